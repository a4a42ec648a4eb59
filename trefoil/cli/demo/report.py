"""The report of a demo: report.json for programs, report.html (one file, no network) for people, a table for both."""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rich.markup import escape
from rich.table import Table

from trefoil.cli.demo import plots
from trefoil.cli.demo.results import DemoFamilySummary, DemoSeries, DemoSummary, Exploration, Report, write_json
from trefoil.cli.demo.spread import savings_of
from trefoil.comparison.comparison import Comparison
from trefoil.comparison.report import headline, opponent_text
from trefoil.page import render
from trefoil.tables import Grid

UNKNOWN: Final = "not metered"
RUN_TITLES: Final = {
    "base": "largest variant, one 7g slice per GPU",
    "static_mix": "best carbon-oblivious mix at the same mean accuracy",
    "static_miad": "the same, and the GPUs' clocks: a governor moves them by each slice's latencies",
    "exact": "carbon-aware planner, budget mode",
    "exact_miad": "carbon-aware planner with those clocks and that governor",
    "co2opt": "smallest variant, finest slices",
    "clover": "configuration graphs, annealed by measuring on this system",
    "blover": "random configurations, measured on this system",
    "uniform": "every family on its GPUs all the time, all of them alike: as Triton routes",
    "packed_uniform": "fewest GPUs, first fit; all of a family's alike",
    "sharing_aware": "fewest GPUs; load by how many families share each",
    "wattwiser": "fewest GPUs; load by sharing and by the rate at hand",
    "highperf": "a high-end GPU for every family",
    "lowenergy": "a low-end GPU for every family",
    "dybatch": "a low-end GPU a family, fair shares of a high-end one",
    "random": "a low-end GPU a family, a high-end one by lot",
    "carbondis": "a low-end GPU a family, a high-end one for what would be late and for hours of much carbon",
    "infadapter": "variants and their cores by an integer program",
    "ms_plus": "the best single variant and its least cores, by the same objective",
    "vpa_plus": "the most accurate variant, as many cores as Kubernetes' autoscaler recommends",
    "oracle": "every standardised configuration, measured on this system",
}
# (label, of a summary, what is better): one list for the terminal and the page.
Show = Callable[[DemoSummary], str]
ROWS: Final[tuple[tuple[str, Show, str], ...]] = (
    ("grams / request", lambda run: _number_text(run.grams_per_request, 4, 1000, "mg"), "lower"),
    ("joules / request", lambda run: _number_text(run.joules_per_request, 2, 1, "J"), "lower"),
    ("idle share of energy", lambda run: _percent_text(run.idle_share), "lower"),
    ("accuracy, measured", lambda run: _percent_text(run.accuracy, 2), "higher"),
    ("accuracy of the variants", lambda run: _percent_text(run.accuracy_profile, 2), "higher"),
    ("SLO attainment", lambda run: _percent_text(run.slo_attainment, 2), "higher"),
    ("latency p50 / p95 / p99", lambda run: _latencies_text(run), "lower"),
    ("requests", lambda run: f"{run.requests:,}", ""),
    ("answered / failed", lambda run: _answers_text(run), ""),
    ("replans", lambda run: _causes_text(run.replans), ""),
    ("reconfigurations", lambda run: _causes_text(run.reconfigurations), ""),
)
# Only where CPUs were cut into slices.
CORE_ROWS: Final[tuple[tuple[str, Show, str], ...]] = (
    ("core seconds", lambda run: _number_text(run.core_s, 1, 1, ""), "lower"),
    *(
        (f"mix {when} the spike", lambda run, when=when: _shares_text(run.mixes.get(when, {})), "")
        for when in ("before", "in", "after")
    ),
)
# Only where a run has measured candidates on the running system.
EXPLORED_ROWS: Final[tuple[tuple[str, Show, str], ...]] = (
    ("explorations", lambda run: _exploration_text(run, lambda e: f"{e.explorations}"), ""),
    (
        "evaluations, refused, broken off",
        lambda run: _exploration_text(run, lambda e: f"{e.evaluations}, {e.refused}, {e.broken_off}"),
        "",
    ),
    ("exploration time", lambda run: _exploration_text(run, lambda e: f"{e.spent_s:.0f} s"), "lower"),
    ("exploration energy", lambda run: _exploration_text(run, lambda e: f"{e.spent_j:,.0f} J"), "lower"),
    ("out of the SLO meanwhile", lambda run: _exploration_text(run, lambda e: f"{e.violations}"), "lower"),
)


def report_table(report: Report) -> Table:
    """Table of a report, as printed at the end."""
    title = "Trefoil demo" + (" (SIMULATED GPUs)" if report.simulated else "")
    if missed := missed_lines(report):
        title = "\n".join([*(f"[bold red]MISSED {escape(line)}[/]" for line in missed), title])
    grid = Grid(title=title, caption=savings_caption(report), title_justify="left", caption_justify="left")
    grid.add_column("")
    for name in report.runs:
        grid.add_column(name, justify="right", style="bold" if name == report.subject else "")
    for label, show, _ in report_rows(report):
        grid.add_row(label, *(show(run) for run in report.runs.values()))
    return grid


def missed_lines(report: Report) -> list[str]:
    """What runs have missed of what was asked for, SLOs and accuracy floors, the report's subject first."""
    names = sorted(report.runs, key=lambda name: name != report.subject)
    return [f"{name}: {line}" for name in names for one in report.outcomes(name) for line in one.misses]


def savings_caption(report: Report) -> str:
    """Savings against every other run, whatever their sign, with what must be equal beside them."""
    parts = []
    subject = report.subject
    for name, run in report.runs.items():
        if name != subject:
            parts.append(
                f"saving of {subject} against {name}: {saving_text(report, name)} (requests {run.requests:,}, accuracy "
                f"{run.accuracy:.4f})"
            )
    ours = report.runs[subject]
    parts.append(
        f"{subject}: requests {ours.requests:,}, accuracy {ours.accuracy:.4f}, floor {report.accuracy_floor:.4f}"
    )
    if report.spread and not report.missed:
        parts += [*headline(report.spread, report.spread.cases[0]).splitlines(), *spread_lines(report.spread, subject)]
    return "\n".join(parts)


def saving_text(report: Report, against: str) -> str:
    """Saving of the live run, which is one draw, with and without the correction for accuracy."""
    if why := report.no_saving(against):
        return f"none: {why}"
    saving, plain = report.saving_pct(against), report.saving_pct(against, corrected=False)
    if saving is None or plain is None:
        return UNKNOWN
    unfair = f"; {against} is below the floor" if report.missed_floor(against) else ""
    return f"{saving:+.1f} % at equal accuracy ({plain:+.1f} % as it ran), one draw{unfair}"


def spread_lines(found: Comparison, subject: str) -> list[str]:
    """Savings of the simulated seeds, at equal accuracy: the figure, of which the live run is one draw."""
    lines, (case,), count = [], found.cases, len(found.seeds)
    what = f"simulated, {count} seed{'s' * (count > 1)}: saving of {subject} against"
    for name, saving in savings_of(found, subject).items():
        if saving.pct is None:
            lines.append(f"{what} {name}: none: {saving.why}, in the mean")
            continue
        assert saving.plain_pct is not None, "where there is a saving there is one as it ran"
        ends = f"{saving.pct['lowest']:+.1f} to {saving.pct['highest']:+.1f}"
        lines.append(
            f"{what} {name} at equal accuracy {saving.pct['mean']:+.1f} % (deviation {saving.pct['deviation']:.1f}, "
            f"{ends}; its twin {saving.by_seed[0]:+.1f} %), {saving.plain_pct['mean']:+.1f} % as it ran"
        )
    below = ", ".join(f"{row.name} under {len(row.missed_seeds('floor'))} of {count}" for row in case.rows)
    price = f"costs {1e3 * case.price_g:.2f} mg per request and unit" if case.price_g else "has no price here"
    lines.append(f"simulated: below the floor {below} seeds, which makes no fair saving; accuracy {price}")
    return lines


def report_rows(report: Report) -> tuple[tuple[str, Show, str], ...]:
    """Rows of the table: label, text of a run, what is better."""
    explored = any(run.exploration is not None for run in report.runs.values())
    families = next(iter(report.runs.values())).families
    each = [row for name in families for row in _family_rows(name)] if len(families) > 1 else []
    each += [_device_types_row(name) for name, one in families.items() if len(one.device_type_shares) > 1]
    cut = any(run.core_s is not None for run in report.runs.values())
    return (*ROWS, *(CORE_ROWS if cut else ()), *each, *(EXPLORED_ROWS if explored else ()))


def _device_types_row(name: str) -> tuple[str, Show, str]:
    """Row of the device types that answered a family, of a fleet that has several."""
    return f"{name}: answered by", lambda run: _shares_text(run.families[name].device_type_shares), ""


def _family_rows(name: str) -> list[tuple[str, Show, str]]:
    """Rows of one of several families."""
    return [
        (f"{name}: p95, SLO", lambda run: _latency_text(run.families[name]), "lower"),
        (f"{name}: SLO attainment", lambda run: _percent_text(run.families[name].slo_attainment, 2), "higher"),
        (f"{name}: accuracy, measured", lambda run: _percent_text(run.families[name].accuracy, 2), "higher"),
        (f"{name}: answered / failed", lambda run: "{0.answered:,} / {0.failed:,}".format(run.families[name]), ""),
        (f"{name}: digest of its schedule", lambda run: run.families[name].schedule_digest, ""),
    ]


def _latency_text(one: DemoFamilySummary) -> str:
    return f"{one.latency_ms_p95:.1f}, {one.slo_ms:.0f} ms"


def _shares_text(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {_percent_text(share)}" for kind, share in shares.items() if share) or "-"


def _answers_text(run: DemoSummary) -> str:
    codes = ", ".join(f"{code} {count:,}" for code, count in run.failed_by_code.items())
    return f"{run.answered:,} / {run.failed:,}{f' ({codes})' if codes else ''}"


def report_lines(report: Report) -> list[str]:
    """Lines of the same table without a terminal: one a number, greppable."""
    lines = []
    for label, show, _ in report_rows(report):
        values = "  ".join(f"{name}={show(run)}" for name, run in report.runs.items())
        lines.append(f"{label}: {values}")
    missed = [f"MISSED {line}" for line in missed_lines(report)]
    return missed + lines + savings_caption(report).splitlines()


def write_report(folder: Path, report: Report, series: Mapping[str, DemoSeries]) -> None:
    """Write report.json and report.html."""
    write_json(folder / "report.json", report.to_json())
    (folder / "report.html").write_text(report_html(report, series))


def report_html(report: Report, series: Mapping[str, DemoSeries]) -> str:
    """HTML page of a report, as one string."""
    slo = next(iter(report.runs.values())).slo
    opponent = _opponent(report)
    others = sorted((name for name in report.runs if name != report.subject), key=lambda name: name != opponent)
    simulated = savings_of(report.spread, report.subject) if report.spread and not report.missed else {}
    spread = {name: saving for name, saving in simulated.items() if saving.pct is not None}
    return render(
        "demo.html.j2",
        title="demo report",
        report=report,
        slo=slo,
        titles=RUN_TITLES,
        savings={name: report.saving_pct(name) for name in others},
        plain={name: report.saving_pct(name, corrected=False) for name in others},
        fleet=" and ".join(f"{count} × {kind}" for kind, count in Counter(report.gpus).items()),
        opponent=opponent,
        opponent_text=opponent_text(report.subject, opponent) if opponent else "",
        no_saving={name: report.no_saving(name) for name in others},
        missed_lines=missed_lines(report),
        missed_rows={
            "SLO attainment": [name for name in report.runs if report.missed_slo(name)],
            "accuracy of the variants": [name for name in report.runs if report.missed_floor(name)],
        },
        spread=spread,
        price_g=report.price_g,
        seeds=report.spread.cases[0].row(report.subject).runs if report.spread else (),
        rows=[
            (label, {name: show(run) for name, run in report.runs.items()}) for label, show, _ in report_rows(report)
        ],
        events={name: one.events for name, one in series.items()},
        colours={name: plots.run_colour(name) for name in report.runs},
        cause_colours=plots.CAUSE_COLOURS,
        figures=_figures(report, series, slo["percentile"]) if series else [],
    )


def _opponent(report: Report) -> str:
    """Policy that the headline is against, by the simulated seeds; "" where there is none."""
    found = report.spread.headline(report.spread.cases[0]) if report.spread else None
    return found[1].name if found else ""


def _figures(report: Report, series: Mapping[str, DemoSeries], percentile: float) -> list[tuple[str, str, str]]:
    """(heading, what to see, svg)."""
    order = list(next(iter(series.values())).answered_by_variant)
    slo_ms = {name: one.slo_ms for name, one in report.runs[report.subject].families.items()}
    return [
        (
            f"Carbon and load, and when {report.subject} replanned",
            "Every run met this same carbon and these same arrivals. "
            f"A numbered line is a decision of {report.subject}; the list below says why.",
            plots.plot_carbon_and_load(series, report.carbon_speedup),
        ),
        ("Power", "Counter of all GPUs, idle and sleeping ones included.", plots.plot_power(series)),
        ("Grams", "Energy times intensity at that moment, from the start of the run.", plots.plot_grams(series)),
        *(
            [
                (
                    "Variant mix",
                    "Which variant answered, per second; the most accurate is at the bottom.",
                    plots.plot_variant_mix(series, order),
                )
            ]
            if order
            else []
        ),
        *(
            (
                "Latency against the SLO" + (f": {name}" if len(slo_ms) > 1 else ""),
                "Open loop, from the intended send time. The SLO was fixed before the runs.",
                plots.plot_latency(series, name, limit_ms, percentile),
            )
            for name, limit_ms in slo_ms.items()
        ),
    ]


def _number_text(value: float | None, digits: int, scale: float, unit: str) -> str:
    return UNKNOWN if value is None else f"{value * scale:.{digits}f} {unit}"


def _percent_text(value: float | None, digits: int = 1) -> str:
    return UNKNOWN if value is None else f"{100 * value:.{digits}f} %"


def _latencies_text(run: DemoSummary) -> str:
    return f"{run.latency_ms_p50:.1f} / {run.latency_ms_p95:.1f} / {run.latency_ms_p99:.1f} ms"


def _exploration_text(run: DemoSummary, show: Callable[[Exploration], str]) -> str:
    return "-" if run.exploration is None else show(run.exploration)


def _causes_text(counts: Mapping[str, int]) -> str:
    shown = ", ".join(f"{cause} {count}" for cause, count in counts.items() if count)
    return f"{sum(counts.values())}" + (f" ({shown})" if shown else "")

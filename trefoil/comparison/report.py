"""A comparison for people and programs: table, JSON, CSV, figure, page. What is missed stands before any saving.

What draws and writes pages is imported where that is asked for: a table is there sooner.
"""

import csv
import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from trefoil.comparison.comparison import COMPARED, EXPLORED, JOBS, Case, Comparison, Row
from trefoil.core.objective import TokenSlo
from trefoil.core.policies import POLICIES, policy, split_preset
from trefoil.core.units import format_duration
from trefoil.simulator.report.result import json_safe
from trefoil.tables import Grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILES: Final = ("comparison.json", "comparison.csv", "comparison.png", "comparison.html")
MISSED: Final = -2  # place of what a row misses among its cells
COLUMNS: Final[Mapping[str, tuple[str, float, str]]] = {
    "grams_per_request": ("mg/request", 1e3, ".4f"),
    "joules_per_request": ("J/request", 1.0, ".3f"),
    "p95_ms": ("p95 ms (SLO)", 1.0, ".1f"),
    "slo_attainment": ("in SLO, % (asked)", 100.0, ".2f"),
    "accuracy": ("accuracy (floor)", 1.0, ".4f"),
    "grams_per_1000_tokens": ("g/1,000 tokens", 1.0, ".4f"),
    "ttft_attainment": ("in TTFT, % (asked)", 100.0, ".2f"),
    "tpot_attainment": ("in TPOT, % (asked)", 100.0, ".2f"),
    "objective": ("f, %", 1.0, ".1f"),
    "evaluations": ("evaluations", 1.0, ".0f"),
    "exploration_s": ("exploring, s", 1.0, ".0f"),
    "jobs.grams": ("g of jobs", 1.0, ".4g"),
    "jobs.interactive_grams": ("g of all else", 1.0, ".4g"),
    "jobs.done": ("jobs done", 1.0, ".4g"),
    "jobs.late": ("jobs late", 1.0, ".4g"),
}
"""Title, factor and format of each averaged number."""


def comparison_tables(found: Comparison) -> list[Table]:
    """Tables for a terminal, one a case."""
    return [_table(found, case) for case in found.cases]


def _table(found: Comparison, case: Case) -> Table:
    table = Grid(title=case_title(found, case), caption=case_caption(found, case))
    table.title_justify = table.caption_justify = "left"
    for number, name in enumerate(columns(found, case)):
        table.add_column(name, justify="right" if number else "left")
    for cells in case_cells(case):
        table.add_row(*cells, style="red" if cells[MISSED] not in ("", "-") else "")
    return table


def case_title(found: Comparison, case: Case) -> str:
    """Title of a case: scenario, what differs, and the load that all of its policies met."""
    seeds = f"seed {found.seeds[0]}" if len(found.seeds) == 1 else f"seeds {found.seeds[0]} to {found.seeds[-1]}"
    differs = f", {case.label}" if case.values else ""
    return f"{found.scenario}{differs}: {format_duration(found.duration_s)} simulated, {seeds}"


def case_caption(found: Comparison, case: Case) -> str:
    """What must be known beside the numbers: equal load, price of accuracy, draws."""
    arrived = round(case.rows[0].mean("arrived"))
    digests = ", ".join(dict.fromkeys(case.arrivals.values()))
    price = "accuracy has no price here"
    if case.price_g is not None:
        price = f"accuracy costs {1e3 * case.price_g:.3f} mg per request and unit (by {case.priced_by})"
    draws = f"mean and deviation of {len(found.seeds)} seeds"
    if len(found.seeds) == 1:
        draws = "one draw" + (": --seeds 5 for a spread" if found.setting == "policy" else "")
    families = case.rows[0].runs[0].summary["families"]
    left_out = "".join(f"\n{policy} does not apply: {why}" for policy, why in case.left_out.items())
    profiles = "".join(f"\nprofile of {name}: {one['profile']}" for name, one in families.items())
    traces = "".join(f"\n{line}" for line in case.traces)
    weighed = f"; f at lambda {case.lambda_weight:g} against base" if "objective" in case.averaged else ""
    equal = f"equal load: {arrived:,} arrivals each, digest {digests}{traces}"
    return f"{headline(found, case)}{equal}\n{price}; {draws}{weighed}{_jobs_text(case)}{profiles}{left_out}"


def _jobs_text(case: Case) -> str:
    """Line about the jobs, whose grams are in those per request."""
    first = case.rows[0]
    if not (count := first.jobs("jobs")):
        return ""
    return (
        f"\njobs: {count:g} with {first.jobs('items'):,.0f} items; their grams are of active joules, and in mg/request"
    )


def headline(found: Comparison, case: Case) -> str:
    """Saving of the subject against the best carbon-blind policy, as a line; "" where there is none."""
    if (rows := found.headline(case)) is None:
        return ""
    subject, opponent = rows
    what = f"{subject.name} against {opponent.name}, {opponent_text(subject.name, opponent.name)}"
    return f"{what}: {_saving_text(case, subject, opponent)}\n"


def opponent_text(subject: str, opponent: str) -> str:
    """What the opponent of a headline is: with the levers of the subject, or without which of them."""
    ours, theirs = (policy(split_preset(name)[0]) for name in (subject, opponent))
    lacked = [lever for lever in ours.levers if lever not in theirs.levers]
    levers = f", without its {' and '.join(lacked)}" if lacked else " with its levers" if ours.levers else ""
    if ":" in ours.planner + theirs.planner:
        levers = ""  # unknown for a user's planner
    return f"the best carbon-blind policy here{levers}"


def columns(found: Comparison, case: Case) -> tuple[str, ...]:
    """Columns of a case's table."""
    saving = f"saving against {found.names[0]} at equal accuracy"
    return COMPARED[found.setting][0], *(COLUMNS[name][0] for name in case.averaged), "missed", saving


def case_cells(case: Case) -> list[tuple[str, ...]]:
    """Cells of a case's table: each policy, and below it each of several families."""
    rows = []
    for row in case.rows:
        rows.append((*_numbers(case, row, ""), missed_text(row), saving_text(case, row)))
        if len(row.families) > 1:
            rows += [(f"  {name}", *_numbers(case, row, name)[1:], "", "") for name in row.families]
    return rows


def _numbers(case: Case, row: Row, family: str) -> tuple[str, ...]:
    cells = [_number(row, name, family) for name in case.averaged]
    families = row.runs[0].summary["families"]
    if family or len(families) == 1:
        one = families[family or row.families[0]]
        cells[2] += f" ({one['slo_ms']:.1f})"
        cells[3] += f" ({100 * one['slo_quantile']:g})"
        cells[4] += f" ({one['floor']:.4f})"
        asked = {f"{of}_attainment": share for of, _, share in TokenSlo(**(one.get("token_slo") or {})).each}
        for at, name in enumerate(case.averaged):
            cells[at] += f" ({100 * asked[name]:g})" if name in asked and cells[at] != "-" else ""
    return (row.name, *cells)


def _number(row: Row, name: str, family: str) -> str:
    if name in EXPLORED and (family or not any(run.summary.get(name) for run in row.runs)):
        return "-"
    if name in JOBS and family:
        return "-"
    return _spread_text(row.spread(name, family), *COLUMNS[name][1:])


def _spread_text(found: Mapping[str, float], scale: float, shape: str) -> str:
    if math.isnan(found["mean"]):
        return "-"
    mean = format(scale * found["mean"], shape)
    return mean if found["lowest"] == found["highest"] else f"{mean} ± {format(scale * found['deviation'], shape)}"


def missed_text(row: Row) -> str:
    """What a policy misses in the mean of its seeds, under how many of them, and its row's reason; `-` for nothing."""
    parts = []
    for what in ("SLO", "floor"):
        seeds = row.missed_seeds(what)
        if what in row.missed or seeds:
            mean = what if what in row.missed else f"{what} not in the mean"
            parts.append(mean if len(row.runs) == 1 else f"{mean} ({len(seeds)} of {len(row.runs)} seeds)")
            why = POLICIES[row.name].misses if what == "SLO" and row.name in POLICIES else ""
            parts[-1] += f": {why}" if why else ""
    if late := row.jobs("late"):
        parts.append(f"deadlines: {late:g} of {row.jobs('jobs'):g} jobs are late")
    return ", ".join(parts) or "-"


def saving_text(case: Case, row: Row) -> str:
    """Saving of a policy, what the first one misses before it; or why there is none."""
    return "" if row is case.rows[0] else _saving_text(case, row, case.rows[0])


def _saving_text(case: Case, row: Row, against: Row) -> str:
    found = case.saving(row, against)
    assert found is not None, "two rows"
    if found.pct is None or found.plain_pct is None:
        return f"none: {found.why}"
    late = f"{against.name} misses its {' and '.join(found.against_missed)}; " if found.against_missed else ""
    return f"{late}{_percent_text(found.pct)} ({_percent_text(found.plain_pct)} as it ran)"


def _percent_text(found: Mapping[str, float]) -> str:
    spread = "" if found["lowest"] == found["highest"] else f" ± {found['deviation']:.1f}"
    return f"{found['mean']:+.1f}{spread} %"


def write_comparison(found: Comparison, folder: Path, about: Mapping[str, Any]) -> None:
    """Write comparison.json, .csv, .png and .html; `about` says where it was made."""
    folder.mkdir(parents=True, exist_ok=True)
    written, table, picture, page = (folder / name for name in FILES)
    document = json_safe({**about, **found.to_json()})
    written.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    table.write_text(_csv(found), encoding="utf-8")
    figure = found.plot()
    figure.savefig(picture, dpi=144)
    page.write_text(_html(found, figure, about), encoding="utf-8")


def _csv(found: Comparison) -> str:
    rows, out = found.records(), io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(json_safe(row) for row in rows)
    return out.getvalue()


def _html(found: Comparison, figure: "Figure", about: Mapping[str, Any]) -> str:
    from trefoil.page import Card, page, svg_of

    cards = []
    for case in found.cases:
        rows, caption = case_cells(case), case_caption(found, case).splitlines()
        missed = {number for number, cells in enumerate(rows) if cells[MISSED] not in ("", "-")}
        cards.append(Card(case_title(found, case), columns(found, case), rows, caption, missed=missed))
    cards.append(Card("By case; a red cross misses SLO or floor", figure=svg_of(figure)))
    return page(
        f"{', '.join(found.names)} at equal load",
        f"Scenario {found.scenario}; seeds: {len(found.seeds)}; cases: {len(found.cases)}.",
        "Hardware and requests are simulated. A saving is grams per answered request at equal accuracy; what is later "
        "than the SLO or below the accuracy floor (red) has saved nothing.",
        cards,
        about,
    )

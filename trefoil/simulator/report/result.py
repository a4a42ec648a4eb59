"""What a run has come to: a summary, series and decisions; as JSON the same bytes for the same scenario and seed."""

import csv
import dataclasses
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

from trefoil.core.catalog import profile_basis
from trefoil.core.demand import TokenTimes
from trefoil.core.objective import FamilyOutcome, TokenSlo
from trefoil.core.plan import DecisionRecord
from trefoil.core.units import format_duration
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.report.frames import data_frame
from trefoil.simulator.simulation import Simulation
from trefoil.tables import Grid

DIGITS = 9  # significant, in JSON


@dataclass(frozen=True, slots=True)
class FamilySummary:
    """Summary of a family since time zero. Joules and grams: its part of all drawn, per answer. Rejected are misses.

    Attainment is None where no request ended, accuracy where none was answered.
    """

    arrived: int
    answered: int
    rejected: int
    grams_per_request: float
    joules_per_request: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    slo_ms: float
    slo_quantile: float
    slo_attainment: float | None
    slo_missed: bool
    """Attainment is below `slo_quantile`: what this run saves is bought with lateness."""
    accuracy: float | None
    floor: float
    """Of the accuracy, as the objective has it."""
    floor_missed: bool
    """Accuracy is below it by more than `FLOOR_TOLERANCE`: what this run saves is not a saving."""
    mix: Mapping[str, float]
    """Share of the answers by variant."""
    by_device_type: Mapping[str, float]
    """Share of the answers by the type of the device that gave them."""
    profile: str = ""
    """What its profile rests on: basis and source."""
    token_slo: TokenSlo | None = None
    tokens: TokenTimes | None = None
    """Objectives and times of its tokens; None: it has no such objective."""
    grams_per_1000_tokens: float | None = None
    """Of a family with objectives of tokens: by the tokens of its answers where a trace has them, else in the mean."""

    def outcome(self, name: str) -> FamilyOutcome:
        """Outcome under a family's name, by which savings are judged."""
        found = self.slo_attainment, self.floor, self.accuracy, self.arrived, self.answered
        slow = self.tokens.slow(self.token_slo) if self.tokens is not None and self.token_slo is not None else ()
        return FamilyOutcome(name, self.slo_quantile, *found, slow)


@dataclass(frozen=True, slots=True)
class JobsSummary:
    """Summary of the jobs of a run. Grams are those of the items' active joules; `interactive_grams` all the others of
    the run: of requests, idle power, wake-ups and moves.
    """

    rule: str
    jobs: int
    done: int
    late: int
    """Ended after their deadline, or not at all."""
    items: float
    answered: float
    late_items: float
    failed: float
    """Items that were refused, because their job's grams were spent."""
    joules: float
    grams: float
    interactive_grams: float

    @property
    def line(self) -> str:
        """Line of a caption."""
        failed = f", {self.failed:,.0f} refused" if self.failed else ""
        return (
            f"jobs by {self.rule}: {self.done} of {self.jobs} done, {self.late} late; {self.answered:,.0f} of "
            f"{self.items:,.0f} items answered, {self.late_items:,.0f} of them late{failed}; {self.grams:.4g} g by "
            f"their active joules, {self.interactive_grams:.4g} g all else"
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a run. Joules are of all devices (and hosts, where the boundary is the node); grams with PUE. Both are
    NaN, null in JSON, where CPUs have no meter.
    """

    scenario: str
    policy: str
    fidelity: str
    seed: int
    duration_s: float
    truth_hash: str
    estimate_hash: str
    arrived: int
    answered: int
    rejected: int
    grams: float
    joules: float
    grams_per_request: float
    joules_per_request: float
    idle_share: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    slo_attainment: float
    slo_missed: bool
    accuracy: float
    floor_missed: bool
    power_w: float
    decisions: int
    replans: int
    reconfigurations: int
    halted: int
    rollout_s: float
    rollout_j: float
    evaluations: int
    exploration_s: float
    exploration_j: float
    exploration_violations: int
    causes: Mapping[str, int]
    families: Mapping[str, FamilySummary]
    zones: Mapping[str, Mapping[str, float]]
    basis: str = "simulated"
    core_s: float = 0.0
    """Core seconds that slices of CPUs had since time zero, also while one takes the other's place."""
    jobs: JobsSummary | None = None
    """None: the scenario has none."""


@dataclass(frozen=True, slots=True)
class Result:
    """Summary, series (numpy arrays by name), decisions, and with `keep_records` what `trefoil replay` needs."""

    summary: Summary
    series: Mapping[str, npt.NDArray[np.float64]]
    decisions: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]] = field(default=())
    records: Sequence[DecisionRecord] = field(default=())

    def to_json(self) -> str:
        """JSON document: the same bytes for the same scenario and seed."""
        document = {
            "summary": _without_absent(dataclasses.asdict(self.summary)),
            "decisions": list(self.decisions),
            "evaluations": list(self.evaluations),
            "series": {name: values.tolist() for name, values in self.series.items()},
        }
        return json.dumps(json_safe(document), indent=1, sort_keys=True, allow_nan=False) + "\n"

    def write(self, folder: Path) -> None:
        """Write result.json and series.csv."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "result.json").write_text(self.to_json(), encoding="utf-8")
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow((*self.series, "basis"))
        rows = zip(*([_short(v) for v in values] for values in self.series.values()), strict=True)
        writer.writerows((*row, self.summary.basis) for row in rows)
        (folder / "series.csv").write_text(out.getvalue(), encoding="utf-8")

    def frame(self) -> Any:
        """pandas DataFrame of the series: one row a bin, indexed by its begin `at_s` [s]; units end the columns' names.

        Of each family: `<family>.rate_per_s`, `.answered_per_s`, `.p95_ms`, `.attainment`, `.accuracy` (NaN: none).

        Raises:
            StartError: pandas is not installed.
        """
        return data_frame(self.series, "at_s")

    def plot(self) -> Any:
        """matplotlib Figure of the series over time: intensity, load, power, latency against the SLO, accuracy."""
        from trefoil.simulator.report.figure import series_figure

        s = self.summary
        numbers = f"{s.grams_per_request * 1e3:.4f} mg a request, {s.slo_attainment:.2%} in SLO"
        return series_figure(self.series, s.families, f"{s.scenario}: {s.policy}, {numbers}")

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table of families."""
        return "family", "answered", "g/request", "J/request", "p95 ms", "SLO ms", "in SLO", "accuracy"

    def rows(self) -> list[tuple[str, ...]]:
        """Cells of the table of families."""
        return [
            (
                name, f"{f.answered:,}", f"{f.grams_per_request:.4g}", f"{f.joules_per_request:.4g}", f"{f.p95_ms:.1f}",
                f"{f.slo_ms:.1f}",
                _shown(f.slo_attainment, ".2%") + (f", {f.slo_quantile:.0%} MISSED" if f.slo_missed else ""),
                _shown(f.accuracy, ".4f") + (f", floor {f.floor:.4f} MISSED" if f.floor_missed else ""),
            )
            for name, f in self.summary.families.items()
        ]  # fmt: skip

    @property
    def caption(self) -> str:
        """What must be known beside the numbers."""
        s = self.summary
        why = next((str(one["why"]) for one in self.decisions if one.get("why")), "") if not s.answered else ""
        explored = f"; {s.evaluations} evaluations, {s.exploration_s:.0f} s exploring" if s.evaluations else ""
        drawn = f"{s.grams:.4g} g, {s.joules / 3.6e6:.4g} kWh, {s.power_w:.0f} W, idle share {s.idle_share:.1%}"
        return (
            ("energy is not metered" if math.isnan(s.joules) else drawn)
            + (f", {s.core_s:.0f} core seconds" if s.core_s else "")
            + f"; {s.decisions} decisions, {s.replans} plans, {s.reconfigurations} reconfigurations{explored}"
            + (f"\nno request was answered: {why}" if why else "")
            + (f"\n{s.jobs.line}" if s.jobs is not None else "")
            + "".join(map(_tokens_line, s.families, s.families.values()))
            + "".join(f"\nprofile of {name}: {f.profile}" for name, f in s.families.items())
        )

    def table(self) -> Table:
        """Table for people."""
        s = self.summary
        table = Grid(
            title=f"{s.scenario}: {s.policy}, {s.fidelity}, {format_duration(s.duration_s)} simulated, seed {s.seed}",
            caption=self.caption, title_justify="left", caption_justify="left",
        )  # fmt: skip
        for name in self.columns:
            table.add_column(name, justify="left" if name == "family" else "right")
        for cells in self.rows():
            table.add_row(*cells)
        return table


def result(simulation: Simulation) -> Result:
    """Result of a run that is over."""
    ledger = simulation.ledger
    ledger.flush()
    names = list(ledger.series[0]) if ledger.series else []
    series = {name: np.array([row[name] for row in ledger.series]) for name in names}
    decisions, evaluations = tuple(ledger.decisions), tuple(ledger.evaluations)
    return Result(_summary(simulation), series, decisions, evaluations, tuple(simulation.records))


def _summary(simulation: Simulation) -> Summary:
    ledger, inputs, scenario = simulation.ledger, simulation.inputs, simulation.scenario
    whole = Interval(0.0, 0.0)
    for one in ledger.total.values():
        whole.add(one)
    joules, co2 = sum(c.joules for c in ledger.by_zone.values()), sum(c.grams for c in ledger.by_zone.values())
    ended = whole.answered + whole.rejected
    explored = simulation.core.explorer.totals
    families = {f: _family(simulation, f) for f in sorted(ledger.total)}
    return Summary(
        scenario=scenario.name,
        policy=scenario.policy,
        fidelity=scenario.fidelity,
        seed=scenario.seed,
        duration_s=scenario.span_s,
        truth_hash=inputs.truth.hash,
        estimate_hash=inputs.estimate.hash,
        arrived=round(whole.arrived),
        answered=round(whole.answered),
        rejected=round(whole.rejected),
        grams=co2,
        joules=joules,
        grams_per_request=_per(co2, whole.answered),
        joules_per_request=_per(joules, whole.answered),
        idle_share=_per(joules - ledger.active_j, joules),
        **_quantiles(whole),
        slo_attainment=_per(whole.within_slo, ended),
        slo_missed=any(f.slo_missed for f in families.values()),
        accuracy=_per(whole.accuracy_sum, whole.answered),
        floor_missed=any(f.floor_missed for f in families.values()),
        power_w=joules / scenario.span_s,
        decisions=simulation.core.decision_number,
        replans=sum(simulation.core.causes.values()),
        reconfigurations=sum(simulation.core.reconfigurations.values()),
        halted=ledger.halted,
        rollout_s=ledger.rolling_s,
        rollout_j=ledger.rolling_j,
        evaluations=explored.evaluations,
        exploration_s=explored.spent_s,
        exploration_j=explored.spent_j,
        exploration_violations=explored.violations,
        causes=dict(sorted(simulation.core.causes.items())),
        families=families,
        zones={z: {"joules": c.joules, "grams": c.grams} for z, c in sorted(ledger.by_zone.items())},
        core_s=ledger.core_s,
        jobs=_jobs(simulation, co2) if simulation.jobs.runs else None,
    )


def _jobs(simulation: Simulation, co2: float) -> JobsSummary:
    runs, cost = simulation.jobs.runs, simulation.ledger.jobs
    return JobsSummary(
        rule=simulation.jobs.rule,
        jobs=len(runs),
        done=sum(not math.isnan(run.ended_s) for run in runs),
        late=sum(run.late for run in runs),
        items=sum(run.items for run in runs),
        answered=sum(run.items - run.left - run.failed for run in runs),
        late_items=sum(run.late_items for run in runs),
        failed=sum(run.failed for run in runs),
        joules=cost.joules,
        grams=cost.grams,
        interactive_grams=co2 - cost.grams,
    )


def _family(simulation: Simulation, family: str) -> FamilySummary:
    one, cost = simulation.ledger.total[family], simulation.ledger.cost[family]
    by_type: dict[str, float] = {}
    for device, count in one.by_device.items():
        name = simulation.hardware.devices[device].type.name
        by_type[name] = by_type.get(name, 0.0) + count
    objective, ended = simulation.core.objectives[family], one.answered + one.rejected
    accuracy = one.accuracy_sum / one.answered if one.answered else None
    attainment = one.within_slo / ended if ended else None
    found = attainment, objective.min_accuracy, accuracy, round(one.arrived), round(one.answered)
    tokens, tokens_mean = TokenTimes.of(one.streams), simulation.inputs.truth.catalog.family(family).tokens_mean
    tokens_out = one.tokens or one.answered * tokens_mean
    outcome = FamilyOutcome(family, objective.slo_quantile, *found, tokens.slow(objective.token_slo))
    return FamilySummary(
        arrived=round(one.arrived),
        answered=round(one.answered),
        rejected=round(one.rejected),
        grams_per_request=_per(cost.grams, one.answered),
        joules_per_request=_per(cost.joules, one.answered),
        **_quantiles(one),
        slo_ms=objective.slo_ms,
        slo_quantile=objective.slo_quantile,
        slo_attainment=attainment,
        slo_missed=outcome.slo_missed,
        profile=profile_basis(simulation.inputs.estimate.catalog.rows, family),
        accuracy=accuracy,
        floor=objective.min_accuracy,
        floor_missed=outcome.floor_missed,
        mix={v: _per(n, one.answered) for v, n in sorted(one.by_variant.items())},
        by_device_type={kind: _per(n, one.answered) for kind, n in sorted(by_type.items())},
        token_slo=objective.token_slo if objective.token_slo else None,
        tokens=tokens if objective.token_slo else None,
        grams_per_1000_tokens=_per(1e3 * cost.grams, tokens_out) if objective.token_slo else None,
    )


def _without_absent(summary: dict[str, Any]) -> dict[str, Any]:
    """The summary without jobs where there are none, and tokens of families that have no objective of them."""
    if summary["jobs"] is None:
        del summary["jobs"]
    for one in summary["families"].values():
        if one["tokens"] is None:
            del one["tokens"], one["token_slo"], one["grams_per_1000_tokens"]
    return summary


def _tokens_line(name: str, one: FamilySummary) -> str:
    """Line of the caption about the tokens of a family; "" where it has no objective of them."""
    if one.tokens is None or one.token_slo is None:
        return ""
    times = asdict(one.tokens)
    parts = [
        f"{of.upper()} p95 {_shown(times[f'{of}_ms_p95'], '.1f')} ms, "
        f"{_shown(times[f'{of}_attainment'], '.2%')} within {limit_ms:g} ms ({asked:.0%} asked)"
        for of, limit_ms, asked in one.token_slo.each
        if limit_ms
    ]
    return f"\ntokens of {name}: {'; '.join(parts)}"


def _quantiles(one: Interval) -> dict[str, Any]:
    return {f"p{q}_ms": one.quantile_ms(q / 100) for q in (50, 95, 99)}


def _per(total: float, count: float) -> float:
    return total / count if count else 0.0


def _shown(value: float | None, shape: str) -> str:
    return "-" if value is None else format(value, shape)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def json_safe(value: Any) -> Any:
    """Value for JSON: floats by significant digits; NaN and infinities are None."""
    if isinstance(value, float):
        return _short(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): json_safe(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(v) for v in value]
    return value

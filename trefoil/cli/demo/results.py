"""Results of a demo: a run's summary and per-second series, the report over all runs, and where it was made.

Field names are those of report.json; joules and grams are None when nothing metered (never 0).
"""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import trefoil
from trefoil.cli.demo.spread import savings_of
from trefoil.comparison.comparison import Comparison, subject_of
from trefoil.comparison.saving import RunOutcome, no_percent, saving_pct
from trefoil.core.objective import FamilyOutcome, missed, no_saving
from trefoil.installation import CHECKOUT, SHIPPED

CAUSES: Final = ("carbon", "load", "slo", "objective")


@dataclass(frozen=True, slots=True)
class PlanEvent:
    """Change of plan that was carried out: when, why, and that serving went on meanwhile."""

    at_s: float  # since the start of the run
    took_s: float | None  # None: not finished when the run ended
    cause: str
    why: str
    plan: str  # what runs afterwards, in words
    answered: int | None  # requests answered while it was carried out; None: not counted
    reconfigured: bool  # False: only weights changed
    superseded: bool = False  # a newer plan took over before it was carried out


@dataclass(frozen=True, slots=True)
class Exploration:
    """Cost of measuring candidates on the running system during a run. All of it is in the run's numbers too."""

    explorations: int
    evaluations: int  # candidates that were deployed
    refused: int  # candidates that were not: they could not have carried the load
    broken_off: int
    spent_s: float
    spent_j: float
    violations: int  # requests out of the SLO meanwhile


@dataclass(frozen=True, slots=True)
class DemoFamilySummary:
    """Summary of what one run answered of one family."""

    requests: int
    answered: int
    failed: int
    schedule_digest: str  # equal ones: the same arrivals with the same images
    slo_ms: float
    latency_ms_p95: float
    slo_attainment: float | None  # None: no requests
    accuracy: float | None  # measured on labels, of images that set no profile; None: nothing was answered
    accuracy_profile: float | None  # of the variants that answered, by family.toml: plans and the price go by it
    accuracy_floor: float
    device_type_shares: Mapping[str, float] = field(default_factory=dict)  # of the answers
    profile: str = ""  # what its profile rests on: basis and source

    @property
    def lower_accuracy(self) -> float | None:
        """The lower one of its labels and of the variants' own; None where one of them is not known."""
        if self.accuracy is None or self.accuracy_profile is None:
            return None
        return min(self.accuracy, self.accuracy_profile)


@dataclass(frozen=True, slots=True)
class DemoSummary:
    """Summary of one run, in the numbers that are compared; of all families, where it served several."""

    requests: int
    answered: int
    failed: int
    slo: Mapping[str, float]  # percentile, latency_ms; of the first family
    latency_ms_p50: float
    latency_ms_p95: float
    latency_ms_p99: float
    slo_attainment: float
    accuracy: float
    accuracy_profile: float
    joules_per_request: float | None
    grams_per_request: float | None
    idle_share: float | None
    replans: Mapping[str, int]
    reconfigurations: Mapping[str, int]
    exploration: Exploration | None = None  # None: the policy does not measure candidates
    families: Mapping[str, DemoFamilySummary] = field(default_factory=dict)
    core_s: float | None = None  # of all slices that stood, the old beside the new included; None: no CPUs were cut
    mixes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # shares of the answers by variant, by time
    failed_by_code: Mapping[str, int] = field(default_factory=dict)  # DEADLINE_EXCEEDED: its client waited no longer


@dataclass(frozen=True, slots=True)
class DemoSeries:
    """Series of what happened each second of a run. All lists are as long as `t_s`."""

    policy: str
    t_s: list[float] = field(default_factory=list)
    intensity_g_per_kwh: list[float | None] = field(default_factory=list)
    offered_per_s: list[float] = field(default_factory=list)
    answered_per_s: list[float] = field(default_factory=list)
    latency_ms_p95: dict[str, list[float | None]] = field(default_factory=dict)  # by family, of what was due then
    power_w: dict[str, list[float | None]] = field(default_factory=dict)  # by device
    device_state: dict[str, list[str]] = field(default_factory=dict)
    clock_mhz: dict[str, list[int | None]] = field(default_factory=dict)
    slices: dict[str, list[str]] = field(default_factory=dict)  # by device: what is READY, in words
    answered_by_variant: dict[str, list[int]] = field(default_factory=dict)  # family by family, least accurate first
    grams: list[float | None] = field(default_factory=list)  # since the start of the run
    cores: list[float] = field(default_factory=list)  # of all slices of CPUs that stood
    events: list[PlanEvent] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Report:
    """Report over all runs, with what they have in common."""

    simulated: bool
    triton_version: str
    gpus: tuple[str, ...]
    duration_s: float
    carbon_speedup: float
    seed: int
    commit: str
    pad_overrun_ratio: float | None
    accuracy_floor: float
    command: str
    machine: str
    started_at: str
    runs: Mapping[str, DemoSummary]
    spread: Comparison | None = None  # None: nothing was simulated, and accuracy has no price

    @property
    def subject(self) -> str:
        """Name of the run that the others are compared with."""
        return subject_of(self.runs)

    def saving_pct(self, against: str, *, corrected: bool = True) -> float | None:
        """Saving in grams per answered request against another run at the same offered load, in percent of it.

        Corrected: what the other run had needed at our accuracy stands for what it took. None: nothing was metered, or
        `no_saving` says why.
        """
        ours, theirs = _outcome(self.runs[self.subject]), _outcome(self.runs[against])
        if ours is None or theirs is None or self.no_saving(against):
            return None
        return saving_pct(ours, theirs, (self.price_g or 0.0) if corrected else 0.0)

    @property
    def price_g(self) -> float | None:
        """Price of accuracy in the simulated seeds [g per request and unit]; None: it has none."""
        return self.spread.cases[0].price_g if self.spread is not None else None

    def no_saving(self, against: str) -> str:
        """Why our run has saved nothing against another one; "" where a saving may be stated."""
        if why := no_saving(self.outcomes(self.subject), self.outcomes(against), priced=self.price_g is not None):
            return why
        ours, theirs = _outcome(self.runs[self.subject]), _outcome(self.runs[against])
        return "" if ours is None or theirs is None else no_percent(ours, theirs, self.price_g or 0.0)

    @property
    def missed(self) -> str:
        """What our run missed of what was asked for; "" if nothing."""
        return missed(self.outcomes(self.subject))

    def outcomes(self, name: str) -> list[FamilyOutcome]:
        """Outcome of each family in a run; its accuracy is the lower one of its labels and of the variants' own."""
        run = self.runs[name]
        return [
            FamilyOutcome(
                family,
                run.slo["percentile"] / 100,
                one.slo_attainment,
                one.accuracy_floor,
                one.lower_accuracy,
                one.requests,
                one.answered,
            )
            for family, one in run.families.items()
        ]

    def missed_floor(self, name: str) -> bool:
        """Whether a run missed the floor of a family."""
        return any(one.floor_missed for one in self.outcomes(name))

    def missed_slo(self, name: str) -> bool:
        """Whether a run answered too few requests of a family within its SLO."""
        return any(one.slo_missed for one in self.outcomes(name))

    def to_json(self) -> dict[str, Any]:
        """JSON values of report.json: runs stand at top level, savings and accuracies beside each other."""
        values = asdict(replace(self, spread=None))
        runs = values.pop("runs")
        others = [name for name in runs if name != self.subject]
        values["saving_pct"] = {name: self.saving_pct(name) for name in others}
        values["no_saving"] = {name: self.no_saving(name) for name in others}
        values["saving_uncorrected_pct"] = {name: self.saving_pct(name, corrected=False) for name in others}
        values["accuracy"] = {name: run.accuracy for name, run in self.runs.items()}
        values["missed_floor"] = {name: self.missed_floor(name) for name in self.runs}
        values["missed_slo"] = {name: self.missed_slo(name) for name in self.runs}
        if self.spread is not None:
            values["spread"] = spread_json(self.spread, self.subject)
        return {**values, **runs}


def spread_json(found: Comparison, subject: str) -> dict[str, Any]:
    """JSON values of the simulated seeds, with the savings of the policy that the demo is about."""
    savings = savings_of(found, subject)
    equal, plain = ({name: getattr(one, what) for name, one in savings.items()} for what in ("pct", "plain_pct"))
    return {**found.to_json(), "subject": subject, "saving_pct": equal, "saving_uncorrected_pct": plain}


def _outcome(run: DemoSummary) -> RunOutcome | None:
    if run.grams_per_request is None or run.joules_per_request is None:
        return None
    return RunOutcome(run.grams_per_request, run.joules_per_request, run.accuracy_profile, run.slo_attainment)


def write_json(path: Path, values: Any) -> None:
    """Write a JSON file: readable, in stable order, no NaN."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def made_by() -> dict[str, str]:
    """Where a result was made: command, commit and machine."""
    command = shlex.join(["trefoil", *sys.argv[1:]])
    return {"command": command, "commit": git_commit(), "machine": machine()}


def git_commit() -> str:
    """Commit that is checked out, marked when files differ from it; of a wheel its version."""
    if SHIPPED != CHECKOUT:
        return f"trefoil {trefoil.__version__}"
    try:
        described = subprocess.run(
            ["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return described.stdout.strip() or "unknown"


def machine() -> str:
    """Machine that the numbers were taken on: cores, memory, system, Python."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    return f"{cores} cores ({platform.machine()}), {gib:.0f} GiB, {platform.system()}, Python {python}"

"""Ledger of a run: requests, latency, accuracy, energy, grams, decisions, in totals and series; and the meter.

Grams: every interval's counter x the intensity of the device's zone then x PUE, from time zero on; idle, sleep and
moves included. A device's energy belongs to the families that computed on it in the interval, in proportion; where none
did, to all alike (core/accounting.by_family). Active joules of items of jobs are apart; idle, sleep and moves are the
families'.
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.explore.core import candidate_measurement
from controller.explore.core.exploration_state import Evaluation
from controller.loop.core.ports import TakenDecision
from controller.observe.core.triggers import Trigger
from trefoil.core.fleet import DeviceKind
from trefoil.core.units import grams
from trefoil.simulator.books.intervals import JOBS, Interval, quantile_ms
from trefoil.simulator.engines.hardware import DrawnEnergy, Hardware
from trefoil.simulator.scenario.inputs import Inputs

Marks = dict[str, tuple[float, float]]


@dataclass(slots=True)
class Cost:
    """Cost in joules and grams."""

    joules: float = 0.0
    grams: float = 0.0

    def add(self, joules: float, co2: float) -> None:
        """Add joules and grams."""
        self.joules += joules
        self.grams += co2


@dataclass(slots=True)
class Bin:
    """Bin of the series."""

    starts_s: float
    intensity: float
    cost: Cost = field(default_factory=Cost)
    core_s: float = 0.0
    families: dict[str, Interval] = field(default_factory=dict)


@dataclass(slots=True)
class _IntervalCost:
    """Cost of an interval."""

    by_family: dict[str, Cost]
    total: Cost = field(default_factory=Cost)
    by_zone: defaultdict[str, Cost] = field(default_factory=lambda: defaultdict(Cost))
    active_j: float = 0.0
    jobs: Cost = field(default_factory=Cost)


class Ledger:
    """Totals of a run since time zero, its series, decisions and evaluations."""

    def __init__(self, inputs: Inputs, now_s: float) -> None:
        self._inputs, self._pue = inputs, inputs.scenario.control.pue
        self._families = sorted(inputs.objectives)
        self.intensity: Mapping[str, float] = {}
        self.total = {f: Interval(0.0, 0.0) for f in self._families}
        self.cost = {f: Cost() for f in self._families}
        self.by_zone = {zone: Cost() for zone in inputs.carbon}
        self.jobs = Cost()
        self.active_j = self.rolling_j = self.rolling_s = self.core_s = 0.0
        self._cpus = any(device.type.kind == DeviceKind.CPU for device in inputs.devices)
        self.halted = 0
        self.decisions: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._since_start = {f: Cost() for f in self._families}
        self.series: list[dict[str, float]] = []
        self._recent: dict[str, deque[tuple[float, float, float]]] = {f: deque() for f in self._families}
        self._bin: Bin | None = None

    def add(
        self,
        from_s: float,
        to_s: float,
        found: Mapping[str, Interval],
        drawn: Sequence[DrawnEnergy],
        rolling: bool,
        cores: float = 0.0,
    ) -> None:
        """Book an interval in which no intensity changed, and slices of CPUs had so many cores."""
        counted = from_s >= -1e-9
        cost = self._cost_of(to_s - from_s, drawn)
        total = cost.total
        for family, mine in cost.by_family.items():
            self._since_start[family].add(mine.joules, mine.grams)
            recent = self._recent[family]
            recent.append((to_s, mine.grams, found[family].answered))
            while recent[0][0] < to_s - 3600.0 or len(recent) > 4096:
                recent.popleft()
        if not counted:
            return
        for zone, here in cost.by_zone.items():
            self.by_zone[zone].add(here.joules, here.grams)
        self.active_j += cost.active_j
        self.jobs.add(cost.jobs.joules, cost.jobs.grams)
        self.core_s += cores * (to_s - from_s)
        if rolling:
            self.rolling_j += total.joules
            self.rolling_s += to_s - from_s
        for family, mine in cost.by_family.items():
            self.total[family].add(found[family])
            self.cost[family].add(mine.joules, mine.grams)
        self._record(from_s, found, total)
        assert self._bin is not None, "recorded just now"
        self._bin.core_s += cores * (to_s - from_s)

    def _cost_of(self, dt_s: float, drawn: Sequence[DrawnEnergy]) -> _IntervalCost:
        """Cost of what devices drew, by family and zone."""
        cost = _IntervalCost({family: Cost() for family in self._families})
        alike = dict.fromkeys(self._families, 1.0)
        for one in drawn:
            joules = one.counter_j
            co2 = grams(joules, self.intensity[one.zone], self._pue)
            cost.total.add(joules, co2)
            cost.by_zone[one.zone].add(joules, co2)
            if items_j := one.by_family.get(JOBS, 0.0):
                items_g = grams(items_j, self.intensity[one.zone], self._pue)
                cost.jobs.add(items_j, items_g)
                joules, co2 = joules - items_j, co2 - items_g
            shares = {family: share for family, share in one.by_family.items() if family != JOBS}
            shares = shares if any(shares.values()) else alike
            whole = sum(shares.values())
            for family, share in shares.items():
                cost.by_family[family].add(joules * share / whole, co2 * share / whole)
            cost.active_j += one.active_j
        self._add_hosts(dt_s, cost)
        return cost

    def _add_hosts(self, dt_s: float, cost: _IntervalCost) -> None:
        """Add what nodes draw beside their devices, where the boundary is the node."""
        costs = self._inputs.scenario.costs
        if costs.boundary != "node" or not costs.host_w:
            return
        zones = {d.node: d.zone for d in self._inputs.devices}
        for zone in zones.values():
            joules = costs.host_w * dt_s
            co2 = grams(joules, self.intensity[zone], self._pue)
            cost.total.add(joules, co2)
            for one in cost.by_family.values():
                one.add(joules / len(cost.by_family), co2 / len(cost.by_family))
            cost.by_zone[zone].add(joules, co2)

    def marks(self) -> dict[str, tuple[float, float]]:
        """Joules and grams of each family since the very beginning."""
        return {family: (cost.joules, cost.grams) for family, cost in self._since_start.items()}

    def grams_per_request(self, span_s: float) -> dict[str, float | None]:
        """Grams per request over the last seconds, as the live accountant tells the planner."""
        found: dict[str, float | None] = {}
        for family, recent in self._recent.items():
            last_s = recent[-1][0] if recent else 0.0
            co2 = answered = 0.0
            for ends_s, g, n in reversed(recent):
                if ends_s <= last_s - span_s:
                    break
                co2, answered = co2 + g, answered + n
            found[family] = co2 / answered if answered and not math.isnan(co2) else None
        return found

    def decision(self, kept: TakenDecision, explored: dict[str, Any] | None = None) -> None:
        """Note a decision; `explored`: what the exploration that led to it has cost."""
        verdict = kept.verdict
        expected = verdict.decision.plan.expected if verdict.decision and verdict.decision.plan else {}
        self.decisions.append(
            {
                "at_s": round(kept.view.now_s, 6),
                "trigger": kept.trigger.cause,
                "outcome": verdict.outcome,
                "effect": kept.effect,
                "rollout_before": kept.versions.get("rollout_before", ""),
                "plan": verdict.digest,
                "degraded": verdict.degraded,
                "expected_g_per_request": {f: e.grams_per_request for f, e in sorted(expected.items())},
                "why": verdict.why,
                **({"exploration": explored} if explored is not None else {}),
            }
        )

    def evaluation(self, at_s: float, trigger: Trigger, one: Evaluation) -> None:
        """Note what became of a candidate."""
        told = one.measurement
        assert told is not None, "it has ended"
        self.evaluations.append(
            {
                "at_s": round(at_s, 6),
                "trigger": trigger.cause,
                "outcome": one.outcome,
                "why": one.why or one.candidate.why,
                "spent_s": told.spent_s,
                "spent_j": told.spent_j,
                "violations": told.violations,
                "measured": {
                    m.family: {
                        "p95_ms": m.latency_ms_p95,
                        "attainment": m.slo_attainment,
                        "accuracy": m.accuracy,
                        "joules_per_request": m.joules_per_request,
                        "grams_per_request": m.grams_per_request,
                    }
                    for m in told.measured
                },
            }
        )

    # --- series -----------------------------------------------------------------------------------------------------

    def _record(self, from_s: float, found: Mapping[str, Interval], total: Cost) -> None:
        width = self._inputs.scenario.bin_s
        starts_s = math.floor((from_s + 1e-9) / width) * width
        if self._bin is None or starts_s > self._bin.starts_s + 1e-9:
            self.flush()
            self._bin = Bin(starts_s, self.intensity[self._inputs.zone])
            self._bin.families = {f: Interval(from_s, from_s) for f in self._families}
        self._bin.cost.add(total.joules, total.grams)
        for family, one in found.items():
            self._bin.families[family].add(one)

    def flush(self) -> None:
        """Close the bin that is open."""
        if self._bin is None:
            return
        width_s = next(iter(self._bin.families.values())).ends_s - self._bin.starts_s
        row = {
            "at_s": self._bin.starts_s,
            "intensity_g_per_kwh": self._bin.intensity,
            "power_w": self._bin.cost.joules / width_s,
            "grams": self._bin.cost.grams,
        }
        if self._cpus:
            row["cores"] = self._bin.core_s / width_s
        for family, one in self._bin.families.items():
            ended = one.answered + one.rejected
            row[f"{family}.rate_per_s"] = one.arrived / width_s
            row[f"{family}.answered_per_s"] = one.answered / width_s
            row[f"{family}.p95_ms"] = quantile_ms(one.latency, 0.95, one.max_ms)
            row[f"{family}.attainment"] = min(1.0, one.within_slo / ended) if ended else 1.0
            row[f"{family}.accuracy"] = one.accuracy_sum / one.answered if one.answered else math.nan
        self.series.append(row)
        self._bin = None


class SimulatedMeter:
    """Energy meter of the simulated controller: the ledger, at once and without error.

    Between `hold` of a time and of inf it keeps what was noted since; else the last note.
    """

    def __init__(self, ledger: Ledger, hardware: Hardware, measure_s: float) -> None:
        self._ledger, self._hardware, self._measure_s = ledger, hardware, measure_s
        self._at_s: list[float] = []
        self._marks: list[Marks] = []
        self._from_s = math.inf

    @property
    def unallocated_j(self) -> float:
        """Energy that moves, sleep and devices without any serving slice have drawn [J]."""
        return sum(device.unallocated_j for device in self._hardware.devices.values())

    def grams_per_request(self, families: Iterable[str], now_s: float) -> dict[str, float | None]:
        """Grams per request over the last `measure_s`."""
        return self._ledger.grams_per_request(self._measure_s)

    def metered_until_s(self, devices: Sequence[str]) -> float:
        """Time until which energy is metered: all of it is known."""
        return math.inf

    def note(self, now_s: float) -> None:
        """Note what everything has cost until now."""
        self._at_s.append(now_s)
        self._marks.append(self._ledger.marks())
        self._forget()

    def hold(self, from_s: float) -> None:
        """Keep what is needed to tell the cost from a time on; inf: nothing."""
        self._from_s = from_s
        self._forget()

    def _forget(self) -> None:
        older = max(0, bisect_right(self._at_s, self._from_s) - 1)
        del self._at_s[:older], self._marks[:older]

    def cost(self, families: Sequence[str], starts_s: float, ends_s: float, pue: float) -> candidate_measurement.Cost:
        """Cost of what all devices drew between two times that were noted."""
        first, last = self._mark(starts_s), self._mark(ends_s)
        joules = {family: last[family][0] - first[family][0] for family in families}
        return candidate_measurement.Cost(joules, {family: last[family][1] - first[family][1] for family in families})

    def _mark(self, at_s: float) -> Marks:
        """Note of a time, or the last one before it."""
        return self._marks[max(0, bisect_right(self._at_s, at_s) - 1)]

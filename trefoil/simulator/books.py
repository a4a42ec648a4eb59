"""What a run is counted by: requests, latency, accuracy, joules, grams, decisions; as totals and as series.

Grams: every interval's counter x the intensity of the device's zone then x PUE, from time zero on; idle, sleep and
moves included. A device's energy belongs to the families that computed on it in the interval, in proportion; where none
did, to all alike (core/accounting.by_family).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controller.core.effects import CandidateEvaluated, RecordDecision
from trefoil.core.units import grams
from trefoil.simulator.inputs import Inputs
from trefoil.simulator.plant import Drawn
from trefoil.simulator.serving import Interval, quantile_ms


@dataclass(slots=True)
class Cost:
    """Joules and grams."""

    joules: float = 0.0
    grams: float = 0.0

    def add(self, joules: float, co2: float) -> None:
        self.joules += joules
        self.grams += co2


@dataclass(slots=True)
class Bin:
    """One bin of the series."""

    starts_s: float
    intensity: float
    cost: Cost = field(default_factory=Cost)
    families: dict[str, Interval] = field(default_factory=dict)
    accuracy: float = 0.0


@dataclass(slots=True)
class _Priced:
    """What an interval cost; one that drew the same at the same intensities costs the same."""

    drawn: Sequence[Drawn]
    intensity: Mapping[str, float]
    by_family: dict[str, Cost]
    total: Cost = field(default_factory=Cost)
    by_zone: dict[str, Cost] = field(default_factory=dict)
    active_j: float = 0.0
    host_j: float = 0.0


class Books:
    """Totals since time zero."""

    def __init__(self, inputs: Inputs, now_s: float) -> None:
        self._inputs, self._pue = inputs, inputs.scenario.costs.pue
        self._families = sorted(inputs.objectives)
        self.intensity: Mapping[str, float] = {}
        self.total = {f: Interval(0.0, 0.0) for f in self._families}
        self.cost = {f: Cost() for f in self._families}
        self.by_zone = {zone: Cost() for zone in inputs.carbon}
        self.counter_j = self.active_j = self.rolling_j = self.rolling_s = self.host_j = 0.0
        self.halted = 0
        self.decisions: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, Any]] = []
        self._ever = {f: Cost() for f in self._families}
        self.series: list[dict[str, float]] = []
        self._recent: dict[str, deque[tuple[float, float, float, float]]] = {f: deque() for f in self._families}
        self._bin: Bin | None = None
        self._priced: _Priced | None = None

    def add(
        self, from_s: float, to_s: float, found: Mapping[str, Interval], drawn: Sequence[Drawn], rolling: bool
    ) -> None:
        """Book an interval in which no intensity changed."""
        counted = from_s >= -1e-9
        priced = self._priced
        if priced is None or priced.drawn is not drawn or priced.intensity is not self.intensity:
            priced = self._priced = self._price(to_s - from_s, drawn)
        total = priced.total
        for family, mine in priced.by_family.items():
            self._ever[family].add(mine.joules, mine.grams)
            recent = self._recent[family]
            recent.append((to_s, mine.joules, mine.grams, found[family].answered))
            while recent[0][0] < to_s - 3600.0 or len(recent) > 4096:
                recent.popleft()
        if not counted:
            return
        for zone, here in priced.by_zone.items():
            self.by_zone[zone].add(here.joules, here.grams)
        self.active_j += priced.active_j
        self.host_j += priced.host_j
        self.counter_j += total.joules
        if rolling:
            self.rolling_j += total.joules
            self.rolling_s += to_s - from_s
        for family, mine in priced.by_family.items():
            self.total[family].add(found[family])
            self.cost[family].add(mine.joules, mine.grams)
        self._record(from_s, found, total)

    def _price(self, dt_s: float, drawn: Sequence[Drawn]) -> _Priced:
        """What devices drew as costs, by family and zone."""
        priced = _Priced(drawn, self.intensity, {family: Cost() for family in self._families})
        alike = dict.fromkeys(self._families, 1.0)
        for one in drawn:
            joules = one.counter_j
            co2 = grams(joules, self.intensity[one.zone], self._pue)
            priced.total.add(joules, co2)
            shares = one.by_family if one.active_j > 0 else alike
            whole = sum(shares.values())
            for family, share in shares.items():
                priced.by_family[family].add(joules * share / whole, co2 * share / whole)
            priced.by_zone.setdefault(one.zone, Cost()).add(joules, co2)
            priced.active_j += one.active_j
        self._host(dt_s, priced)
        return priced

    def _host(self, dt_s: float, priced: _Priced) -> None:
        """Nodes beside their devices, where the boundary is the node."""
        costs = self._inputs.scenario.costs
        if costs.boundary != "node" or not costs.host_w:
            return
        zones = {d.node: d.zone for d in self._inputs.devices}
        for zone in zones.values():
            joules = costs.host_w * dt_s
            co2 = grams(joules, self.intensity[zone], self._pue)
            priced.total.add(joules, co2)
            for one in priced.by_family.values():
                one.add(joules / len(priced.by_family), co2 / len(priced.by_family))
            priced.host_j += joules
            priced.by_zone.setdefault(zone, Cost()).add(joules, co2)

    def marks(self) -> dict[str, tuple[float, float]]:
        """Joules and grams of each family since the very beginning."""
        return {family: (cost.joules, cost.grams) for family, cost in self._ever.items()}

    def spent(self) -> tuple[float, float]:
        """The same of all families."""
        return sum(c.joules for c in self._ever.values()), sum(c.grams for c in self._ever.values())

    def grams_per_request(self, span_s: float) -> dict[str, float | None]:
        """Over the last seconds, as the live accountant tells the planner."""
        found: dict[str, float | None] = {}
        for family, recent in self._recent.items():
            last_s = recent[-1][0] if recent else 0.0
            co2 = answered = 0.0
            for ends_s, _, g, n in reversed(recent):
                if ends_s <= last_s - span_s:
                    break
                co2, answered = co2 + g, answered + n
            found[family] = co2 / answered if answered else None
        return found

    def decision(self, kept: RecordDecision, explored: dict[str, Any] | None = None) -> None:
        """Note a decision; `explored`: what the exploration that led to it has cost."""
        verdict = kept.verdict
        expected = verdict.decision.plan.expected if verdict.decision and verdict.decision.plan else {}
        self.decisions.append(
            {
                "at_s": round(kept.view.now_s, 6),
                "trigger": kept.trigger.cause,
                "outcome": verdict.outcome,
                "effect": kept.effect,
                "plan": verdict.digest,
                "degraded": verdict.degraded,
                "expected_g_per_request": {f: e.grams_per_request for f, e in sorted(expected.items())},
                "why": verdict.why,
                **({"exploration": explored} if explored is not None else {}),
            }
        )

    def evaluation(self, one: CandidateEvaluated) -> None:
        """Note what became of a candidate."""
        told = one.measurement
        self.evaluations.append(
            {
                "at_s": round(one.at_s, 6),
                "trigger": one.trigger.cause,
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
        for family, one in self._bin.families.items():
            ended = one.answered + one.rejected
            row[f"{family}.rate_per_s"] = one.arrived / width_s
            row[f"{family}.p95_ms"] = quantile_ms(one.latency, 0.95, one.max_ms)
            row[f"{family}.attainment"] = min(1.0, one.within_slo / ended) if ended else 1.0
            row[f"{family}.accuracy"] = one.accuracy_sum / one.answered if one.answered else math.nan
        self.series.append(row)
        self._bin = None

"""Drawn fleets, each planned once and then served request by request: what a plan promises, and what is kept of it.

An instance is drawn from a seed: GPUs of one or two types, families with made-up profiles, SLOs of 1.2 to 10 service
times, floors of accuracy, a load. The policy's planner plans it; the simulator's engine, the plan's router and the
policy's governor serve Poisson arrivals at the rate that was planned for, after a warm-up. An instance of which the
planner says that the fleet lacks something is drawn again with a smaller load.
Promises: no class of slices and no family is late more often than its SLO allows, no family is below its floor.
Error: binomial, or that of the means of parts of the run where these scatter more, as lateness comes in long runs.
"""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from numpy.random import Generator, default_rng

from controller.planners.policy_parts import planner_of
from trefoil.core.brains import Decision, Planner, PlanView
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import configurations, device_type
from trefoil.core.fleet import DeviceType
from trefoil.core.objective import floor_missed
from trefoil.core.plan import Plan
from trefoil.core.power import active_w
from trefoil.core.queueing import Z_95, Z_99, rate_max
from trefoil.installation import MODELS
from trefoil.simulator import Provided, Scenario
from trefoil.simulator.books.intervals import Interval
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Served, Zone
from trefoil.simulator.simulation import Simulation

KINDS: Final = ("A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "A30", "Tesla T4")
OVERHEAD_MS, GAP_MS = 2.0, 2.0  # around a request, as `Costs` has them
WARMUP_S, ASKED_S = 90.0, 30.0  # before what is counted; requests come in the last part of it
SHORTEST_S, LONGEST_S = 60.0, 3600.0  # of what is counted
BATCHES: Final = 40
JOINED: Final = (1, 2, 4, 8)  # of them, where lateness lasts for longer than one
TRIES, LESS = 5, 0.7  # a load that the fleet does not carry, and what is tried after it
ALPHA: Final = 0.01  # chance that any of all promises seems broken and is not
QUICK: Final = {"solver_nodes": 30, "frontier_solves": 3}  # of the planner: what it promises does not depend on them

Counts = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of a family; `weight`: its part of the fleet."""

    name: str
    slo_ms: float
    quantile: float
    floor: float
    weight: float


@dataclass(frozen=True, slots=True)
class Instance:
    """Instance: a fleet and its families. `load`: of what whole devices alike would carry; `high`: the demand's high
    quantile over its mean; `at_high`: served at that quantile, else at the mean."""

    seed: int
    devices: tuple[str, ...]
    families: tuple[Wanted, ...]
    catalog: Catalog
    mode: str
    load: float
    high: float
    at_high: bool

    def carried_per_s(self, one: Wanted) -> float:
        """Load that the fleet carries of this family alone, each type cut alike, by one accurate variant [1/s]."""
        accurate = {v.name for v in self.catalog.family(one.name).variants if v.accuracy >= one.floor - 1e-9}
        total = 0.0
        for kind, number in Counter(self.devices).items():
            rows = [r for r in self.catalog.rows if (r.family, r.device_type) == (one.name, kind)]
            limits = one.slo_ms - OVERHEAD_MS, one.quantile, 1.0
            rates = [rate_max(_held(r), *limits, number * _most(kind, r)) for r in rows if r.variant in accurate]
            total += max(rates, default=0.0)
        return total


def _most(kind: str, row: ProfileRow) -> int:
    return max(dict(option.slices).get(row.slice_type, 0) for option in configurations(device_type(kind)))


def _held(row: ProfileRow) -> ProfileRow:
    p50, p95, p99 = (ms + GAP_MS for ms in (row.latency_ms_p50, row.latency_ms_p95, row.latency_ms_p99))
    return replace(row, latency_ms_p50=p50, latency_ms_p95=p95, latency_ms_p99=p99)


def drawn(seed: int) -> Instance:
    """Instance of a seed."""
    rng = default_rng([seed, 77])
    kinds = [str(kind) for kind in rng.choice(KINDS, size=rng.choice([1, 2], p=[0.6, 0.4]), replace=False)]
    devices = tuple(sorted(str(rng.choice(kinds)) for _ in range(rng.choice([1, 2, 3, 4, 6, 8, 12, 16]))))
    families, wanted, rows = [], [], list[ProfileRow]()
    for at in range(rng.integers(1, 5)):
        family, its_rows = _profile(f"family{at}", sorted(set(devices)), rng)
        best = [row for row in its_rows if row.variant == family.variants[-1].name]
        alone_ms = 1e3 / best[rng.integers(len(best))].throughput_per_s
        times = float(rng.choice([1.2, 1.5, 2.0, 2.5, 3.5, 5.0, 10.0]))
        low, high = family.variants[0].accuracy, family.variants[-1].accuracy
        floor = float(low + rng.choice([0.0, 0.3, 0.6, 0.95, 1.0]) * (high - low))
        quantile = float(rng.choice([0.9, 0.95, 0.99], p=[0.2, 0.6, 0.2]))
        slo_ms = OVERHEAD_MS + GAP_MS + times * alone_ms
        wanted.append(Wanted(family.name, slo_ms, quantile, floor, float(rng.uniform(0.3, 1.0))))
        families.append(family)
        rows += its_rows
    whole = sum(one.weight for one in wanted)
    return Instance(
        seed,
        devices,
        tuple(replace(one, weight=one.weight / whole) for one in wanted),
        Catalog(tuple(families), tuple(rows)),
        str(rng.choice(["instant", "budget", "lambda"], p=[0.6, 0.3, 0.1])),
        float(rng.uniform(0.3, 0.9)),
        float(rng.choice([1.0, 1.2, 1.5])),
        bool(rng.random() < 0.6),
    )


def _profile(name: str, kinds: list[str], rng: Generator) -> tuple[Family, list[ProfileRow]]:
    """Family of one to three variants and its rows, at one clock, which a law takes to others."""
    number = int(rng.integers(1, 4))
    slowest_ms, best = float(np.exp(rng.uniform(math.log(3), math.log(40)))), float(rng.uniform(0.7, 0.99))
    times_ms = np.sort(np.append(slowest_ms * rng.uniform(0.2, 0.95, number - 1), slowest_ms))
    less = rng.choice([0.004, 0.03, 0.1]) * rng.uniform(0.1, 1.0, number - 1)
    accuracies = np.sort(np.append(best - less, best)).tolist()
    exponent, sensitivity = float(rng.choice([0.4, 0.8, 1.0])), float(rng.choice([0.0, 0.3, 0.7, 1.0]))
    cv, draws = float(np.exp(rng.uniform(math.log(0.03), math.log(0.8)))), float(rng.uniform(0.4, 1.0))
    variants = tuple(
        Variant(f"v{at}", at + 1, accuracy, "made up", 600, 3.0, 10, "CC0-1.0")
        for at, accuracy in enumerate(accuracies)
    )
    rows = []
    for kind in map(device_type, kinds):
        for shape in kind.slice_types:
            for variant, whole_ms in zip(variants, times_ms.tolist(), strict=True):
                mean_ms = 1.0 + whole_ms / ((shape.sm_count / 98) ** exponent)
                watts = draws * active_w(kind, shape.name, 0)
                row = _row(kind, shape.name, name, variant.name, mean_ms, cv, watts)
                rows.append(replace(row, clock_sensitivity=sensitivity))
    return Family(name, "top1", variants, {"": (100.0, 0.95)}), rows


def _row(
    kind: DeviceType, shape: str, family: str, variant: str, mean_ms: float, cv: float, watts: float
) -> ProfileRow:
    p50, p95, p99 = (mean_ms * (1 - cv * cv / 9 + z * cv / 3) ** 3 for z in (0.0, Z_95, Z_99))
    per_s, joules = 1e3 / mean_ms, mean_ms / 1e3 * watts
    return ProfileRow(
        kind.name, shape, family, variant, 0, 1, max(kind.clocks_mhz), (), p50, p95, p99, per_s, joules, watts, 600
    )


class PlanOnce:
    """Planner whose first plan stays."""

    def __init__(self, planner: Planner) -> None:
        self.planner, self.decision = planner, None

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Plan, or keep what was planned."""
        if self.decision is None:
            self.decision = self.planner.plan(view, rng)
            return self.decision
        return Decision(None, "keeps its first plan", view.now_s + 1e5, "kept")


class Recorded:
    """Engine whose intervals are kept."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.intervals = engine, list[dict[str, Interval]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def serve(self, until_s: float) -> dict[str, Interval]:
        """Serve until then."""
        self.intervals.append(self.engine.serve(until_s))
        return self.intervals[-1]


@dataclass(frozen=True, slots=True)
class Lateness:
    """Answers of a class of slices, or of a family: `counts` of all and of late ones by part of the run."""

    name: str
    allowed: float
    counts: Counts

    @property
    def share(self) -> float:
        """Share of late answers."""
        return float(self.counts[:, 1].sum() / max(1.0, self.counts[:, 0].sum()))

    @property
    def error(self) -> float:
        """Standard error of the share, by the parts of the run, joined as long as that makes it larger."""
        found = self.allowed * (1 - self.allowed) / self.counts[:, 0].sum()
        for joined in JOINED:
            parts = self.counts.reshape(-1, joined, 2).sum(axis=1)
            left = parts[:, 1] - self.share * parts[:, 0]
            found = max(found, (left**2).sum() * len(parts) / (len(parts) - 1) / parts[:, 0].sum() ** 2)
        return math.sqrt(found)

    def broken(self, sigmas: float) -> bool:
        """Whether more are late than allowed, by so many errors."""
        return self.counts.any() and self.share > self.allowed + sigmas * self.error


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one instance under one policy. `watts`: what all devices drew."""

    seed: int
    policy: str
    load: float
    plan: Plan
    classes: tuple[Lateness, ...]
    families: tuple[Lateness, ...]
    accuracies: tuple[tuple[str, float, float], ...]  # family, mean, floor
    watts: float

    def broken(self, trials: int) -> list[str]:
        """Promises that are broken, where so many are judged in all."""
        sigmas = NormalDist().inv_cdf(1 - ALPHA / trials)
        who = f"{self.policy}, seed {self.seed}"
        found = [
            f"{who}: {one.name}: {one.share:.2%} late of {one.counts[:, 0].sum():.0f} for {one.allowed:.0%}"
            for one in (*self.classes, *self.families)
            if one.broken(sigmas)
        ]
        missed = [one for one in self.accuracies if floor_missed(*one[1:])]
        return found + [f"{who}: {name}: accuracy {mean:.4f} for {floor:.4f}" for name, mean, floor in missed]


def outcome(one: Instance, policy: str, requests: int, settings: dict[str, Any] | None = None) -> Outcome | None:
    """Plan and serve an instance; None: the planner says that the fleet cannot have any of the loads tried.

    The load is one that `exact` carries, which has fewer classes, and says sooner that they do not carry one.
    """
    for load in _loads(one):
        planned = _planned(one, "exact", load, requests, settings)
        if planned is not None:
            planned = planned if policy == "exact" else _planned(one, policy, load, requests, settings)
            return None if planned is None else _served(one, policy, load, *planned)
    return None


def _loads(one: Instance) -> list[float]:
    alone = [one.carried_per_s(family) for family in one.families]
    return [one.load * LESS**tried for tried in range(TRIES)] if min(alone) > 0 else []


def _planned(
    one: Instance, policy: str, load: float, requests: int, settings: dict[str, Any] | None
) -> tuple[Plan, Simulation, float] | None:
    """Plan, the simulation in which it is rolled out, and how long that runs [s]; None: the fleet lacks something."""
    high = [load * family.weight * one.carried_per_s(family) for family in one.families]
    served = high if one.at_high else [rate / one.high for rate in high]
    duration_s = min(max(SHORTEST_S, requests / sum(served)), LONGEST_S)
    asked = _scenario(one, policy, high, served, duration_s, {**QUICK, **(settings or {})})
    planner = PlanOnce(planner_of("", asked.policy_row()))
    shell = Simulation(prepare(asked, Provided(catalog=one.catalog, planner=planner)))
    shell.run(1.0 - WARMUP_S)
    plan = shell.core.current
    return (plan, shell, duration_s) if plan is not None and _promises(plan, one, high) else None


def _promises(plan: Plan, one: Instance, high: list[float]) -> bool:
    """Whether the plan says that it carries all of the demand, within floors."""
    names = [family.name for family in one.families]
    whole = all(plan.expected[name].capacity_per_s >= 0.999 * rate for name, rate in zip(names, high, strict=True))
    floors = one.mode == "lambda" or all(plan.expected[f.name].accuracy >= f.floor - 1e-6 for f in one.families)
    return whole and floors and not plan.degraded


def _scenario(
    one: Instance, policy: str, high: list[float], served: list[float], duration_s: float, settings: dict[str, Any]
) -> Scenario:
    families = []
    for family, rate in zip(one.families, served, strict=True):
        points = ((-WARMUP_S, 0.0), (-ASKED_S, 0.0), (1.0 - ASKED_S, rate))
        objective = FamilyObjective(
            type=one.mode,
            slo={"percentile": 100 * family.quantile, "latency_ms": family.slo_ms},
            accuracy={"floor": family.floor},
            window_s=1e6,
        )
        families.append(
            Served(
                name=family.name, repository=MODELS, allow_missing=True, arrivals=Arrivals(points=points),
                objective=objective,
            )
        )  # fmt: skip
    fixed = {
        family.name: {"rate_per_s": rate / one.high, "rate_p90_per_s": rate}
        for family, rate in zip(one.families, high, strict=True)
    }
    return Scenario(
        seed=one.seed,
        duration_s=duration_s,
        warmup_s=WARMUP_S,
        nodes=(Node(devices=one.devices),),
        families=tuple(families),
        carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}),
        policy=policy,
        parts={"planner": settings},
        control={"causes": ["start"], "tick_s": duration_s / BATCHES, "demand_fixed": fixed},
    )


def _served(one: Instance, policy: str, load: float, plan: Plan, shell: Simulation, duration_s: float) -> Outcome:
    shell.run(0.0)
    engines = tuple(Recorded(engine) for engine in shell.engines)
    shell.engines, before_j = engines, _drawn_j(shell)
    shell.run(duration_s)
    kinds = {device.name: device.type.name for device in shell.inputs.devices}
    clocks = {device.device: device.clock_max_mhz for node in plan.nodes for device in node.devices}
    classes, families, accuracies = [], [], []
    for family in one.families:
        route = next(route for route in plan.routes if route.family == family.name)
        place = {
            t.slice: (t.variant, t.slice.slice_type, kinds[t.slice.device], clocks[t.slice.device], round(t.weight, 6))
            for t in route.targets
        }
        counts: dict[Any, Counts] = defaultdict(lambda: np.zeros((BATCHES, 2)))
        accuracy = answered = 0.0
        for interval in (each[family.name] for engine in engines for each in engine.intervals if family.name in each):
            part = min(BATCHES - 1, int(interval.starts_s / duration_s * BATCHES))
            ended = interval.answered + interval.rejected
            counts[None][part] += ended, ended - interval.within_slo
            accuracy, answered = accuracy + interval.accuracy_sum, answered + interval.answered
            for key, latency_s in interval.latency_s_by.items():
                late = sum(1e3 * seconds + OVERHEAD_MS > family.slo_ms for seconds in latency_s)
                counts[place[key]][part] += len(latency_s), late
        allowed = 1 - family.quantile
        families.append(Lateness(family.name, allowed, counts.pop(None)))
        classes += [Lateness(f"{family.name} {name}", allowed, found) for name, found in counts.items()]
        floor = 0.0 if one.mode == "lambda" else family.floor
        accuracies.append((family.name, accuracy / max(1.0, answered), floor))
    watts = (_drawn_j(shell) - before_j) / duration_s
    return Outcome(one.seed, policy, load, plan, tuple(classes), tuple(families), tuple(accuracies), watts)


def _drawn_j(shell: Simulation) -> float:
    return sum(device.counter_j for device in shell.hardware.devices.values())

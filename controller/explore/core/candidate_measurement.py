"""Measurement of a candidate on the running system, from load windows and energy samples. No I/O, no clock.

Data: the load windows of all workers that began after the candidate was in place, the energy samples of all devices.
Decision: a `Measurement`, or why a measurement has to be broken off.
Formulation: latency, attainment and accuracy are those of `LoadWindows.measured_in`. The interval goes from the first
window's start to the last window's end. Joules and grams are the part of every energy sample inside it, idle and sleep
included, over the requests answered in it. backlog = arrived - ended. The p95 and the backlog are bounded, so that a
plan that cannot carry the load is left long before a request is lost.
Deviations: none.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from controller.observe.core.load_windows import LoadWindows
from trefoil.core.accounting import by_family, reading_at
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonReading
from trefoil.core.demand import JOB_CLASS, LoadWindow, Measured
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.latency import merge, quantile_ms
from trefoil.core.plan import Plan
from trefoil.core.units import MS_PER_S, grams

GAP_S: Final = 0.5  # between two samples of a device, beyond which its energy is not known
UNMEASURED: Final = (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one family over some windows."""

    arrived: int
    answered: int
    ended: int
    violations: int  # ended out of the SLO: late, rejected, failed
    latency_ms_p95: float

    @property
    def backlog(self) -> int:
        """Requests that arrived and did not end."""
        return max(0, self.arrived - self.ended)


def tally(windows: Iterable[LoadWindow], family: str) -> Tally:
    """Tally of a family over load windows."""
    cells = [c for w in windows for c in w.cells if c.key.family == family and c.key.slo_class != JOB_CLASS]
    answered = sum(c.answered for c in cells)
    ended = answered + sum(sum(c.failed_by_code.values()) for c in cells)
    late = quantile_ms(merge(c.latency for c in cells), 0.95) if answered else 0.0
    return Tally(sum(c.arrived for c in cells), answered, ended, ended - sum(c.within_slo for c in cells), late)


def covered_span(windows: Sequence[LoadWindow]) -> tuple[float, float]:
    """(start, end) of what the windows cover together; (0, 0) for none."""
    return min((w.starts_at_s for w in windows), default=0.0), max((w.ends_at_s for w in windows), default=0.0)


@dataclass(frozen=True, slots=True)
class Cost:
    """Joules and grams of an interval, by family; None where something was not metered."""

    joules: dict[str, float] | None
    grams: dict[str, float] | None

    @property
    def total_j(self) -> float:
        """Of all families; 0 where nothing is known."""
        return sum(self.joules.values()) if self.joules else 0.0


def cost(
    samples: Iterable[EnergySample],
    readings: Sequence[CarbonReading],
    families: Sequence[str],
    starts_s: float,
    ends_s: float,
    pue: float,
) -> Cost:
    """Cost of an interval over all devices. A sample across its border counts by its share of time."""
    joules = dict.fromkeys(families, 0.0)
    co2 = dict.fromkeys(families, 0.0)
    covered: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        length_s = sample.ends_at_s - sample.starts_at_s
        begin_s, end_s = max(sample.starts_at_s, starts_s), min(sample.ends_at_s, ends_s)
        if end_s <= begin_s or length_s <= 0:
            continue
        if sample.method in UNMEASURED:
            return Cost(None, None)
        covered.setdefault(sample.device, []).append((begin_s, end_s))
        intensity = reading_at(readings, (begin_s + end_s) / 2).intensity_g_per_kwh if readings else math.nan
        for family, whole_j in by_family(sample, families).items():
            part_j = whole_j * (end_s - begin_s) / length_s
            joules[family] = joules.get(family, 0.0) + part_j
            co2[family] = co2.get(family, 0.0) + grams(part_j, intensity, pue)
    if not covered or any(_gap_s(parts, starts_s, ends_s) > GAP_S for parts in covered.values()):
        return Cost(None, None)
    return Cost(joules, co2 if readings else None)


def metered_until_s(samples: Iterable[EnergySample], devices: Iterable[str]) -> float:
    """Time up to which every one of these devices has been metered; -inf while one never was."""
    ends: dict[str, float] = dict.fromkeys(devices, -math.inf)
    for sample in samples:
        if sample.device in ends:
            ends[sample.device] = max(ends[sample.device], sample.ends_at_s)
    return min(ends.values(), default=math.inf)


def measured(view: PlanView, windows: LoadWindows, found: Sequence[LoadWindow], paid: Cost) -> tuple[Measured, ...]:
    """Measurements of each family with an objective over these windows."""
    starts_s, ends_s = covered_span(found)
    results = []
    for family in (o.family for o in view.objectives):
        answered = tally(found, family).answered
        joules = paid.joules[family] / answered if paid.joules and answered else None
        co2 = paid.grams[family] / answered if paid.grams and answered else None
        one = windows.measured_in(found, family, max(1e-9, ends_s - starts_s), view.catalog, co2, joules)
        results += [one] if one is not None else []
    return tuple(results)


def failed_measurements(families: Iterable[str]) -> tuple[Measured, ...]:
    """Measurements that tell a planner of failure: its candidate was refused or broken off.

    If one of several causes the failure, only that one is reported: the others were not measured.
    """
    return tuple(Measured(family, math.inf, math.inf, 0.0, 0.0, None, 0.0, 0.0) for family in families)


def _gap_s(parts: list[tuple[float, float]], starts_s: float, ends_s: float) -> float:
    """The longest time without a sample."""
    edges = [(starts_s, starts_s), *sorted(parts), (ends_s, ends_s)]
    return max(b[0] - a[1] for a, b in pairwise(edges))


P95_REQUESTS_MIN: Final = 40  # answers below which a p95 says nothing
BACKLOG_MIN: Final = 10.0  # requests under way that say nothing
BACKLOG_S_MAX: Final = 4.0  # of arrivals that did not end, once the rollout has settled
QUEUE_SHARE_MAX: Final = 0.25  # backlog as a share of the route's queue, from the first step on: before any is rejected


def slo_s(view: PlanView, family: str) -> float:
    """SLO of a family [s]; 0 where its objective names none."""
    return next((o.slo_ms / MS_PER_S for o in view.objectives if o.family == family), 0.0)


def break_off_reason(
    view: PlanView,
    plan: Plan,
    since: Sequence[LoadWindow],
    settled: Sequence[LoadWindow],
    p95_ratio_max: float,
    measuring: bool,
) -> tuple[str, str]:
    """Reason to break a measurement off, and the family to blame; "" twice while it is bearable.

    `since` are the load windows from its first rollout step on, `settled` those that count as its measurement. Until
    it is measured only the queue's room counts: what waits behind a rollout is not the candidate's doing.
    """
    queue = {r.family: r.queue_requests_max for r in plan.routes}
    for demand in view.demand:
        family = demand.family
        limit = max(BACKLOG_MIN, BACKLOG_S_MAX * demand.rate_per_s) if measuring else math.inf
        if queue.get(family):
            limit = min(limit, QUEUE_SHARE_MAX * queue[family])
        waits = tally(since, family).backlog
        if waits > limit:
            return f"{waits} requests of {family} wait, more than {limit:.0f}", family
        seen, slo_ms = tally(settled, family), MS_PER_S * slo_s(view, family)
        late = slo_ms > 0 and seen.latency_ms_p95 > p95_ratio_max * slo_ms
        if late and seen.answered >= P95_REQUESTS_MIN:
            return f"p95 of {family} {seen.latency_ms_p95:.0f} ms > {p95_ratio_max:g} x {slo_ms:g} ms", family
    return "", ""

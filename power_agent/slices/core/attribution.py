"""Energy attribution: who on a device drew the power above its baseline, by activity x share of the multiprocessors.

Data, per slice: busy seconds that Triton counted; where a sensor has them, its mean activity a in 0..1 over the
interval. That is GPM's `SM_UTIL`, or DCGM's SM_ACTIVE, else GR_ENGINE_ACTIVE. NVML has no energy per slice.
Formulation: weight = activity seconds x sm share, activity seconds = a x length of the interval, or Triton's. All
slices of an interval have one source: the first of DCGM, GPM, Triton that has a fresh value for each of them. It must
not contradict Triton by seeing nothing at all. Inside a slice its models share by busy seconds.
A foreign client: where the operating system counts all use of the device (CPUs), the rest of it weighs in. Elsewhere no
slice gets more than its activity can draw at full power. Both are unallocated.
Deviation: none. Triton counts a batch when it ends, so a batch across the border weighs in the later interval: the
error is bounded by one batch per interval and cancels over several.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trefoil.core.accounting import fold_slices
from trefoil.core.energy import AttributionMethod, EnergyMethod, HostedEnergy, SliceEnergy
from trefoil.core.fleet import DeviceState, SliceKey

TICK_S: Final = 1e-9  # Triton counts nanoseconds
DCGM_S_MAX: Final = 5.0  # its value is a mean of the last second or two: it does not stand for more
QUIET_OTHERS: Final = 0.05  # of a host's CPU time: an operating system is never quite idle
SENSORS: Final = {
    "auto": (AttributionMethod.DCGM, AttributionMethod.GPM),
    "dcgm": (AttributionMethod.DCGM,),
    "gpm": (AttributionMethod.GPM,),
    "triton": (),
}


# --- readings ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """Work counters, cumulative, of one hosted model in one Triton process."""

    family: str
    variant: str
    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class SliceReading:
    """Reading of one slice at one moment. A new `incarnation` (another process) starts its counters at 0.

    `adopted`: this agent did not start the process, so that its first counts may be booked already.
    `overhead_*`: how much of the work since the last reading was warm-up or probing.
    `sm_share`: of the device's multiprocessors; of a CPU slice its cores over those of the node.
    `gpm`, `dcgm`: mean activity since the last reading, 0..1 of the slice; None where no fresh value covers that time.
    """

    key: SliceKey
    generation: int
    incarnation: str
    sm_share: float
    serving: bool
    work: tuple[Work, ...] = ()
    overhead_s: float = 0.0
    overhead_requests: int = 0
    gpm: float | None = None
    dcgm: float | None = None
    adopted: bool = False

    def activity(self, method: AttributionMethod) -> float | None:
        """Activity by one sensor, 0..1; None where it has no fresh value."""
        return self.dcgm if method == AttributionMethod.DCGM else self.gpm


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """Reading of one device at one moment. counter_j None: nothing measures it.

    `monotonic_s` counts from the boot of the machine, so two agents on one boot continue each other.
    `driver` names what the counter counts from (boot, driver load, start of an integral): counters of different ones
    have nothing in common. `counter_uncertainty`: relative error of the counter itself. `busy_s`: all use of
    the device since the last reading, in seconds of all of it, where the operating system tells (CPUs).
    `active_w_max`: what all of the device draws above its baseline when it computes without pause, at this clock.
    `power_max_w`: what it can draw at all; 0: not known.
    """

    device: str
    at_s: float
    monotonic_s: float
    driver: str
    counter_j: float | None
    baseline_w: float
    active_w_max: float
    state: DeviceState
    clock_mhz: int
    serving_s: float | None = None  # since the last reading; None: unseen (the agent was not there)
    foreign: bool = False
    slices: tuple[SliceReading, ...] = ()
    method: EnergyMethod = EnergyMethod.NVML_COUNTER
    counter_uncertainty: float = 0.0
    attribution: str = "auto"
    learn_baseline: bool = False
    busy_s: float | None = None
    power_max_w: float = 0.0


# --- who did what -----------------------------------------------------------------------------------------------------


WorkDone = Mapping[tuple[str, str], tuple[float, int]]  # (family, variant) -> busy seconds, requests


@dataclass(frozen=True, slots=True)
class CounterMark:
    """Counters of one hosted model when they were last read."""

    key: SliceKey
    generation: int
    incarnation: str
    family: str
    variant: str
    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class Split:
    """Split of an interval's joules above the baseline. active_j: by slice, in their order; unserved_j: unallocated."""

    active_j: tuple[float, ...]
    unserved_j: float
    method: AttributionMethod
    quiet: bool  # of each slice it is known that it did nothing, or next to nothing


def work_since(
    marks: Sequence[CounterMark], slices: Sequence[SliceReading]
) -> tuple[tuple[WorkDone, ...], tuple[CounterMark, ...]]:
    """Work of each slice since the marks, and the new marks. A slice whose counters were not read keeps its marks.

    Of an adopted process without marks it is not known what was booked before: its first counts only become marks.
    """
    before = {(m.key, m.generation, m.incarnation, m.family, m.variant): m for m in marks}
    marked = {identity[:3] for identity in before}
    done: list[WorkDone] = []
    after: dict[tuple[SliceKey, int, str, str, str], CounterMark] = {}
    for part in slices:
        own: dict[tuple[str, str], tuple[float, int]] = {}
        process = (part.key, part.generation, part.incarnation)
        for work in part.work:
            identity = (*process, work.family, work.variant)
            mark = before.get(identity)
            # Loading a version again restarts its counters: what they show now was done since.
            if mark is None or work.busy_s < mark.busy_s or work.requests < mark.requests:
                own[work.family, work.variant] = (work.busy_s, work.requests)
            else:
                own[work.family, work.variant] = (work.busy_s - mark.busy_s, work.requests - mark.requests)
            after[identity] = CounterMark(*identity, work.busy_s, work.requests)
        for identity, mark in before.items():
            if identity[:3] == process:
                after.setdefault(identity, mark)
                if not part.work:  # it did not answer, but what it hosts is known
                    own.setdefault((mark.family, mark.variant), (0.0, 0))
        done.append(own if process in marked or not part.adopted else {})
    return tuple(done), tuple(after.values())


def split_active(reading: DeviceReading, done: Sequence[WorkDone], length_s: float, rest_j: float) -> Split:
    """Split the joules above the baseline between the slices by activity; the rest is unallocated."""
    method, seconds = _activity_s(reading, done, length_s)
    own_s = sum(active_s * part.sm_share for part, active_s in zip(reading.slices, seconds, strict=True))
    other_s = max(0.0, reading.busy_s - own_s) if reading.busy_s is not None else 0.0
    weights, unserved = [], other_s
    for part, own, active_s in zip(reading.slices, done, seconds, strict=True):
        served = _served_share(part, _busy_s(own))
        weights.append(active_s * served * part.sm_share)
        unserved += active_s * (1.0 - served) * part.sm_share
    busy = {(p.key, p.generation) for p, active_s in zip(reading.slices, seconds, strict=True) if active_s > 0}
    if len(busy) <= 1:
        method = AttributionMethod.SOLE
    total = sum(weights) + unserved
    quiet = all(done) and own_s <= 0 and other_s <= QUIET_OTHERS * length_s
    if rest_j <= 0 or total <= 0:
        return Split((0.0,) * len(weights), max(0.0, rest_j), method, quiet)
    per_weight_j = rest_j / total
    if reading.foreign:
        per_weight_j = min(per_weight_j, reading.active_w_max)
    active_j = tuple(per_weight_j * weight for weight in weights)
    return Split(active_j, max(0.0, rest_j - sum(active_j)), method, quiet)


def _activity_s(
    reading: DeviceReading, done: Sequence[WorkDone], length_s: float
) -> tuple[AttributionMethod, tuple[float, ...]]:
    counted = tuple(_busy_s(own) for own in done)
    watched = reading.serving_s is not None  # else no sensor did either
    for method in SENSORS[reading.attribution] if watched else ():
        if method == AttributionMethod.DCGM and length_s > DCGM_S_MAX:
            continue
        sensed = tuple(part.activity(method) for part in reading.slices)
        if not all(a is not None and math.isfinite(a) and a >= 0 for a in sensed):
            continue  # stale or absent for one of them: two sources in one split would compare unlike things
        # More than 1 is possible (DCGM rounds by the layout of the instance) and means 1. A slice that never said what
        # it hosts serves no known request.
        seconds = tuple(min(1.0, a or 0.0) * length_s if own else 0.0 for a, own in zip(sensed, done, strict=True))
        if sum(seconds) > 0 or sum(counted) <= 0:
            return method, seconds
    return AttributionMethod.TRITON_COMPUTE, counted


def _served_share(part: SliceReading, busy_s: float) -> float:
    """How much of a slice's activity was for requests: not what it does before it serves, not warm-up or probes."""
    if not part.serving:
        return 0.0
    return min(1.0, max(0.0, 1.0 - part.overhead_s / busy_s)) if busy_s > 0 else 1.0


def _busy_s(own: WorkDone) -> float:
    """Seconds of work on a slice; what no counter can show is rounding."""
    busy_s = sum(seconds for seconds, _ in own.values())
    return busy_s if busy_s >= TICK_S else 0.0


def slice_energies(
    slices: Sequence[SliceReading], done: Sequence[WorkDone], active_j: Sequence[float]
) -> tuple[SliceEnergy, ...]:
    """Energy of each slice and generation, with that of its models: one entry where a Triton was replaced meanwhile."""
    return fold_slices(_slice_energy(*one) for one in zip(slices, done, active_j, strict=True))


def _slice_energy(part: SliceReading, own: WorkDone, active_j: float) -> SliceEnergy:
    total_s = _busy_s(own)
    overhead = part.overhead_requests
    hosted = []
    for (family, variant), (busy_s, requests) in sorted(own.items()):
        share = busy_s / total_s if total_s else 1.0 / len(own)
        hosted.append(HostedEnergy(family, variant, active_j * share, busy_s, max(0, requests - overhead)))
        overhead = max(0, overhead - requests)
    return SliceEnergy(part.key, part.generation, active_j, tuple(hosted))

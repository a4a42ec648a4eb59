"""Split a device's energy counter into active, idle and unallocated joules. CONTRACTS section 4, EnergySample.

Data: counter C [J], baseline power B [W], serving time s [s] of an interval of length t [s], per hosted model the busy
seconds that Triton counted, sm share of each slice. NVML has no energy per slice.
Formulation, per interval: dC = counter delta; after a reset what the counter shows since.
    idle        = min(dC, B s)                      at least one slice READY, SWAPPING or DRAINING
    unallocated = min(dC - idle, B (t - s))         none of them; plus the parts of the rest that serve nobody
    rest        = dC - idle - unallocated           split by weight = busy seconds x sm share
Warm-up and work on slices that do not serve yet weigh in as unallocated; so does a rest without any activity. With a
foreign client on the device a slice gets no more than its busy seconds can draw at full power; the rest is foreign.
Deviation: none. Triton counts a batch when it ends, so a batch across the border weighs in the later interval: the
error is bounded by one batch per interval and cancels over several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trefoil.core.accounting import check_conservation
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample, HostedEnergy, SliceEnergy
from trefoil.core.fleet import DeviceState, SliceKey

UNCERTAINTY_SOLE: Final = 0.01  # one slice serves: only the baseline can be wrong
UNCERTAINTY_SHARED: Final = 0.05  # split by busy seconds: density differs by a few percent between variants
TICK_S: Final = 1e-9  # Triton counts nanoseconds

Place = tuple[SliceKey, int]  # slice and generation
Done = Mapping[tuple[str, str], tuple[float, int]]  # (family, variant) -> busy seconds, requests


@dataclass(frozen=True, slots=True)
class Work:
    """Cumulative counters of one hosted model in one Triton process."""

    family: str
    variant: str
    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class SliceReading:
    """One slice at the time of a reading. A new `incarnation` (another process) starts its counters at 0.

    `overhead_*`: how much of the work since the last reading was warm-up or probing.
    """

    key: SliceKey
    generation: int
    incarnation: str
    sm_share: float
    serving: bool
    work: tuple[Work, ...] = ()
    overhead_s: float = 0.0
    overhead_requests: int = 0


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """One device at the time of a reading. counter_j None: nothing measures it.

    monotonic_s counts from the boot of the machine, so two agents on one boot continue each other.
    """

    device: str
    at_s: float
    monotonic_s: float
    driver: str  # boot and driver load: counters of different ones have nothing in common
    counter_j: float | None
    baseline_w: float
    active_w_max: float
    state: DeviceState
    clock_mhz: int
    serving_s: float | None = None  # since the last reading; None: nobody watched (the agent was not there)
    foreign: bool = False
    slices: tuple[SliceReading, ...] = ()


@dataclass(frozen=True, slots=True)
class Mark:
    """The last counters seen of one hosted model."""

    key: SliceKey
    generation: int
    incarnation: str
    family: str
    variant: str
    busy_s: float
    requests: int


@dataclass(frozen=True, slots=True)
class MeterState:
    """What must survive the agent so that no joule is lost."""

    device: str
    seq: int = 0
    at_s: float = 0.0
    monotonic_s: float = 0.0
    driver: str = ""
    counter_j: float | None = None
    counter_resets: int = 0
    serving: bool = False
    clock_mhz: int = 0
    marks: tuple[Mark, ...] = ()


def advance(
    state: MeterState, reading: DeviceReading, node: str, simulated: bool
) -> tuple[MeterState, EnergySample | None]:
    """Account for the time since the last reading; no sample when there is none that this one can continue.

    Raises:
        AssertionError: readings of two devices, or time going back: a bug in the shell.
    """
    assert state.device == reading.device, (state.device, reading.device)
    started = state.monotonic_s > 0
    continues = started and state.driver == reading.driver
    assert not continues or reading.monotonic_s >= state.monotonic_s, "time went back"
    if continues and reading.monotonic_s == state.monotonic_s:
        return state, None
    done, marks = _settle(state.marks, reading.slices)
    after = MeterState(
        device=state.device,
        seq=state.seq,
        at_s=reading.at_s,
        monotonic_s=reading.monotonic_s,
        driver=reading.driver,
        counter_j=reading.counter_j,
        counter_resets=state.counter_resets,
        serving=any(part.serving for part in reading.slices),
        clock_mhz=reading.clock_mhz,
        marks=marks,
    )
    # Another driver while nobody watched: how long it has run is unknown, so the gap stays a gap.
    if not started or (not continues and reading.serving_s is None):
        return after, None
    was_reset = not continues or _decreased(state.counter_j, reading.counter_j)
    after = replace(after, seq=state.seq + 1, counter_resets=state.counter_resets + was_reset)
    sample = replace(
        _sample(state, reading, done, was_reset),
        node=node,
        simulated=simulated,
        seq=after.seq,
        counter_resets=after.counter_resets,
    )
    check_conservation(sample)
    return after, sample


def _decreased(before_j: float | None, now_j: float | None) -> bool:
    return before_j is not None and now_j is not None and now_j < before_j


def _settle(marks: Sequence[Mark], slices: Sequence[SliceReading]) -> tuple[tuple[Done, ...], tuple[Mark, ...]]:
    """What each slice did since the marks, and the new marks. A slice whose counters were not read keeps its marks."""
    before = {(m.key, m.generation, m.incarnation, m.family, m.variant): m for m in marks}
    done: list[Done] = []
    after: dict[tuple[SliceKey, int, str, str, str], Mark] = {}
    for part in slices:
        own: dict[tuple[str, str], tuple[float, int]] = {}
        for work in part.work:
            identity = (part.key, part.generation, part.incarnation, work.family, work.variant)
            mark = before.get(identity)
            # Loading a version again restarts its counters: what they show now was done since.
            if mark is None or work.busy_s < mark.busy_s or work.requests < mark.requests:
                own[work.family, work.variant] = (work.busy_s, work.requests)
            else:
                own[work.family, work.variant] = (work.busy_s - mark.busy_s, work.requests - mark.requests)
            after[identity] = Mark(*identity, work.busy_s, work.requests)
        for identity, mark in before.items():
            if identity[:3] == (part.key, part.generation, part.incarnation):
                after.setdefault(identity, mark)
        done.append(own)
    return tuple(done), tuple(after.values())


def _sample(state: MeterState, reading: DeviceReading, done: Sequence[Done], was_reset: bool) -> EnergySample:
    length_s = max(0.0, reading.monotonic_s - state.monotonic_s)
    if reading.counter_j is None or (state.counter_j is None and not was_reset):
        nothing = [0.0] * len(done)
        return _draft(state, reading, done, nothing, 0.0, 0.0, 0.0, EnergyMethod.NONE)
    delta_j = reading.counter_j if was_reset else reading.counter_j - (state.counter_j or 0.0)
    if reading.serving_s is not None:
        serving_s = min(length_s, reading.serving_s)
    else:  # nobody watched: what served before and after is taken to have served in between
        serving_s = length_s if state.serving and any(part.serving for part in reading.slices) else 0.0
    idle_j = min(delta_j, reading.baseline_w * serving_s)
    empty_j = min(delta_j - idle_j, reading.baseline_w * (length_s - serving_s))
    active_j, unserved_j = _split(reading, done, delta_j - idle_j - empty_j)
    return _draft(state, reading, done, active_j, idle_j, empty_j + unserved_j, delta_j, EnergyMethod.NVML_COUNTER)


def _split(reading: DeviceReading, done: Sequence[Done], rest_j: float) -> tuple[list[float], float]:
    """Active joules of each slice, and the joules that serve nobody."""
    weights, unserved = [], 0.0
    for part, own in zip(reading.slices, done, strict=True):
        busy_s = _busy_s(own)
        own_s = max(0.0, busy_s - part.overhead_s) if part.serving else 0.0
        weights.append(own_s * part.sm_share)
        unserved += (busy_s - own_s) * part.sm_share
    total = sum(weights) + unserved
    if rest_j <= 0 or total <= 0:
        return [0.0] * len(weights), max(0.0, rest_j)
    per_weight_j = rest_j / total
    if reading.foreign:
        per_weight_j = min(per_weight_j, reading.active_w_max)
    active_j = [per_weight_j * weight for weight in weights]
    return active_j, max(0.0, rest_j - sum(active_j))


def _busy_s(own: Done) -> float:
    """Seconds of work on a slice; what no counter can show is rounding."""
    busy_s = sum(seconds for seconds, _ in own.values())
    return busy_s if busy_s >= TICK_S else 0.0


def _draft(
    state: MeterState,
    reading: DeviceReading,
    done: Sequence[Done],
    active_j: Sequence[float],
    idle_j: float,
    unallocated_j: float,
    delta_j: float,
    method: EnergyMethod,
) -> EnergySample:
    places: dict[Place, list[SliceEnergy]] = {}
    for part, own, joules in zip(reading.slices, done, active_j, strict=True):
        places.setdefault((part.key, part.generation), []).append(_slice_energy(part, own, joules))
    busy = [part for part, own in zip(reading.slices, done, strict=True) if any(s > 0 for s, _ in own.values())]
    sole = len({(part.key, part.generation) for part in busy}) <= 1
    return EnergySample(
        device=state.device,
        starts_at_s=state.at_s,
        ends_at_s=max(reading.at_s, state.at_s),
        counter_j=delta_j,
        method=method,
        attribution=AttributionMethod.SOLE if sole else AttributionMethod.TRITON_COMPUTE,
        slices=tuple(_merged(places[place]) for place in sorted(places)),
        idle_j=idle_j,
        unallocated_j=unallocated_j,
        state=reading.state,
        clock_mhz_mean=(state.clock_mhz + reading.clock_mhz) / 2,
        uncertainty_ratio=UNCERTAINTY_SOLE if sole else UNCERTAINTY_SHARED,
    )


def _slice_energy(part: SliceReading, own: Done, active_j: float) -> SliceEnergy:
    total_s = _busy_s(own)
    overhead = part.overhead_requests
    hosted = []
    for (family, variant), (busy_s, requests) in sorted(own.items()):
        share = busy_s / total_s if total_s else 0.0
        hosted.append(HostedEnergy(family, variant, active_j * share, busy_s, max(0, requests - overhead)))
        overhead = max(0, overhead - requests)
    return SliceEnergy(part.key, part.generation, active_j, tuple(hosted))


def _merged(parts: Sequence[SliceEnergy]) -> SliceEnergy:
    """One entry for a slice whose Triton was replaced inside the interval."""
    if len(parts) == 1:
        return parts[0]
    models = sorted({(h.family, h.variant) for part in parts for h in part.hosted})
    hosted = []
    for model in models:
        own = [h for part in parts for h in part.hosted if (h.family, h.variant) == model]
        hosted.append(
            HostedEnergy(
                *model,
                active_j=sum(h.active_j for h in own),
                compute_s=sum(h.compute_s for h in own),
                requests=sum(h.requests for h in own),
            )
        )
    return replace(parts[0], active_j=sum(part.active_j for part in parts), hosted=tuple(hosted))

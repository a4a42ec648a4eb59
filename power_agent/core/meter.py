"""Split a device's energy counter into active, idle and unallocated joules. CONTRACTS section 4, EnergySample.

Data: counter C [J], baseline power B [W], serving time s [s] of an interval of length t [s], and what its slices did.
The counter is NVML's, RAPL's, or an integral of power readings where there is none.
Formulation, per interval: dC = what the counter has moved (`counter`: resets, wobbles and impossible steps).
    idle        = min(dC, B s)                      at least one slice READY, SWAPPING or DRAINING
    unallocated = min(dC - idle, B (t - s))         none of them; plus the parts of the rest that serve nobody
    rest        = dC - idle - unallocated           split by activity (`attribution`)
Warm-up and work on slices that do not serve yet weigh in as unallocated; so does a rest without any activity.
Deviation: none.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from power_agent.attribution import Done, Mark, Split, settle, slice_energies, split
from power_agent.baseline import Baseline
from power_agent.counter import Move, move, reach_j
from power_agent.readings import DeviceReading
from trefoil.core.accounting import check_conservation
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample

UNCERTAINTY_SOLE: Final = 0.01  # one slice serves: only the baseline can be wrong
UNCERTAINTY_SHARED: Final = 0.05  # split by busy time: density differs by a few percent between variants
SERVED_THROUGHOUT: Final = 0.999


@dataclass(frozen=True, slots=True)
class MeterState:
    """What must survive the agent so that no joule is lost. counter_j: how far the counter has been booked."""

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
    baseline: Baseline = field(default_factory=Baseline)


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
    done, marks = settle(state.marks, reading.slices)
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
        baseline=state.baseline.busy(),
    )
    # Another driver while nobody watched: how long it has run is unknown, so the gap stays a gap.
    if not started or (not continues and reading.serving_s is None):
        return after, None
    length_s = max(0.0, reading.monotonic_s - state.monotonic_s)
    moved = _moved(state, reading, continues, length_s)
    if moved is not None:
        resets = state.counter_resets + moved.reset
        after = replace(after, counter_j=moved.mark_j, counter_resets=resets)
    after = replace(after, seq=state.seq + 1)
    sample, parts = _sample(state, reading, done, moved, length_s)
    if _quiet(state, reading, moved, parts, length_s):
        learned = state.baseline.quiet(reading.clock_mhz, length_s, sample.counter_j, reading.baseline_w)
        after = replace(after, baseline=learned)
    sample = replace(sample, node=node, simulated=simulated, seq=after.seq, counter_resets=after.counter_resets)
    check_conservation(sample)
    return after, sample


def _moved(state: MeterState, reading: DeviceReading, continues: bool, length_s: float) -> Move | None:
    """How far the counter moved; None: nothing measures."""
    if reading.counter_j is None:
        return None
    most_j = reach_j(reading.power_max_w, length_s)
    return move(state.counter_j, reading.counter_j, continues, most_j)


def _sample(
    state: MeterState, reading: DeviceReading, done: Sequence[Done], moved: Move | None, length_s: float
) -> tuple[EnergySample, Split]:
    known = moved is not None and moved.joules is not None
    delta_j = moved.joules if moved is not None and moved.joules is not None else 0.0
    serving_s = _serving_s(state, reading, length_s)
    clock_mhz = (state.clock_mhz + reading.clock_mhz) / 2
    baseline_w = reading.baseline_w
    if reading.learn_baseline:
        baseline_w = state.baseline.watts(clock_mhz, baseline_w)
    idle_j = min(delta_j, baseline_w * serving_s)
    empty_j = min(delta_j - idle_j, baseline_w * (length_s - serving_s))
    parts = split(reading, done, length_s, delta_j - idle_j - empty_j)
    sole = parts.method == AttributionMethod.SOLE
    doubt = (UNCERTAINTY_SOLE if sole else UNCERTAINTY_SHARED) + reading.counter_doubt
    sample = EnergySample(
        device=state.device,
        starts_at_s=state.at_s,
        ends_at_s=max(reading.at_s, state.at_s),
        counter_j=delta_j,
        method=reading.method if known else EnergyMethod.NONE,
        attribution=parts.method,
        slices=slice_energies(reading.slices, done, parts.active_j),
        idle_j=idle_j,
        unallocated_j=empty_j + parts.unserved_j,
        state=reading.state,
        clock_mhz_mean=clock_mhz,
        uncertainty_ratio=min(1.0, doubt),
    )
    return sample, parts


def _serving_s(state: MeterState, reading: DeviceReading, length_s: float) -> float:
    if reading.serving_s is not None:
        return min(length_s, reading.serving_s)
    # Nobody watched: what served before and after is taken to have served in between.
    return length_s if state.serving and any(part.serving for part in reading.slices) else 0.0


def _quiet(state: MeterState, reading: DeviceReading, moved: Move | None, parts: Split, length_s: float) -> bool:
    """Whether this interval measured the power of a device that serves and has nothing to do."""
    return (
        reading.learn_baseline
        and moved is not None
        and moved.joules is not None
        and not moved.reset
        and parts.quiet
        and not reading.foreign
        and reading.serving_s is not None
        and reading.serving_s >= SERVED_THROUGHOUT * length_s > 0
        and all(part.serving and part.work for part in reading.slices)
        and state.clock_mhz == reading.clock_mhz
    )

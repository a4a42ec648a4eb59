"""Energy meter: splits a device's energy counter into active, idle and unallocated joules. CONTRACTS section 4.

Data: counter C [J], baseline power B [W], serving time s [s] of an interval of length t [s], and what its slices did.
The counter is NVML's, RAPL's, or an integral of power readings where there is none.
Formulation, per interval: dC = what the counter has moved (resets, wobbles and impossible steps below).
    idle        = min(dC, B s)                      at least one slice READY, SWAPPING or DRAINING.
    unallocated = min(dC - idle, B (t - s))         none of them; plus the parts of the rest that belong to no slice.
    rest        = dC - idle - unallocated           split by activity (`attribution`).
Warm-up and work on slices that do not serve yet weigh in as unallocated; so does a rest without any activity.
Deviation: none.

The counter: NVML's starts again when the driver or the GPU is reset, and on some machines wobbles by a fraction of a
joule. What cannot be is never booked: no negative step, and no step that the device cannot have drawn. A reset counter
says nothing of the time before the reset: its sample begins when a device of the baseline power began to draw what it
shows, and the time before that is a gap.

The baseline (CONTRACTS: the measured minimum at that clock) is learned from quiet intervals. In them every slice
served, no counter and no sensor showed any work, and the clock stood still. Their mean power over at least QUIET_S is a
measurement. One interval alone may hold a batch that Triton has not counted yet. The lowest measurement at each clock
stands. Until a clock has one, and where a measurement is absurd, the device type's idle power scaled to that clock
stands.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from power_agent.slices.core.attribution import (
    CounterMark,
    DeviceReading,
    Split,
    WorkDone,
    slice_energies,
    split_active,
    work_since,
)
from trefoil.core.accounting import check_conservation
from trefoil.core.energy import AttributionMethod, EnergyMethod, EnergySample

NOISE_J: Final = 1.0  # a smaller decrease is not a reset
STEP_FACTOR: Final = 3.0  # board limits are averages; a step beyond this times the limit is not a measurement
STEP_SLACK_S: Final = 1.0  # counters advance in lumps of up to 100 ms, power sensors average over 1 s
SENSOR_UNCERTAINTY: Final = 0.05  # NVML documents power readings as accurate to 5 %
STEP_S: Final = 0.5  # by which wall time and time that never jumps differ after a step of the wall clock
RECOVERED_MAX_S: Final = 600.0  # since the last published sample; a longer gap stays a gap
SEQ_AHEAD_MAX: Final = 10**9  # several samples a second for years
NUMBER_MAX: Final = 1e15  # of a state: joules of a thousand years, seconds since 1970
HOLE_S: Final = 1.0  # farther apart, two power readings say little about the time between

QUIET_S: Final = 5.0
PLAUSIBLE: Final = (0.2, 2.0)  # of the device type's: outside it something else was at work

UNCERTAINTY_SOLE: Final = 0.01  # one slice serves: only the baseline can be wrong
UNCERTAINTY_SHARED: Final = 0.05  # split by busy time: density differs by a few percent between variants
SERVED_THROUGHOUT: Final = 0.999


# --- counter ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CounterStep:
    """Energy between two readings of a counter.

    joules None: what was spent is unknown. mark_j: where the next step starts. reset: the counter began again.
    """

    joules: float | None
    mark_j: float
    reset: bool


def max_step_j(power_max_w: float, length_s: float) -> float:
    """Maximum energy that a device can have drawn [J]; unbounded when its power is not known."""
    return STEP_FACTOR * power_max_w * (length_s + STEP_SLACK_S) if power_max_w > 0 else math.inf


def counter_step(before_j: float | None, now_j: float, same_origin: bool, most_j: float) -> CounterStep:
    """Energy from one reading of a counter to the next.

    `same_origin` False: the driver was loaded again in between, under our eyes. A reset shows what was spent since; a
    wobble waits until the counter has passed its mark again, so that no joule counts twice. A driver whose marker
    changed although its counter went on is believed to have gone on.
    """
    if same_origin and before_j is None:
        return CounterStep(None, now_j, False)
    grown_j = now_j - before_j if before_j is not None else -math.inf
    if same_origin and 0 <= grown_j <= most_j:
        return CounterStep(grown_j, now_j, False)
    if same_origin and before_j is not None and -NOISE_J <= grown_j < 0:
        return CounterStep(0.0, before_j, False)
    if now_j <= most_j and not (same_origin and grown_j >= 0):
        return CounterStep(now_j, now_j, True)
    if 0 <= grown_j <= most_j:
        return CounterStep(grown_j, now_j, False)
    return CounterStep(None, now_j, True)


def counted_s(step: CounterStep, length_s: float, baseline_w: float) -> float:
    """How much of an interval a counter's step covers [s]: all of it, unless the counter was reset meanwhile."""
    if not step.reset or step.joules is None or baseline_w <= 0:
        return length_s
    return min(length_s, max(STEP_SLACK_S, step.joules / baseline_w))


class PowerIntegral:
    """Energy integral of power readings by trapezoids, for devices without a counter; starts at 0 with this object.

    The true power between two readings is unknown. Where it is monotonic, a trapezoid errs by at most half the
    rectangle between them. The stated uncertainty is the sum of these halves, of everything across holes, and of the
    sensor's own error.
    """

    def __init__(self) -> None:
        self.joules = 0.0
        self._at_s = self._power_w = math.nan
        self._uncertain_j = self._since_j = 0.0

    def add(self, at_s: float, power_w: float) -> None:
        """Add a power reading; monotonic time. What is not a power is as if it had not been read."""
        if not (math.isfinite(power_w) and power_w >= 0):
            return
        length_s = at_s - self._at_s
        if length_s <= 0:
            return
        if not math.isnan(length_s):
            step_j = (self._power_w + power_w) / 2 * length_s
            spread_j = abs(power_w - self._power_w) / 2 * length_s
            self.joules += step_j
            self._since_j += step_j
            self._uncertain_j += step_j if length_s > HOLE_S else spread_j
        self._at_s, self._power_w = at_s, power_w

    def take_uncertainty(self) -> float:
        """Relative error of what was added since the last call."""
        uncertainty = SENSOR_UNCERTAINTY + (self._uncertain_j / self._since_j if self._since_j > 0 else 0.0)
        self._uncertain_j = self._since_j = 0.0
        return min(1.0, uncertainty)


# --- baseline ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Baseline:
    """Baseline power that was learned [W by MHz], and the quiet stretch that is not long enough yet."""

    learned: tuple[tuple[int, float], ...] = ()
    quiet_s: float = 0.0
    quiet_j: float = 0.0
    clock_mhz: int = 0

    def watts_at(self, clock_mhz: float, fallback_w: float) -> float:
        """Baseline power at a clock [W]; between two clocks (it changed meanwhile) nothing was measured."""
        return next((watts for clock, watts in self.learned if clock == clock_mhz), fallback_w)

    def after_quiet(self, clock_mhz: int, length_s: float, joules: float, typical_w: float) -> "Baseline":
        """Baseline after an interval in which nothing was done."""
        known = clock_mhz == self.clock_mhz
        total_s = length_s + (self.quiet_s if known else 0.0)
        total_j = joules + (self.quiet_j if known else 0.0)
        if total_s < QUIET_S:
            return replace(self, quiet_s=total_s, quiet_j=total_j, clock_mhz=clock_mhz)
        return Baseline(_lowest(self.learned, clock_mhz, total_j / total_s, typical_w), clock_mhz=clock_mhz)

    def after_busy(self) -> "Baseline":
        """Baseline after any other interval."""
        return replace(self, quiet_s=0.0, quiet_j=0.0) if self.quiet_s else self


def _lowest(
    learned: Sequence[tuple[int, float]], clock_mhz: int, watts: float, typical_w: float
) -> tuple[tuple[int, float], ...]:
    if not PLAUSIBLE[0] * typical_w <= watts <= PLAUSIBLE[1] * typical_w:
        return tuple(learned)
    by_clock = dict(learned)
    by_clock[clock_mhz] = min(watts, by_clock.get(clock_mhz, watts))
    return tuple(sorted(by_clock.items()))


# --- meter ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeterState:
    """Meter state of a device; it survives the agent so that no joule is lost. counter_j: booked up to there."""

    device: str
    seq: int = 0
    at_s: float = 0.0
    monotonic_s: float = 0.0
    driver: str = ""
    counter_j: float | None = None
    counter_resets: int = 0
    serving: bool = False
    clock_mhz: int = 0
    marks: tuple[CounterMark, ...] = ()
    recovered: bool = False  # from the last sample that was published: what slices did since is not known
    baseline: Baseline = field(default_factory=Baseline)


def is_possible(state: MeterState, device: str, origin: str, now_s: float, monotonic_s: float) -> bool:
    """Whether a state can be what an agent of this device has left on its disk."""
    quiet, learned = (state.baseline.quiet_s, state.baseline.quiet_j), (watts for _, watts in state.baseline.learned)
    numbers = (state.at_s, state.monotonic_s, state.counter_j or 0.0, *quiet, *learned)
    counts = (state.seq, state.counter_resets, state.clock_mhz)
    return (
        state.device == device
        and all(0.0 <= number <= NUMBER_MAX for number in numbers)
        and all(0 <= count <= int(now_s) + SEQ_AHEAD_MAX for count in counts)
        and (state.driver != origin or state.monotonic_s <= monotonic_s)
    )


def recover(known: MeterState | None, sample: EnergySample, now_s: float, monotonic_s: float) -> MeterState | None:
    """State after the last sample that was published of a device, where the log (`known`) lacks it; else None.

    It continues from the published counter, so that no joule counts twice. A sample without an origin, or too old to
    say what the device did since, only keeps `seq` from coming twice. None also if no agent of this device can have
    counted to its `seq`.
    """
    seq = known.seq if known is not None else 0
    if not seq < sample.seq <= max(seq, int(now_s)) + SEQ_AHEAD_MAX:
        return None
    since_s = now_s - sample.ends_at_s
    if not sample.origin or not 0.0 <= since_s <= RECOVERED_MAX_S:
        return MeterState(sample.device, seq=sample.seq)
    return MeterState(
        sample.device,
        seq=sample.seq,
        at_s=sample.ends_at_s,
        monotonic_s=monotonic_s - since_s,
        driver=sample.origin,
        counter_j=sample.mark_j,
        counter_resets=sample.counter_resets,
        serving=sample.idle_j > 0 or bool(sample.slices),
        clock_mhz=round(sample.clock_mhz_mean),
        recovered=True,
        baseline=known.baseline if known is not None else Baseline(),
    )


def advance(
    state: MeterState, reading: DeviceReading, node: str, simulated: bool
) -> tuple[MeterState, EnergySample | None]:
    """Meter the time since the last reading: the new state and an EnergySample; None where there is none to continue.

    Raises:
        AssertionError: readings of two devices, or time going back: a bug in the shell.
    """
    assert state.device == reading.device, (state.device, reading.device)
    started = state.monotonic_s > 0
    continues = started and state.driver == reading.driver
    assert not continues or reading.monotonic_s >= state.monotonic_s, "time went back"
    if continues and reading.monotonic_s == state.monotonic_s:
        return state, None
    done, marks = work_since(state.marks, reading.slices)
    after = replace(
        state,
        at_s=reading.at_s,
        monotonic_s=reading.monotonic_s,
        driver=reading.driver,
        counter_j=reading.counter_j,
        serving=any(part.serving for part in reading.slices),
        clock_mhz=reading.clock_mhz,
        marks=marks,
        recovered=False,
        baseline=state.baseline.after_busy(),
    )
    # Another driver, unseen: how long it has run is unknown, so the gap stays a gap.
    if not started or (not continues and reading.serving_s is None):
        return after, None
    length_s = max(0.0, reading.monotonic_s - state.monotonic_s)
    moved = None  # nothing measures
    if reading.counter_j is not None:
        most_j = max_step_j(reading.power_max_w, length_s)
        moved = counter_step(state.counter_j, reading.counter_j, continues, most_j)
        resets = state.counter_resets + moved.reset
        after = replace(after, counter_j=moved.mark_j, counter_resets=resets)
        length_s = counted_s(moved, length_s, reading.baseline_w)
    after = replace(after, seq=state.seq + 1)
    sample, parts = _sample(state, reading, done, moved, length_s)
    if _is_quiet(state, reading, moved, parts, length_s):
        learned = state.baseline.after_quiet(reading.clock_mhz, length_s, sample.counter_j, reading.baseline_w)
        after = replace(after, baseline=learned)
    sample = replace(sample, node=node, simulated=simulated, seq=after.seq, counter_resets=after.counter_resets)
    if after.counter_j is not None:
        sample = replace(sample, mark_j=after.counter_j, origin=reading.driver)
    check_conservation(sample)
    return after, sample


def _sample(
    state: MeterState, reading: DeviceReading, done: Sequence[WorkDone], moved: CounterStep | None, length_s: float
) -> tuple[EnergySample, Split]:
    known = moved is not None and moved.joules is not None
    delta_j = moved.joules if moved is not None and moved.joules is not None else 0.0
    serving_s = _serving_s(state, reading, length_s)
    clock_mhz = (state.clock_mhz + reading.clock_mhz) / 2
    baseline_w = reading.baseline_w
    if reading.learn_baseline:
        baseline_w = state.baseline.watts_at(clock_mhz, baseline_w)
    idle_j = min(delta_j, baseline_w * serving_s)
    empty_j = min(delta_j - idle_j, baseline_w * (length_s - serving_s))
    parts = split_active(reading, done, length_s, delta_j - idle_j - empty_j)
    reset = moved is not None and moved.reset  # work of before it is in the split, its joules are not
    unseen = any(part.work and not own for part, own in zip(reading.slices, done, strict=True))
    sole = parts.method == AttributionMethod.SOLE
    uncertainty = (UNCERTAINTY_SOLE if sole else UNCERTAINTY_SHARED) + reading.counter_uncertainty
    sample = EnergySample(
        device=state.device,
        starts_at_s=_starts_at_s(state, reading, length_s),
        ends_at_s=reading.at_s,
        counter_j=delta_j,
        method=reading.method if known else EnergyMethod.NONE,
        attribution=parts.method,
        slices=slice_energies(reading.slices, done, parts.active_j),
        idle_j=idle_j,
        unallocated_j=empty_j + parts.unserved_j,
        state=reading.state,
        clock_mhz_mean=clock_mhz,
        uncertainty_ratio=1.0 if state.recovered or reset or unseen else min(1.0, uncertainty),
    )
    return sample, parts


def _starts_at_s(state: MeterState, reading: DeviceReading, length_s: float) -> float:
    """When the last reading was, by the clock of this one: a predecessor may have run on another calendar."""
    counted_s = reading.at_s - length_s
    if state.at_s <= reading.at_s and (not length_s or abs(counted_s - state.at_s) < STEP_S):
        return state.at_s
    return counted_s


def _serving_s(state: MeterState, reading: DeviceReading, length_s: float) -> float:
    if reading.serving_s is not None:
        return min(length_s, reading.serving_s)
    # Unseen: slices that served before and after are taken to have served in between.
    return length_s if state.serving and any(part.serving for part in reading.slices) else 0.0


def _is_quiet(
    state: MeterState, reading: DeviceReading, moved: CounterStep | None, parts: Split, length_s: float
) -> bool:
    """Whether this interval measured the power of a device that serves and has nothing to do."""
    return (
        reading.learn_baseline
        and not state.recovered
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

"""Slices that behave unlike the others without being proven dead: silent, late, failing. And how they come back.

Source: Envoy's outlier detection (consecutive errors, growing ejection times, panic), llm-d's half-open exploration,
    TCP's slow start for the ramp.
Data: ends of requests by slice; how many requests each slice has, and when it last ended one; which slices serve whom.
Decision: which slices to ask whether they are alive, which to eject, how much one that came back may get.
Formulation:
    Silence: a slice that has requests and ended none for `quiet_s` is asked. Time is counted in ticks of the caller, a
        tick as TICK_MAX_S at most: a dispatcher that was stopped itself accuses nobody.
    Streaks: `limit` consecutive late or failed requests make an outlier; one good answer clears them.
    Panic: of each family that a slice serves, at most half of the slices (rounded down) may be out as outliers. When
        all misbehave, it is the load or the clients, and half of a fleet that limps answers more than none.
    Slow start: a slice that comes back gets 1 request at a time, and twice as many after each run of as many good
        answers.
Deviations: proofs of death (connection refused or reset, a dead stub) are not outliers: they eject at once and without
    a bound, for nothing sent there can be answered, and requests wait in the queue instead of failing.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from dispatcher.slice_health.core.service_times import ServiceTimes
from trefoil.core.fleet import SliceKey

TICK_MAX_S: Final = 0.25


class SilenceDetector:
    """Detector of slices that have gone quiet over their work. `tick` is called about ten times a second."""

    def __init__(self, quiet_s: float) -> None:
        self._patience_s = quiet_s
        self._quiet_s: dict[SliceKey, float] = {}
        self._ask_at_s: dict[SliceKey, float] = {}  # how quiet it must be to be asked, again after each answer
        self._answer_counts: dict[SliceKey, int] = {}
        self._at_s: float | None = None

    def tick(self, in_flight: Mapping[SliceKey, int], answered: Mapping[SliceKey, int], now_s: float) -> list[SliceKey]:
        """Slices to ask whether they are alive. `answered` counts what each slice has answered so far."""
        passed_s = min(TICK_MAX_S, now_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = now_s
        known, quiet = self._quiet_s, {}
        for slice_ in in_flight:
            same = slice_ in known and self._answer_counts[slice_] == answered.get(slice_, 0)
            quiet[slice_] = known[slice_] + passed_s if same else 0.0
        self._quiet_s = quiet
        self._answer_counts = {slice_: answered.get(slice_, 0) for slice_ in in_flight}
        self._ask_at_s = {slice_: at for slice_, at in self._ask_at_s.items() if quiet.get(slice_)}
        return [slice_ for slice_, for_s in quiet.items() if for_s >= self._ask_at_s.get(slice_, self._patience_s)]

    def on_alive(self, slice_: SliceKey) -> None:
        """Note that a slice said that it is alive: it may be quiet for as long again."""
        self._ask_at_s[slice_] = self.quiet_s(slice_) + self._patience_s

    def quiet_s(self, slice_: SliceKey) -> float:
        """Time for which a slice has had requests and answered none [s]."""
        return self._quiet_s.get(slice_, 0.0)


class FailureStreaks:
    """Counts of consecutive failures of one kind, by slice."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[SliceKey, int] = {}

    def count_failure(self, slice_: SliceKey, fragile: bool) -> int:
        """Count a failure; returns the count when it makes an outlier, else 0. `fragile`: a slice in its slow start,
        where one is enough."""
        count = self._counts[slice_] = self._counts.get(slice_, 0) + 1
        return count if fragile or count >= self._limit else 0

    def reset(self, slice_: SliceKey) -> None:
        """Note a good answer: it ends the streak."""
        if self._counts:
            self._counts.pop(slice_, None)

    def forget(self, slice_: SliceKey) -> None:
        """Forget the streak of an ejected slice: it comes back with a clean record."""
        self._counts.pop(slice_, None)


class SlowStart:
    """Limits of the slices that came back, which grow with their answers."""

    def __init__(self) -> None:
        self._allowances: dict[SliceKey, _Allowance] = {}

    def __contains__(self, slice_: SliceKey) -> bool:
        return slice_ in self._allowances

    def start(self, slice_: SliceKey, credits: int) -> None:
        """Begin the slow start of a slice that would have so many credits in full."""
        if credits > 1:
            self._allowances[slice_] = _Allowance(credits)

    def count_success(self, slice_: SliceKey) -> bool:
        """Count a good answer; True when the slice's limit changed."""
        if not self._allowances or (ramp := self._allowances.get(slice_)) is None:
            return False
        ramp.successes += 1
        if ramp.successes < ramp.allowed:
            return False
        ramp.allowed, ramp.successes = 2 * ramp.allowed, 0
        if ramp.allowed >= ramp.full:
            del self._allowances[slice_]
        return True

    def drop(self, slice_: SliceKey) -> None:
        """End the slow start of a slice that is out again."""
        self._allowances.pop(slice_, None)

    def limits(self) -> Mapping[SliceKey, int]:
        """Most requests that each slice in its slow start may get: what `build_table` takes."""
        return {slice_: ramp.allowed for slice_, ramp in self._allowances.items()}


@dataclass(slots=True)
class _Allowance:
    full: int
    allowed: int = 1
    successes: int = 0


def panicking_family(slice_: SliceKey, serving: Mapping[str, Collection[SliceKey]], out: Collection[SliceKey]) -> str:
    """Family of which too many slices would be out if this one went too, "" = it may go.

    `serving` gives the slices of each family that are live or would be if they were not out; `out` are the outliers.
    """
    for family, slices in serving.items():
        if slice_ in slices:
            gone = sum(each in out for each in slices if each != slice_)
            if 2 * (gone + 1) > len(slices):
                return family
    return ""


LAGGED_S: Final = 1.0  # for so long after this process was held up, deadlines that pass accuse nobody
LATE_FACTOR: Final = 2.0  # of its predicted time: a deadline that no slice could meet accuses none
FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


class SliceEvidence:
    """Evidence of each slice's health from its requests: silence, streaks, slow start, service times. Belongs to one
    worker; times are the caller's monotonic clock."""

    def __init__(self, quiet_s: float, late_strikes: int, fault_strikes: int) -> None:
        self.answer_counts: defaultdict[SliceKey, int] = defaultdict(int)
        """How often each slice has answered, with whatever status of its own."""
        self.silence = SilenceDetector(quiet_s)
        self.slow_start = SlowStart()
        self.times = ServiceTimes()
        self._late = FailureStreaks(late_strikes)
        self._faults = FailureStreaks(fault_strikes)
        self._lagged_at_s = float("-inf")

    def on_answer(self, slice_: SliceKey, variant: str, items: int, service_s: float | None, now_s: float) -> bool:
        """Count an answer; in a time that says nothing of others, if `service_s` is None. True when the slice may now
        get more than before."""
        self.answer_counts[slice_] += 1
        if service_s is not None:
            self.times.record(slice_, variant, items, service_s, now_s)
        self._late.reset(slice_)
        self._faults.reset(slice_)
        return self.slow_start.count_success(slice_)

    def on_status(self, slice_: SliceKey, code: str) -> str:
        """Count a status of the slice's own that came back; returns why that makes it an outlier, "" = it does not."""
        self.answer_counts[slice_] += 1
        self._late.reset(slice_)
        if code not in FAULTS:
            return ""
        count = self._faults.count_failure(slice_, slice_ in self.slow_start)
        return f"{count} requests in a row ended {code}" if count else ""

    def on_deadline(
        self, slice_: SliceKey, variant: str, items: int, waited_s: float, now_s: float, usual: bool = True
    ) -> str:
        """Count a deadline that passed while the slice had the request, which says how long others take if it is
        `usual`; returns why that makes it an outlier, "" = it does not."""
        if now_s - self._lagged_at_s < LAGGED_S:
            return ""
        if usual:
            self.times.record_late(slice_, variant, items, waited_s, now_s)
        usual_s = self.times.usual_s(slice_, variant, items) or self.times.longest_s(slice_)
        if not usual_s or waited_s < LATE_FACTOR * usual_s:
            return ""
        count = self._late.count_failure(slice_, slice_ in self.slow_start)
        took = f"the last after {waited_s * 1e3:.0f} ms, {usual_s * 1e3:.0f} ms are usual"
        return f"{count} deadlines in a row passed there, {took}" if count else ""

    def on_stall(self, now_s: float) -> None:
        """Note that this process was held up: answers that were there in time were read too late."""
        self._lagged_at_s = now_s

    def on_ejected(self, slice_: SliceKey, dead: bool) -> None:
        """Reset the record of an ejected slice. `dead`: whatever comes back is another server."""
        self._late.forget(slice_)
        self._faults.forget(slice_)
        self.slow_start.drop(slice_)
        if dead:
            self.times.forget(slice_)

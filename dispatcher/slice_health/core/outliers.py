"""Slices that behave unlike the others without being proven dead: silent, late, failing. And how they come back.

Source: Envoy's outlier detection (consecutive errors, growing ejection times, panic), llm-d's half-open exploration,
    TCP's slow start for the ramp.
Data: ends of requests by place (a slice and a model on it); how many requests each place has, and when it last ended
    one. Also which slices serve which families.
Decision: which places to ask whether they are alive, which to suspect, how much one that came back may get.
Formulation:
    Silence: a place that has requests and ended none for `quiet_s` is asked. Time is counted in ticks of the caller, a
        tick as TICK_MAX_S at most: a dispatcher that was stopped itself suspects no slice.
    Streaks: `limit` consecutive late or failed requests make a suspicion; one good answer clears them.
    Panic: of each family that a slice serves, at most half of the slices (rounded down) may be out as outliers. When
        all misbehave, it is the load or the clients, and half of a fleet that limps answers more than none.
    Slow start: a slice that comes back gets 1 request at a time, and twice as many after each run of as many good
        answers.
Deviations: no streak ejects anything; a probe that fails does (suspicion.py). Proofs of death (connection refused or
    reset, a dead stub) are not outliers: they eject without a bound, for nothing sent there can be answered, and
    requests wait in the queue instead of failing.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from dispatcher.slice_health.core.ejection import Failure, Place
from dispatcher.slice_health.core.service_times import ServiceTimes
from dispatcher.slice_health.core.suspicion import DOUBTFUL, FAULTS, Suspicions, is_overload
from trefoil.core.fleet import SliceKey

TICK_MAX_S: Final = 0.25


class SilenceDetector:
    """Detector of places that have gone quiet over their work. `tick` is called about ten times a second."""

    def __init__(self, quiet_s: float) -> None:
        self._patience_s = quiet_s
        self._quiet_s: dict[Place, float] = {}
        self._ask_at_s: dict[Place, float] = {}  # how quiet it must be to be asked, again after each answer
        self._answer_counts: dict[Place, int] = {}
        self._at_s: float | None = None

    def tick(self, in_flight: Mapping[Place, int], answered: Mapping[Place, int], now_s: float) -> list[Place]:
        """Places to ask whether they are alive. `answered` counts what each place has answered so far."""
        passed_s = min(TICK_MAX_S, now_s - self._at_s) if self._at_s is not None else 0.0
        self._at_s = now_s
        known, quiet = self._quiet_s, {}
        for place in in_flight:
            same = place in known and self._answer_counts[place] == answered.get(place, 0)
            quiet[place] = known[place] + passed_s if same else 0.0
        self._quiet_s = quiet
        self._answer_counts = {place: answered.get(place, 0) for place in in_flight}
        self._ask_at_s = {place: at for place, at in self._ask_at_s.items() if quiet.get(place)}
        return [place for place, for_s in quiet.items() if for_s >= self._ask_at_s.get(place, self._patience_s)]

    def on_alive(self, place: Place) -> None:
        """Note that a place said that it is alive: it may be quiet for as long again."""
        self._ask_at_s[place] = self.quiet_s(place) + self._patience_s

    def quiet_s(self, place: Place) -> float:
        """Time for which a place has had requests and answered none [s]."""
        return self._quiet_s.get(place, 0.0)


class FailureStreaks:
    """Counts of consecutive failures of one kind, by place."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._counts: dict[Place, int] = {}

    def count_failure(self, place: Place, fragile: bool) -> int:
        """Count a failure; returns the count when it makes a suspicion, else 0. `fragile`: a place in its slow start,
        where one is enough."""
        count = self._counts[place] = self._counts.get(place, 0) + 1
        return count if fragile or count >= self._limit else 0

    def reset(self, place: Place) -> None:
        """End the streak of a place that answered well, or was ejected: it comes back with a clean record."""
        if self._counts:  # each good answer comes here: without a streak no place is hashed
            self._counts.pop(place, None)


class SlowStart:
    """Limits of the places that came back, which grow with their answers."""

    def __init__(self) -> None:
        self._allowances: dict[Place, _Allowance] = {}

    def __contains__(self, place: Place) -> bool:
        return place in self._allowances

    def start(self, place: Place, credits: int) -> None:
        """Begin the slow start of a place that would have so many credits in full."""
        if credits > 1:
            self._allowances[place] = _Allowance(credits)

    def count_success(self, place: Place) -> bool:
        """Count a good answer; True when its limit changed."""
        if not self._allowances or (ramp := self._allowances.get(place)) is None:
            return False
        ramp.successes += 1
        if ramp.successes < ramp.allowed:
            return False
        ramp.allowed, ramp.successes = 2 * ramp.allowed, 0
        if ramp.allowed >= ramp.full:
            del self._allowances[place]
        return True

    def drop(self, place: Place) -> None:
        """End the slow start of a place that is out again."""
        self._allowances.pop(place, None)

    def limits(self) -> Mapping[Place, int]:
        """Most requests that each place in its slow start may get: what `build_table` takes."""
        return {place: ramp.allowed for place, ramp in self._allowances.items()}


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


LAGGED_S: Final = 1.0  # for so long after this process was held up, missed deadlines count against no slice
LATE_FACTOR: Final = 2.0  # of its predicted time: a deadline that no slice could meet accuses none


class SliceEvidence:
    """Evidence of each place's health from its requests: silence, streaks, suspicions, slow start, service times.
    Belongs to one worker; times are the caller's monotonic clock."""

    def __init__(self, quiet_s: float, late_strikes: int, fault_strikes: int) -> None:
        self.answer_counts: defaultdict[Place, int] = defaultdict(int)
        """How often each place has answered, with whatever status."""
        self.silence = SilenceDetector(quiet_s)
        self.suspicions = Suspicions()
        self.slow_start = SlowStart()
        self.times = ServiceTimes()
        self._late = FailureStreaks(late_strikes)
        self._faults = FailureStreaks(fault_strikes)
        self._lagged_at_s = float("-inf")

    def answers_of(self, slice_: SliceKey) -> int:
        """How often a slice has answered, whichever of its models."""
        return sum(count for place, count in self.answer_counts.items() if place[0] == slice_)

    def on_answer(self, place: Place, variant: str, items: int, service_s: float | None, now_s: float) -> bool:
        """Count an answer; in a time that says nothing of others, if `service_s` is None. True when the place may now
        get more than before."""
        self.answer_counts[place] += 1
        if service_s is not None:
            self.times.record(place[0], variant, items, service_s, now_s)
        else:
            self.times.end_first(place[0], variant, items, now_s)
        self._late.reset(place)
        self._faults.reset(place)
        if self.suspicions:
            self.suspicions.on_good_answer(place)
        return self.slow_start.count_success(place)

    def on_status(self, place: Place, code: str, details: str) -> None:
        """Count a status that a place answered with; what a slice in trouble may say raises a suspicion."""
        self.answer_counts[place] += 1
        self._late.reset(place)
        if code not in DOUBTFUL or is_overload(details):
            return
        count = self._faults.count_failure(place, place in self.slow_start) if code in FAULTS else 0
        if count:
            self.suspicions.suspect(place, Failure.SICK, f"{count} requests in a row ended {code}")
        else:
            self.suspicions.suspect(place, None, f"it answered {code}")

    def on_deadline(
        self, place: Place, variant: str, items: int, waited_s: float, now_s: float, usual: bool = True
    ) -> None:
        """Count a deadline that passed while the place had the request. A `usual` one shows how long others take.
        Several in a row that others would have met raise a suspicion. First calls do not count."""
        if now_s - self._lagged_at_s < LAGGED_S:
            return
        slice_ = place[0]
        if self.times.is_first(slice_, variant, items, waited_s, now_s):
            return
        if usual:
            self.times.record_late(slice_, variant, items, waited_s, now_s)
        usual_s = self.times.usual_s(slice_, variant, items) or self.times.longest_s(slice_)
        if not usual_s or waited_s < LATE_FACTOR * usual_s:
            return
        if count := self._late.count_failure(place, place in self.slow_start):
            took = f"the last after {waited_s * 1e3:.0f} ms, {usual_s * 1e3:.0f} ms are usual"
            self.suspicions.suspect(place, Failure.LATE, f"{count} deadlines in a row passed there, {took}")

    def on_stall(self, now_s: float) -> None:
        """Note that this process was held up: answers that were there in time were read too late."""
        self._lagged_at_s = now_s

    def on_ejected(self, place: Place, dead: bool) -> None:
        """Reset the record of an ejected place. `dead`: whatever comes back is another server."""
        self._late.reset(place)
        self._faults.reset(place)
        self.suspicions.forget(place)
        self.slow_start.drop(place)
        if dead:
            self.times.forget(place[0])

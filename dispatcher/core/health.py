"""What is known of each slice's health from the requests that it answers, or does not: one record for a worker.

Source, data, formulation: see ejection.py (proofs of death), outliers.py (silence, strikes, panic, ramp) and
    service_times.py (predictions), which this joins.
Decision: which slice is an outlier now, and why.
"""

from collections import defaultdict
from typing import Final

from dispatcher.core.outliers import Ramps, Silence, Strikes
from dispatcher.core.service_times import ServiceTimes
from trefoil.core.fleet import SliceKey

LAGGED_S: Final = 1.0  # for so long after this process was held up, deadlines that pass accuse nobody
LATE_FACTOR: Final = 2.0  # of its predicted time: a deadline that no slice could meet accuses none
FAULTS: Final = frozenset({"INTERNAL", "UNKNOWN", "DATA_LOSS"})


class Health:
    """Belongs to one worker. Times are the caller's monotonic clock."""

    def __init__(self, quiet_s: float, late_strikes: int, fault_strikes: int) -> None:
        self.heard: defaultdict[SliceKey, int] = defaultdict(int)
        """How often each slice has answered, with whatever status of its own."""
        self.silence = Silence(quiet_s)
        self.ramps = Ramps()
        self.times = ServiceTimes()
        self._late = Strikes(late_strikes)
        self._faults = Strikes(fault_strikes)
        self._lagged_at_s = float("-inf")

    def answered(self, slice_: SliceKey, variant: str, items: int, service_s: float | None, now_s: float) -> bool:
        """A request was answered; in a time that says nothing of others, if `service_s` is None. True when the slice
        may now get more than before."""
        self.heard[slice_] += 1
        if service_s is not None:
            self.times.seen(slice_, variant, items, service_s, now_s)
        self._late.good(slice_)
        self._faults.good(slice_)
        return self.ramps.good(slice_)

    def status(self, slice_: SliceKey, code: str) -> str:
        """A request came back with a status of the slice's own; why that makes it an outlier, "" = it does not."""
        self.heard[slice_] += 1
        self._late.good(slice_)
        if code not in FAULTS:
            return ""
        count = self._faults.bad(slice_, slice_ in self.ramps)
        return f"{count} requests in a row ended {code}" if count else ""

    def late(self, slice_: SliceKey, variant: str, items: int, waited_s: float, now_s: float) -> str:
        """A deadline passed while the slice had the request; why that makes it an outlier, "" = it does not."""
        predicted_s = self.times.predicted_s(slice_, variant, items, now_s)
        usual_s = predicted_s or self.times.longest_s(slice_)
        lagging = now_s - self._lagged_at_s < LAGGED_S
        if lagging or not usual_s or waited_s < LATE_FACTOR * usual_s:
            return ""
        count = self._late.bad(slice_, slice_ in self.ramps)
        took = f"the last after {waited_s * 1e3:.0f} ms, {usual_s * 1e3:.0f} ms are usual"
        return f"{count} deadlines in a row passed there, {took}" if count else ""

    def lagged(self, now_s: float) -> None:
        """This process was held up: answers that were there in time were read too late."""
        self._lagged_at_s = now_s

    def left(self, slice_: SliceKey, dead: bool) -> None:
        """It was ejected: it has a clean record when it comes back. `dead`: whatever comes back is another server."""
        self._late.forget(slice_)
        self._faults.forget(slice_)
        self.ramps.drop(slice_)
        if dead:
            self.times.forget(slice_)

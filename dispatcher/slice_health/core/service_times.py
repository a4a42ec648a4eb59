"""How long a slice takes for one request, learned from its answers; and whether a deadline can still be met there.

Source: facts of the field: Finagle's and llm-d's deadline drops; the estimate is smoothed as TCP's is (RFC 6298).
Data: dispatch-to-answer times of answered requests, per slice, variant and size of the request (powers of two items),
    without first calls, which may load or compile: the first, and all that were sent before it was answered. Of a
    request whose deadline passed while the slice had it, only that it takes longer is known. A first call that is not
    answered within FIRST_CALL_S is taken for any other.
Decision: a request that others wait behind may be dropped before dispatch. It is dropped when less time is left than
    the slice is predicted to take for a quick one.
Formulation: quick = the LOW quantile of the last RECENT times; predicted <- predicted + ALPHA (quick - predicted); a
    deadline that passed there no sooner than predicted: predicted <- LENGTHEN predicted, at most LONGEST times the
    median of the last times. A prediction ages: it halves every HALF_LIFE_S without either, and once it is older than
    itself, a drop takes it to SHRINK of it. Nothing known predicts 0: nothing is ever dropped on a guess.
Deviations: not a mean, because requests of one size may be unlike: short ones would be dropped for the long ones among
    them. Without the ageing a slice that was slow once would have all its requests dropped and never show that it is
    well again. Without the deadlines that passed, only quick answers would be seen. In every overload that lasts, the
    head of a queue has hardly any time left. Then no request would be given a slice in time to be answered.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from trefoil.core.demand import FIRST_CALL_S
from trefoil.core.fleet import SliceKey

ALPHA: Final = 0.1
LOW: Final = 0.1
RECENT: Final = 32
HALF_LIFE_S: Final = 10.0
SHRINK: Final = 0.95
LENGTHEN: Final = 1.5
LONGEST: Final = 2.0
SIZES: Final = 16  # 2**15 items and more are one size


@dataclass(slots=True)
class _Times:
    at_s: float  # of the last answer, or deadline that passed
    predicted_s: float = 0.0  # drops take from it, deadlines that passed add to it; 0.0 = nothing is predicted
    mean_s: float = 0.0  # of the answers alone; 0.0 = there were none
    recent_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    first_sent_s: float | None = None  # None once it is answered
    first_ended_s: float = -math.inf

    def is_first(self, now_s: float) -> bool:
        """Whether the first call is under way."""
        return self.first_sent_s is not None and now_s - self.first_sent_s < FIRST_CALL_S

    def quantile_s(self, quantile: float) -> float:
        return sorted(self.recent_s)[int(quantile * len(self.recent_s))]


class ServiceTimes:
    """Service times of one worker. Times are the caller's monotonic clock, predictions seconds."""

    def __init__(self) -> None:
        self._known: dict[tuple[SliceKey, str], list[_Times | None]] = {}

    def record_sent(self, slice_: SliceKey, variant: str, items: int, now_s: float) -> None:
        """Record that a slice gets a request: whether it is the first of its kind."""
        if self._times(slice_, variant, items) is None:
            self._begin(slice_, variant, items, _Times(now_s, first_sent_s=now_s))

    def end_first(self, slice_: SliceKey, variant: str, items: int, now_s: float) -> bool:
        """End the first call of a kind; False: it had been answered before."""
        times = self._times(slice_, variant, items)
        if times is not None and times.first_sent_s is not None:
            times.first_sent_s, times.first_ended_s = None, now_s
            return True
        return False

    def is_first(self, slice_: SliceKey, variant: str, items: int, waited_s: float, now_s: float) -> bool:
        """Whether a request that has waited for so long is a first call, or was sent before one was answered."""
        times = self._times(slice_, variant, items)
        return times is not None and (times.is_first(now_s) or now_s - waited_s < times.first_ended_s)

    def has_first(self, slice_: SliceKey, now_s: float) -> bool:
        """Whether a first call of any kind is under way on a slice."""
        kinds = (each for (of, _), sizes in self._known.items() if of == slice_ for each in sizes)
        return any(each is not None and each.is_first(now_s) for each in kinds)

    def record(self, slice_: SliceKey, variant: str, items: int, service_s: float, now_s: float) -> None:
        """Record the service time of an answer; first calls are left out."""
        times = self._times(slice_, variant, items)
        if times is None:
            self._begin(slice_, variant, items, _Times(now_s))
            return
        if self.end_first(slice_, variant, items, now_s) or now_s - service_s < times.first_ended_s:
            return
        times.recent_s.append(service_s)
        quick_s = times.quantile_s(LOW)
        times.predicted_s += (ALPHA if times.predicted_s else 1.0) * (quick_s - times.predicted_s)
        times.mean_s += (ALPHA if times.mean_s else 1.0) * (service_s - times.mean_s)
        times.at_s = now_s

    def record_late(self, slice_: SliceKey, variant: str, items: int, waited_s: float, now_s: float) -> None:
        """Record that a deadline passed while the slice had a request for so long; no first call."""
        times = self._times(slice_, variant, items)
        if times is None:
            self._begin(slice_, variant, items, _Times(now_s, waited_s))
            return
        if waited_s >= times.predicted_s:
            longer_s = LENGTHEN * times.predicted_s or waited_s
            bound_s = LONGEST * times.quantile_s(0.5) if times.recent_s else longer_s
            times.predicted_s = max(times.predicted_s, min(longer_s, bound_s))
        times.at_s = now_s

    def predicted_s(self, slice_: SliceKey, variant: str, items: int, now_s: float) -> float:
        """Time from dispatch to answer of a quick request, 0.0 = not known."""
        times = self._times(slice_, variant, items)
        return times.predicted_s * 0.5 ** (max(0.0, now_s - times.at_s) / HALF_LIFE_S) if times is not None else 0.0

    def usual_s(self, slice_: SliceKey, variant: str, items: int) -> float:
        """Usual time from dispatch to answer, whatever was dropped; 0.0 = not known."""
        times = self._times(slice_, variant, items)
        return times.mean_s if times is not None else 0.0

    def longest_s(self, slice_: SliceKey) -> float:
        """The longest usual time known of a slice, of any variant and size; else of any slice; 0.0 = none is."""
        known = [(key[0], each.mean_s) for key, sizes in self._known.items() for each in sizes if each and each.mean_s]
        return max([s for of, s in known if of == slice_] or [s for _, s in known], default=0.0)

    def record_drop(self, slice_: SliceKey, variant: str, items: int, now_s: float) -> None:
        """Record that a request was dropped for its prediction."""
        times = self._times(slice_, variant, items)
        if times is not None and now_s - times.at_s > times.predicted_s:
            times.predicted_s *= SHRINK

    def forget(self, slice_: SliceKey) -> None:
        """Another server answers there from now on."""
        for key in [key for key in self._known if key[0] == slice_]:
            del self._known[key]

    def _begin(self, slice_: SliceKey, variant: str, items: int, first: _Times) -> None:
        sizes = self._known.setdefault((slice_, variant), [None] * SIZES)
        sizes[min(items.bit_length(), SIZES - 1)] = first

    def _times(self, slice_: SliceKey, variant: str, items: int) -> _Times | None:
        sizes = self._known.get((slice_, variant))
        return sizes[min(items.bit_length(), SIZES - 1)] if sizes is not None else None

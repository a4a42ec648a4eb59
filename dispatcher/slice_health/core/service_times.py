"""How long a slice takes for one request, learned from its answers; and whether a deadline can still be met there.

Source: facts of the field: Finagle's and llm-d's deadline drops; the estimate is TCP's smoothed mean (RFC 6298).
Data: dispatch-to-answer times of answered requests, per slice, variant and size of the request (powers of two items).
    Of a request whose deadline passed while the slice had it, only that it takes longer is known.
Decision: a request is dropped before dispatch when less time is left than the slice is predicted to take.
Formulation: mean <- mean + ALPHA (seen - mean); a deadline that passed there no sooner than predicted: mean <- LENGTHEN
    mean. A prediction ages: it halves every HALF_LIFE_S without either, and once it is older than itself, a drop takes
    it to SHRINK of it. Nothing known predicts 0: nothing is ever dropped on a guess.
Deviations: without the ageing a slice that was slow once would have all its requests dropped and never show that it is
    well again. Without the deadlines that passed only quick answers would be seen, and in a queue whose head has hardly
    any time left, as in every overload that lasts, no request would be given a slice in time to be answered.
"""

from dataclasses import dataclass
from typing import Final

from trefoil.core.fleet import SliceKey

ALPHA: Final = 0.1
HALF_LIFE_S: Final = 10.0
SHRINK: Final = 0.95
LENGTHEN: Final = 1.2
SIZES: Final = 16  # 2**15 items and more are one size


@dataclass(slots=True)
class _Mean:
    seconds: float  # what is predicted: drops take from it, deadlines that passed add to it
    at_s: float  # of the last answer, or deadline that passed
    answers_s: float  # of the answers alone; 0.0 = there were none


class ServiceTimes:
    """Service times of one worker. Times are the caller's monotonic clock, predictions seconds."""

    def __init__(self) -> None:
        self._means: dict[tuple[SliceKey, str], list[_Mean | None]] = {}

    def record(self, slice_: SliceKey, variant: str, items: int, service_s: float, now_s: float) -> None:
        """Record the service time of an answer."""
        mean = self._mean(slice_, variant, items)
        if mean is None:
            self._begin(slice_, variant, items, _Mean(service_s, now_s, service_s))
        else:
            mean.seconds += ALPHA * (service_s - mean.seconds)
            mean.answers_s += (ALPHA if mean.answers_s else 1.0) * (service_s - mean.answers_s)
            mean.at_s = now_s

    def record_late(self, slice_: SliceKey, variant: str, items: int, waited_s: float, now_s: float) -> None:
        """Record that a deadline passed while the slice had a request for so long."""
        mean = self._mean(slice_, variant, items)
        if mean is None:
            self._begin(slice_, variant, items, _Mean(waited_s, now_s, 0.0))
            return
        if waited_s >= mean.seconds:
            mean.seconds *= LENGTHEN
        mean.at_s = now_s

    def predicted_s(self, slice_: SliceKey, variant: str, items: int, now_s: float) -> float:
        """Expected time from dispatch to answer, 0.0 = not known."""
        mean = self._mean(slice_, variant, items)
        return mean.seconds * 0.5 ** (max(0.0, now_s - mean.at_s) / HALF_LIFE_S) if mean is not None else 0.0

    def usual_s(self, slice_: SliceKey, variant: str, items: int) -> float:
        """Usual time from dispatch to answer, whatever was dropped; 0.0 = not known."""
        mean = self._mean(slice_, variant, items)
        return mean.answers_s if mean is not None else 0.0

    def longest_s(self, slice_: SliceKey) -> float:
        """The longest usual time known of a slice, of any variant and size; else of any slice; 0.0 = none is."""
        known = [(key[0], m.answers_s) for key, means in self._means.items() for m in means if m and m.answers_s]
        return max([s for of, s in known if of == slice_] or [s for _, s in known], default=0.0)

    def record_drop(self, slice_: SliceKey, variant: str, items: int, now_s: float) -> None:
        """Record that a request was dropped for its prediction."""
        mean = self._mean(slice_, variant, items)
        if mean is not None and now_s - mean.at_s > mean.seconds:
            mean.seconds *= SHRINK

    def forget(self, slice_: SliceKey) -> None:
        """Another server answers there from now on."""
        for key in [key for key in self._means if key[0] == slice_]:
            del self._means[key]

    def _begin(self, slice_: SliceKey, variant: str, items: int, first: _Mean) -> None:
        sizes = self._means.setdefault((slice_, variant), [None] * SIZES)
        sizes[min(items.bit_length(), SIZES - 1)] = first

    def _mean(self, slice_: SliceKey, variant: str, items: int) -> _Mean | None:
        sizes = self._means.get((slice_, variant))
        return sizes[min(items.bit_length(), SIZES - 1)] if sizes is not None else None

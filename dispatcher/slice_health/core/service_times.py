"""How long a slice takes for one request, learned from its answers; and whether a deadline can still be met there.

Source: facts of the field: Finagle's and llm-d's deadline drops; the estimate is TCP's smoothed mean (RFC 6298).
Data: dispatch-to-answer times of answered requests, per slice, variant and size of the request (powers of two items).
Decision: a request is dropped before dispatch when less time is left than the slice is predicted to take.
Formulation: mean <- mean + ALPHA (seen - mean). A prediction ages: it halves every HALF_LIFE_S without an answer, and a
    drop takes SHRINK off it. Nothing known predicts 0: nothing is ever dropped on a guess.
Deviations: without the ageing a slice that was slow once would have all its requests dropped and never show that it is
    well again.
"""

from dataclasses import dataclass
from typing import Final

from trefoil.core.fleet import SliceKey

ALPHA: Final = 0.1
HALF_LIFE_S: Final = 10.0
SHRINK: Final = 0.95
SIZES: Final = 16  # 2**15 items and more are one size


@dataclass(slots=True)
class _Mean:
    seconds: float  # what is predicted, which drops take from
    at_s: float
    answers_s: float  # of the answers alone


class ServiceTimes:
    """Service times of one worker. Times are the caller's monotonic clock, predictions seconds."""

    def __init__(self) -> None:
        self._means: dict[tuple[SliceKey, str], list[_Mean | None]] = {}

    def record(self, slice_: SliceKey, variant: str, items: int, service_s: float, now_s: float) -> None:
        """Record the service time of an answer."""
        sizes = self._means.get((slice_, variant))
        if sizes is None:
            sizes = self._means[slice_, variant] = [None] * SIZES
        size = items.bit_length()
        if size >= SIZES:
            size = SIZES - 1
        mean = sizes[size]
        if mean is None:
            sizes[size] = _Mean(service_s, now_s, service_s)
        else:
            mean.seconds += ALPHA * (service_s - mean.seconds)
            mean.answers_s += ALPHA * (service_s - mean.answers_s)
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
        """The longest mean known of a slice, of any variant and size; else of any slice; 0.0 = none is."""
        own = [mean.seconds for key, means in self._means.items() if key[0] == slice_ for mean in means if mean]
        return max(own or (mean.seconds for means in self._means.values() for mean in means if mean), default=0.0)

    def record_drop(self, slice_: SliceKey, variant: str, items: int) -> None:
        """A request was dropped for its prediction."""
        mean = self._mean(slice_, variant, items)
        if mean is not None:
            mean.seconds *= SHRINK

    def forget(self, slice_: SliceKey) -> None:
        """Another server answers there from now on."""
        for key in [key for key in self._means if key[0] == slice_]:
            del self._means[key]

    def _mean(self, slice_: SliceKey, variant: str, items: int) -> _Mean | None:
        sizes = self._means.get((slice_, variant))
        return sizes[min(items.bit_length(), SIZES - 1)] if sizes is not None else None

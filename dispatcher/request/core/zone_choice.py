"""Whether a request goes to another zone: what that saves, whether it is answered in time there. Pure.

Source: ours. Data: offers of the controller's plan; round trips and answers as they are seen from here.
Decision: the zone that saves the most grams, or none.
Formulation: saved = items * saved_g - megabytes moved * transfer_j_per_mb at carbon and PUE of the zone, above 0. The
    limit is what is left of the objective, or of half of the time to the deadline. In time: the limit less the round
    trip's p95 is at least the latency that is offered. The p95 of a family's answers from there over SEEN_S is within
    the limit, too. An answer is waited for until half of the limit is over, or PATIENCE times the p95 of the answers if
    that is longer. Until ANSWERS_MIN answers are known one request is there at a time, and is waited for until the
    limit. At most the offered items per second, shared by the workers. A request's floor is at most the accuracy that
    is offered. What a zone refuses it is not asked for HELD_S.
Deviations: none.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trefoil.core.errors import InvalidInput
from trefoil.core.jobs.planned import RequestOffer
from trefoil.core.latency import nearest_rank
from trefoil.core.outside.plausible import RECEIPT_MAX_J
from trefoil.core.outside.ranges import range_of
from trefoil.core.units import grams

QUANTILE: Final = 0.95
ROUND_TRIPS_MIN: Final = 5
ANSWERS_MIN: Final = 20
SEEN_MAX: Final = 256
SEEN_S: Final = 60.0
PATIENCE: Final = 2.0
HELD_S: Final = 60.0
BURST_S: Final = 1.0  # of the offered rate, at once


@dataclass(slots=True)
class Latencies:
    """The last SEEN_MAX latencies [ms] that came within SEEN_S, in order, so that their quantile costs no sorting."""

    _came: deque[tuple[float, float]] = field(default_factory=deque)
    _ordered: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._came)

    def add(self, took_ms: float, now_s: float) -> None:
        """Add one. Infinite: it did not come."""
        self._came.append((now_s, took_ms))
        insort(self._ordered, took_ms)
        self.forget(now_s)

    def forget(self, now_s: float) -> None:
        """Forget those that are too old, or too many."""
        while self._came and (now_s - self._came[0][0] > SEEN_S or len(self._came) > SEEN_MAX):
            del self._ordered[bisect_left(self._ordered, self._came.popleft()[1])]

    def clear(self) -> None:
        """Forget all."""
        self._came.clear()
        self._ordered.clear()

    def quantile(self) -> float:
        """QUANTILE of them; infinite of none."""
        return self._ordered[nearest_rank(len(self), QUANTILE) - 1] if self._ordered else math.inf


@dataclass(slots=True)
class ZoneSight:
    """Round trips from this dispatcher to one other zone."""

    round_trips: Latencies = field(default_factory=Latencies)
    round_trip_ms: float = math.inf
    """Its QUANTILE; infinite: not known, or the zone does not answer."""
    trouble: str = ""
    """Status of the last call, if the zone did not answer that."""

    def reached(self, took_ms: float, now_s: float) -> None:
        """The zone has answered a probe."""
        self.trouble = ""
        self.round_trips.add(took_ms, now_s)
        if len(self.round_trips) >= ROUND_TRIPS_MIN:
            self.round_trip_ms = self.round_trips.quantile()

    def lost(self, trouble: str) -> None:
        """The zone does not answer: ROUND_TRIPS_MIN probes have to come back before it is asked again."""
        self.trouble = trouble
        self.round_trips.clear()
        self.round_trip_ms = math.inf


@dataclass(slots=True)
class FamilyThere:
    """A family's requests in one zone. `items`: that may go now; `answer_bytes`: size of the last answer."""

    items: float = 0.0
    filled_s: float = -math.inf
    in_flight: int = 0
    held_until_s: float = -math.inf
    answer_bytes: int = 0
    answers: Latencies = field(default_factory=Latencies)

    def may_go(self, offer: RequestOffer, items: int, limit_ms: float, now_s: float, workers: int) -> bool:
        """Whether a request of so many items may go now."""
        per_s = offer.rate_per_s / workers
        self.items = min(max(per_s * BURST_S, 1.0), self.items + per_s * min(BURST_S, now_s - self.filled_s))
        self.filled_s = now_s
        if now_s < self.held_until_s or self.items < items:
            return False
        self.answers.forget(now_s)
        if self.answers and self.answers.quantile() > limit_ms:
            return False
        return len(self.answers) >= ANSWERS_MIN or self.in_flight == 0

    def patience_ms(self, limit_ms: float) -> float:
        """Time after which an answer is not waited for, of so much that it may take: the rest is for this zone."""
        if len(self.answers) < ANSWERS_MIN:
            return limit_ms
        return min(limit_ms, max(limit_ms / 2, PATIENCE * self.answers.quantile()))

    def sent(self, items: int) -> None:
        """A request has gone there."""
        self.items, self.in_flight = self.items - items, self.in_flight + 1

    def ended(self, took_ms: float, now_s: float) -> None:
        """A request has come back after a time; infinite: it failed; NaN: that says nothing of the family there."""
        self.in_flight -= 1
        if not math.isnan(took_ms):
            self.answers.add(took_ms, now_s)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a choice needs of a request. `limit_ms`: that it may take there; 0: it has no objective."""

    items: int
    size: int
    limit_ms: float
    min_accuracy: float = 0.0


def saved_g(offer: RequestOffer, items: int, size: float, transfer_j_per_mb: float) -> float:
    """Grams that a request saves there, with what moves so many bytes."""
    return items * offer.saved_g - grams(size / 1e6 * transfer_j_per_mb, offer.p50_g_per_kwh, offer.pue)


def choose(
    offers: Iterable[RequestOffer],
    sights: Mapping[str, ZoneSight],
    there: Mapping[tuple[str, str], FamilyThere],
    asked: Terms,
    transfer_j_per_mb: float,
    now_s: float,
    workers: int,
) -> RequestOffer | None:
    """Offer that a request takes, whose zone saves the most; None: it stays. `there`: by family and zone."""
    found: list[tuple[float, RequestOffer]] = []
    for offer in offers:
        sight, family = sights.get(offer.zone), there.get((offer.family, offer.zone))
        if sight is None or family is None or asked.limit_ms - sight.round_trip_ms < offer.latency_ms:
            continue
        if asked.min_accuracy > offer.min_accuracy:
            continue
        saved = saved_g(offer, asked.items, asked.size + family.answer_bytes, transfer_j_per_mb)
        if saved > 0 and family.may_go(offer, asked.items, asked.limit_ms, now_s, workers):
            found.append((saved, offer))
    return max(found, key=lambda one: one[0])[1] if found else None


def check_receipt(joules: float, carbon_g: float, remedy: str) -> None:
    """Check the receipt of another zone's answer.

    Raises:
        InvalidInput: naming the field.
    """
    if not 0.0 <= joules <= RECEIPT_MAX_J:
        raise InvalidInput(f"is not in 0..{RECEIPT_MAX_J:g} J", field="receipt.energy_j", value=joules, remedy=remedy)
    most_g = grams(joules, range_of("p50_g_per_kwh").high, range_of("pue").high)
    if not abs(carbon_g) <= most_g:  # NaN is not
        why = f"{joules:g} J emit at most {most_g:g} g"
        raise InvalidInput(why, field="receipt.carbon_g", value=carbon_g, remedy=remedy)


def moved(size: float, transfer_j_per_mb: float, joules: float, carbon_g: float) -> tuple[float, float]:
    """Joules and grams of moving so many bytes, at the carbon of the answer's receipt; 0 g where that is not known."""
    moved_j = size / 1e6 * transfer_j_per_mb
    return moved_j, moved_j * carbon_g / joules if joules > 0 and math.isfinite(carbon_g) else 0.0

"""Whether a request goes to another zone: what that saves, whether it is answered in time there. Pure.

Source: ours. Data: offers of the controller's plan; round trips and answers as they are seen from here.
Decision: the zone that saves the most grams, or none.
Formulation: saved = items * saved_g - megabytes moved * transfer_j_per_mb at carbon and PUE of the zone, above 0. In
    time: what is left of the objective, or of half of the time to the deadline, less the round trip's p95 is at least
    the latency that is offered, and the p95 of a family's answers from there over SEEN_S is within it. Until
    ANSWERS_MIN answers are known one request is there at a time. At most the offered items per second, shared by the
    workers. A request's floor is at most the accuracy that is offered. What a zone refuses it is not asked for HELD_S.
Deviations: none.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from trefoil.core.errors import InvalidInput
from trefoil.core.jobs.planned import RequestOffer
from trefoil.core.outside.plausible import RECEIPT_MAX_J
from trefoil.core.outside.ranges import range_of
from trefoil.core.units import grams

QUANTILE: Final = 0.95
ROUND_TRIPS_MIN, ROUND_TRIPS_MAX = 5, 60
ANSWERS_MIN, ANSWERS_MAX = 20, 256
SEEN_S: Final = 60.0
HELD_S: Final = 60.0
BURST_S: Final = 1.0  # of the offered rate, at once


def quantile(values: Iterable[float]) -> float:
    """QUANTILE of values, by the nearest rank; infinite of none."""
    ordered = sorted(values)
    return ordered[math.ceil(QUANTILE * len(ordered)) - 1] if ordered else math.inf


@dataclass(slots=True)
class ZoneSight:
    """Round trips from this dispatcher to one other zone."""

    round_trips_ms: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_MAX))
    round_trip_ms: float = math.inf
    """Its QUANTILE; infinite: not known, or the zone does not answer."""
    trouble: str = ""
    """Status of the last call, if the zone did not answer that."""

    def reached(self, took_ms: float) -> None:
        """The zone has answered a probe."""
        self.trouble = ""
        self.round_trips_ms.append(took_ms)
        if len(self.round_trips_ms) >= ROUND_TRIPS_MIN:
            self.round_trip_ms = quantile(self.round_trips_ms)

    def lost(self, trouble: str) -> None:
        """The zone does not answer: ROUND_TRIPS_MIN probes have to come back before it is asked again."""
        self.trouble = trouble
        self.round_trips_ms.clear()
        self.round_trip_ms = math.inf


@dataclass(slots=True)
class FamilyThere:
    """A family's requests in one zone. `items`: that may go now; `answer_bytes`: size of the last answer."""

    items: float = 0.0
    filled_s: float = -math.inf
    in_flight: int = 0
    held_until_s: float = -math.inf
    answer_bytes: int = 0
    answers: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=ANSWERS_MAX))
    """When each came, and its latency [ms]."""

    def may_go(self, offer: RequestOffer, items: int, limit_ms: float, now_s: float, workers: int) -> bool:
        """Whether a request of so many items may go now."""
        per_s = offer.rate_per_s / workers
        self.items = min(max(per_s * BURST_S, 1.0), self.items + per_s * min(BURST_S, now_s - self.filled_s))
        self.filled_s = now_s
        if now_s < self.held_until_s or self.items < items:
            return False
        while self.answers and now_s - self.answers[0][0] > SEEN_S:
            self.answers.popleft()
        if self.answers and quantile(took_ms for _, took_ms in self.answers) > limit_ms:
            return False
        return len(self.answers) >= ANSWERS_MIN or self.in_flight == 0

    def sent(self, items: int) -> None:
        """A request has gone there."""
        self.items, self.in_flight = self.items - items, self.in_flight + 1

    def ended(self, took_ms: float, now_s: float) -> None:
        """A request has come back after a time; infinite: it failed; NaN: that says nothing of the family there."""
        self.in_flight -= 1
        if not math.isnan(took_ms):
            self.answers.append((now_s, took_ms))


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

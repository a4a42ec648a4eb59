"""Cache of a live provider's answers, and the interval that holds now."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from carbon_feed.core.feed import Observation
from carbon_feed.core.validate import Cause
from carbon_feed.providers.base import ProviderFailure
from trefoil.core.carbon import Quality

RECENT_MAX: Final = 2_000


class AnswerCache:
    """Cache of a provider's answers. Bounded; one observation per interval, the newest said of it."""

    def __init__(self) -> None:
        self._kept: dict[float, Observation] = {}
        self._answer: tuple[Observation, ...] = ()
        self._said: Observation | None = None

    def remember(self, said: Observation, answer: Sequence[Observation] = ()) -> Observation:
        """Keep an observation, and what the same answer says of the time before; returns the observation."""
        self._answer, self._said = tuple(answer) or (said,), said
        for point in self._answer:
            if point.ends_at_s <= said.starts_at_s:
                self._keep(point)
        return self._keep(said)

    def held(self, now_s: float) -> Observation | None:
        """Observation of now in the last answer: of a later interval it was a forecast, whatever it is called."""
        found = next((point for point in self._answer if point.starts_at_s <= now_s < point.ends_at_s), None)
        if found is None or self._said is None or found.starts_at_s == self._said.starts_at_s:
            return self._said
        for point in self._answer:  # none is left out because nobody looked while it held
            if self._said.starts_at_s < point.starts_at_s < found.starts_at_s and point.starts_at_s not in self._kept:
                self._keep(replace(point, quality=Quality.FORECAST))
        if found.starts_at_s not in self._kept:
            self._keep(replace(found, quality=Quality.FORECAST))
        return self._kept[found.starts_at_s]

    def _keep(self, said: Observation) -> Observation:
        self._kept[said.starts_at_s] = said
        while len(self._kept) > RECENT_MAX:
            del self._kept[min(self._kept)]
        return said

    def newest(self, count_max: int) -> tuple[Observation, ...]:
        """Newest observations, oldest first."""
        return tuple(self._kept[key] for key in sorted(self._kept)[-count_max:])


def holding(points: Sequence[Observation], now_s: float) -> Observation:
    """Point whose interval holds now, or else the newest that has ended: the ladder says what it is worth.

    Raises:
        ProviderFailure: all of them are yet to come.
    """
    begun = [point for point in points if point.starts_at_s <= now_s]
    if not begun:
        raise ProviderFailure(Cause.FUTURE, "no interval of the answer has begun")
    return max(begun, key=lambda point: point.starts_at_s)

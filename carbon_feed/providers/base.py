"""The one interface of a provider."""

from typing import Protocol

from carbon_feed.feed import Observation


class Provider(Protocol):
    """One zone's source of intensities. Validation, fallback and publishing are not its business."""

    name: str
    speedup: float
    """Its seconds per wall second; 1 unless it replays."""

    async def read(self, now_s: float) -> Observation:
        """What holds now.

        Raises:
            errors.Unavailable: it has nothing to say; the message says why.
        """
        ...

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        """What it knows of the past, up to and with what holds now, oldest first."""
        ...

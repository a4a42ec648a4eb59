"""The one interface of a provider, and how it says that it has nothing."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from carbon_feed.core.feed import Observation
from carbon_feed.core.validate import Cause, Refusal
from trefoil.core import errors


class ProviderFailure(errors.Unavailable):
    """A provider has no value; `refusal` says why in a word and in a sentence."""

    def __init__(self, cause: Cause, message: str, *, retry_after_s: float = 0.0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.refusal = Refusal(cause, str(self), retry_after_s)


class Provider(Protocol):
    """One zone's source of intensities. Validation, fallback and publishing are not its business."""

    name: str
    speedup: float
    """Its seconds per wall second; 1 unless it replays."""

    async def read(self, now_s: float) -> Observation:
        """What holds now.

        Raises:
            errors.Unavailable: it has nothing to say; the message says why (`ProviderFailure` also in a word).
        """
        ...

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        """What it knows of the past without asking anybody, up to and with what holds now, oldest first."""
        ...


@runtime_checkable
class LiveProvider(Provider, Protocol):
    """One that asks somebody: it can also be asked for what is to come and for what was."""

    licence: str
    poll_s: float
    """How often asking makes sense."""

    def held(self, now_s: float) -> Observation | None:
        """What its last answer says of now, without asking anybody; None = nothing."""
        ...

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        """What is to come, oldest first, unchecked (`carbon_feed.core.ladder.forecast_of` checks).

        Raises:
            ProviderFailure: it gives none, or not now.
        """
        ...

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        """What was, oldest first, as it is known today.

        Raises:
            ProviderFailure: it gives none, or not now.
        """
        ...

    def metered(self, spend: Callable[[], None]) -> None:
        """Call this before each request from now on; it raises ProviderFailure where none may be sent (`Web` does)."""
        ...

    async def close(self) -> None:
        """Give its connections back."""
        ...

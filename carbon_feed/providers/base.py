"""Provider interfaces, and how a provider says that it has nothing."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause, Refusal
from trefoil.core import errors


class ProviderFailure(errors.Unavailable):
    """Failure of a provider; `refusal` says why in a word and in a sentence."""

    def __init__(self, cause: Cause, message: str, *, retry_after_s: float = 0.0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.refusal = Refusal(cause, str(self), retry_after_s)


class Provider(Protocol):
    """Source of one zone's intensities. Validation, fallback and publishing are not its business."""

    name: str
    speedup: float
    """Its seconds per wall second; 1 unless it replays."""

    async def read(self, now_s: float) -> Observation:
        """Observation that holds now.

        Raises:
            errors.Unavailable: it has nothing to say; the message says why (`ProviderFailure` also in a word).
        """
        ...

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        """Past observations, without a call, up to and with the current one, oldest first."""
        ...


@runtime_checkable
class LiveProvider(Provider, Protocol):
    """Provider over a network: it also has a forecast and the past."""

    licence: str
    poll_s: float
    """How often asking makes sense."""

    @property
    def left_out(self) -> int:
        """Rows without a value in its answers so far."""
        ...

    def held(self, now_s: float) -> Observation | None:
        """Current observation in its last answer, without a call; None: there is none."""
        ...

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        """Forecast points, oldest first, unchecked (`carbon_feed.core.fallback.forecast_of` checks).

        Raises:
            ProviderFailure: it gives none, or not now.
        """
        ...

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        """Past observations, oldest first, as they are known today.

        Raises:
            ProviderFailure: it gives none, or not now.
        """
        ...

    def metered(self, spend: Callable[[], None]) -> None:
        """Count requests from now on: `spend` comes before each, and raises ProviderFailure where none may be sent."""
        ...

    async def close(self) -> None:
        """Close its connections."""
        ...

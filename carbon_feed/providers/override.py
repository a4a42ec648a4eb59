"""On-site power in front of the grid: a fixed share, or what the site's meter says now.

Formulation: c = s * own + (1 - s) * grid with s = min(1, own power / site power): what the site makes it uses first,
and exported power gives no credit. The reading names both parts. A grid that fails or a meter that is silent is a
failure of this provider, and the ladder says what follows.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import CLOCK_SLACK_S, Cause
from carbon_feed.providers.base import LiveProvider, Provider, ProviderFailure
from carbon_feed.providers.web import parse_number, parse_utc
from carbon_feed.settings import OverrideSettings
from trefoil.core import errors
from trefoil.runtime import codec
from trefoil.runtime.files import NotPlain, read_plain

METER_BYTES_MAX: Final = 4096


class OverrideProvider:
    """Provider of a site with power of its own: the grid's provider, diluted."""

    name = "override"

    def __init__(self, grid: Provider, settings: OverrideSettings) -> None:
        self._grid, self._settings = grid, settings
        self.speedup = grid.speedup
        self.licence = getattr(grid, "licence", "")
        self.poll_s: float = min(getattr(grid, "poll_s", 60.0), 60.0 if settings.meter_file else math.inf)

    @property
    def left_out(self) -> int:
        return self._grid.left_out if isinstance(self._grid, LiveProvider) else 0

    async def read(self, now_s: float) -> Observation:
        share = await self._share(now_s)
        return self._diluted(await self._grid.read(now_s), share)

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        """Past of a fixed share; what a meter once said is not known any more."""
        if self._settings.own_share is None:
            return ()
        share = self._settings.own_share
        return tuple(self._diluted(observation, share) for observation in self._grid.history(now_s, count_max))

    def held(self, now_s: float) -> Observation | None:
        """Observation of now with a fixed share; of a meter only its own moment is known."""
        share = self._settings.own_share
        grid = self._grid.held(now_s) if share is not None and isinstance(self._grid, LiveProvider) else None
        return self._diluted(grid, share) if grid is not None and share is not None else None

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        share = self._settings.own_share
        if share is None or not isinstance(self._grid, LiveProvider):
            raise ProviderFailure(Cause.NO_DATA, "there is no forecast of the site's own power")
        return tuple(self._diluted(point, share) for point in await self._grid.forecast(now_s, horizon_s))

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        share = self._settings.own_share
        if share is None or not isinstance(self._grid, LiveProvider):
            raise ProviderFailure(Cause.NO_DATA, "the site's past is not known")
        return tuple(self._diluted(point, share) for point in await self._grid.past(begin_s, end_s))

    def metered(self, spend: Callable[[], None]) -> None:
        if isinstance(self._grid, LiveProvider):
            self._grid.metered(spend)

    async def close(self) -> None:
        if isinstance(self._grid, LiveProvider):
            await self._grid.close()

    async def _share(self, now_s: float) -> float:
        if self._settings.own_share is not None:
            return self._settings.own_share
        assert self._settings.meter_file is not None
        parsed = await asyncio.to_thread(_meter, self._settings.meter_file)
        age_s = now_s - parse_utc(parsed.get("at"), "meter at")
        if age_s > self._settings.meter_max_age_s:
            raise ProviderFailure(Cause.ENDED, f"the site's meter last spoke {age_s:.0f} s ago")
        if age_s < -CLOCK_SLACK_S:
            raise ProviderFailure(Cause.FUTURE, f"the site's meter speaks of a time in {-age_s:.0f} s")
        own_w, site_w = _watts(parsed, "own_w"), _watts(parsed, "site_w")
        return min(1.0, own_w / site_w) if site_w > 0 else 0.0

    def _diluted(self, grid: Observation, share: float) -> Observation:
        own = self._settings.own_g_per_kwh
        rest = f"the rest {grid.provider}: {grid.intensity_g_per_kwh:.2f} g/kWh"
        parts = f"{share:.3f} own power at {own:g} g/kWh, {rest}"
        return replace(
            grid,
            intensity_g_per_kwh=share * own + (1 - share) * grid.intensity_g_per_kwh,
            provider=f"{self.name}+{grid.provider}",
            estimation_method=", ".join(part for part in (parts, grid.estimation_method) if part),
            beside_g_per_kwh=grid.beside_g_per_kwh or (grid.intensity_g_per_kwh,),
        )


def make_override(grid: Provider, settings: OverrideSettings) -> OverrideProvider:
    """Make the provider of `[override]` in front of the grid's.

    Raises:
        errors.SettingError: nothing says the share.
    """
    if settings.own_share is None and settings.meter_file is None:
        raise errors.SettingError(
            "the share of on-site power is not set",
            field="override.own_share",
            remedy="set override.own_share or override.meter_file",
        )
    return OverrideProvider(grid, settings)


def _meter(path: Path) -> dict[str, Any]:
    try:
        parsed = codec.parse_json(read_plain(path, METER_BYTES_MAX))
    except (OSError, NotPlain) as error:
        raise ProviderFailure(
            Cause.UNAVAILABLE, f"the site's meter file cannot be read ({errors.system_words(error)})"
        ) from error
    except errors.InvalidInput as error:
        raise ProviderFailure(Cause.NOT_JSON, "the site's meter file is not JSON") from error
    if not isinstance(parsed, dict):
        raise ProviderFailure(Cause.WRONG_SHAPE, "the site's meter file is not a JSON object")
    return parsed


def _watts(parsed: dict[str, Any], name: str) -> float:
    value = parse_number(parsed.get(name), f"meter {name}")
    if value < 0:
        raise ProviderFailure(Cause.NEGATIVE, f"meter {name} is negative")
    return value

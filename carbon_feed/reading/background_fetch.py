"""Background fetching from a zone's provider: its forecast, and the past with its revisions.

Fetched in the background, each at its own pace; readers never wait for it. After a failure it asks again after a tenth
of the pace, or after Retry-After if that is longer. The tenth doubles each time, up to four times the pace. What a
provider does not give at all (not in the plan, no such data) is asked for again after six hours.
"""

import asyncio
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from carbon_feed.core.fallback import forecast_of
from carbon_feed.core.history import History
from carbon_feed.core.observation import Observation, reading_of
from carbon_feed.core.polling import BACK_OFF_MAX_RATIO, JITTER_RATIO, back_off_s
from carbon_feed.core.validation import (
    CLOCK_SLACK_S,
    CONTENT,
    Cause,
    Refusal,
    check_content,
    differ_widely,
)
from carbon_feed.providers.base import LiveProvider, Provider, ProviderFailure
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core import errors
from trefoil.core.carbon import CarbonForecast, CarbonReading
from trefoil.core.units import DAY_S, HOUR_S

NOT_GIVEN: Final = (Cause.FORBIDDEN, Cause.NO_DATA, Cause.GONE)
NOT_GIVEN_S: Final = 6 * 3600.0
EARLY_S: Final = DAY_S  # a next time further off than this and the pace: the clock was set back
PAST_H: Final = 14 * 24.0  # asked for at the start where nothing is known
PIECE_S: Final = 4 * DAY_S  # of the past in one question: five-minute values of more are long to read
REACH_S: Final[Mapping[str, float]] = {  # what they offer at most; another provider is asked for all of our horizon
    "neso": 48 * 3600.0,
    "electricity_maps": 72 * 3600.0,
    "watttime": 72 * 3600.0,
}


class QuestionSchedule:
    """Schedule of a repeated question, with back-off. Stretched by up to a tenth: not all feeds ask at once."""

    def __init__(self, every_s: float, seed: str) -> None:
        self.next_s = float("-inf")
        self.failures = 0
        self._every_s, self._seed = every_s, seed

    def due(self, now_s: float) -> bool:
        """Whether the question is due."""
        return now_s >= self.next_s or self.next_s - now_s > BACK_OFF_MAX_RATIO * self._every_s + EARLY_S

    def succeeded(self, now_s: float) -> None:
        """Schedule the next question at the usual pace."""
        self.failures = 0
        self.next_s = now_s + self._with_jitter(self._every_s, now_s)

    def failed(self, now_s: float, refusal: Refusal) -> None:
        """Schedule the next question after a back-off, or after Retry-After where that is longer."""
        self.failures += 1
        wait_s = back_off_s(self._every_s, self.failures)
        if refusal.cause in NOT_GIVEN:
            wait_s = max(wait_s, NOT_GIVEN_S)
        self.next_s = now_s + max(self._with_jitter(wait_s, now_s), refusal.retry_after_s)

    def _with_jitter(self, wait_s: float, now_s: float) -> float:
        return wait_s * (1 + JITTER_RATIO * zlib.crc32(f"{self._seed} {now_s:.0f}".encode()) / 2**32)


class BackgroundFetcher:
    """Fetcher of one provider's forecast and past. A provider that only replays or is set has neither."""

    def __init__(self, settings: CarbonFeedSettings, provider: Provider) -> None:
        self.forecast_refusal: Refusal | None = None
        """Why there was no forecast the last time; None: there was, or it was never asked for one."""
        name = settings.override.base if settings.provider == "override" else settings.provider
        self._provider = provider if isinstance(provider, LiveProvider) and name in REACH_S else None
        self._series = settings.series
        self._reach_s = min(REACH_S.get(name, settings.outlook.horizon_s), settings.outlook.horizon_s)
        seed = f"{settings.cluster} {settings.zone}"
        self._forecast_schedule = QuestionSchedule(settings.outlook.provider_every_s, f"{seed} forecast")
        self._past_schedule = QuestionSchedule(settings.outlook.past_every_s, f"{seed} past")
        self._past_s = PAST_H * HOUR_S
        self._fetched_until_s = float("-inf")

    def forecast_due(self, now_s: float) -> bool:
        """Whether to fetch the provider's forecast now."""
        return self._provider is not None and self._forecast_schedule.due(now_s)

    async def forecast(self, now_s: float) -> CarbonForecast | Refusal:
        """Fetch the provider's forecast, whole and in order, or say why ours takes its place."""
        assert self._provider is not None
        found: CarbonForecast | Refusal
        try:
            points = await self._provider.forecast(now_s, self._reach_s)
        except ProviderFailure as failure:
            found = failure.refusal
        except errors.SettingError as error:  # a key file that was taken away while we ran
            found = Refusal(Cause.SECRET, str(error))
        else:
            name = points[0].provider if points else self._provider.name
            found = forecast_of(name, points, self._series, now_s, self._reach_s, self._provider.licence)
        if isinstance(found, Refusal):
            self._forecast_schedule.failed(now_s, found)
            self.forecast_refusal = found
        else:
            self._forecast_schedule.succeeded(now_s)
            self.forecast_refusal = None
        return found

    def past_due(self, now_s: float) -> bool:
        """Whether to fetch the past again."""
        return self._provider is not None and self._past_schedule.due(now_s)

    async def past(self, now_s: float, history: History, as_of: int) -> tuple[CarbonReading, ...] | Refusal:
        """Fetch readings of the last day and of the time since the last fetch; at first of what is missing.

        In pieces: what came before a failure counts, and the next look continues behind it. A piece whose answer holds
        nothing usable costs no other piece.
        """
        assert self._provider is not None
        at_s = self._past_begin_s(now_s, history)
        found: list[CarbonReading] = []
        empty: Refusal | None = None
        while at_s < now_s:
            until_s = min(now_s, at_s + PIECE_S)
            points: Sequence[Observation] = ()
            try:
                points = await self._provider.past(at_s, until_s)
            except ProviderFailure as failure:
                if failure.refusal.cause not in CONTENT:
                    return self._past_failed(now_s, failure.refusal, found)
                empty = failure.refusal
            except errors.SettingError as error:
                return self._past_failed(now_s, Refusal(Cause.SECRET, str(error)), found)
            found += [reading_of(point, self._series, now_s, as_of) for point in self._plausible(points, now_s)]
            self._fetched_until_s = at_s = until_s
            await asyncio.sleep(0)
        if empty is not None:
            return self._past_failed(now_s, empty, found)
        self._past_schedule.succeeded(now_s)
        return tuple(found)

    def _past_begin_s(self, now_s: float, history: History) -> float:
        oldest_s = now_s - self._past_s
        if self._fetched_until_s > oldest_s:
            return min(now_s - DAY_S, self._fetched_until_s)
        hours = round(self._past_s / HOUR_S)
        missing = np.flatnonzero(np.isnan(history.means(oldest_s, HOUR_S, hours)))
        return min(now_s - DAY_S, oldest_s + float(missing[0]) * HOUR_S) if len(missing) else now_s - DAY_S

    def _past_failed(
        self, now_s: float, refusal: Refusal, found: list[CarbonReading]
    ) -> tuple[CarbonReading, ...] | Refusal:
        self._past_schedule.failed(now_s, refusal)
        return tuple(found) or refusal

    def _plausible(self, points: Sequence[Observation], now_s: float) -> list[Observation]:
        """Those that are over and sound; one that leaps and is alone with it is left out."""
        sound = [
            point
            for point in points
            if check_content(point, self._series) is None and point.ends_at_s <= now_s + CLOCK_SLACK_S
        ]
        values = [point.intensity_g_per_kwh for point in sound]
        alone = {
            i + 1
            for i, (before, value, after) in enumerate(zip(values, values[1:], values[2:], strict=False))
            if differ_widely(before, value) and differ_widely(value, after)
        }
        return [point for i, point in enumerate(sound) if i not in alone]

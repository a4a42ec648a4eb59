"""Forecasts of one zone: the forecast in force, scores of past ones, and the ratio to the average so far.

Only the zone's leader refreshes; followers adopt what the leader wrote. Readers take what is in memory.
In force is the provider's forecast where it has one, with bands from its own errors; else ours, with the reason.
All of ours are issued once a step and again when a whole step more is known of the past; every issue is archived.
A replay runs `speedup` times as fast. Bands, leads and scores are in wall time, so its hours and days are as much
shorter. Its hour of the day is that of the recording. Its forecasts are not kept on disk: the next one starts again.
Nothing here keeps the event loop for long: long work is done in parts, files in a thread.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from carbon_feed.core.fallback import fallback_reason_of
from carbon_feed.core.history import AddResult, History
from carbon_feed.core.validation import AHEAD_MAX_S, Refusal, forecast_fault
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.archive import ForecastArchive
from carbon_feed.forecast.incremental import Breaks, Incremental, T
from carbon_feed.forecast.live_forecaster import LiveForecaster, Origin
from carbon_feed.history.core.ratio import EXPANDING, WINDOWS, ratio
from carbon_feed.history.forecast_files import ForecastFiles
from carbon_feed.providers.base import Provider
from carbon_feed.reading.background_fetch import BackgroundFetcher
from carbon_feed.reading.zone_metrics import ZoneMetrics
from carbon_feed.settings import CarbonFeedSettings
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, CarbonScores
from trefoil.runtime.keys import Keys
from trefoil.runtime.state import Delete, Put, State, Write

AGE_MAX_S: Final = 3 * 3600.0  # that a forecast is served where no newer one comes, in the source's time
REFRESH_MIN_S: Final = 0.25  # a replay may say something new every few milliseconds
ISSUE_MIN_S: Final = 1.0  # of a fast replay some steps are left out
HORIZON_MIN_S: Final = 30.0  # a shorter forecast is useless
SCORE_MIN_S: Final = 10.0
SCORINGS_PER_STEP: Final = 4  # all of a full archive are a quarter of a second of CPU
FOLLOW_SCORES_S: Final = 60.0
READINGS_BETWEEN_BREAKS: Final = 32


class ZoneForecasts:
    """Forecasts, scores and ratios of one zone. `forecast` is in force; `forecast_reason` says why there is none."""

    def __init__(
        self,
        settings: CarbonFeedSettings,
        provider: Provider,
        history: History,
        reading: Callable[[], CarbonReading | None],
        metrics: ZoneMetrics,
    ) -> None:
        """`history` is the zone's own and stays the same object; `reading` tells what holds now.

        What a provider says of the past is added to the history by `refresh`.
        """
        self.series, self.history = settings.series, history
        self.archive = ForecastArchive(settings.series)
        self.forecast: CarbonForecast | None = None
        self.forecast_reason = "none was issued yet"
        self._settings, self._limits = settings, settings.outlook
        self._reading, self._metrics = reading, metrics
        self._speedup = provider.speedup
        self._fetcher = BackgroundFetcher(settings, provider)
        self._models = {
            name: LiveForecaster(history, model, self._limits.step_s, self._limits.horizon_s, self._speedup)
            for name, model in MODELS.items()
        }
        played = settings.override.base if settings.provider == "override" else settings.provider
        self._files = None if played == "trace" else ForecastFiles(settings.state_dir, settings.series)
        self._restored = False
        self._disk_ok = True
        self._refreshed_s = self._issued_s = self._scored_s = self._followed_s = float("-inf")
        self._origin: tuple[float, float] | None = None
        self._own_forecast: CarbonForecast | None = None
        self._own_reason = ""
        self._provider_forecast: CarbonForecast | None = None
        self._scores: dict[str, CarbonScores] = {}
        self._scored_of: tuple[int, int] = (-1, -1)
        self._ratios: dict[str, tuple[CarbonReading, int, CarbonRatio | None]] = {}
        self._adopted_ratio: CarbonRatio | None = None
        self._not_believed: CarbonForecast | None = None
        self._written: dict[str, object] = {}
        self._log = structlog.get_logger().bind(zone=settings.zone)

    def ratio(self, window: str = EXPANDING, now_s: float = 0.0) -> CarbonRatio | None:
        """Ratio of current to average intensity; None: less than 24 h of the window are known.

        Raises:
            errors.SettingError: no such window.
        """
        reading = self._reading()
        if reading is None:
            return None
        known = self._ratios.get(window)
        if known is None or known[0] is not reading or known[1] != self.history.version:
            found = ratio(self.history, reading, window, speedup=self._speedup)
            known = self._ratios[window] = (reading, self.history.version, found)
        adopted = self._adopted_ratio
        if known[2] is None and adopted is not None and adopted.window == window:
            return adopted
        return known[2]

    def scores(self) -> tuple[CarbonScores, ...]:
        """Scores of what was issued so far, model by model; in wall time."""
        return tuple(self._scores.values())

    async def refresh(self, now_s: float) -> bool:
        """Issue, fetch and score what is due; returns whether something changed. For the leader, one at a time."""
        if 0 <= now_s - self._refreshed_s < REFRESH_MIN_S:
            return False
        self._refreshed_s = now_s
        before = self.forecast, self.forecast_reason, dict(self._scores), self.history.version
        if not self._restored:
            await self._restore(now_s)
        await self._issue(now_s)
        self._choose_forecast(now_s)
        if self._fetcher.past_due(now_s):
            await self._fetch_past(now_s)
            await self._issue(now_s)
        if self._fetcher.forecast_due(now_s):
            await self._fetch_forecast(now_s)
        self._choose_forecast(now_s)
        await self._score(now_s)
        self._update_metrics(now_s)
        return before != (self.forecast, self.forecast_reason, self._scores, self.history.version)

    def writes(self, keys: Keys) -> list[Write]:
        """Writes of what differs from what was last written; `forget_written` after a write that failed."""
        wanted: dict[str, object | None] = {keys.carbon_forecast(self.series): self.forecast}
        for window, (_, _, found) in self._ratios.items():
            wanted[keys.carbon_ratio(self.series, "" if window == EXPANDING else window)] = found
        for model, scores in self._scores.items():
            wanted[keys.carbon_scores(self.series, model)] = scores
        if self.forecast is not None and self.forecast.model in self._scores:
            wanted[keys.carbon_scores(self.series)] = self._scores[self.forecast.model]
        made: list[Write] = []
        for key, value in wanted.items():
            held = self._written.get(key)
            if value is None and held is not None:
                del self._written[key]
                made.append(Delete(key))
            elif value is not None and held is not value and held != value:
                made.append(Put(key, value))
            if value is not None:
                self._written[key] = value
        return made

    def forget_written(self) -> None:
        """Forget what was written: Redis may hold anything, and everything is written again."""
        self._written.clear()

    def adopt(
        self,
        forecast: CarbonForecast | None,
        ratio: CarbonRatio | None = None,
        scores: CarbonScores | Sequence[CarbonScores] | None = None,
    ) -> None:
        """Adopt what the zone's leader wrote; the next leader continues from it."""
        if forecast != self.forecast:  # else readers would process an equal one again
            self.forecast = forecast
            if forecast is not None:
                self._keep_forecast(forecast)
        self.forecast_reason = "" if forecast is not None else "the zone's leader has issued none"
        self._adopted_ratio = ratio
        for one in [scores] if isinstance(scores, CarbonScores) else scores or ():
            self._scores[one.model] = one

    async def follow(self, state: State, now_s: float) -> None:
        """Read what the zone's leader wrote, and adopt it.

        Raises:
            errors.StateUnavailable: Redis does not answer; what was adopted before stays.
        """
        keys = state.keys
        forecast = await state.get(keys.carbon_forecast(self.series), CarbonForecast)
        if forecast is not None and (why := forecast_fault(forecast, now_s)):
            if forecast != self._not_believed:
                self._log.warning("the forecast in Redis is left out", why=why)
            self._not_believed, forecast = forecast, None
        found = await state.get(keys.carbon_ratio(self.series), CarbonRatio)
        scores: list[CarbonScores] = []
        if not 0 <= now_s - self._followed_s < FOLLOW_SCORES_S:
            self._followed_s = now_s
            names = dict.fromkeys(["", *MODELS])
            read = [await state.get(keys.carbon_scores(self.series, name), CarbonScores) for name in names]
            scores = [one for one in read if one is not None]
        before = len(self.archive)
        self.adopt(forecast, found, scores)
        if forecast is not None and len(self.archive) > before:
            await self._save([forecast])

    async def _restore(self, now_s: float) -> None:
        """Go on with what an earlier process issued."""
        self._restored = True
        if self._files is None:
            return
        try:
            lines = await asyncio.to_thread(self._files.lines)
        except OSError as error:
            self._disk_failed(error)
            return
        unreadable = await run_with_breaks(self._files.load_into(self.archive, lines, now_s))
        for model in self.archive.models:
            newest = self.archive.latest(model, now_s)
            if newest is not None and (model == self._limits.model or model not in MODELS):
                self._keep_forecast(newest)
        self._log.info("forecasts restored", forecasts=len(self.archive), strange_lines=unreadable)

    def _keep_forecast(self, forecast: CarbonForecast) -> None:
        """One that was not made here."""
        self.archive.add(forecast)
        held = self._own_forecast if forecast.model in MODELS else self._provider_forecast
        if held is not None and held.issued_at_s >= forecast.issued_at_s:
            return
        if forecast.model in MODELS:
            self._own_forecast = forecast
        else:
            self._provider_forecast = forecast

    async def _issue(self, now_s: float) -> None:
        """Ours, all models, when there is a new origin."""
        if self._limits.model == "none":
            self._own_reason = "outlook.model is none"
            return
        if self._limits.horizon_s / self._speedup < HORIZON_MIN_S:
            hours = self._limits.horizon_s / 3600
            self._own_reason = (
                f"a replay {self._speedup:g} times as fast: {hours:g} h of it are over before they are read"
            )
            return
        origin = self._models[self._limits.model].origin(now_s)
        if not isinstance(origin, Origin):
            self._own_reason = origin
            return
        fresh = (round(origin.begin_s, 3), round(origin.until_s, 3))
        if fresh == self._origin or 0 <= now_s - self._issued_s < ISSUE_MIN_S:
            return
        self._origin, self._issued_s = fresh, now_s
        made = []
        for name, model in self._models.items():
            issued = await run_with_breaks(model.forecast_incrementally(now_s))
            if name == self._limits.model:
                self._own_forecast, self._own_reason = issued.forecast or self._own_forecast, issued.why
            if issued.forecast is not None and self.archive.add(issued.forecast):
                made.append(issued.forecast)
                self._metrics.count_forecast(name)
        await self._save(made)

    async def _fetch_forecast(self, now_s: float) -> None:
        """The provider's."""
        found = await self._fetcher.forecast(now_s)
        if isinstance(found, Refusal):
            name = self._settings.provider
            self._metrics.count_error(name, found.cause)
            self._log.info("no forecast from the provider", provider=name, why=str(found))
            return
        self._provider_forecast = await run_with_breaks(self.archive.banded_incrementally(found, self.history))
        if self.archive.add(self._provider_forecast):
            self._metrics.count_forecast(self._provider_forecast.model)
            await self._save([self._provider_forecast])

    async def _fetch_past(self, now_s: float) -> None:
        """What the provider says of the past today."""
        reading = self._reading()
        found = await self._fetcher.past(now_s, self.history, reading.as_of if reading is not None else 0)
        if isinstance(found, Refusal):
            self._log.info("nothing of the past from the provider", why=str(found))
            return
        added = 0
        for i, one in enumerate(found, 1):
            added += self.history.add(one) in (AddResult.NEW, AddResult.REVISION)
            if i % READINGS_BETWEEN_BREAKS == 0:
                await asyncio.sleep(0)
        if added:
            self._log.info("past", said=len(found), added=added)

    def _choose_forecast(self, now_s: float) -> None:
        """Put a forecast in force."""
        refusal = self._fetcher.forecast_refusal
        refused = fallback_reason_of([(self._settings.provider, refusal)]) if refusal is not None else ""
        provider_forecast, own = (
            self._unless_expired(one, now_s) for one in (self._provider_forecast, self._own_forecast)
        )
        chosen = provider_forecast
        if provider_forecast is None and own is not None:
            chosen = own
            if refused:
                reason = "; ".join(part for part in (refused, own.fallback_reason) if part)
                chosen = replace(own, fallback_reason=reason)
        if chosen != self.forecast:
            self.forecast = chosen
        self.forecast_reason = "; ".join(p for p in (refused, self._own_reason) if p) if chosen is None else ""

    def _unless_expired(self, forecast: CarbonForecast | None, now_s: float) -> CarbonForecast | None:
        """A forecast that is neither too old nor over, nor issued ahead of time."""
        age_max_s = AGE_MAX_S / self._speedup + ISSUE_MIN_S
        if forecast is None or not -AHEAD_MAX_S <= now_s - forecast.issued_at_s <= age_max_s:
            return None
        return forecast if forecast.bands and forecast.bands[-1].ends_at_s > now_s else None

    async def _score(self, now_s: float) -> None:
        """All models, when more is known than the last time, and not all the time."""
        known = (len(self.archive), self.history.version)
        lead_s, horizon_s = self._limits.step_s / self._speedup, self._limits.horizon_s / self._speedup
        if known == self._scored_of or 0 <= now_s - self._scored_s < max(SCORE_MIN_S, lead_s / SCORINGS_PER_STEP):
            return
        self._scored_of, self._scored_s = known, now_s
        for model in self.archive.models:
            parts = self.archive.scores_incrementally(self.history, model, now_s, lead_s=lead_s, horizon_s=horizon_s)
            self._scores[model] = await run_with_breaks(parts)

    async def _save(self, forecasts: list[CarbonForecast]) -> None:
        if self._files is None or not forecasts:
            return
        try:
            await asyncio.to_thread(self._files.append, forecasts)
        except OSError as error:
            self._disk_failed(error)
        else:
            self._disk_ok = True

    def _disk_failed(self, error: OSError) -> None:
        """Log the first failure only: the archive in memory continues."""
        if self._disk_ok:
            self._log.warning("forecasts are not kept on disk", error=str(error))
        self._disk_ok = False

    def _update_metrics(self, now_s: float) -> None:
        """Metrics, and the ratios that are written."""
        found = [one for one in (self.ratio(window, now_s) for window in WINDOWS) if one is not None]
        self._metrics.update_forecasts(now_s, len(self.history), found, self.forecast)
        if self._scored_s == now_s:
            self._metrics.update_scores(self._scores.values())


async def run_with_breaks(computation: Incremental[T]) -> T:
    """Run an incremental computation, giving way to others at each of its breaks."""
    breaks = Breaks(computation)
    for _ in breaks:
        await asyncio.sleep(0)
    return breaks.result

"""What comes, of one zone: the forecast in force, what past ones were worth, and the ratio to the usual.

Only the zone's leader refreshes; who follows adopts what the leader wrote. Readers take what is in memory.
In force is the provider's forecast where it has one, with bands from its own errors; else ours, with the reason.
All of ours are issued once a step and again when a whole step more is known of the past; every issue is archived.
A replay runs `speedup` times as fast: bands, leads and scores are in wall time, so its hours and days are as much
shorter, and its hour of the day is that of the recording. Its forecasts are not kept on disk: the next one starts anew.
Nothing here keeps the event loop for long: long work is done in parts, files in a thread.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import structlog

from carbon_feed.archive_files import ArchiveFiles
from carbon_feed.asking import Asking
from carbon_feed.core.history import History, Kept
from carbon_feed.core.ladder import reason_of
from carbon_feed.core.ratio import EXPANDING, WINDOWS, ratio
from carbon_feed.core.validate import Refusal
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.archive import Archive
from carbon_feed.forecast.issue import Issuer, Origin
from carbon_feed.forecast.parts import Parts, T
from carbon_feed.providers.base import Provider
from carbon_feed.settings import CarbonFeedSettings
from carbon_feed.zone_metrics import ZoneMetrics
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, CarbonScores
from trefoil.runtime.keys import Keys
from trefoil.runtime.state import Delete, Put, State, Write

REFRESH_MIN_S: Final = 0.25  # a replay may say something new every few milliseconds
ISSUE_MIN_S: Final = 1.0  # of a fast replay some steps are left out
HORIZON_MIN_S: Final = 30.0  # a forecast that is over sooner is of use to nobody
SCORE_MIN_S: Final = 10.0
SCORES_A_STEP: Final = 4  # all of a full archive are a quarter of a second of CPU
FOLLOW_SCORES_S: Final = 60.0
PART_READINGS: Final = 32


class ZoneOutlook:
    """One zone. `forecast` is what everybody is told; `forecast_reason` says why there is none."""

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
        self.archive = Archive(settings.series, settings.outlook.archive_max)
        self.forecast: CarbonForecast | None = None
        self.forecast_reason = "none was issued yet"
        self._settings, self._wanted = settings, settings.outlook
        self._reading, self._metrics = reading, metrics
        self._speedup = provider.speedup
        self._asking = Asking(settings, provider)
        self._issuers = {
            name: Issuer(history, model, self._wanted.step_s, self._wanted.horizon_s, self._speedup)
            for name, model in MODELS.items()
        }
        played = settings.override.base if settings.provider == "override" else settings.provider
        self._files = None if played == "trace" else ArchiveFiles(settings.state_dir, settings.series)
        self._restored = False
        self._disk_ok = True
        self._refreshed_s = self._issued_s = self._scored_s = self._followed_s = float("-inf")
        self._origin: tuple[float, float] | None = None
        self._own: CarbonForecast | None = None
        self._own_why = ""
        self._theirs: CarbonForecast | None = None
        self._scores: dict[str, CarbonScores] = {}
        self._scored_of: tuple[int, int] = (-1, -1)
        self._ratios: dict[str, tuple[CarbonReading, int, CarbonRatio | None]] = {}
        self._adopted_ratio: CarbonRatio | None = None
        self._written: dict[str, object] = {}
        self._log = structlog.get_logger().bind(zone=settings.zone)

    def ratio(self, window: str = EXPANDING, now_s: float = 0.0) -> CarbonRatio | None:
        """Current over average intensity; None: less than 24 h of the window are known.

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
        """What was issued so far was worth, model by model; in wall time."""
        return tuple(self._scores.values())

    async def refresh(self, now_s: float) -> bool:
        """Issue, ask and score what is due; whether something changed. For the zone's leader alone, one at a time."""
        if 0 <= now_s - self._refreshed_s < REFRESH_MIN_S:
            return False
        self._refreshed_s = now_s
        before = self.forecast, self.forecast_reason, dict(self._scores), self.history.version
        if not self._restored:
            await self._restore(now_s)
        await self._issue(now_s)
        self._choose(now_s)
        if self._asking.past_due(now_s):
            await self._look_back(now_s)
            await self._issue(now_s)
        if self._asking.forecast_due(now_s):
            await self._ask(now_s)
        self._choose(now_s)
        await self._score(now_s)
        self._update_metrics(now_s)
        return before != (self.forecast, self.forecast_reason, self._scores, self.history.version)

    def writes(self, keys: Keys) -> list[Write]:
        """What differs from what was last written; `forget_written` after a write that failed."""
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
        """Redis may hold anything: everything is written again."""
        self._written.clear()

    def adopt(
        self,
        forecast: CarbonForecast | None,
        ratio: CarbonRatio | None = None,
        scores: CarbonScores | Sequence[CarbonScores] | None = None,
    ) -> None:
        """Take over what the zone's leader wrote; who leads next goes on from it."""
        if forecast != self.forecast:  # who has looked at the old one would look at an equal one again
            self.forecast = forecast
            if forecast is not None:
                self._remember(forecast)
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
            await self._keep([forecast])

    async def _restore(self, now_s: float) -> None:
        """Go on with what an earlier process issued."""
        self._restored = True
        if self._files is None:
            return
        try:
            lines = await asyncio.to_thread(self._files.lines)
        except OSError as error:
            self._disk_refused(error)
            return
        strange = await in_parts(self._files.into(self.archive, lines))
        for model in self.archive.models:
            newest = self.archive.latest(model, now_s)
            if newest is not None and (model == self._wanted.model or model not in MODELS):
                self._remember(newest)
        self._log.info("forecasts restored", forecasts=len(self.archive), strange_lines=strange)

    def _remember(self, forecast: CarbonForecast) -> None:
        """One that was not made here."""
        self.archive.add(forecast)
        held = self._own if forecast.model in MODELS else self._theirs
        if held is not None and held.issued_at_s >= forecast.issued_at_s:
            return
        if forecast.model in MODELS:
            self._own = forecast
        else:
            self._theirs = forecast

    async def _issue(self, now_s: float) -> None:
        """Ours, all models, when there is a new origin."""
        if self._wanted.model == "none":
            self._own_why = "outlook.model is none"
            return
        if self._wanted.horizon_s / self._speedup < HORIZON_MIN_S:
            hours = self._wanted.horizon_s / 3600
            self._own_why = f"a replay {self._speedup:g} times as fast: {hours:g} h of it are over before they are read"
            return
        origin = self._issuers[self._wanted.model].origin(now_s)
        if not isinstance(origin, Origin):
            self._own_why = origin
            return
        fresh = (round(origin.begin_s, 3), round(origin.until_s, 3))
        if fresh == self._origin or 0 <= now_s - self._issued_s < ISSUE_MIN_S:
            return
        self._origin, self._issued_s = fresh, now_s
        made = []
        for name, issuer in self._issuers.items():
            issued = await in_parts(issuer.parts(now_s))
            if name == self._wanted.model:
                self._own, self._own_why = issued.forecast or self._own, issued.why
            if issued.forecast is not None and self.archive.add(issued.forecast):
                made.append(issued.forecast)
                self._metrics.count_forecast(name)
        await self._keep(made)

    async def _ask(self, now_s: float) -> None:
        """The provider's."""
        found = await self._asking.forecast(now_s)
        if isinstance(found, Refusal):
            name = self._settings.provider
            self._metrics.count_error(name, found.cause)
            self._log.info("no forecast from the provider", provider=name, why=str(found))
            return
        self._theirs = await in_parts(self.archive.banded_parts(found, self.history))
        if self.archive.add(self._theirs):
            self._metrics.count_forecast(self._theirs.model)
            await self._keep([self._theirs])

    async def _look_back(self, now_s: float) -> None:
        """What the provider says of the past today."""
        reading = self._reading()
        found = await self._asking.past(now_s, self.history, reading.as_of if reading is not None else 0)
        if isinstance(found, Refusal):
            self._log.info("nothing of the past from the provider", why=str(found))
            return
        added = 0
        for i, one in enumerate(found, 1):
            added += self.history.add(one) in (Kept.NEW, Kept.REVISION)
            if i % PART_READINGS == 0:
                await asyncio.sleep(0)
        if added:
            self._log.info("past", said=len(found), added=added)

    def _choose(self, now_s: float) -> None:
        """Put a forecast in force."""
        refusal = self._asking.refusal
        refused = reason_of([(self._settings.provider, refusal)]) if refusal is not None else ""
        theirs, own = (self._still(one, now_s) for one in (self._theirs, self._own))
        chosen = theirs
        if theirs is None and own is not None:
            chosen = own
            if refused:
                reason = "; ".join(part for part in (refused, own.fallback_reason) if part)
                chosen = replace(own, fallback_reason=reason)
        if chosen != self.forecast:
            self.forecast = chosen
        self.forecast_reason = "; ".join(p for p in (refused, self._own_why) if p) if chosen is None else ""

    def _still(self, forecast: CarbonForecast | None, now_s: float) -> CarbonForecast | None:
        """A forecast that is neither too old nor over."""
        if forecast is None or now_s - forecast.issued_at_s > self._wanted.age_max_s / self._speedup + ISSUE_MIN_S:
            return None
        return forecast if forecast.bands and forecast.bands[-1].ends_at_s > now_s else None

    async def _score(self, now_s: float) -> None:
        """All models, when more is known than the last time, and not all the time."""
        known = (len(self.archive), self.history.version)
        lead_s, horizon_s = self._wanted.step_s / self._speedup, self._wanted.horizon_s / self._speedup
        if known == self._scored_of or 0 <= now_s - self._scored_s < max(SCORE_MIN_S, lead_s / SCORES_A_STEP):
            return
        self._scored_of, self._scored_s = known, now_s
        for model in self.archive.models:
            parts = self.archive.scores_parts(self.history, model, now_s, lead_s=lead_s, horizon_s=horizon_s)
            self._scores[model] = await in_parts(parts)

    async def _keep(self, forecasts: list[CarbonForecast]) -> None:
        if self._files is None or not forecasts:
            return
        try:
            await asyncio.to_thread(self._files.append, forecasts)
        except OSError as error:
            self._disk_refused(error)
        else:
            self._disk_ok = True

    def _disk_refused(self, error: OSError) -> None:
        """Said once: the archive in memory goes on."""
        if self._disk_ok:
            self._log.warning("forecasts are not kept on disk", error=str(error))
        self._disk_ok = False

    def _update_metrics(self, now_s: float) -> None:
        """Metrics, and the ratios that are written."""
        found = [one for one in (self.ratio(window, now_s) for window in WINDOWS) if one is not None]
        self._metrics.update_forecasts(now_s, len(self.history), found, self.forecast)
        if self._scored_s == now_s:
            self._metrics.update_scores(self._scores.values())


async def in_parts(parts: Parts[T]) -> T:
    """Long work, giving way at each of its breaks."""
    while True:
        try:
            next(parts)
        except StopIteration as done:
            result: T = done.value
            return result
        await asyncio.sleep(0)

"""The gRPC servicer of the feed, which only translates: it answers from memory, and no call waits for another.

The message of a reading or of a forecast is made once, however many ask for it or watch it.
"""

import asyncio
import dataclasses
import functools
import itertools
import math
import operator
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any, Final

from carbon_feed.core.history import Piece, check_series
from carbon_feed.history.core.ratio import EXPANDING, WINDOWS
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.serving.core import queries
from carbon_feed.serving.core.change_filter import Announced, ChangeFilter
from carbon_feed.zones import Zone, Zones, load_zones
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from trefoil.core import errors
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Series
from trefoil.core.common import IdentityKey
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.state import series_name

MICROS: Final = 1_000_000
WATCHERS_MAX: Final = 1_000
PIECE: Final = 50  # messages that are made at once: others are answered in between
WAKEUPS_AT_ONCE: Final = 4  # watchers that are woken before others are answered


class FairWakeup:
    """Fair wake-up of many watchers: a few at a time, so that calls are answered in between."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait_turn(self) -> None:
        """Wait until it is the caller's turn."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._next)
        await turn

    def _next(self) -> None:
        for _ in range(min(WAKEUPS_AT_ONCE, len(self._waiting))):
            turn = self._waiting.popleft()
            if not turn.done():  # its watcher may be gone
                turn.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)


class CarbonFeedServicer(pb_grpc.CarbonFeedServicer):  # type: ignore[misc]
    """Servicer of the feed's RPCs. Zones are found by our name and by every other name of the registry."""

    def __init__(
        self,
        feeds: Sequence[ZoneLoop],
        zones: Zones | None = None,
        clock: Clock | None = None,
        watchers_max: int = WATCHERS_MAX,
    ) -> None:
        self._feeds = {feed.series.zone: feed for feed in feeds}
        assert len(self._feeds) == len(feeds), "one feed a zone"
        self._zones = zones or load_zones()
        self._by_id: dict[str, ZoneLoop] = {}
        for feed in feeds:  # a feed may call its zone by another of its names; its own name comes first
            zone = self._zones.get(feed.series.zone)
            self._by_id.setdefault(zone.id if zone is not None else feed.series.zone, feed)
        self._by_id.update(self._feeds)
        self._clock = clock or WallClock()
        self._watchers_max = watchers_max
        self._watchers = 0
        self._wakeup = FairWakeup()
        self._announcements: dict[tuple[str, str], tuple[CarbonReading, Any]] = {}

    async def GetMany(self, request: Any, context: Any) -> Any:
        """Answer the readings in force of one or several zones."""
        response = pb.GetManyResponse()
        for feed in self._requested_feeds(request):
            if feed.reading is not None:
                response.readings.append(_reading_message(IdentityKey(feed.reading)))
            else:
                why = f"no reading of {feed.series.zone} yet"
                response.missing.add(series=codec.to_proto(feed.series), why=why)
        return response

    async def WatchIntensity(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Stream a zone's intensity: now, then as it changes by more than what was asked for."""
        feed = self._feed(request.zone)
        hysteresis = request.hysteresis_ratio if request.HasField("hysteresis_ratio") else None
        watching = ChangeFilter.from_ratios(request.change_ratio, hysteresis)
        if self._watchers >= self._watchers_max:
            raise errors.Unavailable(
                f"{self._watchers} watchers are open", remedy="close some, or ask another replica of the feed"
            )
        self._watchers += 1
        try:
            last: Announced | None = None
            async for reading in feed.watch():
                decision = watching.decide(last, reading)
                last = decision.announced
                if decision.why:
                    await self._wakeup.wait_turn()
                    yield self._announcement(feed, reading, decision.why)
        finally:
            self._watchers -= 1

    async def GetHistory(self, request: Any, context: Any) -> Any:
        """Answer a page of a zone's history."""
        feed = self._feed(request.zone)
        limit = queries.page_limit(request.limit)
        wanted = queries.TimeRange.from_times(*(_time(request, field) for field in ("from_at", "to_at", "as_of_at")))
        now_s = self._clock.now_s()
        page, next_s = queries.page(feed.history, wanted, limit)
        found: list[Piece] = []
        for some in queries.pieces(feed.history, page, request.revisions):
            found += some
            await asyncio.sleep(0)
        response = pb.GetHistoryResponse()
        for at in range(0, len(found), PIECE):
            response.readings.extend(codec.to_proto(queries.piece_reading(piece)) for piece in found[at : at + PIECE])
            await asyncio.sleep(0)
        _set_time(response.as_of_at, min(wanted.as_of_s, now_s), math.ceil)
        if next_s is not None:
            _set_time(response.next_from_at, next_s, math.floor)
        return response

    async def GetForecast(self, request: Any, context: Any) -> Any:
        """Answer a zone's forecast in force."""
        feed = self._feed(request.zone)
        queries.check_forecast_request(request.horizon_s, request.step_s)
        whole = self._forecast(feed, request.model)
        now_s = self._clock.now_s()
        part = queries.forecast_slice(whole, now_s, request.horizon_s, request.step_s, feed.speedup)
        if not part.bands:
            raise errors.Unavailable(
                f"the newest forecast of {feed.series.zone} ended before now, or is shorter than one step",
                remedy="ask for a longer horizon or a shorter step, and look at GetZoneHealth",
            )
        return _forecast_message(IdentityKey(part))

    async def GetRatio(self, request: Any, context: Any) -> Any:
        """Answer the ratio of a zone's intensity to its average."""
        feed = self._feed(request.zone)
        window = request.window or EXPANDING
        if window not in WINDOWS:
            raise errors.InvalidInput(
                "no such window", field="window", value=window, remedy=errors.one_of(WINDOWS, window)
            )
        found = feed.forecasts.ratio(window, self._clock.now_s())
        if found is None:
            raise errors.Unavailable(
                f"no ratio of {feed.series.zone}: less than 24 h of the window {window!r} are known",
                remedy="wait, or let the provider's past be read (GetZoneHealth: history_intervals)",
            )
        return pb.GetRatioResponse(ratio=codec.to_proto(found))

    async def GetScores(self, request: Any, context: Any) -> Any:
        """Answer the scores of a zone's forecasts."""
        feed = self._feed(request.zone)
        scores = feed.forecasts.scores()
        models = sorted({one.model for one in scores})
        if request.model and request.model not in models:
            raise errors.NotFound("no such model", field="model", value=request.model, remedy=_remedy(models))
        chosen = (one for one in scores if request.model in ("", one.model))
        return pb.GetScoresResponse(scores=[codec.to_proto(one) for one in chosen])

    async def ListForecasts(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Stream issued forecasts of a zone."""
        feed = self._feed(request.zone)
        archive = feed.forecasts.archive
        if request.model and request.model not in archive.models:
            raise errors.NotFound("no such model", field="model", value=request.model, remedy=_remedy(archive.models))
        rows = archive.rows(feed.history)
        for (model, issued_at_s), bands in itertools.groupby(rows, operator.itemgetter("model", "issued_at_s")):
            if request.model in ("", model):
                yield _archived(model, issued_at_s, bands)
            await asyncio.sleep(0)

    async def ListZones(self, request: Any, context: Any) -> Any:
        """Answer the zones that are served."""
        response = pb.ListZonesResponse()
        for zone in self._listed(request.name):
            feed = self._feeds.get(zone.id)
            if feed is None and request.polled_only:
                continue
            names = {field: getattr(zone, field) for field in ZONE_FIELDS}
            added = response.zones.add(**names, polled=feed is not None)
            if feed is not None:
                added.series.CopyFrom(codec.to_proto(feed.series))
        return response

    async def GetZoneHealth(self, request: Any, context: Any) -> Any:
        """Answer a zone's health."""
        feeds: Iterable[ZoneLoop] = [self._feed(request.zone)] if request.zone else self._feeds.values()
        now_s = self._clock.now_s()
        return pb.GetZoneHealthResponse(zones=[codec.to_proto(feed.health(now_s)) for feed in feeds])

    def _announcement(self, feed: ZoneLoop, reading: CarbonReading, why: str) -> Any:
        """One message for all watchers of the same reading."""
        key = feed.series.zone, why
        made = self._announcements.get(key)
        if made is None or made[0] is not reading:
            if len(self._announcements) >= ANNOUNCEMENTS_MAX:
                self._announcements.clear()
            made = reading, pb.WatchIntensityResponse(reading=codec.to_proto(reading), why=why)
            self._announcements[key] = made
        return made[1]

    def _forecast(self, feed: ZoneLoop, model: str) -> CarbonForecast:
        forecasts = feed.forecasts
        if not model:
            if forecasts.forecast is None:
                raise errors.Unavailable(
                    f"no forecast of {feed.series.zone}: {forecasts.forecast_reason or 'none was issued yet'}",
                    remedy="plan without one; GetZoneHealth tells how much of the past is known",
                )
            return forecasts.forecast
        found = forecasts.archive.latest(model)
        if found is None:
            models = sorted(forecasts.archive.models)
            raise errors.NotFound("no such model", field="model", value=model, remedy=_remedy(models))
        return found

    def _requested_feeds(self, request: Any) -> list[ZoneLoop]:
        """Feeds of the zones that a caller asks for at once; different series only where each is spelled out."""
        if request.series and request.zones:
            raise errors.InvalidInput(
                "given beside zones", field="series", value=len(request.series), remedy="give zones or series, not both"
            )
        if request.series:
            return _without_repeats([self._feed_of(codec.from_proto(one)) for one in request.series], "series")
        found = _without_repeats([self._feed(name) for name in request.zones], "zones") or list(self._feeds.values())
        for feed in found[1:]:
            _comparable(found[0].series, feed.series)
        return found

    def _feed_of(self, series: Series) -> ZoneLoop:
        """The feed of a series that is spelled out."""
        feed = self._feed(series.zone)
        for field, value in (("method", series.method), ("factors", series.factors)):
            if not value:
                raise errors.InvalidInput(
                    f"not given for {series.zone}", field=f"series.{field}", remedy="spell out zone, method and factors"
                )
            ours = getattr(feed.series, field)
            if value != ours:
                raise errors.NotFound(
                    f"{feed.series.zone} is not read so",
                    field=f"series.{field}",
                    value=value.name.lower(),
                    remedy=f"use {ours.name.lower()}, or use a separate feed for it",
                )
        return feed

    def _feed(self, name: str) -> ZoneLoop:
        feed = self._feeds.get(name)
        if feed is not None:
            return feed
        if not name:
            raise errors.InvalidInput("not given", field="zone", remedy=_remedy(self._feeds))
        zone = self._zones.get(name)
        if zone is None or zone.id not in self._by_id:
            raise errors.NotFound("no such zone", field="zone", value=name, remedy=_remedy(self._feeds))
        return self._by_id[zone.id]

    def _listed(self, name: str) -> list[Zone]:
        registered = {zone.id for zone in self._zones}
        own = [Zone(id=zone, name="") for zone in self._feeds if zone not in registered]
        if not name:
            return [*self._zones, *own]
        return [next((zone for zone in own if zone.id == name), None) or self._zones.find(name)]


ANNOUNCEMENTS_MAX: Final = 256
BAND_FIELDS: Final = tuple(field.name for field in dataclasses.fields(CarbonBand))
ZONE_FIELDS: Final = (
    "id", "name", "timezone", "aliases", "neso", "electricity_maps", "watttime", "eia", "clouds"
)  # fmt: skip


def _comparable(one: Series, other: Series) -> None:
    """Raises errors.SeriesMismatch where two zones' intensities mean different things."""
    try:
        check_series(Series(other.zone, one.method, one.factors), other)
    except errors.SeriesMismatch as error:
        raise errors.SeriesMismatch(
            f"{series_name(one)} and {series_name(other)} must not be compared",
            field="zones",
            remedy="ask for zones of one method and factors, or spell each out in series",
        ) from error


def _without_repeats(feeds: list[ZoneLoop], field: str) -> list[ZoneLoop]:
    names = [feed.series.zone for feed in feeds]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise errors.InvalidInput("asked for twice", field=field, value=twice, remedy="name each zone once")
    return feeds


def _remedy(names: Iterable[str]) -> str:
    return errors.one_of(sorted(names), none="none is known here: ask the zone's holder (GetZoneHealth)")


def _archived(model: str, issued_at_s: float, rows: Iterable[Mapping[str, Any]]) -> Any:
    """One forecast with what came of each of its bands."""
    response = pb.ListForecastsResponse(model=model)
    _set_time(response.issued_at, issued_at_s, round)
    for row in rows:
        response.bands.append(codec.to_proto(CarbonBand(**{name: row[name] for name in BAND_FIELDS})))
        actual = row["actual_g_per_kwh"]
        response.actual_g_per_kwh.append(math.nan if actual is None else actual)
    return response


@functools.lru_cache(maxsize=64)
def _reading_message(reading: IdentityKey[CarbonReading]) -> Any:
    return codec.to_proto(reading.value)


@functools.lru_cache(maxsize=64)
def _forecast_message(forecast: IdentityKey[CarbonForecast]) -> Any:
    return pb.GetForecastResponse(forecast=codec.to_proto(forecast.value))


def _time(message: Any, field: str) -> float | None:
    """UTC seconds; None = unset."""
    if not message.HasField(field):
        return None
    value = getattr(message, field)
    return float((value.seconds * MICROS + value.nanos // 1000) / MICROS)


def _set_time(stamp: Any, at_s: float, rounded: Any) -> None:
    stamp.seconds, micros = divmod(int(rounded(at_s * MICROS)), MICROS)
    stamp.nanos = micros * 1000

"""Electricity Maps v4 (v3 accepted): flow-traced average, direct or lifecycle factors, with a key.

Source: app.electricitymaps.com/docs and facts of its clients. The look-up of the caller's own zone is always off:
with it an unknown zone silently becomes the zone of our address. v3 and v4 differ in the name of that switch only.
A rate that is too high has come back as 401 with a good key: no 401 is final. Free accounts have one zone, for
non-commercial use; forecasts and the past cost.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause
from carbon_feed.providers.base import Provider, ProviderFailure
from carbon_feed.providers.web import (
    HttpClient,
    WebProvider,
    format_utc,
    list_of_objects,
    parse_number,
    parse_utc,
    read_pages,
)
from carbon_feed.settings import CarbonFeedSettings, ElectricityMapsSettings, read_secret
from carbon_feed.zones import provider_zone
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method, Quality

GRANULARITY_S: Final[Mapping[str, float]] = {"5_minutes": 300.0, "15_minutes": 900.0, "hourly": 3600.0}
CALLER_LOOKUP_OFF: Final[Mapping[str, tuple[str, str]]] = {
    "v4": ("disableCallerLookup", "true"),
    "v3": ("shouldUseFallbackCallerLookup", "false"),
}
FORECAST_MAX_H: Final = 72
FORECAST_HOURS: Final = (6, 24, 48, 72)
PAST_MAX_S: Final = 10 * 24 * 3600.0
ROWS: Final = ("data", "history", "forecast")


class ElectricityMapsProvider(WebProvider):
    """Provider of one Electricity Maps zone."""

    name = "electricity_maps"
    speedup = 1.0
    licence = "Electricity Maps terms; free tier: one zone, non-commercial"

    def __init__(self, web: HttpClient, settings: ElectricityMapsSettings, zone: str, factors: Factors) -> None:
        super().__init__(web)
        self.poll_s = settings.poll_s
        self._settings = settings
        self._zone, self._factors = zone, factors
        self._day_only = False
        """Of the past this account has the last day alone."""

    async def read(self, now_s: float) -> Observation:
        parsed = await self._ask("latest", now_s)
        row = parsed if isinstance(parsed, dict) else {}
        return self._cache.remember(self._observation(row, row, (), now_s))

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        hours = next((hours for hours in FORECAST_HOURS if hours * 3600 >= horizon_s), FORECAST_MAX_H)
        points = await self._rows("forecast", now_s, {"horizonHours": str(hours)}, Quality.FORECAST)
        return tuple(point for point in points if point.ends_at_s > now_s)

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        try:
            if not self._day_only:
                return await read_pages(
                    begin_s,
                    end_s,
                    PAST_MAX_S,
                    lambda at_s, until_s: self._rows(
                        "past-range", end_s, {"start": format_utc(at_s), "end": format_utc(until_s)}
                    ),
                )
        except ProviderFailure as failure:
            if failure.refusal.cause not in (Cause.FORBIDDEN, Cause.UNAUTHORISED):
                raise
        found = await self.last_day(end_s)
        self._day_only = True
        return tuple(point for point in found if begin_s <= point.starts_at_s < end_s)

    async def last_day(self, now_s: float) -> tuple[Observation, ...]:
        """Observations of the last 24 h, which free accounts have too."""
        return tuple(await self._rows("history", now_s, {}))

    async def _ask(self, call: str, now_s: float, more: Mapping[str, str] | None = None) -> Any:
        token = read_secret(self._settings.token, "electricity_maps.token")
        version = self._settings.api_version
        switch, off = CALLER_LOOKUP_OFF[version]
        params = {
            "zone": self._zone,
            "emissionFactorType": self._factors.name.lower(),
            "disableEstimations": "false" if self._settings.estimates else "true",
            "temporalGranularity": self._settings.granularity,
            switch: off,
            **(more or {}),
        }
        path = f"/{version}/carbon-intensity/{call}"
        return await self._web.get(path, now_s=now_s, params=params, headers={"auth-token": token}, secrets=(token,))

    async def _rows(
        self, call: str, now_s: float, more: Mapping[str, str], quality: Quality | None = None
    ) -> list[Observation]:
        parsed = await self._ask(call, now_s, more)
        rows = list_of_objects(parsed, ROWS, self.name)
        rows, left_out = self._with_value(rows, lambda row: row.get("carbonIntensity"), ("datetime",))
        beside = tuple(parse_number(row["carbonIntensity"], "electricity_maps carbonIntensity") for row in rows)
        made = (self._observation(row, parsed, beside, now_s, quality) for row in rows)
        points = [replace(point, left_out=left_out) for point in made]
        return sorted(points, key=lambda point: point.starts_at_s)

    def _observation(
        self,
        row: Mapping[str, Any],
        answer: Mapping[str, Any],
        beside: tuple[float, ...],
        now_s: float,
        quality: Quality | None = None,
    ) -> Observation:
        starts_at_s = parse_utc(row.get("datetime"), "electricity_maps datetime")
        granularity = str(row.get("temporalGranularity") or answer.get("temporalGranularity") or "")
        estimated = row.get("isEstimated") is True
        said = str(row.get("emissionFactorType") or answer.get("emissionFactorType") or "")
        method = str(row.get("estimationMethod") or "estimated") if estimated else ""
        observed = row.get("updatedAt") or answer.get("updatedAt")
        return Observation(
            starts_at_s=starts_at_s,
            ends_at_s=starts_at_s + GRANULARITY_S.get(granularity, GRANULARITY_S["hourly"]),
            intensity_g_per_kwh=parse_number(row.get("carbonIntensity"), "electricity_maps carbonIntensity"),
            quality=quality or (Quality.ESTIMATED if estimated else Quality.MEASURED),
            provider=self.name,
            api_version=self._settings.api_version,
            estimation_method=method,
            observed_at_s=min(parse_utc(observed, "updatedAt") if observed else starts_at_s, now_s),
            simulated=False,
            method=Method.AVERAGE,
            factors=Factors[said.upper()] if said.upper() in Factors.__members__ else self._factors,
            zone_asked=self._zone,
            zone_echoed=str(row.get("zone") or answer.get("zone") or ""),
            beside_g_per_kwh=beside,
        )


def make_electricity_maps(settings: CarbonFeedSettings, _now_s: float) -> Provider:
    """Make the provider of `[electricity_maps]`.

    Raises:
        errors.SettingError: no zone or key, or a series that it does not give.
    """
    wanted = settings.electricity_maps
    if settings.series.method is not Method.AVERAGE:
        raise errors.SettingError(
            "electricity_maps gives average intensities only",
            field="method",
            value=settings.method,
            remedy='set method = "average", or use another provider',
        )
    read_secret(wanted.token, "electricity_maps.token")
    zone = wanted.zone or provider_zone(settings, "electricity_maps", "electricity_maps.zone")
    web = HttpClient(settings.web, "electricity_maps", wanted.base_url)
    return ElectricityMapsProvider(web, wanted, zone, settings.series.factors)

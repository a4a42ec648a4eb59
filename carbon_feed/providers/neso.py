"""NESO Carbon Intensity (Great Britain), no key: average, direct factors (its table has 0 for nuclear and wind).

Source: github.com/carbon-intensity/api-definitions, 2024-10-01. UTC, half-hour windows, integers in gCO2/kWh.
`/intensity` alone is the latest complete half hour. Therefore the window that holds now is picked from `fw24h`. There
`actual` is null until about half an hour after the end, and is revised for a day. `forecast` is revised as well.
Regions (1..14 networks, 15..17 countries) and postcodes have forecasts only. By postcode or region the current window
comes as a list and a range as an object; both are read.
"""

import datetime
from collections.abc import Mapping
from typing import Any, Final

from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause
from carbon_feed.providers.base import Provider, ProviderFailure
from carbon_feed.providers.web import (
    HttpClient,
    WebProvider,
    list_of_objects,
    parse_number,
    parse_utc,
    point_holding,
    read_pages,
)
from carbon_feed.settings import CarbonFeedSettings
from carbon_feed.zones import zone_of
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method, Quality

WINDOW_S: Final = 1800.0
FORECAST_MAX_S: Final = 48 * 3600.0
PAST_MAX_S: Final = 14 * 24 * 3600.0  # of one query


class NesoProvider(WebProvider):
    """Provider of Great Britain by NESO: national, or one region."""

    name = "neso"
    speedup = 1.0
    licence = "CC BY 4.0, National Energy System Operator"

    def __init__(self, web: HttpClient, poll_s: float, region_id: int | None = None, postcode: str = "") -> None:
        super().__init__(web)
        self.poll_s = poll_s
        self._zone = f"regionid {region_id}" if region_id is not None else postcode or "GB"
        self._region_id, self._postcode = region_id, postcode

    async def read(self, now_s: float) -> Observation:
        points = await self._ask(_minute(now_s // WINDOW_S * WINDOW_S), "fw24h", now_s)
        return self._cache.remember(point_holding(points, now_s), points)

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        reach = "fw24h" if horizon_s <= FORECAST_MAX_S / 2 else "fw48h"
        points = await self._ask(_minute(now_s // WINDOW_S * WINDOW_S), reach, now_s)
        return tuple(point for point in points if point.ends_at_s > now_s)

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        return await read_pages(
            begin_s, end_s, PAST_MAX_S, lambda at_s, until_s: self._ask(_minute(at_s), _minute(until_s), end_s)
        )

    async def _ask(self, begin: str, reach: str, now_s: float) -> list[Observation]:
        if self._region_id is not None:
            path = f"/regional/intensity/{begin}/{reach}/regionid/{self._region_id}"
        elif self._postcode:
            path = f"/regional/intensity/{begin}/{reach}/postcode/{self._postcode}"
        else:
            path = f"/intensity/{begin}/{reach}"
        parsed = await self._web.get(path, now_s=now_s)
        rows, echoed = self._rows(parsed)
        rows, left_out = self._with_value(rows, _said, ("from", "to"))
        said = [self._value(row) for row in rows]
        beside = tuple(value for value, _ in said)
        return [
            self._observation(row, value, quality, echoed, beside, left_out, now_s)
            for row, (value, quality) in zip(rows, said, strict=True)
        ]

    def _rows(self, parsed: object) -> tuple[list[dict[str, Any]], str]:
        """Windows, and the region that they are for."""
        region = parsed.get("data") if isinstance(parsed, dict) else None
        if isinstance(region, list) and region and isinstance(region[0], dict) and "data" in region[0]:
            region = region[0]
        if isinstance(region, dict):
            if region == {}:
                raise ProviderFailure(Cause.EMPTY, "neso answered 200 with no region")
            asked = self._region_id is not None
            echoed = f"regionid {region.get('regionid')}" if asked else str(region.get("postcode") or "").upper()
            return list_of_objects(region, ("data",), self.name), echoed
        return list_of_objects(parsed, ("data",), self.name), ""

    def _value(self, row: Mapping[str, Any]) -> tuple[float, Quality]:
        intensity = row["intensity"]
        if not isinstance(intensity, dict):
            raise ProviderFailure(Cause.WRONG_SHAPE, "neso gave a window without intensity")
        if intensity.get("actual") is not None:
            return parse_number(intensity["actual"], "neso actual"), Quality.ESTIMATED
        return parse_number(intensity.get("forecast"), "neso forecast"), Quality.FORECAST

    def _observation(
        self,
        row: Mapping[str, Any],
        value: float,
        quality: Quality,
        echoed: str,
        beside: tuple[float, ...],
        left_out: int,
        now_s: float,
    ) -> Observation:
        starts_at_s = parse_utc(row.get("from"), "neso from")
        actual = quality is Quality.ESTIMATED
        return Observation(
            starts_at_s=starts_at_s,
            ends_at_s=parse_utc(row.get("to"), "neso to"),
            intensity_g_per_kwh=value,
            quality=quality,
            provider=self.name,
            api_version="2024-10-01",
            estimation_method="NESO's estimate of what was" if actual else "NESO's forecast of this half hour",
            observed_at_s=min(starts_at_s, now_s),
            simulated=False,
            method=Method.AVERAGE,
            factors=Factors.DIRECT,
            zone_asked=self._zone.upper() if self._postcode else self._zone,
            zone_echoed=echoed,
            beside_g_per_kwh=beside,
            left_out=left_out,
        )


def make_neso(settings: CarbonFeedSettings, _now_s: float) -> Provider:
    """Make the provider of `[neso]`.

    Raises:
        errors.SettingError: the zone is not British, or the series is one that it does not give.
    """
    series, wanted = settings.series, settings.neso
    if (series.method, series.factors) != (Method.AVERAGE, Factors.DIRECT):
        raise errors.SettingError(
            "neso gives average intensities by direct factors only",
            field="method, factors",
            value=(settings.method, settings.factors),
            remedy='set method = "average" and factors = "direct", or use another provider',
        )
    region_id, postcode = wanted.region_id, wanted.postcode.upper()
    zone = zone_of(settings)
    if region_id is None and not postcode:
        if zone is None or not zone.neso:
            raise errors.SettingError(
                "neso knows Great Britain only",
                field="zone",
                value=settings.zone,
                remedy="use GB or GB-1..GB-17, or set neso.region_id or neso.postcode",
            )
        region_id = None if zone.neso == "national" else int(zone.neso)
    return NesoProvider(HttpClient(settings.web, "neso", wanted.base_url), wanted.poll_s, region_id, postcode)


def _said(row: Mapping[str, Any]) -> object:
    """What a window says; None: nothing. Of a window of another shape that shape, which `_value` refuses."""
    intensity = row.get("intensity")
    if not isinstance(intensity, dict):
        return intensity
    return intensity.get("actual") if intensity.get("actual") is not None else intensity.get("forecast")


def _minute(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%MZ")

"""WattTime v3: marginal (co2_moer) or average (co2_aoer) intensity by direct factors, with an account.

Source: docs.watttime.org and its OpenAPI description. A token lasts 30 minutes; a 401 is answered by one new login, a
second 401 is a failure. Values are lbs CO2 per MWh; other units are refused. On 2026-04-22 every point was 0.0 with
status 200 for more than ten hours: therefore the nowcast is read together with the day to come, which tells an outage
from a grid that curtails. Free accounts have CAISO_NORTH.
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
    point_holding,
    read_pages,
)
from carbon_feed.settings import CarbonFeedSettings, WattTimeSettings, read_secret
from carbon_feed.zones import provider_zone
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method, Quality
from trefoil.core.units import g_per_kwh_of_lbs_per_mwh

UNITS: Final = "lbs_co2_per_mwh"
SIGNALS: Final[Mapping[Method, str]] = {Method.MARGINAL: "co2_moer", Method.AVERAGE: "co2_aoer"}
TOKEN_S: Final = 25 * 60.0  # of 30 minutes
PERIOD_S: Final = 300.0
READ_H: Final = 24
FORECAST_MAX_H: Final = 72
PAST_MAX_S: Final = 32 * 24 * 3600.0 - PERIOD_S  # both ends are inclusive


class WattTimeProvider(WebProvider):
    """Provider of one WattTime region and signal."""

    name = "watttime"
    speedup = 1.0
    licence = "WattTime terms; free tier: CAISO_NORTH"

    def __init__(self, web: HttpClient, settings: WattTimeSettings, region: str, method: Method) -> None:
        super().__init__(web)
        self.poll_s = settings.poll_s
        self._settings = settings
        self._region, self._method, self._signal = region, method, SIGNALS[method]
        self._token, self._token_until_s = "", float("-inf")
        self._secrets: tuple[str, ...] = ()

    async def read(self, now_s: float) -> Observation:
        points = await self._points("/v3/forecast", {"horizon_hours": str(READ_H)}, now_s, Quality.ESTIMATED)
        return self._cache.remember(point_holding(points, now_s), points)

    async def forecast(self, now_s: float, horizon_s: float) -> tuple[Observation, ...]:
        hours = min(FORECAST_MAX_H, max(1, round(horizon_s / 3600)))
        points = await self._points("/v3/forecast", {"horizon_hours": str(hours)}, now_s, Quality.FORECAST)
        return tuple(point for point in points if point.ends_at_s > now_s)

    async def past(self, begin_s: float, end_s: float) -> tuple[Observation, ...]:
        async def read(at_s: float, until_s: float) -> list[Observation]:
            span = {"start": format_utc(at_s), "end": format_utc(until_s)}
            return await self._points("/v3/historical", span, end_s, Quality.ESTIMATED)

        return await read_pages(begin_s, end_s, PAST_MAX_S, read)

    async def _login(self, now_s: float) -> None:
        username = read_secret(self._settings.username, "watttime.username")
        password = read_secret(self._settings.password, "watttime.password")
        answer = await self._web.get("/login", now_s=now_s, basic=(username, password), secrets=(password, username))
        self._secrets = (password, username)
        token = answer.get("token") if isinstance(answer, dict) else None
        if not isinstance(token, str) or not token:
            raise ProviderFailure(Cause.WRONG_SHAPE, "watttime answered a login without a token")
        self._token, self._token_until_s = token, now_s + TOKEN_S

    async def _ask(self, path: str, params: Mapping[str, str], now_s: float) -> Any:
        fresh = not self._token or now_s >= self._token_until_s
        if fresh:
            await self._login(now_s)
        try:
            return await self._get(path, params, now_s)
        except ProviderFailure as failure:
            if failure.refusal.cause is not Cause.UNAUTHORISED:
                raise
            self._token = ""
            if fresh:
                raise
        await self._login(now_s)  # once: a second 401 is a failure, and the poller backs off
        try:
            return await self._get(path, params, now_s)
        except ProviderFailure:
            self._token = ""
            raise

    async def _get(self, path: str, params: Mapping[str, str], now_s: float) -> Any:
        bearer = {"Authorization": f"Bearer {self._token}"}
        return await self._web.get(
            path, now_s=now_s, params=params, headers=bearer, secrets=(self._token, *self._secrets)
        )

    async def _points(self, path: str, more: Mapping[str, str], now_s: float, quality: Quality) -> list[Observation]:
        params = {"region": self._region, "signal_type": self._signal, **more}
        parsed = await self._ask(path, params, now_s)
        rows = list_of_objects(parsed, ("data",), self.name)
        meta = parsed.get("meta")
        if not isinstance(meta, dict):
            raise ProviderFailure(Cause.WRONG_SHAPE, "watttime answered without meta")
        if meta.get("units") != UNITS:
            raise ProviderFailure(
                Cause.WRONG_UNIT, f"watttime answered in {str(meta.get('units'))[:40]!r}, not {UNITS}"
            )
        if meta.get("signal_type", self._signal) != self._signal:
            raise ProviderFailure(
                Cause.WRONG_SERIES,
                f"watttime answered {str(meta.get('signal_type'))[:40]!r}, asked for {self._signal!r}",
            )
        rows, left_out = self._with_value(rows, lambda row: row.get("value"), ("point_time",))
        values = [g_per_kwh_of_lbs_per_mwh(parse_number(row.get("value"), "watttime value")) for row in rows]
        beside = tuple(values)
        made = (
            self._observation(row, value, meta, beside, now_s, quality) for row, value in zip(rows, values, strict=True)
        )
        points = [replace(point, left_out=left_out) for point in made]
        return sorted(points, key=lambda point: point.starts_at_s)

    def _observation(
        self,
        row: Mapping[str, Any],
        value: float,
        meta: Mapping[str, Any],
        beside: tuple[float, ...],
        now_s: float,
        quality: Quality,
    ) -> Observation:
        starts_at_s = parse_utc(row.get("point_time"), "watttime point_time")
        period_s = meta.get("data_point_period_seconds")
        generated = row.get("last_updated") or meta.get("generated_at")
        notes = [_model(meta), "imputed" if row.get("imputed_data_used") is True else "", *_warnings(meta)]
        return Observation(
            starts_at_s=starts_at_s,
            ends_at_s=starts_at_s + (PERIOD_S if period_s is None else parse_number(period_s, "watttime period")),
            intensity_g_per_kwh=value,
            quality=quality,
            provider=self.name,
            api_version="v3",
            estimation_method=", ".join(note for note in notes if note),
            observed_at_s=min(parse_utc(generated, "watttime generated_at") if generated else starts_at_s, now_s),
            simulated=False,
            method=self._method,
            factors=Factors.DIRECT,
            zone_asked=self._region,
            zone_echoed=str(meta.get("region") or ""),
            beside_g_per_kwh=beside,
        )


def make_watttime(settings: CarbonFeedSettings, _now_s: float) -> Provider:
    """Make the provider of `[watttime]`.

    Raises:
        errors.SettingError: no region or account, or a series that it does not give.
    """
    wanted = settings.watttime
    if settings.series.factors is not Factors.DIRECT:
        raise errors.SettingError(
            "watttime counts direct emissions only",
            field="factors",
            value=settings.factors,
            remedy='set factors = "direct", or use another provider',
        )
    for field, secret in (("watttime.username", wanted.username), ("watttime.password", wanted.password)):
        read_secret(secret, field)
    region = wanted.region or provider_zone(settings, "watttime", "watttime.region")
    return WattTimeProvider(
        HttpClient(settings.web, "watttime", wanted.base_url), wanted, region, settings.series.method
    )


def _model(meta: Mapping[str, Any]) -> str:
    model = meta.get("model")
    return f"{model.get('type', 'model')} {model.get('date', '')}".strip() if isinstance(model, dict) else "model"


def _warnings(meta: Mapping[str, Any]) -> list[str]:
    warnings = meta.get("warnings")
    kept = warnings[:3] if isinstance(warnings, list) else []
    return [f"warning {str(w.get('type', ''))[:40]}" for w in kept if isinstance(w, dict)]

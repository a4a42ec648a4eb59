"""Settings of the carbon feed (`TREFOIL_CARBON_FEED_...`, deploy/config)."""

import math
import os
import zoneinfo
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, SecretStr, field_validator, model_validator

from carbon_feed.core.trace_playback import INTENSITY_MAX_G_PER_KWH
from carbon_feed.forecast.forecaster import HORIZON_S, STEP_S, grid
from trefoil.core import errors
from trefoil.core.carbon import Factors, Method, Series
from trefoil.core.units import INTENSITY_UNITS, intensity_unit
from trefoil.runtime.config import FIXED, ServiceSettings, Settings
from trefoil.runtime.given.table import TimeUnit
from trefoil.runtime.security.secret_files import read_secret_file

ProviderName = Literal["trace", "constant", "neso", "electricity_maps", "watttime", "override"]
DEFAULT_TRACE = Path(__file__).parent / "data" / "synthetic_duck_72h.csv"
FILE: Final = "file:"
ENVIRONMENT: Final = "env:"


def known_timezone(value: str) -> str:
    """Check an IANA time zone, for pydantic validators."""
    try:
        if value != "UTC":  # a machine without a time zone database knows this one
            zoneinfo.ZoneInfo(value)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:  # OSError: a folder of zones, e.g. Europe
        raise ValueError("no such time zone; write an IANA name, e.g. Europe/London") from error
    return value


def check_secret_reference(reference: SecretStr | None) -> SecretStr | None:
    """Refuse a secret that is in the settings itself; for pydantic validators."""
    if reference is not None and not reference.get_secret_value().startswith((FILE, ENVIRONMENT)):
        raise ValueError("a secret must not stand in the settings: write file:/path or env:NAME")
    return reference


def read_secret(reference: SecretStr | None, field: str) -> str:
    """Read a secret from the file or variable that a setting names; again at each use, since secrets rotate.

    Raises:
        errors.SettingError: none is configured, or the file or variable is absent or empty, or others may read the
            file; never shows the secret.
    """
    if reference is None:
        raise errors.SettingError("no secret", field=field, remedy="name one: file:/path or env:NAME")
    named = reference.get_secret_value()
    if named.startswith(FILE):
        return read_secret_file(Path(named.removeprefix(FILE)), field)
    secret = os.environ.get(named.removeprefix(ENVIRONMENT), "")
    if not secret.strip():
        raise errors.SettingError("is empty", field=field, value=named, remedy="put the secret there")
    return secret.strip()


class TraceReading(Settings):
    """Settings of how a trace is read: the same for the feed, for zones of a scenario and for `carbon backtest`."""

    unit: str = ""
    """Of the intensities: g/kWh, kg/kWh, kg/MWh, t/MWh, lb/MWh, ...; empty = as their column's name says."""
    value_column: str = ""
    """Empty = found by its name, and by `factors` where there are several."""
    time_column: str = ""
    """Empty = found by its name: one in UTC before others."""
    time_unit: TimeUnit = ""
    """Of that column; empty = by its name, or as dates and seconds since 1970 say."""
    timezone: str = ""
    """IANA name, of times without one; empty = UTC. Required for local times."""
    estimates: bool = True
    """Accept rows that their file marks as estimates, which stay estimates; else they are missing."""
    estimated_column: str = ""
    """Which rows are estimates; empty = found by its name, where there is one."""
    gaps: Literal["refuse", "hold", "linear"] = "refuse"
    """Missing rows or values: refuse the file, hold the last value, or interpolate."""
    gap_max_h: float = Field(default=6.0, gt=0)
    """A longer gap is refused whatever `gaps` says."""

    @field_validator("timezone")
    @classmethod
    def _a_timezone(cls, value: str) -> str:
        return known_timezone(value) if value else value

    @field_validator("unit")
    @classmethod
    def _a_unit(cls, value: str) -> str:
        if value and not intensity_unit(value):
            raise ValueError(f"no unit of carbon intensity; use one of {', '.join(INTENSITY_UNITS)}")
        return value


class TraceSettings(TraceReading):
    """Settings of a recorded or synthetic trace that is replayed."""

    path: Path = DEFAULT_TRACE
    """CSV with a header line: a column of times and one of intensities."""
    speedup: float = Field(default=1.0, gt=0)
    """Trace seconds per wall second. Only the feed's clock is scaled."""
    starts_at_s: float = Field(default=0.0, ge=0, allow_inf_nan=True)
    """UTC seconds of trace time zero; the first value holds before. 0 = at start; inf = forever."""
    step_s: float = Field(default=0.0, ge=0)
    """Step of the resampled trace; 0 = as in the file."""
    at_end: Literal["loop", "stop"] = "loop"
    """Start again at time zero, or carry the last value on a named rung."""
    lead_in_h: float | None = Field(default=None, ge=0)
    """Hours at the head of the file that are history. None = by the header, else 0."""
    interpolation: Literal["step", "linear"] = "step"
    """Each value holds until the next, or the way to the next is a line."""

    @model_validator(mode="after")
    def _a_time(self) -> Self:
        if math.isnan(self.starts_at_s):
            raise ValueError("starts_at_s is not a time")
        return self


class ConstantSettings(Settings):
    """Settings of one value forever."""

    intensity_g_per_kwh: float = Field(default=400.0, ge=0, le=INTENSITY_MAX_G_PER_KWH)
    """The value."""
    interval_s: float = Field(default=300.0, gt=0)
    """How long a reading counts as fresh."""
    source: str = "setting constant.intensity_g_per_kwh"
    """Where the value comes from; stands in every reading."""


class WebSettings(Settings):
    """Settings of how providers are reached."""

    REMOVED: ClassVar[Mapping[str, str]] = {"answer_bytes_max": FIXED}

    timeout_s: float = Field(default=10.0, gt=0, le=120)
    """Of one whole exchange."""
    gap_s: float = Field(default=0.5, ge=0, le=60)
    """Between two requests to one address, of all zones of this process together."""
    user_agent: str = "trefoil-carbon-feed"
    """How the feed names itself to providers."""
    proxy: SecretStr = SecretStr("")
    """URL (it may hold a password); `environment` = as HTTPS_PROXY and NO_PROXY say; empty = none."""
    proxy_file: Path | None = None
    """Or the file that holds it."""
    ca_bundle: Path | None = None
    """PEM file; None = the public ones."""


class NesoSettings(Settings):
    """Settings of NESO Carbon Intensity (Great Britain); no key. Average, direct factors."""

    base_url: str = "https://api.carbonintensity.org.uk"
    """Where it is asked."""
    region_id: int | None = Field(default=None, ge=1, le=17)
    """1..14 network regions, 15 England, 16 Scotland, 17 Wales; None = national. Regions have forecasts only."""
    postcode: str = Field(default="", pattern=r"^([A-Za-z]{1,2}[0-9][A-Za-z0-9]?)?$")
    """The outward part (`RG10`) instead of a region."""
    poll_s: float = Field(default=300.0, ge=60)
    """How long an answer is served before the next request (soft TTL)."""
    quota_per_day: int = Field(default=0, ge=0)
    """Requests in a UTC day, spread over it; 0 = no limit."""

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if self.region_id is not None and self.postcode:
            raise ValueError("region_id and postcode are both set; set one")
        return self


class ElectricityMapsSettings(Settings):
    """Settings of Electricity Maps. Average, direct or lifecycle factors."""

    base_url: str = "https://api.electricitymaps.com"
    """Where it is asked."""
    api_version: Literal["v4", "v3"] = "v4"
    """Of their API; paths and names differ."""
    zone: str = ""
    """Their key; empty = as the zone registry says."""
    token: SecretStr | None = None
    """`file:/path` or `env:NAME`."""
    estimates: bool = True
    """Accept estimates, which say so; without them a zone may be silent for hours."""
    granularity: Literal["5_minutes", "15_minutes", "hourly"] = "hourly"
    """Width of the intervals that are asked for."""
    poll_s: float = Field(default=900.0, ge=60)
    """How long an answer is served before the next request (soft TTL)."""
    quota_per_day: int = Field(default=0, ge=0)
    """Requests in a UTC day, spread over it; 0 = no limit."""

    _named = field_validator("token")(check_secret_reference)


class WattTimeSettings(Settings):
    """Settings of WattTime v3. Marginal (co2_moer) or average (co2_aoer), direct factors."""

    base_url: str = "https://api.watttime.org"
    """Where it is asked."""
    region: str = ""
    """Their key; empty = as the zone registry says."""
    username: SecretStr | None = None
    """`file:/path` or `env:NAME`."""
    password: SecretStr | None = None
    """`file:/path` or `env:NAME`."""
    poll_s: float = Field(default=300.0, ge=60)
    """How long an answer is served before the next request (soft TTL)."""
    quota_per_day: int = Field(default=0, ge=0)
    """Requests in a UTC day, logins too, spread over it; 0 = no limit."""

    _named = field_validator("username", "password")(check_secret_reference)


class OverrideSettings(Settings):
    """On-site power: a fixed value, or the grid's and the site's by share."""

    base: Literal["trace", "constant", "neso", "electricity_maps", "watttime"] = "constant"
    """Who tells the grid's part."""
    own_g_per_kwh: float = Field(default=0.0, ge=0, le=INTENSITY_MAX_G_PER_KWH)
    """Intensity of on-site power: direct factors 0; lifecycle about 41 for photovoltaics (IPCC 2014)."""
    own_share: float | None = Field(default=None, ge=0, le=1)
    """A fixed share; 1 = own power only. None: meter_file tells."""
    meter_file: Path | None = None
    """JSON `{"at": "2026-11-20T12:00:00Z", "own_w": 1200, "site_w": 3000}`, written by the site."""
    meter_max_age_s: float = Field(default=900.0, gt=0)
    """An older meter_file is not a reading."""

    @model_validator(mode="after")
    def _one_share(self) -> Self:
        if self.own_share is not None and self.meter_file is not None:
            raise ValueError("own_share and meter_file are both set; set one")
        return self


class PollingSettings(Settings):
    """When live providers are asked."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(("breaker_failures", "hard_ttl_s"), FIXED)

    ask_without_redis: bool = False
    """Ask while Redis is away. For a single feed: with several, each would ask."""


class ForecastSettings(Settings):
    """Settings of forecasts, their scores, and what providers are asked of the past (`[outlook]`)."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(("age_max_s", "archive_max", "past_h"), FIXED)

    model: Literal["blend", "climatology", "persistence", "none"] = "blend"
    """Model that is served where no provider forecasts; all three are scored."""
    step_s: float = STEP_S
    """Of our forecasts, in the source's time: 900, 1800 or 3600."""
    horizon_s: float = Field(default=HORIZON_S, gt=0, le=14 * 86_400.0)
    """How far ahead ours look, in the source's time."""
    provider_every_s: float = Field(default=1800.0, ge=300)
    """Interval of requests for the provider's forecast; they count towards the quota."""
    past_every_s: float = Field(default=3600.0, ge=300)
    """Interval of requests for the last day again, as values are revised."""

    @field_validator("step_s")
    @classmethod
    def _a_step(cls, value: float) -> float:
        try:
            grid(value, HORIZON_S)
        except errors.SettingError as error:
            raise ValueError(str(error)) from error
        return value


class ZoneFields(Settings):
    """Settings of one zone: what is read, and from whom."""

    zone: str = Field(default="demo", pattern=r"^[A-Za-z0-9._-]+$")
    """Zone of every reading: of the registry (`trefoil carbon zones`), or your name."""
    method: Literal["average", "marginal"] = "average"
    """What is read: the average of the grid, or what one more kWh causes."""
    factors: Literal["direct", "lifecycle"] = "lifecycle"
    """Emissions that count: of generation alone, or of the whole life of the plants."""
    provider: ProviderName = "trace"
    """Who is asked."""
    secondary: ProviderName | Literal[""] = ""
    """Asked while the provider fails; it must give the same method and factors."""
    trace: TraceSettings = TraceSettings()
    constant: ConstantSettings = ConstantSettings()
    neso: NesoSettings = NesoSettings()
    electricity_maps: ElectricityMapsSettings = ElectricityMapsSettings()
    watttime: WattTimeSettings = WattTimeSettings()
    override: OverrideSettings = OverrideSettings()
    late_max_s: float = Field(default=60.0, ge=0)
    """How long after its end an interval still holds."""
    carry_max_s: float = Field(default=3600.0, gt=0)
    """How long the last value stands in for a provider that fails, before static_g_per_kwh does."""
    static_g_per_kwh: float | None = Field(default=None, ge=0, le=INTENSITY_MAX_G_PER_KWH)
    """The last rung. None: the last value is carried on, under a rung that says so."""

    @property
    def series(self) -> Series:
        """Series that is read: zone, method and factors."""
        return Series(self.zone, Method[self.method.upper()], Factors[self.factors.upper()])


class FurtherZone(ZoneFields):
    """Table of `[[zones]]`. Keys and addresses of providers are those of the top where it does not say its own."""

    zone: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    provider: ProviderName


SHARED: Final[Mapping[str, tuple[str, ...]]] = {
    "neso": ("region_id", "postcode"),
    "electricity_maps": ("zone",),
    "watttime": ("region",),
}
"""Sections that `[[zones]]` have from the top, and what of them says where, which they have not."""


class CarbonFeedSettings(ZoneFields, ServiceSettings):
    """Settings of the carbon feed, which reads the intensity of one zone or several and publishes it."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(("backfill_max", "history_max", "watchers_max"), FIXED)

    admin_address: str = "127.0.0.1:8101"
    metrics_address: str = "127.0.0.1:8111"
    zones: tuple[FurtherZone, ...] = ()
    """Further zones of this process; the first one stands at the top."""
    web: WebSettings = WebSettings()
    polling: PollingSettings = PollingSettings()
    outlook: ForecastSettings = ForecastSettings()
    zones_file: Path | None = None
    """TOML with further zones, or other ones under a known name."""

    @model_validator(mode="before")
    @classmethod
    def _shared(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping) or not isinstance(raw.get("zones"), list | tuple):
            return raw
        return {**raw, "zones": [_with_shared(raw, zone) for zone in raw["zones"]]}

    def per_zone(self) -> tuple["CarbonFeedSettings", ...]:
        """Settings of each zone, the first one first.

        Raises:
            errors.SettingError: two of them have the same name.
        """
        made, seen = [self.model_copy(update={"zones": ()})], {self.zone: "zone"}
        for index, further in enumerate(self.zones):
            if further.zone in seen:
                raise errors.SettingError(
                    f"is read already, by {seen[further.zone]}",
                    field=f"zones.{index}.zone",
                    value=further.zone,
                    remedy="give each zone once; a second series of it needs another name",
                )
            seen[further.zone] = f"zones.{index}.zone"
            own = {name: getattr(further, name) for name in ZoneFields.model_fields}
            made.append(made[0].model_copy(update=own))
        return tuple(made)


def _with_shared(top: Mapping[str, Any], zone: Any) -> Any:
    if not isinstance(zone, Mapping):
        return zone
    made = dict(zone)
    for section, places in SHARED.items():
        above, own = top.get(section), made.get(section, {})
        if isinstance(above, Mapping) and isinstance(own, Mapping):
            made[section] = {k: v for k, v in above.items() if k not in places} | dict(own)
    return made

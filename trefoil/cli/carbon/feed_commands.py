"""`trefoil carbon now`, `watch`, `health` and `zones`: what a feed reads, and how it stands."""

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from trefoil.cli.carbon.client import (
    FeedClient,
    ZoneArgument,
    rung_name,
    series_kind,
    with_feed,
)
from trefoil.cli.options import RUNNING, ServiceAddress
from trefoil.cli.output import AsJson, as_json, grid, print_json, respond, show
from trefoil.core.carbon import CarbonRatio, CarbonReading, Series, ZoneHealth
from trefoil.core.errors import SettingError, Unavailable
from trefoil.core.units import format_duration, format_time
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock

PCT = 100.0
NAMES: Final = ("id", "name", "timezone", "aliases", "neso", "electricity_maps", "watttime", "eia", "clouds")


def now(
    zones: Annotated[
        list[str] | None, typer.Argument(metavar="[ZONE]...", help="By any name; default: all that the feed reads.")
    ] = None,
    window: Annotated[str, typer.Option(help="Of the average that CIR compares with: expanding, 30d, same_hour.")] = "",
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Show the intensity that holds now, where it comes from, how good and how old it is."""
    now_s = WallClock().now_s()

    async def gather(feed: FeedClient) -> tuple[list[CarbonReading], list[Any], dict[str, CarbonRatio | str]]:
        series = await feed.series(zones or [])
        answer = await feed.call("GetMany", pb.GetManyRequest(series=[codec.to_proto(s) for s in series]))
        ratios = {s.zone: await _ratio(feed, s.zone, window) for s in series}
        return [codec.from_proto(r) for r in answer.readings], list(answer.missing), ratios

    readings, missing, ratios = with_feed(where, gather)
    if as_json_:
        told = {at: {"cir": None, "why": one} if isinstance(one, str) else as_json(one) for at, one in ratios.items()}
        document = [_reading(r, now_s) | {"ratio": told[r.series.zone]} for r in readings]
        print_json({"readings": document, "missing": [{"zone": m.series.zone, "why": m.why} for m in missing]})
        return
    rows = [
        (
            r.series.zone,
            f"{r.intensity_g_per_kwh:.1f}",
            series_kind(r.series),
            r.quality.name.lower(),
            rung_name(r.rung),
            _source(r),
            format_time(r.ends_at_s),
            format_duration(max(0.0, now_s - r.observed_at_s)),
            _cir(ratios[r.series.zone]),
        )
        for r in readings
    ]
    columns = ("zone", "g/kWh", "kind", "quality", "rung", "provider", "holds until", "observed", "CIR")
    fallen = [r for r in readings if r.fallback_reason]
    show(
        *([grid("Carbon intensity now", columns, rows)] if rows else []),
        *(f"{r.series.zone} stands on rung {rung_name(r.rung)}: {r.fallback_reason}" for r in fallen),
        *(f"{absent.series.zone}: no reading: {absent.why}" for absent in missing),
    )


async def _ratio(feed: FeedClient, zone: str, window: str) -> CarbonRatio | str:
    """CIR, or why there is none yet."""
    try:
        answer = await feed.call("GetRatio", pb.GetRatioRequest(zone=zone, window=window))
    except Unavailable as error:
        return str(error)
    ratio: CarbonRatio = codec.from_proto(answer.ratio)
    return ratio


def _cir(ratio: CarbonRatio | str) -> str:
    if isinstance(ratio, str):
        return "-"
    return f"{ratio.cir:.2f} of {ratio.aci_g_per_kwh:.0f} ({ratio.window}, {ratio.samples})"


def _source(reading: CarbonReading) -> str:
    return reading.provider + (" (SIMULATED)" if reading.simulated else "")


def _reading(reading: CarbonReading, now_s: float) -> dict[str, Any]:
    age_s = max(0.0, now_s - reading.observed_at_s)
    return {**as_json(reading), "rung_name": rung_name(reading.rung).partition(" ")[2], "age_s": age_s}


def watch(
    zone: ZoneArgument = "",
    change_pct: Annotated[
        float, typer.Option("--change", min=0, max=100, help="Percent that the value must move by; 0 = every reading.")
    ] = 0.0,
    hysteresis_pct: Annotated[
        float | None,
        typer.Option("--hysteresis", min=0, max=100, help="Percent more to turn back by; default: half of --change."),
    ] = None,
    count: Annotated[int, typer.Option(min=0, help="Stop after so many; 0 = go on.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Stop after so long; 0 = go on.")] = 0.0,
    where: ServiceAddress = RUNNING,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of text.")] = False,
) -> None:
    """Follow a zone: the reading now, then each that tells something new (a change, another quality or rung)."""
    if hysteresis_pct is not None and not change_pct:
        raise SettingError(
            "without --change every reading is shown",
            field="--hysteresis",
            value=hysteresis_pct,
            remedy="give --change",
        )

    async def follow(feed: FeedClient) -> None:
        request = pb.WatchIntensityRequest(zone=(await feed.only_series(zone)).zone, change_ratio=change_pct / PCT)
        if hysteresis_pct is not None:
            request.hysteresis_ratio = hysteresis_pct / PCT
        count_shown, last = 0, None
        try:
            async with asyncio.timeout(seconds or None):
                async for answer in feed.stream("WatchIntensity", request):
                    reading: CarbonReading = codec.from_proto(answer.reading)
                    _announce(reading, answer.why, last, as_json_)
                    count_shown, last = count_shown + 1, reading
                    if count_shown == count:
                        return
        except TimeoutError:
            return  # as long as was asked for

    with_feed(where, follow)


def _announce(reading: CarbonReading, why: str, last: CarbonReading | None, as_json_: bool) -> None:
    now_s = WallClock().now_s()
    if as_json_:
        typer.echo(json.dumps({"why": why, **_reading(reading, now_s)}, ensure_ascii=False))
        return
    moved = ""
    if last is not None and last.intensity_g_per_kwh > 0:
        moved = f" ({PCT * (reading.intensity_g_per_kwh / last.intensity_g_per_kwh - 1):+.1f} %)"
    line = f"{format_time(round(now_s))}  {reading.series.zone}  {reading.intensity_g_per_kwh:.1f} g/kWh{moved}"
    line += f"  {reading.quality.name.lower()}, rung {rung_name(reading.rung)}, {_source(reading)}"
    typer.echo(line + f", until {format_time(reading.ends_at_s)}" + (f": {why}" if why else ""))


def health(
    zone: Annotated[str, typer.Argument(metavar="[ZONE]", help="Zone, by any name; default: all.")] = "",
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Show how each zone's feed stands: who asks, its rung, staleness, quota, breaker, forecast and history."""

    async def gather(feed: FeedClient) -> list[ZoneHealth]:
        name = (await feed.only_series(zone)).zone if zone else ""
        answer = await feed.call("GetZoneHealth", pb.GetZoneHealthRequest(zone=name))
        return [codec.from_proto(one) for one in answer.zones]

    found = with_feed(where, gather)
    columns = ("", *(one.series.zone for one in found))
    columns_of = [_health_rows(one) for one in found]
    rows = [(name, *(each[name] for each in columns_of)) for name in columns_of[0]] if columns_of else []
    respond(as_json_, {"zones": as_json(found)}, grid("Carbon feed", columns, rows))


def _health_rows(one: ZoneHealth) -> dict[str, str]:
    """One zone as lines of a table."""
    stale = "beyond its hard limit: the ladder is used" if one.hard_stale else "soft: fetched again"
    quota = f" of {one.quota_per_day}" if one.quota_per_day else ", no quota"
    forecast = (
        f"{one.forecast_model}, issued {format_time(round(one.forecast_issued_at_s))}" if one.forecast_model else "none"
    )
    read = one.ends_at_s > 0 or one.age_s > 0
    return {
        "kind": series_kind(one.series),
        "provider": one.provider + (" (SIMULATED)" if one.simulated else ""),
        "secondary": one.secondary or "-",
        "this process": "asks the provider" if one.leading else "follows the holder",
        "holder": one.holder or "-",
        "rung": rung_name(one.rung) if read else "NO READING YET",
        "why": one.fallback_reason or "-",
        "age": format_duration(one.age_s) if read else "-",
        "holds until": format_time(round(one.ends_at_s)) if one.ends_at_s > 0 else "-",
        "stale": stale if one.hard_stale or one.soft_stale else "no",
        "asked today": f"{one.asked_today}{quota}",
        "breaker": one.breaker or "-",
        "asks next": format_time(round(one.next_ask_at_s)),
        "last error": one.last_error_cause or "-",
        "Redis": "answers" if one.redis_answers else "DOES NOT ANSWER",
        "forecast": forecast,
        "history": f"{one.history_intervals} intervals, newest {format_time(round(one.history_newest_s))}",
    }


def zones(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Only the zone of this name, provider's key or cloud region.")
    ] = "",
    zones_file: Annotated[
        Path | None, typer.Option(help="TOML that adds zones to the shipped ones, as the feed's setting does.")
    ] = None,
    target: Annotated[str, typer.Option(help="host:port of the feed; default: the running system's.")] = "",
    ca: Annotated[
        Path | None, typer.Option("--ca", "--tls-ca", help="PEM of the authority that signed the feed's certificate.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the grid zones that have a name here, and what providers and clouds call them. Offline without --target."""
    if target and zones_file is not None:
        raise SettingError(
            "a feed has its own", field="--zones-file", value=str(zones_file), remedy="give it without --target"
        )
    found = _of_feed(name, target, ca) if target else _of_file(name, zones_file)
    columns = ["zone", "name", "time zone", "NESO", "Electricity Maps", "WattTime", "EIA", "clouds"]
    rows = [
        [
            ", ".join((zone["id"], *zone["aliases"])),
            zone["name"] or "-",
            zone["timezone"],
            *(zone[key] or "-" for key in ("neso", "electricity_maps", "watttime", "eia")),
            " ".join(zone["clouds"]) or "-",
        ]
        for zone in found
    ]
    if target:
        columns.insert(1, "read as")
        for row, zone in zip(rows, found, strict=True):
            row.insert(1, zone["read_as"] or "-")
    respond(as_json, {"asked": target or None, "zones": found}, grid("Zones", columns, rows))


def _of_file(name: str, zones_file: Path | None) -> list[dict[str, Any]]:
    """The registry as it lies on this machine."""
    from carbon_feed.zones import load_zones

    known = load_zones(zones_file)
    found = [known.find(name)] if name else list(known)
    return [zone.model_dump(mode="json") for zone in found]


def _of_feed(name: str, target: str, ca: Path | None) -> list[dict[str, Any]]:
    """The registry of a feed, and which of the zones it reads."""

    async def gather(feed: FeedClient) -> list[Any]:
        return list((await feed.call("ListZones", pb.ListZonesRequest(name=name))).zones)

    def plain(zone: Any) -> dict[str, Any]:
        values = {key: getattr(zone, key) for key in NAMES}
        values |= {key: list(values[key]) for key in ("aliases", "clouds")}
        series: Series = codec.from_proto(zone.series)
        return {**values, "polled": zone.polled, "read_as": series_kind(series) if zone.polled else ""}

    return [plain(zone) for zone in with_feed(ServiceAddress(target, ca), gather)]

"""`trefoil carbon zones`: the registry of grid zones; offline, unless a feed is asked what it reads."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from trefoil.cli.carbon_asking import Ca, Feed, Target, ask, kind
from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, console, grid, print_json
from trefoil.core.carbon import Series
from trefoil.core.errors import SettingError
from trefoil.runtime import codec

NAMES: Final = ("id", "name", "timezone", "aliases", "neso", "electricity_maps", "watttime", "eia", "clouds")


def zones(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Only the zone of this name, provider's key or cloud region.")
    ] = "",
    zones_file: Annotated[
        Path | None, typer.Option(help="TOML that adds zones to the shipped ones, as the feed's setting does.")
    ] = None,
    target: Target = "",
    ca: Ca = None,
    as_json: AsJson = False,
) -> None:
    """Show the grid zones that have a name here, and what providers and clouds call them. Offline without --target."""
    if target and zones_file is not None:
        raise SettingError(
            "a feed has its own", field="--zones-file", value=str(zones_file), remedy="give it without --target"
        )
    found = _of_feed(name, target, ca) if target else _of_file(name, zones_file)
    if as_json:
        print_json({"asked": target or None, "zones": found})
        return
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
    console().print(grid("Zones", columns, rows))


def _of_file(name: str, zones_file: Path | None) -> list[dict[str, Any]]:
    """The registry as it lies on this machine."""
    from carbon_feed.zones import load_zones

    known = load_zones(zones_file)
    found = [known.find(name)] if name else list(known)
    return [zone.model_dump(mode="json") for zone in found]


def _of_feed(name: str, target: str, ca: Path | None) -> list[dict[str, Any]]:
    """The registry of a feed, and which of the zones it reads."""

    async def gather(feed: Feed) -> list[Any]:
        return list((await feed.ask("ListZones", pb.ListZonesRequest(name=name))).zones)

    def plain(zone: Any) -> dict[str, Any]:
        values = {key: getattr(zone, key) for key in NAMES}
        values |= {key: list(values[key]) for key in ("aliases", "clouds")}
        series: Series = codec.from_proto(zone.series)
        return {**values, "polled": zone.polled, "read_as": kind(series) if zone.polled else ""}

    return [plain(zone) for zone in ask(target, ca, DEFAULT_STATE_DIR, gather)]

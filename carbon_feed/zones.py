"""Zone registry: our name <-> providers' names <-> cloud regions (data/zones.toml and an operator's own file)."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError, field_validator

from carbon_feed.settings import CarbonFeedSettings, known_timezone
from trefoil.core import errors
from trefoil.runtime.config import Settings, explain, read_toml

SHIPPED: Final = Path(__file__).parent / "data" / "zones.toml"
CLOUDS: Final = ("aws", "gcp", "azure")


class Zone(Settings):
    """Grid zone. Empty = that provider does not have it, or under a name that we do not know."""

    id: str
    """Our name."""
    name: str
    """For people."""
    timezone: str = "UTC"
    """IANA name: whose days and hours of the week its people live by."""
    aliases: tuple[str, ...] = ()
    """Older names that must find it."""
    neso: str = ""
    """`national`, or a region id."""
    electricity_maps: str = ""
    """Their key."""
    watttime: str = ""
    """Their key."""
    eia: str = ""
    """The EIA's balancing authority."""
    clouds: tuple[str, ...] = ()
    """`provider/region`."""

    @property
    def regions(self) -> frozenset[str]:
        """Cloud regions without their clouds: `eu-west-2` of `aws/eu-west-2`."""
        return frozenset(cloud.partition("/")[2] for cloud in self.clouds)

    @field_validator("timezone")
    @classmethod
    def _a_timezone(cls, value: str) -> str:
        return known_timezone(value)

    @field_validator("clouds")
    @classmethod
    def _cloud_regions(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for region in value:
            if region.partition("/")[0] not in CLOUDS or not region.partition("/")[2]:
                raise ValueError(f"{region!r} is not provider/region with a provider of {', '.join(CLOUDS)}")
        return value


class Zones:
    """Zones by our name, an alias, a provider's name or a cloud region, `aws/eu-west-2` or `eu-west-2`."""

    def __init__(self, zones: Mapping[str, Zone]) -> None:
        self._zones = dict(zones)
        self._by_name: dict[str, Zone] = {}
        for zone in self._zones.values():
            for name in (*zone.aliases, zone.electricity_maps, zone.watttime, *zone.clouds):
                if name:
                    self._by_name.setdefault(name.lower(), zone)
        regions: dict[str, list[Zone]] = {}
        for zone in self._zones.values():
            for region in zone.regions:
                regions.setdefault(region.lower(), []).append(zone)
        for region, found in regions.items():
            if len(found) == 1:  # one that two clouds have in different zones needs its cloud's name
                self._by_name.setdefault(region, found[0])
        for zone in self._zones.values():  # a zone's own name belongs to no other zone
            self._by_name[zone.id.lower()] = zone

    def __iter__(self) -> Any:
        return iter(self._zones.values())

    def get(self, name: str) -> Zone | None:
        """Zone of any of its names; None: unknown."""
        return self._by_name.get(name.lower())

    def find(self, name: str) -> Zone:
        """Zone of any of its names.

        Raises:
            errors.NotFound: names near ones.
        """
        found = self.get(name)
        if found is None:
            near = sorted(zone.id for zone in self._zones.values() if zone.id[:2].lower() == name[:2].lower())
            remedy = errors.one_of(near or sorted(self._zones), also="add it to zones_file")
            raise errors.NotFound("no such zone", field="zone", value=name, remedy=remedy)
        return found


@lru_cache(maxsize=8)
def load_zones(more: Path | None = None) -> Zones:
    """Load the shipped registry, and a file that adds to it and wins over it.

    Raises:
        errors.SettingError: a bad file, field or value.
    """
    return Zones({**_read(SHIPPED), **(_read(more) if more is not None else {})})


def zone_of(settings: CarbonFeedSettings) -> Zone | None:
    """Registry entry of the configured zone, if it has one: a user's own name is allowed."""
    return load_zones(settings.zones_file).get(settings.zone)


def provider_zone(settings: CarbonFeedSettings, provider: Literal["electricity_maps", "watttime"], field: str) -> str:
    """Provider's own name of the configured zone.

    Raises:
        errors.SettingError: the registry does not know it.
    """
    zone = zone_of(settings)
    name = (zone.electricity_maps if provider == "electricity_maps" else zone.watttime) if zone is not None else ""
    if not name:
        raise errors.SettingError(
            f"{provider} has no name for it in the zone registry",
            field="zone",
            value=settings.zone,
            remedy=f"set {field}, or add it to zones_file",
        )
    return name


def _read(path: Path) -> dict[str, Zone]:
    zones = {}
    for name, table in read_toml(path, "zones_file").items():
        try:
            zones[name] = Zone.model_validate({"id": name, **(table if isinstance(table, dict) else {"": table})})
        except ValidationError as error:
            raise explain(error, f"{path} [{name}]", Zone) from error
    return zones

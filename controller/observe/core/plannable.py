"""Plannable devices and variants: which may take slices and be loaded, and for the others the reason why not."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from trefoil.core.catalog import Catalog, ProfileRow
from trefoil.core.common import IdentityKey
from trefoil.core.device_types import DEVICE_TYPES, device_type
from trefoil.core.errors import NotFound
from trefoil.core.fleet import MISSING_MODEL, DeviceKind, DeviceState, DeviceStatus, FleetState

AWAKE_STATES: Final = frozenset({DeviceState.AWAKE, DeviceState.WAKING})


def profiled_types(catalog: Catalog) -> frozenset[str]:
    """Device types that the catalogue has profiles for."""
    return _types(IdentityKey(catalog.rows))


@lru_cache(maxsize=16)
def _types(rows: IdentityKey[tuple[ProfileRow, ...]]) -> frozenset[str]:
    return frozenset(row.device_type for row in rows.value)


def out_of_service_reason(status: DeviceStatus) -> str:
    """Reason why a device that could be planned may not be used now; empty when it may."""
    if status.state == DeviceState.LOST:
        return "lost"
    return f"out of service ({status.cordon})" if status.cordon else ""


def unplannable_reason(status: DeviceStatus, types: Collection[str]) -> str:
    """Reason why planners cannot do anything with a device, whatever its state; empty when they can.

    `types`: see `profiled_types`. What runs there stays as it is.
    """
    try:
        kind = device_type(status.type)
    except NotFound:
        return f"of unknown type {status.type!r}"
    if kind.kind == DeviceKind.CPU:
        return "CPUs are not planned"
    if kind.name not in types:
        return f"no variant has a profile on {kind.name}"
    return "its MIG mode is off" if mig_off(status) else ""


def mig_off(status: DeviceStatus) -> bool:
    """Whether a GPU that has to be cut cannot be cut now."""
    known = DEVICE_TYPES.get(status.type)
    return known is not None and known.kind == DeviceKind.MIG_GPU and not status.mig_current


def usable_devices(fleet: FleetState) -> frozenset[str]:
    """Devices that a plan may use: not lost, in service, on a node that reports."""
    return _usable(IdentityKey(fleet))


@lru_cache(maxsize=64)
def _usable(fleet: IdentityKey[FleetState]) -> frozenset[str]:
    known = fleet.value
    return frozenset(d.device for node in known.nodes if node.node not in known.stale for d in node.devices if d.usable)


def unloadable_variants(fleet: FleetState) -> Mapping[str, str]:
    """Variants that a node cannot load now, as `family/version`, each with the reason: none of them is planned."""
    return _unloadable(IdentityKey(fleet)) if any(node.missing for node in fleet.nodes) else NOTHING


NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


@lru_cache(maxsize=64)
def _unloadable(fleet: IdentityKey[FleetState]) -> Mapping[str, str]:
    found = {}
    for node in fleet.value.nodes:
        for entry in node.missing:
            name, _, why = entry.partition(": ")
            if name.startswith(MISSING_MODEL):
                found[name.removeprefix(MISSING_MODEL)] = f"{node.node}: {why}"
    return found


def loadable_catalog(catalog: Catalog, fleet: FleetState) -> Catalog:
    """Catalogue without the variants that a node cannot load; a family that has no other stays whole."""
    refused = unloadable_variants(fleet)
    return _loadable(IdentityKey(catalog), frozenset(refused)) if refused else catalog


@lru_cache(maxsize=16)
def _loadable(catalog: IdentityKey[Catalog], refused: frozenset[str]) -> Catalog:
    families, gone = [], set()
    for family in catalog.value.families:
        left = tuple(v for v in family.variants if f"{family.name}/{v.version}" not in refused)
        gone |= {(family.name, v.name) for v in family.variants if left and v not in left}
        families.append(replace(family, variants=left) if left and left != family.variants else family)
    rows = tuple(row for row in catalog.value.rows if (row.family, row.variant) not in gone)
    return Catalog(tuple(families), rows)

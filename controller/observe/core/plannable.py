"""Plannable devices: which may take slices, and for each of the others the reason why not."""

from collections.abc import Collection
from functools import lru_cache
from typing import Final

from trefoil.core.catalog import Catalog, ProfileRow
from trefoil.core.common import IdentityKey
from trefoil.core.device_types import DEVICE_TYPES, device_type
from trefoil.core.errors import NotFound
from trefoil.core.fleet import DeviceKind, DeviceState, DeviceStatus, FleetState

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

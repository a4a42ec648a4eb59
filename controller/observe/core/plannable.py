"""Plannable devices and variants: which may take slices and be loaded, and for the others the reason why not."""

from collections.abc import Collection, Mapping, Sequence
from typing import Final

from trefoil.core.brains import PlanView
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import CPUS, is_outside_mig, limited_type, profile_type
from trefoil.core.errors import PlanError
from trefoil.core.fleet import (
    MISSING_MODEL,
    DeviceKind,
    DeviceState,
    DeviceStatus,
    DeviceType,
    FleetState,
    NodeStatus,
    SliceKey,
)
from trefoil.core.plan import Plan

FOREIGN: Final = "an instance that this agent did not make; destroy it if its place is to be used (nvidia-smi mig -dgi)"
AWAKE_STATES: Final = frozenset({DeviceState.AWAKE, DeviceState.WAKING})


def out_of_service_reason(status: DeviceStatus) -> str:
    """Reason why a device that could be planned may not be used now; empty when it may."""
    if status.state == DeviceState.LOST:
        return "lost"
    return f"out of service ({status.cordon})" if status.cordon else status.closed


def usable_type(status: DeviceStatus) -> DeviceType:
    """Type of a device of a known type, without what its agent would refuse there: places that are taken, slice types
    that the driver does not offer."""
    return limited_type(status.type, status.foreign, status.lacks)


def taken_reason(status: DeviceStatus, key: SliceKey) -> str:
    """Reason why the agent of a device refuses a slice there; empty where it does not."""
    if status.closed:
        return status.closed
    if key.slice_type in status.lacks:
        return f"its driver does not offer {key.slice_type}"
    names = [other.name for other in status.foreign if key.overlaps(other)]
    return f"its place is taken by {names[0]}, see `trefoil status`" if names else ""


def places_refused(fleet: FleetState, reasons: Mapping[str, str]) -> dict[str, str]:
    """Why slices are refused, by place, device or slice type; `reasons`: what agents said of a place."""
    found: dict[str, str] = {}
    for device in (d for node in fleet.nodes for d in node.devices):
        found |= {device.device: device.closed} if device.closed else {}
        found |= {key.name: reasons.get(key.name, FOREIGN) for key in device.foreign}
        found |= {f"{name} of {device.device}": "its driver does not offer it" for name in device.lacks}
    return found


def refused_slices(fleet: FleetState, plan: Plan) -> Mapping[SliceKey, str]:
    """Slices of a plan that the agents of reporting nodes refuse now, each with the reason."""
    seen = {d.device: d for n in fleet.reporting for d in n.devices}
    keys = [part.key for node in plan.nodes for device in node.devices for part in device.slices]
    whys = {key: taken_reason(seen[key.device], key) for key in keys if key.device in seen}
    return {key: why for key, why in whys.items() if why}


def unplannable_reason(status: DeviceStatus, types: Collection[str]) -> str:
    """Reason why planners cannot do anything with a device, whatever its state; empty when they can.

    `types`: see `Catalog.profiled_types`. What runs there stays as it is.
    """
    kind = status.type
    if kind.unknown:
        return f"of unknown type {kind.name!r}"
    if kind.kind == DeviceKind.CPU and CPUS not in types:
        return "CPUs are not planned: no variant has a profile on any"
    if profile_type(kind.name) not in types:
        return f"no variant has a profile on {kind.name}"
    return wrong_mig_mode(status)


def wrong_mig_mode(status: DeviceStatus) -> str:
    """Reason why a GPU cannot be what its type says: to be cut in MIG mode only, or whole outside it; else empty."""
    kind = status.type
    if kind.unknown or kind.kind == DeviceKind.CPU:
        return ""
    if kind.kind == DeviceKind.MIG_GPU:
        return "" if status.mig_current else "its MIG mode is off"
    return "its MIG mode is on" if status.mig_current and is_outside_mig(kind.name) else ""


def check_obeyed(view: PlanView, plan: Plan) -> None:
    """Refuse a plan that an agent would not obey: a slice in a place that is taken, a variant that a node cannot load.
    What is loaded there already may stay.

    Raises:
        PlanError: naming slice, or node and variant, and why.
    """
    for key, why in refused_slices(view.fleet, plan).items():
        raise PlanError(why, field="nodes.devices.slices", value=key.name, remedy="plan around it")
    lacking = [(n.node, entry) for n in view.fleet.nodes for entry in n.missing if entry.startswith(MISSING_MODEL)]
    if not lacking:
        return
    new = _hosted(plan) - (_hosted(view.current) if view.current else set())
    for node, entry in lacking:
        name, _, why = entry.removeprefix(MISSING_MODEL).partition(": ")
        if (node, name) in new:
            remedy = "give this node the same model repository, or plan without it"
            raise PlanError(f"cannot load {name}: {why}", field="nodes.node", value=node, remedy=remedy)


def _hosted(plan: Plan) -> set[tuple[str, str]]:
    """What each node hosts, as `family/version`."""
    slices = ((node.node, part) for node in plan.nodes for device in node.devices for part in device.slices)
    return {(node, f"{h.family}/{h.version}") for node, part in slices for h in part.hosted}


def differing_models(fleet: FleetState, catalog: Catalog, stated: Mapping[str, str]) -> Mapping[str, tuple[str, ...]]:
    """Variants of which a node has other files than those that are planned with, by node, as in `NodeStatus.missing`.

    The measure is what the controller's own family.toml states (`stated`, by family/version), else what the first node
    that reports has. Stale nodes count for nothing: they may be gone for good.
    """
    versions = {family.name: [f"{family.name}/{v.version}" for v in family.variants] for family in catalog.families}
    measure = {name: ("the controller's family.toml states", digest) for name, digest in stated.items()}
    judged: dict[tuple[str, ...], dict[str, str]] = {}
    found = {}
    for node in fleet.nodes:
        if not node.models or node.node in fleet.stale:
            continue
        if node.models not in judged:
            judged[node.models] = _differences(node, versions, measure)
        named = {entry.partition(": ")[0] for entry in node.missing}
        whys = {name: why for name, why in judged[node.models].items() if name not in named}
        if whys:
            found[node.node] = tuple(f"{name}: {why}" for name, why in whys.items())
    return found


def _differences(
    node: NodeStatus, versions: Mapping[str, Sequence[str]], measure: dict[str, tuple[str, str]]
) -> dict[str, str]:
    """Why a node's files of a version differ from the planned ones; the first files seen become the planned ones."""
    has = dict(entry.split(": ", 1) for entry in node.models)
    whys = {}
    for family in dict.fromkeys(name.rpartition("/")[0] for name in has):
        for name in versions.get(family, ()):
            if name not in has:
                whys[MISSING_MODEL + name] = "its repository has no such version"
                continue
            whose, digest = measure.setdefault(name, (f"{node.node} has", has[name]))
            if digest not in (has[name], has[name].partition("+")[0]):
                whys[MISSING_MODEL + name] = f"its files have digest {has[name]}, and {whose} {digest}"
    return whys


def loadable_catalog(catalog: Catalog, fleet: FleetState) -> Catalog:
    """Catalogue without the variants that a node cannot load; a family that has no other stays whole."""
    return catalog.without(frozenset(fleet.unloadable)) if fleet.unloadable else catalog

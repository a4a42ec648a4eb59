"""Fleet: what hardware there is, and what state it is in."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Final

from trefoil.core.common import Provenance, Revision


class DeviceKind(IntEnum):
    """Kind of a device."""

    UNSPECIFIED = 0
    MIG_GPU = 1
    WHOLE_GPU = 2
    CPU = 3


class DeviceState(IntEnum):
    """Power state of a device; a clock is shared by all slices of it."""

    UNSPECIFIED = 0
    AWAKE = 1
    FALLING_ASLEEP = 2
    ASLEEP = 3
    WAKING = 4
    LOST = 5


class SliceState(IntEnum):
    """State of a slice in its life. SWAPPING serves the old variant while the new one loads."""

    UNSPECIFIED = 0
    PENDING = 1
    STARTING = 2
    READY = 3
    SWAPPING = 4
    DRAINING = 5
    GONE = 6
    FAILED = 7


TRITON_NAME: Final = "tritons.{node}"


def triton_name(node: str, form: str = TRITON_NAME) -> str:
    """Name in the certificate of a node's Tritons: another than the node's own, for models can read their key."""
    return form.replace("{node}", node)


@dataclass(frozen=True, slots=True)
class SliceType:
    """Slice type: a MIG profile, a whole GPU or a core range; `starts` are legal memory-slice starts."""

    name: str = ""
    compute_slices: int = 0
    memory_slices: int = 0
    sm_count: int = 0
    memory_mib: int = 0
    cores: int = 0
    starts: tuple[int, ...] = ()

    def key(self, device: str) -> "SliceKey":
        """Key of such a slice at the first start that a device allows."""
        return SliceKey(device, self.name, self.starts[0], self.memory_slices)


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Device type: what it can do and draws [W]; `sleep_w` defaults to idle on real hardware."""

    name: str = ""
    kind: DeviceKind = DeviceKind.UNSPECIFIED
    slice_types: tuple[SliceType, ...] = ()
    clocks_mhz: tuple[int, ...] = ()
    clock_lockable: bool = False
    energy_counter: bool = False
    idle_w: float = 0.0
    sleep_w: float = 0.0
    max_w: float = 0.0
    wake_s: float = 0.0
    power_limit_min_w: float = 0.0
    power_limit_max_w: float = 0.0
    cores: int = 0
    tier: str = ""
    embodied_g: float = 0.0
    power_provenance: Provenance | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return repr(self.name)

    @property
    def unknown(self) -> bool:
        """Whether only its name is known."""
        return self.kind == DeviceKind.UNSPECIFIED

    @property
    def largest(self) -> SliceType:
        """The largest slice type: a whole GPU, or all cores."""
        return max(self.slice_types, key=lambda shape: (shape.memory_slices, shape.compute_slices))


class _Hashed:
    """Room for a hash that is computed once: keys of slices are looked up far more often than they are made."""

    __slots__ = ("_hash",)
    _hash: int


@dataclass(frozen=True, slots=True, order=True)
class SliceKey(_Hashed):
    """Identity of a slice in plans, loads and energy.

    start and size are in memory slices (MIG, as in NVML), or 0 and 1 (a whole GPU). Of CPUs they are in cores (`cpu:N`)
    or in tenths of a core (`quota:X.Y`).
    """

    device: str = ""
    slice_type: str = ""
    start: int = 0
    size: int = 0

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            object.__setattr__(self, "_hash", hash((self.device, self.slice_type, self.start, self.size)))
            return self._hash

    @property
    def name(self) -> str:
        """Name, path-safe and readable: `node0-gpu0-3g.20gb-4`."""
        return f"{self.device.replace('/', '-')}-{self.slice_type.replace('+', '_').replace(':', '-')}-{self.start}"

    def overlaps(self, other: "SliceKey") -> bool:
        """True if both want the same place of one device; CPUs are cut one way at a time, in cores or by quota."""
        if self.device != other.device:
            return False
        if self.slice_type.partition(":")[0] != other.slice_type.partition(":")[0] and ":" in self.slice_type:
            return True
        return self.start < other.start + other.size and other.start < self.start + self.size


@dataclass(frozen=True, slots=True)
class Hosted:
    """Model hosted on a slice: one family's variant."""

    family: str = ""
    variant: str = ""
    version: int = 0
    stage: int = 0
    stages: int = 0
    instances: int = 0
    max_batch: int = 0

    @property
    def model(self) -> str:
        """Name of its model in Triton."""
        return stage_model(self.family, self.stage, self.stages)


def same_variants(these: tuple[Hosted, ...], those: tuple[Hosted, ...]) -> bool:
    """Whether two slices serve the same variants of the same models, in whichever order."""
    return these == those or sorted((h.model, h.variant) for h in these) == sorted((h.model, h.variant) for h in those)


def serves_alike(these: tuple[Hosted, ...], those: tuple[Hosted, ...]) -> bool:
    """Whether two slices look alike from outside: models, versions and instances, which is what a Triton can tell."""

    def seen(hosted: tuple[Hosted, ...]) -> list[tuple[str, int, int]]:
        return sorted((h.model, h.version, max(1, h.instances)) for h in hosted)

    return seen(these) == seen(those)


def stage_model(family: str, stage: int, stages: int) -> str:
    """Name of the Triton model that does one stage of a family, counted from 0; the family's own if it is whole.

    No family's name can have an @ (`trefoil/runtime/repository.py`).
    """
    return f"{family}@{stage + 1}of{stages}" if stages > 1 else family


def split_model(model: str) -> tuple[str, int, int]:
    """Family, stage and stages of a Triton model by its name; (model, 0, 1) for one that is whole."""
    family, mark, place = model.partition("@")
    stage, _, stages = place.partition("of")
    return (family, int(stage) - 1, int(stages)) if mark else (family, 0, 1)


def family_of(model: str) -> str:
    """Family that a Triton model is, or is a stage of."""
    return model.partition("@")[0]


@dataclass(frozen=True, slots=True)
class ClockLease:
    """Lease of a clock range, a power limit or both for a bounded time; 0: left to the plan."""

    device: str = ""
    min_mhz: int = 0
    max_mhz: int = 0
    holder: str = ""
    epoch: int = 0
    expires_at_s: float = 0.0
    power_limit_w: float = 0.0


@dataclass(frozen=True, slots=True)
class SliceStatus:
    """Status of one slice as its agent observes it; `mig_uuid` and `generation` are never in a plan."""

    key: SliceKey = SliceKey()
    generation: int = 0
    mig_uuid: str = ""
    state: SliceState = SliceState.UNSPECIFIED
    why: str = ""
    hosted: tuple[Hosted, ...] = ()
    grpc_target: str = ""
    metrics_url: str = ""
    revision: Revision = Revision()
    since_s: float = 0.0
    credits: int = 0


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Status of one device as its agent observes it."""

    device: str = ""
    type: DeviceType = DeviceType()
    state: DeviceState = DeviceState.UNSPECIFIED
    slices: tuple[SliceStatus, ...] = ()
    clock_mhz: int = 0
    clock_lease: ClockLease | None = None
    power_limit_w: float = 0.0
    mig_current: bool = False
    mig_pending: bool = False
    clock_event_reasons: tuple[str, ...] = ()
    drift: tuple[str, ...] = ()
    power_w: float = 0.0
    temperature_c: float = 0.0
    cordon: str = ""  # why the device is out of service; empty = in service
    foreign: tuple[SliceKey, ...] = ()  # instances that the agent did not make: their places are taken
    closed: str = ""  # why the agent refuses every slice on it, with the remedy
    lacks: tuple[str, ...] = ()  # slice types of its type that its driver does not offer

    @property
    def usable(self) -> bool:
        """True if a plan may put slices on it."""
        return self.state != DeviceState.LOST and not self.cordon and not self.closed


CATALOG: Final = "catalogue"  # entry of `NodeStatus.missing`: the node refused the changed model repository
MISSING_MODEL: Final = "model "
"""Entries of `NodeStatus.missing` that begin so name a variant, as `model family/version: why`, that the node cannot
load."""
MODEL_DIGEST_CHARS: Final = 16
"""Characters of a SHA-256 in `NodeStatus.models`: against mistakes, not against forgers."""


def why_missing(missing: Iterable[str], what: str, device: str) -> str:
    """Why a device lacks a capability, by its node's `NodeStatus.missing`; "" where nothing is said.

    An entry `what: why` is of all devices of the node, `what gpuN: why` of one.
    """
    reasons = {name: why for name, _, why in (entry.partition(": ") for entry in missing)}
    return reasons.get(what) or reasons.get(f"{what} {device.rpartition('/')[2]}") or ""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """Status of a node, published by its agent every second and on change."""

    node: str = ""
    zone: str = ""
    site: str = ""
    epoch: int = 0
    boot_id: str = ""
    driver_load_id: str = ""
    applied: Revision = Revision()
    devices: tuple[DeviceStatus, ...] = ()
    capabilities: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    observed_at_s: float = 0.0
    simulated: bool = False
    agent_target: str = ""
    highest_epoch_seen: int = 0
    models: tuple[str, ...] = ()  # digests of the files of each version that the node has, as `family/version: digest`


@dataclass(frozen=True)
class FleetState:
    """State of the fleet: nodes by their last status; `stale` names those whose status is older than its limit.

    Each index is built when it is first read, and kept. A node reports while it is not stale.
    """

    nodes: tuple[NodeStatus, ...]
    stale: tuple[str, ...] = ()

    @cached_property
    def reporting(self) -> tuple[NodeStatus, ...]:
        """Nodes that report."""
        return tuple(node for node in self.nodes if node.node not in self.stale)

    @cached_property
    def types(self) -> Mapping[str, DeviceType]:
        """Type of each device."""
        return {d.device: d.type for node in self.nodes for d in node.devices}

    @cached_property
    def present(self) -> frozenset[str]:
        """Devices that a node names and has not lost."""
        return frozenset(d.device for node in self.nodes for d in node.devices if d.state != DeviceState.LOST)

    @cached_property
    def usable(self) -> frozenset[str]:
        """Devices that a plan may use: not lost, in service, on a node that reports."""
        return frozenset(d.device for node in self.reporting for d in node.devices if d.usable)

    @cached_property
    def taken(self) -> frozenset[str]:
        """What cannot be used on devices of nodes that report, in words: places that are taken, slice types that a
        driver does not offer."""
        devices = [d for node in self.reporting for d in node.devices]
        places = {key.name for d in devices for key in d.foreign}
        return frozenset(places | {f"{name} of {d.device}" for d in devices for name in d.lacks})

    @cached_property
    def unloadable(self) -> Mapping[str, str]:
        """Variants that a node cannot load now, as `family/version`, each with the reason: none of them is planned."""
        found = {}
        for node in self.nodes:
            for name, _, why in (entry.partition(": ") for entry in node.missing):
                if name.startswith(MISSING_MODEL):
                    found[name.removeprefix(MISSING_MODEL)] = f"{node.node}: {why}"
        return found

    @cached_property
    def hosted_families(self) -> frozenset[str]:
        """Families that run."""
        return frozenset(h.family for node in self.nodes for d in node.devices for s in d.slices for h in s.hosted)

    @cached_property
    def slice_states(self) -> Mapping[SliceKey, SliceState]:
        """State of each slice."""
        return {s.key: s.state for node in self.nodes for d in node.devices for s in d.slices}

    def device(self, device: str) -> DeviceStatus:
        """Status of one device.

        Raises:
            KeyError: no node reports it.
        """
        for node in self.nodes:
            for status in node.devices:
                if status.device == device:
                    return status
        raise KeyError(device)


@dataclass(frozen=True, slots=True)
class Configuration:
    """Configuration: slice types that fit one device together, ((slice_type, count), ...), sorted by name."""

    device_type: str
    slices: tuple[tuple[str, int], ...]


LEGAL_MOVES: Final[Mapping[SliceState, frozenset[SliceState]]] = {
    SliceState.PENDING: frozenset({SliceState.STARTING, SliceState.FAILED}),
    SliceState.STARTING: frozenset({SliceState.READY, SliceState.FAILED}),
    SliceState.READY: frozenset({SliceState.SWAPPING, SliceState.DRAINING, SliceState.FAILED}),
    SliceState.SWAPPING: frozenset({SliceState.READY, SliceState.DRAINING, SliceState.FAILED}),
    SliceState.DRAINING: frozenset({SliceState.GONE, SliceState.FAILED}),
    SliceState.FAILED: frozenset({SliceState.PENDING, SliceState.GONE}),
    SliceState.GONE: frozenset(),
}

FAILED_LAST: Final = "it failed last: "
"""Words in `SliceStatus.why` of a slice that is started again, before the reason of its last failure."""
SERVING: Final = frozenset({SliceState.READY, SliceState.SWAPPING})


@dataclass(frozen=True, slots=True)
class Step:
    """Step of reconciliation on one slice; also what the agent's journal writes (protos/power_agent/v1 Step)."""

    slice: SliceKey
    verb: str
    state: str = ""
    took_ms: float = 0.0
    why: str = ""


def failures(nodes: Iterable[NodeStatus]) -> dict[str, tuple[str, ...]]:
    """Names of slices that have failed and do not serve again yet, by the reason that their agent gives."""
    found: dict[str, tuple[str, ...]] = {}
    for slice_ in (one for node in nodes for device in node.devices for one in device.slices):
        before, mended, last = slice_.why.partition(FAILED_LAST)
        failed = slice_.state == SliceState.FAILED
        if failed or (mended and slice_.state in (SliceState.PENDING, SliceState.STARTING)):
            why = (before if failed else last) or "its agent gives no reason"
            found[why] = (*found.get(why, ()), slice_.key.name)
    return found

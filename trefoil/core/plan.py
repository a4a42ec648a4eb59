"""Plan: what ought to run, where requests go, and why."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cache, cached_property, lru_cache
from typing import Any, Final

from trefoil.core.common import Revision
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.objective import Objective, TokenSlo

NUMBER_DIGITS: Final = 18  # of a number in a decision's id; a longer one is none
SCALARS: Final = frozenset({str, float, int, bool, type(None)})


def plain(value: Any) -> Any:
    """Value with dataclasses, tuples and enums as JSON-ready values, in a canonical form."""
    kind = type(value)
    if kind in SCALARS:  # most of what there is
        return value
    if kind is SliceKey:
        return _plain_key(value)
    if dataclasses.is_dataclass(kind):
        fields = [(name, getattr(value, name)) for name in _names(kind)]
        return {name: one if type(one) in SCALARS else plain(one) for name, one in fields}
    if isinstance(value, IntEnum):
        return value.name
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in sorted(value.items())}
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value


@lru_cache(maxsize=16_384)  # of a few slices, in every plan; never changed by who gets it
def _plain_key(key: SliceKey) -> dict[str, Any]:
    return {name: getattr(key, name) for name in _names(SliceKey)}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(kind))


def governs(governor: str) -> bool:
    """Whether a governor of this name moves clocks."""
    return governor not in ("", "fixed")


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """Slice that ought to exist, and what it ought to serve."""

    key: SliceKey = SliceKey()
    hosted: tuple[Hosted, ...] = ()
    credits: int = 0


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """Device as wanted."""

    device: str = ""
    target: DeviceState = DeviceState.UNSPECIFIED
    slices: tuple[PlannedSlice, ...] = ()
    clock_min_mhz: int = 0
    clock_max_mhz: int = 0
    governor: str = ""
    power_limit_w: float = 0.0

    @property
    def held_mhz(self) -> int:
        """What holds it back, as `core/power.py` has it: its highest clock, below 0 its power limit [-W], 0 nothing."""
        return self.clock_max_mhz or -round(self.power_limit_w)

    @property
    def governed(self) -> bool:
        """Whether a governor moves its clock inside the range."""
        return governs(self.governor)

    @property
    def families(self) -> tuple[str, ...]:
        """Families that its slices host, in order."""
        return tuple(sorted({hosted.family for part in self.slices for hosted in part.hosted}))


@lru_cache(maxsize=4096)  # most devices are planned as they were
def _text(device: PlannedDevice) -> str:
    ordered = replace(device, slices=tuple(sorted(device.slices, key=lambda s: s.key)))
    return json.dumps(plain(ordered), sort_keys=True)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class NodePlan:
    """Plan of one node: always its complete desired state, also inside a rollout.

    `signature`: of a plan in Redis, where controller and agents have a separate key.
    """

    revision: Revision = Revision()
    node: str = ""
    devices: tuple[PlannedDevice, ...] = ()
    digest: str = ""
    signature: str = ""

    @cached_property
    def content_digest(self) -> str:
        """Digest of its devices: equal for equal desired states, whatever their revision."""
        return _digest(f"[{', '.join([_text(one) for one in sorted(self.devices, key=lambda d: d.device)])}]")


@dataclass(frozen=True, slots=True)
class RouteTarget:
    """Target of a route: a slice's share of a family's traffic; weights sum to 1 over the live targets of a stage.

    `accuracy` and `version` are the variant's, filled in from the catalogue when a plan is published; 0 = not known.
    """

    slice: SliceKey = SliceKey()
    variant: str = ""
    stage: int = 0
    weight: float = 0.0
    credits: int = 0
    draining: bool = False
    tier: str = ""
    accuracy: float = 0.0
    version: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Route of one family's requests. `class_slo_ms`, `class_token_slo`: of the classes whose objective is not the
    family's."""

    family: str = ""
    router: str = ""
    queue: str = ""
    targets: tuple[RouteTarget, ...] = ()
    queue_requests_max: int = 0
    queue_bytes_max: int = 0
    params: Mapping[str, float] = field(default_factory=dict)
    class_slo_ms: Mapping[str, float] = field(default_factory=dict)
    class_token_slo: Mapping[str, TokenSlo] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expected:
    """Prediction of the planner for a family; compared with what is measured."""

    grams_per_request: float = 0.0
    joules_per_request: float = 0.0
    latency_ms_p95: float = 0.0
    accuracy: float = 0.0
    capacity_per_s: float = 0.0
    move_j: float = 0.0
    move_s: float = 0.0


@dataclass(frozen=True, slots=True)
class InputStamp:
    """Stamp of an input that a plan was decided on."""

    key: str = ""
    observed_at_s: float = 0.0
    rung: int = 0


@dataclass(frozen=True)
class Plan:
    """Plan: a complete desired state of the fleet and its routes, with the reason.

    `signature`: of a plan in Redis, where controller and dispatchers have a key.
    """

    revision: Revision = Revision()
    policy: str = ""
    planner: str = ""
    objectives: tuple[Objective, ...] = ()
    nodes: tuple[NodePlan, ...] = ()
    routes: tuple[Route, ...] = ()
    why: str = ""
    expected: Mapping[str, Expected] = field(default_factory=dict)
    optimality_gap: float = 0.0
    inputs: tuple[InputStamp, ...] = ()
    created_at_s: float = 0.0
    exploration: bool = False
    degraded: str = ""
    decision_id: str = ""
    signature: str = ""

    @cached_property
    def content_digest(self) -> str:
        """Digest of nodes and routes: equal for equal desired states, whatever their revision, reason or age."""
        digests = sorted((node.node, node.content_digest) for node in self.nodes)
        plains = []
        for route in sorted(self.routes, key=lambda r: r.family):
            targets = []
            for target in sorted(route.targets, key=lambda t: (t.stage, t.slice)):
                plain_target = plain(target)
                plain_target["weight"] = round(target.weight, 9)
                targets.append(plain_target)
            plain_route = {**plain(replace(route, targets=())), "targets": targets}
            for name in ("class_slo_ms", "class_token_slo"):  # as digests were before routes had any
                if not plain_route[name]:
                    del plain_route[name]
            plains.append(plain_route)
        return _digest(json.dumps([digests, plains], sort_keys=True))

    @cached_property
    def hosted_families(self) -> frozenset[str]:
        """Families that are to run."""
        return frozenset(h.family for n in self.nodes for d in n.devices for s in d.slices for h in s.hosted)


class RolloutState(IntEnum):
    """State of a rollout."""

    UNSPECIFIED = 0
    APPLYING = 1
    WAITING_READY = 2
    WAITING_ACK = 3
    WAITING_DRAIN = 4
    DONE = 5
    HALTED = 6
    ROLLED_BACK = 7
    SUPERSEDED = 8


@dataclass(frozen=True, slots=True)
class Rollout:
    """Rollout: the way from what runs to a target plan. `step` of `steps` is under way, or was the last; 0: none."""

    target: Revision = Revision()
    state: RolloutState = RolloutState.UNSPECIFIED
    step: int = 0
    steps: int = 0
    moving: tuple[SliceKey, ...] = ()
    capacity_floor_per_s: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    since_s: float = 0.0
    spent_j: float = 0.0


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """Record of a decision: all that is needed to take it again (`trefoil replay`)."""

    id: str = ""
    revision: Revision = Revision()
    trigger: str = ""
    policy: str = ""
    view_json: str = ""
    seed: int = 0
    why: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    at_s: float = 0.0
    solve_ms: float = 0.0
    wall_limit_hit: bool = False


def decision_order(name: str) -> tuple[int, ...]:
    """Order of a decision's id, `<epoch>.<number>`."""
    return tuple(int(part) if part.isdecimal() and len(part) <= NUMBER_DIGITS else 0 for part in name.split("."))

"""Plan: what ought to run, where requests go, and why."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from trefoil.core.common import Revision
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.objective import Objective


@dataclass(frozen=True, slots=True)
class PlannedSlice:
    """Slice that ought to exist, and what it ought to serve."""

    key: SliceKey = SliceKey()
    hosted: tuple[Hosted, ...] = ()
    credits: int = 0


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """Device as it ought to be."""

    device: str = ""
    target: DeviceState = DeviceState.UNSPECIFIED
    slices: tuple[PlannedSlice, ...] = ()
    clock_min_mhz: int = 0
    clock_max_mhz: int = 0
    governor: str = ""
    power_limit_w: float = 0.0

    @property
    def families(self) -> tuple[str, ...]:
        """Families that its slices host, in order."""
        return tuple(sorted({hosted.family for part in self.slices for hosted in part.hosted}))


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Plan of one node: always its complete desired state, also inside a rollout.

    `signature`: of a plan in Redis, where controller and agents have a key of their own.
    """

    revision: Revision = Revision()
    node: str = ""
    devices: tuple[PlannedDevice, ...] = ()
    digest: str = ""
    signature: str = ""


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
    """Route of one family's requests. `class_slo_ms`: of the classes whose objective is not the family's."""

    family: str = ""
    router: str = ""
    queue: str = ""
    targets: tuple[RouteTarget, ...] = ()
    queue_requests_max: int = 0
    queue_bytes_max: int = 0
    params: Mapping[str, float] = field(default_factory=dict)
    class_slo_ms: Mapping[str, float] = field(default_factory=dict)


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


@dataclass(frozen=True, slots=True)
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
    return tuple(int(part) if part.isdigit() else 0 for part in name.split("."))

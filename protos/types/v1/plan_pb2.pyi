import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from protos.types.v1 import fleet_pb2 as _fleet_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ObjectiveMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OBJECTIVE_MODE_UNSPECIFIED: _ClassVar[ObjectiveMode]
    OBJECTIVE_MODE_BUDGET: _ClassVar[ObjectiveMode]
    OBJECTIVE_MODE_INSTANT: _ClassVar[ObjectiveMode]
    OBJECTIVE_MODE_LAMBDA: _ClassVar[ObjectiveMode]

class ActMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACT_MODE_UNSPECIFIED: _ClassVar[ActMode]
    ACT_MODE_OBSERVE: _ClassVar[ActMode]
    ACT_MODE_ADVISE: _ClassVar[ActMode]
    ACT_MODE_ACT: _ClassVar[ActMode]

class BudgetRung(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BUDGET_RUNG_WITHIN: _ClassVar[BudgetRung]
    BUDGET_RUNG_JOBS_WAIT: _ClassVar[BudgetRung]
    BUDGET_RUNG_LOWER_ACCURACY: _ClassVar[BudgetRung]
    BUDGET_RUNG_REFUSED: _ClassVar[BudgetRung]

class RolloutState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_STATE_UNSPECIFIED: _ClassVar[RolloutState]
    ROLLOUT_STATE_APPLYING: _ClassVar[RolloutState]
    ROLLOUT_STATE_WAITING_READY: _ClassVar[RolloutState]
    ROLLOUT_STATE_WAITING_ACK: _ClassVar[RolloutState]
    ROLLOUT_STATE_WAITING_DRAIN: _ClassVar[RolloutState]
    ROLLOUT_STATE_DONE: _ClassVar[RolloutState]
    ROLLOUT_STATE_HALTED: _ClassVar[RolloutState]
    ROLLOUT_STATE_ROLLED_BACK: _ClassVar[RolloutState]
    ROLLOUT_STATE_SUPERSEDED: _ClassVar[RolloutState]
OBJECTIVE_MODE_UNSPECIFIED: ObjectiveMode
OBJECTIVE_MODE_BUDGET: ObjectiveMode
OBJECTIVE_MODE_INSTANT: ObjectiveMode
OBJECTIVE_MODE_LAMBDA: ObjectiveMode
ACT_MODE_UNSPECIFIED: ActMode
ACT_MODE_OBSERVE: ActMode
ACT_MODE_ADVISE: ActMode
ACT_MODE_ACT: ActMode
BUDGET_RUNG_WITHIN: BudgetRung
BUDGET_RUNG_JOBS_WAIT: BudgetRung
BUDGET_RUNG_LOWER_ACCURACY: BudgetRung
BUDGET_RUNG_REFUSED: BudgetRung
ROLLOUT_STATE_UNSPECIFIED: RolloutState
ROLLOUT_STATE_APPLYING: RolloutState
ROLLOUT_STATE_WAITING_READY: RolloutState
ROLLOUT_STATE_WAITING_ACK: RolloutState
ROLLOUT_STATE_WAITING_DRAIN: RolloutState
ROLLOUT_STATE_DONE: RolloutState
ROLLOUT_STATE_HALTED: RolloutState
ROLLOUT_STATE_ROLLED_BACK: RolloutState
ROLLOUT_STATE_SUPERSEDED: RolloutState

class Objective(_message.Message):
    __slots__ = ("family", "mode", "slo_ms", "slo_quantile", "min_accuracy", "lambda_weight", "base_intensity_g_per_kwh", "base_j_per_request", "pue", "number", "params", "window_s", "hard_min_accuracy", "replicas_min", "spread_min", "devices", "ttft_ms", "ttft_quantile", "tpot_ms", "tpot_quantile")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    SLO_MS_FIELD_NUMBER: _ClassVar[int]
    SLO_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    LAMBDA_WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BASE_INTENSITY_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    BASE_J_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    PUE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    HARD_MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_MIN_FIELD_NUMBER: _ClassVar[int]
    SPREAD_MIN_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    family: str
    mode: ObjectiveMode
    slo_ms: float
    slo_quantile: float
    min_accuracy: float
    lambda_weight: float
    base_intensity_g_per_kwh: float
    base_j_per_request: float
    pue: float
    number: int
    params: _containers.ScalarMap[str, float]
    window_s: float
    hard_min_accuracy: float
    replicas_min: int
    spread_min: int
    devices: _containers.RepeatedScalarFieldContainer[str]
    ttft_ms: float
    ttft_quantile: float
    tpot_ms: float
    tpot_quantile: float
    def __init__(self, family: _Optional[str] = ..., mode: _Optional[_Union[ObjectiveMode, str]] = ..., slo_ms: _Optional[float] = ..., slo_quantile: _Optional[float] = ..., min_accuracy: _Optional[float] = ..., lambda_weight: _Optional[float] = ..., base_intensity_g_per_kwh: _Optional[float] = ..., base_j_per_request: _Optional[float] = ..., pue: _Optional[float] = ..., number: _Optional[int] = ..., params: _Optional[_Mapping[str, float]] = ..., window_s: _Optional[float] = ..., hard_min_accuracy: _Optional[float] = ..., replicas_min: _Optional[int] = ..., spread_min: _Optional[int] = ..., devices: _Optional[_Iterable[str]] = ..., ttft_ms: _Optional[float] = ..., ttft_quantile: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., tpot_quantile: _Optional[float] = ...) -> None: ...

class TokenSlo(_message.Message):
    __slots__ = ("ttft_ms", "ttft_quantile", "tpot_ms", "tpot_quantile")
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    ttft_ms: float
    ttft_quantile: float
    tpot_ms: float
    tpot_quantile: float
    def __init__(self, ttft_ms: _Optional[float] = ..., ttft_quantile: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., tpot_quantile: _Optional[float] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("tenant", "family", "grams_per_day", "joules_per_day", "least_accuracy", "time_zone", "number")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    GRAMS_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    LEAST_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    TIME_ZONE_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    family: str
    grams_per_day: float
    joules_per_day: float
    least_accuracy: float
    time_zone: str
    number: int
    def __init__(self, tenant: _Optional[str] = ..., family: _Optional[str] = ..., grams_per_day: _Optional[float] = ..., joules_per_day: _Optional[float] = ..., least_accuracy: _Optional[float] = ..., time_zone: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class TenantRung(_message.Message):
    __slots__ = ("tenant", "family", "rung", "limits", "least_accuracy", "free_at")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LEAST_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    FREE_AT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    family: str
    rung: BudgetRung
    limits: str
    least_accuracy: float
    free_at: _timestamp_pb2.Timestamp
    def __init__(self, tenant: _Optional[str] = ..., family: _Optional[str] = ..., rung: _Optional[_Union[BudgetRung, str]] = ..., limits: _Optional[str] = ..., least_accuracy: _Optional[float] = ..., free_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class TenantRungs(_message.Message):
    __slots__ = ("rungs", "epoch", "observed_at", "signature")
    RUNGS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    rungs: _containers.RepeatedCompositeFieldContainer[TenantRung]
    epoch: int
    observed_at: _timestamp_pb2.Timestamp
    signature: str
    def __init__(self, rungs: _Optional[_Iterable[_Union[TenantRung, _Mapping]]] = ..., epoch: _Optional[int] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., signature: _Optional[str] = ...) -> None: ...

class PlannedSlice(_message.Message):
    __slots__ = ("key", "hosted", "credits")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    key: _fleet_pb2.SliceKey
    hosted: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.Hosted]
    credits: int
    def __init__(self, key: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., hosted: _Optional[_Iterable[_Union[_fleet_pb2.Hosted, _Mapping]]] = ..., credits: _Optional[int] = ...) -> None: ...

class PlannedDevice(_message.Message):
    __slots__ = ("device", "target", "slices", "clock_min_mhz", "clock_max_mhz", "governor", "power_limit_w")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MIN_MHZ_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MAX_MHZ_FIELD_NUMBER: _ClassVar[int]
    GOVERNOR_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    device: str
    target: _fleet_pb2.DeviceState
    slices: _containers.RepeatedCompositeFieldContainer[PlannedSlice]
    clock_min_mhz: int
    clock_max_mhz: int
    governor: str
    power_limit_w: float
    def __init__(self, device: _Optional[str] = ..., target: _Optional[_Union[_fleet_pb2.DeviceState, str]] = ..., slices: _Optional[_Iterable[_Union[PlannedSlice, _Mapping]]] = ..., clock_min_mhz: _Optional[int] = ..., clock_max_mhz: _Optional[int] = ..., governor: _Optional[str] = ..., power_limit_w: _Optional[float] = ...) -> None: ...

class NodePlan(_message.Message):
    __slots__ = ("revision", "node", "devices", "digest", "signature")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    revision: _common_pb2.Revision
    node: str
    devices: _containers.RepeatedCompositeFieldContainer[PlannedDevice]
    digest: str
    signature: str
    def __init__(self, revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., node: _Optional[str] = ..., devices: _Optional[_Iterable[_Union[PlannedDevice, _Mapping]]] = ..., digest: _Optional[str] = ..., signature: _Optional[str] = ...) -> None: ...

class RouteTarget(_message.Message):
    __slots__ = ("slice", "variant", "stage", "weight", "credits", "draining", "tier", "accuracy", "version")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    slice: _fleet_pb2.SliceKey
    variant: str
    stage: int
    weight: float
    credits: int
    draining: bool
    tier: str
    accuracy: float
    version: int
    def __init__(self, slice: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., variant: _Optional[str] = ..., stage: _Optional[int] = ..., weight: _Optional[float] = ..., credits: _Optional[int] = ..., draining: _Optional[bool] = ..., tier: _Optional[str] = ..., accuracy: _Optional[float] = ..., version: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("family", "router", "queue", "targets", "queue_requests_max", "queue_bytes_max", "params", "class_slo_ms", "class_token_slo")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ClassSloMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ClassTokenSloEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TokenSlo
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TokenSlo, _Mapping]] = ...) -> None: ...
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_REQUESTS_MAX_FIELD_NUMBER: _ClassVar[int]
    QUEUE_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    CLASS_SLO_MS_FIELD_NUMBER: _ClassVar[int]
    CLASS_TOKEN_SLO_FIELD_NUMBER: _ClassVar[int]
    family: str
    router: str
    queue: str
    targets: _containers.RepeatedCompositeFieldContainer[RouteTarget]
    queue_requests_max: int
    queue_bytes_max: int
    params: _containers.ScalarMap[str, float]
    class_slo_ms: _containers.ScalarMap[str, float]
    class_token_slo: _containers.MessageMap[str, TokenSlo]
    def __init__(self, family: _Optional[str] = ..., router: _Optional[str] = ..., queue: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[RouteTarget, _Mapping]]] = ..., queue_requests_max: _Optional[int] = ..., queue_bytes_max: _Optional[int] = ..., params: _Optional[_Mapping[str, float]] = ..., class_slo_ms: _Optional[_Mapping[str, float]] = ..., class_token_slo: _Optional[_Mapping[str, TokenSlo]] = ...) -> None: ...

class Expected(_message.Message):
    __slots__ = ("grams_per_request", "joules_per_request", "latency_ms_p95", "accuracy", "capacity_per_s", "move_j", "move_s")
    GRAMS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_P95_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_PER_S_FIELD_NUMBER: _ClassVar[int]
    MOVE_J_FIELD_NUMBER: _ClassVar[int]
    MOVE_S_FIELD_NUMBER: _ClassVar[int]
    grams_per_request: float
    joules_per_request: float
    latency_ms_p95: float
    accuracy: float
    capacity_per_s: float
    move_j: float
    move_s: float
    def __init__(self, grams_per_request: _Optional[float] = ..., joules_per_request: _Optional[float] = ..., latency_ms_p95: _Optional[float] = ..., accuracy: _Optional[float] = ..., capacity_per_s: _Optional[float] = ..., move_j: _Optional[float] = ..., move_s: _Optional[float] = ...) -> None: ...

class InputStamp(_message.Message):
    __slots__ = ("key", "observed_at", "rung")
    KEY_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    key: str
    observed_at: _timestamp_pb2.Timestamp
    rung: int
    def __init__(self, key: _Optional[str] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rung: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("revision", "policy", "planner", "objectives", "nodes", "routes", "why", "expected", "optimality_gap", "inputs", "created_at", "exploration", "degraded", "decision_id", "signature")
    class ExpectedEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Expected
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Expected, _Mapping]] = ...) -> None: ...
    REVISION_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    PLANNER_FIELD_NUMBER: _ClassVar[int]
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    OPTIMALITY_GAP_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    EXPLORATION_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    revision: _common_pb2.Revision
    policy: str
    planner: str
    objectives: _containers.RepeatedCompositeFieldContainer[Objective]
    nodes: _containers.RepeatedCompositeFieldContainer[NodePlan]
    routes: _containers.RepeatedCompositeFieldContainer[Route]
    why: str
    expected: _containers.MessageMap[str, Expected]
    optimality_gap: float
    inputs: _containers.RepeatedCompositeFieldContainer[InputStamp]
    created_at: _timestamp_pb2.Timestamp
    exploration: bool
    degraded: str
    decision_id: str
    signature: str
    def __init__(self, revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., policy: _Optional[str] = ..., planner: _Optional[str] = ..., objectives: _Optional[_Iterable[_Union[Objective, _Mapping]]] = ..., nodes: _Optional[_Iterable[_Union[NodePlan, _Mapping]]] = ..., routes: _Optional[_Iterable[_Union[Route, _Mapping]]] = ..., why: _Optional[str] = ..., expected: _Optional[_Mapping[str, Expected]] = ..., optimality_gap: _Optional[float] = ..., inputs: _Optional[_Iterable[_Union[InputStamp, _Mapping]]] = ..., created_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., exploration: _Optional[bool] = ..., degraded: _Optional[str] = ..., decision_id: _Optional[str] = ..., signature: _Optional[str] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("target", "state", "step", "steps", "moving", "capacity_floor_per_s", "why", "since", "spent_j")
    class CapacityFloorPerSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MOVING_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FLOOR_PER_S_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    SPENT_J_FIELD_NUMBER: _ClassVar[int]
    target: _common_pb2.Revision
    state: RolloutState
    step: int
    steps: int
    moving: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.SliceKey]
    capacity_floor_per_s: _containers.ScalarMap[str, float]
    why: str
    since: _timestamp_pb2.Timestamp
    spent_j: float
    def __init__(self, target: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., state: _Optional[_Union[RolloutState, str]] = ..., step: _Optional[int] = ..., steps: _Optional[int] = ..., moving: _Optional[_Iterable[_Union[_fleet_pb2.SliceKey, _Mapping]]] = ..., capacity_floor_per_s: _Optional[_Mapping[str, float]] = ..., why: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., spent_j: _Optional[float] = ...) -> None: ...

class DecisionRecord(_message.Message):
    __slots__ = ("id", "revision", "trigger", "policy", "view_json", "seed", "why", "versions", "at", "solve_ms", "wall_limit_hit")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VIEW_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    SOLVE_MS_FIELD_NUMBER: _ClassVar[int]
    WALL_LIMIT_HIT_FIELD_NUMBER: _ClassVar[int]
    id: str
    revision: _common_pb2.Revision
    trigger: str
    policy: str
    view_json: str
    seed: int
    why: str
    versions: _containers.ScalarMap[str, str]
    at: _timestamp_pb2.Timestamp
    solve_ms: float
    wall_limit_hit: bool
    def __init__(self, id: _Optional[str] = ..., revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., trigger: _Optional[str] = ..., policy: _Optional[str] = ..., view_json: _Optional[str] = ..., seed: _Optional[int] = ..., why: _Optional[str] = ..., versions: _Optional[_Mapping[str, str]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., solve_ms: _Optional[float] = ..., wall_limit_hit: _Optional[bool] = ...) -> None: ...

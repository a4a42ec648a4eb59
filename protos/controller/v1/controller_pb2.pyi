import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import carbon_pb2 as _carbon_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from protos.types.v1 import fleet_pb2 as _fleet_pb2
from protos.types.v1 import jobs_pb2 as _jobs_pb2
from protos.types.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetOffersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetOffersResponse(_message.Message):
    __slots__ = ("zone", "made_at", "slots")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    zone: str
    made_at: _timestamp_pb2.Timestamp
    slots: _containers.RepeatedCompositeFieldContainer[OfferedSlot]
    def __init__(self, zone: _Optional[str] = ..., made_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., slots: _Optional[_Iterable[_Union[OfferedSlot, _Mapping]]] = ...) -> None: ...

class OfferedSlot(_message.Message):
    __slots__ = ("starts_at", "ends_at", "p50_g_per_kwh", "pue", "pools")
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    P50_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    PUE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    starts_at: _timestamp_pb2.Timestamp
    ends_at: _timestamp_pb2.Timestamp
    p50_g_per_kwh: float
    pue: float
    pools: _containers.RepeatedCompositeFieldContainer[OfferedPool]
    def __init__(self, starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., p50_g_per_kwh: _Optional[float] = ..., pue: _Optional[float] = ..., pools: _Optional[_Iterable[_Union[OfferedPool, _Mapping]]] = ...) -> None: ...

class OfferedPool(_message.Message):
    __slots__ = ("name", "free_s", "sure_s", "items")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FREE_S_FIELD_NUMBER: _ClassVar[int]
    SURE_S_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    name: str
    free_s: float
    sure_s: float
    items: _containers.RepeatedCompositeFieldContainer[OfferedItem]
    def __init__(self, name: _Optional[str] = ..., free_s: _Optional[float] = ..., sure_s: _Optional[float] = ..., items: _Optional[_Iterable[_Union[OfferedItem, _Mapping]]] = ...) -> None: ...

class OfferedItem(_message.Message):
    __slots__ = ("family", "device_s", "active_j", "accuracy", "request_s", "request_j", "variant")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_J_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_J_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    family: str
    device_s: float
    active_j: float
    accuracy: float
    request_s: float
    request_j: float
    variant: str
    def __init__(self, family: _Optional[str] = ..., device_s: _Optional[float] = ..., active_j: _Optional[float] = ..., accuracy: _Optional[float] = ..., request_s: _Optional[float] = ..., request_j: _Optional[float] = ..., variant: _Optional[str] = ...) -> None: ...

class GetPlanRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetPlanResponse(_message.Message):
    __slots__ = ("plan", "rollout", "mode", "frozen", "pinned", "carbon_refused", "disk_trouble", "loans", "models_refused", "agents_unreached", "places_refused", "files_set_aside", "set_aside", "overrides", "catalog_refused")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    CARBON_REFUSED_FIELD_NUMBER: _ClassVar[int]
    DISK_TROUBLE_FIELD_NUMBER: _ClassVar[int]
    LOANS_FIELD_NUMBER: _ClassVar[int]
    MODELS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    AGENTS_UNREACHED_FIELD_NUMBER: _ClassVar[int]
    PLACES_REFUSED_FIELD_NUMBER: _ClassVar[int]
    FILES_SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    OVERRIDES_FIELD_NUMBER: _ClassVar[int]
    CATALOG_REFUSED_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    rollout: _plan_pb2.Rollout
    mode: _plan_pb2.ActMode
    frozen: bool
    pinned: bool
    carbon_refused: str
    disk_trouble: str
    loans: _containers.RepeatedCompositeFieldContainer[Loan]
    models_refused: _containers.RepeatedScalarFieldContainer[str]
    agents_unreached: _containers.RepeatedScalarFieldContainer[str]
    places_refused: _containers.RepeatedScalarFieldContainer[str]
    files_set_aside: _containers.RepeatedScalarFieldContainer[str]
    set_aside: _containers.RepeatedScalarFieldContainer[str]
    overrides: _containers.RepeatedScalarFieldContainer[str]
    catalog_refused: str
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ..., rollout: _Optional[_Union[_plan_pb2.Rollout, _Mapping]] = ..., mode: _Optional[_Union[_plan_pb2.ActMode, str]] = ..., frozen: _Optional[bool] = ..., pinned: _Optional[bool] = ..., carbon_refused: _Optional[str] = ..., disk_trouble: _Optional[str] = ..., loans: _Optional[_Iterable[_Union[Loan, _Mapping]]] = ..., models_refused: _Optional[_Iterable[str]] = ..., agents_unreached: _Optional[_Iterable[str]] = ..., places_refused: _Optional[_Iterable[str]] = ..., files_set_aside: _Optional[_Iterable[str]] = ..., set_aside: _Optional[_Iterable[str]] = ..., overrides: _Optional[_Iterable[str]] = ..., catalog_refused: _Optional[str] = ...) -> None: ...

class Loan(_message.Message):
    __slots__ = ("device", "holder", "left_s")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    device: str
    holder: str
    left_s: float
    def __init__(self, device: _Optional[str] = ..., holder: _Optional[str] = ..., left_s: _Optional[float] = ...) -> None: ...

class ObjectiveChange(_message.Message):
    __slots__ = ("objective", "expected_number", "reset")
    OBJECTIVE_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    objective: _plan_pb2.Objective
    expected_number: int
    reset: bool
    def __init__(self, objective: _Optional[_Union[_plan_pb2.Objective, _Mapping]] = ..., expected_number: _Optional[int] = ..., reset: _Optional[bool] = ...) -> None: ...

class AllocatedDevice(_message.Message):
    __slots__ = ("device", "sharing_factor")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SHARING_FACTOR_FIELD_NUMBER: _ClassVar[int]
    device: str
    sharing_factor: int
    def __init__(self, device: _Optional[str] = ..., sharing_factor: _Optional[int] = ...) -> None: ...

class LoadFamilyRequest(_message.Message):
    __slots__ = ("family", "device")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    family: str
    device: str
    def __init__(self, family: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class LoadFamilyResponse(_message.Message):
    __slots__ = ("devices", "degraded")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[AllocatedDevice]
    degraded: str
    def __init__(self, devices: _Optional[_Iterable[_Union[AllocatedDevice, _Mapping]]] = ..., degraded: _Optional[str] = ...) -> None: ...

class UnloadFamilyRequest(_message.Message):
    __slots__ = ("family", "device")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    family: str
    device: str
    def __init__(self, family: _Optional[str] = ..., device: _Optional[str] = ...) -> None: ...

class UnloadFamilyResponse(_message.Message):
    __slots__ = ("devices", "degraded")
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    devices: _containers.RepeatedCompositeFieldContainer[AllocatedDevice]
    degraded: str
    def __init__(self, devices: _Optional[_Iterable[_Union[AllocatedDevice, _Mapping]]] = ..., degraded: _Optional[str] = ...) -> None: ...

class StopFamilyRequest(_message.Message):
    __slots__ = ("family",)
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    family: str
    def __init__(self, family: _Optional[str] = ...) -> None: ...

class StopFamilyResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: str
    def __init__(self, held: _Optional[str] = ...) -> None: ...

class StartFamilyRequest(_message.Message):
    __slots__ = ("family",)
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    family: str
    def __init__(self, family: _Optional[str] = ...) -> None: ...

class StartFamilyResponse(_message.Message):
    __slots__ = ("held", "degraded")
    HELD_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    held: str
    degraded: str
    def __init__(self, held: _Optional[str] = ..., degraded: _Optional[str] = ...) -> None: ...

class SetObjectivesRequest(_message.Message):
    __slots__ = ("objectives", "max_watts", "reset_max_watts")
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    MAX_WATTS_FIELD_NUMBER: _ClassVar[int]
    RESET_MAX_WATTS_FIELD_NUMBER: _ClassVar[int]
    objectives: _containers.RepeatedCompositeFieldContainer[ObjectiveChange]
    max_watts: float
    reset_max_watts: bool
    def __init__(self, objectives: _Optional[_Iterable[_Union[ObjectiveChange, _Mapping]]] = ..., max_watts: _Optional[float] = ..., reset_max_watts: _Optional[bool] = ...) -> None: ...

class SetObjectivesResponse(_message.Message):
    __slots__ = ("objectives", "max_watts", "degraded")
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    MAX_WATTS_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    objectives: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Objective]
    max_watts: float
    degraded: str
    def __init__(self, objectives: _Optional[_Iterable[_Union[_plan_pb2.Objective, _Mapping]]] = ..., max_watts: _Optional[float] = ..., degraded: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("objectives", "max_watts", "mode", "prune", "dry_run", "budgets")
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    MAX_WATTS_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PRUNE_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    objectives: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Objective]
    max_watts: float
    mode: _plan_pb2.ActMode
    prune: bool
    dry_run: bool
    budgets: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Budget]
    def __init__(self, objectives: _Optional[_Iterable[_Union[_plan_pb2.Objective, _Mapping]]] = ..., max_watts: _Optional[float] = ..., mode: _Optional[_Union[_plan_pb2.ActMode, str]] = ..., prune: _Optional[bool] = ..., dry_run: _Optional[bool] = ..., budgets: _Optional[_Iterable[_Union[_plan_pb2.Budget, _Mapping]]] = ...) -> None: ...

class FieldChange(_message.Message):
    __slots__ = ("field", "now", "wanted")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    field: str
    now: str
    wanted: str
    def __init__(self, field: _Optional[str] = ..., now: _Optional[str] = ..., wanted: _Optional[str] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("changes", "degraded", "held")
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    DEGRADED_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[FieldChange]
    degraded: str
    held: str
    def __init__(self, changes: _Optional[_Iterable[_Union[FieldChange, _Mapping]]] = ..., degraded: _Optional[str] = ..., held: _Optional[str] = ...) -> None: ...

class SetBudgetRequest(_message.Message):
    __slots__ = ("budget", "expected_number", "reset")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    budget: _plan_pb2.Budget
    expected_number: int
    reset: bool
    def __init__(self, budget: _Optional[_Union[_plan_pb2.Budget, _Mapping]] = ..., expected_number: _Optional[int] = ..., reset: _Optional[bool] = ...) -> None: ...

class SetBudgetResponse(_message.Message):
    __slots__ = ("use",)
    USE_FIELD_NUMBER: _ClassVar[int]
    use: BudgetUse
    def __init__(self, use: _Optional[_Union[BudgetUse, _Mapping]] = ...) -> None: ...

class ClearBudgetRequest(_message.Message):
    __slots__ = ("tenant", "family")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    family: str
    def __init__(self, tenant: _Optional[str] = ..., family: _Optional[str] = ...) -> None: ...

class ClearBudgetResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetBudgetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class BudgetUse(_message.Message):
    __slots__ = ("budget", "grams", "joules", "rung", "free_at")
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    GRAMS_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    FREE_AT_FIELD_NUMBER: _ClassVar[int]
    budget: _plan_pb2.Budget
    grams: float
    joules: float
    rung: _plan_pb2.BudgetRung
    free_at: _timestamp_pb2.Timestamp
    def __init__(self, budget: _Optional[_Union[_plan_pb2.Budget, _Mapping]] = ..., grams: _Optional[float] = ..., joules: _Optional[float] = ..., rung: _Optional[_Union[_plan_pb2.BudgetRung, str]] = ..., free_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetBudgetsResponse(_message.Message):
    __slots__ = ("budgets",)
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    budgets: _containers.RepeatedCompositeFieldContainer[BudgetUse]
    def __init__(self, budgets: _Optional[_Iterable[_Union[BudgetUse, _Mapping]]] = ...) -> None: ...

class GetObjectivesRequest(_message.Message):
    __slots__ = ("family",)
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    family: str
    def __init__(self, family: _Optional[str] = ...) -> None: ...

class GetObjectivesResponse(_message.Message):
    __slots__ = ("objectives", "max_watts")
    OBJECTIVES_FIELD_NUMBER: _ClassVar[int]
    MAX_WATTS_FIELD_NUMBER: _ClassVar[int]
    objectives: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Objective]
    max_watts: float
    def __init__(self, objectives: _Optional[_Iterable[_Union[_plan_pb2.Objective, _Mapping]]] = ..., max_watts: _Optional[float] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("family",)
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    family: str
    def __init__(self, family: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("why", "expected", "advice", "advised", "trigger", "replans_by_cause", "reconfigurations_by_cause", "exploration")
    class ReplansByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class ReconfigurationsByCauseEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WHY_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    ADVICE_FIELD_NUMBER: _ClassVar[int]
    ADVISED_FIELD_NUMBER: _ClassVar[int]
    TRIGGER_FIELD_NUMBER: _ClassVar[int]
    REPLANS_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    RECONFIGURATIONS_BY_CAUSE_FIELD_NUMBER: _ClassVar[int]
    EXPLORATION_FIELD_NUMBER: _ClassVar[int]
    why: str
    expected: _plan_pb2.Expected
    advice: str
    advised: _plan_pb2.Expected
    trigger: str
    replans_by_cause: _containers.ScalarMap[str, int]
    reconfigurations_by_cause: _containers.ScalarMap[str, int]
    exploration: Exploration
    def __init__(self, why: _Optional[str] = ..., expected: _Optional[_Union[_plan_pb2.Expected, _Mapping]] = ..., advice: _Optional[str] = ..., advised: _Optional[_Union[_plan_pb2.Expected, _Mapping]] = ..., trigger: _Optional[str] = ..., replans_by_cause: _Optional[_Mapping[str, int]] = ..., reconfigurations_by_cause: _Optional[_Mapping[str, int]] = ..., exploration: _Optional[_Union[Exploration, _Mapping]] = ...) -> None: ...

class Exploration(_message.Message):
    __slots__ = ("under_way", "text", "explorations", "evaluations", "refused", "broken_off", "spent_s", "spent_j", "violations")
    UNDER_WAY_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    EXPLORATIONS_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    BROKEN_OFF_FIELD_NUMBER: _ClassVar[int]
    SPENT_S_FIELD_NUMBER: _ClassVar[int]
    SPENT_J_FIELD_NUMBER: _ClassVar[int]
    VIOLATIONS_FIELD_NUMBER: _ClassVar[int]
    under_way: bool
    text: str
    explorations: int
    evaluations: int
    refused: int
    broken_off: int
    spent_s: float
    spent_j: float
    violations: int
    def __init__(self, under_way: _Optional[bool] = ..., text: _Optional[str] = ..., explorations: _Optional[int] = ..., evaluations: _Optional[int] = ..., refused: _Optional[int] = ..., broken_off: _Optional[int] = ..., spent_s: _Optional[float] = ..., spent_j: _Optional[float] = ..., violations: _Optional[int] = ...) -> None: ...

class SetModeRequest(_message.Message):
    __slots__ = ("mode", "reset")
    MODE_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    mode: _plan_pb2.ActMode
    reset: bool
    def __init__(self, mode: _Optional[_Union[_plan_pb2.ActMode, str]] = ..., reset: _Optional[bool] = ...) -> None: ...

class SetModeResponse(_message.Message):
    __slots__ = ("mode",)
    MODE_FIELD_NUMBER: _ClassVar[int]
    mode: _plan_pb2.ActMode
    def __init__(self, mode: _Optional[_Union[_plan_pb2.ActMode, str]] = ...) -> None: ...

class FreezeRequest(_message.Message):
    __slots__ = ("frozen",)
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    frozen: bool
    def __init__(self, frozen: _Optional[bool] = ...) -> None: ...

class FreezeResponse(_message.Message):
    __slots__ = ("frozen", "revision")
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    frozen: bool
    revision: _common_pb2.Revision
    def __init__(self, frozen: _Optional[bool] = ..., revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.Plan
    def __init__(self, plan: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: _common_pb2.Revision
    def __init__(self, revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RollbackResponse(_message.Message):
    __slots__ = ("revision", "why")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    revision: _common_pb2.Revision
    why: str
    def __init__(self, revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class ReplanRequest(_message.Message):
    __slots__ = ("cause", "why", "revision")
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    cause: str
    why: str
    revision: _common_pb2.Revision
    def __init__(self, cause: _Optional[str] = ..., why: _Optional[str] = ..., revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

class ReplanResponse(_message.Message):
    __slots__ = ("decision_id", "outcome", "effect", "why", "revision")
    DECISION_ID_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    EFFECT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    decision_id: str
    outcome: str
    effect: str
    why: str
    revision: _common_pb2.Revision
    def __init__(self, decision_id: _Optional[str] = ..., outcome: _Optional[str] = ..., effect: _Optional[str] = ..., why: _Optional[str] = ..., revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

class GetDecisionRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetDecisionResponse(_message.Message):
    __slots__ = ("decision", "made")
    DECISION_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    decision: _plan_pb2.DecisionRecord
    made: _plan_pb2.Plan
    def __init__(self, decision: _Optional[_Union[_plan_pb2.DecisionRecord, _Mapping]] = ..., made: _Optional[_Union[_plan_pb2.Plan, _Mapping]] = ...) -> None: ...

class LendDeviceRequest(_message.Message):
    __slots__ = ("holder", "device", "lease_s", "force")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    holder: str
    device: _plan_pb2.PlannedDevice
    lease_s: float
    force: bool
    def __init__(self, holder: _Optional[str] = ..., device: _Optional[_Union[_plan_pb2.PlannedDevice, _Mapping]] = ..., lease_s: _Optional[float] = ..., force: _Optional[bool] = ...) -> None: ...

class LendDeviceResponse(_message.Message):
    __slots__ = ("revision",)
    REVISION_FIELD_NUMBER: _ClassVar[int]
    revision: _common_pb2.Revision
    def __init__(self, revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

class ReturnDeviceRequest(_message.Message):
    __slots__ = ("device", "holder")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    device: str
    holder: str
    def __init__(self, device: _Optional[str] = ..., holder: _Optional[str] = ...) -> None: ...

class ReturnDeviceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Served(_message.Message):
    __slots__ = ("family", "slo_class", "slo_ms", "rate_per_s", "answered", "failed", "latency_ms_p95", "slo_attainment", "accuracy", "joules_per_request", "grams_per_request", "tokens", "waited_share", "wait_ms_mean", "length_cv")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    SLO_MS_FIELD_NUMBER: _ClassVar[int]
    RATE_PER_S_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_P95_FIELD_NUMBER: _ClassVar[int]
    SLO_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    ACCURACY_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    GRAMS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAITED_SHARE_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_MEAN_FIELD_NUMBER: _ClassVar[int]
    LENGTH_CV_FIELD_NUMBER: _ClassVar[int]
    family: str
    slo_class: str
    slo_ms: float
    rate_per_s: float
    answered: int
    failed: int
    latency_ms_p95: float
    slo_attainment: float
    accuracy: float
    joules_per_request: float
    grams_per_request: float
    tokens: ServedTokens
    waited_share: float
    wait_ms_mean: float
    length_cv: float
    def __init__(self, family: _Optional[str] = ..., slo_class: _Optional[str] = ..., slo_ms: _Optional[float] = ..., rate_per_s: _Optional[float] = ..., answered: _Optional[int] = ..., failed: _Optional[int] = ..., latency_ms_p95: _Optional[float] = ..., slo_attainment: _Optional[float] = ..., accuracy: _Optional[float] = ..., joules_per_request: _Optional[float] = ..., grams_per_request: _Optional[float] = ..., tokens: _Optional[_Union[ServedTokens, _Mapping]] = ..., waited_share: _Optional[float] = ..., wait_ms_mean: _Optional[float] = ..., length_cv: _Optional[float] = ...) -> None: ...

class ServedTokens(_message.Message):
    __slots__ = ("tokens", "prompt_tokens", "ttft_ms", "ttft_quantile", "ttft_ms_p95", "ttft_attainment", "tpot_ms", "tpot_quantile", "tpot_ms_p95", "tpot_attainment", "joules_per_token", "grams_per_token")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_P95_FIELD_NUMBER: _ClassVar[int]
    TTFT_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_FIELD_NUMBER: _ClassVar[int]
    TPOT_QUANTILE_FIELD_NUMBER: _ClassVar[int]
    TPOT_MS_P95_FIELD_NUMBER: _ClassVar[int]
    TPOT_ATTAINMENT_FIELD_NUMBER: _ClassVar[int]
    JOULES_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    GRAMS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    prompt_tokens: int
    ttft_ms: float
    ttft_quantile: float
    ttft_ms_p95: float
    ttft_attainment: float
    tpot_ms: float
    tpot_quantile: float
    tpot_ms_p95: float
    tpot_attainment: float
    joules_per_token: float
    grams_per_token: float
    def __init__(self, tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., ttft_ms: _Optional[float] = ..., ttft_quantile: _Optional[float] = ..., ttft_ms_p95: _Optional[float] = ..., ttft_attainment: _Optional[float] = ..., tpot_ms: _Optional[float] = ..., tpot_quantile: _Optional[float] = ..., tpot_ms_p95: _Optional[float] = ..., tpot_attainment: _Optional[float] = ..., joules_per_token: _Optional[float] = ..., grams_per_token: _Optional[float] = ...) -> None: ...

class GetServedResponse(_message.Message):
    __slots__ = ("window_s", "served", "base_basis", "base_unknown")
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    SERVED_FIELD_NUMBER: _ClassVar[int]
    BASE_BASIS_FIELD_NUMBER: _ClassVar[int]
    BASE_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    served: _containers.RepeatedCompositeFieldContainer[Served]
    base_basis: str
    base_unknown: str
    def __init__(self, window_s: _Optional[float] = ..., served: _Optional[_Iterable[_Union[Served, _Mapping]]] = ..., base_basis: _Optional[str] = ..., base_unknown: _Optional[str] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("cluster", "nodes", "stale_nodes", "carbon", "carbon_ratios", "workers", "plans_refused", "carbon_forecasts", "jobs")
    CLUSTER_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    STALE_NODES_FIELD_NUMBER: _ClassVar[int]
    CARBON_FIELD_NUMBER: _ClassVar[int]
    CARBON_RATIOS_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PLANS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    CARBON_FORECASTS_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    cluster: str
    nodes: _containers.RepeatedCompositeFieldContainer[_fleet_pb2.NodeStatus]
    stale_nodes: _containers.RepeatedScalarFieldContainer[str]
    carbon: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonReading]
    carbon_ratios: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonRatio]
    workers: _containers.RepeatedScalarFieldContainer[str]
    plans_refused: _containers.RepeatedScalarFieldContainer[str]
    carbon_forecasts: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonForecast]
    jobs: _jobs_pb2.PlannedJobs
    def __init__(self, cluster: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[_fleet_pb2.NodeStatus, _Mapping]]] = ..., stale_nodes: _Optional[_Iterable[str]] = ..., carbon: _Optional[_Iterable[_Union[_carbon_pb2.CarbonReading, _Mapping]]] = ..., carbon_ratios: _Optional[_Iterable[_Union[_carbon_pb2.CarbonRatio, _Mapping]]] = ..., workers: _Optional[_Iterable[str]] = ..., plans_refused: _Optional[_Iterable[str]] = ..., carbon_forecasts: _Optional[_Iterable[_Union[_carbon_pb2.CarbonForecast, _Mapping]]] = ..., jobs: _Optional[_Union[_jobs_pb2.PlannedJobs, _Mapping]] = ...) -> None: ...

class ListDecisionsRequest(_message.Message):
    __slots__ = ("since", "newest")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    since: _timestamp_pb2.Timestamp
    newest: int
    def __init__(self, since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., newest: _Optional[int] = ...) -> None: ...

class ListDecisionsResponse(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[_plan_pb2.DecisionRecord]
    def __init__(self, decisions: _Optional[_Iterable[_Union[_plan_pb2.DecisionRecord, _Mapping]]] = ...) -> None: ...

class GetReportRequest(_message.Message):
    __slots__ = ("since", "until")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    def __init__(self, since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class FamilyHour(_message.Message):
    __slots__ = ("family", "starts_at", "sums")
    class SumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    family: str
    starts_at: _timestamp_pb2.Timestamp
    sums: _containers.ScalarMap[str, float]
    def __init__(self, family: _Optional[str] = ..., starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sums: _Optional[_Mapping[str, float]] = ...) -> None: ...

class GetReportResponse(_message.Message):
    __slots__ = ("since", "until", "hours", "simulated", "embodied_lifetime_years", "embodied_unknown", "accuracies")
    class AccuraciesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SINCE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    EMBODIED_LIFETIME_YEARS_FIELD_NUMBER: _ClassVar[int]
    EMBODIED_UNKNOWN_FIELD_NUMBER: _ClassVar[int]
    ACCURACIES_FIELD_NUMBER: _ClassVar[int]
    since: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    hours: _containers.RepeatedCompositeFieldContainer[FamilyHour]
    simulated: bool
    embodied_lifetime_years: float
    embodied_unknown: _containers.RepeatedScalarFieldContainer[str]
    accuracies: _containers.ScalarMap[str, float]
    def __init__(self, since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., hours: _Optional[_Iterable[_Union[FamilyHour, _Mapping]]] = ..., simulated: _Optional[bool] = ..., embodied_lifetime_years: _Optional[float] = ..., embodied_unknown: _Optional[_Iterable[str]] = ..., accuracies: _Optional[_Mapping[str, float]] = ...) -> None: ...

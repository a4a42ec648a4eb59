import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeviceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DEVICE_STATE_UNSPECIFIED: _ClassVar[DeviceState]
    DEVICE_STATE_AWAKE: _ClassVar[DeviceState]
    DEVICE_STATE_FALLING_ASLEEP: _ClassVar[DeviceState]
    DEVICE_STATE_ASLEEP: _ClassVar[DeviceState]
    DEVICE_STATE_WAKING: _ClassVar[DeviceState]
    DEVICE_STATE_LOST: _ClassVar[DeviceState]

class SliceState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SLICE_STATE_UNSPECIFIED: _ClassVar[SliceState]
    SLICE_STATE_PENDING: _ClassVar[SliceState]
    SLICE_STATE_STARTING: _ClassVar[SliceState]
    SLICE_STATE_READY: _ClassVar[SliceState]
    SLICE_STATE_SWAPPING: _ClassVar[SliceState]
    SLICE_STATE_DRAINING: _ClassVar[SliceState]
    SLICE_STATE_GONE: _ClassVar[SliceState]
    SLICE_STATE_FAILED: _ClassVar[SliceState]
DEVICE_STATE_UNSPECIFIED: DeviceState
DEVICE_STATE_AWAKE: DeviceState
DEVICE_STATE_FALLING_ASLEEP: DeviceState
DEVICE_STATE_ASLEEP: DeviceState
DEVICE_STATE_WAKING: DeviceState
DEVICE_STATE_LOST: DeviceState
SLICE_STATE_UNSPECIFIED: SliceState
SLICE_STATE_PENDING: SliceState
SLICE_STATE_STARTING: SliceState
SLICE_STATE_READY: SliceState
SLICE_STATE_SWAPPING: SliceState
SLICE_STATE_DRAINING: SliceState
SLICE_STATE_GONE: SliceState
SLICE_STATE_FAILED: SliceState

class SliceKey(_message.Message):
    __slots__ = ("device", "slice_type", "start", "size")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SLICE_TYPE_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    device: str
    slice_type: str
    start: int
    size: int
    def __init__(self, device: _Optional[str] = ..., slice_type: _Optional[str] = ..., start: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class Hosted(_message.Message):
    __slots__ = ("family", "variant", "version", "stage", "stages", "instances", "max_batch")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    family: str
    variant: str
    version: int
    stage: int
    stages: int
    instances: int
    max_batch: int
    def __init__(self, family: _Optional[str] = ..., variant: _Optional[str] = ..., version: _Optional[int] = ..., stage: _Optional[int] = ..., stages: _Optional[int] = ..., instances: _Optional[int] = ..., max_batch: _Optional[int] = ...) -> None: ...

class ClockLease(_message.Message):
    __slots__ = ("device", "min_mhz", "max_mhz", "holder", "epoch", "expires_at", "power_limit_w")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    MIN_MHZ_FIELD_NUMBER: _ClassVar[int]
    MAX_MHZ_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    device: str
    min_mhz: int
    max_mhz: int
    holder: str
    epoch: int
    expires_at: _timestamp_pb2.Timestamp
    power_limit_w: float
    def __init__(self, device: _Optional[str] = ..., min_mhz: _Optional[int] = ..., max_mhz: _Optional[int] = ..., holder: _Optional[str] = ..., epoch: _Optional[int] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., power_limit_w: _Optional[float] = ...) -> None: ...

class SliceStatus(_message.Message):
    __slots__ = ("key", "generation", "mig_uuid", "state", "why", "hosted", "grpc_target", "metrics_url", "revision", "since", "credits")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    MIG_UUID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    GRPC_TARGET_FIELD_NUMBER: _ClassVar[int]
    METRICS_URL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    key: SliceKey
    generation: int
    mig_uuid: str
    state: SliceState
    why: str
    hosted: _containers.RepeatedCompositeFieldContainer[Hosted]
    grpc_target: str
    metrics_url: str
    revision: _common_pb2.Revision
    since: _timestamp_pb2.Timestamp
    credits: int
    def __init__(self, key: _Optional[_Union[SliceKey, _Mapping]] = ..., generation: _Optional[int] = ..., mig_uuid: _Optional[str] = ..., state: _Optional[_Union[SliceState, str]] = ..., why: _Optional[str] = ..., hosted: _Optional[_Iterable[_Union[Hosted, _Mapping]]] = ..., grpc_target: _Optional[str] = ..., metrics_url: _Optional[str] = ..., revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., credits: _Optional[int] = ...) -> None: ...

class DeviceStatus(_message.Message):
    __slots__ = ("device", "type", "state", "slices", "clock_mhz", "clock_lease", "power_limit_w", "mig_current", "mig_pending", "clock_event_reasons", "drift", "power_w", "temperature_c", "cordon", "foreign", "closed", "lacks")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    CLOCK_LEASE_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMIT_W_FIELD_NUMBER: _ClassVar[int]
    MIG_CURRENT_FIELD_NUMBER: _ClassVar[int]
    MIG_PENDING_FIELD_NUMBER: _ClassVar[int]
    CLOCK_EVENT_REASONS_FIELD_NUMBER: _ClassVar[int]
    DRIFT_FIELD_NUMBER: _ClassVar[int]
    POWER_W_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_C_FIELD_NUMBER: _ClassVar[int]
    CORDON_FIELD_NUMBER: _ClassVar[int]
    FOREIGN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    LACKS_FIELD_NUMBER: _ClassVar[int]
    device: str
    type: str
    state: DeviceState
    slices: _containers.RepeatedCompositeFieldContainer[SliceStatus]
    clock_mhz: int
    clock_lease: ClockLease
    power_limit_w: float
    mig_current: bool
    mig_pending: bool
    clock_event_reasons: _containers.RepeatedScalarFieldContainer[str]
    drift: _containers.RepeatedScalarFieldContainer[str]
    power_w: float
    temperature_c: float
    cordon: str
    foreign: _containers.RepeatedCompositeFieldContainer[SliceKey]
    closed: str
    lacks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, device: _Optional[str] = ..., type: _Optional[str] = ..., state: _Optional[_Union[DeviceState, str]] = ..., slices: _Optional[_Iterable[_Union[SliceStatus, _Mapping]]] = ..., clock_mhz: _Optional[int] = ..., clock_lease: _Optional[_Union[ClockLease, _Mapping]] = ..., power_limit_w: _Optional[float] = ..., mig_current: _Optional[bool] = ..., mig_pending: _Optional[bool] = ..., clock_event_reasons: _Optional[_Iterable[str]] = ..., drift: _Optional[_Iterable[str]] = ..., power_w: _Optional[float] = ..., temperature_c: _Optional[float] = ..., cordon: _Optional[str] = ..., foreign: _Optional[_Iterable[_Union[SliceKey, _Mapping]]] = ..., closed: _Optional[str] = ..., lacks: _Optional[_Iterable[str]] = ...) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("node", "zone", "site", "epoch", "boot_id", "driver_load_id", "applied", "devices", "capabilities", "missing", "observed_at", "simulated", "agent_target", "highest_epoch_seen", "models")
    NODE_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    SITE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DRIVER_LOAD_ID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    AGENT_TARGET_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_EPOCH_SEEN_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    node: str
    zone: str
    site: str
    epoch: int
    boot_id: str
    driver_load_id: str
    applied: _common_pb2.Revision
    devices: _containers.RepeatedCompositeFieldContainer[DeviceStatus]
    capabilities: _containers.RepeatedScalarFieldContainer[str]
    missing: _containers.RepeatedScalarFieldContainer[str]
    observed_at: _timestamp_pb2.Timestamp
    simulated: bool
    agent_target: str
    highest_epoch_seen: int
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, node: _Optional[str] = ..., zone: _Optional[str] = ..., site: _Optional[str] = ..., epoch: _Optional[int] = ..., boot_id: _Optional[str] = ..., driver_load_id: _Optional[str] = ..., applied: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., devices: _Optional[_Iterable[_Union[DeviceStatus, _Mapping]]] = ..., capabilities: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[str]] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., simulated: _Optional[bool] = ..., agent_target: _Optional[str] = ..., highest_epoch_seen: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

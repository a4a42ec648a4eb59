from protos.types.v1 import energy_pb2 as _energy_pb2
from protos.types.v1 import fleet_pb2 as _fleet_pb2
from protos.types.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Step(_message.Message):
    __slots__ = ("slice", "verb", "state", "took_ms", "why")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    VERB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    TOOK_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    slice: _fleet_pb2.SliceKey
    verb: str
    state: str
    took_ms: float
    why: str
    def __init__(self, slice: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., verb: _Optional[str] = ..., state: _Optional[str] = ..., took_ms: _Optional[float] = ..., why: _Optional[str] = ...) -> None: ...

class ApplyRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.NodePlan
    def __init__(self, plan: _Optional[_Union[_plan_pb2.NodePlan, _Mapping]] = ...) -> None: ...

class ApplyResponse(_message.Message):
    __slots__ = ("accepted", "changed", "steps")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    changed: bool
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    def __init__(self, accepted: _Optional[bool] = ..., changed: _Optional[bool] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ...) -> None: ...

class GetNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _fleet_pb2.NodeStatus
    def __init__(self, node: _Optional[_Union[_fleet_pb2.NodeStatus, _Mapping]] = ...) -> None: ...

class WatchNodeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchNodeResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _fleet_pb2.NodeStatus
    def __init__(self, node: _Optional[_Union[_fleet_pb2.NodeStatus, _Mapping]] = ...) -> None: ...

class PreviewPlanRequest(_message.Message):
    __slots__ = ("plan",)
    PLAN_FIELD_NUMBER: _ClassVar[int]
    plan: _plan_pb2.NodePlan
    def __init__(self, plan: _Optional[_Union[_plan_pb2.NodePlan, _Mapping]] = ...) -> None: ...

class PreviewPlanResponse(_message.Message):
    __slots__ = ("changed", "steps")
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    steps: _containers.RepeatedCompositeFieldContainer[Step]
    def __init__(self, changed: _Optional[bool] = ..., steps: _Optional[_Iterable[_Union[Step, _Mapping]]] = ...) -> None: ...

class WatchEnergyRequest(_message.Message):
    __slots__ = ("after_seq",)
    class AfterSeqEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    AFTER_SEQ_FIELD_NUMBER: _ClassVar[int]
    after_seq: _containers.ScalarMap[str, int]
    def __init__(self, after_seq: _Optional[_Mapping[str, int]] = ...) -> None: ...

class WatchEnergyResponse(_message.Message):
    __slots__ = ("sample",)
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    sample: _energy_pb2.EnergySample
    def __init__(self, sample: _Optional[_Union[_energy_pb2.EnergySample, _Mapping]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("device", "epoch", "why", "patience_s", "release")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_S_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    device: str
    epoch: int
    why: str
    patience_s: float
    release: bool
    def __init__(self, device: _Optional[str] = ..., epoch: _Optional[int] = ..., why: _Optional[str] = ..., patience_s: _Optional[float] = ..., release: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _fleet_pb2.NodeStatus
    def __init__(self, node: _Optional[_Union[_fleet_pb2.NodeStatus, _Mapping]] = ...) -> None: ...

class SetClocksRequest(_message.Message):
    __slots__ = ("lease", "ttl_s")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    lease: _fleet_pb2.ClockLease
    ttl_s: float
    def __init__(self, lease: _Optional[_Union[_fleet_pb2.ClockLease, _Mapping]] = ..., ttl_s: _Optional[float] = ...) -> None: ...

class SetClocksResponse(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _fleet_pb2.ClockLease
    def __init__(self, lease: _Optional[_Union[_fleet_pb2.ClockLease, _Mapping]] = ...) -> None: ...

class ReleaseClocksRequest(_message.Message):
    __slots__ = ("device", "holder", "epoch")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    device: str
    holder: str
    epoch: int
    def __init__(self, device: _Optional[str] = ..., holder: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseClocksResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdoptRequest(_message.Message):
    __slots__ = ("name", "epoch")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    def __init__(self, name: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ...) -> None: ...

class AdoptResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _fleet_pb2.NodeStatus
    def __init__(self, node: _Optional[_Union[_fleet_pb2.NodeStatus, _Mapping]] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("name", "epoch", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: _containers.RepeatedScalarFieldContainer[str]
    epoch: int
    force: bool
    def __init__(self, name: _Optional[_Iterable[str]] = ..., epoch: _Optional[int] = ..., force: _Optional[bool] = ...) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("node",)
    NODE_FIELD_NUMBER: _ClassVar[int]
    node: _fleet_pb2.NodeStatus
    def __init__(self, node: _Optional[_Union[_fleet_pb2.NodeStatus, _Mapping]] = ...) -> None: ...

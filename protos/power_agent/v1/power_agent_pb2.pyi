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

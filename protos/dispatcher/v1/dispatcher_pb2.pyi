from protos.types.v1 import common_pb2 as _common_pb2
from protos.types.v1 import load_pb2 as _load_pb2
from protos.types.v1 import plan_pb2 as _plan_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetTableRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetTableResponse(_message.Message):
    __slots__ = ("table", "routes", "slices", "why", "workers")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.Revision
    routes: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Route]
    slices: _containers.RepeatedCompositeFieldContainer[_load_pb2.SliceLoad]
    why: str
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, table: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., routes: _Optional[_Iterable[_Union[_plan_pb2.Route, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[_load_pb2.SliceLoad, _Mapping]]] = ..., why: _Optional[str] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("dispatcher", "worker", "table", "draining", "in_flight", "waiting", "peer_target", "why")
    DISPATCHER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PEER_TARGET_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    dispatcher: str
    worker: int
    table: _common_pb2.Revision
    draining: bool
    in_flight: int
    waiting: int
    peer_target: str
    why: str
    def __init__(self, dispatcher: _Optional[str] = ..., worker: _Optional[int] = ..., table: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., draining: _Optional[bool] = ..., in_flight: _Optional[int] = ..., waiting: _Optional[int] = ..., peer_target: _Optional[str] = ..., why: _Optional[str] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("family", "params")
    class ParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    family: str
    params: _containers.ScalarMap[str, str]
    def __init__(self, family: _Optional[str] = ..., params: _Optional[_Mapping[str, str]] = ...) -> None: ...

class ScoredTarget(_message.Message):
    __slots__ = ("target", "eligible", "score", "in_flight", "why")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ELIGIBLE_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    target: _plan_pb2.RouteTarget
    eligible: bool
    score: float
    in_flight: int
    why: str
    def __init__(self, target: _Optional[_Union[_plan_pb2.RouteTarget, _Mapping]] = ..., eligible: _Optional[bool] = ..., score: _Optional[float] = ..., in_flight: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("table", "router", "targets", "waiting", "why")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.Revision
    router: str
    targets: _containers.RepeatedCompositeFieldContainer[ScoredTarget]
    waiting: int
    why: str
    def __init__(self, table: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., router: _Optional[str] = ..., targets: _Optional[_Iterable[_Union[ScoredTarget, _Mapping]]] = ..., waiting: _Optional[int] = ..., why: _Optional[str] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("epoch", "why", "release")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    why: str
    release: bool
    def __init__(self, epoch: _Optional[int] = ..., why: _Optional[str] = ..., release: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ...) -> None: ...

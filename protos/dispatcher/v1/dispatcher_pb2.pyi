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
    __slots__ = ("table", "routes", "slices", "why")
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROUTES_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    table: _common_pb2.Revision
    routes: _containers.RepeatedCompositeFieldContainer[_plan_pb2.Route]
    slices: _containers.RepeatedCompositeFieldContainer[_load_pb2.SliceLoad]
    why: str
    def __init__(self, table: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., routes: _Optional[_Iterable[_Union[_plan_pb2.Route, _Mapping]]] = ..., slices: _Optional[_Iterable[_Union[_load_pb2.SliceLoad, _Mapping]]] = ..., why: _Optional[str] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("window",)
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    window: _load_pb2.LoadWindow
    def __init__(self, window: _Optional[_Union[_load_pb2.LoadWindow, _Mapping]] = ...) -> None: ...

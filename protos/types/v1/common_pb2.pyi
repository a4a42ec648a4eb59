import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Basis(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BASIS_UNSPECIFIED: _ClassVar[Basis]
    BASIS_MEASURED: _ClassVar[Basis]
    BASIS_MODELLED: _ClassVar[Basis]
    BASIS_SYNTHETIC: _ClassVar[Basis]
    BASIS_SIMULATED: _ClassVar[Basis]
    BASIS_NONE: _ClassVar[Basis]
BASIS_UNSPECIFIED: Basis
BASIS_MEASURED: Basis
BASIS_MODELLED: Basis
BASIS_SYNTHETIC: Basis
BASIS_SIMULATED: Basis
BASIS_NONE: Basis

class Revision(_message.Message):
    __slots__ = ("epoch", "number", "step")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    number: int
    step: int
    def __init__(self, epoch: _Optional[int] = ..., number: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("name", "holder", "epoch", "expires_at")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_FIELD_NUMBER: _ClassVar[int]
    name: str
    holder: str
    epoch: int
    expires_at: _timestamp_pb2.Timestamp
    def __init__(self, name: _Optional[str] = ..., holder: _Optional[str] = ..., epoch: _Optional[int] = ..., expires_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class KeptFile(_message.Message):
    __slots__ = ("name", "written", "json", "signature")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    name: str
    written: Revision
    json: str
    signature: str
    def __init__(self, name: _Optional[str] = ..., written: _Optional[_Union[Revision, _Mapping]] = ..., json: _Optional[str] = ..., signature: _Optional[str] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("basis", "source", "version", "licence", "as_of")
    BASIS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LICENCE_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    basis: Basis
    source: str
    version: str
    licence: str
    as_of: _timestamp_pb2.Timestamp
    def __init__(self, basis: _Optional[_Union[Basis, str]] = ..., source: _Optional[str] = ..., version: _Optional[str] = ..., licence: _Optional[str] = ..., as_of: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("scheme", "index", "count", "sum_ms", "max_ms")
    SCHEME_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SUM_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_MS_FIELD_NUMBER: _ClassVar[int]
    scheme: int
    index: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    sum_ms: float
    max_ms: float
    def __init__(self, scheme: _Optional[int] = ..., index: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., sum_ms: _Optional[float] = ..., max_ms: _Optional[float] = ...) -> None: ...

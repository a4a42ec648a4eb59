from protos.types.v1 import carbon_pb2 as _carbon_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetIntensityRequest(_message.Message):
    __slots__ = ("zone",)
    ZONE_FIELD_NUMBER: _ClassVar[int]
    zone: str
    def __init__(self, zone: _Optional[str] = ...) -> None: ...

class GetIntensityResponse(_message.Message):
    __slots__ = ("reading",)
    READING_FIELD_NUMBER: _ClassVar[int]
    reading: _carbon_pb2.CarbonReading
    def __init__(self, reading: _Optional[_Union[_carbon_pb2.CarbonReading, _Mapping]] = ...) -> None: ...

class WatchIntensityRequest(_message.Message):
    __slots__ = ("zone",)
    ZONE_FIELD_NUMBER: _ClassVar[int]
    zone: str
    def __init__(self, zone: _Optional[str] = ...) -> None: ...

class WatchIntensityResponse(_message.Message):
    __slots__ = ("reading",)
    READING_FIELD_NUMBER: _ClassVar[int]
    reading: _carbon_pb2.CarbonReading
    def __init__(self, reading: _Optional[_Union[_carbon_pb2.CarbonReading, _Mapping]] = ...) -> None: ...

import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from protos.types.v1 import fleet_pb2 as _fleet_pb2
from protos.types.v1 import carbon_pb2 as _carbon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EnergyMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENERGY_METHOD_UNSPECIFIED: _ClassVar[EnergyMethod]
    ENERGY_METHOD_NVML_COUNTER: _ClassVar[EnergyMethod]
    ENERGY_METHOD_POWER_INTEGRAL: _ClassVar[EnergyMethod]
    ENERGY_METHOD_RAPL: _ClassVar[EnergyMethod]
    ENERGY_METHOD_NONE: _ClassVar[EnergyMethod]

class AttributionMethod(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ATTRIBUTION_METHOD_UNSPECIFIED: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_SOLE: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_DCGM: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_GPM: _ClassVar[AttributionMethod]
    ATTRIBUTION_METHOD_TRITON_COMPUTE: _ClassVar[AttributionMethod]
ENERGY_METHOD_UNSPECIFIED: EnergyMethod
ENERGY_METHOD_NVML_COUNTER: EnergyMethod
ENERGY_METHOD_POWER_INTEGRAL: EnergyMethod
ENERGY_METHOD_RAPL: EnergyMethod
ENERGY_METHOD_NONE: EnergyMethod
ATTRIBUTION_METHOD_UNSPECIFIED: AttributionMethod
ATTRIBUTION_METHOD_SOLE: AttributionMethod
ATTRIBUTION_METHOD_DCGM: AttributionMethod
ATTRIBUTION_METHOD_GPM: AttributionMethod
ATTRIBUTION_METHOD_TRITON_COMPUTE: AttributionMethod

class HostedEnergy(_message.Message):
    __slots__ = ("family", "variant", "active_j", "compute_s", "requests")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_J_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    family: str
    variant: str
    active_j: float
    compute_s: float
    requests: int
    def __init__(self, family: _Optional[str] = ..., variant: _Optional[str] = ..., active_j: _Optional[float] = ..., compute_s: _Optional[float] = ..., requests: _Optional[int] = ...) -> None: ...

class SliceEnergy(_message.Message):
    __slots__ = ("key", "generation", "active_j", "hosted", "cpu_s")
    KEY_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_J_FIELD_NUMBER: _ClassVar[int]
    HOSTED_FIELD_NUMBER: _ClassVar[int]
    CPU_S_FIELD_NUMBER: _ClassVar[int]
    key: _fleet_pb2.SliceKey
    generation: int
    active_j: float
    hosted: _containers.RepeatedCompositeFieldContainer[HostedEnergy]
    cpu_s: float
    def __init__(self, key: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., generation: _Optional[int] = ..., active_j: _Optional[float] = ..., hosted: _Optional[_Iterable[_Union[HostedEnergy, _Mapping]]] = ..., cpu_s: _Optional[float] = ...) -> None: ...

class EnergySample(_message.Message):
    __slots__ = ("node", "device", "seq", "starts_at", "ends_at", "counter_j", "method", "attribution", "slices", "idle_j", "unallocated_j", "state", "clock_mhz_mean", "counter_resets", "simulated", "uncertainty_ratio", "mark_j", "origin")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    COUNTER_J_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    ATTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    IDLE_J_FIELD_NUMBER: _ClassVar[int]
    UNALLOCATED_J_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_MEAN_FIELD_NUMBER: _ClassVar[int]
    COUNTER_RESETS_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    UNCERTAINTY_RATIO_FIELD_NUMBER: _ClassVar[int]
    MARK_J_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    node: str
    device: str
    seq: int
    starts_at: _timestamp_pb2.Timestamp
    ends_at: _timestamp_pb2.Timestamp
    counter_j: float
    method: EnergyMethod
    attribution: AttributionMethod
    slices: _containers.RepeatedCompositeFieldContainer[SliceEnergy]
    idle_j: float
    unallocated_j: float
    state: _fleet_pb2.DeviceState
    clock_mhz_mean: float
    counter_resets: int
    simulated: bool
    uncertainty_ratio: float
    mark_j: float
    origin: str
    def __init__(self, node: _Optional[str] = ..., device: _Optional[str] = ..., seq: _Optional[int] = ..., starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., counter_j: _Optional[float] = ..., method: _Optional[_Union[EnergyMethod, str]] = ..., attribution: _Optional[_Union[AttributionMethod, str]] = ..., slices: _Optional[_Iterable[_Union[SliceEnergy, _Mapping]]] = ..., idle_j: _Optional[float] = ..., unallocated_j: _Optional[float] = ..., state: _Optional[_Union[_fleet_pb2.DeviceState, str]] = ..., clock_mhz_mean: _Optional[float] = ..., counter_resets: _Optional[int] = ..., simulated: _Optional[bool] = ..., uncertainty_ratio: _Optional[float] = ..., mark_j: _Optional[float] = ..., origin: _Optional[str] = ...) -> None: ...

class ReceiptRate(_message.Message):
    __slots__ = ("slice", "family", "variant", "request_j", "item_j", "ratio", "basis", "window_s", "token_j")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_J_FIELD_NUMBER: _ClassVar[int]
    ITEM_J_FIELD_NUMBER: _ClassVar[int]
    RATIO_FIELD_NUMBER: _ClassVar[int]
    BASIS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_J_FIELD_NUMBER: _ClassVar[int]
    slice: _fleet_pb2.SliceKey
    family: str
    variant: str
    request_j: float
    item_j: float
    ratio: float
    basis: _common_pb2.Basis
    window_s: float
    token_j: float
    def __init__(self, slice: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., family: _Optional[str] = ..., variant: _Optional[str] = ..., request_j: _Optional[float] = ..., item_j: _Optional[float] = ..., ratio: _Optional[float] = ..., basis: _Optional[_Union[_common_pb2.Basis, str]] = ..., window_s: _Optional[float] = ..., token_j: _Optional[float] = ...) -> None: ...

class ReceiptRates(_message.Message):
    __slots__ = ("rates", "observed_at", "series", "pue", "plan")
    RATES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    PUE_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    rates: _containers.RepeatedCompositeFieldContainer[ReceiptRate]
    observed_at: _timestamp_pb2.Timestamp
    series: _carbon_pb2.Series
    pue: float
    plan: _common_pb2.Revision
    def __init__(self, rates: _Optional[_Iterable[_Union[ReceiptRate, _Mapping]]] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., series: _Optional[_Union[_carbon_pb2.Series, _Mapping]] = ..., pue: _Optional[float] = ..., plan: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

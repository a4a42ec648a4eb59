import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenJob(_message.Message):
    __slots__ = ("job_id", "family", "items_left", "complete_by", "priority", "min_accuracy", "zones", "bounded", "grams_left", "transfer_j")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    ITEMS_LEFT_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_BY_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    BOUNDED_FIELD_NUMBER: _ClassVar[int]
    GRAMS_LEFT_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_J_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    family: str
    items_left: int
    complete_by: _timestamp_pb2.Timestamp
    priority: int
    min_accuracy: float
    zones: _containers.RepeatedScalarFieldContainer[str]
    bounded: bool
    grams_left: float
    transfer_j: float
    def __init__(self, job_id: _Optional[str] = ..., family: _Optional[str] = ..., items_left: _Optional[int] = ..., complete_by: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., priority: _Optional[int] = ..., min_accuracy: _Optional[float] = ..., zones: _Optional[_Iterable[str]] = ..., bounded: _Optional[bool] = ..., grams_left: _Optional[float] = ..., transfer_j: _Optional[float] = ...) -> None: ...

class OpenJobs(_message.Message):
    __slots__ = ("folder", "epoch", "jobs")
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    folder: str
    epoch: int
    jobs: _containers.RepeatedCompositeFieldContainer[OpenJob]
    def __init__(self, folder: _Optional[str] = ..., epoch: _Optional[int] = ..., jobs: _Optional[_Iterable[_Union[OpenJob, _Mapping]]] = ...) -> None: ...

class PlannedHour(_message.Message):
    __slots__ = ("starts_at", "ends_at", "items", "grams", "p50_g_per_kwh", "zone", "variants")
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    GRAMS_FIELD_NUMBER: _ClassVar[int]
    P50_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    VARIANTS_FIELD_NUMBER: _ClassVar[int]
    starts_at: _timestamp_pb2.Timestamp
    ends_at: _timestamp_pb2.Timestamp
    items: float
    grams: float
    p50_g_per_kwh: float
    zone: str
    variants: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., items: _Optional[float] = ..., grams: _Optional[float] = ..., p50_g_per_kwh: _Optional[float] = ..., zone: _Optional[str] = ..., variants: _Optional[_Iterable[str]] = ...) -> None: ...

class PlannedJob(_message.Message):
    __slots__ = ("job_id", "items_left", "hours", "in_time", "finishes_at", "reason", "grams", "at_once_grams", "evenly_grams", "complete_by", "at_once")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    ITEMS_LEFT_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    IN_TIME_FIELD_NUMBER: _ClassVar[int]
    FINISHES_AT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GRAMS_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_GRAMS_FIELD_NUMBER: _ClassVar[int]
    EVENLY_GRAMS_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_BY_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    job_id: str
    items_left: int
    hours: _containers.RepeatedCompositeFieldContainer[PlannedHour]
    in_time: bool
    finishes_at: _timestamp_pb2.Timestamp
    reason: str
    grams: float
    at_once_grams: float
    evenly_grams: float
    complete_by: _timestamp_pb2.Timestamp
    at_once: bool
    def __init__(self, job_id: _Optional[str] = ..., items_left: _Optional[int] = ..., hours: _Optional[_Iterable[_Union[PlannedHour, _Mapping]]] = ..., in_time: _Optional[bool] = ..., finishes_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., reason: _Optional[str] = ..., grams: _Optional[float] = ..., at_once_grams: _Optional[float] = ..., evenly_grams: _Optional[float] = ..., complete_by: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., at_once: _Optional[bool] = ...) -> None: ...

class RequestOffer(_message.Message):
    __slots__ = ("family", "zone", "saved_g", "p50_g_per_kwh", "pue", "rate_per_s", "latency_ms", "min_accuracy")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    SAVED_G_FIELD_NUMBER: _ClassVar[int]
    P50_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    PUE_FIELD_NUMBER: _ClassVar[int]
    RATE_PER_S_FIELD_NUMBER: _ClassVar[int]
    LATENCY_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    family: str
    zone: str
    saved_g: float
    p50_g_per_kwh: float
    pue: float
    rate_per_s: float
    latency_ms: float
    min_accuracy: float
    def __init__(self, family: _Optional[str] = ..., zone: _Optional[str] = ..., saved_g: _Optional[float] = ..., p50_g_per_kwh: _Optional[float] = ..., pue: _Optional[float] = ..., rate_per_s: _Optional[float] = ..., latency_ms: _Optional[float] = ..., min_accuracy: _Optional[float] = ...) -> None: ...

class PlannedJobs(_message.Message):
    __slots__ = ("revision", "made_at", "until", "jobs", "signature", "requests")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    MADE_AT_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    revision: _common_pb2.Revision
    made_at: _timestamp_pb2.Timestamp
    until: _timestamp_pb2.Timestamp
    jobs: _containers.RepeatedCompositeFieldContainer[PlannedJob]
    signature: str
    requests: _containers.RepeatedCompositeFieldContainer[RequestOffer]
    def __init__(self, revision: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., made_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., jobs: _Optional[_Iterable[_Union[PlannedJob, _Mapping]]] = ..., signature: _Optional[str] = ..., requests: _Optional[_Iterable[_Union[RequestOffer, _Mapping]]] = ...) -> None: ...

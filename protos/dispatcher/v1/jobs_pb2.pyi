import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import jobs_pb2 as _jobs_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JobState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    JOB_STATE_UNSPECIFIED: _ClassVar[JobState]
    JOB_STATE_WAITING: _ClassVar[JobState]
    JOB_STATE_RUNNING: _ClassVar[JobState]
    JOB_STATE_DONE: _ClassVar[JobState]
    JOB_STATE_CANCELLED: _ClassVar[JobState]
JOB_STATE_UNSPECIFIED: JobState
JOB_STATE_WAITING: JobState
JOB_STATE_RUNNING: JobState
JOB_STATE_DONE: JobState
JOB_STATE_CANCELLED: JobState

class Job(_message.Message):
    __slots__ = ("id", "family", "complete_by", "tenant", "priority", "min_accuracy", "zones", "grams_max")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    COMPLETE_BY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCURACY_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    GRAMS_MAX_FIELD_NUMBER: _ClassVar[int]
    id: str
    family: str
    complete_by: _timestamp_pb2.Timestamp
    tenant: str
    priority: int
    min_accuracy: float
    zones: _containers.RepeatedScalarFieldContainer[str]
    grams_max: float
    def __init__(self, id: _Optional[str] = ..., family: _Optional[str] = ..., complete_by: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., min_accuracy: _Optional[float] = ..., zones: _Optional[_Iterable[str]] = ..., grams_max: _Optional[float] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("job", "items", "total")
    JOB_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    job: Job
    items: Items
    total: int
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., items: _Optional[_Union[Items, _Mapping]] = ..., total: _Optional[int] = ...) -> None: ...

class Items(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, requests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class JobStatus(_message.Message):
    __slots__ = ("job", "state", "items", "answered", "failed", "joules", "grams", "submitted_at", "ended_at", "why", "late", "owner", "expected_at", "hours", "prospect", "in_danger", "at_once_grams", "evenly_grams", "first_error", "zones")
    JOB_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    GRAMS_FIELD_NUMBER: _ClassVar[int]
    SUBMITTED_AT_FIELD_NUMBER: _ClassVar[int]
    ENDED_AT_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_AT_FIELD_NUMBER: _ClassVar[int]
    HOURS_FIELD_NUMBER: _ClassVar[int]
    PROSPECT_FIELD_NUMBER: _ClassVar[int]
    IN_DANGER_FIELD_NUMBER: _ClassVar[int]
    AT_ONCE_GRAMS_FIELD_NUMBER: _ClassVar[int]
    EVENLY_GRAMS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ERROR_FIELD_NUMBER: _ClassVar[int]
    ZONES_FIELD_NUMBER: _ClassVar[int]
    job: Job
    state: JobState
    items: int
    answered: int
    failed: int
    joules: float
    grams: float
    submitted_at: _timestamp_pb2.Timestamp
    ended_at: _timestamp_pb2.Timestamp
    why: str
    late: bool
    owner: str
    expected_at: _timestamp_pb2.Timestamp
    hours: _containers.RepeatedCompositeFieldContainer[_jobs_pb2.PlannedHour]
    prospect: str
    in_danger: bool
    at_once_grams: float
    evenly_grams: float
    first_error: str
    zones: _containers.RepeatedCompositeFieldContainer[ZoneShare]
    def __init__(self, job: _Optional[_Union[Job, _Mapping]] = ..., state: _Optional[_Union[JobState, str]] = ..., items: _Optional[int] = ..., answered: _Optional[int] = ..., failed: _Optional[int] = ..., joules: _Optional[float] = ..., grams: _Optional[float] = ..., submitted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ended_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., why: _Optional[str] = ..., late: _Optional[bool] = ..., owner: _Optional[str] = ..., expected_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., hours: _Optional[_Iterable[_Union[_jobs_pb2.PlannedHour, _Mapping]]] = ..., prospect: _Optional[str] = ..., in_danger: _Optional[bool] = ..., at_once_grams: _Optional[float] = ..., evenly_grams: _Optional[float] = ..., first_error: _Optional[str] = ..., zones: _Optional[_Iterable[_Union[ZoneShare, _Mapping]]] = ...) -> None: ...

class ZoneShare(_message.Message):
    __slots__ = ("zone", "away", "answered", "joules", "grams")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    AWAY_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    JOULES_FIELD_NUMBER: _ClassVar[int]
    GRAMS_FIELD_NUMBER: _ClassVar[int]
    zone: str
    away: int
    answered: int
    joules: float
    grams: float
    def __init__(self, zone: _Optional[str] = ..., away: _Optional[int] = ..., answered: _Optional[int] = ..., joules: _Optional[float] = ..., grams: _Optional[float] = ...) -> None: ...

class SubmitResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    def __init__(self, status: _Optional[_Union[JobStatus, _Mapping]] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    def __init__(self, status: _Optional[_Union[JobStatus, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    def __init__(self, tenant: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("jobs",)
    JOBS_FIELD_NUMBER: _ClassVar[int]
    jobs: _containers.RepeatedCompositeFieldContainer[JobStatus]
    def __init__(self, jobs: _Optional[_Iterable[_Union[JobStatus, _Mapping]]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("id", "why", "remove")
    ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    id: str
    why: str
    remove: bool
    def __init__(self, id: _Optional[str] = ..., why: _Optional[str] = ..., remove: _Optional[bool] = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    def __init__(self, status: _Optional[_Union[JobStatus, _Mapping]] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: JobStatus
    def __init__(self, status: _Optional[_Union[JobStatus, _Mapping]] = ...) -> None: ...

class GetResultsRequest(_message.Message):
    __slots__ = ("id", "first")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    id: str
    first: int
    def __init__(self, id: _Optional[str] = ..., first: _Optional[int] = ...) -> None: ...

class GetResultsResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ItemResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ItemResult, _Mapping]]] = ...) -> None: ...

class ItemResult(_message.Message):
    __slots__ = ("item", "response", "code", "error", "zone", "moved_j", "moved_g")
    ITEM_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    ZONE_FIELD_NUMBER: _ClassVar[int]
    MOVED_J_FIELD_NUMBER: _ClassVar[int]
    MOVED_G_FIELD_NUMBER: _ClassVar[int]
    item: int
    response: bytes
    code: str
    error: str
    zone: str
    moved_j: float
    moved_g: float
    def __init__(self, item: _Optional[int] = ..., response: _Optional[bytes] = ..., code: _Optional[str] = ..., error: _Optional[str] = ..., zone: _Optional[str] = ..., moved_j: _Optional[float] = ..., moved_g: _Optional[float] = ...) -> None: ...

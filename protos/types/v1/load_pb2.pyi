import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from protos.types.v1 import fleet_pb2 as _fleet_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadKey(_message.Message):
    __slots__ = ("family", "variant", "slice", "tenant", "slo_class")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    VARIANT_FIELD_NUMBER: _ClassVar[int]
    SLICE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SLO_CLASS_FIELD_NUMBER: _ClassVar[int]
    family: str
    variant: str
    slice: _fleet_pb2.SliceKey
    tenant: str
    slo_class: str
    def __init__(self, family: _Optional[str] = ..., variant: _Optional[str] = ..., slice: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., tenant: _Optional[str] = ..., slo_class: _Optional[str] = ...) -> None: ...

class StreamCounts(_message.Message):
    __slots__ = ("ttft", "tpot", "ttft_asked", "ttft_within", "tpot_asked", "tpot_within", "tokens_in")
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    TTFT_ASKED_FIELD_NUMBER: _ClassVar[int]
    TTFT_WITHIN_FIELD_NUMBER: _ClassVar[int]
    TPOT_ASKED_FIELD_NUMBER: _ClassVar[int]
    TPOT_WITHIN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_IN_FIELD_NUMBER: _ClassVar[int]
    ttft: _common_pb2.Histogram
    tpot: _common_pb2.Histogram
    ttft_asked: int
    ttft_within: int
    tpot_asked: int
    tpot_within: int
    tokens_in: int
    def __init__(self, ttft: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ..., tpot: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ..., ttft_asked: _Optional[int] = ..., ttft_within: _Optional[int] = ..., tpot_asked: _Optional[int] = ..., tpot_within: _Optional[int] = ..., tokens_in: _Optional[int] = ...) -> None: ...

class LoadCell(_message.Message):
    __slots__ = ("key", "arrived", "answered", "failed_by_code", "items", "within_slo", "tokens_out", "latency", "queue", "service", "in_flight_max", "arrived_per_s", "receipt_j", "receipts", "passed", "passed_items", "unanswered", "unanswered_work", "unanswered_items", "unanswered_tokens", "unanswered_j", "streams")
    class FailedByCodeEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    KEY_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_FIELD_NUMBER: _ClassVar[int]
    FAILED_BY_CODE_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    WITHIN_SLO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OUT_FIELD_NUMBER: _ClassVar[int]
    LATENCY_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    SERVICE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_J_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    PASSED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_WORK_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_ITEMS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_J_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    key: LoadKey
    arrived: int
    answered: int
    failed_by_code: _containers.ScalarMap[str, int]
    items: int
    within_slo: int
    tokens_out: int
    latency: _common_pb2.Histogram
    queue: _common_pb2.Histogram
    service: _common_pb2.Histogram
    in_flight_max: int
    arrived_per_s: _containers.RepeatedScalarFieldContainer[int]
    receipt_j: float
    receipts: int
    passed: _common_pb2.Histogram
    passed_items: int
    unanswered: int
    unanswered_work: float
    unanswered_items: float
    unanswered_tokens: float
    unanswered_j: float
    streams: StreamCounts
    def __init__(self, key: _Optional[_Union[LoadKey, _Mapping]] = ..., arrived: _Optional[int] = ..., answered: _Optional[int] = ..., failed_by_code: _Optional[_Mapping[str, int]] = ..., items: _Optional[int] = ..., within_slo: _Optional[int] = ..., tokens_out: _Optional[int] = ..., latency: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ..., queue: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ..., service: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ..., in_flight_max: _Optional[int] = ..., arrived_per_s: _Optional[_Iterable[int]] = ..., receipt_j: _Optional[float] = ..., receipts: _Optional[int] = ..., passed: _Optional[_Union[_common_pb2.Histogram, _Mapping]] = ..., passed_items: _Optional[int] = ..., unanswered: _Optional[int] = ..., unanswered_work: _Optional[float] = ..., unanswered_items: _Optional[float] = ..., unanswered_tokens: _Optional[float] = ..., unanswered_j: _Optional[float] = ..., streams: _Optional[_Union[StreamCounts, _Mapping]] = ...) -> None: ...

class LoadWindow(_message.Message):
    __slots__ = ("dispatcher", "worker", "seq", "starts_at", "ends_at", "table", "cells")
    DISPATCHER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    CELLS_FIELD_NUMBER: _ClassVar[int]
    dispatcher: str
    worker: int
    seq: int
    starts_at: _timestamp_pb2.Timestamp
    ends_at: _timestamp_pb2.Timestamp
    table: _common_pb2.Revision
    cells: _containers.RepeatedCompositeFieldContainer[LoadCell]
    def __init__(self, dispatcher: _Optional[str] = ..., worker: _Optional[int] = ..., seq: _Optional[int] = ..., starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., table: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., cells: _Optional[_Iterable[_Union[LoadCell, _Mapping]]] = ...) -> None: ...

class SliceLoad(_message.Message):
    __slots__ = ("slice", "in_flight", "open_sequences", "ejected", "family")
    SLICE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EJECTED_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    slice: _fleet_pb2.SliceKey
    in_flight: int
    open_sequences: int
    ejected: bool
    family: str
    def __init__(self, slice: _Optional[_Union[_fleet_pb2.SliceKey, _Mapping]] = ..., in_flight: _Optional[int] = ..., open_sequences: _Optional[int] = ..., ejected: _Optional[bool] = ..., family: _Optional[str] = ...) -> None: ...

class TableAck(_message.Message):
    __slots__ = ("dispatcher", "worker", "table", "slices", "observed_at", "peer_target", "leaving", "counts", "refused", "refused_plan")
    DISPATCHER_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    SLICES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    PEER_TARGET_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_PLAN_FIELD_NUMBER: _ClassVar[int]
    dispatcher: str
    worker: int
    table: _common_pb2.Revision
    slices: _containers.RepeatedCompositeFieldContainer[SliceLoad]
    observed_at: _timestamp_pb2.Timestamp
    peer_target: str
    leaving: bool
    counts: _containers.RepeatedScalarFieldContainer[str]
    refused: str
    refused_plan: _common_pb2.Revision
    def __init__(self, dispatcher: _Optional[str] = ..., worker: _Optional[int] = ..., table: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ..., slices: _Optional[_Iterable[_Union[SliceLoad, _Mapping]]] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., peer_target: _Optional[str] = ..., leaving: _Optional[bool] = ..., counts: _Optional[_Iterable[str]] = ..., refused: _Optional[str] = ..., refused_plan: _Optional[_Union[_common_pb2.Revision, _Mapping]] = ...) -> None: ...

class LoadForecast(_message.Message):
    __slots__ = ("family", "model", "issued_at", "horizon_s", "mean_per_s", "p90_per_s", "max_per_s", "fallback_reason")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_PER_S_FIELD_NUMBER: _ClassVar[int]
    P90_PER_S_FIELD_NUMBER: _ClassVar[int]
    MAX_PER_S_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    family: str
    model: str
    issued_at: _timestamp_pb2.Timestamp
    horizon_s: float
    mean_per_s: float
    p90_per_s: float
    max_per_s: float
    fallback_reason: str
    def __init__(self, family: _Optional[str] = ..., model: _Optional[str] = ..., issued_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., horizon_s: _Optional[float] = ..., mean_per_s: _Optional[float] = ..., p90_per_s: _Optional[float] = ..., max_per_s: _Optional[float] = ..., fallback_reason: _Optional[str] = ...) -> None: ...

class ScaleSignal(_message.Message):
    __slots__ = ("node", "device", "families", "why", "since")
    NODE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    FAMILIES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    node: str
    device: str
    families: _containers.RepeatedScalarFieldContainer[str]
    why: str
    since: _timestamp_pb2.Timestamp
    def __init__(self, node: _Optional[str] = ..., device: _Optional[str] = ..., families: _Optional[_Iterable[str]] = ..., why: _Optional[str] = ..., since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

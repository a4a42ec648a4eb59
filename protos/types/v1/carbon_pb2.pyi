import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Method(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    METHOD_UNSPECIFIED: _ClassVar[Method]
    METHOD_AVERAGE: _ClassVar[Method]
    METHOD_MARGINAL: _ClassVar[Method]

class Factors(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FACTORS_UNSPECIFIED: _ClassVar[Factors]
    FACTORS_DIRECT: _ClassVar[Factors]
    FACTORS_LIFECYCLE: _ClassVar[Factors]

class Quality(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    QUALITY_UNSPECIFIED: _ClassVar[Quality]
    QUALITY_MEASURED: _ClassVar[Quality]
    QUALITY_ESTIMATED: _ClassVar[Quality]
    QUALITY_FORECAST: _ClassVar[Quality]
    QUALITY_CARRIED: _ClassVar[Quality]
    QUALITY_CLIMATOLOGY: _ClassVar[Quality]
    QUALITY_STATIC: _ClassVar[Quality]
METHOD_UNSPECIFIED: Method
METHOD_AVERAGE: Method
METHOD_MARGINAL: Method
FACTORS_UNSPECIFIED: Factors
FACTORS_DIRECT: Factors
FACTORS_LIFECYCLE: Factors
QUALITY_UNSPECIFIED: Quality
QUALITY_MEASURED: Quality
QUALITY_ESTIMATED: Quality
QUALITY_FORECAST: Quality
QUALITY_CARRIED: Quality
QUALITY_CLIMATOLOGY: Quality
QUALITY_STATIC: Quality

class Series(_message.Message):
    __slots__ = ("zone", "method", "factors")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    FACTORS_FIELD_NUMBER: _ClassVar[int]
    zone: str
    method: Method
    factors: Factors
    def __init__(self, zone: _Optional[str] = ..., method: _Optional[_Union[Method, str]] = ..., factors: _Optional[_Union[Factors, str]] = ...) -> None: ...

class CarbonReading(_message.Message):
    __slots__ = ("series", "starts_at", "ends_at", "intensity_g_per_kwh", "quality", "provider", "api_version", "estimation_method", "observed_at", "fetched_at", "rung", "fallback_reason", "simulated", "as_of", "epoch")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    INTENSITY_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    QUALITY_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    API_VERSION_FIELD_NUMBER: _ClassVar[int]
    ESTIMATION_METHOD_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    FETCHED_AT_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    AS_OF_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    series: Series
    starts_at: _timestamp_pb2.Timestamp
    ends_at: _timestamp_pb2.Timestamp
    intensity_g_per_kwh: float
    quality: Quality
    provider: str
    api_version: str
    estimation_method: str
    observed_at: _timestamp_pb2.Timestamp
    fetched_at: _timestamp_pb2.Timestamp
    rung: int
    fallback_reason: str
    simulated: bool
    as_of: int
    epoch: int
    def __init__(self, series: _Optional[_Union[Series, _Mapping]] = ..., starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., intensity_g_per_kwh: _Optional[float] = ..., quality: _Optional[_Union[Quality, str]] = ..., provider: _Optional[str] = ..., api_version: _Optional[str] = ..., estimation_method: _Optional[str] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., fetched_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., rung: _Optional[int] = ..., fallback_reason: _Optional[str] = ..., simulated: _Optional[bool] = ..., as_of: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class CarbonBand(_message.Message):
    __slots__ = ("starts_at", "ends_at", "p10_g_per_kwh", "p50_g_per_kwh", "p90_g_per_kwh")
    STARTS_AT_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    P10_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    P50_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    P90_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    starts_at: _timestamp_pb2.Timestamp
    ends_at: _timestamp_pb2.Timestamp
    p10_g_per_kwh: float
    p50_g_per_kwh: float
    p90_g_per_kwh: float
    def __init__(self, starts_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., p10_g_per_kwh: _Optional[float] = ..., p50_g_per_kwh: _Optional[float] = ..., p90_g_per_kwh: _Optional[float] = ...) -> None: ...

class CarbonForecast(_message.Message):
    __slots__ = ("series", "model", "issued_at", "bands", "provenance", "fallback_reason")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    BANDS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    series: Series
    model: str
    issued_at: _timestamp_pb2.Timestamp
    bands: _containers.RepeatedCompositeFieldContainer[CarbonBand]
    provenance: _common_pb2.Provenance
    fallback_reason: str
    def __init__(self, series: _Optional[_Union[Series, _Mapping]] = ..., model: _Optional[str] = ..., issued_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., bands: _Optional[_Iterable[_Union[CarbonBand, _Mapping]]] = ..., provenance: _Optional[_Union[_common_pb2.Provenance, _Mapping]] = ..., fallback_reason: _Optional[str] = ...) -> None: ...

class CarbonRatio(_message.Message):
    __slots__ = ("series", "aci_g_per_kwh", "cir", "window", "samples", "observed_at")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    ACI_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    CIR_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    series: Series
    aci_g_per_kwh: float
    cir: float
    window: str
    samples: int
    observed_at: _timestamp_pb2.Timestamp
    def __init__(self, series: _Optional[_Union[Series, _Mapping]] = ..., aci_g_per_kwh: _Optional[float] = ..., cir: _Optional[float] = ..., window: _Optional[str] = ..., samples: _Optional[int] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class CarbonScore(_message.Message):
    __slots__ = ("horizon_s", "samples", "mae_g_per_kwh", "bias_g_per_kwh", "mape_ratio", "mape_samples", "coverage_ratio", "coverage_samples")
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    MAE_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    BIAS_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    MAPE_RATIO_FIELD_NUMBER: _ClassVar[int]
    MAPE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    horizon_s: float
    samples: int
    mae_g_per_kwh: float
    bias_g_per_kwh: float
    mape_ratio: float
    mape_samples: int
    coverage_ratio: float
    coverage_samples: int
    def __init__(self, horizon_s: _Optional[float] = ..., samples: _Optional[int] = ..., mae_g_per_kwh: _Optional[float] = ..., bias_g_per_kwh: _Optional[float] = ..., mape_ratio: _Optional[float] = ..., mape_samples: _Optional[int] = ..., coverage_ratio: _Optional[float] = ..., coverage_samples: _Optional[int] = ...) -> None: ...

class CarbonScores(_message.Message):
    __slots__ = ("series", "model", "scores", "forecasts", "issued_from_at", "issued_to_at", "observed_at")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    FORECASTS_FIELD_NUMBER: _ClassVar[int]
    ISSUED_FROM_AT_FIELD_NUMBER: _ClassVar[int]
    ISSUED_TO_AT_FIELD_NUMBER: _ClassVar[int]
    OBSERVED_AT_FIELD_NUMBER: _ClassVar[int]
    series: Series
    model: str
    scores: _containers.RepeatedCompositeFieldContainer[CarbonScore]
    forecasts: int
    issued_from_at: _timestamp_pb2.Timestamp
    issued_to_at: _timestamp_pb2.Timestamp
    observed_at: _timestamp_pb2.Timestamp
    def __init__(self, series: _Optional[_Union[Series, _Mapping]] = ..., model: _Optional[str] = ..., scores: _Optional[_Iterable[_Union[CarbonScore, _Mapping]]] = ..., forecasts: _Optional[int] = ..., issued_from_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., issued_to_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., observed_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ZoneHealth(_message.Message):
    __slots__ = ("series", "provider", "secondary", "leading", "holder", "rung", "fallback_reason", "age_s", "ends_at", "soft_stale", "hard_stale", "asked_today", "quota_per_day", "breaker", "next_ask_at", "last_error_cause", "redis_answers", "forecast_model", "forecast_issued_at", "history_intervals", "history_newest", "simulated")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    PROVIDER_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_FIELD_NUMBER: _ClassVar[int]
    LEADING_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    ENDS_AT_FIELD_NUMBER: _ClassVar[int]
    SOFT_STALE_FIELD_NUMBER: _ClassVar[int]
    HARD_STALE_FIELD_NUMBER: _ClassVar[int]
    ASKED_TODAY_FIELD_NUMBER: _ClassVar[int]
    QUOTA_PER_DAY_FIELD_NUMBER: _ClassVar[int]
    BREAKER_FIELD_NUMBER: _ClassVar[int]
    NEXT_ASK_AT_FIELD_NUMBER: _ClassVar[int]
    LAST_ERROR_CAUSE_FIELD_NUMBER: _ClassVar[int]
    REDIS_ANSWERS_FIELD_NUMBER: _ClassVar[int]
    FORECAST_MODEL_FIELD_NUMBER: _ClassVar[int]
    FORECAST_ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    HISTORY_INTERVALS_FIELD_NUMBER: _ClassVar[int]
    HISTORY_NEWEST_FIELD_NUMBER: _ClassVar[int]
    SIMULATED_FIELD_NUMBER: _ClassVar[int]
    series: Series
    provider: str
    secondary: str
    leading: bool
    holder: str
    rung: int
    fallback_reason: str
    age_s: float
    ends_at: _timestamp_pb2.Timestamp
    soft_stale: bool
    hard_stale: bool
    asked_today: int
    quota_per_day: int
    breaker: str
    next_ask_at: _timestamp_pb2.Timestamp
    last_error_cause: str
    redis_answers: bool
    forecast_model: str
    forecast_issued_at: _timestamp_pb2.Timestamp
    history_intervals: int
    history_newest: _timestamp_pb2.Timestamp
    simulated: bool
    def __init__(self, series: _Optional[_Union[Series, _Mapping]] = ..., provider: _Optional[str] = ..., secondary: _Optional[str] = ..., leading: _Optional[bool] = ..., holder: _Optional[str] = ..., rung: _Optional[int] = ..., fallback_reason: _Optional[str] = ..., age_s: _Optional[float] = ..., ends_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., soft_stale: _Optional[bool] = ..., hard_stale: _Optional[bool] = ..., asked_today: _Optional[int] = ..., quota_per_day: _Optional[int] = ..., breaker: _Optional[str] = ..., next_ask_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., last_error_cause: _Optional[str] = ..., redis_answers: _Optional[bool] = ..., forecast_model: _Optional[str] = ..., forecast_issued_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., history_intervals: _Optional[int] = ..., history_newest: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., simulated: _Optional[bool] = ...) -> None: ...

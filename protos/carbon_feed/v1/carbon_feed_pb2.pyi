import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from protos.types.v1 import carbon_pb2 as _carbon_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WatchIntensityRequest(_message.Message):
    __slots__ = ("zone", "change_ratio", "hysteresis_ratio")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_RATIO_FIELD_NUMBER: _ClassVar[int]
    HYSTERESIS_RATIO_FIELD_NUMBER: _ClassVar[int]
    zone: str
    change_ratio: float
    hysteresis_ratio: float
    def __init__(self, zone: _Optional[str] = ..., change_ratio: _Optional[float] = ..., hysteresis_ratio: _Optional[float] = ...) -> None: ...

class WatchIntensityResponse(_message.Message):
    __slots__ = ("reading", "why")
    READING_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    reading: _carbon_pb2.CarbonReading
    why: str
    def __init__(self, reading: _Optional[_Union[_carbon_pb2.CarbonReading, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class GetManyRequest(_message.Message):
    __slots__ = ("zones", "series")
    ZONES_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    zones: _containers.RepeatedScalarFieldContainer[str]
    series: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.Series]
    def __init__(self, zones: _Optional[_Iterable[str]] = ..., series: _Optional[_Iterable[_Union[_carbon_pb2.Series, _Mapping]]] = ...) -> None: ...

class GetManyResponse(_message.Message):
    __slots__ = ("readings", "missing")
    READINGS_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    readings: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonReading]
    missing: _containers.RepeatedCompositeFieldContainer[MissingReading]
    def __init__(self, readings: _Optional[_Iterable[_Union[_carbon_pb2.CarbonReading, _Mapping]]] = ..., missing: _Optional[_Iterable[_Union[MissingReading, _Mapping]]] = ...) -> None: ...

class MissingReading(_message.Message):
    __slots__ = ("series", "why")
    SERIES_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    series: _carbon_pb2.Series
    why: str
    def __init__(self, series: _Optional[_Union[_carbon_pb2.Series, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class GetHistoryRequest(_message.Message):
    __slots__ = ("zone", "from_at", "to_at", "as_of_at", "limit", "revisions")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    FROM_AT_FIELD_NUMBER: _ClassVar[int]
    TO_AT_FIELD_NUMBER: _ClassVar[int]
    AS_OF_AT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    REVISIONS_FIELD_NUMBER: _ClassVar[int]
    zone: str
    from_at: _timestamp_pb2.Timestamp
    to_at: _timestamp_pb2.Timestamp
    as_of_at: _timestamp_pb2.Timestamp
    limit: int
    revisions: bool
    def __init__(self, zone: _Optional[str] = ..., from_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., to_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., as_of_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., limit: _Optional[int] = ..., revisions: _Optional[bool] = ...) -> None: ...

class GetHistoryResponse(_message.Message):
    __slots__ = ("readings", "next_from_at", "as_of_at")
    READINGS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FROM_AT_FIELD_NUMBER: _ClassVar[int]
    AS_OF_AT_FIELD_NUMBER: _ClassVar[int]
    readings: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonReading]
    next_from_at: _timestamp_pb2.Timestamp
    as_of_at: _timestamp_pb2.Timestamp
    def __init__(self, readings: _Optional[_Iterable[_Union[_carbon_pb2.CarbonReading, _Mapping]]] = ..., next_from_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., as_of_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class GetForecastRequest(_message.Message):
    __slots__ = ("zone", "horizon_s", "step_s", "model")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    HORIZON_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    zone: str
    horizon_s: float
    step_s: float
    model: str
    def __init__(self, zone: _Optional[str] = ..., horizon_s: _Optional[float] = ..., step_s: _Optional[float] = ..., model: _Optional[str] = ...) -> None: ...

class GetForecastResponse(_message.Message):
    __slots__ = ("forecast",)
    FORECAST_FIELD_NUMBER: _ClassVar[int]
    forecast: _carbon_pb2.CarbonForecast
    def __init__(self, forecast: _Optional[_Union[_carbon_pb2.CarbonForecast, _Mapping]] = ...) -> None: ...

class GetRatioRequest(_message.Message):
    __slots__ = ("zone", "window")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    zone: str
    window: str
    def __init__(self, zone: _Optional[str] = ..., window: _Optional[str] = ...) -> None: ...

class GetRatioResponse(_message.Message):
    __slots__ = ("ratio",)
    RATIO_FIELD_NUMBER: _ClassVar[int]
    ratio: _carbon_pb2.CarbonRatio
    def __init__(self, ratio: _Optional[_Union[_carbon_pb2.CarbonRatio, _Mapping]] = ...) -> None: ...

class GetScoresRequest(_message.Message):
    __slots__ = ("zone", "model")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    zone: str
    model: str
    def __init__(self, zone: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class GetScoresResponse(_message.Message):
    __slots__ = ("scores",)
    SCORES_FIELD_NUMBER: _ClassVar[int]
    scores: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonScores]
    def __init__(self, scores: _Optional[_Iterable[_Union[_carbon_pb2.CarbonScores, _Mapping]]] = ...) -> None: ...

class ListForecastsRequest(_message.Message):
    __slots__ = ("zone", "model")
    ZONE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    zone: str
    model: str
    def __init__(self, zone: _Optional[str] = ..., model: _Optional[str] = ...) -> None: ...

class ListForecastsResponse(_message.Message):
    __slots__ = ("model", "issued_at", "bands", "actual_g_per_kwh")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    BANDS_FIELD_NUMBER: _ClassVar[int]
    ACTUAL_G_PER_KWH_FIELD_NUMBER: _ClassVar[int]
    model: str
    issued_at: _timestamp_pb2.Timestamp
    bands: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.CarbonBand]
    actual_g_per_kwh: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, model: _Optional[str] = ..., issued_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., bands: _Optional[_Iterable[_Union[_carbon_pb2.CarbonBand, _Mapping]]] = ..., actual_g_per_kwh: _Optional[_Iterable[float]] = ...) -> None: ...

class ListZonesRequest(_message.Message):
    __slots__ = ("polled_only", "name")
    POLLED_ONLY_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    polled_only: bool
    name: str
    def __init__(self, polled_only: _Optional[bool] = ..., name: _Optional[str] = ...) -> None: ...

class ListZonesResponse(_message.Message):
    __slots__ = ("zones",)
    ZONES_FIELD_NUMBER: _ClassVar[int]
    zones: _containers.RepeatedCompositeFieldContainer[Zone]
    def __init__(self, zones: _Optional[_Iterable[_Union[Zone, _Mapping]]] = ...) -> None: ...

class Zone(_message.Message):
    __slots__ = ("id", "name", "timezone", "aliases", "neso", "electricity_maps", "watttime", "eia", "clouds", "series", "polled")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TIMEZONE_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    NESO_FIELD_NUMBER: _ClassVar[int]
    ELECTRICITY_MAPS_FIELD_NUMBER: _ClassVar[int]
    WATTTIME_FIELD_NUMBER: _ClassVar[int]
    EIA_FIELD_NUMBER: _ClassVar[int]
    CLOUDS_FIELD_NUMBER: _ClassVar[int]
    SERIES_FIELD_NUMBER: _ClassVar[int]
    POLLED_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    timezone: str
    aliases: _containers.RepeatedScalarFieldContainer[str]
    neso: str
    electricity_maps: str
    watttime: str
    eia: str
    clouds: _containers.RepeatedScalarFieldContainer[str]
    series: _carbon_pb2.Series
    polled: bool
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., timezone: _Optional[str] = ..., aliases: _Optional[_Iterable[str]] = ..., neso: _Optional[str] = ..., electricity_maps: _Optional[str] = ..., watttime: _Optional[str] = ..., eia: _Optional[str] = ..., clouds: _Optional[_Iterable[str]] = ..., series: _Optional[_Union[_carbon_pb2.Series, _Mapping]] = ..., polled: _Optional[bool] = ...) -> None: ...

class GetZoneHealthRequest(_message.Message):
    __slots__ = ("zone",)
    ZONE_FIELD_NUMBER: _ClassVar[int]
    zone: str
    def __init__(self, zone: _Optional[str] = ...) -> None: ...

class GetZoneHealthResponse(_message.Message):
    __slots__ = ("zones",)
    ZONES_FIELD_NUMBER: _ClassVar[int]
    zones: _containers.RepeatedCompositeFieldContainer[_carbon_pb2.ZoneHealth]
    def __init__(self, zones: _Optional[_Iterable[_Union[_carbon_pb2.ZoneHealth, _Mapping]]] = ...) -> None: ...

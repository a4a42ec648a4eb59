"""Codec, the only converter between `trefoil.core` dataclasses, protobuf messages, bytes and canonical JSON.

Reflective: the table below pairs classes, the fields pair by name. Proto field `x_at` (Timestamp) is dataclass field
`x_at_s` (UTC seconds; 0.0 = unset). A sub-message is a dataclass. When unset it is None, or the empty dataclass where
the field's type does not allow None. A repeated field is a tuple, a map a dict; a device's type is written as its name.
Timestamps carry whole microseconds, which is as fine as a float of this century resolves.
"""

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, Final, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.timestamp_pb2 import Timestamp

from protos.types.v1 import carbon_pb2, common_pb2, energy_pb2, fleet_pb2, jobs_pb2, load_pb2, plan_pb2
from trefoil.core import brains, carbon, catalog, common, demand, energy, errors, fleet, latency, objective, plan
from trefoil.core.device_types import reported_type
from trefoil.core.jobs import planned

RETIRED: Final = frozenset({"lane"})
"""Fields that messages had once; a record, plan or table on disk may still have them."""
ADDED: Final[Mapping[type, frozenset[str]]] = {
    brains.PlanView: frozenset({"flexible"}),
    catalog.Family: frozenset({"token_classes"}),
    demand.LoadCell: frozenset({"streams"}),
    demand.Measured: frozenset({"tokens"}),
    fleet.ClockLease: frozenset({"power_limit_w"}),
    objective.Objective: frozenset({"ttft_ms", "ttft_quantile", "tpot_ms", "tpot_quantile"}),
    plan.Route: frozenset({"class_token_slo"}),
}
"""Fields that the version before does not know, by class: JSON leaves them out at their default, so that a rollback
reads it, and signatures of it hold."""
MESSAGES: Final[Mapping[type, type[Message]]] = {
    common.Revision: common_pb2.Revision,
    common.Lease: common_pb2.Lease,
    common.KeptFile: common_pb2.KeptFile,
    common.Provenance: common_pb2.Provenance,
    latency.Histogram: common_pb2.Histogram,
    carbon.Series: carbon_pb2.Series,
    carbon.CarbonReading: carbon_pb2.CarbonReading,
    carbon.CarbonBand: carbon_pb2.CarbonBand,
    carbon.CarbonForecast: carbon_pb2.CarbonForecast,
    carbon.CarbonRatio: carbon_pb2.CarbonRatio,
    carbon.CarbonScore: carbon_pb2.CarbonScore,
    carbon.CarbonScores: carbon_pb2.CarbonScores,
    carbon.ZoneHealth: carbon_pb2.ZoneHealth,
    fleet.SliceKey: fleet_pb2.SliceKey,
    fleet.Hosted: fleet_pb2.Hosted,
    fleet.ClockLease: fleet_pb2.ClockLease,
    fleet.SliceStatus: fleet_pb2.SliceStatus,
    fleet.DeviceStatus: fleet_pb2.DeviceStatus,
    fleet.NodeStatus: fleet_pb2.NodeStatus,
    objective.Objective: plan_pb2.Objective,
    objective.TokenSlo: plan_pb2.TokenSlo,
    objective.Budget: plan_pb2.Budget,
    objective.TenantRung: plan_pb2.TenantRung,
    objective.TenantRungs: plan_pb2.TenantRungs,
    plan.PlannedSlice: plan_pb2.PlannedSlice,
    plan.PlannedDevice: plan_pb2.PlannedDevice,
    plan.NodePlan: plan_pb2.NodePlan,
    plan.RouteTarget: plan_pb2.RouteTarget,
    plan.Route: plan_pb2.Route,
    plan.Expected: plan_pb2.Expected,
    plan.InputStamp: plan_pb2.InputStamp,
    plan.Plan: plan_pb2.Plan,
    plan.Rollout: plan_pb2.Rollout,
    plan.DecisionRecord: plan_pb2.DecisionRecord,
    energy.HostedEnergy: energy_pb2.HostedEnergy,
    energy.SliceEnergy: energy_pb2.SliceEnergy,
    energy.EnergySample: energy_pb2.EnergySample,
    energy.ReceiptRate: energy_pb2.ReceiptRate,
    energy.ReceiptRates: energy_pb2.ReceiptRates,
    demand.LoadKey: load_pb2.LoadKey,
    demand.StreamCounts: load_pb2.StreamCounts,
    demand.LoadCell: load_pb2.LoadCell,
    demand.LoadWindow: load_pb2.LoadWindow,
    demand.SliceLoad: load_pb2.SliceLoad,
    demand.TableAck: load_pb2.TableAck,
    demand.LoadForecast: load_pb2.LoadForecast,
    demand.ScaleSignal: load_pb2.ScaleSignal,
    planned.OpenJob: jobs_pb2.OpenJob,
    planned.OpenJobs: jobs_pb2.OpenJobs,
    planned.PlannedHour: jobs_pb2.PlannedHour,
    planned.PlannedJob: jobs_pb2.PlannedJob,
    planned.RequestOffer: jobs_pb2.RequestOffer,
    planned.PlannedJobs: jobs_pb2.PlannedJobs,
}
_slice_key: Final = functools.lru_cache(maxsize=4096)(fleet.SliceKey)
"""Equal keys are one object, whichever process wrote them: a table finds them by identity."""
CLASSES: Final[Mapping[str, type]] = {pb.DESCRIPTOR.full_name: cls for cls, pb in MESSAGES.items()}

NOT_FINITE: Final = ("inf", "-inf", "nan")  # how `to_plain` writes them
REWRITE: Final = "give the text that to_json wrote"
DEPTH_MAX: Final = 100  # of JSON: far below where Python's own functions give up, each at another depth
INTEGERS: Final = range(-(2**63), 2**64)  # of a message's fields
TIMESTAMP: Final = Timestamp.DESCRIPTOR.full_name
MICROS_PER_S: Final = 1_000_000
TIMES_S: Final = (-62_135_596_800, 253_402_300_799)  # google.protobuf.Timestamp: the years 1 to 9999
NUMBERS: Final = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)

T = TypeVar("T")
Field = Any  # google.protobuf has two FieldDescriptors, of which the type stubs know one


def core_field_name(field: Field) -> str:
    """Name of the dataclass field that mirrors a proto field."""
    is_time = field.message_type is not None and field.message_type.full_name == TIMESTAMP
    return f"{field.name}_s" if is_time else str(field.name)


def to_proto(obj: Any) -> Any:
    """Convert a core dataclass to its protobuf message."""
    message = _message_class(type(obj))()
    cls: Any = type(obj)
    for copy in _writers(cls):
        copy(obj, message)
    return message


def from_proto(message: Message) -> Any:
    """Convert a protobuf message to its core dataclass.

    Raises:
        errors.InvalidInput: an enum value that this version does not know; a number that is not finite.
    """
    cls = CLASSES[message.DESCRIPTOR.full_name]
    make = _slice_key if cls is fleet.SliceKey else cls
    return make(**{name: read(message) for name, read in _readers(cls)})


def encode(obj: Any) -> bytes:
    """Encode as binary protobuf, the same bytes for equal objects within one version of the library."""
    return typing.cast(bytes, to_proto(obj).SerializeToString(deterministic=True))


def decode(cls: type[T], data: bytes) -> T:
    """Decode binary protobuf: the inverse of `encode`.

    Raises:
        errors.InvalidInput: bytes that are not this message.
    """
    message = _message_class(cls)()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise errors.InvalidInput(
            f"{len(data)} bytes are not a {cls.__name__}", remedy="the writer is of another version; restart it"
        ) from error
    return typing.cast(T, from_proto(message))


def to_json(obj: Any) -> str:
    """Encode any core dataclass as canonical JSON, also without a message: sorted keys, enum names, exact floats."""
    return json_text(obj, separators=(",", ":"))


def json_text(obj: Any, **layout: Any) -> str:
    """JSON of `to_plain`; `layout`: of `json.dumps`. Each dataclass becomes a dict when its turn comes: a whole tree of
    dicts would keep the garbage collector busy, and every thread waiting."""
    inner = functools.partial(_level, inner=_shallow)
    return json.dumps(_shallow(obj), default=inner, sort_keys=True, allow_nan=False, ensure_ascii=False, **layout)


def from_json(cls: type[T], text: str) -> T:
    """Decode canonical JSON: the inverse of `to_json`, which needs the class.

    Raises:
        errors.InvalidInput: not JSON, an unknown field, or a value of the wrong type.
    """
    return typing.cast(T, from_plain(cls, parse_json(text), cls.__name__))


def parse_json(data: str | bytes) -> Any:
    """Parse JSON: finite numbers, no key twice, texts that UTF-8 can hold, nested no deeper than DEPTH_MAX.

    Raises:
        errors.InvalidInput: it is something else; in few words.
    """
    try:
        text = data if isinstance(data, str) else data.decode()
        tree = json.loads(text, parse_constant=_no_number, parse_float=_finite_number, object_pairs_hook=_once)
        _check_depth(tree)
        if "\\u" in text:  # an escape may be half of a character
            json.dumps(tree, ensure_ascii=False).encode()
        return tree
    except RecursionError as error:
        raise errors.InvalidInput("nested too deeply", remedy=REWRITE) from error
    except ValueError as error:
        raise errors.InvalidInput(f"not JSON: {error}" if data else "empty", remedy=REWRITE) from error


def _check_depth(tree: Any) -> None:
    level: list[Any] = [[tree]]
    for _ in range(DEPTH_MAX + 1):
        inner = (child for node in level for child in (node.values() if type(node) is dict else node))
        level = [child for child in inner if type(child) in (dict, list)]
        if not level:
            return
    raise RecursionError


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not a number")


def _finite_number(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _no_number(text[: errors.VALUE_CHARS_MAX])


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key occurs twice")
    return found


def to_plain(obj: Any) -> Any:
    """Convert to nested dicts and lists of JSON types. Infinities become strings: JSON cannot otherwise hold them."""
    return _level(obj, to_plain)


def _shallow(obj: Any) -> Any:
    """As `to_plain`, but for dataclasses, which stay."""
    cls: Any = type(obj)
    if cls in plan.SCALARS and cls is not float:  # most of what there is
        return obj
    return _level(obj, _shallow) if cls is fleet.DeviceType or _field_names(cls) is None else obj


def _level(obj: Any, inner: Callable[[Any], Any]) -> Any:
    """One level of `to_plain`; `inner` converts what it holds."""
    if isinstance(obj, fleet.DeviceType):
        return obj.name
    cls: Any = type(obj)
    if (names := _field_names(cls)) is not None:
        found = {name: inner(getattr(obj, name)) for name in names}
        for name, default in _added(cls):
            if getattr(obj, name) == default:
                del found[name]
        return found
    if isinstance(obj, IntEnum):
        return obj.name
    if isinstance(obj, Mapping):
        return {str(key): inner(value) for key, value in obj.items()}
    if isinstance(obj, tuple | list):
        return [inner(item) for item in obj]
    if isinstance(obj, float) and not math.isfinite(obj):
        return str(obj)
    assert obj is None or isinstance(obj, bool | int | float | str), f"{type(obj)} has no canonical JSON"
    return obj


@functools.cache
def _field_names(cls: Any) -> tuple[str, ...] | None:
    """Names of a dataclass' fields; None of any other class."""
    return tuple(field.name for field in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else None


@functools.cache
def _added(cls: Any) -> tuple[tuple[str, Any], ...]:
    """Fields that the version before does not know, and their defaults."""
    added = (field for field in dataclasses.fields(cls) if field.name in ADDED.get(cls, ()))
    return tuple(
        (f.name, f.default if f.default_factory is dataclasses.MISSING else f.default_factory()) for f in added
    )


def from_plain(annotation: Any, tree: Any, path: str = "") -> Any:
    """Rebuild a value of the annotated type; `path` names it in complaints."""
    try:
        return _rebuild(annotation, tree, path)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, StopIteration) as error:
        raise errors.InvalidInput(
            f"cannot become {annotation}: {error!r}", field=path, value=tree, remedy="use what to_json writes"
        ) from error


def _rebuild(annotation: Any, tree: Any, path: str) -> Any:
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Union or origin is types.UnionType:
        if tree is None and type(None) in arguments:
            return None
        members = [member for member in arguments if member is not type(None)]
        if len(members) > 1:  # e.g. float | str: the JSON type decides
            return next(tree for member in members if isinstance(tree, member))
        return _rebuild(members[0], tree, path)
    if origin is tuple:
        if not isinstance(tree, list | tuple):
            raise TypeError(f"{type(tree).__name__} is not a list")
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return tuple(from_plain(arguments[0], item, f"{path}[{i}]") for i, item in enumerate(tree))
        pairs = zip(arguments, tree, strict=True)
        return tuple(from_plain(member, item, f"{path}[{i}]") for i, (member, item) in enumerate(pairs))
    if origin is not None and issubclass(origin, Mapping):
        return {_rebuild(arguments[0], k, path): from_plain(arguments[1], v, f"{path}.{k}") for k, v in tree.items()}
    if annotation is fleet.DeviceType:
        return reported_type(_rebuild(str, tree, path))
    if dataclasses.is_dataclass(annotation):
        return _rebuild_dataclass(typing.cast(type, annotation), tree, path)
    if issubclass(annotation, IntEnum):
        return annotation[tree]
    if isinstance(tree, bool) and annotation in (int, float):
        raise TypeError("bool is not a number")
    if annotation is float:
        if isinstance(tree, str) and tree not in NOT_FINITE:
            raise TypeError("text is not a number")
        return float(tree)
    if annotation is int and isinstance(tree, str):
        tree = int(tree)  # keys of a JSON object are text
    if not isinstance(tree, annotation):
        raise TypeError(f"{type(tree).__name__} is not {annotation.__name__}")
    if annotation is int and tree not in INTEGERS:
        raise ValueError("beyond 64 bits")
    return tree


def _rebuild_dataclass(cls: type, tree: Any, path: str) -> Any:
    hints = _hints(cls)
    if not isinstance(tree, Mapping):
        raise TypeError(f"{type(tree).__name__} is not an object")
    if not RETIRED.isdisjoint(tree):  # what an older version has kept is still read
        tree = {name: value for name, value in tree.items() if name in hints or name not in RETIRED}
    for name in tree:
        if name not in hints:
            remedy = errors.one_of(sorted(hints), name)
            raise errors.InvalidInput("unknown field", field=f"{path}.{name}", remedy=remedy)
    return cls(**{name: from_plain(hints[name], value, f"{path}.{name}") for name, value in tree.items()})


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _message_class(cls: type) -> type[Message]:
    assert cls in MESSAGES, f"{cls.__name__} has no message; add it to MESSAGES"
    return MESSAGES[cls]


@functools.cache
def _writers(cls: type) -> tuple[Callable[[Any, Any], None], ...]:
    hints = _hints(cls)
    return tuple(_writer(field, hints[core_field_name(field)]) for field in _message_class(cls).DESCRIPTOR.fields)


def _writer(field: Field, annotation: Any) -> Callable[[Any, Any], None]:
    """One function that copies this field from dataclass to message. Built once: the hot path only calls it."""
    name, core_name = field.name, core_field_name(field)
    if _is_map(field):
        holds_messages = field.message_type.fields_by_name["value"].message_type is not None

        def write_map(obj: Any, message: Any) -> None:
            target = getattr(message, name)
            for key, value in getattr(obj, core_name).items():
                if holds_messages:
                    target[key].CopyFrom(to_proto(value))
                else:
                    target[key] = value

        return write_map
    if core_name != name:

        def write_time(obj: Any, message: Any) -> None:
            value_s = getattr(obj, core_name)
            if value_s:
                micros = round(value_s * MICROS_PER_S)
                seconds, rest = divmod(micros, MICROS_PER_S)
                target = getattr(message, name)
                target.seconds, target.nanos = seconds, rest * 1000

        return write_time
    if field.message_type is not None and field.is_repeated:
        return lambda obj, message: getattr(message, name).extend([to_proto(item) for item in getattr(obj, name)])
    if field.message_type is not None:
        unset = _unset(annotation)

        def write_message(obj: Any, message: Any) -> None:
            value = getattr(obj, name)
            if value != unset:
                getattr(message, name).CopyFrom(to_proto(value))

        return write_message
    if field.is_repeated:
        return lambda obj, message: getattr(message, name).extend(getattr(obj, name))
    if annotation is fleet.DeviceType:
        return lambda obj, message: setattr(message, name, getattr(obj, name).name)
    return lambda obj, message: setattr(message, name, getattr(obj, name))


@functools.cache
def _readers(cls: type) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    hints = _hints(cls)
    fields = _message_class(cls).DESCRIPTOR.fields
    return tuple((core_field_name(field), _reader(field, hints[core_field_name(field)])) for field in fields)


def _reader(field: Field, annotation: Any) -> Callable[[Any], Any]:
    name = field.name
    if _is_map(field):
        if field.message_type.fields_by_name["value"].message_type is not None:
            return lambda message: {key: from_proto(value) for key, value in getattr(message, name).items()}
        if field.message_type.fields_by_name["value"].cpp_type in NUMBERS:
            return lambda message: {key: _finite(name, value) for key, value in getattr(message, name).items()}
        return lambda message: dict(getattr(message, name))
    if core_field_name(field) != name:

        def read_time(message: Any) -> float:
            if not message.HasField(name):
                return 0.0
            value = getattr(message, name)
            if not TIMES_S[0] <= value.seconds <= TIMES_S[1]:
                raise errors.InvalidInput("not of the years 1 to 9999", field=name, value=value.seconds)
            return float((value.seconds * MICROS_PER_S + value.nanos // 1000) / MICROS_PER_S)

        return read_time
    if field.message_type is not None and field.is_repeated:
        return lambda message: tuple(from_proto(item) for item in getattr(message, name))
    if field.message_type is not None:
        unset = _unset(annotation)
        return lambda message: from_proto(getattr(message, name)) if message.HasField(name) else unset
    if field.enum_type is not None:
        return functools.partial(_read_enum, name, annotation)
    if field.is_repeated:
        return lambda message: tuple(getattr(message, name))
    if field.cpp_type in NUMBERS:
        return lambda message: _finite(name, getattr(message, name))
    if annotation is fleet.DeviceType:
        return lambda message: reported_type(getattr(message, name))
    return lambda message: getattr(message, name)


def _finite(name: str, value: float) -> float:
    if not math.isfinite(value):
        raise errors.InvalidInput("not a finite number", field=name, value=value, remedy="send a number")
    return value


def _read_enum(name: str, enum: type[IntEnum], message: Any) -> IntEnum:
    try:
        return enum(getattr(message, name))
    except ValueError as error:
        raise errors.InvalidInput(
            f"unknown {enum.__name__}", field=name, value=getattr(message, name), remedy="update this process"
        ) from error


def _unset(annotation: Any) -> Any:
    """What an absent sub-message reads as; written as absent, so that each object has one encoding."""
    return None if type(None) in typing.get_args(annotation) else annotation()


def _is_map(field: Field) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)

"""Every message survives every encoding, and every dataclass has exactly its message's fields."""

import dataclasses
import functools
import importlib
import json
import math
import pkgutil
import struct
import typing
from pathlib import Path

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given, settings
from hypothesis import strategies as st

import trefoil.core
from protos.types.v1 import carbon_pb2, common_pb2, energy_pb2, fleet_pb2, jobs_pb2, load_pb2, plan_pb2
from trefoil.core import carbon, errors, plan
from trefoil.core.common import Provenance, Revision
from trefoil.core.demand import LoadCell, LoadKey, TableAck
from trefoil.core.device_types import DEVICE_TYPES, reported_type
from trefoil.core.fleet import ClockLease, DeviceState, DeviceType, SliceKey, SliceStatus
from trefoil.core.objective import Objective
from trefoil.runtime import codec

FILES = (common_pb2, carbon_pb2, fleet_pb2, plan_pb2, energy_pb2, load_pb2, jobs_pb2)
CLASSES = sorted(codec.MESSAGES, key=lambda cls: cls.__name__)
SCALARS = {
    FieldDescriptor.CPPTYPE_UINT32: st.integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: st.integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(allow_nan=False, allow_infinity=False),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
    FieldDescriptor.CPPTYPE_STRING: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
}
# Microseconds from 1970 to 2100: what a float64 of seconds holds exactly enough.
TIMES = st.integers(0, 4_102_444_800_000_000).map(lambda micros: micros / 1_000_000)


@functools.cache
def strategy(cls: type) -> st.SearchStrategy:
    hints = typing.get_type_hints(cls)
    fields = codec.MESSAGES[cls].DESCRIPTOR.fields
    named = {codec.core_field_name(field): field for field in fields}
    return st.builds(cls, **{name: field_strategy(field, hints[name]) for name, field in named.items()})


def field_strategy(field, annotation) -> st.SearchStrategy:
    if codec._is_map(field):
        parts = field.message_type.fields_by_name
        return st.dictionaries(value_strategy(parts["key"], str), value_strategy(parts["value"], None), max_size=3)
    if field.is_repeated:
        return st.lists(value_strategy(field, None), max_size=2).map(tuple)
    if type(None) in typing.get_args(annotation):
        return st.none() | value_strategy(field, None)
    return value_strategy(field, annotation)


def value_strategy(field, annotation) -> st.SearchStrategy:
    if field.message_type is not None:
        if field.message_type.full_name == codec.TIMESTAMP:
            return TIMES
        return strategy(codec.CLASSES[field.message_type.full_name])
    if field.enum_type is not None:
        return st.sampled_from(annotation)
    if annotation is DeviceType:
        return (SCALARS[field.cpp_type] | st.sampled_from([*DEVICE_TYPES, "cpu:8"])).map(reported_type)
    return SCALARS[field.cpp_type]


@pytest.mark.hypothesis
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_round_trips(cls):
    @settings(max_examples=25, deadline=None)
    @given(strategy(cls))
    def check(obj):
        assert codec.decode(cls, codec.encode(obj)) == obj
        assert codec.from_proto(codec.to_proto(obj)) == obj
        text = codec.to_json(obj)
        assert codec.from_json(cls, text) == obj
        assert codec.to_json(codec.from_json(cls, text)) == text
        values = {"values": [obj, (math.inf, {1: obj})]}
        plain = json.dumps(codec.to_plain(values), sort_keys=True, indent=1, ensure_ascii=False)
        assert codec.json_text(values, indent=1) == plain

    check()


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_fields_are_the_messages_fields_in_the_same_order(cls):
    fields = codec.MESSAGES[cls].DESCRIPTOR.fields
    assert [field.name for field in dataclasses.fields(cls)] == [codec.core_field_name(field) for field in fields]
    assert codec.MESSAGES[cls].DESCRIPTOR.name == cls.__name__


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_an_empty_message_is_the_default_object(cls):
    assert codec.decode(cls, b"") == cls()


def test_every_message_has_a_class():
    names = {message.full_name for file in FILES for message in file.DESCRIPTOR.message_types_by_name.values()}
    assert names == set(codec.CLASSES)


def test_every_enum_has_the_same_members():
    core = {}
    for module in pkgutil.iter_modules(trefoil.core.__path__, "trefoil.core."):
        core |= vars(importlib.import_module(module.name))
    for file in FILES:
        for name, enum in file.DESCRIPTOR.enum_types_by_name.items():
            prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in name).lstrip("_") + "_"
            assert {value.name.removeprefix(prefix): value.number for value in enum.values} == {
                member.name: member.value for member in core[name]
            }


@given(strategy(plan.Plan))
@settings(max_examples=20, deadline=None)
def test_equal_objects_have_equal_bytes(obj):
    assert codec.encode(obj) == codec.encode(codec.decode(plan.Plan, codec.encode(obj)))


def test_equal_keys_of_slices_are_one_object_whoever_wrote_them():
    key = SliceKey("n/gpu0", "1g.5gb", 2, 1)
    status = codec.decode(SliceStatus, codec.encode(SliceStatus(key=key)))
    assert status.key == key
    assert status.key is codec.decode(SliceKey, codec.encode(key))
    assert status.key is not codec.decode(SliceKey, codec.encode(dataclasses.replace(key, start=3)))


def test_a_field_that_was_removed_is_passed_over():
    ratio, lane = b"\x59" + struct.pack("<d", 1.0), b"\x32\x04unix"  # LoadCell.sample_ratio, TableAck.lane_fallback
    assert codec.decode(LoadCell, codec.encode(LoadCell(arrived=2)) + ratio) == LoadCell(arrived=2)
    assert codec.decode(TableAck, codec.encode(TableAck("d", 1)) + lane) == TableAck("d", 1)


def test_times_keep_microseconds_and_unset_stays_unset():
    stamped = Provenance(as_of_s=1_795_219_200.123456)
    assert codec.decode(Provenance, codec.encode(stamped)) == stamped
    assert not codec.to_proto(Provenance()).HasField("as_of")


def test_a_time_that_no_calendar_has_is_refused():
    message = common_pb2.Provenance()
    message.as_of.seconds = 2**62
    with pytest.raises(errors.InvalidInput, match="as_of"):
        codec.from_proto(message)


def test_an_absent_message_is_none_where_the_type_allows_it_and_else_the_empty_object():
    assert LoadKey(slice=None) == codec.decode(LoadKey, codec.encode(LoadKey()))
    assert codec.decode(LoadKey, codec.encode(LoadKey(slice=SliceKey()))).slice == SliceKey()
    assert codec.decode(plan.Plan, b"").revision == Revision()
    assert codec.encode(plan.Plan()) == b""


def test_broken_bytes_are_an_operating_error():
    with pytest.raises(errors.InvalidInput, match="Plan"):
        codec.decode(plan.Plan, b"\xff\xff\xff")


def test_an_enum_value_of_a_later_version_is_named():
    message = fleet_pb2.DeviceStatus(state=99)
    with pytest.raises(errors.InvalidInput, match="99"):
        codec.from_proto(message)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ('{"nonsense": 1}', "Revision.nonsense"),
        ('{"epoch": "one"}', "Revision.epoch"),
        ('{"epoch": 1.5}', "Revision.epoch"),
        ("[]", "Revision"),
        ("null", "Revision"),
    ],
)
def test_bad_json_names_what_is_wrong(text, named):
    with pytest.raises(errors.InvalidInput, match=named):
        codec.from_json(Revision, text)


def test_json_is_canonical_and_readable():
    text = codec.to_json(plan.PlannedDevice(device="node0/gpu0", target=DeviceState.AWAKE))
    assert text.startswith('{"clock_max_mhz":0,"clock_min_mhz":0,"device":"node0/gpu0"')
    assert '"target":"AWAKE"' in text


def test_what_an_older_version_kept_is_read_without_the_fields_that_are_gone():
    kept = '{"family":"digits","lane":"any","router":"weighted"}'
    assert codec.from_json(plan.Route, kept) == plan.Route("digits", "weighted")
    assert codec.from_json(LoadKey, '{"family":"digits","lane":"any"}') == LoadKey("digits")


KEPT = dict(line.split(": ") for line in Path(__file__).with_name("kept_fields.txt").read_text().splitlines())
"""Fields of what lies on disk or in Redis as JSON, by class, in the version before."""


def kept_class(name: str) -> type:
    module, _, found = name.rpartition(".")
    return getattr(importlib.import_module(module), found)


@pytest.mark.parametrize("name", KEPT)
def test_without_new_features_json_has_the_keys_that_the_version_before_knows(name):
    cls = kept_class(name)
    needed = (f for f in dataclasses.fields(cls) if f.default is f.default_factory is dataclasses.MISSING)
    made = cls(**{field.name: None for field in needed})
    assert sorted(codec.to_plain(made)) == sorted(KEPT[name].split())


def test_new_fields_stand_in_json_once_they_are_used():
    for cls, names in codec.ADDED.items():
        kept = KEPT[f"{cls.__module__}.{cls.__name__}"].split()
        assert not names & set(kept)
        fields = {field.name for field in dataclasses.fields(cls)}
        assert fields == names | set(kept)
    chat = Objective("chat", slo_ms=900.0, ttft_ms=200.0, ttft_quantile=0.95)
    assert codec.to_plain(chat)["ttft_ms"] == 200.0
    assert "tpot_ms" not in codec.to_plain(chat)
    assert codec.from_json(Objective, codec.to_json(chat)) == chat
    lease = ClockLease("n/gpu0", power_limit_w=200.0)
    assert codec.from_json(ClockLease, codec.to_json(lease)) == lease


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_no_message(value: float) -> None:
    reading = carbon_pb2.CarbonReading(intensity_g_per_kwh=value)
    route = plan_pb2.Route(params={"slo_ms": value})
    for cls, message in ((carbon.CarbonReading, reading), (plan.Route, route)):
        with pytest.raises(errors.InvalidInput, match="not a finite number"):
            codec.decode(cls, message.SerializeToString())

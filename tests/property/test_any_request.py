"""Whatever a client or an operator sends is admitted or refused in one line, at a bounded cost; never a bug."""

import contextlib
import dataclasses
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request import admission
from dispatcher.request.admission import Admission, Caller
from dispatcher.request.contracts import Contracts
from dispatcher.routing.core.routing_table import build_table, check_plan
from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from dispatcher.transport.core import kserve_wire
from protos.controller.v1 import controller_pb2
from protos.power_agent.v1 import power_agent_pb2
from tests.support.plans import CATALOG, SMALL, fleet, plan_of, planned
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.core.common import Revision
from trefoil.core.demand import PROBE_ID, PROBE_TENANT
from trefoil.core.errors import STATUS_BYTES_MAX, VALUE_CHARS_MAX, InvalidInput, TrefoilError, brief, shown
from trefoil.core.plan_check import CREDITS_MAX, check
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.security.scopes import PARTS_MAX, TEXT_CHARS_MAX, check_request

# Any message, after a good one: a few of its fields, at any depth, are something else.
EXTREME = {
    "int32": st.sampled_from([0, 1, -1, 2**31 - 1, -(2**31)]),
    "int64": st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), 2**62]),
    "uint32": st.sampled_from([0, 1, 7, 2**31, 2**32 - 1]),
    "uint64": st.sampled_from([0, 1, 2**63, 2**64 - 1]),
    "float": st.sampled_from([0.0, -1.0, 0.5, 1e308, 5e-324, math.nan, math.inf, -math.inf]),
    "text": st.sampled_from(["", "x", "node0/gpu0", "toy", "\0", "é" * 70, "x" * 5000, "x" * (TEXT_CHARS_MAX + 1)]),
}


def extreme(draw, field):
    if field.enum_type is not None:
        return draw(st.sampled_from([0, 1, 2, 3, 99, -1]))
    kinds = {
        1: "int32", 2: "int64", 3: "uint32", 4: "uint64", 5: "float", 6: "float", 9: "text",
    }  # fmt: skip
    if field.cpp_type == 7:
        return draw(st.booleans())
    value = draw(EXTREME[kinds[field.cpp_type]])
    if field.cpp_type == 6 and abs(value) > 3e38 and math.isfinite(value):
        value = 1.0
    return value.encode() if field.type == field.TYPE_BYTES else value


def spoil(draw, message):
    """Change one thing of a message, somewhere."""
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if is_map:
        key, value = field.message_type.fields
        made = extreme(draw, key)
        if value.message_type is None:
            getattr(message, field.name)[made] = extreme(draw, value)
        else:
            spoil(draw, getattr(message, field.name)[made])
    elif field.is_repeated and field.message_type is not None:
        held = getattr(message, field.name)
        what = draw(st.sampled_from(["clear", "empty", "double", "into", "into", "into"]))
        if what == "clear":
            message.ClearField(field.name)
        elif what == "empty" or not held:
            held.add()
        elif what == "double":
            held.add().CopyFrom(held[0])
        else:
            spoil(draw, draw(st.sampled_from(list(held))))
    elif field.is_repeated:
        getattr(message, field.name).append(extreme(draw, field))
    elif field.message_type is not None:
        spoil(draw, getattr(message, field.name))
    else:
        setattr(message, field.name, extreme(draw, field))


@st.composite
def spoilt(draw, good):
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(draw(st.integers(1, 4))):
        spoil(draw, message)
    return message


GOOD_PLAN = codec.to_proto(plan_of(planned("3g.20gb", 0), planned("3g.20gb", 4, SMALL)))


@settings(max_examples=400)
@given(spoilt(controller_pb2.PinRequest(plan=GOOD_PLAN)))
def test_any_plan_is_refused_in_one_line_or_can_be_kept_compared_and_routed(request_):
    accepted = False
    with contextlib.suppress(InvalidInput):
        check_request(request_)
        made = codec.from_proto(request_.plan)
        check(made, fleet(), CATALOG)
        accepted = True
    if not accepted:
        return
    assert codec.from_json(type(made), codec.to_json(made)) == made
    assert codec.encode(codec.from_proto(codec.to_proto(made))) == codec.encode(made)
    assert made.content_digest
    made = dataclasses.replace(made, revision=Revision(1, 1, 0))
    with contextlib.suppress(InvalidInput):  # a router, a queue or a stage that dispatchers do not have
        check_plan(made, Revision())
        build_table(made, ())


@settings(max_examples=200)
@given(
    spoilt(power_agent_pb2.ApplyRequest(plan=GOOD_PLAN.nodes[0]))
    | spoilt(power_agent_pb2.SetClocksRequest())
    | spoilt(controller_pb2.SetObjectivesRequest(objectives=[controller_pb2.ObjectiveChange()]))
    | spoilt(controller_pb2.ReplanRequest())
)
def test_what_passes_the_limits_converts_there_and_back(request_):
    try:
        check_request(request_)
    except InvalidInput:
        return
    for field, value in request_.ListFields():
        if field.message_type is not None and field.message_type.full_name in codec.CLASSES:
            try:
                made = codec.from_proto(value)
            except InvalidInput:  # an enum of another version
                continue
            assert codec.from_proto(codec.to_proto(made)) == made


def test_a_request_of_too_many_parts_is_refused_before_anybody_looks_at_them():
    request_ = controller_pb2.PinRequest()
    request_.plan.nodes.add().devices.MergeFrom([type(GOOD_PLAN.nodes[0].devices[0])()] * (PARTS_MAX + 1))
    started_s = time.process_time()
    with pytest.raises(InvalidInput, match=rf"plan\.nodes\.devices: the request has more than {PARTS_MAX} parts"):
        check_request(request_)
    assert time.process_time() - started_s < 1.0
    many = power_agent_pb2.WatchEnergyRequest(after_seq={str(n): n for n in range(PARTS_MAX + 1)})
    with pytest.raises(InvalidInput, match=f"more than {PARTS_MAX} parts"):
        check_request(many)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_none_is_refused_by_the_name_of_its_field(value):
    request_ = controller_pb2.PinRequest(plan=GOOD_PLAN)
    request_.plan.routes[0].targets[1].weight = value
    with pytest.raises(InvalidInput, match=rf"plan\.routes\.targets\.weight = {value}: is not a number\. Remedy"):
        check_request(request_)


def test_credits_that_workers_would_deal_for_years_are_refused():
    whole = plan([route([target(0, credits=CREDITS_MAX)])])
    check_plan(whole, Revision())
    with pytest.raises(TrefoilError, match=f"more than {CREDITS_MAX}"):
        check_plan(plan([route([target(0, credits=2**32 - 1)])]), Revision())


# What clients send


@pytest.fixture(scope="module")
def door(tmp_path_factory):
    """Admission of a worker that routes `digits`."""
    local = LocalWorker(DispatcherSettings(state_dir=tmp_path_factory.mktemp("d")), "d", ManualClock(1000.0))
    local.routing.connections.connect = lambda _: None
    local.routing.set_plan(plan([route([target(0)])]))
    local.routing.set_nodes([node([status(0)])])
    return Admission(local, Contracts(local))


def test_a_ticket_has_the_flow_of_its_caller_and_the_cost_of_requests_like_it(door):
    few, many = good_request(), good_request()
    many.inputs[0].shape[:] = [32, 8, 8]
    caller = Caller("vision", flow=("vision", "ipv4:10.0.0.1:5000"), weight=3.0)

    def admitted(message):
        return door.admit(message.SerializeToString(), caller, 100.0).ticket

    assert (admitted(few).flow, admitted(few).weight) == (caller.flow, 3.0)
    assert admitted(many).cost_s == pytest.approx(32 * admitted(few).cost_s), "nothing known: by items"
    for _ in range(50):
        door._costs.record("digits", 1, 0.004)
        door._costs.record("digits", 32, 0.040)
    assert admitted(few).cost_s == pytest.approx(0.004, rel=0.01)
    assert admitted(many).cost_s == pytest.approx(0.040, rel=0.01), "measured, not by items"
    many.inputs[0].shape[:] = [64, 8, 8]
    assert admitted(many).cost_s == pytest.approx(0.080, rel=0.01), "the nearest size, in proportion"


def test_a_probe_of_a_caller_without_a_tenant_is_booked_to_trefoil(door):
    probe, other = good_request(), good_request()
    probe.id = PROBE_ID
    tenants = [door.admit(m.SerializeToString(), Caller(), 100.0).ticket.tenant for m in (probe, other)]
    assert tenants == [PROBE_TENANT, ""]
    assert {cell.key.tenant for cell in door._load.close_window(101.0, Revision()).cells} >= {PROBE_TENANT}
    assert door.admit(probe.SerializeToString(), Caller("vision"), 100.0).ticket.tenant == "vision", "it pays itself"


def good_request():
    message = pb.ModelInferRequest(model_name="digits", id="7")
    message.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
    message.outputs.add(name="PROBABILITIES")
    message.raw_input_contents.append(bytes(64))
    message.parameters["trefoil_slo_ms"].double_param = 100.0
    message.parameters["trefoil_min_accuracy"].string_param = "0.9"
    message.parameters["priority"].uint64_param = 1
    message.parameters["timeout"].int64_param = 1_000_000
    message.parameters["sequence_id"].int64_param = 5
    return message


GOOD_REQUEST = good_request()


@settings(max_examples=400)
@given(spoilt(GOOD_REQUEST).map(lambda m: m.SerializeToString()) | st.binary(max_size=60), st.binary(max_size=4))
def test_any_request_is_a_ticket_or_a_refusal(door, data, more):
    try:
        made = door.admit(data + more, Caller(), 100.0)
    except TrefoilError:
        return
    ticket = made.ticket
    assert 1 <= ticket.items <= admission.ITEMS_MAX
    assert ticket.deadline_s is None or math.isfinite(ticket.deadline_s)
    assert math.isfinite(ticket.slo_ms)
    assert 0 <= ticket.min_accuracy <= 1
    pb.ModelInferRequest.FromString(b"".join(made.payload))


@pytest.mark.parametrize("size", [2**63 - 1, 2**57, -(2**63)])
def test_sizes_that_no_tensor_has_reach_no_slice(door, size):
    message = good_request()
    message.inputs[0].shape[:] = [size, 0, 8]
    with pytest.raises(InvalidInput, match=r"inputs\.shape = \[-?\d+, 0, 8\]: is larger than any tensor"):
        door.admit(message.SerializeToString(), Caller(), 100.0)


@pytest.mark.parametrize("pad", [0, admission.SMALL_BYTES])
def test_a_hundred_thousand_small_tensors_are_refused_whatever_comes_with_them(door, pad):
    message = good_request()
    message.raw_input_contents.append(bytes(pad))
    data = message.SerializeToString() + b"\x2a\x00" * 100_000
    with pytest.raises(InvalidInput, match="more than 4096 tensors and parameters"):
        door.admit(data, Caller(), 100.0)


def test_what_lies_beside_the_raw_contents_has_a_limit_and_raw_contents_have_not(door):
    message = good_request()
    message.raw_input_contents[0] = bytes(20 * 2**20)
    door.admit(message.SerializeToString(), Caller(), 100.0)
    message.inputs[0].contents.bytes_contents.append(bytes(17 * 2**20))
    with pytest.raises(InvalidInput, match="beside its raw_input_contents"):
        door.admit(message.SerializeToString(), Caller(), 100.0)


@pytest.mark.parametrize("where", ["texts", "numbers", "of a tensor", "of an output", "of a parameter", "group"])
def test_what_would_hold_up_the_event_loop_is_refused_unparsed(door, monkeypatch, where):
    """Eight million texts took the parser 0.2 s."""
    message, count = good_request(), 2**21
    field = {
        "texts": b"\x2a%b" % nested(b"\x2a", b"\x42\x00" * count),
        "numbers": b"\x2a%b" % nested(b"\x2a", b"\x10\x01" * count),
        "of a tensor": b"\x2a%b" % nested(b"\x22\x00" * count),
        "of an output": b"\x32%b" % nested(b"\x12\x00" * count),
        "of a parameter": b"\x22%b" % nested(b"\x12", b"\x08\x01" * count),
        "group": b"\x7b" + b"\x08\x01" * count + b"\x7c",
    }[where]
    monkeypatch.setattr(admission, "_parse", None)
    with pytest.raises(InvalidInput, match=r"more than 16384 texts and values|not a ModelInferRequest"):
        door.admit(message.SerializeToString() + field, Caller(), 100.0)


def nested(tag: bytes, inner: bytes = b"") -> bytes:
    """A message of one field, which is a message, or a message of these bytes, each with its length before it."""
    data = tag + kserve_wire.length(len(inner)) + inner if inner else tag
    return kserve_wire.length(len(data)) + data


def test_packed_numbers_and_a_long_text_are_one_value_each(door):
    message = good_request()
    message.inputs[0].contents.fp32_contents.extend([0.5] * 500_000)
    message.inputs[0].contents.bytes_contents.append(bytes(2**20))
    assert door.admit(message.SerializeToString(), Caller(), 100.0).ticket.items == 1


@given(spoilt(GOOD_REQUEST))
def test_the_fields_of_messages_are_counted(message):
    message.inputs.add().contents.bytes_contents.extend([b"a", b""])
    data = message.SerializeToString()
    maps = [message.parameters, *(each.parameters for each in [*message.inputs, *message.outputs])]
    fields = sum(len(v) if f.is_repeated and f.name != "parameters" else 0 for f, v in message.ListFields())
    fields += sum(not f.is_repeated for f, _ in message.ListFields())
    for tensor in [*message.inputs, *message.outputs]:
        fields += sum(1 for f, _ in tensor.ListFields() if f.name != "parameters")  # shapes are packed
    for tensor in message.inputs:
        fields += sum(len(v) if f.name == "bytes_contents" else 1 for f, v in tensor.contents.ListFields())
    entries = [value for each in maps for value in each.values()]
    fields += sum(3 + len(value.ListFields()) for value in entries)  # the entry, its key and value
    assert kserve_wire.count_fields(data, 10**6) == fields
    assert kserve_wire.count_fields(data, fields - 1) == fields


@given(spoilt(GOOD_REQUEST))
def test_the_head_is_measured_as_protobuf_writes_it(message):
    data = message.SerializeToString()
    fields = sum(len(value) if field.is_repeated else 1 for field, value in message.ListFields())
    raw = list(message.raw_input_contents)
    message.ClearField("raw_input_contents")
    head = message.SerializeToString()
    size, counted, spans = kserve_wire.head_size(data)
    assert (size, counted) == (len(head), fields)
    assert kserve_wire.without(data, spans) == head
    message.raw_input_contents.extend(raw)
    assert pb.ModelInferRequest.FromString(head + b"".join(data[a:b] for a, b in spans)) == message
    assert sum(map(len, raw)) <= len(data)


@pytest.mark.parametrize("before", [b"", b"\x08", b"\x3a"], ids=["tag", "number", "length"])
def test_a_number_of_more_than_ten_bytes_is_no_message(before):
    size, fields, raw = kserve_wire.head_size(data := before + b"\xff" * 10 + b"\x00" + bytes(admission.SMALL_BYTES))
    assert size >= len(data) - 1
    assert (fields, raw) == (1, [])
    for spoilt_data in (data, before + b"\xff" * 800_000):  # half a minute, were it read as one number
        with pytest.raises(InvalidInput, match="are not a ModelInferRequest"):
            admission.parse_request(spoilt_data, 2**24)


def test_who_sends_megabytes_does_not_get_them_back():
    long = "n" * 10**7
    assert len(shown(long)) < VALUE_CHARS_MAX + 40
    assert len(shown([long, long])) < VALUE_CHARS_MAX + 40
    assert "(10000000 characters)" in str(InvalidInput("is too long", field="id", value=long, remedy="shorten it"))
    for text in (long, "é" * 10**6, "\U0001f600" * 10**6):
        told = brief(f"begins {text} ends")
        assert told.startswith("begins")
        assert told.endswith("ends")
        assert len(told.encode()) <= STATUS_BYTES_MAX
    assert brief("short") == "short"


def test_a_client_that_waits_for_ever_waits_a_month(door):
    message = good_request()
    message.parameters["timeout"].int64_param = 2**63 - 1
    made = door.admit(message.SerializeToString(), Caller(), 100.0)
    assert made.ticket.deadline_s == 100.0 + admission.DEADLINE_MAX_S
    assert door.admit(GOOD_REQUEST.SerializeToString(), Caller(deadline_s=1e300), 100.0).ticket.deadline_s == 101.0

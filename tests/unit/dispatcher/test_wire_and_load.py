"""Appended bytes mean what protobuf says; windows and totals add up."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.admission import Request
from dispatcher.request.decoupled import engine_count
from dispatcher.request.token_times import stream_end
from dispatcher.routing import request_parameters
from dispatcher.service.accounting import CLASS_WINDOWS, OTHER, SECONDS_MAX, LoadCounters, StreamEnd
from dispatcher.transport.core import kserve_wire
from tests.support.wire_fields import repeated_messages
from tests.unit.dispatcher.worlds import key
from trefoil.core.brains import Ticket
from trefoil.core.common import Revision
from trefoil.core.demand import JOB_CLASS, NO_STREAMS, LoadCell, LoadWindow
from trefoil.core.energy import ReceiptRate
from trefoil.core.errors import InvalidInput
from trefoil.core.latency import merge, quantile_ms
from trefoil.core.objective import NO_TOKEN_SLO, TokenSlo
from trefoil.core.outside.plausible import window_fault
from trefoil.runtime import codec

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)


@given(variant=names, id_=names, version=st.sampled_from(["", "4", "12"]), tensor=st.binary(max_size=500))
def test_the_suffix_overrides_the_version_and_adds_the_variant_and_leaves_the_rest(variant, id_, version, tensor):
    answer = pb.ModelInferResponse(model_name="digits", model_version=version, id=id_)
    answer.parameters["mine"].int64_param = 3
    answer.parameters["trefoil_variant"].string_param = "forged"
    answer.raw_output_contents.append(tensor)
    changed = pb.ModelInferResponse.FromString(answer.SerializeToString() + kserve_wire.answer_suffix(variant))
    answer.model_version = "1"
    answer.parameters["trefoil_variant"].string_param = variant
    assert changed == answer


@given(data=st.binary(max_size=300), id_=st.text(max_size=20), details=st.text(max_size=200))
def test_stream_messages_are_what_protobuf_would_write(data, id_, details):
    answer = pb.ModelInferResponse(model_name="digits", id=id_, raw_output_contents=[data])
    wrapped = kserve_wire.stream_answer(answer.SerializeToString() + kserve_wire.FINAL)
    told = pb.ModelStreamInferResponse.FromString(wrapped)
    assert told.infer_response.parameters[kserve_wire.IS_FINAL].bool_param
    del told.infer_response.parameters[kserve_wire.IS_FINAL]
    assert told == pb.ModelStreamInferResponse(infer_response=answer)
    refused = kserve_wire.stream_error(details, id_)
    error = pb.ModelStreamInferResponse.FromString(refused)
    assert error == pb.ModelStreamInferResponse(error_message=details, infer_response=pb.ModelInferResponse(id=id_))
    assert not [*repeated_messages(wrapped, told.DESCRIPTOR), *repeated_messages(refused, told.DESCRIPTOR)]


def test_the_empty_final_response_is_asked_for_whatever_the_client_said():
    request = pb.ModelInferRequest(model_name="digits", raw_input_contents=[b"1"])
    request.parameters[kserve_wire.WANTS_FINAL].bool_param = False
    asked = pb.ModelInferRequest.FromString(request.SerializeToString() + kserve_wire.ASK_FINAL)
    assert asked.parameters[kserve_wire.WANTS_FINAL].bool_param
    assert list(asked.raw_input_contents) == [b"1"]


def test_the_version_of_a_request_is_cleared():
    request = pb.ModelInferRequest(model_name="digits", model_version="1", id="x")
    assert pb.ModelInferRequest.FromString(request.SerializeToString() + kserve_wire.CLEAR_VERSION).model_version == ""


def _parameters(**values):
    request = pb.ModelInferRequest()
    for name, value in values.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}[type(value)]
        setattr(request.parameters[name], field, value)
    return request.parameters


def test_knobs_are_read_in_every_type_that_clients_can_send_and_taken_out():
    parameters = _parameters(trefoil_class="gold", trefoil_min_accuracy="0.95", trefoil_slo_ms=50, other=True)
    assert request_parameters.extract(parameters) == request_parameters.RequestParameters("gold", 0.95, 50.0)
    assert list(parameters) == ["other"]
    assert request_parameters.extract(parameters) is request_parameters.NO_PARAMETERS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trefoil_min_accuracy", -0.1), ("trefoil_min_accuracy", 1.1), ("trefoil_min_accuracy", "high"),
        ("trefoil_min_accuracy", True), ("trefoil_min_accuracy", float("nan")), ("trefoil_slo_ms", float("inf")),
        ("trefoil_slo_ms", 0), ("trefoil_class", 1), ("trefoil_class", "x" * 65), ("trefoil_class", "a\nb"),
        ("trefoil_clas", "gold"),
    ],
)  # fmt: skip
def test_bad_knobs_are_named(name, value):
    with pytest.raises(InvalidInput, match=name):
        request_parameters.extract(_parameters(**{name: value}))


@pytest.mark.parametrize("own", [JOB_CLASS, "(default)", "(job) "])
def test_a_client_cannot_leave_the_demand_by_a_class_of_trefoils_own(own):
    with pytest.raises(InvalidInput, match=r"trefoil_class = '\("):
        request_parameters.extract(_parameters(trefoil_class=own))


def test_a_knob_without_any_value_is_refused():
    request = pb.ModelInferRequest()
    request.parameters["trefoil_slo_ms"].SetInParent()
    with pytest.raises(InvalidInput, match="trefoil_slo_ms"):
        request_parameters.extract(request.parameters)


events = st.lists(
    st.tuples(
        st.sampled_from(["arrived", "answered", "failed", "refused", "take"]),
        st.sampled_from(["", "gold"]),
        st.floats(0.01, 500.0),
    ),
    max_size=60,
)


@given(events=events)
def test_windows_add_up_to_the_totals(events):
    book = LoadCounters("d", 0, 1000.2, classes_max=4)
    windows, now_s, counts = [], 1000.2, Counter()
    for kind, slo_class, value_ms in events:
        now_s += 0.05
        counts[kind] += 1
        if kind == "arrived":
            book.arrived("digits", slo_class, now_s)
        elif kind == "answered":
            book.sent("digits", "digits-l", key(0), slo_class, 2)
            book.answered("digits", "digits-l", key(0), slo_class, 3, value_ms, value_ms / 4, 100.0, now_s)
            counts["within"] += value_ms <= 100.0
        elif kind == "failed":
            book.failed("digits", "digits-l", key(0), slo_class, "INTERNAL", value_ms)
        elif kind == "refused":
            book.failed("digits", "", None, slo_class, "RESOURCE_EXHAUSTED", value_ms)
        else:
            windows.append(book.close_window(now_s, Revision(1, 2, 3)))
    windows.append(book.close_window(now_s + 0.1, Revision(1, 2, 3)))
    cells = [cell for window in windows for cell in window.cells]
    assert [window.seq for window in windows] == list(range(1, len(windows) + 1))
    assert sum(cell.arrived for cell in cells) == counts["arrived"] == sum(sum(c.arrived_per_s) for c in cells)
    assert sum(cell.answered for cell in cells) == counts["answered"]
    assert sum(cell.items for cell in cells) == 3 * counts["answered"]
    assert sum(cell.within_slo for cell in cells) == counts["within"]
    for part in ("latency", "queue", "service"):
        assert merge(getattr(cell, part) for cell in cells).total == counts["answered"]
    codes = sum((Counter(cell.failed_by_code) for cell in cells), Counter())
    assert codes == Counter({"INTERNAL": counts["failed"], "RESOURCE_EXHAUSTED": counts["refused"]})
    totals = book.totals.get("digits")
    assert (totals.answered if totals else 0) == counts["answered"]
    assert (totals.failed if totals else 0) == counts["failed"] + counts["refused"]


def test_tokens_are_counted_when_they_come_and_priced_once_however_their_request_ends():
    book, rate = LoadCounters("d", 0, 0.0, classes_max=4), ReceiptRate(key(0), "pydoc", "v", 0.0, 0.0, token_j=0.5)
    for _ in range(3):
        book.tokens("pydoc", "v", key(0), "", 1, "somebody")
    book.settle(lambda *_: rate)
    book.tokens("pydoc", "v", key(0), "", 1, "somebody")
    book.failed("pydoc", "v", key(0), "", "CANCELLED", 5.0, "somebody")
    book.settle(lambda *_: rate)
    (cell,) = book.close_window(0.5, Revision()).cells
    assert (cell.tokens_out, cell.receipt_j, cell.receipts, cell.answered) == (4, 2.0, 0, 0)
    assert rate.energy_j(items=1, tokens=4) == 2.0
    assert codec.decode(LoadCell, codec.encode(cell)).tokens_out == 4


TOKENS = TokenSlo(ttft_ms=100.0, ttft_quantile=0.9, tpot_ms=20.0, tpot_quantile=0.9)
times = st.one_of(st.none(), st.floats(0.02, 500.0))
streams = st.lists(st.tuples(times, times, st.integers(0, 9), st.sampled_from([TOKENS, NO_TOKEN_SLO]), st.booleans()))


@given(streams)
def test_streams_are_counted_once_in_the_cell_of_their_end_and_against_their_own_objectives(streams):
    book, windows, counts = LoadCounters("d", 0, 0.0, classes_max=4), [], Counter()
    for ttft_ms, tpot_ms, tokens_in, slo, closes in streams:
        end = StreamEnd(ttft_ms, tpot_ms if ttft_ms is not None else None, tokens_in)
        if ttft_ms is None:
            book.failed("pydoc", "v", key(0), "", "CANCELLED", 5.0)
        else:
            book.answered("pydoc", "v", key(0), "", 1, 600.0, 1.0, 0.0, 1.0)
        book.streamed("pydoc", "v", key(0), "", end, slo)
        asked = slo is TOKENS
        counts["in"] += tokens_in
        counts["ttft"] += ttft_ms is not None
        counts["tpot"] += end.tpot_ms is not None
        counts["asked"] += asked
        counts["in time"] += asked and ttft_ms is not None and ttft_ms <= 100.0
        counts["tpot asked"] += asked and end.tpot_ms is not None
        counts["tpot in time"] += asked and end.tpot_ms is not None and end.tpot_ms <= 20.0
        if closes:
            windows.append(book.close_window(1.0, Revision()))
    windows = [codec.decode(LoadWindow, codec.encode(one)) for one in (*windows, book.close_window(2.0, Revision()))]
    assert [window_fault(window) for window in windows] == [""] * len(windows)
    found = [cell.streams for window in windows for cell in window.cells]
    assert merge(one.ttft for one in found).total == counts["ttft"]
    assert merge(one.tpot for one in found).total == counts["tpot"]
    sums = {name: sum(getattr(one, name) for one in found) for name in ("ttft_asked", "ttft_within", "tpot_asked")}
    assert sums == {"ttft_asked": counts["asked"], "ttft_within": counts["in time"], "tpot_asked": counts["tpot asked"]}
    assert sum(one.tpot_within for one in found) == counts["tpot in time"]
    assert sum(one.tokens_in for one in found) == counts["in"]


def test_a_window_of_before_tokens_were_timed_is_read_as_one_without_streams():
    book = LoadCounters("d", 0, 0.0, classes_max=4)
    book.answered("digits", "v", key(0), "", 1, 40.0, 1.0, 0.0, 0.0)
    cell = book.close_window(0.5, Revision()).cells[0]
    assert b"streams" not in codec.encode(cell)
    assert codec.decode(LoadCell, codec.encode(cell)).streams == NO_STREAMS


def stream(*tokens_at_s, arrived_s=10.0, first=1):
    """A request whose tokens left at these times; `first` of them at once."""
    ticket = Ticket(1, "pydoc", "", "", 1, 9, arrived_s, None, 0.0, 0, "", False, False, None)
    request = Request("pydoc", ("pydoc",), None, ticket, (), request_parameters.NO_PARAMETERS, streams=True)
    request.tokens_out, request.tokens_first = len(tokens_at_s), first if tokens_at_s else 0
    if tokens_at_s:
        request.first_token_s, request.last_token_s = tokens_at_s[0], tokens_at_s[-1]
    return request


@pytest.mark.parametrize(
    ("request_", "until_s", "ttft_ms", "tpot_ms"),
    [
        (stream(), 12.0, None, None),
        (stream(10.5), 0.0, 500.0, None),
        (stream(10.5, 10.6, 10.9), 0.0, 500.0, 200.0),
        (stream(10.5, 10.5, 10.9, first=2), 0.0, 500.0, 400.0),
        (stream(10.5, 10.6, 10.9), 14.5, 500.0, 2000.0),
    ],
    ids=["no token", "one token", "three", "two at once, then one", "failed long after its last token"],
)
def test_ttft_is_from_arrival_and_tpot_the_mean_of_what_followed_the_first_answer(request_, until_s, ttft_ms, tpot_ms):
    end = stream_end(request_, until_s)
    assert end.ttft_ms == (ttft_ms and pytest.approx(ttft_ms))
    assert end.tpot_ms == (tpot_ms and pytest.approx(tpot_ms))


def engine_answer(raw, datatype="UINT32", name="num_output_tokens"):
    answer = pb.ModelInferResponse()
    answer.outputs.add(name="text_output", datatype="BYTES", shape=[1])
    answer.outputs.add(name=name, datatype=datatype, shape=[1])
    answer.raw_output_contents.extend([b"", raw])
    return answer


@pytest.mark.parametrize(
    ("answer", "count"),
    [
        (engine_answer((3).to_bytes(4, "little")), 3),
        (engine_answer((3).to_bytes(4, "little") + (4).to_bytes(4, "little")), 7),
        (engine_answer((5).to_bytes(4, "little", signed=True), "INT32"), 5),
        (engine_answer((0).to_bytes(4, "little")), 0),
        (engine_answer(b"\xff" * 4), None),
        (engine_answer(b"\xff" * 4, "INT32"), None),
        (engine_answer(b"\x01\x02\x03"), None),
        (engine_answer(b"\x01" * 4, "FP32"), None),
        (engine_answer(b"\x01" * 4, name="tokens"), None),
        (engine_answer(b"\xff" * 24, "UINT64"), None),
        (pb.ModelInferResponse(), None),
    ],
    ids=["one", "two choices", "signed", "none new", "absurd", "negative", "torn", "no number", "other", "long", "no"],
)
def test_an_engine_counts_its_tokens_unless_what_it_says_is_absurd(answer, count):
    assert engine_count(answer, "num_output_tokens") == count


def test_latency_is_split_into_queue_and_service():
    book = LoadCounters("d", 0, 0.0, classes_max=4)
    book.answered("digits", "v", key(0), "", 1, latency_ms=40.0, queue_ms=30.0, slo_ms=0.0, now_s=0.0)
    (cell,) = book.close_window(0.5, Revision()).cells
    assert quantile_ms(cell.queue, 0.5) == pytest.approx(30.0, rel=0.03)
    assert quantile_ms(cell.service, 0.5) == pytest.approx(10.0, rel=0.03)
    assert cell.within_slo == 1, "without an objective every answer is in time"
    assert book.totals["digits"].queue_ns + book.totals["digits"].service_ns == 40_000_000


@pytest.mark.parametrize("jump_s", [-1e6, 1e6, 1.7e9])
def test_a_wall_clock_that_jumps_loses_no_arrival_and_costs_no_memory(jump_s):
    book = LoadCounters("d", 0, 1e6, classes_max=4)
    book.arrived("digits", "", 1e6)
    book.arrived("digits", "", 1e6 + jump_s)
    (cell,) = book.close_window(1e6 + jump_s, Revision()).cells
    assert sum(cell.arrived_per_s) == cell.arrived == 2
    assert len(cell.arrived_per_s) <= SECONDS_MAX


def test_classes_beyond_the_bound_are_counted_together():
    book = LoadCounters("d", 0, 0.0, classes_max=2)
    assert [book.class_name(name) for name in ("", "a", "b", "c", "a", "d")] == ["", "a", "b", OTHER, "a", OTHER]


def test_a_class_that_nobody_asks_for_any_more_makes_room_for_another():
    book = LoadCounters("d", 0, 0.0, classes_max=2)
    for name in ("junk", "gold"):
        book.class_name(name)
    for window in range(CLASS_WINDOWS):
        assert book.class_name("silver") == OTHER, window
        assert book.class_name("gold") == "gold"
        book.close_window(window + 1.0, Revision())
    assert [book.class_name(name) for name in ("silver", "gold", "junk", "")] == ["silver", "gold", OTHER, ""]

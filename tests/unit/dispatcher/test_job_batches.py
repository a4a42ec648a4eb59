"""Batches of jobs: joined and cut without a byte lost; what a family cannot take is one item's error."""

import json

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.rest.codec_process import PROCESS_BYTES
from dispatcher.jobs.batching import Item, ItemReader, Split, join
from dispatcher.request.contracts import Contract
from trefoil.core.errors import InvalidInput


def contract(family: str, *inputs: tuple[str, str, int], optional: str = "") -> Contract:
    metadata, config = pb.ModelMetadataResponse(name=family), pb.ModelConfigResponse()
    config.config.max_batch_size = 8
    for name, datatype, size in inputs:
        metadata.inputs.add(name=name, datatype=datatype, shape=[-1, size])
        config.config.input.add(name=name, optional=name == optional)
    return Contract(metadata, config)


TAKEN = contract("digits", ("IMAGE", "UINT8", 2))
TEXTS = contract("words", ("TEXT", "BYTES", 1), ("HINT", "INT32", 1), optional="HINT")


def request(
    rows: int = 1, first: int = 0, name: str = "IMAGE", size: int = 2, datatype: str = "UINT8", **more
) -> bytes:
    message = pb.ModelInferRequest(**more)
    message.inputs.add(name=name, datatype=datatype, shape=[rows, size])
    message.raw_input_contents.append(bytes(range(first, first + rows * size)))
    return bytes(message.SerializeToString())


def read(*given: bytes, taken: Contract = TAKEN) -> list[Item]:
    reader = ItemReader(taken)
    return [reader.read(number, data) for number, data in enumerate(given)]


def text(*words: str) -> bytes:
    message = pb.ModelInferRequest()
    message.inputs.add(name="TEXT", datatype="BYTES", shape=[len(words), 1])
    parts = (word.encode() for word in words)
    message.raw_input_contents.append(b"".join(len(p).to_bytes(4, "little") + p for p in parts))
    return bytes(message.SerializeToString())


def test_items_are_joined_by_rows():
    items = read(request(1, 0), request(3, 2), request(1, 8))
    message = pb.ModelInferRequest.FromString(join(items))
    assert message.model_name == "digits"
    assert list(message.inputs[0].shape) == [5, 2]
    assert message.raw_input_contents[0] == bytes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert len({item.head.kind for item in items}) == 1
    assert not any(item.alone for item in items)


@pytest.mark.parametrize("part", ["texts", "inputs", "parameters", "id"])
def test_what_would_hold_up_the_event_loop_is_refused_unparsed(monkeypatch, part):
    message = pb.ModelInferRequest.FromString(request())
    for number in range(70_000):
        if part == "texts":
            message.inputs[0].contents.bytes_contents.append(b"")
        elif part == "inputs" and number < 5000:
            message.inputs.add()
        elif part == "parameters" and number < 10_000:
            message.parameters[str(number)].SetInParent()
    message.id = "x" * 70_000 if part == "id" else ""
    monkeypatch.setattr(ItemReader, "_parse", None)
    with pytest.raises(InvalidInput, match=r"item = '[0-9]+ bytes, [0-9]+ fields': is too large beside its raw"):
        read(message.SerializeToString())


def test_what_differs_is_not_of_one_kind():
    one = read(request())[0]
    with_parameter = pb.ModelInferRequest.FromString(request())
    with_parameter.parameters["temperature"].double_param = 0.9
    other = read(with_parameter.SerializeToString())[0]
    assert one.head.kind != other.head.kind
    assert read(request(id="x"))[0].head.kind == one.head.kind  # ids are of no batch


def test_an_answer_is_cut_with_its_receipt():
    items = read(request(1), request(2), request(1))
    answer = pb.ModelInferResponse(model_name="digits", model_version="1")
    answer.outputs.add(name="P", datatype="FP32", shape=[4, 3])
    answer.raw_output_contents.append(np.arange(12, dtype=np.float32).tobytes())
    answer.outputs.add(name="T", datatype="BYTES", shape=[4, 1])
    answer.raw_output_contents.append(b"".join(bytes([n, 0, 0, 0]) + b"x" * n for n in (1, 0, 3, 2)))
    answer.parameters["trefoil_variant"].string_param = "digits-l"
    answer.parameters["trefoil_energy_j_estimate"].double_param = 4.0
    answer.parameters["trefoil_carbon_mg_estimate"].double_param = 8.0
    split = Split.of(answer.SerializeToString(), items)
    assert (split.joules, split.grams) == (4.0, 0.008)
    cut = [
        pb.ModelInferResponse.FromString(split.answer(item, row)) for item, row in zip(items, (0, 1, 3), strict=True)
    ]
    assert [list(one.outputs[0].shape) for one in cut] == [[1, 3], [2, 3], [1, 3]]
    values = [np.frombuffer(one.raw_output_contents[0], np.float32).tolist() for one in cut]
    assert values == [[0, 1, 2], [3, 4, 5, 6, 7, 8], [9, 10, 11]]
    assert [one.raw_output_contents[1][4:] for one in cut] == [b"x", b"\x03\0\0\0xxx", b"xx"]
    assert [one.parameters["trefoil_energy_j_estimate"].double_param for one in cut] == [1.0, 2.0, 1.0]
    assert {one.parameters["trefoil_variant"].string_param for one in cut} == {"digits-l"}


def test_the_answer_to_one_item_stays_whole():
    items = read(request(2))
    answer = pb.ModelInferResponse(model_name="digits")
    answer.outputs.add(name="COUNT", datatype="INT32", shape=[1])  # not of its rows
    answer.raw_output_contents.append(b"abcd")
    assert pb.ModelInferResponse.FromString(Split.of(answer.SerializeToString(), items).answer(items[0], 0)) == answer


@pytest.mark.parametrize("contents", [[], [b"abc"]])
def test_an_answer_without_the_rows_of_its_batch_is_refused(contents):
    answer = pb.ModelInferResponse(raw_output_contents=contents)
    answer.outputs.add(name="P", datatype="FP32", shape=[3, 1])
    with pytest.raises(InvalidInput, match="outputs"):
        Split.of(answer.SerializeToString(), read(request(), request()))


@pytest.mark.parametrize("shape", [[2, 2**62], [2, 5], [2, *[2] * 64]], ids=str)
def test_texts_of_which_an_answer_has_fewer_than_its_shape_are_refused_at_once(shape):
    answer = pb.ModelInferResponse(raw_output_contents=[(b"\x01\0\0\0a") * 8])
    answer.outputs.add(name="TEXT", datatype="BYTES", shape=shape)
    with pytest.raises(InvalidInput, match=r"incomplete|does not have the rows"):
        Split.of(answer.SerializeToString(), read(request(), request()))


def test_items_in_json_are_those_of_the_rest_port():
    given = {"inputs": [{"name": "IMAGE", "datatype": "UINT8", "shape": [1, 2], "data": [0, 1]}]}
    items = read(json.dumps(given).encode(), request())
    assert items[0].head.kind == items[1].head.kind
    assert items[0].raws == items[1].raws
    with pytest.raises(InvalidInput, match="inputs"):
        read(b'{"inputs": 3}')


def test_typed_contents_go_alone():
    message = pb.ModelInferRequest()
    message.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 2]).contents.uint_contents.extend([5, 6])
    item = read(message.SerializeToString())[0]
    assert item.alone
    sent = pb.ModelInferRequest.FromString(join([item]))
    assert sent.model_name == "digits"
    assert list(sent.inputs[0].contents.uint_contents) == [5, 6]


def test_texts_and_optional_inputs():
    items = read(text("a"), text("bcd", ""), taken=TEXTS)
    message = pb.ModelInferRequest.FromString(join(items))
    assert list(message.inputs[0].shape) == [3, 1]
    assert message.raw_input_contents[0] == b"\1\0\0\0a\3\0\0\0bcd\0\0\0\0"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff\xff", r"item = '2 bytes': is not a request. Remedy: send a KServe v2 ModelInferRequest"),
        (b"", r"inputs = \[\]: digits takes other inputs. Remedy: give IMAGE"),
        (request(model_name="letters"), r"model_name = 'letters': is another family's. Remedy: leave it out"),
        (request(name="PICTURE"), r"inputs = \['PICTURE'\]: digits takes other inputs. Remedy: give IMAGE"),
        (request(size=3), r"inputs.IMAGE.shape = \[1, 3\]: is another shape. Remedy: send \[-1, 2\]"),
        (request(rows=0), r"inputs.IMAGE.shape = \[0, 2\]: is another shape"),
        (request(rows=9), r"inputs.shape = 9: has too many rows. Remedy: at most 8"),
        (request(datatype="FP32"), r"inputs.IMAGE.datatype = 'FP32': is another type. Remedy: send UINT8"),
        (request()[:-1] + b"\0\0", r"item|inputs"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_take(data, says):
    with pytest.raises(InvalidInput, match=says):
        read(data)


def test_contents_that_do_not_fit_their_shape():
    message = pb.ModelInferRequest.FromString(request(2))
    message.raw_input_contents[0] = b"abc"
    with pytest.raises(InvalidInput, match=r"inputs.IMAGE = '3 bytes': its shape \[2, 2\] takes 4 bytes"):
        read(message.SerializeToString())
    message.raw_input_contents.append(b"")
    with pytest.raises(InvalidInput, match="inputs = 2: inputs and raw contents differ"):
        read(message.SerializeToString())
    message = pb.ModelInferRequest.FromString(request())
    message.parameters["sequence_id"].int64_param = 3
    with pytest.raises(InvalidInput, match="sequence_id: items of jobs have no order"):
        read(message.SerializeToString())


def test_large_json_is_refused_with_a_remedy():
    small = {"inputs": [{"name": "IMAGE", "datatype": "UINT8", "shape": [1, 2], "data": [0, 1]}]}
    assert read(json.dumps(small).encode().ljust(PROCESS_BYTES - 1))[0].rows == 1
    with pytest.raises(InvalidInput, match=r"item = '65536 bytes': is too large for JSON. Remedy: .* in binary"):
        read(json.dumps(small).encode().ljust(PROCESS_BYTES))


@pytest.mark.parametrize("name", ["timeout", "trefoil_min_accuracy", "trefoil_class", "trefoil_slo_ms"])
def test_what_a_request_may_ask_for_and_an_item_not(name):
    message = pb.ModelInferRequest.FromString(request())
    message.parameters[name].int64_param = 1
    with pytest.raises(InvalidInput, match=f"{name}: is not for items of jobs. Remedy: leave it out"):
        read(message.SerializeToString())

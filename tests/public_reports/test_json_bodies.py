"""JSON of requests is read as Triton reads it (tests/integration/test_dispatcher_rest_real.py asks it)."""

import json
import math
import time

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.rest import codec, tensors
from dispatcher.fronts.rest.json_text import parse
from tests.public_reports.json_bodies import NO_NUMBER, READ, REFUSED
from trefoil.core.errors import InvalidInput


@pytest.mark.parametrize("report", READ, ids=str)
def test_what_triton_takes(report):
    assert parse(report.input) == report.expected


@pytest.mark.parametrize("report", NO_NUMBER, ids=str)
def test_no_number(report):
    assert math.isnan(parse(report.input)["a"])


@pytest.mark.parametrize("report", REFUSED, ids=str)
def test_what_triton_refuses(report):
    with pytest.raises(InvalidInput):
        parse(report.input)


def body(inputs="", outputs="", request=""):
    tensor = f'{{"name":"X","datatype":"FP32","shape":[2],"data":[1,-Inf]{inputs}}}'
    return f'{{"inputs":[{tensor}],"outputs":[{{"name":"Y"{outputs}}}]{request}}}'.encode()


@pytest.mark.parametrize("value", ["null", "[]", "0", '""', "true", "Inf"])
def test_parameters_of_a_tensor_that_are_no_object_are_none_and_those_of_a_request_are_refused(value):
    plain = body()
    for text in (body(inputs=f',"parameters":{value}'), body(outputs=f',"parameters":{value}')):
        assert codec.decode(text, len(text), "m", "") == codec.decode(plain, len(plain), "m", "")
    text = body(request=f',"parameters":{value}')
    with pytest.raises(InvalidInput, match="Unable to parse 'parameters'"):
        codec.decode(text, len(text), "m", "")


def test_no_classes_are_no_classification():
    wanted, plain = body(outputs=',"parameters":{"classification":0}'), body()
    assert codec.decode(wanted, len(wanted), "m", "") == codec.decode(plain, len(plain), "m", "")


@pytest.mark.parametrize("rows", [2**62, 2**63 - 1])
def test_a_shape_whose_elements_are_more_than_64_bits_count_is_refused(rows):
    """Either ends Triton's process where it gets it."""
    text = body().replace(b"[2]", f"[{rows},4]".encode())
    with pytest.raises(InvalidInput, match="'data' has 2 elements"):
        codec.decode(text, len(text), "m", "")


@pytest.mark.parametrize("data", ['"data":[1]', '"parameters":{"binary_data_size":0}'], ids=["json", "binary"])
@pytest.mark.parametrize("last", ["2", "0"])
def test_a_shape_of_thousands_of_sizes_is_refused_before_they_are_multiplied(data, last):
    shape = ",".join([str(2**63 - 1)] * 12_000 + [last])
    text = f'{{"inputs":[{{"name":"X","datatype":"FP32","shape":[{shape}],{data}}}]}}'.encode()
    began_s = time.process_time()
    with pytest.raises(InvalidInput, match=r"'shape' is longer than any tensor's.*at most 64 sizes"):
        codec.decode(text, len(text), "m", "")
    assert time.process_time() - began_s < 0.1
    most = ",".join([str(2**63 - 1)] * 64)
    text = f'{{"inputs":[{{"name":"X","datatype":"FP32","shape":[{most}],"data":[1]}}]}}'.encode()
    with pytest.raises(InvalidInput, match="'data' has 1 elements"):
        codec.decode(text, len(text), "m", "")


def test_a_whole_number_beyond_64_bits_is_a_double():
    text = body(request=',"parameters":{"a":18446744073709551615,"b":-9223372036854775809}')
    message = pb.ModelInferRequest.FromString(codec.decode(text, len(text), "m", "")[0])
    assert {name: each.double_param for name, each in message.parameters.items()} == {"a": 2.0**64, "b": -(2.0**63)}
    assert message.raw_input_contents[0] == np.array([1, -np.inf], np.float32).tobytes()


def test_an_image_of_640_by_640_in_lists_of_three():
    pixels = np.random.default_rng(1).integers(0, 256, (1, 640, 640, 3), np.uint8)
    tensor = {"name": "X", "datatype": "UINT8", "shape": list(pixels.shape), "data": pixels.tolist()}
    text = json.dumps({"inputs": [tensor]}).encode()
    assert codec.decode(text, len(text), "m", "")[0].endswith(pixels.tobytes())


def test_lists_beside_elements_cost_each_element_once_however_deep_they_are():
    def took_s(depth: int) -> float:
        data: list[object] = [1]
        for _ in range(depth):
            data = [data, *[1] * 20_000]
        began_s = time.process_time()
        assert len(tensors.to_bytes("X", "UINT8", [1 + 20_000 * depth], data)) == 1 + 20_000 * depth
        return time.process_time() - began_s

    assert took_s(80) < 40 * took_s(8)
    with pytest.raises(InvalidInput, match="nested deeper"):
        took_s(100)

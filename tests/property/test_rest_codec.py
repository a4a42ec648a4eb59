"""The REST codec against tritonclient.http's own: what that one writes is what we read, and the other way round."""

import contextlib
import json
import string
import time

import numpy as np
import pytest
import tritonclient.http as triton
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor

from dispatcher.fronts.rest import codec, generate_codec, json_text, tensors
from trefoil.core.errors import InvalidInput, TrefoilError

DTYPES = [np.bool_, np.uint8, np.uint16, np.uint32, np.uint64, np.int8, np.int16, np.int32, np.int64, np.float16,
          np.float32, np.float64, np.object_]  # fmt: skip
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(string.ascii_letters + "/_é", min_size=1, max_size=8)
SHAPES = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
PARAMETERS = st.dictionaries(
    NAMES.map("x{}".format),
    st.one_of(TEXT, st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False)),
    max_size=3,
)


@st.composite
def tensor(draw, jsonable=True):
    dtype = draw(st.sampled_from([d for d in DTYPES if not (jsonable and d is np.float16)]))
    shape = draw(SHAPES)
    if dtype is np.object_:
        made = np.empty(shape, np.object_)
        for index in np.ndindex(*shape):
            made[index] = draw(TEXT).encode()
        return made
    made = draw(arrays.arrays(dtype, shape))
    if jsonable and made.dtype.kind == "f":
        made[np.isnan(made)] = np.nan  # JSON has but one
    return made


def contents(array):
    if array.dtype == np.object_:
        packed = serialize_byte_tensor(array)
        return packed.item() if packed.size else b""
    return array.tobytes()


@st.composite
def requests(draw):
    inputs, values = [], []
    for name in draw(st.lists(NAMES, min_size=1, max_size=3, unique=True)):
        binary = draw(st.booleans())
        value = draw(tensor(jsonable=not binary))
        made = triton.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
        made.set_data_from_numpy(value, binary_data=binary)
        inputs.append(made)
        values.append(value)
    return inputs, values


@given(
    requests(), TEXT, st.integers(0, 2**64 - 1), st.booleans(), st.integers(0, 9), st.none() | st.integers(1, 10**9),
    PARAMETERS, st.dictionaries(NAMES, st.tuples(st.booleans(), st.integers(0, 9)), max_size=3),
)  # fmt: skip
def test_a_request_of_tritonclient_arrives_as_it_was_meant(
    made, request_id, sequence, start, priority, timeout, parameters, wanted
):
    inputs, values = made
    outputs = [triton.InferRequestedOutput(name, binary, count) for name, (binary, count) in wanted.items()]
    body, length = triton.InferenceServerClient.generate_request_body(
        inputs, outputs, request_id, sequence, start, not start, priority, timeout, parameters
    )
    data, form = codec.decode(body, len(body) if length is None else length, "digits", "1")
    message = pb.ModelInferRequest.FromString(data)
    assert (message.model_name, message.model_version, message.id) == ("digits", "1", request_id)
    assert len(message.raw_input_contents) == len(values)
    for tensor_, raw, sent, value in zip(message.inputs, message.raw_input_contents, inputs, values, strict=True):
        assert (tensor_.name, tensor_.datatype, list(tensor_.shape)) == (sent.name(), sent.datatype(), sent.shape())
        assert raw == contents(value)
    given_ = {name: codec.parameter_value(each) for name, each in message.parameters.items()}
    if sequence:
        assert given_.pop("sequence_id") % 2**64 == sequence
        assert (given_.pop("sequence_start"), given_.pop("sequence_end")) == (start, not start)
    if priority:
        assert given_.pop("priority") == priority
    if timeout:
        assert given_.pop("timeout") == timeout
    assert given_ == parameters
    assert {name: type(value) for name, value in given_.items()} == {n: type(v) for n, v in parameters.items()}
    assert {each.name: each.parameters["classification"].int64_param for each in message.outputs} == {
        name: count for name, (_, count) in wanted.items()
    }
    assert {name: form.binary(name) for name in wanted} == {name: binary for name, (binary, _) in wanted.items()}
    assert form.binary("another") == (not wanted)


@given(
    st.dictionaries(NAMES, st.tuples(tensor(), st.booleans()), min_size=1, max_size=3), TEXT, PARAMETERS,
    st.booleans(),
)  # fmt: skip
@settings(max_examples=50)
def test_an_answer_reaches_tritonclient_as_it_was_given(outputs, request_id, parameters, others):
    message = pb.ModelInferResponse(model_name="digits", model_version="1", id=request_id)
    for name, value in parameters.items():
        kind = {str: "string_param", bool: "bool_param", int: "int64_param", float: "double_param"}[type(value)]
        setattr(message.parameters[name], kind, value)
    for name, (value, _) in outputs.items():
        message.outputs.add(name=name, datatype=np_to_triton_dtype(value.dtype), shape=value.shape)
        message.raw_output_contents.append(contents(value))
    named = {name: binary for name, (_, binary) in outputs.items() if binary is not others}
    body, length = codec.encode(message.SerializeToString(), codec.OutputForm(named, others))
    result = triton.InferenceServerClient.parse_response_body(body, header_length=length)
    answer = result.get_response()
    assert (answer["model_name"], answer["model_version"]) == ("digits", "1")
    assert answer.get("id", "") == request_id
    assert answer.get("parameters", {}) == parameters
    for name, (value, binary) in outputs.items():
        got = result.as_numpy(name)
        assert got.shape == value.shape
        assert ("data" in result.get_output(name)) == (not binary)
        if value.dtype == np.object_:
            decoded = [each if isinstance(each, bytes) else each.encode() for each in got.ravel().tolist()]
            assert decoded == value.ravel().tolist()
        else:
            np.testing.assert_array_equal(got, value)


@given(tensor())
def test_json_data_has_the_bytes_that_binary_data_has_and_back(value):
    datatype = np_to_triton_dtype(value.dtype)
    made = triton.InferInput("X", list(value.shape), datatype)
    made.set_data_from_numpy(value, binary_data=False)
    given_ = json.loads(json.dumps(made._get_tensor()["data"]))
    raw = tensors.to_bytes("X", datatype, value.shape, given_)
    assert raw == contents(value)
    back = tensors.from_bytes("X", datatype, value.shape, raw)
    assert tensors.to_bytes("X", datatype, value.shape, back) == raw
    if datatype == "BYTES" and raw:
        assert [each.encode() for each in back] == deserialize_bytes_tensor(raw).tolist()


NESTED = st.recursive(st.integers(0, 9), lambda deeper: st.lists(deeper, max_size=3), max_leaves=12)


@given(st.lists(NESTED, max_size=4))
def test_nested_lists_are_read_in_their_order_whatever_their_nesting(data):
    flat = []

    def walk(each):
        for one in each:
            walk(one) if isinstance(one, list) else flat.append(one)

    walk(data)
    assert tensors.to_bytes("X", "UINT8", [len(flat)], data) == bytes(flat)


KEYS = st.sampled_from(
    ["id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "binary_data_size", "sequence_id",
     "shared_memory_region", "classification", "binary_data", "timeout", "priority", "triton_x", "x"]
)  # fmt: skip
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda deeper: st.lists(deeper, max_size=3) | st.dictionaries(KEYS, deeper, max_size=4),
    max_leaves=12,
)
INPUT = st.fixed_dictionaries(
    {"name": st.text(max_size=4) | JSON, "shape": st.lists(st.integers(-1, 3) | JSON, max_size=2) | JSON},
    optional={
        "datatype": st.sampled_from([*tensors.DATATYPES, "FP8"]) | JSON,
        "data": JSON,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 9) | JSON}) | JSON,
    },
)
REQUEST = st.fixed_dictionaries(
    {"inputs": st.lists(INPUT, max_size=3) | JSON},
    optional={"id": st.text(max_size=3) | JSON, "parameters": JSON, "outputs": st.lists(JSON, max_size=2)},
)


@settings(max_examples=400)
@given(REQUEST.map(json.dumps) | JSON.map(json.dumps) | st.text(max_size=30), st.binary(max_size=9), st.integers(-2, 2))
def test_any_body_is_a_message_or_a_refusal_with_a_remedy(text, rest, shift):
    head = text.encode("utf-8", "surrogatepass")
    refused, data = "", b""
    try:
        data, _ = codec.decode(head + rest, max(0, len(head) + shift), "m", "")
    except InvalidInput as error:
        refused = str(error)
    assert bool(data) == ("Remedy" not in refused)
    message = pb.ModelInferRequest.FromString(data)
    given_ = [each for each in message.inputs if "shared_memory_region" not in each.parameters]
    assert len(message.raw_input_contents) == len(given_)


@pytest.mark.parametrize(
    "text", [r"\ud800", r"\udc00", r"\udc00\ud800", r"\ud83d\u0041", r"\\\uD800", r"\ud83d\ud83d\ude00"]
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(text):
    """Half a letter has no bytes: what repeats it, an error or a list of batches, could not be sent."""
    for form in ('{"a": "%s"}', '{"%s": 1}', '{"a": [{"b": "x%s"}]}'):
        with pytest.raises(InvalidInput, match=r"not Unicode, '\\u[0-9a-f]{4}' is half.*Remedy: send both halves"):
            json_text.parse((form % text).encode())


def test_whole_surrogate_pairs_and_escaped_backslashes_are_read():
    assert json_text.parse(rb'{"a": "\ud83d\ude00\\ud800"}') == {"a": "\U0001f600\\ud800"}


def test_long_numbers_are_searched_for_in_linear_time():
    times_s = []
    for run in (299, 9):
        body = b'{"a":"%b"}' % ((b"1" * run + b",") * (200_000 // (run + 1)))
        spent_s = []
        for _ in range(5):
            began_s = time.thread_time()
            json_text.parse(body)
            spent_s.append(time.thread_time() - began_s)
        times_s.append(min(spent_s))
    assert times_s[0] < 5 * times_s[1]


def test_outputs_are_bounded_in_number_as_inputs_are():
    for name in ("inputs", "outputs"):
        body = json.dumps({"inputs": [], name: [{"name": str(n)} for n in range(5000)]}).encode()
        with pytest.raises(InvalidInput, match=f"{name} = 5000: has more than 4096"):
            codec.decode(body, len(body), "m", "")


@pytest.mark.parametrize("data", ["[" * 99 + "1" + "]" * 99, "[1]"])
def test_deep_nesting_is_read_up_to_tritons_limit(data):
    assert tensors.to_bytes("X", "INT32", [1], json.loads(data)) == b"\x01\0\0\0"


@pytest.mark.parametrize("depth", [101, 90_000])
def test_deeper_nesting_is_refused(depth):
    body = b'{"inputs":[{"name":"X","shape":[1],"datatype":"INT8","data":' + b"[" * depth + b"1" + b"]" * depth + b"}]}"
    with pytest.raises(InvalidInput, match=r"nested deeper than 100|recursion"):
        codec.decode(body, len(body), "m", "")


def test_an_answer_of_any_number_of_sizes_is_refused_in_a_short_text():
    with pytest.raises(TrefoilError, match="has 1 elements and the shape") as caught:
        tensors.from_bytes("y", "UINT8", [2**63 - 1] * 40_000, b"1")
    assert len(str(caught.value)) < 2000


@settings(max_examples=200)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*tensors.DATATYPES, "FP8", "", "fp32"]), st.lists(st.integers(-1, 2**40), max_size=2)
        ),
        max_size=2,
    ),
    st.lists(st.binary(max_size=12), max_size=3),
)
def test_any_answer_of_a_model_is_written_or_refused_with_a_reason(outputs, contents):
    message = pb.ModelInferResponse(model_name="m", model_version="1", raw_output_contents=contents)
    for datatype, shape in outputs:
        message.outputs.add(name="o", datatype=datatype, shape=shape)
    for write in (lambda data: codec.encode(data, codec.OutputForm())[0], generate_codec.write):
        with contextlib.suppress(TrefoilError):
            json.loads(write(message.SerializeToString()).decode("utf-8", "surrogateescape"))

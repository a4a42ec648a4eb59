"""Bodies of OpenAI's API: what is read, what is refused, what an engine is asked."""

import base64
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest
from google.protobuf import text_format
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.openai import bodies, vectors
from dispatcher.fronts.openai.embeddings import Embeddings
from dispatcher.fronts.openai.engines import check_tools, text_inputs, whole_calls
from dispatcher.fronts.rest.generate_codec import PARAMETERS, encode
from dispatcher.request.admission import Caller
from dispatcher.request.contracts import Contract, published
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.runtime.given.llm_backends import complete_vllm

PYDOC = """
name: "pydoc" max_batch_size: 8 model_transaction_policy { decoupled: true }
input [ { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "MAX_TOKENS" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "TOKEN" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
TRT = """
name: "trt" max_batch_size: 8 model_transaction_policy { decoupled: true }
parameters { key: "default_max_tokens" value { string_value: "512" } }
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "max_tokens" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "stop_words" data_type: TYPE_STRING dims: [ -1 ] }, { name: "temperature" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "stream" data_type: TYPE_BOOL dims: [ 1 ] }, { name: "seed" data_type: TYPE_UINT64 dims: [ 1 ] },
  { name: "return_num_output_tokens" data_type: TYPE_BOOL dims: [ 1 ] } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ -1 ] } ]
"""
EMBEDDER = """
name: "embedder" max_batch_size: 8
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "embedding" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
TEXT = {"model": "m", "prompt": "hello"}


def contract(text: str) -> Contract:
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    if not config.input:
        complete_vllm(config)
    metadata = pb.ModelMetadataResponse(name=config.name)
    for of, tensors in ((metadata.inputs, config.input), (metadata.outputs, config.output)):
        for tensor in tensors:
            kind = model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_").replace("STRING", "BYTES")
            of.add(name=tensor.name, datatype=kind, shape=[-1] * bool(config.max_batch_size) + list(tensor.dims))
    return published(config.name, metadata, config)


VLLM = contract('name: "chat"')
ADOPTED = contract('name: "chat" backend: "openai"')
FAMILIES = (VLLM, contract(PYDOC), contract(TRT))


def read(body: dict[str, Any], **headers: str) -> Any:
    path = bodies.CHAT if "messages" in body else bodies.EMBEDDINGS if "input" in body else bodies.COMPLETIONS
    return bodies.read(body, {name.replace("_", "-"): value for name, value in headers.items()}, path)


def test_what_is_given_is_read_and_what_is_null_counts_as_left_out():
    asked = read({**CHAT, "max_tokens": 7, "stop": "x", "temperature": 0, "n": None, "tools": None, "user": "me"})
    assert (asked.max_tokens, asked.stops, asked.sampling) == (7, ("x",), {"temperature": 0})
    assert read(CHAT).max_tokens is None
    assert read(TEXT).max_tokens == 16, "OpenAI's own default of completions"
    assert read({**TEXT, "prompt": ["one"]}).prompt == "one"
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    developer = {"role": "developer", "content": parts, "name": "x", "tool_calls": None}
    assert read({**CHAT, "messages": [developer]}).messages == ({"role": "system", "content": "ab", "name": "x"},)
    assert read({**CHAT, "stream": True, "stream_options": {"include_usage": True}}).include_usage


def test_headers_are_request_parameters_which_the_body_overrides():
    headers = {"trefoil_min_accuracy": "0.5", "trefoil_receipt": "true", "trefoil_priority": "1", "accept": "x"}
    asked = read({**CHAT, "trefoil_receipt": False, "timeout": 5}, **headers)
    assert asked.parameters == {
        "trefoil_min_accuracy": "0.5", "trefoil_receipt": False, "priority": 1, "timeout": 5,
    }  # fmt: skip


@pytest.mark.parametrize("value", ["\xb2", "\u0661", "1" * 5000, "-1", "1.5", ""])
@pytest.mark.parametrize("name", ["priority", "timeout"])
def test_a_header_that_is_no_number_is_refused_by_name(name, value):
    asked = read(TEXT, **{f"trefoil_{name}": value})
    with pytest.raises(InvalidInput, match=name):
        encode({"text_input": "x", PARAMETERS: dict(asked.parameters)}, VLLM.metadata, "m")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": ""}, "model = '': is not text"),
        ({"model": None}, "model = 'missing'"),
        ({"messages": None}, r"messages = \[\]: has no message"),
        ({"messages": [7]}, r"messages\[0\] = 7: is not an object"),
        ({"messages": [{"content": "x"}]}, r"messages\[0\].role = 'missing'"),
        ({"messages": [{"role": []}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user"}]}, r"messages\[0\].content = 'missing'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\].content"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}, r"messages\[0\].tool_calls"),
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": True}, "max_tokens = True"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens is given too"),
        ({"temperature": 2.5}, r"temperature = 2.5.*0\.\.2"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"top_p": 0}, "top_p = 0"),
        ({"seed": 2**63}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stream": "yes"}, "stream = 'yes': is not a boolean"),
        ({"stream_options": {"include_usage": True}}, "needs stream = true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options"),
        ({"n": 2}, "n = 2: no family here has that. Remedy: leave it out, or send 1"),
        ({"n": True}, "n = True"),
        ({"logprobs": True}, "logprobs = True: no family here has that"),
        ({"temperature": -1}, r"temperature = -1.*0\.\.2"),
        ({"logit_bias": {"1": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_token": 5}, "did you mean max_tokens"),
        ({"messages": CHAT["messages"] * 1025}, "messages = 1025: are too many. Remedy: send at most 1024"),
        ({f"trefoil_{n}": 1 for n in range(300)}, "a body has 302 keys. Remedy: send at most 256"),
        ({"k" * 10_000: 1}, "^k{200}: is not a parameter"),
        ({"trefoil_x": {}}, "trefoil_x = {}: has invalid type. Remedy: send a number"),
        ({"trefoil_x": [[[]]]}, r"trefoil_x = \[\[\[\]\]\]: has invalid type"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(change, words):
    with pytest.raises(InvalidInput, match=words):
        read(CHAT | change)


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}


def test_tools_are_read_for_engines_that_have_them():
    turns = [
        *CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]  # fmt: skip
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("none", "auto", "required", named):
        asked = read({**CHAT, "messages": turns, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False})
        assert asked.tools == {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
        sampling = json.loads(text_inputs(ADOPTED, asked, "")["sampling_parameters"])
        assert sampling == {"messages": turns, **asked.tools}
    assert read({**CHAT, "tools": [], "tool_choice": "none", "parallel_tool_calls": True}).tools == {}
    for change, field in (({"tools": [TOOL]}, "tools"), ({"messages": turns}, r"messages\[1\].tool_calls")):
        for family in FAMILIES:
            with pytest.raises(InvalidInput, match=f"^{field}: m has no tools. Remedy: ask a family of an adopted"):
                check_tools(family, read(CHAT | change))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tools": {}}, "tools"), ({"tools": [TOOL] * 129}, "tools"), ({"tools": [7]}, r"tools\[0\]"),
        ({"tools": [TOOL, {"type": "custom", "custom": {"name": "x"}}]}, r"tools\[1\]"),
        ({"tools": [{**TOOL, "function": {"name": "two words"}}]}, r"tools\[0\]"),
        ({"tools": [{**TOOL, "function": {"name": "x", "parameters": "all"}}]}, r"tools\[0\]"),
        ({"tool_choice": "required"}, "tool_choice"), ({"tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "y"}}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": []}]}, r"messages\[0\].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "id": 5}]}]}, r"messages\[0\].tool_calls"),
        ({"messages": [{"role": "tool", "tool_calls": [{**CALL, "function": None}]}]}, r"messages\[0\].tool_calls"),
        ({"functions": [TOOL]}, "functions"),
    ],
)  # fmt: skip
def test_tools_that_are_none_are_named(change, field):
    with pytest.raises(InvalidInput, match=f"^{field} = .* Remedy: "):
        read(CHAT | change)


def test_values_within_tools_and_calls_are_bounded():
    """Each is an object that the worker unpickles on its loop, whatever its bytes."""
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(40)}}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": schema}} for n in range(bodies.TOOLS_MAX)]
    assert len(read({**CHAT, "tools": tools}).tools["tools"]) == bodies.TOOLS_MAX
    many = [[]] * bodies.VALUES_MAX
    with pytest.raises(InvalidInput, match=r"^tools: tools and calls have \d+ values. Remedy: send at most 16384"):
        read({**CHAT, "tools": [{**TOOL, "more": many}]})
    calls = [{**CALL, "more": {str(n): each for n, each in enumerate(many)}}]
    with pytest.raises(InvalidInput, match=r"^messages\[0\].tool_calls: tools and calls have"):
        read({**CHAT, "messages": [{"role": "assistant", "tool_calls": calls}]})


def test_parts_of_calls_become_calls():
    parts = [
        {"index": 0, "id": "a", "type": "function", "function": {"name": "one", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"x": '}}, {"index": 1, "id": "b", "function": {"name": "two"}},
        {"index": 0, "id": None, "function": {"name": None, "arguments": "1}"}}, {"index": 1, "function": None},
    ]  # fmt: skip
    assert whole_calls(parts) == [
        {"id": "a", "type": "function", "function": {"name": "one", "arguments": '{"x": 1}'}},
        {"id": "b", "type": "function", "function": {"name": "two", "arguments": ""}},
    ]


TEXTS = {"model": "m", "input": ["a", "b"]}


def test_texts_to_embed_are_read():
    asked = read({**TEXTS, "encoding_format": "base64", "dimensions": 8, "user": "me", "trefoil_receipt": True})
    assert asked == bodies.AskedVectors("m", ("a", "b"), True, 8, {"trefoil_receipt": True})
    assert read({"model": "m", "input": "a"}) == bodies.AskedVectors("m", ("a",), False, None, {})
    assert len(read({"model": "m", "input": ["a"] * 2048}).texts) == 2048


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": []}, r"input = \[\]: is not text"),
        ({"input": None}, "input = 'missing': is not text"),
        ({"input": ""}, "none of them empty"),
        ({"input": ["a", ""]}, "none of them empty"),
        ({"input": [1, 2, 3]}, "token ids are not taken"),
        ({"input": [[1, 2], [3]]}, "token ids are not taken"),
        ({"input": {"text": "a"}}, "is not text"),
        ({"input": ["a"] * 2049}, "input = 2049: are too many texts. Remedy: send at most 2048"),
        ({"encoding_format": "int8"}, "encoding_format = 'int8': is not a known encoding"),
        ({"encoding_format": ["float"]}, "encoding_format"),
        ({"dimensions": 0}, "dimensions = 0"),
        ({"dimensions": True}, "dimensions = True"),
        ({"stream": True}, "stream: is not a parameter of this API here"),
        ({"model": 5}, "model = 5: is not text"),
    ],
)  # fmt: skip
def test_texts_that_cannot_be_embedded_are_named(change, words):
    with pytest.raises(InvalidInput, match=words):
        read(TEXTS | change)


def test_vectors_are_cut_to_length_one_and_written_either_way():
    raw = np.array([[3, 4, 9], [0, 0, 1]], np.float32)
    short = vectors.cut(raw, 2)
    assert short.tolist() == pytest.approx(np.array([[0.6, 0.8], [0, 0]])), "a vector without length stays"
    numbers = json.loads(vectors.written(raw.tobytes(), 3, False))
    assert numbers[1] == {"object": "embedding", "index": 1, "embedding": [0.0, 0.0, 1.0]}
    coded = json.loads(vectors.written(raw.tobytes(), 3, True))
    assert np.frombuffer(base64.b64decode(coded[0]["embedding"]), "<f4").tolist() == [3, 4, 9]
    with pytest.raises(TrefoilError, match="not finite"):
        vectors.written(np.array([np.inf], np.float32).tobytes(), 1, False)


@pytest.mark.parametrize("form", bodies.ENCODINGS)
@pytest.mark.parametrize(("size", "beside"), [(8, False), (2**16, True)])
async def test_large_vectors_are_written_in_a_process_in_either_form(form, size, beside):
    """Megabytes of base64 take the loop as long as numbers do."""
    answer = pb.ModelInferResponse()
    answer.outputs.add(name="embedding", datatype="FP32", shape=[1, size])
    answer.raw_output_contents.append(bytes(4 * size))
    inference, process = AsyncMock(), AsyncMock()
    inference.answer.return_value = SimpleNamespace(data=answer.SerializeToString())
    process.call.side_effect = lambda _line, function, *given: function(*given)
    asked = read({**TEXTS, "input": "a", "encoding_format": form})
    body, _ = await Embeddings(inference, lambda _: process).answer(contract(EMBEDDER), asked, Caller())
    assert len(json.loads(body)["data"][0]["embedding"]) == (size if form == "float" else -(-size * 4 // 3) * 4)
    assert process.call.await_count == beside


def test_a_prompt_is_one_text():
    for prompt in (None, 7, [], ["a", "b"], [1, 2], [[1]]):
        with pytest.raises(InvalidInput, match="prompt"):
            read({"model": "m", "prompt": prompt})


def test_vllm_gets_all_sampling_parameters_as_json_and_the_flags_that_its_contract_has():
    asked = read({**CHAT, "max_tokens": 9, "top_k": 5, "stop": ["x"], "ignore_eos": True})
    found = text_inputs(VLLM, asked, "hello")
    assert json.loads(found.pop("sampling_parameters")) == {
        "max_tokens": 9, "top_k": 5, "ignore_eos": True, "stop": ["x"], "include_stop_str_in_output": True,
    }  # fmt: skip
    assert found == {
        "text_input": "hello", "stream": True, "exclude_input_in_output": True, "return_finish_reason": True,
        "return_num_input_tokens": True, "return_num_output_tokens": True,
    }  # fmt: skip


def test_tensorrt_llm_gets_a_tensor_for_each_parameter_that_it_has():
    asked = read({**CHAT, "temperature": 0.5, "seed": 3, "stop": ["x", "y"], "presence_penalty": 0})
    found = text_inputs(contract(TRT), asked, "hello")
    assert found == {
        "text_input": "hello", "max_tokens": 512, "temperature": 0.5, "seed": 3, "stop_words": ["x", "y"],
        "stream": True, "return_num_output_tokens": True,
    }  # fmt: skip
    message = pb.ModelInferRequest.FromString(encode(found, contract(TRT).metadata, "trt"))
    assert {tensor.name: list(tensor.shape) for tensor in message.inputs}["stop_words"] == [1, 2]
    with pytest.raises(InvalidInput, match=r"top_p = 0\.5: m has no such parameter"):
        text_inputs(contract(TRT), read({**CHAT, "top_p": 0.5}), "hello")
    with pytest.raises(TrefoilError, match="default_max_tokens = 'many'"):
        text_inputs(contract(TRT.replace("512", "many")), read(CHAT), "hello")


def test_a_greedy_family_takes_what_means_greedy_and_refuses_the_rest():
    for fine in ({"temperature": 0}, {"top_p": 1}, {"top_k": 1}, {"seed": 5}, {"frequency_penalty": 0.0}, {"min_p": 0}):
        assert text_inputs(contract(PYDOC), read(CHAT | fine), "def") == {"PROMPT": "def"}
    for wrong in ({"temperature": 0.7}, {"top_p": 0.9}, {"repetition_penalty": 1.1}, {"ignore_eos": True}):
        with pytest.raises(InvalidInput, match=f"{next(iter(wrong))} = .*: m decodes greedily. Remedy: leave it out"):
            text_inputs(contract(PYDOC), read(CHAT | wrong), "def")
    assert text_inputs(contract(PYDOC), read(CHAT | {"max_tokens": 5}), "def")["MAX_TOKENS"] == 5


OTHERS = ("model", "messages", "prompt", "stream", "stop", "stream_options", "ignore_eos", "user", "trefoil_receipt")
KEYS = sorted({*bodies.NUMBERS, *bodies.LIMITS, *bodies.UNUSED, *OTHERS, "priority", "timeout", "trefoil_x"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "user", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def made_of(body: dict[str, Any], chat: bool, family: Contract) -> Any:
    """Request for a family; the error if the body is refused."""
    try:
        asked = bodies.read(body, {}, bodies.CHAT if chat else bodies.COMPLETIONS)
        inputs = text_inputs(family, asked, asked.prompt)
        parameters = {PARAMETERS: dict(asked.parameters)}
        return pb.ModelInferRequest.FromString(encode(inputs | parameters, family.metadata, "m"))
    except InvalidInput as error:
        return error


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=4), st.booleans())
def test_wrong_types_anywhere_are_refused_or_reach_an_engine(change, chat):
    """Whatever a body holds: an error that names a field, or a request of the family's tensors."""
    for family in FAMILIES:
        made = made_of((CHAT if chat else TEXT) | change, chat, family)
        if isinstance(made, InvalidInput):
            assert made.field or "Unicode" in str(made)
        else:
            assert {tensor.name for tensor in made.inputs} <= {tensor.name for tensor in family.metadata.inputs}

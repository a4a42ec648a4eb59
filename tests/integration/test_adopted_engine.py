"""An engine that already runs and speaks OpenAI's API, behind a dispatcher: OpenAI's package, gRPC, its faults."""

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support import openai_engine
from tests.support.dispatching import DispatcherSystem, dispatching, until
from tests.support.engine_family import outputs, request
from tests.support.generation import answers
from tests.support.openai_engine import MODEL, Engine
from tests.unit.dispatcher.worlds import key, node, status
from trefoil import engine_api
from trefoil.core.fleet import Hosted
from trefoil.core.plan import Route, RouteTarget
from trefoil.runtime.given.llm_backends import embeds

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
CHAT = "chat"
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which way is the sea"}]


@dataclasses.dataclass
class Adopted:
    """A dispatcher with one engine behind it, or several."""

    system: DispatcherSystem
    client: AsyncOpenAI

    async def stream(self, prompt: str, **more) -> tuple[list[str], list]:
        """Texts and events of a streamed completion, up to an error that it ends with."""
        more = {"max_tokens": 6, **more}
        events = [e async for e in await self.client.completions.create(model=CHAT, prompt=prompt, stream=True, **more)]
        return [e.choices[0].text for e in events if e.choices and e.choices[0].text], events


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with openai_engine.serving() as made:
        yield made


async def publish(system: DispatcherSystem, *addresses: str, credits: int = 8, task: str = "") -> None:
    hosted = Hosted(CHAT, "tiny", 1, 0, 1, 1, credits)
    slices = [
        dataclasses.replace(status(n), hosted=(hosted,), grpc_target=f"{address}{task}#{MODEL}")
        for n, address in enumerate(addresses)
    ]
    targets = [RouteTarget(key(n), "tiny", 0, 1 / len(slices), credits, False, "", 0.6, 1) for n in range(len(slices))]
    await system.publish(node(slices), [Route(CHAT, "weighted", "fifo", tuple(targets), 5000, 0, {})])
    await until(lambda: system.running.contracts.known(CHAT))


@pytest.fixture
async def adopted(state, tmp_path, engine) -> AsyncIterator[Adopted]:
    async with dispatching(state, tmp_path, rest_address="127.0.0.1:0") as running:
        system = DispatcherSystem(running, state, [])
        await publish(system, engine.address)
        base = f"http://{running.rest_address}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60.0) as client:
            yield Adopted(system, client)


def load(adopted: Adopted):
    return adopted.system.local.routing.in_flight()


@pytest.mark.gate
async def test_completions_and_chats_are_the_engines_own_with_its_usage(adopted, engine):
    assert [one.id async for one in adopted.client.models.list()] == [CHAT]
    answer = await adopted.client.completions.create(
        model=CHAT, prompt="hello", max_tokens=3, temperature=0, extra_body={"trefoil_receipt": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("w0 w1 w2 ", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert answer.system_fingerprint == "tiny"
    assert answer.trefoil["trefoil_tokens_out"] == 3
    assert engine.bodies[-1] | {"stream_options": 0} == {
        "model": MODEL, "prompt": "hello", "max_tokens": 3, "temperature": 0, "stream": True, "stream_options": 0
    }  # fmt: skip
    chat = await adopted.client.chat.completions.create(model=CHAT, messages=HELLO)
    assert chat.choices[0].message.content == "w0 w1 w2 w3 w4 w5 w6 w7 "
    assert engine.bodies[-1]["messages"] == HELLO, "the engine has the template"
    assert "max_tokens" not in engine.bodies[-1]
    plain = await adopted.client.completions.create(model=CHAT, prompt="!plain", max_tokens=4)
    assert (plain.usage.completion_tokens, "completion_tokens" in plain.usage.trefoil_estimated) == (4, True)


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


@pytest.mark.parametrize("prompt", ["!tools", "!repeat"])
async def test_tools_are_passed_on_and_their_calls_come_back_whole_or_as_a_stream(adopted, engine, prompt):
    tools = {"tools": [tool("weather"), tool("sea")], "tool_choice": "required", "parallel_tool_calls": True}
    asked = [{"role": "user", "content": prompt}]
    answer = await adopted.client.chat.completions.create(model=CHAT, messages=asked, **tools)
    choice = answer.choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    calls = [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("call-0", "weather", '{"of": "weather"}'), ("call-1", "sea", '{"of": "sea"}')]
    assert {name: engine.bodies[-1][name] for name in tools} == tools
    async with adopted.client.chat.completions.stream(model=CHAT, messages=asked, **tools) as stream:
        streamed = (await stream.get_final_completion()).choices[0]
    assert [(call.id, call.function.name, call.function.arguments) for call in streamed.message.tool_calls] == calls
    assert streamed.finish_reason == "tool_calls"
    turn = choice.message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call[0], "content": "rain"} for call in calls]
    again = await adopted.client.chat.completions.create(model=CHAT, messages=[*asked, turn, *results], **tools)
    assert again.choices[0].message.content == "w0 w1 w2 w3 w4 w5 w6 w7 "
    sent = engine.bodies[-1]["messages"]
    assert [each["id"] for each in sent[1]["tool_calls"]] == [each["tool_call_id"] for each in sent[2:]]
    with pytest.raises(openai.InternalServerError, match="an engine event is not a completion"):
        await adopted.client.chat.completions.create(
            model=CHAT, messages=[{"role": "user", "content": "!mad"}], **tools
        )
    await until(lambda: not load(adopted) and engine.running == 0)


FAULTS = {
    "!429": (openai.RateLimitError, "the engine is full"),
    "!503": (openai.InternalServerError, "answers 503: loading the model"),
    "!404": (openai.InternalServerError, "The model does not exist. Remedy: correct address or model"),
    "!html": (openai.InternalServerError, "answers text/html, no stream of events: <html>It works!</html>. Remedy:"),
    "!half": (openai.InternalServerError, "ended within an event"),
    "!broken": (openai.InternalServerError, "is not JSON: {choices}"),
    "!error": (openai.InternalServerError, "aborted the answer: the engine core died"),
    "!cut": (openai.InternalServerError, "aborted the answer: its stream ended without a finish_reason"),
    "!close": (openai.InternalServerError, "aborted the answer: its stream ended without a finish_reason"),
    "x" * 1001: (openai.BadRequestError, "the maximum context length is 1000"),
}


@pytest.mark.parametrize("prompt", FAULTS, ids=lambda prompt: prompt[:8])
async def test_each_fault_is_one_error_and_the_engine_serves_on(adopted, engine, prompt):
    kind, words = FAULTS[prompt]
    with pytest.raises(kind, match=words):
        await adopted.client.completions.create(model=CHAT, prompt=prompt)
    if prompt in openai_engine.FAULTS:
        with pytest.raises(openai.APIError, match=words):
            await adopted.stream(prompt)
    await until(lambda: not load(adopted) and engine.running == 0)
    texts, _ = await adopted.stream("well again")
    assert len(texts) == 6


NO_STREAMS = {
    "!405": "answers 405: not here. Remedy: see its log",
    "!424": "answers 424: not here",
    "!json": "answers application/json, no stream of events: no streams today. Remedy: check that the engine runs",
    "!chunks": "ended the connection: ",
    "!ssh": "ended the connection: .*[^.]\\. Remedy: ",
}


async def test_servers_that_are_no_engine_are_one_error_and_no_fault_of_the_request(adopted, engine):
    for prompt, words in NO_STREAMS.items():
        with pytest.raises(openai.InternalServerError, match=words):
            await adopted.client.completions.create(model=CHAT, prompt=prompt)
        assert len((await adopted.stream("well again"))[0]) == 6
    await until(lambda: not load(adopted))


async def test_a_connection_whose_stream_was_cut_is_not_used_again(adopted, engine):
    engine.closes_s = 0.2
    for _ in range(5):
        with pytest.raises(openai.InternalServerError, match=r"without an event\. Remedy: see its log"):
            await adopted.client.completions.create(model=CHAT, prompt="!empty")
        assert len((await adopted.stream("well again"))[0]) == 6


async def test_a_stream_with_its_reason_is_whole_without_done_or_usage(adopted):
    for prompt, counted in (("!undone", 6), ("!null", None)):
        texts, events = await adopted.stream(prompt, stream_options={"include_usage": True})
        assert (len(texts), events[-2].choices[0].finish_reason) == (6, "length")
        assert events[-1].usage.completion_tokens == 6
        assert ("trefoil_estimated" in events[-1].usage.model_extra) == (counted is None)


async def test_a_stream_that_an_engine_cuts_off_casts_no_doubt_on_it(adopted, engine):
    """A probe would cut the next stream off: llama.cpp's server ends one for each further request to its API."""
    for _ in range(3):
        with pytest.raises(openai.APIError, match="without a finish_reason"):
            await adopted.stream("!cut")
    assert len((await adopted.stream("on", max_tokens=40))[0]) == 40
    assert not adopted.system.local.health.evidence.suspicions
    await adopted.system.local.routing.connections.connection(key(0)).alive(5.0)
    assert {path for path in engine.paths if path != "/v1/completions"} == {"/v1"}


async def test_an_engine_that_falls_silent_is_one_error_after_its_time(adopted, engine, monkeypatch, state, tmp_path):
    monkeypatch.setattr(engine_api.EngineClient.__init__, "__defaults__", (0.5,))
    await publish(adopted.system)
    await publish(adopted.system, engine.address)
    for prompt in ("!silence", "!deaf"):
        with pytest.raises(openai.InternalServerError, match=r"said nothing for 0\.5 s"):
            await adopted.client.completions.create(model=CHAT, prompt=prompt)
    await until(lambda: not load(adopted))
    assert len((await adopted.stream("well again"))[0]) == 6


async def test_a_client_that_leaves_and_a_deadline_free_their_place_at_the_engine(adopted, engine):
    engine.step_s = 0.02
    stream = await adopted.client.completions.create(model=CHAT, prompt="long", max_tokens=10_000, stream=True)
    async for _ in stream:
        break
    assert engine.running == 1
    await stream.close()
    await until(lambda: engine.left == 1 and engine.running == 0 and not load(adopted), 1.0)
    with pytest.raises(openai.APIError, match="Deadline"):
        await adopted.client.completions.create(
            model=CHAT, prompt="long", max_tokens=10_000, extra_body={"timeout": 300_000}
        )
    await until(lambda: engine.left == 2 and engine.running == 0 and not load(adopted), 1.0)


async def test_a_stop_sequence_ends_the_stream_at_the_engine(adopted, engine):
    engine.step_s = 0.005
    texts, events = await adopted.stream("long", max_tokens=10_000, stop="w3")
    assert "".join(texts) == "w0 w1 w2 "
    assert engine.bodies[-1].keys() == {"model", "prompt", "max_tokens", "stop", "stream", "stream_options"}
    assert events[-1].choices[0].finish_reason == "stop"
    await until(lambda: engine.running == 0 and not load(adopted), 2.0)


async def test_hundreds_of_streams_are_whole(adopted, engine):
    await publish(adopted.system, engine.address, credits=64)
    answers_ = await asyncio.gather(*(adopted.stream(f"prompt {n}", max_tokens=3 + n % 5) for n in range(300)))
    assert [len(texts) for texts, _ in answers_] == [3 + n % 5 for n in range(300)]


@pytest.mark.gate
async def test_an_engine_that_is_gone_gets_nothing_and_no_token_comes_twice(adopted, engine):
    async with openai_engine.serving(step_s=0.02) as other:
        await publish(adopted.system, engine.address, other.address)
        engine.step_s = 0.02
        streams = [asyncio.create_task(adopted.stream("long", max_tokens=60)) for _ in range(8)]
        await until(lambda: other.running == 4 and engine.running == 4)
        other.stop()
        found = await asyncio.gather(*streams, return_exceptions=True)
    failed = [one for one in found if isinstance(one, openai.APIError)]
    whole = [one[0] for one in found if isinstance(one, tuple)]
    assert (len(failed), len(whole)) == (4, 4), found
    assert all(texts == [f"w{n} " for n in range(60)] for texts in whole)
    engine.step_s = 0.0
    texts = await asyncio.gather(*(adopted.stream("on") for _ in range(8)))
    assert [len(one) for one, _ in texts] == [6] * 8, "what was not taken there is tried here"


@pytest.mark.parametrize(
    ("flags", "text"), [({"stream": True}, ""), ({}, "hello"), ({"exclude_input_in_output": True}, "")]
)
async def test_clients_of_grpc_see_tritons_vllm_backend(adopted, flags, text):
    target = adopted.system.running.address
    asked = request("hello", sampling={"max_tokens": 3}, **{"stream": None, **flags})
    found = [outputs(one) async for one in answers(target, asked)]
    assert b"".join(one["text_output"][0] for one in found if one) == f"{text}w0 w1 w2 ".encode()
    assert sum(one["num_output_tokens"][0] for one in found if one) == 3
    assert found[-1]["finish_reason"] == [b"length"]


async def test_what_is_wrong_of_a_grpc_request_is_one_error_that_names_it(adopted, engine):
    def changed(name: str, datatype: str = "BYTES", shape: tuple[int, ...] = (1,), raw: bytes | None = None):
        asked = request("hello", sampling={})
        at = next((at for at, tensor in enumerate(asked.inputs) if tensor.name == name), len(asked.inputs))
        if raw is None:
            del asked.inputs[at], asked.raw_input_contents[at]
            return asked
        del asked.inputs[at:], asked.raw_input_contents[at:]
        asked.inputs.add(name=name, datatype=datatype, shape=shape)
        asked.raw_input_contents.append(raw)
        return asked

    two = 2 * (b"\x02\0\0\0" + b"hi")
    for asked, words in (
        (request("hello", sampling=b"{"), "sampling_parameters is not a JSON object"),
        (request("hello", sampling={"n": 2}), "n = 2: an engine gives one choice. Remedy: send n = 1"),
        (request("hello", sampling=b'{"temperature": NaN}'), "the request is not JSON: Out of range float"),
        (request("hello", sampling=b'{"stop": "\\ud800"}'), "the request is not JSON: 'utf-8' codec"),
        (request("hello", sampling=b'{"a":' * 5000 + b"1" + b"}" * 5000), "recursion"),
        (changed("text_input"), "text_input is missing. Remedy: send one text"),
        (changed("text_input", raw=b"\x09\0\0\0hi"), "input text_input (BYTES): "),
        (changed("text_input", raw=b"h"), "input text_input (BYTES): "),
        (changed("text_input", raw=two), "bytes follow 1 texts. Remedy: send it as ModelMetadata has it"),
        (changed("text_input", shape=(2,), raw=two), "elements of the shape [2]: one is taken"),
        (changed("text_input", shape=(2**20,), raw=bytes(2**22)), "elements of the shape [1048576]: one is taken"),
        (changed("text_input", shape=(1,), raw=bytes(2**22)), "4194300 bytes follow 1 texts"),
        (changed("text_input", shape=(0,), raw=b""), "elements of the shape [0]: one is taken"),
        (changed("stream", "BOOL", raw=bytes(2**20)), "1048576 bytes for the shape [1]"),
        (changed("text_input", "INT32", raw=bytes(4)), "input text_input (INT32): this family has text_input (BYTES)"),
        (changed("image", raw=two), "input image (BYTES): this family has text_input (BYTES), sampling_parameters ("),
    ):  # fmt: skip
        [answer] = [one async for one in answers(adopted.system.running.address, asked)]
        assert words in answer.error_message
    assert not engine.bodies
    assert not load(adopted)


async def test_texts_that_are_not_unicode_are_refused_wherever_they_stand(adopted, engine):
    odd = {"type": "function", "function": {"name": "sea", "parameters": {"most": float("nan")}}}
    for change, words in (
        ({"tools": [odd]}, "the request is not JSON"), ({"stop": "\ud800"}, "not Unicode"),
        ({"tools": [{**odd, "description": "\ud800"}]}, "not Unicode"), ({"\ud800": 1}, "not Unicode"),
        ({"model": "\ud800"}, "not Unicode"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not Unicode"),
    ):  # fmt: skip
        body = json.dumps({"model": CHAT, "messages": HELLO, **change})
        async with httpx.AsyncClient() as plain:
            answer = await plain.post(f"{adopted.client.base_url}chat/completions", content=body)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), answer.text
    assert not engine.bodies
    assert not load(adopted)


@pytest.fixture
async def embedding(adopted, engine) -> Adopted:
    await publish(adopted.system)
    await publish(adopted.system, engine.address, task="?embed")
    contracts = adopted.system.running.contracts
    await until(lambda: embeds(contracts.known(CHAT).config.config))  # the text engine's contract was known before
    return adopted


async def test_embeddings_are_the_engines_own_with_its_usage(embedding, engine):
    assert [one.id async for one in embedding.client.models.list()] == [CHAT]
    texts = [f"{chr(97 + n % 26)}{'x' * n}" for n in range(70)]
    answer = await embedding.client.embeddings.create(model=CHAT, input=texts, dimensions=2)
    assert [each.embedding for each in answer.data] == [[len(text), ord(text[0])] for text in texts]
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    assert [len(body["input"]) for body in engine.bodies] == [32, 32, 6]
    numbers = await embedding.client.embeddings.create(model=CHAT, input="!numbers", encoding_format="float")
    assert numbers.data[0].embedding == [8, 33, 1]
    assert engine.bodies[-1] == {"model": MODEL, "input": ["!numbers"], "encoding_format": "base64"}
    for wrong, kind, words in (
        ("!429", openai.RateLimitError, "the engine is full"),
        ("!short", openai.InternalServerError, "answers no embeddings"),
        ("!html", openai.InternalServerError, "answers no embeddings"),
    ):
        with pytest.raises(kind, match=words):
            await embedding.client.embeddings.create(model=CHAT, input=wrong)
    with pytest.raises(openai.BadRequestError, match="no such model, or size"):
        await embedding.client.embeddings.create(model=CHAT, input="a", dimensions=5)
    with pytest.raises(openai.BadRequestError, match=r"dimensions = 2: .* they have 3 numbers\. Remedy: leave it out"):
        await embedding.client.embeddings.create(model=CHAT, input="!whole", dimensions=2)
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        await embedding.client.completions.create(model=CHAT, prompt="a")
    await until(lambda: not load(embedding))


@pytest.mark.gate
async def test_an_engine_gets_its_key_alone_and_no_error_shows_it(state, tmp_path, capfd):
    file = tmp_path / "key"
    file.write_text("sk-secret-1\n")
    file.chmod(0o600)
    async with (
        openai_engine.serving(key="sk-secret-1") as engine,
        openai_engine.serving() as other,
        dispatching(
            state, tmp_path, rest_address="127.0.0.1:0", engine_key_files={f"{engine.address}/": file}
        ) as running,
        AsyncOpenAI(base_url=f"http://{running.rest_address}/v1", api_key="none", max_retries=0) as client,
    ):
        adopted = Adopted(DispatcherSystem(running, state, []), client)
        await publish(adopted.system, engine.address)
        assert len((await adopted.stream("hello"))[0]) == 6
        assert engine.shown[-1] == "sk-secret-1"
        engine.elsewhere = f"{other.address}/completions"
        with pytest.raises(openai.InternalServerError, match="answers 307"):
            await adopted.stream("!redirect")
        assert not other.paths, "no redirect takes the key along"
        engine.key = "sk-secret-2"
        refused = r"key_file = '\[key\]': .* answers 401.* no such key: \[key\]\. Remedy: put that engine's API key"
        with pytest.raises(openai.InternalServerError, match=refused):
            await adopted.stream("hello")
        file.write_text("sk-secret-2\n")
        assert len((await adopted.stream("hello"))[0]) == 6, "the file is read again"
        file.write_text("")
        assert len((await adopted.stream("hello"))[0]) == 6, "the last key stays"
        await publish(adopted.system)
        await publish(adopted.system, other.address)
        assert len((await adopted.stream("hello"))[0]) == 6
        assert set(other.shown) == {""}, "the key is for the one address"
    said = "".join(capfd.readouterr())
    assert "the change is not used" in said
    assert "sk-secret" not in said


async def test_an_engine_that_wants_a_key_says_so(adopted, engine):
    engine.key = "sk-secret"
    with pytest.raises(openai.InternalServerError, match=r"key_file = 'none': .*Remedy: name a file that holds its"):
        await adopted.stream("hello")

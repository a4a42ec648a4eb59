"""OpenAI's API on the REST port: its unmodified Python package and curl, before real Tritons."""

import asyncio
import hashlib
import json
import subprocess
import time
from collections.abc import AsyncIterator

import httpx
import numpy as np
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support import engine_family
from tests.support.dispatching import until
from tests.support.http_clients import needs
from tests.support.openai_serving import CHAT, SLICE, base, both_tritons, serving_both, spelt
from tests.support.special_world import World
from tests.unit.dispatcher.worlds import key
from trefoil.core.common import Basis, Revision
from trefoil.core.energy import ReceiptRate
from trefoil.core.objective import BudgetRung, TenantRung, TenantRungs
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]
HELLO = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "which way is the sea"}]
PROMPT = "<system>be brief\n<user>which way is the sea\n<assistant>"


@pytest.fixture(scope="module")
def tritons(tmp_path_factory):
    with both_tritons(tmp_path_factory.mktemp("openai")) as both:
        yield both


TENANT = """
[[tenant]]
name = "team"
token_sha256 = "{}"
rate_per_s = 0.01
burst = 1
"""


@pytest.fixture
async def world(state, tmp_path, tritons) -> AsyncIterator[World]:
    async with serving_both(state, tmp_path, tritons) as made:
        yield made


@pytest.fixture
async def client(world) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=base(world), api_key="none", max_retries=0, timeout=60.0) as made:
        yield made


async def test_models_are_the_families_that_generate_text(client):
    assert [one.id async for one in client.models.list()] == [CHAT, "echo", "embedder", "speller"]
    assert (await client.models.retrieve(CHAT)).id == CHAT
    for name in ("scores", "nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve(name)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_answers_are_the_engines_own_with_usage_and_reason(client, world):
    for most in (5, None):
        [(text, tokens, reason)] = engine_family.answer(1, PROMPT, max_tokens=most or engine_family.CONTEXT)
        answer = await client.chat.completions.create(model=CHAT, messages=HELLO, max_completion_tokens=most)
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == reason
        assert answer.system_fingerprint == "chat-small"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, tokens)
    [(text, tokens, reason)] = engine_family.answer(1, "once upon a time")
    answer = await client.completions.create(model=CHAT, prompt="once upon a time")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, reason)
    assert answer.usage.total_tokens == 4 + tokens
    assert world.idle
    assert world.local.accounting.load.totals[CHAT].answered == 3


async def test_a_stream_brings_the_text_then_the_reason_then_usage_if_asked(client):
    [(text, tokens, reason)] = engine_family.answer(1, PROMPT, max_tokens=9, temperature=0.5, seed=3)
    sampling = {"max_tokens": 9, "temperature": 0.5, "seed": 3, "stream": True}
    for options in ({}, {"stream_options": {"include_usage": True}}):
        chunks = [
            c async for c in await client.chat.completions.create(model=CHAT, messages=HELLO, **sampling, **options)
        ]
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == text
        assert [choice.finish_reason for choice in choices] == [None] * tokens + [reason]
        assert [chunk.usage.completion_tokens for chunk in chunks if chunk.usage] == ([tokens] if options else [])
        assert len({chunk.id for chunk in chunks}) == 1


async def test_many_streams_at_once_are_each_its_own(client, world):
    async def one(number: int) -> str:
        stream = await client.completions.create(model=CHAT, prompt=f"question {number}", max_tokens=20, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    texts = await asyncio.gather(*map(one, range(32)))
    assert texts == [engine_family.answer(1, f"question {n}", max_tokens=20)[0][0] for n in range(32)]
    assert world.idle


@pytest.mark.gate
async def test_stops_are_found_across_tokens_and_end_the_stream_on_its_slice(client, world):
    """The speller knows no stops: what it says after one must not be seen, nor waited for."""
    endless = spelt(b"one S", b"TO", b"P two", *[b" on"] * 2000, ms=20)
    began_s = time.monotonic()
    stream = await client.completions.create(model="speller", prompt=endless, stop=["nothing", "STOP"], stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert time.monotonic() - began_s < 5.0
    await until(lambda: world.idle)
    answer = await client.completions.create(model="speller", prompt=spelt(b"a", b"b S", b"TO", b" end"), stop="STOP")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab STO end", "stop")
    totals = world.local.accounting.load.totals["speller"]
    assert (totals.answered, totals.failed, totals.by_code["CANCELLED"]) == (2, 0, 0), "who had enough was answered"
    [(text, *_)] = engine_family.answer(1, "sea", max_tokens=40, ignore_eos=True)
    stop = text[7:11]
    answer = await client.completions.create(
        model=CHAT, prompt="sea", max_tokens=40, stop=stop, extra_body={"ignore_eos": True}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text[: text.index(stop)], "stop")
    late = {"ignore_eos": True, "min_tokens": 20}
    [(text, tokens, reason)] = engine_family.answer(1, "sea", max_tokens=40, stop=stop, **late)
    answer = await client.completions.create(model=CHAT, prompt="sea", max_tokens=40, stop=stop, extra_body=late)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, reason)
    assert answer.usage.completion_tokens == tokens > 20


async def test_a_family_with_one_whole_answer_is_answered_as_well(client):
    answer = await client.completions.create(model="echo", prompt="all at once", stop=" once", max_tokens=1)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("all at", "stop")
    assert (
        answer.usage.trefoil_estimated
        == "prompt_tokens: 4 bytes a token; completion_tokens: one an answer of the engine"
    )
    stream = await client.completions.create(model="echo", prompt="all", stream=True)
    assert [chunk.choices[0].text async for chunk in stream] == ["all", ""]
    with pytest.raises(openai.BadRequestError, match=r"temperature = 0\.5: echo has no such parameter"):
        await client.completions.create(model="echo", prompt="all", temperature=0.5)


async def test_letters_are_whole_however_their_bytes_come(client):
    sea = "Größe 海 🌊".encode()
    prompt = spelt(*(sea[at : at + 1] for at in range(len(sea))), b"\xff", b"!", b"\xe6\xb5")
    stream = await client.chat.completions.create(
        model="speller", messages=[{"role": "user", "content": prompt}], stream=True
    )
    texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
    assert "".join(texts) == "Größe 海 🌊\ufffd!", "what is not a letter is marked, half of one at the end is left out"


async def test_knobs_are_headers_and_extra_body_and_the_last_event_has_the_receipt(client, world):
    await world.carbon()
    await world.rates(ReceiptRate(SLICE, CHAT, "chat-small", 0.0, 0.0, 1.0, Basis.MEASURED, 60.0, 0.25))
    asked = {"model": CHAT, "messages": HELLO, "max_tokens": 6}
    answer = await client.chat.completions.create(**asked, extra_headers={"Trefoil-Receipt": "true"})
    tokens = answer.usage.completion_tokens
    assert answer.trefoil["trefoil_energy_j_estimate"] == pytest.approx(0.25 * tokens)
    assert answer.trefoil["trefoil_slice"] == SLICE.name
    stream = await client.chat.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}, extra_body={"trefoil_receipt": True}
    )
    chunks = [chunk async for chunk in stream]
    assert [hasattr(chunk, "trefoil") for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].trefoil["trefoil_tokens_out"] == tokens
    stopped = await client.completions.create(
        model="speller", prompt=spelt(b"a.", b"b"), stop=".", extra_body={"trefoil_receipt": True}
    )
    assert (stopped.choices[0].text, stopped.trefoil["trefoil_tokens_out"]) == ("a", 1)
    with pytest.raises(openai.APIStatusError) as caught:
        await client.chat.completions.create(**asked, extra_headers={"Trefoil-Min-Accuracy": "0.99"})
    assert caught.value.status_code == 400
    assert "0.6" in caught.value.message
    with pytest.raises(openai.BadRequestError, match="unknown request parameter trefoil_min"):
        await client.chat.completions.create(**asked, extra_body={"trefoil_min": 0.5})
    assert "trefoil" not in (await client.chat.completions.create(**asked)).model_extra


async def test_a_client_that_leaves_frees_its_place_within_a_second(client, world):
    long = {"model": CHAT, "prompt": "stay", "max_tokens": 250, "extra_body": {"ignore_eos": True}, "stream": True}
    streams = [await client.completions.create(**long) for _ in range(4)]
    for stream in streams:
        await anext(aiter(stream))
    assert world.local.accounting.open_streams == len(streams)
    left_s = time.monotonic()
    for stream in streams:
        await stream.close()
    await until(lambda: world.idle)
    assert time.monotonic() - left_s < 1.0
    assert not world.local.accounting.open_streams


CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "x", "arguments": ""}}]}
BAD = [
    ({"model": "nobody"}, 404, "model", "model_not_found", "does not exist"),
    ({"model": "scores"}, 400, "model", None, "generates no text"),
    ({"messages": []}, 400, "messages", None, "has no message"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", None, "is not a role"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, 400, "max_tokens", None, "max_completion_tokens is given too"),
    ({"n": 2}, 400, "n", None, "n = 2"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0]", None, "is not a function"),
    ({"tools": [{"type": "function", "function": {"name": "x"}}]}, 400, "tools", None, f"{CHAT} has no tools"),
    ({"messages": [CALLED]}, 400, "messages[0].tool_calls", None, f"{CHAT} has no tools"),
    ({"temperature": "hot"}, 400, "temperature", None, "0..2"),
    ({"temprature": 0}, 400, "temprature", None, "did you mean temperature"),
    ({"messages": [{"role": "user", "content": "word " * 300}]}, 400, None, "context_length_exceeded", "256"),
]


@pytest.mark.parametrize(("change", "status", "param", "code", "words"), BAD)
async def test_a_bad_request_has_one_clear_error(client, world, change, status, param, code, words):
    given = {"model": CHAT, "messages": HELLO, **change}
    for stream in (False, True):
        with pytest.raises(openai.APIStatusError, match=words) as caught:
            await client.post("/chat/completions", body={**given, "stream": stream}, cast_to=object)
        error = caught.value
        assert (error.status_code, error.param, error.code, error.type) == (
            status, param, code, "invalid_request_error",
        )  # fmt: skip
    assert world.idle


def vectors_of(answer) -> np.ndarray:
    assert [each.index for each in answer.data] == list(range(len(answer.data)))
    return np.array([each.embedding for each in answer.data])


@pytest.mark.gate
async def test_texts_are_embedded_by_as_many_as_the_family_takes(client, world):
    """The family takes 8 at once; the package asks for base64 where nothing is said."""
    texts = [f"which way is the sea {number}" for number in range(20)]
    answer = await client.embeddings.create(model="embedder", input=texts)
    whole = vectors_of(answer)
    assert whole.shape == (20, 16)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens, answer.model) == (120, 120, "embedder")
    assert len({tuple(each) for each in whole}) == 20
    totals = world.local.accounting.load.totals["embedder"]
    assert (totals.answered, totals.items) == (3, 20)
    one = await client.embeddings.create(model="embedder", input=texts[13], encoding_format="float")
    assert np.allclose(vectors_of(one), whole[13:14])
    short = await client.embeddings.create(model="embedder", input=texts[:9], dimensions=4)
    cut = whole[:9, :4] / np.linalg.norm(whole[:9, :4], axis=1, keepdims=True)
    assert np.allclose(vectors_of(short), cut, atol=1e-6)
    many = await client.embeddings.create(model="embedder", input=texts * 50, encoding_format="float")
    assert np.allclose(vectors_of(many), np.tile(whole, (50, 1))), "written in a process"
    assert world.idle


async def test_the_receipt_of_embeddings_is_that_of_all_requests(client, world):
    await world.carbon()
    await world.rates(ReceiptRate(key(0), "embedder", "v1", 0.1, 0.5, 0.0, Basis.MEASURED, 60.0, 0.0))
    knobs = {"extra_headers": {"Trefoil-Receipt": "true"}}
    answer = await client.embeddings.create(model="embedder", input=["a"] * 20, **knobs)
    assert answer.trefoil["trefoil_energy_j_estimate"] == pytest.approx(3 * 0.1 + 20 * 0.5)
    assert answer.trefoil["trefoil_slice"] == key(0).name
    assert "trefoil" not in (await client.embeddings.create(model="embedder", input="a")).model_extra


@pytest.mark.parametrize(
    ("change", "status", "param", "words"),
    [
        ({"model": "nobody"}, 404, "model", "does not exist"),
        ({"model": "scores"}, 400, "model", "makes no embeddings"),
        ({"model": CHAT}, 400, "model", "makes no embeddings"),
        ({"input": [5, 6]}, 400, "input", "token ids are not taken"),
        ({"dimensions": 5}, 400, "dimensions", "leave it out, or send 4 or 8 or 16"),
        ({"encoding_format": "float", "input": "!nan"}, 500, None, "not finite"),
        ({"input": ["a"] * 9 + ["!error"]}, 500, None, "bewitched"),
    ],
)
async def test_embeddings_that_cannot_be_made_are_one_clear_error(client, world, change, status, param, words):
    given = {"model": "embedder", "input": "a", **change}
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        await client.post("/embeddings", body=given, cast_to=object)
    assert (caught.value.status_code, caught.value.param) == (status, param)
    with pytest.raises(openai.BadRequestError, match="generates no text"):
        await client.completions.create(model="embedder", prompt="a")
    assert world.idle


async def test_http_that_is_wrong_is_told_so_in_openais_shape(world):
    async with httpx.AsyncClient(base_url=f"http://{world.running.rest_address}", timeout=60.0) as plain:
        for method, path, body, status, words in (
            ("POST", "/v1/completions", b"{", 400, "failed to parse"),
            ("POST", "/v1/completions", b"[]", 400, "not a JSON object"),
            ("POST", "/v1/completions", b" " * (4 * 2**20 + 1), 413, "4194304 bytes"),
            ("GET", "/v1/completions", b"", 405, "Method Not Allowed"),
            ("POST", "/v1/models", b"{}", 405, "Method Not Allowed"),
            ("POST", "/v1/embeddings", b"{}", 400, "model = 'missing'"),
            ("GET", "/v1/embeddings", b"", 405, "Method Not Allowed"),
            ("POST", "/v1/images/generations", b"{}", 404, "not offered"),
            ("HEAD", "/v1/chat/completions", b"", 405, ""),
        ):
            answer = await plain.request(method, path, content=body)
            assert answer.status_code == status
            if method != "HEAD":
                error = answer.json()["error"]
                assert words in error["message"]
                assert set(error) == {"message", "type", "param", "code"}


async def test_an_error_after_the_first_token_is_an_event_and_nothing_follows(client, world):
    stream = await client.completions.create(model="speller", prompt=spelt(b"a", b"b", error="broken"), stream=True)
    assert [(await anext(stream)).choices[0].text for _ in "ab"] == ["a", "b"]
    with pytest.raises(openai.APIError, match="broken"):
        await anext(stream)
    with pytest.raises(openai.InternalServerError, match="broken"):
        await client.completions.create(model="speller", prompt=spelt(b"a", error="broken"))
    assert world.idle


@pytest.mark.parametrize(
    ("path", "field", "grace_s"),
    [("/v1/completions", "prompt", 0.2), ("/v2/models/speller/generate_stream", "text_input", 0.0)],
)
async def test_a_dispatcher_that_stops_says_so_in_the_last_event(world, path, field, grace_s):
    world.local.settings = world.local.settings.model_copy(update={"stop_grace_s": grace_s})
    body = {"model": "speller", field: spelt(*[b"on"] * 2000, ms=20), "stream": True}
    url, got = f"http://{world.running.rest_address}{path}", b""
    async with httpx.AsyncClient(timeout=60.0) as plain, plain.stream("POST", url, json=body) as answer:
        async for data in answer.aiter_raw():
            if not got:
                stopping = asyncio.create_task(world.running.rest.shutdown())
            got += data
    await stopping
    error = json.loads(got.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    message = error["message"] if field == "prompt" else error
    assert message == "the dispatcher is stopping. Remedy: send the request again"
    await until(lambda: world.idle)


async def test_a_token_is_the_api_key_and_limits_are_those_of_the_tenant(state, tmp_path, tritons):
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(TENANT.format(hashlib.sha256(b"sesame").hexdigest()))
    async with serving_both(state, tmp_path, tritons, tenants_file=tenants) as world:
        asked = {"model": "speller", "prompt": "hello"}
        async with AsyncOpenAI(base_url=base(world), api_key="wrong", max_retries=0) as stranger:
            with pytest.raises(openai.AuthenticationError) as caught:
                await stranger.completions.create(**asked)
            assert caught.value.code == "invalid_api_key"
        async with AsyncOpenAI(base_url=base(world), api_key="sesame", max_retries=0) as client:
            assert (await client.completions.create(**asked)).choices[0].text == "hello"
            with pytest.raises(openai.RateLimitError) as limited:
                await client.completions.create(**asked)
            assert limited.value.code == "rate_limit_exceeded"
            assert int(limited.value.response.headers["retry-after"]) > 0
        window = world.local.accounting.close_window(WallClock().now_s(), Revision())
        assert {cell.key.tenant for cell in window.cells if cell.answered} == {"team"}


async def test_a_budget_that_is_spent_is_a_rate_limit_with_the_time(world, client):
    now_s = WallClock().now_s()
    rung = TenantRung("", "speller", BudgetRung.REFUSED, "9 g a day", free_at_s=now_s + 3600.0)
    world.local.budgets.set(TenantRungs((rung,), 1, now_s), now_s)
    with pytest.raises(openai.RateLimitError, match=r"9 g a day, is spent\. Remedy: try again at") as limited:
        await client.completions.create(model="speller", prompt="hello")
    assert limited.value.code == "rate_limit_exceeded"
    assert 3500 < int(limited.value.response.headers["retry-after"]) <= 3600
    assert (await client.completions.create(model=CHAT, prompt="once")).choices[0].text


async def test_curl_sees_events_that_end_with_done(world):
    needs("curl")
    body = json.dumps({"model": CHAT, "messages": HELLO, "max_tokens": 3, "stream": True})
    url = f"{base(world)}/chat/completions"
    command = ["curl", "-sS", "-N", "-i", url, "-H", "Content-Type: application/json", "-d", body]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, timeout=60, check=True)
    head, _, events = done.stdout.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert b"content-type: text/event-stream" in head
    lines = events.split(b"\n\n")
    assert lines[-2:] == [b"data: [DONE]", b""]
    texts = [json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"].get("content", "") for line in lines[:-2]]
    assert "".join(texts) == engine_family.answer(1, PROMPT, max_tokens=3)[0][0]


async def test_the_sync_client_works_as_well(world):
    def ask() -> str:
        with OpenAI(base_url=base(world), api_key="none", max_retries=0) as made:
            return made.chat.completions.create(model=CHAT, messages=HELLO).choices[0].message.content

    assert await asyncio.to_thread(ask) == engine_family.answer(1, PROMPT, max_tokens=engine_family.CONTEXT)[0][0]

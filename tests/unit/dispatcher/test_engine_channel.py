"""A channel to an engine that already runs: what hostile or odd streams do to answers, counts and other work."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.openai import bodies
from dispatcher.fronts.openai.engines import TextAnswer, whole_calls
from dispatcher.fronts.rest.codec import dumps
from dispatcher.transport import engine_channel
from dispatcher.transport.engine_channel import EngineChannel
from tests.support.engine_family import request
from trefoil import engine_api
from trefoil.engine_api import EngineTarget
from trefoil.runtime.given.llm_backends import VLLM
from trefoil.runtime.security.key_file import KeyFile

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
TEXT = b'data: {"choices": [{"text": "a"}]}\n\n'
END = b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
TOOLS = [{"type": "function", "function": {"name": "sea"}}]


@asynccontextmanager
async def engine(answer: bytes, *, ends: bool = True, key: KeyFile | None = None) -> AsyncIterator[EngineChannel]:
    """A channel to an engine that answers everything so, and then, unless it `ends`, comments without end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]))
        writer.write(HEAD + answer)
        while not ends and not writer.is_closing():
            writer.write(b": on\n\n")
            await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    base = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    channel = EngineChannel(EngineTarget(base, "m"), key)
    try:
        yield channel
    finally:
        await channel.close()
        server.close()


async def answered(channel: EngineChannel, sampling: object = None, **flags: bool) -> list[pb.ModelInferResponse]:
    data = request("hello", sampling=sampling or {}, **flags).SerializeToString()
    async with aclosing(channel.stream("/x/ModelStreamInfer", (data,))) as answers:
        return [pb.ModelStreamInferResponse.FromString(each).infer_response async for each in answers]


def read(responses: list[pb.ModelInferResponse]) -> tuple[str, list, TextAnswer]:
    """Text, calls and the answer as the front of OpenAI's API has them."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    made, texts, calls = TextAnswer(bodies.read(body, {}, bodies.CHAT), "hi"), [], []
    for response in responses:
        text, parts = made.add(response, VLLM)
        texts.append(text)
        calls += parts
    return "".join([*texts, made.end()]), calls, made


@pytest.mark.parametrize("line", [TEXT, b"data: {}\n\n", b"\n"])
async def test_events_that_come_together_keep_nothing_else_waiting(line):
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    lines = b"\n".count(b"\n") * line.count(b"\n") * 5000
    async with engine(line * 5000 + END + DONE) as channel:
        beside = asyncio.create_task(other())
        text, _, _ = read(await answered(channel))
        beside.cancel()
    assert text == "a" * (5000 if line is TEXT else 0)
    assert turns > lines / engine_api.AT_ONCE


async def test_small_chunks_of_a_long_event_cost_no_more_than_their_bytes():
    """A copy of all that came before for each part would be 20 GB."""

    async def parts() -> AsyncIterator[bytes]:
        yield b'data: {"a": "'
        for _ in range(200_000):
            yield b"x"
        yield b'"}\n'

    assert [len(event["a"]) async for event in engine_api.events_of(parts())] == [200_000]


async def test_a_stream_whose_answer_has_its_reason_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(engine_api, "END_S", 0.3)
    async with engine(TEXT + END, ends=False) as channel, asyncio.timeout(20):
        text, _, made = read(await answered(channel))
    assert (text, made.finish_reason) == ("a", "stop")


@pytest.mark.parametrize("flags", [{}, {"stream": False}])
async def test_an_answer_beyond_all_bounds_is_one_error(monkeypatch, flags):
    monkeypatch.setattr(engine_api, "ANSWER_CHARS_MAX", 1000)
    async with engine(TEXT * 1001 + END) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="the engine answers more than 1000 characters"):
            await answered(channel, **flags)
    async with engine(TEXT * 1000 + END) as channel:
        assert len(read(await answered(channel, stream=True))[0]) == 1000


async def test_calls_of_tools_are_text_and_have_what_openai_has():
    function = b'{"name": "sea", "arguments": "\\ud83d", "x": 1}'
    call = b'{"index": 0, "id": "a", "odd": NaN, "type": null, "function": %b}' % function
    more = b'{"index": 0, "id": null, "function": {"name": null, "arguments": "!\\udcff"}}'
    events = b"".join(b'data: {"choices": [{"delta": {"tool_calls": [%b]}}]}\n\n' % each for each in (call, more))
    async with engine(events + END) as channel:
        _, calls, _ = read(await answered(channel))
    assert calls[0] == {"index": 0, "id": "a", "function": {"name": "sea", "arguments": "?"}}
    assert whole_calls(calls)[0]["function"] == {"name": "sea", "arguments": "?!?"}
    assert dumps(calls).decode()


@pytest.mark.parametrize(("said", "counted"), [(2, 2), (3, 3), (9, 9), (None, 3)])
async def test_usage_is_the_engines_however_many_events_it_sent(said, counted):
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": %d}}\n\n' % (said or 0)
    async with engine(TEXT * 3 + END + (usage if said else b"") + DONE) as channel:
        _, _, made = read(await answered(channel, stream=True))
    usage = made.usage()
    assert usage["completion_tokens"] == counted
    assert ("trefoil_estimated" in usage) == (said is None)


async def test_an_engines_key_is_in_no_error_of_a_stream(tmp_path):
    (tmp_path / "key").write_text("sk-secret\n")
    (tmp_path / "key").chmod(0o600)
    key = KeyFile(tmp_path / "key", "key_file")
    for event in (b'{"error": {"message": "no key sk-secret"}}', b"sk-secret", b'["sk-secret"]',
                  b'{"choices": "sk-secret"}'):  # fmt: skip
        async with engine(b"data: " + event + b"\n\n", key=key) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match=r"\[key\]") as caught:
                await answered(channel)
        assert "secret" not in caught.value.details()


@pytest.mark.parametrize(("code", "status"), [(b"400", "INVALID_ARGUMENT"), (b"429", "RESOURCE_EXHAUSTED")])
async def test_an_error_in_a_stream_is_the_status_that_its_code_is(code, status):
    async with engine(b'data: {"error": {"message": "no", "code": %b}}\n\n' % code) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="aborted the answer: no") as caught:
            await answered(channel)
    assert caught.value.code().name == status


async def test_what_a_request_makes_of_a_workers_time_is_bounded():
    many = b'{"a": [' + b"[]," * engine_channel.VALUES_MAX + b"1]}"
    large = b'{"stop": "' + b"x" * engine_channel.REQUEST_BYTES_MAX + b'"}'
    async with engine(TEXT + END) as channel:
        for sampling, words in ((many, "it has more than 65536 values"), (large, "Remedy: send at most 10485760")):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as caught:
                await answered(channel, sampling)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        commas = b'{"stop": "' + b'\\",[' * engine_channel.VALUES_MAX + b'"}'
        assert read(await answered(channel, commas))[0] == "a"

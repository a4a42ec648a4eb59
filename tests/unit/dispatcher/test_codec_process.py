"""Large JSON bodies, read and written beside the worker: equal to what the codec does, and nobody waits for them."""

import asyncio
import json
import time

import pytest
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.openai import bodies
from dispatcher.fronts.rest import codec, generate_codec, json_text
from dispatcher.fronts.rest.codec_process import PROCESS_BYTES, CodecProcess
from tests.support.dispatching import until
from trefoil.core.errors import InvalidInput, Unavailable

ROUNDS_MAX = 10  # what shares this core or its memory makes a round slower, for a while


def body_of(items: int) -> bytes:
    data = [round(0.001 * i, 3) for i in range(items)]
    return json.dumps({"inputs": [{"name": "X", "datatype": "FP32", "shape": [items], "data": data}]}).encode()


@pytest.fixture
async def beside():
    made = CodecProcess(2**30)
    yield made
    await made.close()


async def test_it_says_what_the_codec_says(beside):
    body = body_of(1000)
    assert await beside.call("", codec.decode, body, len(body), "m", "") == codec.decode(body, len(body), "m", "")
    answer = pb.ModelInferResponse(model_name="m", id="x")
    answer.outputs.add(name="Y", datatype="UINT8", shape=[3])
    answer.raw_output_contents.append(b"\1\2\3")
    data = answer.SerializeToString()
    assert await beside.call("", codec.encode, data, codec.OutputForm()) == codec.encode(data, codec.OutputForm())
    assert await beside.call("", generate_codec.write, data) == generate_codec.write(data)
    with pytest.raises(InvalidInput) as direct:
        codec.decode(b"[]", 2, "m", "")
    with pytest.raises(InvalidInput) as beside_it:
        await beside.call("", codec.decode, b"[]", 2, "m", "")
    assert str(beside_it.value) == str(direct.value)


async def test_the_loop_goes_on_while_megabytes_of_json_are_read(beside):
    body = body_of(1_500_000)  # some 14 MB
    await beside.call("", codec.decode, *((small := body_of(1)), len(small)), "m", "")
    began_s = time.thread_time()
    codec.decode(body, len(body), "m", "")
    here_s, turns_s = time.thread_time() - began_s, [float("inf")]
    while min(turns_s) >= here_s / 5 and len(turns_s) <= ROUNDS_MAX:
        longest_s, reading = 0.0, asyncio.create_task(beside.call("", codec.decode, body, len(body), "m", ""))
        while not reading.done():
            began_s = time.thread_time()
            await asyncio.sleep(0)
            longest_s = max(longest_s, time.thread_time() - began_s)
        data, _ = reading.result()
        assert len(data) >= 4 * 1_500_000
        turns_s.append(longest_s)
    assert min(turns_s) < here_s / 5, "CPU time of this thread between two turns, of the best of rounds"


async def test_a_client_that_leaves_disturbs_nobody_and_a_dead_process_is_replaced(beside):
    body = body_of(200_000)
    leaving = asyncio.create_task(beside.call("", codec.decode, body, len(body), "m", ""))
    await asyncio.sleep(0)
    leaving.cancel()
    small = body_of(3)
    assert await beside.call("", codec.decode, small, len(small), "m", "") == codec.decode(small, len(small), "m", "")
    beside._process.kill()
    for _ in range(3):
        try:
            found = await beside.call("", codec.decode, small, len(small), "m", "")
        except Unavailable:
            continue
        break
    assert found == codec.decode(small, len(small), "m", "")


async def test_who_waits_has_its_turn_after_one_call_of_each_other_and_who_left_has_none(beside, monkeypatch):
    begun, ended = list[str](), list[str]()
    exchange = beside._exchange

    async def counted(function, args):
        begun.append(args[2])
        return await exchange(function, args)

    async def call(line: str, model: str) -> None:
        body = body_of(3)
        await beside.call(line, codec.decode, body, len(body), model, "")
        ended.append(line)

    monkeypatch.setattr(beside, "_exchange", counted)
    crowd = [asyncio.create_task(call("crowd", f"crowd {n}")) for n in range(8)]
    await until(lambda: begun)
    single = asyncio.create_task(call("single", "single"))
    await asyncio.sleep(0)
    for leaving in crowd[4:]:
        leaving.cancel()
    await asyncio.gather(single, *crowd[:4])
    await asyncio.gather(*crowd[4:], return_exceptions=True)
    assert ended[:2] == ["crowd", "single"], "the others of the crowd came earlier"
    assert sorted(begun) == [f"crowd {n}" for n in range(4)] + ["single"]


async def test_no_line_grows_without_end():
    made = CodecProcess(2**30, calls_max=2)
    try:
        body = body_of(3)
        calls = [asyncio.create_task(made.call("crowd", codec.decode, body, len(body), "m", "")) for _ in range(5)]
        single = asyncio.create_task(made.call("single", codec.decode, body, len(body), "m", ""))
        found = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(one, Unavailable) for one in found] == [False] * 2 + [True] * 3
        assert await single == found[0]
        assert await made.call("crowd", codec.decode, body, len(body), "m", "") == found[0]
    finally:
        await made.close()
    with pytest.raises(Unavailable, match="stops"):
        await made.call("", codec.decode, body, len(body), "m", "")


async def test_an_error_does_not_bring_a_large_value_back(beside):
    body = json.dumps({"model": [[] for _ in range(1000)]}).encode()
    with pytest.raises(InvalidInput, match=r"model = \[\[\], \[\].*is not text") as caught:
        await beside.call("", bodies.read_text, body, {}, bodies.COMPLETIONS)
    assert caught.value.value is None


async def test_a_body_that_needs_too_much_memory_is_refused_and_the_next_is_read():
    little = CodecProcess(2**26)
    try:
        body = body_of(1_500_000)  # 24 bytes each as Python's floats
        with pytest.raises(InvalidInput, match="rest_json_memory_bytes_max"):
            await little.call("", codec.decode, body, len(body), "m", "")
        first = little._process
        small = body_of(3)
        assert await little.call("", codec.decode, small, len(small), "m", "") == codec.decode(
            small, len(small), "m", ""
        )
        assert little._process is first
    finally:
        await little.close()


def test_what_the_event_loop_reads_itself_is_soon_read():
    begin, end = b'{"parameters":{"a":1e100,"b":"\\ud83d\\ude00","c":Inf},"inputs":[{"name":"x","data":[""', b"]}]}"
    body = begin + b',""' * ((PROCESS_BYTES - 1 - len(begin) - len(end)) // 3) + end
    took = []
    for _ in range(ROUNDS_MAX):
        began_s = time.thread_time()
        assert len(json_text.parse(body)["inputs"][0]["data"]) > 20_000
        took.append(time.thread_time() - began_s)
    assert min(took) < 0.03

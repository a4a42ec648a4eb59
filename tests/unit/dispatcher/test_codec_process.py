"""Large JSON bodies, read and written beside the worker: equal to what the codec does, and nobody waits for them."""

import asyncio
import json
import time

import pytest
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.codec_process import CodecProcess
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
    assert await beside.decode(body, len(body), "m", "") == codec.decode(body, len(body), "m", "")
    answer = pb.ModelInferResponse(model_name="m", id="x")
    answer.outputs.add(name="Y", datatype="UINT8", shape=[3])
    answer.raw_output_contents.append(b"\1\2\3")
    data = answer.SerializeToString()
    assert await beside.encode(data, codec.OutputForm()) == codec.encode(data, codec.OutputForm())
    with pytest.raises(InvalidInput) as direct:
        codec.decode(b"[]", 2, "m", "")
    with pytest.raises(InvalidInput) as beside_it:
        await beside.decode(b"[]", 2, "m", "")
    assert str(beside_it.value) == str(direct.value)


async def test_the_loop_goes_on_while_megabytes_of_json_are_read(beside):
    body = body_of(1_500_000)  # some 14 MB
    await beside.decode(*((small := body_of(1)), len(small)), "m", "")
    began_s = time.thread_time()
    codec.decode(body, len(body), "m", "")
    here_s, turns_s = time.thread_time() - began_s, [float("inf")]
    while min(turns_s) >= here_s / 5 and len(turns_s) <= ROUNDS_MAX:
        longest_s, reading = 0.0, asyncio.create_task(beside.decode(body, len(body), "m", ""))
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
    leaving = asyncio.create_task(beside.decode(body, len(body), "m", ""))
    await asyncio.sleep(0)
    leaving.cancel()
    small = body_of(3)
    assert await beside.decode(small, len(small), "m", "") == codec.decode(small, len(small), "m", "")
    beside._process.kill()
    for _ in range(3):
        try:
            found = await beside.decode(small, len(small), "m", "")
        except Unavailable:
            continue
        break
    assert found == codec.decode(small, len(small), "m", "")


async def test_a_body_that_needs_too_much_memory_is_refused_and_the_next_is_read():
    little = CodecProcess(2**26)
    try:
        body = body_of(1_500_000)  # 24 bytes each as Python's floats
        with pytest.raises(InvalidInput, match="rest_json_memory_bytes_max"):
            await little.decode(body, len(body), "m", "")
        first = little._process
        small = body_of(3)
        assert await little.decode(small, len(small), "m", "") == codec.decode(small, len(small), "m", "")
        assert little._process is first
    finally:
        await little.close()

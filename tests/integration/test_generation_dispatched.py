"""A generative family behind the dispatcher: tokens booked, receipts, refusals, and what a fault leaves of a stream."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import numpy as np
import openai
import psutil
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import DispatcherSystem, Running, dispatching, image, until
from tests.support.fake_triton import FakeTriton
from tests.support.generation import FAMILY, PLACES, Told, alone, answers, ask, connection, hosted, prompts, request
from tests.support.triton_process import ROOT, PaceFile, TritonProcess
from tests.unit.dispatcher.worlds import key, node, route, status, target
from trefoil.core.common import Basis, Revision
from trefoil.core.energy import ReceiptRate
from trefoil.core.fleet import SliceState, SliceStatus
from trefoil.core.plan import Route, RouteTarget
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]
VERSION = 2
STEP_MS = 30.0
OTHER = 9  # the slice of another family


class World(DispatcherSystem):
    """Two slices of pydoc, one of the digits, behind one dispatcher."""

    @property
    def load(self):
        return self.local.accounting.load

    @property
    def idle(self) -> bool:
        return not self.local.routing.in_flight()

    def tokens(self) -> int:
        """Booked in the window that is open and in those that were closed."""
        window = self.local.accounting.close_window(WallClock().now_s(), Revision())
        self.cells = [*getattr(self, "cells", ()), *window.cells]
        return sum(cell.tokens_out for cell in self.cells)

    async def rate(self, rate: ReceiptRate) -> None:
        await self.carbon()
        await self.rates(rate)
        receipts = self.local.accounting.receipts
        await until(lambda: receipts.price(rate.slice, FAMILY, rate.variant, 1, 1).carbon_mg > 0)


def serving(number: int, process: TritonProcess, version: int = VERSION) -> SliceStatus:
    return SliceStatus(
        key=key(number), generation=1, mig_uuid=f"MIG-{number}", state=SliceState.READY, hosted=(hosted(version),),
        grpc_target=process.launch.grpc_target, since_s=1.0, revision=Revision(1, 1, 0), credits=PLACES,
    )  # fmt: skip


@pytest.fixture
async def world(state, tmp_path: Path) -> AsyncIterator[World]:
    row_ms = STEP_MS * 20
    slices = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        pace = PaceFile(folder / "pace", [(VERSION, 1, row_ms, 0.0), (VERSION, 8, row_ms, 0.0)], family=FAMILY)
        slices.append(TritonProcess(folder, VERSION, serving=hosted(VERSION), pace=pace.path))
    try:
        for one in slices:
            await one.ready([hosted(VERSION)], 60.0)
        quiet = {"window_s": 3600.0, "deadline_s": 600.0, "rest_address": "127.0.0.1:0"}
        async with FakeTriton(version=4) as digits, dispatching(state, tmp_path, **quiet) as running:
            made = World(running, state, slices)
            variant = hosted(VERSION).variant
            targets = tuple(RouteTarget(key(i), variant, 0, 0.5, PLACES, False, "", 0.5, VERSION) for i in range(2))
            routes = [Route(FAMILY, "weighted", "fifo", targets, 5000, 0, {}), route([target(OTHER)])]
            statuses = [*(serving(i, one) for i, one in enumerate(slices)), status(OTHER, digits.target)]
            await made.publish(node(statuses), routes, slo_ms=2000.0)
            await until(lambda: running.contracts.known(FAMILY))
            yield made
    finally:
        for one in slices:
            one.close()


async def test_tokens_are_the_models_own_and_are_booked_and_priced(world):
    await world.rate(ReceiptRate(key(0), FAMILY, "pydoc-s", 0.0, 0.0, 1.0, Basis.MEASURED, 60.0, 0.25))
    asked = [(prompt, None) for prompt in prompts()[:24]]
    began_s = time.monotonic()
    found = await asyncio.gather(*(ask(world.address, request(p, trefoil_receipt=True)) for p, _ in asked))
    whole_ms = 1e3 * (time.monotonic() - began_s)
    wanted = alone(asked, VERSION)
    assert [one.tokens for one in found] == wanted
    assert world.tokens() == sum(map(len, wanted))
    receipts = [(one.final, len(one.tokens)) for one in found if one.final["trefoil_slice"] == key(0).name]
    assert 0 < len(receipts) < len(found), "both slices served"
    streams = [cell.streams for cell in world.cells]
    assert sum(one.ttft.total for one in streams) == len(found)
    assert sum(one.tpot.total for one in streams) == sum(len(one) > 1 for one in wanted)
    for one in found:
        first_ms, next_ms, later = one.final["trefoil_ttft_ms"], one.final.get("trefoil_tpot_ms"), len(one.tokens) - 1
        assert (next_ms is None) == (later == 0)
        assert 0.5 * STEP_MS <= first_ms <= first_ms + later * (next_ms or 0.0) <= whole_ms
        assert next_ms is None or next_ms >= 0.5 * STEP_MS
    for told, tokens in receipts:
        assert told["trefoil_tokens_out"] == tokens
        assert told["trefoil_energy_j_estimate"] == pytest.approx(0.25 * tokens)
        assert told["trefoil_carbon_mg_estimate"] == pytest.approx(0.25 * tokens / 3.6e6 * 360 * 1.2 * 1e3)
    assert world.idle


async def test_tokens_of_whoever_leaves_are_booked_too(world):
    began = answers(world.address, request(max(prompts()[:40], key=len)))
    for _ in range(2):
        await anext(began)
    await began.aclose()
    await until(lambda: world.idle)
    assert world.tokens() >= 2
    assert world.load.totals[FAMILY].by_code == {"CANCELLED": 1}


async def test_refused_prompts_are_the_clients_fault_and_eject_nothing(world):
    for _ in range(60):
        told = await ask(world.address, request(""))
        assert "INVALID_ARGUMENT: PROMPT is empty" in told.error
    assert not world.running.local.health.ejections.outliers()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _status(world.address, request(b"\xff"))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "PROMPT is not UTF-8 text" in caught.value.details()
    assert world.load.totals[FAMILY].by_code == {"INVALID_ARGUMENT": 61}
    assert (await ask(world.address, request(prompts()[0]))).tokens


async def _status(address: str, asked) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(
            metadata=(("triton_grpc_error", "true"),), timeout=30
        )
        await call.write(asked.SerializeToString())
        while await call.read() is not grpc.aio.EOF:
            pass


async def test_unary_requests_are_refused_in_tritons_words(world):
    async with triton.InferenceServerClient(world.address) as client:
        tensor = triton.InferInput("PROMPT", [1, 1], "BYTES")
        tensor.set_data_from_numpy(np.array([[b"def a():"]], dtype=np.object_))
        with pytest.raises(InferenceServerException, match="decoupled"):
            await client.infer(FAMILY, [tensor])


# --- over HTTP ------------------------------------------------------------------------------------------------------


async def _events(world: World, prompt: str, **more) -> AsyncIterator[dict]:
    """Events of generate_stream, each as it comes; leaving the loop closes the connection."""
    url = f"http://{world.running.rest_address}/v2/models/{FAMILY}/generate_stream"
    async with (
        httpx.AsyncClient(timeout=60.0) as client,
        client.stream("POST", url, json={"PROMPT": prompt, **more}) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        rest = b""
        async for data in answer.aiter_raw():
            *whole, rest = (rest + data).split(b"\n\n")
            for event in whole:
                yield json.loads(event.removeprefix(b"data: ").decode("utf-8", "surrogateescape"))


async def _tokens(world: World, prompt: str, **more) -> Told:
    told = Told()
    async for event in _events(world, prompt, **more):
        if "TOKEN" in event:
            told.tokens.append(event["TOKEN"].encode("utf-8", "surrogateescape"))
        elif "error" in event:
            told.error = event["error"]
        else:
            told.final = event
    return told


async def test_streams_over_http_are_those_over_grpc_booked_and_priced(world):
    await world.rate(ReceiptRate(key(0), FAMILY, "pydoc-s", 0.0, 0.0, 1.0, Basis.MEASURED, 60.0, 0.25))
    asked = [(prompt, None) for prompt in prompts()[:32]]
    found = await asyncio.gather(*(_tokens(world, prompt, trefoil_receipt=True) for prompt, _ in asked))
    assert [one.tokens for one in found] == alone(asked, VERSION)
    assert not [one.error for one in found if one.error]
    assert world.tokens() == sum(len(one.tokens) for one in found)
    assert world.load.totals[FAMILY].answered == len(asked)
    for one in found:
        assert one.final["trefoil_tokens_out"] == len(one.tokens)
        if one.final["trefoil_slice"] == key(0).name:
            assert one.final["trefoil_energy_j_estimate"] == pytest.approx(0.25 * len(one.tokens))
    one = await _tokens(world, prompts()[0], MAX_TOKENS=2)
    assert (len(one.tokens), one.final) == (2, None), "who asks for no receipt gets none"
    assert world.idle


async def test_refusals_over_http_are_statuses_and_name_what_is_wrong(world):
    base = f"http://{world.running.rest_address}/v2/models/{FAMILY}"
    async with httpx.AsyncClient(base_url=base, timeout=60.0) as client:
        for path, given, words in (
            ("/generate_stream", {"PROMPT": ""}, "PROMPT is empty"),
            ("/generate_stream", {"PROMPT": "def a():", "MAX_TOKENS": 9999}, "MAX_TOKENS is 9999"),
            ("/generate_stream", {"PROMPT": "def a():", "MAX_TOKENS": 1.5}, "MAX_TOKENS"),
            ("/generate_stream", {"PROMPT": ["a", "b"]}, "PROMPT has 2 texts"),
            ("/generate_stream", {}, "expected"),
            ("/generate", {"PROMPT": prompts()[0]}, "exactly 1 response"),
        ):
            answer = await client.post(path, json=given)
            assert (answer.status_code, words in answer.json()["error"]) == (400, True), answer.text
        answer = await client.post("/versions/1/generate", json={"PROMPT": prompts()[0], "MAX_TOKENS": 1})
        assert answer.json()["TOKEN"].encode() == alone([(prompts()[0], 1)], VERSION)[0][0]
        assert (await client.post("/versions/2/generate", json={"PROMPT": "def a():"})).status_code == 404
    await until(lambda: world.idle)


async def test_openais_package_is_answered_by_a_family_of_tokens(world):
    async with openai.AsyncOpenAI(base_url=f"http://{world.running.rest_address}/v1", api_key="x") as client:
        prompt = max(prompts()[:40], key=len)
        [tokens] = alone([(prompt, None)], VERSION)
        asked = {"model": FAMILY, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        answer = await client.chat.completions.create(**asked)
        whole = b"".join(tokens).decode()
        assert answer.choices[0].message.content == whole
        assert answer.usage.completion_tokens == len(tokens)
        assert "prompt_tokens" in answer.usage.trefoil_estimated, "the family does not say how many they are"
        stop = whole[len(whole) // 2 :][:5]
        stream = await client.chat.completions.create(**asked, stop=stop, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        assert "".join(chunk.delta.content or "" for chunk in chunks) == whole[: whole.index(stop)]
        assert chunks[-1].finish_reason == "stop"
        short = await client.completions.create(model=FAMILY, prompt=prompt, max_tokens=2)
        assert (short.usage.completion_tokens, short.choices[0].finish_reason) == (2, "length")
        for change, words in (
            ({"temperature": 0.7}, "pydoc decodes greedily"),
            ({"messages": [{"role": "user", "content": "word " * 500}]}, "PROMPT has"),
            ({"max_tokens": 9999}, "MAX_TOKENS is 9999"),
        ):
            with pytest.raises(openai.BadRequestError, match=words):
                await client.chat.completions.create(**asked | change)
    await until(lambda: world.idle)
    assert world.load.totals[FAMILY].answered == 3
    assert world.load.totals[FAMILY].by_code == {"INVALID_ARGUMENT": 2}


async def test_a_client_of_http_that_leaves_frees_its_place_within_a_second(world):
    began = [_events(world, prompt) for prompt in sorted(prompts()[:100], key=len)[-6:]]
    await asyncio.gather(*(anext(each) for each in began))
    assert sum(world.local.routing.in_flight().values()) == len(began)
    left_s = time.monotonic()
    await asyncio.gather(*(each.aclose() for each in began))
    await until(lambda: world.idle)
    assert time.monotonic() - left_s < 1.0
    assert world.load.totals[FAMILY].by_code["CANCELLED"] + world.load.totals[FAMILY].answered == len(began)


async def test_a_triton_that_is_killed_is_an_error_event_and_no_token_comes_twice(world):
    chosen = sorted(prompts()[:60], key=len)[-8:]
    wanted = alone([(prompt, None) for prompt in chosen], VERSION)
    under_way = [asyncio.create_task(_tokens(world, prompt)) for prompt in chosen]
    await until(lambda: len(world.running.local.routing.in_flight()) == 2)
    await asyncio.sleep(6 * STEP_MS / 1e3)
    os.killpg(world.slices[0].process.pid, signal.SIGKILL)
    told = await asyncio.gather(*under_way)
    for one, whole in zip(told, wanted, strict=True):
        assert one.tokens == whole[: len(one.tokens)], "in order, none twice"
        assert (one.tokens == whole) is not bool(one.error), one
    assert [one for one in told if one.error]
    await until(lambda: world.idle)


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_a_triton_that_is_killed_ends_its_streams_with_a_status_and_no_token_comes_twice(world):
    chosen = sorted(prompts()[:60], key=len)[-16:]
    wanted = alone([(prompt, None) for prompt in chosen], VERSION)
    under_way = [asyncio.create_task(_collect(world.address, prompt)) for prompt in chosen]
    await until(lambda: len(world.running.local.routing.in_flight()) == 2)
    await asyncio.sleep(6 * STEP_MS / 1e3)
    os.killpg(world.slices[0].process.pid, signal.SIGKILL)
    told = await asyncio.gather(*under_way)
    for one, whole in zip(told, wanted, strict=True):
        assert one.tokens == whole[: len(one.tokens)], "in order, none twice"
        assert (one.tokens == whole and not one.error) or one.error, one
    cut = [one for one in told if one.error]
    assert cut
    assert all("INVALID_ARGUMENT" not in one.error for one in cut)
    assert sum(not one.error for one in told) >= 4, "those of the other slice go on"
    await until(lambda: world.idle)
    again = await asyncio.gather(*(ask(world.address, request(prompt)) for prompt in chosen))
    assert [one.tokens for one in again] == wanted


async def _collect(address: str, prompt: str) -> Told:
    """As `ask`, with a status of the stream itself as the error."""
    try:
        return await ask(address, request(prompt))
    except (grpc.aio.AioRpcError, AssertionError) as error:
        return Told(error=str(error))


@pytest.mark.long
async def test_a_thousand_cancels_leave_nothing_behind(world):
    before = _footprint()

    async def leave(number: int) -> None:
        began = answers(world.address, request(prompts()[number % 50]))
        if number % 4:
            await anext(began)
        else:
            first = asyncio.ensure_future(anext(began))
            await asyncio.sleep(0.002 * (number % 7))
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        await began.aclose()

    for first in range(0, 1000, 50):
        await asyncio.gather(*(leave(number) for number in range(first, first + 50)))
    await until(lambda: world.idle)
    asked = [(prompt, None) for prompt in prompts()[:16]]
    found = await asyncio.gather(*(ask(world.address, request(prompt)) for prompt, _ in asked))
    assert [one.tokens for one in found] == alone(asked, VERSION)
    await until(lambda: world.running.local.accounting.open_streams == 0)
    after = _footprint()
    print(f"1,000 cancels: tasks {before[0]} -> {after[0]}, descriptors {before[1]} -> {after[1]}")
    assert after[0] <= before[0] + 5
    assert after[1] <= before[1] + 10


STOPPING = """
import asyncio, os, signal, sys
import grpc
sys.path.insert(0, sys.argv[1])
from tests.support.generation import prompts, request
from tritonclient.grpc import service_pb2_grpc

async def main():
    calls = []
    for i in range(int(sys.argv[3])):
        channel = grpc.aio.insecure_channel(sys.argv[2], options=[("grpc.use_local_subchannel_pool", 1)])
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(request(prompts()[i % 100]))
        calls.append((channel, call))
    print("sent", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)

asyncio.run(main())
"""


@pytest.mark.long
async def test_five_hundred_clients_that_stop_reading_hold_up_nobody(world):
    others_before_ms = await _others(world, 8.0)
    before = _footprint()
    argv = [sys.executable, "-c", STOPPING, str(ROOT), world.address, "500"]
    process = await asyncio.create_subprocess_exec(*argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await asyncio.wait_for(process.stdout.readline(), 120) == b"sent\n"
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        others_ms = await _others(world, 8.0)
        await until(lambda: world.idle, 300.0)
        assert world.running.local.accounting.open_streams == 500, "they hold their streams, and nothing else"
        assert (await ask(world.address, request(prompts()[0]))).tokens == alone([(prompts()[0], None)], VERSION)[0]
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await until(lambda: world.running.local.accounting.open_streams == 0)
    after = _footprint()
    p99, before_p99 = np.quantile(others_ms, 0.99), np.quantile(others_before_ms, 0.99)
    print(f"others' p99 {before_p99:.1f} ms before, {p99:.1f} ms beside 500 who do not read")
    print(f"tasks {before[0]} -> {after[0]}, descriptors {before[1]} -> {after[1]}")
    assert p99 <= max(2 * before_p99, 20.0)
    assert after[0] <= before[0] + 5
    assert after[1] <= before[1] + 10


async def _others(world: World, seconds: float) -> list[float]:
    """Latencies [ms] of another family's requests, one after the other."""
    found = []
    async with triton.InferenceServerClient(world.address) as client:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            began_s = time.monotonic()
            await client.infer("digits", [image(3)])
            found.append((time.monotonic() - began_s) * 1e3)
            await asyncio.sleep(0.005)
    return found


def _footprint() -> tuple[int, int]:
    """Tasks and descriptors of this process."""
    return len(asyncio.all_tasks()), psutil.Process().num_fds()


# --- shortest job first -----------------------------------------------------------------------------------------------

ARRIVALS, RATE_PER_S = 300, 3.4
ONCE = 2  # streams at once, of one slice
ITERATION_MS = 40.0  # an answer has 14.5 iterations, so 3.45 are served a second
ITERATIONS = 13.376  # that the profile's time of an answer stands for: tokens_mean of family.toml and one


async def _completions(address: str, asked: list[str], due_s: np.ndarray) -> tuple[np.ndarray, list[list[bytes]]]:
    """Time from arrival to the end of each answer [s], and its tokens. One connection asks: among several, fairness
    goes before the queue's order."""
    began_s = time.monotonic()

    async def one(prompt: str, due_s: float) -> tuple[float, list[bytes]]:
        await asyncio.sleep(began_s + due_s - time.monotonic())
        told = await ask(channel, request(prompt), 300.0)
        assert not told.error
        return time.monotonic() - began_s - due_s, told.tokens

    async with connection(address) as channel:
        found = await asyncio.gather(*map(one, asked, due_s))
    return np.array([took_s for took_s, _ in found]), [tokens for _, tokens in found]


@asynccontextmanager
async def _queued(queue: str, redis_url: str, folder: Path) -> AsyncIterator[Running]:
    """A slice of pydoc-m behind a dispatcher with that queue, in a separate cluster."""
    folder.mkdir()
    pace = PaceFile(folder / "pace", [(3, batch, ITERATION_MS * ITERATIONS, 0.0) for batch in (1, 8)], family=FAMILY)
    slice_, state = TritonProcess(folder, 3, serving=hosted(3), pace=pace.path), State.connect(redis_url, folder.name)
    try:
        await slice_.ready([hosted(3)], 60.0)
        async with dispatching(state, folder, deadline_s=600.0) as running:
            targets = (RouteTarget(key(0), hosted(3).variant, 0, 1.0, ONCE, False, "", 0.5, 3),)
            routes = [Route(FAMILY, "weighted", queue, targets, 5000, 0, {})]
            await DispatcherSystem(running, state).publish(node([serving(0, slice_, 3)]), routes, slo_ms=2000.0)
            await until(lambda: running.contracts.known(FAMILY))
            counts = running.local.lengths.total
            while queue == "ssjf" and not counts["predicted"] + counts["cached"]:
                await ask(running.address, request("def warm(up):"))
            yield running
    finally:
        await state.close()
        slice_.close()


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_shortest_job_first_beats_first_come_first_served_on_the_same_arrivals(shared_redis, tmp_path):
    """300 prompts that the shipped predictor was not trained on, each to both at once: what slows one slows both."""
    chance = np.random.default_rng(20261126)
    asked = [str(prompt) for prompt in chance.permutation(prompts())[:ARRIVALS]]
    due_s = np.cumsum(chance.exponential(1.0 / RATE_PER_S, ARRIVALS))
    async with (
        _queued("fifo", shared_redis.url, tmp_path / "fifo") as fifo,
        _queued("ssjf", shared_redis.url, tmp_path / "ssjf") as ssjf,
    ):
        found = await asyncio.gather(*(_completions(one.address, asked, due_s) for one in (fifo, ssjf)))
        counts = dict(ssjf.local.lengths.total)
    wanted = alone([(prompt, None) for prompt in asked], 3)
    assert [tokens for _, tokens in found] == [wanted, wanted]
    fifo_s, ssjf_s = (float(took_s.mean()) for took_s, _ in found)
    print(f"mean completion: fifo {fifo_s:.2f} s, ssjf {ssjf_s:.2f} s, {ssjf_s / fifo_s - 1:+.1%}; {counts}")
    assert ssjf_s < fifo_s

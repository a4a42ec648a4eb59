"""A generative family on a real Triton: every token is the model's own, whoever else is served beside it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from power_agent.triton.client import TritonClient
from tests.support.generation import FAMILY, PLACES, alone, answers, ask, hosted, prompts, request
from tests.support.triton_process import MODELS, PaceFile, TritonProcess
from trefoil.runtime.model_files import contract

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
VERSION = 2
READY_S = 60.0
WAITING_MAX = 256
STEP_MS = 100.0  # of a paced slice, however many streams it decodes

BAD = {
    "empty": (request(""), "PROMPT is empty"),
    "blank": (request(" \n"), "PROMPT is empty"),
    "no text": (request(b"def \xff\xfe():"), "PROMPT is not UTF-8 text: byte 4 is 0xff"),
    "over the limit": (request("x, " * 60), "PROMPT has"),
    "far over the limit": (request("a" * 1_000_000), "PROMPT has 1000000 bytes"),
    "no tokens": (request("def a():", 0), "MAX_TOKENS is 0. Remedy: 1 to 192"),
    "fewer than none": (request("def a():", -7), "MAX_TOKENS is -7"),
    "absurdly many": (request("def a():", 2**31 - 1), "MAX_TOKENS is 2147483647"),
}


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonProcess]:
    one = TritonProcess(tmp_path_factory.mktemp("pydoc"), VERSION, serving=hosted(VERSION))
    yield one
    one.close()


@pytest.fixture
async def target(triton: TritonProcess) -> str:
    await triton.ready([hosted(VERSION)], READY_S)
    return triton.launch.grpc_target


async def test_every_token_is_that_of_the_model_alone(target):
    asked = [(prompt, None if i % 3 else 5 + i) for i, prompt in enumerate(prompts()[:32])]
    found = await asyncio.gather(*(ask(target, request(*one)) for one in asked))
    assert [one.tokens for one in found] == alone(asked, VERSION)
    assert all(not one.error and one.final for one in found)
    assert len({len(one.tokens) for one in found}) > 5, "length depends on the prompt"


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_is_refused_by_name_and_costs_nobody_else_anything(target, name):
    bad, why = BAD[name]
    good, told = await asyncio.gather(ask(target, request(prompts()[0])), ask(target, bad))
    assert f"INVALID_ARGUMENT: {why}" in told.error
    assert not told.tokens
    assert good.tokens == alone([(prompts()[0], None)], VERSION)[0]


async def test_two_prompts_in_one_request_are_refused(target):
    two = request("def a():")
    two.inputs[0].shape[0] = 2
    two.raw_input_contents[0] *= 2
    assert "PROMPT has 2 texts. Remedy: one a request" in (await ask(target, two)).error


async def test_a_probe_takes_one_token(triton, target):
    client = triton.client()
    assert await client.probe(FAMILY, VERSION) > 0
    assert (await ask(target, request(prompts()[1]))).tokens == alone([(prompts()[1], None)], VERSION)[0]
    await client.close()


# --- on a simulated slice ---------------------------------------------------------------------------------------------


@pytest.fixture
async def paced(tmp_path: Path) -> AsyncIterator[tuple[str, TritonClient, PaceFile]]:
    """A slice whose steps take STEP_MS, however many streams it has; a variation of the profile's moves none."""
    mean = float(contract(MODELS, FAMILY).parameters["tokens_mean"].string_value)
    row_ms = STEP_MS * (mean + 1)
    pace = PaceFile(tmp_path / "pace", [(VERSION, 1, row_ms, 0.3), (VERSION, PLACES, row_ms, 0.3)], family=FAMILY)
    one = TritonProcess(tmp_path, VERSION, serving=hosted(VERSION), pace=pace.path)
    client = one.client()
    await client.wait_ready([hosted(VERSION)], READY_S)
    yield one.launch.grpc_target, client, pace
    await client.close()
    one.close()


def longest(count: int) -> list[tuple[str, list[bytes]]]:
    """The prompts with the longest answers, and these."""
    asked = prompts()[:60]
    found = zip(asked, alone([(prompt, None) for prompt in asked], VERSION), strict=True)
    return sorted(found, key=lambda one: len(one[1]))[-count:]


async def test_one_step_serves_all_streams_and_its_time_is_what_the_agent_meters(paced):
    target, client, pace = paced
    chosen = longest(PLACES)
    [before], booked = await client.statistics(), pace.read(VERSION)
    told = await asyncio.gather(*(ask(target, request(prompt)) for prompt, _ in chosen))
    assert [one.tokens for one in told] == [tokens for _, tokens in chosen]
    [after], now = await client.statistics(), pace.read(VERSION)
    steps, tokens = now["batches"] - booked["batches"], sum(len(one) for _, one in chosen)
    most = max(len(one) for _, one in chosen)
    assert most <= steps <= most + PLACES + 1, "prompts join two a step, and one more finds the end"
    assert now["items"] - booked["items"] >= tokens
    busy_ns = now["busy_ns"] - booked["busy_ns"]
    assert busy_ns >= 0.99e6 * STEP_MS * steps
    assert after.compute_batch_ns - before.compute_batch_ns == pytest.approx(busy_ns, rel=0.05)
    await client.heal(hosted(VERSION), READY_S)
    [healed] = await client.statistics()
    assert healed.compute_batch_ns < after.compute_batch_ns, "the counter begins anew with the model"


async def test_a_cancelled_stream_frees_its_place_at_once(paced):
    target, _, _ = paced
    chosen = longest(PLACES + 1)
    (last, wanted), (first, _), others = chosen[0], chosen[-1], chosen[1:-1]
    assert len(wanted) >= 3
    leaving = answers(target, request(first))
    await anext(leaving)
    beside = [asyncio.create_task(ask(target, request(prompt))) for prompt, _ in others]
    await asyncio.sleep(0.5)
    waiting = asyncio.create_task(ask(target, request(last)))
    done, _ = await asyncio.wait([waiting, *beside], timeout=4 * STEP_MS / 1e3, return_when=asyncio.FIRST_COMPLETED)
    assert not done, "all places are taken, and their answers are long"
    began_s = time.monotonic()
    await leaving.aclose()
    assert (await waiting).tokens == wanted
    assert time.monotonic() - began_s < (len(wanted) + 6) * STEP_MS / 1e3 + 2.0
    assert [one.tokens for one in await asyncio.gather(*beside)] == [tokens for _, tokens in others]


async def test_what_waits_is_bounded(paced):
    target, _, _ = paced
    asked = [asyncio.create_task(ask(target, request(prompts()[i % 8]))) for i in range(WAITING_MAX + 60)]
    refused: list[str] = []
    async with asyncio.timeout(60):
        while len(refused) < 20:
            await asyncio.sleep(0.1)
            refused = [one.result().error for one in asked if one.done() and one.result().error]
    assert set(refused) == {f"Exceeds maximum queue size: {WAITING_MAX} prompts wait"}
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    assert (await ask(target, request(prompts()[0], 1))).tokens == alone([(prompts()[0], 1)], VERSION)[0]

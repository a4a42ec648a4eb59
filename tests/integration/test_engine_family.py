"""A family of Triton's vLLM backend on a real Triton, and the stand-in's contract, as NVIDIA's backend has it."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from typer.testing import CliRunner

from power_agent.triton.client import TritonClient
from tests.support.engine_family import (
    CONTEXT,
    PLACES,
    TOKENS_MEAN,
    answer,
    hosted,
    installation,
    outputs,
    request,
    write_family,
)
from tests.support.foreign_models import add
from tests.support.generation import answers
from tests.support.triton_process import PaceFile, TritonProcess
from trefoil.api.client import Client
from trefoil.cli.main import app
from trefoil.core.fleet import Hosted
from trefoil.runtime.repository import load_family

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]
PROMPT = "which way is the sea"
COUNTED = {"return_num_output_tokens": True, "return_num_input_tokens": True, "return_finish_reason": True}
READY_S = 60.0

BAD = {
    "an unknown sampling key": (
        request(PROMPT, sampling={"tempreature": 0}), "'NoneType' object has no attribute 'lora_name'",
    ),
    "no tokens": (request(PROMPT, sampling={"max_tokens": 0}), "'NoneType' object"),
    "the prompt in a stream": (
        request(PROMPT, exclude_input_in_output=False), "`exclude_input_in_output` = False is not allowed",
    ),
    "sampling parameters that are not JSON": (request(PROMPT, sampling=b"{"), "JSONDecodeError"),
    "a prompt beyond the context": (request("word " * CONTEXT), "longer than the maximum model length of"),
    "an adapter": (request(PROMPT, sampling={"lora_name": "x"}), "LoRA feature is not enabled."),
}  # fmt: skip


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonProcess]:
    folder = tmp_path_factory.mktemp("chat")
    write_family(folder / "models")
    one = TritonProcess(folder, 1, source=folder / "models", serving=hosted(1), triton=installation(folder))
    yield one
    one.close()


@pytest.fixture
async def target(triton: TritonProcess) -> str:
    await triton.ready([hosted(1)], READY_S)
    return triton.launch.grpc_target


async def ask(target: str, asked) -> list:
    return [one async for one in answers(target, asked)]


@pytest.mark.gate
async def test_a_stream_brings_each_token_once_and_its_end_with_the_last(target):
    sampling = {"max_tokens": 40, "ignore_eos": True, "temperature": 0}
    found = await ask(target, request(PROMPT, sampling=sampling, **COUNTED))
    [(text, tokens, reason)] = answer(1, PROMPT, **sampling)
    told = [outputs(one) for one in found]
    assert b"".join(one["text_output"][0] for one in told).decode() == text
    assert [one["num_output_tokens"] for one in told] == [[1]] * tokens == [[1]] * 40
    assert {tuple(one["num_input_tokens"]) for one in told} == {(5,)}
    assert [one["finish_reason"] for one in told] == [[b"None"]] * 39 + [[reason.encode()]]
    finals = [one.infer_response.parameters["triton_final_response"].bool_param for one in found]
    assert finals == [False] * 39 + [True], "no empty response follows"


async def test_whole_answers_begin_with_the_prompt_unless_it_is_excluded(target):
    [whole] = await ask(target, request(PROMPT, stream=None))
    [(text, _, _)] = answer(1, PROMPT)
    assert outputs(whole) == {"text_output": [(PROMPT + text).encode()]}, "no output that was not asked for"
    sampling = {"n": 2, "max_tokens": 9, "ignore_eos": True}
    [two] = await ask(target, request(PROMPT, False, sampling, exclude_input_in_output=True, **COUNTED))
    told, wanted = outputs(two), answer(1, PROMPT, **sampling)
    assert [one.decode() for one in told["text_output"]] == [text for text, _, _ in wanted]
    assert told["num_output_tokens"] == [9, 9]


async def test_streams_run_together_and_each_is_that_of_the_model_alone(target):
    prompts = [f"question {i}" for i in range(24)]
    found = await asyncio.gather(
        *(ask(target, request(one, sampling={"max_tokens": 30}, **COUNTED)) for one in prompts)
    )
    texts = [b"".join(outputs(one)["text_output"][0] for one in each).decode() for each in found]
    assert texts == [answer(1, one, max_tokens=30)[0][0] for one in prompts]


@pytest.mark.parametrize("name", BAD)
async def test_bad_requests_get_the_backends_own_words(target, name):
    asked, why = BAD[name]
    [told] = await ask(target, asked)
    assert why in told.error_message


async def test_a_client_that_leaves_frees_its_place(target):
    endless = {"max_tokens": CONTEXT, "ignore_eos": True}
    leaving = [answers(target, request(f"stay {i}", sampling=endless)) for i in range(8)]
    for one in leaving:
        await anext(one)
    for one in leaving:
        await one.aclose()
    [(text, _, _)] = answer(1, PROMPT, max_tokens=3)
    found = await asyncio.wait_for(ask(target, request(PROMPT, sampling={"max_tokens": 3})), 5.0)
    assert b"".join(outputs(one)["text_output"][0] for one in found).decode() == text


async def test_a_swap_changes_the_model_and_a_probe_takes_one_token(triton, target):
    client = triton.client()
    assert await client.probe("chat", 1) > 0
    await client.swap(hosted(1), hosted(2), READY_S)
    [told] = await ask(target, request(PROMPT, False, {"max_tokens": 5}, exclude_input_in_output=True))
    assert outputs(told)["text_output"][0].decode() == answer(2, PROMPT, max_tokens=5)[0][0]
    await client.swap(hosted(2), hosted(1), READY_S)
    await client.close()


# --- a decoupled python model ----------------------------------------------------------------------------------------

STEP_MS = 40.0
STEP_MS_OF_CHAT = 2.0
STREAMING = """
import asyncio
import json
import sys
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.gather(*(self._answer(request) for request in requests))

    async def _answer(self, request):
        sender = request.get_response_sender()
        for number in range(max(1, int(pb_utils.get_input_tensor_by_name(request, "COUNT").as_numpy()[0]))):
            await asyncio.sleep(0)
            tensor = pb_utils.Tensor("NUMBER", np.array([number], np.int32))
            sender.send(pb_utils.InferenceResponse(output_tensors=[tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
COUNTING = """
backend: "python" model_transaction_policy { decoupled: true }
input [ { name: "COUNT" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "NUMBER" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""


def count_to(number: int):
    made = pb.ModelInferRequest(model_name="numbers")
    made.inputs.add(name="COUNT", datatype="INT32", shape=[1])
    made.raw_input_contents.append(np.int32(number).tobytes())
    return made


@pytest.fixture
async def numbers(tmp_path: Path) -> AsyncIterator[tuple[str, TritonClient, PaceFile]]:
    """A family imported from a Triton repository of one decoupled python model, on a paced slice."""
    add(tmp_path / "theirs", "one", COUNTING, STREAMING.encode(), file="model.py")
    words = ["--as", "numbers=one", "--accuracy", "one=1", "--slo-latency-ms", "900", "--tokens-mean", "4"]
    where = ["family", "import", tmp_path / "theirs", *words, "--repository", tmp_path / "models"]
    done = CliRunner().invoke(app, [str(word) for word in where])
    assert done.exit_code == 0, done.output
    row_ms = STEP_MS * 5
    pace = PaceFile(tmp_path / "pace", [(1, 1, row_ms, 0.3), (1, PLACES, row_ms, 0.3)], family="numbers")
    served = Hosted("numbers", "one", 1, 0, 1, 1, PLACES)
    one = TritonProcess(tmp_path, 1, source=tmp_path / "models", serving=served, pace=pace.path)
    client = one.client()
    try:
        await client.wait_ready([served], READY_S)
        yield one.launch.grpc_target, client, pace
    finally:
        await client.close()
        one.close()


async def test_a_decoupled_python_model_keeps_a_simulated_slices_pace_and_its_time_is_metered(numbers):
    target, client, pace = numbers
    [before], booked = await client.statistics(), pace.read(1)
    found = await asyncio.gather(*(ask(target, count_to(count)) for count in (10, 10, 3)))
    told = [[outputs(one)["NUMBER"][0] for one in each if one.infer_response.outputs] for each in found]
    assert told == [[*range(10)], [*range(10)], [*range(3)]]
    [after], now = await client.statistics(), pace.read(1)
    assert 10 <= now["batches"] - booked["batches"] <= 14, "streams share iterations, each with a token of every one"
    spent_ns = after.compute_batch_ns - before.compute_batch_ns
    assert spent_ns >= 0.95e6 * STEP_MS * 9
    assert spent_ns <= 1.5 * (now["busy_ns"] - booked["busy_ns"])


async def test_the_stand_in_as_python_models_is_paced_by_its_tokens(tmp_path):
    write_family(tmp_path / "models", python=True)
    row_ms = STEP_MS * (TOKENS_MEAN + 1)
    pace = PaceFile(tmp_path / "pace", [(1, 1, row_ms, 0.0), (1, PLACES, row_ms, 0.0)], family="chat")
    one = TritonProcess(tmp_path, 1, source=tmp_path / "models", serving=hosted(1), pace=pace.path)
    try:
        await one.ready([hosted(1)], READY_S)
        sampling = {"max_tokens": 20, "ignore_eos": True}
        whole = request(PROMPT, False, sampling, exclude_input_in_output=True, return_num_output_tokens=True)
        began_s = time.monotonic()
        [told], stream = await asyncio.gather(
            ask(one.launch.grpc_target, whole), ask(one.launch.grpc_target, request(PROMPT, sampling=sampling))
        )
        text = answer(1, PROMPT, **sampling)[0][0]
        assert outputs(told) == {"text_output": [text.encode()], "num_output_tokens": [20]}
        assert b"".join(outputs(each)["text_output"][0] for each in stream).decode() == text
        assert time.monotonic() - began_s >= 19 * STEP_MS / 1e3
    finally:
        one.close()


async def profile(family: str, target: str, models: Path, out: Path, *more: str) -> tuple[int, str]:
    where = ["--triton", target, "--device-type", "cpu:2", "--slices", "cpu:1", "--repository", str(models)]
    how = ["--window", "0.5", "--rates", "", "--estimate-energy", "--out", str(out), *more]
    command = [sys.executable, "-m", "trefoil.cli.main", "family", "profile", family, *where, *how]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    told, _ = await process.communicate()
    return process.returncode or 0, told.decode()


async def test_streams_are_profiled_by_how_many_run_at_once(triton, target, tmp_path):
    models, out = triton.launch.source, tmp_path / "profile.csv"
    code, told = await profile("chat", target, models, out, "--variants", "chat-small", "--batches", "1,16")
    assert code == 0, told
    points = {point["batch"]: point for point in json.loads(out.with_suffix(".json").read_text())}
    assert "chat-small on cpu:1, 16 streams: TTFT p50 " in told
    assert STEP_MS_OF_CHAT <= points[1]["tpot_ms_p50"] < 60
    assert points[1]["latency_ms"][0] >= STEP_MS_OF_CHAT * TOKENS_MEAN
    assert points[16]["ttft_ms_p50"] > points[1]["latency_ms"][0], "8 of 16 wait for an answer to end"
    _, rows = load_family(models / "chat", out, ["chat-small"])
    assert {row.batch for row in rows} == {1, 16}


async def test_our_client_speaks_the_api_of_the_family(target):
    def generated(most: int | None) -> str:
        with Client(target) as client:
            return "".join(piece.text for piece in client.generate("chat", PROMPT, max_tokens=most))

    assert await asyncio.to_thread(generated, 4) == answer(1, PROMPT, max_tokens=4)[0][0]
    assert await asyncio.to_thread(generated, None) == answer(1, PROMPT)[0][0]

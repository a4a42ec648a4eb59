"""The process that predicts lengths, and who asks it: right answers, true lengths, and every way in which it fails."""

import asyncio
import json
import os
import signal
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from tritonclient.grpc import InferInput, service_pb2
from tritonclient.grpc._utils import _get_inference_request

from dispatcher.lengths import asking
from dispatcher.lengths.asking import Lengths, prompt_of
from dispatcher.service.core.fallback_rungs import Dependencies, active_rungs
from tests.support.length_predictor import write_predictor
from tests.unit.dispatcher.worlds import ticket
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.gate]
WAIT_S = 0.5


def payload(prompt: str | bytes) -> bytes:
    given = InferInput("PROMPT", [1], "BYTES")
    given.set_data_from_numpy(np.array([prompt], dtype=object))
    return _get_inference_request(
        model_name="pydoc", inputs=[given], model_version="", request_id="", outputs=None, sequence_id=0,
        sequence_start=False, sequence_end=False, priority=0, timeout=None, parameters=None,
    ).SerializeToString()  # fmt: skip


TICKET = replace(ticket(1), family="pydoc")


@asynccontextmanager
async def asked(folder, wait_s: float = WAIT_S, ready: bool = True):
    lengths = Lengths(folder, WallClock(), lambda: True, wait_s)
    running = asyncio.create_task(lengths.run())
    try:
        assert (lengths.trouble, await score(lengths, "the first")) == ("", None)
        assert "has not started" in lengths.trouble
        if ready:
            await until(lambda: not lengths.trouble)
            lengths.total.clear()
        yield lengths
    finally:
        running.cancel()
        await lengths.shutdown()


async def until(holds, within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.02)


async def score(lengths: Lengths, prompt: str):
    return (await lengths.scored(TICKET, payload(prompt))).length_score


async def test_scores_are_the_networks_and_true_lengths_are_told_for_prompts_that_are_alike(tmp_path):
    async with asked(write_predictor(tmp_path, "pydoc"), wait_s=20.0) as lengths:
        assert await score(lengths, "def parse text") == 3.0
        lengths.learn(TICKET, payload("def parse text"), 60)
        assert await score(lengths, "def parse text") == 4.0  # 60 tokens: beyond the last border
        assert await score(lengths, "def parse text text") == 4.0  # cosine 0.94
        assert await score(lengths, "class one") == 2.0
        assert lengths.total == {"predicted": 2, "cached": 2}
        other = replace(TICKET, family="other")
        assert await lengths.scored(other, payload("def parse")) is other


async def test_a_killed_one_is_said_missed_and_started_again(tmp_path):
    async with asked(write_predictor(tmp_path, "pydoc"), wait_s=20.0) as lengths:
        os.kill(lengths._process.pid, signal.SIGKILL)
        await until(lambda: lengths.trouble)
        assert "has ended with -9: requests are served first come, first served" in lengths.trouble
        began_s = time.monotonic()
        assert await score(lengths, "def parse") is None
        assert time.monotonic() - began_s < 0.5
        assert active_rungs(Dependencies(lengths_instead=lengths.trouble)).keys() == {"lengths"}
        await until(lambda: not lengths.trouble)
        assert await score(lengths, "def parse") == 2.0
        assert lengths.total["absent"] == 1  # beside the first, which starts it


async def test_while_one_is_stopped_nobody_waits_but_the_first_and_it_catches_up(tmp_path):
    async with asked(write_predictor(tmp_path, "pydoc"), wait_s=20.0) as lengths:
        assert await score(lengths, "def") == 1.0
        lengths._wait_s = 0.3
        os.kill(lengths._process.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        assert await score(lengths, "def parse") is None
        first_s = time.monotonic() - began_s
        assert 0.3 <= first_s < 3.0
        assert "has not answered within 300 ms" in lengths.trouble
        began_s = time.monotonic()
        assert [await score(lengths, "def parse") for _ in range(100)] == [None] * 100
        assert time.monotonic() - began_s < 3.0
        os.kill(lengths._process.pid, signal.SIGCONT)
        await until(lambda: not lengths.trouble)
        lengths._wait_s = 20.0
        assert await score(lengths, "def parse") == 2.0
        assert lengths.total["late"] == 101


async def test_a_silent_one_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "SILENT_S", 1.0)
    async with asked(write_predictor(tmp_path, "pydoc"), wait_s=0.2) as lengths:
        os.kill(lengths._process.pid, signal.SIGSTOP)
        await score(lengths, "def")
        await until(lambda: "was silent for 1 s and was killed" in lengths.trouble)


async def test_one_that_answers_nan_is_not_gone_by(tmp_path):
    async with asked(write_predictor(tmp_path, "pydoc", per_word=float("nan")), wait_s=20.0) as lengths:
        assert await score(lengths, "def parse") is None
        assert "answers nan: requests are served first come" in lengths.trouble
        assert lengths.total == {"invalid": 1}


@pytest.mark.parametrize("what", ["another hash", "no files", "no JSON", "another graph"])
async def test_files_that_cannot_be_used_are_said(tmp_path, what):
    folder = tmp_path / "lengths"
    if what != "no files":
        write_predictor(folder, "pydoc", ids="NUMBERS" if what == "another graph" else "IDS")
        (folder / "predictor.onnx").open("ab").write(b"x") if what == "another hash" else None
        (folder / "lengths.json").write_text("{") if what == "no JSON" else None
    async with asked(folder, ready=False) as lengths:
        await until(lambda: "does not start" in lengths.trouble)
        wanted = {
            "another hash": "predictor.onnx has SHA-256", "no files": "No such file", "no JSON": "Expecting",
            "another graph": "predictor.onnx takes NUMBERS, not IDS alone",
        }  # fmt: skip
        assert wanted[what] in lengths.trouble
        assert "make pydoc-lengths" in lengths.trouble
        assert await score(lengths, "def") is None


async def test_it_does_not_run_where_no_queue_reads_lengths(tmp_path):
    lengths = Lengths(write_predictor(tmp_path, "pydoc"), WallClock(), lambda: False)
    running = asyncio.create_task(lengths.run())
    assert await score(lengths, "def") is None
    await asyncio.sleep(0.5)
    assert (lengths._process, lengths.trouble) == (None, "")
    running.cancel()


def test_the_prompt_of_a_request_is_its_first_text_or_nothing():
    assert prompt_of(payload("def größer(a):")) == "def größer(a):"
    assert prompt_of(payload(b"\xff\xfe")) == ""
    assert prompt_of(b"\x00not a request") == ""
    typed = service_pb2.ModelInferRequest()
    typed.inputs.add(name="PROMPT", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"class A:")
    assert prompt_of(typed.SerializeToString()) == "class A:"
    empty = service_pb2.ModelInferRequest()
    empty.inputs.add(name="PROMPT", datatype="BYTES", shape=[1])
    assert prompt_of(empty.SerializeToString()) == ""
    assert len(prompt_of(payload("x" * 10_000))) == asking.PROMPT_CHARS_MAX
    assert json.dumps(prompt_of(payload("\ud7ff"))) == '"\\ud7ff"'

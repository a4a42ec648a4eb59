"""Signals: the first cancels, teardown finishes all the same, the second only hurries it."""

import asyncio
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app
from trefoil.cli.run import shutdown, supervisor
from trefoil.cli.run.shutdown import ShutdownSignals, run_until_signal, uncancellable


@pytest.mark.parametrize("number", shutdown.SIGNALS)
def test_a_signal_cancels_and_gives_the_shells_exit_code(number: int) -> None:
    async def main(_: ShutdownSignals) -> int:
        os.kill(os.getpid(), number)
        await asyncio.sleep(30)
        return 0

    assert run_until_signal(main) == 128 + number


def test_without_a_signal_the_result_is_the_exit_code() -> None:
    async def main(_: ShutdownSignals) -> int:
        return 7

    assert run_until_signal(main) == 7


def test_teardown_survives_more_signals_and_is_told_to_hurry() -> None:
    steps: list[str] = []

    async def teardown(signals: ShutdownSignals) -> None:
        steps.append(f"patient {not signals.kill_now}")
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        steps.append(f"hurried {signals.kill_now}")

    async def main(signals: ShutdownSignals) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            await uncancellable(teardown(signals))
        return 0

    assert run_until_signal(main) == 128 + signal.SIGTERM
    assert steps == ["patient True", "hurried True"]


def test_a_swallowed_cancellation_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutdown, "CANCEL_AGAIN_S", 0.05)
    asked = 0

    async def main(_: ShutdownSignals) -> int:
        nonlocal asked
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            asked += 1
        await asyncio.sleep(30)
        return 0

    assert run_until_signal(main) == 130
    assert asked == 1


async def test_a_cancellation_during_uncancellable_work_comes_afterwards() -> None:
    finished = asyncio.Event()

    async def work() -> None:
        await asyncio.sleep(0.05)
        finished.set()

    task = asyncio.ensure_future(uncancellable(work()))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert finished.is_set()


async def test_an_error_of_uncancellable_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("it")

    with pytest.raises(ValueError, match="it"):
        await uncancellable(work())


def test_ctrl_c_in_up_says_what_is_stopped_and_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "60"])
    reading, writing = os.pipe()
    os.write(writing, b"{}\n")
    os.close(writing)
    monkeypatch.setattr(supervisor, "start_detached", lambda *_: (child, reading))

    def interrupted(_line: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(json, "loads", interrupted)
    said = CliRunner().invoke(app, ["up", "--state-dir", str(tmp_path)])
    assert said.exit_code != 0
    assert "interrupted: stopping what was started\nstopped\n" in said.stderr
    assert child.returncode == -signal.SIGTERM

"""Children and what they leave: nothing, whatever they do when asked to stop."""

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trefoil.cli.run import processes
from trefoil.cli.run.processes import ChildProcess, Command
from trefoil.runtime.clock import WallClock
from trefoil.runtime.proc import Identity

INFO = '{"level": "info", "event": "down"}'
CLOCK = WallClock()
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
POLITE = "import time; print('up', flush=True); time.sleep(60)"
PARENT = (
    "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
    " start_new_session=True); print('up', flush=True); time.sleep(60)"
)


def child(tmp_path: Path, code: str, launch_id: str, grace_s: float = 5.0) -> ChildProcess:
    return ChildProcess(
        Command("it", (sys.executable, "-c", code), tmp_path / "it.log", stop_grace_s=grace_s), launch_id, CLOCK
    )


@pytest.fixture
def launch_id() -> str:
    """Nobody else's on this machine, where these tests may run twice at once."""
    return secrets.token_hex(8)


async def until_up(one: ChildProcess) -> None:
    while "up" not in one.last_lines():
        await asyncio.sleep(0.02)


async def test_a_polite_child_goes_by_itself(tmp_path: Path) -> None:
    one = child(tmp_path, POLITE, "polite")
    await until_up(one)
    assert one.identity.alive()
    assert await one.stop()
    assert not one.identity.alive()
    assert one.exit_code == -signal.SIGTERM


async def test_a_stubborn_child_is_killed_after_the_grace(tmp_path: Path) -> None:
    one = child(tmp_path, STUBBORN, "stubborn", grace_s=0.2)
    await until_up(one)
    assert not await one.stop()
    assert one.exit_code == -signal.SIGKILL


async def test_hurry_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    one = child(tmp_path, STUBBORN, "kill_now", grace_s=60.0)
    await until_up(one)
    async with asyncio.timeout(30):
        assert not await one.stop(kill_now=lambda: True)


async def test_a_grandchild_in_a_session_of_its_own_is_found_and_swept(tmp_path: Path, launch_id: str) -> None:
    one = child(tmp_path, PARENT, launch_id)
    await until_up(one)
    assert len(processes.descendants(launch_id)) == 2
    await one.stop()
    assert len(processes.descendants(launch_id)) == 1, "it has left the group"
    assert len(await processes.kill_leftovers(launch_id, CLOCK)) == 1
    assert processes.descendants(launch_id) == []


async def test_a_child_is_found_at_every_moment_of_its_start(tmp_path: Path, launch_id: str) -> None:
    for number in range(10):  # it becomes a Python, then the command: two moments without an environment
        one = child(tmp_path, POLITE, f"{launch_id}-{number}")
        while "up" not in one.last_lines():
            assert processes.descendants(f"{launch_id}-{number}") == [one.identity]
        one.kill()


async def test_the_kernel_stops_children_of_a_killed_launcher(tmp_path: Path, launch_id: str) -> None:
    launcher = (
        "import sys, time; from pathlib import Path; from trefoil.cli.run.processes import ChildProcess, Command;"
        "from trefoil.runtime.clock import WallClock;"
        "c = ChildProcess(Command('x', (sys.executable, '-c', 'import time; time.sleep(60)'), Path(sys.argv[1])),"
        " sys.argv[2], WallClock()); print('up', flush=True); time.sleep(60)"
    )
    argv = (sys.executable, "-c", launcher, str(tmp_path / "x.log"), launch_id)
    one = ChildProcess(Command("launcher", argv, tmp_path / "launcher.log"), "outer", CLOCK)
    await until_up(one)
    assert len(processes.descendants(launch_id)) == 1
    os.kill(one.pid, signal.SIGKILL)
    async with asyncio.timeout(30):
        while processes.descendants(launch_id):
            await asyncio.sleep(0.05)
    one.kill()


async def test_last_lines_are_of_this_start(tmp_path: Path) -> None:
    for word in ("first", "second"):
        one = child(tmp_path, f"print({word!r})", "log")
        await one.wait()
    assert one.last_lines() == "second"


async def test_last_lines_leave_out_all_the_settings(tmp_path: Path) -> None:
    settings = json.dumps({"pue": 1.2, "event": "settings", "level": "info"})
    one = child(tmp_path, f"print({settings!r}); print('it ends')", "log")
    await one.wait()
    assert one.last_lines() == "it ends"
    one = child(tmp_path, f"print({settings!r})", "log")
    await one.wait()
    assert one.last_lines() == "(it logged nothing but its settings)"


async def test_a_silent_child_is_said_to_be_silent(tmp_path: Path) -> None:
    one = child(tmp_path, "pass", "silent")
    await one.wait()
    assert one.last_lines() == "(it logged nothing)"


def test_an_identity_is_not_fooled_by_a_reused_number() -> None:
    me = Identity.of_pid(os.getpid())
    assert me.alive()
    assert not Identity(me.pid, me.start_ticks + 1).alive()
    assert not Identity.of_pid(2**22).alive()


@pytest.mark.parametrize("code", [0, 3])
async def test_wait_returns_the_exit_code(tmp_path: Path, code: int) -> None:
    assert await child(tmp_path, f"raise SystemExit({code})", "exit").wait() == code


@pytest.mark.parametrize(
    ("words", "said"),
    [(("error: no moon", INFO), "no moon"), ((INFO,), "(it logged no error)"), ((), "(it logged nothing)")],
)
def test_the_last_error_is_no_line_of_progress(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    argv = (sys.executable, "-c", "import sys; print(*sys.argv[1:], sep='\\n')", *words)
    one = ChildProcess(Command("one", argv, tmp_path / "one.log"), "launch", CLOCK)
    one._popen.wait()
    assert one.last_error() == said


def test_a_log_that_cannot_be_read_is_no_error(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.log")
    for path in (tmp_path, tmp_path / "fifo.log"):
        assert "cannot be read" in processes.last_log_lines(path)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_command_starts_no_thread_for_each_core() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"}
    count = "import os, trefoil.cli.main, numpy; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"

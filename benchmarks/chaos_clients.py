"""Rows of what clients and operators send: while an attack lasts, everybody else is served, and so is the attacker.

Each attack is a process (`benchmarks/hostile.py`): its calls must get a status within STATUS_S, whatever they ask.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Final

import psutil

from benchmarks.chaos_rows import Trouble
from benchmarks.echo_system import EchoSystem
from trefoil.cli.system_client import TOKEN_FILE_VARIABLE

STATUS_S: Final = 1.0
DESCRIPTORS_LEFT: Final = 600
ATTACK_S: Final = 10.0
END_S: Final = 20.0
ROWS: Final = (
    ("clients send requests that make no sense", "nonsense"),
    ("clients send JSON that makes no sense, deep and huge", "json"),
    ("clients send half a megabyte that would become 128", "bombs"),
    ("clients ask 500 times a second and leave", "cancel"),
    ("clients ask 500 times a second with 1 ms to go", "hurry"),
    ("clients flood with resets, pings and settings", "flood"),
    ("clients read nothing, or write a byte a moment", "dribble"),
    ("1,500 idle connections a front, 600 descriptors left", "idle"),
    ("operators send commands that make no sense", "operate"),
)


def troubles() -> tuple[Trouble, ...]:
    """Troubles that clients and operators make."""
    return tuple(Trouble(what, partial(attacked, attack), ATTACK_S) for what, attack in ROWS)


def attacked(attack: str, system: EchoSystem) -> AbstractAsyncContextManager[None]:
    """Attack from a process of its own; at its end its calls are judged."""
    return _attacked(attack, system)


@asynccontextmanager
async def _attacked(attack: str, system: EchoSystem) -> AsyncIterator[None]:
    with ExitStack() as stack:
        if attack == "idle":
            for worker in system.workers() or [system.dispatcher()]:
                stack.enter_context(few_descriptors(worker))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.hostile", attack, json.dumps(dict(system.launch.addresses)),
            stdout=asyncio.subprocess.PIPE, env={**os.environ, TOKEN_FILE_VARIABLE: system.launch.token_file},
        )  # fmt: skip
        try:
            assert process.stdout is not None
            await asyncio.wait_for(process.stdout.readline(), END_S)
            yield
        finally:
            if process.returncode is None:
                process.terminate()
            told, _ = await asyncio.wait_for(process.communicate(), END_S)
        judge(attack, json.loads(told))


def judge(attack: str, found: dict[str, Any]) -> None:
    """Print what an attack met; raises AssertionError if a call waited for its status longer than it may.

    On a machine that others use as well, as much longer as everything takes there.
    """
    slowed = max(1.0, found["slowed"])
    print(
        f"{attack}: {found['calls']} calls, {found['codes']}; slowest {found['slowest_s']:.2f} s ({found['slowest']}), "
        f"beside {found['stood_still_s']:.2f} s in which its own process stood still; machine slowed {slowed:.1f} times"
    )
    late = f"{found['slowest']} took {found['slowest_s']:.2f} s, a status is due in {STATUS_S:g} s"
    assert found["slowest_s"] <= STATUS_S * slowed, late


@contextmanager
def few_descriptors(process: psutil.Process) -> Iterator[None]:
    """Leave a process DESCRIPTORS_LEFT descriptors."""
    soft, hard = process.rlimit(psutil.RLIMIT_NOFILE)
    process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + DESCRIPTORS_LEFT, hard))
    try:
        yield
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, (soft, hard))

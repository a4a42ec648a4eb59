"""A power agent whose journal is lost, spoilt or another's, under a serving system: what runs serves on.

Each trouble stops the agent (or lets it run), takes its journal or state directory away, and starts the next agent.
What it must find as before: every Triton (pid), every slice (READY, generation), nothing that is left unproven.
"""

import asyncio
import json
import os
import shutil
import signal
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Final

from benchmarks.chaos_rows import Trouble, running_pids
from benchmarks.echo_system import EchoSystem
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SliceKey, SliceState

LASTS_S: Final = 0.5
FRESH_S: Final = 2.0
TAKEN_OVER_S: Final = 10.0
POLL_S: Final = 0.1
JOURNAL: Final = "journal.jsonl"
Loss = Callable[[Path], None]


def troubles() -> tuple[Trouble, ...]:
    """Losses under an agent that is stopped, and under one that runs."""
    stopped = {
        "state directory moved away": _moved,
        "journal deleted": lambda folder: (folder / JOURNAL).unlink(),
        "journal cut in half": lambda folder: os.truncate(folder / JOURNAL, (folder / JOURNAL).stat().st_size // 2),
        "journal of another node": lambda folder: _append(folder, {"version": 1, "owner": "echo/node9"}),
        "journal full of zeros": lambda folder: (folder / JOURNAL).write_bytes(bytes(65536)),
        "runtime and slices deleted too": lambda folder: (
            [shutil.rmtree(path) for path in folder.iterdir() if path.is_dir()] and (folder / JOURNAL).unlink()
        ),
    }
    running = {"state directory moved away": _moved, "journal deleted": stopped["journal deleted"]}
    ends = frozenset({"power_agent"})
    return (
        *(Trouble(f"agent stopped, {what}", _lose(loss, stops=True), LASTS_S, ends) for what, loss in stopped.items()),
        *(Trouble(f"agent runs, {what}", _lose(loss, stops=False), LASTS_S) for what, loss in running.items()),
    )


def _moved(folder: Path) -> None:
    aside = folder.with_name(f"{folder.name}.lost")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)


def _append(folder: Path, header: dict[str, object]) -> None:
    text = json.dumps({"load": "", "journal": header}).encode()
    with (folder / JOURNAL).open("ab") as file:
        file.write(b"%s\t%08x\n" % (text, zlib.crc32(text)))


def _lose(loss: Loss, *, stops: bool) -> Callable[[EchoSystem], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def trouble(system: EchoSystem) -> AsyncIterator[None]:
        before, folder, pid = (
            await _tritons(system),
            system.launcher.paths.folder("agent"),
            system.launcher.pid("power_agent"),
        )
        system.launcher._failing.pop("power_agent", None)  # its pause after several ends is not measured
        if stops:
            os.kill(pid, signal.SIGSTOP)
        loss(folder)
        if stops:
            os.kill(pid, signal.SIGKILL)
            await _until_another(system, pid)
        yield
        await _as_before(system, before, folder / JOURNAL)

    return trouble


async def _until_another(system: EchoSystem, pid: int) -> None:
    while running_pids(system).get("power_agent", pid) == pid:
        await system.clock.sleep(POLL_S)


async def _tritons(system: EchoSystem) -> dict[SliceKey, tuple[int, int]]:
    """Generation and pid of each slice's Triton."""
    found = {}
    for key, status in (await system.serving()).items():
        process = await system.triton(key)
        found[key] = (status.generation, process.pid if process is not None else 0)
    return found


async def _as_before(system: EchoSystem, before: dict[SliceKey, tuple[int, int]], journal: Path) -> None:
    """Wait until the next agent says that all is as before; AssertionError where it is not."""
    found = ""
    try:
        async with asyncio.timeout(TAKEN_OVER_S):
            while found := "" if journal.is_file() else "no journal was written again":
                await system.clock.sleep(POLL_S)
            while found := await _difference(system, before):
                await system.clock.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(found) from None


async def _difference(system: EchoSystem, before: dict[SliceKey, tuple[int, int]]) -> str:
    try:
        nodes = await system.client.nodes()
    except TrefoilError as error:
        return str(error)
    since_s = system.clock.now_s() - FRESH_S
    if not nodes or any(node.observed_at_s < since_s for node in nodes):
        return "no agent publishes"
    unproven = [text for node in nodes for text in node.missing if text.startswith(("unproven", "disk"))]
    parts = [part for node in nodes for device in node.devices for part in device.slices]
    unready = [f"{part.key.name} is {part.state.name}" for part in parts if part.state != SliceState.READY]
    now = await _tritons(system)
    return "; ".join([*unproven, *unready, *([] if now == before else [f"slices were {before}, are {now}"])])

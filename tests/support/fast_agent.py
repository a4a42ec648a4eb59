"""The power agent as it is wired in production, in a forked process: with a fast clock and a place to die at.

Crash points live here and not in the product: the journal's append and its compaction are wrapped, count themselves in
a page that is shared with the test, and end the process by SIGKILL before or after the write that the test has chosen.
"""

import asyncio
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from power_agent import __main__ as wiring
from power_agent import agent as agent_module
from power_agent.durability.journal import Journal
from power_agent.triton.installation import TritonInstall
from trefoil.core.errors import TrefoilError
from trefoil.runtime.clock import WallClock
from trefoil.runtime.repository import load_catalog
from trefoil.runtime.service import run

WRITES, ARMED, WHERE, DIED, READY, ENDED = range(6)  # of the page: 8 bytes each
BEFORE, AFTER = 1, 2
_catalogs: dict[Path, Any] = {}


class Page:
    """Numbers that test and agent share, and that survive the agent."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(mmap.PAGESIZE))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), mmap.PAGESIZE)

    def __getitem__(self, field: int) -> int:
        return int(struct.unpack_from("<q", self._map, 8 * field)[0])

    def __setitem__(self, field: int, value: int) -> None:
        struct.pack_into("<q", self._map, 8 * field, value)


class FastClock(WallClock):
    """Runs `rate` times as fast; what crosses machines (`now_s`) stays true."""

    def __init__(self, rate: float) -> None:
        self._rate = rate

    def monotonic_s(self) -> float:
        return time.monotonic() * self._rate

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._rate)

    def block(self, seconds: float) -> None:
        time.sleep(seconds / self._rate)


def _mortal(page: Page, write: Callable[..., None]) -> Callable[..., None]:
    def mortal(*args: Any, **kwargs: Any) -> None:
        page[WRITES] += 1
        here = page[WRITES] == page[ARMED]
        if here and page[WHERE] == BEFORE:
            _die(page)
        write(*args, **kwargs)
        if here and page[WHERE] == AFTER:
            _die(page)

    return mortal


def _die(page: Page) -> None:
    page[DIED] = page[WRITES]
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(10)  # the signal is on its way


def catalog(root: Path, *_: Any) -> Any:
    """Read once, in the zygote: not at each start."""
    if root not in _catalogs:
        _catalogs[root] = load_catalog(root)
    return _catalogs[root]


def _install(*_: Any) -> TritonInstall:
    here = Path("/nowhere")
    return TritonInstall(here, here, here, here, "3.11", "1", "1", "", True, "")


def main(config: dict[str, Any]) -> int:
    """In the forked process: `config` holds the agent's settings, `page` and `rate`."""
    page, rate = Page(Path(config.pop("page"))), float(config.pop("rate"))
    journal: Any = Journal
    journal._append = _mortal(page, journal._append)
    journal._compact = _mortal(page, journal._compact)
    modules: list[Any] = [wiring, agent_module]
    for module in modules:
        for name, value in (("WallClock", lambda: FastClock(rate)), ("load_catalog", catalog)):
            if hasattr(module, name):
                setattr(module, name, value)
        if hasattr(module, "install_triton"):
            module.install_triton = _install
    arguments = [word for name, value in config.items() for word in ("--set", f"{name}={value}")]
    try:
        asyncio.run(_serve(arguments, page))
    except TrefoilError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        page[ENDED] = 1
    return 0


async def _serve(arguments: list[str], page: Page) -> None:
    parts = wiring.build(arguments)
    last: Any = parts[-1]
    init = last.init

    async def ready() -> None:
        await init()
        page[READY] = 1

    last.init = ready
    await run(parts, WallClock())

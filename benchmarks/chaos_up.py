"""Troubles of services that do not stay up, and of an agent that starts while its driver is not ready."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

import pynvml

from benchmarks.chaos_rows import Trouble
from benchmarks.echo_system import EchoSystem

KILL_EVERY_S: Final = 1.0
NEVER: Final = 10**6
NOT_READY: Final = {
    "Uninitialized": pynvml.NVML_ERROR_UNINITIALIZED,
    "DriverNotLoaded": pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
}


def troubles() -> tuple[Trouble, ...]:
    """Troubles of this part, in the order in which they are measured."""
    agent, all_three = frozenset({"power_agent"}), ("controller", "carbon_feed", "power_agent")
    return (
        *(
            Trouble(f"agent starts, NVML says {word}", lambda system, code=code: not_ready(system, code), ended=agent)
            for word, code in NOT_READY.items()
        ),
        *(
            Trouble(
                f"{name} refuses its settings",
                lambda system, name=name: refusing(system, name),
                ended=frozenset({name}),
            )
            for name in all_three
        ),
        Trouble(
            f"{', '.join(all_three)} die as soon as they are up",
            lambda system: dying(system, all_three),
            ended=frozenset(all_three),
        ),
    )


@asynccontextmanager
async def refusing(system: EchoSystem, name: str) -> AsyncIterator[None]:
    """Break a service's settings, then kill it: it refuses each start until they are fixed."""
    path = system.launcher.paths.settings(name)
    before = path.read_text()
    path.write_text("no_such_setting = 1\n" + before)
    try:
        _kill(system, name)
        yield
    finally:
        path.write_text(before)


@asynccontextmanager
async def dying(system: EchoSystem, names: Sequence[str]) -> AsyncIterator[None]:
    """Kill services again and again, as soon as they are up."""

    async def kill() -> None:
        while True:
            for name in names:
                with suppress(KeyError, ProcessLookupError):  # it waits for its next start
                    _kill(system, name)
            await system.clock.sleep(KILL_EVERY_S)

    killing = asyncio.create_task(kill(), name="kill")
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


@asynccontextmanager
async def not_ready(system: EchoSystem, code: int) -> AsyncIterator[None]:
    """Let the driver refuse to list its GPUs, then kill the agent: it starts while NVML is not ready."""
    await asyncio.to_thread(system.node.admin, "fault", symbol="nvmlDeviceGetCount_v2", code=code, times=NEVER)
    try:
        _kill(system, "power_agent")
        yield
    finally:
        await asyncio.to_thread(system.node.admin, "clear_faults")


def _kill(system: EchoSystem, name: str) -> None:
    os.kill(system.launcher.pid(name), signal.SIGKILL)

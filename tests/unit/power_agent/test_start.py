"""An agent that starts before its driver or simulated node is ready: it waits, says why once, and continues by
itself."""

import asyncio
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import structlog

from power_agent.agent import WAIT_MAX_S, AgentComponent
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import install_simulated_driver, uninstall_simulated
from power_agent.durability.journal import Journal
from power_agent.settings import PowerAgentSettings
from power_agent.slices.node_state import Node
from power_agent.watch.driver_watch import DriverWatch
from tests.support.simulated_driver import A100_40GB, H100_80GB, make_driver
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import DeviceState
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.driver import Driver
from trefoil.simulated_node.gpu_state import Nvml, NvmlFault

LIBRARY_NOT_FOUND, UNKNOWN = 12, 999
NOT_READY = (int(Nvml.UNINITIALIZED), int(Nvml.DRIVER_NOT_LOADED), LIBRARY_NOT_FOUND)
READY = {"node0/gpu0": DeviceState.ASLEEP, "node0/gpu1": DeviceState.ASLEEP}


class Clock(ManualClock):
    """Whoever sleeps on it is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self.pauses_s: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        self.move(seconds)
        await asyncio.sleep(0)


class World:
    """A driver that refuses the calls `refused` (by their number, with that code), and an agent that starts on it."""

    def __init__(self, folder: Path, *, marker: bool = True, socket: bool = False) -> None:
        self.refused: dict[int, int] = {}
        self.calls = 0
        self.runtime_away = 0
        self.driver: Driver = make_driver(A100_40GB, H100_80GB)
        folder.mkdir(exist_ok=True)
        self.marker = folder / "driver_load_id"
        if marker:
            self.marker.write_text("load-1")
        settings = PowerAgentSettings(
            state_dir=folder, driver_marker_path=self.marker, node_socket=folder / "node.sock" if socket else None
        )
        self.clock = Clock()
        self.journal = Journal(folder, "boot", "load-1")
        self.journal.open()
        nothing: Any = None
        self.node = Node(settings, self.clock, self.journal, nothing, Metrics("power_agent"))
        self.node.driver_load_id = "load-1" if marker else ""
        inventory = Inventory("node0", None)
        parts: dict[str, Any] = dict.fromkeys(field.name for field in fields(AgentComponent))
        parts |= {"node": self.node, "inventory": inventory, "calls": DriverCalls(inventory), "executor": self}
        self.agent = AgentComponent(**parts)

    def send(self, symbol: str, args: Any) -> tuple[int, list[Any]]:
        self.calls += 1
        if self.calls in self.refused:
            return self.refused[self.calls], []
        try:
            return 0, CALLS[symbol](self.driver, *args)
        except NvmlFault as refusal:
            return int(refusal.code), []

    async def processes(self) -> dict[str, Any]:
        """In place of the executor."""
        if self.runtime_away:
            self.runtime_away -= 1
            raise Unavailable("no engine answers")
        return {"tag": self}

    async def start(self) -> dict[str, DeviceState]:
        install_simulated_driver(self.send)
        try:
            assert await self.agent._find_devices() == {"tag": self}
        finally:
            uninstall_simulated()
        return {name: device.state for name, device in self.node.devices.items()}


async def test_a_driver_that_is_not_ready_at_any_call_only_costs_time(tmp_path: Path) -> None:
    plain = World(tmp_path)
    assert await plain.start() == READY
    assert plain.clock.pauses_s == []
    assert plain.calls > 10
    for number in range(1, plain.calls + 1):
        for code in NOT_READY:
            world = World(tmp_path / f"{number}-{code}")
            world.refused[number] = code
            assert await world.start() == READY, (number, code)
            assert len(world.clock.pauses_s) == 1, (number, code)
            assert world.node.missing == plain.node.missing


@pytest.mark.parametrize("code", [*NOT_READY, UNKNOWN])
@pytest.mark.parametrize("socket", [True, False])
async def test_a_driver_that_comes_late_is_waited_for_and_that_is_said_once(
    tmp_path: Path, code: int, socket: bool
) -> None:
    world = World(tmp_path, socket=socket, marker=not socket)
    world.refused = dict.fromkeys(range(1, 11), code)
    world.runtime_away = 1
    with structlog.testing.capture_logs() as logs:
        assert await world.start() == READY
    said = [entry["event"] for entry in logs if "devices of this node" in entry["event"]]
    assert said == ["waiting for the devices of this node"] * 2 + ["the devices of this node are ready"]
    assert len(world.clock.pauses_s) == 11
    assert world.clock.pauses_s == sorted(world.clock.pauses_s)
    assert (world.clock.pauses_s[0], world.clock.pauses_s[-1]) == (0.1, WAIT_MAX_S)


@pytest.mark.parametrize("code", NOT_READY)
async def test_a_machine_without_a_driver_starts_at_once_and_says_so(tmp_path: Path, code: int) -> None:
    world = World(tmp_path, marker=False)
    world.refused = dict.fromkeys(range(1, 100), code)
    assert await world.start() == {}
    assert world.clock.pauses_s == []
    nothing: Any = None
    watch = DriverWatch(world.node, nothing, nothing, world.agent.calls, world.agent.inventory, nothing)
    watching = asyncio.create_task(watch.run())
    while len(world.clock.pauses_s) < 3:
        await asyncio.sleep(0)
    watching.cancel()
    assert [entry.partition(":")[0] for entry in world.node.missing] == ["driver"]


async def test_what_an_earlier_driver_held_is_dropped_when_another_came_meanwhile(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.marker.write_text("load-2")
    dropped: list[str] = []
    world.journal.driver_changed = dropped.append  # type: ignore[method-assign]
    await world.start()
    assert (world.node.driver_load_id, dropped) == ("load-2", ["load-2"])


async def test_names_of_gpus_outlive_the_agent(tmp_path: Path) -> None:
    world = World(tmp_path)
    await world.start()
    world.journal.close()
    after = World(tmp_path)
    _, second = after.driver.gpus
    after.driver.gpus, second.index = (second,), 0
    assert await after.start() == {"node0/gpu1": DeviceState.ASLEEP}
    assert after.node.devices["node0/gpu1"].uuid == second.uuid


async def test_what_was_seen_before_the_runtime_answered_is_looked_at_again(tmp_path: Path) -> None:
    plain = World(tmp_path / "plain")
    await plain.start()
    world = World(tmp_path / "world")
    world.refused[plain.calls] = int(Nvml.GPU_IS_LOST)
    world.runtime_away = 1
    assert await world.start() == READY

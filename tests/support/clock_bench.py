"""A clock keeper with its journal and node, on a driver of a few lines and a clock that only tests move.

`HANDS` are the levers of a device as tests that hold for each of them speak of it.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from power_agent.clocks.clock_keeper import ClockKeeper
from power_agent.clocks.core.clock_control import Lever
from power_agent.clocks.latency_reader import LatencyReader
from power_agent.devices.errors import DeviceError, DeviceLost
from power_agent.devices.gpus import PowerLimits
from power_agent.durability.journal import Journal
from power_agent.settings import PowerAgentSettings
from power_agent.slices.node_state import Device, Node
from tests.support.plans import CATALOG
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import ClockLease, DeviceState, DeviceType
from trefoil.core.plan import NodePlan, PlannedDevice
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics

GPU = "node0/gpu0"
SETTERS = ("lock_clock", "reset_clock", "set_power_limit_w")


class FakeGpus:
    """Remembers what is set, when, and refuses what it is told to refuse. Outlives the agents that use it."""

    def __init__(self, clock: ManualClock, kind: DeviceType = A100_40GB) -> None:
        self.clock = clock
        self.kind = kind
        self.locked: tuple[int, int] | None = None
        self.limit_w = self.found_w = kind.power_limit_max_w  # in force; as the agents found it
        self.calls: list[tuple[float, str]] = []
        self.refusals: list[DeviceError] = []  # of the next setters
        self.reading = kind.clocks_mhz[-1] if kind.clocks_mhz else 0
        self.reasons: tuple[str, ...] = ()
        self.default_mhz = 0
        self.lost = False

    def _set(self, name: str) -> None:
        self.calls.append((self.clock.monotonic_s(), name))
        self._alive()
        if self.refusals:
            raise self.refusals.pop(0)

    def _alive(self) -> None:
        if self.lost:
            raise DeviceLost("lost", code=15)

    def lock_clock(self, device: str, min_mhz: int, max_mhz: int) -> None:
        self._set("set")
        self.locked = (min_mhz, max_mhz)

    def reset_clock(self, device: str) -> None:
        self._set("reset")
        self.locked = None

    def clock_mhz(self, device: str) -> int:
        self._alive()
        return self.locked[1] if self.locked and not self.reasons else self.reading

    def clock_event_reasons(self, device: str) -> tuple[str, ...]:
        return (*(("locked_or_application_clocks",) if self.locked else ()), *self.reasons)

    def clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        return self.kind.clocks_mhz

    def default_application_clock_mhz(self, device: str) -> int:
        return self.default_mhz

    def power_limit_w(self, device: str) -> float | None:
        return self.limit_w

    def power_limit_set_w(self, device: str) -> float | None:
        self._alive()
        return self.limit_w

    def power_limits(self, device: str) -> PowerLimits | None:
        low, high = self.kind.power_limit_min_w, self.kind.power_limit_max_w
        return PowerLimits(low, high, high)

    def set_power_limit_w(self, device: str, limit_w: float) -> None:
        self._set("reset" if limit_w == self.found_w else "set")
        self.limit_w = limit_w

    def reload(self) -> None:
        """The driver is loaded again, and has forgotten what was set."""
        self.locked, self.limit_w = None, self.found_w


class Bench:
    """One agent after another on the same GPU, journal and clock."""

    def __init__(self, folder: Path, kind: DeviceType = A100_40GB) -> None:
        self.folder = folder
        self.clock = ManualClock(1_700_000_000.0)
        self.gpus = FakeGpus(self.clock, kind)
        self.driver_load_id = "load-1"
        self.crash: str = ""  # the next setter never returns: "before" or "after" the driver took it
        self.crashed = False
        self.task: asyncio.Task[None] | None = None
        self.state: State | None = None  # with what dispatchers report; None: nobody reports anything

    async def start(self, plan: NodePlan | None = None, state: DeviceState = DeviceState.AWAKE) -> None:
        settings = PowerAgentSettings(node_socket=self.folder / "node.sock", state_dir=self.folder)
        journal = Journal(self.folder, "boot", self.driver_load_id)
        self.node = Node(settings, self.clock, journal, CATALOG, Metrics("power_agent", simulated=True))
        self.node.boot_id, self.node.driver_load_id = "boot", self.driver_load_id
        self.node.devices[GPU] = Device(GPU, self.gpus.kind, state)
        journal.open()
        self.node.plan = plan
        self.crashed = False
        reader = LatencyReader(self.node, self.state) if self.state is not None else None
        self.keeper = ClockKeeper(self.node, self.gpus, self._call, reader)
        await self.keeper.open()
        self.task = asyncio.create_task(self.keeper.run())
        await self.clock.advance(0.0)

    @property
    def device(self) -> Device:
        return self.node.devices[GPU]

    async def _call(self, device: str, call: Callable[[], Any]) -> Any:
        is_setter = any(name in call.__code__.co_names for name in SETTERS)
        if is_setter and self.crash:
            moment, self.crash = self.crash, ""
            if moment == "after":
                call()
            self.crashed = True
            await asyncio.get_running_loop().create_future()  # the process is gone: nothing continues from here
        await asyncio.sleep(0)
        return call()

    async def kill(self) -> None:
        """As SIGKILL: nothing is put back."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.node.journal.close()

    async def end(self) -> None:
        """As SIGTERM."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        restoring = asyncio.create_task(self.keeper.restore())
        while not restoring.done():
            await self.clock.advance(0.1)
        restoring.result()
        self.node.journal.close()

    async def pass_s(self, seconds: float) -> None:
        """Let time pass; a bug in the keeper comes out here."""
        await self.clock.advance(seconds)
        if self.task is not None and self.task.done():
            self.task.result()

    def take(self, plan: NodePlan | None, state: DeviceState = DeviceState.AWAKE) -> None:
        """A new plan is in force."""
        self.node.plan = plan
        self.node.set_device(self.device, state)
        self.node.changed()


def clock_plan(min_mhz: int = 0, max_mhz: int = 0, limit_w: float = 0.0, number: int = 1, epoch: int = 1) -> NodePlan:
    """A plan of one device that hosts nothing and asks for clocks."""
    device = PlannedDevice(GPU, DeviceState.AWAKE, clock_min_mhz=min_mhz, clock_max_mhz=max_mhz, power_limit_w=limit_w)
    return NodePlan(Revision(epoch, number), "node0", (device,))


@dataclass(frozen=True)
class Hand:
    """One lever of the GPU with three values: low, middle, high."""

    lever: Lever
    values: tuple[int, int, int]

    def plan(self, value: int, number: int = 1) -> NodePlan:
        """A plan that wants a value; 0: the default."""
        return clock_plan(0, value, number=number) if self.is_clock else clock_plan(limit_w=value, number=number)

    def lease(self, value: int, holder: str = "governor", epoch: int = 1) -> ClockLease:
        """A request for a lease of a value."""
        if self.is_clock:
            return ClockLease(GPU, 0, value, holder, epoch)
        return ClockLease(GPU, 0, 0, holder, epoch, power_limit_w=value)

    def said(self, value: int) -> str:
        """The value as reports have it."""
        return f"210-{value} MHz" if self.is_clock else f"{value} W"

    @property
    def is_clock(self) -> bool:
        return self.lever is Lever.CLOCK

    def in_force(self, gpus: FakeGpus) -> float | None:
        """What the driver has; None: as the agents found it."""
        if self.is_clock:
            return gpus.locked[1] if gpus.locked else None
        return gpus.limit_w if gpus.limit_w != gpus.found_w else None


HANDS = (
    Hand(Lever.CLOCK, (600, 900, 1200)),
    Hand(Lever.POWER_LIMIT, (150, 250, 300)),
)

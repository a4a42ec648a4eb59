"""One GPU's clocks and power limit: what was set, and the calls that set and read them.

The journal is told before the driver: whatever is set when this process dies is known to its successor. Nothing here
is fatal: what the driver refuses is noted, tried again later and reported as drift.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import structlog

from power_agent.core.clocks import (
    LIMIT_TOLERANCE_W,
    Ability,
    Action,
    ClockRange,
    HeldLease,
    Lever,
    Reading,
    Verb,
    View,
    complaints,
    drift,
    planned_range,
)
from power_agent.core.governing import Governed
from power_agent.devices.errors import DeviceLost
from power_agent.devices.gpus import PowerLimits
from power_agent.memory import Override
from power_agent.node import Device, Node
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import PlannedDevice

SETTLE_S: Final = 0.3  # a GPU takes 5 to 50 ms to reach a new clock, its sensors a little longer
CONFIRM_S: Final = 1.0  # what differs is read again before it is called drift: clocks move all the time
CLOCK: Final = "clock"
POWER_LIMIT: Final = "power_limit"

T = TypeVar("T")


class Gauges(Protocol):
    """What of the inventory is needed here."""

    def clock_mhz(self, device: str) -> int: ...
    def clock_event_reasons(self, device: str) -> tuple[str, ...]: ...
    def clocks_supported_mhz(self, device: str) -> tuple[int, ...]: ...
    def lock_clock(self, device: str, min_mhz: int, max_mhz: int) -> None: ...
    def reset_clock(self, device: str) -> None: ...
    def power_limit_w(self, device: str) -> float | None: ...
    def power_limit_set_w(self, device: str) -> float | None: ...
    def power_limits(self, device: str) -> PowerLimits | None: ...
    def set_power_limit_w(self, device: str, limit_w: float) -> None: ...


class Call(Protocol):
    """Runs a blocking call in the worker of a device."""

    def __call__(self, device: str, call: Callable[[], T], /) -> Awaitable[T]: ...


class ClockDevice:
    """`free_w`: the limit that is in force without ours. `load`: the driver load that the levers are true for."""

    def __init__(self, node: Node, device: Device, inventory: Gauges, call: Call) -> None:
        self.device = device
        self.name = device.device
        self.ability = Ability(self.name, device.type.name, cannot_lock="nothing is known of its clocks")
        self.lease: HeldLease | None = None
        settings = node.settings
        self.governed = Governed(settings.governor, settings.parts.get("governor", {}))
        self.check_s = 0.0
        self._node = node
        self._inventory = inventory
        self._call = call
        self._clock: Lever[ClockRange] = Lever()
        self._limit: Lever[float] = Lever()
        self._free_w = 0.0
        self._actuated_s = float("-inf")
        self._load = self._current_load
        self._known = False
        self._seen: tuple[str, ...] = ()  # by the last reading, not yet confirmed
        self._lost = device.state == DeviceState.LOST
        self._log = structlog.get_logger()

    @property
    def _current_load(self) -> str:
        return f"{self._node.boot_id}/{self._node.driver_load_id}"

    async def look(self) -> None:
        """Find out what the device can do, and what a predecessor that was killed may have left set.

        Raises:
            DeviceError: the driver refuses; to be asked again later.
        """
        if self._known or self.device.state == DeviceState.LOST:
            return
        name, inventory = self.name, self._inventory

        def read() -> tuple[tuple[int, ...], PowerLimits | None, float | None]:
            return inventory.clocks_supported_mhz(name), inventory.power_limits(name), inventory.power_limit_set_w(name)

        clocks_mhz, limits, in_force_w = await self._call(name, read)
        kind, cannot_lock = self.device.type, ""
        if not kind.clock_lockable or not clocks_mhz:
            cannot_lock = f"a {kind.name} cannot lock clocks: that came with Volta"
        range_w = None if limits is None else (limits.min_w, limits.max_w)
        self.ability = Ability(name, kind.name, clocks_mhz, range_w, cannot_lock)
        self._known = True
        memory, self._free_w = self._node.journal.memory, in_force_w or 0.0
        if (name, CLOCK) in memory.overrides:
            self._clock = Lever(None, sure=False)
        limit = memory.overrides.get((name, POWER_LIMIT))
        if limit is None:
            return
        if limit.load == self._current_load or abs(self._free_w - limit.high) <= LIMIT_TOLERANCE_W:
            self._free_w, self._limit = limit.low, Lever(None, sure=False)
        else:  # the driver was loaded again and has forgotten it: what is in force now is somebody else's
            self._node.journal.restored(name, POWER_LIMIT)

    def view(
        self, planned: PlannedDevice | None = None, state: DeviceState | None = None, *, leaving: bool = False
    ) -> View:
        """As the brain looks at it; `planned` and `state` stand in for those in force, which alone are governed."""
        plan, asked = self._node.plan, planned
        if planned is None and plan is not None:
            planned = next((device for device in plan.devices if device.device == self.name), None)
        limit_w = planned.power_limit_w if planned is not None else 0.0
        return View(
            self.ability,
            self.device.state if state is None else state,
            None if planned is None else self._range(planned, governed=asked is None and not leaving),
            limit_w if limit_w and abs(limit_w - self._free_w) > LIMIT_TOLERANCE_W else None,
            self.lease,
            self._clock,
            self._limit,
            self._actuated_s,
            leaving,
        )

    def _range(self, planned: PlannedDevice, *, governed: bool) -> ClockRange | None:
        if not governed:
            return planned_range(planned, self.ability.supported_mhz)
        device, now_s = self.device, self._node.clock.monotonic_s()
        return self.governed.range(planned, self.ability, device.clock_mhz, not device.clock_drift, now_s)

    def notice(self) -> None:
        """A lease that has run out; a driver or a GPU that came back, perhaps without what was set on it."""
        now_s = self._node.clock.monotonic_s()
        if self.device.clock_lease is not None and (self.lease is None or now_s >= self.lease.expires_s):
            self.device.clock_lease = None
            self._log.info("clock lease ended", device=self.name)
            self._node.changed()
        lost = self.device.state == DeviceState.LOST
        if lost == self._lost and (lost or self._load == self._current_load):
            return
        if self._clock.value is not None:
            self._clock = replace(self._clock, sure=False)
        if self._limit.value is not None:
            self._limit = replace(self._limit, sure=False)
        self._lost, self._load, self.check_s = lost, self._current_load, now_s
        if lost:
            self._report(())

    # --- set ----------------------------------------------------------------------------------------------------------

    async def act(self, action: Action) -> None:
        """Carry out one action; what the driver refuses is noted, not raised."""
        clock, started_s, error = self._node.clock, self._node.clock.monotonic_s(), ""
        try:
            self._begin(action)
            await self._call(self.name, self._change(action))
            self._taken(action)
        except DeviceLost as lost:
            error = str(lost)
            self._node.set_device(self.device, DeviceState.LOST)
        except TrefoilError as refused:
            error = str(refused)
            self._refused(action, error)
        finally:
            self._actuated_s = clock.monotonic_s()
        self.check_s = self._actuated_s + SETTLE_S
        log, value = self._log.warning if error else self._log.info, action.range or action.limit_w or "default"
        log("clocks", device=self.name, verb=action.verb.value, value=str(value), why=action.why, error=error)
        outcome, took_s = "failed" if error else "done", self._actuated_s - started_s
        self._node.metrics.inc("trefoil_steps_total", verb="lock_clock", outcome=outcome)
        self._node.metrics.observe("trefoil_step_duration_seconds", took_s, verb="lock_clock")
        self._node.changed()

    def _begin(self, action: Action) -> None:
        """Remember what is about to be set: from here on a crash may leave it so."""
        journal = self._node.journal
        if action.range is not None:
            journal.override(Override(self.name, CLOCK, action.range.min_mhz, action.range.max_mhz, self._current_load))
        if action.limit_w is not None:
            journal.override(Override(self.name, POWER_LIMIT, self._free_w, action.limit_w, self._current_load))
        if action.verb in (Verb.LOCK, Verb.RESET):
            self._clock = replace(self._clock, sure=False)
        else:
            self._limit = replace(self._limit, sure=False)

    def _change(self, action: Action) -> Callable[[], None]:
        inventory, name = self._inventory, self.name
        if action.verb == Verb.LOCK:
            assert action.range is not None
            low, high = action.range.min_mhz, action.range.max_mhz
            return lambda: inventory.lock_clock(name, low, high)
        if action.verb == Verb.RESET:
            return lambda: inventory.reset_clock(name)
        limit_w = self._free_w if action.limit_w is None else action.limit_w
        return lambda: inventory.set_power_limit_w(name, limit_w)

    def _taken(self, action: Action) -> None:
        if action.verb in (Verb.LOCK, Verb.RESET):
            self._clock = Lever(action.range)
        else:
            self._limit = Lever(action.limit_w)
        if action.verb == Verb.RESET:
            self._node.journal.restored(self.name, CLOCK)
        elif action.verb == Verb.UNLIMIT:
            self._node.journal.restored(self.name, POWER_LIMIT)

    def _refused(self, action: Action, error: str) -> None:
        now_s = self._node.clock.monotonic_s()
        if action.verb in (Verb.LOCK, Verb.RESET):
            self._clock = self._clock.failed(action.range, error, now_s)
        else:
            self._limit = self._limit.failed(action.limit_w, error, now_s)

    # --- read back ----------------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Compare what the GPU does with what was set; what differs is reported, not fought."""
        inventory, name, device = self._inventory, self.name, self.device
        self.check_s = self._node.clock.monotonic_s() + self._node.settings.drift_poll_s
        if device.state == DeviceState.LOST:
            return

        def read() -> tuple[Reading, float | None]:
            clock_mhz, reasons = inventory.clock_mhz(name), inventory.clock_event_reasons(name)
            return Reading(clock_mhz, reasons, inventory.power_limit_set_w(name)), inventory.power_limit_w(name)

        try:
            await self.look()
            reading, enforced_w = await self._call(name, read)
        except TrefoilError as error:  # whether it is lost, or the driver gone, is for health to find out
            self._log.info("clocks cannot be read", device=name, why=str(error))
            self._report(tuple(complaints(self.view())))
            return
        before = (device.clock_mhz, device.clock_event_reasons, device.power_limit_w)
        device.clock_mhz, device.clock_event_reasons = reading.clock_mhz, reading.reasons
        device.power_limit_w = enforced_w or 0.0
        if self._limit == Lever() and reading.limit_w is not None:  # nobody's, or somebody else's: to be put back
            self._free_w = reading.limit_w
        seen = drift(self.view(), reading)
        if seen != self._seen and seen != device.clock_drift:
            self.check_s = min(self.check_s, self._node.clock.monotonic_s() + CONFIRM_S)
        confirmed, self._seen = tuple(text for text in seen if text in self._seen), seen
        self._report((*confirmed, *(text for text in complaints(self.view()) if text not in confirmed)))
        if before != (device.clock_mhz, device.clock_event_reasons, device.power_limit_w):
            self._node.changes.notify()

    def _report(self, found: tuple[str, ...]) -> None:
        if found != self.device.clock_drift:
            self.device.clock_drift = found
            (self._log.warning if found else self._log.info)("drift of clocks", device=self.name, drift=found)
            self._node.changed()

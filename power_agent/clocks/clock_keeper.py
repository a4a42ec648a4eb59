"""Clock control shell: locks and resets each GPU's clocks as `core/clock_control.py` decides, and grants clock leases.

One task per device, so that a stuck call on one GPU keeps no lease of another alive. The journal is told before the
driver: whatever is set when this process dies is known to its successor. Nothing that the driver refuses is fatal: it
is noted, tried again later and reported as drift.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import structlog

from power_agent.clocks.core.clock_control import (
    HOLDS_BACK,
    Ability,
    ClockAction,
    ClockLock,
    ClockRange,
    ClockReading,
    ClockVerb,
    ClockView,
    HeldLease,
    check_lease_epoch,
    decide,
    drift,
    grant_lease,
    is_settled,
    planned_range,
    refuse_clocks,
    refuse_power_limit,
    repeated_failure,
    wanted_range,
)
from power_agent.clocks.core.device_governor import DeviceGovernor
from power_agent.clocks.core.slice_latencies import SliceLatencies
from power_agent.clocks.latency_reader import LatencyReader
from power_agent.devices.errors import DeviceLost
from power_agent.durability.journal_state import Override
from power_agent.governors import governor_of
from power_agent.slices.node_state import Device, Node
from trefoil.core.brains import ClockDecision
from trefoil.core.demand import ScaleSignal
from trefoil.core.errors import NotFound, PlanError, SettingError, TrefoilError, Unavailable
from trefoil.core.fleet import ClockLease, DeviceKind, DeviceState, SliceKey, Step, why_missing
from trefoil.core.plan import NodePlan, PlannedDevice

LEASE_TTL_MAX_S: Final = 600.0  # of a clock lease: its holder renews it
SETTLE_S: Final = 0.3  # a GPU takes 5 to 50 ms to reach a new clock, its sensors a little longer
CONFIRM_S: Final = 1.0  # what differs is read again before it is called drift: clocks move all the time
RESTORE_S: Final = 2.5  # of the 4 s that a service has to be gone
LONGEST_PAUSE_S: Final = 3600.0
CLOCK: Final = "clock"  # the setting's name in the journal

T = TypeVar("T")


class ClockDriver(Protocol):
    """Driver calls on a GPU's clocks, of the inventory; each may raise DeviceError."""

    def clock_mhz(self, device: str) -> int:
        """SM clock now [MHz]."""

    def clock_event_reasons(self, device: str) -> tuple[str, ...]:
        """Reasons why the clock is what it is."""

    def default_application_clock_mhz(self, device: str) -> int:
        """Application clock of the SMs that the board comes with [MHz]; 0 where it does not tell."""

    def clocks_supported_mhz(self, device: str) -> tuple[int, ...]:
        """Supported SM clocks [MHz], ascending."""

    def lock_clock(self, device: str, min_mhz: int, max_mhz: int) -> None:
        """Lock the SM clock to a range."""

    def reset_clock(self, device: str) -> None:
        """Undo a lock."""

    def power_limit_w(self, device: str) -> float | None:
        """Enforced power limit [W]; it is only reported."""


class DriverCall(Protocol):
    """Runs a blocking call in the worker thread of a device."""

    def __call__(self, device: str, call: Callable[[], T], /) -> Awaitable[T]: ...


class DeviceClocks:
    """Clocks of one GPU: what was locked, by which lease, and the calls that lock, reset and read them.

    `_driver_load`: the boot and driver load that the lock is true for.
    """

    def __init__(
        self,
        node: Node,
        device: Device,
        driver: ClockDriver,
        call: DriverCall,
        latencies: SliceLatencies | None = None,
    ) -> None:
        self.device = device
        self.name = device.device
        self.ability = Ability(self.name, device.type.name, cannot_lock="nothing is known of its clocks")
        self.lease: HeldLease | None = None
        settings = node.settings
        self.device_governor = DeviceGovernor(settings.governor, settings.parts.get("governor", {}), latencies)
        self.check_s = 0.0
        self._node = node
        self._driver = driver
        self._call = call
        self._lock = ClockLock()
        self._actuated_s = float("-inf")
        self._driver_load = self._current_load
        self._ability_known = False
        self._unconfirmed: tuple[str, ...] = ()  # drift by the last reading
        self._lost = device.state == DeviceState.LOST
        self._log = structlog.get_logger()

    @property
    def _current_load(self) -> str:
        return f"{self._node.boot_id}/{self._node.driver_load_id}"

    async def read_ability(self) -> None:
        """Read what the device can do, once, and what a predecessor that was killed may have left locked.

        Raises:
            DeviceError: the driver refuses; to be asked again later.
        """
        if self._ability_known or self.device.state == DeviceState.LOST:
            return
        clocks_mhz = await self._call(self.name, lambda: self._driver.clocks_supported_mhz(self.name))
        kind, cannot_lock = self.device.type, ""
        if not kind.clock_lockable or not clocks_mhz:
            cannot_lock = f"a {kind.name} cannot lock clocks: that came with Volta"
        self.ability = Ability(self.name, kind.name, clocks_mhz, cannot_lock)
        self._ability_known = True
        if (self.name, CLOCK) in self._node.journal.state.overrides:
            self._lock = ClockLock(None, certain=False)

    @property
    def ability_here(self) -> Ability:
        """What the device can do, with the reasons of this node."""
        ability, why = self.ability, why_missing(self._node.missing, "clock_lock", self.name)
        if why and not ability.cannot_lock:
            return replace(ability, cannot_lock=f"clocks cannot be locked here: {why}")
        return ability

    def view(
        self, planned: PlannedDevice | None = None, state: DeviceState | None = None, *, leaving: bool = False
    ) -> ClockView:
        """View for the decision; `planned` and `state` stand in for those in force, which alone are governed."""
        plan, is_preview = self._node.plan, planned is not None
        if planned is None and plan is not None:
            planned = next((device for device in plan.devices if device.device == self.name), None)
        if planned is None:
            self.device.scale_signal = None
        return ClockView(
            self.ability,
            self.device.state if state is None else state,
            None if planned is None else self._range(planned, governed=not is_preview and not leaving),
            self.lease,
            self._lock,
            self._actuated_s,
            leaving,
        )

    def _range(self, planned: PlannedDevice, *, governed: bool) -> ClockRange | None:
        if not governed:
            return planned_range(planned, self.ability.supported_mhz)
        device, governor, now_s = self.device, self.device_governor, self._node.clock.monotonic_s()
        leased = self.lease is not None and now_s < self.lease.expires_s
        honoured = not (device.clock_drift or leased or HOLDS_BACK.intersection(device.clock_event_reasons))
        found = governor.range(planned, self.ability_here, device.clock_mhz, honoured, now_s)
        self._signal_scale(planned, governor.decision)
        return found

    def _signal_scale(self, planned: PlannedDevice, decision: ClockDecision | None) -> None:
        """Say, or say no more, that the governor wants capacity; the publisher writes it."""
        device = self.device
        if decision is None or not decision.scale_out:
            device.scale_signal = None
        elif device.scale_signal is None:
            node, since_s = self._node.settings.node, self._node.clock.now_s()
            device.scale_signal = ScaleSignal(node, self.name, planned.families, decision.why, since_s)
            self._node.changes.notify()

    def note_changes(self) -> None:
        """Note a lease that has run out, and a driver or GPU that came back, perhaps without what was set on it."""
        now_s = self._node.clock.monotonic_s()
        if self.device.clock_lease is not None and (self.lease is None or now_s >= self.lease.expires_s):
            self.device.clock_lease = None
            self._log.info("clock lease ended", device=self.name)
            self._node.changed()
        if (self.name, CLOCK) in self._node.journal.state.overrides and self._lock == ClockLock():
            self._lock = ClockLock(None, certain=False)  # of a predecessor, which came to light later
        lost = self.device.state == DeviceState.LOST
        if lost == self._lost and (lost or self._driver_load == self._current_load):
            return
        if self._lock.range is not None:
            self._lock = replace(self._lock, certain=False)
        self._lost, self._driver_load, self.check_s = lost, self._current_load, now_s
        if lost:
            self._report(())

    # --- set ----------------------------------------------------------------------------------------------------------

    async def apply(self, action: ClockAction) -> None:
        """Carry out one action; what the driver refuses is noted, not raised."""
        clock, started_s, error = self._node.clock, self._node.clock.monotonic_s(), ""
        try:
            self._journal_override(action)
            await self._call(self.name, self._driver_call(action))
            self._lock = ClockLock(action.range)
            if action.verb == ClockVerb.RESET:
                self._node.journal.end_override(self.name, CLOCK)
        except DeviceLost as lost:
            error = str(lost)
            self._node.set_device(self.device, DeviceState.LOST)
        except TrefoilError as refused:
            error = str(refused)
            self._lock = self._lock.failed(action.range, error, clock.monotonic_s())
        finally:
            self._actuated_s = clock.monotonic_s()
        self.check_s = self._actuated_s + SETTLE_S
        log, value = self._log.warning if error else self._log.info, action.range or "default"
        decision = self.device_governor.decision
        said = {"value": str(value), "why": action.why, "governor": decision.why if decision is not None else ""}
        log("clocks", device=self.name, verb=action.verb.value, **said, error=error)
        outcome, took_s = "failed" if error else "done", self._actuated_s - started_s
        self._node.metrics.inc("trefoil_steps_total", verb="lock_clock", outcome=outcome)
        self._node.metrics.observe("trefoil_step_duration_seconds", took_s, verb="lock_clock")
        self._node.changed()

    def _journal_override(self, action: ClockAction) -> None:
        """Remember what is about to be set: from here on a crash may leave it so."""
        if action.range is not None:
            low, high = action.range.min_mhz, action.range.max_mhz
            self._node.journal.begin_override(Override(self.name, CLOCK, low, high, self._current_load))
        self._lock = replace(self._lock, certain=False)

    def _driver_call(self, action: ClockAction) -> Callable[[], None]:
        driver, name = self._driver, self.name
        if action.range is None:
            return lambda: driver.reset_clock(name)
        low, high = action.range.min_mhz, action.range.max_mhz
        return lambda: driver.lock_clock(name, low, high)

    # --- read back ----------------------------------------------------------------------------------------------------

    async def check_drift(self) -> None:
        """Compare what the GPU does with what was set; what differs is reported, not fought."""
        driver, name, device = self._driver, self.name, self.device
        self.check_s = self._node.clock.monotonic_s() + self._node.settings.drift_poll_s
        if device.state == DeviceState.LOST:
            return

        def read() -> tuple[ClockReading, float | None]:
            default_mhz = driver.default_application_clock_mhz(name)
            reading = ClockReading(driver.clock_mhz(name), driver.clock_event_reasons(name), default_mhz)
            return reading, driver.power_limit_w(name)

        try:
            await self.read_ability()
            reading, power_limit_w = await self._call(name, read)
        except TrefoilError as error:  # whether it is lost, or the driver gone, is for health to find out
            self._log.info("clocks cannot be read", device=name, why=str(error))
            self._report(repeated_failure(self._lock))
            return
        before = (device.clock_mhz, device.clock_event_reasons, device.power_limit_w)
        device.clock_mhz, device.clock_event_reasons = reading.clock_mhz, reading.reasons
        device.power_limit_w = power_limit_w or 0.0
        found = drift(self.view(), reading)
        if found != self._unconfirmed and found != device.clock_drift:
            self.check_s = min(self.check_s, self._node.clock.monotonic_s() + CONFIRM_S)
        confirmed, self._unconfirmed = tuple(text for text in found if text in self._unconfirmed), found
        self._report((*confirmed, *(text for text in repeated_failure(self._lock) if text not in confirmed)))
        if before != (device.clock_mhz, device.clock_event_reasons, device.power_limit_w):
            self._node.changes.notify()

    def _report(self, found: tuple[str, ...]) -> None:
        if found != self.device.clock_drift:
            self.device.clock_drift = found
            (self._log.warning if found else self._log.info)("drift of clocks", device=self.name, drift=found)
            self._node.changed()


class ClockKeeper:
    """Clocks of all GPUs of the node: what plans may ask of them, and their leases."""

    def __init__(
        self, node: Node, driver: ClockDriver, call: DriverCall, latencies: LatencyReader | None = None
    ) -> None:
        self._node = node
        self._latencies = latencies
        self._driver = driver
        self._call = call
        self._devices: dict[str, DeviceClocks] = {}
        self._log = structlog.get_logger()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read what each device can do, and what a predecessor that was killed may have left locked."""
        self._forget_power_limits()
        for clocks in self._add_new():
            try:
                await clocks.read_ability()
            except TrefoilError as error:
                self._log.warning("nothing is known of its clocks yet", device=clocks.name, why=str(error))
        if self._node.journal.state.overrides:
            left = sorted(self._node.journal.state.overrides)
            self._log.warning("a predecessor left clocks set", left=left)

    def _forget_power_limits(self) -> None:
        """Say which power limits an agent of an earlier version left set, and let go of them: none is set any more."""
        for (device, setting), override in list(self._node.journal.state.overrides.items()):
            if setting != CLOCK:
                _, uuid = self._node.journal.state.devices.get(device, ("", "<its UUID>"))
                remedy = f"nvidia-smi -i {uuid} -pl {override.low:g}"
                self._log.warning(
                    "a predecessor left a power limit set", device=device, limit_w=override.high, remedy=remedy
                )
                self._node.journal.end_override(device, setting)

    async def run(self) -> None:
        """Keep every device as it ought to be, until cancelled."""
        async with asyncio.TaskGroup() as group:
            if self._latencies is not None:
                group.create_task(self._latencies.run(), name="latencies")
            started: set[str] = set()
            while True:
                seen = self._node.changes.count
                self._add_new()  # a GPU that did not answer when the agent started
                for name in self._devices.keys() - started:
                    group.create_task(self._keep(self._devices[name]), name=f"clocks of {name}")
                    started.add(name)
                await self._node.changes.wait(seen)

    def _add_new(self) -> list[DeviceClocks]:
        """Add GPUs that are not kept yet; returns them."""
        latencies = self._latencies.latencies if self._latencies is not None else None
        found = [
            DeviceClocks(self._node, device, self._driver, self._call, latencies)
            for device in self._node.devices.values()
            if device.type.kind != DeviceKind.CPU and device.device not in self._devices
        ]
        self._devices.update((clocks.name, clocks) for clocks in found)
        return found

    async def _keep(self, clocks: DeviceClocks) -> None:
        clock, changes = self._node.clock, self._node.changes
        while True:
            seen = changes.count
            clocks.note_changes()
            action = decide(clocks.view(), clock.monotonic_s())
            if action.verb != ClockVerb.NOTHING:
                await clocks.apply(action)
                continue
            if clock.monotonic_s() >= clocks.check_s:
                await clocks.check_drift()
                continue
            await self._pause(seen, min(action.until_s, clocks.check_s, clocks.device_governor.next_s))

    async def _pause(self, seen: int, until_s: float) -> None:
        """Wait until the node changes, or until then (monotonic)."""
        clock = self._node.clock
        changed = asyncio.ensure_future(self._node.changes.wait(seen))
        timer = asyncio.ensure_future(clock.sleep(min(LONGEST_PAUSE_S, max(0.0, until_s - clock.monotonic_s()))))
        try:
            await asyncio.wait((changed, timer), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            timer.cancel()
            await asyncio.gather(changed, timer, return_exceptions=True)

    async def restore(self) -> None:
        """Reset all clocks because the agent ends; what does not succeed in time is left to the successor."""
        until_s = self._node.clock.monotonic_s() + RESTORE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESTORE_S):
                await asyncio.gather(*(self._restore(clocks, until_s) for clocks in self._devices.values()))
        left = sorted(self._node.journal.state.overrides)
        if left:
            self._log.error("clocks stay set until the next start", left=left)

    async def _restore(self, clocks: DeviceClocks, until_s: float) -> None:
        clock = self._node.clock
        while True:
            action = decide(clocks.view(leaving=True), clock.monotonic_s())
            if action.verb != ClockVerb.NOTHING:
                await clocks.apply(action)
            elif action.until_s > until_s:  # done, or out of time
                return
            else:
                await clock.sleep(max(0.0, action.until_s - clock.monotonic_s()))

    # --- plans --------------------------------------------------------------------------------------------------------

    def refuse(self, plan: NodePlan) -> None:
        """Refuse a plan whose clocks, power limits or governors a device cannot have.

        Raises:
            PlanError: naming field, value and remedy.
        """
        self.refuse_governors(plan)
        for planned in plan.devices:
            refuse_power_limit(planned)
            ability = self.ability(planned.device)
            if ability is not None and self._node.devices[planned.device].state == DeviceState.LOST:
                continue  # nothing is set on it, and nobody may know yet what it can do
            refuse_clocks(planned, ability or Ability(planned.device, "CPU", cannot_lock="it has no clocks to lock"))

    def refuse_governors(self, plan: NodePlan) -> None:
        """Refuse a plan that names a governor which is not there, or cannot be made with this agent's settings.

        Raises:
            PlanError: naming field, value and remedy.
        """
        settings = self._node.settings
        for planned in {device.governor: device for device in plan.devices}.values():
            name = settings.governor or planned.governor
            try:
                governor_of(name, settings.parts.get("governor", {}))
            except SettingError as error:
                raise PlanError(str(error), field=f"device {planned.device}") from error

    def ability(self, device: str) -> Ability | None:
        """Clock abilities of a device, with the reasons of this node; None for a device without clocks of its own."""
        clocks = self._devices.get(device)
        return None if clocks is None else clocks.ability_here

    def settled(self) -> bool:
        """Whether every device surely has the range that it ought to have."""
        now_s = self._node.clock.monotonic_s()
        return all(is_settled(clocks.view(), now_s) for clocks in self._devices.values())

    def steps(self, plan: NodePlan) -> tuple[Step, ...]:
        """The lock_clock steps that a plan needs now, one per device."""
        now_s, found = self._node.clock.monotonic_s(), []
        for planned in plan.devices:
            clocks = self._devices.get(planned.device)
            if clocks is None:
                continue
            state = clocks.device.state if clocks.device.state == DeviceState.LOST else planned.target
            view = clocks.view(planned, state)
            if not is_settled(view, now_s):
                why = str(wanted_range(view, now_s)[0] or "default clocks")
                found.append(Step(SliceKey(planned.device), "lock_clock", "planned", why=why))
        return tuple(found)

    # --- leases -------------------------------------------------------------------------------------------------------

    def set_clocks(self, requested: ClockLease, ttl_s: float) -> ClockLease:
        """Make or renew a lease; the answer names the supported clocks that it came to.

        Raises:
            NotFound: no such device.
            Unavailable: the device is lost.
            InvalidInput, Fenced: as `clock_control.grant_lease`.
        """
        clocks, clock = self._find(requested.device), self._node.clock
        if clocks.device.state == DeviceState.LOST:
            remedy = "wait until it is back, or use another device"
            raise Unavailable("the device is lost", field="device", value=clocks.name, remedy=remedy)
        ability = self.ability(requested.device)
        assert ability is not None
        clocks.lease = lease = grant_lease(
            requested,
            ttl_s,
            ability,
            clocks.lease,
            self._node.journal.state.highest_epoch,
            ttl_max_s=LEASE_TTL_MAX_S,
            now_s=clock.monotonic_s(),
            at_s=clock.now_s(),
        )
        self._node.journal.raise_highest_epoch(requested.epoch)
        clocks.device.clock_lease = answer = lease.message(requested.device)
        self._log.info("clock lease", device=clocks.name, holder=requested.holder, range=str(lease.range), ttl_s=ttl_s)
        self._node.changed()
        return answer

    def release_clocks(self, device: str, holder: str, epoch: int) -> None:
        """End a lease early; one that has ended already is no error.

        Raises:
            NotFound: no such device.
            Fenced: somebody else holds it, or the epoch is old.
        """
        clocks, now_s = self._find(device), self._node.clock.monotonic_s()
        check_lease_epoch(device, holder, epoch, clocks.lease, self._node.journal.state.highest_epoch, now_s)
        if clocks.lease is not None and now_s < clocks.lease.expires_s:
            clocks.lease = replace(clocks.lease, expires_s=now_s)
        self._node.changed()

    def _find(self, device: str) -> DeviceClocks:
        clocks = self._devices.get(device)
        if clocks is None:
            served = ", ".join(self._devices) or "none"
            raise NotFound("no device with clocks of its own", field="device", value=device, remedy=f"one of {served}")
        return clocks

"""Clocks and power limit of one GPU: what was set, by which lease, and the driver calls that set, reset and read them.

The journal is written before the driver is called: whatever is set when this process dies is known to its successor.
Nothing that the driver refuses is fatal: it is noted, tried again later and reported as drift. What the driver says
that it never does is reported as missing, and a plan is not held up by it.

A power limit is read before it is set: what is in force then goes into the journal, and is what is put back. A driver
that was loaded again has forgotten ours, and what it has then is left alone.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Final, Protocol, TypeVar

import structlog

from power_agent.clocks.core.clock_control import (
    Ability,
    ClockRange,
    HeldLease,
    Lever,
    LeverAction,
    LeverReading,
    LeverState,
    LeverValue,
    LeverVerb,
    LeverView,
    PowerLimit,
    drift,
    held_back,
    planned_limit,
    planned_range,
    repeated_failures,
    same_limit,
)
from power_agent.clocks.core.device_governor import DeviceGovernor
from power_agent.clocks.core.slice_latencies import SliceLatencies
from power_agent.devices.errors import DeviceError, DeviceLost, DeviceUnsupported, NoPermission
from power_agent.devices.gpus import PowerLimits
from power_agent.devices.inventory import Inventory
from power_agent.durability.journal_state import Override
from power_agent.slices.node_state import Device, Node
from trefoil.core.brains import ClockDecision
from trefoil.core.demand import ScaleSignal
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import DeviceState, why_missing
from trefoil.core.plan import PlannedDevice

SETTLE_S: Final = 0.3  # a GPU takes 5 to 50 ms to reach a new clock, its sensors a little longer
CONFIRM_S: Final = 1.0  # what differs is read again before it is called drift: clocks move all the time

T = TypeVar("T")


class DriverCall(Protocol):
    """Runs a blocking call in the worker thread of a device."""

    def __call__(self, device: str, call: Callable[[], T], /) -> Awaitable[T]: ...


class DeviceClocks:
    """Levers of one GPU: what was set, by which lease, and the calls that set, reset and read them.

    `_driver_load`: the boot and driver load that it is true for. `_found_w`: the power limit that is put back; None:
    not read yet.
    """

    def __init__(
        self,
        node: Node,
        device: Device,
        driver: Inventory,
        call: DriverCall,
        latencies: SliceLatencies | None = None,
    ) -> None:
        self.device = device
        self.name = device.device
        unknown = "nothing is known of its"
        self.ability = Ability(
            self.name, device.type.name, cannot_lock=f"{unknown} clocks", cannot_limit=f"{unknown} power limits"
        )
        self.lease: HeldLease | None = None
        settings = node.settings
        self.device_governor = DeviceGovernor(settings.governor, settings.parts.get("governor", {}), latencies)
        self.check_s = 0.0
        self._node = node
        self._driver = driver
        self._call = call
        self._levers = {lever: LeverState() for lever in Lever}
        self._found_w: float | None = None
        self._driver_load = self._current_load
        self._ability_known = False
        self._refused: set[str] = set()  # names under which the node says what the driver never does
        self._unconfirmed: tuple[str, ...] = ()  # drift by the last reading
        self._lost = device.state == DeviceState.LOST
        self._log = structlog.get_logger()

    @property
    def _current_load(self) -> str:
        return f"{self._node.boot_id}/{self._node.driver_load_id}"

    async def read_ability(self) -> None:
        """Read what the device can do, once, and what a predecessor that was killed may have left set.

        Raises:
            DeviceError: the driver refuses; to be asked again later.
        """
        if self._ability_known or self.device.state == DeviceState.LOST:
            return
        driver, name = self._driver, self.name

        def read() -> tuple[tuple[int, ...], PowerLimits | None, float | None]:
            return driver.clocks_supported_mhz(name), driver.power_limits(name), driver.power_limit_set_w(name)

        clocks_mhz, limits, limit_w = await self._call(name, read)
        kind, cannot_lock, cannot_limit, limits_w = self.device.type, "", "", (0.0, 0.0)
        if not kind.clock_lockable or not clocks_mhz:
            cannot_lock = f"a {kind.name} cannot lock clocks: that came with Volta"
        if limits is None or limit_w is None or limits.min_w >= limits.max_w:
            cannot_limit = f"the power limit of this {kind.name} cannot be changed"
        else:
            limits_w = (limits.min_w, limits.max_w)
        self.ability = Ability(name, kind.name, clocks_mhz, cannot_lock, limits_w, cannot_limit)
        self._found_w, self._ability_known = limit_w, True
        self._take_over()

    def _take_over(self) -> None:
        """Take what a predecessor may have left set for ours; what it found is put back."""
        for lever, held in self._levers.items():
            override = self._node.journal.state.overrides.get((self.name, lever))
            if override is None or not held.at_rest:
                continue
            if lever is Lever.POWER_LIMIT:
                self._found_w = override.low
            self._levers[lever] = replace(held, certain=False)

    @property
    def ability_here(self) -> Ability:
        """What the device can do, with the reasons of this node and the limit that was found."""
        ability, (least_w, most_w) = self.ability, self.ability.limits_w
        if self._found_w is not None and self._found_w < most_w:
            ability = replace(ability, limits_w=(least_w, max(least_w, self._found_w)))
        for lever in Lever:
            why = why_missing(self._node.missing, lever.capability, self.name)
            if why and not ability.cannot(lever):
                ability = ability.lacking(lever, f"{lever.text} cannot be set here: {why}")
        return ability

    def views(
        self, planned: PlannedDevice | None = None, state: DeviceState | None = None, *, leaving: bool = False
    ) -> tuple[LeverView, ...]:
        """Views for the decision; `planned` and `state` stand in for those in force, which alone are governed."""
        plan, is_preview = self._node.plan, planned is not None
        if planned is None and plan is not None:
            planned = next((device for device in plan.devices if device.device == self.name), None)
        if planned is None:
            self.device.scale_signal = None
        wishes = self._wishes(planned, governed=not is_preview and not leaving) if planned is not None else {}
        ability = self.ability_here
        free = ability.full if ability.supported_mhz else None
        found = None if self._found_w is None else PowerLimit(self._found_w)
        return tuple(
            LeverView(
                lever,
                self.device.state if state is None else state,
                default,
                None if ability.cannot(lever) else wishes.get(lever),
                self.lease,
                self._levers[lever],
                leaving,
            )
            for lever, default in ((Lever.CLOCK, free), (Lever.POWER_LIMIT, found))
        )

    def _wishes(self, planned: PlannedDevice, *, governed: bool) -> Mapping[Lever, LeverValue | None]:
        if not governed:
            clocks = planned_range(planned, self.ability.supported_mhz)
            return {Lever.CLOCK: clocks, Lever.POWER_LIMIT: planned_limit(planned, self.ability_here)}
        device, governor, now_s = self.device, self.device_governor, self._node.clock.monotonic_s()
        leased = self.lease is not None and now_s < self.lease.expires_s
        slowed = held_back(device.clock_event_reasons, self._levers[Lever.POWER_LIMIT])
        honoured = not (device.clock_drift or leased or slowed)
        found = governor.wishes(planned, self.ability_here, device.clock_mhz, honoured, now_s)
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
        self._take_over()  # what came to light later
        lost = self.device.state == DeviceState.LOST
        if lost == self._lost and (lost or self._driver_load == self._current_load):
            return
        for lever, held in self._levers.items():
            if held.value is not None:
                self._levers[lever] = replace(held, certain=False)
        for name in self._refused:
            self._node.set_missing(name, "")
        self._refused.clear()
        self._lost, self._driver_load, self.check_s = lost, self._current_load, now_s
        if lost:
            self._report(())

    # --- set ----------------------------------------------------------------------------------------------------------

    async def apply(self, action: LeverAction) -> None:
        """Carry out one action; what the driver refuses is noted, not raised."""
        clock, started_s, error = self._node.clock, self._node.clock.monotonic_s(), ""
        lever, before = action.lever, self._levers[action.lever]
        try:
            call = await self._journalled_call(action)
            if call is not None:
                await self._call(self.name, call)
            self._levers[lever] = LeverState(action.value)
            if action.verb == LeverVerb.RESET:
                self._node.journal.end_override(self.name, lever)
        except DeviceLost as lost:
            error = str(lost)
            self._node.set_device(self.device, DeviceState.LOST)
        except TrefoilError as refused:
            error = str(refused)
            self._levers[lever] = before.failed(action.value, error, clock.monotonic_s())
            if isinstance(refused, NoPermission | DeviceUnsupported):
                self._note_never(action, before, error)
        finally:
            self._levers[lever] = replace(self._levers[lever], actuated_s=clock.monotonic_s())
        self.check_s = clock.monotonic_s() + SETTLE_S
        log, value = self._log.warning if error else self._log.info, action.value or "default"
        decision = self.device_governor.decision
        said = {"value": str(value), "why": action.why, "governor": decision.why if decision is not None else ""}
        log(lever.text, device=self.name, verb=action.verb.value, **said, error=error)
        outcome, took_s = "failed" if error else "done", clock.monotonic_s() - started_s
        self._node.metrics.inc("trefoil_steps_total", verb=lever.step, outcome=outcome)
        self._node.metrics.observe("trefoil_step_duration_seconds", took_s, verb=lever.step)
        self._node.changed()

    async def _journalled_call(self, action: LeverAction) -> Callable[[], None] | None:
        """Driver call of an action; None: there is nothing to undo. From here on a crash may leave it set."""
        driver, name, value = self._driver, self.name, action.value
        if action.lever is Lever.POWER_LIMIT:
            is_ours = await self._find_limit()
            if isinstance(value, PowerLimit) and self._found_w is not None and value.watts > self._found_w:
                value = None  # an operator has lowered it since the last reading
            if value is None and not is_ours:
                return None
        if isinstance(value, ClockRange):
            self._begin_override(action.lever, value.min_mhz, value.max_mhz)
        elif isinstance(value, PowerLimit):
            if self._found_w is None:
                raise DeviceError("its power limit cannot be read now, so it could not be restored")
            self._begin_override(action.lever, self._found_w, value.watts)
        self._levers[action.lever] = replace(self._levers[action.lever], certain=False)
        if isinstance(value, ClockRange):
            low, high = value.min_mhz, value.max_mhz
            return lambda: driver.lock_clock(name, low, high)
        if action.lever is Lever.CLOCK:
            return lambda: driver.reset_clock(name)
        limit_w = value.watts if isinstance(value, PowerLimit) else self._found_w
        assert limit_w is not None
        return lambda: driver.set_power_limit_w(name, limit_w)

    def _begin_override(self, lever: Lever, low: float, high: float) -> None:
        self._node.journal.begin_override(Override(self.name, lever, low, high, self._current_load))

    async def _find_limit(self) -> bool:
        """Find the limit that is to be put back; returns whether the one in force may be ours."""
        driver, name = self._driver, self.name
        override = self._node.journal.state.overrides.get((name, Lever.POWER_LIMIT))
        in_force_w = await self._call(name, lambda: driver.power_limit_set_w(name))
        if override is None or (override.load != self._current_load and not same_limit(in_force_w, override.high)):
            self._found_w = in_force_w  # the driver was loaded again: its limit is not ours
            return False
        self._found_w = override.low
        return True

    def _note_never(self, action: LeverAction, before: LeverState, why: str) -> None:
        """Note that the driver will not do this, and has not: what is in force is what was before."""
        lever = action.lever
        self._levers[lever] = replace(self._levers[lever], certain=before.certain)
        if before.at_rest:
            self._node.journal.end_override(self.name, lever)
        name = f"{lever.capability} {self.name.rpartition('/')[2]}"
        self._refused.add(name)
        self._node.set_missing(name, why)

    # --- read back ----------------------------------------------------------------------------------------------------

    async def check_drift(self) -> None:
        """Compare what the GPU does with what was set; what differs is reported, not fought."""
        driver, name, device = self._driver, self.name, self.device
        self.check_s = self._node.clock.monotonic_s() + self._node.settings.drift_poll_s
        if device.state == DeviceState.LOST:
            return

        def read() -> tuple[LeverReading, float | None]:
            default_mhz, limit_w = driver.default_application_clock_mhz(name), driver.power_limit_set_w(name)
            reading = LeverReading(driver.clock_mhz(name), driver.clock_event_reasons(name), default_mhz, limit_w)
            return reading, driver.power_limit_w(name)

        try:
            await self.read_ability()
            reading, power_limit_w = await self._call(name, read)
        except TrefoilError as error:  # whether it is lost, or the driver gone, is for health to find out
            self._log.info("clocks cannot be read", device=name, why=str(error))
            self._report(repeated_failures(self._levers))
            return
        before = (device.clock_mhz, device.clock_event_reasons, device.power_limit_w)
        device.clock_mhz, device.clock_event_reasons = reading.clock_mhz, reading.reasons
        device.power_limit_w = power_limit_w or 0.0
        if self._levers[Lever.POWER_LIMIT].at_rest:  # an operator may set another one meanwhile
            self._found_w = reading.limit_w
        found = drift(self._levers, reading)
        if found != self._unconfirmed and found != device.clock_drift:
            self.check_s = min(self.check_s, self._node.clock.monotonic_s() + CONFIRM_S)
        confirmed, self._unconfirmed = tuple(text for text in found if text in self._unconfirmed), found
        self._report((*confirmed, *(text for text in repeated_failures(self._levers) if text not in confirmed)))
        if before != (device.clock_mhz, device.clock_event_reasons, device.power_limit_w):
            self._node.changes.notify()

    def _report(self, found: tuple[str, ...]) -> None:
        if found != self.device.clock_drift:
            self.device.clock_drift = found
            (self._log.warning if found else self._log.info)("drift of clocks", device=self.name, drift=found)
            self._node.changed()

"""Clock control shell: keeps each GPU's clocks and power limit as `core/clock_control.py` decides, and grants leases.

One task per device, so that a stuck call on one GPU keeps no lease of another alive.
"""

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

import structlog

from power_agent.clocks.core.clock_control import (
    Ability,
    LeverVerb,
    check_lease_epoch,
    decide,
    grant_lease,
    is_settled,
    refuse_levers,
    wanted_value,
)
from power_agent.clocks.device_clocks import DeviceClocks, DriverCall
from power_agent.clocks.latency_reader import LatencyReader
from power_agent.devices.inventory import Inventory
from power_agent.governors import governor_of
from power_agent.slices.node_state import Node
from trefoil.core.errors import NotFound, PlanError, SettingError, TrefoilError, Unavailable
from trefoil.core.fleet import ClockLease, DeviceKind, DeviceState, SliceKey, Step
from trefoil.core.plan import NodePlan

LEASE_TTL_MAX_S: Final = 600.0  # of a clock lease: its holder renews it
RESTORE_S: Final = 2.5  # of the 4 s that a service has to be gone
LONGEST_PAUSE_S: Final = 3600.0
NO_LEVERS: Final = Ability("", "CPU", cannot_lock="it has no clocks to lock", cannot_limit="it takes no power limit")


class ClockKeeper:
    """Clocks of all GPUs of the node: what plans may ask of them, and their leases."""

    def __init__(self, node: Node, driver: Inventory, call: DriverCall, latencies: LatencyReader | None = None) -> None:
        self._node = node
        self._latencies = latencies
        self._driver = driver
        self._call = call
        self._devices: dict[str, DeviceClocks] = {}
        self._log = structlog.get_logger()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Read what each device can do, and what a predecessor that was killed may have left set."""
        for clocks in self._add_new():
            try:
                await clocks.read_ability()
            except TrefoilError as error:
                self._log.warning("nothing is known of its clocks yet", device=clocks.name, why=str(error))
        if self._node.journal.state.overrides:
            left = sorted(self._node.journal.state.overrides)
            self._log.warning("a predecessor left clocks or power limits set", left=left)

    async def run(self) -> None:
        """Keep every device as wanted, until cancelled."""
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
            action = decide(clocks.views(), clock.monotonic_s())
            if action.verb != LeverVerb.NOTHING:
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
        """Put all levers back because the agent ends; what does not succeed in time is left to the successor."""
        until_s = self._node.clock.monotonic_s() + RESTORE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESTORE_S):
                await asyncio.gather(*(self._restore(clocks, until_s) for clocks in self._devices.values()))
        left = sorted(self._node.journal.state.overrides)
        if left:
            self._log.error("clocks or power limits stay set until the next start", left=left)

    async def _restore(self, clocks: DeviceClocks, until_s: float) -> None:
        clock = self._node.clock
        while True:
            action = decide(clocks.views(leaving=True), clock.monotonic_s())
            if action.verb != LeverVerb.NOTHING:
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
            ability = self.ability(planned.device)
            if ability is not None and self._node.devices[planned.device].state == DeviceState.LOST:
                continue  # nothing is set on it, and its abilities may be unknown yet
            refuse_levers(planned, ability or NO_LEVERS)

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
        """Abilities of a device, with the reasons of this node; None for a device without clocks of its own."""
        clocks = self._devices.get(device)
        return None if clocks is None else clocks.ability_here

    def settled(self) -> bool:
        """Whether every device surely has the clocks and the power limit that it ought to have."""
        now_s = self._node.clock.monotonic_s()
        return all(is_settled(view, now_s) for clocks in self._devices.values() for view in clocks.views())

    def steps(self, plan: NodePlan) -> tuple[Step, ...]:
        """The steps that a plan needs now, one for each lever of a device that is to be moved."""
        now_s, found = self._node.clock.monotonic_s(), []
        for planned in plan.devices:
            clocks = self._devices.get(planned.device)
            if clocks is None:
                continue
            state = clocks.device.state if clocks.device.state == DeviceState.LOST else planned.target
            for view in clocks.views(planned, state):
                if not is_settled(view, now_s):
                    why = str(wanted_value(view, now_s)[0] or f"default {view.lever.text}")
                    found.append(Step(SliceKey(planned.device), view.lever.step, "planned", why=why))
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
        said = {"range": str(lease.range), "limit": str(lease.limit)}
        self._log.info("clock lease", device=clocks.name, holder=requested.holder, ttl_s=ttl_s, **said)
        self._node.changed()
        return answer

    def release_clocks(self, device: str, holder: str, epoch: int) -> None:
        """End a lease early; one that has ended already is not an error.

        Raises:
            NotFound: no such device.
            Fenced: another holder has it, or the epoch is old.
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

"""Keeps clocks and power limits as `clocks` decides: one task per device, so that a stuck call on one GPU keeps no
lease of another alive. Also the door for leases, and for what a plan asks of clocks.
"""

import asyncio
import contextlib
from dataclasses import replace
from typing import Final

import structlog

from power_agent.clock_device import Call, ClockDevice, Gauges
from power_agent.core.clock_rules import check_epoch, grant, refuse_planned
from power_agent.core.clocks import Ability, Verb, decide, settled, wanted_limit, wanted_range
from power_agent.governors import governor_of
from power_agent.node import Node
from trefoil.core.errors import NotFound, PlanError, SettingError, TrefoilError, Unavailable
from trefoil.core.fleet import ClockLease, DeviceKind, DeviceState, SliceKey, Step
from trefoil.core.plan import NodePlan

RESTORE_S: Final = 2.5  # of the 4 s that a service has to be gone
LONGEST_PAUSE_S: Final = 3600.0


class ClockKeeper:
    """Everything that the agent sets on GPUs besides their instances."""

    def __init__(self, node: Node, inventory: Gauges, call: Call) -> None:
        self._node = node
        self._inventory = inventory
        self._call = call
        self._devices: dict[str, ClockDevice] = {}
        self._log = structlog.get_logger()

    # --- life ---------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Find out what each device can do, and what a predecessor that was killed may have left set."""
        for own in self._new():
            try:
                await own.look()
            except TrefoilError as error:
                self._log.warning("nothing is known of its clocks yet", device=own.name, why=str(error))
        if self._node.journal.memory.overrides:
            left = sorted(self._node.journal.memory.overrides)
            self._log.warning("a predecessor left clocks or power limits set", left=left)

    async def run(self) -> None:
        """Keep every device as it ought to be, until cancelled."""
        async with asyncio.TaskGroup() as group:
            started: set[str] = set()
            while True:
                seen = self._node.changes.count
                self._new()  # a GPU that did not answer when the agent started
                for name in self._devices.keys() - started:
                    group.create_task(self._keep(self._devices[name]), name=f"clocks of {name}")
                    started.add(name)
                await self._node.changes.wait(seen)

    def _new(self) -> list[ClockDevice]:
        """Devices that are kept from now on."""
        found = [
            ClockDevice(self._node, device, self._inventory, self._call)
            for device in self._node.devices.values()
            if device.type.kind != DeviceKind.CPU and device.device not in self._devices
        ]
        self._devices.update((own.name, own) for own in found)
        return found

    async def _keep(self, own: ClockDevice) -> None:
        clock, changes = self._node.clock, self._node.changes
        while True:
            seen = changes.count
            own.notice()
            action = decide(own.view(), clock.monotonic_s())
            if action.verb != Verb.NOTHING:
                await own.act(action)
                continue
            if clock.monotonic_s() >= own.check_s:
                await own.check()
                continue
            await self._pause(seen, min(action.until_s, own.check_s, own.governed.next_s))

    async def _pause(self, seen: int, until_s: float) -> None:
        """Until the node changes, or until then (monotonic)."""
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
        """Back to the defaults, because the agent ends; what does not succeed in time is left to the successor."""
        until_s = self._node.clock.monotonic_s() + RESTORE_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RESTORE_S):
                await asyncio.gather(*(self._restore(own, until_s) for own in self._devices.values()))
        left = sorted(self._node.journal.memory.overrides)
        if left:
            self._log.error("clocks or power limits stay set until the next start", left=left)

    async def _restore(self, own: ClockDevice, until_s: float) -> None:
        clock = self._node.clock
        while True:
            action = decide(own.view(leaving=True), clock.monotonic_s())
            if action.verb != Verb.NOTHING:
                await own.act(action)
            elif action.until_s > until_s:  # done, or out of time
                return
            else:
                await clock.sleep(max(0.0, action.until_s - clock.monotonic_s()))

    # --- plans --------------------------------------------------------------------------------------------------------

    def refuse(self, plan: NodePlan) -> None:
        """Refuse a plan whose clocks, limits or governors a device cannot have.

        Raises:
            PlanError: naming field, value and remedy.
        """
        self.refuse_governors(plan)
        for planned in plan.devices:
            ability = self.ability(planned.device)
            if ability is not None and self._node.devices[planned.device].state == DeviceState.LOST:
                continue  # nothing is set on it, and nobody may know yet what it can do
            refuse_planned(planned, ability or Ability(planned.device, "CPU", cannot_lock="it has no clocks to lock"))

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
        """What a device can do, with the reasons of this node; None for a device without clocks of its own."""
        own = self._devices.get(device)
        if own is None:
            return None
        ability, short = own.ability, own.name.rpartition("/")[2]
        missing = {what: why for what, _, why in (entry.partition(": ") for entry in self._node.missing)}
        lock = missing.get("clock_lock") or missing.get(f"clock_lock {short}")  # of all devices, or of this one
        limit = missing.get("power_limit") or missing.get(f"power_limit {short}")
        if lock and not ability.cannot_lock:
            ability = replace(ability, cannot_lock=f"clocks cannot be locked here: {lock}")
        if limit:
            ability = replace(ability, limits_w=None, cannot_limit=f"power limits cannot be set here: {limit}")
        return ability

    def settled(self) -> bool:
        """Whether every device surely has the range and the limit that it ought to have."""
        now_s = self._node.clock.monotonic_s()
        return all(settled(own.view(), now_s) for own in self._devices.values())

    def steps(self, plan: NodePlan) -> tuple[Step, ...]:
        """The lock_clock steps that a plan needs now, one per device."""
        now_s, found = self._node.clock.monotonic_s(), []
        for planned in plan.devices:
            own = self._devices.get(planned.device)
            if own is None:
                continue
            state = own.device.state if own.device.state == DeviceState.LOST else planned.target
            view = own.view(planned, state)
            if not settled(view, now_s):
                limit_w = wanted_limit(view)[0]
                clock = str(wanted_range(view, now_s)[0] or "default clocks")
                limit = "default power limit" if limit_w is None else f"power limit {limit_w:g} W"
                found.append(Step(SliceKey(planned.device), "lock_clock", "planned", why=f"{clock}, {limit}"))
        return tuple(found)

    # --- leases -------------------------------------------------------------------------------------------------------

    def set_clocks(self, asked: ClockLease, ttl_s: float) -> ClockLease:
        """Make or renew a lease; the answer names the supported clocks that it came to.

        Raises:
            NotFound: no such device.
            Unavailable: the device is lost.
            InvalidInput, Fenced: as `clock_rules.grant`.
        """
        own, clock, settings = self._find(asked.device), self._node.clock, self._node.settings
        if own.device.state == DeviceState.LOST:
            remedy = "wait until it is back, or use another device"
            raise Unavailable("the device is lost", field="device", value=own.name, remedy=remedy)
        ability = self.ability(asked.device)
        assert ability is not None
        own.lease = grant(
            asked,
            ttl_s,
            ability,
            own.lease,
            self._node.journal.memory.highest_epoch,
            ttl_max_s=settings.clock_lease_ttl_max_s,
            now_s=clock.monotonic_s(),
            at_s=clock.now_s(),
        )
        self._node.journal.see_epoch(asked.epoch)
        own.device.clock_lease = answer = own.lease.message(asked.device)
        self._log.info("clock lease", device=own.name, holder=asked.holder, range=str(own.lease.range), ttl_s=ttl_s)
        self._node.changed()
        return answer

    def release_clocks(self, device: str, holder: str, epoch: int) -> None:
        """End a lease early; one that has ended already is no error.

        Raises:
            NotFound: no such device.
            Fenced: somebody else holds it, or the epoch is old.
        """
        own, now_s = self._find(device), self._node.clock.monotonic_s()
        check_epoch(device, holder, epoch, own.lease, self._node.journal.memory.highest_epoch, now_s)
        if own.lease is not None and now_s < own.lease.expires_s:
            own.lease = replace(own.lease, expires_s=now_s)
        self._node.changed()

    def _find(self, device: str) -> ClockDevice:
        own = self._devices.get(device)
        if own is None:
            served = ", ".join(self._devices) or "none"
            raise NotFound("no device with clocks of its own", field="device", value=device, remedy=f"one of {served}")
        return own

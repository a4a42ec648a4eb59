"""Cordons: devices out of service, who took them out, and until when their slices may leave by plan.

A cordon is on disk before it is answered, so it survives the agent and a reboot. It is published at once. A controller
that sees it plans without the device and takes the slices away in the order that keeps the capacity. What is planned
there still when the patience is over the agent drains and stops itself.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Final

import structlog

from power_agent.durability.journal import Journal
from power_agent.durability.journal_state import Cordon
from trefoil.core.errors import InvalidInput, NotFound, StaleRevision
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import NodePlan, PlannedDevice
from trefoil.runtime.clock import Clock

PATIENCE_MAX_S: Final = 86_400.0
UNNAMED: Final = "taken out of service by an operator"


def without_devices(plan: NodePlan, devices: Collection[str]) -> NodePlan:
    """Copy of a plan with those devices empty and asleep."""
    if not any(planned.slices and planned.device in devices for planned in plan.devices):
        return plan
    emptied = (
        PlannedDevice(planned.device, DeviceState.ASLEEP) if planned.device in devices else planned
        for planned in plan.devices
    )
    return replace(plan, devices=tuple(emptied))


class Cordons:
    """Cordons of a node. `on_change` is called after each change, also when a patience is over."""

    def __init__(self, clock: Clock, journal: Journal, on_change: Callable[[], None]) -> None:
        self._clock = clock
        self._journal = journal
        self._on_change = on_change
        self._deadline_s: dict[str, float] = {}  # monotonic
        self._log = structlog.get_logger()

    def resume(self) -> None:
        """Resume the cordons that the journal remembers; patience continues too, but never longer than it was
        granted."""
        for cordon in self._journal.state.cordons.values():
            left_s = cordon.at_s + cordon.patience_s - self._clock.now_s()
            self._wait(cordon.device, min(cordon.patience_s, max(0.0, left_s)))

    def reason(self, device: str) -> str:
        """Reason why a device is out of service; empty when it is not."""
        cordon = self._journal.state.cordons.get(device)
        return cordon.why if cordon else ""

    def evicted(self, device: str) -> bool:
        """Whether a cordoned device has to be empty by now."""
        return device in self._deadline_s and self._clock.monotonic_s() >= self._deadline_s[device]

    def all_evicted(self) -> frozenset[str]:
        """Cordoned devices that have to be empty by now."""
        return frozenset(device for device in self._deadline_s if self.evicted(device))

    async def set(self, devices: Sequence[str], why: str, patience_s: float) -> None:
        """Cordon devices: out of service; once more replaces reason and patience.

        Raises:
            InvalidInput: patience that is not a duration.
            JournalError: it could not be written; the devices not yet named in the log are in service as before.
        """
        if not 0 <= patience_s <= PATIENCE_MAX_S:
            remedy = f"0 (leave now) to {PATIENCE_MAX_S:g} seconds"
            raise InvalidInput("is not a valid patience", field="patience_s", value=patience_s, remedy=remedy)
        try:
            for device in devices:
                await self._journal.set_cordon(Cordon(device, why or UNNAMED, self._clock.now_s(), patience_s))
                self._log.warning("device out of service", device=device, why=why, patience_s=patience_s)
                self._wait(device, patience_s)
        finally:
            self._on_change()

    async def release(self, devices: Sequence[str]) -> None:
        """Release cordons: back into service; no-op for those that are.

        Raises:
            JournalError: it could not be written; that cordon holds.
        """
        try:
            for device in devices:
                await self._journal.release_cordon(device)
                if self._deadline_s.pop(device, None) is not None:
                    self._log.warning("device in service", device=device)
        finally:
            self._on_change()

    def _wait(self, device: str, patience_s: float) -> None:
        self._deadline_s[device] = self._clock.monotonic_s() + patience_s
        asyncio.get_running_loop().call_later(patience_s, self._on_change)


def devices_named(device: str, known: Collection[str]) -> tuple[str, ...]:
    """Devices that a request names: one, or with an empty name all.

    Raises:
        NotFound: naming those that there are.
    """
    if device and device not in known:
        raise NotFound("no such device", field="device", value=device, remedy=f"one of {', '.join(known)}")
    return (device,) if device else tuple(known)


def refuse_old_epoch(epoch: int, highest: int) -> None:
    """Refuse a command of a holder that has been overtaken.

    Raises:
        StaleRevision: naming both epochs.
    """
    if epoch < highest:
        raise StaleRevision(
            f"a newer controller, of epoch {highest}, is obeyed",
            field="epoch",
            value=epoch,
            remedy="send the node's highest_epoch_seen, or a newer epoch of your own",
        )

"""Monitor of one run through Redis: each second what the system is doing, and every plan change with its cause.

Power and grams come from the energy stream, that is from what was metered, and carbon from the feed's own history;
nothing here is interpolated. What was asked and answered comes from the load process, not from here.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from trefoil.cli.output import count_equal
from trefoil.cli.run.state_directory import Launch
from trefoil.core.accounting import Account, account
from trefoil.core.carbon import CarbonReading
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.errors import StateUnavailable
from trefoil.core.fleet import DeviceState, NodeStatus
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Rollout, RolloutState
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State

TICK_S: Final = 0.2
CANCEL_AGAIN_S: Final = 1.0
SAMPLES_MAX: Final = 100_000
FINISHED: Final = (RolloutState.DONE, RolloutState.HALTED, RolloutState.ROLLED_BACK)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State of the system in one second."""

    at_s: float
    carbon: CarbonReading | None
    nodes: tuple[NodeStatus, ...]
    plan: Plan | None
    rollout: Rollout | None


@dataclass(slots=True)
class PlanChange:
    """Change of plan: one that was put in force; `done_at_s` once its rollout has ended."""

    decision: DecisionRecord
    started_at_s: float
    done_at_s: float | None = None
    reconfigured: bool = False  # slices or devices changed, not only weights
    slices_text: str = ""  # what runs afterwards, in words


@dataclass(slots=True)
class RunMonitor:
    """Monitor of one run: `run()` until cancelled; then read `snapshots`, `changes` and `samples()`."""

    launch: Launch
    clock: Clock
    state: State
    on_snapshot: Callable[[Snapshot], Awaitable[None]] | None = None
    snapshots: list[Snapshot] = field(default_factory=list)
    changes: list[PlanChange] = field(default_factory=list)
    _seen_decision: str = "0"
    _seen_sample: str = "0"
    _samples: list[EnergySample] = field(default_factory=list)
    _reading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self) -> None:
        """Follow plan changes every TICK_S and take a snapshot every second, until cancelled."""
        next_snapshot_s = self.clock.monotonic_s()
        while True:
            try:
                await self._follow_changes()
                if self.clock.monotonic_s() >= next_snapshot_s:
                    snapshot = await self._take_snapshot()
                    self.snapshots.append(snapshot)
                    if self.on_snapshot is not None:
                        await self.on_snapshot(snapshot)
                    next_snapshot_s += 1.0
            except StateUnavailable:
                next_snapshot_s += 1.0  # an unseen second; the energy stream still holds it
            await self.clock.sleep(TICK_S)

    async def _take_snapshot(self) -> Snapshot:
        keys = self.state.keys
        readings = await self.state.scan(keys.carbon_now_prefix(), CarbonReading)
        nodes = await self.state.scan(keys.node_prefix(), NodeStatus)
        plan = await self.state.get(keys.plan(), Plan)
        rollout = await self.state.get(keys.rollout(), Rollout)
        of_zone = [r for r in readings.values() if r.series is not None and r.series.zone == self.launch.zone]
        return Snapshot(
            self.clock.now_s(),
            of_zone[0] if of_zone else None,
            tuple(nodes[key] for key in sorted(nodes)),
            plan,
            rollout,
        )

    async def _follow_changes(self) -> None:
        entries = await self.state.stream(self.state.keys.decisions(), DecisionRecord, self._seen_decision)
        for entry_id, decision in entries:
            self._seen_decision = entry_id
            before = self.changes[-1] if self.changes else None
            if not decision.revision.number or (before and before.decision.revision == decision.revision):
                continue
            if before and before.done_at_s is None and decision.versions.get("rollout_before") == "done":
                await self._note_end(before, decision.at_s)  # it ended since the last look
            self.changes.append(PlanChange(decision, decision.at_s))
        if not self.changes or self.changes[-1].done_at_s is not None:
            return
        rollout = await self.state.get(self.state.keys.rollout(), Rollout)
        change = self.changes[-1]
        revision = change.decision.revision
        if rollout is None or (rollout.target.epoch, rollout.target.number) != (revision.epoch, revision.number):
            return
        change.reconfigured = change.reconfigured or bool(rollout.moving) or rollout.spent_j > 0
        if rollout.state in FINISHED:
            await self._note_end(change, self.clock.now_s())

    async def _note_end(self, change: PlanChange, at_s: float) -> None:
        nodes = await self.state.scan(self.state.keys.plan_node_prefix(), NodePlan)
        change.done_at_s, change.slices_text = at_s, plan_text(tuple(nodes.values()))

    # Energy

    async def grams_since(self, starts_at_s: float, pue: float) -> float | None:
        """Grams since a time [UTC s], of what has been metered; None when nothing has."""
        samples, readings = await self.samples(), await self.readings()
        now_s = self.clock.now_s()
        return account(samples, readings, starts_at_s, now_s, pue).grams if readings and now_s > starts_at_s else None

    async def samples(self) -> list[EnergySample]:
        """Energy samples of the node so far."""
        key = self.state.keys.energy(self.launch.node)
        async with self._reading:  # two readers at once would both take the same new entries
            entries = await self.state.stream(key, EnergySample, self._seen_sample, SAMPLES_MAX)
            if entries:
                self._seen_sample = entries[-1][0]
                self._samples += [sample for _, sample in entries]
        return self._samples

    async def readings(self) -> list[CarbonReading]:
        """Carbon readings of our zone so far, oldest first."""
        found: list[CarbonReading] = []
        for name in await self.state.names(self.state.keys.prefix + "carbon:history:"):
            entries = await self.state.stream(name, CarbonReading, count=SAMPLES_MAX)
            found += [r for _, r in entries if r.series is not None and r.series.zone == self.launch.zone]
        return sorted(found, key=lambda r: r.observed_at_s)

    def power_w(self, device: str) -> float | None:
        """Power of a device [W]: the mean of its newest sample, for NVML's gauge flickers with each batch."""
        newest = next((s for s in reversed(self._samples) if s.device == device), None)
        if newest is None or newest.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED):
            return None
        return newest.counter_j / (newest.ends_at_s - newest.starts_at_s)

    async def wait_metered_until(self, at_s: float, deadline_s: float) -> None:
        """Wait until the meter has reported past a time (or until the deadline): samples come a second late."""
        give_up_s = self.clock.monotonic_s() + deadline_s
        while self.clock.monotonic_s() < give_up_s:
            latest: dict[str, float] = {}
            for sample in await self.samples():
                latest[sample.device] = max(latest.get(sample.device, 0.0), sample.ends_at_s)
            if latest and min(latest.values()) >= at_s:
                return
            await self.clock.sleep(TICK_S)


def grams_by_second(
    samples: list[EnergySample], readings: list[CarbonReading], starts_at_s: float, seconds: int, pue: float
) -> list[float | None]:
    """Grams from the start until the end of each second; None where nothing metered."""
    if not readings:
        return [None] * seconds
    total: list[float | None] = []
    so_far = 0.0
    for second in range(seconds):
        begin_s = starts_at_s + second
        part: Account = account(samples, readings, begin_s, begin_s + 1, pue)
        if part.grams is None:
            total.append(None)
            continue
        so_far += part.grams
        total.append(so_far)
    return total


def power_by_second(samples: list[EnergySample], starts_at_s: float, seconds: int) -> dict[str, list[float | None]]:
    """Power of each device in each second [W]: the mean of what was metered in it."""
    devices = sorted({sample.device for sample in samples})
    joules = {device: [0.0] * seconds for device in devices}
    covered = {device: [0.0] * seconds for device in devices}
    for sample in samples:
        length_s = sample.ends_at_s - sample.starts_at_s
        if sample.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) or length_s <= 0:
            continue
        first = max(0, int(sample.starts_at_s - starts_at_s))
        for second in range(first, min(seconds, int(sample.ends_at_s - starts_at_s) + 1)):
            begin_s = starts_at_s + second
            inside_s = min(sample.ends_at_s, begin_s + 1) - max(sample.starts_at_s, begin_s)
            if inside_s > 0:
                joules[sample.device][second] += sample.counter_j * inside_s / length_s
                covered[sample.device][second] += inside_s
    return {
        device: [j / c if c > 0 else None for j, c in zip(joules[device], covered[device], strict=True)]
        for device in devices
    }


def plan_text(nodes: tuple[NodePlan, ...]) -> str:
    """Text of the slices that a plan wants: `gpu0: 2x 3g.20gb digits-l; gpu1: asleep`."""
    parts = []
    for node in sorted(nodes, key=lambda n: n.node):
        for device in node.devices:
            slices = [f"{s.key.slice_type} {'+'.join(h.variant for h in s.hosted)}" for s in device.slices]
            resting = device.target is DeviceState.ASLEEP
            parts.append(f"{device.device.split('/')[-1]}: {'asleep' if resting else count_equal(slices)}")
    return "; ".join(parts)


async def cancel_and_wait(task: "asyncio.Task[None]") -> None:
    """Cancel a background task, again if a library swallowed it, and wait for its end; its own failure is raised."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.result()

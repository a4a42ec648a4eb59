"""Nodes in virtual time: devices, slices that start, swap, drain and die, and the agent in front of them.

The agent obeys the rules of the real one: no older epoch or revision, the complete desired state, what it obeyed
outlives it. What stands continues while it is dead or stopped.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from numpy.random import Generator

from power_agent.slices.core.epochs import refuse_made_up_epoch
from tests.support.virtual.loop import VirtualLoop
from trefoil.core import errors
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, DeviceStatus, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.outside.plausible import LED_AHEAD_MAX
from trefoil.core.plan import NodePlan, PlannedDevice
from trefoil.runtime.clock import Clock
from trefoil.runtime.state_errors import believed_epoch

SERVES = (SliceState.READY, SliceState.SWAPPING)


class Surroundings(Protocol):
    """What a node needs of the system around it."""

    loop: VirtualLoop

    def clock_of(self, place: str) -> Clock: ...
    def published(self, node: "Node") -> None: ...
    def metered(self, node: "Node", sample: EnergySample) -> None: ...
    def stopping(self, node: "Node", key: SliceKey, revision: Revision) -> None: ...
    def led_epoch(self) -> int: ...
    def every(self, seconds: float, phase_s: float, call: Callable[[], Any]) -> None: ...


class Node:
    """One node; `answers` is false while its agent is dead or stopped."""

    def __init__(self, system: Surroundings, name: str, gpus: int, rng: Generator) -> None:
        self.name, self._system, self._rng = name, system, rng
        self.agent_target = f"{name}:1"
        self.clock = system.clock_of(name)
        self.devices = {f"{name}/gpu{i}": DeviceState.ASLEEP for i in range(gpus)}
        self.slices: dict[SliceKey, SliceStatus] = {}
        self.cordons: dict[str, str] = {}
        self.answers = True
        self.desired: NodePlan | None = None
        self.applied = Revision()
        self.highest_epoch = 0
        self.starts_fail = False
        self._due_s: dict[SliceKey | str, float] = {}
        self._generation = 0
        self._said: tuple[Any, ...] = ()
        self._seq = 0
        self.drawn_j = 0.0
        """What its meters have told, of all devices."""
        self._metered_s = self.clock.now_s()
        self._start_s = float(rng.uniform(0.3, 1.5))
        system.every(1.0, float(rng.uniform(0, 1)), self._tick)

    # --- what a controller asks ---------------------------------------------------------------------------------------

    def apply(self, plan: NodePlan) -> bool:
        """Apply, as the agent answers it."""
        led = believed_epoch(self._system.led_epoch(), self.highest_epoch, LED_AHEAD_MAX)
        refuse_made_up_epoch(plan.revision.epoch, self.highest_epoch, led)
        highest = max(self.highest_epoch, led)
        if plan.revision.epoch < highest or plan.revision < self.applied:
            raise errors.StaleRevision(f"{self.name} obeys epoch {highest}, revision {self.applied}")
        self.highest_epoch = plan.revision.epoch
        changed = self.desired is None or self.desired.digest != plan.digest
        self.desired, self.applied = plan, plan.revision
        self.work()
        return changed

    def status(self) -> NodeStatus:
        """What the agent observes now."""
        return NodeStatus(
            node=self.name,
            zone="demo",
            applied=self.applied,
            devices=tuple(
                DeviceStatus(
                    device=name,
                    type=A100_40GB,
                    state=state,
                    slices=tuple(status for key, status in sorted(self.slices.items()) if key.device == name),
                    mig_current=True,
                    cordon=self.cordons.get(name, ""),
                )
                for name, state in self.devices.items()
            ),
            observed_at_s=self.clock.now_s(),
            simulated=True,
            agent_target=self.agent_target,
            highest_epoch_seen=self.highest_epoch,
        )

    def restart(self) -> None:
        """Another agent, on the calendar of now; what the old one had read of the meters it continues from."""
        length_s = self.clock.now_s() - self._metered_s
        self.clock = self._system.clock_of(self.name)
        self._metered_s = self.clock.now_s() - length_s
        self.answers = True
        self.work()

    # --- faults -------------------------------------------------------------------------------------------------------

    def kill_slice(self, key: SliceKey) -> None:
        """Its Triton dies; its agent starts another one a moment later."""
        self._set(key, state=SliceState.FAILED, why="its Triton ended")
        self._later(key, 1.0)
        self._say()

    def lose(self, device: str) -> None:
        """The device is gone, with what ran there."""
        self.devices[device] = DeviceState.LOST
        self.slices = {key: status for key, status in self.slices.items() if key.device != device}
        self._say()

    def find(self, device: str) -> None:
        """The device is back."""
        if self.devices[device] == DeviceState.LOST:
            self.devices[device] = DeviceState.ASLEEP
        self.work()

    # --- what the agent does ------------------------------------------------------------------------------------------

    def work(self) -> None:
        """One step towards what is wanted, by an agent that lives."""
        if not self.answers:
            return
        for device in self.desired.devices if self.desired is not None else ():
            if self.devices.get(device.device, DeviceState.LOST) != DeviceState.LOST:
                self._pursue(device, self._system.loop.time())
        if self._said != (self.slices, self.devices, self.cordons, self.applied):
            self._say()

    def _say(self) -> None:
        if self.answers:
            self._said = (dict(self.slices), dict(self.devices), dict(self.cordons), self.applied)
            self._system.published(self)

    def _set(self, key: SliceKey, **changes: Any) -> None:
        self.slices[key] = replace(self.slices[key], since_s=self.clock.now_s(), **changes)

    def _later(self, what: SliceKey | str, seconds: float) -> None:
        self._due_s[what] = self._system.loop.time() + seconds
        self._system.loop.call_later(seconds + 1e-4, self.work)

    def _pursue(self, device: PlannedDevice, now_s: float) -> None:
        name, wanted = device.device, {part.key: part for part in device.slices}
        for key in [key for key in self.slices if key.device == name and key not in wanted]:
            if self.slices[key].state != SliceState.DRAINING:
                assert self.desired is not None
                self._system.stopping(self, key, self.desired.revision)
                self._set(key, state=SliceState.DRAINING)
                self._later(key, 0.1)
            elif now_s >= self._due_s[key]:
                del self.slices[key]
        state = self.devices[name]
        if device.target == DeviceState.AWAKE and state == DeviceState.ASLEEP:
            self.devices[name] = DeviceState.WAKING
            self._later(name, 0.4)
        elif state == DeviceState.WAKING and now_s >= self._due_s[name]:
            self.devices[name] = DeviceState.AWAKE
        elif not wanted and not any(key.device == name for key in self.slices):
            self.devices[name] = device.target
        if self.devices[name] == DeviceState.AWAKE:
            for key in wanted:
                self._bring(key, wanted[key].hosted, now_s)

    def _bring(self, key: SliceKey, hosted: tuple[Any, ...], now_s: float) -> None:
        status = self.slices.get(key)
        if status is None:
            if not any(key.overlaps(other) for other in self.slices):
                self._generation += 1
                self.slices[key] = SliceStatus(
                    key, self._generation, "MIG-x", SliceState.STARTING, "", hosted, f"{key.name}:{self._generation}",
                    "", self.applied, self.clock.now_s(), 2,
                )  # fmt: skip
                self._later(key, self._start_s)
            return
        due = now_s >= self._due_s.get(key, 0.0)
        if status.state == SliceState.DRAINING and due:
            del self.slices[key]  # it goes first; then it comes again
            self._later(key, 0.01)
        elif status.state == SliceState.STARTING and due:
            if self.starts_fail:
                self._set(key, state=SliceState.FAILED, why="out of memory")
                self._later(key, 2.0)
            else:
                self._set(key, state=SliceState.READY)
        elif status.state == SliceState.READY and status.hosted != hosted:
            self._set(key, state=SliceState.SWAPPING)
            self._later(key, self._start_s / 2)
        elif status.state == SliceState.SWAPPING and due:
            self._set(key, state=SliceState.READY, hosted=hosted)
        elif status.state == SliceState.FAILED and due:
            self._generation += 1
            target = f"{self.name}:{self._generation}"
            self._set(
                key, state=SliceState.STARTING, hosted=hosted, generation=self._generation, grpc_target=target, why=""
            )
            self._later(key, self._start_s)

    def _tick(self) -> None:
        self._said = ()  # every second, also where nothing has changed
        self.work()
        if not self.answers:
            return
        now_s, before_s = self.clock.now_s(), self._metered_s
        self._metered_s, self._seq = now_s, self._seq + 1
        for name, state in self.devices.items():
            joules = (60.0 if state == DeviceState.AWAKE else 20.0) * (now_s - before_s)
            sample = EnergySample(
                self.name, name, self._seq, before_s, now_s, joules, EnergyMethod.NVML_COUNTER, idle_j=joules,
                state=state, simulated=True,
            )  # fmt: skip
            self.drawn_j += joules
            self._system.metered(self, sample)

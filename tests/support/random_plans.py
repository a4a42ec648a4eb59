"""Random plans of a node, from a seed: layouts with explicit placements, variants, sleeping devices, clocks."""

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.support.triton_process import hosted
from trefoil.core.common import Revision
from trefoil.core.device_types import device_type
from trefoil.core.fleet import DeviceState, DeviceType, SliceKey
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed

COMPUTE_SLICES = 7
VARIANTS = 4


class Planner:
    """Each plan is a change of the one before: most of it stays, so that there are neighbours to leave alone."""

    def __init__(
        self,
        seed: int,
        node: str,
        devices: Sequence[str],
        *,
        clocks: bool = False,
        change: float = 0.5,
        asleep: float = 0.12,
    ) -> None:
        self._random = random.Random(seed)
        self._node = node
        self._types = {f"{node}/gpu{index}": device_type(name) for index, name in enumerate(devices)}
        self._clocks = clocks
        self._change = change
        self._asleep = asleep
        self._number = 0
        self.last = self._seal([PlannedDevice(name, DeviceState.ASLEEP) for name in self._types])

    def reseed(self, seed: int) -> None:
        """Draw what comes next from another seed."""
        self._random = random.Random(seed)

    def _seal(self, devices: Sequence[PlannedDevice]) -> NodePlan:
        self._number += 1
        return sealed(NodePlan(node=self._node, devices=tuple(devices)), Revision(1, self._number))

    def next(self) -> NodePlan:
        """A plan that differs from the last one."""
        before = self.last
        while True:
            devices = [
                self._changed(device) if self._random.random() < self._change else device for device in before.devices
            ]
            if tuple(devices) != before.devices:
                self.last = self._seal(devices)
                return self.last

    def again(self, plan: NodePlan) -> NodePlan:
        """The same content under a new revision."""
        self.last = self._seal(plan.devices)
        return self.last

    def _changed(self, device: PlannedDevice) -> PlannedDevice:
        kind, chance = self._types[device.device], self._random.random()
        if chance < self._asleep:
            return PlannedDevice(device.device, DeviceState.ASLEEP)
        parts = device.slices if chance < 0.7 else ()
        kept = tuple(self._swapped(part) for part in parts if self._random.random() < 0.7)
        slices = self._filled(device.device, kind, kept)
        changed = PlannedDevice(device.device, DeviceState.AWAKE if slices else DeviceState.ASLEEP, slices)
        if self._clocks and slices and kind.clock_lockable and self._random.random() < 0.6:
            mhz = self._random.choice(kind.clocks_mhz)
            governor = "miad" if mhz % 30 else ""  # nobody reports a latency to it: the top of the range
            changed = replace(changed, clock_max_mhz=mhz, governor=governor)
        return changed

    def _swapped(self, part: PlannedSlice) -> PlannedSlice:
        return self._slice(part.key) if self._random.random() < 0.3 else part

    def _slice(self, key: SliceKey) -> PlannedSlice:
        return PlannedSlice(key, (hosted(self._random.randint(1, VARIANTS)),), 2)

    def _filled(self, device: str, kind: DeviceType, kept: tuple[PlannedSlice, ...]) -> tuple[PlannedSlice, ...]:
        """Fill some of what is left in random order; half-empty devices occur too."""
        parts = list(kept)
        sizes = {one.name: one for one in kind.slice_types}
        places = [(one, start) for one in kind.slice_types for start in one.starts]
        self._random.shuffle(places)
        for one, start in places[: self._random.randint(1, len(places))]:
            key = SliceKey(device, one.name, start, one.memory_slices)
            used = sum(sizes[part.key.slice_type].compute_slices for part in parts)
            if used + one.compute_slices <= COMPUTE_SLICES and not any(key.overlaps(part.key) for part in parts):
                parts.append(self._slice(key))
        return tuple(sorted(parts, key=lambda part: part.key))

"""How busy each slice was, by sensors: GPM (NVML's own counters, Hopper and newer) here, DCGM in `dcgm`.

Both are keyed by GPU-instance ids, which drivers reuse at once: so a value belongs to a slice and its generation, and
a slice that was created again starts without one.
"""

from collections.abc import Mapping
from typing import Any, Final

from power_agent.devices.errors import DeviceError, DeviceLost, DeviceUnsupported, DriverUnavailable
from power_agent.devices.inventory import Inventory
from trefoil.core.device_types import WHOLE
from trefoil.core.energy import AttributionMethod
from trefoil.core.fleet import SliceKey

WHOLE_GPU: Final = None  # stands for a GPU-instance id where there are none


class GpuInstanceIds:
    """GPU-instance ids of the slices of a device, listed again only when its slices change. Blocking."""

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._known: dict[str, tuple[Mapping[SliceKey, int], dict[SliceKey, int | None]]] = {}

    def lookup(self, device: str, generations: Mapping[SliceKey, int]) -> Mapping[SliceKey, int | None]:
        """GPU-instance id of each of these slices that exists; None for a whole GPU.

        Raises:
            DeviceError: the driver refuses the listing.
        """
        known = self._known.get(device)
        if known is not None and known[0] == generations and len(known[1]) == len(generations):
            return known[1]
        found: dict[SliceKey, int | None] = {key: WHOLE_GPU for key in generations if key.slice_type == WHOLE}
        if len(found) < len(generations):
            found |= {s.key: s.gi_id for s in self._inventory.gpu_instances(device) if s.key in generations}
        self._known[device] = (dict(generations), found)
        return found

    def invalidate(self, device: str) -> None:
        """Invalidate what is known of a device, so that it is listed again next time."""
        self._known.pop(device, None)


class Gpm:
    """Activity of each slice between two calls, by NVML's GPM counters. One thread per device may call it."""

    method = AttributionMethod.GPM

    def __init__(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._ids = GpuInstanceIds(inventory)
        self._supported: dict[str, bool] = {}
        self._samples: dict[str, dict[tuple[SliceKey, int], Any]] = {}
        inventory.before_closing.append(self.close)

    def activity(self, device: str, generations: Mapping[SliceKey, int]) -> Mapping[SliceKey, float]:
        """Mean busy share of the multiprocessors of each slice since the last call, 0..1; new slices are absent.

        Raises:
            DeviceError: the GPU is lost or its driver gone.
        """
        if device not in self._supported:
            self._supported[device] = self._inventory.gpm_supported(device)
        if not self._supported[device]:
            return {}
        before = self._samples.pop(device, {})
        after: dict[tuple[SliceKey, int], Any] = {}
        found: dict[SliceKey, float] = {}
        try:
            for key, gi_id in self._ids.lookup(device, generations).items():
                place = (key, generations[key])
                try:
                    after[place] = self._inventory.gpm_sample(device, gi_id)
                    value = self._compare(device, before.get(place), after[place])
                except DeviceUnsupported:
                    continue  # an instance that is being rebuilt
                if value is not None:
                    found[key] = value
        except DeviceError as error:
            self._ids.invalidate(device)
            self._supported.pop(device)
            if isinstance(error, DeviceLost | DriverUnavailable):
                raise
            found.clear()  # no reason to go without the counter: the meter has other ways to split it
        finally:
            for sample in before.values():
                self._inventory.gpm_free(sample)
            self._samples[device] = after
        return found

    def _compare(self, device: str, before: Any, after: Any) -> float | None:
        return None if before is None else self._inventory.gpm_sm_activity(device, before, after)

    def close(self) -> None:
        """Free all samples, before NVML is shut down; the next call has none to compare with."""
        for samples in self._samples.values():
            for sample in samples.values():
                self._inventory.gpm_free(sample)
        self._samples.clear()

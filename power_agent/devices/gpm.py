"""GPU performance monitoring of the simulated driver (Hopper): samples of work done, and metrics between two of them.

A sample keeps what its GPU or GPU instance had worked so far. Two samples of different generations of one GPU-instance
id give nonsense, as on hardware: ids are reused.
"""

from dataclasses import dataclass
from typing import Any, Final

from power_agent.devices.gpu import Gpu, GpuInstance, Nvml, NvmlFault

SAMPLES_MAX: Final = 1024
PERIOD_S: Final = 0.1  # the hardware counts in steps of this: closer samples hold no data
WHOLE_GPU: Final = 0  # key of Gpu.busy_s; GPU instances have their generation
GRAPHICS_UTIL, SM_UTIL, SM_OCCUPANCY, ANY_TENSOR_UTIL, DRAM_BW_UTIL = 1, 2, 3, 5, 10
# Percent of full use at density 1; only the first two matter here, the others are plausible.
SCALE: Final = {GRAPHICS_UTIL: 100.0, SM_UTIL: 100.0, SM_OCCUPANCY: 40.0, ANY_TENSOR_UTIL: 30.0, DRAM_BW_UTIL: 35.0}


@dataclass(frozen=True, slots=True)
class Sample:
    """Work at one moment. busy_s: seconds with a kernel; dense_s: the same, weighted by how full the SMs were."""

    at_s: float
    busy_s: float
    dense_s: float


class GpmSamples:
    """The samples that clients have allocated; bounded, as killed clients free nothing."""

    def __init__(self) -> None:
        self._samples: dict[int, Sample | None] = {}

    def clear(self) -> None:
        self._samples.clear()

    def allocate(self, handle: int) -> None:
        if len(self._samples) >= SAMPLES_MAX:
            del self._samples[next(iter(self._samples))]
        self._samples[handle] = None

    def free(self, handle: int) -> None:
        self._known(handle)
        del self._samples[handle]

    def take(self, handle: int, gpu: Gpu, instance: GpuInstance | None, now_s: float) -> None:
        self._known(handle)
        busy_s, dense_s = gpu.busy_s.get(instance.generation if instance else WHOLE_GPU, (0.0, 0.0))
        self._samples[handle] = Sample(now_s, busy_s, dense_s)

    def metrics(self, first: int, second: int, wanted: list[int]) -> list[dict[str, Any]]:
        """Mean of each metric between two samples [percent], with a return code of its own."""
        before, after = self._known(first), self._known(second)
        if before is None or after is None:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        span_s = after.at_s - before.at_s
        found = []
        for metric in wanted:
            if metric not in SCALE:
                found.append({"nvmlReturn": int(Nvml.NOT_SUPPORTED), "value": 0.0})
            elif span_s < PERIOD_S:
                found.append({"nvmlReturn": int(Nvml.NO_DATA), "value": 0.0})
            else:
                done_s = after.busy_s - before.busy_s if metric == GRAPHICS_UTIL else after.dense_s - before.dense_s
                percent = min(max(SCALE[metric] * done_s / span_s, 0.0), 100.0)
                found.append({"nvmlReturn": int(Nvml.SUCCESS), "value": percent})
        return found

    def _known(self, handle: int) -> Sample | None:
        if handle not in self._samples:
            raise NvmlFault(Nvml.INVALID_ARGUMENT)
        return self._samples[handle]

"""What a GPU's sensors make of its true power: sampled for a quarter of the time (GA100), or averaged over a second.

Source: arXiv 2312.02741 (A100 samples 25 ms of each 100 ms); nvml.h (instantaneous up to GA100, 1 s average later).
"""

from collections import deque
from typing import Final

from power_agent.devices.calls_power import settled_c
from power_agent.devices.gpu import Gpu

AVERAGE_S: Final = 1.0
HEAT_S: Final = 15.0  # time constant of the temperature; an assumption


class Sensors:
    """The sensors of one GPU; `feed` after each stretch of constant power."""

    def __init__(self, gpu: Gpu, at_rest_w: float) -> None:
        self._gpu = gpu
        self._recent: deque[tuple[float, float, float]] = deque([(-AVERAGE_S, 0.0, at_rest_w)])  # from, to [s], watts
        self._held_w = at_rest_w  # of the last finished sampling window, which began at
        self._held_since_s = -AVERAGE_S
        gpu.power_w = gpu.instant_w = gpu.average_w = at_rest_w
        gpu.temperature_c = settled_c(at_rest_w)

    def feed(self, now_s: float, dt_s: float, power_w: float) -> None:
        """The GPU drew `power_w` for `dt_s` seconds until `now_s`."""
        gpu = self._gpu
        self._recent.append((now_s - dt_s, now_s, power_w))
        while len(self._recent) > 1 and self._recent[0][1] <= now_s - AVERAGE_S:
            self._recent.popleft()
        if gpu.model.power_average_s:
            gpu.power_w = gpu.average_w = self._mean_w(now_s - AVERAGE_S, now_s)
            gpu.instant_w = power_w
        elif gpu.model.power_duty:
            gpu.power_w = gpu.instant_w = self._sampled_w(now_s, *gpu.model.power_duty)
        else:
            gpu.power_w = gpu.instant_w = power_w
        share = min(1.0, dt_s / HEAT_S)
        assert gpu.temperature_c is not None
        gpu.temperature_c += share * (settled_c(power_w) - gpu.temperature_c)

    def _mean_w(self, start_s: float, end_s: float) -> float:
        parts = [(min(end_s, to_s) - max(start_s, from_s), watts) for from_s, to_s, watts in self._recent]
        covered_s = sum(part_s for part_s, _ in parts if part_s > 0)
        if covered_s <= 0:
            return self._recent[-1][2]
        return sum(part_s * watts for part_s, watts in parts if part_s > 0) / covered_s

    def _sampled_w(self, now_s: float, sampled_s: float, period_s: float) -> float:
        window_s = now_s // period_s * period_s
        if now_s < window_s + sampled_s:
            window_s -= period_s  # this one is still open
        if window_s > self._held_since_s:
            self._held_since_s = window_s
            self._held_w = self._mean_w(window_s, window_s + sampled_s)
        return self._held_w

"""True energy of one simulated GPU, split by slice and version, and what its sensors make of its power.

Power is integrated tick by tick into the counter and into its true split. Each term is integrated on its own; none is
computed as what the others leave. idle_j is the baseline while at least one slice serves. unallocated_j is the baseline
while none does, plus what a slice draws before it serves (start, warm-up) and what foreign processes draw. active_j is
the rest, per slice and version. A slice serves from the end of its process's first batch (the warm-up) to the end of
the process.

Power sensors sample for a quarter of the time (GA100) or average over a second. Source: arXiv 2312.02741 (A100 samples
25 ms of each 100 ms); nvml.h (instantaneous up to GA100, 1 s average later)."""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import numpy as np

from trefoil.core import power
from trefoil.core.fleet import DeviceState, DeviceType
from trefoil.simulated_node.gpu_models import gpu_model
from trefoil.simulated_node.gpu_state import Gpu

NOISE_CLIP: Final = 3.0  # in standard deviations


@dataclass(frozen=True, slots=True)
class PowerDraw:
    """Work of one version on one slice in a tick. `account` is where its energy is booked; None = unallocated."""

    slice_type: str
    busy_s: float
    density: float
    account: "VersionAccount | None"
    generation: int = 0


@dataclass(slots=True)
class VersionAccount:
    """Energy and work of one version on one slice."""

    family: str
    variant: str
    version: int
    active_j: float = 0.0
    busy_s: float = 0.0
    batches: int = 0
    items: int = 0


@dataclass(slots=True)
class SliceAccount:
    """Energy of one slice, from its creation to its end."""

    slice_type: str
    start: int
    size: int
    generation: int
    mig_uuid: str
    versions: dict[tuple[int, int], VersionAccount] = field(default_factory=dict)

    def truth(self) -> dict[str, Any]:
        """True energy and work of the slice by version, as JSON values."""
        return {
            **asdict(replace(self, versions={})),
            "active_j": sum(version.active_j for version in self.versions.values()),
            "versions": [asdict(version) for version in self.versions.values()],
        }


@dataclass(frozen=True, slots=True)
class TickPower:
    """Power that the driver reports of the last tick."""

    power_w: float
    capped: bool


class DeviceEnergy:
    """Energy counter and true split of one GPU [J]."""

    def __init__(self, device: DeviceType, chance: np.random.Generator, noise_ratio: float) -> None:
        self.device = device
        self._chance = chance
        self._noise_ratio = noise_ratio
        self.counter_j = 0.0
        self.idle_j = 0.0
        self.asleep_j = 0.0  # baseline while no process has a context
        self.starting_j = 0.0  # baseline while a process runs but no slice serves yet
        self.warm_up_j = 0.0
        self.foreign_j = 0.0
        self.slices: list[SliceAccount] = []
        self._full_w: dict[tuple[str, int], float] = {}
        self._shares: dict[str, float] = {}

    def full_load_w(self, slice_type: str, clock_mhz: int) -> float:
        """Power above idle of a slice that computes without pause at density 1."""
        key = (slice_type, clock_mhz)
        if key not in self._full_w:
            law = power.dynamic_w(self.device) * power.clock_law(self.device, clock_mhz)
            self._full_w[key] = self.sm_share(slice_type) * law
        return self._full_w[key]

    def sm_share(self, slice_type: str) -> float:
        """Share of the GPU's multiprocessors; also of instances that no plan knows, such as 1g.5gb+me."""
        if slice_type not in self._shares:
            known = {kind.name for kind in self.device.slice_types} | {power.WHOLE}
            if slice_type in known:
                self._shares[slice_type] = power.sm_share(self.device, slice_type)
            else:
                sms = {profile.name: profile.sm_count for profile in gpu_model(self.device.name).profiles}
                self._shares[slice_type] = sms[slice_type] / max(sms.values())
        return self._shares[slice_type]

    @property
    def at_rest_w(self) -> float:
        """Power of the GPU while no process has a context."""
        return power.idle_w(self.device, DeviceState.ASLEEP, 0)

    def account(self, slice_type: str, start: int, size: int, generation: int, uuid: str) -> SliceAccount:
        """Account of this creation of a slice; opened when it is first asked for."""
        for found in reversed(self.slices):
            if (found.generation, found.mig_uuid) == (generation, uuid):
                return found
        self.slices.append(SliceAccount(slice_type, start, size, generation, uuid))
        return self.slices[-1]

    def truth(self) -> dict[str, Any]:
        """Counter and split since the start [J]."""
        return {
            "counter_j": self.counter_j,
            "active_j": self.active_j,
            "idle_j": self.idle_j,
            "unallocated_j": self.unallocated_j,
            "unallocated": {
                "asleep_j": self.asleep_j,
                "starting_j": self.starting_j,
                "warm_up_j": self.warm_up_j,
                "foreign_j": self.foreign_j,
            },
            "slices": [account.truth() for account in self.slices],
        }

    @property
    def unallocated_j(self) -> float:
        """Joules of sleep, starts, warm-ups and foreign processes."""
        return self.asleep_j + self.starting_j + self.warm_up_j + self.foreign_j

    @property
    def active_j(self) -> float:
        """Joules of all versions on all slices, above the baseline."""
        return sum(version.active_j for account in self.slices for version in account.versions.values())

    def step(
        self,
        dt_s: float,
        *,
        clock_mhz: int,
        limit_w: float,
        occupied: bool,
        serving: bool,
        draws: Sequence[PowerDraw],
        foreign_w: float = 0.0,
    ) -> TickPower:
        """Book `dt_s` seconds. `occupied`: a process has a context; `serving`: a slice is past its warm-up."""
        state = DeviceState.AWAKE if occupied or foreign_w else DeviceState.ASLEEP
        noise = 1.0 + self._noise_ratio * float(np.clip(self._chance.standard_normal(), -NOISE_CLIP, NOISE_CLIP))
        base_w = power.idle_w(self.device, state, clock_mhz) * noise
        linear_w = [
            draw.busy_s / dt_s * (draw.density * self.full_load_w(draw.slice_type, clock_mhz)) for draw in draws
        ]
        total_w = sum(linear_w) + foreign_w
        bent_w = power.saturated_w(self.device, total_w) * noise
        capped = base_w + bent_w > limit_w
        if capped:
            bent_w = max(0.0, limit_w - base_w)
        scale = bent_w / total_w if total_w else 0.0
        self.counter_j += (base_w + bent_w) * dt_s
        base_j = base_w * dt_s
        if serving:
            self.idle_j += base_j
        elif occupied:
            self.starting_j += base_j
        else:
            self.asleep_j += base_j
        self.foreign_j += foreign_w * scale * dt_s
        for draw, draw_w in zip(draws, linear_w, strict=True):
            joules = draw_w * scale * dt_s
            if draw.account is None:
                self.warm_up_j += joules
            else:
                draw.account.active_j += joules
        return TickPower(base_w + bent_w, capped)


TEMPERATURE_AT_REST_C: Final = 30.0
TEMPERATURE_C_PER_W: Final = 0.11
AVERAGE_S: Final = 1.0
HEAT_S: Final = 15.0  # time constant of the temperature; an assumption


def settled_c(power_w: float) -> float:
    """Temperature that the GPU settles at under that power."""
    return TEMPERATURE_AT_REST_C + TEMPERATURE_C_PER_W * power_w


class Sensors:
    """Power and temperature sensors of one GPU; `update` after each stretch of constant power."""

    def __init__(self, gpu: Gpu, at_rest_w: float) -> None:
        self._gpu = gpu
        self._recent: deque[tuple[float, float, float]] = deque([(-AVERAGE_S, 0.0, at_rest_w)])  # from, to [s], watts
        self._window_w = at_rest_w  # of the last finished sampling window, which began at
        self._window_began_s = -AVERAGE_S
        gpu.power_w = gpu.instant_w = gpu.average_w = at_rest_w
        gpu.temperature_c = settled_c(at_rest_w)

    def update(self, now_s: float, dt_s: float, power_w: float) -> None:
        """Update the sensors: the GPU drew `power_w` for `dt_s` seconds until `now_s`."""
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
        if window_s > self._window_began_s:
            self._window_began_s = window_s
            self._window_w = self._mean_w(window_s, window_s + sampled_s)
        return self._window_w

"""Energy of a device over a window [J], from the power agent's energy samples: counter differences, never gauges.

Only samples that lie wholly inside the window count; they must cover at least WINDOW_MIN_S, because counters advance in
steps (NVML: some 100 ms) that a shorter window would take for energy. No meter, or too little covered: None, never 0.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock

WINDOW_MIN_S: Final = 2.0
WINDOW_MARGIN_S: Final = 2.0  # samples come once a second: what a window needs beyond WINDOW_MIN_S to hold whole ones
LATE_MAX_S: Final = 5.0  # a busy agent tells the last sample of a window that much after its end


@dataclass(frozen=True, slots=True)
class MeteredEnergy:
    """Energy of a device [J] and the time that it covers [s]."""

    joules: float
    seconds: float
    simulated: bool

    @property
    def watts(self) -> float:
        """Mean power [W]."""
        return self.joules / self.seconds


def energy_between(
    samples: Sequence[EnergySample], device: str, starts_at_s: float, ends_at_s: float
) -> MeteredEnergy | None:
    """Energy of a device between two moments [UTC s]; None where samples cover too little of it."""
    inside = [
        s
        for s in samples
        if s.device == device and s.starts_at_s >= starts_at_s and s.ends_at_s <= ends_at_s and not s.counter_resets
    ]
    seconds = sum(s.ends_at_s - s.starts_at_s for s in inside)
    if seconds < WINDOW_MIN_S or any(s.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) for s in inside):
        return None
    return MeteredEnergy(sum(s.counter_j for s in inside), seconds, any(s.simulated for s in inside))


def active_j_per_batch(idle: MeteredEnergy | None, busy: MeteredEnergy | None, batches_per_s: float) -> float | None:
    """Joules above idle of one batch, from a device at rest and one that never rests."""
    if idle is None or busy is None or batches_per_s <= 0:
        return None
    return max(0.0, (busy.watts - idle.watts) / batches_per_s)


class EnergyLog:
    """Energy samples of a power agent's stream as they come; without an agent it stays empty."""

    def __init__(self, stub: Any | None) -> None:
        self.samples: list[EnergySample] = []
        self._task = asyncio.create_task(self._follow(stub)) if stub is not None else None

    @property
    def metered(self) -> bool:
        """Whether samples with joules have come."""
        return any(s.method not in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) for s in self.samples)

    async def energy_over(
        self, device: str, starts_at_s: float, ends_at_s: float, clock: Clock
    ) -> MeteredEnergy | None:
        """Energy of a device over a window, once all of its samples have come or are too late to be waited for."""
        give_up_s = clock.monotonic_s() + LATE_MAX_S
        while self._sampled_until_s(device) < ends_at_s and clock.monotonic_s() < give_up_s:
            await clock.sleep(0.1)
        return energy_between(self.samples, device, starts_at_s, ends_at_s)

    def _sampled_until_s(self, device: str) -> float:
        return next((s.ends_at_s for s in reversed(self.samples) if s.device == device), 0.0)

    async def _follow(self, stub: Any) -> None:
        from protos.power_agent.v1 import power_agent_pb2

        try:
            async for answer in stub.WatchEnergy(power_agent_pb2.WatchEnergyRequest()):
                self.samples.append(codec.from_proto(answer.sample))
        except grpc.aio.AioRpcError:
            return  # an agent without a meter, or one that went away: what is missing reads as None

    async def close(self) -> None:
        """Stop following the stream."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

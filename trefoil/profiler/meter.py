"""Joules of a device over a window, from the power agent's energy samples: counter differences, never gauges.

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

WINDOW_MIN_S: Final = 2.0
ROOM_S: Final = 1.5  # samples come once a second: what a window needs beyond WINDOW_MIN_S to hold whole ones


@dataclass(frozen=True, slots=True)
class Metered:
    """Energy and the time that it covers."""

    joules: float
    seconds: float
    simulated: bool

    @property
    def watts(self) -> float:
        """Mean power."""
        return self.joules / self.seconds


def metered(samples: Sequence[EnergySample], device: str, starts_at_s: float, ends_at_s: float) -> Metered | None:
    """What a device took between two moments; None where nobody can say."""
    inside = [
        s
        for s in samples
        if s.device == device and s.starts_at_s >= starts_at_s and s.ends_at_s <= ends_at_s and not s.counter_resets
    ]
    seconds = sum(s.ends_at_s - s.starts_at_s for s in inside)
    if seconds < WINDOW_MIN_S or any(s.method in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) for s in inside):
        return None
    return Metered(sum(s.counter_j for s in inside), seconds, any(s.simulated for s in inside))


def active_j(idle: Metered | None, busy: Metered | None, batches_per_s: float) -> float | None:
    """Joules above idle of a batch, from a device at rest and one that never rests."""
    if idle is None or busy is None or batches_per_s <= 0:
        return None
    return max(0.0, (busy.watts - idle.watts) / batches_per_s)


class EnergyLog:
    """Follows an agent's energy stream; without an agent it stays empty."""

    def __init__(self, stub: Any | None) -> None:
        self.samples: list[EnergySample] = []
        self._task = asyncio.create_task(self._follow(stub)) if stub is not None else None

    @property
    def metered(self) -> bool:
        """Whether samples with joules have come."""
        return any(s.method not in (EnergyMethod.NONE, EnergyMethod.UNSPECIFIED) for s in self.samples)

    async def _follow(self, stub: Any) -> None:
        from protos.power_agent.v1 import power_agent_pb2

        try:
            async for answer in stub.WatchEnergy(power_agent_pb2.WatchEnergyRequest()):
                self.samples.append(codec.from_proto(answer.sample))
        except grpc.aio.AioRpcError:
            return  # an agent without a meter, or one that went away: what is missing reads as None

    async def close(self) -> None:
        """Stop following."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

"""CPU use of slices: compute seconds as they are told, means over a minute, and the history of each variant."""

from dataclasses import dataclass
from typing import Final

from trefoil.core.cpus.use import CpuHistory, CpuUse
from trefoil.core.device_types import slice_cores, slice_servers
from trefoil.core.fleet import SliceKey

SAMPLE_S: Final = 60.0  # as Kubernetes' metrics are looked at
FORGET_S: Final = 3 * SAMPLE_S  # after it a slice that nothing is told of has no use any more


@dataclass(slots=True)
class _Open:
    """What was told of a slice since its last sample."""

    starts_s: float
    ends_s: float
    core_s: float = 0.0


class CpuUses:
    """CPU use of all slices of CPUs."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        self._open: dict[tuple[SliceKey, str, str], _Open] = {}
        self._last: dict[tuple[SliceKey, str, str], tuple[CpuUse, float]] = {}
        self._histories: dict[tuple[str, str], CpuHistory] = {}

    def add(self, part: SliceKey, family: str, variant: str, compute_s: float, starts_s: float, ends_s: float) -> None:
        """Add how long the instances of a variant computed on a slice; of other slices than CPUs' nothing is kept.

        A quota's instance that computes takes its part of the quota: it is throttled, and not always running.
        """
        cores = slice_cores(part.slice_type)
        if not cores:
            return
        key = part, family, variant
        one = self._open.setdefault(key, _Open(starts_s, starts_s))
        one.core_s += compute_s * min(1.0, cores / slice_servers(part.slice_type))
        one.ends_s = max(one.ends_s, ends_s)
        length_s = one.ends_s - one.starts_s
        if length_s < SAMPLE_S - 1e-6:
            return
        del self._open[key]
        used = min(cores, one.core_s / length_s)
        self._last[key] = CpuUse(family, variant, part, used, length_s), one.ends_s
        history = self._histories.get((family, variant), CpuHistory(family, variant))
        self._histories[family, variant] = history.with_sample(used, cores, one.ends_s)

    def uses(self, now_s: float) -> tuple[CpuUse, ...]:
        """Last use of each slice that anything is told of."""
        self._last = {key: one for key, one in self._last.items() if now_s - one[1] <= FORGET_S}
        self._open = {key: one for key, one in self._open.items() if now_s - one.ends_s <= FORGET_S}
        return tuple(self._last[key][0] for key in sorted(self._last))

    def histories(self) -> tuple[CpuHistory, ...]:
        """History of each variant."""
        return tuple(self._histories[key] for key in sorted(self._histories))

"""CPU use of slices: core seconds as reported, means over a minute, and the history of each variant."""

from dataclasses import dataclass
from typing import Final

from trefoil.core.cpus.use import CpuHistory, CpuUse
from trefoil.core.device_types import slice_cores, slice_servers
from trefoil.core.energy import SliceEnergy
from trefoil.core.fleet import SliceKey

SAMPLE_S: Final = 60.0  # as Kubernetes' metrics are looked at
FORGET_S: Final = 3 * SAMPLE_S  # after it a slice without reports has no use any more


@dataclass(slots=True)
class _Open:
    """Reports of a slice since its last sample."""

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

    def add_slice(self, part: SliceEnergy, starts_s: float, ends_s: float) -> None:
        """Add what a node tells of a slice: by the counter of its control group where there is one, each variant's
        part being that of its compute seconds, else those."""
        total_s = sum(h.compute_s for h in part.hosted)
        for h in part.hosted:
            if part.cpu_s > 0:
                share = h.compute_s / total_s if total_s else 1 / len(part.hosted)
                self._add(part.key, h.family, h.variant, part.cpu_s * share, starts_s, ends_s)
            else:
                self.add(part.key, h.family, h.variant, h.compute_s, starts_s, ends_s)

    def add(self, part: SliceKey, family: str, variant: str, compute_s: float, starts_s: float, ends_s: float) -> None:
        """Add how long the instances of a variant computed on a slice.

        A quota's instance that computes takes its part of the quota: it is throttled, and not always running.
        """
        share = min(1.0, slice_cores(part.slice_type) / slice_servers(part.slice_type))
        self._add(part, family, variant, compute_s * share, starts_s, ends_s)

    def _add(self, part: SliceKey, family: str, variant: str, core_s: float, starts_s: float, ends_s: float) -> None:
        """Add core seconds; of other slices than CPUs' nothing is kept."""
        cores = slice_cores(part.slice_type)
        if not cores:
            return
        key = part, family, variant
        one = self._open.setdefault(key, _Open(starts_s, starts_s))
        one.core_s += core_s
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
        """Latest reported CPU use, by slice."""
        self._last = {key: one for key, one in self._last.items() if now_s - one[1] <= FORGET_S}
        self._open = {key: one for key, one in self._open.items() if now_s - one.ends_s <= FORGET_S}
        return tuple(self._last[key][0] for key in sorted(self._last))

    def histories(self) -> tuple[CpuHistory, ...]:
        """History of each variant."""
        return tuple(self._histories[key] for key in sorted(self._histories))

"""A profiling session: every variant, slice, clock and batch that was asked for, one after the other, alone."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from trefoil.core.catalog import Family, Variant
from trefoil.core.errors import NotFound, SettingError
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.profiler.load import CLIENTS, Slice, Window
from trefoil.profiler.meter import ROOM_S, WINDOW_MIN_S, EnergyLog, Metered, active_j
from trefoil.profiler.node import Node
from trefoil.profiler.table import QUANTILES, Measured, RatePoint
from trefoil.runtime.clock import Clock

METER_WAIT_S: Final = 2.5  # for the first energy sample: they come once a second
LONGER: Final = (1, 2, 4)  # times the window, until its samples cover enough: under load they are longer and fewer
SEED: Final = 1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """What to measure and for how long. `rates`: shares of saturation to offer as Poisson arrivals."""

    family: Family
    folder: Path
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    window_s: float
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values, low, high in (("--batches", self.batches, 1, 4096), ("--rates", self.rates, 0.01, 1.5)):
            wrong = [value for value in values if not low <= value <= high]
            if wrong or (name == "--batches" and not values):
                raise SettingError(f"from {low} to {high}", field=name, value=wrong or None, remedy="e.g. 1,2,4 or 0.5")
        if not 0.1 <= self.window_s <= 600:
            raise SettingError("0.1 to 600 s", field="--window", value=self.window_s, remedy="e.g. 5")


@dataclass(frozen=True, slots=True)
class Where:
    """What the windows are of. `device` names it in the energy stream; empty: nobody meters."""

    device: str
    device_type: str
    slice_type: str
    clock_mhz: int


class Session:
    """Measures; `log` may be empty (no agent)."""

    def __init__(self, asked: Asked, clock: Clock, log: EnergyLog, say: Say, found: list[Measured]) -> None:
        self.asked, self._clock, self._log, self._say = asked, clock, log, say
        self._rng = np.random.default_rng(SEED)
        self.found = found  # the caller's: what was measured before something failed stays

    async def direct(self, target: str, where: Where) -> None:
        """Variants that a running Triton has loaded.

        Raises:
            NotFound: a variant is not loaded there.
        """
        await self._await_meter(where)
        part = Slice(target, self.asked.family.name, self._clock, self.asked.shapes, self.asked.folder / "heldout.npz")
        try:
            loaded = await part.loaded()
            for name in self.asked.variants:
                variant = self.asked.family.variant(name)
                if variant.version not in loaded:
                    raise NotFound(
                        f"{target} has not loaded {self.asked.family.name} version {variant.version} ({name})",
                        remedy=f"load it, or name others with --variants; versions that are ready: {loaded}",
                    )
                await self._variant(part, where, variant)
        finally:
            await part.close()

    async def through(self, node: Node, slices: Sequence[str], clocks: Sequence[int]) -> None:
        """Every variant on every slice type and clock of a node."""
        try:
            for place in node.places(slices, clocks):
                where = Where(place.device, place.kind.name, place.slice_type, place.clock_mhz)
                await self._await_meter(where)
                for name in self.asked.variants:
                    variant = self.asked.family.variant(name)
                    if variant.memory_mib + CONTEXT_MIB > place.memory_mib:
                        self._say(f"{name} does not fit {place.slice_type}: no row")
                        continue
                    status = await node.serve(place, self.asked.family.name, variant, max(self.asked.batches))
                    await self._on(status.grpc_target, where, variant)
        finally:
            await node.empty()

    async def _on(self, target: str, where: Where, variant: Variant) -> None:
        items = self.asked.folder / "heldout.npz"
        part = Slice(target, self.asked.family.name, self._clock, self.asked.shapes, items)
        try:
            await self._variant(part, where, variant)
        finally:
            await part.close()

    async def _await_meter(self, where: Where) -> None:
        end_s = self._clock.monotonic_s() + METER_WAIT_S
        while where.device and not self._log.metered and self._clock.monotonic_s() < end_s:
            await self._clock.sleep(0.1)
        if not self._log.metered:
            self._say("no meter: joules will be null")

    async def _variant(self, part: Slice, where: Where, variant: Variant) -> None:
        idle: Metered | None = None
        for batch in self.asked.batches:
            request = await part.request(variant.version, batch)
            await part.warm_up(request)
            if idle is None:
                _, idle = await self._covered(where, self._rest)
            point = await self._point(part, where, variant, batch, request, idle)
            self.found.append(point)
            joules = "no meter" if point.energy_active_j is None else f"{point.energy_active_j:.3g} J"
            self._say(
                f"{variant.name} on {where.slice_type}, batch {batch}: p50 {point.latency_ms[0]:.2f} ms, "
                f"{point.throughput_per_s:.1f} items/s, {joules}"
            )

    async def _rest(self, seconds: float) -> Window:
        window = Window(self._clock.now_s(), 0.0, 0)
        await self._clock.sleep(seconds)
        window.ends_at_s = self._clock.now_s()
        return window

    def _seconds(self) -> float:
        """Long enough for the meter where there is one."""
        return max(self.asked.window_s, WINDOW_MIN_S + ROOM_S) if self._log.metered else self.asked.window_s

    async def _point(
        self, part: Slice, where: Where, variant: Variant, batch: int, request: Any, idle: Metered | None
    ) -> Measured:
        alone = await part.closed(request, batch, self.asked.window_s)
        full, busy = await self._covered(where, lambda seconds: part.closed(request, batch, seconds, CLIENTS))
        if not alone.latency_ms or not full.latency_ms:
            raise SettingError(
                "nothing was answered in it", field="--window", value=self.asked.window_s, remedy="read Triton's log"
            )
        joules = active_j(idle, busy, full.batches_per_s)
        offered = [share * full.batches_per_s for share in self.asked.rates]
        rates = [await self._rate(part, where, request, batch, per_s) for per_s in offered]
        p50, p95, p99 = (alone.quantile_ms(q) for q in QUANTILES)
        return Measured(
            where.device_type, where.slice_type, variant.name, batch, where.clock_mhz, (p50, p95, p99),
            batch * full.batches_per_s, joules, variant.memory_mib, len(alone.latency_ms),
            simulated=busy is not None and busy.simulated, rates=tuple(rates),
        )  # fmt: skip

    async def _rate(self, part: Slice, where: Where, request: Any, batch: int, per_s: float) -> RatePoint:
        window, power = await self._covered(where, lambda seconds: part.open(request, batch, seconds, per_s, self._rng))
        latency = None
        if window.latency_ms:
            p50, p95, p99 = (window.quantile_ms(q) for q in QUANTILES)
            latency = (p50, p95, p99)
        watts = None if power is None else power.watts
        return RatePoint(per_s, window.batches_per_s, window.failed, latency, watts)

    async def _covered(
        self, where: Where, measure: Callable[[float], Awaitable[Window]]
    ) -> tuple[Window, Metered | None]:
        """A window and what the device took in it; a longer one where the meter's samples covered too little of it."""
        for longer in LONGER:
            window = await measure(longer * self._seconds())
            if not (self._log.metered and where.device):
                break
            energy = await self._log.over(where.device, window.starts_at_s, window.ends_at_s, self._clock)
            if energy is not None:
                return window, energy
        return window, None

"""A profiling session: every variant, slice, clock and batch that was asked for, one after the other, alone."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from trefoil.core.catalog import Family, Variant
from trefoil.core.device_types import slice_servers
from trefoil.core.errors import NotFound, SettingError
from trefoil.core.fleet import triton_name
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.units import MS_PER_S
from trefoil.profiler.energy_meter import (
    WINDOW_MARGIN_S,
    WINDOW_MIN_S,
    EnergyLog,
    MeteredEnergy,
    active_j_per_batch,
)
from trefoil.profiler.exclusive_node import ExclusiveNode
from trefoil.profiler.lent_device import LentDevice
from trefoil.profiler.profile_csv import QUANTILES, LoadPoint, ProfilePoint
from trefoil.profiler.stream_load import StreamSlice, refuse_streams
from trefoil.profiler.triton_load import SPARE_CLIENTS, TritonSlice, Window, closed_shape, refuse_batch
from trefoil.runtime.clock import Clock
from trefoil.runtime.model_files import CONFIG, contract
from trefoil.runtime.security.tls import Tls

FIRST_SAMPLE_WAIT_S: Final = 2.5  # for the first energy sample: they come once a second
# Times the window, until its samples cover enough: under load they are longer and fewer.
WINDOW_FACTORS: Final = (1, 2, 4)
SEED: Final = 1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ProfileSpec:
    """What a session measures, and for how long. `rates`: shares of saturation to offer as Poisson arrivals;
    `instances`: of a variant on a node's slice, 0 for as many as plans host."""

    family: Family
    folder: Path
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    rates: tuple[float, ...]
    window_s: float
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    instances: int = 0

    def __post_init__(self) -> None:
        for name, values, low, high in (("--batches", self.batches, 1, 4096), ("--rates", self.rates, 0.01, 1.5)):
            wrong = [value for value in values if not low <= value <= high]
            if wrong or (name == "--batches" and not values):
                raise SettingError(f"from {low} to {high}", field=name, value=wrong or None, remedy="e.g. 1,2,4 or 0.5")
        if not 0.1 <= self.window_s <= 600:
            raise SettingError("0.1 to 600 s", field="--window", value=self.window_s, remedy="e.g. 5")

    def check_contract(self) -> None:
        """Check batches and shapes against the family's contract, where it is here: else its Triton will tell.

        Raises:
            SettingError: a batch above the largest, or an input whose shape stays open.
            InvalidInput: it answers by streams of no API that is known.
        """
        path = self.folder / CONFIG
        if not path.is_file():
            return
        config = contract(self.folder.parent, self.folder.name)
        if config.model_transaction_policy.decoupled:
            refuse_streams(config, max(self.batches))
            return
        for batch in self.batches:
            refuse_batch(self.family.name, batch, config.max_batch_size)
        for tensor in config.input:
            closed_shape(tensor.name, tensor.dims, self.shapes)


@dataclass(frozen=True, slots=True)
class MeasuredSlice:
    """Slice that is measured. `device` names it in the energy stream; empty: no meter."""

    device: str
    device_type: str
    slice_type: str
    clock_mhz: int


class Session:
    """A profiling session on one Triton or one node. `log` stays empty without an agent."""

    def __init__(
        self,
        spec: ProfileSpec,
        clock: Clock,
        log: EnergyLog,
        say: Say,
        points: list[ProfilePoint],
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self.spec, self._clock, self._log, self._say = spec, clock, log, say
        self._rng = np.random.default_rng(SEED)
        self.points = points  # the caller's: what was measured before something failed stays

    async def profile_triton(self, target: str, on: MeasuredSlice) -> None:
        """Measure variants that a running Triton has loaded.

        Raises:
            NotFound: a variant is not loaded there.
        """
        await self._await_meter(on)
        triton = self._slice(target)
        try:
            loaded = await triton.ready_versions()
            for name in self.spec.variants:
                variant = self.spec.family.variant(name)
                if variant.version not in loaded:
                    raise NotFound(
                        f"{target} has not loaded {self.spec.family.name} version {variant.version} ({name})",
                        remedy=f"load it, or name others with --variants; versions that are ready: {loaded}",
                    )
                await self._measure_variant(triton, on, variant)
        finally:
            await triton.close()

    async def profile_node(
        self, node: ExclusiveNode | LentDevice, slices: Sequence[str], clocks: Sequence[int]
    ) -> None:
        """Measure every variant on every slice type and clock of a node, or of a device that is lent.

        Raises:
            SettingError: the family does not take what was asked for; then nothing was moved for it.
        """
        self.spec.check_contract()
        try:
            for found in node.places(slices, clocks):
                place = replace(found, instances=self.spec.instances)
                on = MeasuredSlice(place.device, place.kind.name, place.shape.name, place.clock_mhz)
                await self._await_meter(on)
                for name in self.spec.variants:
                    variant = self.spec.family.variant(name)
                    if variant.memory_mib + CONTEXT_MIB > place.shape.memory_mib:
                        self._say(f"{name} does not fit {place.shape.name}: no row")
                        continue
                    status = await node.serve(place, self.spec.family.name, variant, max(self.spec.batches))
                    shown = triton_name(status.key.device.partition("/")[0])
                    await self._measure_at(status.grpc_target, shown, on, variant)
        finally:
            await node.empty()

    async def _measure_at(self, target: str, name: str, on: MeasuredSlice, variant: Variant) -> None:
        triton = self._slice(target, name)
        try:
            await self._measure_variant(triton, on, variant)
        finally:
            await triton.close()

    def _slice(self, target: str, name: str = "") -> TritonSlice:
        spec = self.spec
        if spec.family.generative:
            return StreamSlice(target, spec.family, spec.folder, self._clock, self._tls, name)
        items = spec.folder / "heldout.npz"
        return TritonSlice(target, spec.family.name, self._clock, spec.shapes, items, self._tls, name)

    async def _await_meter(self, on: MeasuredSlice) -> None:
        end_s = self._clock.monotonic_s() + FIRST_SAMPLE_WAIT_S
        while on.device and not self._log.metered and self._clock.monotonic_s() < end_s:
            await self._clock.sleep(0.1)
        if not self._log.metered:
            self._say("no meter: joules will be null")

    async def _measure_variant(self, triton: TritonSlice, on: MeasuredSlice, variant: Variant) -> None:
        idle: MeteredEnergy | None = None
        for batch in self.spec.batches:
            request = await triton.make_request(variant.version, batch)
            await triton.warm_up(request)
            if idle is None:
                _, idle = await self.measure_with_energy(on, self.idle_window)
            if isinstance(triton, StreamSlice):
                point = await self._measure_streams(triton, on, variant, batch, request, idle)
            else:
                point = await self._measure_point(triton, on, variant, batch, request, idle)
            self.points.append(point)
            self._say(self._line(point))

    def _line(self, point: ProfilePoint) -> str:
        place = f"{point.variant} on {point.slice_type}"
        joules = "no meter" if point.energy_active_j is None else f"{point.energy_active_j:.3g} J"
        if point.tpot_ms_p50 is None:
            return (
                f"{place}, batch {point.batch}: p50 {point.latency_ms[0]:.2f} ms, "
                f"{point.throughput_per_s:.1f} items/s, {joules}"
            )
        times = f"TTFT p50 {point.ttft_ms_p50:.1f} ms, TPOT p50 {point.tpot_ms_p50:.2f} ms"
        tokens_per_s = point.throughput_per_s * self.spec.family.tokens_mean
        return f"{place}, {point.batch} streams: {times}, {tokens_per_s:.1f} tokens/s, {joules} for all of them"

    async def _measure_streams(
        self,
        triton: StreamSlice,
        on: MeasuredSlice,
        variant: Variant,
        streams: int,
        request: Any,
        idle: MeteredEnergy | None,
    ) -> ProfilePoint:
        """Measure so many streams at once. What a row says of a batch holds of these answers together."""
        window, busy = await self.measure_with_energy(on, lambda seconds: triton.streams(request, streams, seconds))
        if not window.latency_ms:
            why = triton.failure or "each answer had one token"
            raise SettingError(f"nothing was answered in it: {why}", field="--window", value=self.spec.window_s)
        answers_per_s = streams * MS_PER_S / window.mean_ms
        joules = active_j_per_batch(idle, busy, answers_per_s / streams)
        p50, p95, p99 = (window.quantile_ms(q) for q in QUANTILES)
        return ProfilePoint(
            on.device_type, on.slice_type, variant.name, streams, on.clock_mhz, (p50, p95, p99), answers_per_s, joules,
            variant.memory_mib, len(window.latency_ms), simulated=busy is not None and busy.simulated,
            ttft_ms_p50=float(np.median(triton.ttft_ms)), tpot_ms_p50=float(np.median(triton.tpot_ms)),
        )  # fmt: skip

    async def idle_window(self, seconds: float) -> Window:
        """Wait with nothing sent."""
        window = Window(self._clock.now_s(), 0.0, 0)
        await self._clock.sleep(seconds)
        window.ends_at_s = self._clock.now_s()
        return window

    def _window_s(self) -> float:
        """Length of a window [s]: enough for the meter where there is one."""
        return max(self.spec.window_s, WINDOW_MIN_S + WINDOW_MARGIN_S) if self._log.metered else self.spec.window_s

    async def _measure_point(
        self,
        triton: TritonSlice,
        on: MeasuredSlice,
        variant: Variant,
        batch: int,
        request: Any,
        idle: MeteredEnergy | None,
    ) -> ProfilePoint:
        at_once = self.spec.instances or slice_servers(on.slice_type)
        unloaded = await triton.closed_loop(request, batch, self.spec.window_s)
        saturated, busy = await self.measure_with_energy(
            on, lambda seconds: triton.closed_loop(request, batch, seconds, at_once + SPARE_CLIENTS)
        )
        if not unloaded.latency_ms or not saturated.latency_ms:
            raise SettingError(
                "nothing was answered in it", field="--window", value=self.spec.window_s, remedy="read Triton's log"
            )
        joules = active_j_per_batch(idle, busy, saturated.batches_per_s)
        offered = [share * saturated.batches_per_s for share in self.spec.rates]
        rates = [await self._measure_load(triton, on, request, batch, per_s) for per_s in offered]
        p50, p95, p99 = (unloaded.quantile_ms(q) for q in QUANTILES)
        return ProfilePoint(
            on.device_type, on.slice_type, variant.name, batch, on.clock_mhz, (p50, p95, p99),
            batch * saturated.batches_per_s, joules, variant.memory_mib, len(unloaded.latency_ms),
            simulated=busy is not None and busy.simulated, rates=tuple(rates), instances=at_once,
        )  # fmt: skip

    async def _measure_load(
        self, triton: TritonSlice, on: MeasuredSlice, request: Any, batch: int, per_s: float
    ) -> LoadPoint:
        window, power = await self.measure_with_energy(
            on, lambda seconds: triton.open_loop(request, batch, seconds, per_s, self._rng)
        )
        latency = None
        if window.latency_ms:
            p50, p95, p99 = (window.quantile_ms(q) for q in QUANTILES)
            latency = (p50, p95, p99, window.mean_ms)
        watts = None if power is None else power.watts
        return LoadPoint(per_s, window.batches_per_s, window.failed, latency, watts)

    async def measure_with_energy(
        self, on: MeasuredSlice, measure: Callable[[float], Awaitable[Window]]
    ) -> tuple[Window, MeteredEnergy | None]:
        """Measure a window and the energy of the device in it; a longer one where samples covered too little of it."""
        for factor in WINDOW_FACTORS:
            window = await measure(factor * self._window_s())
            if not (self._log.metered and on.device):
                break
            energy = await self._log.energy_over(on.device, window.starts_at_s, window.ends_at_s, self._clock)
            if energy is not None:
                return window, energy
        return window, None

"""A stated law of DNN service time and energy on MIG slices, for profiles that could not be measured.

Source of the form: roofline (Williams et al., CACM 2009) with a launch floor; constants: model_repository/_profiles.
Data: per variant and item `macs`, elements `written` by all operators, kernel `launches`, `weights` read per pass.
Law of a pass of b items [ms], on a slice with the share s of the SMs and m of the memory. The clock is the share r of
the highest:

    floor   = launch_ms * launches                                      the CPU launches: no slice or clock helps.
    compute = b * macs / macs_per_ms / (s^alpha * r)                    arithmetic.
    traffic = (b * written / written_per_ms + weights / weights_per_ms) / (m^beta * (s * r)^delta) / bandwidth
    bare    = (floor^p + (compute + traffic)^p)^(1/p)                   what a benchmark of the network measures.
    pass    = ((launch_scale * floor)^p + (work_scale * (compute + traffic))^p)^(1/p)       the application's code.
    service = host_ms * b / items + pass                                decoding and transport, the slice held.

Energy above idle of a batch [J]: joules * (macs / macs of the largest)^gamma * b / items * (1 - eta + eta * fill). Here
fill is pass * s over the same work's time on a whole GPU without floor. At a lower clock the energy is multiplied by
(mu + (1 - mu) * clock_law(r)) * pass(r) / pass(1). No slice draws more during a pass than its share of the board limit
less idle.

Assumed, identified by no data: eta (how much of the joules follows the slice's width rather than the work). Likewise mu
(how much of the active power does not follow the SM clock), and that host time grows with the items. Scales, gamma and
CV are assumed to hold for every variant of a family.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from trefoil.core.device_types import MEMORY_SLICES, WHOLE
from trefoil.core.fleet import DeviceType, SliceType
from trefoil.core.power import clock_law, clock_ratio, sm_share
from trefoil.core.units import MS_PER_S

FIT_SMS: Final = 98  # of the widest slice that the constants were fitted to: share 1 of the SMs
NORMAL_QUANTILES: Final = {"p50": 0.0, "p95": 1.6448536269514722, "p99": 2.3263478740408408}


@dataclass(frozen=True, slots=True)
class Features:
    """Features of one variant per item: macs [1e9], elements written [1e6], kernel launches, weights read [1e6]."""

    macs: float
    written: float
    launches: float
    weights: float


@dataclass(frozen=True, slots=True)
class LatencyLaw:
    """Cost of a kernel, a multiply-add, an element and a weight on a whole GPU; see the module."""

    launch_ms: float
    macs_per_ms: float
    written_per_ms: float
    weights_per_ms: float
    alpha: float
    beta: float
    delta: float
    p: float


@dataclass(frozen=True, slots=True)
class FamilyLaw:
    """Constants of one application: how its service differs from a bare pass. `items` is the size of a request."""

    items: int
    host_ms: float
    launch_scale: float
    work_scale: float
    cv: float
    joules: float
    gamma: float
    macs_largest: float


@dataclass(frozen=True, slots=True)
class SliceShare:
    """Slice, to the law: share of SM groups, share of memory bandwidth, bandwidth and clock over the fit's."""

    sm_share: float
    memory_share: float
    bandwidth: float = 1.0
    clock: float = 1.0


@dataclass(frozen=True, slots=True)
class LawConstants:
    """All constants of the law for one GPU type: `eta`, `mu` and `bandwidth` are stated, the rest is fitted."""

    latency: LatencyLaw
    families: Mapping[str, FamilyLaw]
    eta: float
    mu: float
    bandwidth: float
    idle_w: float


@dataclass(frozen=True, slots=True)
class Point:
    """One operating point: mean service time, its coefficient of variation, joules above idle of a batch."""

    mean_ms: float
    cv: float
    energy_j: float

    def quantile_ms(self, name: str) -> float:
        """p50, p95 or p99 of the gamma law with this mean and CV (Wilson and Hilferty's cube)."""
        return self.mean_ms * gamma_factor(self.cv, NORMAL_QUANTILES[name])


def gamma_factor(cv: float, normal: float) -> float:
    """Quantile of a gamma law of mean 1, from the same quantile of the standard normal."""
    ninth = cv * cv / 9.0
    return float(max(0.0, 1.0 - ninth + normal * math.sqrt(ninth)) ** 3)


def bare_ms(law: LatencyLaw, of: Features, on: SliceShare, batch: float) -> float:
    """Time of one pass of the bare network [ms]."""
    return smooth_max(law.launch_ms * of.launches, work_ms(law, of, on, batch), law.p)


def work_ms(law: LatencyLaw, of: Features, on: SliceShare, batch: float) -> float:
    """Arithmetic and memory traffic of one pass, without the launch floor [ms]."""
    compute = batch * of.macs / law.macs_per_ms / (on.sm_share**law.alpha * on.clock)
    traffic = batch * of.written / law.written_per_ms + of.weights / law.weights_per_ms
    speed = on.memory_share**law.beta * (on.sm_share * on.clock) ** law.delta * on.bandwidth
    return float(compute + traffic / speed)


def smooth_max(a: float, b: float, p: float) -> float:
    """Maximum of two numbers with a smooth corner: their p-norm."""
    return float((a**p + b**p) ** (1.0 / p))


def pass_ms(model: LawConstants, family: str, of: Features, on: SliceShare, batch: float) -> float:
    """Time of one pass of an application [ms]."""
    law, own = model.latency, model.families[family]
    floor = own.launch_scale * law.launch_ms * of.launches
    return smooth_max(floor, own.work_scale * work_ms(law, of, on, batch), law.p)


def fill(model: LawConstants, family: str, of: Features, on: SliceShare, batch: float) -> float:
    """GPU-seconds that a pass reserves over those that its work needs on a whole GPU at the highest clock."""
    ideal = model.families[family].work_scale * work_ms(model.latency, of, SliceShare(1.0, 1.0, on.bandwidth), batch)
    return pass_ms(model, family, of, on, batch) * on.sm_share / ideal


def machine(device: DeviceType, shape: SliceType, clock_mhz: int, bandwidth: float) -> SliceShare:
    """Slice as the law takes it. Without MIG a GPU has more SMs than its widest slice, and the same memory.

    That share above 1 is an extrapolation: the timings were taken in MIG mode, up to 7 of 7 groups.
    """
    if shape.name == WHOLE:
        return SliceShare(shape.sm_count / FIT_SMS, 1.0, bandwidth, clock_ratio(device, clock_mhz))
    share = shape.memory_slices / MEMORY_SLICES
    return SliceShare(sm_share(device, shape.name), share, bandwidth, clock_ratio(device, clock_mhz))


def energy_j(
    model: LawConstants, family: str, of: Features, device: DeviceType, shape: SliceType, batch: float
) -> float:
    """Energy above idle of one batch [J] at the highest clock."""
    own, on = model.families[family], machine(device, shape, max(device.clocks_mhz), model.bandwidth)
    weight = 1.0 - model.eta + model.eta * fill(model, family, of, on, batch)
    joules = own.joules * (of.macs / own.macs_largest) ** own.gamma * batch / own.items * weight
    most_w = (device.max_w - model.idle_w) * min(1.0, on.sm_share)
    return float(min(joules, most_w * pass_ms(model, family, of, on, batch) / MS_PER_S))


def point(
    model: LawConstants, family: str, of: Features, device: DeviceType, shape: SliceType, clock_mhz: int, batch: int
) -> Point:
    """Operating point of one variant on one slice at one clock and batch, by the model."""
    own = model.families[family]
    clocks = (clock_mhz, max(device.clocks_mhz))
    slow_ms, full_ms = (
        pass_ms(model, family, of, machine(device, shape, mhz, model.bandwidth), batch) for mhz in clocks
    )
    power = model.mu + (1.0 - model.mu) * clock_law(device, clock_mhz)
    joules = energy_j(model, family, of, device, shape, batch) * power * slow_ms / full_ms
    return Point(own.host_ms * batch / own.items + slow_ms, own.cv, joules)


def read_model(tree: Mapping[str, Any]) -> LawConstants:
    """Model from the constants that calibrate.py wrote."""
    families = {name: FamilyLaw(**values["law"]) for name, values in tree["families"].items()}
    stated = {name: float(tree[name]) for name in ("eta", "mu", "bandwidth", "idle_w")}
    return LawConstants(LatencyLaw(**tree["latency"]), families, **stated)


def read_features(tree: Mapping[str, Any]) -> dict[str, dict[str, Features]]:
    """Features of features.toml by group and model."""
    return {
        group: {name: Features(*(float(v) for v in values)) for name, values in models.items()}
        for group, models in tree.items()
    }

"""Power law of a device, for the simulated driver's truth and for every estimate made from profiles.

P = idle_w(state, clock) + sum over slices of busy * density * sm_share * dynamic_w * clock_law(clock).

idle_w    belongs to the device: sleep_w when asleep, else DeviceType.idle_w scaled weakly with the clock.
density   how much of the slice's dynamic power a variant draws while it computes (1 = all of it).
sm_share  streaming multiprocessors of the slice over those of the whole device in MIG mode.
dynamic_w span between idle and an inference load that keeps every SM busy; below max_w - idle_w, because inference does
          not reach the board limit. Synthetic until measured.
clock_law c1 r + c3 r^3 with r = f / f_max: linear at constant voltage, cubic where voltage follows (Zeus, mu-Serve).

A clock that is not profiled, in the simulated driver, pace files, the simulator and planners (`rows_at`): between two
profiled clocks a time is linear in 1/f; beyond them the part `clock_sensitivity` of it follows the clock (`stretch`).
Active power follows `clock_law`. Without rows at two clocks and without a stated sensitivity all of the time follows
the clock, the pessimistic assumption. docs/energy.md has the sources.

A board under a power limit lowers its clock until it draws no more (`clock_under`). Where a clock is asked for, a
number below 0 stands for a limit of so many watts and no lock: of a profile row what it was measured at, of a class
what it is planned at. A limit that is not profiled is, for each row, the clock that it leaves (`rows_at`).

`saturated_w` bends the sum slightly: two busy slices draw a little less than twice one. The planner does not know this:
truth and estimate differ on purpose, by at most CONCAVITY of a small load.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final

from trefoil.core.common import Basis, ProfileRow, Provenance
from trefoil.core.device_types import device_share, profile_type
from trefoil.core.fleet import DeviceState, DeviceType
from trefoil.core.units import MS_PER_S

DYNAMIC_W: Final = {  # synthetic: inference at full width draws some 305 W of the 400 W board limit of an A100
    "A100-SXM4-40GB": 250.0,
    "A100-SXM4-40GB-nomig": 250.0 * 108 / 98,  # as much per SM
    "A100-SXM4-80GB": 245.0,
    "A100-SXM4-80GB-nomig": 245.0 * 108 / 98,
    "H100-SXM5-80GB": 455.0,
    "H100-SXM5-80GB-nomig": 455.0,
    "Tesla V100-SXM2-32GB": 180.0,
    "Tesla T4": 38.0,  # small boards are built to run at their limit
    "Tesla P4": 45.0,
}
# What a load sweep says of idle power, where it differs from DeviceType.idle_w: with it the modelled profiles reproduce
# that sweep's joules. A scenario that repeats the sweep's paper takes it; the device type keeps its source's figure.
SWEEP_IDLE_W: Final = {
    "A100-SXM4-40GB": (
        36.1,
        Provenance(
            Basis.MODELLED,
            "fitted to 15 rows of CLOVER's load sweep (2 A100-40GB in MIG mode, contexts open): docs/profiles.md",
        ),
    ),
}
CLOCK_LINEAR: Final = 0.45  # c1, our choice: at 60 % clock the active power is 0.39 of its maximum
CLOCK_CUBIC: Final = 1.0 - CLOCK_LINEAR
IDLE_CLOCK_SHARE: Final = 0.15  # share of idle power that follows the clock
CONCAVITY: Final = 0.02  # excess of small loads over their linear share, truth only
WHOLE: Final = "whole"


def dynamic_w(device: DeviceType) -> float:
    """Dynamic power: the span between idle and every SM busy with inference at the highest clock [W]."""
    return DYNAMIC_W.get(profile_type(device.name), device.max_w - device.idle_w)


def clock_ratio(device: DeviceType, clock_mhz: int) -> float:
    """Ratio of a clock to the highest clock; 1 where the device has no clock list, and for a power limit."""
    return clock_mhz / max(device.clocks_mhz) if device.clocks_mhz and clock_mhz > 0 else 1.0


def clock_law(device: DeviceType, clock_mhz: int) -> float:
    """Ratio of active power at this clock to that at the highest."""
    ratio = clock_ratio(device, clock_mhz)
    return CLOCK_LINEAR * ratio + CLOCK_CUBIC * ratio**3


def clock_under(device: DeviceType, limit_w: float, active_w: float) -> int:
    """Highest supported clock at which a board draws no more than its limit, else the lowest; 0 without a clock list.

    `active_w`: what its slices would draw above idle at the highest clock.
    """
    fits = (
        clock
        for clock in sorted(device.clocks_mhz, reverse=True)
        if idle_w(device, DeviceState.AWAKE, clock) + active_w * clock_law(device, clock) <= limit_w
    )
    return next(fits, min(device.clocks_mhz, default=0))


def limit_leaving(device: DeviceType, clock_mhz: int) -> float:
    """Power limit that leaves a board this clock, whatever computes on it [W]: what all of its SMs draw there."""
    return idle_w(device, DeviceState.AWAKE, clock_mhz) + dynamic_w(device) * clock_law(device, clock_mhz)


def idle_w(device: DeviceType, state: DeviceState, clock_mhz: int) -> float:
    """Idle power of a device on which nothing computes [W]. A lost device counts as asleep: its power is unknown."""
    if state in (DeviceState.ASLEEP, DeviceState.LOST):
        return device.sleep_w
    return device.idle_w * (1.0 - IDLE_CLOCK_SHARE * (1.0 - clock_ratio(device, clock_mhz)))


def sm_share(device: DeviceType, slice_type_name: str) -> float:
    """Share of the device's SMs that a slice has in MIG mode; a whole GPU is 1."""
    if slice_type_name == WHOLE:
        return 1.0
    return device_share(device, slice_type_name)


def active_w(device: DeviceType, slice_type_name: str, clock_mhz: int, density: float = 1.0) -> float:
    """Active power, above idle, of one slice that computes without pause [W]."""
    return density * sm_share(device, slice_type_name) * dynamic_w(device) * clock_law(device, clock_mhz)


def density(
    device: DeviceType, slice_type_name: str, clock_mhz: int, service_s: float, energy_active_j: float
) -> float:
    """Density that makes a batch of this service time cost this energy: inverse of `active_w`."""
    assert service_s > 0
    return energy_active_j / (service_s * active_w(device, slice_type_name, clock_mhz))


def stretch(row_clock_mhz: int, clock_mhz: int, sensitivity: float = 1.0) -> float:
    """Stretch of service time at a clock over that at the clock of a profile row: 1 - s + s f0 / f.

    1 where either clock is not known (0, or a power limit). `sensitivity` s is of the profile row.
    """
    if row_clock_mhz <= 0 or clock_mhz <= 0:
        return 1.0
    return 1.0 - sensitivity + sensitivity * row_clock_mhz / clock_mhz


def sensitivity_at(row_clock_mhz: int, clock_mhz: int, sensitivity: float) -> float:
    """Sensitivity at a clock of what has this one at the clock of a profile row: the part that follows the clock grows
    as the clock falls, the rest does not."""
    return sensitivity * row_clock_mhz / clock_mhz / stretch(row_clock_mhz, clock_mhz, sensitivity)


def fitted_sensitivity(times: Sequence[tuple[int, float]], clock_mhz: int) -> float | None:
    """Part of a time that follows the clock at `clock_mhz`, by least squares of T = a + b / f with a, b >= 0.

    `times`: (clock [MHz], time) of one operating point. None: they are of fewer than two clocks.
    """
    periods = [1.0 / mhz for mhz, _ in times if mhz]
    if len(set(periods)) < 2 or len(periods) < len(times) or not clock_mhz:
        return None
    mean_period, mean_time = sum(periods) / len(periods), sum(time for _, time in times) / len(times)
    spread = sum((period - mean_period) ** 2 for period in periods)
    slope = sum((x - mean_period) * (time - mean_time) for x, (_, time) in zip(periods, times, strict=True)) / spread
    follows = max(0.0, slope) / clock_mhz
    stays = max(0.0, mean_time - max(0.0, slope) * mean_period)
    return follows / (follows + stays)


def rows_at(device: DeviceType, rows: Iterable[ProfileRow], clock_mhz: int) -> tuple[ProfileRow, ...]:
    """Rows of one variant on one slice type at a clock (0: the highest that is profiled; below 0: under a power limit
    of so many watts), ascending by batch.

    Rows of that very clock or limit if there are any, else each batch by its own rows at clocks.
    """
    known = sorted(rows, key=lambda row: (row.batch, row.clock_mhz))
    wanted_mhz = clock_mhz or max((row.clock_mhz for row in known), default=0)
    if exact := tuple(row for row in known if row.clock_mhz == wanted_mhz):
        return exact
    known = [row for row in known if row.clock_mhz >= 0]
    if wanted_mhz < 0:
        return tuple(_limited(device, row, -wanted_mhz) for row in rows_at(device, known, 0))
    return tuple(_row_at(device, list(same), wanted_mhz) for _, same in groupby(known, lambda row: row.batch))


def _limited(device: DeviceType, row: ProfileRow, limit_w: int) -> ProfileRow:
    """Row at a clock as it is under a power limit of the board, with nothing else on it."""
    watts = row.energy_active_j_per_batch / row.latency_ms_p50 * MS_PER_S / clock_law(device, row.clock_mhz)
    return at_clock(device, row, min(row.clock_mhz, clock_under(device, limit_w, watts)))


def _row_at(device: DeviceType, rows: Sequence[ProfileRow], clock_mhz: int) -> ProfileRow:
    """Row of one operating point at a clock, from its rows at others, ascending."""
    above = min(bisect_left([row.clock_mhz for row in rows], clock_mhz), len(rows) - 1)
    low, high = rows[above - 1], rows[above]
    if not 0 < low.clock_mhz < clock_mhz < high.clock_mhz:
        return at_clock(device, high, clock_mhz)
    share = (1 / clock_mhz - 1 / high.clock_mhz) / (1 / low.clock_mhz - 1 / high.clock_mhz)  # of the lower clock
    law, low_law, high_law = (clock_law(device, mhz) for mhz in (clock_mhz, low.clock_mhz, high.clock_mhz))

    def mean(of_low: float, of_high: float) -> float:
        return share * of_low + (1.0 - share) * of_high

    latency_ms = mean(low.latency_ms_p50, high.latency_ms_p50)
    active_w = law * mean(
        low.energy_active_j_per_batch / low.latency_ms_p50 / low_law,
        high.energy_active_j_per_batch / high.latency_ms_p50 / high_law,
    )
    ends = [(row.clock_mhz, row.latency_ms_p50) for row in (low, high)]
    return replace(
        high,
        clock_mhz=clock_mhz,
        latency_ms_p50=latency_ms,
        latency_ms_p95=mean(low.latency_ms_p95, high.latency_ms_p95),
        latency_ms_p99=mean(low.latency_ms_p99, high.latency_ms_p99),
        throughput_per_s=1.0 / mean(1.0 / low.throughput_per_s, 1.0 / high.throughput_per_s),
        energy_active_j_per_batch=active_w * latency_ms,
        power_w=law * mean(low.power_w / low_law, high.power_w / high_law),
        clock_sensitivity=fitted_sensitivity(ends, clock_mhz) or 0.0,
    )


def at_clock(device: DeviceType, row: ProfileRow, clock_mhz: int) -> ProfileRow:
    """Profile row at another clock by its sensitivity; 0 = unchanged."""
    if not clock_mhz or clock_mhz == row.clock_mhz:
        return row
    longer = stretch(row.clock_mhz, clock_mhz, row.clock_sensitivity)
    watts = clock_law(device, clock_mhz) / clock_law(device, row.clock_mhz)
    return replace(
        row,
        clock_mhz=clock_mhz,
        latency_ms_p50=row.latency_ms_p50 * longer,
        latency_ms_p95=row.latency_ms_p95 * longer,
        latency_ms_p99=row.latency_ms_p99 * longer,
        throughput_per_s=row.throughput_per_s / longer,
        energy_active_j_per_batch=row.energy_active_j_per_batch * longer * watts,
        power_w=row.power_w * watts,
        clock_sensitivity=sensitivity_at(row.clock_mhz, clock_mhz, row.clock_sensitivity),
    )


def saturated_w(device: DeviceType, linear_w: float) -> float:
    """Power that slices together draw above idle [W], from the sum of their linear shares. Equal at 0 and full load."""
    span_w = dynamic_w(device)
    return linear_w * (1.0 + CONCAVITY * (1.0 - linear_w / span_w)) if linear_w < span_w else linear_w

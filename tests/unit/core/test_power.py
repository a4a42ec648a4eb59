"""The power law: shape, and the identity that profiles rely on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning import row
from trefoil.core import power
from trefoil.core.device_types import A100_40GB, P4
from trefoil.core.fleet import DeviceState

CLOCKS = st.sampled_from(A100_40GB.clocks_mhz)
KINDS = st.sampled_from([kind.name for kind in A100_40GB.slice_types])


@given(low=CLOCKS, high=CLOCKS, kind=KINDS)
def test_power_never_falls_with_the_clock(low, high, kind):
    low, high = sorted((low, high))
    assert power.idle_w(A100_40GB, DeviceState.AWAKE, low) <= power.idle_w(A100_40GB, DeviceState.AWAKE, high)
    assert power.active_w(A100_40GB, kind, low) <= power.active_w(A100_40GB, kind, high)


def test_stated_points():
    assert power.idle_w(A100_40GB, DeviceState.AWAKE, 1410) == 55.0
    assert power.idle_w(A100_40GB, DeviceState.ASLEEP, 1410) == 35.0
    assert power.active_w(A100_40GB, "7g.40gb", 1410) == 250.0
    assert power.active_w(A100_40GB, "3g.20gb", 1410) == pytest.approx(250.0 * 42 / 98)
    assert power.clock_law(A100_40GB, 1410) == pytest.approx(1.0)


@given(kind=KINDS, clock=CLOCKS, service_s=st.floats(1e-3, 1), joules=st.floats(1e-3, 100))
def test_density_inverts_active_power(kind, clock, service_s, joules):
    density = power.density(A100_40GB, kind, clock, service_s, joules)
    assert power.active_w(A100_40GB, kind, clock, density) * service_s == pytest.approx(joules)


@given(one_w=st.floats(0, 125), other_w=st.floats(0, 125))
def test_saturation_is_concave_and_exact_at_both_ends(one_w, other_w):
    def bent(w):
        return power.saturated_w(A100_40GB, w)

    assert bent(one_w + other_w) <= bent(one_w) + bent(other_w) + 1e-9
    assert bent(0.0) == 0.0
    assert bent(250.0) == 250.0


@given(clock=CLOCKS, sensitivity=st.floats(0, 1))
def test_only_the_part_that_is_sensitive_follows_the_clock(clock, sensitivity):
    longer = power.stretch(1410, clock, sensitivity)
    assert longer == pytest.approx(1 + sensitivity * (1410 / clock - 1))
    assert power.stretch(1410, clock) == power.stretch(1410, clock, 1.0) == 1410 / clock, "to the last bit, as before"
    assert power.stretch(1410, clock, 0.0) == power.stretch(0, clock, sensitivity) == 1.0
    moved = power.at_clock(A100_40GB, replace(row("l", "7g.40gb", 40.0), clock_sensitivity=sensitivity), clock)
    assert moved.latency_ms_p95 == pytest.approx(row("l", "7g.40gb", 40.0).latency_ms_p95 * longer)


@given(limit_w=st.floats(60, 400), active_w=st.floats(0, 300))
def test_a_board_takes_the_highest_clock_whose_power_fits_its_limit(limit_w, active_w):
    def drawn_w(mhz):
        return power.idle_w(A100_40GB, DeviceState.AWAKE, mhz) + active_w * power.clock_law(A100_40GB, mhz)

    clock_mhz = power.clock_under(A100_40GB, limit_w, active_w)
    assert clock_mhz in A100_40GB.clocks_mhz
    fitting = [mhz for mhz in A100_40GB.clocks_mhz if drawn_w(mhz) <= limit_w]
    assert clock_mhz == (fitting[-1] if fitting else A100_40GB.clocks_mhz[0])
    assert power.clock_under(P4, limit_w, active_w) == 0, "it lists no clocks"


def test_rows_under_a_limit_are_the_measured_ones_else_what_the_limit_leaves_of_the_clock():
    free = replace(row("l", "7g.40gb", 40.0), clock_mhz=1410, energy_active_j_per_batch=9.0)
    measured = replace(free, clock_mhz=-200, latency_ms_p50=47.0, latency_ms_p95=47.0, latency_ms_p99=47.0)
    rows = [measured, free]
    assert power.rows_at(A100_40GB, rows, -200) == (measured,)
    assert power.rows_at(A100_40GB, rows, 0) == (free,)
    (half,) = power.rows_at(A100_40GB, rows, 705)
    assert half == power.at_clock(A100_40GB, free, 705), "rows at limits say nothing of clocks"
    (limited,) = power.rows_at(A100_40GB, rows, -150)
    full_w = 9.0 / free.latency_ms_p50 * 1e3
    assert limited == power.at_clock(A100_40GB, free, power.clock_under(A100_40GB, 150.0, full_w))
    assert limited.energy_active_j_per_batch / limited.latency_ms_p50 * 1e3 <= 150.0
    assert power.rows_at(A100_40GB, rows, -400) == (free,), "more than it draws"
    assert power.idle_w(A100_40GB, DeviceState.AWAKE, -150) == A100_40GB.idle_w
    assert power.stretch(1410, -150) == power.stretch(-150, 705) == 1.0


@given(clock=CLOCKS, shape=st.sampled_from(["1g.5gb", "3g.20gb", "7g.40gb"]))
def test_a_row_at_another_clock_keeps_its_density(clock, shape):
    known = row("l", shape, 40.0)
    moved = power.at_clock(A100_40GB, known, clock)
    assert moved.latency_ms_p95 / known.latency_ms_p95 == pytest.approx(1410 / clock)
    before, after = (
        power.density(A100_40GB, shape, r.clock_mhz, r.latency_ms_p50 / 1e3, r.energy_active_j_per_batch)
        for r in (known, moved)
    )
    assert after == pytest.approx(before)
    longer = moved.latency_ms_p50 / known.latency_ms_p50
    assert moved.power_w * longer / known.power_w == pytest.approx(
        moved.energy_active_j_per_batch / known.energy_active_j_per_batch
    )
    assert power.at_clock(A100_40GB, known, 0) is known


def profiled(*clocks_ms: tuple[int, float], s: float = 1.0):
    """Rows of one batch at clocks, with these times and as much energy as density 1 has there."""
    rows = []
    for clock_mhz, time_ms in clocks_ms:
        joules = power.active_w(A100_40GB, "7g.40gb", clock_mhz) * time_ms / 1e3
        rows.append(
            replace(
                row("l", "7g.40gb", 40.0), clock_mhz=clock_mhz, latency_ms_p50=time_ms, latency_ms_p95=1.1 * time_ms,
                latency_ms_p99=1.2 * time_ms, throughput_per_s=1e3 / time_ms, energy_active_j_per_batch=joules,
                clock_sensitivity=s,
            )
        )  # fmt: skip
    return rows


@given(clock=st.sampled_from([mhz for mhz in A100_40GB.clocks_mhz if 735 < mhz < 1410]), s=st.floats(0, 1))
def test_between_two_profiled_clocks_a_time_is_linear_in_its_period_and_keeps_its_density(clock, s):
    top_ms = 40.0
    known = profiled((1410, top_ms), (735, top_ms * power.stretch(1410, 735, s)))
    (found,) = power.rows_at(A100_40GB, known, clock)
    assert found.latency_ms_p50 == pytest.approx(top_ms * power.stretch(1410, clock, s))
    assert found.latency_ms_p95 == pytest.approx(1.1 * found.latency_ms_p50)
    assert found.throughput_per_s == pytest.approx(1e3 / found.latency_ms_p50)
    joules = power.active_w(A100_40GB, "7g.40gb", clock) * found.latency_ms_p50 / 1e3
    assert found.energy_active_j_per_batch == pytest.approx(joules)
    again = power.at_clock(A100_40GB, found, 1410)
    assert again.latency_ms_p50 == pytest.approx(top_ms), "its sensitivity is that of its own clock"


def test_over_all_clocks_a_time_never_falls_with_the_clock_where_no_profiled_one_does():
    known = profiled((1410, 38.0), (1005, 39.0), (735, 41.0), s=0.1)
    times = [power.rows_at(A100_40GB, known, mhz)[0].latency_ms_p50 for mhz in A100_40GB.clocks_mhz]
    assert times == sorted(times, reverse=True)
    assert power.rows_at(A100_40GB, known, 0) == power.rows_at(A100_40GB, known, 1410) == (known[0],)
    assert times[0] == pytest.approx(41.0 * power.stretch(735, A100_40GB.clocks_mhz[0], 0.1))


def test_the_sensitivity_is_fitted_over_the_periods_of_all_clocks():
    times = [(mhz, 40.0 * power.stretch(1410, mhz, 0.3)) for mhz in (1410, 1140, 735)]
    assert power.fitted_sensitivity(times, 1410) == pytest.approx(0.3)
    at_735 = 0.3 * (1410 / 735) / power.stretch(1410, 735, 0.3)
    assert power.fitted_sensitivity(times, 735) == pytest.approx(at_735)
    assert power.fitted_sensitivity([(1410, 40.0), (705, 39.0)], 1410) == 0.0, "noise makes no slope"
    assert power.fitted_sensitivity([(1410, 40.0), (705, 90.0)], 1410) == 1.0
    assert power.fitted_sensitivity([(1410, 40.0)], 1410) is None
    assert power.fitted_sensitivity([(1410, 40.0), (0, 40.0)], 1410) is None, "a clock is not known"

"""The power law: shape, and the identity that profiles rely on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.planning import row
from trefoil.core import power
from trefoil.core.device_types import A100_40GB
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

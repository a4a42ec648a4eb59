"""The true split: each term where it belongs, and all of them together the counter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trefoil.core.device_types import A100_40GB
from trefoil.core.power import idle_w, saturated_w
from trefoil.simulated_node.energy import DeviceEnergy, PowerDraw, SliceAccount, VersionAccount


def meter(noise=0.0):
    return DeviceEnergy(A100_40GB, np.random.default_rng(1), noise)


def step(energy, dt_s=1.0, draws=(), occupied=True, serving=True, clock_mhz=1410, limit_w=400.0, foreign_w=0.0):
    return energy.step(
        dt_s,
        clock_mhz=clock_mhz,
        limit_w=limit_w,
        occupied=occupied,
        serving=serving,
        draws=draws,
        foreign_w=foreign_w,
    )


def test_an_empty_gpu_sleeps_and_that_is_unallocated():
    energy = meter()
    assert step(energy, occupied=False, serving=False).power_w == A100_40GB.sleep_w
    assert (energy.asleep_j, energy.idle_j, energy.unallocated_j) == (35.0, 0.0, 35.0)


def test_a_starting_process_draws_idle_power_that_no_slice_serves_for():
    energy = meter()
    step(energy, serving=False)
    assert (energy.starting_j, energy.idle_j) == (55.0, 0.0)
    step(energy)
    assert energy.idle_j == 55.0


def test_warm_up_is_unallocated():
    energy = meter()
    step(energy, draws=[PowerDraw("7g.40gb", 0.1, 1.0, None)], serving=False)
    assert energy.warm_up_j == pytest.approx(saturated_w(A100_40GB, 25.0))
    assert energy.active_j == 0


def test_the_power_limit_is_kept_and_reported():
    energy = meter()
    tick = step(energy, draws=[PowerDraw("7g.40gb", 1.0, 1.0, VersionAccount("f", "v", 1))], limit_w=200.0)
    assert tick == (tick.__class__)(200.0, True)


@given(
    ticks=st.lists(
        st.tuples(
            st.floats(0.001, 0.1), st.lists(st.floats(0, 1), min_size=3, max_size=3), st.booleans(), st.floats(0, 50)
        ),
        max_size=30,
    ),
    noise=st.floats(0, 0.2),
)
def test_the_terms_add_up_to_the_counter(ticks, noise):
    energy = meter(noise)
    kinds = ("1g.5gb", "2g.10gb", "4g.20gb")
    accounts = [VersionAccount("f", kind, 1) for kind in kinds]
    for kind, account in zip(kinds, accounts, strict=True):
        energy.slices.append(SliceAccount(kind, 0, 1, 1, "", {(0, 1): account}))
    for dt_s, busy, serving, foreign_w in ticks:
        draws = [
            PowerDraw(kind, dt_s * share, 0.98, account if serving else None)
            for kind, share, account in zip(kinds, busy, accounts, strict=True)
        ]
        step(energy, dt_s, draws, serving=serving, foreign_w=foreign_w)
    assert energy.active_j + energy.idle_j + energy.unallocated_j == pytest.approx(energy.counter_j, rel=1e-9)


@given(shares=st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_saturation_moves_the_split_by_at_most_two_percent(shares):
    linear_w = 250.0 * sum(shares) / 2
    assert linear_w <= saturated_w(A100_40GB, linear_w) <= linear_w * 1.02 + 1e-9


def test_noise_does_not_bias_the_mean():
    energy = meter(0.05)
    for _ in range(20_000):
        step(energy, 0.04)
    assert energy.counter_j == pytest.approx(800 * idle_w(A100_40GB, 1, 1410), rel=0.003)

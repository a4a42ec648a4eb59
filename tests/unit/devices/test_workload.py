"""What the driver derives from profiles."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_agent.devices.pace import family_crc32
from power_agent.devices.workload import Workload, gamma_from_quantiles
from trefoil.core import power
from trefoil.core.catalog import Catalog, Family, ProfileRow, Variant
from trefoil.core.device_types import A100_40GB

VARIANTS = (Variant("f-s", 1, 0.8, "", 16, 1.0, 1, ""), Variant("f-l", 2, 0.9, "", 16, 1.0, 1, ""))


def row(variant, batch, p50_ms, joules, slice_type="7g.40gb", clock_mhz=1410):
    return ProfileRow(
        A100_40GB.name, slice_type, "f", variant, 0, batch, clock_mhz, (), p50_ms, p50_ms, p50_ms, 0.0, joules, 0.0, 16
    )


@given(mean=st.floats(1, 1000), cv=st.floats(0.01, 0.4))
def test_mean_and_variation_come_back_from_the_quantiles(mean, cv):
    draws = np.random.default_rng(1).gamma(1 / cv**2, mean * cv**2, 200_000)
    p50, p95 = np.quantile(draws, [0.5, 0.95])
    found_mean, found_cv = gamma_from_quantiles(float(p50), float(p95))
    assert found_mean == pytest.approx(mean, rel=0.01)
    assert found_cv == pytest.approx(cv, rel=0.03)


def test_a_profile_without_spread_is_deterministic():
    assert gamma_from_quantiles(25.0, 25.0) == (25.0, 0.0)


@given(
    small=st.floats(1, 50),
    large=st.floats(1, 50),
    joules=st.floats(0.1, 10),
    kind=st.sampled_from(A100_40GB.slice_types),
)
def test_equal_joules_in_the_profile_are_equal_joules_in_the_world(small, large, joules, kind):
    rows = (row("f-s", 1, small, joules, kind.name), row("f-l", 1, large, joules, kind.name))
    loaded = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), rows)).loaded(kind.name, 1410)
    for version, service_ms in ((1, small), (2, large)):
        density = loaded[family_crc32("f"), version].density(1)
        world_j = power.active_w(A100_40GB, kind.name, 1410, density) * service_ms / 1e3
        assert world_j == pytest.approx(joules)


def test_density_is_interpolated_between_batches_and_flat_outside():
    rows = (row("f-l", 2, 10.0, 2.5), row("f-l", 4, 20.0, 10.0))
    loaded = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), rows)).loaded("7g.40gb", 1410)
    version = loaded[family_crc32("f"), 2]
    assert [version.density(b) for b in (1, 2, 3, 4, 9)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0])


def test_an_unprofiled_clock_stretches_the_service_time():
    workload = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), (row("f-l", 1, 10.0, 2.5),)))
    (entry,) = workload.entries("7g.40gb", 705)
    assert entry.service_ms_mean == pytest.approx(20.0)
    assert workload.entries("1g.5gb", 1410) == []


def test_a_pace_file_holds_the_families_that_its_slice_serves_and_no_others():
    other = Family("g", "m", (Variant("g-s", 1, 0.8, "", 16, 1.0, 1, ""),))
    rows = (row("f-s", 1, 10.0, 2.5), replace(row("g-s", 1, 12.0, 2.5), family="g"))
    workload = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS), other), rows))
    assert [entry.family for entry in workload.entries("7g.40gb", 1410, {"g"})] == ["g"]
    assert sorted(entry.family for entry in workload.entries("7g.40gb", 1410)) == ["f", "g"]

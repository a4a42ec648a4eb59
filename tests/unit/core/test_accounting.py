"""Energy is conserved, priced at the intensity in force, and never made up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trefoil.core.accounting import account, check_conservation, intensity_at, per_request
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.energy import EnergyMethod, EnergySample, SliceEnergy
from trefoil.core.errors import SeriesMismatch
from trefoil.core.fleet import SliceKey

ZONE = Series("test", Method.AVERAGE, Factors.LIFECYCLE)


def sample(
    start: float, end: float, active: float = 60.0, idle: float = 30.0, rest: float = 10.0, **changes
) -> EnergySample:
    values = {"method": EnergyMethod.NVML_COUNTER, **changes}
    return EnergySample(
        "n",
        "n/gpu0",
        0,
        start,
        end,
        active + idle + rest,
        slices=(SliceEnergy(SliceKey("n/gpu0", "7g.40gb", 0, 8), 1, active),),
        idle_j=idle,
        unallocated_j=rest,
        **values,
    )


def reading(at: float, grams: float, series: Series = ZONE) -> CarbonReading:
    return CarbonReading(series, intensity_g_per_kwh=grams, observed_at_s=at)


def test_worked_numbers():
    """3.6 MJ at 200 g/kWh and PUE 1.5: 1 kWh x 200 x 1.5 = 300 g."""
    out = account([sample(0, 10, 3.0e6, 0.5e6, 0.1e6)], [reading(0, 200)], 0, 10, 1.5)
    assert out.grams == pytest.approx(300.0)
    assert out.idle_share == pytest.approx(0.6 / 3.6)
    assert per_request(out.grams, 100) == pytest.approx(3.0)


def test_intensity_changes_inside_the_interval():
    samples = [sample(i, i + 1) for i in range(10)]
    out = account(samples, [reading(0, 100), reading(5, 300)], 0, 10, 1.0)
    assert out.grams == pytest.approx(10 * 100 / 3.6e6 * 200)


@given(st.floats(0.0, 9.0), st.floats(0.1, 10.0))
def test_a_sample_across_the_border_counts_by_its_share(start, length):
    end = min(10.0, start + length)
    out = account([sample(0, 10)], [reading(0, 250)], start, end, 1.0)
    assert out.counter_j == pytest.approx(100.0 * (end - start) / 10)
    assert out.active_j + out.idle_j + out.unallocated_j == pytest.approx(out.counter_j)


def test_no_method_makes_null_never_zero():
    out = account([sample(0, 10), sample(10, 20, method=EnergyMethod.NONE)], [reading(0, 250)], 0, 20, 1.0)
    assert out.counter_j is None
    assert out.grams is None
    assert per_request(out.grams, 5) is None
    assert account([], [reading(0, 250)], 0, 20, 1.0).counter_j is None


def test_a_gap_is_booked_not_interpolated():
    out = account([sample(0, 4), sample(6, 10)], [reading(0, 250)], 0, 10, 1.0)
    assert out.counter_j == pytest.approx(200.0)
    assert out.unknown_s == pytest.approx(2.0)


def test_conservation_is_asserted():
    check_conservation(sample(0, 1))
    with pytest.raises(AssertionError):
        check_conservation(EnergySample("n", "d", counter_j=1.0, idle_j=0.5))


def test_series_never_mix():
    other = Series("test", Method.MARGINAL, Factors.LIFECYCLE)
    with pytest.raises(SeriesMismatch, match="MARGINAL"):
        intensity_at([reading(0, 100), reading(1, 100, other)], 2)

"""The forecast rises at once, falls patiently, and does not mistake chance for growth."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.forecasters.last_max import LastMax, poisson_quantile
from controller.planners.policy_parts import forecaster_of, row_of
from controller.settings import ControllerSettings
from trefoil.core.errors import SettingError

LAST_MAX = LastMax()
BIN_S = 0.5


def forecast(bins, lead_s=6.0):
    return LAST_MAX.forecast("toy", bins, BIN_S, 100.0, lead_s)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=200))
def test_p90_is_never_below_the_rate_and_the_rate_never_below_the_present_mean(bins):
    found = forecast([float(b) for b in bins])
    assert found.p90_per_s >= found.max_per_s >= found.mean_per_s - 1e-9 >= -1e-9
    assert found.p90_per_s <= 2 * (found.max_per_s + 1) + 10


def test_a_fall_shows_only_after_the_look_back():
    bins = [13.0] * 40 + [6.0] * 8
    assert forecast(bins).max_per_s == pytest.approx(26.0)
    assert forecast(bins + [6.0] * 13).max_per_s == pytest.approx(12.0)


def test_a_rise_shows_at_once():
    assert forecast([13.0] * 40 + [26.0] * 8).max_per_s == pytest.approx(52.0)


def test_a_step_from_nothing_shows_after_a_second():
    assert forecast([0.0] * 40 + [13.0] * 2).max_per_s > 15
    assert forecast([0.0] * 40 + [13.0] * 4).max_per_s > 18


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_a_steady_poisson_stream_rarely_looks_like_growth(seed):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(13.0, 400).astype(float).tolist()
    grown = sum(forecast(counts[: i + 40]).p90_per_s > 40 for i in range(0, 360, 10))
    assert grown <= 5


def test_a_ramp_is_foreseen_and_a_step_is_not_blown_up():
    ramp = [13.0] * 30 + [13.0 + 1.1 * i for i in range(10)]
    assert forecast(ramp).p90_per_s > 50
    step = [13.0] * 30 + [26.0] * 5
    assert forecast(step).p90_per_s <= 1.5 * forecast(step).max_per_s + 10


def test_little_data_says_so():
    assert forecast([]).fallback_reason == "no data"
    assert "only 1 s" in forecast([3.0, 4.0]).fallback_reason
    assert not forecast([3.0] * 20).fallback_reason


@given(st.floats(0.01, 199))
def test_the_poisson_quantile_is_the_smallest_that_reaches_ninety_percent(mean):
    n = int(poisson_quantile(mean))
    below = sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(n))
    at = below + math.exp(-mean + n * math.log(mean) - math.lgamma(n + 1))
    assert below < 0.9 + 1e-9
    assert at >= 0.9 - 1e-9


def test_the_normal_law_takes_over_smoothly():
    assert poisson_quantile(200.1) == pytest.approx(poisson_quantile(199.9), abs=1.5)


def test_an_unknown_forecaster_is_refused_by_naming_those_that_exist():
    with pytest.raises(SettingError, match=r"forecaster = 'prophet': .*lstm, minute_max, oracle, or module:Class"):
        made("prophet")


def made(name="", **settings):
    return forecaster_of(row_of(ControllerSettings(forecaster=name, **settings)))


def test_settings_of_the_part_are_the_forecasters_and_the_controller_has_none_of_them():
    assert made() == LastMax()
    assert made(parts={"forecaster": {"smooth_s": "2.5"}}) == LastMax(smooth_s=2.5)
    with pytest.raises(SettingError, match=r"slope_s: unknown setting .*Remedy: set parts.forecaster.slope_s"):
        ControllerSettings(slope_s=9.0)


def test_it_looks_at_one_bin_at_least_and_at_three_for_a_slope():
    coarse, rising = 300.0, (100.0, 400.0, 900.0, 1600.0)
    assert LastMax().forecast("f", rising, coarse, 0.0, 60.0) == LastMax(300.0, 300.0, 900.0).forecast(
        "f", rising, coarse, 0.0, 60.0
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (
            {"hidden": 3},
            r"forecaster setting hidden = 3: last_max has no such setting.*one of: slope_s",
        ),
        ({"smooth_s": "much"}, r"forecaster setting smooth_s = 'much'"),
        ({"smooth_s": 0.0}, r"forecaster setting smooth_s = 0.0: .*greater than 0"),
    ],
)
def test_settings_that_a_forecaster_has_not_or_cannot_have_are_refused(values, says):
    with pytest.raises(SettingError, match=says):
        made(parts={"forecaster": values})

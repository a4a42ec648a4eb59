"""CIR says which mean it is a ratio to, of how many samples, and says nothing before a day is known."""

import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.core.history import History
from carbon_feed.forecast.backtest import trace_means
from carbon_feed.history.core.ratio import EXPANDING, MONTH, SAME_HOUR, WINDOWS, ratio
from carbon_feed.providers.trace import load_trace
from tests.unit.carbon_feed.test_history import SERIES, T0_S, kept, said
from trefoil.core import errors
from trefoil.core.carbon import Method
from trefoil.core.units import HOUR_S

DATA = Path(os.environ.get("TREFOIL_DATA", Path(__file__).resolve().parents[3] / ".." / "shared" / "data")) / "carbon"


def hourly(values):
    return kept(*(said(i, float(v)) for i, v in enumerate(values)))


@pytest.mark.parametrize("window", WINDOWS)
def test_nothing_before_a_day_is_known(window):
    assert ratio(hourly([100] * 23), said(23, 200), window) is None
    found = ratio(hourly([100] * 24), said(24, 200), window)
    assert (found.aci_g_per_kwh, found.cir, found.window) == (100, 2, window)
    assert found.samples == (1 if window == SAME_HOUR else 24)
    assert found.observed_at_s == said(24, 200).observed_at_s


@settings(max_examples=40, deadline=None)
@given(values=st.lists(st.floats(1, 1500), min_size=24, max_size=24 * 40), now=st.floats(0, 1500))
def test_the_three_definitions(values, now):
    history, at = hourly(values), len(values)
    current = said(at, now)
    means = {
        EXPANDING: np.mean(values),
        MONTH: np.mean(values[-24 * 30 :]),
        SAME_HOUR: np.mean([v for i, v in enumerate(values) if (at - i) % 24 == 0 and at - i <= 24 * 30]),
    }
    for window, mean in means.items():
        found = ratio(history, current, window)
        assert found.aci_g_per_kwh == pytest.approx(mean)
        assert found.cir == pytest.approx(now / mean)


def test_the_current_value_is_not_part_of_its_own_mean():
    history = hourly([100] * 24 + [900])
    assert ratio(history, said(24, 900)).aci_g_per_kwh == 100


def test_it_weighs_by_time():
    history = hourly([100] * 24)
    for half in range(48):
        history.add(said(24 + half / 2, 300, hours=0.5))
    found = ratio(history, said(48, 300))
    assert (found.aci_g_per_kwh, found.samples) == (200, 72)


def test_it_uses_what_was_known_then():
    history = hourly([100] * 24)
    for hour in range(24):
        history.add(said(hour, 200, 48 * HOUR_S))
    assert ratio(history, said(24, 100), as_of_s=T0_S + 24 * HOUR_S).aci_g_per_kwh == 100
    assert ratio(history, said(24, 100)).aci_g_per_kwh == 200


def test_a_replay_has_shorter_days():
    fast = [
        replace(said(0, 100.0 + i % 24), starts_at_s=T0_S + 10 * i, ends_at_s=T0_S + 10 * i + 10) for i in range(72)
    ]
    current = replace(fast[0], starts_at_s=T0_S + 720, ends_at_s=T0_S + 730, intensity_g_per_kwh=110.0)
    found = ratio(kept(*fast), current, SAME_HOUR, speedup=360.0)
    assert (found.aci_g_per_kwh, found.samples) == (100, 3)
    assert ratio(kept(*fast), current) is None  # 720 s are not a day


def test_nothing_is_compared_across_series_and_unknown_windows_are_refused():
    history = hourly([100] * 24)
    with pytest.raises(errors.SeriesMismatch, match="Remedy"):
        ratio(history, said(24, 100, series=replace(SERIES, method=Method.MARGINAL)))
    with pytest.raises(errors.SettingError, match="same_hour"):
        ratio(history, said(24, 100), "forever")
    assert ratio(hourly([0] * 24), said(24, 100)) is None
    assert ratio(History(SERIES), said(24, 100)) is None


@pytest.mark.parametrize(
    ("file", "expanding", "month"),
    [("em_US-CAL-CISO_2022_hourly.csv", 0.31, 0.26), ("em_AU-NSW_2022_hourly.csv", 0.18, 0.18)],
)
def test_how_far_it_swings_on_real_grids(file, expanding, month):
    path = DATA / file
    if not path.exists():
        pytest.skip(f"no {path.name} in {DATA}: set TREFOIL_DATA to the evaluation data")
    history = History(SERIES)
    found = {EXPANDING: [], MONTH: []}
    for hour, value in enumerate(trace_means(load_trace(path))):
        current = said(hour, float(value))
        for window, ratios in found.items():
            one = ratio(history, current, window)
            ratios.append(math.nan if one is None else one.cir)
        history.add(current)
    spread = {window: float(np.nanstd(ratios)) for window, ratios in found.items()}
    print(file, spread)
    assert spread[EXPANDING] == pytest.approx(expanding, abs=0.005)
    assert spread[MONTH] == pytest.approx(month, abs=0.005)

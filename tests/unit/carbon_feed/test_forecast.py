"""A forecast knows nothing after its origin, says how wrong it has been, and is worth what the documents say."""

import csv
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from typer.testing import CliRunner

from carbon_feed.forecast import MODELS
from carbon_feed.forecast.backtest import backtest, trace_means
from carbon_feed.forecast.bands import ERRORS_MIN, LeadErrors
from carbon_feed.forecast.forecaster import Forecaster
from carbon_feed.forecast.scores import ScoreSums, pool_scores
from carbon_feed.providers.trace import load_trace
from trefoil.cli.main import app
from trefoil.core import errors
from trefoil.core.units import HOUR_S

ROOT = Path(__file__).resolve().parents[3]
DATA = Path(os.environ.get("TREFOIL_DATA", ROOT / ".." / "shared" / "data")) / "carbon"
DUCK = ROOT / "carbon_feed" / "data" / "synthetic_duck_72h.csv"
H = 96

values = hnp.arrays(
    np.float64, st.integers(24, 400), elements=st.floats(0, 1500) | st.just(math.nan), fill=st.just(250.0)
)


def duck(days: int, seed: int = 1) -> np.ndarray:
    """A daily cycle with noise that lasts for hours; positive."""
    rng = np.random.default_rng(seed)
    noise = np.zeros(24 * days)
    for i in range(1, len(noise)):
        noise[i] = 0.9 * noise[i - 1] + rng.normal(0, 8)
    return np.maximum(5.0, 250 + 80 * np.sin(np.arange(24 * days) * 2 * np.pi / 24) + noise)


def trained(model, values, horizon_s=H * HOUR_S):
    """A forecaster that has observed a past, oldest value first."""
    made = Forecaster(model, HOUR_S, horizon_s)
    for value in values:
        made.observe(value)
    return made


@pytest.mark.parametrize("name", MODELS)
def test_a_day_that_repeats_is_forecast_without_error(name):
    day = np.arange(24) * 10.0 + 100
    assert np.allclose(MODELS[name].curve(np.tile(day, 10), 24, H), np.tile(day, 4))


def test_the_numbers_of_the_three_forms():
    day = np.arange(24.0)
    past = np.concatenate([np.tile(day + 100, 6), day + 170])  # a week whose last day is 70 higher
    ahead = {name: model.curve(past, 24, 48) for name, model in MODELS.items()}
    assert np.allclose(ahead["persistence"][:24], day + 170)
    assert np.allclose(ahead["climatology"][:24], day + 110)
    # newest value 193, its base from the six days before it: 0.5 * 123 + 0.5 * 123
    assert np.allclose(ahead["blend"][:24], day + 140 + 70 * np.exp(-np.arange(1, 25) / 12))


def test_an_old_error_has_faded_by_its_age():
    past = np.concatenate([np.full(24 * 7, 100.0), [160.0, math.nan, math.nan]])
    base = MODELS["blend"].curve(np.append(past[:-3], [math.nan] * 3), 24, 1)[0]
    assert MODELS["blend"].curve(past, 24, 1)[0] == pytest.approx(base + 60 * math.exp(-3 / 12))


@settings(max_examples=60, deadline=None)
@given(past=values, name=st.sampled_from(sorted(MODELS)))
def test_gaps_are_filled_from_what_is_known_or_nothing_is_said(past, name):
    curve = MODELS[name].curve(past, 24, H)
    assert len(curve) == H
    if np.isnan(past[-24 * 7 :]).all():
        assert np.isnan(curve).all()
    else:
        assert np.isfinite(curve).all()
        assert (curve >= 0).all()


class Peeker:
    """A model that looks beyond the values it was handed, as far as memory goes."""

    name = "peeker"

    def __init__(self) -> None:
        self.seen: list[float] = []

    def curve(self, past, per_day, steps):
        whole = past if past.base is None else past.base
        self.seen += [float(v) for v in whole[len(past) :] if not math.isnan(v)]
        return np.full(steps, past[-1])


def test_in_a_backtest_everything_after_the_origin_is_nan():
    peeker = Peeker()
    backtest(peeker, duck(40), first=24 * 30)
    assert peeker.seen == []


@settings(max_examples=12, deadline=None)
@given(origin=st.integers(24 * 9, 24 * 12), name=st.sampled_from(sorted(MODELS)), noise=st.floats(0, 1500))
def test_no_forecast_depends_on_what_came_after_it_or_on_who_asked_before(origin, name, noise):
    truth = duck(13)
    alone = trained(MODELS[name], truth[: origin + 1], horizon_s=24 * HOUR_S).quantile_forecast().values
    other = truth.copy()
    other[origin + 1 :] = noise
    asked = Forecaster(MODELS[name], horizon_s=24 * HOUR_S)
    kept = {}
    for i, value in enumerate(other):
        asked.observe(float(value))
        if i in (origin - 31, origin - 3, origin):
            kept[i] = asked.quantile_forecast().values.copy()
    assert np.array_equal(kept[origin], alone)


@pytest.mark.parametrize("name", MODELS)
def test_where_a_backtest_begins_to_learn_changes_nothing(name):
    long = duck(130)
    late = backtest(MODELS[name], long, first=24 * 110, horizon_s=24 * HOUR_S)
    whole = Forecaster(MODELS[name], horizon_s=24 * HOUR_S)
    tally = ScoreSums(24)
    for origin in range(len(long) - 1):
        whole.observe(float(long[origin]))
        if origin >= 24 * 110:
            after = long[origin + 1 : origin + 25]
            tally.add(whole.quantile_forecast().values, np.append(after, np.full(24 - len(after), math.nan)))
    assert late.scores == tally.scores(HOUR_S)


def test_bands_cover_what_they_say_on_errors_of_any_shape():
    result = backtest(MODELS["blend"], duck(140), first=24 * 70, horizon_s=24 * HOUR_S)
    assert 0.75 <= result.day(1).coverage_ratio <= 0.85


def test_quantiles_are_those_of_numpy_and_borrowed_beyond():
    book = LeadErrors(window=100, steps=30)
    rng = np.random.default_rng(3)
    made, errors_at = {}, {lead: [] for lead in range(1, 31)}
    for index in range(45):
        value = math.nan if index % 7 == 0 else float(rng.normal(200, 30))
        book.actual(index, value)
        for lead in range(1, 31):
            if index - lead in made and not math.isnan(value):
                errors_at[lead].append(value - made[index - lead][lead - 1])
        made[index] = rng.normal(200, 30, 30)
        book.forecast(index, made[index])
    book.refresh()
    found = book.quantiles()
    assert found.own == sum(len(e) >= ERRORS_MIN for e in errors_at.values())
    assert 0 < found.own < 30
    for lead in range(1, found.own + 1):
        assert found.values[:, lead - 1] == pytest.approx(np.quantile(errors_at[lead], [0.1, 0.5, 0.9]))
    assert (found.values[:, found.own :] == found.values[:, found.own - 1 : found.own]).all()


def test_bands_are_ordered_and_never_negative():
    forecast = trained(MODELS["blend"], duck(20) - 180).quantile_forecast()
    low, middle, high = forecast.values
    assert ((low >= 0) & (low <= middle) & (middle <= high)).all()


def test_scores_keep_their_counts():
    tally = ScoreSums(3)
    low, high = np.array([90, 90, math.nan]), np.array([110, 110, math.nan])
    tally.add(np.stack([low, np.array([100.0, 100, 100]), high]), np.array([80.0, 0.5, math.nan]))
    one, two, three = tally.scores(HOUR_S)
    assert (one.samples, one.mae_g_per_kwh, one.bias_g_per_kwh, one.mape_ratio) == (1, 20, 20, 0.25)
    assert (one.coverage_samples, one.coverage_ratio) == (1, 0)
    assert (two.samples, two.mape_samples, two.mape_ratio) == (1, 0, 0)  # 0.5 g/kWh: no percentage
    assert (three.samples, three.coverage_samples, three.horizon_s) == (0, 0, 3 * HOUR_S)
    assert pool_scores((one, two, three)).mae_g_per_kwh == pytest.approx((20 + 99.5) / 2)


@pytest.mark.parametrize(("step_s", "horizon_s"), [(0, 1), (300, 3600), (5000, 86_400), (3600, 0), (3600, 1e9)])
def test_steps_and_horizons_that_make_no_sense_are_refused(step_s, horizon_s):
    with pytest.raises(errors.SettingError, match="Remedy"):
        Forecaster(MODELS["blend"], step_s, horizon_s)


def test_a_trace_is_cut_into_means():
    trace = load_trace(DUCK)
    assert np.allclose(trace_means(trace, 7200.0), np.array(trace.values_g_per_kwh).reshape(-1, 2).mean(axis=1))
    with pytest.raises(errors.TraceError, match="multiple"):
        trace_means(trace, 1800.0)


def test_the_command_prints_writes_and_draws(tmp_path):
    out, plot = tmp_path / "a" / "scores.csv", tmp_path / "scores.png"
    path = tmp_path / "trace.csv"
    path.write_text("hour,intensity_g_per_kwh\n" + "".join(f"{i},{v:.3f}\n" for i, v in enumerate(duck(12))))
    words = ["carbon", "backtest", str(path), "--model", "blend", "--horizon-h", "36"]
    said = CliRunner().invoke(app, [*words, "--out", str(out), "--plot", str(plot)])
    assert said.exit_code == 0, said.output
    assert "nothing after an origin is known to it" in said.output
    document = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    days = document["models"]["blend"]["days"]
    assert [day["horizon_h"] for day in days] == [24, 36]
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 36
    assert float(rows[0]["mae_g_per_kwh"]) == document["models"]["blend"]["leads"][0]["mae_g_per_kwh"]
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "names"),
    [(["--model", "oracle"], "blend"), (["--factors", "both"], "lifecycle"), (["--step-min", "25"], "--step-min")],
)
def test_the_command_refuses_with_field_value_and_remedy(words, names):
    said = CliRunner().invoke(app, ["carbon", "backtest", str(DUCK), *words])
    assert said.exit_code == 2
    assert "Remedy" in said.output
    assert names in said.output


@pytest.mark.parametrize(
    ("file", "mape_max", "persistence"),
    [("em_US-CAL-CISO_2022_hourly.csv", 0.065, 0.080), ("em_AU-NSW_2022_hourly.csv", 0.070, 0.079)],
)
def test_day_ahead_on_real_grids(file, mape_max, persistence):
    """Hours 1-24, every hourly origin of the second half of the year, lifecycle factors."""
    path = DATA / file
    if not path.exists():
        pytest.skip(f"no {path.name} in {DATA}: set TREFOIL_DATA to the evaluation data")
    series = trace_means(load_trace(path))
    first = len(series) // 2 - 1
    played = backtest(MODELS["blend"], series, first=first, horizon_s=24 * HOUR_S)
    blend = played.day(1)
    simple = backtest(MODELS["persistence"], series, first=first, horizon_s=24 * HOUR_S).day(1)
    print(f"{file}: blend MAPE {blend.mape_ratio:.2%}, MAE {blend.mae_g_per_kwh:.1f} g/kWh, in band "
          f"{blend.coverage_ratio:.1%}; persistence {simple.mape_ratio:.2%}")  # fmt: skip
    assert blend.mape_ratio <= mape_max
    assert 0.75 <= blend.coverage_ratio <= 0.85
    assert all(0.75 <= lead.coverage_ratio <= 0.85 for lead in played.scores)
    assert simple.mape_ratio == pytest.approx(persistence, abs=0.001)
    assert blend.samples == 24 * (len(series) - first - 1) - sum(range(24))

"""What is issued has ordered bands for 96 h and its provenance, or says why it cannot; later it is judged."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.core.history import History
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.archive import ForecastArchive
from carbon_feed.forecast.incremental import run_to_end
from carbon_feed.forecast.live_forecaster import LiveForecaster
from carbon_feed.forecast.resample import resample
from tests.unit.carbon_feed.test_forecast import duck, trained
from tests.unit.carbon_feed.test_history import SERIES, T0_S, said
from trefoil.core import errors
from trefoil.core.carbon import CarbonBand, CarbonForecast
from trefoil.core.common import Basis
from trefoil.core.units import HOUR_S

BLEND = MODELS["blend"]
TRUTH = duck(30)
DAY_H = 24


def past(hours, values=TRUTH):
    history = History(SERIES)
    for hour in range(hours):
        history.add(said(hour, float(values[hour])))
    return history


def issue(history, model, now_s, **options):
    """One forecast of a forecaster that is used once."""
    return LiveForecaster(history, model, **options).forecast(now_s)


def issued(history, hour, **options):
    made = issue(history, BLEND, T0_S + hour * HOUR_S + 300, **options)
    assert made.forecast is not None, made.why
    return made.forecast


def test_four_days_in_order_without_gaps_with_their_provenance():
    forecast = issued(past(20 * DAY_H), 20 * DAY_H)
    assert (forecast.model, forecast.series, forecast.fallback_reason) == ("blend", SERIES, "")
    assert forecast.issued_at_s == T0_S + 480 * HOUR_S + 300
    assert [b.starts_at_s for b in forecast.bands] == [T0_S + (480 + i) * HOUR_S for i in range(96)]
    assert all(b.ends_at_s - b.starts_at_s == HOUR_S for b in forecast.bands)
    assert all(0 <= b.p10_g_per_kwh <= b.p50_g_per_kwh <= b.p90_g_per_kwh for b in forecast.bands)
    provenance = forecast.provenance
    assert (provenance.basis, provenance.source) == (Basis.MODELLED, "own blend of neso")
    assert provenance.as_of_s == T0_S + 479 * HOUR_S


def test_the_hour_that_holds_now_counts_as_past_once_it_is_known():
    assert issued(past(481), 480).bands[0].starts_at_s == T0_S + 481 * HOUR_S


def test_values_that_come_late_are_carried_by_the_model_and_nothing_is_skipped():
    forecast = issued(past(478), 480)
    assert forecast.bands[0].starts_at_s == T0_S + 480 * HOUR_S
    assert len(forecast.bands) == 96


def test_only_what_was_known_then_is_used():
    history = past(480)
    before = issued(history, 480)
    for hour in range(400, 480):
        history.add(said(hour, 900, 600 * HOUR_S))
    assert issued(history, 480, as_of_s=T0_S + 500 * HOUR_S) == before
    assert issued(history, 480) != before


@pytest.mark.parametrize(("hours", "why"), [(0, "nothing is known"), (20, "needs 24 h"), (30, "two days")])
def test_too_little_is_said_and_not_made_up(hours, why):
    made = issue(past(hours), BLEND, T0_S + hours * HOUR_S)
    assert made.forecast is None
    assert why in made.why


@settings(max_examples=8, deadline=None)
@given(
    late=st.lists(st.integers(1, 30), min_size=1, max_size=15),
    start=st.integers(80, 300),
    revised=st.sampled_from([0.0, 40.0]),
)
def test_what_was_learnt_before_makes_no_difference_to_where_a_forecast_stands(late, start, revised):
    """One issuer through gaps, late values and revisions: the same steps and 50 % lines as one that starts again."""
    history = past(start)
    kept, known = LiveForecaster(history, BLEND, horizon_s=24 * HOUR_S), start
    for ahead in late:
        hour = min(700, known + ahead)
        for back in range(min(30, known)):  # the newest day is revised
            at = known - 1 - back
            history.add(said(at, float(TRUTH[at]) + revised, (known + 1) * HOUR_S))
        for new in range(known, hour - ahead % 3):
            history.add(said(new, float(TRUTH[new])))
        known = max(known, hour - ahead % 3)
        now_s = T0_S + hour * HOUR_S + 60
        one = kept.forecast(now_s).forecast
        other = issue(history, BLEND, now_s, horizon_s=24 * HOUR_S).forecast
        assert [b.starts_at_s for b in one.bands] == [b.starts_at_s for b in other.bands]
        widths = [abs(a.p50_g_per_kwh - b.p50_g_per_kwh) for a, b in zip(one.bands, other.bands, strict=True)]
        assert max(widths) <= 25 + revised  # medians of errors are learnt at other hours


def test_an_issuer_learns_as_the_backtest_does():
    history = past(20 * DAY_H)
    kept = LiveForecaster(history, BLEND)
    for hour in range(20 * DAY_H, 24 * DAY_H + 1):
        history.add(said(hour, float(TRUTH[hour])))
        made = kept.forecast(T0_S + (hour + 1) * HOUR_S).forecast
    anew = issue(history, BLEND, T0_S + (24 * DAY_H + 1) * HOUR_S).forecast
    assert replace(made, bands=()) == replace(anew, bands=())
    assert [b.p10_g_per_kwh for b in made.bands] == pytest.approx([b.p10_g_per_kwh for b in anew.bands])
    lines = trained(BLEND, TRUTH[: 24 * DAY_H + 1].tolist()).quantile_forecast().values
    assert [b.p90_g_per_kwh for b in made.bands] == pytest.approx(list(lines[2]))


def test_late_values_have_the_bands_of_longer_leads_and_very_late_ones_shorten_the_forecast():
    history = past(481)
    fresh, late, later = (issued(history, 481 + age) for age in (0, 10, 40))
    assert [b.p10_g_per_kwh for b in late.bands[:86]] == [b.p10_g_per_kwh for b in fresh.bands[10:]]
    assert (len(late.bands), late.fallback_reason) == (96, "")
    assert len(later.bands) == 80
    assert "40 h old: only 80 h ahead" in later.fallback_reason
    made = issue(history, BLEND, T0_S + 1000 * HOUR_S)
    assert made.forecast is None
    assert "0 h of the last 7 days" in made.why


def test_a_short_history_lends_bands_and_says_so():
    forecast = issued(past(97), 97)
    assert "bands beyond" in forecast.fallback_reason
    assert len(forecast.bands) == 96


def test_a_replay_is_forecast_on_its_own_clock():
    wall_s, history = 10.0, History(SERIES)
    for i, value in enumerate(TRUTH[:480]):
        start = T0_S + 3.5 + i * wall_s
        reading = replace(said(0, float(value)), starts_at_s=start, ends_at_s=start + wall_s, fetched_at_s=start)
        history.add(replace(reading, simulated=True))
    fast = issue(history, BLEND, T0_S + 3.5 + 480 * wall_s + 1, speedup=360.0).forecast
    assert (fast.bands[0].starts_at_s, len(fast.bands)) == (T0_S + 3.5 + 4800, 96)
    assert fast.provenance.basis == Basis.SIMULATED
    plain = issued(past(480), 480)
    assert [b.p50_g_per_kwh for b in fast.bands] == pytest.approx([b.p50_g_per_kwh for b in plain.bands])


def banded(*middles, step_s=HOUR_S, width=10.0):
    return CarbonForecast(
        series=SERIES,
        model="neso",
        issued_at_s=T0_S,
        bands=tuple(
            CarbonBand(T0_S + i * step_s, T0_S + (i + 1) * step_s, m - width, m, m + width)
            for i, m in enumerate(middles)
        ),
    )


@pytest.mark.parametrize("step_s", [300.0, 900.0, 1800.0])
def test_finer_steps_repeat_and_come_back(step_s):
    forecast = banded(100, 200, 300)
    fine = resample(forecast, step_s)
    assert len(fine.bands) == 3 * HOUR_S / step_s
    assert {b.p50_g_per_kwh for b in fine.bands} == {100, 200, 300}
    assert resample(fine, HOUR_S) == forecast


def test_coarser_steps_are_means_and_gaps_stay_gaps():
    assert [b.p50_g_per_kwh for b in resample(banded(100, 200, 300, 500, 700), 2 * HOUR_S).bands] == [150, 400]
    whole = banded(100, 200, 300)
    holed = replace(whole, bands=(whole.bands[0], whole.bands[2]))
    assert [b.p50_g_per_kwh for b in resample(holed, HOUR_S / 2).bands] == [100, 100, 300, 300]
    assert resample(replace(whole, bands=()), 300).bands == ()


def test_what_was_issued_is_scored_by_lead_against_what_came():
    archive, history = ForecastArchive(SERIES), past(3)  # of the fourth band nothing is known yet
    actual = TRUTH[:3]
    archive.add(banded(*(actual + np.array([0, 5, -20])), 100))
    scores = run_to_end(archive.scores_incrementally(history, "neso", T0_S + 9, horizon_s=4 * HOUR_S))
    one, two, three = scores.scores[:3]
    assert (one.samples, one.mae_g_per_kwh, two.samples) == (2, pytest.approx(2.5), 1)  # the hour now and the next
    assert (two.mae_g_per_kwh, two.bias_g_per_kwh) == (pytest.approx(20), pytest.approx(-20))
    assert (one.coverage_ratio, two.coverage_ratio) == (1, 0)
    assert two.mape_ratio == pytest.approx(20 / actual[2])
    assert (three.samples, three.horizon_s) == (0, 3 * HOUR_S)
    assert (scores.forecasts, scores.issued_from_at_s, scores.observed_at_s) == (1, T0_S, T0_S + 9)
    rows = list(archive.rows(history))
    assert [row["actual_g_per_kwh"] for row in rows[:3]] == pytest.approx(list(actual))
    assert rows[3]["actual_g_per_kwh"] is None


def test_the_archive_keeps_what_was_first_issued_refuses_other_series_and_is_bounded():
    archive = ForecastArchive(SERIES, forecasts_max=3)
    first = banded(100)
    assert archive.add(first)
    assert not archive.add(banded(999))
    assert archive.latest("neso") == first
    for i in range(1, 9):
        archive.add(replace(first, issued_at_s=T0_S + i))
    assert archive.latest("neso", T0_S + 5.5) is None
    assert archive.latest("neso", T0_S + 7).issued_at_s == T0_S + 7
    assert run_to_end(archive.scores_incrementally(past(3), "neso", T0_S)).forecasts == 3
    with pytest.raises(errors.SeriesMismatch):
        archive.add(replace(first, series=replace(SERIES, zone="FR")))


@pytest.mark.parametrize("hours", [20 * DAY_H + 1, 29 * DAY_H + 1])
def test_the_live_feed_and_the_backtest_are_one(hours):
    """Where the backtest looks at its errors, once a day, both say the same."""
    played = trained(BLEND, TRUTH[:hours].tolist()).quantile_forecast().values
    live = issued(past(hours), hours).bands
    assert [b.p10_g_per_kwh for b in live] == pytest.approx(list(played[0]))
    assert [b.p50_g_per_kwh for b in live] == pytest.approx(list(played[1]))
    assert [b.p90_g_per_kwh for b in live] == pytest.approx(list(played[2]))


def test_a_providers_points_get_bands_from_its_own_errors_and_points_are_no_bands():
    archive, history = ForecastArchive(SERIES), past(30 * DAY_H)
    rng = np.random.default_rng(5)
    for hour in range(20 * DAY_H):
        noisy = [float(TRUTH[hour + i] + rng.normal(0, 10)) for i in range(4)]
        points = banded(*noisy, width=0.0)
        moved = tuple(
            replace(b, starts_at_s=b.starts_at_s + hour * HOUR_S, ends_at_s=b.ends_at_s + hour * HOUR_S)
            for b in points.bands
        )
        archive.add(replace(points, issued_at_s=T0_S + hour * HOUR_S - 1, bands=moved))
    assert {s.coverage_samples for s in run_to_end(archive.scores_incrementally(history, "neso", T0_S)).scores} == {0}
    fresh = replace(banded(300, 300, 300, 300, width=0.0), issued_at_s=T0_S - 1)
    widened = run_to_end(archive.banded_incrementally(fresh, history))
    for band in widened.bands:
        assert band.p50_g_per_kwh == 300
        assert band.p10_g_per_kwh == pytest.approx(300 - 12.8, abs=2.5)
        assert band.p90_g_per_kwh == pytest.approx(300 + 12.8, abs=2.5)
    assert run_to_end(ForecastArchive(SERIES).banded_incrementally(fresh, history)) == fresh
    assert not any(math.isnan(b.p10_g_per_kwh) for b in widened.bands)

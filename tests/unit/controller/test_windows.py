"""What load windows say, whatever their order and however they are aligned."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.observe.core.load_windows import LoadWindows
from controller.thresholds import WindowSettings
from tests.support.plans import CATALOG, LARGE, SMALL
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.latency import build_histogram


def window(seq, starts_s, ends_s, arrived=0, small=0, large=0, worker=0, latencies=(), failed=0, dispatcher="d"):
    cells = [LoadCell(LoadKey("toy"), arrived=arrived, failed_by_code={"RESOURCE_EXHAUSTED": failed} if failed else {})]
    for variant, count in ((SMALL, small), (LARGE, large)):
        if count:
            cells.append(
                LoadCell(
                    LoadKey("toy", variant.name), answered=count, items=2 * count, within_slo=count,
                    latency=build_histogram(latencies or [20.0] * count),
                )
            )  # fmt: skip
    return LoadWindow(dispatcher, worker, seq, starts_s, ends_s, cells=tuple(cells))


def book(*windows, **settings):
    found = LoadWindows(WindowSettings(**settings))
    found.open_budget("toy", 100.0, 0.0)
    for one in windows:
        found.add(one, CATALOG)
    return found


@settings(max_examples=50)
@given(st.floats(0, 0.49), st.lists(st.integers(0, 50), min_size=4, max_size=40))
def test_no_arrival_is_lost_or_invented_by_alignment(offset_s, counts):
    windows = [window(i + 1, 10 + offset_s + 0.5 * i, 10.5 + offset_s + 0.5 * i, n) for i, n in enumerate(counts)]
    idle = [
        window(len(counts) + i, windows[-1].ends_at_s + 0.5 * (i - 1), windows[-1].ends_at_s + 0.5 * i) for i in (1, 2)
    ]
    found = book(*windows, *idle)
    assert sum(found.arrivals("toy", idle[-1].ends_at_s)) == pytest.approx(sum(counts))


def test_a_repeated_window_counts_once():
    one = window(1, 10, 10.5, 7, small=7)
    found = book(one, one, window(2, 10.5, 11.0))
    assert sum(found.arrivals("toy", 11.0)) == 7
    assert found.answered["toy", SMALL.name] == 7


def test_bins_end_where_the_slowest_live_worker_has_reported():
    found = book(window(1, 10, 10.5, 5), window(2, 10.5, 11.0, 5), window(1, 10, 10.5, 3, worker=1))
    assert found.arrivals("toy", 11.0) == (8.0,)
    assert found.arrivals("toy", 13.0) == (8.0, 5.0)  # nobody is live any more: no zeros are made up
    assert not found.live(13.1)


def test_measured_counts_refusals_as_misses_and_weighs_accuracy_by_answers():
    found = book(window(1, 10, 10.5, 10, small=6, large=2, failed=2))
    measured = found.measured("toy", 10.5, CATALOG, None)
    assert measured.slo_attainment == pytest.approx(0.8)
    assert measured.accuracy == pytest.approx((6 * SMALL.accuracy + 2 * LARGE.accuracy) / 8)
    assert measured.rate_per_s == pytest.approx(1.0)
    assert found.items_mean("toy") == 2.0
    assert found.measured("other", 10.5, CATALOG, None) is None


def test_a_class_that_asks_for_more_is_no_miss_of_what_is_planned_for():
    gold = LoadKey("toy", LARGE.name, slo_class="gold")
    late = LoadCell(gold, arrived=8, answered=8, within_slo=0, latency=build_histogram([90.0] * 8))
    plain = window(1, 10, 10.5, 10, small=9, failed=1)
    both = book(replace(plain, cells=(*plain.cells, late))).measured("toy", 10.5, CATALOG, None)
    assert (both.slo_attainment, both.rate_per_s) == (pytest.approx(0.9), pytest.approx(1.8))
    assert both.latency_ms_p95 == pytest.approx(90.0, rel=0.1)
    alone = book(replace(plain, cells=(late,))).measured("toy", 10.5, CATALOG, None)
    assert alone.slo_attainment == 0.0, "where all have a class, theirs is what there is"


def test_the_hours_of_the_day_are_known_after_a_whole_day_and_outlive_a_restart_and_a_new_objective():
    def hour(number):  # in two windows; each hour of the day has its own load, the second day twice as much
        load = (number % 24 + 1) * (1 + number // 24)
        return [
            window(2 * number + i, 3600.0 * number + 1800 * i, 3600.0 * number + 1800 * (i + 1), load, large=load)
            for i in (0, 1)
        ]

    found = book()
    for number in range(24):
        for one in hour(number):
            found.add(one, CATALOG)
    assert found.budgets(24 * 3600.0)[0].day == ()  # the first hour may have been seen in part
    for number in range(24, 30):
        for one in hour(number):
            found.add(one, CATALOG)
    now_s = 30 * 3600.0 - 60.0  # the hour that is under way does not count
    day = found.budgets(now_s)[0].day
    assert day[0] == 2 * 2 * 1
    assert day[4] == 2 * 2 * 5
    assert day[5] == 2 * 6
    assert day[23] == 2 * 24
    assert found.budgets(now_s + 120.0)[0].day[5] == 2 * 2 * 6
    found.add(window(60, 30 * 3600.0 - 10.0, 30 * 3600.0, 7, large=7), CATALOG)
    assert found.budgets(now_s + 120.0)[0].day[5] == 2 * 2 * 6 + 7, "a window that came late"
    again = LoadWindows(WindowSettings())
    again.load_budgets(json.loads(json.dumps(found.dump_budgets())), now_s)
    again.restart_budget("toy")
    again.open_budget("toy", 100.0, now_s)
    assert again.budgets(now_s)[0].day == day


def test_a_full_window_stays_full_whenever_it_is_looked_at():
    """Its oldest bucket has just left most of the time; it must not count as nearly full, with its end at hand."""
    found = book(*(window(i + 1, 0.7 * i, 0.7 * (i + 1), 1, small=1) for i in range(300)))
    assert all(found.budgets(now_s)[0].elapsed_s == 100.0 for now_s in np.arange(110.0, 205.0, 0.13))
    assert found.budgets(400.0)[0].elapsed_s == 0.0, "nothing is left of it: it opens anew"


def test_the_budget_fills_then_rolls_and_survives_a_restart():
    found = book(*(window(i + 1, 10.0 * i, 10.0 * (i + 1), large=10) for i in range(8)))
    (budget,) = found.budgets(80.0)
    assert (budget.requests, budget.accuracy_sum) == (80, pytest.approx(80 * LARGE.accuracy))
    assert 65 <= budget.elapsed_s <= 80
    again = LoadWindows(WindowSettings())
    again.load_budgets(found.dump_budgets(), 80.0)
    assert again.budgets(80.0) == found.budgets(80.0)
    (later,) = again.budgets(150.0)
    assert later.requests == 30
    assert later.elapsed_s <= 100.0


def test_a_budget_that_a_clock_hours_ahead_wrote_rolls_on_from_now():
    found = book(*(window(i + 1, 10.0 * i, 10.0 * (i + 1), large=10) for i in range(8)))
    again = LoadWindows(WindowSettings())
    again.load_budgets(found.dump_budgets(), 80.0 - 7200.0)
    for number in range(12):
        starts_s = 80.0 - 7200.0 + 10.0 * number
        again.add(window(number + 20, starts_s, starts_s + 10.0, small=10), CATALOG)
    (budget,) = again.budgets(200.0 - 7200.0)
    assert budget.requests == pytest.approx(100, abs=10)
    assert budget.accuracy_sum == pytest.approx(budget.requests * SMALL.accuracy)
    assert budget.elapsed_s == 100.0


@pytest.mark.parametrize("workers", [1, 3])
def test_poisson_arrivals_have_a_gap_scv_of_one_and_batches_have_more(workers):
    rng = np.random.default_rng(5)

    def scv(size):
        windows = [
            window(i + 1, 0.5 * i, 0.5 * (i + 1), int(size * rng.poisson(12 / size / workers)), worker=w)
            for i in range(120)
            for w in range(workers)
        ]
        return book(*windows).gap_scv("toy")

    assert scv(1) == 1.0
    assert scv(4) > 2.0


def test_of_a_thousand_poisson_streams_fewer_than_ten_pass_for_bursts():
    """Nothing is planned for bursts that are chance: at every look, for as long as a family is served."""
    rng = np.random.default_rng(3)
    streams = ([window(i + 1, 0.5 * i, 0.5 * (i + 1), int(rng.poisson(30))) for i in range(40)] for _ in range(1000))
    assert sum(book(*windows).gap_scv("toy") > 1 for windows in streams) < 10


def test_a_ramp_is_not_burstiness():
    rng = np.random.default_rng(6)
    found = book(*(window(i + 1, 0.5 * i, 0.5 * (i + 1), int(rng.poisson(5 + i / 4))) for i in range(120)))
    assert found.gap_scv("toy") == 1.0


def test_a_stalled_worker_is_not_burstiness():
    rng = np.random.default_rng(7)
    found = book(
        window(1, 0, 3.0, 70), *(window(i, 0.5 * i, 0.5 * i + 0.5, int(rng.poisson(12))) for i in range(6, 90))
    )
    assert found.gap_scv("toy") == 1.0


def test_old_windows_are_forgotten():
    found = book(window(1, 0, 0.5, 5, small=5), window(2, 100, 100.5, 1, small=1))
    found.forget(100.5)
    assert found.answered_since("toy", 0) == 1
    assert sum(found.arrivals("toy", 100.5)) == pytest.approx(1)


def test_a_new_objective_starts_a_new_accuracy_window():
    found = book(window(1, 0.0, 0.5, 10), window(2, 0.5, 1.0, 10))
    assert found.budgets(1.0)
    found.restart_budget("toy")
    assert found.budgets(1.0) == ()
    found.open_budget("toy", 100.0, 1.0)
    assert found.budgets(1.0)[0].requests == 0


def test_a_load_that_begins_is_no_burst():
    """Ten seconds of nothing, then a Poisson stream: whatever lies where the windows are cut."""
    chance = np.random.default_rng(5)
    for cut_s in (0.0, 0.1, 0.25, 0.4):
        windows = LoadWindows(WindowSettings())
        at_s = 10.0 + np.cumsum(chance.exponential(1 / 26.0, 400))
        edges = np.arange(cut_s, 22.0, 0.5)
        for seq, (a, b) in enumerate(itertools.pairwise(edges.tolist())):
            arrived = int(np.count_nonzero((at_s >= a) & (at_s < b)))
            cells = (LoadCell(LoadKey("digits"), arrived=arrived, arrived_per_s=(arrived,)),) if arrived else ()
            windows.add(LoadWindow("d", 0, seq, a, b, cells=cells), CATALOG)
        assert windows.gap_scv("digits") == 1.0

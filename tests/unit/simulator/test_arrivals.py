"""Arrivals: the law that was asked for, the same bytes in any steps, and files that are refused by row."""

import os
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trefoil.core.errors import SettingError, TraceError
from trefoil.simulator.scenario.arrivals import (
    ArrivalStream,
    DeepRecSysArrivals,
    Rate,
    RecordedArrivals,
    counts_as_rate,
)
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.request_columns import TraceOptions
from trefoil.simulator.scenario.request_trace import read_trace
from trefoil.simulator.scenario.schema import Arrivals, Scenario

DATA = Path(os.environ.get("TREFOIL_DATA", Path(__file__).parents[3] / ".." / "shared" / "data")) / "requests"


def points(*pairs, **kwargs):
    times, rates = zip(*pairs, strict=True)
    return Rate(np.array(times, dtype=float), np.array(rates, dtype=float), **kwargs)


RATES = {
    "constant": lambda: points((0.0, 300.0)),
    "lines": lambda: points((0.0, 20.0), (50.0, 400.0), (90.0, 0.0), (100.0, 0.0), (130.0, 150.0)),
    "late": lambda: points((40.0, 200.0), (80.0, 10.0)),
    "cyclic": lambda: counts_as_rate(np.array([30.0, 0.0, 900.0, 5.0]), 10.0),
}


@given(
    name=st.sampled_from(sorted(RATES)),
    gap_scv=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    cuts=st.lists(st.floats(0.0, 150.0), max_size=12),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_in_whatever_steps_it_is_read_a_stream_is_the_same_bytes(name, gap_scv, cuts, seed):
    whole = ArrivalStream(RATES[name](), gap_scv, np.random.default_rng(seed)).until(150.0)
    stepwise = ArrivalStream(RATES[name](), gap_scv, np.random.default_rng(seed))
    parts = [stepwise.until(cut) for cut in [*sorted(cuts), 150.0]]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert np.all(np.diff(whole) >= 0)
    assert whole.size == 0 or 0 <= whole[0] <= whole[-1] < 150.0
    for part, cut in zip(parts, [*sorted(cuts), 150.0], strict=True):
        assert part.size == 0 or part[-1] < cut


@pytest.mark.parametrize("name", sorted(RATES))
def test_as_many_come_as_the_rate_says_wherever_it_bends(name):
    rate = RATES[name]()
    edges = np.linspace(0.0, 160.0, 17)
    mean = np.array([rate.mean_per_s(a, b) for a, b in pairwise(edges)]) * np.diff(edges)
    found = sum(
        np.histogram(ArrivalStream(rate, 1.0, np.random.default_rng(seed)).until(160.0), edges)[0] for seed in range(40)
    )
    assert np.all(np.abs(found - 40 * mean) <= 4.5 * np.sqrt(40 * mean) + 1e-9)


@pytest.mark.parametrize("name", sorted(RATES))
def test_inverse_and_cumulative_rate_agree(name):
    rate = RATES[name]()
    at = np.linspace(0.0, 200.0, 401)
    assert rate.mass(rate.inverse(rate.mass(at))) == pytest.approx(rate.mass(at), abs=1e-6)
    slope = np.diff(rate.mass(at)) / np.diff(at)
    middle = np.array([rate.at(x) for x in (at[:-1] + at[1:]) / 2])
    assert slope == pytest.approx(middle, abs=1e-6)


@pytest.mark.parametrize("gap_scv", [0.0, 0.3, 1.0, 3.0])
def test_gaps_vary_as_they_were_asked_to(gap_scv):
    gaps = np.diff(ArrivalStream(points((0.0, 50.0)), gap_scv, np.random.default_rng(2)).until(1200.0))
    assert np.mean(gaps) == pytest.approx(0.02, rel=0.03)
    assert np.var(gaps) / np.mean(gaps) ** 2 == pytest.approx(gap_scv, rel=0.08, abs=1e-6)


@given(rate_per_s=st.sampled_from([2.1, 4.0, 40.0]), cuts=st.lists(st.floats(0.0, 900.0), max_size=6))
@settings(max_examples=20, deadline=None)
def test_gaps_of_deeprecsys_are_whole_milliseconds_and_the_same_in_whatever_steps(rate_per_s, cuts):
    whole = DeepRecSysArrivals(rate_per_s, np.random.default_rng(5), -60.0).until(900.0)
    stepwise = DeepRecSysArrivals(rate_per_s, np.random.default_rng(5), -60.0)
    assert np.concatenate([stepwise.until(cut) for cut in [*sorted(cuts), 900.0]]).tobytes() == whole.tobytes()
    gaps_ms = np.diff(whole, prepend=-60.0) * 1e3
    assert gaps_ms == pytest.approx(
        np.random.default_rng(5).poisson(1e3 / rate_per_s, 8192 * 5)[: gaps_ms.size], abs=1e-6
    )
    assert np.var(gaps_ms) == pytest.approx(1e3 / rate_per_s, rel=0.15), (
        "almost a metronome: a Poisson process has its square"
    )


@pytest.mark.parametrize(
    ("name", "value"), [("points", ((0.0, 5.0),)), ("trace", Path("counts.csv")), ("gap_scv", 0.0), ("gap_scv", 2.0)]
)
def test_deeprecsys_has_one_rate_and_no_other_law(name, value):
    with pytest.raises(SettingError, match=f"{name} .* with process deeprecsys.*leave {name} out"):
        Arrivals(rate_per_s=4.0, process="deeprecsys", **{name: value})
    scenario = Scenario(
        duration_s=20, families=[{"name": "digits", "arrivals": {"rate_per_s": 4, "process": "deeprecsys"}}]
    )
    assert prepare(scenario).arrivals["digits"].until(20.0).size == pytest.approx(80 * 4, abs=9), "the warm-up too"


def test_a_rate_that_ends_at_zero_stops_and_one_that_begins_late_is_constant_before():
    assert ArrivalStream(points((0.0, 10.0), (20.0, 0.0)), 1.0, np.random.default_rng(1)).until(
        1e6
    ).size == pytest.approx(100, abs=35)
    begun = ArrivalStream(RATES["late"](), 0.0, np.random.default_rng(1), now_s=10.0)
    assert begun.until(40.0).size == pytest.approx(6000, abs=1)


def test_a_trace_of_counts_repeats_and_is_scaled_to_a_mean(tmp_path):
    path = tmp_path / "counts.csv"
    path.write_text("# somewhere\nminute,requests\n0,60\n1,120\n", encoding="utf-8")
    counts, bin_s = read_trace(path).counted()
    assert (counts.tolist(), bin_s) == ([60.0, 120.0], 60.0)
    rate = counts_as_rate(counts, bin_s)
    assert [rate.at(at) for at in (0.0, 59.0, 61.0, 121.0, 181.0)] == [1.0, 1.0, 2.0, 1.0, 2.0]
    assert counts_as_rate(counts, bin_s, 30.0).mean_per_s(0.0, 240.0) == pytest.approx(30.0)


def test_given_times_are_handed_out_once(tmp_path):
    path = tmp_path / "times.csv"
    path.write_text("arrival_s,tokens\n0.0,3\n0.5,3\n0.5,3\n2.0,3\n", encoding="utf-8")
    source = RecordedArrivals(read_trace(path).numbers)
    assert source.until(0.5).tolist() == [0.0]
    assert source.until(2.0).tolist() == [0.5, 0.5]
    assert source.until(9.0).tolist() == [2.0]
    assert source.mean_per_s(0.0, 2.0) == 1.5


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("minute,requests\n", "is empty"),
        ("minute,requests\n0,5\n1,-2\n", "line 3.*>= 0"),
        ("minute,requests\n0,5\n1,many\n", "line 3.*no number"),
        ("minute,requests\n0,5\n1\n", "line 3.*no number"),
        ("minute,requests\n0,0\n1,0\n", "no request"),
        ("minute,requests\n0,nan\n", "line 2"),
        ("place,requests\n0,5\n", "how long a bin is"),
    ],
)
def test_a_trace_that_cannot_be_used_says_where(tmp_path, text, words):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(TraceError, match=rf"(?s){words}"):
        read_trace(path)


def test_missing_files_columns_and_order_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"none\.csv.*No such file"):
        read_trace(tmp_path / "none.csv")
    path = tmp_path / "trace.csv"
    path.write_text("minute,requests\n0,5\n", encoding="utf-8")
    with pytest.raises(TraceError, match=r"jobs.*use one of: minute, requests"):
        read_trace(path, TraceOptions(column="jobs"))
    path.write_text("arrival_s\n1.0\n0.5\n", encoding="utf-8")
    with pytest.raises(TraceError, match="line 3: negative or earlier"):
        read_trace(path)
    with pytest.raises(TraceError, match="ascend"):
        RecordedArrivals(np.array([2.0, -1.0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: points((0.0, -1.0)),
        lambda: points((0.0, 0.0)),
        lambda: points((1.0, 1.0), (0.0, 2.0)),
        lambda: ArrivalStream(points((0.0, 1.0)), -0.5, np.random.default_rng(1)),
        lambda: counts_as_rate(np.array([1.0]), 0.0),
        lambda: Rate(np.empty(0), np.empty(0)),
    ],
)
def test_negative_and_empty_settings_are_refused(make):
    with pytest.raises(SettingError):
        make()


def test_the_recorded_traces_are_read_as_they_are():
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}: set TREFOIL_DATA to the evaluation data")
    for path in sorted(DATA.glob("*_per_*.csv")):
        counts, bin_s = read_trace(path).counted()
        found = ArrivalStream(counts_as_rate(counts, bin_s), 1.0, np.random.default_rng(1)).until(counts.size * bin_s)
        assert found.size == pytest.approx(counts.sum(), abs=5 * np.sqrt(counts.sum())), path.name
    for path in sorted(DATA.glob("*_requests.csv")):
        times = read_trace(path).numbers
        assert RecordedArrivals(times).until(np.inf).size == times.size > 1000, path.name

"""Arrivals and images: right on average, the same for a seed, and loud about a bad trace."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trefoil.cli.load.arrivals import (
    ArrivalTrace,
    NormalSizes,
    RateProfile,
    schedule,
    shuffled_passes,
)
from trefoil.cli.load.inputs import labelled_inputs
from trefoil.core.errors import InvalidInput, TraceError
from trefoil.simulator.scenario.request_trace import read_trace

TWITTER = Path("../shared/data/requests/twitter_2021-08_infadapter_21min_per_second.csv")


def profile_of(steps: list[tuple[float, float]]) -> RateProfile:
    ends_s = np.cumsum([length_s for length_s, _ in steps]).tolist()
    return RateProfile(((0.0, 5.0), *zip(ends_s, [rate for _, rate in steps], strict=True)))


profiles = st.lists(st.tuples(st.floats(0.5, 20), st.floats(0, 50)), min_size=1, max_size=5).map(profile_of)


@given(profile=profiles, seed=st.integers(0, 2**31))
def test_arrivals_are_sorted_inside_the_profile_and_the_same_for_a_seed(profile, seed):
    times = profile.times_s(seed)
    assert np.all(np.diff(times) >= 0)
    assert not len(times) or (times[0] >= 0 and times[-1] <= profile.duration_s)
    assert np.array_equal(times, profile.times_s(seed))


def test_a_surge_doubles_the_load_where_it_says_so():
    surge = RateProfile(((0.0, 26.0), (28.0, 26.0), (34.0, 52.0), (54.0, 52.0), (60.0, 26.0), (84.0, 26.0)))
    assert [surge.rate_per_s(t) for t in (0, 28, 31, 34, 54, 57, 60, 84, 85)] == [26, 26, 39, 52, 52, 39, 26, 26, 0]
    assert surge.expected == pytest.approx(84 * 26 + 26 * 26)
    counts = np.histogram(np.concatenate([surge.times_s(s) for s in range(30)]), bins=[0, 28, 34, 54, 60, 84])[0] / 30
    assert counts == pytest.approx([28 * 26, 6 * 39, 20 * 52, 6 * 39, 24 * 26], rel=0.04)


@pytest.mark.parametrize(
    "points",
    [((0, 1),), ((1, 1), (2, 1)), ((0, 1), (0, 2)), ((0, -1), (1, 1)), ((0, 0), (9, 0)), ((0, math.nan), (1, 1))],
)
def test_a_profile_that_makes_no_sense_is_refused(points):
    with pytest.raises(InvalidInput, match="rate profile"):
        RateProfile(points)


@given(held_out=st.integers(1, 50), passes=st.integers(1, 4), extra=st.integers(0, 49), seed=st.integers(0, 99))
def test_every_pass_holds_every_image_once(held_out, passes, extra, seed):
    drawn = shuffled_passes(passes * held_out + min(extra, held_out - 1), held_out, seed)
    for i in range(passes):
        assert sorted(drawn[i * held_out : (i + 1) * held_out]) == list(range(held_out))
    assert len(set(drawn[passes * held_out :])) == len(drawn[passes * held_out :])


def test_a_seed_fixes_times_and_images_and_another_seed_changes_both():
    profile = RateProfile.constant(20, 30)
    one, same, other = (schedule(profile, 599, (1, 4), seed) for seed in (7, 7, 8))
    assert one.digest == same.digest != other.digest
    assert np.array_equal(one.images, same.images)
    assert set(np.diff(one.starts)) == {1, 4}
    assert schedule(profile, 599, (1,), 7).times_s.tolist() == one.times_s.tolist()  # sizes do not disturb times


def test_batches_by_a_normal_law_are_drawn_with_the_schedule_and_stand_in_its_digest():
    profile = RateProfile.constant(50, 60)
    one, same, other = (schedule(profile, 599, NormalSizes(3.0, sd, 8), 7) for sd in (2.0, 2.0, 1.0))
    sizes = np.diff(one.starts)
    assert (sizes.min(), sizes.max()) == (1, 8)
    assert sizes.mean() == pytest.approx(3.1, abs=0.15), "what lies below 1 is 1"
    assert one.digest == same.digest != other.digest
    assert one.times_s.tolist() == other.times_s.tolist()
    assert schedule(profile, 599, NormalSizes(), 7).digest == schedule(profile, 599, (1,), 7).digest


@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any), seed=st.integers(0, 99))
def test_a_trace_plays_exactly_its_counts(tmp_path_factory, counts, seed):
    path = tmp_path_factory.mktemp("trace") / "counts.csv"
    path.write_text("second,requests\n" + "".join(f"{10 + i},{c}\n" for i, c in enumerate(counts)))
    times = ArrivalTrace(path).times_s(seed)
    assert np.histogram(times, bins=np.arange(len(counts) + 1))[0].tolist() == counts


def test_scale_and_limit_of_a_trace(tmp_path):
    path = tmp_path / "minutes.csv"
    path.write_text("minute,jobs\n" + "".join(f"{i},100\n" for i in range(50)))
    assert len(ArrivalTrace(path, rate_scale=0.305).times_s(1)) == pytest.approx(50 * 30.5, abs=30)
    short = ArrivalTrace(path, limit_s=600.0).times_s(1)
    assert len(short) == 1000
    assert short[-1] < 600
    (tmp_path / "times.csv").write_text("arrival_s,tokens\n0.5,9\n0.5,9\n2.25,9\n")
    assert ArrivalTrace(tmp_path / "times.csv").times_s(1).tolist() == [0.5, 0.5, 2.25]
    with pytest.raises(InvalidInput, match="rate_scale = 0"):
        ArrivalTrace(path, rate_scale=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "second,requests\n0,1\n2,1\n",
            r"line 3: second 2 follows 0: a gap or .*write every interval once",
        ),
        ("second,requests\n0,1\n0,1\n", "line 3: second 0 follows 0"),
        ("second,requests\n0,-1\n", r"requests = -1.0: .* line 2: no count"),
        ("second,requests\n0,1.5\n", "no count"),
        ("second,requests\n0,\n", "line 2: no number"),
        ("second,requests\n0,nan\n", "line 2: no number"),
        ("second,requests\n0\n", "line 2: no number"),
        ("second,requests\n", "no rows"),
        ("week,requests\n0,1\n", "does not say how long a bin is"),
        ("second,latency_ms\n0,1\n", "line 1: unknown header 'second,latency_ms'"),
        ("", "is empty"),
        ("arrival_s\n1\n0.5\n", r"line 3: negative or earlier"),
        ("arrival_s\n-1\n", "line 2: negative"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path, text, message):
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(path, whole=True)


def test_a_missing_trace_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"absent\.csv"):
        read_trace(tmp_path / "absent.csv")


@pytest.mark.skipif(not TWITTER.is_file(), reason="the evaluation data (../shared/data) is not beside this clone")
def test_every_trace_of_the_evaluation_data_is_read():
    for path in TWITTER.parent.glob("*.csv"):
        trace = read_trace(path, whole=True)
        assert trace.bin_s == {"minute": 60.0, "second": 1.0, "requests": 0.0}[path.stem.rpartition("_")[2]]
        assert trace.numbers.size > 100
    assert read_trace(TWITTER).mean_per_s == pytest.approx(96.6, abs=1)


@pytest.mark.parametrize("arrays", [{"images": np.zeros((2, 8, 8), np.uint8)}, {"images": [], "labels": []}, {}])
def test_a_file_without_labelled_images_is_refused(tmp_path, arrays):
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    with pytest.raises(InvalidInput, match="images"):
        labelled_inputs(path)
    with pytest.raises(InvalidInput, match="images"):
        labelled_inputs(tmp_path / "absent.npz")

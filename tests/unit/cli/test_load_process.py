"""The load's process: a warm-up that does not count, and results that read back as they were written."""

from dataclasses import replace
from pathlib import Path

import pytest

from trefoil.cli.load.process import (
    LoadPlan,
    last_answer_at_s,
    merged,
    progress_of_all,
    read_load_result,
    without_warmup,
)
from trefoil.cli.load.result import LoadResult, Progress, Record

POINTS = ((0.0, 26.0), (10.0, 26.0), (12.0, 52.0), (20.0, 52.0))
PLAN = LoadPlan(POINTS, 6.0, "images.npz", "digits", 7)


def result() -> LoadResult:
    records = tuple(Record(at_s, 0.1, 30.0, "OK", 1, 1, "digits-l") for at_s in (1.0, 5.9, 6.0, 25.99))
    return LoadResult(records, started_at_s=1000.0, duration_s=26.0, seed=7, digest="d")


def test_the_warm_up_is_a_prefix_at_the_first_rate() -> None:
    points = PLAN.spec().arrivals.points  # type: ignore[union-attr]
    assert points == ((0.0, 26.0), (6.0, 26.0), (16.0, 26.0), (18.0, 52.0), (26.0, 52.0))
    assert PLAN.duration_s == 20.0


def test_the_same_seed_offers_the_same_arrivals_to_every_policy() -> None:
    first, second = (PLAN.spec().arrivals.times_s(PLAN.seed) for _ in range(2))
    assert first.tolist() == second.tolist()


@pytest.mark.parametrize(("at_s", "rate"), [(-3.0, 26.0), (5.0, 26.0), (11.0, 39.0), (19.0, 52.0), (99.0, 52.0)])
def test_the_offered_rate_is_known_at_every_second(at_s: float, rate: float) -> None:
    assert PLAN.rate_per_s(at_s) == pytest.approx(rate)


def test_without_the_warm_up_time_counts_from_its_end() -> None:
    counted = without_warmup(result(), 6.0)
    assert [r.intended_s for r in counted.records] == pytest.approx([0.0, 19.99])
    assert counted.started_at_s == 1006.0
    assert counted.duration_s == 20.0


def test_a_run_ends_with_its_last_answer() -> None:
    assert last_answer_at_s(result()) == pytest.approx(1000.0 + 25.99 + 0.03)


def test_loads_of_two_families_are_one_where_all_is_counted() -> None:
    other = replace(
        result(), digest="e", records=tuple(replace(r, intended_s=r.intended_s + 0.5) for r in result().records)
    )
    both = merged({"digits": result(), "twin": other})
    assert [r.intended_s for r in both.records] == [1.0, 1.5, 5.9, 6.0, 6.4, 6.5, 25.99, 26.49]
    assert both.digest == "d+e"
    slow = Progress(3.0, 26.0, 40, 30, 2, 8, 10.0, 80.0, 0.9)
    quick = Progress(3.1, 26.0, 10, 10, 0, 0, 5.0, None, 0.8)
    assert progress_of_all([slow, quick]) == Progress(3.0, 26.0, 50, 40, 2, 8, 15.0, 80.0, 0.8)
    assert progress_of_all([slow]) == slow


def test_a_written_result_reads_back(tmp_path: Path) -> None:
    result().write(tmp_path / "load.json", slo_ms=75.0)
    assert read_load_result(tmp_path / "load.json") == result()

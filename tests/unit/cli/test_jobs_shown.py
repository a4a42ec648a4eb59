"""What commands say of planned jobs."""

from typing import Any

import pytest

from trefoil.cli.jobs import _saved
from trefoil.cli.operate.overview import LATE_MAX, jobs_lines

NOW_S = 1000 * 3600.0


def planned(name: str, *items: float, in_time: bool = True) -> dict[str, Any]:
    starts = [NOW_S - 60.0 + number * 3600.0 for number in range(len(items))]
    hours = [
        {"starts_at_s": start, "ends_at_s": start + 3600.0, "items": count, "grams": 1.0, "p50_g_per_kwh": 90.0}
        for start, count in zip(starts, items, strict=True)
    ]
    return {
        "job_id": f"f0/{name}", "in_time": in_time, "hours": hours, "reason": f"{name} is short of time",
        "grams": 1.5, "at_once_grams": 4.0, "evenly_grams": 3.0,
    }  # fmt: skip


def lines(*jobs: dict[str, Any], until_s: float = NOW_S + 86_400) -> list[str]:
    return jobs_lines({"jobs": {"until_s": until_s, "jobs": list(jobs)}}, NOW_S)


def test_the_hour_that_has_begun_and_what_is_saved():
    assert lines(planned("a", 1200, 500), planned("b", 0, 99)) == [
        "jobs: 2 planned, 1,200 items this hour; 3 g, at once 8 g, evenly 6 g; 0 will be late"
    ]


def test_late_jobs_are_named_and_counted_beyond_a_few():
    found = lines(*(planned(f"j{n}", 1, in_time=False) for n in range(LATE_MAX + 2)))
    assert found[0].endswith(f"; {LATE_MAX + 2} will be late")
    assert found[1] == "job j0: j0 is short of time"
    assert found[LATE_MAX + 1 :] == ["... and 2 more: trefoil jobs list"]


def test_without_a_plan_or_after_its_end_nothing_is_said():
    assert jobs_lines({"jobs": None}, NOW_S) == []
    assert lines() == []
    assert lines(planned("a", 1), until_s=NOW_S) == []


@pytest.mark.parametrize(
    ("saved", "text"),
    [(1e-16, "about nothing"), (-1e-16, "about nothing"), (0.0, "about nothing"), (1.0, "1 g (50%)"),
     (-0.5, "-0.5 g (-25%)")],
)  # fmt: skip
def test_what_a_plan_saves_is_rounded_and_never_hidden(saved, text):
    assert _saved(saved, 2.0) == text

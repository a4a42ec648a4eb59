"""Traces with local times, holes and lines: nothing is filled in unless the settings say so, and then it is told."""

import os
from pathlib import Path

import pytest

from carbon_feed.providers.trace import load_trace, make_trace
from carbon_feed.settings import CarbonFeedSettings, TraceSettings
from trefoil.core.carbon import Quality
from trefoil.core.errors import TraceError

DATA = Path(os.environ.get("TREFOIL_DATA", Path(__file__).resolve().parents[4] / "shared" / "data"))
HOLES = (
    "time,carbon_intensity_g_per_kwh\n2026-01-01T00:00Z,100\n2026-01-01T01:00Z,\n2026-01-01T04:00Z,180\n"
    "2026-01-01T05:00Z,90\n"
)


def load(tmp_path, text, **options):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return load_trace(path, TraceSettings(path=path, **options))


def test_holes_are_filled_only_as_told(tmp_path):
    with pytest.raises(TraceError, match="no value"):
        load(tmp_path, HOLES)
    assert load(tmp_path, HOLES, gaps="hold").values_g_per_kwh == (100, 100, 100, 100, 180, 90)
    drawn = load(tmp_path, HOLES, gaps="linear")
    assert drawn.values_g_per_kwh == (100, 120, 140, 160, 180, 90)
    assert (drawn.filled, drawn.step_s) == (3, 3600.0)
    with pytest.raises(TraceError, match=r"a gap of 4 h.*gap_max_h"):
        load(tmp_path, HOLES, gaps="linear", gap_max_h=3)
    with pytest.raises(TraceError, match="not after the line before"):
        load(tmp_path, HOLES + "2026-01-01T05:00Z,90\n", gaps="hold")


async def test_what_is_filled_in_is_an_estimate_that_says_so(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(HOLES)
    settings = CarbonFeedSettings(trace=TraceSettings(path=path, gaps="hold"))
    said = await make_trace(settings, 1e9).read(1e9)
    assert said.quality is Quality.ESTIMATED
    assert "3 of its rows are filled in" in said.estimation_method


def test_local_hours_through_the_change_of_clocks(tmp_path):
    """25 October 2026 in London has 25 hours, 29 March 23."""
    autumn = [f"2026-10-25T{h:02}:00" for h in (0, 1, 1, 2, 3)]
    spring = [f"2026-03-29T{h:02}:00" for h in (0, 2, 3)]
    for hours in (autumn, spring):
        text = "time,carbon_intensity_g_per_kwh\n" + "".join(f"{at},{k}\n" for k, at in enumerate(hours))
        trace = load(tmp_path, text, timezone="Europe/London")
        assert (trace.step_s, len(trace.values_g_per_kwh)) == (3600.0, len(hours))
    with pytest.raises(TraceError):
        load(tmp_path, "time,carbon_intensity_g_per_kwh\n" + "".join(f"{at},1\n" for at in autumn))


def test_a_line_between_values(tmp_path):
    text = "time,carbon_intensity_g_per_kwh\n2026-01-01T00:00Z,100\n2026-01-01T01:00Z,200\n2026-01-01T02:00Z,0\n"
    step, line = load(tmp_path, text), load(tmp_path, text, interpolation="linear")
    assert [step.mean_g_per_kwh(at, at + 1800) for at in (0, 1800, 3600)] == [100, 100, 200]
    assert [line.mean_g_per_kwh(at, at + 1800) for at in (0, 1800, 3600)] == [125, 175, 150]
    assert line.mean_g_per_kwh(0, 7200) == pytest.approx((150 + 100) / 2)
    assert line.mean_g_per_kwh(7200, 10800) == 0, "the last value holds"


@pytest.mark.parametrize(
    ("name", "mean", "sd"),
    [("ciso_2021-03", 239.2, 102.8), ("ciso_2021-09", 223.7, 58.6), ("eso_2021-03", 137.4, 65.2)],
)
def test_the_three_files_that_clover_ran_load_unchanged(name, mean, sd):
    path = DATA / "carbon" / f"clover_{name}_48h.csv"
    if not path.exists():
        pytest.skip(f"no {path}: set TREFOIL_DATA")
    values = load_trace(path).values_g_per_kwh
    assert len(values) == 49
    assert sum(values) / 49 == pytest.approx(mean, abs=0.06)
    variance = sum((value - mean) ** 2 for value in values) / 48
    assert variance**0.5 == pytest.approx(sd, rel=0.03)

"""The terminal plot: what is drawn where, and that nothing unknown is."""

import pytest

from trefoil.cli.carbon_chart import AHEAD, BAND, NOW, PAST, Span, chart, draw, nice_top, of_bands, of_readings
from trefoil.core.carbon import CarbonBand, CarbonReading

HOUR_S = 3600.0
NOON_S = 20_700 * 86400 + 12 * HOUR_S  # Friday


def flat(begin_h: float, end_h: float, low: float, middle: float, high: float) -> Span:
    return Span(NOON_S + begin_h * HOUR_S, NOON_S + end_h * HOUR_S, low, middle, high)


def cells(lines: list[str], width: int) -> list[str]:
    """The columns of the plot, each from the top down."""
    rows = [line.partition("┤")[2].ljust(width) for line in lines if "┤" in line]
    return ["".join(row[i] for row in rows) for i in range(width)]


def test_past_now_and_band_stand_where_they_belong():
    lines = chart([flat(-4, 0, 50, 50, 50)], [flat(0, 4, 25, 50, 95)], NOON_S, width=8, height=4)
    columns = cells(lines, 8)
    assert columns[0] == columns[3] == f"  {PAST} ", "50 of 100: the second of four rows from below"
    assert columns[5] == f"{BAND}{BAND}{AHEAD} "
    assert columns[4] == f"{BAND}{BAND}{AHEAD}{NOW}"
    assert lines[0].startswith("100 ┤")
    assert lines[-2].startswith("  0 └")


def test_a_gap_stays_a_gap():
    columns = cells(chart([flat(-4, -3, 9, 9, 9), flat(-1, 0, 9, 9, 9)], [], NOON_S, width=4, height=3), 4)
    assert [PAST in column for column in columns] == [True, False, False, True]


def test_a_column_is_the_mean_over_time_of_what_it_covers():
    ahead = [flat(0, 3, 0, 0, 0), flat(3, 4, 100, 100, 100)]
    lines = chart([], ahead, NOON_S - HOUR_S, width=1, height=5)
    assert cells(lines, 1) == [f"{AHEAD}    "], "25 g/kWh, which is the top"
    assert lines[0].startswith("25 ┤")


def test_what_came_wins_over_what_was_forecast():
    columns = cells(chart([flat(-2, 1, 8, 8, 8)], [flat(-1, 2, 2, 2, 2)], NOON_S, width=4, height=4), 4)
    assert [PAST in column for column in columns] == [True, True, True, False]


def test_the_axis_names_round_hours_of_utc():
    axis = chart([flat(-24, 0, 1, 1, 1)], [flat(0, 24, 1, 1, 1)], NOON_S, width=96)[-1]
    assert axis.index("╵Fri 12:00") == len("1 ┤") + 48, "half way"
    assert axis.index("╵Sat 00:00") == len("1 ┤") + 72


@pytest.mark.parametrize("hours", [0.001, 0.1, 5, 96, 24 * 400])
def test_any_length_of_time_fits(hours):
    lines = chart([flat(-hours, 0, 400, 400, 400)], [], NOON_S, width=60)
    assert max(map(len, lines)) <= 60 + 12 + len("400 ┤")
    assert lines[-1].count("╵") >= 1


def test_zero_is_drawn_and_nothing_is_not():
    assert PAST in cells(chart([flat(-1, 0, 0, 0, 0)], [], NOON_S, width=2, height=3), 2)[0]
    assert chart([], [], NOON_S) == []


@pytest.mark.parametrize(("value", "top"), [(0.0, 1.0), (95.0, 100.0), (100.0, 100.0), (101.0, 120.0), (0.3, 0.3)])
def test_the_top_is_a_round_number(value, top):
    assert nice_top(value) == top


def test_spans_of_readings_and_bands():
    old = CarbonReading(starts_at_s=0, ends_at_s=1, intensity_g_per_kwh=5)
    new = CarbonReading(starts_at_s=0, ends_at_s=1, intensity_g_per_kwh=6)
    assert of_readings([old, new]) == (Span(0, 1, 6, 6, 6),), "a later version of an interval stands for it"
    assert of_bands([CarbonBand(0, 1, 2, 3, 4)]) == (Span(0, 1, 2, 3, 4),)


def test_png(tmp_path):
    path = tmp_path / "plot.png"
    draw(path, "GB", [flat(-4, -3, 9, 9, 9), flat(-1, 0, 9, 9, 9)], [flat(0, 4, 5, 9, 12)], NOON_S)
    assert path.read_bytes().startswith(b"\x89PNG")

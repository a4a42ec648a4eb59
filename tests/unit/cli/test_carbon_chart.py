"""Charts of intensity and of forecast errors: what is drawn is what is known, and each column is a mean."""

import numpy as np
import pytest

from trefoil.cli.carbon.chart import (
    BAND,
    HEIGHT,
    IntensityCurves,
    draw_errors,
    draw_intensity,
    sample_curves,
    save_intensity_png,
)
from trefoil.core.carbon import CarbonBand, CarbonReading
from trefoil.core.units import HOUR_S

NOON_S = 20_700 * 86400 + 12 * HOUR_S  # Friday


def past(begin_h: float, end_h: float, value: float) -> CarbonReading:
    return CarbonReading(
        starts_at_s=NOON_S + begin_h * HOUR_S, ends_at_s=NOON_S + end_h * HOUR_S, intensity_g_per_kwh=value
    )


def ahead(begin_h: float, end_h: float, low: float, middle: float, high: float) -> CarbonBand:
    return CarbonBand(NOON_S + begin_h * HOUR_S, NOON_S + end_h * HOUR_S, low, middle, high)


def sampled(readings: list[CarbonReading], bands: list[CarbonBand], points: int) -> IntensityCurves:
    curves = sample_curves(readings, bands, NOON_S, points)
    assert curves is not None
    return curves


def test_a_point_is_the_mean_over_time_of_what_it_covers():
    curves = sampled([], [ahead(0, 3, 0, 0, 0), ahead(3, 4, 80, 100, 120)], 1)
    assert [c.tolist() for c in (curves.p10, curves.p50, curves.p90)] == [[20.0], [25.0], [30.0]]


def test_a_gap_stays_a_gap():
    values = sampled([past(-4, -3, 9), past(-1, 0, 9)], [], 4).past
    assert np.isnan(values).tolist() == [False, True, True, False]
    drawn = draw_intensity(sampled([past(-4, -3, 9), past(-1, 0, 9)], [], 160), 80).splitlines()
    (line,) = [row for row in drawn if "⠤⠤⠤" in row or "⠒⠒⠒" in row or "⠉⠉⠉" in row]
    assert 30 < line.rindex("    ") - line.index("┤") < 70, "half of the line is empty"


def test_a_later_version_of_an_interval_stands_for_it():
    assert sampled([past(-1, 0, 5), past(-1, 0, 6)], [], 1).past.tolist() == [6.0]


def test_past_band_and_now_are_drawn_and_named():
    curves = sampled([past(-4, 0, 50)], [ahead(0, 4, 25, 50, 95)], 120)
    text = draw_intensity(curves, 60)
    assert BAND in text
    assert "past │ forecast" in text
    assert "Fri 12:00" in text
    lines = text.splitlines()
    assert len(lines) == HEIGHT
    assert max(map(len, lines)) <= 60
    assert all(BAND not in line[:25] for line in lines[1:]), "nothing is forecast of the past"


def test_a_forecast_of_points_has_no_band():
    assert BAND not in draw_intensity(sampled([], [ahead(0, 4, 50, 50, 50)], 60), 60)


@pytest.mark.parametrize("hours", [0.001, 0.1, 5, 96, 24 * 400])
@pytest.mark.parametrize("value", [0.0, 400.0])
def test_any_length_of_time_and_any_value_fit(hours, value):
    lines = draw_intensity(sampled([past(-hours, 0, value)], [], 120), 60).splitlines()
    assert max(map(len, lines)) <= 60
    assert any("┬" in line for line in lines)


def test_nothing_known_is_not_drawn():
    assert sample_curves([], [], NOON_S, 10) is None


def test_errors_of_models_stand_under_their_first_letter():
    text = draw_errors({"blend": ([1, 2, 3], [1.0, 2.0, 3.0]), "climatology": ([1, 2, 3], [5.0, 5.0, 5.0])}, 60)
    assert "b = blend, c = climatology" in text
    assert "c" in text.splitlines()[2]


def test_png(tmp_path):
    path = tmp_path / "plot.png"
    curves = sampled([past(-4, -3, 9), past(-1, 0, 9)], [ahead(0, 4, 5, 9, 12)], 100)
    save_intensity_png(path, "GB", curves)
    assert path.read_bytes().startswith(b"\x89PNG")
    save_intensity_png(path, "GB", None)
    assert path.read_bytes().startswith(b"\x89PNG")

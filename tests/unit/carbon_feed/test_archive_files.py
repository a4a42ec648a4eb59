"""An issued forecast outlives its process: line by line, day by day, whatever was torn."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carbon_feed.forecast.archive import ForecastArchive, forecast_of_line, line_of
from carbon_feed.forecast.incremental import run_to_end
from carbon_feed.history.forecast_files import ForecastFiles
from tests.unit.carbon_feed.test_history import SERIES, T0_S
from trefoil.core.carbon import CarbonBand, CarbonForecast
from trefoil.core.common import Basis, Provenance
from trefoil.core.units import DAY_S

grams = st.integers(0, 15_000).map(lambda tenths: tenths / 10)


@st.composite
def forecasts(draw):
    steps = draw(st.lists(st.sampled_from([300.0, 1800.0, 3600.0, 1.75]), min_size=1, max_size=8))
    if draw(st.booleans()):
        steps = [steps[0]] * len(steps)
    at_s, bands = T0_S + draw(st.integers(0, 86_400)) / 8, []
    for step_s in steps:
        bands.append(CarbonBand(at_s, at_s + step_s, draw(grams), draw(grams), draw(grams)))
        at_s += step_s
    said = Provenance(Basis.MODELLED, draw(st.text(max_size=9)), "1", "CC BY 4.0", T0_S)
    return CarbonForecast(
        SERIES,
        draw(st.text(max_size=9)),
        T0_S + 0.25,
        tuple(bands),
        draw(st.sampled_from([None, said])),
        draw(st.text()),
    )


@settings(max_examples=20, deadline=None)
@given(forecast=forecasts())
def test_a_line_is_the_forecast(forecast):
    line = line_of(forecast)
    assert "\n" not in line
    found = forecast_of_line(line, SERIES)
    assert replace(found, bands=()) == replace(forecast, bands=())
    for one, other in zip(found.bands, forecast.bands, strict=True):
        assert one.starts_at_s == pytest.approx(other.starts_at_s, abs=1e-3)
        assert one.ends_at_s == pytest.approx(other.ends_at_s, abs=1e-3)
        assert (one.p10_g_per_kwh, one.p50_g_per_kwh, one.p90_g_per_kwh) == (
            other.p10_g_per_kwh,
            other.p50_g_per_kwh,
            other.p90_g_per_kwh,
        )


@settings(max_examples=60, deadline=None)
@given(forecast=forecasts(), cut=st.integers(0, 400), noise=st.text(max_size=20))
def test_what_is_not_a_line_of_ours_is_none_and_no_crash(forecast, cut, noise):
    line = line_of(forecast)
    assert forecast_of_line(line[: min(cut, len(line) - 1)], SERIES) is None
    forecast_of_line(noise, SERIES)
    for strange in ('{"format":2}', "null", "[]", '{"format":1}', line.replace('"p50_g_per_kwh"', '"p51"')):
        assert forecast_of_line(strange, SERIES) is None


def issued(day, hour=0.0):
    at_s = T0_S // DAY_S * DAY_S + day * DAY_S + hour * 3600
    return CarbonForecast(SERIES, "blend", at_s, (CarbonBand(at_s, at_s + 3600, 1.0, 2.0, 3.0),))


def test_a_file_a_day_old_ones_go_and_a_torn_line_spoils_no_other(tmp_path):
    files = ForecastFiles(tmp_path, SERIES, days_kept=3)
    assert files.lines() == []
    for day in range(5):
        files.append([issued(day, 1), issued(day, 2)])
    names = [path.name for path in sorted(files.folder.iterdir())]
    assert len(names) == 3
    with (files.folder / names[-1]).open("ab") as file:
        file.write(b'{"torn')
    files.append([issued(4, 3)])
    found = ForecastArchive(SERIES)
    now_s = T0_S + 6 * DAY_S
    assert run_to_end(files.load_into(found, files.lines(), now_s)) == 1
    assert len(found) == 7
    assert found.latest("blend") == issued(4, 3)
    files.append([replace(issued(4, 4), bands=(CarbonBand(1.0, 9e10, 1.0, 2.0, 3.0),)), issued(365), issued(-365)])
    assert run_to_end(files.load_into(ForecastArchive(SERIES), files.lines(), now_s)) >= 3

"""A file of carbon intensity is read alike by the feed, a scenario's zone and `carbon backtest`, or refused by all."""

import json

import pytest
from typer.testing import CliRunner

from carbon_feed.providers.trace import make_trace
from carbon_feed.settings import CarbonFeedSettings
from tests.public_reports.carbon_files import READ, REFUSED
from trefoil.cli.main import app
from trefoil.core.carbon import Quality
from trefoil.core.errors import TraceError
from trefoil.runtime.config import changed
from trefoil.simulator.scenario.carbon import carbon_read, intensity_of
from trefoil.simulator.scenario.schema import Carbon

NOW_S = 1e6


def given(report, tmp_path):
    text, options = report.input
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    reading = dict(options)
    kind = {name: reading.pop(name) for name in ("method", "factors") if name in reading}
    feed = CarbonFeedSettings(provider="trace", trace={"path": path, **reading}, **kind)
    return path, reading, kind, feed, Carbon(zones={"mine": {"trace": path, **reading}}, **kind)


def backtest(path, reading, kind):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in (reading | kind).items() if name != "estimates"]
    flags += ["--no-estimates"] if reading.get("estimates") is False else []
    return CliRunner().invoke(app, ["carbon", "backtest", str(path), "--horizon-h", "1", "--json", *flags])


@pytest.mark.parametrize("report", READ, ids=str)
async def test_a_file_has_one_reading_in_feed_and_scenario(report, tmp_path):
    _, _, _, feed, carbon = given(report, tmp_path)
    values, step_s, estimates = report.expected
    provider = make_trace(changed(feed, {"trace.starts_at_s": NOW_S}), NOW_S)
    zone = intensity_of("mine", carbon)
    for i, value in enumerate(values):
        said = await provider.read(NOW_S + i * step_s)
        simulated = zone.reading(i * step_s)
        assert said.intensity_g_per_kwh == pytest.approx(value)
        assert simulated.intensity_g_per_kwh == pytest.approx(value)
        estimated = i in estimates or "filled in" in said.estimation_method
        assert said.quality is simulated.quality is (Quality.ESTIMATED if estimated else Quality.MEASURED)
        assert ("by the file's own word" in said.estimation_method) == (i in estimates)
    assert f"{len(values)} rows of" in carbon_read(carbon, ["mine"])[0]


def test_a_backtest_takes_the_options_of_the_feed(tmp_path):
    path = tmp_path / "year.csv"
    rows = "".join(f"{h},{400 + h % 24},{'true' if h % 30 == 7 else 'false'}\n" for h in range(24 * 40))
    path.write_text("when,co2,estimated\n" + rows, encoding="utf-8")
    reading = {"time_column": "when", "time_unit": "h", "unit": "lb/MWh", "gaps": "hold", "estimates": False}
    found = backtest(path, reading | {"gap_max_h": 3}, {"method": "average"})
    assert found.exit_code == 2
    assert "--column" in found.stderr
    flags = ["--column=co2", "--time-column=when", "--time-unit=h", "--unit=lb/MWh", "--gaps=hold", "--no-estimates"]
    words = ["carbon", "backtest", str(path), "--horizon-h", "1", "--model", "persistence", "--json", *flags]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.stderr
    read_as = json.loads(found.stdout)["read_as"]
    assert "960 rows of 'co2' in lb/MWh" in read_as
    assert "mean 186.6 g/kWh, 32 of them filled in" in read_as


@pytest.mark.parametrize("report", REFUSED, ids=str)
def test_a_file_that_cannot_be_told_is_refused_by_all_three(report, tmp_path):
    path, reading, kind, feed, carbon = given(report, tmp_path)
    for read in (lambda: make_trace(feed, NOW_S), lambda: intensity_of("mine", carbon)):
        with pytest.raises(TraceError, match=f"(?s){report.expected}"):
            read()
    if report in REFUSED[:1]:
        refused = backtest(path, reading, kind)
        assert refused.exit_code == 2
        assert "--unit: " in refused.stderr
        assert "mine.csv" in refused.stderr


def test_a_backtest_names_the_flag_that_contradicts_the_header(tmp_path):
    path = tmp_path / "direct.csv"
    path.write_text("datetime_utc,intensity_g_per_kwh (direct)\n2022-01-01,1\n2022-01-02,2\n", encoding="utf-8")
    assert "--factors = 'lifecycle': " in backtest(path, {}, {}).stderr

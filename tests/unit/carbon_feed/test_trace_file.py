"""CSV traces of any shape load; a wrong one is refused by file, line, value and remedy."""

import pytest

from carbon_feed.data import make_duck_curve
from carbon_feed.providers.trace import load_trace, make_trace
from carbon_feed.providers.trace_columns import choose_columns
from carbon_feed.settings import DEFAULT_TRACE, CarbonFeedSettings, TraceSettings
from trefoil.core.carbon import Factors, Method, Quality
from trefoil.core.errors import TraceError, Unavailable
from trefoil.runtime.given.table import date_of, zone_of

HOURLY = "time,carbon_intensity_g_per_kwh\n" + "".join(f"2026-01-01T{h:02}:00Z,{100 + h}\n" for h in range(24))
CLOVER = (
    "hour,inferred_datetime_utc,carbon_intensity_gco2_per_kwh\n0,2021-03-26T21:00Z,124.57\n"
    "1,2021-03-26T22:00Z,135.6\n2,2021-03-26T23:00Z,148\n"
)
MAPS = (
    "Datetime (UTC),Zone Id,Carbon Intensity gCO₂eq/kWh (direct),Carbon Intensity gCO₂eq/kWh (LCA),Data Source\n"
    '2022-01-01 00:00:00,GB,156.03,233.76," a; b, c"\n2022-01-01 01:00:00,GB,152.52,229.73,a\n'
)


def write(tmp_path, text):
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_hourly(tmp_path):
    trace = load_trace(write(tmp_path, HOURLY))
    assert trace.step_s == 3600.0
    assert trace.values_g_per_kwh == tuple(100.0 + h for h in range(24))
    assert (trace.source, trace.starts, trace.synthetic, trace.lead_in_s) == (
        "trace.csv",
        "2026-01-01T00:00Z",
        False,
        0,
    )


def test_files_of_clover_load(tmp_path):
    trace = load_trace(write(tmp_path, CLOVER))
    assert trace.step_s == 3600.0
    assert trace.values_g_per_kwh == (124.57, 135.6, 148.0)


@pytest.mark.parametrize(("factors", "first"), [(Factors.DIRECT, 156.03), (Factors.LIFECYCLE, 233.76)])
def test_of_several_columns_the_factors_choose(tmp_path, factors, first):
    assert load_trace(write(tmp_path, MAPS), factors=factors).values_g_per_kwh[0] == first


@pytest.mark.parametrize(
    ("times", "step_s"),
    [
        (("0", "0.5", "1"), 1800.0),
        (("2026-01-01T00:00+01:00", "2026-01-01T00:05+01:00", "2025-12-31T23:10Z"), 300.0),
        (("2026-01-01", "2026-01-02", "2026-01-03"), 86400.0),
    ],
)
def test_any_resolution_and_way_to_write_time(tmp_path, times, step_s):
    name = "hour" if times[0] == "0" else "time"
    text = f"{name},intensity_g_per_kwh\n" + "".join(f"{time},5\n" for time in times)
    assert load_trace(write(tmp_path, text)).step_s == step_s


def test_columns_can_be_named(tmp_path):
    path = write(tmp_path, "when,us-west,us-east\n0,1,2\n60,3,4\n")
    wanted = TraceSettings(path=path, time_column="when", time_unit="s", value_column="us-east", unit="g/kWh")
    assert load_trace(path, wanted).values_g_per_kwh == (2.0, 4.0)
    with pytest.raises(TraceError, match=r"trace\.time_column = \['when', 'us-west', 'us-east'\].*no column"):
        load_trace(path)
    with pytest.raises(TraceError, match=r"trace\.value_column = 'us-north': .*use one of: when, "):
        load_trace(path, TraceSettings(path=path, time_column="when", value_column="us-north"))


@pytest.mark.parametrize(
    ("old", "new", "line", "named"),
    [
        ("2026-01-01T05:00Z,105\n", "", 7, "time = '2026-01-01T06:00Z': .*a gap of 2 h, the step is 1 h"),
        (",105", ",-3", 7, "carbon_intensity_g_per_kwh = '-3': .*negative"),
        (",105", ",", 7, "carbon_intensity_g_per_kwh = '': .*no value"),
        (",105", ",null", 7, "carbon_intensity_g_per_kwh = 'null': .*no value"),
        (",105", ",nan", 7, "carbon_intensity_g_per_kwh = 'nan': .*no value"),
        (",105", ",lots", 7, "carbon_intensity_g_per_kwh = 'lots': .*not a number"),
        (",105", ",1501", 7, "carbon_intensity_g_per_kwh = '1501': .*above 1500 g/kWh.*check the unit"),
        (",105", "", 7, "1 cells for 2 columns"),
        (",105", ",105,7", 7, "3 cells for 2 columns"),
        ("T05:00Z", "T04:00Z", 7, "not after the line before"),
        ("T05:00Z", "T03:00Z", 7, "not after the line before"),
        ("T05:00Z", "T04:30Z", 7, "0.5 h after the line before, the step is 1 h"),
        ("T05:00Z", "T25:00Z", 7, "not a time"),
        ("T05:00Z", " five", 7, "not a time"),
        (",105", ',"105', 7, "a quotation mark is not closed"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, old, new, line, named):
    assert HOURLY.count(old) == 1
    path = write(tmp_path, HOURLY.replace(old, new))
    with pytest.raises(TraceError, match=named) as caught:
        load_trace(path)
    text = str(caught.value)
    assert f"{path} line {line}" in text
    assert "Remedy: " in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is empty"),
        ("# only a comment\n", "is empty"),
        ("time_s,intensity_g_per_kwh\n", "has 0 rows"),
        ("time_s,intensity_g_per_kwh\n0,5\n", "has 1 rows"),
        ("time_s,intensity_g_per_kwh\n0,0\n60,0\n", "every value is 0"),
        ("time_s,intensity_g_per_kwh,carbon_intensity\n0,1,2\n60,1,2\n", "several columns could be meant"),
        ("# lead_in_h: much\ntime_s,intensity_g_per_kwh\n0,1\n60,1\n", "lead_in_h = 'much'"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, named):
    with pytest.raises(TraceError, match=named):
        load_trace(write(tmp_path, text))


def test_absent_and_unreadable_files_are_named(tmp_path):
    with pytest.raises(TraceError, match=r"trace = .*absent.: cannot be read .No such file"):
        load_trace(tmp_path / "absent")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path)


def provider(now_s=1000.0, **trace):
    return make_trace(CarbonFeedSettings(trace=TraceSettings(**trace)), now_s)


async def test_the_default_trace_says_that_it_is_synthetic_and_simulated():
    made = provider(step_s=14_400.0, speedup=2057.142857)
    reading = await made.read(1000.0)
    assert (reading.quality, reading.simulated) == (Quality.ESTIMATED, True)
    assert reading.estimation_method == "synthetic; mean of 4 h, replayed 2057.14 times as fast"
    assert reading.api_version.startswith("synthetic_duck_72h.csv@sha256:")
    assert len(made.history(1000.0 - 1e-3, 100)) == 6, "24 h of lead-in in four-hour steps"


def test_the_default_trace_is_what_its_script_writes():
    assert DEFAULT_TRACE.read_text(encoding="utf-8") == make_duck_curve.text()


def test_the_default_trace_is_a_duck():
    trace = load_trace(DEFAULT_TRACE)
    values = trace.values_g_per_kwh
    assert (len(values), trace.lead_in_s, trace.step_s) == (72, 24 * 3600.0, 3600.0)
    for day in range(3):
        hours = values[24 * day : 24 * day + 24]
        assert 10 <= hours.index(min(hours)) <= 15
        assert 18 <= hours.index(max(hours)) <= 22
        assert 60 <= min(hours) <= 120
        assert 330 <= max(hours) <= 430
    assert values[:24] != values[24:48], "days differ"


async def test_at_the_end_it_stops_or_loops(tmp_path):
    path = write(tmp_path, HOURLY)
    stopping = provider(0.0, path=path, at_end="stop", starts_at_s=1000.0)
    assert (await stopping.read(1000.0 + 23.5 * 3600)).intensity_g_per_kwh == 123.0
    with pytest.raises(Unavailable, match=r"trace\.csv has ended.*loop"):
        await stopping.read(1000.0 + 24 * 3600)
    looping = provider(0.0, path=path, starts_at_s=1000.0)
    assert (await looping.read(1000.0 + 24 * 3600)).intensity_g_per_kwh == 100.0


async def test_zero_starts_now_and_a_later_start_holds(tmp_path):
    path = write(tmp_path, HOURLY)
    assert (await provider(500.0, path=path).read(500.0)).starts_at_s == 500.0
    held = await provider(500.0, path=path, starts_at_s=5000.0).read(600.0)
    assert not held.record
    assert "held until the trace starts" in held.estimation_method


def test_a_lead_in_longer_than_the_file_is_named(tmp_path):
    with pytest.raises(TraceError, match=r"trace\.step_s, trace\.lead_in_h = \(3600\.0, 24\.0\)"):
        provider(path=write(tmp_path, HOURLY), lead_in_h=24.0)


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("time (UTC+1)", "2021-12-31T23:00Z"),
        ("Datetime (GMT-8)", "2022-01-01T08:00Z"),
        ("Local time (UTC +05:30)", "2021-12-31T18:30Z"),
        ("datetime [utc\u2212 03]", "2022-01-01T03:00Z"),
        ("time (-05:00)", "2022-01-01T05:00Z"),
        ("UTCtime", "2022-01-01T00:00Z"),
        ("time (UTC+00:00)", "2022-01-01T00:00Z"),
        ("Datetime (Etc/UTC)", "2022-01-01T00:00Z"),
    ],
)
def test_an_offset_in_the_name_of_the_times_counts(name, first, tmp_path):
    path = write(tmp_path, f"g/kWh,{name}\n1,2022-01-01 00:00\n2,2022-01-01 01:00\n")
    columns = choose_columns("", ["g/kWh", name], TraceSettings(), Factors.DIRECT, Method.AVERAGE, "")
    assert date_of("2022-01-01 00:00", columns.zone or zone_of("UTC")) == date_of(first)
    starts = load_trace(path).starts
    assert starts.removeprefix("2022-01-01 00:00") == (f" {columns.zone}" if columns.zone else "")

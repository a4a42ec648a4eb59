"""`trefoil carbon` against the feed's real servicer on a real port, over two zones that are made up."""

import asyncio
import csv
import json
import math
import os
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from carbon_feed.core.history import History
from carbon_feed.forecast import MODELS
from carbon_feed.forecast.archive import ForecastArchive
from carbon_feed.forecast.incremental import run_to_end
from carbon_feed.forecast.live_forecaster import LiveForecaster
from carbon_feed.history.core.ratio import ratio
from carbon_feed.serving.servicer import CarbonFeedServicer
from carbon_feed.settings import DEFAULT_TRACE, CarbonFeedSettings
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from trefoil.cli.carbon import feed_commands
from trefoil.cli.main import app
from trefoil.cli.run.state_directory import Launch, StatePaths
from trefoil.core.carbon import (
    CarbonForecast,
    CarbonReading,
    CarbonScores,
    Factors,
    Method,
    Quality,
    Series,
    ZoneHealth,
)
from trefoil.core.errors import Unavailable
from trefoil.core.units import HOUR_S
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.proc import Identity

NOW_S = 1_795_000_000.0
BEGIN_S = NOW_S // HOUR_S * HOUR_S
CISO = Series("US-CAL-CISO", Method.AVERAGE, Factors.LIFECYCLE)
GB = Series("GB", Method.AVERAGE, Factors.DIRECT)
DAYS = 5


def said(series: Series, at_s: float, quality: Quality = Quality.MEASURED) -> CarbonReading:
    """A duck curve: 200 to 300 g/kWh by the hour of the day."""
    value = 250 + 50 * math.cos(2 * math.pi * at_s / (24 * HOUR_S)) + at_s / HOUR_S % 7
    return CarbonReading(
        series, at_s, at_s + HOUR_S, value, quality, "electricity_maps", "v4", observed_at_s=at_s, fetched_at_s=at_s
    )


class Forecasts:
    """What a zone's own forecasts say, from the brains that it uses."""

    def __init__(self, history: History, reading: CarbonReading | None) -> None:
        self.archive = ForecastArchive(history.series)
        self.history, self._reading = history, reading
        for hours in (30, 6):
            then_s = BEGIN_S - hours * HOUR_S
            made = LiveForecaster(history, MODELS["climatology"], as_of_s=then_s).forecast(then_s)
            if made.forecast is not None:
                self.archive.add(made.forecast)
        made = LiveForecaster(history, MODELS["blend"]).forecast(NOW_S)
        self.forecast: CarbonForecast | None = made.forecast
        self.forecast_reason = "" if made.forecast else made.why
        if made.forecast is not None:
            self.archive.add(made.forecast)

    def ratio(self, window: str, now_s: float) -> Any:
        return ratio(self.history, self._reading, window) if self._reading is not None else None

    def scores(self) -> tuple[CarbonScores, ...]:
        return tuple(
            run_to_end(self.archive.scores_incrementally(self.history, model, NOW_S)) for model in self.archive.models
        )


@dataclass
class Zone:
    """Two zones of this kind are served: one that is well, one that has just begun."""

    series: Series
    days: int
    reading: CarbonReading | None
    told: ZoneHealth
    speedup: float = 1.0
    history: History = field(init=False)
    forecasts: Forecasts = field(init=False)

    def __post_init__(self) -> None:
        self.history = History(self.series)
        for hour in range(self.days * 24):
            self.history.add(said(self.series, BEGIN_S - (self.days * 24 - hour) * HOUR_S))
        if self.days:
            late = said(self.series, BEGIN_S - 2 * HOUR_S)
            revised = replace(late, intensity_g_per_kwh=333.0, fetched_at_s=NOW_S - 60, as_of=9)
            self.history.add(revised)
        self.forecasts = Forecasts(self.history, self.reading)

    async def watch(self) -> AsyncIterator[CarbonReading]:
        if self.reading is None:
            raise Unavailable("the feed is going down", remedy="ask another one")
        for grams in (100.0, 103.0, 110.0):
            yield replace(self.reading, intensity_g_per_kwh=grams, as_of=int(grams))
        yield replace(self.reading, intensity_g_per_kwh=110.0, quality=Quality.CARRIED, rung=2, as_of=200)
        await asyncio.sleep(60)

    def health(self, now_s: float) -> ZoneHealth:
        return replace(self.told, series=self.series)


WELL = ZoneHealth(
    provider="electricity_maps", secondary="", leading=True, holder="host:1", age_s=90, ends_at_s=BEGIN_S + HOUR_S,
    asked_today=17, quota_per_day=48, breaker="closed", redis_answers=True, forecast_model="blend",
    forecast_issued_at_s=BEGIN_S, history_intervals=120, history_newest_s=BEGIN_S,
)  # fmt: skip
ILL = ZoneHealth(
    provider="neso", rung=4, fallback_reason="neso server_error: [500] down", age_s=7300, hard_stale=True,
    breaker="open", last_error_cause="server_error",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def wall_clock() -> Iterator[None]:
    """Stands still, for whoever asks and for the feed: else an hour may end between what they say."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(WallClock, "now_s", lambda _: NOW_S)
        yield


@pytest.fixture(scope="module")
def served(wall_clock: None) -> Iterator[str]:
    """The address of a servicer on an event loop of its own."""
    zones = [
        Zone(CISO, DAYS, said(CISO, BEGIN_S, Quality.ESTIMATED), WELL),
        Zone(GB, 0, None, ILL),
    ]
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> rpc.RpcServer:
        add, name = pb_grpc.add_CarbonFeedServicer_to_server, "trefoil.carbon_feed.v1.CarbonFeed"
        settings = CarbonFeedSettings(admin_address="127.0.0.1:0")
        server = rpc.make_server(settings, [(add, CarbonFeedServicer(zones), name)])
        await server.start()
        return server

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(20)
    yield f"127.0.0.1:{server.port}"
    asyncio.run_coroutine_threadsafe(server.stop(0.1), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(20)


def run(address: str, *words: str) -> Result:
    return CliRunner().invoke(app, ["carbon", *words, "--target", address], catch_exceptions=False)


def text(address: str, *words: str) -> str:
    result = run(address, *words)
    assert result.exit_code == 0, result.output
    return str(result.stdout)


def document(address: str, *words: str) -> Any:
    return json.loads(text(address, *words, "--json"))


def test_now_shows_every_zone_and_why_one_has_nothing(served):
    said_ = text(served, "now")
    for part in ("US-CAL-CISO", "average, lifecycle", "estimated", "0 normal", "electricity_maps", "(expanding, 120)"):
        assert part in said_
    assert "GB: no reading: no reading of GB yet" in said_
    found = document(served, "now")
    (one,) = found["readings"]
    assert one["intensity_g_per_kwh"] == pytest.approx(said(CISO, BEGIN_S).intensity_g_per_kwh)
    assert (one["rung_name"], one["quality"]) == ("normal", "ESTIMATED")
    assert one["age_s"] >= 0
    assert one["ratio"]["samples"] == 120
    assert [missing["zone"] for missing in found["missing"]] == ["GB"]


@pytest.mark.parametrize("name", ["US-CAL-CISO", "CAISO", "CAISO_NORTH", "aws/us-west-1"])
def test_a_zone_is_found_by_any_of_its_names(served, name):
    assert document(served, "now", name)["readings"][0]["series"]["zone"] == "US-CAL-CISO"


def test_the_window_of_the_ratio_can_be_chosen(served):
    found = document(served, "now", "CAISO", "--window", "same_hour")["readings"][0]
    assert (found["ratio"]["window"], found["ratio"]["samples"]) == ("same_hour", DAYS)
    result = run(served, "now", "CAISO", "--window", "week")
    assert result.exit_code == 2
    assert "expanding, 30d, same_hour" in result.stderr


def test_watch_tells_changes_and_why(served):
    lines = text(served, "watch", "CAISO", "--count", "4").splitlines()
    assert [line.split()[3] for line in lines] == ["100.0", "103.0", "110.0", "110.0"]
    assert "(+3.0 %)" in lines[1]
    assert "carried, rung 2 carried" in lines[3]
    told = text(served, "watch", "CAISO", "--change", "5", "--count", "3", "--json").splitlines()
    values = [(r["intensity_g_per_kwh"], r["quality"]) for r in map(json.loads, told)]
    assert values == [(100.0, "ESTIMATED"), (110.0, "ESTIMATED"), (110.0, "CARRIED")]
    assert all(json.loads(line)["why"] for line in told)


def test_watch_ends_when_its_time_is_over(served):
    assert len(text(served, "watch", "CAISO", "--seconds", "3").splitlines()) == 4


def test_watch_ends_quietly_by_ctrl_c(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(feed_commands, "with_feed", interrupted)
    result = run("127.0.0.1:9", "watch")
    assert (result.exit_code, result.output) == (130, "")


def test_forecast_draws_the_day_before_and_the_band(served):
    said_ = text(served, "forecast", "CAISO")
    for part in ("blend, issued", "96.0 h ahead", "own blend of electricity_maps", "past │ forecast", "░", "┬", "Z "):
        assert part in said_, part
    assert "What past forecasts were worth" in said_
    assert "day 1" in said_


def test_forecast_in_other_steps_and_models(served):
    found = document(served, "forecast", "CAISO", "--hours", "6", "--step", "30")["forecast"]
    spans = {round(band["ends_at_s"] - band["starts_at_s"]) for band in found["bands"]}
    assert spans == {1800}
    assert 12 <= len(found["bands"]) <= 13
    other = document(served, "forecast", "CAISO", "--model", "climatology")
    assert other["forecast"]["model"] == "climatology"
    assert [told["model"] for told in other["scores"]] == ["climatology"]
    day = other["scores"][0]["days"][0]
    assert (day["day"], day["samples"]) == (1, 24 + 5)
    assert 23 <= len(other["past"]) <= 24
    assert other["now"]["intensity_g_per_kwh"] > 0


def test_no_forecast_is_said_to_be_none(served):
    assert "no forecast: no forecast of GB: nothing is known of the past" in text(served, "forecast", "GB")
    found = document(served, "forecast", "GB")
    assert found["forecast"] is None
    assert "nothing is known" in found["why"]


def test_forecast_plot_is_a_png(served, tmp_path):
    path = tmp_path / "new" / "forecast.png"
    text(served, "forecast", "CAISO", "--plot", str(path))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_archived_forecasts_and_scores_are_exported(served, tmp_path):
    path = tmp_path / "archive.csv"
    assert "288 archived bands" in text(served, "forecast", "CAISO", "--export", str(path))
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * 96
    assert {row["model"] for row in rows} == {"climatology", "blend"}
    assert {row["basis"] for row in rows} == {"modelled"}
    settled = [row for row in rows if row["actual_g_per_kwh"]]
    assert len(settled) == 29 + 5, "the hour of issue was known; of the blend nothing has ended yet"
    first = next(r for r in settled if float(r["starts_at_s"]) != BEGIN_S - 2 * HOUR_S)
    truth = said(CISO, float(first["starts_at_s"])).intensity_g_per_kwh
    assert float(first["actual_g_per_kwh"]) == pytest.approx(truth)
    scores = (tmp_path / "archive-scores.csv").read_text().splitlines()
    assert scores[0] == "model,horizon_h,samples,mape_pct,mae_g_per_kwh,bias_g_per_kwh,coverage_pct,basis"
    assert {row.rpartition(",")[2] for row in scores[1:]} == {"measured"}
    text(served, "forecast", "CAISO", "--export", str(tmp_path / "archive.json"))
    found = json.loads((tmp_path / "archive.json").read_text())
    assert len(found["forecasts"]) == 3 * 96
    assert found["series"]["zone"] == CISO.zone
    assert {told["model"] for told in found["scores"]} == {"climatology", "blend"}


def test_history_with_what_was_known_then_and_its_revisions(served, tmp_path):
    at_s = BEGIN_S - 2 * HOUR_S

    def value_of(found: Any) -> float:
        return float(next(r["intensity_g_per_kwh"] for r in found["readings"] if r["starts_at_s"] == at_s))

    assert value_of(document(served, "history", "CAISO")) == 333.0
    assert value_of(document(served, "history", "CAISO", "--as-of", "30min")) != 333.0
    both = document(served, "history", "CAISO", "--revisions", "--from", "3h")["readings"]
    assert [r["intensity_g_per_kwh"] == 333.0 for r in both if r["starts_at_s"] == at_s] == [False, True]
    path = tmp_path / "history.csv"
    said_ = text(served, "history", "CAISO", "--from", "7d", "--out", str(path), "--rows", "5")
    assert f"{DAYS * 24} intervals" in said_
    assert "the newest 5" in said_
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == DAYS * 24
    assert rows[-2]["intensity_g_per_kwh"] == "333.0"
    assert rows[0]["quality"] == "measured"


def test_a_long_history_comes_in_pages(served, monkeypatch):
    monkeypatch.setattr("trefoil.cli.carbon.client.PAGE", 7)
    assert len(document(served, "history", "CAISO", "--from", "7d")["readings"]) == DAYS * 24


def test_health_shows_who_asks_and_what_is_ill(served):
    said_ = text(served, "health")
    for part in ("asks the provider", "17 of 48", "closed", "blend, issued", "120 intervals"):
        assert part in said_, part
    for part in ("4 static", "[500] down", "beyond its hard limit", "open", "server_error", "DOES NOT ANSWER"):
        assert part in said_, part
    found = document(served, "health", "GB")["zones"]
    assert [codec.from_plain(ZoneHealth, one, "zones") for one in found] == [replace(ILL, series=GB)]


def test_zones_of_a_feed_say_which_it_reads(served):
    found = {zone["id"]: zone for zone in document(served, "zones")["zones"]}
    assert [name for name, zone in found.items() if zone["polled"]] == ["GB", "US-CAL-CISO"]
    assert found["GB"]["read_as"] == "average, direct"
    assert "average, lifecycle" in text(served, "zones", "CAISO")


def test_zones_works_offline(tmp_path):
    result = CliRunner().invoke(app, ["carbon", "zones", "gcp/europe-west1", "--json"], catch_exceptions=False)
    (zone,) = json.loads(result.stdout)["zones"]
    assert (zone["id"], zone["timezone"], zone["electricity_maps"]) == ("BE", "Europe/Brussels", "BE")
    own = tmp_path / "zones.toml"
    own.write_text('[HERE]\nname = "Our site"\ntimezone = "Europe/Berlin"\n')
    said_ = CliRunner().invoke(app, ["carbon", "zones", "--zones-file", str(own)]).stdout
    assert "Our site" in said_
    assert "CAISO_NORTH" in said_


@pytest.mark.parametrize(
    ("words", "named", "remedy"),
    [
        (["now", "Mars"], "zone = 'Mars'", "GB, US-CAL-CISO"),
        (["watch"], "ZONE", "GB, US-CAL-CISO"),
        (["forecast", "CAISO", "--step", "7"], "--step = 7", "0, 5, 15, 30, 60"),
        (["forecast", "CAISO", "--model", "magic"], "model = 'magic'", "blend"),
        (["forecast", "GB", "--model", "blend"], "model = 'blend'", "ask the zone's holder"),
        (["forecast", "CAISO", "--export", "a.xlsx"], "--export = 'a.xlsx'", "FILE.csv"),
        (["forecast", "CAISO", "--plot", "/proc/no/plot.png"], "--plot", "write to"),
        (["history", "CAISO", "--from", "yesterday"], "--from = 'yesterday'", "24h"),
        (["history", "CAISO", "--from", "1h", "--to", "2h"], "--from = '1h'", "earlier"),
        (["watch", "CAISO", "--hysteresis", "5"], "--hysteresis", "--change"),
        (["zones", "Mars"], "zone = 'Mars'", "use one of"),
        (["zones", "--zones-file", "x.toml"], "--zones-file", "without --target"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_a_person_gets_wrong_is_named_with_a_remedy(served, words, named, remedy):
    result = run(served, *words)
    assert result.exit_code == 2
    assert result.stderr.startswith("trefoil: ")
    assert named in result.stderr
    assert remedy in result.stderr.partition("Remedy: ")[2]
    assert result.stderr.count("\n") == 1


def test_a_feed_that_is_not_there_is_said_to_be_so():
    result = run("127.0.0.1:9", "now")
    assert result.exit_code == 2
    assert "--target = '127.0.0.1:9': no carbon feed answers" in result.stderr
    assert run("nonsense", "now").exit_code == 2


def test_the_running_system_s_feed_is_found_by_its_state_dir(served, tmp_path):
    launch = Launch(
        launch_id="test", cluster="test", state_dir=str(tmp_path), supervisor=Identity.of_pid(os.getpid()),
        redis_url="redis://127.0.0.1:1/0", addresses={"carbon_feed": served}, metrics={}, node_socket="",
        family="digits", node="node0", zone="demo", triton_ports=(1, 2), started_at_s=0.0,
    )  # fmt: skip
    StatePaths(tmp_path).write_launch(launch)
    words = ["carbon", "now", "CAISO", "--json", "--state-dir", str(tmp_path)]
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert json.loads(result.stdout)["readings"][0]["series"]["zone"] == "US-CAL-CISO"


def test_a_stream_that_ends_says_why(served):
    result = run(served, "watch", "GB")
    assert result.exit_code == 2
    assert "the feed is going down" in result.stderr
    assert "--target" not in result.stderr, "it has answered"


def test_without_a_running_system_one_line_says_so(tmp_path):
    for command in ("now", "watch", "forecast", "history", "health"):
        result = CliRunner().invoke(app, ["carbon", command, "--state-dir", str(tmp_path)], catch_exceptions=False)
        assert result.exit_code == 2
        assert "trefoil up" in result.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--column", "nope"], "--column = 'nope': "),
        (["--step-min", "45"], "--step-min = 45.0: "),
        (["--horizon-h", "1", "--step-min", "240"], "--horizon-h = 1.0: "),
    ],
)
def test_backtest_names_the_flag_that_was_given(words: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["carbon", "backtest", str(DEFAULT_TRACE), *words])
    assert result.exit_code == 2
    assert named in result.stderr
    assert "_s" not in result.stderr.partition("Remedy")[2], "a remedy in the unit of the flag"


def test_backtest_says_which_file_has_no_times_and_which_trace_is_too_short(tmp_path: Path) -> None:
    lines = DEFAULT_TRACE.read_text().splitlines()
    header = next(n for n, line in enumerate(lines) if not line.startswith("#"))
    short, unnamed = tmp_path / "short.csv", tmp_path / "unnamed.csv"
    short.write_text("\n".join([lines[header], *lines[header + 1 : header + 4]]) + "\n")
    unnamed.write_text("\n".join(["a,b", *lines[header + 1 :]]) + "\n")
    for trace, named in ((short, "--test-share = 0.01: "), (unnamed, "--time-column = ['a', 'b']: ")):
        result = CliRunner().invoke(app, ["carbon", "backtest", str(trace), "--test-share", "0.01", "--horizon-h", "1"])
        assert result.exit_code == 2
        assert named in result.stderr

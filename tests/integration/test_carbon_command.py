"""`trefoil carbon` beside a feed that runs as a process of its own: forecasts, their archive, health, and its end."""

import asyncio
import csv
import json
import math
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.feed_process import FeedProcess
from tests.support.redis_server import RedisServer
from trefoil.cli.main import app

pytestmark = pytest.mark.integration

HOURS = 24 * 8
LEAD_IN_H = 24 * 6
PATIENCE_S = 60.0


def recording(path: Path) -> Path:
    """A duck curve of eight days with a little of its own each day."""
    rows = [f"2026-01-{1 + h // 24:02}T{h % 24:02}:00Z,{value(h):.2f}" for h in range(HOURS)]
    path.write_text("time,intensity_g_per_kwh\n" + "\n".join(rows) + "\n")
    return path


def value(hour: int) -> float:
    return 250 + 60 * math.cos(2 * math.pi * hour / 24) + 5 * math.sin(hour * hour)


@pytest.fixture
async def feed(tmp_path: Path, redis_server: RedisServer, unused_tcp_port: int) -> AsyncIterator[FeedProcess]:
    made = FeedProcess(tmp_path, redis_server.url, unused_tcp_port)
    settings = {"trace__path": recording(tmp_path / "eight_days.csv"), "trace__lead_in_h": LEAD_IN_H}
    await made.start(**settings)
    await made.ask()
    yield made
    if made.process is not None:
        await made.end(signal.SIGKILL)


async def run(feed: FeedProcess, *words: str) -> Result:
    arguments = ["carbon", *words, "--target", f"127.0.0.1:{feed.port}"]
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, arguments, catch_exceptions=False))


async def document(feed: FeedProcess, *words: str) -> Any:
    result = await run(feed, *words, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


async def until_forecast(feed: FeedProcess) -> Any:
    """The first forecast is issued in the background."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = await document(feed, "forecast")
            if found["forecast"] is not None and found["scores"]:
                return found
            await asyncio.sleep(0.1)


async def test_a_living_feed_tells_all_and_its_end_is_noticed(feed, tmp_path):
    found = await until_forecast(feed)
    assert found["forecast"]["model"] == "blend"
    assert len(found["forecast"]["bands"]) == 96
    assert found["now"]["simulated"] is True
    assert len(found["past"]) >= 23
    path = tmp_path / "archive.csv"
    assert "SIMULATED" in (await run(feed, "forecast", "--export", str(path))).stdout
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == {"blend", "climatology", "persistence"}
    assert len(rows) == 3 * 96
    (told,) = (await document(feed, "health"))["zones"]
    assert (told["leading"], told["redis_answers"], told["forecast_model"]) == (True, True, "blend")
    assert told["history_intervals"] >= LEAD_IN_H
    (reading,) = (await document(feed, "now", "--window", "same_hour"))["readings"]
    assert reading["ratio"]["window"] == "same_hour"
    readings = (await document(feed, "history", "--from", "3d"))["readings"]
    assert 71 <= len(readings) <= 73
    await watching_ends_quietly_by_ctrl_c(feed)
    await feed.end()
    gone = await run(feed, "now")
    assert gone.exit_code == 2
    assert "no carbon feed answers" in gone.stderr


async def watching_ends_quietly_by_ctrl_c(feed: FeedProcess) -> None:
    watching = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trefoil.cli.main", "carbon", "watch", "--target", f"127.0.0.1:{feed.port}",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    assert watching.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        assert b"g/kWh" in await watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        _, said = await watching.communicate()
    assert (watching.returncode, said) == (130, b"")

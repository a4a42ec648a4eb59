"""Every trace of the table is one load to simulate, compare, load and backtest, or refused by all with one line."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.public_reports.traces import READ, REFUSED
from trefoil.cli.load.arrivals import ArrivalTrace
from trefoil.cli.main import app
from trefoil.core.errors import TraceError
from trefoil.forecasting.training import counts_per_s
from trefoil.simulator.scenario.inputs import arrivals_of, traces_read
from trefoil.simulator.scenario.request_columns import TraceOptions
from trefoil.simulator.scenario.request_trace import read_trace
from trefoil.simulator.scenario.schema import Scenario

DATA = Path(os.environ.get("TREFOIL_DATA", Path(__file__).parents[2] / ".." / "shared" / "data")) / "requests"


def scenario(path: Path, options: dict) -> Scenario:
    arrivals = {"trace": path, "gap_scv": 0.0, **options}
    return Scenario(duration_s=60, families=[{"name": "digits", "arrivals": arrivals}])


@pytest.mark.parametrize("report", READ, ids=str)
def test_a_trace_is_one_load_whoever_reads_it(report, tmp_path):
    text, options = report.input
    requests, span_s = report.expected
    path = tmp_path / "trace.csv"
    path.write_text(text, encoding="utf-8")
    played = scenario(path, options)
    assert arrivals_of(played)["digits"].mean_per_s(0.0, span_s) == pytest.approx(requests / span_s, rel=1e-9)
    (line,) = traces_read(played)
    assert f"; {requests:,} requests in {span_s:,} s, mean {requests / span_s:.4g}/s" in line
    read = ArrivalTrace(path, options=TraceOptions(**options))
    times = read.times_s(seed=1)
    assert len(times) == pytest.approx(requests)
    assert np.all(times < span_s)
    counts = counts_per_s(read.read(), np.random.default_rng(1))
    assert counts.size == span_s
    assert counts.sum() == pytest.approx(requests, abs=5 * np.sqrt(requests) if read.read().counted()[1] > 1 else 0)


@pytest.mark.parametrize("report", REFUSED, ids=str)
def test_a_trace_that_nobody_can_tell_is_refused_by_every_reader(report, tmp_path):
    text, options = report.input
    path = tmp_path / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (
        lambda: arrivals_of(scenario(path, options)),
        lambda: ArrivalTrace(path, options=TraceOptions(**options)).times_s(1),
    ):
        with pytest.raises(TraceError, match=f"(?s){report.expected}") as refused:
            read()
        assert "trace.csv" in str(refused.value)
        assert refused.value.remedy


def test_simulate_and_compare_print_what_was_read(tmp_path):
    trace, file = tmp_path / "mine.csv", tmp_path / "mine.toml"
    trace.write_text("second,requests,errors\n" + "".join(f"{i},18,1\n" for i in range(100)), encoding="utf-8")
    file.write_text(
        f'duration_s = 100\nfidelity = "fluid"\nstep_s = 50\n[[families]]\nname = "digits"\n'
        f'arrivals.trace = "{trace}"\n[[nodes]]\nzone = "demo"\n',
        encoding="utf-8",
    )
    line = "digits: trace mine.csv: 100 rows, each a count (requests) over 1 s; 1,800 requests in 100 s, mean 18/s"
    shown = CliRunner().invoke(app, ["simulate", str(file), "--policy", "base"])
    assert line in shown.stdout
    document = CliRunner().invoke(app, ["simulate", str(file), "--policy", "base", "--json"])
    assert line in document.stderr
    assert json.loads(document.stdout)["summary"]["arrived"] == pytest.approx(1800)
    compared = ["compare", str(file), "--policies", "base,co2opt", "--seeds", "1", "--jobs", "1", "--json"]
    assert json.loads(CliRunner().invoke(app, compared).stdout)["cases"][0]["traces"] == [line]


def test_the_rate_of_a_busy_second_is_written_out(tmp_path):
    path = tmp_path / "busy.csv"
    path.write_text("second,requests\n0,18000\n1,18000\n", encoding="utf-8")
    assert str(read_trace(path)).endswith("36,000 requests in 2 s, mean 18,000/s")


def test_the_recorded_traces_have_their_known_means():
    if not DATA.is_dir():
        pytest.skip(f"no {DATA}: set TREFOIL_DATA to the evaluation data")
    twitter = read_trace(DATA / "twitter_2021-08_infadapter_21min_per_second.csv")
    assert (twitter.rows, twitter.span_s, round(twitter.mean_per_s, 1)) == (1260, 1260.0, 96.6)
    code = read_trace(DATA / "azure_llm_2023_code_requests.csv")
    assert (code.rows, code.bin_s) == (8819, 0.0)
    day = read_trace(DATA / "azure_functions_sample_1day_per_minute.csv")
    assert (day.rows, day.span_s) == (1440, 86_400.0)

"""`trefoil forecast`: a backtest scores what it says, and training refuses what it will be tested on."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support.seam.forecaster import Promised, PromisedSettings
from trefoil.cli.main import app
from trefoil.forecasting.backtest import backtest
from trefoil.forecasting.training import counts_per_s, file_sha256, generated_counts, train, windows_of
from trefoil.simulator.scenario.request_trace import read_trace


def run(*arguments: object):
    return CliRunner().invoke(app, ["forecast", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    found = run(*arguments)
    assert found.exit_code == 2
    return found.stderr or found.output


@pytest.fixture
def trace(tmp_path):
    """Twenty-five minutes, of which the last seconds of each are busier."""
    path = tmp_path / "mine.csv"
    path.write_text("second,requests\n" + "".join(f"{i},{30 if i % 60 > 50 else 10}\n" for i in range(1500)))
    return path


def test_a_backtest_scores_what_is_planned_for_against_the_busiest_second_that_came():
    counts = np.array([10.0] * 720 + [50.0] * 60 + [10.0] * 420)
    found = backtest(Promised(PromisedSettings(rate_per_s=20.0)), counts, every_s=60)
    came = [10.0, 10.0, 50.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0, 10.0]
    assert found.forecasts == len(came)
    assert found.under_share == 0.1
    assert found.under_ratio == pytest.approx(30 / 50)
    assert found.over_ratio == pytest.approx(9 * 10 / sum(came))
    assert found.error_ratio == pytest.approx((9 * 10 + 30) / sum(came))
    assert found.instead == 0


@pytest.mark.long
def test_a_backtest_prints_every_forecaster_or_those_that_are_asked_for(trace):
    found = json.loads(run("backtest", trace, "--json", "--every-s", 60).stdout)
    assert set(found["scores"]) == {"last_max", "minute_max", "ewma", "holt_winters", "lstm"}
    assert found["scores"]["ewma"]["error_ratio"] == pytest.approx(0.0, abs=1e-9)
    own = run("backtest", trace, "--forecaster", "tests.support.seam.forecaster:Promised", "--set", "rate_per_s=60")
    assert "100.0%" in own.output  # of what is above
    assert "trace mine.csv: 1,500 rows, each a count (requests) over 1 s; 19,500 requests in 1,500 s" in own.output


@pytest.mark.parametrize(
    ("forecaster", "says"),
    [
        ("oracle", "forecaster = 'oracle': knows what only a simulation knows"),
        ("prophet", "forecaster = 'prophet': no such forecaster. Remedy: "),
    ],
)
def test_a_backtest_refuses_who_cannot_forecast(trace, forecaster, says):
    assert says in refusal("backtest", trace, "--forecaster", forecaster)


def test_a_trace_too_short_is_refused_by_both(tmp_path):
    short = tmp_path / "short.csv"
    short.write_text("second,requests\n" + "".join(f"{i},3\n" for i in range(600)))
    assert "600 s are too few" in refusal("backtest", short)
    python = tmp_path / "python"
    python.touch()
    assert "too short" in refusal("train", short, "--python", python)


def test_a_held_out_trace_is_not_trained_on_whatever_it_is_called(trace, tmp_path):
    copy = tmp_path / "another.csv"
    shutil.copy(trace, copy)
    python = tmp_path / "python"
    python.touch()
    says = refusal("train", copy, "--held-out", trace, "--python", python)
    assert f"TRACES = '{copy}': is the held-out {trace}. Remedy: train on another trace" in says


def test_training_needs_an_interpreter_with_torch(trace, tmp_path):
    assert "Remedy: make .venv-export/.ready" in refusal("train", trace, "--python", tmp_path / "nowhere")


def interpreter(tmp_path, error: str) -> Path:
    """A python whose every training ends with this error against 0.2."""
    python = tmp_path / "python"
    python.write_text(f"""#!/bin/sh
echo new > "$3"
echo '{{"validation": {{"mae_ratio": {error}, "mae_ratio_of_last_minute": 0.2}}}}'
""")
    python.chmod(0o755)
    return python


@pytest.mark.parametrize(("error", "says"), [("0.3", "30.0%"), ("0.2", "20.0%"), ("NaN", "nan%")])
def test_a_model_that_loses_to_the_last_minutes_maximum_leaves_the_one_that_stands(trace, tmp_path, error, says):
    out = tmp_path / "models" / "mine.onnx"
    out.parent.mkdir()
    for path in (out, out.with_suffix(".json")):
        path.write_text("standing")
    refused = run("train", trace, "--python", interpreter(tmp_path, error), "--out", out)
    assert refused.exit_code == 2
    assert f"validation.mae_ratio = {error.lower()}: its error of {says} is no less than 20.0% of" in refused.stderr
    assert "Remedy: train on more or longer traces" in refused.stderr
    assert {path.name: path.read_text() for path in out.parent.iterdir()} == dict.fromkeys(
        ("mine.onnx", "mine.json"), "standing"
    )


def test_a_model_that_wins_takes_its_place_with_its_card(trace, tmp_path):
    out = tmp_path / "models" / "mine.onnx"
    card = train([trace], [], out, seed=1, python=interpreter(tmp_path, "0.1"))
    assert {path.name for path in out.parent.iterdir()} == {"mine.onnx", "mine.json"}
    assert card == json.loads(out.with_suffix(".json").read_text())
    assert card["sha256"] == file_sha256(out)


def test_an_interpreter_that_trains_nothing_is_named(trace, tmp_path):
    refused = run("train", trace, "--python", "/bin/true", "--out", tmp_path / "models" / "mine.onnx")
    assert refused.exit_code == 2
    assert "--python = '/bin/true': training ended with 0 and no model. Remedy: " in refused.stderr


def test_windows_are_ten_minutes_and_the_largest_second_after_them():
    counts = np.arange(800, dtype=np.float64)
    x, y = windows_of(counts, stride_s=100)
    assert x.shape == (2, 600)
    assert list(y) == [659.0, 759.0]
    assert list(x[1][:2]) == [100.0, 101.0]


def test_minutes_are_drawn_to_seconds_at_the_mean_that_is_asked_for_and_seconds_stay_as_they_are(tmp_path, trace):
    minutes = tmp_path / "minutes.csv"
    minutes.write_text("minute,jobs\n" + "".join(f"{i},{5 + i % 3}\n" for i in range(200)))
    drawn = counts_per_s(read_trace(minutes), np.random.default_rng(1), 30.0)
    assert drawn.size == 12_000
    assert drawn.mean() == pytest.approx(30.0, rel=0.02)
    assert counts_per_s(read_trace(trace), np.random.default_rng(1), 99.0).max() == 30.0
    assert list(generated_counts(np.random.default_rng(2))) == list(generated_counts(np.random.default_rng(2)))

"""Work that may take long says within 2 s that it continues, on standard error; JSON stays alone."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.support.triton_process import MODELS
from trefoil.cli import output
from trefoil.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
COMMANDS = (
    "simulate digits --set duration_s=30",
    "simulate digits --set duration_s=30 --forecasts",
    "demo --quick --simulated --policy base --policy co2opt --set simulated_seeds=1",
    "compare digits --set duration_s=30 --policies base --seeds 1 --jobs 1",
    f"carbon backtest {ROOT}/carbon_feed/data/synthetic_duck_72h.csv --horizon-h 1 --model persistence",
    "forecast backtest {0}/load.csv --forecaster ewma",
    "forecast train {0}/load.csv --python {0}/load.csv",
    "lengths train {0}/load.csv",
    "family import {0}/theirs --as f=digits --slo-latency-ms 50 --accuracy digits=0.5 --repository {0}/ours",
    "family assume digits --repository {0}/theirs",
    "family check digits --graphs-only --repository {0}/theirs",
    "replay {0}/load.csv",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_progress_is_printed_while_a_command_works(command, tmp_path, monkeypatch):
    monkeypatch.setattr(output, "FIRST_TICK_S", 0.0)
    (tmp_path / "load.csv").write_text("second,requests\n" + "".join(f"{i},10\n" for i in range(1500)))
    shutil.copytree(MODELS / "_shared", tmp_path / "theirs" / "_shared")
    shutil.copytree(MODELS / "digits", tmp_path / "theirs" / "digits", ignore=shutil.ignore_patterns("*.npz"))
    words = command.format(tmp_path).split()
    assert "working, 0 s so far" in CliRunner().invoke(app, words).stderr
    assert "working" not in CliRunner().invoke(app, [*words, "--json"]).stderr

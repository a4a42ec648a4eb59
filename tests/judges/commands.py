"""Commands run in this process: `--help` of each, and `--json` of each without a running system."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import chdir
from pathlib import Path
from typing import Any, Final
from unittest import mock

from typer.testing import CliRunner

import trefoil
from tests.support.commands import commands
from tests.support.foreign_models import LINEAR, add, graph
from tests.support.metric_pages import World, long_csv
from tests.unit.cli.test_deploy_env import HERE
from trefoil.cli.deploy import machine
from trefoil.cli.main import app

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = "trefoil-judges-"
ENVIRONMENT: Final = {"COLUMNS": "100", "NO_COLOR": "1", "TZ": "UTC", "PATH": os.environ.get("PATH", "")}
NORMALISED: Final[tuple[tuple[str, str], ...]] = (
    (re.escape(sys.executable), "<python>"),  # before <root>, which may hold it
    (re.escape(str(ROOT)), "<root>"),
    (re.escape(tempfile.gettempdir()) + rf"/{FOLDER}\w+", "<tmp>"),
    (re.escape(trefoil.__version__), "<version>"),
    (r'("(?:commit|machine)": )"[^"]*"', r'\1"<of this run>"'),
    (r'("took_(?:ms_\w+|s)": )[\d.e-]+', r"\1<ms>"),  # wall time
    (r"(?m)^working, \d+ s so far\n", ""),  # progress, by wall time
)
ARGUMENTS: Final[Mapping[str, str]] = {
    "up": "--set policy=clever",
    "compare": "mig --policies base,static_mix --set duration_s=40 --seeds 1 --jobs 1",
    "policy": "exact_miad",
    "assess": "--from-csv {tmp}/fleet.csv --seeds 0",
    "family check": "digits --graphs-only",
    "family import": "{tmp}/theirs --as toy=small,large --slo-latency-ms 50 --accuracy small=0.7 --accuracy large=0.9 "
    "--repository {tmp}/ours",
    "family engine": "toy=nowhere --as toy --tokens-mean 8 --slo-latency-ms 50 --device-type L4 "
    "--repository {tmp}/ours",
    "family assume": "toy --repository {tmp}/ours",
    "carbon backtest": "carbon_feed/data/synthetic_duck_72h.csv",
    "forecast backtest": "{tmp}/trace.csv --every-s 300",
    "deploy env": "--output {tmp}/env",
}
"""Of commands that answer, or would start a system. The others refuse, for no system is running."""
LEFT_OUT: Final[Mapping[str, str]] = {
    "simulate": "judge `results`",
    "demo": "judge `results`",
    "replay": "judge `replays`",
    "node doctor": "describes this machine",
    "setup triton": "installs an environment",
    "forecast train": "trains for minutes, in an environment with torch",
    "reproduce": "takes minutes; tests/simulation/test_reproduce.py",
}


def normalised(text: str) -> str:
    """A text without what differs from run to run."""
    for pattern, stands_for in NORMALISED:
        text = re.sub(pattern, stands_for, text)
    return text


def folder() -> "tempfile.TemporaryDirectory[str]":
    """Folder whose name `normalised` replaces."""
    return tempfile.TemporaryDirectory(prefix=FOLDER)


def ran(*words: str) -> tuple[str, Any]:
    """Run a command: its words, and its exit code, output and errors."""
    typed = mock.patch.object(sys, "argv", ["trefoil", *words])  # some answers name the command
    with mock.patch.dict(os.environ, ENVIRONMENT, clear=True), typed, chdir(ROOT):
        done = CliRunner().invoke(app, words, prog_name="trefoil")
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    texts = {"output": normalised(done.stdout), "errors": normalised(done.stderr)}
    return normalised(" ".join(words)), {"exit": done.exit_code, **texts}


def helps() -> Iterator[tuple[str, Any]]:
    """Help of every command and group."""
    for path, _ in commands():
        yield ran(*path.split(), "--help")


def answers() -> Iterator[tuple[str, Any]]:
    """JSON or refusal of every command that is not left out."""
    with folder() as tmp, mock.patch.object(machine, "look", return_value=HERE), mock.patch.object(machine, "check"):
        for name in ("small", "large"):
            add(Path(tmp) / "theirs", name, LINEAR, graph("linear"))
        rows = "".join(f"{second},{30 if second % 60 > 50 else 10}\n" for second in range(1500))
        (Path(tmp) / "trace.csv").write_text(f"second,requests\n{rows}")
        (Path(tmp) / "fleet.csv").write_text(long_csv(World().series(7200.0, 600.0)))
        for path, command in commands():
            if hasattr(command, "commands") or path in LEFT_OUT or path.split()[0] in LEFT_OUT:
                continue
            options = [option for parameter in command.params for option in parameter.opts]
            words = [*path.split(), *ARGUMENTS.get(path, "").format(tmp=tmp).split()]
            words += ["--json"] * ("--json" in options) + ["--state-dir", f"{tmp}/none"] * ("--state-dir" in options)
            yield ran(*words)

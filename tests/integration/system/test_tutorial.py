"""The examples of README.md and docs/quickstart.md as printed, against a system of `trefoil up`."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.integration.system.conftest import Serving
from tests.support.prose import examples
from tests.support.system import TREFOIL

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
NOT_HERE = ("trefoil up", "trefoil down", "trefoil setup", "trefoil top")
"""Start and end are the fixture's, and `top` needs a terminal."""
OF_A_READER = "TRITON_REPO"
"""Stands for a folder that a reader has."""


@pytest.mark.parametrize(("page", "least"), [("README.md", 2), ("docs/quickstart.md", 7)])
def test_commands_end_well(serving: Serving, page: str, least: int) -> None:
    blocks = [text for language, text in examples((ROOT / page).read_text()) if not language]
    lines = [line for text in blocks if OF_A_READER not in text for line in text.splitlines()]
    commands = [line for line in lines if line.startswith("trefoil ") and not line.startswith(NOT_HERE)]
    assert len(commands) >= least
    here = {**os.environ, "TREFOIL_STATE_DIR": str(serving.system.state_dir)}
    try:
        for line in commands:
            words = [str(TREFOIL), *shlex.split(line, comments=True)[1:]]
            ended = subprocess.run(words, env=here, capture_output=True, text=True, timeout=900)
            assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    finally:
        serving.system.ask("objective", "set", "--reset")


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_client_gets_an_answer_and_its_receipt(
    serving: Serving, capsys: pytest.CaptureFixture[str], page: str
) -> None:
    [program] = [text for language, text in examples((ROOT / page).read_text()) if language == "python"]
    exec(compile(program.replace("127.0.0.1:8001", serving.system.inference), page, "exec"), {})
    assert "trefoil_energy_j_estimate" in capsys.readouterr().out

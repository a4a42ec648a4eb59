"""The page of `trefoil simulate --out`: what was missed first, and that nothing of it was real."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app

DIGITS = Path(__file__).resolve().parents[3] / "benchmarks" / "scenarios" / "digits.toml"


@pytest.mark.parametrize(("policy", "missed"), [("base", False), ("co2opt", True)])
def test_simulate_writes_a_page_that_says_simulated_and_what_was_missed(
    tmp_path: Path, policy: str, missed: bool
) -> None:
    arguments = ["simulate", str(DIGITS), "--policy", policy, "--set", "duration_s=120", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "report.html" in result.stdout
    page = (tmp_path / "report.html").read_text()
    assert '<td data-name="family">digits</td>' in page, "on a telephone each cell stands below its column's name"
    for part in (
        "2 × A100-SXM4-40GB",
        "Simulated.",
        "Over time, simulated",
        "result.json",
        "Decisions, and why",
        "requests/s",
    ):
        assert part in page
    for part in ("Triton", "wall time", "accuracy, measured", "one draw"):
        assert part not in page.replace("No Triton", "")
    assert ("digits is below its accuracy floor" in page) == missed
    assert ('role="alert"' in page) == missed

"""The report of `trefoil simulate --out`: the demo's page, without what no simulation knows."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from trefoil.cli.demo.simulation_report import plan_events
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
    for part in ("2 × A100-SXM4-40GB", "Simulated.", "simulated hours", "result.json", "SLO attainment"):
        assert part in page
    for part in ("Triton", "wall time", "accuracy, measured", "one draw"):
        assert part not in page.replace("No Triton", "")
    assert ("accuracy floor: co2opt" in page) == missed


def test_decisions_that_made_a_plan_are_listed_with_what_the_next_one_met() -> None:
    def decision(at_s: float, effect: str, before: str) -> dict[str, object]:
        return {"at_s": at_s, "effect": effect, "rollout_before": before, "trigger": "load", "why": "more"}

    found = plan_events(
        [
            decision(-60.0, "reconfigure", "unspecified"),
            decision(10.0, "reconfigure", "done"),
            decision(12.0, "unchanged", "applying"),
            decision(14.0, "reroute", "applying"),
            decision(3600.0, "reconfigure", "done"),
        ]
    )
    assert [(e.at_s * 3600, e.superseded) for e in found] == [(10.0, True), (14.0, False), (3600.0, False)]

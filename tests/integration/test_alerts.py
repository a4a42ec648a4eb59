"""Alerts fire and clear as deploy/prometheus/tests says, by Prometheus' own promtool (Debian: prometheus)."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(PROMTOOL is None, reason="no promtool on PATH: install the package prometheus"),
]


def promtool(*argv: str) -> str:
    done = subprocess.run([str(PROMTOOL), *argv], cwd=PROMETHEUS / "tests", capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_alert_fires_and_clears():
    files = sorted(path.name for path in (PROMETHEUS / "tests").glob("*.yml"))
    assert promtool("test", "rules", *files).count("SUCCESS") == len(files) > 0


def test_prometheus_takes_the_configuration():
    assert "is valid prometheus config file syntax" in promtool("check", "config", "../prometheus.yml")

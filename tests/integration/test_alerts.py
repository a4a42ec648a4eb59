"""Alerts fire and clear as deploy/prometheus/tests says, by Prometheus' own promtool (Debian: prometheus)."""

import json
import os
import queue
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from tests.support.ports import free_ports

PROMETHEUS = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")
ALERTMANAGER = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")

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


@pytest.fixture
def webhook() -> Iterator[tuple[str, "queue.Queue[tuple[str, str]]"]]:
    """URL of a receiver, and what it is sent: path, and the name of the first alert."""
    received: queue.Queue[tuple[str, str]] = queue.Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.put((self.path, told["alerts"][0]["labels"]["alertname"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: the queue has it."""

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", received
    server.shutdown()


def alertmanager(folder: Path, *argv: str, **environment: str) -> "subprocess.Popen[str]":
    (folder / "alertmanager").symlink_to(ALERTMANAGER or "/bin/false")
    (folder / "tmp").mkdir()
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        ["sh", str(PROMETHEUS / "alertmanager.sh"), *argv],
        env={"PATH": path, "TMPDIR": str(folder / "tmp"), "TREFOIL_ALERT_WAIT": "0s", **environment},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.skipif(ALERTMANAGER is None, reason="no Alertmanager on PATH: install the package prometheus-alertmanager")
def test_alerts_reach_the_webhook_and_the_watchdog_its_own(tmp_path, webhook):
    url, received = webhook
    (port,) = free_ports(1)
    process = alertmanager(
        tmp_path, f"--web.listen-address=127.0.0.1:{port}", TREFOIL_ALERT_WEBHOOK=f"{url}/alerts",
        TREFOIL_WATCHDOG_WEBHOOK=f"{url}/watchdog",
    )  # fmt: skip
    try:
        alerts = [{"labels": {"alertname": name}} for name in ("TrefoilRedisAway", "TrefoilWatchdog")]
        deadline_s = time.monotonic() + 30
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            try:
                httpx.post(f"http://127.0.0.1:{port}/api/v2/alerts", json=alerts).raise_for_status()
                break
            except httpx.TransportError:  # it does not listen yet
                time.sleep(0.05)
        found = {received.get(timeout=30), received.get(timeout=30)}
    finally:
        process.kill()
        process.wait()
    assert found == {("/alerts", "TrefoilRedisAway"), ("/watchdog", "TrefoilWatchdog")}


@pytest.mark.parametrize("url", ["ftp://here", 'http://here/"x', "here"])
def test_a_webhook_that_is_no_url_is_refused(tmp_path, url):
    process = alertmanager(tmp_path, TREFOIL_ALERT_WEBHOOK=url)
    _, why = process.communicate(timeout=30)
    assert process.returncode == 2
    assert f"webhook = '{url}'" in why
    assert "Remedy: " in why

"""End-to-end check of `trefoil assess`: `make e2e-assess`, or `python -m benchmarks.assess`.

1. `trefoil up` with policy `base` serves a varied load on two real Tritons and two simulated GPUs. Debian's Prometheus
   scrapes both Tritons, and a page in the form of DCGM's exporter with the driver's energy counters.
2. `trefoil assess` reads that Prometheus. Its joules have to be within 2 % of the driver's counters, its requests
   within 1 % of those that were answered.
3. The simulator plays its scenario under `exact`; `trefoil up` with its up.toml then serves the same load. Grams per
   request have to agree within 10 %, p95 within 20 %.

Prints a table; the exit code is 1 if a limit is missed. Needs prometheus.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Final

from benchmarks.dashboards import CLOCK, running_prometheus
from power_agent.devices.node_client import NodeClient
from tests.support.metric_pages import dcgm_page
from tests.support.prometheus_api import Api, reply, serving
from trefoil.cli.demo.results import write_json
from trefoil.cli.run.state_directory import StatePaths
from trefoil.installation import CHECKOUT
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.schema import Scenario

OUT: Final = CHECKOUT / "out" / "assess"
TREFOIL: Final = (sys.executable, "-m", "trefoil.cli.main")
LOAD: Final = ((0, 8), (0.2, 8), (0.35, 24), (0.6, 24), (0.75, 5), (1, 5))
SLO_MS: Final = 150.0
GRAMS: Final = 400.0
SCRAPE_S: Final = 2
BOARD: Final = (
    'gpu="{0}",UUID="GPU-{0}",device="nvidia{0}",modelName="NVIDIA A100-SXM4-40GB",GPU_I_PROFILE="7g.40gb",'
    'GPU_I_ID="0",Hostname="node0",pod="triton-{0}"'
)
LIMITS_PCT: Final = {"joules": 2.0, "requests": 1.0, "grams of a request": 10.0, "p95": 20.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.assess", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of load, once as found and once under exact")
    parser.add_argument("--port-offset", type=int, default=1400)
    given = parser.parse_args(argv)
    if shutil.which("prometheus") is None:
        print("not found: prometheus. Remedy: install this package", file=sys.stderr)
        return 1
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="assess-") as scratch:
        rows = measure(Path(scratch), given.minutes, given.port_offset)
    write_json(OUT / "e2e.json", {"minutes": given.minutes, "rows": rows})
    wrong = 0
    for name, (told, counted) in rows.items():
        apart = 100 * (told / counted - 1)
        held = abs(apart) <= LIMITS_PCT[name]
        wrong += not held
        verdict = "" if held else "WRONG"
        print(f"{name}: told {told:.6g}, counted {counted:.6g}, {apart:+.2f} %, limit {LIMITS_PCT[name]:g} {verdict}")
    return 1 if wrong else 0


def measure(scratch: Path, minutes: float, port_offset: int) -> dict[str, tuple[float, float]]:
    """Value of `assess` and measured value, by name."""
    start = [
        "--policy", "base", "--set", f"slo.latency_ms={SLO_MS}", "--set", "carbon_feed.provider=constant",
        "--set", f"carbon_feed.static_g_per_kwh={GRAMS}",
    ]  # fmt: skip
    with running(scratch / "today", port_offset, start) as state_dir:
        paths = StatePaths(state_dir)
        client = NodeClient(paths.node_socket)
        with (
            serving(Api(other=exporter(client))) as dcgm,
            running_prometheus(scratch, scraped(state_dir, dcgm), OUT, "/prom") as url,
        ):
            CLOCK.block(3 * SCRAPE_S)
            before, begin_s = counted(client), CLOCK.now_s()
            sent = load(state_dir, minutes)
            end_s, after = CLOCK.now_s(), counted(client)
            CLOCK.block(2 * SCRAPE_S)
            told = assess(url, begin_s, end_s)
    rows = {
        "joules": (told["joules"] / told["covered_s"] * (end_s - begin_s), sum(after) - sum(before)),
        "requests": (sum(one["requests"] for one in told["models"].values()), float(sent["answered"])),
    }
    found = simulate(Scenario.load(OUT / "scenario.toml")).summary
    with running(scratch / "exact", port_offset, ["--config", str(OUT / "up.toml")]) as state_dir:
        served = load(state_dir, minutes)
    rows["grams of a request"] = found.grams_per_request, served["grams_per_request"]
    rows["p95"] = found.p95_ms, served["latency_ms_p95"]
    return rows


@contextmanager
def running(state_dir: Path, port_offset: int, words: Sequence[str]) -> Iterator[Path]:
    """`trefoil up`, and its end."""
    where = ["--state-dir", str(state_dir)]
    try:
        subprocess.run([*TREFOIL, "up", *where, "--port-offset", str(port_offset), *words], check=True)
        yield state_dir
    finally:
        subprocess.run([*TREFOIL, "down", *where], check=True, stdout=subprocess.DEVNULL)


def asked(*words: str) -> Any:
    """JSON of a command."""
    done = subprocess.run([*TREFOIL, *words, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def scraped(state_dir: Path, dcgm: str) -> dict[str, Any]:
    """Configuration of Prometheus: each Triton and the exporter, with a label `pod`, which renames the exporter's."""
    node = asked("node", "show", "--state-dir", str(state_dir))
    devices = sorted(node["node"]["devices"], key=lambda one: one["device"])
    tritons = [one["slices"][0]["metrics_url"].split("/")[2] for one in devices]
    jobs = {
        "triton": [{"targets": [address], "labels": {"pod": f"triton-{n}"}} for n, address in enumerate(tritons)],
        "dcgm": [{"targets": [dcgm.removeprefix("http://")], "labels": {"pod": "dcgm-exporter"}}],
    }
    every = {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}
    return {"global": every, "scrape_configs": [{"job_name": k, "static_configs": v} for k, v in jobs.items()]}


def load(state_dir: Path, minutes: float) -> dict[str, Any]:
    """Summary of the load, the same arrivals each time."""
    profile = ",".join(f"{share * minutes * 60:g}:{rate}" for share, rate in LOAD)
    where = ("--state-dir", str(state_dir), "--slo-latency-ms", str(SLO_MS))
    found = asked("load", *where, "--profile", profile, "--duration", f"{minutes * 60:g}", "--seed", "7")
    return {**found, **(found.get("summary") or {}), **(found.get("metered") or {})}


def counted(client: NodeClient) -> list[float]:
    """Joules that the driver has counted, by device."""
    return [one["counter_j"] for one in client.truth()["devices"]]


def exporter(client: NodeClient) -> Callable[[BaseHTTPRequestHandler], None]:
    """Answers with a page in the form of DCGM's exporter: joules and watts since the last page."""
    last = {"at_s": CLOCK.monotonic_s(), "joules": counted(client)}

    def page(handler: BaseHTTPRequestHandler) -> None:
        now_s, joules = CLOCK.monotonic_s(), counted(client)
        watts = [(a - b) / max(1e-3, now_s - last["at_s"]) for a, b in zip(joules, last["joules"], strict=True)]
        last.update(at_s=now_s, joules=joules)
        rows = {
            ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter"): [1e3 * one for one in joules],
            ("DCGM_FI_DEV_POWER_USAGE", "gauge"): watts,
        }
        labelled = {key: [(BOARD.format(n), one) for n, one in enumerate(values)] for key, values in rows.items()}
        reply(handler, 200, "text/plain; version=0.0.4", dcgm_page(labelled))

    return page


def assess(url: str, begin_s: float, end_s: float) -> dict[str, Any]:
    """JSON of `trefoil assess` of a time; its files go to OUT."""
    since, until = (datetime.fromtimestamp(at_s, UTC).isoformat() for at_s in (begin_s, end_s))
    span = ("--since", since, "--until", until, "--step", str(SCRAPE_S))
    found = asked(
        "assess", "--prometheus", url, *span, "--carbon", f"{GRAMS:g}", "--seeds", "3", "--out", str(OUT),
        "--slo-latency-ms", f"{SLO_MS:g}",
    )  # fmt: skip
    for line in (*found["assumed"], *found["risks"], found["asked"]):
        print(line)
    for one in found["savings"]:
        print({name: one[name] for name in ("lever", "saving_pct", "low_pct", "high_pct", "why_none")})
    return dict(found)


if __name__ == "__main__":
    raise SystemExit(main())

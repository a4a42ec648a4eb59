"""`trefoil assess` beside what is really counted and then served: `make e2e-assess`, or `python -m benchmarks.assess`.

1. `trefoil up` with policy `base`: two real Tritons on two simulated GPUs, under load that rises and falls. Debian's
   Prometheus scrapes both, and a page in the form of DCGM's exporter, made of what the driver counts.
2. `trefoil assess` reads that Prometheus: its joules against the driver's counters (2 %), its rates against the load
   that was sent (1 %).
3. Its scenario under `exact` in the simulator, against the same load really served by `trefoil up` on its up.toml:
   grams of a request within 10 %, p95 within 20 %.

Prints a table; exit code 1 where something does not hold. Needs prometheus.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import yaml

from benchmarks.dashboards import CLOCK, free_port, wait_ready
from power_agent.devices.node_client import NodeClient
from trefoil.cli.demo.results import write_json
from trefoil.cli.run.state_directory import StatePaths
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock
from trefoil.simulator.run import simulate
from trefoil.simulator.scenario.schema import Scenario

OUT: Final = CHECKOUT / "out" / "assess"
TREFOIL: Final = (sys.executable, "-m", "trefoil.cli.main")
LOAD: Final = ((0, 8), (0.2, 8), (0.35, 24), (0.6, 24), (0.75, 5), (1, 5))
SLO_MS: Final = 150.0
GRAMS: Final = 400.0
SCRAPE_S: Final = 2
COUNTERS: Final = ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter"), ("DCGM_FI_DEV_POWER_USAGE", "gauge")
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
    """What was told and what was counted, by what it is."""
    start = [
        "--policy", "base", "--set", f"slo.latency_ms={SLO_MS}", "--set", "carbon_feed.provider=constant",
        "--set", f"carbon_feed.static_g_per_kwh={GRAMS}",
    ]  # fmt: skip
    with running(scratch / "today", port_offset, start) as state_dir:
        paths = StatePaths(state_dir)
        client = NodeClient(paths.node_socket)
        with exporter(client) as dcgm, prometheus(scratch, tritons(state_dir), dcgm) as url:
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


def tritons(state_dir: Path) -> dict[int, str]:
    """Address of the metrics of each device's Triton."""
    node = asked("node", "show", "--state-dir", str(state_dir))
    devices = sorted(node["node"]["devices"], key=lambda one: one["device"])
    return {n: one["slices"][0]["metrics_url"].split("/")[2] for n, one in enumerate(devices)}


def load(state_dir: Path, minutes: float) -> dict[str, Any]:
    """Summary of the load, the same arrivals each time."""
    profile = ",".join(f"{share * minutes * 60:g}:{rate}" for share, rate in LOAD)
    where = ("--state-dir", str(state_dir), "--slo-latency-ms", str(SLO_MS))
    found = asked("load", *where, "--profile", profile, "--duration", f"{minutes * 60:g}", "--seed", "7")
    return {**found, **(found.get("summary") or {}), **(found.get("metered") or {})}


def counted(client: NodeClient) -> list[float]:
    """Joules that the driver has counted, by device."""
    return [one["counter_j"] for one in client.truth()["devices"]]


@contextmanager
def exporter(client: NodeClient) -> Iterator[str]:
    """Address of a page in the form of DCGM's exporter."""
    clock = WallClock()
    last = {"at_s": clock.monotonic_s(), "joules": counted(client)}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            now_s, joules = clock.monotonic_s(), counted(client)
            watts = [(a - b) / max(1e-3, now_s - last["at_s"]) for a, b in zip(joules, last["joules"], strict=True)]
            last.update(at_s=now_s, joules=joules)
            lines = []
            for (name, kind), values in zip(COUNTERS, ([1e3 * j for j in joules], watts), strict=True):
                lines.append(f"# TYPE {name} {kind}")
                for n, value in enumerate(values):
                    labels = (
                        f'gpu="{n}",UUID="GPU-{n}",device="nvidia{n}",modelName="NVIDIA A100-SXM4-40GB",'
                        f'GPU_I_PROFILE="7g.40gb",GPU_I_ID="0",Hostname="node0",pod="triton-{n}"'
                    )
                    lines.append(f"{name}{{{labels}}} {value:.3f}")
            body = ("\n".join(lines) + "\n").encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def prometheus(scratch: Path, tritons: Mapping[int, str], dcgm: str) -> Iterator[str]:
    """A real Prometheus on both; its own label pod makes that of the exporter exported_pod."""
    import asyncio

    targets = [{"targets": [address], "labels": {"pod": f"triton-{n}"}} for n, address in tritons.items()]
    jobs = [
        {"job_name": "triton", "static_configs": targets},
        {"job_name": "dcgm", "static_configs": [{"targets": [dcgm], "labels": {"pod": "dcgm-exporter"}}]},
    ]
    config = {"global": {"scrape_interval": f"{SCRAPE_S}s", "scrape_timeout": f"{SCRAPE_S}s"}, "scrape_configs": jobs}
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    argv = ["prometheus", f"--config.file={scratch / 'prometheus.yml'}", f"--storage.tsdb.path={scratch / 'tsdb'}"]
    with (OUT / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [*argv, f"--web.listen-address={address}", "--web.route-prefix=/prom/"], stdout=log, stderr=log
        )
        try:
            asyncio.run(wait_ready(f"http://{address}/prom/-/ready"))
            yield f"http://{address}/prom"
        finally:
            process.terminate()
            process.wait(30)


def assess(url: str, begin_s: float, end_s: float) -> dict[str, Any]:
    """What `trefoil assess` tells of that time; its files in OUT."""
    span = ("--since", _utc(begin_s), "--until", _utc(end_s), "--step", str(SCRAPE_S))
    found = asked(
        "assess", "--prometheus", url, *span, "--carbon", f"{GRAMS:g}", "--seeds", "3", "--out", str(OUT),
        "--slo-latency-ms", f"{SLO_MS:g}",
    )  # fmt: skip
    for line in (*found["assumed"], *found["risks"], found["asked"]):
        print(line)
    for one in found["savings"]:
        print({name: one[name] for name in ("lever", "saving_pct", "low_pct", "high_pct", "why_none")})
    return dict(found)


def _utc(at_s: float) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_s, UTC).isoformat()


if __name__ == "__main__":
    raise SystemExit(main())

"""Dashboards and alerts on a running system: `make e2e-dashboards`, or `python -m benchmarks.dashboards`.

`trefoil up` in a separate folder, load that rises and falls while carbon changes, and a real Prometheus that scrapes
it and Redis' exporter by deploy/prometheus/prometheus.yml (addresses instead of names, nothing else is changed). Then
every expression of every panel, every recording rule and every alert has to have a finite value, no alert may fire, and
each dashboard is drawn in a headless Chromium by Grafana's own panel components (benchmarks/render), wide and as on a
phone, since Grafana's server comes from no package registry: no panel may be empty. Pictures go to out/dashboards, with
--pictures also to docs/images. Prints what it found; exit code 1 where something does not hold. Needs prometheus,
prometheus-redis-exporter, chromium, node and npm.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, Final, Self

import yaml

from trefoil.cli.demo.results import write_json
from trefoil.cli.run.state_directory import StatePaths
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
PROMETHEUS: Final = CHECKOUT / "deploy" / "prometheus"
DASHBOARDS: Final = CHECKOUT / "deploy" / "grafana" / "dashboards"
RENDER: Final = CHECKOUT / "benchmarks" / "render"
OUT: Final = CHECKOUT / "out" / "dashboards"
IMAGES: Final = CHECKOUT / "docs" / "images"
EXPORTER: Final = "prometheus-redis-exporter"
NEEDED: Final = {"prometheus": "prometheus", "chromium": "chromium", "node": "nodejs", "npm": "npm", EXPORTER: EXPORTER}
STEP_S: Final = 10
WIDTHS_PX: Final = {".png": 1616, "-400.png": 400}  # of the window, by ending of a picture's name
COMPARED: Final = re.compile(r" (==|!=|>=|<=|>|<) ")
FAMILY: Final = "digits"
NOT_HERE: Final = {
    "TrefoilCertificateEnds": "`trefoil up` speaks no TLS",
    "TrefoilProxyDown": "it has no HAProxy",
    "TrefoilProxyNoDispatcher": "it has no HAProxy",
    "TrefoilJobsLate": "it has no jobs",
    "TrefoilGpuError": "none of its devices reports an error",
    "TrefoilBudgetSpent": "it has no budget",
    "TrefoilWatchdog": "it always fires",
    "TrefoilRolloutHalted": "its rollouts are done, and the alert leaves those out",
    **dict.fromkeys(
        (
            "TrefoilTokensLate",
            "trefoil:token_slo_miss:ratio_rate1h",
            "trefoil:token_slo_miss:ratio_rate5m",
            "trefoil:token_slo_budget:ratio",
        ),
        "its family makes no tokens",
    ),
}
"""Alerts and rules on metrics that this system does not have, and why."""

Answer = Sequence[Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dashboards", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--port-offset", type=int, default=1200)
    parser.add_argument("--pictures", action="store_true", help="also write docs/images")
    given = parser.parse_args(argv)
    missing = [f"{package} ({name})" for name, package in NEEDED.items() if shutil.which(name) is None]
    if missing:
        print(f"not found: {', '.join(missing)}. Remedy: install these packages", file=sys.stderr)
        return 1
    if not (RENDER / "node_modules").is_dir():
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=RENDER, check=True)
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory(prefix="dashboards-") as scratch:
        wrong = measure(Path(scratch), given.minutes, given.port_offset)
    for ending, width_px in WIDTHS_PX.items():
        wrong += draw(ending, width_px)
    for line in wrong:
        print(f"WRONG: {line}")
    if given.pictures and not wrong:
        for picture in OUT.glob("*.png"):
            shutil.copy(picture, IMAGES / f"dashboard-{picture.name}")
    return 1 if wrong else 0


def measure(scratch: Path, minutes: float, port_offset: int) -> list[str]:
    """Serve under load for so long, ask for everything, and leave what the dashboards show in OUT; what is wrong."""
    with running_system(scratch / "state", minutes, port_offset) as state_dir:
        launch = StatePaths(state_dir).read_launch()
        exporter, address = redis_exporter(launch.redis_url, OUT)
        config = product_jobs({name: [address] for name, address in (launch.metrics | {"redis": address}).items()})
        with exporter, running_prometheus(scratch, config, OUT) as prometheus:
            load(state_dir, minutes)
            return ask_all(prometheus, minutes)


@contextmanager
def running_system(state_dir: Path, minutes: float, port_offset: int) -> Iterator[Path]:
    """`trefoil up` with a step of carbon each minute or so, and its end."""
    trefoil = [sys.executable, "-m", "trefoil.cli.main"]
    where = ["--state-dir", str(state_dir)]
    steps = [
        "--set",
        f"carbon.step_s={minutes * 60 / 5:g}",
        "--set",
        "slo.latency_ms=1000",
    ]  # a busy machine is not an alert
    try:
        subprocess.run([*trefoil, "up", *where, "--port-offset", str(port_offset), *steps], check=True)
        yield state_dir
    finally:
        subprocess.run([*trefoil, "down", *where], check=True, stdout=subprocess.DEVNULL)


def load(state_dir: Path, minutes: float) -> None:
    """Load that rises and falls; ends when the last answer is there."""
    end_s = minutes * 60
    points = [(0, 6), (0.3, 6), (0.4, 16), (0.6, 16), (0.7, 4), (1, 4)]
    profile = ",".join(f"{share * end_s:g}:{rate}" for share, rate in points)
    argv = [sys.executable, "-m", "trefoil.cli.main", "load", "--state-dir", str(state_dir), "--profile", profile]
    subprocess.run([*argv, "--duration", f"{end_s:g}"], check=True)


def product_jobs(metrics: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Configuration of Prometheus: the product's rules and those of its jobs that have addresses in `metrics`."""
    config: dict[str, Any] = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["scrape_configs"] = [job for job in config["scrape_configs"] if job["job_name"] in metrics]
    for job in config["scrape_configs"]:
        del job["dns_sd_configs"]
        job["static_configs"] = [{"targets": list(metrics[job["job_name"]])}]
    return config | {"rule_files": [str(PROMETHEUS / "rules" / "*.yml")]}


class Program:
    """A program beside the system, which can be killed and started again."""

    def __init__(self, argv: Sequence[str], log: Path, **environment: str) -> None:
        self._argv, self._log, self._environment = argv, log, os.environ | environment
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Start it."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._argv, stdout=log, stderr=log, env=self._environment)

    def kill(self) -> None:
        """Kill it, if it runs."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def redis_exporter(redis_url: str, logs: Path) -> tuple[Program, str]:
    """An exporter of this Redis, and its address."""
    url, address = urllib.parse.urlsplit(redis_url), f"127.0.0.1:{free_port()}"
    argv = [EXPORTER, f"-redis.addr=redis://{url.hostname}:{url.port}", f"-web.listen-address={address}"]
    return Program(argv, logs / "redis_exporter.log", REDIS_PASSWORD=url.password or ""), address


@contextmanager
def running_prometheus(scratch: Path, config: Mapping[str, Any], logs: Path, prefix: str = "") -> Iterator[str]:
    """URL of a Prometheus with this configuration, behind a path prefix; its log goes to a folder."""
    (scratch / "prometheus.yml").write_text(yaml.safe_dump(dict(config)))
    address = f"127.0.0.1:{free_port()}"
    argv = ["prometheus", f"--config.file={scratch / 'prometheus.yml'}", f"--storage.tsdb.path={scratch / 'tsdb'}"]
    argv += [f"--web.listen-address={address}", f"--web.route-prefix={prefix or '/'}"]
    with (logs / "prometheus.log").open("w") as log:
        process = subprocess.Popen(argv, stdout=log, stderr=log)
        try:
            asyncio.run(wait_ready(f"http://{address}{prefix}/-/ready"))
            yield f"http://{address}{prefix}"
        finally:
            process.terminate()
            process.wait(30)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


async def wait_ready(url: str) -> None:
    """Wait for a minute until a page is there."""
    until_s = CLOCK.monotonic_s() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.URLError:
            if CLOCK.monotonic_s() > until_s:
                raise
            await CLOCK.sleep(0.2)


def ask(prometheus: str, kind: str, **parameters: Any) -> Any:
    """An answer of Prometheus' API."""
    form = urllib.parse.urlencode(parameters).encode() if parameters else None
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/{kind}", form, timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{kind} {parameters}: {error.read().decode()}") from error


def ask_all(prometheus: str, minutes: float) -> list[str]:
    """Ask for every expression; what is not finite, or fires."""
    to_s = CLOCK.now_s()
    wrong, asked = [], 0
    for file in sorted(DASHBOARDS.glob("*.json")):
        dashboard = json.loads(file.read_text())
        answers: dict[int, list[Answer]] = {}
        for panel in dashboard["panels"]:
            answers[panel["id"]] = found = []
            for target in panel["targets"]:
                expression, asked = substituted(prometheus, target["expr"]), asked + 1
                answer = ask(prometheus, "query", query=expression, time=to_s)["result"]
                if not is_finite(answer) and (answer or "noValue" not in panel["fieldConfig"]["defaults"]):
                    wrong.append(f"{file.stem}, {panel['title']}: {expression} is {values(answer)}")
                if target["range"]:
                    span = {"start": to_s - minutes * 60, "end": to_s, "step": STEP_S}
                    answer = ask(prometheus, "query_range", query=expression, **span)["result"]
                found.append(answer)
        shown = {"dashboard": titled(dashboard), "answers": answers, "from": to_s - minutes * 60, "to": to_s}
        write_json(OUT / f"{file.stem}.json", shown)
    print(f"{asked} expressions of {len(list(DASHBOARDS.glob('*.json')))} dashboards asked")
    rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    for rule in rules:
        alert = rule["type"] == "alerting"
        if rule["name"] in NOT_HERE:
            print(f"{rule['name']} not asked: {NOT_HERE[rule['name']]}")
            continue
        answer = ask(prometheus, "query", query=COMPARED.sub(r" \1 bool ", rule["query"]) if alert else rule["query"])
        if not is_finite(answer["result"]):
            wrong.append(f"rule {rule['name']}: {rule['query']} is {values(answer['result'])}")
        if rule["health"] != "ok":
            wrong.append(f"rule {rule['name']}: {rule.get('lastError')}")
        if alert and rule["state"] == "firing":
            wrong.append(f"alert {rule['name']} fires: {rule['alerts'][0]['annotations']['summary']}")
        if alert and rule["state"] == "pending":
            print(f"alert {rule['name']} is pending: {rule['alerts'][0]['annotations']['summary']}")
    alerts = sum(rule["type"] == "alerting" for rule in rules)
    print(f"{alerts} alerts and {len(rules) - alerts} recording rules asked")
    return wrong


def substituted(prometheus: str, expression: str) -> str:
    """An expression as Grafana would send it."""
    (device, *_) = ask(prometheus, "label/device/values")
    node = device.rpartition("/")[0]
    chosen = {"$__rate_interval": f"{4 * STEP_S}s", "$cluster": ".*", "$family": FAMILY, "$node": node}
    for name, value in chosen.items():
        expression = expression.replace(name, value)
    return expression


def titled(dashboard: dict[str, Any]) -> dict[str, Any]:
    """A dashboard whose title says what its variables stand for."""
    named = {"family": FAMILY, "node": "node0"}
    chosen = [named[each["name"]] for each in dashboard["templating"]["list"] if each["name"] in named]
    return {**dashboard, "title": " ".join([dashboard["title"], *chosen])}


def values(answer: Answer) -> list[str]:
    """Newest values of an answer."""
    return [str(series["value"][1]) for series in answer]


def is_finite(answer: Answer) -> bool:
    """Whether there is a value, and each of them is a number."""
    return bool(answer) and all(isfinite(float(value)) for value in values(answer))


def draw(ending: str, width_px: int) -> list[str]:
    """Draw what is in OUT in a window of this width, to *ENDING; what is empty in the pictures."""
    pictures = {file: file.with_name(f"{file.stem}{ending}") for file in sorted(OUT.glob("*.json"))}
    pairs = [str(path) for pair in pictures.items() for path in pair]
    argv = ["node", str(RENDER / "draw.mjs"), shutil.which("chromium") or "", str(width_px), *pairs]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
    wrong = []
    for file, panels in json.loads(done.stdout).items():
        picture = pictures[Path(file)]
        for panel in panels:
            words = panel["words"].replace(panel["title"], "", 1).strip()
            if panel["drawn"] == 0 or not words or "No data" in words:
                wrong.append(f"{picture.name}, {panel['title']}: the picture is empty")
        print(f"{picture.name}: {len(panels)} panels, {picture.stat().st_size // 1024} KiB")
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())

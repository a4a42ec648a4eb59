"""Every alert on a real fault: `make e2e-alerts`, or `python -m benchmarks.alerts --only REGEX`.

Whole systems as `trefoil up` starts them, the shipped HAProxy and a second feed run under a real Prometheus with the
shipped scrape jobs and rules. Each fault of benchmarks/alerts_faults.py is played until its alerts fire, then it ends,
and the alerts have to clear. So that hours pass in minutes, rules are shortened (`shortened`): each `for:`, window and
offset is divided by SPEEDUP, a window is at least WINDOW_S long, and metrics are scraped every second. Nothing else
differs. Prints a table: alert, fault, seconds until it fired and until it cleared. Exit code 1 where an alert does not
fire or does not clear. Needs root, and prometheus, prometheus-redis-exporter, haproxy and cc.
"""

import argparse
import asyncio
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from redis import RedisError
from rich.console import Console

from benchmarks import alerts_faults, chaos_clock
from benchmarks.alerts_faults import Fault, World
from benchmarks.dashboards import CLOCK, EXPORTER, PROMETHEUS, ask, product_jobs, running_prometheus
from trefoil.cli.demo.results import write_json
from trefoil.cli.output import grid
from trefoil.core.errors import TrefoilError
from trefoil.installation import CHECKOUT

OUT: Final = CHECKOUT / "out" / "alerts"
SPEEDUP: Final = 60
WINDOW_S: Final = 10.0
SCRAPE_S: Final = 1
DURATION: Final = re.compile(r"(\[|offset )(\d+)([smhd])")
UNIT_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LIMIT_S: Final = 240.0  # within which an alert has to fire, and to clear
NEEDED: Final = {"prometheus": "prometheus", "haproxy": "haproxy", "cc": "gcc", EXPORTER: EXPORTER}
NEVER_CLEARS: Final = "TrefoilWatchdog"


@dataclass(frozen=True, slots=True)
class Seen:
    """One alert under one fault; None: it did not within LIMIT_S."""

    alert: str
    fault: str
    fired_s: float | None
    cleared_s: float | None

    @property
    def good(self) -> bool:
        """Whether it fired, and cleared unless it never does."""
        return self.fired_s is not None and (self.cleared_s is not None or self.alert == NEVER_CLEARS)


class Watch:
    """Alerts that fire, by their labels."""

    def __init__(self, prometheus: str) -> None:
        self._prometheus = prometheus

    async def until(self, labels: Mapping[str, str], fires: bool) -> float | None:
        """Seconds until an alert with these labels fires, or none does; None: not within LIMIT_S."""
        began_s = CLOCK.monotonic_s()
        while (waited_s := CLOCK.monotonic_s() - began_s) < LIMIT_S:
            alerts = (await asyncio.to_thread(ask, self._prometheus, "alerts"))["alerts"]
            firing = [alert["labels"] for alert in alerts if alert["state"] == "firing"]
            if any(labels.items() <= found.items() for found in firing) == fires:
                return waited_s
            await CLOCK.sleep(0.5)
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run all; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.alerts", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="only faults of which an alert, or the text, matches"
    )
    wanted = re.compile(parser.parse_args(argv).only)
    missing = [f"{package} ({name})" for name, package in NEEDED.items() if shutil.which(name) is None]
    if missing:
        print(f"not found: {', '.join(missing)}. Remedy: install these packages", file=sys.stderr)
        return 1
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    seen: list[Seen] = []
    with tempfile.TemporaryDirectory(prefix="alerts-") as scratch:
        asyncio.run(run(Path(scratch), lambda text: bool(wanted.search(text)), seen))
    rows = [(each.alert, each.fault, shown(each.fired_s), shown(each.cleared_s)) for each in seen]
    Console(width=160).print(grid("", ("alert", "fault", "fired after s", "cleared after s"), rows))
    write_json(OUT / "alerts.json", {"speedup": SPEEDUP, "seen": [asdict(each) for each in seen]})
    left = alert_names() - {each.alert for each in seen}
    if left:
        print(f"not played: {', '.join(sorted(left))}")
    wrong = [each for each in seen if not each.good]
    for each in wrong:
        print(f"WRONG: {each.alert} did not {'fire' if each.fired_s is None else 'clear'} by: {each.fault}")
    return 1 if wrong or not seen or (left and not wanted.pattern) else 0


def shown(seconds: float | None) -> str:
    """Seconds, or that there are none."""
    return "-" if seconds is None else f"{seconds:.0f}"


def alert_names() -> set[str]:
    """Names of all shipped alerts."""
    groups = (group for _, text in rule_files() for group in text["groups"])
    return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


def rule_files() -> list[tuple[str, Any]]:
    """Shipped files of rules, by name."""
    return [(path.name, yaml.safe_load(path.read_text())) for path in sorted((PROMETHEUS / "rules").glob("*.yml"))]


def shortened(rule: Mapping[str, Any]) -> dict[str, Any]:
    """A rule whose `for:`, windows and offsets are divided by SPEEDUP; a window stays at least WINDOW_S long."""

    def scaled(match: re.Match[str]) -> str:
        seconds = int(match[2]) * UNIT_S[match[3]] / SPEEDUP
        return f"{match[1]}{max(1, round(max(seconds, WINDOW_S)))}s"

    made = {**rule, "expr": DURATION.sub(scaled, rule["expr"])}
    if "for" in rule:
        made["for"] = f"{round(int(rule['for'][:-1]) * UNIT_S[rule['for'][-1]] / SPEEDUP * 1e3)}ms"
    return made


def config(scratch: Path, metrics: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Configuration of Prometheus with the shortened rules."""
    rules = scratch / "rules"
    rules.mkdir()
    for name, found in rule_files():
        for group in found["groups"]:
            group["rules"] = [shortened(rule) for rule in group["rules"]]
        (rules / name).write_text(yaml.safe_dump(found))
    made = product_jobs(metrics)
    made["global"] |= dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{SCRAPE_S}s")
    return made | {"rule_files": [str(rules / "*.yml")]}


async def run(scratch: Path, wanted: Callable[[str], bool], seen: list[Seen]) -> None:
    """Play every wanted fault: the lanes of each world at once, the faults of a lane one after the other."""
    with chaos_clock.stepped_clocks(scratch / "clock"):
        for number, (running, lanes) in enumerate(alerts_faults.WORLDS):
            chosen = [[fault for fault in lane if any(map(wanted, (fault.what, *fault.alerts)))] for lane in lanes]
            if not any(chosen):
                continue
            folder = scratch / str(number)
            folder.mkdir()
            async with AsyncExitStack() as stack:
                world = await stack.enter_async_context(running(folder))
                prometheus = stack.enter_context(ExitStack())
                url = await asyncio.to_thread(
                    prometheus.enter_context, running_prometheus(folder, config(folder, world.metrics), OUT)
                )
                async with asyncio.TaskGroup() as group:
                    for lane in chosen:
                        group.create_task(play(lane, world, Watch(url), seen))


async def play(lane: Sequence[Fault], world: World, watch: Watch, seen: list[Seen]) -> None:
    """Play faults one after the other."""
    for fault in lane:
        alerts = {name: {"alertname": name, **labels} for name, labels in fault.alerts.items()}
        for name, labels in alerts.items():
            if await watch.until(labels, fires=name == NEVER_CLEARS) is None:
                print(f"WRONG: {name} {'does not fire' if name == NEVER_CLEARS else 'fires'} before: {fault.what}")
        print(f"{fault.what}: begins", flush=True)
        fired: dict[str, float | None] = dict.fromkeys(alerts)
        try:
            await world.settled()
            async with fault.make(world):
                during = {name: labels for name, labels in alerts.items() if name not in fault.afterwards}
                fired |= await seconds(watch, during, fires=True)
            fired |= await seconds(
                watch, {name: labels for name, labels in alerts.items() if name in fault.afterwards}, fires=True
            )
        except (TrefoilError, RedisError, AssertionError, TimeoutError) as error:
            print(f"WRONG: {fault.what}: {error!r}", flush=True)
        clearing = {name: labels for name, labels in alerts.items() if name != NEVER_CLEARS}
        cleared = await seconds(watch, clearing, fires=False)
        for name in alerts:
            seen.append(one := Seen(name, fault.what, fired[name], cleared.get(name)))
            print(f"{fault.what}: {name} fired {shown(one.fired_s)}, cleared {shown(one.cleared_s)}", flush=True)


async def seconds(watch: Watch, alerts: Mapping[str, Mapping[str, str]], *, fires: bool) -> dict[str, float | None]:
    """Seconds until each fires, or none does."""
    return dict(zip(alerts, await asyncio.gather(*(watch.until(each, fires) for each in alerts.values())), strict=True))


if __name__ == "__main__":
    raise SystemExit(main())

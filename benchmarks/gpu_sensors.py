"""What NVML tells of one NVIDIA GPU beside work that is known, by the power agent's own reading code; torch works.

Run: `python -m benchmarks.gpu_sensors --out gpu_sensors.json` (two minutes, GPU otherwise idle). It measures how often
the energy counter moves and what it says beside the integral of power; what GPM calls busy at known duty cycles; power
at rest without and with a context, and how it falls after work; what each call costs; whether our own process is
listed. The report of `trefoil node doctor --json` is in it. Settings of the GPU are read and never changed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from power_agent.devices.gpm import Gpm
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory
from power_agent.doctor.gpus import check_gpus
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import WallClock

CLOCK: Final = WallClock()
DUTIES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
SIDE: Final = 8192  # of the matrices
UNIT_S: Final = 0.005  # of work
SETTLE_S: Final = 1.0  # power and clocks follow a new duty cycle for a while
FALLING_S: Final = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0)
POLL_S: Final = 0.002
CALLS: Final = 200


class Worker:
    """A separate process that fills the GPU with matrix products, and holds a context as long as it lives."""

    def __init__(self) -> None:
        command = (sys.executable, "-m", "benchmarks.gpu_sensors", "--work")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked, self._answers = self._process.stdin, self._process.stdout
        self.pid = int(self._answers.readline())  # it is ready

    def begin(self, duty: float, seconds: float) -> None:
        """Begin to work for that share of so many seconds."""
        print(duty, seconds, file=self._asked, flush=True)

    def busy_share(self) -> float:
        """Busy share of the work that began last, once it has ended."""
        return float(self._answers.readline())

    def end(self) -> None:
        """End the process, and with it the context."""
        self._asked.close()
        self._process.wait()


def work() -> None:
    """Be the worker: lines of (duty, seconds) in, busy shares out; units of some `UNIT_S`."""
    import torch

    a = torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16)

    def unit(repeats: int) -> float:
        begun_s = CLOCK.monotonic_s()
        for _ in range(repeats):
            torch.mm(a, a)
        torch.cuda.synchronize()
        return CLOCK.monotonic_s() - begun_s

    unit(1)
    repeats = max(1, round(20 * UNIT_S / unit(20)))
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        duty, seconds = map(float, line.split())
        begun_s, busy_s = CLOCK.monotonic_s(), 0.0
        while (elapsed_s := CLOCK.monotonic_s() - begun_s) < seconds:
            if busy_s < duty * elapsed_s:
                busy_s += unit(repeats)
            else:
                CLOCK.block(POLL_S)
        print(busy_s / elapsed_s, flush=True)


def watched(inventory: Inventory, device: str, seconds: float) -> dict[str, Any]:
    """Counter and power for so many seconds: [W] by both, how often the counter moves [ms]; least, median, highest."""
    trail: list[tuple[float, float, float]] = []
    end_s = CLOCK.monotonic_s() + seconds
    while CLOCK.monotonic_s() < end_s:
        energy_j = inventory.energy_j(device) or 0.0
        trail.append((CLOCK.monotonic_s(), energy_j, inventory.power_w(device) or 0.0))
        CLOCK.block(POLL_S)
    moved = [now for before, now in pairwise(trail) if now[1] != before[1]]
    gaps_ms = [(b[0] - a[0]) * 1e3 for a, b in pairwise(moved)]
    inside = [reading for reading in trail if moved[0][0] <= reading[0] <= moved[-1][0]]
    integral_j = sum((b[0] - a[0]) * (a[2] + b[2]) / 2 for a, b in pairwise(inside))
    seconds = moved[-1][0] - moved[0][0]
    return {
        "counter_w": round((moved[-1][1] - moved[0][1]) / seconds, 2),
        "integral_w": round(integral_j / seconds, 2),
        "counter_step_ms": [round(f(gaps_ms), 2) for f in (min, statistics.median, max)],
        "power_w": [round(f([reading[2] for reading in trail]), 1) for f in (min, statistics.median, max)],
    }


def duties(inventory: Inventory, seen: ObservedDevice, worker: Worker, seconds: float) -> list[dict[str, Any]]:
    """At each duty cycle: what `watched` tells, the busy share of the work and GPM's."""
    gpm, whole = Gpm(inventory), SliceKey(seen.device, "whole", 0, 1)
    rows = []
    for duty in DUTIES:
        worker.begin(duty, seconds + 2 * SETTLE_S)
        CLOCK.block(SETTLE_S)
        gpm.activity(seen.device, {whole: 1})
        row = watched(inventory, seen.device, seconds)
        found = gpm.activity(seen.device, {whole: 1}).get(whole)
        shares = {"busy_share": round(worker.busy_share(), 4), "gpm_busy_share": found and round(found, 4)}
        rows.append({"duty": duty, **shares, **row})
        print(json.dumps(rows[-1]), file=sys.stderr)
    gpm.close()
    return rows


def falling(inventory: Inventory, device: str) -> list[tuple[float, float, int]]:
    """Seconds from now, power [W] and clock [MHz] then."""
    begun_s, trail = CLOCK.monotonic_s(), []
    for at_s in FALLING_S:
        CLOCK.block(max(0.0, begun_s + at_s - CLOCK.monotonic_s()))
        trail.append((at_s, round(inventory.power_w(device) or 0.0, 1), inventory.clock_mhz(device)))
    return trail


def cost_us(call: Callable[[], Any]) -> list[float]:
    """Time of a call [us]: median and highest."""
    found = []
    for _ in range(CALLS):
        begun_s = CLOCK.monotonic_s()
        call()
        found.append((CLOCK.monotonic_s() - begun_s) * 1e6)
    return [round(statistics.median(found), 1), round(max(found), 1)]


def calls(inventory: Inventory, seen: ObservedDevice) -> dict[str, list[float]]:
    """What the agent's reads cost on this driver."""
    device = seen.device
    return {
        "energy_j": cost_us(lambda: inventory.energy_j(device)),
        "power_w": cost_us(lambda: inventory.power_w(device)),
        "clock_mhz": cost_us(lambda: inventory.clock_mhz(device)),
        "temperature_c": cost_us(lambda: inventory.temperature_c(device)),
        "clock_event_reasons": cost_us(lambda: inventory.clock_event_reasons(device)),
        "pids": cost_us(lambda: inventory.pids(seen.uuid)),
        "gpm_sample": cost_us(lambda: inventory.gpm_free(inventory.gpm_sample(device, None))),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_sensors.json"))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each duty cycle")
    parser.add_argument("--work", action="store_true", help="be the worker of another process")
    options = parser.parse_args()
    if options.work:
        return work()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    inventory = Inventory("node0")
    findings, report = check_gpus(inventory, Path("/"), CLOCK.block, ("", ""), cpu_serves=False)
    found: dict[str, Any] = {"findings": [str(finding) for finding in findings], "hardware": report}
    options.out.write_text(json.dumps(found, indent=1, default=str))
    inventory.open()
    seen = inventory.list_devices()[0]
    found["type"] = seen.type
    found["without_context"] = watched(inventory, seen.device, options.seconds)
    worker = Worker()
    found["worker_listed"] = worker.pid in inventory.pids(seen.uuid)
    found["duties"] = duties(inventory, seen, worker, options.seconds)
    found["calls_us"] = calls(inventory, seen)
    worker.begin(1.0, SETTLE_S)
    worker.busy_share()
    found["after_work"] = falling(inventory, seen.device)
    worker.end()
    found["after_the_context"] = falling(inventory, seen.device)
    inventory.close()
    options.out.write_text(json.dumps(found, indent=1, default=str))
    print(json.dumps({key: value for key, value in found.items() if key not in ("hardware", "findings")}, indent=1))


if __name__ == "__main__":
    main()

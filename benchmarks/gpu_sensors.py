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
import sys
from collections.abc import Callable, Iterator
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
UNIT_S: Final = 0.005  # of work
POLL_S: Final = 0.002
CALLS: Final = 200


class Work:
    """Matrix products that fill the GPU, in units of some 5 ms."""

    def __init__(self, side: int = 8192) -> None:
        import torch

        self._torch = torch
        generator = torch.Generator("cuda").manual_seed(1)
        self._a = torch.randn(side, side, device="cuda", dtype=torch.bfloat16, generator=generator)
        self._repeats = 1
        self.unit()
        begun_s = CLOCK.monotonic_s()
        self._repeats = 20
        self.unit()
        self._repeats = max(1, round(20 * UNIT_S / (CLOCK.monotonic_s() - begun_s)))

    def unit(self) -> None:
        """One unit, to its end."""
        for _ in range(self._repeats):
            self._torch.mm(self._a, self._a)
        self._torch.cuda.synchronize()

    def play(self, duty: float, seconds: float) -> Iterator[float]:
        """Work for that share of the time; yields busy seconds so far, after each unit or rest."""
        begun_s, busy_s = CLOCK.monotonic_s(), 0.0
        while (now_s := CLOCK.monotonic_s()) < begun_s + seconds:
            if duty >= 1.0 or busy_s < duty * (now_s - begun_s):
                self.unit()
                busy_s += CLOCK.monotonic_s() - now_s
            else:
                CLOCK.block(POLL_S)
            yield busy_s


def rest(seconds: float) -> Iterator[float]:
    """Nothing, looked at now and then."""
    begun_s = CLOCK.monotonic_s()
    while CLOCK.monotonic_s() < begun_s + seconds:
        CLOCK.block(POLL_S)
        yield 0.0


def watched(inventory: Inventory, device: str, steps: Iterator[float]) -> dict[str, Any]:
    """Counter and power while the steps go on: [J], [W], steps of the counter [ms], busy share of the work."""
    trail: list[tuple[float, float, float]] = []
    worked_s = 0.0
    for busy_s in steps:
        worked_s = busy_s
        trail.append((CLOCK.monotonic_s(), inventory.energy_j(device) or 0.0, inventory.power_w(device) or 0.0))
    moved = [now for before, now in pairwise(trail) if now[1] != before[1]]
    gaps_ms = [(b[0] - a[0]) * 1e3 for a, b in pairwise(moved)]
    seconds, joules = moved[-1][0] - moved[0][0], moved[-1][1] - moved[0][1]
    inside = [reading for reading in trail if moved[0][0] <= reading[0] <= moved[-1][0]]
    integral_j = sum((b[0] - a[0]) * (a[2] + b[2]) / 2 for a, b in pairwise(inside))
    return {
        "seconds": round(trail[-1][0] - trail[0][0], 3),
        "busy_share": round(worked_s / (trail[-1][0] - trail[0][0]), 4),
        "counter_w": round(joules / seconds, 2),
        "integral_w": round(integral_j / seconds, 2),
        "counter_step_ms": [round(f(gaps_ms), 2) for f in (min, statistics.median, max)],
        "power_w": [round(f([reading[2] for reading in trail]), 1) for f in (min, statistics.median, max)],
    }


def duties(inventory: Inventory, seen: ObservedDevice, work: Work, seconds: float) -> list[dict[str, Any]]:
    """At each duty cycle: what `watched` tells, and GPM's busy share by second."""
    gpm, whole = Gpm(inventory), SliceKey(seen.device, "whole", 0, 1)
    rows = []
    for duty in DUTIES:
        steps = work.play(duty, seconds) if duty else rest(seconds)
        for _ in work.play(duty, 1.0) if duty else rest(1.0):
            pass  # power and clocks follow the new duty for a while
        gpm.activity(seen.device, {whole: 1})
        row = {"duty": duty, **watched(inventory, seen.device, steps)}
        found = gpm.activity(seen.device, {whole: 1}).get(whole)
        rows.append({**row, "gpm_busy_share": None if found is None else round(found, 4)})
        print(json.dumps(rows[-1]), file=sys.stderr)
    gpm.close()
    return rows


def falling(inventory: Inventory, device: str, work: Work) -> list[tuple[float, float]]:
    """Seconds after the end of work, and power then [W]."""
    for _ in work.play(1.0, 3.0):
        pass
    end_s, trail = CLOCK.monotonic_s(), []
    for at_s in (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0):
        CLOCK.block(max(0.0, end_s + at_s - CLOCK.monotonic_s()))
        trail.append((at_s, round(inventory.power_w(device) or 0.0, 1)))
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
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    inventory = Inventory("node0")
    findings, report = check_gpus(inventory, Path("/"), CLOCK.block, ("", ""), cpu_serves=False)
    found: dict[str, Any] = {"findings": [str(finding) for finding in findings], "hardware": report}
    options.out.write_text(json.dumps(found, indent=1, default=str))
    inventory.open()
    seen = inventory.list_devices()[0]
    found["type"] = seen.type
    found["without_context"] = watched(inventory, seen.device, rest(options.seconds))
    work = Work()
    found["own_process_listed"] = os.getpid() in inventory.pids(seen.uuid)
    found["duties"] = duties(inventory, seen, work, options.seconds)
    found["falling"] = falling(inventory, seen.device, work)
    found["calls_us"] = calls(inventory, seen)
    inventory.close()
    options.out.write_text(json.dumps(found, indent=1, default=str))
    print(json.dumps({key: value for key, value in found.items() if key not in ("hardware", "findings")}, indent=1))


if __name__ == "__main__":
    main()

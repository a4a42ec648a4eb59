"""`make bench-jobs`: jobs that can wait in five zones' real years: grams of each rule, and of perfect knowledge.

Equal work, deadlines and capacity for all: each hour a rule says how many items of each job run; what is due by its end
runs in any case; awake devices are filled first, then whole devices are woken. Counted is what jobs add: active joules,
idle power above sleep of woken devices, starts, and moving items to another zone. `perfect` is a linear program with
the true carbon, load and jobs of all hours and fractions of devices: a bound from below that no rule reaches.
"""

import argparse
import json
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.jobs_world import (
    DATA,
    FAMILY,
    GPUS,
    IDLE_W,
    PAIRS,
    ZONES,
    World,
    Zone,
    cleanest_third,
    item,
    items,
    trace,
    wake_j,
    world,
)
from controller.jobs.core import rules
from controller.jobs.core.rules import CarbonScaler, Rule
from controller.planners.exact.milp import Limits, Program
from trefoil.cli.demo.results import git_commit, machine
from trefoil.core.jobs.planned import PendingJob, Slot
from trefoil.core.units import HOUR_S, grams
from trefoil.runtime.clock import WallClock

SHARES: Final = (0.1, 0.3, 0.5)
DEADLINES_H: Final = (4, 12, 24)
MIDDLE: Final = (0.3, 12)
MOVED_J: Final = 1.0  # an item of 150 kB there, its result back: 0.002 kWh a GB, an assumption
BLOCK_H, EVERY_H = 14 * 24, 91 * 24  # a fortnight of each quarter
CRUMB_H: Final = 1e-3  # device hours: what rounding to items may add up to
RULES: Final[Mapping[str, Callable[[], Rule]]] = {
    **rules.RULES,
    "carbon_scaler_j": lambda: CarbonScaler(joules=True),
}
WITHIN_PCT: Final = 8.0  # aim: the mean distance to perfect knowledge
OUT: Final = Path("out/bench/jobs.json")


@dataclass(slots=True)
class Played:
    """What a rule's hours took. Hours are device hours."""

    grams: float = 0.0
    hours: float = 0.0
    late_h: float = 0.0
    """Overdue, counted each hour until it is done."""
    moved_h: float = 0.0
    woken_h: float = 0.0


@dataclass(slots=True)
class _Fleet:
    """Devices of one zone while hours are played."""

    world: World
    woken: int = 0
    idle_h: float = 0.0
    room_h: float = 0.0
    run_h: float = 0.0

    def begin(self, hour: int) -> None:
        self.idle_h, asleep = self.world.free(self.world.load[hour])
        self.room_h, self.run_h = self.idle_h + asleep, 0.0

    def end(self, hour: int, played: Played) -> None:
        """Count the grams of what ran in the hour."""
        woken = math.ceil(max(0.0, self.run_h - self.idle_h) - CRUMB_H)  # a few items over fit on those awake
        active_j = self.run_h * HOUR_S / item().device_s * item().active_j
        added_j = woken * IDLE_W * HOUR_S + max(0, woken - self.woken) * wake_j()
        played.grams += grams(active_j + added_j, self.world.carbon[hour], 1.0)
        played.hours, played.woken_h, self.woken = played.hours + self.run_h, played.woken_h + woken, woken


def play(worlds: Sequence[World], rule: Rule, deadline_h: int, knows: str = "forecast") -> Played:
    """Play hours in which a job arrives in every zone, to be complete in so many hours, and a rule decides.

    With several zones a job may run in all of them. `knows`: see `World.slots`.
    """
    fleets = {one.zone: _Fleet(one) for one in worlds}
    moved_j = MOVED_J if len(worlds) > 1 else 0.0
    jobs: dict[str, PendingJob] = {}
    played, hours = Played(), min(one.hours for one in worlds)
    arrive = hours - deadline_h  # all of the work ends with the hours
    for hour in range(hours):
        for one in worlds if hour < arrive else ():
            zones = (one.zone, *(other.zone for other in worlds if other is not one))
            name, due_s = f"{one.zone}-{hour}", (hour + deadline_h) * HOUR_S
            jobs[name] = PendingJob(name, FAMILY, items(one.arriving[hour]), due_s, zones=zones, transfer_j=moved_j)
        for fleet in fleets.values():
            fleet.begin(hour)
        waiting = sorted(jobs.values(), key=lambda job: job.complete_by_s)
        last = max((math.ceil(job.complete_by_s / HOUR_S) for job in waiting), default=hour)
        slots = [s for f in fleets.values() for s in f.world.slots(hour, max(1, last - hour), f.woken, knows)]
        _run(jobs, fleets, waiting, _now(rule, waiting, slots, hour * HOUR_S) if jobs else {}, hour, played)
        for fleet in fleets.values():
            fleet.end(hour, played)
    played.late_h += sum(job.items_left for job in jobs.values()) * item().device_s / HOUR_S
    return played


def _now(
    rule: Rule, jobs: Sequence[PendingJob], slots: Sequence[Slot], now_s: float
) -> Mapping[tuple[str, str], float]:
    """Items that a rule runs in the slots that have begun, by (job, zone)."""
    found = Counter[tuple[str, str]]()
    for one in rule(jobs, slots, now_s).portions:
        if one.starts_at_s <= now_s:
            found[one.job_id, one.zone] += one.items  # type: ignore[assignment]
    return found


def _run(
    jobs: dict[str, PendingJob],
    fleets: Mapping[str, _Fleet],
    waiting: Sequence[PendingJob],
    wanted: Mapping[tuple[str, str], float],
    hour: int,
    played: Played,
) -> None:
    """Run what is wanted in an hour, the earliest deadline first, and all that is due by its end."""
    item_h = item().device_s / HOUR_S
    for job in waiting:
        left, due = job.items_left, job.complete_by_s <= (hour + 1) * HOUR_S
        for zone in job.zones:
            fleet = fleets[zone]
            room = int((fleet.room_h - fleet.run_h) / item_h + CRUMB_H)
            asked = left if due and zone == job.zones[-1] else round(wanted.get((job.job_id, zone), 0.0))
            count = min(left, room, asked)
            fleet.run_h, left = fleet.run_h + count * item_h, left - count
            if zone != job.zones[0] and count:
                played.moved_h += count * item_h
                played.grams += grams(count * job.transfer_j, fleet.world.carbon[hour], 1.0)
        if due:
            played.late_h += left * item_h
        if left:
            jobs[job.job_id] = replace(job, items_left=left)
        else:
            del jobs[job.job_id]


def perfect(one: World, deadline_h: int) -> float | None:
    """Grams of the best plan of all hours, with everything known before; None: not all can be in time."""
    program, item_h = Program(), item().device_s / HOUR_S
    before_waiting = before_awake = None
    arrive = one.hours - deadline_h
    arriving = [items(amount) * item_h for amount in one.arriving[:arrive]] + [0.0] * deadline_h
    for hour, carbon in enumerate(one.carbon):
        active_g, idle_g = (grams(of_j, carbon, 1.0) for of_j in (item().active_j / item_h, IDLE_W * HOUR_S))
        idle_h, asleep = one.free(one.load[hour])
        filled = program.variable(active_g, 0.0, idle_h)
        woken = program.variable(active_g + idle_g, 0.0, asleep)
        starts = program.variable(grams(wake_j(), carbon, 1.0), 0.0, GPUS)
        waiting = program.variable(0.0, 0.0, sum(arriving[max(0, hour - deadline_h + 2) : hour + 1]))
        held = [(before_waiting, -1.0)] if before_waiting is not None else []
        program.row([(waiting, 1.0), (filled, 1.0), (woken, 1.0), *held], low=arriving[hour], high=arriving[hour])
        awake = [(before_awake, -1.0)] if before_awake is not None else []
        program.row([(woken, 1.0), (starts, -1.0), *awake], high=0.0)
        before_waiting, before_awake = waiting, woken
    found = program.solve(Limits())
    return None if found is None else found.objective


def blocks(one: World, whole_year: bool) -> list[World]:
    """Parts of the year that are played."""
    if whole_year:
        return [one]
    return [one.part(first, BLOCK_H) for first in range(0, one.hours - BLOCK_H + 1, EVERY_H)]


def case(zone: Zone, share: float, deadline_h: int, whole_year: bool) -> dict[str, Any]:
    """All rules in one zone: grams, overdue hours, and what knowledge is worth."""
    found: dict[str, Any] = {"zone": zone.name, "share": share, "deadline_h": deadline_h}
    parts = blocks(world(zone, share), whole_year)

    def row(rule: str, knows: str = "forecast") -> dict[str, float]:
        played = [play([part], RULES[rule](), deadline_h, knows) for part in parts]
        sums = {name: sum(getattr(one, name) for one in played) for name in ("grams", "late_h", "woken_h", "hours")}
        return {name: round(float(value), 3) for name, value in sums.items()}

    found["rules"] = {rule: row(rule) for rule in RULES}
    if (share, deadline_h) == MIDDLE:
        found["knows"] = {knows: row("planned", knows) for knows in ("none", "truth")}
    known = [perfect(part, deadline_h) for part in parts]
    found["perfect_g"] = round(sum(one for one in known if one is not None), 3) if None not in known else None
    return found


def pair(zones: tuple[Zone, Zone], whole_year: bool) -> dict[str, Any]:
    """Two zones whose jobs may run in both, against each for itself; at the middle share and deadline."""
    share, deadline_h = MIDDLE
    worlds = [blocks(world(zone, share), whole_year) for zone in zones]
    alone = [play([part], RULES["planned"](), deadline_h) for parts in worlds for part in parts]
    both = [play(parts, RULES["planned"](), deadline_h) for parts in zip(*worlds, strict=True)]
    return {
        "zones": [zone.name for zone in zones],
        "alone_g": round(float(sum(one.grams for one in alone)), 3),
        "together_g": round(float(sum(one.grams for one in both)), 3),
        "late_h": round(float(sum(one.late_h for one in (*alone, *both))), 3),
        "moved_pct": 100 * float(sum(one.moved_h for one in both) / sum(one.hours for one in both)),
    }


def main() -> None:
    """Play everything; the summary as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="whole years, instead of a fortnight of each quarter")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if not DATA.is_dir():
        raise SystemExit(f"no {DATA}: set TREFOIL_DATA to the evaluation data")
    began_s = WallClock().monotonic_s()
    found: dict[str, Any] = {
        "command": "make bench-jobs" + (" ARGS=--whole" if args.whole else ""),
        "commit": git_commit(),
        "machine": machine(),
        "thirds": {zone.name: cleanest_third(trace(zone)[1]) for zone in ZONES},
        "cases": [],
        "pairs": [],
    }
    for zone in ZONES:
        print(f"{zone.name}: the cleanest third of hours lies {found['thirds'][zone.name]:.1f} % below the day's mean")
        for share in SHARES:
            for deadline_h in DEADLINES_H:
                found["cases"].append(case(zone, share, deadline_h, args.whole))
                print(f"{zone.name} {share:.0%} {deadline_h} h:", figures(found["cases"][-1]), flush=True)
                _write(found, args.out)
    for zones in PAIRS:
        found["pairs"].append(pair(zones, args.whole))
        print(found["pairs"][-1], flush=True)
    found["took_s"] = round(WallClock().monotonic_s() - began_s)
    _write(found, args.out)
    print(f"written to {args.out}")
    if wrong := missed(found["cases"]):
        raise SystemExit("missed: " + "; ".join(wrong))


def _write(found: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def saved_pct(row: Mapping[str, Any], rule: str) -> float:
    """Grams of jobs that the plan saves against a rule [%]."""
    return float(100 * (1 - row["rules"]["planned"]["grams"] / row["rules"][rule]["grams"]))


def distance_pct(row: Mapping[str, Any], knows: str = "") -> float:
    """How far the plan, told something else where that is named, is above perfect knowledge [%]."""
    used = row["knows"][knows] if knows else row["rules"]["planned"]
    return float(100 * (used["grams"] / row["perfect_g"] - 1))


def figures(row: Mapping[str, Any]) -> str:
    """A case in a line."""
    saved = ", ".join(f"{saved_pct(row, rule):+.1f} % to {rule}" for rule in RULES if rule != "planned")
    return f"{saved}; {distance_pct(row):.1f} % above perfect; late {row['rules']['planned']['late_h']:.2f} h"


def missed(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Aims that these cases miss. Where `at_once` is in time, capacity sufficed: no order has more in time."""
    mean = statistics.fmean(distance_pct(row) for row in rows)
    found = [f"{mean:.1f} % above perfect in the mean"] if mean > WITHIN_PCT else []
    late = [row for row in rows if row["rules"]["planned"]["late_h"] and not row["rules"]["at_once"]["late_h"]]
    return found + [f"{row['zone']}: late at {row['share']:.0%}, {row['deadline_h']} h" for row in late]


if __name__ == "__main__":
    main()

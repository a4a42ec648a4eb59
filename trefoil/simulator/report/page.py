"""The page of a simulated run: what it missed, its numbers by family, its series and its decisions."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import matplotlib

from trefoil.core.units import HOUR_S
from trefoil.page import Card, page, svg_of
from trefoil.simulator.report.result import Result
from trefoil.simulator.scenario.schema import Scenario

EFFECTS = {
    "reconfigure": "other slices, variants or devices",
    "reroute": "other shares, the same slices",
}


def result_page(scenario: Scenario, found: Result, about: Mapping[str, Any]) -> str:
    """HTML of a run's result. `about`: where it was made."""
    summary = found.summary
    devices = Counter(kind for node in scenario.nodes for _ in range(node.count) for kind in node.devices)
    fleet = " and ".join(f"{count} × {kind}" for kind, count in devices.items())
    missed = [line for name, family in summary.families.items() for line in family.outcome(name).misses]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": summary.scenario}):
        figure = svg_of(found.plot())
    unit, unit_s = ("h", HOUR_S) if summary.duration_s >= 2 * HOUR_S else ("min", 60.0)
    decisions = [
        (f"{one['at_s'] / unit_s:.2f}", one["trigger"], one["why"], EFFECTS[one["effect"]])
        for one in found.decisions
        if one["effect"] in EFFECTS and one["at_s"] >= 0
    ]
    cards = [
        *([Card("Missed", lines=missed, alert=True)] if missed else []),
        Card(f"{summary.scenario} under {summary.policy}", found.columns, found.rows(), found.caption.splitlines()),
        Card("Over time, simulated", figure=figure),
        Card("Decisions, and why", (f"at, {unit}", "cause", "why", "what changed"), decisions),
    ]
    return page(
        f"{summary.policy}, simulated",
        f"{fleet}, {summary.duration_s / unit_s:.4g} {unit} of simulated time.",
        "No Triton, GPU or request was real. Planners, routers and queues are those of a live system, in simulated "
        "time, on the profiles that the scenario names. Joules and grams compare policies; they measure no hardware.",
        cards,
        {**about, "seed": summary.seed, "the same as data": "result.json and series.csv next to this file"},
    )

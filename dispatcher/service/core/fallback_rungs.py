"""What stands in for what is away: one named rung for each that a dispatcher can lose. Serving continues on all of
them.

Source: DESIGN section 5 (everything degrades by named rungs), CONTRACTS section 3 (what happens when a key is lost).
Data: since when Redis has not answered, whether the plan came from disk, who holds the controller's lease. Also how old
    each node's status and the rates of receipts are.
Decision: which rungs are in force, and in words what serves instead.
Formulation: redis, disk, controller, agent, feed, lengths, plan; each is in force or not, none hides another.
Deviations: while Redis is away nothing is known of who writes to it: only its own rung is said then, and what is old.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

CAUSES: Final = ("redis", "disk", "controller", "agent", "feed", "lengths", "plan")


@dataclass(frozen=True, slots=True)
class Dependencies:
    """State of what a dispatcher depends on. Ages are seconds. `stale_receipts`: what receipts say of their rates.
    `lengths_instead`: why lengths of answers are not predicted. `plan_refused`: why the plan in Redis is refused."""

    redis_away_s: float = 0.0
    from_disk: bool = False
    planned: bool = False
    controller: str = ""
    stale_nodes: Mapping[str, float] = field(default_factory=dict)
    stale_receipts: tuple[str, ...] = ()
    lengths_instead: str = ""
    plan_refused: str = ""


def active_rungs(dependencies: Dependencies) -> dict[str, str]:
    """Fallback rungs in force: cause to what serves instead; empty when nothing is away."""
    found = {}
    if dependencies.redis_away_s:
        found["redis"] = (
            f"Redis has not answered for {dependencies.redis_away_s:.0f} s: the last good table and the last shares of "
            f"credits stay in force, load windows are kept"
        )
    if dependencies.from_disk:
        found["disk"] = "the table is the one on disk: each of its slices is served once a probe has found it"
    if dependencies.planned and not dependencies.controller and not dependencies.redis_away_s:
        found["controller"] = "no controller leads: the last plan stays in force"
    if dependencies.stale_nodes:
        nodes = ", ".join(f"{node} for {age_s:.0f} s" for node, age_s in sorted(dependencies.stale_nodes.items()))
        found["agent"] = f"no status of {nodes}: its slices are served as long as probes from here find them"
    if dependencies.stale_receipts:
        found["feed"] = f"receipts are carried on: {', '.join(dependencies.stale_receipts)}"
    if dependencies.lengths_instead:
        found["lengths"] = dependencies.lengths_instead
    if dependencies.plan_refused:
        found["plan"] = f"the last good plan stays in force: {dependencies.plan_refused}"
    return found

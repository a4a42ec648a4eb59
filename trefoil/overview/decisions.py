"""Decisions as rows: what started each, what became of it, and why."""

from collections.abc import Sequence
from typing import Any, Final

from trefoil.core.plan import DecisionRecord, Rollout

MADE: Final = ("reconfigure", "reroute")  # effects of a decision that put a plan in force
ENDS: Final = {
    "done": "carried out",
    "halted": "halted",
    "rolled_back": "rolled back",
    "superseded": "superseded",
}  # of a rollout, by its state


def decision_rows(records: Sequence[DecisionRecord], rollout: Rollout) -> list[dict[str, Any]]:
    """Rows of decisions: id, time, trigger, plan that it made (if it made one), its outcome, and why.

    A later decision says in its record how far the rollout was that it met; `rollout` says it of the last plan.
    """
    made = [record for record in records if record.versions.get("effect") in MADE]
    rows = []
    for record in records:
        revision = record.revision
        came, plan = record.versions.get("outcome", "not known").replace("_", " "), ""
        if record in made:
            plan = f"{revision.epoch}.{revision.number}"
            after = next((r for r in made if r.revision > revision), None)
            came = _came_of(record, after, rollout)
        rows.append(
            {
                "id": record.id,
                "at_s": record.at_s,
                "trigger": record.trigger,
                "outcome": record.versions.get("outcome", ""),
                "plan": plan,
                "came_of_it": came,
                "why": record.why,
            }
        )
    return rows


def _came_of(record: DecisionRecord, after: DecisionRecord | None, rollout: Rollout) -> str:
    """What became of the plan of a decision, of which `after` made the next one."""
    epoch, number = record.revision.epoch, record.revision.number
    if (rollout.target.epoch, rollout.target.number) == (epoch, number):
        state = rollout.state.name.lower()
    elif after is not None and (after.revision.epoch, after.revision.number) == (epoch, number + 1):
        state = after.versions.get("rollout_before", "")
    else:
        return "followed by a plan of an operator, a restart or a retry"
    if after is not None and state not in ENDS:
        return "superseded"
    return ENDS.get(state, "under way")

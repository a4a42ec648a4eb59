"""Take a recorded decision again: same view, seed, planner and memory of it; the plan's digest must be the same.

A step of an exploration is one decision: the candidate that was asked for, or the plan that ended it.

`trefoil replay` prints what `replay` returns. The view and the seed are in the record; the plan that was made lies
beside the record on the controller's disk and is only needed to show a difference.
"""

import difflib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from controller.core.decide import as_live, ask, think
from trefoil.core import errors
from trefoil.core.brains import Planner, PlanView
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.core.plan_check import plan_digest
from trefoil.runtime import codec

DIFF_LINES_MAX = 60


@dataclass(frozen=True, slots=True)
class Replayed:
    """Whether a decision came out the same; `diff` shows where not, line by line."""

    id: str
    trigger: str
    equal: bool
    recorded: str
    again: str
    why: str
    diff: tuple[str, ...] = ()


def replay(record: DecisionRecord, planner: Planner, made: Plan | None = None) -> Replayed:
    """Decide again on the recorded view and compare.

    Raises:
        errors.InvalidInput: the record's view is not one that this version can read.
    """
    recorded = record.versions.get("plan", "")
    if record.wall_limit_hit:
        why = "the live decision ran into the wall limit and kept the last plan: nothing to compare"
        return Replayed(record.id, record.trigger, True, recorded, "", why)
    live, memory = as_live(planner), record.versions.get("memory")
    if live is not None and memory:
        live.recall(json.loads(memory))
    call = ask if record.versions.get("call") == "ask" else think
    step = call(codec.from_json(PlanView, record.view_json), planner, record.seed)
    again = plan_digest(step.plan) if step.plan else ""
    if again == recorded:
        return Replayed(record.id, record.trigger, True, recorded, again, step.why)
    diff = tuple(_diff(made, step.plan)) if made is not None else ()
    return Replayed(record.id, record.trigger, False, recorded, again, step.why, diff)


def records(folder: Path) -> Iterator[tuple[DecisionRecord, Plan | None]]:
    """All decisions of a controller's `decisions` folder, oldest first.

    Raises:
        errors.InvalidInput: no such folder, or a file that is not a decision.
    """
    if not folder.is_dir():
        raise errors.InvalidInput(
            "no such folder", field="decisions", value=str(folder), remedy="name <state>/decisions of a controller"
        )
    for path in sorted(p for p in folder.glob("*.json") if not p.name.endswith(".plan.json")):
        record = codec.from_json(DecisionRecord, path.read_text(encoding="utf-8"))
        beside = path.with_name(path.name.removesuffix(".json") + ".plan.json")
        made = codec.from_json(Plan, beside.read_text(encoding="utf-8")) if beside.exists() else None
        yield record, made


def _diff(recorded: Plan, again: Plan | None) -> Iterator[str]:
    """Unified difference of the two plans as JSON."""
    after = _lines(again) if again else []
    found = difflib.unified_diff(_lines(recorded), after, "recorded", "replayed", lineterm="", n=1)
    for count, line in enumerate(found):
        if count == DIFF_LINES_MAX:
            yield "... (more differences)"
            return
        yield line


def _lines(plan: Plan) -> list[str]:
    return json.dumps(codec.to_plain(plan), indent=1, sort_keys=True).splitlines()

"""`trefoil replay`: recorded decisions, taken again from what was known then. Works on a stopped system too."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controller import records as brain
from controller.planning import planner_of, with_preset
from trefoil.core.brains import Planner
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.core.plan import DecisionRecord, Plan
from trefoil.core.policies import chosen, policy
from trefoil.runtime import codec


def replay(decision: str, state_dir: Path) -> list[brain.Replayed]:
    """One decision (an id, or a file of <state>/controller/decisions), or all that are kept.

    Raises:
        NotFound: no such decision.
        InvalidInput: no decisions are kept there, or a file is none.
    """
    file = Path(decision) if decision.endswith(".json") else None
    found = list(
        _from_file(file) if file is not None else brain.stored_decisions(state_dir / "controller" / "decisions")
    )
    if decision and file is None:
        found = [(record, made) for record, made in found if record.id == decision]
    if not found:
        raise NotFound(
            "no such decision",
            field="decision",
            value=decision or str(state_dir),
            remedy="trefoil state dump decisions",
        )
    return [brain.replay(record, _planner(record), made) for record, made in found]


def lines(result: brain.Replayed) -> Iterator[str]:
    """One decision in words, with the difference when there is one."""
    verdict = "same plan" if result.equal else f"ANOTHER PLAN: {result.recorded or 'none'} -> {result.again or 'none'}"
    yield f"{result.id} ({result.trigger}): {verdict}; {result.why}"
    yield from result.diff


def to_json(result: brain.Replayed) -> dict[str, Any]:
    """As one JSON object."""
    return {name: getattr(result, name) for name in brain.Replayed.__dataclass_fields__}


def _planner(record: DecisionRecord) -> Planner:
    """The planner that took it, with the preset and the settings of then."""
    row = with_preset(policy(record.policy), record.versions.get("preset", ""))
    given = json.loads(record.versions.get("parts", "{}"))
    return planner_of("", chosen(row, {"planner": record.versions.get("planner", "")}, given))


def _from_file(path: Path) -> list[tuple[DecisionRecord, Plan | None]]:
    try:
        text = path.read_text()
    except OSError as error:
        raise InvalidInput(
            f"cannot be read ({error})", field="decision", value=str(path), remedy="a file of controller/decisions"
        ) from error
    return [(codec.from_json(DecisionRecord, text), None)]

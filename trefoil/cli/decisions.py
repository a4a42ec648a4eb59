"""Commands about deciding: ask for a new plan, look at one decision, follow a rollout."""

from typing import Annotated, Any

import typer

from trefoil.cli.asking import DEFAULT_STATE_DIR, ask, planned
from trefoil.cli.attached import Attached, as_json
from trefoil.cli.output import AsJson, StateDir, console, grid, print_json
from trefoil.core.plan import DecisionRecord, Plan, Rollout
from trefoil.runtime import codec


def replan(
    cause: Annotated[
        str, typer.Option(help="Pretend that this trigger fired (carbon, load, slo ...); default: operator.")
    ] = "",
    why: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Decide now, whatever the triggers say, and show what came of it. Modes, freeze and pin hold as ever."""
    from protos.controller.v1 import controller_pb2

    request = controller_pb2.ReplanRequest(cause=cause, why=why)
    answer = ask(state_dir, lambda system: system.ask("Replan", request))
    found = {
        "decision": answer.decision_id,
        "outcome": answer.outcome,
        "effect": answer.effect,
        "why": answer.why,
        "revision": as_json(answer.revision),
    }
    if as_json_:
        print_json(found)
        return
    revision = answer.revision
    console().print(f"decision {answer.decision_id}: {answer.outcome} ({answer.effect})", markup=False)
    console().print(f"plan in force: {revision.epoch}.{revision.number}")
    console().print(f"why: {answer.why}", markup=False)


def rollout(state_dir: StateDir = DEFAULT_STATE_DIR, as_json_: AsJson = False) -> None:
    """Show how far the rollout is that leads to the plan in force."""
    from protos.controller.v1 import controller_pb2

    answer = ask(state_dir, lambda system: system.ask("GetRollout", controller_pb2.GetRolloutRequest()))
    now: Rollout = codec.from_proto(answer.rollout)
    if as_json_:
        print_json({"rollout": as_json(now), "plan": as_json(answer.plan)})
        return
    out = console()
    target = now.target
    out.print(
        f"rollout of plan {target.epoch}.{target.number}: {now.state.name.lower()}, step {now.step} of {now.steps}"
    )
    if now.moving:
        out.print(f"moving: {', '.join(key.name for key in now.moving)}", markup=False)
    for family, floor in sorted(now.capacity_floor_per_s.items()):
        out.print(f"capacity never below {floor:.1f}/s for {family}")
    out.print(f"spent: {now.spent_j:.0f} J")
    if now.why:
        out.print(f"why: {now.why}", markup=False)


def show_decision(decision_id: str, state_dir: str, as_json_: bool) -> None:
    """One decision that is kept ("last" = the newest): trigger, outcome, what was planned, and why."""
    from protos.controller.v1 import controller_pb2

    wanted = "" if decision_id == "last" else decision_id

    async def fetch(system: Attached) -> Any:
        return await system.ask("GetDecision", controller_pb2.GetDecisionRequest(id=wanted))

    answer = ask(state_dir, fetch)
    record: DecisionRecord = codec.from_proto(answer.decision)
    made: Plan | None = codec.from_proto(answer.made) if answer.HasField("made") else None
    if as_json_:
        print_json({"decision": as_json(record), "plan": as_json(made) if made is not None else None})
        return
    out = console()
    out.print(f"decision {record.id} of policy {record.policy}, trigger {record.trigger}", markup=False)
    out.print(f"outcome: {record.versions.get('outcome', '-')} ({record.versions.get('effect', '-')})", markup=False)
    out.print(f"took {record.solve_ms:.0f} ms" + (", hit the wall limit" if record.wall_limit_hit else ""))
    if made is not None:
        out.print(grid("Planned", ("device", "target", "slices"), planned(made)))
    out.print(f"why: {record.why}", markup=False)
    out.print(f"take it again with `trefoil replay {record.id}`", markup=False)

"""Commands about decisions: the rollout under way, one decision, where a request would go, decisions replayed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from protos.controller.v1 import controller_pb2
from trefoil.cli.options import HERE, SystemAddress, of_system
from trefoil.cli.output import AsJson, as_json, grid, plan_table, respond, slow
from trefoil.cli.system_client import ControllerClient, call_system, channel_to, make_channel
from trefoil.core.errors import InvalidInput, NotFound, SettingError, system_error
from trefoil.core.plan import DecisionRecord, Plan, Rollout
from trefoil.core.policies import chosen, policy
from trefoil.core.units import format_time
from trefoil.overview.decisions import decision_rows
from trefoil.runtime import codec
from trefoil.runtime.config import parse_pairs
from trefoil.runtime.files import NotPlain, read_plain
from trefoil.runtime.state_files import BYTES_MAX

if TYPE_CHECKING:
    from controller.loop.decision_records import Replayed
    from trefoil.core.brains import Planner


@of_system
def rollout(where: SystemAddress = HERE, as_json_: AsJson = False) -> None:
    """Show how far the rollout is that leads to the plan in force."""
    answer = call_system(where, lambda system: system.plan())
    now: Rollout = codec.from_proto(answer.rollout)
    target, floors = now.target, sorted(now.capacity_floor_per_s.items())
    respond(
        as_json_,
        {"rollout": as_json(now), "plan": as_json(answer.plan.revision)},
        f"rollout of plan {target.epoch}.{target.number}: {now.state.name.lower()}, step {now.step} of {now.steps}",
        *([f"moving: {', '.join(key.name for key in now.moving)}"] if now.moving else []),
        *(f"capacity never below {floor:.1f}/s for {family}" for family, floor in floors),
        f"spent: {now.spent_j:.0f} J",
        *([f"why: {now.why}"] if now.why else []),
    )


def show_decision(decision_id: str, where: SystemAddress, as_json_: bool) -> None:
    """One decision that is kept ("last" = the newest): trigger, outcome, what was planned, and why."""
    record, made = _kept("" if decision_id == "last" else decision_id, where)
    respond(
        as_json_,
        {"decision": as_json(record), "plan": as_json(made) if made is not None else None},
        f"decision {record.id} of policy {record.policy}, trigger {record.trigger}",
        f"outcome: {record.versions.get('outcome', '-')} ({record.versions.get('effect', '-')})",
        f"took {record.solve_ms:.0f} ms" + (", hit the wall limit" if record.wall_limit_hit else ""),
        *([plan_table("Planned", made)] if made is not None else []),
        f"why: {record.why}",
        f"take it again with `trefoil replay {record.id}`",
    )


def _kept(decision: str, where: SystemAddress) -> tuple[DecisionRecord, Plan | None]:
    """Decision that a controller keeps ("" = the newest), and the plan that it made."""
    request = controller_pb2.GetDecisionRequest(id=decision)
    answer = call_system(where, lambda system: system.call("GetDecision", request))
    return codec.from_proto(answer.decision), codec.from_proto(answer.made) if answer.HasField("made") else None


def show_decisions(since_s: float, where: SystemAddress, as_json_: bool) -> None:
    """Decisions since a time [UTC s], oldest first: what started each, its outcome, and why."""

    async def fetch(system: ControllerClient) -> tuple[list[DecisionRecord], Any]:
        return await system.decisions(since_s), await system.plan()

    records, answer = call_system(where, fetch)
    rows = decision_rows(records, codec.from_proto(answer.rollout))
    shown = decisions_table(rows) if rows else f"no decision since {format_time(since_s)}"
    respond(as_json_, {"since_s": since_s, "decisions": rows}, shown)


def decisions_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Table of rows of `decision_rows`."""
    cells = [
        (one["id"], format_time(round(one["at_s"])), one["trigger"], one["plan"] or "-", one["came_of_it"], one["why"])
        for one in rows
    ]
    return grid("Decisions", ("decision", "at", "trigger", "plan", "outcome", "why"), cells)


@of_system
def explain_request(
    params: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Parameters of the request, e.g. trefoil_min_accuracy=0.95 trefoil_class=gold priority=1.",
        ),
    ] = None,
    family: Annotated[str, typer.Option(help="Family; default: the one that is served.")] = "",
    dispatcher: Annotated[
        str,
        typer.Option(
            "--dispatcher", envvar="TREFOIL_DISPATCHER", metavar="HOST:PORT", help="Its admin port, with --controller."
        ),
    ] = "",
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Show to which slice the dispatcher would give a request now, how every other stands, and why."""
    wanted = parse_pairs("NAME=VALUE", params or ())
    if where.controller and not dispatcher:
        raise SettingError(
            "none is named", field="--dispatcher", remedy="give the host:port of a dispatcher's admin port"
        )

    async def ask(system: ControllerClient) -> Any:
        if dispatcher or system.local is None:
            channel = channel_to(dispatcher, where)
        else:
            channel = make_channel(system.local.launch.addresses["dispatcher"], token=system.local.token)
        async with channel:
            return await system.explain_request(channel, await system.family(family), wanted)

    answer = call_system(where, ask)
    state = f"router {answer.router}, {answer.waiting} waiting, table {answer.table.epoch}.{answer.table.number}"
    rows = [
        (
            one.target.slice.device,
            one.target.slice.slice_type,
            one.target.variant,
            f"{one.target.accuracy:.4f}" if one.target.accuracy else "-",
            f"{100 * one.target.weight:.1f} %",
            f"{one.in_flight}/{one.target.credits}",
            f"{one.score:.2f}" if one.eligible else "-",
            one.why,
        )
        for one in answer.targets
    ]
    columns = ("device", "slice", "variant", "accuracy", "share", "taken", "score", "why")
    respond(as_json_, _explanation(answer), answer.why, state, grid("Targets, best first", columns, rows))


def _explanation(answer: Any) -> dict[str, Any]:
    """The answer as plain JSON values; a score is null where the target cannot have the request at once."""
    return {
        "why": answer.why,
        "router": answer.router,
        "waiting": answer.waiting,
        "table": codec.to_plain(codec.from_proto(answer.table)),
        "targets": [
            {
                "target": codec.to_plain(codec.from_proto(one.target)),
                "eligible": one.eligible,
                "score": one.score if one.eligible and one.score != float("inf") else None,
                "in_flight": one.in_flight,
                "why": one.why,
            }
            for one in answer.targets
        ],
    }


@of_system
@slow
def replay(
    decision: Annotated[
        str,
        typer.Argument(
            help="Decision id, or a file from <state>/decisions; default: all kept, with --controller the newest."
        ),
    ] = "",
    own: Annotated[
        list[str] | None,
        typer.Option(help="module:Class or module:ROW of your own that a record names and this command may import."),
    ] = None,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Take recorded decisions again from what was known then, and compare the plans. Exit code 1 when one differs."""
    mine, folder = own or (), Path(where.state_dir)
    results = replay_kept(decision, where, mine) if where.controller else replay_decisions(decision, folder, mine)
    lines = (line for result in results for line in _replay_lines(result))
    respond(as_json_, [asdict(result) for result in results], *lines)
    if not all(result.equal for result in results):
        raise typer.Exit(1)


def replay_kept(decision: str, where: SystemAddress, own: Sequence[str] = ()) -> "list[Replayed]":
    """Replay one decision (an id, "" = the newest) that a controller elsewhere keeps.

    Raises:
        NotFound: no such decision.
    """
    from controller.loop import decision_records

    record, made = _kept(decision, where)
    return [decision_records.replay(record, _planner_of(record, own), made)]


def replay_decisions(decision: str, state_dir: Path, own: Sequence[str] = ()) -> "list[Replayed]":
    """Replay one decision (an id, or a file of <state>/controller/decisions), or all that are kept.

    Raises:
        NotFound: no such decision.
        InvalidInput: no decisions are kept there, or a file is none.
    """
    from controller.loop import decision_records

    file = Path(decision) if decision.endswith(".json") else None
    found = list(
        _from_file(file)
        if file is not None
        else decision_records.stored_decisions(state_dir / "controller" / "decisions")
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
    return [decision_records.replay(record, _planner_of(record, own), made) for record, made in found]


def _replay_lines(result: "Replayed") -> Iterator[str]:
    """One replayed decision, and the difference where there is one."""
    verdict = "same plan" if result.equal else f"ANOTHER PLAN: {result.recorded or 'none'} -> {result.again or 'none'}"
    yield f"{result.id} ({result.trigger}): {verdict}; {result.why}"
    yield from result.diff


def _planner_of(record: DecisionRecord, own: Sequence[str]) -> "Planner":
    """The planner that took it, with the preset and the settings of then. A record imports nothing by itself."""
    from controller.planners.policy_parts import planner_of, presets_of, with_preset

    for column, name in (("policy", record.policy), ("planner", record.versions.get("planner", ""))):
        if ":" in name and name not in own:
            remedy = f"give --own {name}, if that code is yours"
            raise SettingError("is not imported because a record names it", field=column, value=name, remedy=remedy)
    row = chosen(policy(record.policy), {"planner": record.versions.get("planner", "")}, {})
    preset = record.versions.get("preset", "")
    row = with_preset(row, preset) if preset in presets_of(row) else row  # older records may name one without effect
    return planner_of("", chosen(row, {}, codec.parse_json(record.versions.get("parts", "{}"))))


def _from_file(path: Path) -> list[tuple[DecisionRecord, Plan | None]]:
    try:
        text = read_plain(path, BYTES_MAX).decode()
    except (OSError, NotPlain, UnicodeDecodeError) as error:
        remedy = "name a file of controller/decisions"
        raise system_error(InvalidInput, error, "be read", path, field="decision", remedy=remedy) from error
    return [(codec.from_json(DecisionRecord, text), None)]

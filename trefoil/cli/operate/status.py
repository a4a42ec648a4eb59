"""Commands that show a running system: what runs, the plan in force, what stands in Redis."""

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.table import Table

from trefoil.cli.carbon.client import parse_moment
from trefoil.cli.guarded import Guarded
from trefoil.cli.operate.decisions import show_decision, show_decisions
from trefoil.cli.operate.overview import (
    carbon_lines,
    devices_table,
    gather_overview,
    jobs_lines,
    receipt_lines,
    saving_lines,
    served_tables,
    trouble_lines,
)
from trefoil.cli.options import HERE, SystemAddress, of_system
from trefoil.cli.output import (
    DEFAULT_STATE_DIR,
    AsJson,
    StateDir,
    as_json,
    grid,
    plan_table,
    print_json,
    respond,
    show,
    writing,
)
from trefoil.cli.run.state_directory import StatePaths
from trefoil.cli.system_client import ControllerClient, call_system, connect_system
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, CarbonScores
from trefoil.core.common import KeptFile, Lease
from trefoil.core.demand import LoadForecast, LoadWindow, ScaleSignal, TableAck
from trefoil.core.energy import EnergySample
from trefoil.core.errors import SettingError
from trefoil.core.fleet import NodeStatus
from trefoil.core.jobs.planned import OpenJobs, PlannedJobs
from trefoil.core.objective import ActMode, Objective, TenantRungs, objective_text
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Rollout, Route
from trefoil.overview.budgets import BUDGETS_UNKNOWN, budget_line
from trefoil.overview.served import order_lines
from trefoil.overview.troubles import nodes_of
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import replace_files
from trefoil.runtime.security.plan_keys import PlanKeys

if TYPE_CHECKING:
    from trefoil.runtime.state import State

state = typer.Typer(cls=Guarded, no_args_is_help=True, help="What the services tell each other through Redis.")

# Types of Redis values by key (docs/state.md), longest prefix first; what is listed in neither table is shown as text.
VALUES: Final[Mapping[str, type]] = {
    "carbon:now:": CarbonReading,
    "carbon:forecast:": CarbonForecast,
    "carbon:ratio:": CarbonRatio,
    "carbon:scores:": CarbonScores,
    "kept:": KeptFile,
    "lease:": Lease,
    "objective:": Objective,
    "plan:node:": NodePlan,
    "plan": Plan,
    "rollout": Rollout,
    "tenant_rungs": TenantRungs,
    "node:": NodeStatus,
    "ack:": TableAck,
    "forecast:load:": LoadForecast,
    "signal:scale:": ScaleSignal,
    "jobs:open:": OpenJobs,
    "jobs:plan": PlannedJobs,
}
STREAMS: Final[Mapping[str, type]] = {
    "carbon:history:": CarbonReading,
    "decisions": DecisionRecord,
    "demand:": LoadWindow,
    "energy:": EnergySample,
    "load:": LoadWindow,
}


@of_system
def status(where: SystemAddress = HERE, as_json_: AsJson = False) -> None:
    """Show what runs and what it costs: services, GPUs and slices, carbon now, each family's service, the saving."""
    found = call_system(where, gather_overview)
    if as_json_:
        print_json(found)
        return
    rest = f", HTTP on {found['rest']}" if found["rest"] else ""
    serving = (
        f"serving on {found['inference']}{rest}" if found["inference"] else f"{len(found['workers'])} workers serve"
    )
    if "unknown" in found:
        show(f"{found['cluster']}: {serving}; the rest is not known: {found['unknown']}")
    else:
        held = "".join(f", {word}" for word in ("frozen", "pinned", "exploring") if found[word])
        show(f"{found['cluster']}: mode {found['mode']}{held}, rollout {found['rollout']}; {serving}")
    if found["page"]:
        show(f"page: {found['page']}")
    rows = [(n, "yes" if ok else "NO", found["metrics"].get(n, "-")) for n, ok in found["services"].items()]
    show(grid("Services", ("service", "healthy", "metrics"), rows), *trouble_lines(found, WallClock().now_s()))
    if "unknown" in found:
        return
    show(*map(devices_table, nodes_of(found)), *served_tables(found))
    wanted = [objective_text(codec.from_plain(Objective, one)) for one in found["objectives"]]
    wanted += [f"fleet: {found['max_watts']:g} W at most"] if found["max_watts"] else []
    budgets = found["budgets"]
    wanted += [BUDGETS_UNKNOWN] if budgets is None else [budget_line(row) for row in budgets]
    rest_lines = [*order_lines(found), *carbon_lines(found), *saving_lines(found), *receipt_lines(found)]
    show(*wanted, *found["overrides"], *rest_lines, *jobs_lines(found, WallClock().now_s()))


@of_system
def plan(
    family: Annotated[str, typer.Option(help="Explain this family; default: the one that is served.")] = "",
    decision: Annotated[
        str, typer.Option(help="Show this decision instead, carried out or not; `last` is the newest.")
    ] = "",
    since: Annotated[
        str, typer.Option(help="List the decisions since then instead: 90min, 2h, 7d ago, or an ISO 8601 time.")
    ] = "",
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Show the plan in force and why it is what it is. Its --json can be given to `trefoil pin`."""
    if decision:
        show_decision(decision, where, as_json_)
        return
    if since:
        show_decisions(parse_moment(since, "--since", WallClock().now_s()), where, as_json_)
        return

    async def fetch(system: ControllerClient) -> tuple[Any, Any]:
        return await system.plan(), await system.explain(await system.family(family))

    answer, why = call_system(where, fetch)
    current: Plan = codec.from_proto(answer.plan)
    document = {
        "plan": as_json(current),
        "rollout": as_json(answer.rollout),
        "mode": ActMode(answer.mode).name.lower(),
        "frozen": answer.frozen,
        "pinned": answer.pinned,
        "why": why.why,
        "trigger": why.trigger,
        "expected": as_json(why.expected),
        "advice": why.advice,
        "advised": as_json(why.advised) if why.HasField("advised") else None,
        "replans": dict(why.replans_by_cause),
        "reconfigurations": dict(why.reconfigurations_by_cause),
        "exploration": {field.name: getattr(why.exploration, field.name) for field in why.exploration.DESCRIPTOR.fields}
        if why.HasField("exploration")
        else None,
    }
    revision = current.revision
    respond(
        as_json_,
        document,
        f"plan {revision.epoch}.{revision.number} of policy {current.policy}, planned for: {why.trigger}",
        plan_table("Devices", current),
        *map(_route_table, current.routes),
        f"why: {why.why}",
        *([f"degraded: {current.degraded}"] if current.degraded else []),
        *([f"not carried out: {why.advice}"] if why.advice else []),
        *filter(None, [why.exploration.text]),
    )


def _route_table(route: Route) -> Table:
    rows = [
        (t.slice.device, t.slice.slice_type, t.variant, f"{100 * t.weight:.1f} %", "draining" if t.draining else "")
        for t in route.targets
    ]
    return grid(f"Route of {route.family}", ("device", "slice", "variant", "share", ""), rows)


@state.command("dump")
def state_dump(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so, e.g. node: or plan.")] = "",
    last: Annotated[int, typer.Option(help="Newest entries of each stream to show.", min=1, max=1000)] = 3,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write a file for `state restore` instead (0600).")
    ] = None,
    controller: Annotated[
        Path | None, typer.Option("--config", help="With --output: settings of the controller, which name Redis.")
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Print what stands in Redis, decoded; or write what `state restore` takes."""
    if output is not None:
        if prefix:
            raise SettingError("a dump is whole", field="PREFIX", value=prefix, remedy="leave it out")
        _write_dump(output, controller, state_dir, as_json)
        return
    if controller is not None:
        raise SettingError("goes with --output", field="--config", value=str(controller), remedy="add --output FILE")

    async def decode() -> dict[str, Any]:
        async with connect_system(Path(state_dir)) as system:
            return await decode_keys(system.state, prefix, last)

    found = asyncio.run(decode())
    respond(as_json, found, *(f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in found.items()))


def _write_dump(output: Path, controller: Path | None, state_dir: str, as_json: bool) -> None:
    from trefoil.cli.operate.state_dump import Where, dump_state

    if controller is not None:
        where = Where.by_config(controller)
    else:
        launch = StatePaths(Path(state_dir).resolve()).running()
        where = Where(launch.redis_url, launch.cluster, PlanKeys(launch.cluster))
    text, keys = asyncio.run(dump_state(where, WallClock().now_s()))
    with writing(output, "--output") as path:
        replace_files({path: text}, mode=0o600)
    _print_values({"file": str(output), "cluster": where.cluster, "keys": keys}, as_json)


@state.command("restore")
def state_restore(
    file: Annotated[Path, typer.Argument(help="File of `trefoil state dump --output`.")],
    controller: Annotated[Path, typer.Option("--config", help="Settings of the controller, which name Redis.")],
    as_json: AsJson = False,
) -> None:
    """Write a dump into a Redis without a controller's state, all or nothing. Controllers that start then with an empty
    state_dir continue from it.
    """
    from trefoil.cli.operate.state_dump import Where, read_dump, restore_state

    where = Where.by_config(controller)
    entries = read_dump(file, where)
    left = asyncio.run(restore_state(entries, where))
    _print_values({"cluster": where.cluster, "keys": len(entries) - len(left), "left_as_they_are": left}, as_json)


def _print_values(values: dict[str, Any], as_json: bool) -> None:
    respond(as_json, values, *(f"{name}: {value}" for name, value in values.items()))


async def decode_keys(state: "State", prefix: str, last: int) -> dict[str, Any]:
    """Values of all keys that begin so, decoded, by key; of streams the newest entries."""
    found: dict[str, Any] = {}
    for key in await state.names(state.keys.prefix + prefix):
        short = key.removeprefix(state.keys.prefix)
        value_type, stream_type = _type_of(VALUES, short), _type_of(STREAMS, short)
        if value_type is not None:
            value: Any = await state.get(key, value_type)
            found[short] = None if value is None else as_json(value)
        elif stream_type is not None:
            entries: list[tuple[str, Any]] = await state.tail(key, stream_type, last)
            found[short] = [as_json(entry) for _, entry in entries]
        else:
            found[short] = await state.raw(key, last)
    return found


def _type_of(table: Mapping[str, type], key: str) -> type | None:
    for prefix, kind in table.items():
        if key == prefix or (prefix.endswith(":") and key.startswith(prefix)):
            return kind
    return None

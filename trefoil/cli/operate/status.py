"""Commands that show a running system: what runs, the plan in force, what stands in Redis."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from trefoil.cli.operate.decisions import show_decision
from trefoil.cli.output import (
    DEFAULT_STATE_DIR,
    AsJson,
    StateDir,
    as_json,
    console,
    grid,
    plan_rows,
    print_json,
    slices_text,
)
from trefoil.cli.run import services
from trefoil.cli.run.state_directory import Failing, StatePaths
from trefoil.cli.system_client import SystemClient, call_system
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading, CarbonScores
from trefoil.core.common import Lease
from trefoil.core.demand import LoadForecast, LoadWindow, ScaleSignal, TableAck
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import MISSING_MODEL, NodeStatus
from trefoil.core.objective import ActMode, Objective
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Rollout, RolloutState
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

# Types of Redis values by key (docs/state.md), longest prefix first; what is listed in neither table is shown as text.
VALUES: Final[Mapping[str, type]] = {
    "carbon:now:": CarbonReading,
    "carbon:forecast:": CarbonForecast,
    "carbon:ratio:": CarbonRatio,
    "carbon:scores:": CarbonScores,
    "lease:": Lease,
    "objective:": Objective,
    "plan:node:": NodePlan,
    "plan": Plan,
    "rollout": Rollout,
    "node:": NodeStatus,
    "ack:": TableAck,
    "forecast:load:": LoadForecast,
    "signal:scale:": ScaleSignal,
}
STREAMS: Final[Mapping[str, type]] = {
    "carbon:history:": CarbonReading,
    "decisions": DecisionRecord,
    "demand:": LoadWindow,
    "energy:": EnergySample,
    "load:": LoadWindow,
}


def status(state_dir: StateDir = DEFAULT_STATE_DIR, as_json_: AsJson = False) -> None:
    """Show what runs: services, GPUs and their slices, carbon now, mode, and the plan's revision."""

    async def gather(system: SystemClient) -> dict[str, Any]:
        launch = system.launch
        healthy = await asyncio.gather(*(services.is_serving(launch.addresses[n]) for n in services.SERVICES))
        found = {
            "cluster": launch.cluster,
            "state_dir": launch.state_dir,
            "inference": launch.addresses["inference"],
            "rest": launch.addresses.get("rest", ""),
            "services": dict(zip(services.SERVICES, healthy, strict=True)),
            "failing": {name: asdict(one) for name, one in StatePaths(Path(launch.state_dir)).failing().items()},
        }
        try:
            return found | await _gather_plan(system)
        except Unavailable as error:  # the controller or Redis is among those that fail: the rest is shown
            return found | {"unknown": str(error)}

    found = call_system(state_dir, gather)
    if as_json_:
        print_json(found)
        return
    out = console()
    rest = f", HTTP on {found['rest']}" if found["rest"] else ""
    serving = f"serving on {found['inference']}{rest}"
    if "unknown" in found:
        out.print(f"{found['cluster']}: {serving}; the rest is not known: {found['unknown']}", markup=False)
    else:
        held = "".join(f", {word}" for word in ("frozen", "pinned", "exploring") if found[word])
        out.print(f"{found['cluster']}: mode {found['mode']}{held}, rollout {found['rollout']}; {serving}")
    out.print(
        grid("Services", ("service", "healthy"), [(n, "yes" if ok else "NO") for n, ok in found["services"].items()])
    )
    for name, failing in found["failing"].items():
        out.print(_failing_text(name, Failing(**failing), WallClock().now_s()), markup=False)
    if "unknown" not in found:
        _print_plan(out, found)


async def _gather_plan(system: SystemClient) -> dict[str, Any]:
    """What the controller and Redis say.

    Raises:
        Unavailable: one of them does not answer.
    """
    answer, readings = await system.plan(), await system.carbon()
    return {
        "mode": ActMode(answer.mode).name.lower(),
        "frozen": answer.frozen,
        "pinned": answer.pinned,
        "revision": as_json(answer.plan.revision),
        "rollout": RolloutState(answer.rollout.state).name.lower(),
        "exploring": answer.plan.exploration,
        "nodes": [as_json(node) for node in await system.nodes()],
        "carbon": [as_json(reading) for reading in readings],
        "carbon_ratio": [{"zone": one.series.zone, "ratio": await system.carbon_ratio(one)} for one in readings],
        "carbon_refused": answer.carbon_refused,
        "disk_trouble": answer.disk_trouble,
        "receipts": await system.receipts(),
    }


def _failing_text(name: str, failing: Failing, now_s: float) -> str:
    row = f" {failing.ends} times in a row, last" if failing.ends > 1 else ""
    wait_s = failing.again_at_s - now_s
    when = f"started again in {wait_s:.0f} s" if wait_s > 0 else "started again"
    return f"{name} fails: it ended{row} with {failing.how}, {when}: {failing.last_error}"


def _print_plan(out: Console, found: Mapping[str, Any]) -> None:
    nodes = [codec.from_plain(NodeStatus, node) for node in found["nodes"]]
    for node in nodes:
        out.print(_devices_table(node))
    for node in nodes:
        for entry in (entry for entry in node.missing if entry.startswith(("disk: ", MISSING_MODEL))):
            out.print(f"{node.node} cannot: {entry}", markup=False)
    for reading, known in zip(found["carbon"], found["carbon_ratio"], strict=True):
        kind = "simulated" if reading["simulated"] else reading["provider"]
        ratio = "not known, routers that go by it do without" if known["ratio"] is None else f"{known['ratio']:.2f}"
        now = f"{reading['intensity_g_per_kwh']:.0f} g/kWh ({kind})"
        out.print(f"carbon {reading['series']['zone']}: {now}; over its mean: {ratio}")
    if found["carbon_refused"]:
        out.print(f"carbon is not planned by: {found['carbon_refused']}")
    if found["disk_trouble"]:
        out.print(f"nothing new is decided: {found['disk_trouble']}", markup=False)
    for row in found["receipts"]:
        if row["residual"] is not None:
            out.print(
                f"receipts {row['family']}: {row['receipt_j']:,.0f} J of {row['active_j']:,.0f} J metered active "
                f"energy ({100 * row['residual']:+.1f} %) since the last full hour began"
            )


def plan(
    family: Annotated[str, typer.Option(help="Explain this family; default: the one that is served.")] = "",
    decision: Annotated[
        str, typer.Option(help="Show this decision instead, carried out or not; `last` is the newest.")
    ] = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Show the plan in force and why it is what it is. Its --json can be given to `trefoil pin`."""
    if decision:
        show_decision(decision, state_dir, as_json_)
        return

    async def fetch(system: SystemClient) -> tuple[Any, Any]:
        return await system.plan(), await system.explain(family or system.launch.family)

    answer, why = call_system(state_dir, fetch)
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
        "exploration": _exploration(why) if why.HasField("exploration") else None,
    }
    if as_json_:
        print_json(document)
        return
    out = console()
    revision = current.revision
    out.print(f"plan {revision.epoch}.{revision.number} of policy {current.policy}, planned for: {why.trigger}")
    out.print(grid("Devices", ("device", "target", "slices"), plan_rows(current)))
    for route in current.routes:
        rows = [
            (t.slice.device, t.slice.slice_type, t.variant, f"{100 * t.weight:.1f} %", "draining" if t.draining else "")
            for t in route.targets
        ]
        out.print(grid(f"Route of {route.family}", ("device", "slice", "variant", "share", ""), rows))
    out.print(f"why: {why.why}")
    if current.degraded:
        out.print(f"degraded: {current.degraded}")
    if why.advice:
        out.print(f"not carried out: {why.advice}")
    if why.exploration.text:
        out.print(why.exploration.text, markup=False)


def _exploration(why: Any) -> dict[str, Any]:
    """What measuring candidates on the system does now and has cost, of an Explain answer."""
    found = why.exploration
    return {field.name: getattr(found, field.name) for field in found.DESCRIPTOR.fields}


def _devices_table(node: NodeStatus) -> Any:
    title = f"{node.node}" + (" (SIMULATED GPUs)" if node.simulated else "")
    rows = [
        (d.device, d.type, d.state.name.lower(), f"{d.clock_mhz} MHz", f"{d.power_w:.0f} W", slices_text(d))
        for d in node.devices
    ]
    return grid(title, ("device", "type", "state", "clock", "power", "slices"), rows)


def state_dump(
    prefix: Annotated[str, typer.Argument(help="Only keys that begin so, e.g. node: or plan.")] = "",
    last: Annotated[int, typer.Option(help="Newest entries of each stream to show.", min=1, max=1000)] = 3,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Print what stands in Redis, decoded."""
    found = call_system(state_dir, lambda system: decode_keys(system.state, prefix, last))
    if as_json:
        print_json(found)
        return
    for key, value in found.items():
        console().print(f"{key} = {json.dumps(value, ensure_ascii=False)}", markup=False, soft_wrap=True)


async def decode_keys(state: State, prefix: str, last: int) -> dict[str, Any]:
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

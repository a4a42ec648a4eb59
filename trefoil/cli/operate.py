"""Commands that look at a running system or tell its controller something."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from trefoil.cli import services
from trefoil.cli.asking import DEFAULT_STATE_DIR, ask, describe_slices, planned
from trefoil.cli.attached import MODES, Attached, as_json, changed_objective, read_plan
from trefoil.cli.decisions import show_decision
from trefoil.cli.output import AsJson, StateDir, console, grid, print_json
from trefoil.cli.overrides import number, pairs
from trefoil.core.errors import SettingError
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import ActMode, Objective
from trefoil.core.plan import Plan, RolloutState
from trefoil.runtime import codec

OptionalFloat = Annotated[float | None, typer.Option()]


def status(state_dir: StateDir = DEFAULT_STATE_DIR, as_json_: AsJson = False) -> None:
    """Show what runs: services, GPUs and their slices, carbon now, mode, and the plan's revision."""

    async def gather(system: Attached) -> dict[str, Any]:
        healthy = await asyncio.gather(*(services.serving(system.launch.addresses[n]) for n in services.SERVICES))
        answer = await system.plan()
        return {
            "cluster": system.launch.cluster,
            "state_dir": system.launch.state_dir,
            "inference": system.launch.addresses["inference"],
            "rest": system.launch.addresses.get("rest", ""),
            "services": dict(zip(services.SERVICES, healthy, strict=True)),
            "mode": ActMode(answer.mode).name.lower(),
            "frozen": answer.frozen,
            "pinned": answer.pinned,
            "revision": as_json(answer.plan.revision),
            "rollout": RolloutState(answer.rollout.state).name.lower(),
            "exploring": answer.plan.exploration,
            "nodes": [as_json(node) for node in await system.nodes()],
            "carbon": [as_json(reading) for reading in await system.carbon()],
            "carbon_refused": answer.carbon_refused,
            "receipts": await system.receipts(),
        }

    found = ask(state_dir, gather)
    if as_json_:
        print_json(found)
        return
    out = console()
    held = "".join(f", {word}" for word in ("frozen", "pinned", "exploring") if found[word])
    rest = f", HTTP on {found['rest']}" if found["rest"] else ""
    serving = f"serving on {found['inference']}{rest}"
    out.print(f"{found['cluster']}: mode {found['mode']}{held}, rollout {found['rollout']}; {serving}")
    out.print(
        grid("Services", ("service", "healthy"), [(n, "yes" if ok else "NO") for n, ok in found["services"].items()])
    )
    for node in found["nodes"]:
        out.print(_fleet(codec.from_plain(NodeStatus, node)))
    for reading in found["carbon"]:
        kind = "simulated" if reading["simulated"] else reading["provider"]
        out.print(f"carbon {reading['series']['zone']}: {reading['intensity_g_per_kwh']:.0f} g/kWh ({kind})")
    if found["carbon_refused"]:
        out.print(f"carbon is not planned by: {found['carbon_refused']}")
    for told in found["receipts"]:
        if told["residual"] is not None:
            out.print(
                f"receipts {told['family']}: {told['receipt_j']:,.0f} J of {told['active_j']:,.0f} J metered active "
                f"energy ({100 * told['residual']:+.1f} %) since the last full hour began"
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

    async def fetch(system: Attached) -> tuple[Any, Any]:
        return await system.plan(), await system.explain(family or system.launch.family)

    answer, why = ask(state_dir, fetch)
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
        "exploration": explored(why) if why.HasField("exploration") else None,
    }
    if as_json_:
        print_json(document)
        return
    out = console()
    revision = current.revision
    out.print(f"plan {revision.epoch}.{revision.number} of policy {current.policy}, planned for: {why.trigger}")
    out.print(grid("Devices", ("device", "target", "slices"), planned(current)))
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


def explored(why: Any) -> dict[str, Any]:
    """What measuring candidates on the system does now and what it has cost; of an Explain answer."""
    found = why.exploration
    return {field.name: getattr(found, field.name) for field in found.DESCRIPTOR.fields}


def objective_set(
    family: Annotated[str, typer.Option(help="Family; default: the one that is served.")] = "",
    min_accuracy: Annotated[float | None, typer.Option(help="Accuracy floor, a fraction of 1.", min=0, max=1)] = None,
    slo_ms: Annotated[float | None, typer.Option(help="Latency objective [ms].", min=0)] = None,
    slo_percentile: Annotated[
        float | None, typer.Option(help="Percentile that must meet it, e.g. 95.", min=1, max=99.999)
    ] = None,
    lambda_weight: Annotated[
        float | None,
        typer.Option(
            "--lambda", help="Weigh carbon against accuracy (CLOVER Eq. 3), instead of a floor.", min=0, max=1
        ),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(
            "--param",
            metavar="NAME=NUMBER",
            help="A constant of the policy, e.g. accuracy_margin=0.004; 0 takes it back.",
        ),
    ] = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Change what is wanted of a family. Says so when the fleet cannot meet it; the last good plan stays then."""

    params = {name: number("--param", name, text) for name, text in pairs("--param", param).items()}

    async def change(system: Attached) -> tuple[Objective, str]:
        now = await system.objective(family or system.launch.family)
        wanted = changed_objective(
            now, min_accuracy=min_accuracy, slo_ms=slo_ms, slo_percentile=slo_percentile, lambda_weight=lambda_weight,
            params=params,
        )  # fmt: skip
        return await system.set_objective(wanted)

    stored, degraded = ask(state_dir, change)
    if as_json_:
        print_json({"objective": as_json(stored), "degraded": degraded})
        return
    console().print(_objective(stored))
    if degraded:
        console().print(f"the fleet cannot meet it: {degraded}")


def objective_show(
    family: Annotated[str, typer.Option(help="Family; default: the one that is served.")] = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Show what is wanted of a family."""
    stored = ask(state_dir, lambda system: system.objective(family or system.launch.family))
    if as_json_:
        print_json({"objective": as_json(stored)})
    else:
        console().print(_objective(stored))


def mode(
    mode_: Annotated[str, typer.Argument(metavar="observe|advise|act", help="How far the controller may go.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """observe: meter and report only; advise: plan and predict, touch nothing; act: carry plans out."""
    from protos.controller.v1 import controller_pb2

    if mode_ not in MODES:
        raise SettingError("no such mode", field="mode", value=mode_, remedy=f"one of {', '.join(MODES)}")
    request = controller_pb2.SetModeRequest(mode=f"ACT_MODE_{MODES[mode_].name}")
    answer = ask(state_dir, lambda system: system.ask("SetMode", request))
    _said({"mode": ActMode(answer.mode).name.lower()}, as_json_)


def freeze(
    off: Annotated[bool, typer.Option("--off", help="Thaw: plans may change again.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Keep the plan in force as it is; metering and reports go on. --off ends it."""
    from protos.controller.v1 import controller_pb2

    request = controller_pb2.FreezeRequest(frozen=not off)
    answer = ask(state_dir, lambda system: system.ask("Freeze", request))
    _said({"frozen": answer.frozen, "revision": as_json(answer.revision)}, as_json_)


def pin(
    file: Annotated[Path | None, typer.Argument(help="A plan as `trefoil plan --json` prints it.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Unpin: the planner decides again.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Roll a plan out from a file and keep it until the next pin, rollback, or `pin --off`."""
    from protos.controller.v1 import controller_pb2

    if off == (file is not None):
        raise SettingError("one of the two is needed", field="pin", remedy="give a FILE, or --off to unpin")
    request = controller_pb2.PinRequest(plan=codec.to_proto(read_plan(file)) if file is not None else None)
    answer = ask(state_dir, lambda system: system.ask("Pin", request))
    _said({"pinned": not off, "revision": as_json(answer.revision)}, as_json_)


def rollback(state_dir: StateDir = DEFAULT_STATE_DIR, as_json_: AsJson = False) -> None:
    """Go back to the plan before the one in force, and freeze there."""
    from protos.controller.v1 import controller_pb2

    answer = ask(state_dir, lambda system: system.ask("Rollback", controller_pb2.RollbackRequest()))
    _said({"revision": as_json(answer.revision), "why": answer.why}, as_json_)


def _said(values: dict[str, Any], as_json_: bool) -> None:
    if as_json_:
        print_json(values)
    else:
        console().print(", ".join(f"{key}: {_short(value)}" for key, value in values.items()))


def _short(value: Any) -> str:
    if isinstance(value, dict) and {"epoch", "number"} <= value.keys():
        return f"{value['epoch']}.{value['number']}"
    return str(value)


def _objective(stored: Objective) -> str:
    percentile = 100 * stored.slo_quantile
    text = f"{stored.family}: p{percentile:g} <= {stored.slo_ms:g} ms, mode {stored.mode.name.lower()}"
    text += (
        f", accuracy >= {stored.min_accuracy:.4f} over {stored.window_s:g} s, never < {stored.hard_min_accuracy:.4f}"
    )
    params = "".join(f", {name} {value:g}" for name, value in sorted(stored.params.items()))
    return text + f", lambda {stored.lambda_weight:g}{params} (number {stored.number})"


def _fleet(node: NodeStatus) -> Any:
    title = f"{node.node}" + (" (SIMULATED GPUs)" if node.simulated else "")
    rows = [
        (d.device, d.type, d.state.name.lower(), f"{d.clock_mhz} MHz", f"{d.power_w:.0f} W", describe_slices(d))
        for d in node.devices
    ]
    return grid(title, ("device", "type", "state", "clock", "power", "slices"), rows)

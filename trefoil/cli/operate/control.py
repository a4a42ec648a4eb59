"""Commands that change what the controller does: objective, mode, freeze, pin, rollback, replan."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trefoil.cli.options import parse_number, parse_pairs, read_plan
from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, as_json, console, print_json
from trefoil.cli.system_client import SystemClient, call_system
from trefoil.core.errors import SettingError
from trefoil.core.objective import ActMode, Objective, ObjectiveMode
from trefoil.runtime import codec

MODES: Final = {"observe": ActMode.OBSERVE, "advise": ActMode.ADVISE, "act": ActMode.ACT}


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

    params = {name: parse_number("--param", name, text) for name, text in parse_pairs("--param", param).items()}

    async def change(system: SystemClient) -> tuple[Objective, str]:
        now = await system.objective(family or system.launch.family)
        wanted = with_changes(
            now, min_accuracy=min_accuracy, slo_ms=slo_ms, slo_percentile=slo_percentile, lambda_weight=lambda_weight,
            params=params,
        )  # fmt: skip
        return await system.set_objective(wanted)

    stored, degraded = call_system(state_dir, change)
    if as_json_:
        print_json({"objective": as_json(stored), "degraded": degraded})
        return
    console().print(_objective_text(stored))
    if degraded:
        console().print(f"the fleet cannot meet it: {degraded}")


def objective_show(
    family: Annotated[str, typer.Option(help="Family; default: the one that is served.")] = "",
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Show what is wanted of a family."""
    stored = call_system(state_dir, lambda system: system.objective(family or system.launch.family))
    if as_json_:
        print_json({"objective": as_json(stored)})
    else:
        console().print(_objective_text(stored))


def family_load(
    family: Annotated[str, typer.Argument(help="Family.")],
    device: Annotated[str, typer.Argument(help="Device that it may use from now on, e.g. node0/gpu1.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Let a family use one more device, under a policy that shares whole devices (wattwiser)."""
    _allocate("LoadFamily", family, device, state_dir, as_json_)


def family_unload(
    family: Annotated[str, typer.Argument(help="Family.")],
    device: Annotated[str, typer.Argument(help="Device that it may use no longer.")],
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Take a device from a family, under a policy that shares whole devices (wattwiser)."""
    _allocate("UnloadFamily", family, device, state_dir, as_json_)


def _allocate(method: str, family: str, device: str, state_dir: str, as_json_: bool) -> None:
    from protos.controller.v1 import controller_pb2

    request = getattr(controller_pb2, f"{method}Request")(family=family, device=device)
    answer = call_system(state_dir, lambda system: system.call(method, request))
    shared = {one.device: one.sharing_factor for one in answer.devices}
    if as_json_:
        print_json({"family": family, "devices": shared, "degraded": answer.degraded})
        return
    console().print(f"{family} may use " + ", ".join(f"{name} (shared by {n})" for name, n in shared.items()))
    if answer.degraded:
        console().print(f"the fleet cannot meet its objective: {answer.degraded}")


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
    answer = call_system(state_dir, lambda system: system.call("SetMode", request))
    _print_values({"mode": ActMode(answer.mode).name.lower()}, as_json_)


def freeze(
    off: Annotated[bool, typer.Option("--off", help="Thaw: plans may change again.")] = False,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json_: AsJson = False,
) -> None:
    """Keep the plan in force as it is; metering and reports go on. --off ends it."""
    from protos.controller.v1 import controller_pb2

    request = controller_pb2.FreezeRequest(frozen=not off)
    answer = call_system(state_dir, lambda system: system.call("Freeze", request))
    _print_values({"frozen": answer.frozen, "revision": as_json(answer.revision)}, as_json_)


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
    answer = call_system(state_dir, lambda system: system.call("Pin", request))
    _print_values({"pinned": not off, "revision": as_json(answer.revision)}, as_json_)


def rollback(state_dir: StateDir = DEFAULT_STATE_DIR, as_json_: AsJson = False) -> None:
    """Go back to the plan before the one in force, and freeze there."""
    from protos.controller.v1 import controller_pb2

    answer = call_system(state_dir, lambda system: system.call("Rollback", controller_pb2.RollbackRequest()))
    _print_values({"revision": as_json(answer.revision), "why": answer.why}, as_json_)


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
    answer = call_system(state_dir, lambda system: system.call("Replan", request))
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


def _print_values(values: dict[str, Any], as_json_: bool) -> None:
    if as_json_:
        print_json(values)
    else:
        console().print(", ".join(f"{key}: {_value_text(value)}" for key, value in values.items()))


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and {"epoch", "number"} <= value.keys():
        return f"{value['epoch']}.{value['number']}"
    return str(value)


def _objective_text(stored: Objective) -> str:
    percentile = 100 * stored.slo_quantile
    text = f"{stored.family}: p{percentile:g} <= {stored.slo_ms:g} ms, mode {stored.mode.name.lower()}"
    text += (
        f", accuracy >= {stored.min_accuracy:.4f} over {stored.window_s:g} s, never < {stored.hard_min_accuracy:.4f}"
    )
    params = "".join(f", {name} {value:g}" for name, value in sorted(stored.params.items()))
    return text + f", lambda {stored.lambda_weight:g}{params} (number {stored.number})"


def with_changes(
    now: Objective,
    *,
    min_accuracy: float | None,
    slo_ms: float | None,
    slo_percentile: float | None,
    lambda_weight: float | None,
    params: Mapping[str, float] | None = None,
) -> Objective:
    """The stored objective with the changes of the command line; `lambda_weight` selects lambda mode. `params` are
    the policy's constants; 0 takes one back.

    Raises:
        SettingError: nothing was given, or both a floor and a lambda.
    """
    changes: dict[str, Any] = {}
    if lambda_weight is not None and min_accuracy is not None:
        raise SettingError(
            "lambda mode trades accuracy freely, a floor binds it",
            field="--lambda",
            value=lambda_weight,
            remedy="give either --lambda or --min-accuracy",
        )
    if lambda_weight is not None:
        changes |= {"lambda_weight": lambda_weight, "mode": ObjectiveMode.LAMBDA}
    if min_accuracy is not None:
        changes["min_accuracy"] = min_accuracy
        changes["hard_min_accuracy"] = min(now.hard_min_accuracy, min_accuracy)
        if now.mode is ObjectiveMode.LAMBDA:
            changes["mode"] = ObjectiveMode.BUDGET
    if slo_ms is not None:
        changes["slo_ms"] = slo_ms
    if slo_percentile is not None:
        changes["slo_quantile"] = slo_percentile / 100
    if params:
        changes["params"] = {name: value for name, value in {**now.params, **params}.items() if value}
    if not changes:
        raise SettingError(
            "nothing to change",
            field="objective set",
            remedy="give --min-accuracy, --slo-ms, --slo-percentile, --lambda or --param",
        )
    return replace(now, **changes)

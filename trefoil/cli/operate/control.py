"""Commands that change what the controller does: objective, mode, freeze, pin, rollback, replan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import typer
from pydantic import Field, model_validator

from protos.controller.v1 import controller_pb2
from trefoil.cli.guarded import Guarded
from trefoil.cli.options import HERE, SystemAddress, of_system, parse_number, read_plan
from trefoil.cli.output import AsJson, as_json, held_lines, respond
from trefoil.cli.system_client import ControllerClient, call_system
from trefoil.core.errors import InvalidInput, NotFound, SettingError, one_of
from trefoil.core.objective import NO_TOKEN_SLO, SETTING_NAMES, ActMode, Objective, ObjectiveMode, objective_text
from trefoil.runtime import codec, config
from trefoil.runtime.config import Settings, parse_pairs

objective = typer.Typer(cls=Guarded, no_args_is_help=True, help="What is wanted of families, and of the fleet.")

MODES: Final = {"observe": ActMode.OBSERVE, "advise": ActMode.ADVISE, "act": ActMode.ACT}


def fraction(value: float | None) -> float | None:
    """Value of an option that is a fraction of 1."""
    if value is not None and not 0 <= value <= 1:
        remedy = f"write {value / 100:g} for {value:g} %" if 1 < value <= 100 else "write a number from 0 to 1"
        raise SettingError("is not a fraction of 1", field="--accuracy-floor", value=value, remedy=remedy)
    return value


def _refuse_mode(value: str) -> None:
    """Refuse the old name of --type."""
    if value:
        raise SettingError("no such option", field="--mode", value=value, remedy=f"--type {value}")


TtftMs = Annotated[float | None, typer.Option(help="Objective of the time to a stream's first token [ms].", min=0)]
TpotMs = Annotated[float | None, typer.Option(help="Objective of a stream's time from token to token [ms].", min=0)]
StreamsPercentile = Annotated[
    float | None, typer.Option(help="Percentile of streams that must meet it.", min=1, max=99.999)
]
LambdaWeight = Annotated[
    float | None,
    typer.Option("--lambda", help="Weigh carbon against accuracy (CLOVER Eq. 3), instead of a floor.", min=0, max=1),
]
Params = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=NUMBER",
        help="A constant of the policy, e.g. accuracy_margin=0.004; 0 takes it back.",
    ),
]
NoSloTokens = Annotated[bool, typer.Option("--no-slo-tokens", help="Take the objectives of tokens back.")]


@objective.command("set")
@of_system
def objective_set(
    family: Annotated[str, typer.Option(help="Family; default: the one that is served.")] = "",
    accuracy_floor: Annotated[
        float | None, typer.Option(help="Accuracy floor, a fraction of 1.", callback=fraction)
    ] = None,
    slo_latency_ms: Annotated[float | None, typer.Option(help="Latency objective [ms].", min=0)] = None,
    slo_percentile: Annotated[
        float | None, typer.Option(help="Percentile that must meet it, e.g. 95.", min=1, max=99.999)
    ] = None,
    slo_ttft_ms: TtftMs = None,
    slo_ttft_percentile: StreamsPercentile = None,
    slo_tpot_ms: TpotMs = None,
    slo_tpot_percentile: StreamsPercentile = None,
    no_slo_tokens: NoSloTokens = False,
    type_: Annotated[
        str,
        typer.Option(
            "--type",
            help="What the floor binds. budget: the mean of a window; instant: every instant; lambda: nothing.",
        ),
    ] = "",
    _mode: Annotated[str, typer.Option("--mode", hidden=True, callback=_refuse_mode)] = "",
    window_s: Annotated[float | None, typer.Option(help="Window of type budget [s]; a day is 86400.", min=1)] = None,
    lambda_weight: LambdaWeight = None,
    param: Params = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Objectives of several families, and of the fleet, from TOML: all are set, or none."),
    ] = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Back to what the controller's settings say of the family.")
    ] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Change what is wanted of a family, until --reset. Says so when the fleet cannot meet it; the last good plan stays
    then.
    """
    values: dict[str, Any] = {"type": type_ or None, "window_s": window_s, "lambda_weight": lambda_weight}
    values["slo"] = {
        "percentile": slo_percentile, "latency_ms": slo_latency_ms, "ttft_ms": slo_ttft_ms,
        "ttft_percentile": slo_ttft_percentile, "tpot_ms": slo_tpot_ms, "tpot_percentile": slo_tpot_percentile,
        "tokens": False if no_slo_tokens else None,
    }  # fmt: skip
    pairs = parse_pairs("--param", param or ()).items()
    values["params"] = {name: parse_number("--param", name, text) for name, text in pairs}
    given = WantedChange(**values, accuracy=_WantedAccuracy(floor=accuracy_floor))
    asked = given != WantedChange()
    if reset and (file is not None or asked):
        raise SettingError("goes back to the settings", field="--reset", remedy="give it with --family alone")
    if file is not None:
        if family or asked:
            raise SettingError(
                "a file excludes other options", field="--file", value=str(file), remedy="give it alone, or no file"
            )
        _set_from_file(file, where, as_json_)
        return
    _set_one(family, None if reset else given, where, as_json_)


class _WantedSlo(Settings):
    percentile: float | None = Field(default=None, ge=1, le=99.999)
    latency_ms: float | None = Field(default=None, gt=0)
    ttft_ms: float | None = Field(default=None, gt=0)
    ttft_percentile: float | None = Field(default=None, ge=1, le=99.999)
    tpot_ms: float | None = Field(default=None, gt=0)
    tpot_percentile: float | None = Field(default=None, ge=1, le=99.999)
    tokens: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if self.tokens is False and (self.ttft_ms is not None or self.tpot_ms is not None):
            raise ValueError("tokens = false takes ttft_ms and tpot_ms back: give one of both")
        return self

    def changes(self) -> dict[str, float]:
        """Fields of an objective that it changes."""
        found = dict.fromkeys(asdict(NO_TOKEN_SLO), 0.0) if self.tokens is False else {}
        for setting, field, scale in (
            ("latency_ms", "slo_ms", 1.0), ("percentile", "slo_quantile", 100.0), ("ttft_ms", "ttft_ms", 1.0),
            ("ttft_percentile", "ttft_quantile", 100.0), ("tpot_ms", "tpot_ms", 1.0),
            ("tpot_percentile", "tpot_quantile", 100.0),
        ):  # fmt: skip
            if (value := getattr(self, setting)) is not None:
                found[field] = value / scale
        return found


class _WantedAccuracy(Settings):
    floor: float | None = Field(default=None, ge=0, le=1)


class WantedChange(Settings):
    """What is to be changed of one family's objective; None: nothing of it."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        **{old: f"set {new}" for old, new in SETTING_NAMES.items()},
        "slo_percentile": "set slo.percentile",
    }

    type: Literal["budget", "instant", "lambda"] | None = None
    slo: _WantedSlo = _WantedSlo()
    accuracy: _WantedAccuracy = _WantedAccuracy()
    window_s: float | None = Field(default=None, ge=1)
    lambda_weight: float | None = Field(default=None, ge=0, le=1)
    params: dict[str, float] = Field(default_factory=dict)


def _set_one(family: str, wanted: WantedChange | None, where: SystemAddress, as_json_: bool) -> None:
    """Change the objective of a family; `wanted` None: back to the settings."""

    async def change(system: ControllerClient) -> tuple[Objective, str]:
        name = await system.family(family)
        if wanted is None:
            return await system.reset_objective(name)
        return await system.set_objective(with_changes(await _before(system, name, wanted), wanted))

    stored, degraded = call_system(where, change)
    respond(as_json_, {"objective": as_json(stored), "degraded": degraded}, *_lines([stored], None, degraded))


async def _before(system: ControllerClient, family: str, wanted: WantedChange) -> Objective:
    """Objective of a family that is to be changed; of a family that has none yet, one to begin with."""
    try:
        return await system.objective(family)
    except NotFound:
        if wanted.accuracy.floor is None and wanted.lambda_weight is None:
            raise
        return Objective(family, ObjectiveMode.BUDGET)


class _WantedOfFleet(Settings):
    max_watts: float | None = Field(default=None, ge=0)


class _ObjectivesFile(Settings):
    """Objectives as `trefoil objective set --file` reads them."""

    fleet: _WantedOfFleet = _WantedOfFleet()
    families: dict[str, WantedChange] = Field(default_factory=dict)


def _set_from_file(file: Path, where: SystemAddress, as_json_: bool) -> None:
    wanted = config.load(_ObjectivesFile, file)
    if wanted == _ObjectivesFile():
        raise SettingError("says nothing", field="--file", value=str(file), remedy="add [families.NAME] or [fleet]")

    async def change(system: ControllerClient) -> Any:
        now = {each.family: each for each in (await system.objectives())[0]}
        changed = []
        for family, values in wanted.families.items():
            if family not in now:
                raise SettingError(
                    "no such family is served", field=f"families.{family}", remedy=one_of(sorted(now), family)
                )
            try:
                changed.append(with_changes(now[family], values))
            except SettingError as error:
                raise SettingError(f"family {family}: {error}") from error
        return await system.set_objectives(changed, wanted.fleet.max_watts)

    try:
        answer = call_system(where, change)
    except InvalidInput as error:
        raise SettingError(f"{file}: {error}") from error
    _print_answer(answer, as_json_)


@objective.command("show")
@of_system
def objective_show(
    family: Annotated[str, typer.Option(help="Family; default: every one.")] = "",
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Show what is wanted of the families, and of the fleet."""
    stored, max_watts = call_system(where, lambda system: system.objectives())
    known = [each.family for each in stored]
    if family and family not in known:
        raise NotFound("no such family is served", field="--family", value=family, remedy=one_of(known, family))
    stored = [each for each in stored if family in ("", each.family)]
    document = {"objectives": as_json(stored), "max_watts": max_watts or None}
    respond(as_json_, document, *_lines(stored, max_watts))


@objective.command("fleet")
@of_system
def objective_fleet(
    max_watts: Annotated[
        float | None, typer.Option(help="Cap on the planned power of all GPUs together, in the mean [W].", min=1)
    ] = None,
    no_max_watts: Annotated[bool, typer.Option("--no-max-watts", help="Take the cap away.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the cap of the controller's settings.")] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Cap the fleet's planned power, until --reset. Plans above it are refused; without an option: show the cap."""
    if no_max_watts and max_watts is not None:
        raise SettingError("one of the two", field="--max-watts", value=max_watts, remedy="drop --no-max-watts")
    if reset and (no_max_watts or max_watts is not None):
        raise SettingError("goes back to the settings", field="--reset", remedy="give it alone")
    if max_watts is None and not (no_max_watts or reset):
        _, cap = call_system(where, lambda system: system.objectives())
        _print_values({"max_watts": cap or None}, as_json_)
        return
    wanted_w = None if reset else max_watts or 0.0
    _print_answer(call_system(where, lambda system: system.set_objectives((), wanted_w, reset)), as_json_)


def _print_answer(answer: Any, as_json_: bool) -> None:
    stored = [codec.from_proto(each) for each in answer.objectives]
    document = {"objectives": as_json(stored), "max_watts": answer.max_watts or None, "degraded": answer.degraded}
    respond(as_json_, document, *_lines(stored, answer.max_watts, answer.degraded))


def _lines(stored: Sequence[Objective], max_watts: float | None, degraded: str = "") -> Iterator[str]:
    """`max_watts` None: the cap is not spoken of; 0: there is none."""
    for each in stored:
        params = "".join(f"; {name} {value:g}" for name, value in sorted(each.params.items()))
        yield f"{objective_text(each)}{params} (number {each.number})"
    if max_watts is not None:
        yield f"fleet: {max_watts:g} W at most" if max_watts else "fleet: no cap on its watts"
    if degraded:
        yield f"the fleet cannot meet it: {degraded}"


@of_system
def family_load(
    family: Annotated[str, typer.Argument(help="Family.")],
    device: Annotated[str, typer.Argument(help="Device that it may use from now on, e.g. node0/gpu1.")],
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Let a family use one more device, under a policy that shares whole devices (wattwiser)."""
    _allocate("LoadFamily", family, device, where, as_json_)


@of_system
def family_unload(
    family: Annotated[str, typer.Argument(help="Family.")],
    device: Annotated[str, typer.Argument(help="Device that it may use no longer.")],
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Take a device from a family, under a policy that shares whole devices (wattwiser)."""
    _allocate("UnloadFamily", family, device, where, as_json_)


@of_system
def family_stop(
    family: Annotated[str, typer.Argument(help="Family.")], where: SystemAddress = HERE, as_json_: AsJson = False
) -> None:
    """Take a family out of service until `family start`: its slices are freed, its requests answered NOT_FOUND."""
    _set_service("StopFamily", family, where, as_json_)


@of_system
def family_start(
    family: Annotated[str, typer.Argument(help="Family.")], where: SystemAddress = HERE, as_json_: AsJson = False
) -> None:
    """Bring a stopped family back into service, with the objective that it had."""
    _set_service("StartFamily", family, where, as_json_)


def _set_service(method: str, family: str, where: SystemAddress, as_json_: bool) -> None:
    request, stopped = getattr(controller_pb2, f"{method}Request")(family=family), method == "StopFamily"
    answer = call_system(where, lambda system: system.call(method, request))
    degraded = "" if stopped else answer.degraded
    document = {"family": family, "stopped": stopped, "held": answer.held, "degraded": degraded}
    state = f"{family} is {'out of service' if stopped else 'in service'}"
    respond(as_json_, document, state, *held_lines(answer.held), *_degraded_lines(degraded))


def _allocate(method: str, family: str, device: str, where: SystemAddress, as_json_: bool) -> None:
    request = getattr(controller_pb2, f"{method}Request")(family=family, device=device)
    answer = call_system(where, lambda system: system.call(method, request))
    shared = {one.device: one.sharing_factor for one in answer.devices}
    document = {"family": family, "devices": shared, "degraded": answer.degraded}
    uses = f"{family} may use " + ", ".join(f"{name} (shared by {n})" for name, n in shared.items())
    respond(as_json_, document, uses, *_degraded_lines(answer.degraded))


def _degraded_lines(degraded: str) -> list[str]:
    return [f"the fleet cannot meet its objective: {degraded}"] if degraded else []


@of_system
def mode(
    mode_: Annotated[
        str, typer.Argument(metavar="[observe|advise|act]", help="How far the controller may go.", show_default=False)
    ] = "",
    reset: Annotated[bool, typer.Option("--reset", help="Back to the mode of the controller's settings.")] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """observe: meter and report only; advise: plan and predict, touch nothing; act: carry plans out. It holds until
    --reset.
    """
    if reset == bool(mode_):
        raise SettingError("one of the two is needed", field="mode", remedy=f"give {', '.join(MODES)}, or --reset")
    if mode_ and mode_ not in MODES:
        raise SettingError("no such mode", field="mode", value=mode_, remedy=one_of(MODES, mode_))
    wanted = f"ACT_MODE_{MODES[mode_].name}" if mode_ else None
    request = controller_pb2.SetModeRequest(mode=wanted, reset=reset)
    answer = call_system(where, lambda system: system.call("SetMode", request))
    _print_values({"mode": ActMode(answer.mode).name.lower()}, as_json_)


@of_system
def freeze(
    off: Annotated[bool, typer.Option("--off", help="Thaw: plans may change again.")] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Keep the plan in force; metering and reports go on. --off ends it."""
    request = controller_pb2.FreezeRequest(frozen=not off)
    answer = call_system(where, lambda system: system.call("Freeze", request))
    _print_values({"frozen": answer.frozen, "revision": as_json(answer.revision)}, as_json_)


@of_system
def pin(
    file: Annotated[Path | None, typer.Argument(help="A plan as `trefoil plan --json` prints it.")] = None,
    off: Annotated[bool, typer.Option("--off", help="Unpin: the planner decides again.")] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Roll a plan out from a file and keep it until the next pin, rollback, or `pin --off`."""
    if off == (file is not None):
        raise SettingError("one of the two is needed", field="pin", remedy="give a FILE, or --off to unpin")
    request = controller_pb2.PinRequest(plan=codec.to_proto(read_plan(file)) if file is not None else None)
    answer = call_system(where, lambda system: system.call("Pin", request))
    _print_values({"pinned": not off, "revision": as_json(answer.revision)}, as_json_)


@of_system
def rollback(where: SystemAddress = HERE, as_json_: AsJson = False) -> None:
    """Go back to the plan before the one in force, and freeze there."""
    answer = call_system(where, lambda system: system.call("Rollback", controller_pb2.RollbackRequest()))
    _print_values({"revision": as_json(answer.revision), "why": answer.why}, as_json_)


@of_system
def replan(
    cause: Annotated[
        str, typer.Option(help="Pretend that this trigger fired (carbon, load, slo ...); default: operator.")
    ] = "",
    why: Annotated[str, typer.Option(help="Why, for the record.")] = "",
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Decide now, whatever the triggers say, and show the result. Modes, freeze and pin hold as ever."""
    request = controller_pb2.ReplanRequest(cause=cause, why=why)
    answer = call_system(where, lambda system: system.call("Replan", request))
    found = {"decision": answer.decision_id} | {name: getattr(answer, name) for name in ("outcome", "effect", "why")}
    respond(
        as_json_,
        found | {"revision": as_json(answer.revision)},
        f"decision {answer.decision_id}: {answer.outcome} ({answer.effect})",
        f"plan in force: {answer.revision.epoch}.{answer.revision.number}",
        f"why: {answer.why}",
    )


def _print_values(values: dict[str, Any], as_json_: bool) -> None:
    respond(as_json_, values, ", ".join(f"{key}: {_value_text(value)}" for key, value in values.items()))


def _value_text(value: Any) -> str:
    if isinstance(value, dict) and {"epoch", "number"} <= value.keys():
        return f"{value['epoch']}.{value['number']}"
    return str(value)


def with_changes(now: Objective, wanted: WantedChange) -> Objective:
    """The stored objective with what is to be changed; `lambda_weight` selects type lambda, and a floor another one.
    `params` are settings of the policy's planner; 0 takes one back.

    Raises:
        SettingError: nothing was given, or what does not go together.
    """
    changes: dict[str, Any] = {}
    floor, slo, window_s = wanted.accuracy.floor, wanted.slo, wanted.window_s
    chosen = _chosen_type(now, wanted.type, floor, wanted.lambda_weight)
    if chosen is not now.mode or wanted.type is not None:
        changes["mode"] = chosen
    if wanted.lambda_weight is not None:
        changes["lambda_weight"] = wanted.lambda_weight
    if floor is not None:
        changes["min_accuracy"] = floor
        changes["hard_min_accuracy"] = min(now.hard_min_accuracy, floor)
    if window_s is not None:
        if chosen is not ObjectiveMode.BUDGET:
            raise SettingError(
                f"type {chosen.name.lower()} has no window", field="window_s", value=window_s, remedy="--type budget"
            )
        changes["window_s"] = window_s
    changes |= slo.changes()
    if wanted.params:
        changes["params"] = {name: value for name, value in {**now.params, **wanted.params}.items() if value}
    if not changes:
        raise SettingError(
            "nothing to change",
            field="objective set",
            remedy="give --accuracy-floor, --slo-latency-ms, --slo-percentile, --slo-ttft-ms, --slo-tpot-ms, "
            "--no-slo-tokens, --type, --window-s, --lambda, --param or --file",
        )
    return replace(now, **changes)


def _chosen_type(now: Objective, wanted: str | None, floor: float | None, lambda_weight: float | None) -> ObjectiveMode:
    """Type that was chosen, or that a floor or a lambda alone choose; raises SettingError."""
    if wanted is not None:
        chosen = ObjectiveMode[wanted.upper()]
    elif lambda_weight is not None:
        chosen = ObjectiveMode.LAMBDA
    else:
        lifted = floor is not None and now.mode is ObjectiveMode.LAMBDA
        chosen = ObjectiveMode.BUDGET if lifted else now.mode
    if chosen is ObjectiveMode.LAMBDA and floor is not None:
        raise SettingError(
            "type lambda trades accuracy freely, a floor binds it", field="accuracy.floor", value=floor,
            remedy="give either a lambda or a floor",
        )  # fmt: skip
    if chosen is not ObjectiveMode.LAMBDA and lambda_weight is not None:
        name = chosen.name.lower()
        raise SettingError(f"type {name} weighs nothing", field="lambda", value=lambda_weight, remedy="--type lambda")
    return chosen

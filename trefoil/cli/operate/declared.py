"""Commands on a file that declares objectives, budgets, watt cap and mode: export, diff, apply.

The file has the words of the controller's settings: what `export` writes can also be declared there.
"""

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from pydantic import AfterValidator, Field

from controller.settings import BudgetSettings, ObjectiveSettings, act_mode_name
from protos.controller.v1 import controller_pb2
from trefoil.cli.options import HERE, SystemAddress, of_system
from trefoil.cli.output import AsJson, held_lines, print_json, respond, writing
from trefoil.cli.system_client import ControllerClient, call_system
from trefoil.core.errors import InvalidInput, SettingError
from trefoil.core.objective import ActMode, Objective
from trefoil.overview.budgets import BUDGETS_UNKNOWN
from trefoil.runtime import codec, config
from trefoil.runtime.config import Settings, to_toml

DIFFERS: Final = 1
"""Exit code of `diff` where something differs, as of `kubectl diff`."""


class DeclaredFile(Settings):
    """What a file declares; None: it leaves it as it is."""

    mode: Annotated[str, AfterValidator(act_mode_name)] | None = None
    max_watts: float | None = Field(default=None, ge=0)
    objectives: tuple[ObjectiveSettings, ...] = ()
    budgets: tuple[BudgetSettings, ...] = ()


File = Annotated[
    Path, typer.Option("--file", "-f", help="File as `trefoil export` writes it (TOML); -: standard input.")
]
Prune = Annotated[
    bool, typer.Option("--prune", help="Families that the file leaves out go out of service; budgets are cleared.")
]


@of_system
def diff(file: File, prune: Prune = False, where: SystemAddress = HERE, as_json_: AsJson = False) -> None:
    """Show what `apply` would change. Exit code 0: nothing, 1: something, 2: the file or the system cannot be used."""
    answer = _apply(file, prune, where, dry_run=True)
    _print(answer, as_json_, ["nothing differs"])
    if answer.changes:
        raise typer.Exit(DIFFERS)


@of_system
def apply(file: File, prune: Prune = False, where: SystemAddress = HERE, as_json_: AsJson = False) -> None:
    """Put objectives, budgets, watt cap and mode of a file in force, all or none. What it leaves out stays, but for
    families and budgets with --prune. Says so when the fleet cannot meet it; the last good plan stays then.
    """
    answer = _apply(file, prune, where, dry_run=False)
    held = held_lines(answer.held if answer.changes else "")
    degraded = [f"the fleet cannot meet it: {answer.degraded}"] if answer.degraded else []
    _print(answer, as_json_, ["nothing changed"], *held, *degraded)


@of_system
def export(
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print it.")] = None,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Write a file of what is in force, which `apply` and `diff` take. It holds objectives, budgets, watt cap and
    mode, in the words of the controller's settings.
    """

    async def ask(system: ControllerClient) -> tuple[list[Objective], float, int, Any]:
        budgets = await system.call_if_known("GetBudgets", controller_pb2.GetBudgetsRequest())
        return *(await system.objectives()), (await system.plan()).mode, budgets

    objectives, max_watts, mode, budgets = call_system(where, ask)
    found = {
        "mode": ActMode(mode).name.lower(),
        "max_watts": max_watts,
        "objectives": [ObjectiveSettings.of(one).model_dump(exclude_none=True) for one in objectives],
    }
    if budgets is None:
        typer.echo(BUDGETS_UNKNOWN, err=True)
    else:
        found["budgets"] = [BudgetSettings.of(codec.from_proto(one.budget)).model_dump() for one in budgets.budgets]
    if as_json_:
        print_json(found)
        return
    if output is None:
        typer.echo(to_toml(found), nl=False)
        return
    with writing(output, "--output") as path:
        path.write_text(to_toml(found), encoding="utf-8")


def _apply(file: Path, prune: bool, where: SystemAddress, *, dry_run: bool) -> Any:
    declared = config.load(DeclaredFile, file)
    if declared == DeclaredFile():
        raise SettingError(
            "declares nothing",
            field="--file",
            value=str(file),
            remedy="add [[objectives]], [[budgets]], mode or max_watts",
        )
    request = controller_pb2.ApplyRequest(
        objectives=[codec.to_proto(one.stated()) for one in declared.objectives],
        budgets=[codec.to_proto(one.stated()) for one in declared.budgets],
        max_watts=declared.max_watts,
        mode=None if declared.mode is None else f"ACT_MODE_{declared.mode.upper()}",
        prune=prune,
        dry_run=dry_run,
    )

    async def ask(system: ControllerClient) -> Any:
        # A controller without budgets skips that field in silence.
        asked = controller_pb2.GetBudgetsRequest()
        if declared.budgets and await system.call_if_known("GetBudgets", asked) is None:
            why = "unknown to this controller, which is older: nothing is changed"
            raise InvalidInput(why, field="budgets", remedy="upgrade it, or leave [[budgets]] out")
        return await system.call("Apply", request)

    try:
        return call_system(where, ask)
    except InvalidInput as error:
        raise SettingError(f"{file}: {error}") from error


def _print(answer: Any, as_json_: bool, none: list[str], *more: str) -> None:
    """Print the changes, or `none` where there are none, and more lines."""
    changes = [{"field": one.field, "now": one.now, "wanted": one.wanted} for one in answer.changes]
    lines = [f"{one.field}: {one.now} -> {one.wanted}" for one in answer.changes] or none
    respond(as_json_, {"changes": changes, "degraded": answer.degraded, "held": answer.held}, *lines, *more)

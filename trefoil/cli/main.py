"""The `trefoil` command. Each command says what it does with --help and answers in JSON with --json.

A command's module is imported when the command is called: `trefoil --help` imports none of them.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

import trefoil
from trefoil.cli.guarded import Guarded

COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    "up": (
        "run.commands:up",
        "Start Redis, the four services and a node on this machine, simulated or its own, and leave them running.",
    ),
    "down": ("run.commands:down", "Stop what `trefoil up` started; also cleans up what a killed supervisor left."),
    "status": (
        "operate.status:status",
        "Show what runs and what it costs: services, GPUs and slices, carbon now, each family's service, the saving.",
    ),
    "plan": ("operate.status:plan", "Show the plan in force and why it is what it is."),
    "top": ("operate.top:top", "Watch the running system: fleet, slices, families, carbon, plan and saving, live."),
    "report": (
        "operate.report:report",
        "Report joules and grams by family, variant and tenant, how well they are known, and the SCI of an answer.",
    ),
    "mode": (
        "operate.control:mode",
        "observe: meter and report only; advise: plan and predict, touch nothing; act: carry plans out.",
    ),
    "freeze": ("operate.control:freeze", "Keep the plan in force; metering and reports go on."),
    "pin": (
        "operate.control:pin",
        "Roll a plan out from a file and keep it until the next pin, rollback, or `pin --off`.",
    ),
    "rollback": ("operate.control:rollback", "Go back to the plan before the one in force, and freeze there."),
    "explain-request": (
        "operate.decisions:explain_request",
        "Show to which slice the dispatcher would give a request now, how every other stands, and why.",
    ),
    "replan": ("operate.control:replan", "Decide now, whatever the triggers say, and show the result."),
    "rollout": ("operate.decisions:rollout", "Show how far the rollout is that leads to the plan in force."),
    "load": (
        "load.command:load",
        "Send items open loop, check every answer, and print latency, attainment, accuracy, joules and grams.",
    ),
    "replay": (
        "operate.decisions:replay",
        "Take recorded decisions again from what was known then, and compare the plans.",
    ),
    "demo": ("demo.command:demo", "Play the same load and carbon against several policies, and report what was saved."),
    "simulate": ("simulate:simulate", "Simulate a scenario: same scenario and seed, same bytes."),
    "compare": (
        "compare:compare",
        "Compare policies: equal arrivals and carbon for each; savings with attainment and accuracy.",
    ),
    "assess": ("assess:assess", "Tell what a fleet costs in joules and grams, and what each lever would save."),
    "policy": (
        "policy:policy",
        "Show the policies, or what can be set of one: settings of its parts, with value, type and meaning.",
    ),
    "generate": ("family.verbs:old_generate", ""),
    "profile": ("family.verbs:old_profile", ""),
    "sensitivity": ("family.verbs:old_sensitivity", ""),
    "objective": ("operate.control:objective", "What is wanted of families, and of the fleet."),
    "apply": ("operate.declared:apply", "Put objectives, budgets, watt cap and mode of a file in force, all or none."),
    "diff": ("operate.declared:diff", "Show what `apply` would change."),
    "export": ("operate.declared:export", "Write a file of what is in force, which `apply` and `diff` take."),
    "budget": ("operate.budget:app", "Grams or joules that a tenant, a family or both may spend in a day."),
    "state": ("operate.status:state", "What the services tell each other through Redis."),
    "node": ("operate.node:app", "One node: its power agent, devices, clocks and joules."),
    "reproduce": ("reproduce:app", "Play a paper again in the simulator, at equal load."),
    "family": ("family.verbs:app", "Families of models: list, check, import, engine, profile, generate."),
    "carbon": ("carbon.commands:app", "Grid carbon intensity and its forecasts."),
    "forecast": ("forecasting:app", "Forecasts of load."),
    "lengths": ("lengths:app", "Lengths of generated answers, predicted."),
    "jobs": ("jobs:app", "Work that can wait: items with a deadline, run on idle slices."),
    "setup": ("setup:app", "Install what a system needs apart from this package."),
    "deploy": ("deploy.commands:app", "Deployments by Docker Compose (docs/howto/compose.md)."),
}
"""Commands and groups by name: where each is defined under `trefoil.cli`, first sentence of its help ("" = hidden)."""


class Program(Guarded):
    """The whole program: help, completion and suggestions read the table, a call imports its command."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands = {name: TyperCommand(name, help=text, hidden=not text) for name, (_, text) in COMMANDS.items()}

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, name and import_command(name), rest


def import_command(name: str) -> Any:
    """Command or group of a name of `COMMANDS`, with its module imported."""
    where, text = COMMANDS[name]
    module, _, attribute = where.partition(":")
    found = getattr(import_module(f"trefoil.cli.{module}"), attribute)
    group = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    if isinstance(found, typer.Typer):
        group.add_typer(found, name=name)
    else:
        group.command(name, hidden=not text)(found)
    return typer.main.get_group(group).commands[name]


app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Serve DNN inference for the fewest grams of CO2, inside the latency objective and above the accuracy floor.",
)


def print_version(wanted: bool) -> None:
    """Print the version and end, where that is what is wanted."""
    if wanted:
        typer.echo(f"trefoil {trefoil.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before any command."""


if __name__ == "__main__":
    app()

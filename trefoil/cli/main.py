"""The `trefoil` command. Each command says what it does with --help and answers in JSON with --json.

Imports that cost time stand inside the commands: `trefoil --help` answers at once.
"""

import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

import trefoil
from trefoil.cli import forecasting, reproduce, setup, simulate
from trefoil.cli.carbon import commands
from trefoil.cli.compare import compare
from trefoil.cli.deploy import commands as deploy
from trefoil.cli.family.commands import app as family_app
from trefoil.cli.family.profile_command import profile
from trefoil.cli.family.sensitivity_command import sensitivity
from trefoil.cli.load.command import load
from trefoil.cli.load.generate import generate
from trefoil.cli.operate import control, decisions, node, status
from trefoil.cli.operate.report import report
from trefoil.cli.operate.top import top
from trefoil.cli.options import (
    Forecaster,
    Governor,
    Planner,
    Queue,
    Router,
    Sets,
    as_moved,
    non_empty,
    of_system,
    parse_sets,
)
from trefoil.cli.output import DEFAULT_STATE_DIR, EXIT_ERROR, AsJson, Guarded, StateDir, console, print_json
from trefoil.cli.policy import policy as show_policy
from trefoil.core.errors import StartError

UP_CONFIG: Final = Path("deploy/config/up.toml")
DEMO_CONFIG: Final = Path("deploy/config/demo.toml")

app = typer.Typer(
    cls=Guarded,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Serve DNN inference for the fewest grams of CO2, inside the latency objective and above the accuracy floor.",
)
objective = typer.Typer(cls=Guarded, no_args_is_help=True, help="What is wanted of families, and of the fleet.")
state = typer.Typer(cls=Guarded, no_args_is_help=True, help="What the services tell each other through Redis.")

Config = Annotated[Path, typer.Option("--config", help="Settings file.", show_default=True)]
PortOffset = Annotated[
    int, typer.Option("--port-offset", help="Move every port by this: a second system beside a first.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", min=1, max=64, help="Dispatcher processes behind one port; default: the settings file's."
    ),
]


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


def up(
    config: Config = UP_CONFIG,
    policy: Annotated[str, typer.Option(help="Policy; default: the settings file's.")] = "",
    mode: Annotated[str, typer.Option(help="observe, advise or act; default: the settings file's.")] = "",
    planner: Planner = "",
    forecaster: Forecaster = "",
    router: Router = "",
    queue: Queue = "",
    governor: Governor = "",
    workers: Workers = None,
    port_offset: PortOffset = 0,
    sets: Sets = None,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Start Redis, the four services and a node on this machine, simulated or its own, and leave them running."""
    from trefoil.cli.run.scenario import System, load_system
    from trefoil.cli.run.services import check_served
    from trefoil.cli.run.supervisor import start_detached
    from trefoil.installation import resolve_path

    overrides = parse_sets(sets) | non_empty(policy=policy, mode=mode, planner=planner, forecaster=forecaster)
    overrides |= non_empty(router=router, queue=queue, governor=governor)
    overrides |= {"port_offset": port_offset} | ({} if workers is None else {"workers": workers})
    check_served(load_system(resolve_path(config), System, overrides))  # what is known to be wrong is said at once
    child, reading = start_detached(resolve_path(config), Path(state_dir), overrides)
    ready: dict[str, Any] = {}
    failure = ""
    try:
        with os.fdopen(reading) as pipe:
            for line in pipe:
                message = json.loads(line)
                if "say" in message and not as_json:
                    console().print(message["say"])
                failure = message.get("error", failure)
                ready = message if "ready" in message else ready
    except KeyboardInterrupt:
        typer.echo("interrupted: stopping what was started", err=True)
        os.kill(child.pid, signal.SIGTERM)
        child.wait()
        typer.echo("stopped", err=True)
        raise
    if not ready:
        child.wait()
        raise StartError(failure or f"the supervisor died; read {state_dir}/logs/supervisor.log")
    if as_json:
        print_json({"inference": ready["ready"], "first_answer_s": ready["answered_s"], "state_dir": state_dir})
    else:
        if ready["answered_s"] is None:
            console().print(f"up, and no slice serves on {ready['ready']} yet: `trefoil plan` says why")
        else:
            console().print(f"serving on {ready['ready']}: first answer {ready['answered_s']:.1f} s after the start")
        console().print("look with `trefoil status`, load it with `trefoil load`, stop it with `trefoil down`")


def down(state_dir: StateDir = DEFAULT_STATE_DIR, as_json: AsJson = False) -> None:
    """Stop what `trefoil up` started; also cleans up what a killed supervisor left."""
    from trefoil.cli.run.supervisor import stop_system

    lines: list[str] = []
    stopped = stop_system(Path(state_dir), lines.append)
    if as_json:
        print_json({"stopped": stopped, "said": lines})
    else:
        for line in [*lines, "stopped" if stopped else f"nothing runs in {state_dir}"]:
            console().print(line)


def demo(
    config: Config = DEMO_CONFIG,
    out: Annotated[Path, typer.Option(help="Folder for report.json, report.html and each run's series.")] = Path(
        "out/demo"
    ),
    policy: Annotated[
        str, typer.Option(help="Play this policy: as in deploy/config/demo-<policy>.toml, else against base.")
    ] = "",
    preset: Annotated[str, typer.Option(help="Settings of its planner, e.g. artifact; default: the paper's.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Three carbon steps instead of all: a first look.")] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Start nothing: only simulate the scenario under its seeds.")
    ] = False,
    planner: Planner = "",
    forecaster: Forecaster = "",
    router: Router = "",
    queue: Queue = "",
    governor: Governor = "",
    workers: Workers = None,
    port_offset: PortOffset = 0,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Play the same load and carbon against several policies, and report what was saved. Ends by itself."""
    from trefoil.cli.demo.run_demo import QUICK_STEPS, run_demo, simulate_only
    from trefoil.cli.run.scenario import DemoScenario, load_system, overrides_against_base
    from trefoil.installation import resolve_path

    overrides = parse_sets(sets) | {"port_offset": port_offset} | ({} if workers is None else {"workers": workers})
    overrides |= non_empty(planner=planner, forecaster=forecaster, router=router, queue=queue, governor=governor)
    if policy:
        checked, own = overrides_against_base(policy, preset), DEMO_CONFIG.with_name(f"demo-{policy}.toml")
        if config == DEMO_CONFIG and resolve_path(own).exists():
            config, checked = own, non_empty(preset=preset)
        overrides = checked | overrides
    scenario = load_system(resolve_path(config), DemoScenario, overrides)
    if quick:
        scenario = scenario.shortened(QUICK_STEPS)
    if simulated:
        simulate_only(scenario, as_json=as_json)
        return
    code = run_demo(scenario, out, as_json=as_json)
    if code:
        raise typer.Exit(code)


COMMANDS: Final[dict[str, Callable[..., None]]] = {
    "up": up,
    "down": down,
    "status": of_system(status.status),
    "plan": of_system(status.plan),
    "top": of_system(top),
    "report": of_system(report),
    "mode": of_system(control.mode),
    "freeze": of_system(control.freeze),
    "pin": of_system(control.pin),
    "rollback": of_system(control.rollback),
    "explain-request": of_system(decisions.explain_request),
    "replan": of_system(control.replan),
    "rollout": of_system(decisions.rollout),
    "load": load,
    "replay": of_system(decisions.replay),
    "demo": demo,
    "simulate": simulate.simulate,
    "compare": compare,
    "policy": show_policy,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(_command)
objective.command("set")(of_system(control.objective_set))
objective.command("show")(of_system(control.objective_show))
objective.command("fleet")(of_system(control.objective_fleet))
state.command("dump")(status.state_dump)
app.add_typer(objective, name="objective")
app.add_typer(state, name="state")
app.add_typer(node.app, name="node")
app.add_typer(reproduce.app, name="reproduce")
VERBS: Mapping[str, Callable[..., None]] = {"generate": generate, "profile": profile, "sensitivity": sensitivity}
for _name, _verb in VERBS.items():
    family_app.command(_name)(_verb)
    app.command(_name, hidden=True)(as_moved(_verb, _name, f"family {_name}"))
family_app.command("load")(of_system(control.family_load))
family_app.command("unload")(of_system(control.family_unload))
family_app.command("stop")(of_system(control.family_stop))
family_app.command("start")(of_system(control.family_start))
app.add_typer(family_app, name="family")
app.add_typer(commands.app, name="carbon")
app.add_typer(forecasting.app, name="forecast")
app.add_typer(setup.app, name="setup")
app.add_typer(deploy.app, name="deploy")

if __name__ == "__main__":
    app()

__all__ = ["EXIT_ERROR", "app"]

"""`trefoil demo`: several policies under the same load and carbon, and what was saved."""

from pathlib import Path
from typing import Annotated, Final

import typer

from trefoil.cli.options import (
    OF_THE_POLICY,
    Config,
    PortOffset,
    Sets,
    Workers,
    folder_to_write,
    non_empty,
    of_policy,
    parse_sets,
)
from trefoil.cli.output import AsJson

DEMO_CONFIG: Final = Path("deploy/config/demo.toml")


@of_policy
def demo(
    config: Config = DEMO_CONFIG,
    out: Annotated[
        Path, typer.Option(help="Folder for report.json, report.html and each run's series.", callback=folder_to_write)
    ] = Path("out/demo"),
    policy: Annotated[
        str, typer.Option(help="Play this policy: as in deploy/config/demo-<policy>.toml, else against base.")
    ] = "",
    preset: Annotated[str, typer.Option(help="Settings of its planner, e.g. artifact; default: the paper's.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Two policies, a minute each: a first look.")] = False,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Start nothing: only simulate the scenario under its seeds.")
    ] = False,
    parts: dict[str, str] = OF_THE_POLICY,
    workers: Workers = None,
    port_offset: PortOffset = 0,
    sets: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Play the same load and carbon against several policies, and report what was saved. Ends by itself."""
    from trefoil.cli.demo.run_demo import run_demo, simulate_only
    from trefoil.cli.run.scenario import DemoScenario, load_system, overrides_against_base
    from trefoil.installation import resolve_path

    overrides = parse_sets(sets) | {"port_offset": port_offset} | ({} if workers is None else {"workers": workers})
    overrides |= parts
    if policy:
        checked, own = overrides_against_base(policy, preset), DEMO_CONFIG.with_name(f"demo-{policy}.toml")
        if config == DEMO_CONFIG and resolve_path(own).exists():
            config, checked = own, non_empty(preset=preset)
        overrides = checked | overrides
    scenario = load_system(resolve_path(config), DemoScenario, overrides)
    if quick:
        scenario = scenario.shortened()
    if simulated:
        simulate_only(scenario, as_json=as_json)
        return
    code = run_demo(scenario, out, as_json=as_json)
    if code:
        raise typer.Exit(code)

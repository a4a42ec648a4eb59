"""`trefoil simulate SCENARIO.toml`: the live brains in simulated time, on simulated hardware that says so."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trefoil.cli.output import AsJson, console
from trefoil.cli.overrides import Sets, given
from trefoil.core.errors import SettingError


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, e.g. benchmarks/scenarios/digits.toml.")],
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's seed.")] = None,
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and series.csv.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the --out folder.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario: same scenario and seed, same bytes. Nothing runs but this process."""
    from trefoil.simulator.run import simulate_to
    from trefoil.simulator.scenario import Scenario

    overrides = given(sets)
    if seed is not None:
        overrides["seed"] = seed
    if resume and out is None:
        raise SettingError("where from?", field="--resume", remedy="name the folder of the interrupted run with --out")
    wanted = Scenario.load(scenario, overrides)
    found = simulate_to(wanted, out, resume=resume, bar=not as_json and sys.stderr.isatty())
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    console().print(found.table())
    if out is not None:
        console().print(f"written to {out}/result.json and {out}/series.csv")

"""`trefoil simulate SCENARIO.toml`: the live brains in simulated time, on simulated hardware that says so."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.output import AsJson, console
from trefoil.cli.overrides import Forecaster, Governor, Planner, Queue, Router, Sets, chosen, given
from trefoil.core.errors import SettingError

if TYPE_CHECKING:
    from trefoil.simulator.scenario import Scenario


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, e.g. benchmarks/scenarios/digits.toml.")],
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's seed.")] = None,
    policy: Annotated[str, typer.Option(help="Policy; default: the scenario's.")] = "",
    planner: Planner = "",
    forecaster: Forecaster = "",
    router: Router = "",
    queue: Queue = "",
    governor: Governor = "",
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json and series.csv.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint in the --out folder.")
    ] = False,
    forecasts: Annotated[
        bool, typer.Option("--forecasts", help="Compare: no carbon forecast, the feed's own, a perfect one. Six runs.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario: same scenario and seed, same bytes. Nothing runs but this process."""
    from trefoil.simulator.run import simulate_to
    from trefoil.simulator.scenario import Scenario

    overrides = given(sets)
    parts = chosen(name=policy, planner=planner, forecaster=forecaster, router=router, queue=queue, governor=governor)
    overrides |= {f"policy.{column}": name for column, name in parts.items()}
    if seed is not None:
        overrides["seed"] = seed
    if resume and out is None:
        raise SettingError("where from?", field="--resume", remedy="name the folder of the interrupted run with --out")
    wanted = Scenario.load(scenario, overrides)
    if forecasts:
        _compare(wanted, out, resume, as_json)
        return
    found = simulate_to(wanted, out, resume=resume, bar=not as_json and sys.stderr.isatty())
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    console().print(found.table())
    if out is not None:
        console().print(f"written to {out}/result.json and {out}/series.csv")


def _compare(wanted: "Scenario", out: Path | None, resume: bool, as_json: bool) -> None:
    """What forecasts of carbon intensity buy in this scenario."""
    from trefoil.simulator.forecast_value import compare_forecasts
    from trefoil.simulator.run import progress_bar

    if resume:
        raise SettingError("a comparison has no checkpoint", field="--resume", remedy="leave out --resume")
    with progress_bar(wanted.name, not as_json and sys.stderr.isatty()) as progress:
        found = compare_forecasts(wanted, progress=progress)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "forecasts.json").write_text(found.to_json(), encoding="utf-8")
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    console().print(found.table())
    if out is not None:
        console().print(f"written to {out}/forecasts.json")

"""`trefoil simulate`: a scenario in simulated time, or with other forecasts beside it."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from trefoil.cli.compare import show_comparison
from trefoil.cli.options import OF_THE_POLICY, Sets, folder_to_write, non_empty, of_policy, parse_sets
from trefoil.cli.output import AsJson, show, ticking


@of_policy
def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, or one that ships by its name: digits.")],
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's seed.")] = None,
    policy: Annotated[str, typer.Option(help="Policy; default: the scenario's.")] = "",
    parts: dict[str, str] = OF_THE_POLICY,
    sets: Sets = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for result.json, series.csv and report.html.", callback=folder_to_write)
    ] = None,
    forecasts: Annotated[
        bool, typer.Option("--forecasts", help="Compare no carbon forecast, the feed's own models and a perfect one.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario: same scenario and seed, same bytes. Nothing runs but this process."""
    from trefoil.simulator.run import simulate_to
    from trefoil.simulator.scenario.inputs import traces_read
    from trefoil.simulator.scenario.schema import Scenario

    overrides = parse_sets(sets) | non_empty(policy=policy) | parts
    if seed is not None:
        overrides["seed"] = seed
    loaded = Scenario.load(scenario, overrides)
    for line in traces_read(loaded):
        typer.echo(line, err=as_json)
    if forecasts:
        from trefoil.comparison.runs import compare_forecasts

        with ticking(quiet=as_json) as say:
            compared, notes = compare_forecasts(loaded, say)
        show_comparison(compared, out, as_json, notes)
        return
    bar = not as_json and sys.stderr.isatty()
    with ticking(quiet=as_json or bar):
        found = simulate_to(loaded, out, bar=bar)
    if out is not None:
        from trefoil.cli.demo.results import made_by
        from trefoil.simulator.report.page import result_page

        (out / "report.html").write_text(result_page(loaded, found, made_by()), encoding="utf-8")
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    show(found.table())
    if out is not None:
        show(f"written to {out}/result.json, {out}/series.csv and {out}/report.html")

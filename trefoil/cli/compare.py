"""`trefoil compare`: policies at equal load, in simulated time, side by side on all cores."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.options import folder_to_write
from trefoil.cli.output import AsJson, respond, ticking
from trefoil.core.errors import SettingError
from trefoil.runtime.config import parse_pairs

if TYPE_CHECKING:
    from trefoil.comparison.comparison import Comparison


def compare(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, or the name of one that ships, e.g. digits.")],
    policies: Annotated[
        str,
        typer.Option(
            help="Policies by commas, POLICY@PRESET for a preset; compared with the first. all: those that apply."
        ),
    ] = "all",
    rules: Annotated[
        str,
        typer.Option(
            help="Compare rules of jobs by commas instead, under one policy: at_once,evenly,wait_awhile,carbon_scaler,"
            "planned; or all."
        ),
    ] = "",
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=A,B", help="Values of a setting; each combination of them is a case."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="How many seeds, from the scenario's own on.")] = 5,
    jobs: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: one per core.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for comparison.json, .csv, .png and .html.", callback=folder_to_write)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare policies: equal arrivals and carbon for each; savings with attainment and accuracy."""
    with ticking(quiet=as_json) as say:
        from trefoil.comparison.runs import compare as compare_policies
        from trefoil.comparison.runs import compare_rules, split_values
        from trefoil.simulator.scenario.schema import Scenario

        values = {key: split_values(text) for key, text in parse_pairs("--set", sets or ()).items()}
        named, compared = ([name.strip() for name in text.split(",") if name.strip()] for text in (policies, rules))
        if compared and len(named) > 1:
            remedy = "name one policy with --rules, or the policies alone"
            raise SettingError("rules are compared under one policy", field="--policies", value=policies, remedy=remedy)
        if compared:
            loaded = Scenario.load(scenario, {} if named == ["all"] else {"policy": named[0]})
            found = compare_rules(loaded, compared, values, seeds, jobs, say)
        else:
            found = compare_policies(scenario, named, values, seeds, jobs, say)
    show_comparison(found, out, as_json)


def show_comparison(found: "Comparison", out: Path | None, as_json: bool, notes: Sequence[str] = ()) -> None:
    """Print a comparison, and with `out` write its files there."""
    from trefoil.cli.demo.results import made_by
    from trefoil.comparison.report import FILES, comparison_tables, write_comparison
    from trefoil.simulator.report.result import json_safe

    about = made_by()
    if out is not None:
        write_comparison(found, out, about)
    document = json_safe({**about, **found.to_json(), **({"notes": list(notes)} if notes else {})})
    written = [f"written to {out}: {', '.join(FILES)}"] if out is not None else []
    respond(as_json, document, *comparison_tables(found), *notes, *written)

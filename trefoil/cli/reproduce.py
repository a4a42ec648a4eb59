"""`trefoil reproduce PAPER`: play a paper again, at equal load, and write every number down."""

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from trefoil.cli.output import AsJson, Guarded, console, grid, print_json
from trefoil.core.errors import SettingError

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Play a paper again in the simulator, at equal load.")


@app.command("clover")
def clover(
    out: Annotated[
        Path, typer.Option(help="Folder for summary.json, one CSV and PNG per figure, and kept runs.")
    ] = Path("out/reproduce/clover"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds of the headline.")] = 5,
    hours: Annotated[float, typer.Option(min=1, max=48, help="Of the traces.")] = 48.0,
    speedup: Annotated[float, typer.Option(min=1, max=96, help="Trace hours in one simulated hour.")] = 1.0,
    family: Annotated[list[str] | None, typer.Option(help="Only these applications.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Runs side by side; 0: one per core.")] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="One application, one seed, 12 h (four in one), no sweeps.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """CLOVER (SC 23): ten A100s, three applications, 48 h of carbon. Runs kept in --out are not played again."""
    from trefoil.cli.demo import commit, machine
    from trefoil.reproduce.clover import FAMILIES, QUICK, Options, Study
    from trefoil.reproduce.experiment import data_folder
    from trefoil.reproduce.figures import all_figures
    from trefoil.reproduce.scores import json_finite

    unknown = sorted(set(family or ()) - set(FAMILIES))
    if unknown:
        raise SettingError("no such application", field="--family", value=unknown[0], remedy=f"one of {FAMILIES}")
    options = Options(tuple(family or FAMILIES), tuple(range(1, seeds + 1)), hours, hours, speedup, jobs)
    if quick:
        options = QUICK
    said = console()
    say = (lambda _text: None) if as_json else (lambda text: said.print(text))
    found: dict[str, Any] = {
        "paper": "CLOVER, SC 23", "basis": "simulated on modelled profiles", "commit": commit(), "machine": machine(),
        "command": shlex.join(["trefoil", *sys.argv[1:]]),
        "seeds": list(options.seeds), "hours": options.hours, "speedup": options.speedup,
        "data": "real traces (TREFOIL_DATA)" if data_folder() else "synthetic curve: the real traces are not here",
    }  # fmt: skip
    found |= all_figures(Study(options, out, say), out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(
        json.dumps(json_finite(found), indent=1, allow_nan=False) + "\n", encoding="utf-8"
    )
    if as_json:
        print_json(json_finite(found))
        return
    for name in options.families:
        said.print(_table(name, found["equal"][name]))
        for claim, values in found["equal"][name]["claims"].items():
            said.print(f"  {claim}: {', '.join(f'{v:.2f}' for v in values)}")
        method = found["paper_method"][name]
        saved, alone = ([f"{v:.1f}" for v in method[k]] for k in (
            "saving_pct", "of_which_base_alone_by_its_load_pct"))  # fmt: skip
        said.print(f"  paper's method (BASE at a fifth of the load): {saved} %, BASE alone by its load {alone} %")
    said.print(f"written to {out}/summary.json, with a CSV and a PNG per figure")


def _table(family: str, found: dict[str, Any]) -> Any:
    rows = []
    for label, row in found["rows"].items():
        rows.append([
            label, *(f"{row[k]['mean']:.4g} ({row[k]['low']:.4g} to {row[k]['high']:.4g})" for k in (
                "grams_per_request", "accuracy", "p95_over_slo", "slo_attainment", "objective", "evaluations")),
        ])  # fmt: skip
    columns = ("scheme", "g/request", "accuracy", "p95 / SLO", "in SLO", "objective f, %", "evaluations")
    title = f"{family}: equal load {found['rate_per_s']:.1f}/s; mean (lowest to highest) of the seeds"
    return grid(title, columns, rows)

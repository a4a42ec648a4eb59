"""`trefoil reproduce`: a paper played again in the simulator, at equal load."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.output import AsJson, console, print_json
from trefoil.core.errors import SettingError, one_of

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Play a paper again in the simulator, at equal load.")
Out = Annotated[Path, typer.Option(help="Folder for summary.json, a CSV and PNG per figure, and kept runs.")]
Jobs = Annotated[int, typer.Option(min=0, help="Runs side by side; 0: one per core.")]


@dataclass(frozen=True, slots=True)
class Paper:
    """A paper's command: help of it and of its options; `plays`: module with `OPTIONS`, `QUICK`, `study` and `about`;
    `tables`: function of what a study finds; `sources`: policy and module that a run depends on.
    """

    command: str
    plays: str
    tables: str
    sources: tuple[str, str]
    text: str
    seeds: str
    sweeps: str
    quick: str


PAPERS: Final = (
    Paper(
        "wattwiser", "wattwiser.study", "tables:wattwiser_tables", ("wattwiser", "wattwiser.experiment"),
        "WattWiser: five pairs of models on four GPUs, 60 s of each SWIM hour. "
        "Runs kept in --out are not played again.",
        "How many seeds of the pairs.", "Also causes turned off, and constants turned by 30 %.",
        "One pair, one seed, 20 s of each hour, no sweeps.",
    ),
    Paper(
        "carbondis", "carbondis_study", "tables:carbondis_tables", ("carbondis", "carbondis"),
        "CARBONDIS: two sets of five jobs on P4s or T4s and A100s, as published and a week of carbon. Runs are kept.",
        "How many seeds, each of which begins another day.", "Also CIT from 0.8 to 1.2, and constants turned by 30 %.",
        "One seed, 2,000 requests a job, a day, no sweeps.",
    ),
    Paper(
        "infadapter", "infadapter.study", "tables:infadapter_tables", ("infadapter", "infadapter.experiment"),
        "InfAdapter: five networks on 20 cores, 21 minutes of Twitter and a steady load. Runs in --out are kept.",
        "How many seeds of the arrivals.", "Also the public code's constants, its arrivals, and forecasters.",
        "One seed, 13 minutes of each load, no sweeps.",
    ),
    Paper(
        "muserve", "muserve.study", "muserve.study:muserve_tables", ("", "muserve.study"),
        "mu-Serve without its scheduler: 15 models in pipelines on 4 to 14 V100s, clocks by MIAD. Runs are kept.",
        "How many seeds of the arrivals.", "Also other choices, and constants turned by 30 %.",
        "One seed, five minutes a run, fewer points.",
    ),
    Paper(
        "muserve-scheduler", "muserve.scheduler", "muserve.scheduler:scheduler_tables", ("", "muserve.scheduler"),
        "mu-Serve's scheduler: shortest job first by predicted length against FCFS and the oracle, and its power.",
        "How many seeds of arrivals, lengths and errors.", "Also constants turned by 30 % in the runs of power.",
        "One seed, five minutes a run, fewer points.",
    ),
)  # fmt: skip


def _add(paper: Paper) -> None:
    folder = Path("out/reproduce") / paper.command.replace("-", "_")

    @app.command(paper.command, help=paper.text)
    def command(
        out: Out = folder,
        seeds: Annotated[int, typer.Option(min=1, max=100, help=paper.seeds)] = 5,
        jobs: Jobs = 0,
        sweeps: Annotated[bool, typer.Option(help=paper.sweeps)] = True,
        quick: Annotated[bool, typer.Option("--quick", help=paper.quick)] = False,
        as_json: AsJson = False,
    ) -> None:
        module = _module(paper.plays)
        options = module.QUICK
        if not quick:
            options = replace(module.OPTIONS, seeds=tuple(range(1, seeds + 1)), sweeps=sweeps)
        options = replace(options, jobs=jobs)
        about = {**module.about(), "seeds": list(options.seeds)}
        _play(about, paper.sources, partial(module.study, options, out), paper.tables, out, as_json)


@app.command("clover")
def clover(
    out: Out = Path("out/reproduce/clover"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds of the headline.")] = 5,
    hours: Annotated[float, typer.Option(min=1, max=48, help="Of the traces.")] = 48.0,
    speedup: Annotated[float, typer.Option(min=1, max=96, help="Trace hours in one simulated hour.")] = 1.0,
    family: Annotated[list[str] | None, typer.Option(help="Only these applications.")] = None,
    jobs: Jobs = 0,
    sweeps: Annotated[bool, typer.Option(help="Also levers, loads, thresholds, seasons, assumptions turned.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="One application, one seed, 12 h (four in one), no sweeps.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """CLOVER (SC 23): ten A100s, three applications, 48 h of carbon. Runs kept in --out are not played again."""
    from trefoil.reproduce.clover import FAMILIES, QUICK, CloverOptions
    from trefoil.reproduce.experiment import data_folder
    from trefoil.reproduce.figures import all_figures

    unknown = sorted(set(family or ()) - set(FAMILIES))
    if unknown:
        raise SettingError(
            "no such application", field="--family", value=unknown[0], remedy=one_of(FAMILIES, unknown[0])
        )
    seeds_played = tuple(range(1, seeds + 1))
    options = CloverOptions(tuple(family or FAMILIES), seeds_played, hours, hours, speedup, jobs, sweeps)
    if quick:
        options = replace(QUICK, jobs=jobs)
    about = {
        "paper": "CLOVER, SC 23", "basis": "simulated on modelled profiles", "seeds": list(options.seeds),
        "hours": options.hours, "speedup": options.speedup,
        "data": "real traces (TREFOIL_DATA)" if data_folder() else "synthetic curve: the real traces are not here",
    }  # fmt: skip
    _play(about, ("", "runs"), partial(all_figures, options, out), "tables:clover_tables", out, as_json)


for _paper in PAPERS:
    _add(_paper)


def _module(name: str) -> Any:
    return import_module(f"trefoil.reproduce.{name}")


def _play(
    about: Mapping[str, Any],
    sources: tuple[str, str],
    study: Callable[[Callable[[str], None]], dict[str, Any]],
    tables: str,
    out: Path,
    as_json: bool,
) -> None:
    """Play a study, keep its summary, print its tables."""
    from rich.markdown import Markdown

    from trefoil.cli.demo.results import made_by
    from trefoil.reproduce.runs import source_hash
    from trefoil.reproduce.scores import json_finite

    screen, (policy, module) = console(), sources
    made = {"sources": source_hash(policy, f"trefoil.reproduce.{module}"), **made_by()}
    found = {**about, **made, **study((lambda _text: None) if as_json else (lambda text: screen.print(text)))}
    out.mkdir(parents=True, exist_ok=True)
    plain = json_finite(found)
    (out / "summary.json").write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(plain)
        return
    home, _, function = tables.partition(":")
    for title, table in getattr(_module(home), function)(json.loads(json.dumps(plain))).items():
        screen.print(f"[bold]{title}[/bold]", Markdown(table))
    screen.print(f"written to {out}/summary.json, with a CSV and a PNG per figure")

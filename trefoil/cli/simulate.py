"""`trefoil simulate` and `trefoil reproduce`: a scenario, or a paper at equal load, in simulated time."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trefoil.cli.options import Forecaster, Governor, Planner, Queue, Router, Sets, non_empty, parse_sets
from trefoil.cli.output import AsJson, Guarded, console, print_json, ticking
from trefoil.core.errors import SettingError, one_of

if TYPE_CHECKING:
    from trefoil.simulator.scenario.schema import Scenario

reproduce = typer.Typer(cls=Guarded, no_args_is_help=True, help="Play a paper again in the simulator, at equal load.")
Out = Annotated[Path, typer.Option(help="Folder for summary.json, a CSV and PNG per figure, and kept runs.")]
Jobs = Annotated[int, typer.Option(min=0, help="Runs side by side; 0: one per core.")]


def simulate(
    scenario: Annotated[Path, typer.Argument(help="Scenario file, or one that ships by its name: digits.")],
    seed: Annotated[int | None, typer.Option(help="Instead of the scenario's seed.")] = None,
    policy: Annotated[str, typer.Option(help="Policy; default: the scenario's.")] = "",
    planner: Planner = "",
    forecaster: Forecaster = "",
    router: Router = "",
    queue: Queue = "",
    governor: Governor = "",
    sets: Sets = None,
    out: Annotated[Path | None, typer.Option(help="Folder for result.json, series.csv and report.html.")] = None,
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
    from trefoil.simulator.scenario.inputs import traces_read
    from trefoil.simulator.scenario.schema import Scenario

    overrides = parse_sets(sets)
    parts = non_empty(
        name=policy, planner=planner, forecaster=forecaster, router=router, queue=queue, governor=governor
    )
    overrides |= {f"policy.{column}": name for column, name in parts.items()}
    if seed is not None:
        overrides["seed"] = seed
    if resume and out is None:
        raise SettingError("where from?", field="--resume", remedy="name the folder of the interrupted run with --out")
    loaded = Scenario.load(scenario, overrides)
    for line in traces_read(loaded):
        typer.echo(line, err=as_json)
    if forecasts:
        _compare(loaded, out, resume, as_json)
        return
    bar = not as_json and sys.stderr.isatty()
    with ticking(quiet=as_json or bar):
        found = simulate_to(loaded, out, resume=resume, bar=bar)
    if out is not None:
        from trefoil.cli.demo.simulation_report import write_simulation_report

        write_simulation_report(out, loaded, {loaded.policy.name: found}, shlex.join(["trefoil", *sys.argv[1:]]))
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    console().print(found.table())
    if out is not None:
        console().print(f"written to {out}/result.json, {out}/series.csv and {out}/report.html")


def _compare(scenario: "Scenario", out: Path | None, resume: bool, as_json: bool) -> None:
    """What forecasts of carbon intensity buy in this scenario."""
    from trefoil.simulator.report.forecast_value import compare_forecasts
    from trefoil.simulator.run import progress_bar

    if resume:
        raise SettingError("a comparison has no checkpoint", field="--resume", remedy="leave out --resume")
    bar = not as_json and sys.stderr.isatty()
    with ticking(quiet=as_json or bar), progress_bar(scenario.name, bar) as progress:
        found = compare_forecasts(scenario, progress=progress)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "forecasts.json").write_text(found.to_json(), encoding="utf-8")
    if as_json:
        typer.echo(found.to_json(), nl=False)
        return
    console().print(found.table())
    if out is not None:
        console().print(f"written to {out}/forecasts.json")


@reproduce.command("clover")
def clover(
    out: Annotated[
        Path, typer.Option(help="Folder for summary.json, one CSV and PNG per figure, and kept runs.")
    ] = Path("out/reproduce/clover"),
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
    from rich.markdown import Markdown

    from trefoil.cli.demo.results import git_commit, machine
    from trefoil.reproduce.clover import FAMILIES, QUICK, CloverOptions, Study
    from trefoil.reproduce.experiment import data_folder
    from trefoil.reproduce.figures import all_figures
    from trefoil.reproduce.runs import source_hash
    from trefoil.reproduce.scores import json_finite
    from trefoil.reproduce.tables import clover_tables

    unknown = sorted(set(family or ()) - set(FAMILIES))
    if unknown:
        raise SettingError(
            "no such application", field="--family", value=unknown[0], remedy=one_of(FAMILIES, unknown[0])
        )
    seeds_played = tuple(range(1, seeds + 1))
    options = CloverOptions(tuple(family or FAMILIES), seeds_played, hours, hours, speedup, jobs, sweeps)
    if quick:
        options = QUICK
    screen = console()
    say = (lambda _text: None) if as_json else (lambda text: screen.print(text))
    found: dict[str, Any] = {
        "paper": "CLOVER, SC 23", "basis": "simulated on modelled profiles", "commit": git_commit(),
        "sources": source_hash(),
        "machine": machine(),
        "command": shlex.join(["trefoil", *sys.argv[1:]]),
        "seeds": list(options.seeds), "hours": options.hours, "speedup": options.speedup,
        "data": "real traces (TREFOIL_DATA)" if data_folder() else "synthetic curve: the real traces are not here",
    }  # fmt: skip
    found |= all_figures(Study(options, out, say), out)
    out.mkdir(parents=True, exist_ok=True)
    plain = json_finite(found)
    summary = json.dumps(plain, indent=1, allow_nan=False) + "\n"
    (out / "summary.json").write_text(summary, encoding="utf-8")
    if as_json:
        print_json(plain)
        return
    for name, table in clover_tables(json.loads(summary)).items():
        screen.print(f"[bold]{name}[/bold]", Markdown(table))
    screen.print(f"written to {out}/summary.json, with a CSV and a PNG per figure")


@reproduce.command("wattwiser")
def wattwiser(
    out: Annotated[Path, typer.Option(help="Folder for summary.json, one CSV per figure, and kept runs.")] = Path(
        "out/reproduce/wattwiser"
    ),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds of the pairs.")] = 5,
    jobs: Jobs = 0,
    sweeps: Annotated[bool, typer.Option(help="Also causes turned off, and constants turned by 30 %.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One pair, one seed, 20 s of each hour, no sweeps.")] = False,
    as_json: AsJson = False,
) -> None:
    """WattWiser: five pairs of models on four GPUs, 60 s of each SWIM hour. Runs kept in --out are not played again."""
    from trefoil.reproduce.experiment import data_folder
    from trefoil.reproduce.tables import wattwiser_tables
    from trefoil.reproduce.wattwiser_study import QUICK, WattwiserOptions, study

    options = QUICK if quick else WattwiserOptions(tuple(range(1, seeds + 1)), sweeps=sweeps, jobs=jobs)
    about = {
        "paper": "WattWiser", "basis": "simulated on modelled GPUs", "seeds": list(options.seeds),
        "data": "SWIM (TREFOIL_DATA)" if data_folder() else "a made-up day: SWIM is not here",
    }  # fmt: skip
    _reproduce("wattwiser", about, partial(study, options, out), wattwiser_tables, out, as_json)


@reproduce.command("carbondis")
def carbondis(
    out: Out = Path("out/reproduce/carbondis"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds, each of which begins another day.")] = 5,
    jobs: Jobs = 0,
    sweeps: Annotated[bool, typer.Option(help="Also CIT from 0.8 to 1.2, and constants turned by 30 %.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, 2,000 requests a job, a day, no sweeps.")] = False,
    as_json: AsJson = False,
) -> None:
    """CARBONDIS: two sets of five jobs on P4s or T4s and A100s, as published and a week of carbon. Runs are kept."""
    from trefoil.reproduce.carbondis import trace_path
    from trefoil.reproduce.carbondis_study import QUICK, CarbondisOptions, study
    from trefoil.reproduce.tables import carbondis_tables

    options = CarbondisOptions(tuple(range(1, seeds + 1)), sweeps=sweeps, jobs=jobs)
    options = replace(QUICK, jobs=jobs) if quick else options
    about = {
        "paper": "CARBONDIS", "basis": "simulated on modelled profiles", "seeds": list(options.seeds),
        "data": "Electricity Maps by CASPER (TREFOIL_DATA)" if trace_path() else "synthetic curve: no trace is here",
    }  # fmt: skip
    _reproduce("carbondis", about, partial(study, options, out), carbondis_tables, out, as_json)


@reproduce.command("infadapter")
def infadapter(
    out: Out = Path("out/reproduce/infadapter"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds of the arrivals.")] = 5,
    jobs: Jobs = 0,
    sweeps: Annotated[
        bool, typer.Option(help="Also the public code's constants, its arrivals, and forecasters.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, 13 minutes of each load, no sweeps.")] = False,
    as_json: AsJson = False,
) -> None:
    """InfAdapter: five networks on 20 cores, 21 minutes of Twitter and a steady load. Runs in --out are kept."""
    from trefoil.reproduce.infadapter import load
    from trefoil.reproduce.infadapter_study import QUICK, InfadapterOptions, study
    from trefoil.reproduce.tables import infadapter_tables

    options = InfadapterOptions(tuple(range(1, seeds + 1)), sweeps=sweeps, jobs=jobs)
    options = replace(QUICK, jobs=jobs) if quick else options
    about = {
        "paper": "InfAdapter", "basis": "simulated on published capacities", "seeds": list(options.seeds),
        "data": load("twitter")[1],
    }  # fmt: skip
    _reproduce("infadapter", about, partial(study, options, out), infadapter_tables, out, as_json)


@reproduce.command("muserve")
def muserve(
    out: Out = Path("out/reproduce/muserve"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds of the arrivals.")] = 5,
    jobs: Jobs = 0,
    sweeps: Annotated[bool, typer.Option(help="Also other choices, and constants turned by 30 %.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, five minutes a run, fewer points.")] = False,
    as_json: AsJson = False,
) -> None:
    """mu-Serve without its scheduler: 15 models in pipelines on 4 to 14 V100s, clocks by MIAD. Runs are kept."""
    from trefoil.reproduce.experiment import data_folder
    from trefoil.reproduce.muserve.study import QUICK, MuserveOptions, muserve_tables, study

    options = MuserveOptions(tuple(range(1, seeds + 1)), sweeps=sweeps, jobs=jobs)
    options = replace(QUICK, jobs=jobs) if quick else options
    about = {
        "paper": "mu-Serve", "basis": "simulated on modelled operators", "seeds": list(options.seeds),
        "data": "gamma gaps; Azure's functions (TREFOIL_DATA)" if data_folder() else "gamma gaps; Azure's are not here",
    }  # fmt: skip
    played = "trefoil.reproduce.muserve.study"
    _reproduce("muserve", about, partial(study, options, out), muserve_tables, out, as_json, played)


@reproduce.command("muserve-scheduler")
def muserve_scheduler(
    out: Out = Path("out/reproduce/muserve_scheduler"),
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many seeds of arrivals, lengths and errors.")] = 5,
    jobs: Jobs = 0,
    sweeps: Annotated[bool, typer.Option(help="Also constants turned by 30 % in the runs of power.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, five minutes a run, fewer points.")] = False,
    as_json: AsJson = False,
) -> None:
    """mu-Serve's scheduler: shortest job first by predicted length against FCFS and the oracle, and its power."""
    from trefoil.reproduce.muserve.scheduler import scheduler_tables, study
    from trefoil.reproduce.muserve.study import QUICK, MuserveOptions

    options = MuserveOptions(tuple(range(1, seeds + 1)), sweeps=sweeps, jobs=jobs)
    options = replace(QUICK, jobs=jobs) if quick else options
    options = replace(options, slo_scales=(5, 10), rates=(1, 3) if quick else (1, 2, 3, 4))
    about = {
        "paper": "mu-Serve", "basis": "simulated on modelled operators, errors by the measured confusion matrix",
        "seeds": list(options.seeds), "data": "gamma gaps; generated tokens of Azure's LLM traces, of pydoc",
    }  # fmt: skip
    played = "trefoil.reproduce.muserve.scheduler"
    _reproduce("muserve_scheduler", about, partial(study, options, out), scheduler_tables, out, as_json, played)


def _reproduce(
    name: str,
    about: dict[str, Any],
    study: Callable[[Callable[[str], None]], dict[str, Any]],
    tables: Callable[[dict[str, Any]], dict[str, str]],
    out: Path,
    as_json: bool,
    module: str = "",
) -> None:
    """Play a study, keep its summary, print its tables. `module`: that plays it, where that is not reproduce.<name>
    with a policy of that name."""
    from rich.markdown import Markdown

    from trefoil.cli.demo.results import git_commit, machine
    from trefoil.reproduce.runs import source_hash
    from trefoil.reproduce.scores import json_finite

    screen = console()
    found = about | {
        "commit": git_commit(),
        "sources": source_hash("", module) if module else source_hash(name, f"trefoil.reproduce.{name}"),
        "machine": machine(),
        "command": shlex.join(["trefoil", *sys.argv[1:]]),
    }
    found |= study((lambda _text: None) if as_json else (lambda text: screen.print(text)))
    out.mkdir(parents=True, exist_ok=True)
    plain = json_finite(found)
    (out / "summary.json").write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(plain)
        return
    for title, table in tables(plain).items():
        screen.print(f"[bold]{title}[/bold]", Markdown(table))
    screen.print(f"written to {out}/summary.json, with a CSV per figure")

"""`trefoil reproduce`: a paper played again in the simulator, at equal load."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.options import folder_to_write
from trefoil.cli.output import AsJson, console, print_json, show
from trefoil.core.errors import SettingError, one_of
from trefoil.runtime.clock import WallClock

if TYPE_CHECKING:
    from trefoil.reproduce.experiment import Experiment

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Play a paper again in the simulator, at equal load.")
Out = Annotated[
    Path,
    typer.Option(help="Folder for summary.json, a CSV and PNG per figure, and kept runs.", callback=folder_to_write),
]
Families = Annotated[list[str] | None, typer.Option("--family", help="Only these families of the repository.")]
Repository = Annotated[Path | None, typer.Option(help="Model repository; default: the one that ships.")]
TraceOf = Annotated[str, typer.Option("--trace", help="ciso-march, ciso-september, eso-march, or a CSV file.")]
DeviceOf = Annotated[str, typer.Option("--device", help="Device type of the GPUs; default: the paper's A100-40GB.")]
Policies = Annotated[str, typer.Option(help="Play only these next to base, e.g. clover,oracle,exact.")]
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
        "carbondis", "carbondis.study", "tables:carbondis_tables", ("carbondis", "carbondis.experiment"),
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
    family: Families = None,
    repository: Repository = None,
    trace: TraceOf = "",
    device: DeviceOf = "",
    gpus: Annotated[int, typer.Option(min=1, max=1000, help="How many GPUs; the paper's: 10.")] = 10,
    load: Annotated[float, typer.Option(min=0.01, max=1, help="Share of what BASE answers.")] = 0.6,
    weight: Annotated[float, typer.Option("--lambda", min=0, max=1, help="Weight of carbon in f.")] = 0.5,
    policies: Policies = "",
    jobs: Jobs = 0,
    sweeps: Annotated[bool, typer.Option(help="Also levers, loads, thresholds, seasons, assumptions turned.")] = True,
    quick: Annotated[
        bool, typer.Option("--quick", help="One application, one seed, 12 h (four in one), no sweeps.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """CLOVER (SC 23): ten A100s, three applications, 48 h of carbon; or your own. Runs kept in --out are not played
    again.
    """
    from trefoil.reproduce.clover.figures import all_figures
    from trefoil.reproduce.clover.study import QUICK, CloverOptions
    from trefoil.reproduce.experiment import trace_of

    of = _experiment(family or (QUICK.experiment.families if quick else ()), repository, trace, device, policies)
    of = replace(of, gpus=gpus, load=load, lambda_weight=weight)
    options = CloverOptions(of, tuple(range(1, seeds + 1)), hours, hours, speedup, jobs, sweeps)
    if quick:
        options = replace(QUICK, experiment=of, jobs=jobs)
    about = {
        "paper": "CLOVER, SC 23", "basis": "simulated on modelled profiles", "seeds": list(options.seeds),
        "hours": options.hours, "speedup": options.speedup,
        "data": Path(trace_of(of.trace)).name or "synthetic curve: the real traces are not here (TREFOIL_DATA)",
    }  # fmt: skip
    _play(about, ("", "runs"), partial(all_figures, options, out), "tables:clover_tables", out, as_json)


def _experiment(
    families: Sequence[str], repository: Path | None, trace: str, device: str, policies: str
) -> "Experiment":
    """Experiment with what was given; the rest as printed.

    Raises:
        SettingError, NotFound: a name that stands for nothing.
    """
    from trefoil.core.device_types import device_type
    from trefoil.core.policies import policy
    from trefoil.reproduce.experiment import TRACES, Experiment
    from trefoil.reproduce.runs import family_folder

    folder = str(repository) if repository else ""
    known = sorted(path.parent.name for path in family_folder("", folder).glob("*/family.toml"))
    for name in families:
        if name not in known:
            raise SettingError("no such family", field="--family", value=name, remedy=one_of(known, name))
    if trace and trace not in TRACES and not Path(trace).is_file():
        remedy = one_of(TRACES, trace, also="a CSV file of intensities")
        raise SettingError("no such trace", field="--trace", value=trace, remedy=remedy)
    found = Experiment(repository=folder, policies=tuple(policy(name).name for name in policies.split(",") if name))
    if repository or families:
        found = replace(found, families=tuple(families or known))
    return replace(found, trace=trace or found.trace, device=device_type(device or found.device).name)


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
    made, clock = {"sources": source_hash(policy, f"trefoil.reproduce.{module}"), **made_by()}, WallClock()
    began_s = clock.monotonic_s()
    found = {**about, **made, **study((lambda _text: None) if as_json else show)}
    found["took_s"] = round(clock.monotonic_s() - began_s)
    out.mkdir(parents=True, exist_ok=True)
    plain = json_finite(found)
    (out / "summary.json").write_text(json.dumps(plain, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    if as_json:
        print_json(plain)
        return
    home, _, function = tables.partition(":")
    for title, table in getattr(_module(home), function)(json.loads(json.dumps(plain))).items():
        screen.print(f"[bold]{title}[/bold]", Markdown(table))
    show(f"written to {out}/summary.json, with a CSV and a PNG per figure")

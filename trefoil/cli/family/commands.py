"""`trefoil family`: what can be served, whether it is in order, and how a Triton repository becomes a family."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trefoil.cli.guarded import Guarded
from trefoil.cli.output import AsJson, grid, respond, slow, ticking
from trefoil.core.errors import BinaryMissing, SettingError, StartError
from trefoil.core.plan_check import CREDITS_MAX
from trefoil.installation import MODELS, own_repository, triton_environment
from trefoil.runtime.given.repository_names import check_name

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from power_agent.triton.installation import TritonInstall
    from trefoil.cli.family.contract_check import Ask
    from trefoil.cli.family.import_family import ImportedFamily
    from trefoil.core.catalog import Family, Variant
    from trefoil.profiler.assumed import GraphCost

FOUND_WRONG: Final = 1
TOKENS_MIN: Final = 2
"""Of an answer, for the time between two."""
REPOSITORY_HELP: Final = "Model repository; default: TREFOIL_REPOSITORY, else ./model_repository, and what ships."

app = typer.Typer(
    cls=Guarded, no_args_is_help=True, help="Families of models: list, check, import, engine, profile, generate."
)

Repository = Annotated[Path, typer.Option("--repository", help=REPOSITORY_HELP, show_default=False)]
PerModel = typer.Option(metavar="MODEL=NUMBER")
SloMs = Annotated[float, typer.Option(help="Latency objective of the family [ms].", min=0.001)]
SloPercentile = Annotated[float, typer.Option(help="Percent of requests that must meet it.", min=1, max=99.99)]
Shapes = Annotated[list[str] | None, typer.Option("--shape", help="INPUT=3,224,224 where the model leaves it open.")]


@app.command("list")
def list_(repository: Repository = MODELS, as_json: AsJson = False) -> None:
    """Every family: its variants by accuracy, which have model files here, and how many profile rows there are."""
    from trefoil.cli.family.contract_check import describe_families

    found = describe_families(repository)
    rows = [
        (
            family["family"], one["name"], str(one["version"]), f"{one['accuracy']:.4f}",
            "yes" if one["files"] else "no", str(one["rows"]),
        )
        for family in found
        for one in family["variants"]
    ]  # fmt: skip
    respond(as_json, found, grid("", ("family", "variant", "version", "accuracy", "model files", "profile rows"), rows))


@app.command()
def check(
    families: Annotated[list[str] | None, typer.Argument(help="Families; default: all.")] = None,
    graphs_only: Annotated[
        bool, typer.Option("--graphs-only", help="Compare contracts with graphs; run none.")
    ] = False,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Compare each contract with its graphs, and ask each variant once on this machine's Triton. Exit code 1: something
    is wrong."""
    from trefoil.cli.family.contract_check import check_families

    with ticking(quiet=as_json) as say:
        found = check_families(repository, families or [], None if graphs_only else _asker(say))
    lines = [[f"{one['family']}: {one['state']}", *(f"  {why}" for why in one["problems"])] for one in found]
    respond(as_json, found, *chain(*lines))
    if any(family["problems"] for family in found):
        raise typer.Exit(FOUND_WRONG)


def _asker(say: "Callable[[str], None]") -> "Ask":
    """Asks variants on this machine's Triton; where there is none that is said, once."""

    @cache
    def install() -> "TritonInstall | None":
        from power_agent.triton.installation import find_triton, prepare_triton

        try:
            found = find_triton(None, triton_environment(None))
            prepare_triton(found)
        except (BinaryMissing, StartError) as error:
            typer.echo(f"no model is run here, contracts are compared with graphs alone: {error}", err=True)
            return None
        return found

    def ask(root: Path, family: "Family", variants: "Sequence[Variant]") -> dict[int, str] | None:
        from trefoil.cli.family.asked_once import unanswered

        return None if (found := install()) is None else unanswered(found, root, family, variants, say)

    return ask


@app.command("import")
@slow
def import_(
    source: Annotated[Path, typer.Argument(metavar="REPO", help="Triton repository whose models become variants.")],
    as_: Annotated[str, typer.Option("--as", metavar="FAMILY=MODEL,MODEL,...", help="Their order is their versions'.")],
    slo_latency_ms: SloMs,
    accuracy: Annotated[list[str] | None, PerModel] = None,
    accuracies: Annotated[Path | None, typer.Option(help="TOML or JSON file of MODEL = NUMBER.")] = None,
    accuracy_source: Annotated[str, typer.Option(help="Who measured it, on what.")] = "stated at import",
    metric: Annotated[str, typer.Option(help="What accuracy is.")] = "accuracy",
    task: Annotated[str, typer.Option(help="What the family does.")] = "",
    slo_percentile: SloPercentile = 95.0,
    licence: Annotated[str, typer.Option(help="Of the weights.")] = "not stated at import",
    memory_mib: Annotated[list[str] | None, PerModel] = None,
    load_s: Annotated[list[str] | None, PerModel] = None,
    macs: Annotated[list[str] | None, PerModel] = None,
    tokens_mean: Annotated[
        float, typer.Option(help="Mean tokens of an answer, where models answer by streams.", min=0)
    ] = 0.0,
    assume: Annotated[
        bool, typer.Option("--assume", help="Also write a synthetic profile, from what each graph does.")
    ] = False,
    shape: Shapes = None,
    link: Annotated[bool, typer.Option("--link", help="Hard links instead of copies, on one file system.")] = False,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Import a Triton repository whose variants are separate models, or refuse and name the field that differs."""
    from trefoil.cli.family.import_family import Statement, import_family, parse_accuracies, parse_numbers

    name, models = _parse_as(as_)
    stated = Statement(
        family=name,
        accuracies=parse_accuracies(models, parse_numbers(accuracy, "--accuracy"), accuracies),
        accuracy_source=accuracy_source if accuracies is None else f"{accuracy_source} ({accuracies.name})",
        slo_latency_ms=slo_latency_ms,
        slo_percentile=slo_percentile,
        metric=metric,
        task=task,
        licence=licence,
        memory_mib=parse_numbers(memory_mib, "--memory-mib"),
        load_s=parse_numbers(load_s, "--load-s"),
        macs=parse_numbers(macs, "--macs"),
        shapes=parse_shapes(shape),
        tokens_mean=tokens_mean,
    )
    costs: dict[str, GraphCost] = {}

    def finish(folder: Path) -> None:
        from trefoil.cli.family.assume import write_assumed

        costs.update(write_assumed(folder, parse_shapes(shape)))

    into = own_repository(repository)
    imported = import_family(source, models, into, stated, link=link, finish=finish if assume else None)
    document = asdict(imported) | {"folder": str(imported.folder)} | _assumed_json(costs)
    respond(as_json, document, *_lines(imported, costs))


@app.command()
@slow
def engine(
    engines: Annotated[list[str], typer.Argument(metavar="VARIANT=ADDRESS[#MODEL]...", help="Engines that run.")],
    as_: Annotated[str, typer.Option("--as", metavar="FAMILY", help="Family to be written.")],
    slo_latency_ms: SloMs,
    device_type: Annotated[str, typer.Option(help="Board that they compute on. Names: docs/device-types.md")],
    tokens_mean: Annotated[float, typer.Option(help="Mean tokens of an answer.", min=0, max=1_000_000)] = 0.0,
    embeddings: Annotated[bool, typer.Option("--embeddings", help="They make embeddings, no text.")] = False,
    api: Annotated[str, typer.Option(help="What they speak: openai, or triton (host:port of gRPC).")] = "openai",
    key_file: Annotated[
        list[str] | None, typer.Option(metavar="VARIANT=FILE", help="File with an engine's API key.")
    ] = None,
    accuracy: Annotated[list[str] | None, PerModel] = None,
    accuracy_source: Annotated[str, typer.Option(help="Who measured it, on what.")] = "stated at adoption",
    metric: Annotated[str, typer.Option(help="What accuracy is.")] = "accuracy",
    load_s: Annotated[list[str] | None, PerModel] = None,
    slo_percentile: SloPercentile = 95.0,
    licence: Annotated[str, typer.Option(help="Of the weights.")] = "not stated at adoption",
    streams: Annotated[str, typer.Option(help="Streams at once on each GPU; the most is planned.")] = "1,4,16",
    gpus: Annotated[int, typer.Option(help="GPUs that each engine computes on.", min=1, max=64)] = 1,
    seconds: Annotated[float, typer.Option(help="How long each number of streams is measured.", min=0)] = 3.0,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Write a family for engines that already run and speak OpenAI's API, measured at their addresses."""
    from trefoil.cli.family.adopt_engine import adopt_engines, lines, parse_engines, read_keys, whole_board
    from trefoil.cli.family.import_family import Statement, parse_accuracies, parse_numbers

    if api not in ("openai", "triton") or (api == "triton" and (embeddings or key_file)):
        why = "is not an API of engines" if api not in ("openai", "triton") else "takes no --embeddings, no --key-file"
        raise SettingError(why, field="--api", value=api, remedy="write openai or triton, and triton alone")
    whole = embeddings or api == "triton"
    if tokens_mean > 0 if whole else tokens_mean < TOKENS_MIN:
        why = "whole answers have no tokens" if whole else f"an answer has at least {TOKENS_MIN} tokens"
        remedy = "leave it out" if whole else "state it; or --embeddings, where the engines make embeddings"
        raise SettingError(why, field="--tokens-mean", value=tokens_mean, remedy=remedy)
    found = parse_engines(engines, "triton" if api == "triton" else "embed" if embeddings else "")
    key_files = dict(text.partition("=")[::2] for text in key_file or ())
    keys = read_keys(key_files, found)
    stated = Statement(
        family=check_name(as_, "--as"),
        accuracies=parse_accuracies(list(found), parse_numbers(accuracy, "--accuracy"), None),
        accuracy_source=accuracy_source,
        slo_latency_ms=slo_latency_ms,
        slo_percentile=slo_percentile,
        metric=metric,
        licence=licence,
        load_s=parse_numbers(load_s, "--load-s"),
        tokens_mean=tokens_mean,
    )
    into, board, numbers = own_repository(repository), whole_board(device_type), _parse_streams(streams)
    with ticking(quiet=as_json) as say:
        measured = adopt_engines(found, into, stated, board, numbers, gpus, seconds, say, keys)
    told = {name: [asdict(one) for one in each] for name, each in measured.items()}
    document = {"family": as_, "folder": str(into / as_), "measured": told}
    respond(as_json, document, *lines(stated, into / as_, found, measured, gpus, key_files))


def _parse_streams(text: str) -> list[int]:
    numbers = [int(one) if one.strip().isdecimal() else 0 for one in text.split(",")]
    if not all(1 <= one <= CREDITS_MAX for one in numbers) or numbers != sorted(set(numbers)):
        remedy = f"write numbers from 1 to {CREDITS_MAX} that rise, as 1,4,16"
        raise SettingError("are not numbers of streams", field="--streams", value=text, remedy=remedy)
    return numbers


@app.command()
@slow
def assume(
    family: Annotated[str, typer.Argument(help="A folder of the model repository that has no profile yet.")],
    shape: Shapes = None,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Write a synthetic profile, from multiply-adds and bytes of each graph; nothing is measured."""
    from trefoil.cli.family.assume import write_assumed
    from trefoil.runtime.repository import PROFILE_FILE, known_folder

    folder = known_folder(repository, family)
    costs = write_assumed(folder, parse_shapes(shape))
    document = {"family": family, "profile": str(folder / PROFILE_FILE)} | _assumed_json(costs)
    respond(as_json, document, *_assumed_lines(folder, costs))


def _lines(imported: "ImportedFamily", costs: "Mapping[str, GraphCost]") -> list[str]:
    lines = [f"  {one.variant}: version {one.version} (there {one.from_version})" for one in imported.variants]
    lines += [f"  note: {note}" for note in imported.notes]
    lines.append(f"{imported.folder} holds family {imported.family}.")
    if costs:
        return [*lines, *_assumed_lines(imported.folder, costs)]
    from trefoil.runtime.model_files import contract, how_to_profile

    return [*lines, f"It has no profile yet: {how_to_profile(contract(imported.folder.parent, imported.family))}."]


def _assumed_lines(folder: Path, costs: "Mapping[str, GraphCost]") -> list[str]:
    from trefoil.cli.family.assume import cost_lines

    end = f"{folder}/profile.csv is assumed (basis synthetic), for a first look; `trefoil family profile` measures one."
    return [*cost_lines(costs), end]


def _assumed_json(costs: "Mapping[str, GraphCost]") -> dict[str, Any]:
    return {"assumed": {name: asdict(cost) for name, cost in costs.items()}} if costs else {}


def parse_shapes(given: list[str] | None) -> dict[str, tuple[int, ...]]:
    """Shapes of inputs without the batch, by name, from `--shape IMAGE=3,224,224`.

    Raises:
        SettingError: not of that form.
    """
    found = {}
    for text in given or []:
        name, equals, sizes = text.partition("=")
        try:
            found[name] = tuple(int(size) for size in sizes.split(","))
        except ValueError:
            equals = ""
        if not equals or not name or min(found[name]) < 1:
            raise SettingError("not INPUT=sizes", field="--shape", value=text, remedy="e.g. --shape IMAGE=3,224,224")
    return found


def _parse_as(as_: str) -> tuple[str, list[str]]:
    family, _, rest = as_.partition("=")
    models = [name for name in rest.split(",") if name]
    if not family or not models or len(set(models)) < len(models):
        raise SettingError("cannot be read", field="--as", value=as_, remedy="write --as resnet=resnet18,resnet50")
    for name in (family, *models):
        check_name(name, "--as")
    return family, models

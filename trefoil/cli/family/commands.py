"""`trefoil family`: what can be served, whether it is in order, and how a Triton repository becomes a family."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from trefoil.cli.output import AsJson, Guarded, console, grid, print_json
from trefoil.core.errors import SettingError

if TYPE_CHECKING:
    from trefoil.cli.family.import_family import ImportedFamily

MODELS: Final = Path("model_repository")
FOUND_WRONG: Final = 1

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Families of models: list, check, import.")

Repository = Annotated[Path, typer.Option("--repository", help="Model repository of this system.", show_default=True)]
PerModel = typer.Option(metavar="MODEL=NUMBER")


@app.command("list")
def list_(repository: Repository = MODELS, as_json: AsJson = False) -> None:
    """Every family: its variants by accuracy, which have model files here, and how many profile rows there are."""
    from trefoil.cli.family.contract_check import describe_families
    from trefoil.cli.run.state_directory import resolve_path

    found = describe_families(resolve_path(repository))
    if as_json:
        print_json(found)
        return
    rows = []
    for family in found:
        for variant in family["variants"]:
            files = "yes" if variant["files"] else "no"
            accuracy = f"{variant['accuracy']:.4f}"
            rows.append(
                (family["family"], variant["name"], str(variant["version"]), accuracy, files, str(variant["rows"]))
            )
    console().print(grid("", ("family", "variant", "version", "accuracy", "model files", "profile rows"), rows))


@app.command()
def check(
    families: Annotated[list[str] | None, typer.Argument(help="Families; default: all.")] = None,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Compare each family's contract with its graphs; say what cannot be served. Exit code 1: something is wrong."""
    from trefoil.cli.family.contract_check import check_families
    from trefoil.cli.run.state_directory import resolve_path

    found = check_families(resolve_path(repository), families or [])
    if as_json:
        print_json(found)
    else:
        for family in found:
            for line in [f"{family['family']}: {family['state']}", *(f"  {problem}" for problem in family["problems"])]:
                console().print(line, markup=False, soft_wrap=True)
    if any(family["problems"] for family in found):
        raise typer.Exit(FOUND_WRONG)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="REPO", help="Triton repository whose models become variants.")],
    as_: Annotated[str, typer.Option("--as", metavar="FAMILY=MODEL,MODEL,...", help="Their order is their versions'.")],
    slo_ms: Annotated[float, typer.Option(help="Latency objective of the family [ms].", min=0.001)],
    accuracy: Annotated[list[str] | None, PerModel] = None,
    accuracies: Annotated[Path | None, typer.Option(help="TOML or JSON file of MODEL = NUMBER.")] = None,
    accuracy_source: Annotated[str, typer.Option(help="Who measured it, on what.")] = "stated at import",
    metric: Annotated[str, typer.Option(help="What accuracy is.")] = "accuracy",
    task: Annotated[str, typer.Option(help="What the family does.")] = "",
    slo_quantile: Annotated[float, typer.Option(help="Quantile of the objective.", min=0.01, max=0.9999)] = 0.95,
    licence: Annotated[str, typer.Option(help="Of the weights.")] = "not stated at import",
    memory_mib: Annotated[list[str] | None, PerModel] = None,
    load_s: Annotated[list[str] | None, PerModel] = None,
    macs: Annotated[list[str] | None, PerModel] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Symbolic links instead of copies; containers cannot follow them.")
    ] = False,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Import a Triton repository whose variants are separate models, or refuse and name the field that differs."""
    from trefoil.cli.family.import_family import Statement, import_family, parse_accuracies, parse_numbers
    from trefoil.cli.run.state_directory import resolve_path

    name, models = _parse_as(as_)
    stated = Statement(
        family=name,
        accuracies=parse_accuracies(models, parse_numbers(accuracy, "--accuracy"), accuracies),
        accuracy_source=accuracy_source if accuracies is None else f"{accuracy_source} ({accuracies.name})",
        slo_ms=slo_ms,
        slo_quantile=slo_quantile,
        metric=metric,
        task=task,
        licence=licence,
        memory_mib=parse_numbers(memory_mib, "--memory-mib"),
        load_s=parse_numbers(load_s, "--load-s"),
        macs=parse_numbers(macs, "--macs"),
    )
    imported = import_family(source, models, resolve_path(repository), stated, link=link)
    if as_json:
        print_json(asdict(imported) | {"folder": str(imported.folder)})
        return
    for line in _lines(imported):
        console().print(line, markup=False, soft_wrap=True)


def _lines(imported: "ImportedFamily") -> list[str]:
    lines = [f"  {one.variant}: version {one.version} (there {one.from_version})" for one in imported.variants]
    lines += [f"  note: {note}" for note in imported.notes]
    end = f"{imported.folder} holds family {imported.family}. It has no profile yet: `trefoil profile` measures one."
    return [*lines, end]


def _parse_as(as_: str) -> tuple[str, list[str]]:
    family, _, rest = as_.partition("=")
    models = [name for name in rest.split(",") if name]
    if not family or not models or len(set(models)) < len(models):
        raise SettingError("cannot be read", field="--as", value=as_, remedy="write --as resnet=resnet18,resnet50")
    return family, models

"""`trefoil family`: what can be served, whether it is in order, and how a Triton repository becomes a family."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from trefoil.cli.output import AsJson, Guarded, console, grid, print_json
from trefoil.core.errors import SettingError

if TYPE_CHECKING:
    from trefoil.cli.family_import import Imported

MODELS: Final = Path("model_repository")
FOUND_WRONG: Final = 1

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Families of models: list, check, import.")

Repository = Annotated[Path, typer.Option("--repository", help="Model repository of this system.", show_default=True)]
PerModel = typer.Option(metavar="MODEL=NUMBER")


@app.command("list")
def list_(repository: Repository = MODELS, as_json: AsJson = False) -> None:
    """Every family: its variants by accuracy, which have model files here, and how many profile rows there are."""
    from trefoil.cli.family_check import described
    from trefoil.cli.layout import shipped

    found = described(shipped(repository))
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
    from trefoil.cli.family_check import checked
    from trefoil.cli.layout import shipped

    found = checked(shipped(repository), families or [])
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
    rename: Annotated[
        list[str] | None, typer.Option(metavar="MODEL:TENSOR=NAME", help="Where type and shape do not tell.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Symbolic links instead of copies; containers cannot follow them.")
    ] = False,
    repository: Repository = MODELS,
    as_json: AsJson = False,
) -> None:
    """Adopt a Triton repository whose variants are separate models, or refuse and name the field that differs."""
    from trefoil.cli import family_toml
    from trefoil.cli.family_import import adopt
    from trefoil.cli.layout import shipped

    name, models = _wanted(as_)
    given = family_toml.numbers(accuracy, "--accuracy")
    stated = family_toml.Stated(
        family=name,
        accuracies=family_toml.accuracies(models, given, accuracies),
        accuracy_source=accuracy_source if accuracies is None else f"{accuracy_source} ({accuracies.name})",
        slo_ms=slo_ms,
        slo_quantile=slo_quantile,
        metric=metric,
        task=task,
        licence=licence,
        memory_mib=family_toml.numbers(memory_mib, "--memory-mib"),
        load_s=family_toml.numbers(load_s, "--load-s"),
        macs=family_toml.numbers(macs, "--macs"),
    )
    done = adopt(source, models, shipped(repository), stated, link=link, wanted=_renames(rename))
    said = _told(done)
    if as_json:
        print_json(said)
        return
    for line in _lines(said):
        console().print(line, markup=False, soft_wrap=True)


def _told(done: "Imported") -> dict[str, Any]:
    return {
        "family": done.family,
        "folder": str(done.folder),
        "variants": [
            {
                "variant": one.variant,
                "version": one.version,
                "from_version": one.from_version,
                "renamed": one.renames.changed,
            }
            for one in done.variants
        ],
        "notes": done.notes,
    }


def _lines(said: dict[str, Any]) -> list[str]:
    lines = []
    for one in said["variants"]:
        renamed = ", ".join(f"{old} -> {new}" for old, new in one["renamed"].items())
        line = f"  {one['variant']}: version {one['version']} (there {one['from_version']})"
        lines.append(line + (f", renamed {renamed}" if renamed else ""))
    lines += [f"  note: {note}" for note in said["notes"]]
    end = f"{said['folder']} holds family {said['family']}. It has no profile yet: `trefoil profile` measures one."
    return [*lines, end]


def _wanted(as_: str) -> tuple[str, list[str]]:
    family, _, rest = as_.partition("=")
    models = [name for name in rest.split(",") if name]
    if not family or not models or len(set(models)) < len(models):
        raise SettingError("cannot be read", field="--as", value=as_, remedy="write --as resnet=resnet18,resnet50")
    return family, models


def _renames(given: list[str] | None) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for one in given or ():
        model, colon, rest = one.partition(":")
        tensor, equals, name = rest.rpartition("=")
        if not colon or not equals or not all((model, tensor, name)):
            remedy = "write --rename resnet50:input.1=IMAGE"
            raise SettingError("not of the form MODEL:TENSOR=NAME", field="--rename", value=one, remedy=remedy)
        found.setdefault(model, {})[tensor] = name
    return found

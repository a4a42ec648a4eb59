"""Adopt the models of an existing Triton repository as the variants of one family.

    REPO/resnet18/config.pbtxt, 1/model.onnx          MODELS/resnet/config.pbtxt   the contract that all agree on
    REPO/resnet50/config.pbtxt, 3/model.onnx    ->                  family.toml    accuracies, names, versions
                                                                    1/model.onnx   resnet18
                                                                    2/model.onnx   resnet50

The variants must agree in backend, batching, and in number, types and shapes of their tensors. Names may differ where
the model is an ONNX graph: Triton itself can rename the tensors of an ensemble only, whose versions share one mapping,
so the copy gets the first variant's names by an Identity node for each tensor (`onnx_names`). The source stays.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.cli import family_toml
from trefoil.cli.family_source import Source, engine_file, read_source, refuse_difference, refuse_unfit
from trefoil.cli.layout import shipped
from trefoil.cli.onnx_names import renamed
from trefoil.cli.tensor_match import Renames, match
from trefoil.core.errors import CatalogError
from trefoil.runtime.model_files import CONFIG, ENGINES, FILES, OURS, backend_of
from trefoil.runtime.repository import FAMILY_FILE, load_family

SHARED: Final = "_shared"
# What a slice's configuration decides itself, or what has no meaning for a family.
DROPPED: Final = ("instance_group", "model_warmup", "optimization", "parameters", "response_cache", "metric_tags")


@dataclass(frozen=True, slots=True)
class Adopted:
    """What became of one model."""

    variant: str
    version: int
    from_version: int
    renames: Renames


@dataclass(slots=True)
class Imported:
    """The outcome. `notes`: what was not carried over."""

    family: str
    folder: Path
    variants: list[Adopted] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def adopt(
    repository: Path,
    models: Sequence[str],
    into: Path,
    stated: family_toml.Stated,
    *,
    link: bool = False,
    wanted: Mapping[str, Mapping[str, str]] | None = None,
) -> Imported:
    """Write `into`/<family> from these models, in the order of their versions; nothing is written when one is refused.

    `wanted` maps a model to its tensors' names in the family. `link` saves space by symbolic links to the repository.

    Raises:
        CatalogError: naming model, field, value and remedy.
        NotFound: the repository has no such model.
    """
    target = into / stated.family
    if target.exists():
        raise CatalogError(
            f"{target} exists already",
            field="--as",
            value=stated.family,
            remedy="take another name, or remove it first",
        )
    sources = [read_source(repository, name) for name in models]
    result = Imported(stated.family, target)
    first = sources[0]
    for source in sources:
        refuse_unfit(source)
        refuse_difference(first, source)
        result.notes += _dropped(source)
    names = dict(wanted or {})
    renames = {first.name: match(first, names.get(first.name, {}))}
    for source in sources[1:]:
        renames[source.name] = match(source, names.get(source.name, {}), renames[first.name])
    contract = _contract(first, renames[first.name], stated.family)
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into, prefix=".import-") as folder:
        fresh = Path(folder) / stated.family
        for version, source in enumerate(sources, 1):
            size_bytes = _place(source, fresh / str(version), renames[source.name], link=link)
            stated.sizes_bytes[source.name] = size_bytes
            result.variants.append(Adopted(source.name, version, source.version, renames[source.name]))
        (fresh / CONFIG).write_text(text_format.MessageToString(contract), encoding="utf-8")
        (fresh / FAMILY_FILE).write_text(family_toml.text(stated, models, repository), encoding="utf-8")
        load_family(fresh)  # what was just written is judged as any other family
        fresh.rename(target)
    _share(into)
    return result


def _dropped(source: Source) -> list[str]:
    config = source.config
    left = [name for name in DROPPED if name in {f.name for f, _ in config.ListFields()}]
    left += [f"{tensor.name}.label_filename" for tensor in config.output if tensor.label_filename]
    return [f"{source.name}: {', '.join(left)} not carried over"] if left else []


def _contract(first: Source, renames: Renames, family: str) -> model_config_pb2.ModelConfig:
    """The first variant's configuration without what is its own."""
    config = model_config_pb2.ModelConfig(name=family, max_batch_size=first.config.max_batch_size)
    config.backend = backend_of(first.config)
    for target, tensors_, names in (
        (config.input, renames.input_tensors, renames.inputs),
        (config.output, renames.output_tensors, renames.outputs),
    ):
        for tensor in tensors_:
            kept = target.add()
            kept.CopyFrom(tensor)
            kept.name = names[tensor.name]
            if "label_filename" in kept.DESCRIPTOR.fields_by_name:
                kept.label_filename = ""
    if first.config.HasField("dynamic_batching"):
        config.dynamic_batching.CopyFrom(first.config.dynamic_batching)
    for capability in first.config.cc_model_filenames:
        config.cc_model_filenames[capability] = engine_file(capability)
    if first.config.cc_model_filenames and FILES[ENGINES] in first.files:
        config.default_model_filename = FILES[ENGINES]
    return config


def _place(source: Source, folder: Path, renames: Renames, *, link: bool) -> int:
    """Put one version's files into the family; return their bytes."""
    folder.mkdir(parents=True)
    pairs = {**source.files, **{name: name for name in source.beside}}
    for here, there in pairs.items():
        original = (source.folder / there).resolve()
        if renames.needed and here == FILES["onnxruntime"]:
            (folder / here).write_bytes(renamed(original, renames.inputs, renames.outputs))
        elif link:
            (folder / here).symlink_to(original)
        else:
            shutil.copyfile(original, folder / here)
    return sum((source.folder / there).stat().st_size for there in pairs.values())


def _share(into: Path) -> None:
    """A model repository of its own needs the model.py that a slice of the python backend runs."""
    own = into / SHARED / OURS
    if not own.exists():
        own.parent.mkdir(exist_ok=True)
        shutil.copyfile(shipped(Path("model_repository") / SHARED / OURS), own)

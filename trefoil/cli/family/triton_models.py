"""Models of a Triton repository, read for `trefoil family import`, and why one cannot be a variant."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.config_fields import ONE_VALUE, left_fields, refused_fields, shared_fields
from trefoil.cli.family.onnx_graph import ANY, TensorInfo, differences, graph_tensors
from trefoil.core.errors import CatalogError, NotFound, system_error
from trefoil.runtime.given.llm_backends import LLM_FILES, RUNNING, VLLM, complete_vllm, engine_args
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import (
    VERSION,
    check_files,
    check_name,
    names_below,
    read_text,
    resolved,
)
from trefoil.runtime.model_files import (
    CHAT_TEMPLATE,
    CONFIG,
    ENGINES,
    FILES,
    OURS,
    PYTHON,
    backend_of,
    check_dims,
    label_files,
    read_contract,
)

LABELS_BYTES_MAX: Final = 2**24
NAMED_MAX: Final = 5  # files in a note
SOURCE_FILES: Final = {**FILES, PYTHON: "model.py", **LLM_FILES}  # by Triton's own names
COMPLETED_BATCH: Final = 4  # Triton's own default of the onnxruntime backend (default-max-batch-size)
EXPORT: Final = "export it to ONNX, or build a TensorRT engine"


@dataclass(frozen=True, slots=True)
class Source:
    """One model of the repository, as it is served there."""

    name: str
    served: tuple[int, ...]  # versions, the newest last
    config: model_config_pb2.ModelConfig
    folder: Path  # of that version
    files: Mapping[str, str]  # file in the family's version folder -> file here
    other_files: tuple[str, ...]  # other files below that folder, e.g. external data
    below: Path  # the repository, which none of its files leaves
    labels: tuple[str, ...] = ()  # files beside its config.pbtxt that the family has: of labels, the chat template
    not_taken: tuple[str, ...] = ()  # names beside its config.pbtxt

    @property
    def version(self) -> int:
        """The version that is taken."""
        return self.served[-1]


def read_source(repository: Path, name: str) -> Source:
    """Read one model of a Triton repository.

    Raises:
        CatalogError: it has no usable configuration, backend, version or file.
        NotFound: there is no such model.
    """
    repository = repository.resolve()
    folder = repository / check_name(name, "model")
    if not folder.is_dir():
        known = sorted(p.parent.name for p in repository.glob(f"*/{CONFIG}"))
        elsewhere = (
            "name another folder" if repository.is_dir() else "name a folder of this machine; copy an object store"
        )
        raise NotFound(f"{repository} has no model {name}", remedy=f"one of {known}" if known else elsewhere)
    config = _config(folder, repository)
    backend = backend_of(config)
    if backend not in SOURCE_FILES:
        if config.HasField("ensemble_scheduling"):  # of which this says more than its platform does
            for field, value, remedy in refused_fields(config):
                raise variant_error(name, field, value, remedy, folder / CONFIG)
        value = backend or str(config.platform)
        remedy = f"one of {', '.join(one for one in SOURCE_FILES if one not in RUNNING)}: {EXPORT}"
        raise variant_error(name, "backend", value, remedy, folder / CONFIG)
    served = _served_versions(name, folder, config)
    version_folder = folder / str(served[-1])
    apart = () if backend in LLM_FILES else OURS
    there = names_below(version_folder, check_files(version_folder, repository, apart))
    files = _files(name, version_folder, config, backend)
    other_files = there.keys() - set(files.values()) - files.keys()
    clash = [
        file for file in (*apart, FILES[PYTHON]) if (version_folder / file).exists() and file not in files.values()
    ]
    if backend == PYTHON and clash:
        raise variant_error(name, "file", clash[0], "give that file another name: the family has one of this name")
    template = f"{CHAT_TEMPLATE}.jinja"
    labels = (*label_files(config), *([template] if os.path.lexists(folder / template) else []))
    taken = {CONFIG, *labels}
    left = [p.name for p in folder.iterdir() if p.name not in taken and p.name[0] != "." and not _is_version(p)]
    left += [f"{served[-1]}/{file}" for file in files if file in there and file not in files.values()]
    source = Source(
        name, served, config, version_folder, files, tuple(sorted(other_files)), repository, labels,
        tuple(sorted(left)[:NAMED_MAX]),
    )  # fmt: skip
    for label in labels:
        if not (folder / label).is_file():
            raise variant_error(name, "label_filename", label, f"put that file into {folder}")
        resolved(folder / label, repository)
    if backend == VLLM:
        complete_vllm(config)
        engine_args(version_folder / files[LLM_FILES[VLLM]], repository)
    if backend == "onnxruntime":
        outside = check_external_data(version_folder / files[FILES[backend]], repository) - other_files
        if outside:
            raise variant_error(name, "external_data", min(outside), "put that file beside the model", source.folder)
    return source


def _config(folder: Path, repository: Path) -> model_config_pb2.ModelConfig:
    """Configuration of a model; what it does not say of its backend Triton tells by the name of the model's file."""
    try:
        config = read_contract(folder / CONFIG, repository)
    except OSError as error:
        if not isinstance(error, FileNotFoundError) or not _inferred(folder, ""):
            remedy = "write its config.pbtxt (Triton prints the one it completed: curl .../v2/models/<name>/config)"
            if any(folder.glob("*/saved_model.pb*")):
                remedy = f"it is a SavedModel: {EXPORT}"
            raise system_error(
                CatalogError, error, "be read", folder / CONFIG, field=f"model {folder.name}", remedy=remedy
            ) from error
        config = model_config_pb2.ModelConfig(name=folder.name)
    if not config.backend and not config.platform and not config.HasField("ensemble_scheduling"):
        config.backend = _inferred(folder, str(config.default_model_filename))
    return config


def _inferred(folder: Path, file: str) -> str:
    """Backend of a model by the name of its file; "" where none is known."""
    for backend, name in SOURCE_FILES.items():
        if backend in LLM_FILES:  # whose models say it
            continue
        if file == name or (
            not file and any((path / name).is_file() for path in folder.iterdir() if _is_version(path))
        ):
            return backend
    return ""


def _is_version(path: Path) -> bool:
    return bool(VERSION.fullmatch(path.name)) and path.is_dir()


def _served_versions(name: str, folder: Path, config: model_config_pb2.ModelConfig) -> tuple[int, ...]:
    """The versions that its policy serves, the newest last."""
    there = sorted(int(p.name) for p in folder.iterdir() if _is_version(p))
    if config.version_policy.HasField("specific"):
        there = [version for version in there if version in set(config.version_policy.specific.versions)]
    elif not config.version_policy.HasField("all"):
        there = there[-max(1, config.version_policy.latest.num_versions) :]
    if not there:
        raise CatalogError(
            f"{folder} has no version to serve", field="model", value=name, remedy="add 1/ with the model"
        )
    return tuple(there)


def _files(name: str, folder: Path, config: model_config_pb2.ModelConfig, backend: str) -> dict[str, str]:
    """Names in the family -> names here. Engines by compute capability become model_cc<capability>.plan."""
    default = str(config.default_model_filename) or SOURCE_FILES[backend]
    files = {}
    if backend == ENGINES:
        files = {engine_file(capability): file for capability, file in sorted(config.cc_model_filenames.items())}
    if not files or (folder / default).is_file():
        files[FILES.get(backend, default)] = default
    for file in files.values():
        if not (folder / file).is_file():
            raise CatalogError(f"{folder / file} is missing", field="model", value=name, remedy="add that file")
    return files


def engine_file(capability: str) -> str:
    """Name of a family's engine file for GPUs of that compute capability."""
    return f"model_cc{capability}.plan"


def refuse_unfit(source: Source) -> None:
    """Refuse what a variant of a family cannot be: sequences, ensembles, ragged tensors, streams of graphs.

    Raises:
        CatalogError: naming model and field.
    """
    for name, value, remedy in refused_fields(source.config):
        raise variant_error(source.name, name, value, remedy)


def refuse_difference(first: Source, source: Source) -> None:
    """Refuse a model whose shared fields differ from the first's: one configuration serves all variants.

    Raises:
        CatalogError: naming model, field, value and what the first has.
    """
    wanted, found = shared_fields(first.config), shared_fields(source.config)
    for name in dict.fromkeys([*wanted, *found]):
        want, have = wanted.get(name, "none"), found.get(name, "none")
        if want != have:
            raise variant_error(
                source.name, name, have, f"make it {want!r}, as {first.name} has it, or import fewer models"
            )
    for label in source.labels:
        if label in first.labels and _label(first, label) != _label(source, label):
            remedy = f"make it equal to {first.name}'s; or name files of labels otherwise in both config.pbtxt"
            raise variant_error(source.name, "file", label, remedy)


def _label(source: Source, name: str) -> str:
    return read_text(source.folder.parent / name, source.below, LABELS_BYTES_MAX)


def notes(source: Source) -> list[str]:
    """What is not carried over from a model's folder, with the reason."""
    found = [f"{source.name}: {text}" for text in left_fields(source.config)]
    if len(source.served) > 1:
        served = ", ".join(map(str, source.served))
        found.append(f"{source.name}: versions {served} are served there, {source.version} is taken")
    if backend_of(source.config) == VLLM and not source.other_files:
        found.append(f"{source.name}: its version holds a {LLM_FILES[VLLM]} alone: weights are not copied, nor hashed")
    if source.not_taken:
        found.append(f"{source.name}: not taken from its folder: {', '.join(map(repr, source.not_taken))}")
    return found


def complete_tensors(source: Source) -> None:
    """Complete inputs and outputs from the graph, as Triton does; all are compared with it.

    Raises:
        CatalogError: configuration and graph do not agree, or a tensor cannot be served in batches.
    """
    config = source.config
    if backend_of(config) != "onnxruntime":
        if not config.input or not config.output:
            raise variant_error(source.name, "input", [], "write input and output into its config.pbtxt")
        return
    path = source.folder / source.files[FILES["onnxruntime"]]
    graph = graph_tensors(path, source.below)
    for entries, tensors in zip((config.input, config.output), graph, strict=True):
        for tensor in () if entries else tensors:
            _complete(source, tensor, entries.add())
    for name, value, why, remedy in differences(config, graph):
        raise CatalogError(f"model {source.name}: {why} ({path})", field=name, value=value, remedy=remedy)


def complete_batching(source: Source) -> None:
    """Complete the largest batch as Triton does where a configuration leaves it and the tensors to the graph."""
    config = source.config
    if config.max_batch_size or (config.input and config.output) or backend_of(config) != "onnxruntime":
        return
    graph = graph_tensors(source.folder / source.files[FILES["onnxruntime"]], source.below)
    if not all(tensor.dims and tensor.dims[0] == ANY for tensors in graph for tensor in tensors):
        return
    config.max_batch_size = COMPLETED_BATCH
    if not config.HasField("dynamic_batching"):
        config.dynamic_batching.SetInParent()


def _complete(source: Source, tensor: TensorInfo, entry: Any) -> None:
    """Complete the entry of config.pbtxt for a tensor of the graph: a batch dimension is not written there, and one
    value for each item is `dims: [ 1 ]`, reshaped."""
    if tensor.data_type not in model_config_pb2.DataType.keys():  # noqa: SIM118 - an enum wrapper, not a mapping
        remedy = "export tensors of types that Triton has (skl2onnx: options={'zipmap': False})"
        raise variant_error(source.name, f"{tensor.name}.data_type", tensor.data_type, remedy)
    if not tensor.dims:
        remedy = f"write input and output into its config.pbtxt, with {ONE_VALUE} where a tensor has no dimensions"
        raise variant_error(source.name, f"{tensor.name}.dims", [], remedy)
    dims = tensor.dims[1:] if source.config.max_batch_size > 0 else tensor.dims
    if not dims:
        dims = (1,)
        entry.reshape.SetInParent()
    entry.name, entry.data_type = tensor.name, model_config_pb2.DataType.Value(tensor.data_type)
    check_dims(source.folder, f"{tensor.name}.dims", dims)
    entry.dims.extend(dims)


def refuse_other_tensors(first: Source, source: Source) -> None:
    """Refuse a model whose tensors differ from the first's in number, name, type or shape.

    Raises:
        CatalogError: naming model and tensor, the names found, and what to export.
    """
    for kind in ("input", "output"):
        want, have = (getattr(one.config, kind) for one in (first, source))
        _refuse_other_names(first, source, kind, [t.name for t in want], [t.name for t in have])
        family = {tensor.name: tensor for tensor in want}
        for tensor in have:
            _refuse_other_shape(source, tensor, family[tensor.name])


def _refuse_other_names(first: Source, source: Source, kind: str, want: Sequence[str], have: Sequence[str]) -> None:
    if len(have) != len(want):
        raise variant_error(source.name, kind, have, f"the family has {len(want)}: {', '.join(want)}")
    if sorted(have) == sorted(want):
        return
    unknown = next((name for name in have if name not in want), have[0])
    remedy = f"{source.name} has {', '.join(have)}, {first.name} has {', '.join(want)}: "
    if backend_of(source.config) == ENGINES:
        remedy += f"build the engine from a graph with the {kind} names of {first.name}"
    else:
        remedy += f"export it again with {kind}_names={list(want)} (torch.onnx.export), and so in its config.pbtxt"
    raise variant_error(source.name, f"{kind}.name", unknown, remedy)


def _refuse_other_shape(source: Source, tensor: Any, family: Any) -> None:
    if tensor.data_type != family.data_type:
        want, have = (model_config_pb2.DataType.Name(t.data_type) for t in (family, tensor))
        remedy = f"the family's is {want}; export it so"
        raise variant_error(source.name, f"{tensor.name}.data_type", have, remedy)
    if tuple(tensor.dims) != tuple(family.dims):
        remedy = f"the family's has {list(family.dims)}; export it so, with resizing inside the graph"
        raise variant_error(source.name, f"{tensor.name}.dims", list(tensor.dims), remedy)
    for field in dict.fromkeys(field.name for one in (family, tensor) for field, _ in one.ListFields()):
        if field not in ("name", "data_type", "dims") and getattr(tensor, field) != getattr(family, field):
            value = " ".join(str(getattr(tensor, field)).split())
            raise variant_error(source.name, f"{tensor.name}.{field}", value, "make it equal to the family's")


def variant_error(model: str, name: str, value: object, remedy: str, path: Path | str = "") -> CatalogError:
    """The error that says why a model cannot be a variant."""
    where = f" ({path})" if path else ""
    return CatalogError(f"model {model} cannot be a variant{where}", field=name, value=value, remedy=remedy)

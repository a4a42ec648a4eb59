"""Models of somebody's Triton repository, read for `trefoil family import`, and why one cannot be a variant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.onnx_graph import TensorInfo, graph_tensors
from trefoil.core.errors import CatalogError, NotFound
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import VERSION, check_files, check_name
from trefoil.runtime.model_files import CONFIG, ENGINES, FILES, OURS, backend_of, check_dims, read_contract


@dataclass(frozen=True, slots=True)
class Source:
    """One model of the repository, as it is served there."""

    name: str
    version: int
    config: model_config_pb2.ModelConfig
    folder: Path  # of that version
    files: Mapping[str, str]  # file in the family's version folder -> file here
    other_files: tuple[str, ...]  # other files, e.g. external data
    below: Path  # the repository, which none of its files leaves


@dataclass(frozen=True, slots=True)
class Tensors:
    """Inputs and outputs of a model, as entries of a config.pbtxt."""

    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def read_source(repository: Path, name: str) -> Source:
    """Read one model of a Triton repository.

    Raises:
        CatalogError: it has no usable configuration, backend, version or file.
        NotFound: there is no such model.
    """
    repository = repository.resolve()
    folder = repository / check_name(name, "model")
    path = folder / CONFIG
    if not folder.is_dir():
        known = sorted(p.parent.name for p in repository.glob(f"*/{CONFIG}"))
        raise NotFound(
            f"{repository} has no model {name}", remedy=f"one of {known}" if known else "name another folder"
        )
    try:
        config = read_contract(path, repository)
    except OSError as error:
        raise CatalogError(
            f"{path}: {error.strerror}",
            field="model",
            value=name,
            remedy="write its config.pbtxt (Triton prints the one it completed: curl .../v2/models/<name>/config)",
        ) from error
    backend = backend_of(config)
    if backend not in FILES:
        raise variant_error(name, "backend", backend or str(config.platform), f"one of {', '.join(FILES)}", path)
    version = _served_version(name, folder, config)
    there = check_files(folder / str(version), repository, OURS)
    files = _files(name, folder / str(version), config, backend)
    other_files = {path.name for path in there} - set(files.values())
    source = Source(name, version, config, folder / str(version), files, tuple(sorted(other_files)), repository)
    if backend != ENGINES:
        outside = check_external_data(folder / str(version) / files[FILES[backend]], repository) - other_files
        if outside:
            raise variant_error(name, "external_data", min(outside), "put that file beside the model", source.folder)
    return source


def _served_version(name: str, folder: Path, config: model_config_pb2.ModelConfig) -> int:
    """The newest version that its policy serves."""
    there = {int(p.name) for p in folder.iterdir() if p.is_dir() and VERSION.fullmatch(p.name)}
    if config.version_policy.HasField("specific"):
        there &= set(config.version_policy.specific.versions)
    if not there:
        raise CatalogError(
            f"{folder} has no version to serve", field="model", value=name, remedy="add 1/ with the model"
        )
    return max(there)


def _files(name: str, folder: Path, config: model_config_pb2.ModelConfig, backend: str) -> dict[str, str]:
    """Names in the family -> names here. Engines by compute capability become model_cc<capability>.plan."""
    default = str(config.default_model_filename) or FILES[backend]
    files = {}
    if backend == ENGINES:
        files = {engine_file(capability): file for capability, file in sorted(config.cc_model_filenames.items())}
    if not files or (folder / default).is_file():
        files[FILES[backend]] = default
    for file in files.values():
        if not (folder / file).is_file():
            raise CatalogError(f"{folder / file} is missing", field="model", value=name, remedy="add that file")
    return files


def engine_file(capability: str) -> str:
    """Name of a family's engine file for GPUs of that compute capability."""
    return f"model_cc{capability}.plan"


def refuse_unfit(source: Source) -> None:
    """Refuse what a variant of a family cannot be: sequences, decoupled answers, no batches, reshaped tensors.

    Raises:
        CatalogError: naming model and field.
    """
    config = source.config
    if config.max_batch_size < 1:
        raise variant_error(
            source.name, "max_batch_size", config.max_batch_size, "export it with a batch dimension of any size"
        )
    for unfit in ("batch_input", "batch_output"):
        if len(getattr(config, unfit)):
            raise variant_error(source.name, unfit, "set", "serve it outside of a family")
    if config.HasField("sequence_batching"):
        raise variant_error(source.name, "sequence_batching", "set", "serve it outside of a family")
    if config.model_transaction_policy.decoupled:
        raise variant_error(source.name, "model_transaction_policy.decoupled", True, "serve it outside of a family")
    for tensor in (*config.input, *config.output):
        for unfit in ("reshape", "is_shape_tensor", "is_non_linear_format_io", "allow_ragged_batch", "optional"):
            if unfit in tensor.DESCRIPTOR.fields_by_name and unfit in {f.name for f, _ in tensor.ListFields()}:
                raise variant_error(source.name, f"{tensor.name}.{unfit}", "set", "export it without")


def refuse_difference(first: Source, source: Source) -> None:
    """Refuse a model whose shared fields differ from the first's: one configuration serves all variants.

    Raises:
        CatalogError: naming model, field, value and what the first has.
    """
    shared: dict[str, tuple[Any, Any]] = {
        "backend": (backend_of(first.config), backend_of(source.config)),
        "max_batch_size": (first.config.max_batch_size, source.config.max_batch_size),
        "dynamic_batching": (_batching(first), _batching(source)),
        "cc_model_filenames": (_keys(first), _keys(source)),
    }
    for name, (want, have) in shared.items():
        if want != have:
            raise variant_error(
                source.name, name, have, f"make it {want!r}, as {first.name} has it, or import fewer models"
            )


def _keys(source: Source) -> list[str]:
    return sorted(source.config.cc_model_filenames)


def _batching(source: Source) -> str:
    """An empty `dynamic_batching { }` is not the same as none."""
    config = source.config
    text = text_format.MessageToString(config.dynamic_batching, as_one_line=True)
    return f"{{ {text} }}" if config.HasField("dynamic_batching") else "none"


def read_tensors(source: Source) -> Tensors:
    """Inputs and outputs of a model; those that Triton completes by itself are read from the graph, all are compared
    with it.

    Raises:
        CatalogError: configuration and graph do not agree, or a tensor cannot be served in batches.
    """
    inputs, outputs = tuple(source.config.input), tuple(source.config.output)
    if backend_of(source.config) == ENGINES:
        if not inputs or not outputs:
            raise variant_error(source.name, "input", [], "write input and output into its config.pbtxt")
        return Tensors(inputs, outputs)
    path = source.folder / source.files[FILES["onnxruntime"]]
    graph_inputs, graph_outputs = graph_tensors(path, source.below)
    inputs = inputs or tuple(_completed(source, t, model_config_pb2.ModelInput()) for t in graph_inputs)
    outputs = outputs or tuple(_completed(source, t, model_config_pb2.ModelOutput()) for t in graph_outputs)
    for kind, configured, graph in (("input", inputs, graph_inputs), ("output", outputs, graph_outputs)):
        there = {tensor.name for tensor in graph}
        for tensor in configured:
            if tensor.name not in there:
                raise variant_error(
                    source.name, kind, tensor.name, f"{path} has {', '.join(sorted(there))}: mend config.pbtxt"
                )
    if lacking := {t.name for t in graph_inputs} - {t.name for t in inputs}:
        raise variant_error(
            source.name, "input", sorted(lacking), "its config.pbtxt has to list all inputs of the graph"
        )
    return Tensors(inputs, outputs)


def _completed(source: Source, tensor: TensorInfo, entry: Any) -> Any:
    """The entry of config.pbtxt for a tensor of the graph: its batch dimension is not written there."""
    if not tensor.dims or tensor.dims[0] != -1:
        remedy = "export it with a batch dimension of any size"
        raise variant_error(source.name, f"{tensor.name}.dims", list(tensor.dims), remedy)
    if tensor.data_type not in model_config_pb2.DataType.keys():  # noqa: SIM118 - an enum wrapper, not a mapping
        raise CatalogError(f"model {source.name}: Triton has no {tensor.data_type}", field=tensor.name)
    entry.name, entry.data_type = tensor.name, model_config_pb2.DataType.Value(tensor.data_type)
    check_dims(source.folder, f"{tensor.name}.dims", tensor.dims[1:])
    entry.dims.extend(tensor.dims[1:])
    return entry


def refuse_other_tensors(first: Source, wanted: Tensors, source: Source, own: Tensors) -> None:
    """Refuse a model whose tensors differ from the first's in number, name, type or shape.

    Raises:
        CatalogError: naming model and tensor, the names found, and what to export.
    """
    for kind, want, have in (("input", wanted.inputs, own.inputs), ("output", wanted.outputs, own.outputs)):
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


def variant_error(model: str, name: str, value: object, remedy: str, path: Path | str = "") -> CatalogError:
    """The error that says why a model cannot be a variant."""
    where = f" ({path})" if path else ""
    return CatalogError(f"model {model} cannot be a variant{where}", field=name, value=value, remedy=remedy)

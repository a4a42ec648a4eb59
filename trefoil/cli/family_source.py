"""Models of somebody's Triton repository, read for `trefoil family import`, and why one cannot be a variant."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.core.errors import CatalogError, NotFound
from trefoil.runtime.model_files import CONFIG, ENGINES, FILES, OURS, backend_of, read_contract


@dataclass(frozen=True, slots=True)
class Source:
    """One model of the repository, as it is served there."""

    name: str
    version: int
    config: model_config_pb2.ModelConfig
    folder: Path  # of that version
    files: Mapping[str, str]  # file in the family's version folder -> file here
    beside: tuple[str, ...]  # other files, e.g. external data


def read_source(repository: Path, name: str) -> Source:
    """One model.

    Raises:
        CatalogError: it has no usable configuration, backend, version or file.
        NotFound: there is no such model.
    """
    folder = repository / name
    path = folder / CONFIG
    if not folder.is_dir():
        known = sorted(p.parent.name for p in repository.glob(f"*/{CONFIG}"))
        raise NotFound(
            f"{repository} has no model {name}", remedy=f"one of {known}" if known else "name another folder"
        )
    try:
        config = read_contract(path)
    except OSError as error:
        raise CatalogError(
            f"{path}: {error.strerror}",
            field="model",
            value=name,
            remedy="write its config.pbtxt (Triton prints the one it completed: curl .../v2/models/<name>/config)",
        ) from error
    backend = backend_of(config)
    if backend not in FILES:
        raise refused(name, "backend", backend or str(config.platform), f"one of {', '.join(FILES)}", path)
    version = _served_version(name, folder, config)
    files = _files(name, folder / str(version), config, backend)
    beside = {p.name for p in (folder / str(version)).iterdir() if p.is_file()} - set(files.values()) - {OURS}
    return Source(name, version, config, folder / str(version), files, tuple(sorted(beside)))


def _served_version(name: str, folder: Path, config: model_config_pb2.ModelConfig) -> int:
    """The newest version that its policy serves."""
    there = {int(p.name) for p in folder.iterdir() if p.is_dir() and p.name.isdigit() and p.name[0] != "0"}
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
    """Where a family keeps its engine for GPUs of that compute capability."""
    return f"model_cc{capability}.plan"


def refuse_unfit(source: Source) -> None:
    """What a family of interchangeable variants cannot be."""
    config = source.config
    if config.max_batch_size < 1:
        raise refused(
            source.name, "max_batch_size", config.max_batch_size, "export it with a batch dimension of any size"
        )
    for unfit in ("batch_input", "batch_output"):
        if len(getattr(config, unfit)):
            raise refused(source.name, unfit, "set", "serve it outside of a family")
    if config.HasField("sequence_batching"):
        raise refused(source.name, "sequence_batching", "set", "serve it outside of a family")
    if config.model_transaction_policy.decoupled:
        raise refused(source.name, "model_transaction_policy.decoupled", True, "serve it outside of a family")
    for tensor in (*config.input, *config.output):
        for unfit in ("reshape", "is_shape_tensor", "is_non_linear_format_io", "allow_ragged_batch", "optional"):
            if unfit in tensor.DESCRIPTOR.fields_by_name and unfit in {f.name for f, _ in tensor.ListFields()}:
                raise refused(source.name, f"{tensor.name}.{unfit}", "set", "export it without")


def refuse_difference(first: Source, source: Source) -> None:
    """Fields that all variants share because one configuration serves them all."""
    shared: dict[str, tuple[Any, Any]] = {
        "backend": (backend_of(first.config), backend_of(source.config)),
        "max_batch_size": (first.config.max_batch_size, source.config.max_batch_size),
        "dynamic_batching": (_batching(first), _batching(source)),
        "cc_model_filenames": (_keys(first), _keys(source)),
    }
    for name, (want, have) in shared.items():
        if want != have:
            raise refused(source.name, name, have, f"make it {want!r}, as {first.name} has it, or import fewer models")


def _keys(source: Source) -> list[str]:
    return sorted(source.config.cc_model_filenames)


def _batching(source: Source) -> str:
    """An empty `dynamic_batching { }` is not the same as none."""
    config = source.config
    text = text_format.MessageToString(config.dynamic_batching, as_one_line=True)
    return f"{{ {text} }}" if config.HasField("dynamic_batching") else "none"


def refused(model: str, name: str, value: object, remedy: str, path: Path | str = "") -> CatalogError:
    where = f" ({path})" if path else ""
    return CatalogError(f"model {model} cannot be a variant{where}", field=name, value=value, remedy=remedy)

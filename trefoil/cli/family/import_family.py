"""Import the models of an existing Triton repository as the variants of one family.

    REPO/resnet18/config.pbtxt, 1/model.onnx          MODELS/resnet/config.pbtxt   the contract that all agree on
    REPO/resnet50/config.pbtxt, 3/model.onnx    ->                  family.toml    accuracies, names, versions
                                                                    1/model.onnx   resnet18
                                                                    2/model.onnx   resnet50

The variants must agree in backend, batching, and in names, types and shapes of their tensors. The family.toml holds
what the user stated of each variant, and what was assumed where nothing was said. The source stays as it is.
"""

import os
import shutil
import stat
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.config_fields import metadata, warm_shapes
from trefoil.cli.family.run_once import run_graphs
from trefoil.cli.family.triton_models import (
    Source,
    complete_batching,
    complete_tensors,
    engine_file,
    notes,
    read_source,
    refuse_difference,
    refuse_other_tensors,
    refuse_unfit,
)
from trefoil.cli.options import parse_number
from trefoil.core.errors import CatalogError, DiskUnavailable, SettingError, system_error
from trefoil.installation import MODELS, SHIPPED
from trefoil.runtime import codec
from trefoil.runtime.config import TOML_BYTES_MAX, parse_pairs, to_toml
from trefoil.runtime.files import NotPlain, read_plain, replace_file
from trefoil.runtime.given.llm_backends import LLM_FILES
from trefoil.runtime.given.repository_names import FILE_BYTES_MAX, check_name, opened, parts_of
from trefoil.runtime.model_files import (
    CONFIG,
    ENGINES,
    FILES,
    OPAQUE,
    OURS,
    PROBE_SHAPE,
    PYTHON,
    TOKENS_MEAN,
    backend_of,
    check_contract,
)
from trefoil.runtime.repository import FAMILY_FILE, load_family
from trefoil.runtime.state_files import STRANGE

SHARED: Final = "_shared"
LOAD_S: Final = 5.0  # assumption: a swap of a model of some hundred megabytes
LLM_LOAD_S: Final = 120.0  # assumption: weights of some gigabytes from a local disk, and CUDA graphs
WORKSPACE: Final = 2.0  # assumption: a batch needs as much memory as the weights
WORKSPACE_MIB_MIN: Final = 128
MIB: Final = 2**20
COPY_BYTES_MAX: Final = 2**37  # of one family: as much as the GPUs of a node hold
FREE_MIN: Final = 0.05  # of the disk is left free
UNFINISHED: Final = ".import-"  # of the folder of an import that is under way, with its process


@dataclass(slots=True)
class Statement:
    """Statement of a user about a family to be imported. Mappings are by model name."""

    family: str
    accuracies: Mapping[str, float]
    accuracy_source: str
    slo_latency_ms: float
    slo_percentile: float = 95.0
    metric: str = "accuracy"
    task: str = ""
    licence: str = "not stated at import"
    memory_mib: Mapping[str, float] = field(default_factory=dict)
    load_s: Mapping[str, float] = field(default_factory=dict)
    macs: Mapping[str, float] = field(default_factory=dict)
    shapes: Mapping[str, Sequence[int]] = field(default_factory=dict)  # of inputs that are open
    tokens_mean: float = 0.0  # of an answer; 0: it does not answer by streams
    sizes_bytes: dict[str, int] = field(default_factory=dict)  # of the files, found at import


@dataclass(frozen=True, slots=True)
class ImportedVariant:
    """A model that became a variant: its version in the family, and the one in its repository."""

    variant: str
    version: int
    from_version: int


@dataclass(slots=True)
class ImportedFamily:
    """The family that an import wrote. `notes`: what was not carried over."""

    family: str
    folder: Path
    variants: list[ImportedVariant] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def import_family(
    repository: Path,
    models: Sequence[str],
    into: Path,
    stated: Statement,
    *,
    link: bool = False,
    finish: Callable[[Path], object] | None = None,
) -> ImportedFamily:
    """Write `into`/<family> from these models, in the order of their versions; nothing is written when one is refused.

    `link` saves space by hard links to the repository's files. `finish` is given the folder before it becomes the
    family's. An import that was killed leaves a folder `.import-<pid>-...`, which the next one removes.

    Raises:
        CatalogError: naming model, field, value and remedy.
        NotFound: the repository has no such model.
        DiskUnavailable: there is no room, or the disk refuses.
    """
    target = into / check_name(stated.family, "--as")
    if os.path.lexists(target):
        raise CatalogError(
            f"{target} exists already",
            field="--as",
            value=stated.family,
            remedy="take another name, or remove it first",
        )
    sources = [read_source(repository, name) for name in models]
    result = ImportedFamily(stated.family, target)
    first = sources[0]
    for source in sources:
        refuse_unfit(source)
        complete_batching(source)
        refuse_difference(first, source)
        complete_tensors(source)
        refuse_other_tensors(first, source)
        result.notes += notes(source)
    _refuse_unstated(first.config, models, stated)
    contract = _contract(first, stated)
    try:
        into.mkdir(parents=True, exist_ok=True)
        _remove_unfinished(into)
        if not link:
            _check_room(sources, into)
        _write(repository, models, sources, contract, stated, result, link=link, finish=finish)
        _copy_backend(into)
    except OSError as error:
        remedy = "make room there, or make it writable; leave out --link across file systems"
        raise system_error(DiskUnavailable, error, "be written", into, field="repository", remedy=remedy) from error
    return result


def _write(
    repository: Path,
    models: Sequence[str],
    sources: Sequence[Source],
    contract: model_config_pb2.ModelConfig,
    stated: Statement,
    result: ImportedFamily,
    *,
    link: bool,
    finish: Callable[[Path], object] | None,
) -> None:
    """Write the family's folder beside its place, and rename it."""
    target = result.folder
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{UNFINISHED}{os.getpid()}-") as folder:
        fresh = Path(folder) / stated.family
        for version, source in enumerate(sources, 1):
            stated.sizes_bytes[source.name] = _copy_files(source, fresh / str(version), link=link)
            result.variants.append(ImportedVariant(source.name, version, source.version))
        (fresh / CONFIG).write_text(text_format.MessageToString(contract), encoding="utf-8")
        text = family_toml(stated, models, f"`trefoil family import` from {repository.name!r}")
        (fresh / FAMILY_FILE).write_text(text, encoding="utf-8")
        load_family(fresh)  # what was just written is judged as any other family
        if note := run_graphs(fresh):
            result.notes.append(note)
        if finish is not None:
            finish(fresh)
        fresh.rename(target)


def _remove_unfinished(into: Path) -> None:
    """Remove what imports have left whose process is gone."""
    for left in into.glob(f"{UNFINISHED}*-*"):
        pid = left.name.removeprefix(UNFINISHED).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(left, ignore_errors=True)


def _check_room(sources: Sequence[Source], into: Path) -> None:
    wanted = sum((s.folder / name).stat().st_size for s in sources for name in (*s.files.values(), *s.other_files))
    disk = shutil.disk_usage(into)
    most = min(COPY_BYTES_MAX, disk.free - int(FREE_MIN * disk.total))
    if wanted > most:
        remedy = f"make room in {into}, import fewer models, or give --link on one file system"
        raise CatalogError(f"of {wanted} bytes at most {max(0, most)} are copied", field="--as", remedy=remedy)


def _refuse_unstated(config: model_config_pb2.ModelConfig, models: Sequence[str], stated: Statement) -> None:
    """Refuse a mean length of answers that is missing, or of models that give one answer; and a language model's memory
    that is missing: its files do not say how much its engine takes for its KV cache."""
    streams = bool(config.model_transaction_policy.decoupled)
    if streams != (stated.tokens_mean > 0):
        why = "the models answer by streams" if streams else "the models give one answer to each request"
        remedy = "add --tokens-mean 200, the mean of your log" if streams else "leave it out"
        raise CatalogError(why, field="--tokens-mean", value=stated.tokens_mean or None, remedy=remedy)
    if backend_of(config) in LLM_FILES:
        for name in models:
            if name not in stated.memory_mib:
                remedy = f"add --memory-mib {name}=20000: weights and KV cache, as its engine is configured"
                raise CatalogError(f"memory of {name} is not stated", field="--memory-mib", remedy=remedy)


def _contract(first: Source, stated: Statement) -> model_config_pb2.ModelConfig:
    """The first variant's configuration without what is its own."""
    config = model_config_pb2.ModelConfig(name=stated.family, max_batch_size=first.config.max_batch_size)
    config.backend = backend_of(first.config)
    config.input.extend(first.config.input)
    config.output.extend(first.config.output)
    for name in ("dynamic_batching", "optimization", "model_transaction_policy"):
        if first.config.HasField(name):
            getattr(config, name).CopyFrom(getattr(first.config, name))
    unknown = sorted(stated.shapes.keys() - {tensor.name for tensor in config.input})
    if unknown:
        known = ", ".join(tensor.name for tensor in config.input)
        raise CatalogError("no such input", field="--shape", value=unknown[0], remedy=f"the inputs are {known}")
    shapes = {PROBE_SHAPE + name: ",".join(map(str, sizes)) for name, sizes in stated.shapes.items()}
    for name, text in (metadata(first.config) | warm_shapes(first.config) | shapes).items():
        config.parameters[name].string_value = text
    for capability in first.config.cc_model_filenames:
        config.cc_model_filenames[capability] = engine_file(capability)
    if first.config.cc_model_filenames and FILES[ENGINES] in first.files:
        config.default_model_filename = FILES[ENGINES]
    if config.backend == PYTHON:
        config.default_model_filename = OPAQUE
        if stated.tokens_mean:  # by which a simulated slice keeps its pace
            config.parameters[TOKENS_MEAN].string_value = f"{stated.tokens_mean:g}"
    check_contract(config, first.folder.parent / CONFIG)
    return config


def _copy_files(source: Source, folder: Path, *, link: bool) -> int:
    """Put one version's files into the family; return their bytes."""
    folder.mkdir(parents=True)
    pairs = {**source.files, **{name: name for name in source.other_files}}
    for here, there in pairs.items():
        (folder / here).parent.mkdir(parents=True, exist_ok=True)
        _put(source.folder / there, source.below, folder / here, link=link)
    for label in source.labels:
        if not (folder.parent / label).exists():
            _put(source.folder.parent / label, source.below, folder.parent / label, link=link)
    return sum((folder / here).stat().st_size for here in pairs)


def _put(original: Path, below: Path, target: Path, *, link: bool) -> None:
    if link:
        with opened(original, below, FILE_BYTES_MAX) as file:  # the file that was judged, whatever has its name by now
            os.link(f"/proc/self/fd/{file.fileno()}", target, src_dir_fd=file.fileno())  # without a dir_fd: of the link
    else:
        _copy(original, below, target)


def _copy(original: Path, below: Path, target: Path) -> None:
    """Copy a file, with what others may do with it, but for running it."""
    with opened(original, below, FILE_BYTES_MAX) as file:
        found = os.fstat(file.fileno())
        mode = stat.S_IMODE(found.st_mode) & 0o666
        with open(target, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as copy:
            for part in parts_of(file, found.st_size):
                copy.write(part)


def _copy_backend(into: Path) -> None:
    """A separate model repository needs the newest of what a slice of the python backend runs."""
    for name in (OURS[0], OPAQUE):
        own, newest = into / SHARED / name, (SHIPPED / MODELS / SHARED / name).read_text(encoding="utf-8")
        if not own.is_file() or own.read_text(encoding="utf-8") != newest:
            own.parent.mkdir(exist_ok=True)
            replace_file(own, newest)
            own.chmod(0o644)


def parse_numbers(given: Sequence[str] | None, flag: str) -> dict[str, float]:
    """Numbers of a repeated flag `--flag model=number`, by model.

    Raises:
        SettingError: not of that form, no number, or two numbers for a model.
    """
    return {name: parse_number(flag, name, text) for name, text in parse_pairs(flag, given or ()).items()}


def parse_accuracies(models: Sequence[str], given: Mapping[str, float], file: Path | None) -> dict[str, float]:
    """Accuracy of every model [0..1], from flags first, then from a TOML or JSON file of name = number.

    Raises:
        SettingError: one is missing, unknown, or no fraction; it is named.
    """
    found = dict(_from_file(file) if file else {}) | dict(given)
    for name in models:
        if name not in found:
            raise SettingError(
                f"no accuracy of {name}",
                field="--accuracy",
                value=sorted(found) or "none given",
                remedy=f"add --accuracy {name}=0.7, or a file with --accuracies",
            )
        if not 0 <= found[name] <= 1:
            remedy = f"write {found[name] / 100:g}" if 1 < found[name] <= 100 else "write a number from 0 to 1"
            raise SettingError(
                f"accuracy of {name} is not a fraction", field="--accuracy", value=found[name], remedy=remedy
            )
    if unknown := sorted(set(given) - set(models)):
        raise SettingError(
            "no such model is imported", field="--accuracy", value=unknown[0], remedy=f"of {list(models)}"
        )
    return {name: found[name] for name in models}


def _from_file(path: Path) -> dict[str, float]:
    try:
        content = read_plain(path, TOML_BYTES_MAX).decode()
        tree = codec.parse_json(content) if path.suffix == ".json" else tomllib.loads(content)
        return {str(name): float(value) for name, value in tree.items()}
    except (OSError, NotPlain, *STRANGE, RecursionError) as error:
        remedy = "a TOML file with lines like resnet18 = 0.69758, or the same in JSON"
        raise system_error(SettingError, error, "be read", path, field="--accuracies", remedy=remedy) from error


def family_toml(stated: Statement, models: Sequence[str], writer: str, assumed: Sequence[str] = ()) -> str:
    """Text of the family.toml of an import. `writer`: who wrote it, and of what; `assumed`: where nothing was stated.

    Raises:
        CatalogError: two models have one name.
    """
    if len(set(models)) < len(models):
        raise CatalogError("a model occurs twice", field="--as", value=list(models), remedy="name each once")
    load_s = LLM_LOAD_S if stated.tokens_mean else LOAD_S
    files = f"memory_mib twice the model's files, with at least {WORKSPACE_MIB_MIN} for a batch; load_s {load_s:g}."
    assumed = assumed or (files,)
    variants = []
    for version, name in enumerate(models, 1):
        weights_mib = stated.sizes_bytes.get(name, 0) / MIB
        memory_mib = stated.memory_mib.get(name, weights_mib + max(weights_mib * (WORKSPACE - 1), WORKSPACE_MIB_MIN))
        known = {"name": name, "version": version, "accuracy": float(stated.accuracies[name])}
        known |= {"accuracy_source": stated.accuracy_source, "memory_mib": max(1, round(memory_mib))}
        known |= {"load_s": stated.load_s.get(name, load_s), "macs": round(stated.macs.get(name, 0))}
        variants.append({**known, "licence": stated.licence})
    tree = {
        "name": stated.family,
        "metric": stated.metric,
        "task": stated.task,
        "generative": stated.tokens_mean > 0,
        "tokens_mean": stated.tokens_mean or None,
        "sequence_batching": False,
        "classes": {"": {"percentile": stated.slo_percentile, "latency_ms": stated.slo_latency_ms}},
        "variants": variants,
    }
    head = (f"Written by {writer}. Assumed where nothing was stated:", *assumed, "macs = 0 means unknown.")
    return "".join(f"# {line}\n" for line in head) + to_toml(tree)

"""Model files of a family for Triton: its tensor contract (config.pbtxt) and the files of each version.

    <family>/config.pbtxt              name, max_batch_size, input, output: what all variants share; the backend
             labels.txt                of the outputs that name one (label_filename), for all variants
             <version>/model.onnx      backend onnxruntime (or none named): the graph; external data below its folder
             <version>/model.plan      backend tensorrt: an engine; several for GPU types by `cc_model_filenames`
             <version>/variant.py      backend python: a model that is code
             <version>/model.json      backend vllm; config.json: tensorrtllm; engine.json: openai or triton, a
                                       server that already runs (trefoil/runtime/given/llm_backends.py)

A family may have no model files at all: the catalogue knows it, and only a slice that shall serve it refuses.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2

from trefoil.core.errors import CatalogError, system_error
from trefoil.installation import CHECKOUT, MODELS, SHIPPED
from trefoil.runtime.given.llm_backends import (
    DEVICES,
    ENGINE_PATH,
    LLM_FILES,
    OPENAI,
    RUNNING,
    TENSORRT_LLM,
    TRITON,
    VLLM_TENSORS,
    complete_vllm,
    embeds,
)
from trefoil.runtime.given.repository_names import (
    BATCH_MAX,
    CONFIG_BYTES_MAX,
    VERSION,
    boundary,
    check_file_name,
    check_files,
    check_name,
    names_below,
    read_text,
)

CONFIG: Final = "config.pbtxt"
ENGINES: Final = "tensorrt"  # the backend whose models are built for one type of GPU
GPU_ONLY: Final = (ENGINES, TENSORRT_LLM, *RUNNING)  # backends whose models no Triton of any machine can load
PYTHON: Final = "python"  # the backend of models that are code
FILES: Final = {"onnxruntime": "model.onnx", ENGINES: "model.plan", PYTHON: "variant.py"}
PLATFORMS: Final = {"onnxruntime_onnx": "onnxruntime", "tensorrt_plan": ENGINES}
PROBE_SEQUENCE: Final = 0x7472_6566_6F69_6C  # "trefoil": no client's, or it would meet a probe
ZERO_TEXT: Final = b"\x01\x00\x00\x000"  # the zero of strings in a probe: an empty one is refused by what generates
TRAINING: Final = "_training"  # folder of a repository with the scripts that make model files: not in the wheel
MAKERS: Final = ("export_{}.py", "train_{}.py")
DECODER: Final = "decoder.py"  # what a generative family's contract names as its default_model_filename
OPAQUE: Final = "opaque.py"  # what the contract of a family of python models names as its default_model_filename
TOKENS_MEAN: Final = "tokens_mean"  # parameter of a contract whose model is code and answers by streams
OURS: Final = ("model.py", DECODER, "decoding.py", OPAQUE)  # linked into versions by the agent: the first into all


TENSORS_MAX: Final = 256  # inputs, or outputs, of a model
DIMS_MAX: Final = 16
ELEMENTS_MAX: Final = 2**31  # of one item of a tensor: no request of gRPC holds more bytes
# What makes Triton load other code, or reads and writes other files, than those of the version.
FORBIDDEN: Final = ("ensemble_scheduling", "model_operations", "model_repository_agents", "model_warmup", "runtime")
CHAT_TEMPLATE: Final = "chat_template"  # parameter of a contract, and with .jinja the file that may hold it
RESERVED: Final = (CONFIG, "family.toml", "profile.csv", f"{CHAT_TEMPLATE}.jinja")  # in a family's folder
PATHS: Final = ("/", "\\", "\0", "..")
# Parameters that Triton or a backend takes for the name of a file; all others are metadata, and any text.
FILE_PARAMETER: Final = re.compile(r"(?i)path|file|dir|lib|^session\.|^ep\.")
THREADS: Final = "intra_op_thread_count"  # a parameter of the onnxruntime backend, which a slice sets
PROBE_SHAPE: Final = "trefoil_shape."
"""Parameter of a contract, with the name of an input after it: shape of one item that a probe sends, `3,640,640`."""


def read_contract(path: Path, below: Path | None = None) -> model_config_pb2.ModelConfig:
    """Parse one config.pbtxt; its names of files and its tensors are judged.

    Raises:
        CatalogError: it is not a model configuration, or a value of it is out of range.
        OSError: it cannot be read.
    """
    try:
        config = text_format.Parse(read_text(path, below, CONFIG_BYTES_MAX), model_config_pb2.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError, ArithmeticError, RecursionError) as error:
        raise CatalogError(f"{path} is not a Triton model configuration: {error}", remedy="fix that line") from error
    names = {"default_model_filename": config.default_model_filename}
    names |= {f"cc_model_filenames[{key}]": name for key, name in config.cc_model_filenames.items()}
    names |= {f"{tensor.name}.label_filename": tensor.label_filename for tensor in config.output}
    for field, name in names.items():
        if name:
            check_file_name(name, f"{path}: {field}")
    for tensor in config.output:
        if tensor.label_filename in RESERVED or VERSION.fullmatch(tensor.label_filename):
            remedy = "give the file of labels another name"
            raise CatalogError(
                f"{path}: is not a file of labels", field="label_filename", value=tensor.label_filename, remedy=remedy
            )
    for key in config.cc_model_filenames:
        check_file_name(key, f"{path}: cc_model_filenames")
    _check_range(path, "max_batch_size", config.max_batch_size, 0 <= config.max_batch_size <= BATCH_MAX, BATCH_MAX)
    for kind, tensors in (("input", config.input), ("output", config.output)):
        _check_range(path, kind, len(tensors), len(tensors) <= TENSORS_MAX, TENSORS_MAX)
        for tensor in tensors:
            check_dims(path, f"{tensor.name}.dims", tensor.dims)
            check_dims(path, f"{tensor.name}.reshape", tensor.reshape.shape)
    return config


def check_dims(path: Path, field: str, dims: Sequence[int]) -> None:
    """Check the shape of one item of a tensor: each dimension at least 1, or -1 where it is open.

    Raises:
        CatalogError: names the tensor.
    """
    _check_range(path, field, len(dims), len(dims) <= DIMS_MAX, f"{DIMS_MAX} dimensions")
    fits = all(dim == -1 or dim >= 1 for dim in dims) and math.prod(dim for dim in dims if dim > 0) <= ELEMENTS_MAX
    _check_range(path, field, list(dims), fits, f"{ELEMENTS_MAX} elements, each dimension >= 1 or -1")


def _check_range(path: Path, field: str, value: object, fits: bool, most: object) -> None:
    if not fits:
        raise CatalogError(f"{path}: at most {most}", field=field, value=value, remedy="correct that line")


def _texts(message: Message, place: str = "") -> Iterator[tuple[str, str]]:
    """Texts of a message by field, names of tensors apart: these are not names of files."""
    for field, value in message.ListFields():
        if field.name == "parameters" and not place:
            yield from ((f"parameters.{key}", value[key].string_value) for key in value if FILE_PARAMETER.search(key))
            continue
        entries = value.values() if hasattr(value, "values") else value if field.is_repeated else (value,)
        for entry in entries:
            if isinstance(entry, Message):
                yield from _texts(entry, f"{place}{field.name}.")
            elif isinstance(entry, str) and not (field.name == "name" and place):
                yield f"{place}{field.name}", entry


def contract(source: Path, family: str) -> model_config_pb2.ModelConfig:
    """Tensor contract of a family: names, types, shapes and largest batch that all of its variants share.

    Raises:
        CatalogError: the file is missing or is not a model configuration.
    """
    check_name(family, "family")
    path = source / family / CONFIG
    try:
        config = read_contract(path, boundary(source, family))
    except OSError as error:
        remedy, so = "add it, with input and output, to the family's folder", f"family {family} has no tensor contract"
        raise system_error(CatalogError, error, "be read", path, remedy=remedy, so=so) from error
    if backend_of(config) in VLLM_TENSORS and not embeds(config):
        complete_vllm(config)
    if backend_of(config) == TENSORRT_LLM:
        config.parameters.pop(ENGINE_PATH, None)
    _add_chat_template(config, path.with_name(f"{CHAT_TEMPLATE}.jinja"), boundary(source, family))
    if config.name != family or not config.input or not config.output:
        raise CatalogError(f"{path} needs name {family!r}, input and output", field="family", value=family)
    check_contract(config, path)
    return config


def _add_chat_template(config: model_config_pb2.ModelConfig, path: Path, below: Path | None) -> None:
    """Add the text of a family's chat template, if it is a file; a parameter of the contract goes before it."""
    if CHAT_TEMPLATE in config.parameters or not path.exists():
        return
    try:
        config.parameters[CHAT_TEMPLATE].string_value = read_text(path, below, CONFIG_BYTES_MAX)
    except UnicodeDecodeError as error:
        raise CatalogError(f"{path} is not UTF-8 text: {error}", remedy="save it as UTF-8") from error
    except OSError as error:
        remedy = "make it readable, or remove it"
        raise system_error(CatalogError, error, "be read", path, remedy=remedy) from error


def check_contract(config: model_config_pb2.ModelConfig, path: Path) -> None:
    """Check that a contract makes Triton read no file but those of its family, and no shape that a probe cannot have.

    Raises:
        CatalogError: naming the field.
    """
    present = {field.name for field, _ in config.ListFields()}
    for name in FORBIDDEN:
        if name in present:
            remedy = "remove it: slices are configured by the agent"
            raise CatalogError(f"{path}: a family's contract has none", field=name, remedy=remedy)
    for name in DEVICES:
        if name in config.parameters and (value := config.parameters[name].string_value):
            remedy = "remove it: a slice has one GPU"
            raise CatalogError(f"{path}: names devices", field=f"parameters.{name}", value=value, remedy=remedy)
    for tensor in config.input:
        probe_shape(config, tensor)
    for field, text in _texts(config):
        if any(part in text for part in PATHS):
            remedy = "name files beside the model, without a path"
            raise CatalogError(f"{path}: is a path", field=field, value=text, remedy=remedy)


def graph_dims(tensor: Any) -> tuple[int, ...]:
    """Shape of one item of a tensor as its model takes it: Triton reshapes what clients send."""
    return tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


def probe_shape(config: model_config_pb2.ModelConfig, tensor: Any) -> list[int]:
    """Shape of an input in a probe, of one item where the model batches: open dimensions by the contract's parameter
    `trefoil_shape.<input>`, else 1.

    Raises:
        CatalogError: that parameter is not a shape of the input.
    """
    dims = [max(1, size) for size in tensor.dims]
    field = PROBE_SHAPE + str(tensor.name)
    if field in config.parameters:
        text = str(config.parameters[field].string_value)
        fits = re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text)
        given = [int(size) for size in text.split(",")] if fits else []
        if not (
            len(given) == len(dims)
            and all(a == b or (a > 0 and b == -1) for a, b in zip(given, tensor.dims, strict=True))
        ):
            remedy = f"write sizes that fit dims {list(tensor.dims)}, as in 3,640,640"
            raise CatalogError("is not a shape of that input", field=field, value=text, remedy=remedy)
        check_dims(Path(CONFIG), field, given)
        dims = given
    return [1, *dims] if config.max_batch_size > 0 else dims


def graph_probe(config: model_config_pb2.ModelConfig, tensor: Any) -> list[int]:
    """Shape of one item of an input in a probe, as the model takes it after Triton's reshape."""
    shape = probe_shape(config, tensor)
    given = shape[1:] if config.max_batch_size > 0 else shape
    opened = iter([size for size, dim in zip(given, tensor.dims, strict=True) if dim == -1])
    return [next(opened, 1) if dim == -1 else dim for dim in graph_dims(tensor)]


def label_files(config: model_config_pb2.ModelConfig) -> tuple[str, ...]:
    """Files with the labels of outputs, beside the config.pbtxt."""
    return tuple(sorted({str(tensor.label_filename) for tensor in config.output if tensor.label_filename}))


def isolate_sequence(request: Any, config: model_config_pb2.ModelConfig) -> None:
    """Make a ModelInferRequest stand for itself where the model takes sequences only: one of one request."""
    if not config.HasField("sequence_batching"):
        return
    controls = [control for tensor in config.sequence_batching.control_input for control in tensor.control]
    textual = model_config_pb2.TYPE_STRING
    if any(each.kind == each.CONTROL_SEQUENCE_CORRID and each.data_type == textual for each in controls):
        request.parameters["sequence_id"].string_param = "trefoil-probe"
    else:
        request.parameters["sequence_id"].int64_param = PROBE_SEQUENCE
    request.parameters["sequence_start"].bool_param = request.parameters["sequence_end"].bool_param = True


def backend_of(config: model_config_pb2.ModelConfig) -> str:
    """Backend that the model's files are made for; "" when the configuration does not say."""
    return str(config.backend) or PLATFORMS.get(str(config.platform), str(config.platform))


def generative(config: model_config_pb2.ModelConfig) -> bool:
    """Whether `_shared/decoder.py` serves the family: a stream of tokens for each prompt."""
    return backend_of(config) == "python" and str(config.default_model_filename) == DECODER


def opaque(config: model_config_pb2.ModelConfig) -> bool:
    """Whether `_shared/opaque.py` serves the family: each variant is a python model."""
    return backend_of(config) == PYTHON and str(config.default_model_filename) == OPAQUE


def counts_decoding(config: model_config_pb2.ModelConfig) -> bool:
    """Whether `_shared` counts the time in which the family's model makes tokens, on Triton's metrics page."""
    return generative(config) or (opaque(config) and bool(config.model_transaction_policy.decoupled))


def starts_processes(config: model_config_pb2.ModelConfig) -> bool:
    """Whether a family's model may start processes, as engines of language models do."""
    return backend_of(config) in LLM_FILES or (opaque(config) and bool(config.model_transaction_policy.decoupled))


def not_graphs(config: model_config_pb2.ModelConfig) -> str:
    """What a family's versions are where they are not ONNX graphs, in words; "" where they are."""
    backend = backend_of(config)
    if backend == OPENAI:
        return "language models of engines that already run"
    if backend == TRITON:
        return "models of Tritons that already run"
    if backend in LLM_FILES:
        return f"language models of Triton's backend {backend}"
    return "TensorRT engines" if backend == ENGINES else "python models" if opaque(config) else ""


def shared_files(config: model_config_pb2.ModelConfig) -> tuple[str, ...]:
    """Files of `_shared` that a version of the family needs."""
    if backend_of(config) in LLM_FILES:
        return ()
    return OURS[:3] if generative(config) else (OURS[0], OPAQUE) if opaque(config) else OURS[:1]


def expected_files(config: model_config_pb2.ModelConfig) -> tuple[str, ...]:
    """Names of the files that every version folder has to hold.

    With `cc_model_filenames` Triton takes the file of the GPU's compute capability, and the default one elsewhere.
    """
    if opaque(config):
        return (FILES[PYTHON],)
    if (backend := backend_of(config)) in LLM_FILES:
        return (LLM_FILES[backend],)
    if backend != ENGINES:
        return (FILES["onnxruntime"],)
    by_gpu = sorted(set(config.cc_model_filenames.values()))
    default = str(config.default_model_filename)
    return tuple(dict.fromkeys([*by_gpu, *([default] if default else [])])) or (FILES[ENGINES],)


def version_files(source: Path, config: model_config_pb2.ModelConfig) -> dict[int, tuple[Path, ...]]:
    """Files of each complete version, those below its folder included (external data); what `judged_versions` refuses
    is left out.
    """
    return judged_versions(source, config)[0]


def judged_versions(
    source: Path, config: model_config_pb2.ModelConfig
) -> tuple[dict[int, tuple[Path, ...]], dict[int, str]]:
    """Files of each complete version of a contract's family, and why other versions are refused: a file leads out of
    the repository, is not a regular file, or there are too many.
    """
    family, expected = str(config.name), expected_files(config)
    found, refused, below = dict[int, tuple[Path, ...]](), dict[int, str](), boundary(source, family)
    for folder in (source / family).glob("[0-9]*"):
        if not VERSION.fullmatch(folder.name) or not folder.is_dir():
            continue
        try:
            files = check_files(folder, below, OURS if shared_files(config) else ())
        except (CatalogError, OSError) as error:
            refused[int(folder.name)] = str(error)
            continue
        if set(expected) <= names_below(folder, files).keys():
            found[int(folder.name)] = files
    return found, refused


def how_to_make(source: Path, family: str) -> str:
    """Remedy for a family without model files."""
    folder = source / family
    if SHIPPED != CHECKOUT and folder.resolve().is_relative_to(SHIPPED):
        scripts, own = MODELS / TRAINING, MODELS / family
        return f"make them in a checkout by its script in {scripts}, and copy {own} to your own repository"
    scripts = folder.resolve().parent / TRAINING
    maker = next((scripts / name.format(family) for name in MAKERS if (scripts / name.format(family)).is_file()), None)
    if maker is None:
        return f"put them into {folder}, or adopt an existing Triton repository with `trefoil family import`"
    return f"make them with {maker}, whose first lines say how"


def how_to_profile(config: model_config_pb2.ModelConfig) -> str:
    """Remedy for a family without a profile: only of graphs is one assumed."""
    measured = f"`trefoil family profile {config.name}` measures one"
    if not_graphs(config) or generative(config):
        return measured
    return f"{measured}, `trefoil family assume {config.name}` writes one from its graphs for a first look"

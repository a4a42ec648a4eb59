"""Model files of a family for Triton: its tensor contract (config.pbtxt) and the files of each version.

    <family>/config.pbtxt              name, max_batch_size, input, output: what all variants share; the backend
             <version>/model.onnx      backend onnxruntime (or none named): the graph, and external data beside it
             <version>/model.plan      backend tensorrt: an engine; several for GPU types by `cc_model_filenames`

A family may have no model files at all: the catalogue knows it, and only a slice that shall serve it refuses.
"""

from pathlib import Path
from typing import Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.core.errors import CatalogError
from trefoil.installation import CHECKOUT, MODELS, SHIPPED

CONFIG: Final = "config.pbtxt"
ENGINES: Final = "tensorrt"  # the backend whose models are built for one type of GPU
FILES: Final = {"onnxruntime": "model.onnx", ENGINES: "model.plan"}
PLATFORMS: Final = {"onnxruntime_onnx": "onnxruntime", "tensorrt_plan": ENGINES}
PROBE_SEQUENCE: Final = 0x7472_6566_6F69_6C  # "trefoil": no client's, or it would meet a probe
ZERO_TEXT: Final = b"\x01\x00\x00\x000"  # the zero of strings in a probe: an empty one is refused by what generates
MAKERS: Final = ("export.py", "train.py")
DECODER: Final = "decoder.py"  # what a generative family's contract names as its default_model_filename
OURS: Final = ("model.py", DECODER, "decoding.py")  # linked into versions by the agent: the first into all


def read_contract(path: Path) -> model_config_pb2.ModelConfig:
    """Parse one config.pbtxt.

    Raises:
        CatalogError: it is no model configuration.
        OSError: it cannot be read.
    """
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise CatalogError(f"{path} is no Triton model configuration: {error}", remedy="mend that line") from error


def contract(source: Path, family: str) -> model_config_pb2.ModelConfig:
    """Tensor contract of a family: names, types, shapes and largest batch that all of its variants share.

    Raises:
        CatalogError: the file is missing or is no model configuration.
    """
    path = source / family / CONFIG
    try:
        config = read_contract(path)
    except OSError as error:
        raise CatalogError(
            f"no tensor contract of family {family}: {path}: {error.strerror}",
            field="family",
            value=family,
            remedy="add config.pbtxt with max_batch_size, input and output to the family's folder",
        ) from error
    if config.name != family or not config.input or not config.output or config.max_batch_size < 1:
        raise CatalogError(
            f"{path} needs name {family!r}, max_batch_size >= 1, input and output", field="family", value=family
        )
    return config


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


def expected_files(config: model_config_pb2.ModelConfig) -> tuple[str, ...]:
    """Names of the files that every version folder has to hold.

    With `cc_model_filenames` Triton takes the file of the GPU's compute capability, and the default one elsewhere.
    """
    if backend_of(config) != ENGINES:
        return (FILES["onnxruntime"],)
    by_gpu = sorted(set(config.cc_model_filenames.values()))
    default = str(config.default_model_filename)
    return tuple(dict.fromkeys([*by_gpu, *([default] if default else [])])) or (FILES[ENGINES],)


def version_files(source: Path, family: str, expected: tuple[str, ...]) -> dict[int, tuple[Path, ...]]:
    """Files of each complete version, resolved, those beside the model included (external data)."""
    found: dict[int, tuple[Path, ...]] = {}
    for folder in (source / family).glob("[0-9]*"):
        if folder.name.isdigit() and all((folder / name).is_file() for name in expected):
            beside = (
                path for path in folder.iterdir() if path.is_file() and path.name not in OURS and path.name[0] != "."
            )
            found[int(folder.name)] = tuple(sorted(path.absolute() for path in beside))
    return found


def how_to_make(source: Path, family: str) -> str:
    """Remedy for a family without model files."""
    folder = source / family
    maker = next((folder / name for name in MAKERS if (folder / name).is_file()), None)
    if maker is None:
        return f"put them into {folder}, or adopt an existing Triton repository with `trefoil family import`"
    if SHIPPED != CHECKOUT and folder.resolve().is_relative_to(SHIPPED):
        return f"make them in a checkout by {MODELS / family / maker.name} and copy that folder to your own repository"
    return f"make them with {maker}, whose first lines say how"

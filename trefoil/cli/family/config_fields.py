"""What becomes of each field of a config.pbtxt when its model becomes a variant: carried over, left out and named in a
note, or refused. A field that is in none of these tables is refused.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from trefoil.runtime.given.llm_backends import DEVICES, TENSORRT_LLM, VLLM
from trefoil.runtime.model_files import ENGINES, FILE_PARAMETER, PROBE_SHAPE, PYTHON, THREADS, backend_of

CARRIED: Final = frozenset(
    {
        "name", "platform", "backend", "version_policy", "max_batch_size", "input", "output", "dynamic_batching",
        "default_model_filename", "cc_model_filenames", "parameters", "optimization", "model_transaction_policy",
    }
)  # fmt: skip
LEFT: Final[Mapping[str, str]] = {
    "instance_group": "the plan decides devices and instances",
    "model_warmup": "each load asks the model once before it serves",
    "response_cache": "an answer from a cache would hide what the variant costs",
    "metric_tags": "metrics are labelled by family and variant",
    "model_metrics": "metrics are labelled by family and variant",
}
OUTSIDE: Final = "serve it outside of a family"
REFUSED: Final[Mapping[str, str]] = {
    "runtime": "leave it out: no other library is loaded",
    "batch_input": OUTSIDE,
    "batch_output": OUTSIDE,
    "sequence_batching": OUTSIDE,
    "ensemble_scheduling": "import the model that costs most as the family, and call its neighbours from the client",
    "model_operations": "leave it out: no other library is loaded",
    "model_repository_agents": "leave it out: no other library is loaded",
}
TENSOR_CARRIED: Final = frozenset({"name", "data_type", "format", "dims", "reshape", "label_filename"})
BACKEND_CARRIED: Final[Mapping[str, frozenset[str]]] = {
    ENGINES: frozenset({"is_shape_tensor", "is_non_linear_format_io"}),
    PYTHON: frozenset({"optional"}),
    VLLM: frozenset({"optional"}),
    TENSORRT_LLM: frozenset({"optional", "allow_ragged_batch"}),
}
STREAMING: Final = (PYTHON, VLLM, TENSORRT_LLM)
"""Backends whose models may answer a request more than once."""
GROUP_LEFT: Final = frozenset({"name", "kind", "count", "gpus", "rate_limiter", "host_policy"})
ONE_VALUE: Final = "dims: [ 1 ] reshape { shape: [ ] }"
ALWAYS: Final = {"data_type": "write it, e.g. TYPE_FP32", "dims": f"write it; {ONE_VALUE} where each item is one value"}
"""What Triton wants of each tensor that a configuration names."""
ENVIRONMENT: Final = "EXECUTION_ENV_PATH"
TEXT_MAX: Final = 100  # characters of a value in a note


def _only_step(config: model_config_pb2.ModelConfig) -> str:
    """Remedy for an ensemble that runs one model; "" for anything else. No backend serves a model under other names."""
    steps = config.ensemble_scheduling.step
    if len(steps) != 1:
        return ""
    names = {**dict(steps[0].input_map), **dict(steps[0].output_map)}
    other = [f"{name} for {outside}" for name, outside in names.items() if name != outside]
    clients = f"; clients then name its tensors: {', '.join(sorted(other))}" if other else ""
    return f"import {steps[0].model_name}, the one model that it runs{clients}"


def refused_fields(config: model_config_pb2.ModelConfig) -> Iterator[tuple[str, object, str]]:
    """Fields that a variant cannot have: name, value, and what to do."""
    for field, value in config.ListFields():
        if field.name not in CARRIED and field.name not in LEFT:
            yield field.name, _text(value), _only_step(config) or REFUSED.get(field.name, OUTSIDE)
    if config.platform and config.backend == PYTHON:
        yield "platform", config.platform, "write model.py as a TritonPythonModel, and leave this out"
    if config.model_transaction_policy.decoupled and backend_of(config) not in STREAMING:
        yield "model_transaction_policy.decoupled", True, OUTSIDE
    carried = TENSOR_CARRIED | BACKEND_CARRIED.get(backend_of(config), frozenset())
    for tensor in (*config.input, *config.output):
        for field, value in tensor.ListFields():
            if field.name not in carried:
                yield f"{tensor.name}.{field.name}", value, "export it without"
        for name, remedy in ALWAYS.items():
            if not getattr(tensor, name):
                yield f"{tensor.name}.{name}", getattr(tensor, name) or None, remedy
    for field in DEVICES:
        if field in config.parameters and (value := config.parameters[field].string_value):
            yield f"parameters.{field}", value, "leave it out: the plan decides on which GPU it runs"
    for group in config.instance_group:
        for field, value in group.ListFields():
            if field.name not in GROUP_LEFT:
                yield f"instance_group.{field.name}", _text(value), "leave it out: the plan decides where it runs"
    if ENVIRONMENT in config.parameters:
        value = config.parameters[ENVIRONMENT].string_value
        yield f"parameters.{ENVIRONMENT}", value, "install its packages in Triton's own environment, and leave it out"


def left_fields(config: model_config_pb2.ModelConfig) -> Iterator[str]:
    """Fields that are not carried over, with their values and the reason."""
    for field, value in config.ListFields():
        if field.name in LEFT:
            yield f"{field.name} {_text(value)} is left out: {LEFT[field.name]}"
    if THREADS in config.parameters:
        value = config.parameters[THREADS].string_value
        yield f"parameters.{THREADS} {value} is left out: a slice shares out its cores"
    for name, text in _places(config).items():
        yield f"parameters.{name} {text} is left out: the engine is that of the version's folder"
    if config.HasField("optimization") and backend_of(config) != ENGINES:
        yield "optimization acts where Triton's onnxruntime backend serves, not under its python backend"


def shared_fields(config: model_config_pb2.ModelConfig) -> dict[str, object]:
    """Fields in which all variants agree, since one configuration serves them: name -> value."""
    found: dict[str, object] = {
        "backend": backend_of(config),
        "max_batch_size": config.max_batch_size,
        "dynamic_batching": _set(config, "dynamic_batching"),
        "model_transaction_policy": _set(config, "model_transaction_policy"),
        "optimization": _set(config, "optimization"),
        "cc_model_filenames": sorted(config.cc_model_filenames),
    }
    return found | {f"parameters.{name}": text for name, text in metadata(config).items()}


def metadata(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    """Parameters that are carried over: not the places of files, which a TensorRT-LLM model has by them."""
    left = {THREADS, *_places(config)}
    return {name: value.string_value for name, value in sorted(config.parameters.items()) if name not in left}


def _places(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    """Parameters of a TensorRT-LLM model that are paths of its machine."""
    found = {name: value.string_value for name, value in sorted(config.parameters.items())}
    of_files = backend_of(config) == TENSORRT_LLM
    return {name: text for name, text in found.items() if of_files and FILE_PARAMETER.search(name) and "/" in text}


def warm_shapes(config: model_config_pb2.ModelConfig) -> dict[str, str]:
    """Parameters with the shapes of the first sample that the model is warmed up with, of inputs that are open."""
    found = {}
    for sample in config.model_warmup[:1]:
        for tensor in config.input:
            if -1 in tensor.dims and tensor.name in sample.inputs and sample.inputs[tensor.name].dims:
                found[PROBE_SHAPE + tensor.name] = ",".join(map(str, sample.inputs[tensor.name].dims))
    return found


def _set(config: model_config_pb2.ModelConfig, name: str) -> str:
    """A field as text; an empty `dynamic_batching { }` is not the same as none."""
    return _text(getattr(config, name), whole=True) if config.HasField(name) else "none"


def _text(value: Any, *, whole: bool = False) -> str:
    if hasattr(value, "DESCRIPTOR"):
        text = f"{{ {text_format.MessageToString(value, as_one_line=True)} }}"
    elif isinstance(value, str | bytes | bool | int | float):
        text = str(value)
    elif hasattr(value, "items"):
        text = str({key: _text(value[key]) for key in sorted(value)})
    else:
        text = f"[{', '.join(_text(one) for one in value)}]"
    return text if whole or len(text) <= TEXT_MAX else f"{text[:TEXT_MAX]}..."

"""Backends that serve language models: their files, the tensors that vLLM's completes, and the API of a family.

    <version>/model.json     backend vllm: keyword arguments of vLLM's engine
    <version>/config.json    backend tensorrtllm: an engine's folder, as trtllm-build writes it
    <version>/engine.json    backends openai and triton, none of Triton's: {"model": its name}, at an engine, or at a
                             Triton, that already runs

Source: triton-inference-server/vllm_backend src/model.py, tensorrtllm_backend all_models/inflight_batcher_llm.
"""

import json
from pathlib import Path
from typing import Any, Final, Literal

from tritonclient.grpc import model_config_pb2

from trefoil.core.errors import CatalogError
from trefoil.runtime.given.repository_names import CONFIG_BYTES_MAX, read_text

VLLM: Final = "vllm"
TENSORRT_LLM: Final = "tensorrtllm"
OPENAI: Final = "openai"
TRITON: Final = "triton"
RUNNING: Final = (OPENAI, TRITON)
"""Backends of families that servers serve which already run."""
LLM_FILES: Final = {VLLM: "model.json", TENSORRT_LLM: "config.json", **dict.fromkeys(RUNNING, "engine.json")}
"""Backends whose versions are folders that the backend reads by itself, and the file that each version has."""
VLLM_TENSORS: Final = (VLLM, OPENAI)
"""Backends whose families have the tensors of vLLM's."""
DEVICES: Final = ("GPU_DEVICE_IDS", "gpu_device_ids")
"""Parameters by which a backend takes other GPUs than that of its slice."""
ENGINE_PATH: Final = "gpt_model_path"
"""Parameter with the folder of a TensorRT-LLM engine: on a slice its version's, whatever a contract says."""
PROMPT: Final = "text_input"
ANSWER: Final = "text_output"
EMBEDDING: Final = "embedding"
DIMENSIONS: Final = "dimensions"
"""Input of a family, or parameter of its contract (`"64,128"`): sizes to which its vectors may be cut."""
SAMPLING: Final = "sampling_parameters"
MAX_TOKENS: Final = "max_tokens"
TOKENS_OUT: Final = "num_output_tokens"
TOKENS_IN: Final = "num_input_tokens"
REASON: Final = "finish_reason"
TOOL_CALLS: Final = "tool_calls"
"""Output of an engine that already runs: JSON of the parts of calls of tools, where an answer has any."""
LENGTHS: Final = (MAX_TOKENS, "request_output_len", "input_lengths")  # TensorRT-LLM's inputs that may not be 0
TEXTS_MAX: Final = 32
"""Texts of one request to an engine that makes embeddings: the default bound of text-embeddings-inference."""
ENGINE_REMEDY: Final = 'write the name that the engine has for it: {"model": "..."}'
_FLAGS: Final = (
    "stream", "exclude_input_in_output", "return_finish_reason", "return_cumulative_logprob", "return_logprobs",
    "return_num_input_tokens", "return_num_output_tokens",
)  # fmt: skip
_OUTPUTS: Final = {
    ANSWER: "TYPE_STRING", REASON: "TYPE_STRING", "cumulative_logprob": "TYPE_FP32",
    "logprobs": "TYPE_STRING", TOKENS_IN: "TYPE_UINT32", TOKENS_OUT: "TYPE_UINT32",
}  # fmt: skip
Api = Literal["vllm", "tensorrtllm", "trefoil", ""]


def complete_vllm(config: model_config_pb2.ModelConfig) -> None:
    """Complete a configuration as the vLLM backend does: tensors that it lacks, decoupled, no batch dimension.

    `image` and `embedding_request` are left to configurations that name them.
    """
    of_inputs, of_outputs = {tensor.name for tensor in config.input}, {tensor.name for tensor in config.output}
    texts = [(PROMPT, "TYPE_STRING", False), (SAMPLING, "TYPE_STRING", True)]
    for name, kind, optional in (*texts, *((flag, "TYPE_BOOL", True) for flag in _FLAGS)):
        if name not in of_inputs:
            config.input.add(name=name, data_type=model_config_pb2.DataType.Value(kind), dims=[1], optional=optional)
    for name, kind in _OUTPUTS.items():
        if name not in of_outputs:
            config.output.add(name=name, data_type=model_config_pb2.DataType.Value(kind), dims=[-1])
    config.model_transaction_policy.decoupled = True
    config.max_batch_size = 0


def complete_embeddings(config: model_config_pb2.ModelConfig) -> None:
    """Complete the configuration of a family whose engines already run and make embeddings."""
    kind = model_config_pb2.DataType.Value
    config.input.add(name=PROMPT, data_type=kind("TYPE_STRING"), dims=[1])
    config.input.add(name=DIMENSIONS, data_type=kind("TYPE_INT32"), dims=[1], optional=True)
    config.output.add(name=EMBEDDING, data_type=kind("TYPE_FP32"), dims=[-1])
    config.output.add(name=TOKENS_IN, data_type=kind("TYPE_UINT32"), dims=[1])
    config.max_batch_size = TEXTS_MAX


def engine_args(path: Path, below: Path | None) -> dict[str, Any]:
    """Arguments of vLLM's engine in a model.json. Their names are the engine's to judge, when it loads them.

    Raises:
        CatalogError: it is not a JSON object, or its engine wants more GPUs than a slice has.
        OSError: it cannot be read.
    """
    remedy = 'write the arguments of vLLM\'s engine as one JSON object, e.g. {"model": "...", "max_model_len": 8192}'
    try:
        args = json.loads(read_text(path, below, CONFIG_BYTES_MAX))
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{path} is not JSON: {error}", remedy=remedy) from error
    if not isinstance(args, dict):
        raise CatalogError(f"{path} is not a JSON object but {type(args).__name__}", remedy=remedy)
    for field in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        if (value := args.get(field, 1)) != 1:
            raise CatalogError(f"{path}: a slice has one GPU", field=field, value=value, remedy="write 1, or remove it")
    return args


def engine_model(path: Path, below: Path | None) -> str:
    """Name of a variant's model at an engine that already runs, by its engine.json.

    Raises:
        CatalogError: it is not a JSON object with that name.
        OSError: it cannot be read.
    """
    try:
        given = json.loads(read_text(path, below, CONFIG_BYTES_MAX))
        if given.keys() == {"model"} and given["model"] and isinstance(given["model"], str):
            return str(given["model"])
    except (ValueError, AttributeError, RecursionError) as error:
        raise CatalogError(f"{path} is not a JSON object: {error}", remedy=ENGINE_REMEDY) from error
    raise CatalogError(f"{path} names no model", remedy=ENGINE_REMEDY)


def api_of(config: model_config_pb2.ModelConfig) -> Api:
    """API by which a generative family is asked, by the tensors of its contract; "" = none of them.

    `vllm`: text_input and sampling_parameters (JSON), shape [1]. `tensorrtllm`: text_input, and a tensor for each
    parameter (max_tokens), with a batch dimension. `trefoil`: PROMPT and TOKEN.
    """
    inputs, outputs = {tensor.name for tensor in config.input}, {tensor.name for tensor in config.output}
    if "PROMPT" in inputs and "TOKEN" in outputs:
        return "trefoil"
    if PROMPT in inputs and ANSWER in outputs:
        return VLLM if SAMPLING in inputs else TENSORRT_LLM if MAX_TOKENS in inputs else ""
    return ""


def embeds(config: model_config_pb2.ModelConfig) -> bool:
    """Whether a family makes a vector of each text: `text_input` to `embedding` (FP32), one answer a request."""
    texts = {tensor.name for tensor in config.input if tensor.data_type == model_config_pb2.TYPE_STRING}
    floats = {tensor.name for tensor in config.output if tensor.data_type == model_config_pb2.TYPE_FP32}
    return PROMPT in texts and EMBEDDING in floats and not config.model_transaction_policy.decoupled


def stream_inputs(
    config: model_config_pb2.ModelConfig, prompt: bytes, max_tokens: int | None, **sampling: object
) -> dict[str, bytes | bool | int]:
    """Inputs of one stream by the API of a generative family, the prompt first; `sampling` where the API takes it."""
    known, limit = {tensor.name for tensor in config.input}, {} if max_tokens is None else {MAX_TOKENS: max_tokens}
    api = api_of(config)
    found: dict[str, bytes | bool | int]
    if api == VLLM:
        found = {PROMPT: prompt, "stream": True, SAMPLING: json.dumps(limit | sampling).encode()}
    elif api == TENSORRT_LLM:
        found = {PROMPT: prompt, "stream": True, **limit}
    else:
        found = {"PROMPT": prompt, **{name.upper(): tokens for name, tokens in limit.items()}}
    found[f"return_{TOKENS_OUT}"] = True
    return {name: value for name, value in found.items() if name in known or value is prompt}


def ask_one_token(request: Any, config: model_config_pb2.ModelConfig) -> None:
    """Make a probe, a ModelInferRequest of zeros, ask for one token where its model is a language model."""
    if api_of(config) == VLLM:
        request.inputs.add(name=SAMPLING, datatype="BYTES", shape=[1])
        text = json.dumps({MAX_TOKENS: 1}).encode()
        request.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    elif TENSORRT_LLM in (api_of(config), str(config.backend)):
        for at, tensor in enumerate(request.inputs):
            if tensor.name in LENGTHS:
                request.raw_input_contents[at] = (1).to_bytes(len(request.raw_input_contents[at]), "little")


def unasked_outputs(config: model_config_pb2.ModelConfig) -> frozenset[str]:
    """Outputs that are in an answer only where its request asks for them."""
    if api_of(config) not in (VLLM, TENSORRT_LLM) and str(config.backend) not in LLM_FILES.keys() - {TRITON}:
        return frozenset()
    return frozenset(tensor.name for tensor in config.output) - {ANSWER, "output_ids"}

"""A family of language models for tests, served by a real Triton with a stand-in for its vLLM backend.

`chat` has two variants, `chat-small` and `chat-large`, whose versions hold a model.json as vLLM's users write it.
`environment` is one of Triton's with `tests/support/vllm_backend` as its backend `vllm`: set triton_environment to it.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from power_agent.triton.installation import TritonInstall, find_triton, prepare_triton
from tests.support.triton_process import ENVIRONMENT, MODELS
from tests.support.vllm_backend import language
from trefoil.core.fleet import Hosted
from trefoil.runtime.given.llm_backends import complete_vllm

FAMILY = "chat"
NAMES = ("chat-small", "chat-large")
PLACES = 8  # streams that a slice's profile goes up to
TOKENS_MEAN = 12
STEP_MS = 2.0
CONTEXT = 256  # max_model_len, in tokens
BACKEND = Path(language.__file__).parent
FAMILY_TOML = f"""
name = "{FAMILY}"
metric = "share of questions answered"
generative = true
tokens_mean = {TOKENS_MEAN}

[classes.""]
percentile = 95.0
latency_ms = 2000.0
"""
VARIANT = """
[[variants]]
name = "{name}"
version = {version}
accuracy = {accuracy}
accuracy_source = "stated"
memory_mib = 4000
load_s = 1.0
macs = 0
licence = "none"
"""
COLUMNS = (
    "device_type,slice_type,variant,stage,batch,clock_mhz,cohosted,latency_ms_p50,latency_ms_p95,latency_ms_p99,"
    "throughput_per_s,energy_active_j_per_batch,power_w,memory_mib"
)


def engine_args(version: int, **more: object) -> dict[str, object]:
    """The model.json of a version."""
    own = {"step_ms": STEP_MS * version, "tokens_mean": TOKENS_MEAN}
    args = {"model": NAMES[version - 1], "max_model_len": CONTEXT, "max_num_seqs": PLACES, "enforce_eager": True}
    return args | {"hf_overrides": own} | more


def write_family(repository: Path, *, python: bool = False, **more: object) -> Path:
    """Write the family's folder as a user would by hand; returns it. `more`: keys of every model.json.

    `python`: served by Triton's python backend instead, with the stand-in's code in each version. That needs no
    `environment`, and keeps the pace of a simulated slice.
    """
    folder = repository / FAMILY
    folder.mkdir(parents=True)
    config = model_config_pb2.ModelConfig(name=FAMILY, backend="vllm")
    if python:
        complete_vllm(config)
        config.backend, config.default_model_filename = "python", "opaque.py"
        config.parameters["tokens_mean"].string_value = str(TOKENS_MEAN)
        (repository / "_shared").symlink_to(MODELS / "_shared")
    (folder / "config.pbtxt").write_text(text_format.MessageToString(config))
    variants = [VARIANT.format(name=name, version=v, accuracy=0.5 + 0.1 * v) for v, name in enumerate(NAMES, 1)]
    (folder / "family.toml").write_text(FAMILY_TOML + "".join(variants))
    for version in (1, 2):
        (folder / str(version)).mkdir()
        if python:
            shutil.copy(BACKEND / "model.py", folder / str(version) / "variant.py")
            shutil.copy(BACKEND / "language.py", folder / str(version))
        (folder / str(version) / "model.json").write_text(json.dumps(engine_args(version, **more)))
    (folder / "profile.csv").write_text(_profile())
    return folder


def _profile() -> str:
    """Synthetic times of A100 slices: a step of b streams takes 0.86 + 0.14 b times that of one."""
    lines = [
        "# basis: synthetic",
        "# source: tests",
        "# machine: none",
        "# date: 2026-11-29",
        "# commit: none",
        COLUMNS,
    ]
    for slice_type, speed in {"1g.5gb": 1, "2g.10gb": 1.8, "3g.20gb": 2.5, "4g.20gb": 3, "7g.40gb": 4}.items():
        for version, name in enumerate(NAMES, 1):
            for batch in (1, 2, 4, PLACES):
                mean_ms = 4 * STEP_MS * version / speed * (0.86 + 0.14 * batch) * (TOKENS_MEAN + 1)
                power_w = 25.0 * speed
                numbers = (mean_ms, 1.5 * mean_ms, 2 * mean_ms, 1e3 * batch / mean_ms, power_w * mean_ms / 1e3, power_w)
                point = f"A100-SXM4-40GB,{slice_type},{name},0,{batch},1410,,"
                lines.append(point + ",".join(f"{number:.6f}" for number in numbers) + ",4000")
    return "\n".join(lines) + "\n"


def hosted(version: int) -> Hosted:
    return Hosted(FAMILY, NAMES[version - 1], version, 0, 1, 1, PLACES)


def answer(version: int, prompt: str, **sampling: object) -> list[tuple[str, int, str]]:
    """Text, tokens and finish reason of each choice, by the model alone."""
    name = NAMES[version - 1]
    return language.answer(name, prompt, sampling, tokens_mean=TOKENS_MEAN, max_model_len=CONTEXT)


def request(prompt: str | bytes, stream: bool | None = True, sampling: object = None, **flags: bool) -> Any:
    """A ModelInferRequest by the vLLM backend's tensors. `sampling`: None = no tensor; `flags`: e.g.
    return_num_output_tokens."""
    made = pb.ModelInferRequest(model_name=FAMILY)
    texts = {"text_input": prompt if isinstance(prompt, bytes) else prompt.encode()}
    if sampling is not None:
        texts["sampling_parameters"] = sampling if isinstance(sampling, bytes) else json.dumps(sampling).encode()
    for name, text in texts.items():
        made.inputs.add(name=name, datatype="BYTES", shape=[1])
        made.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    for name, value in {**({} if stream is None else {"stream": stream}), **flags}.items():
        made.inputs.add(name=name, datatype="BOOL", shape=[1])
        made.raw_input_contents.append(bytes([value]))
    return made


def outputs(answer: Any) -> dict[str, list[Any]]:
    """Tensors of a ModelStreamInferResponse by name, as lists of bytes or numbers."""
    found: dict[str, list[Any]] = {}
    response = answer.infer_response
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            found[tensor.name] = list(deserialize_bytes_tensor(raw))
        else:
            found[tensor.name] = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).tolist()
    return found


def environment(folder: Path) -> Path:
    """An environment of Triton's below `folder`, as TREFOIL_TRITON_ENVIRONMENT names one, whose Triton has the stand-in
    as its backend `vllm`; all else of it is the checkout's."""
    own = folder / "triton-environment"
    if not own.exists():
        shutil.copytree(
            ENVIRONMENT, own, copy_function=_link, symlinks=True
        )  # links out of it would not be let through
        [backends] = own.glob("lib/python3.*/site-packages/pytriton/tritonserver/backends")
        shutil.copytree(BACKEND, backends / "vllm", ignore=shutil.ignore_patterns("__*"))
    return own


def installation(folder: Path) -> TritonInstall:
    """The Triton of `environment`, ready to start."""
    found = find_triton(None, environment(folder))
    prepare_triton(found)
    return found


def _link(source: str, target: str) -> None:
    """A hard link; a copy across file systems."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)

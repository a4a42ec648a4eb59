"""One run of ONNX graphs with zeros: run as a script in the Triton environment.

    python graph_run.py '{"inputs": {"IMAGE": [3, 224, 224]}, "outputs": {"LOGITS": [1000]}, "batches": [1, 2]}' \
        MODEL.onnx ...   ->   one JSON text a graph, in the same order: why it cannot serve, "" where it can

`batches`: each is run and has to be the first dimension of every output; none: the model does not batch. Memory is
bounded by that of the machine, since a graph may ask for any.
"""

import json
import os
import resource
import sys
from typing import Any

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as state

TYPES: dict[str, Any] = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "string": np.object_, "bool": np.bool_,
    **{f"{sign}int{bits}": np.dtype(f"{sign}int{bits}").type for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
ERRORS: tuple[type[Exception], ...] = (
    state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf, state.NoSuchFile,
    state.NotImplemented, state.RuntimeException, RuntimeError, KeyError, ValueError, MemoryError,
)  # fmt: skip


def why_not(path: str, wanted: dict[str, Any]) -> str:
    """Why a graph cannot be run as the contract says; "" where it can."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        for batch in wanted["batches"] or [None]:
            first = [] if batch is None else [batch]
            feeds = {}
            for tensor in session.get_inputs():
                dtype = TYPES[tensor.type.removeprefix("tensor(").removesuffix(")")]
                shape = [*first, *wanted["inputs"][tensor.name]]
                feeds[tensor.name] = np.full(shape, "0" if dtype is np.object_ else 0, dtype)
            outputs = session.run(list(wanted["outputs"]), feeds)
            for (name, dims), output in zip(wanted["outputs"].items(), outputs, strict=True):
                have, want = list(np.shape(output)), [*first, *dims]
                if len(have) != len(want) or any(b not in (-1, a) for a, b in zip(have, want, strict=True)):
                    return f"output {name} of inputs {shapes(feeds)} is {have}, config.pbtxt says {want}"
    except ERRORS as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"ONNX Runtime {onnxruntime.__version__} says: {lines[0]}"
    return ""


def shapes(feeds: dict[str, Any]) -> dict[str, list[int]]:
    """Shapes of arrays, by name."""
    return {name: list(array.shape) for name, array in feeds.items()}


if __name__ == "__main__":
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for graph in sys.argv[2:]:
        print(json.dumps(why_not(graph, json.loads(sys.argv[1]))), flush=True)

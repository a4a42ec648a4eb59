"""Cost of ONNX graphs by ONNX Runtime's own profile of one pass: run as a script in the Triton environment.

    python graph_costs.py '{"IMAGE": [3, 224, 224]}' MODEL.onnx ...   ->   one JSON object a graph, in the same order

ONNX Runtime reports the input and output shapes of each kernel in a pass of one item (of n by the entry `"": [n]`). So
nothing is guessed. `macs` are of convolutions, matrix products and recurrent layers. `written` counts elements of
outputs, `kernels` the kernels; both leave out mere changes of shape. `uncounted` has the operators whose multiply-adds
are not counted, with their number. `operators` has each one with its FLOPs (two a multiply-add, elsewhere one an
element) and the bytes that it reads and writes. With it are shape and type of its first output, and types and shapes of
its inputs that are there.
"""

import json
import os
import sys
import tempfile
from math import prod
from typing import Any

import numpy as np
import onnxruntime

FREE = {"Constant", "ConstantOfShape", "Flatten", "Identity", "Reshape", "Shape", "Squeeze", "Unsqueeze"}
# Products that one more operand than these would hide: what they do is not counted, and said.
UNCOUNTED = {"Attention", "Einsum", "FusedMatMul", "MatMulNBits", "MultiHeadAttention", "QAttention"}
TYPES = {
    "float": np.float32, "double": np.float64, "float16": np.float16, "int64": np.int64, "int32": np.int32,
    "int8": np.int8, "uint8": np.uint8, "bool": np.bool_, "string": np.object_,
}  # fmt: skip


def shapes_of(entries: list[dict[str, list[int]]]) -> list[list[int]]:
    """Shapes of tensors as the profile lists them: [{"float": [1, 3, 8, 8]}, ...]."""
    return [next(iter(entry.values()), []) for entry in entries]


def macs_of(operator: str, ins: list[list[int]], outs: list[list[int]]) -> int:
    """Multiply-adds of one kernel."""
    if operator in ("Conv", "QLinearConv", "ConvInteger"):
        return prod(outs[0]) * prod(ins[1 if operator != "QLinearConv" else 3][1:])
    if operator == "ConvTranspose":
        return prod(ins[0]) * prod(ins[1][1:])
    if operator in ("MatMul", "MatMulInteger"):
        return prod(outs[0]) * (ins[0][-1] if ins[0] else 1)
    if operator == "Gemm":
        return prod(outs[0]) * (prod(ins[0]) // max(1, outs[0][0]))
    if operator in ("LSTM", "GRU", "RNN"):
        return prod(ins[0][:2]) * (prod(ins[1]) + prod(ins[2]))
    return 0


def operator_of(event: dict[str, Any]) -> dict[str, Any]:
    """Name, kind, FLOPs and bytes of one kernel; a mere change of shape does nothing."""
    args = event["args"]
    name, operator = event["name"].removesuffix("_kernel_time"), args["op_name"]
    ins, outs = shapes_of(args["input_type_shape"]), shapes_of(args["output_type_shape"])
    types = [next(iter(entry)) for entry in args["input_type_shape"]]
    found = {"name": name, "operator": operator, "flops": 0, "bytes": 0, "shape": outs[0]}
    found |= {"inputs": list(zip(types, ins, strict=True)), "type": next(iter(args["output_type_shape"][0]))}
    if operator in FREE:
        return found
    elements = [sum(prod(shape) for shape in shapes) for shapes in (ins[:1], outs)]
    flops = 2 * macs_of(operator, ins, outs) or max(elements)
    moved = sum(int(args[size]) for size in ("activation_size", "parameter_size", "output_size"))
    return found | {"flops": flops, "bytes": moved}


def pass_of(path: str, given: dict[str, list[int]]) -> Any:
    """One pass of a graph, profiled."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.enable_profiling = True
    options.add_session_config_entry("session.disable_prepacking", "1")  # packed weights would be missing among inputs
    with tempfile.TemporaryDirectory(prefix="trefoil-graph-") as folder:
        options.profile_file_prefix = os.path.join(folder, "pass")
        return _profiled(path, options, given)


def _profiled(path: str, options: onnxruntime.SessionOptions, given: dict[str, list[int]]) -> Any:
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    feeds: dict[str, Any] = {}
    rng = np.random.default_rng(1)
    for tensor in session.get_inputs():
        kind = tensor.type.removeprefix("tensor(").removesuffix(")")
        shape = [*given.get("", [1]), *given.get(tensor.name, tensor.shape[1:])]
        if kind not in TYPES:
            raise SystemExit(f"input {tensor.name} of type {tensor.type} cannot be generated")
        if any(not isinstance(size, int) or size < 1 for size in shape):
            raise SystemExit(f"the shape {tensor.shape[1:]} of input {tensor.name} is open")
        floats = np.issubdtype(TYPES[kind], np.floating)
        made = rng.standard_normal(shape) if floats else np.full(shape, "0" if kind == "string" else 0)
        feeds[tensor.name] = made.astype(TYPES[kind])
    session.run(None, feeds)
    with open(session.end_profiling()) as file:
        return json.load(file)


def costs(path: str, given: dict[str, list[int]]) -> dict[str, Any]:
    """What one pass of one item does."""
    found: dict[str, Any] = {"macs": 0, "written": 0, "kernels": 0, "uncounted": {}, "operators": []}
    for event in pass_of(path, given):
        args = event.get("args", {})
        operator = args.get("op_name", "")
        if event.get("cat") != "Node" or "output_type_shape" not in args:
            continue
        found["operators"].append(operator_of(event))
        if operator in FREE:
            continue
        ins, outs = shapes_of(args["input_type_shape"]), shapes_of(args["output_type_shape"])
        found["macs"] += macs_of(operator, ins, outs)
        found["written"] += sum(prod(shape) for shape in outs)
        found["kernels"] += 1
        if operator in UNCOUNTED:
            found["uncounted"][operator] = found["uncounted"].get(operator, 0) + 1
    return found


if __name__ == "__main__":
    for graph in sys.argv[2:]:
        print(json.dumps(costs(graph, json.loads(sys.argv[1]))), flush=True)

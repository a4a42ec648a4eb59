"""Graphs that run one operator of a model again and again, so that a Triton can be asked how long it takes.

Source: mu-Serve section 3.1 runs each operator alone, with each of its shapes, 5000 times, and takes the mean.
Formulation: a graph takes X [n, 1] and passes n times through a loop of COPIES copies of the operator. So its time is
    a + n COPIES t: what comes before and after the loop, and the request itself, are in a. Each copy reads separate
    tensors, computed from X, so that ONNX Runtime can neither compute them beforehand nor take several for one. Weights
    are the model's. X is in [0, 1), and what is computed from it in [0.5, 1): no value is false, whole numbers are 0.
Operators that are equal but for the values of their weights are timed once. Needs the package onnx.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from trefoil.profiler.assumed import OperatorCost
from trefoil.profiler.split import computing

COPIES: Final = 8
INPUT, OUTPUT, COPY = "X", "Y", "copy"
WHOLE: Final = ("int64", "int32")  # types of constants that say what an operator does, as axes and pads do
TYPES: Final = {
    "float": "FLOAT", "double": "DOUBLE", "float16": "FLOAT16", "int64": "INT64", "int32": "INT32", "int8": "INT8",
    "uint8": "UINT8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RepeatedOperator:
    """Operators that are timed as one, by name, what one of them does, and the graph that repeats it."""

    names: tuple[str, ...]
    cost: OperatorCost
    graph: Any


def repeated_operators(model: Any, costs: Sequence[OperatorCost]) -> tuple[list[RepeatedOperator], dict[str, str]]:
    """Graphs of all operators that do something, and why there is none, by the name of the operator.

    `model`: an onnx.ModelProto whose nodes have names; `costs`: of its operators.
    """
    nodes, whys, groups = {node.name: node for node in model.graph.node}, dict[str, str](), dict[Any, list[str]]()
    made = {value.name for value in model.graph.input} - {one.name for one in model.graph.initializer}
    made |= {name for node in computing(model.graph) for name in node.output}
    by_name = {cost.name: cost for cost in costs if cost.bytes}
    for cost in by_name.values():
        node = nodes.get(cost.name)
        if why := _unfit(node, cost, made):
            whys[cost.name] = why
        else:
            groups.setdefault(_key(model.graph, node, cost), []).append(cost.name)
    found = []
    for names in groups.values():
        cost = by_name[names[0]]
        found.append(RepeatedOperator(tuple(names), cost, _repeated(model, nodes[names[0]], cost, made)))
    return found, whys


def _unfit(node: Any, cost: OperatorCost, made: set[str]) -> str:
    if node is None:
        return "ONNX Runtime runs it as other operators"
    if any(attribute.HasField("g") for attribute in node.attribute):
        return "it has graphs of its own"
    if not made.intersection(node.input):
        return "it is done once, when the model is loaded"
    if len([name for name in node.input if name]) != len(cost.inputs):
        return "the types of its inputs are not known"
    unknown = sorted({kind for kind, _ in (*cost.inputs, (cost.type, ()))} - TYPES.keys())
    return f"{', '.join(unknown)} cannot be generated" if unknown else ""


def _key(graph: Any, node: Any, cost: OperatorCost) -> Any:
    """What makes two operators equal: kind, attributes, types and shapes, and the values of whole constants."""
    values = {one.name: one for one in graph.initializer}
    values |= {one.output[0]: one.attribute[0].t for one in graph.node if one.op_type == "Constant"}
    there = [name for name in node.input if name]
    whole = [
        values[name] for name, (kind, _) in zip(there, cost.inputs, strict=True) if kind in WHOLE and name in values
    ]
    said = tuple((one.raw_data, *one.int64_data, *one.int32_data) for one in whole)
    attributes = tuple(sorted(attribute.SerializeToString() for attribute in node.attribute))
    inputs = tuple((kind, tuple(shape)) for kind, shape in cost.inputs)
    missing = tuple(not name for name in (*node.input, *node.output))
    return node.domain, node.op_type, attributes, inputs, tuple(cost.shape), missing, said


def _repeated(model: Any, node: Any, cost: OperatorCost, made: set[str]) -> Any:
    """The graph of one operator; `made`: tensors of the model that are made of its inputs."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    given = {name: one for name, one in zip(filter(None, node.input), cost.inputs, strict=True) if name in made}
    weights = _behind(model.graph, [name for name in node.input if name and name not in made])
    constants, before = list(weights[0]), list(weights[1])

    def constant(name: str, values: Any, kind: str) -> str:
        import numpy as np

        constants.append(numpy_helper.from_array(np.array(values, kind), name))
        return name

    def add(operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        before.append(helper.make_node(operator, inputs, [output], **attributes))
        return output

    add("Gather", [add("Shape", [INPUT], "_shape"), constant("_0", 0, "int64")], "_runs")
    add(
        "Reshape", [add("Gather", [INPUT, constant("_row", [0], "int64")], "_item"), constant("_1", [1], "int64")], "_x"
    )
    out_type = getattr(TensorProto, TYPES[cost.type])
    copies, first, begun, carried, ended = [], list[str](), list[str](), list[str](), list[str]()
    for copy in range(COPIES):
        seed = add("Max", ["_x", constant(f"_c{copy}", [0.5 + copy / (2 * COPIES)], "float32")], f"_v{copy}")
        own = {}
        for at, (name, (kind, shape)) in enumerate(given.items()):
            cast = add("Cast", [seed], f"_t{at}_{copy}", to=getattr(TensorProto, TYPES[kind]))
            own[name] = add("Expand", [cast, constant(f"_s{at}_{copy}", shape, "int64")], f"_in{at}_{copy}")
        one = onnx.NodeProto()
        one.CopyFrom(node)
        one.name = f"{COPY}{copy}"
        one.input[:] = [own.get(name, name) for name in node.input]
        one.output[:] = [f"_out{at}_{copy}" if name else "" for at, name in enumerate(node.output)]
        copies.append(one)
        first.append(add("Cast", [seed], f"_begin{copy}", to=out_type))
        begun.append(f"_before{copy}")
        carried.append(next(name for name in one.output if name))
        ended.append(f"_end{copy}")
    going = helper.make_node("Identity", ["_go"], ["_goes"])
    value = helper.make_tensor_value_info
    head = [value("_i", TensorProto.INT64, []), value("_go", TensorProto.BOOL, [])]
    body = helper.make_graph(
        [going, *copies], "copies", [*head, *(value(name, out_type, None) for name in begun)],
        [value("_goes", TensorProto.BOOL, []), *(value(name, out_type, None) for name in carried)],
    )  # fmt: skip
    before.append(helper.make_node("Loop", ["_runs", constant("_yes", True, "bool"), *first], ended, body=body))
    add("Add", [INPUT, add("Cast", [add("Size", ended[:1], "_size")], "_number", to=TensorProto.FLOAT)], OUTPUT)
    ends = ([value(name, TensorProto.FLOAT, ["n", 1])] for name in (INPUT, OUTPUT))
    found = onnx.ModelProto()
    found.CopyFrom(onnx.ModelProto(ir_version=model.ir_version, opset_import=model.opset_import))
    found.functions.extend(model.functions)
    found.graph.CopyFrom(helper.make_graph(before, "repeated", *ends, constants))
    return found


def _behind(graph: Any, names: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Weights that tensors are made of, and the nodes that make these of them, in their order."""
    wanted, nodes = set(names), []
    for node in reversed(graph.node):
        if wanted.intersection(node.output):
            nodes.append(node)
            wanted.update(node.input)
    return [one for one in graph.initializer if one.name in wanted], nodes[::-1]

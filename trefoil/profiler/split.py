"""Cut an ONNX graph into stages of a pipeline, at borders of operator clusters where a single tensor passes.

Needs the package onnx (`trefoil[stages]`). Data: the graph, and the scores and times of its operators, by name. A unit
is one or more clusters of Algorithm 1 between two borders that a single tensor crosses; stages are runs of units
(controller/planners/muserve). Memory is that of the weights that a stage reads.
"""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, prod
from pathlib import Path
from typing import Any, Final

from controller.planners.muserve.clusters import THRESHOLD, clusters, stage_ends
from trefoil.core.errors import CatalogError, SettingError
from trefoil.profiler.sensitivity import OperatorScore, s_of
from trefoil.runtime.given.onnx_file import check_external_data

MEBIBYTE: Final = 2**20


@dataclass(frozen=True, slots=True)
class GraphStage:
    """A stage: the tensors that come in and go out, its operators, its time at the highest clock, s and weights."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    operators: tuple[str, ...]
    time_ms: float
    s: float
    memory_mib: float
    shape: tuple[int, ...] = ()
    """Of what goes out to the next stage, the items first; () of the last."""


def named(path: Path, out: Path, field: str = "--stages") -> Any:
    """Read a graph, give a name to operators without one, and write it so, for scores to be known by.

    Raises:
        SettingError: onnx is not installed, which `field` needs.
        CatalogError: weights of it could be outside of its folder, or it is not an ONNX model.
    """
    if importlib.util.find_spec("onnx") is None:
        raise SettingError(
            "onnx is not installed", field=field, remedy=f"pip install 'trefoil[stages]', or leave out {field}"
        )
    import onnx

    check_external_data(path)
    model = onnx.load(str(path))
    known: set[str] = set()
    for number, node in enumerate(model.graph.node):
        if not node.name or node.name in known:
            node.name = f"{node.op_type}#{number}"
        known.add(node.name)
    onnx.save(model, str(out))
    return model


def graph_stages(
    model: Any, scores: Sequence[OperatorScore], stages: int, memory_mib_max: float = inf,
    threshold: float | None = THRESHOLD,
) -> list[GraphStage]:  # fmt: skip
    """Stages of a graph whose slowest is as fast as can be. `threshold` None: every operator is a separate cluster,
    as AlpaServe cuts.

    Raises:
        CatalogError: too few borders are crossed by a single tensor.
        InvalidInput: an operator has no score, or no cut fits the memory.
    """
    graph, by_name = model.graph, {one.name: one for one in scores}
    nodes = computing(graph)
    names = [node.name for node in nodes]
    groups = [[name] for name in names]
    if threshold is not None:
        groups = clusters(names, {name: one.score for name, one in by_name.items()}, threshold)
    ends = [0]
    for group in groups:
        ends.append(ends[-1] + len(group))
    crossing = _crossing(graph, nodes)
    borders = [0, *(end for end in ends[1:-1] if len(crossing[end]) == 1), len(nodes)]
    if len(borders) <= stages:
        raise CatalogError(
            f"has {len(borders) - 2} borders of clusters that a single tensor crosses, {stages} stages need "
            f"{stages - 1}", field="--stages", value=stages, remedy="fewer stages, or --operators",
        )  # fmt: skip
    weights = _weights_mib(graph)
    units = [nodes[a:b] for a, b in pairwise(borders)]
    times = [sum(by_name[node.name].time_ms for node in unit) for unit in units]
    sizes = [_memory_mib(unit, weights) for unit in units]
    cuts = [0, *(borders[end] for end in stage_ends(times, sizes, stages, memory_mib_max))]
    inputs = [value.name for value in graph.input if value.name not in weights]
    crossed = [inputs, *([next(iter(crossing[cut]))] for cut in cuts[1:-1]), [value.name for value in graph.output]]
    found = []
    for number, (begin, end) in enumerate(pairwise(cuts)):
        own = [by_name[node.name] for node in nodes[begin:end]]
        time_ms, memory = sum(one.time_ms for one in own), _memory_mib(nodes[begin:end], weights)
        ins, outs = tuple(crossed[number]), tuple(crossed[number + 1])
        maker = next((node.name for node in nodes[:end] if outs[0] in node.output), "")
        shape = by_name[maker].shape if end < len(nodes) and maker else ()
        found.append(GraphStage(ins, outs, tuple(one.name for one in own), time_ms, s_of(own), memory, shape))
    return found


def write_stages(model: Path, stages: Sequence[GraphStage], out: Path) -> list[Path]:
    """Write each stage of a graph as a separate model, in `out`: <model>-stage<n>.onnx; checked by onnx."""
    import onnx

    out.mkdir(parents=True, exist_ok=True)
    paths = [out / f"{model.stem}-stage{number}.onnx" for number in range(len(stages))]
    for path, stage in zip(paths, stages, strict=True):
        onnx.utils.extract_model(str(model), str(path), list(stage.inputs), list(stage.outputs), check_model=True)
    return paths


def computing(graph: Any) -> list[Any]:
    """Nodes that compute on what comes in; what weights alone say, each stage has for itself."""
    moving, found = {value.name for value in graph.input} - {one.name for one in graph.initializer}, []
    for node in graph.node:
        if _reads(node) & moving:
            moving.update(node.output)
            found.append(node)
    return found


def _crossing(graph: Any, nodes: Sequence[Any]) -> list[set[str]]:
    """Tensors that cross the border before each node: made before it, or inputs of the graph, and read from it on."""
    made = {value.name: 0 for value in graph.input if value.name not in {one.name for one in graph.initializer}}
    made |= {name: at + 1 for at, node in enumerate(nodes) for name in node.output if name}
    read = {value.name: len(nodes) for value in graph.output}
    for at, node in enumerate(nodes):
        for name in _reads(node):
            read[name] = max(read.get(name, 0), at)
    found: list[set[str]] = [set() for _ in range(len(nodes) + 1)]
    for name, begin in made.items():
        for border in range(begin, read.get(name, -1) + 1):
            found[border].add(name)
    return found


def _reads(node: Any) -> set[str]:
    """Tensors that a node reads, those of the graphs inside it included."""
    inner = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
    return {*node.input, *(name for graph in inner for one in graph.node for name in _reads(one))}


def _weights_mib(graph: Any) -> dict[str, dict[str, float]]:
    """Weights behind every tensor that is made of weights alone, each with its size, by the tensor's name."""
    from onnx import helper

    def mib(tensor: Any) -> float:
        size: float = prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize / MEBIBYTE
        return size

    found = {one.name: {one.name: mib(one)} for one in graph.initializer}
    moving = {node.name for node in computing(graph)}
    for node in graph.node:
        if node.name not in moving:
            own = {node.name: sum(mib(attribute.t) for attribute in node.attribute if attribute.HasField("t"))}
            behind = {name: size for read in _reads(node) for name, size in found.get(read, {}).items()}
            found |= dict.fromkeys(node.output, own | behind)
    return found


def _memory_mib(nodes: Sequence[Any], weights: Mapping[str, Mapping[str, float]]) -> float:
    """Size of what these nodes read, each weight once."""
    read = set().union(*(_reads(node) for node in nodes))
    return sum({name: size for one in read for name, size in weights.get(one, {}).items()}.values())

"""The 15 models of mu-Serve's Table 1 as rows of operators, each with a time and what of it follows the clock.

Source: Table 1 (size, latency); hidden sizes, layers and vocabularies of the published models; V100 as in section 4.1.
Model: operators of a transformer layer, or of ResNet's bottlenecks, by their FLOPs and bytes in FP32. Weights are read
    once a pass. Roofline: trefoil/profiler/sensitivity.py at 1380 MHz. An autoregressive model reads PROMPT
    tokens in one pass and makes as many in passes of one; the others read 2 PROMPT. So 512 tokens are a query, as the
    table has it. All times of a model are scaled by one factor to its latency in the table.
Deviations: experts of Switch are dense feed-forward layers of its base model, as one serves each token. Memory is the
    table's size, by the weights of each operator. With `overhead`, what the roofline leaves of a latency follows no
    clock instead: the framework's time. Where models are named `insensitive` (Fig. 14a), theirs follow the SMs' clock
    by FOLLOWS, as memory does, and those of all others wholly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Final, NamedTuple

from controller.planners.muserve.alpaserve import OperatorCluster, joined
from controller.planners.muserve.clusters import THRESHOLD, clusters
from trefoil.core.units import MS_PER_S
from trefoil.profiler.assumed import FP32_PER_SM, GB_PER_S, HALF, OperatorCost
from trefoil.profiler.sensitivity import Board, modelled_scores

DEVICE: Final = "Tesla V100-SXM2-32GB"  # the paper's has 16 GB
TOP_MHZ, LOW_MHZ = 1380, 200
SMS: Final = 80
MIB_PER_GB: Final = 1e9 / 2**20
FLOAT_BYTES: Final = 4
PROMPT: Final = 256
FOLLOWS: Final = 0.25


class Shape(NamedTuple):
    """A model of Table 1: GB and ms of the table; of a transformer its layers, hidden and inner size, vocabulary."""

    size_gb: float
    latency_ms: float
    layers: int
    hidden: int
    inner: int
    vocabulary: int
    autoregressive: bool


MODELS: Final[Mapping[str, Shape]] = {
    "ResNet-50": Shape(0.2, 51, 0, 0, 0, 0, False),
    "BERT-base": Shape(0.5, 123, 12, 768, 3072, 30522, False),
    "BERT-large": Shape(1.4, 365, 24, 1024, 4096, 30522, False),
    "RoBERTa-base": Shape(0.5, 135, 12, 768, 3072, 50265, False),
    "RoBERTa-large": Shape(1.4, 382, 24, 1024, 4096, 50265, False),
    "OPT-1.3b": Shape(5.0, 1243, 24, 2048, 8192, 50272, True),
    "OPT-2.7b": Shape(10.4, 2351, 32, 2560, 10240, 50272, True),
    "GPT2-large": Shape(3.3, 832, 36, 1280, 5120, 50257, True),
    "GPT2-xl": Shape(6.4, 1602, 48, 1600, 6400, 50257, True),
    "CodeGen-350m": Shape(1.3, 357, 20, 1024, 4096, 51200, True),
    "CodeGen-2b": Shape(8.0, 2507, 32, 2560, 10240, 51200, True),
    "Bloom-1b1": Shape(4.0, 523, 24, 1536, 6144, 250880, True),
    "Bloom-3b": Shape(11.0, 1293, 30, 2560, 10240, 250880, True),
    "Switch-base-16": Shape(2.4, 348, 24, 768, 3072, 32128, True),
    "Switch-base-32": Shape(4.8, 402, 24, 768, 3072, 32128, True),
}
BOTTLENECKS: Final = ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7))  # of ResNet-50: blocks, width, pixels
BOARD: Final = Board(2.0 * FP32_PER_SM[DEVICE] * SMS * 1e6 * TOP_MHZ, GB_PER_S[DEVICE] * 1e9)


class Operator(NamedTuple):
    """An operator over a whole query: its unit, its score and the weights that it reads."""

    name: str
    unit: OperatorCluster
    score: float


@cache
def operators(
    name: str, overhead: bool = False, follows: float = FOLLOWS, insensitive: tuple[str, ...] | None = None
) -> tuple[Operator, ...]:
    """Operators of a model in the order in which they run; times add up to the table's latency."""
    shape, rows = MODELS[name], list(_rows(MODELS[name]))
    passes: list[tuple[int, int]] = [(1, 2 * PROMPT)]
    if shape.autoregressive:
        passes = [(1, PROMPT), (PROMPT, 1)]
    if not shape.layers:
        passes = [(1, 1)]
    times, halves = [0.0] * len(rows), [0.0] * len(rows)
    for repeats, tokens in passes:
        costs = [OperatorCost(one.name, "", one.flops * tokens, one.weights + one.moved * tokens) for one in rows]
        for at, (cost, scored) in enumerate(zip(costs, modelled_scores(costs, BOARD), strict=True)):
            times[at] += repeats * scored.time_ms
            halves[at] += repeats * BOARD.time_ms(cost, HALF)
    stretched = shape.latency_ms / sum(times)
    mib = shape.size_gb * MIB_PER_GB / sum(one.weights for one in rows)
    found = []
    for one, time_ms, half_ms in zip(rows, times, halves, strict=True):
        s = follows + (1.0 - follows) * (half_ms / time_ms - 1.0) / (max(1.0, stretched) if overhead else 1.0)
        found.append(Operator(one.name, OperatorCluster(time_ms * stretched / MS_PER_S, s, one.weights * mib), 2.0 * s))
    if insensitive is not None:
        s = follows if name in insensitive else 1.0
        found = [one._replace(unit=replace(one.unit, s=s), score=2.0 * s) for one in found]
    return tuple(found)


@cache
def units(
    name: str,
    clustered: bool,
    overhead: bool = False,
    follows: float = FOLLOWS,
    insensitive: tuple[str, ...] | None = None,
) -> tuple[OperatorCluster, ...]:
    """Units of a model that are not split: its operators, or clusters of them."""
    those = operators(name, overhead, follows, insensitive)
    if not clustered:
        return tuple(one.unit for one in those)
    by_name = {one.name: one for one in those}
    groups = clusters(list(by_name), {one.name: one.score for one in those}, THRESHOLD)
    return tuple(joined([by_name[name].unit for name in group]) for group in groups)


class _Row(NamedTuple):
    name: str
    flops: float  # of a token (of an image: all)
    weights: float  # bytes, read once a pass
    moved: float  # bytes of a token


def _rows(shape: Shape) -> Iterator[_Row]:
    if not shape.layers:
        yield from _resnet()
        return
    hidden, inner = shape.hidden, shape.inner

    def product(name: str, from_: int, to: int) -> _Row:
        return _Row(name, 2.0 * from_ * to, FLOAT_BYTES * from_ * to, FLOAT_BYTES * (from_ + to))

    def each(name: str, width: int, reads: int = 1) -> _Row:
        return _Row(name, 5.0 * width, 0.0, FLOAT_BYTES * width * (reads + 1))

    yield each("embed", hidden)
    for layer in range(shape.layers):
        at, keys = f"{layer}.", 2 * PROMPT
        yield each(at + "norm1", hidden)
        yield product(at + "qkv", hidden, 3 * hidden)
        yield _Row(at + "scores", 2.0 * hidden * keys, 0.0, FLOAT_BYTES * (hidden + keys))
        yield each(at + "softmax", keys)
        yield _Row(at + "context", 2.0 * hidden * keys, 0.0, FLOAT_BYTES * (hidden + keys))
        yield product(at + "out", hidden, hidden)
        yield each(at + "add1", hidden, 2)
        yield each(at + "norm2", hidden)
        yield product(at + "up", hidden, inner)
        yield each(at + "gelu", inner)
        yield product(at + "down", inner, hidden)
        yield each(at + "add2", hidden, 2)
    yield each("norm", hidden)
    if shape.autoregressive:
        yield product("head", hidden, shape.vocabulary)
    else:
        yield product("pool", hidden, hidden)


def _resnet() -> Iterator[_Row]:
    def conv(name: str, from_: int, to: int, kernel: int, pixels: int) -> Iterator[_Row]:
        weights, out = from_ * to * kernel**2, to * pixels**2
        yield _Row(name, 2.0 * weights * pixels**2, FLOAT_BYTES * weights, FLOAT_BYTES * (from_ * pixels**2 + out))
        yield _Row(name + ".relu", out, 0.0, 2 * FLOAT_BYTES * out)

    yield from conv("stem", 3, 64, 7, 112)
    before = 64
    for level, (blocks, width, pixels) in enumerate(BOTTLENECKS):
        for block in range(blocks):
            at = f"{level}.{block}."
            yield from conv(at + "reduce", before, width, 1, pixels)
            yield from conv(at + "conv", width, width, 3, pixels)
            yield from conv(at + "expand", width, 4 * width, 1, pixels)
            before = 4 * width
    yield _Row("head", 2.0 * before * 1000, FLOAT_BYTES * before * 1000, FLOAT_BYTES * (before + 1000))

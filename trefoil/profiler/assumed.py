"""A profile without measurements: from each graph, by the law of docs/profiles.md. Basis synthetic.

Data: multiply-adds, elements written, kernels (ONNX Runtime's own profile of one pass: graph_costs.py) and bytes of the
weights; the law of `cost_law.bare_ms` with the constants that were fitted to one A100-80GB in MIG mode.
Assumed, in addition to the law: Triton's own time of a batch (SERVER_MS), one coefficient of variation (CV), and memory
bandwidths of data sheets. An SM and MHz of every GPU are worth those of an A100. A slice draws its whole dynamic share
while it computes (core/power.py). Good for a first look at plans; measurements alone show what saves how much.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

from trefoil.core.catalog import Family, Variant
from trefoil.core.device_types import DEVICE_TYPES, NO_MIG
from trefoil.core.errors import CatalogError, SettingError
from trefoil.core.fleet import DeviceKind, DeviceType, SliceType
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.units import MS_PER_S
from trefoil.profiler import cost_law
from trefoil.profiler.profile_csv import ProfilePoint

SERVER_MS: Final = 0.3
CV: Final = 0.05
BATCHES: Final = (1, 2, 4, 8, 16, 32)
GRAPH_TIMEOUT_S: Final = 600.0
HALF: Final = 0.5  # of the highest clock: a sensitivity is what the time grows by from one to the other
A100_MHZ: Final = 1410
A100_80GB_GB_PER_S: Final = 2039.0
GB_PER_S: Final = {  # of data sheets; a board outside MIG has what it has in it
    "A100-SXM4-40GB": 1555.0, "A100-SXM4-80GB": 2039.0, "A100-PCIE-40GB": 1555.0, "A100 80GB PCIe": 1935.0,
    "A30": 933.0, "H100-SXM5-80GB": 3350.0, "H100 PCIe": 2000.0, "H100 NVL": 3900.0, "H200": 4800.0, "B200": 8000.0,
    "Tesla V100-SXM2-32GB": 900.0, "Tesla T4": 320.0, "Tesla P4": 192.0, "L4": 300.0, "L40S": 864.0, "A10": 600.0,
}  # fmt: skip


FP32_PER_SM: Final = {  # cores, of the CUDA programming guide's table of arithmetic throughput, by compute capability
    "A100-SXM4-40GB": 64, "A100-SXM4-80GB": 64, "A100-PCIE-40GB": 64, "A100 80GB PCIe": 64, "A30": 64,
    "H100-SXM5-80GB": 128, "H100 PCIe": 128, "H100 NVL": 128, "H200": 128, "B200": 128,
    "Tesla V100-SXM2-32GB": 64, "Tesla T4": 64, "Tesla P4": 128, "L4": 128, "L40S": 128, "A10": 128,
}  # fmt: skip


class OperatorCost(NamedTuple):
    """What one operator of a graph does in a pass of one item."""

    name: str
    operator: str
    flops: float
    bytes: float
    shape: Sequence[int] = ()
    """Of its first output."""
    type: str = ""
    """Of its first output, as ONNX Runtime names types: float, int64."""
    inputs: Sequence[tuple[str, Sequence[int]]] = ()
    """Types and shapes of the inputs that are there, weights among them."""


@dataclass(frozen=True, slots=True)
class GraphCost:
    """What one pass of one item of a graph does: multiply-adds, elements written, kernels, bytes of its files.

    `uncounted`: operators whose multiply-adds are not known, with their number. `operators`: each, as they run.
    """

    macs: int
    written: int
    kernels: int
    weights_bytes: int
    uncounted: Mapping[str, int]
    operators: tuple[OperatorCost, ...] = ()

    @property
    def features(self) -> cost_law.Features:
        """The same as the law takes it; weights count as of 32 bits."""
        return cost_law.Features(self.macs / 1e9, self.written / 1e6, float(self.kernels), self.weights_bytes / 4e6)


def graph_costs(
    graphs: Sequence[Path], weights_bytes: Sequence[int], shapes: Mapping[str, Sequence[int]], python: Path
) -> list[GraphCost]:
    """What one pass of each ONNX graph does, as ONNX Runtime in that Python environment sees it. Seconds for each.

    Raises:
        CatalogError: a graph cannot be run; says what ONNX Runtime says. SettingError: an input's shape is open.
    """
    script = Path(__file__).with_name("graph_costs.py")
    argv = [str(python), str(script), json.dumps({name: list(sizes) for name, sizes in shapes.items()})]
    done = subprocess.run(
        [*argv, *map(str, graphs)], capture_output=True, text=True, timeout=GRAPH_TIMEOUT_S, check=False
    )
    lines = done.stdout.splitlines()
    if done.returncode:
        graph = graphs[min(len(lines), len(graphs) - 1)]
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if "is open" in why:
            raise SettingError(why, field="--shape", remedy="give --shape INPUT=<sizes without the batch>")
        raise CatalogError(f"{graph} cannot be run: {why}", remedy="measure it instead: trefoil family profile")
    return [_graph_cost(json.loads(line), size) for line, size in zip(lines, weights_bytes, strict=True)]


def _graph_cost(told: dict[str, Any], weights_bytes: int) -> GraphCost:
    operators = tuple(OperatorCost(**one) for one in told.pop("operators"))
    return GraphCost(weights_bytes=weights_bytes, operators=operators, **told)


def assumed_points(
    family: Family, costs: Mapping[str, GraphCost], law: cost_law.LatencyLaw, max_batch: int
) -> list[ProfilePoint]:
    """Points of every variant on every slice of every GPU type that it fits, at the highest clock."""
    gpus = [kind for kind in DEVICE_TYPES.values() if kind.kind in (DeviceKind.MIG_GPU, DeviceKind.WHOLE_GPU)]
    found = []
    for kind, variant in product(gpus, family.variants):
        for shape in kind.slice_types:
            if variant.memory_mib + CONTEXT_MIB > shape.memory_mib:
                continue
            for batch in (size for size in BATCHES if size <= max(1, max_batch)):
                found.append(_point(kind, shape, variant, costs[variant.name], law, batch))
    return found


def _point(
    kind: DeviceType, shape: SliceType, variant: Variant, cost: GraphCost, law: cost_law.LatencyLaw, batch: int
) -> ProfilePoint:
    machine = machine_of(kind, shape)
    mean_ms, half_ms = (
        SERVER_MS + cost_law.bare_ms(law, cost.features, replace(machine, clock=clock), batch) for clock in (1.0, HALF)
    )
    point = cost_law.Point(mean_ms, CV, 0.0)
    p50, p95, p99 = (point.quantile_ms(name) for name in cost_law.NORMAL_QUANTILES)
    return ProfilePoint(
        kind.name, shape.name, variant.name, batch, max(kind.clocks_mhz, default=0), (p50, p95, p99),
        batch * MS_PER_S / mean_ms, None, variant.memory_mib, samples=0, simulated=True,
        clock_sensitivity=min(1.0, half_ms / mean_ms - 1.0),
    )  # fmt: skip


def machine_of(kind: DeviceType, shape: SliceType) -> cost_law.SliceShare:
    """The slice in units of the fit's board; where no data sheet is known, memory is as fast as the SMs are many."""
    share = shape.sm_count * max(kind.clocks_mhz, default=A100_MHZ) / (cost_law.FIT_SMS * A100_MHZ)
    whole = max(s.sm_count for s in kind.slice_types) * max(kind.clocks_mhz, default=A100_MHZ)
    known = GB_PER_S.get(kind.name.removesuffix(NO_MIG), A100_80GB_GB_PER_S * whole / (cost_law.FIT_SMS * A100_MHZ))
    memory = shape.memory_slices / max(s.memory_slices for s in kind.slice_types)
    return cost_law.SliceShare(share, memory, known / A100_80GB_GB_PER_S)

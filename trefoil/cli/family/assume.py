"""Write the profile of an unmeasured family, from its graphs."""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from tritonclient.grpc import model_config_pb2

import trefoil
from trefoil.core.errors import BinaryMissing, CatalogError
from trefoil.installation import MODELS, SHIPPED, triton_environment
from trefoil.profiler.assumed import GraphCost, assumed_points, graph_costs
from trefoil.profiler.cost_law import read_model
from trefoil.profiler.profile_csv import ProfileProvenance, profile_text, write_profile
from trefoil.runtime.clock import WallClock
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import boundary
from trefoil.runtime.model_files import (
    FILES,
    PROBE_SHAPE,
    contract,
    generative,
    graph_probe,
    not_graphs,
    version_files,
)
from trefoil.runtime.repository import PROFILE_FILE, load_family

CONSTANTS = SHIPPED / MODELS / "_profiles" / "constants.json"


def write_assumed(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, GraphCost]:
    """Write the profile.csv of a family's folder; what each variant's pass does, by name.

    Raises:
        CatalogError: it has a profile, or a graph cannot be run. BinaryMissing: no ONNX Runtime is here.
    """
    family, rows = load_family(folder)
    if rows:
        raise CatalogError(
            f"{folder / PROFILE_FILE} exists already", field="family", value=family.name,
            remedy="remove it first, or measure: trefoil family profile",
        )  # fmt: skip
    config = contract(folder.parent, folder.name)
    if generative(config):
        raise CatalogError(
            "what decoding takes is not known from a graph", field="family", value=family.name,
            remedy="measure: trefoil family profile",
        )  # fmt: skip
    if what := not_graphs(config):
        raise CatalogError(
            f"{what} cannot be looked into",
            field="family",
            value=family.name,
            remedy="measure: trefoil family profile",
        )
    python = triton_environment() / "bin" / "python"
    if not python.exists():
        raise BinaryMissing(f"no ONNX Runtime: {python} is not there", remedy="trefoil setup triton")
    files = version_files(folder.parent, config)
    graphs, sizes = [], []
    for variant in family.variants:
        if variant.version not in files:
            raise CatalogError(f"{variant.name} has no model files", field="family", value=family.name)
        graph = folder.absolute() / str(variant.version) / FILES["onnxruntime"]
        check_external_data(graph, boundary(folder.parent, folder.name))
        graphs.append(graph)
        sizes.append(sum(file.stat().st_size for file in files[variant.version]))
    known = _item_shapes(config) | dict(shapes) | ({} if config.max_batch_size else {"": ()})
    found = dict(zip((v.name for v in family.variants), graph_costs(graphs, sizes, known, python), strict=True))
    law = read_model(json.loads(CONSTANTS.read_text(encoding="utf-8"))).latency
    points = assumed_points(family, found, law, config.max_batch_size)
    date = datetime.fromtimestamp(WallClock().now_s(), UTC).strftime("%Y-%m-%d")
    source = "trefoil family assume: nothing was measured; the law of docs/profiles.md on what each graph does"
    text = profile_text(
        points, ProfileProvenance("none", date, f"trefoil {trefoil.__version__}", True, source), estimate_energy=True
    )
    write_profile(folder / PROFILE_FILE, folder, text)
    return found


def _item_shapes(config: model_config_pb2.ModelConfig) -> dict[str, Sequence[int]]:
    """Shapes of one item of the inputs that the contract leaves not open."""
    closed = (t for t in config.input if -1 not in t.dims or PROBE_SHAPE + t.name in config.parameters)
    return {tensor.name: graph_probe(config, tensor) for tensor in closed}


def cost_lines(costs: Mapping[str, GraphCost]) -> list[str]:
    """What each variant's pass does, in words."""
    lines = []
    for name, cost in costs.items():
        text = f"  {name}: {cost.macs / 1e6:,.3g} M multiply-adds, {cost.kernels} kernels, "
        text += f"{cost.weights_bytes / 1e6:,.3g} MB of weights"
        if cost.uncounted:
            text += f"; not counted: {', '.join(f'{n} x {op}' for op, n in sorted(cost.uncounted.items()))}"
        lines.append(text)
    return lines

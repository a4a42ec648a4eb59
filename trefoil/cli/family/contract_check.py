"""Families of a model repository as `trefoil family list` and `check` show them."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.onnx_graph import TensorInfo, graph_tensors
from trefoil.core.catalog import Family
from trefoil.core.errors import NotFound, TrefoilError
from trefoil.runtime.model_files import ENGINES, FILES, backend_of, contract, expected_files, how_to_make, version_files
from trefoil.runtime.repository import FAMILY_FILE, load_catalog, load_family


def describe_families(root: Path) -> list[dict[str, Any]]:
    """Families with their variants, most accurate last.

    Raises:
        CatalogError: a family.toml or profile.csv is malformed.
    """
    catalog = load_catalog(root)
    rows = Counter((row.family, row.variant) for row in catalog.rows)
    return [
        {
            "family": family.name,
            "metric": family.metric,
            "variants": [
                {
                    "name": variant.name,
                    "version": variant.version,
                    "accuracy": variant.accuracy,
                    "files": variant.version in _files_by_version(root, family),
                    "rows": rows[family.name, variant.name],
                }
                for variant in family.by_accuracy()
            ],
        }
        for family in catalog.families
    ]


def _files_by_version(root: Path, family: Family) -> dict[int, tuple[Path, ...]]:
    try:
        return version_files(root, family.name, expected_files(contract(root, family.name)))
    except TrefoilError:
        return {}  # `check` says what is wrong with its contract


def check_families(root: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """State and problems of each family; one that is only catalogued (no model files at all) is no problem.

    Raises:
        NotFound: no such family.
    """
    known = sorted(path.parent.name for path in root.glob(f"*/{FAMILY_FILE}"))
    for name in names:
        if name not in known:
            raise NotFound(f"no family {name} in {root}", remedy=f"one of {known}")
    return [_check_family(root, name) for name in names or known]


def _check_family(root: Path, name: str) -> dict[str, Any]:
    problems: list[str] = []
    state = "cannot be served"
    try:
        family, rows = load_family(root / name)
        config = contract(root, name)
        files = version_files(root, name, expected_files(config))
        missing = [v.name for v in family.variants if v.version not in files]
        if not files:
            state = f"catalogue only, no model files: {how_to_make(root, name)}"
        else:
            state = f"{len(family.variants) - len(missing)} of {len(family.variants)} variants can be served"
            problems += [f"{variant} has no model files" for variant in missing]
        for version, there in sorted(files.items()):
            problems += _graph_differences(config, version, there)
        state += f"; {len(rows)} profile rows"
    except TrefoilError as error:
        problems.append(str(error))
    return {"family": name, "state": state, "problems": problems}


def _graph_differences(config: model_config_pb2.ModelConfig, version: int, files: Sequence[Path]) -> list[str]:
    """Where a version's graph differs from the contract. Engines cannot be looked into."""
    if backend_of(config) == ENGINES:
        return []
    path = next(file for file in files if file.name == FILES["onnxruntime"])
    inputs, outputs = graph_tensors(path)
    found = []
    for configured, graph, exact in ((config.input, inputs, True), (config.output, outputs, False)):
        there = {tensor.name: tensor for tensor in graph}
        for tensor in configured:
            if tensor.name not in there:
                found.append(f"version {version}: {tensor.name} is not in its graph, which has {', '.join(there)}")
            elif why := _difference(tensor, there[tensor.name]):
                found.append(f"version {version}: {tensor.name} {why}")
        if exact and (more := sorted(set(there) - {tensor.name for tensor in configured})):
            found.append(f"version {version}: its graph also wants {', '.join(more)}")
    return found


def _difference(configured: Any, graph: TensorInfo) -> str:
    """How a tensor of the graph differs from the contract's; "" when it does not."""
    kind = model_config_pb2.DataType.Name(configured.data_type)
    if graph.data_type != kind:
        return f"is {graph.data_type} in its graph, the contract says {kind}"
    dims = tuple(configured.dims)
    inner = graph.dims[1:]
    fits = len(inner) == len(dims) and all(
        -1 in (have, want) or have == want for have, want in zip(inner, dims, strict=True)
    )
    if graph.dims and (not fits or graph.dims[0] != -1):
        return f"is {list(graph.dims)} in its graph, the contract says [-1, {', '.join(map(str, dims))}]"
    return ""

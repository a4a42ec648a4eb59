"""Families of a model repository as `trefoil family list` and `check` show them."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.onnx_graph import TensorInfo, graph_tensors
from trefoil.core.catalog import Family
from trefoil.core.errors import CatalogError, NotFound, TrefoilError, one_of
from trefoil.installation import repositories
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import boundary
from trefoil.runtime.model_files import (
    ENGINES,
    FILES,
    backend_of,
    contract,
    expected_files,
    generative,
    how_to_make,
    judged_versions,
    version_files,
)
from trefoil.runtime.repository import family_folders, load_family


def describe_families(repository: Path) -> list[dict[str, Any]]:
    """Families with their variants, most accurate last.

    Raises:
        CatalogError: a family.toml or profile.csv is malformed.
    """
    return [_describe_family(folder) for folder in family_folders(repository).values()]


def _describe_family(folder: Path) -> dict[str, Any]:
    family, profile = load_family(folder)
    rows, files = Counter(row.variant for row in profile), _files_by_version(folder.parent, family)
    return {
        "family": family.name,
        "folder": str(folder),
        "metric": family.metric,
        "variants": [
            {
                "name": variant.name,
                "version": variant.version,
                "accuracy": variant.accuracy,
                "files": variant.version in files,
                "rows": rows[variant.name],
            }
            for variant in family.by_accuracy()
        ],
    }


def _files_by_version(root: Path, family: Family) -> dict[int, tuple[Path, ...]]:
    try:
        return version_files(root, family.name, expected_files(contract(root, family.name)))
    except TrefoilError:
        return {}  # `check` says what is wrong with its contract


def check_families(repository: Path, names: Sequence[str]) -> list[dict[str, Any]]:
    """State and problems of each family; one that is only catalogued (no model files at all) is no problem.

    Raises:
        NotFound: no such family.
    """
    known = family_folders(repository)
    for name in names:
        if name not in known:
            where = " or ".join(map(str, repositories(repository)))
            raise NotFound(f"no such family in {where}", field="FAMILY", value=name, remedy=one_of(known, name))
    return [_check_family(known[name].parent, name) for name in names or known]


def refuse_unserved(folder: Path, profile: Path | None, device_types: Collection[str], *, measured: bool) -> None:
    """Refuse a family that nothing could serve: no model files, or no profile rows for any of these device types.

    `profile` stands for its own; no `device_types`: any will do; `measured`: its planner measures and needs no profile.

    Raises:
        CatalogError: naming the family and the remedy.
    """
    family, rows = load_family(folder, profile)
    if not version_files(folder.parent, folder.name, expected_files(contract(folder.parent, folder.name))):
        remedy = how_to_make(folder.parent, folder.name)
        raise CatalogError("has no model files here", field="family", value=family.name, remedy=remedy)
    profiled = sorted({row.device_type for row in rows})
    if measured or (profiled and not device_types) or set(profiled) & set(device_types):
        return
    why = f"has a profile of {profiled}, not of {sorted(device_types)}" if profiled else "has no profile"
    remedy = (
        f"`trefoil profile {family.name}` measures one on a system that serves others, "
        f"`trefoil family assume {family.name}` writes one from its graphs for a first look"
    )
    raise CatalogError(f"{why}: nothing is known of what it costs", field="family", value=family.name, remedy=remedy)


def _check_family(root: Path, name: str) -> dict[str, Any]:
    problems: list[str] = []
    state = "cannot be served"
    try:
        family, rows = load_family(root / name)
        config = contract(root, name)
        files, refused = judged_versions(root, name, expected_files(config))
        missing = [v.name for v in family.variants if v.version not in files and v.version not in refused]
        problems += [f"version {version} is refused: {why}" for version, why in sorted(refused.items())]
        if not files:
            state = f"catalogue only, no model files: {how_to_make(root, name)}"
        else:
            state = f"{len(family.variants) - len(missing)} of {len(family.variants)} variants can be served"
            problems += [f"{variant} has no model files" for variant in missing]
        for version, there in sorted(files.items()):
            problems += _graph_differences(config, version, there)
        state += f"; {len(rows)} profile rows"
        if files and not rows:
            problems.append(
                "no profile: only policies that measure can serve it. Remedy: "
                f"`trefoil profile {name}` measures one, `trefoil family assume {name}` writes one from its graphs"
            )
    except TrefoilError as error:
        problems.append(str(error))
    return {"family": name, "state": state, "problems": problems}


def _graph_differences(config: model_config_pb2.ModelConfig, version: int, files: Sequence[Path]) -> list[str]:
    """Where a version's graph differs from the contract. Engines cannot be looked into, and what decodes is between a
    generative family's contract and its graph."""
    if backend_of(config) == ENGINES or generative(config):
        return []
    path = next(file for file in files if file.name == FILES["onnxruntime"])
    below = boundary(path.parent.parent.parent, path.parent.parent.name)
    found = []
    if lacking := check_external_data(path, below) - {file.name for file in files}:
        found.append(f"version {version}: weights are missing beside its graph: {', '.join(sorted(lacking))}")
    inputs, outputs = graph_tensors(path, below)
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

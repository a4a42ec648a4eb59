"""Families of a model repository as `trefoil family list` and `check` show them."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from tritonclient.grpc import model_config_pb2

from trefoil.cli.family.onnx_graph import differences, graph_tensors
from trefoil.core.catalog import Family, Variant
from trefoil.core.errors import CatalogError, TrefoilError
from trefoil.runtime.given.llm_backends import LLM_FILES, VLLM, engine_args
from trefoil.runtime.given.onnx_file import check_external_data
from trefoil.runtime.given.repository_names import boundary, names_below
from trefoil.runtime.model_files import (
    FILES,
    GPU_ONLY,
    backend_of,
    contract,
    generative,
    how_to_make,
    how_to_profile,
    judged_versions,
    label_files,
    not_graphs,
    version_files,
)
from trefoil.runtime.repository import family_folders, known_folder, load_family

Ask = Callable[[Path, Family, Sequence[Variant]], dict[int, str] | None]
"""Loads variants of a repository's family; says by version which do not answer, and why; None: no Triton is here."""


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
        return version_files(root, contract(root, family.name))
    except TrefoilError:
        return {}  # `check` says what is wrong with its contract


def check_families(repository: Path, names: Sequence[str], ask: Ask | None = None) -> list[dict[str, Any]]:
    """State and problems of each family; one that is only catalogued (no model files at all) is not a problem.

    `ask` loads variants on a Triton and says which do not answer; None: graphs are compared with contracts alone.

    Raises:
        NotFound: no such family.
    """
    folders = [known_folder(repository, name) for name in names] or [*family_folders(repository).values()]
    return [_check_family(folder.parent, folder.name, ask) for folder in folders]


def refuse_unserved(folder: Path, profile: Path | None, device_types: Collection[str], *, measured: bool) -> None:
    """Refuse a family that nothing could serve: no model files, or no profile rows for any of these device types.

    `profile` stands for its own; no `device_types`: any will do; `measured`: its planner measures and needs no profile.

    Raises:
        CatalogError: naming the family and the remedy.
    """
    family, rows = load_family(folder, profile)
    config = contract(folder.parent, folder.name)
    if not version_files(folder.parent, config):
        remedy = how_to_make(folder.parent, folder.name)
        raise CatalogError("has no model files here", field="family", value=family.name, remedy=remedy)
    profiled = sorted({row.device_type for row in rows})
    if measured or (profiled and not device_types) or set(profiled) & set(device_types):
        return
    why = f"has a profile of {profiled}, not of {sorted(device_types)}" if profiled else "has no profile"
    raise CatalogError(
        f"{why}: nothing is known of what it costs", field="family", value=family.name, remedy=how_to_profile(config)
    )


def _check_family(root: Path, name: str, ask: Ask | None) -> dict[str, Any]:
    problems: list[str] = []
    state = "cannot be served"
    try:
        family, rows = load_family(root / name)
        config = contract(root, name)
        files, refused = judged_versions(root, config)
        wrong = {version: [f"version {version} is refused: {why}"] for version, why in sorted(refused.items())}
        for variant in family.variants:
            if variant.version not in files and variant.version not in refused:
                wrong[variant.version] = [f"{variant.name} has no model files"] if files else []
        absent = [label for label in label_files(config) if not (root / name / label).is_file()]
        problems += [f"labels are missing beside its config.pbtxt: {label}" for label in absent]
        for version, there in sorted(files.items()):
            if found := _graph_differences(root, config, version, there):
                wrong[version] = found
        engines = backend_of(config) in GPU_ONLY
        present = [variant for variant in family.variants if variant.version in files]
        silent = ask(root, family, present) if ask is not None and present else None
        for version, why in (silent or {}).items():
            wrong[version] = [*wrong.get(version, []), why]
        sound = [v for v in family.variants if v.version not in wrong and not absent]
        if not files:
            state = f"catalogue only, no model files: {how_to_make(root, name)}"
        else:
            how = "compared with the contract, not run" if silent is None else "answer on Triton"
            what = f"have their files; {not_graphs(config)} are not run here" if engines else how
            state = f"{len(sound)} of {len(family.variants)} variants {what}"
        problems += [why for whys in wrong.values() for why in whys]
        state += f"; {len(rows)} profile rows"
        if files and not rows:
            problems.append(f"no profile: only policies that measure can serve it. Remedy: {how_to_profile(config)}")
    except TrefoilError as error:
        problems.append(str(error))
    return {"family": name, "state": state, "problems": problems}


def _graph_differences(
    root: Path, config: model_config_pb2.ModelConfig, version: int, files: Sequence[Path]
) -> list[str]:
    """Where a version's graph differs from the contract. Engines cannot be looked into, and what decodes is between a
    generative family's contract and its graph."""
    folder, below = root / config.name / str(version), boundary(root, config.name)
    try:
        if backend_of(config) == VLLM:
            engine_args(folder / LLM_FILES[VLLM], below)
        if not_graphs(config) or generative(config):
            return []
        path = folder / FILES["onnxruntime"]
        lacking = sorted(check_external_data(path, below) - names_below(folder, files).keys())
        found = [f"weights are missing beside its graph: {', '.join(lacking)}"] if lacking else []
        found += [why for _, _, why, _ in differences(config, graph_tensors(path, below))]
    except (TrefoilError, OSError) as error:
        found = [str(error)]
    return [f"version {version}: {why}" for why in found]

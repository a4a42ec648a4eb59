"""Split a family's best variant: its stages as Triton models beside it, with separate profile rows."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from trefoil.cli.family.sensitivity_command import costs_of
from trefoil.cli.family.stage_models import write_stage_models
from trefoil.cli.output import csv_text
from trefoil.core.catalog import Variant
from trefoil.core.device_types import device_type
from trefoil.runtime.given.repository_names import PROFILE_BYTES_MAX, boundary, read_text
from trefoil.runtime.model_files import FILES
from trefoil.runtime.repository import PROFILE_FILE, SENSITIVITY, load_family

if TYPE_CHECKING:
    from trefoil.profiler.split import GraphStage


def split_family(folder: Path, stages: int, device: str, items: int) -> "list[GraphStage]":
    """Cut the graph of a family's best variant into stages between any two operators. Write them as models next to the
    family's folder, and add their rows to its profile. Stages are balanced, and s is computed, by the roofline of
    `items` on `device`.

    Raises:
        CatalogError: no single tensor passes where it would be cut, or the graph cannot be run.
        SettingError: onnx is not installed, or nothing is known of that device. BinaryMissing: no ONNX Runtime is here.
    """
    from trefoil.profiler.sensitivity import board_of, modelled_scores
    from trefoil.profiler.split import graph_stages, named, write_stages

    family, _ = load_family(folder)
    graph = folder / str(family.best.version) / FILES["onnxruntime"]
    with TemporaryDirectory() as made:
        whole = Path(made) / "whole.onnx"
        model = named(graph, whole)
        scores = modelled_scores(costs_of(whole, {"": (items,)}), board_of(device_type(device)))
        found = graph_stages(model, scores, stages, threshold=None)
        paths = write_stages(whole, found, Path(made))
        write_stage_models(graph, paths, [one.shape for one in found], items, folder.parent)
    profile = folder / PROFILE_FILE
    rows = read_text(profile, boundary(folder.parent, folder.name), PROFILE_BYTES_MAX)
    text = with_stage_rows(rows, family.best, found, f"{device} at {items} items")
    profile.unlink()  # it may be a link
    profile.write_text(text, encoding="utf-8")
    return found


def with_stage_rows(text: str, variant: Variant, stages: "Sequence[GraphStage]", where: str) -> str:
    """A profile with rows of a variant's stages. A stage has the part of the whole's joules and time that it has of the
    graph's time. Its memory is the whole's without the weights of the others. Earlier statements of s are removed.
    """
    lines = text.splitlines()
    comments = [line for line in lines if line.startswith("#") and not line.startswith(f"# {SENSITIVITY}")]
    comments.append(f"# {SENSITIVITY}: modelled: a roofline of {where}; of variants that are not split all of it")
    time_ms, weights_mib = sum(one.time_ms for one in stages), sum(one.memory_mib for one in stages)
    rows = []
    for row in csv.DictReader(line for line in lines if line and not line.startswith("#")):
        if row["variant"] != variant.name:
            rows.append({**row, SENSITIVITY: ""})
            continue
        rows.append({**row, SENSITIVITY: f"{sum(one.time_ms * one.s for one in stages) / time_ms:.4f}"})
        for number, one in enumerate(stages, 1):
            own, part = dict(row), one.time_ms / time_ms
            for name in row:
                if name.startswith(("latency", "energy")):
                    own[name] = f"{float(row[name]) * part:.6g}"
            mib = math.ceil(float(row["memory_mib"]) - weights_mib + one.memory_mib)
            own |= {"stage": str(number), "memory_mib": str(max(1, mib)), SENSITIVITY: f"{one.s:.4f}"}
            rows.append({**own, "throughput_per_s": f"{float(row['throughput_per_s']) / part:.6g}"})
    return "\n".join(comments) + "\n" + csv_text(rows)

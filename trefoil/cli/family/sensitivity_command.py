"""`trefoil sensitivity`: how much longer each operator of an ONNX graph takes at half the clock."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.family.commands import Shapes, parse_shapes
from trefoil.cli.family.stage_models import write_stage_models
from trefoil.cli.output import AsJson, console, grid, print_json
from trefoil.core.device_types import device_type
from trefoil.core.errors import BinaryMissing, CatalogError
from trefoil.installation import triton_environment

if TYPE_CHECKING:
    from trefoil.profiler.sensitivity import OperatorScore

DEVICE = "Tesla V100-SXM2-32GB"


def sensitivity(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    device: Annotated[str, typer.Option(help="Device type whose ceilings the roofline has.")] = DEVICE,
    shape: Shapes = None,
    batch: Annotated[int, typer.Option(min=1, help="Items in a pass; every input has them first.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Also cut the graph into so many stages.")] = 1,
    threshold: Annotated[float, typer.Option(min=0, max=2, help="Of scores in a cluster, with --stages.")] = 0.5,
    operators: Annotated[bool, typer.Option(help="With --stages, cut anywhere, not only between clusters.")] = False,
    memory_mib: Annotated[float, typer.Option(help="That a stage's weights may take, with --stages.")] = math.inf,
    repository: Annotated[
        Path | None, typer.Option(help="Also write the stages here as Triton models, <family>@<n>of<stages>.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for <model>.csv, .png and stages.")] = Path("out/sensitivity"),
    as_json: AsJson = False,
) -> None:
    """Score every operator of a graph by mu-Serve's dLatency/dFrequency: 0 no clock touches it, 2 it follows it."""
    from trefoil.profiler.sensitivity import summary
    from trefoil.profiler.split import GraphStage, graph_stages, named, write_stages
    from trefoil.reproduce import plots

    name = model.stem if model.stem != "model" else f"{model.parent.parent.name}-{model.parent.name}"
    shapes, cut = {"": (batch,), **parse_shapes(shape)}, list[GraphStage]()
    scores = scores_of(model, device, shapes)
    if stages > 1:
        whole = out / f"{name}.onnx"
        out.mkdir(parents=True, exist_ok=True)
        graph = named(model, whole)
        scores = scores_of(whole, device, shapes)
        cut = graph_stages(graph, scores, stages, memory_mib, None if operators else threshold)
        paths = write_stages(whole, cut, out)
        if repository is not None:
            write_stage_models(model, paths, [one.shape for one in cut], batch, repository)
    found = {"model": str(model), "device": device, "batch": batch, **summary(scores)}
    plots.write_csv(out, name, [asdict(one) for one in scores])
    ends = list(accumulate((one.time_ms for one in scores), initial=0.0))
    at = [moment for pair in pairwise(ends) for moment in pair]
    panel = {f"{name} on {device}: {scores[0].source}": {"score": (at, [s.score for s in scores for _ in range(2)])}}
    plots.lines(panel, out, name, "time within a pass at the highest clock [ms]", "dLatency/dFrequency")
    if as_json:
        print_json({**found, "stages": [asdict(one) for one in cut], "scores": [asdict(one) for one in scores]})
        return
    console().print(grid("", ("operator", "number", "part of the time", "score from", "mean", "to"), _kinds(scores)))
    console().print(
        f"{found['operators']} operators, {found['time_ms']:.3g} ms, s = {found['s']:.3f}; insensitive (score < 1): "
        f"{found['insensitive_share']:.0%} of them, {found['insensitive_time_share']:.0%} of the time. "
        f"{scores[0].source}; each in {out}/{name}.csv",
        soft_wrap=True,
    )
    for number, one in enumerate(cut):
        console().print(
            f"stage {number}: {len(one.operators)} operators, {one.time_ms:.3g} ms, s = {one.s:.3f}, "
            f"{one.memory_mib:.3g} MiB of weights, {', '.join(one.inputs)} -> {', '.join(one.outputs)}",
            soft_wrap=True,
        )


def scores_of(model: Path, device: str, shapes: dict[str, tuple[int, ...]]) -> "list[OperatorScore]":
    """Scores of every operator of an ONNX file.

    Raises:
        CatalogError: no such file, it cannot be run, or has no operators. NotFound, SettingError: no such device type.
        BinaryMissing: no ONNX Runtime is here.
    """
    from trefoil.profiler.assumed import graph_costs
    from trefoil.profiler.sensitivity import board_of, modelled_scores

    board = board_of(device_type(device))
    if not model.is_file():
        raise CatalogError("is no file", field="MODEL", value=str(model), remedy="name an ONNX file")
    python = triton_environment() / "bin" / "python"
    if not python.exists():
        raise BinaryMissing(f"no ONNX Runtime: {python} is not there", remedy="trefoil setup triton")
    scores = modelled_scores(graph_costs([model], [0], shapes, python)[0].operators, board)
    if not scores:
        raise CatalogError("has no operators", field="MODEL", value=str(model), remedy="export it again")
    return scores


def _kinds(scores: "Sequence[OperatorScore]") -> list[list[str]]:
    """A row for each kind of operator, the longest first."""
    total_ms = sum(one.time_ms for one in scores) or 1.0
    kinds: dict[str, list[OperatorScore]] = {}
    for one in scores:
        kinds.setdefault(one.operator, []).append(one)
    rows = []
    for kind, those in sorted(kinds.items(), key=lambda item: -sum(one.time_ms for one in item[1])):
        found = [one.score for one in those]
        mean = sum(found) / len(found)
        share = sum(one.time_ms for one in those) / total_ms
        rows.append([kind, str(len(those)), f"{share:.1%}", f"{min(found):.2f}", f"{mean:.2f}", f"{max(found):.2f}"])
    return rows

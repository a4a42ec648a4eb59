"""`trefoil family sensitivity`: how much longer each operator of an ONNX graph takes at half the clock."""

import asyncio
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trefoil.cli.family.commands import Shapes, parse_shapes
from trefoil.cli.family.measured_operators import OperatorMeasurement, variant_of
from trefoil.cli.family.stage_models import write_stage_models
from trefoil.cli.options import folder_to_write
from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, grid, respond, show
from trefoil.core.device_types import device_type
from trefoil.core.errors import BinaryMissing, CatalogError
from trefoil.installation import triton_environment

if TYPE_CHECKING:
    from trefoil.profiler.assumed import OperatorCost
    from trefoil.profiler.sensitivity import OperatorScore
    from trefoil.profiler.split import GraphStage

DEVICE = "Tesla V100-SXM2-32GB"
DEVICE_HELP = (
    f"Device type whose ceilings the roofline has, default: {DEVICE}. With --agent a device, <node>/gpu<i>, or its "
    "type; default: the first that can hold a clock."
)
REPOSITORY_HELP = (
    "Also write the stages here as Triton models, <family>@<n>of<stages>. With --agent what is timed is put here, for "
    "the agent to read; default: where the model is."
)
WRITE_HELP = (
    "Also write s into the profile.csv of the model's family: into the rows of this variant on this device type, with "
    "--stages into those of the stages too."
)


def sensitivity(
    model: Annotated[Path, typer.Argument(help="An ONNX file.")],
    device: Annotated[str, typer.Option(help=DEVICE_HELP)] = "",
    agent: Annotated[str, typer.Option(help="Time them on a GPU of a node that serves nothing: its host:port.")] = "",
    slice_type: Annotated[str, typer.Option("--slice", help="That they are timed on; default: the widest.")] = "",
    clock: Annotated[int, typer.Option(min=0, help="Clock [MHz]; 0: the highest. The other is half of it.")] = 0,
    window: Annotated[float, typer.Option(min=0.1, max=10, help="Seconds of each of the four windows.")] = 1.0,
    replace: Annotated[bool, typer.Option("--replace", help="End what the node serves now.")] = False,
    shape: Shapes = None,
    batch: Annotated[int, typer.Option(min=1, help="Items in a pass; every input has them first.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Also cut the graph into so many stages.")] = 1,
    threshold: Annotated[float, typer.Option(min=0, max=2, help="Of scores in a cluster, with --stages.")] = 0.5,
    operators: Annotated[bool, typer.Option(help="With --stages, cut anywhere, not only between clusters.")] = False,
    memory_mib: Annotated[float, typer.Option(help="That a stage's weights may take, with --stages.")] = math.inf,
    repository: Annotated[Path | None, typer.Option(help=REPOSITORY_HELP)] = None,
    write: Annotated[bool, typer.Option("--write", help=WRITE_HELP)] = False,
    out: Annotated[
        Path, typer.Option(help="Folder for <model>.csv, .png and stages.", callback=folder_to_write)
    ] = Path("out/sensitivity"),
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Score every operator of a graph by mu-Serve's dLatency/dFrequency: 0 no clock touches it, 2 it follows it."""
    from trefoil.profiler.sensitivity import board_of, modelled_scores, summary
    from trefoil.profiler.split import graph_stages, named, write_stages

    name = model.stem if model.stem != "model" else f"{model.parent.parent.name}-{model.parent.name}"
    shapes, cut, whole = {"": (batch,), **parse_shapes(shape)}, list["GraphStage"](), model
    kind = device or DEVICE
    board = None if agent else board_of(device_type(kind))
    variant = variant_of(model) if write else None
    costs, graph = costs_of(model, shapes), None
    if stages > 1 or agent:
        out.mkdir(parents=True, exist_ok=True)
        whole = out / f"{name}.onnx"
        graph = named(model, whole, "--stages" if stages > 1 else "--agent")
        costs = costs_of(whole, shapes)
    if board is not None:
        scores = modelled_scores(costs, board)
    else:
        where = repository or model.absolute().parent.parent.parent
        measurement = OperatorMeasurement(
            model, agent, device, slice_type, clock, window, replace, where, Path(state_dir),
            triton_environment() / "bin" / "python", (lambda _line: None) if as_json else show,
        )  # fmt: skip
        kind, scores = asyncio.run(measurement.scores(graph, costs))
    if stages > 1:
        cut = graph_stages(graph, scores, stages, memory_mib, None if operators else threshold)
        paths = write_stages(whole, cut, out)
        if repository is not None:
            write_stage_models(model, paths, [one.shape for one in cut], batch, repository)
    found = {"model": str(model), "device": device or agent or DEVICE, "batch": batch, **summary(scores)}
    if variant is not None:
        _write(model, variant.name, kind, scores, cut)
    _draw(scores, name, out)
    document = {**found, "stages": [asdict(one) for one in cut], "scores": [asdict(one) for one in scores]}
    columns = ("operator", "number", "part of the time", "score from", "mean", "to")
    table = grid("", columns, _kinds(scores))
    respond(as_json, document, table, *_lines(found, scores, cut, f"{out}/{name}.csv"))


def costs_of(model: Path, shapes: dict[str, tuple[int, ...]]) -> "Sequence[OperatorCost]":
    """What every operator of an ONNX file does.

    Raises:
        CatalogError: no such file, it cannot be run, or has no operators. BinaryMissing: no ONNX Runtime is here.
    """
    from trefoil.profiler.assumed import graph_costs

    if not model.is_file():
        raise CatalogError("is not a file", field="MODEL", value=str(model), remedy="name an ONNX file")
    python = triton_environment() / "bin" / "python"
    if not python.exists():
        raise BinaryMissing(f"no ONNX Runtime: {python} is not there", remedy="trefoil setup triton")
    found = graph_costs([model], [0], shapes, python)[0].operators
    if not found:
        raise CatalogError("has no operators", field="MODEL", value=str(model), remedy="export it again")
    return found


def _write(
    model: Path, variant: str, kind: str, scores: "Sequence[OperatorScore]", cut: "Sequence[GraphStage]"
) -> None:
    """Write s of the whole and of its stages into the family's profile."""
    from trefoil.profiler.profile_csv import write_sensitivity
    from trefoil.profiler.sensitivity import s_of
    from trefoil.runtime.repository import PROFILE_FILE

    folder = model.absolute().parent.parent
    values = {0: s_of(scores), **{number: one.s for number, one in enumerate(cut, 1)}}
    sources = sorted({one.source.partition(":")[0] for one in scores})
    source = f"trefoil family sensitivity, {variant} on {kind}: {'; '.join(sources)}"
    write_sensitivity(folder / PROFILE_FILE, folder, variant, kind, values, source)


def _draw(scores: "Sequence[OperatorScore]", name: str, out: Path) -> None:
    """Write the table and the plot, in which measured operators are a line and modelled ones another."""
    from trefoil.reproduce import plots

    plots.write_csv(out, name, [asdict(one) for one in scores])
    ends = list(accumulate((one.time_ms for one in scores), initial=0.0))
    at = [moment for pair in pairwise(ends) for moment in pair]
    bases = [one.source.partition(":")[0] for one in scores]
    lines = {
        basis: (at, [s.score if own == basis else math.nan for s, own in zip(scores, bases, strict=True) for _ in "ab"])
        for basis in dict.fromkeys(bases)
    }
    plots.lines({name: lines}, out, name, "time within a pass at the highest clock [ms]", "dLatency/dFrequency")


def _lines(
    found: Mapping[str, Any], scores: "Sequence[OperatorScore]", cut: "Sequence[GraphStage]", table: str
) -> Iterator[str]:
    yield (
        f"{found['operators']} operators, {found['time_ms']:.3g} ms, s = {found['s']:.3f}; insensitive (score < 1): "
        f"{found['insensitive_share']:.0%} of them, {found['insensitive_time_share']:.0%} of the time. Each in "
        f"{table}; times and scores:"
    )
    for source, number in Counter(one.source for one in scores).most_common():
        yield f"  {number} {source}"
    if not any(one.samples for one in scores):
        yield "--agent HOST:PORT measures, on a node whose GPU's clock may be set"
    for at, one in enumerate(cut):
        yield (
            f"stage {at}: {len(one.operators)} operators, {one.time_ms:.3g} ms, s = {one.s:.3f}, "
            f"{one.memory_mib:.3g} MiB of weights, {', '.join(one.inputs)} -> {', '.join(one.outputs)}"
        )


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

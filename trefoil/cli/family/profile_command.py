"""`trefoil profile`: measure what the operating points of a family cost, on real slices, and write profile.csv.

Through a power agent (`--agent`) every variant is put on every slice type in turn, on a node that serves nothing else.
A single Triton that somebody else runs (`--triton`) is measured as it is; its joules are null unless the agent of its
node and its device are named too.
"""

import asyncio
import json
import os
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trefoil.cli.output import AsJson, console, print_json
from trefoil.cli.run.state_directory import CHECKOUT, resolve_path
from trefoil.cli.system_client import TOKEN_VARIABLE
from trefoil.core.device_types import device_type, slice_type
from trefoil.core.errors import SettingError

if TYPE_CHECKING:
    from trefoil.profiler.profile_csv import ProfilePoint, Provenance
    from trefoil.profiler.session import MeasuredSlice, ProfileSpec


def profile(
    family: Annotated[str, typer.Argument(help="A folder of the model repository, e.g. digits.")],
    agent: Annotated[str, typer.Option(help="host:port of the power agent of a node to use alone.")] = "",
    triton: Annotated[str, typer.Option(help="host:port of one slice's Triton, measured as it is.")] = "",
    device: Annotated[str, typer.Option(help="With --triton and --agent: the device it is on, <node>/gpu<i>.")] = "",
    device_kind: Annotated[str, typer.Option("--device-type", help="With --triton, e.g. cpu:2.")] = "",
    slices: Annotated[str, typer.Option(help="Slice types, e.g. 1g.5gb,3g.20gb or cpu:1; default: all.")] = "",
    clocks: Annotated[str, typer.Option(help="Clocks to hold [MHz]; default: the highest.")] = "",
    variants: Annotated[str, typer.Option(help="Default: all.")] = "",
    batches: Annotated[str, typer.Option(help="Items per batch.")] = "1,2,4,8",
    rates: Annotated[str, typer.Option(help="Loads to offer, as shares of saturation; empty: none.")] = "0.3,0.6,0.9",
    window: Annotated[float, typer.Option(help="Seconds of each measurement; at least 3.5 where joules count.")] = 5.0,
    shape: Annotated[list[str] | None, typer.Option(help="INPUT=3,224,224 where the model leaves it open.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="End what the node serves now.")] = False,
    estimate_energy: Annotated[
        bool, typer.Option("--estimate-energy", help="Without a meter, write joules by the power law (basis modelled).")
    ] = False,
    machine: Annotated[str, typer.Option(help="What the header says it was measured on; default: this CPU.")] = "",
    out: Annotated[Path | None, typer.Option(help="The CSV; default: out/profile/<family>.csv.")] = None,
    repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    as_json: AsJson = False,
) -> None:
    """Measure latency, throughput and joules of each operating point and write them as profile.csv."""
    from trefoil.profiler.profile_csv import point_json, profile_text, selected_variants, write_profile
    from trefoil.profiler.session import ProfileSpec
    from trefoil.runtime.repository import load_family

    folder = resolve_path(repository) / family
    known, _ = load_family(folder)
    if not agent and not triton:
        raise SettingError("nothing to measure", field="--agent", value="", remedy="give --agent or --triton host:port")
    sizes, clocks_mhz = _integers("--batches", batches), _integers("--clocks", clocks)
    spec = ProfileSpec(
        known,
        folder,
        tuple(selected_variants(known, _names(variants))),
        sizes,
        _numbers("--rates", rates),
        window,
        _shapes(shape),
    )
    on = _named_slice(device, device_kind, _names(slices), clocks_mhz) if triton else None
    say: Callable[[str], None] = _discard if as_json else _print_line
    target = out or Path("out/profile") / f"{family}.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    report = target.with_suffix(".json")
    points: list[ProfilePoint] = []
    try:
        simulated = asyncio.run(_measure(spec, points, (agent, triton), on, _names(slices), clocks_mhz, replace, say))
    finally:  # hours of measurement are kept, whatever ended them
        if points:
            report.write_text(json.dumps([point_json(point) for point in points], indent=1) + "\n")
    text = profile_text(points, _provenance(machine, simulated), estimate_energy=estimate_energy)
    count = write_profile(target, folder, text)
    if as_json:
        print_json({"profile": str(target), "rows": count, "points": [point_json(point) for point in points]})
    else:
        console().print(f"{count} operating points in {target}; every load in {report}", markup=False)


async def _measure(
    spec: "ProfileSpec",
    points: list["ProfilePoint"],
    targets: tuple[str, str],
    on: "MeasuredSlice | None",
    slices: list[str],
    clocks: tuple[int, ...],
    replace: bool,
    say: Callable[[str], None],
) -> bool:
    """Measure into `points`; returns whether anything about them was simulated."""
    from protos.power_agent.v1 import power_agent_pb2_grpc
    from trefoil.profiler.energy_meter import EnergyLog
    from trefoil.profiler.exclusive_node import ExclusiveNode
    from trefoil.profiler.session import Session
    from trefoil.runtime import rpc
    from trefoil.runtime.clock import WallClock

    agent, triton = targets
    clock = WallClock()
    channel = rpc.channel(agent, token=os.environ.get(TOKEN_VARIABLE)) if agent else None
    stub = power_agent_pb2_grpc.PowerAgentStub(channel) if channel is not None else None
    log = EnergyLog(stub)
    session = Session(spec, clock, log, say, points)
    simulated = False
    try:
        if on is not None:
            await session.profile_triton(triton, on)
        else:
            node = await ExclusiveNode.acquire(stub, agent, clock, replace_running=replace)
            simulated = node.simulated
            await session.profile_node(node, slices, clocks)
    finally:
        await log.close()
        if channel is not None:
            await channel.close()
    return simulated or any(point.simulated for point in points)


def _named_slice(device: str, kind: str, slices: list[str], clocks: tuple[int, ...]) -> "MeasuredSlice":
    """What a Triton that is given directly runs on: nobody can ask it."""
    from trefoil.profiler.session import MeasuredSlice

    if not kind or len(slices) != 1 or len(clocks) > 1:
        raise SettingError(
            "a Triton does not say what it runs on",
            field="--triton",
            remedy="give --device-type, one of --slices and at most one of --clocks with it",
        )
    known = device_type(kind)
    highest = max(known.clocks_mhz, default=0)
    return MeasuredSlice(device, known.name, slice_type(known, slices[0]).name, clocks[0] if clocks else highest)


def _provenance(machine: str, simulated: bool) -> "Provenance":
    """Where and when: this machine, today, this commit."""
    from trefoil.profiler.profile_csv import Provenance
    from trefoil.runtime.clock import WallClock

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=CHECKOUT, capture_output=True, text=True)
    date = datetime.fromtimestamp(WallClock().now_s(), UTC).strftime("%Y-%m-%d")
    return Provenance(machine or _this_machine(), date, git.stdout.strip() or "unknown", simulated)


def _this_machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {os.cpu_count()} cores"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _numbers(field: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text))
    except ValueError as error:
        raise SettingError("not numbers with commas between", field=field, value=text, remedy="e.g. 1,2,8") from error


def _integers(field: str, text: str) -> tuple[int, ...]:
    found = _numbers(field, text)
    if any(number != int(number) for number in found):
        raise SettingError("not whole numbers", field=field, value=text, remedy="e.g. 1,2,8")
    return tuple(int(number) for number in found)


def _shapes(given: list[str] | None) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for text in given or []:
        name, equals, sizes = text.partition("=")
        if not equals or not name:
            raise SettingError("not INPUT=sizes", field="--shape", value=text, remedy="e.g. --shape IMAGE=3,224,224")
        shapes[name] = _integers("--shape", sizes)
    return shapes


def _print_line(line: str) -> None:
    console().print(line, markup=False)


def _discard(line: str) -> None:
    """The answer is one JSON document: nothing else is printed."""

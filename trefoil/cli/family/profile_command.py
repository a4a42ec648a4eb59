"""`trefoil family profile`: measure what the operating points of a family cost, on real slices, and write profile.csv.

The running system lends a device of each type, and has it back at the end. On that device every variant is put on every
slice type in turn, while the other devices serve on. Through a power agent (`--agent`) a node is used alone that serves
nothing. A single Triton outside of Trefoil (`--triton`) is measured unchanged. Its joules are null unless the agent of
its node and its device are named too.
"""

import asyncio
import json
import os
import platform
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trefoil.cli.family.commands import Repository, Shapes, parse_shapes
from trefoil.cli.options import file_to_write
from trefoil.cli.output import DEFAULT_STATE_DIR, AsJson, StateDir, respond, show
from trefoil.cli.system_client import command_tls, connect_system, make_channel, token_at
from trefoil.core.device_types import device_type, slice_type
from trefoil.core.errors import SettingError, TrefoilError
from trefoil.installation import MODELS

if TYPE_CHECKING:
    from trefoil.profiler.profile_csv import ProfilePoint, ProfileProvenance
    from trefoil.profiler.session import MeasuredSlice, ProfileSpec, Session
    from trefoil.runtime.clock import Clock


def profile(
    family: Annotated[str, typer.Argument(help="A folder of the model repository, e.g. digits.")],
    agent: Annotated[str, typer.Option(help="host:port of the power agent of a node to use alone.")] = "",
    triton: Annotated[str, typer.Option(help="host:port of one slice's Triton, measured unchanged.")] = "",
    device: Annotated[
        str, typer.Option(help="Device to borrow, <node>/gpu<i>; with --triton and --agent: the one it is on.")
    ] = "",
    device_kind: Annotated[str, typer.Option("--device-type", help="With --triton, e.g. cpu:2.")] = "",
    slices: Annotated[str, typer.Option(help="Slice types, e.g. 1g.5gb,3g.20gb or cpu:1; default: all.")] = "",
    clocks: Annotated[str, typer.Option(help="Clocks to hold [MHz]; default: the highest.")] = "",
    limits: Annotated[str, typer.Option(help="Power limits to hold too [W], where a slice is the whole board.")] = "",
    variants: Annotated[str, typer.Option(help="Default: all.")] = "",
    batches: Annotated[str, typer.Option(help="Items per batch, or streams.")] = "1,2,4,8",
    rates: Annotated[str, typer.Option(help="Loads to offer, as shares of saturation; empty: none.")] = "0.3,0.6,0.9",
    instances: Annotated[
        int, typer.Option(min=0, help="Of a variant on a slice, sharing its cores; 0: one a core, as plans host it.")
    ] = 0,
    window: Annotated[float, typer.Option(help="Seconds of each measurement; at least 3.5 where joules count.")] = 5.0,
    shape: Shapes = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="End what the node serves now; borrow whatever the others then miss.")
    ] = False,
    estimate_energy: Annotated[
        bool, typer.Option("--estimate-energy", help="Without a meter, write joules by the power law (basis modelled).")
    ] = False,
    machine: Annotated[str, typer.Option(help="What the header says it was measured on; default: this CPU.")] = "",
    out: Annotated[Path | None, typer.Option(help="Default: out/profile/FAMILY.csv.", callback=file_to_write)] = None,
    repository: Repository = MODELS,
    state_dir: StateDir = DEFAULT_STATE_DIR,
    as_json: AsJson = False,
) -> None:
    """Measure latency, throughput and joules of each operating point and write them as profile.csv."""
    from trefoil.profiler.profile_csv import point_json, profile_text, selected_variants, write_profile
    from trefoil.profiler.session import ProfileSpec
    from trefoil.runtime.repository import known_folder, load_family

    folder = known_folder(repository, family)
    known, _ = load_family(folder)
    sizes, held = _integers("--batches", batches), _held(clocks, limits)
    chosen, shares = tuple(selected_variants(known, _names(variants))), _numbers("--rates", rates)
    spec = ProfileSpec(known, folder, chosen, sizes, shares, window, parse_shapes(shape), instances)
    on = _named_slice(device, device_kind, _names(slices), held) if triton else None
    say: Callable[[str], None] = (lambda _line: None) if as_json else show
    target = out or Path("out/profile") / f"{family}.csv"
    target.parent.mkdir(parents=True, exist_ok=True)
    report = target.with_suffix(".json")
    points: list[ProfilePoint] = []
    try:
        work = _Work(spec, points, on, _names(slices), held, replace, say, Path(state_dir))
        alone = agent or triton
        simulated = asyncio.run(work.alone(agent, triton) if alone else work.borrowing(device))
    finally:  # hours of measurement are kept, whatever ended them
        if points:
            report.write_text(json.dumps([point_json(point) for point in points], indent=1) + "\n")
    text = profile_text(points, _provenance(machine, simulated), estimate_energy=estimate_energy)
    count = write_profile(target, folder, text, chosen)
    document = {"profile": str(target), "rows": count, "points": [point_json(point) for point in points]}
    respond(as_json, document, f"{count} operating points in {target}; every load in {report}")


@dataclass(frozen=True, slots=True)
class _Work:
    """What is to be measured, into `points`. Both ways answer whether anything about them was simulated."""

    spec: "ProfileSpec"
    points: list["ProfilePoint"]
    on: "MeasuredSlice | None"
    slices: list[str]
    clocks: tuple[int, ...]
    replace: bool
    say: Callable[[str], None]
    state_dir: Path

    async def alone(self, agent: str, triton: str) -> bool:
        """On a Triton outside of Trefoil, or on a node that serves nothing."""
        from trefoil.profiler.exclusive_node import ExclusiveNode

        async with self._session(agent) as (session, stub, clock):
            if self.on is not None:
                await session.profile_triton(triton, self.on)
                return self._simulated()
            node = await ExclusiveNode.acquire(stub, agent, clock, replace_running=self.replace)
            await session.profile_node(node, self.slices, self.clocks)
            return node.simulated or self._simulated()

    async def borrowing(self, device: str) -> bool:
        """On a device of each type that the controller of the running system lends."""
        from trefoil.profiler.lent_device import LentDevice, lendable
        from trefoil.profiler.places import places_on

        holder, simulated = f"trefoil family profile {self.spec.family.name} (process {os.getpid()})", False
        async with connect_system(self.state_dir) as system:
            chosen = lendable(await system.nodes(), device)
            wanted = places_on([status for _, status in chosen.values()], self.slices, self.clocks)
            for node, status in chosen.values():
                here = [place.shape.name for place in wanted if place.device == status.device]
                if not here:
                    continue
                self.say(f"borrowing {status.device} ({status.type.name}) of the running system")
                async with self._session(node.agent_target) as (session, stub, clock):
                    lent = LentDevice(system.call, stub, status, clock, holder=holder, force=self.replace)
                    try:
                        await session.profile_node(lent, list(dict.fromkeys(here)), self.clocks)
                    except TrefoilError as error:
                        raise (lent.lost or error) from error
                simulated |= node.simulated
        return simulated or self._simulated()

    def _simulated(self) -> bool:
        return any(point.simulated for point in self.points)

    @asynccontextmanager
    async def _session(self, agent: str) -> "AsyncIterator[tuple[Session, Any, Clock]]":
        """A session with a power agent's energy, or without an agent and without energy."""
        from protos.power_agent.v1 import power_agent_pb2_grpc
        from trefoil.profiler.energy_meter import EnergyLog
        from trefoil.profiler.session import Session
        from trefoil.runtime.clock import WallClock

        clock = WallClock()
        token = token_at(agent, self.state_dir) if agent else None
        channel = make_channel(agent, token=token) if agent else None
        tls = command_tls() if token is None else None
        stub = power_agent_pb2_grpc.PowerAgentStub(channel) if channel is not None else None
        log = EnergyLog(stub)
        try:
            yield Session(self.spec, clock, log, self.say, self.points, tls), stub, clock
        finally:
            await log.close()
            if channel is not None:
                await channel.close()


def _held(clocks: str, limits: str) -> tuple[int, ...]:
    """Clocks to hold [MHz], then power limits [-W]."""
    return (*_integers("--clocks", clocks), *(-watts for watts in _integers("--limits", limits)))


def _named_slice(device: str, kind: str, slices: list[str], clocks: tuple[int, ...]) -> "MeasuredSlice":
    """Device of a Triton that is given directly: it cannot report it."""
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


def _provenance(machine: str, simulated: bool) -> "ProfileProvenance":
    """Where and when: this machine, today, this commit."""
    from trefoil.cli.demo.results import git_commit
    from trefoil.profiler.profile_csv import ProfileProvenance
    from trefoil.runtime.clock import WallClock

    date = datetime.fromtimestamp(WallClock().now_s(), UTC).strftime("%Y-%m-%d")
    return ProfileProvenance(machine or _this_machine(), date, git_commit(), simulated)


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

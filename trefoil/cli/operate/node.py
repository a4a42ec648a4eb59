"""`trefoil node`: what an operator asks of one power agent, here or on another machine.

Without --target it is the agent of the system that runs in the state directory. The control token is read from
TREFOIL_TOKEN or TREFOIL_TOKEN_FILE, never from the command line, where everyone could see it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer

import trefoil
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.cli.guarded import Guarded
from trefoil.cli.options import RUNNING, ServiceAddress, Sets, of_service, parse_sets, read_plan
from trefoil.cli.output import AsJson, as_json, grid, power_text, respond
from trefoil.cli.system_client import RPC_TIMEOUT_S, open_service
from trefoil.core.errors import NotFound, Unavailable
from trefoil.core.fleet import ClockLease, NodeStatus
from trefoil.runtime import codec, rpc
from trefoil.runtime.config import load

T = TypeVar("T")
UNIT_SETTINGS: Final = Path("/etc/trefoil/power-agent.toml")

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="One node: its power agent, devices, clocks and joules.")

DeviceArgument = Annotated[str, typer.Argument(metavar="DEVICE", help="<node>/gpu<i> or <node>/cpu.")]


@dataclass(frozen=True, slots=True)
class AgentClient:
    """Client of one power agent."""

    target: str
    stub: Any

    async def call(self, method: str, request: Any) -> Any:
        """Call the agent, with a deadline; its errors are raised as the TrefoilError that it met."""
        return await rpc.call(getattr(self.stub, method), request, RPC_TIMEOUT_S)

    async def status(self) -> NodeStatus:
        """Status of the node now."""
        answer = await self.call("GetNode", power_agent_pb2.GetNodeRequest())
        status: NodeStatus = codec.from_proto(answer.node)
        return status

    async def command(self, method: str, **fields: Any) -> Any:
        """Call what changes something, under the epoch that the agent obeys now."""
        epoch = (await self.status()).highest_epoch_seen
        return await self.call(method, getattr(power_agent_pb2, f"{method}Request")(epoch=epoch, **fields))


def call_agent(where: ServiceAddress, work: Callable[[AgentClient], Awaitable[T]]) -> T:
    """Run a coroutine with a client of a power agent.

    Raises:
        SettingError: the certificate cannot be read.
        NotFound: no target was given and nothing runs in the state directory.
    """

    async def connected() -> T:
        async with open_service("power_agent", *where) as (address, channel):
            return await work(AgentClient(address, power_agent_pb2_grpc.PowerAgentStub(channel)))

    return asyncio.run(connected())


def show(where: ServiceAddress = RUNNING, as_json_: AsJson = False) -> None:
    """Show the node: devices, slices, clocks, what the agent can and cannot do here."""
    status = call_agent(where, AgentClient.status)
    kind = " (SIMULATED)" if status.simulated else ""
    rows = []
    for device in status.devices:
        lease = device.clock_lease
        clock = f"{device.clock_mhz} MHz" if device.clock_mhz else "-"
        held = f", {_leased(lease)} by {lease.holder}" if lease else ""
        notes = "; ".join([*([f"cordon: {device.cordon}"] if device.cordon else []), *device.drift])
        kinds = (device.type.name, device.state.name)
        rows.append((device.device, *kinds, clock + held, power_text(device), notes or "-"))
    slices = [
        (part.key.name, part.state.name, "+".join(h.variant for h in part.hosted), part.why or "-")
        for device in status.devices
        for part in device.slices
    ]
    respond(
        as_json_,
        {"node": as_json(status)},
        f"node {status.node}{kind}, zone {status.zone or '-'}, obeys epoch {status.highest_epoch_seen}",
        f"can: {', '.join(status.capabilities) or 'nothing'}",
        *(f"cannot: {missing}" for missing in status.missing),
        grid("Devices", ("device", "type", "state", "clock", "power", "notes"), rows),
        grid("Slices", ("slice", "state", "serves", "why"), slices),
    )


def preview(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A plan as `trefoil plan --json` prints it.")],
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Show the steps that a plan would take on this node; touch nothing."""
    plan = read_plan(file)

    async def dry_run(agent: AgentClient) -> Any:
        name = (await agent.status()).node
        for node in plan.nodes:
            if node.node == name:
                return await agent.call("PreviewPlan", power_agent_pb2.PreviewPlanRequest(plan=codec.to_proto(node)))
        raise NotFound("the plan has no part for it", field="node", value=name, remedy="give a plan of this cluster")

    answer = call_agent(where, dry_run)
    steps = [(codec.from_proto(step.slice), step.verb, step.why) for step in answer.steps]
    document = [{"slice": as_json(key), "verb": verb, "why": why} for key, verb, why in steps]
    rows = [(key.name if key.slice_type else key.device, verb, why) for key, verb, why in steps]
    shown = grid("Steps", ("where", "step", "why"), rows) if rows else "nothing to do"
    respond(as_json_, {"changed": answer.changed, "steps": document}, shown)


def drain(
    device: Annotated[str, typer.Argument(metavar="[DEVICE]", help="Default: every device of the node.")] = "",
    why: Annotated[str, typer.Option(help="Shown wherever the device is.")] = "maintenance",
    patience_s: Annotated[
        float, typer.Option("--patience", help="Seconds for the controller to move the work elsewhere first.", min=0)
    ] = 60.0,
    release: Annotated[bool, typer.Option("--release", help="Put it back into service.")] = False,
    wait_s: Annotated[float, typer.Option("--wait", help="Wait up to so many seconds until it is empty.", min=0)] = 0.0,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Take a device (or the node) out of service without failing a request; --release ends it."""

    async def change(agent: AgentClient) -> NodeStatus:
        answer = await agent.command("Drain", device=device, why=why, patience_s=patience_s, release=release)
        status: NodeStatus = codec.from_proto(answer.node)
        return status if release or not wait_s else await _wait_until_empty(agent, device, wait_s)

    status = call_agent(where, change)
    devices = [d for d in status.devices if device in ("", d.device)]
    rows = [(d.device, d.cordon or "in service", str(len(d.slices))) for d in devices]
    respond(as_json_, {"devices": as_json(devices)}, grid("Devices", ("device", "service", "slices left"), rows))


async def _wait_until_empty(agent: AgentClient, device: str, wait_s: float) -> NodeStatus:
    status = await agent.status()
    try:
        async with asyncio.timeout(wait_s):
            async for change in agent.stub.WatchNode(power_agent_pb2.WatchNodeRequest()):
                status = codec.from_proto(change.node)
                if not any(d.slices for d in status.devices if device in ("", d.device)):
                    break
    except TimeoutError:
        left = [part.key.name for d in status.devices if device in ("", d.device) for part in d.slices]
        raise Unavailable(
            f"still there after {wait_s:g} s: {', '.join(left)}",
            field="--wait",
            value=wait_s,
            remedy="look at `trefoil node show`; wait longer",
        ) from None
    return status


NamesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME]...", help="Tags of Tritons or names of slices; default: all that is not proven."),
]


def adopt(
    names: NamesArgument = None,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Take over what runs on the node and is not proven to be its agent's."""
    answer = call_agent(where, lambda agent: agent.command("Adopt", name=names or []))
    _print_unproven(codec.from_proto(answer.node), as_json_)


def reset(
    names: NamesArgument = None,
    force: Annotated[bool, typer.Option("--force", help="Also what serves: its requests fail.")] = False,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """End what runs on the node and is not proven to be its agent's, and destroy its instances."""
    answer = call_agent(where, lambda agent: agent.command("Reset", name=names or [], force=force))
    _print_unproven(codec.from_proto(answer.node), as_json_)


def _print_unproven(status: NodeStatus, as_json_: bool) -> None:
    left = [why.partition(": ")[2] for why in status.missing if why.startswith("unproven: ")]
    said = f"{status.node}: {left[0] if left else 'all that runs here is of its agent'}"
    respond(as_json_, {"node": status.node, "unproven": left}, said)


def clocks(
    device: DeviceArgument,
    max_mhz: Annotated[
        int, typer.Option("--max", help="Highest clock [MHz]; snapped to a supported one. 0 = left to the plan.", min=0)
    ] = 0,
    min_mhz: Annotated[int, typer.Option("--min", help="Lowest clock [MHz]; 0 = the lowest supported.", min=0)] = 0,
    limit_w: Annotated[
        float, typer.Option("--limit", help="Power limit of the board [W]; 0 = left to the plan.", min=0)
    ] = 0.0,
    ttl_s: Annotated[float, typer.Option("--ttl", help="Seconds until the default is restored.", min=1)] = 60.0,
    holder: Annotated[str, typer.Option(help="Who holds the lease.")] = "operator",
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Hold a device's clock range, its power limit or both for a bounded time."""

    async def change(agent: AgentClient) -> Any:
        request = power_agent_pb2.SetClocksRequest(ttl_s=ttl_s)
        request.lease.device, request.lease.holder = device, holder
        request.lease.min_mhz, request.lease.max_mhz, request.lease.power_limit_w = min_mhz, max_mhz, limit_w
        request.lease.epoch = (await agent.status()).highest_epoch_seen
        return (await agent.call("SetClocks", request)).lease

    lease = codec.from_proto(call_agent(where, change))
    said = f"{lease.device}: {_leased(lease)} for {ttl_s:g} s, held by {lease.holder}"
    respond(as_json_, {"lease": as_json(lease)}, said)


def _leased(lease: ClockLease) -> str:
    """What a lease holds."""
    clocks = [f"{lease.min_mhz}-{lease.max_mhz} MHz"] if lease.max_mhz else []
    return ", ".join([*clocks, *([f"{lease.power_limit_w:g} W"] if lease.power_limit_w else [])])


def unlock(
    device: DeviceArgument,
    holder: Annotated[str, typer.Option(help="Who holds the lease.")] = "operator",
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """End a lease of clocks or power limit before its time."""
    call_agent(where, lambda agent: agent.command("ReleaseClocks", device=device, holder=holder))
    respond(as_json_, {"released": device}, f"{device}: released")


def energy(
    seconds: Annotated[float, typer.Option(help="How long to watch.", min=0)] = 5.0,
    where: ServiceAddress = RUNNING,
) -> None:
    """Print energy samples as JSON lines: those that the agent still holds, then each new one."""
    import json

    async def watch(agent: AgentClient) -> None:
        try:
            async with asyncio.timeout(seconds):
                async for answer in agent.stub.WatchEnergy(power_agent_pb2.WatchEnergyRequest()):
                    typer.echo(json.dumps(as_json(codec.from_proto(answer.sample))))
        except TimeoutError:
            return  # as long as was asked for

    call_agent(where, watch)


def doctor(
    config: Annotated[
        Path | None, typer.Option("--config", help=f"Settings of the agent. Default, where it exists: {UNIT_SETTINGS}")
    ] = None,
    sets: Sets = None,
    as_json_: AsJson = False,
) -> None:
    """Look at this machine as a power agent would: what works, what does not, what fixes it. No agent need run.

    Changes nothing. Exit code 1 where something does not work. A bug report needs what --json prints: no secrets.
    """
    from power_agent.doctor.examination import examine
    from power_agent.settings import PowerAgentSettings

    path = config or (UNIT_SETTINGS if UNIT_SETTINGS.is_file() else None)
    found = examine(load(PowerAgentSettings, path, "TREFOIL_POWER_AGENT_", parse_sets(sets)))
    title = "Doctor" + (" (SIMULATED)" if found.simulated else "")
    rows = [(one.subject, one.verdict, one.seen, one.remedy or "-") for one in found.findings]
    table = grid(title, ("what", "", "seen", "what fixes it"), rows)
    respond(as_json_, {"trefoil": trefoil.__version__} | found.document(), table)
    if not found.healthy:
        raise typer.Exit(1)


for _command in (show, preview, drain, adopt, reset, clocks, unlock, energy):
    app.command()(of_service("agent")(_command))
app.command()(doctor)

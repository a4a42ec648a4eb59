"""Clients of a running system: its controller, dispatcher and Redis by the launch file, or one service by its address.

The services of a system that is found by its state directory are sent the token that its launch made. Others get the
one of TREFOIL_TOKEN, or of the file that TREFOIL_TOKEN_FILE names, never of the command line, where all could see it.
TREFOIL_TLS_CA, TREFOIL_TLS_CERTIFICATE and TREFOIL_TLS_KEY name PEM files: the authority of the services' certificates
(or `--ca`), and the pair that this command shows.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc

from dispatcher.request.core.receipts import current_ratio
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil.cli.run.state_directory import Launch, StatePaths
from trefoil.core.carbon import CarbonRatio, CarbonReading
from trefoil.core.errors import NotFound, SettingError, StartError
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import Objective
from trefoil.core.plan import DecisionRecord
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.config import read_secret_file
from trefoil.runtime.security.tls import Tls

RPC_TIMEOUT_S: Final = 10.0
RECEIPT_HOURS: Final = 2
DECISIONS_PAGE: Final = 100
TOKEN_VARIABLE: Final = "TREFOIL_TOKEN"
TOKEN_FILE_VARIABLE: Final = "TREFOIL_TOKEN_FILE"
TLS_VARIABLES: Final = ("TREFOIL_TLS_CERTIFICATE", "TREFOIL_TLS_KEY", "TREFOIL_TLS_CA")
INSECURE_VARIABLE: Final = "TREFOIL_INSECURE"  # 1: the token may leave this machine in clear text

T = TypeVar("T")


class SystemClient:
    """Connections to a running system's controller, dispatcher and Redis, for the length of one command."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        from trefoil.runtime.state import State  # brings redis: a third of what `trefoil --help` would take

        self.state = State.connect(launch.redis_url, launch.cluster, clock=WallClock())
        self.token = launch_token(launch)
        self._channel = make_channel(launch.addresses["controller"], token=self.token)
        self.controller = controller_pb2_grpc.ControllerStub(self._channel)

    async def close(self) -> None:
        """Close the connections."""
        await self._channel.close()
        await self.state.close()

    async def call(self, method: str, request: Any) -> Any:
        """Call the controller, with a deadline; its errors are raised as the TrefoilError that it met."""
        return await rpc.call(getattr(self.controller, method), request, RPC_TIMEOUT_S)

    async def plan(self) -> Any:
        """The plan in force (GetPlanResponse: plan, rollout, mode, frozen, pinned)."""
        return await self.call("GetPlan", controller_pb2.GetPlanRequest())

    async def explain(self, family: str) -> Any:
        """Why a family's plan is what it is (ExplainResponse)."""
        return await self.call("Explain", controller_pb2.ExplainRequest(family=family))

    async def explain_request(self, family: str, params: Mapping[str, str]) -> Any:
        """How the dispatcher's targets stand for a request with these parameters (ExplainRequestResponse)."""
        async with make_channel(self.launch.addresses["dispatcher"], token=self.token) as channel:
            request = dispatcher_pb2.ExplainRequestRequest(family=family, params=params)
            return await rpc.call(dispatcher_pb2_grpc.DispatcherStub(channel).ExplainRequest, request, RPC_TIMEOUT_S)

    async def objective(self, family: str) -> Objective:
        """Objective in force of a family."""
        answer = await self.call("GetObjective", controller_pb2.GetObjectiveRequest(family=family))
        stored: Objective = codec.from_proto(answer.objective)
        return stored

    async def set_objective(self, objective: Objective) -> tuple[Objective, str]:
        """Store an objective, unless somebody else changed it since.

        Returns it with its new number, and how the plan for it is degraded ("" when it is not).
        """
        request = controller_pb2.SetObjectiveRequest(
            objective=codec.to_proto(objective), expected_number=objective.number
        )
        answer = await self.call("SetObjective", request)
        return codec.from_proto(answer.objective), answer.degraded

    async def objectives(self) -> tuple[list[Objective], float]:
        """Objectives in force by family, and the cap on the planned power of the fleet [W], 0 = none."""
        answer = await self.call("GetObjectives", controller_pb2.GetObjectivesRequest())
        return [codec.from_proto(each) for each in answer.objectives], answer.max_watts

    async def set_objectives(self, objectives: Sequence[Objective], max_watts: float | None) -> Any:
        """Store objectives, all or none, and the fleet's cap (0 = none; None = as it is): SetObjectivesResponse."""
        changed = [
            controller_pb2.SetObjectiveRequest(objective=codec.to_proto(each), expected_number=each.number)
            for each in objectives
        ]
        return await self.call(
            "SetObjectives", controller_pb2.SetObjectivesRequest(objectives=changed, max_watts=max_watts)
        )

    async def nodes(self) -> list[NodeStatus]:
        """Statuses that the power agents publish, by node name."""
        found = await self.state.scan(self.state.keys.node_prefix(), NodeStatus)
        return [found[key] for key in sorted(found)]

    async def carbon(self) -> list[CarbonReading]:
        """Last carbon reading of each zone."""
        found = await self.state.scan(self.state.keys.carbon_now_prefix(), CarbonReading)
        return [found[key] for key in sorted(found)]

    async def carbon_ratio(self, reading: CarbonReading) -> float | None:
        """Carbon over its mean that routers go by now; None: not known, or too old."""
        found = await self.state.get(self.state.keys.carbon_ratio(reading.series), CarbonRatio)
        return current_ratio(found, reading, WallClock().now_s())

    async def served(self) -> Any:
        """What was served of late, by family and class (GetServedResponse)."""
        return await self.call("GetServed", controller_pb2.GetServedRequest())

    async def decisions_since(self, at_s: float) -> list[DecisionRecord]:
        """Decisions that are kept and were taken at a time [UTC s] or later, oldest first."""
        key, found, last = self.state.keys.decisions(), list[DecisionRecord](), "0"
        while entries := await self.state.stream(key, DecisionRecord, last, DECISIONS_PAGE):
            last = entries[-1][0]
            found += [record for _, record in entries if record.at_s >= at_s]
        return found

    async def newest_decisions(self, count: int) -> list[DecisionRecord]:
        """The newest decisions that are kept, oldest first."""
        return [record for _, record in await self.state.tail(self.state.keys.decisions(), DecisionRecord, count)]

    async def totals(self) -> dict[str, list[dict[str, float]]]:
        """Totals of each family since the launch: its hours, oldest first."""
        hours: dict[str, dict[str, str]] = {}
        prefix = self.state.keys.totals_prefix()
        first = datetime.fromtimestamp(self.launch.started_at_s, UTC).strftime("%Y%m%d%H")
        for key in await self.state.names(prefix):
            family, _, hour = key.removeprefix(prefix).rpartition(":")
            if hour >= first:
                hours.setdefault(family, {})[hour] = key
        return {
            family: [await self.state.totals(key) for _, key in sorted(keys.items())]
            for family, keys in sorted(hours.items())
        }


def receipt_check(totals: Mapping[str, Sequence[Mapping[str, float]]]) -> list[dict[str, Any]]:
    """Energy by family as receipts sum it and as it was metered [J], in the hour under way and the one before.

    `residual`: receipts over metered, less 1; None where nothing was answered or metered.
    """
    found = []
    for family, hours in totals.items():
        recent = hours[-RECEIPT_HOURS:]
        answered, receipt_j, active_j = (
            sum(hour.get(name, 0.0) for hour in recent) for name in ("requests", "receipt_joules", "active_joules")
        )
        residual = receipt_j / active_j - 1 if active_j and answered else None
        one = {"receipt_j": receipt_j, "active_j": active_j, "residual": residual}
        found.append({"family": family, "answered": round(answered), **one})
    return found


def saving_since_start(totals: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """What all families took since the launch, and what modelled BASE would have for the same answers in the same time.

    Only of the time that was metered. `saving_pct` of grams; None where one of the two is not known.
    """
    sums = dict.fromkeys(("requests", "unmeasured_s", "base_unknown_s"), 0.0)
    for hours in totals.values():
        for hour in hours:
            for name, value in hour.items():
                sums[name] = sums.get(name, 0.0) + value
    names = ("joules", "grams", "base_joules", "base_grams")
    modelled = not sums["base_unknown_s"]
    found = {n: sums[n] if n in sums and (modelled or not n.startswith("base")) else None for n in names}
    grams, base = found["grams"], found["base_grams"]
    saving_pct = 100 * (1 - grams / base) if grams is not None and base else None
    counts = {"requests": round(sums["requests"]), "unmeasured_s": sums["unmeasured_s"]}
    return counts | found | {"saving_pct": saving_pct}


@asynccontextmanager
async def connect_system(state_dir: Path) -> AsyncIterator[SystemClient]:
    """Connect to the system that runs in a state directory.

    Raises:
        NotFound: none runs there.
    """
    client = SystemClient(StatePaths(state_dir.resolve()).running())
    try:
        yield client
    finally:
        await client.close()


def call_system(state_dir: str, work: Callable[[SystemClient], Awaitable[T]]) -> T:
    """Run a coroutine with a client of the system that runs in a state directory.

    Raises:
        NotFound: none runs there.
    """

    async def connected() -> T:
        async with connect_system(Path(state_dir)) as client:
            return await work(client)

    return asyncio.run(connected())


def control_token() -> str | None:
    """Control token of this command, from TREFOIL_TOKEN or from the file that TREFOIL_TOKEN_FILE names; None: none.

    Raises:
        SettingError: both are set; the file cannot be read, holds no token, or others may read it.
    """
    token, path = os.environ.get(TOKEN_VARIABLE), os.environ.get(TOKEN_FILE_VARIABLE)
    if not path:
        return token
    if token:
        remedy = f"unset it, or {TOKEN_VARIABLE}"
        raise SettingError(f"{TOKEN_VARIABLE} is set too", field=TOKEN_FILE_VARIABLE, value=path, remedy=remedy)
    return read_secret_file(Path(path), TOKEN_FILE_VARIABLE)


def launch_token(launch: Launch) -> str | None:
    """Token of the services of a running system.

    Raises:
        SettingError: this user may not read it.
    """
    return read_secret_file(Path(launch.token_file), "token_file") if launch.token_file else None


def token_at(address: str, state_dir: Path) -> str | None:
    """Token of the system that runs in a state directory, if one of its services listens at this address; else None."""
    try:
        launch = StatePaths(state_dir.resolve()).running()
    except (NotFound, StartError):  # who names an address needs none
        return None
    return launch_token(launch) if address in launch.addresses.values() else None


def make_channel(address: str, ca: Path | None = None, token: str | None = None) -> grpc.aio.Channel:
    """Channel of this command to a service: with the token of a system of `trefoil up`, which has no TLS of its own,
    else with this command's, and over TLS where an authority is named.

    Raises:
        SettingError: a certificate cannot be used, see `control_token`, or the token would leave in clear text.
    """
    if token is not None and ca is None:
        return rpc.channel(address, token=token)
    insecure = os.environ.get(INSECURE_VARIABLE) == "1"
    return rpc.channel(address, tls=command_tls(ca), token=token or control_token(), insecure=insecure)


def command_tls(ca: Path | None = None) -> Tls | None:
    """TLS of this command by `--ca` and its environment; None: it speaks clear text.

    Raises:
        SettingError: no authority is named for a certificate, or a file cannot be used.
    """
    certificate, key, authority = (Path(value) if (value := os.environ.get(name)) else None for name in TLS_VARIABLES)
    wanted = ca or authority
    if wanted is None and (certificate is not None or key is not None):
        remedy = f"set {TLS_VARIABLES[2]}, or give --ca"
        raise SettingError("no authority is named", field=f"{TLS_VARIABLES[0]}, {TLS_VARIABLES[1]}", remedy=remedy)
    fields = (TLS_VARIABLES[0], TLS_VARIABLES[1], "--ca" if ca is not None else TLS_VARIABLES[2])
    return Tls(certificate, key, wanted, fields=fields, serves=False) if wanted is not None else None


@asynccontextmanager
async def open_service(service: str, target: str, ca: Path | None, state_dir: str) -> AsyncIterator[tuple[str, Any]]:
    """Address of a service, and a gRPC channel to it for the length of one command: at the given host:port, else in the
    system that runs in the state directory, whose own token is sent.

    Raises:
        SettingError: not host:port, or as `make_channel`.
        NotFound: no target was given and nothing runs there.
    """
    if not target:
        target = StatePaths(Path(state_dir).resolve()).running().addresses[service]
    elif not target.startswith("unix:"):
        rpc.split_address(target)
    channel = make_channel(target, ca, token_at(target, Path(state_dir)))
    try:
        yield target, channel
    finally:
        await channel.close()

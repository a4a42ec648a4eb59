"""Clients of a running system: its controller, dispatcher and Redis by the launch file, or one service by its address.

The control token is read from TREFOIL_TOKEN, never from the command line, where everyone could see it.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

from dispatcher.request.core.receipts import current_ratio
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil.cli.run.state_directory import Launch, StatePaths
from trefoil.core.carbon import CarbonRatio, CarbonReading
from trefoil.core.errors import SettingError
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import Objective
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

RPC_TIMEOUT_S: Final = 10.0
RECEIPT_HOURS: Final = 2
TOKEN_VARIABLE: Final = "TREFOIL_TOKEN"

T = TypeVar("T")


class SystemClient:
    """Connections to a running system's controller, dispatcher and Redis, for the length of one command."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.state = State.connect(launch.redis_url, launch.cluster, clock=WallClock())
        self._channel = rpc.channel(launch.addresses["controller"])
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
        async with rpc.channel(self.launch.addresses["dispatcher"]) as channel:
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

    async def receipts(self) -> list[dict[str, Any]]:
        """Energy by family as receipts sum it and as it was metered [J], in the hour under way and the one before.

        `residual`: receipts over metered, less 1; None where nothing was metered.
        """
        hours: dict[str, list[str]] = {}
        prefix = self.state.keys.totals_prefix()
        for key in await self.state.names(prefix):
            hours.setdefault(key.removeprefix(prefix).rpartition(":")[0], []).append(key)
        found = []
        for family, keys in sorted(hours.items()):
            totals = [await self.state.totals(key) for key in sorted(keys)[-RECEIPT_HOURS:]]
            receipt_j = sum(each.get("receipt_joules", 0.0) for each in totals)
            active_j = sum(each.get("active_joules", 0.0) for each in totals)
            residual = receipt_j / active_j - 1 if active_j else None
            found.append({"family": family, "receipt_j": receipt_j, "active_j": active_j, "residual": residual})
        return found


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


def service_address(service: str, target: str, state_dir: str) -> str:
    """Address of a service: the given host:port, else that of the system that runs in the state directory.

    Raises:
        SettingError: not host:port.
        NotFound: no target was given and nothing runs there.
    """
    if not target:
        return StatePaths(Path(state_dir).resolve()).running().addresses[service]
    if not target.startswith("unix:"):
        rpc.split_address(target)
    return target


@asynccontextmanager
async def open_channel(address: str, ca: Path | None) -> AsyncIterator[Any]:
    """Open a gRPC channel to an address, with the control token, for the length of one command.

    Raises:
        SettingError: the certificate cannot be read.
    """
    try:
        authority = ca.read_bytes() if ca is not None else None
    except OSError as error:
        raise SettingError(
            f"cannot be read ({error})", field="--ca", value=str(ca), remedy="name a PEM file"
        ) from error
    channel = rpc.channel(address, ca=authority, token=os.environ.get(TOKEN_VARIABLE))
    try:
        yield channel
    finally:
        await channel.close()

"""Clients of a system: its controller by the launch file or by its address, or one service by its address.

The services of a system that is found by its state directory are sent the token that its launch made. Others get the
one of `--token-file`, of TREFOIL_TOKEN, or of the file that TREFOIL_TOKEN_FILE names, never of the command line, where
all could see it. TREFOIL_TLS_CA, TREFOIL_TLS_CERTIFICATE and TREFOIL_TLS_KEY name PEM files, as `--tls-ca` (`--ca`),
`--tls-certificate` and `--tls-key` do: the authority of the services' certificates, and the pair that this command
shows.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from trefoil import direct
from trefoil.cli.options import SystemAddress
from trefoil.cli.run.state_directory import Launch, StatePaths
from trefoil.core.carbon import CarbonReading
from trefoil.core.errors import NotFound, SettingError, StartError, TrefoilError, Unavailable, UnknownCall
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import Objective
from trefoil.overview.reads import ControllerReads
from trefoil.runtime import codec, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.secret_files import OVERLAP, read_secret_file
from trefoil.runtime.security.tls import Tls

if TYPE_CHECKING:
    from trefoil.runtime.state import State

RPC_TIMEOUT_S: Final = 10.0
HEALTH_TIMEOUT_S: Final = 1.0
TOKEN_VARIABLE: Final = "TREFOIL_TOKEN"
TOKEN_FILE_VARIABLE: Final = "TREFOIL_TOKEN_FILE"
TLS_VARIABLES: Final = ("TREFOIL_TLS_CERTIFICATE", "TREFOIL_TLS_KEY", "TREFOIL_TLS_CA")
TLS_NAME_VARIABLE: Final = "TREFOIL_TLS_NAME"
"""Name that the certificate of the service must have, instead of the host of its address."""
INSECURE_VARIABLE: Final = "TREFOIL_INSECURE"  # 1: the token may leave this machine in clear text

REFUSED: Final = ("UNAUTHENTICATED", "PERMISSION_DENIED")
SILENCE: Final = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")  # begins an error where no service has answered

T = TypeVar("T")


class ControllerClient(ControllerReads):
    """Connections to a system's controllers, for the length of one command."""

    def __init__(self, channels: Mapping[str, grpc.aio.Channel]) -> None:
        self._channels = dict(channels)
        self._stubs = {at: controller_pb2_grpc.ControllerStub(channel) for at, channel in channels.items()}

    @property
    def local(self) -> "SystemClient | None":
        """This client, where the system runs in a state directory of this machine; else None."""
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels.values():
            await channel.close()

    async def call(self, method: str, request: Any) -> Any:
        """Call the controller that leads, with a deadline; its errors are raised as the TrefoilError that it met.

        Raises:
            Unavailable: none answers, or none leads.
            UnknownCall: the controller is older than this command; standbys may be.
        """
        silent: list[tuple[str, TrefoilError]] = []
        for at, stub in self._stubs.items():
            try:
                answer = await rpc.call(getattr(stub, method), request, RPC_TIMEOUT_S)
            except (Unavailable, UnknownCall) as error:
                silent.append((at, error))
                continue
            except TrefoilError as error:
                if str(error).startswith(REFUSED):
                    remedy = f"give the file of its token, or set {TOKEN_VARIABLE} or {TOKEN_FILE_VARIABLE}"
                    raise SettingError(
                        f"{at} wants another token ({error})", field="--token-file", remedy=remedy
                    ) from error
                raise
            if silent:  # it is asked first from now on
                self._stubs = {at: stub, **self._stubs}
            return answer
        if old := [at for at, error in silent if isinstance(error, UnknownCall)]:
            raise UnknownCall(f"{method}: unknown to the controller at {old[0]}", remedy="upgrade it: it is older")
        if len(silent) == 1 and not str(silent[0][1]).startswith(SILENCE):
            raise silent[0][1]
        found = "; ".join(f"{at}: {why}" for at, why in silent)
        remedy = "see that the address is right, that it runs there, and that both or neither speak TLS"
        raise Unavailable(f"no controller answers ({found})", remedy=remedy)

    async def family(self, wanted: str) -> str:
        """The wanted family, "" = the one that is served.

        Raises:
            SettingError: there are several.
        """
        if wanted:
            return wanted
        names = [each.family for each in (await self.objectives())[0]]
        if len(names) != 1:
            raise SettingError(
                "several are served", field="--family", remedy=f"one of {', '.join(names) or 'none yet'}"
            )
        return names[0]

    async def explain_request(self, channel: grpc.aio.Channel, family: str, params: Mapping[str, str]) -> Any:
        """How a dispatcher's targets stand for a request with these parameters (ExplainRequestResponse)."""
        request = dispatcher_pb2.ExplainRequestRequest(family=family, params=params)
        return await rpc.call(dispatcher_pb2_grpc.DispatcherStub(channel).ExplainRequest, request, RPC_TIMEOUT_S)

    async def objective(self, family: str) -> Objective:
        """Objective in force of a family."""
        found = {each.family: each for each in (await self.objectives(family))[0]}
        return found[family]

    async def set_objective(self, objective: Objective) -> tuple[Objective, str]:
        """Store an objective, unless another caller changed it since.

        Returns it with its new number, and how the plan for it is degraded ("" when it is not).
        """
        answer = await self.set_objectives((objective,), None)
        return codec.from_proto(answer.objectives[0]), answer.degraded

    async def reset_objective(self, family: str) -> tuple[Objective, str]:
        """Go back to the settings' objective of a family; returns as `set_objective`."""
        change = controller_pb2.ObjectiveChange(objective=codec.to_proto(Objective(family)), reset=True)
        answer = await self.call("SetObjectives", controller_pb2.SetObjectivesRequest(objectives=[change]))
        return codec.from_proto(answer.objectives[0]), answer.degraded

    async def set_objectives(
        self, objectives: Sequence[Objective], max_watts: float | None, reset_max_watts: bool = False
    ) -> Any:
        """Store objectives, all or none, and the fleet's cap (0 = none; None = as it is): SetObjectivesResponse.

        `reset_max_watts`: the cap is that of the settings.
        """
        changed = [
            controller_pb2.ObjectiveChange(objective=codec.to_proto(each), expected_number=each.number)
            for each in objectives
        ]
        request = controller_pb2.SetObjectivesRequest(
            objectives=changed, max_watts=max_watts, reset_max_watts=reset_max_watts
        )
        return await self.call("SetObjectives", request)


class SystemClient(ControllerClient):
    """Connections to a system that `trefoil up` started here: also to its dispatcher and Redis."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._state: State | None = None
        self.token = launch_token(launch)
        address = launch.addresses["controller"]
        super().__init__({address: make_channel(address, token=self.token)})

    @property
    def local(self) -> "SystemClient":
        """This client."""
        return self

    @property
    def state(self) -> "State":
        """Its Redis."""
        if self._state is None:
            from trefoil.runtime.state import State  # brings redis and structlog, which few commands need

            self._state = State.connect(self.launch.redis_url, self.launch.cluster, clock=WallClock())
        return self._state

    async def close(self) -> None:
        """Close the connections."""
        await super().close()
        if self._state is not None:
            await self._state.close()

    async def family(self, wanted: str) -> str:
        """The wanted family, "" = the first that this system was started for."""
        return wanted or self.launch.family

    async def nodes(self) -> list[NodeStatus]:
        """Statuses that the power agents publish, by node name, whether or not a controller answers."""
        found = await self.state.scan(self.state.keys.node_prefix(), NodeStatus)
        return [found[key] for key in sorted(found)]

    async def carbon(self) -> list[CarbonReading]:
        """Last carbon reading of each zone, whether or not a controller answers."""
        found = await self.state.scan(self.state.keys.carbon_now_prefix(), CarbonReading)
        return [found[key] for key in sorted(found)]


async def is_serving(address: str) -> bool:
    """Whether the gRPC health service of an admin port says SERVING."""
    async with direct.channel(address) as channel:
        try:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest(), timeout=HEALTH_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def connect_system(state_dir: Path) -> AsyncIterator[SystemClient]:
    """Connect to the system that runs in a state directory.

    Raises:
        NotFound: none runs there.
    """
    paths, began_s = StatePaths(state_dir.resolve()), WallClock().now_s()
    async with SystemClient(paths.running()) as client:
        try:
            yield client
        except Unavailable as error:
            raise paths.with_first_errors(error, began_s) from error


@asynccontextmanager
async def connect(where: SystemAddress) -> AsyncIterator[ControllerClient]:
    """Connect to a system, here or elsewhere.

    Raises:
        NotFound: none runs in the state directory.
        SettingError: an address is none; a token or certificate cannot be used.
    """
    if not where.controller:
        async with connect_system(Path(where.state_dir)) as local:
            yield local
        return
    addresses = where.controller.split(",")
    try:
        for address in addresses:
            rpc.split_address(address)
    except SettingError as error:
        remedy = "write host:port, or several with commas between"
        raise SettingError("not host:port", field="--controller", value=where.controller, remedy=remedy) from error
    async with ControllerClient({address: channel_to(address, where) for address in addresses}) as client:
        yield client


def channel_to(address: str, where: SystemAddress) -> grpc.aio.Channel:
    """Channel to a service of a system elsewhere, by the options that name it; raises as `make_channel`."""
    rpc.split_address(address)
    own = read_secret_file(where.token_file, "--token-file", OVERLAP) if where.token_file else None
    tls = command_tls(where.tls_ca, where.tls_certificate, where.tls_key)
    if own is None and tls is None and (token := token_at(address, Path(where.state_dir))):
        return make_channel(address, token=token)
    return open_channel(address, tls, own)


def call_system(where: SystemAddress, work: Callable[[ControllerClient], Awaitable[T]]) -> T:
    """Run a coroutine with a client of a system; raises what `connect` does."""

    async def connected() -> T:
        async with connect(where) as client:
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
    return read_secret_file(Path(path), TOKEN_FILE_VARIABLE, OVERLAP)


def launch_token(launch: Launch) -> str | None:
    """Token of the services of a running system.

    Raises:
        SettingError: this user may not read it.
    """
    return read_secret_file(Path(launch.token_file), "token_file", OVERLAP) if launch.token_file else None


def page_link(launch: Launch) -> str:
    """Link to the live page of a running system, with its token; "" where it has none."""
    if not launch.page:
        return ""
    token = read_secret_file(StatePaths(Path(launch.state_dir)).read_token, "read_token", OVERLAP)
    return f"http://{launch.page}/?token={token}"


def token_at(address: str, state_dir: Path) -> str | None:
    """Token of the system that runs in a state directory, if one of its services listens at this address; else None."""
    try:
        launch = StatePaths(state_dir.resolve()).running()
    except (NotFound, StartError):  # who names an address needs none
        return None
    return launch_token(launch) if address in launch.addresses.values() else None


def make_channel(address: str, ca: Path | None = None, token: str | None = None) -> grpc.aio.Channel:
    """Channel of this command to a service, over TLS where an authority is named. `token`: of a system of `trefoil up`,
    whose services have no TLS; None: this command's token is sent.

    Raises:
        SettingError: a certificate cannot be used, see `control_token`, or the token would leave in clear text.
    """
    if token is not None and ca is None:
        return rpc.channel(address, token=token)
    return open_channel(address, command_tls(ca), token)


def open_channel(address: str, tls: Tls | None, token: str | None) -> grpc.aio.Channel:
    """Channel over this TLS, with this token or with this command's; raises as `make_channel`."""
    insecure = os.environ.get(INSECURE_VARIABLE) == "1"
    name = os.environ.get(TLS_NAME_VARIABLE, "")
    return rpc.channel(address, tls=tls, name=name, token=token or control_token(), insecure=insecure)


def command_tls(ca: Path | None = None, certificate: Path | None = None, key: Path | None = None) -> Tls | None:
    """TLS of this command by its options, else by its environment; None: it speaks clear text.

    Raises:
        SettingError: no authority is named for a certificate, or a file cannot be used.
    """
    given = {"--tls-certificate": certificate, "--tls-key": key, "--tls-ca": ca}
    fields, paths = [], []
    for (option, path), variable in zip(given.items(), TLS_VARIABLES, strict=True):
        fields.append(variable if path is None else option)
        paths.append(path or (Path(value) if (value := os.environ.get(variable)) else None))
    if paths[2] is None and (paths[0] is not None or paths[1] is not None):
        remedy = f"set {TLS_VARIABLES[2]}, or give --tls-ca"
        raise SettingError("no authority is named", field=f"{fields[0]}, {fields[1]}", remedy=remedy)
    named = (fields[0], fields[1], fields[2])
    return Tls(*paths, fields=named, serves=False) if paths[2] is not None else None


@asynccontextmanager
async def open_service(service: str, target: str, ca: Path | None, state_dir: str) -> AsyncIterator[tuple[str, Any]]:
    """Address of a service, and a gRPC channel to it for the length of one command: at the given host:port, else in the
    system that runs in the state directory, whose own token is sent.

    Raises:
        SettingError: not host:port, or as `make_channel`.
        NotFound: no target was given and nothing runs there.
    """
    paths, began_s = StatePaths(Path(state_dir).resolve()), WallClock().now_s()
    if local := not target:
        target = paths.running().addresses[service]
    elif not target.startswith("unix:"):
        rpc.split_address(target)
    channel = make_channel(target, ca, token_at(target, Path(state_dir)))
    try:
        yield target, channel
    except Unavailable as error:
        if not local:
            raise
        raise paths.with_first_errors(error, began_s) from error
    finally:
        await channel.close()

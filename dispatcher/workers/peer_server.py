"""The other end of the links: answers for other workers, and tells them what this one knows.

It is a Unix socket in the state directory that only this user may open. Where replicas on other hosts shall reach it,
it is a port with the cluster's TLS and token. Raw bytes, as on the inference port.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

import grpc

from dispatcher.request import peer_links
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.decoupled import answer_stream
from dispatcher.request.inference import Inference
from dispatcher.routing.core import membership
from dispatcher.routing.core.membership import WorkerId
from dispatcher.service.local_worker import LocalWorker
from dispatcher.service.state_sync import StateSync
from dispatcher.transport.accepting import listen
from dispatcher.transport.core.grpc_framing import JOIN
from dispatcher.transport.h2 import ConnectionLimits, Held
from dispatcher.transport.h2_call import ServerBounds
from dispatcher.transport.h2_server import H2Server, Routes
from trefoil.core.errors import SettingError, StartError, system_error
from trefoil.runtime import codec, rpc
from trefoil.runtime.security.scopes import Tokens
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.socket_paths import socket_folder

GRACE_S: Final = 1.0

Answer = Callable[[bytes], Awaitable[bytes]]


class PeerServer:
    """Server for other workers, a part of the service. It listens before the first acknowledgement says where."""

    def __init__(self, local: LocalWorker, inference: Inference, asked: dict[str, Answer], sync: StateSync) -> None:
        self._local = local
        self._inference = inference
        self._methods = asked
        self._sync = sync
        self._server: H2Server | None = None
        self._socket: Path | None = None
        self._tokens = Tokens.from_settings(local.settings)
        self._own_trailer = ((peer_links.ANSWERED_BY, membership.worker_name(local.id)),)

    async def init(self) -> None:
        """Listen on the peer address or the worker's own socket.

        Raises:
            StartError, SettingError: it cannot.
        """
        address = self._local.settings.peer_address
        handlers = {
            "Infer": grpc.unary_unary_rpc_method_handler(self._infer, response_serializer=JOIN),
            "Flow": grpc.unary_stream_rpc_method_handler(self._flow),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch),
        }
        handlers |= {n: grpc.unary_unary_rpc_method_handler(self._bytes_handler(a)) for n, a in self._methods.items()}
        if address:
            self._server = self._listen_to_all(handlers, address)
        else:
            self._socket = socket_of(self._local.settings.state_dir, self._local.id)
            self._local.peer_target = f"unix:{self._socket}"
            self._server = make_server(handlers, self._local.peer_target)
            self._socket.chmod(0o600)
        await self._server.start()

    async def run(self) -> None:
        """Serve until cancelled."""
        await asyncio.Event().wait()

    async def shutdown(self) -> None:
        """Stop listening: the other workers know that we left."""
        if self._server is not None:
            await self._server.stop(GRACE_S)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)

    def _listen_to_all(self, handlers: dict[str, Any], address: str) -> H2Server:
        settings = self._local.settings
        host, port = rpc.split_address(address)
        own = f"{host}:{port + self._local.id[1] % membership.RESTART_STEP if port else 0}"
        rpc.check_listener(settings, own)
        if settings.tls_certificate is not None and settings.tls_ca is None:
            remedy = "set it to the authority that signed the certificates of all dispatchers"
            raise SettingError("missing: dispatchers could not tell each other", field="tls_ca", remedy=remedy)
        server = make_server(handlers, own, self._local.tls)
        self._local.peer_target = f"{host}:{server.port}"
        return server

    async def _infer(self, data: bytes, context: Any) -> tuple[bytes, ...]:
        await self._check(context)
        try:
            answer = await self._inference.answer(data, self._caller(context))
        except StatusError as refused:
            raise self._own(refused) from refused
        named = ((peer_links.VARIANT, answer.variant.encode()), (peer_links.SLICE, codec.encode(answer.slice)))
        context.set_trailing_metadata((*(answer.trailers or ()), *self._own_trailer, *named))
        return answer.parts

    async def _flow(self, data: bytes, context: Any) -> None:
        """One request of a decoupled family; its answers are those of a client's stream."""
        await self._check(context)
        told = dict(context.invocation_metadata() or ())
        asked = {"wants_final": "trefoil-final" in told, "grpc_error": "trefoil-grpc-error" in told}
        caller = self._caller(context)
        try:
            await answer_stream(self._local, self._inference, data, caller, context.write, **asked)
        except StatusError as refused:
            raise self._own(refused) from refused

    def _own(self, refused: StatusError) -> StatusError:
        """A status with the mark that it came from this worker."""
        return StatusError(refused.code, refused.details, (*(refused.trailers or ()), *self._own_trailer))

    async def _watch(self, _: bytes, context: Any) -> AsyncIterator[bytes]:
        """Each load window of this worker as it is flushed."""
        await self._check(context)
        windows = self._sync.subscribe()
        try:
            while True:
                yield codec.encode(await windows.get())
        finally:
            self._sync.unsubscribe(windows)

    def _caller(self, context: Any) -> Caller:
        remaining_s = context.time_remaining()
        deadline_s = None if remaining_s is None else self._local.clock.monotonic_s() + remaining_s
        return peer_links.caller_of(dict(context.invocation_metadata() or ())[peer_links.CALLER], deadline_s)

    def _bytes_handler(self, answer: Answer) -> Any:
        async def handle(request: bytes, context: Any) -> bytes:
            await self._check(context)
            return await answer(request)

        return handle

    async def _check(self, context: Any) -> None:
        if self._socket is None and self._tokens.scope(context.invocation_metadata()) not in ("control", "open"):
            raise self._own(StatusError(grpc.StatusCode.UNAUTHENTICATED, "no valid token"))


def make_server(handlers: Mapping[str, Any], address: str, tls: Tls | None = None) -> H2Server:
    """Server for other workers at host:port or unix:path, bound.

    Raises:
        StartError, PortInUse: it cannot listen there.
    """
    routes = Routes()
    routes.add_registered_method_handlers(peer_links.SERVICE, handlers)
    return H2Server(
        routes.handlers,
        ServerBounds(),
        ConnectionLimits(stream_window_bytes=1 << 24, connection_window_bytes=1 << 26),
        Held(),
        listen(address, "peer_address"),
        tls.server_context if tls is not None else None,
    )


def socket_of(state_dir: Path, me: WorkerId) -> Path:
    """Path of a worker's own socket: under the state directory where it is short enough, else under the temporary one.

    Raises:
        StartError: another process owns the folder, or it cannot be made.
    """
    inside = (state_dir / "peers").resolve()
    name = f"{me[0].removeprefix('dispatcher-')}-{me[1]}.sock"
    inside = socket_folder(inside, name, of=inside)
    try:
        inside.mkdir(parents=True, exist_ok=True, mode=0o700)
        inside.chmod(0o700)
    except OSError as error:
        remedy = "give a state_dir that this user owns"
        raise system_error(StartError, error, "be used", inside, field="state_dir", remedy=remedy) from error
    for other in inside.glob("*.sock"):
        _remove_dead_socket(other)
    return inside / name


def _remove_dead_socket(path: Path) -> None:
    """Remove a socket that a killed worker has left: no process accepts connections there any more."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:  # gone meanwhile, or too busy to answer at once: a process is there
            pass

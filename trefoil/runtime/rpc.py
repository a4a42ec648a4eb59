"""gRPC servers and channels: one set of options, one error table, health and reflection, one rule about listening.

A `TrefoilError` in a handler becomes a status plus the trailer `trefoil-error: <class>`; `call` turns it back.
"""

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import SecretStr

from trefoil import direct
from trefoil.core import errors
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.connections import CallsUnderWay, connections_max, guard_connections
from trefoil.runtime.security.audit import AuditLog
from trefoil.runtime.security.scopes import (
    Scopes,
    StreamToken,
    Tokens,
    UnaryToken,
    UploadToken,
    asks_only,
    check_request,
)
from trefoil.runtime.security.tls import Tls, explain

if TYPE_CHECKING:
    from trefoil.runtime.telemetry import Metrics

MESSAGE_BYTES_MAX: Final = 64 * 2**20
CONNECTION_CALLS_MAX: Final = 4096
"""Calls under way on one connection; a client's further ones wait in the client."""
STREAMS_MAX: Final = 100
"""Streams of answers that one server has open at once: each gets every change, whether its client reads or not."""
ERROR_TRAILER: Final = "trefoil-error"
PORT: Final = re.compile("[0-9]{1,5}")
NEVER_S: Final = 86_400.0  # a grace of gRPC's own, which RpcServer.stop ends long before
HEALTH_SERVICE: Final = "grpc.health.v1.Health"

# The first class that matches wins, so subclasses stand before their bases.
STATUS: Final[tuple[tuple[type[errors.TrefoilError], grpc.StatusCode], ...]] = (
    (errors.InvalidInput, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Infeasible, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Fenced, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.StartError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.TrefoilError, grpc.StatusCode.INTERNAL),
)

ServiceEntry = tuple[Callable[[Any, Any], None], Any, str]
"""(add_<X>Servicer_to_server, the servicer, "trefoil.<x>.v1.<X>")"""


@dataclass(slots=True)
class RpcServer:
    """Server, bound. `port` is the real one when the address asked for port 0. `health`: by service. `calls`: what is
    under way; connections without any may be closed (`connections.py`)."""

    server: grpc.aio.Server
    health: health.aio.HealthServicer
    port: int
    names: Sequence[str]
    calls: CallsUnderWay
    tls: Tls | None = None
    _guarding: asyncio.Task[None] | None = field(default=None, init=False)
    _ending: asyncio.Future[None] | None = field(default=None, init=False)
    _cutting: asyncio.Future[None] | None = field(default=None, init=False)

    async def start(self) -> None:
        """Serve, and report healthy: the process ("") and each of its services."""
        for name in ["", *self.names]:
            await self.serving(name, True)
        await self.server.start()
        if self.port:
            self._guarding = asyncio.create_task(guard_connections(self.port, self.calls.ports))

    async def stop(self, grace_s: float = 1.0) -> None:
        """Turn unhealthy, let calls in flight finish within the grace, cancel the rest. Called again, before it has
        ended: the shorter grace counts.

        grpc.aio's own `stop` promises this too. But a caller that comes to cancel the calls when another has just
        destroyed the server ends the process with signal 11 (grpcio 1.85, AioServer.shutdown). Hence one grace that
        never ends and, once, none at all: these two calls cannot collide.
        """
        if self._guarding is not None:
            self._guarding.cancel()
        await self.health.enter_graceful_shutdown()
        if self._ending is None:
            self._ending = asyncio.ensure_future(self.server.stop(NEVER_S))
        await asyncio.wait((self._ending,), timeout=grace_s)
        if not self._ending.done() and self._cutting is None:
            self._cutting = asyncio.ensure_future(self.server.stop(None))
        both = [one for one in (self._ending, self._cutting) if one is not None]
        await asyncio.wait(both)  # which cancels neither, if this call is cancelled
        for one in both:
            one.result()

    async def wait_for_termination(self) -> None:
        # Shielded: a cancelled waiter would cancel the future inside grpc.aio that stop() waits for.
        """Wait until the server has stopped."""
        await asyncio.shield(asyncio.ensure_future(self.server.wait_for_termination()))

    async def serving(self, full_name: str, yes: bool) -> None:
        """Set the health of one service; "" is the process as a whole."""
        states = health_pb2.HealthCheckResponse
        await self.health.set(full_name, states.SERVING if yes else states.NOT_SERVING)


def make_server(
    settings: ServiceSettings,
    services: Sequence[ServiceEntry],
    *,
    address: str | None = None,
    read_only: bool = False,
    metrics: "Metrics | None" = None,
    audit: AuditLog | None = None,
    reuse_port: bool = False,
    tls: Tls | None = None,
    tokens: Scopes | None = None,
    streams_max: int = STREAMS_MAX,
) -> RpcServer:
    """Bind a server (not started) at `address`, default `settings.admin_address`.

    With `audit`, each call that is not a plain question is noted before and after it. `tls`: instead of what the
    settings name. `tokens`: who may what, instead of the settings' two tokens. `streams_max`: streams of answers that
    may be open at once.

    Raises:
        errors.SettingError: a non-loopback listener without TLS and token, or certificates that cannot be used.
        errors.PortInUse: another process listens there.
    """
    listen = address or settings.admin_address
    check_listener(settings, listen, read_only=read_only)
    tls = tls or Tls.of(settings)
    if not reuse_port:
        check_port(listen)
    tokens = tokens or (Tokens() if read_only else Tokens.from_settings(settings))
    calls = CallsUnderWay()
    server = grpc.aio.server(
        interceptors=[_Interceptor(metrics, tokens, audit, calls, streams_max, settings.tls_clients)],
        options=[
            ("grpc.so_reuseport", int(reuse_port)),
            ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", connections_max()),
            ("grpc.max_concurrent_streams", CONNECTION_CALLS_MAX),
        ],
    )
    by_name = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(by_name, server)
    for add, implementation, _ in services:
        add(implementation, server)
    names = [name for _, _, name in services]
    reflection.enable_server_reflection([*names, HEALTH_SERVICE, reflection.SERVICE_NAME], server)
    return RpcServer(server, by_name, _bind(server, listen, tls), names, calls, tls)


def _bind(server: grpc.aio.Server, address: str, tls: Tls | None) -> int:
    try:
        if tls is not None:
            return int(server.add_secure_port(address, tls.server_credentials()))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise errors.StartError(f"cannot listen ({error})", field="address", value=address, remedy=_FREE) from error


_FREE: Final = "stop what listens there, or set another address"


def check_listener(
    settings: ServiceSettings, address: str, *, read_only: bool = False, authenticated: bool = False
) -> None:
    """House rule: loopback, or TLS and token (or callers `authenticated` otherwise), or `insecure` (which is warned
    about); read-only listeners are exempt.

    Raises:
        errors.SettingError: none of these.
    """
    if read_only or is_loopback(address) or (settings.tls_certificate and (settings.token or authenticated)):
        return
    if not settings.insecure:
        raise errors.SettingError(
            "a listener that other machines reach needs TLS and a token",
            field="address",
            value=address,
            remedy="listen on 127.0.0.1, or set tls_certificate, tls_key and token, or give --insecure",
        )
    import structlog

    structlog.get_logger().warning("insecure listener: anyone who reaches it can command it", address=address)


def check_port(address: str) -> None:
    """Check that no process listens at host:port (errors.PortInUse); port 0 and Unix sockets always pass."""
    if address.startswith("unix:"):
        return
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            raise errors.listen_error(error, address) from error


def split_address(address: str) -> tuple[str, int]:
    """Split an address: ("127.0.0.1", 8001) of "127.0.0.1:8001"; IPv6 hosts stand in brackets."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not PORT.fullmatch(port) or int(port) > 65535:
        raise errors.SettingError("not host:port", field="address", value=address, remedy="write e.g. 127.0.0.1:8101")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """True if only this machine reaches the address. An unknown host name counts as reachable."""
    if address.startswith("unix:"):
        return True
    host, _ = split_address(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_clear_text(target: str, token: SecretStr | str | None, tls: Tls | None, *, insecure: bool = False) -> None:
    """Check that a token does not leave this machine in clear text; errors.SettingError where it would."""
    if token and tls is None and not insecure and not is_loopback(target):
        raise errors.SettingError(
            "a token would leave this machine in clear text",
            field="target",
            value=target,
            remedy="set up TLS on both sides (tls_ca), or give --insecure (a command: TREFOIL_INSECURE=1)",
        )


def channel(
    target: str, *, tls: Tls | None = None, name: str = "", token: SecretStr | str | None = None, insecure: bool = False
) -> grpc.aio.Channel:
    """Channel without retries, message limits or proxies, that reconnects quickly. `name`: whom the server's
    certificate must name, instead of the target's host. `insecure`: the token may leave this machine in clear text.

    Raises:
        errors.SettingError: the token would leave this machine in clear text.
    """
    check_clear_text(target, token, tls, insecure=insecure)
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 2000),  # the patience of one attempt; the pause between two is the other two
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    secret = SecretStr(token) if isinstance(token, str) else token
    interceptors: list[grpc.aio.ClientInterceptor] = []
    if secret:
        interceptors = [UnaryToken(secret), StreamToken(secret), UploadToken(secret)]
    if tls is not None and name:
        options.append(("grpc.ssl_target_name_override", name))
    return direct.channel(target, None if tls is None else tls.channel_credentials(), options, interceptors)


async def call(method: Any, request: Any, timeout_s: float) -> Any:
    """Call a unary method with a deadline; statuses come back as the `TrefoilError` they were.

    Raises:
        errors.TrefoilError: of the class that the server raised, `Unavailable` when it did not answer, or `Untrusted`.
    """
    try:
        return await method(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error


_BY_NAME: Final[Mapping[str, type[errors.TrefoilError]]] = {
    cls.__name__: cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.TrefoilError)
}


_SYSTEM_WORDS: Final = re.compile(r"(?:Failed to connect to remote host|address lookup failed for [^ ]+): ([^:\]]+)")
"""What gRPC quotes of the system when no connection comes up; it lists all that it tried around it."""


def error_of(error: grpc.aio.AioRpcError) -> errors.TrefoilError:
    """Operating error behind a failed call."""
    name = str(dict(error.trailing_metadata() or ()).get(ERROR_TRAILER, ""))
    cls = _BY_NAME.get(name)
    if cls is None:
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAVAILABLE and (found := explain(details)) is not None:
            return errors.Untrusted(f"no connection: {found[0]} ({details})", remedy=found[1])
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return errors.UnknownCall(
                f"unknown to this service ({details})", remedy="upgrade it: it is older than this"
            )
        gone = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
        cls = errors.Unavailable if error.code() in gone else errors.TrefoilError
        system = _SYSTEM_WORDS.search(details)
        return cls(f"{error.code().name}: {system[1] if system else details}")
    return cls(error.details() or name)


def status_of(error: errors.TrefoilError) -> grpc.StatusCode:
    """Status code of an operating error."""
    return next(code for cls, code in STATUS if isinstance(error, cls))


class _Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Checks the token's scope, keeps the audit log, counts and times calls, maps errors to statuses."""

    def __init__(
        self,
        metrics: "Metrics | None",
        tokens: Scopes,
        audit: AuditLog | None,
        calls: CallsUnderWay,
        streams_max: int = STREAMS_MAX,
        names: Collection[str] = (),
    ) -> None:
        """`names`: of which a caller's certificate must have one; empty: any name."""
        self._metrics, self._names = metrics, frozenset(names)
        self._streams = 0
        self._streams_max = streams_max
        self._calls = calls
        self._tokens = tokens
        self._audit = audit

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or method.startswith("/grpc."):  # health and reflection stay open
            return handler
        scope = self._tokens.scope(handler_call_details.invocation_metadata)
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        sides = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if streaming else "unary" for streaming in sides)
        wrap = self._streaming if handler.response_streaming else self._unary
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        return make(wrap(getattr(handler, kind), method, scope), **coders)

    def _unary(self, behaviour: Any, method: str, scope: str) -> Any:
        async def handle(request: Any, context: Any) -> Any:
            async with self._observed(context, method, scope, request):
                return await behaviour(request, context)

        return handle

    def _streaming(self, behaviour: Any, method: str, scope: str) -> Any:
        async def handle(request: Any, context: Any) -> None:
            async with self._observed(context, method, scope, request), self._one_more_stream():
                responses = behaviour(request, context)
                if not hasattr(responses, "__aiter__"):
                    await responses
                    return
                async with contextlib.aclosing(responses):
                    async for response in responses:
                        await context.write(response)

        return handle

    @contextlib.asynccontextmanager
    async def _one_more_stream(self) -> AsyncIterator[None]:
        if self._streams >= self._streams_max:
            raise errors.Unavailable(f"{self._streams} streams are open here", remedy="close some, or ask instead")
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @contextlib.asynccontextmanager
    async def _observed(self, context: Any, method: str, scope: str, request: Any) -> AsyncIterator[None]:
        started_s = asyncio.get_running_loop().time()
        wrong, peer = _wrong(request), context.peer()
        call = ""
        noted = False
        self._calls.begin(peer)

        def note(code: grpc.StatusCode, why: str = "") -> None:
            nonlocal noted
            if noted:
                return
            noted = True
            took_s = asyncio.get_running_loop().time() - started_s
            if self._audit is not None and call:
                self._audit.record_outcome(call, code.name, why, took_s * 1e3)
            if self._metrics is not None:
                self._metrics.inc("trefoil_rpc_requests_total", method=method, code=code.name)
                self._metrics.observe("trefoil_rpc_duration_seconds", took_s, method=method)

        async def refuse(code: grpc.StatusCode, why: str, *trailers: tuple[str, str]) -> None:
            why = errors.brief(why)
            note(code, why)  # first, as an answer is: its reader finds it noted
            await context.abort(code, why, trailers)

        try:
            if self._audit is not None and not asks_only(method):
                noted_request = request if wrong is None else None  # its size and content are unchecked
                call = self._audit.record_request(method, peer, scope, noted_request)
            if self._names and self._names.isdisjoint(shown := _shown_names(context)):
                await refuse(grpc.StatusCode.PERMISSION_DENIED, _NO_NAME.format(shown))
            if not scope:
                await refuse(grpc.StatusCode.UNAUTHENTICATED, _NO_TOKEN)
            if scope == "denied" or (scope.startswith("/") and not method.startswith(scope)):
                await refuse(grpc.StatusCode.PERMISSION_DENIED, _NO_ROLE)
            if scope == "read" and not asks_only(method):
                await refuse(grpc.StatusCode.PERMISSION_DENIED, _READ_TOKEN)
            if wrong is not None:
                raise wrong
            yield
        except errors.TrefoilError as error:
            await refuse(status_of(error), str(error), (ERROR_TRAILER, type(error).__name__))
        except (grpc.aio.AbortError, grpc.aio.UsageError):
            note(_context_code(context))
            raise
        except asyncio.CancelledError:
            note(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:
            import structlog

            structlog.get_logger().exception("bug in an rpc handler", method=method)
            await refuse(grpc.StatusCode.INTERNAL, f"bug in {method}: {error!r}")
            raise
        finally:
            self._calls.end(peer)
            note(grpc.StatusCode.OK)


def _wrong(request: Any) -> errors.InvalidInput | None:
    """What is wrong with a request, whatever method it is for."""
    try:
        if isinstance(request, Message):
            check_request(request)
    except errors.InvalidInput as error:
        return error
    return None


def _shown_names(context: Any) -> list[str]:
    """Names in the caller's certificate."""
    return [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]


_NO_NAME: Final = "the caller's certificate names {}, none of tls_clients. Remedy: add the name, or use another pair"
_NO_TOKEN: Final = "no valid token. Remedy: send 'authorization: Bearer <token>'"
_NO_ROLE: Final = "this token's tenant has no role 'admin'. Remedy: use a token of a tenant that has it"
_READ_TOKEN: Final = "this token may only read. Remedy: send the control token"


def _context_code(context: Any) -> grpc.StatusCode:
    code = context.code()
    return next(
        (known for known in grpc.StatusCode if known is code or known.value[0] == code), grpc.StatusCode.UNKNOWN
    )

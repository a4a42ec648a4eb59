"""The `grpc` transport: grpc.aio behind the seam.

A status of grpc.aio does not say whether the server sent it. A call that ends UNAVAILABLE while the channel is
connected was answered; otherwise the connection died, or, where there was none since the call began, nothing was sent.

Traps that this file knows (measured): the default receive limit of 4 MB; one retry loop only, ours; channels to the
same address share a connection unless told otherwise; the default reconnect backoff grows to two minutes.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final

import grpc

from dispatcher.transport.core.grpc_framing import JOIN
from dispatcher.transport.seam import ConnectionDied, Keepalive, Leaving, Metadata, NotTaken, Parts, Trailers
from trefoil import direct
from trefoil.core.errors import StartError
from trefoil.runtime.security.tls import Tls

OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 * 1024),  # a slice's error says names and ids again: ours to shorten
    ("grpc.absolute_max_metadata_size", 128 * 1024),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),  # the patience of one attempt; the pause between two is the other two
    ("grpc.max_reconnect_backoff_ms", 500),
)
SERVER_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.http2.max_ping_strikes", 0),
)


class GrpcChannel:
    """Channel of grpc.aio."""

    def __init__(
        self, target: str, *, tls: Tls | None = None, name: str = "", keepalive: Keepalive | None = None
    ) -> None:
        options: list[tuple[str, Any]] = [*OPTIONS]
        if keepalive is not None:
            options += [
                ("grpc.keepalive_time_ms", int(keepalive.every_s * 1e3)),
                ("grpc.keepalive_timeout_ms", int(keepalive.timeout_s * 1e3)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        if name:
            options.append(("grpc.ssl_target_name_override", name))
        self._channel = direct.channel(target, None if tls is None else tls.channel_credentials(), options)
        self._channel.get_state(try_to_connect=True)  # not at the first request
        self._methods: dict[tuple[str, str], Any] = {}
        self._ending: set[asyncio.Future[None]] = set()  # streams whose caller has left

    def get_state(self, try_to_connect: bool = False) -> Any:
        """State of the connection."""
        return self._channel.get_state(try_to_connect=try_to_connect)

    async def wait_for_state_change(self, last: Any) -> None:
        """Wait until the state is not this one."""
        await self._channel.wait_for_state_change(last)

    async def unary(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> tuple[bytes, Trailers]:  # fmt: skip
        """Answer and trailing metadata."""
        connected = self._connected()
        call = self._method("unary_unary", path)(parts, timeout=timeout_s, metadata=tuple(metadata))
        try:
            if leaving is not None:
                await _done(call, leaving)
            data = await call
        except grpc.aio.AioRpcError as error:
            raise self._judged(error, connected) from error
        return bytes(data), tuple(await call.trailing_metadata() or ())

    async def stream(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = (),
        leaving: Leaving | None = None,
    ) -> AsyncGenerator[bytes, None]:  # fmt: skip
        """Answers to one message. Closing it does as cancelling it."""
        connected = self._connected()
        call = self._method("unary_stream", path)(parts, timeout=timeout_s, metadata=tuple(metadata))
        left = leaving
        try:
            while True:
                reading = asyncio.ensure_future(call.read())  # a cancelled `read` would cancel the call
                try:
                    data = await asyncio.shield(reading)
                except asyncio.CancelledError:
                    task = asyncio.current_task()
                    if task is None or not task.cancelling():  # this end closed the channel
                        left = None
                    raise
                if data is grpc.aio.EOF:
                    left = None  # it was read to its end
                    return
                yield data
        except grpc.aio.AioRpcError as error:
            left = None
            raise self._judged(error, connected) from error
        finally:
            if left is None or call.done():
                call.cancel()  # does nothing after its end
                if left is not None:
                    left.ended(not call.cancelled())
            else:
                self._ending.add(ending := asyncio.ensure_future(_drain(call, reading, left)))
                ending.add_done_callback(self._ending.discard)

    async def close(self, grace_s: float | None = None) -> None:
        """Take no more calls."""
        await self._channel.close(grace_s)

    def _connected(self) -> bool:
        return self._channel.get_state() is grpc.ChannelConnectivity.READY

    def _judged(self, error: grpc.aio.AioRpcError, connected: bool) -> grpc.aio.AioRpcError:
        """The error as what the channel knows of it. `connected`: whether it was when the call began."""
        if error.code() is not grpc.StatusCode.UNAVAILABLE or self._connected():
            return error
        refused = not connected and (error.details() or "").startswith("failed to connect")
        kind = NotTaken if refused else ConnectionDied
        return kind(error.code(), error.initial_metadata(), error.trailing_metadata(), error.details())

    def _method(self, kind: str, path: str) -> Any:
        made = self._methods.get((kind, path))
        if made is None:
            made = self._methods[kind, path] = getattr(self._channel, kind)(path, request_serializer=JOIN)
        return made


async def _done(call: Any, leaving: Leaving) -> None:
    """Wait until a call has ended. Where the caller is cancelled it goes on, as `leaving` says."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    call.add_done_callback(lambda _: None if done.done() else done.set_result(None))
    try:
        await done
    except asyncio.CancelledError:
        given_up = loop.call_later(leaving.grace_s, call.cancel)

        def ended(_: Any) -> None:
            given_up.cancel()
            leaving.ended(not call.cancelled())

        call.add_done_callback(ended)
        raise


async def _drain(call: Any, reading: Any, leaving: Leaving) -> None:
    """Read a stream to its end, for the grace at most; then it is cancelled."""
    try:
        async with asyncio.timeout(leaving.grace_s):
            while await reading is not grpc.aio.EOF:
                reading = call.read()
    except (TimeoutError, asyncio.CancelledError, grpc.aio.AioRpcError):
        call.cancel()  # does nothing after its end
    leaving.ended(not call.cancelled())


class GrpcServer:
    """Server of grpc.aio for other workers: handlers of one service, without health or reflection."""

    def __init__(self, service: str, handlers: Mapping[str, Any], address: str, tls: Tls | None) -> None:
        """`address` is host:port or unix:path.

        Raises:
            StartError: it cannot listen there.
        """
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        try:
            if tls is not None:
                self.port = int(self._server.add_secure_port(address, tls.server_credentials()))
            else:
                self.port = int(self._server.add_insecure_port(address))
        except RuntimeError as error:
            remedy = "set another peer_address, or a state_dir with room for a socket"
            raise StartError(f"cannot listen ({error})", field="peer_address", value=address, remedy=remedy) from error

    async def start(self) -> None:
        """Serve."""
        await self._server.start()

    async def stop(self, grace_s: float) -> None:
        """Stop."""
        await self._server.stop(grace_s)

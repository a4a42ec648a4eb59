"""Client of grpc.aio with the calls of the dispatcher's own channel: the peer of its server in tests."""

from collections.abc import AsyncGenerator
from typing import Any, Final

from dispatcher.transport.calls import Metadata, Parts
from trefoil import direct
from trefoil.runtime.security.tls import Tls

OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
)


class AioChannel:
    """Channel of grpc.aio to one server."""

    def __init__(self, target: str, *, tls: Tls | None = None, name: str = "") -> None:
        named = [("grpc.ssl_target_name_override", name)] if name else []
        credentials = None if tls is None else tls.channel_credentials()
        self._channel = direct.channel(target, credentials, [*OPTIONS, *named])

    async def unary(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> tuple[bytes, tuple[Any, ...]]:
        """Answer and trailing metadata."""
        call = self._channel.unary_unary(path)(b"".join(parts), timeout=timeout_s, metadata=tuple(metadata))
        return await call, tuple(await call.trailing_metadata() or ())

    async def stream(
        self, path: str, parts: Parts, timeout_s: float | None = None, metadata: Metadata = ()
    ) -> AsyncGenerator[bytes, None]:
        """Answers to one message; closing it cancels the call."""
        call = self._channel.unary_stream(path)(b"".join(parts), timeout=timeout_s, metadata=tuple(metadata))
        try:
            async for answer in call:
                yield answer
        finally:
            call.cancel()

    async def close(self) -> None:
        """Cancel what is under way."""
        await self._channel.close()

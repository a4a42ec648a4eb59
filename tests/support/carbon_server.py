"""A local HTTP server that answers as providers do: documented bodies verbatim, and each way they fail."""

import asyncio
import json
import ssl
from dataclasses import dataclass, field
from urllib.parse import parse_qs, urlsplit


@dataclass(frozen=True)
class Reply:
    """One answer. `cut` = close the connection after that many bytes; `hang` = never answer."""

    body: bytes | str | dict | list = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    hang: bool = False
    cut: int | None = None

    def bytes(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


@dataclass(frozen=True)
class Asked:
    """One request as it arrived."""

    path: str
    params: dict[str, str]
    headers: dict[str, str]


class CarbonServer:
    """Replies by path prefix, the last one forever; what has no reply is a 404."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self._replies: dict[str, list[Reply]] = {}
        self._server: asyncio.Server | None = None
        self._stopped = asyncio.Event()
        self.url = ""

    def reply(self, prefix: str, *replies: Reply) -> None:
        self._replies[prefix] = list(replies)

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        self._stopped.set()
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (head := await reader.readuntil(b"\r\n\r\n")) and await self._answer(head.decode(), writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _answer(self, head: str, writer: asyncio.StreamWriter) -> bool:
        first, *rest = head.strip().split("\r\n")
        method, target, _ = first.split(" ")
        assert method == "GET", "providers only read"
        url = urlsplit(target)
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in rest)}
        params = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.asked.append(Asked(url.path, params, headers))
        reply = self._next(url.path)
        if reply.hang:
            await self._stopped.wait()
            return False
        body = reply.bytes()
        lines = {"content-type": "application/json", "content-length": str(len(body)), **reply.headers}
        text = f"HTTP/1.1 {reply.status} x\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()) + "\r\n"
        whole = text.encode() + body
        writer.write(whole if reply.cut is None else whole[: reply.cut])
        await writer.drain()
        return reply.cut is None

    def _next(self, path: str) -> Reply:
        found = [prefix for prefix in self._replies if path.startswith(prefix)]
        if not found:
            return Reply({"message": "not found"}, 404)
        replies = self._replies[max(found, key=len)]
        return replies.pop(0) if len(replies) > 1 else replies[0]

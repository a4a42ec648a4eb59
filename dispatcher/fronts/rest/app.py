"""The ASGI application: Triton's URLs, methods, statuses and errors.

Health stays open without a token, for load balancers. Everything else asks access control first.
"""

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts import kserve
from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.rest import codec, compression, json_text
from dispatcher.fronts.rest.codec_process import CodecProcess
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.core.tenants import ADMIN, Tenant
from dispatcher.transport.accepting import peer_of
from dispatcher.transport.core.trace_context import trace_of
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.runtime.rpc import status_of

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON_LENGTH: Final = "inference-header-content-length"
PROCESS_BYTES: Final = 256 * 1024
"""JSON from here on is read and written in a process of its own: others' requests must not wait for it."""
HUGE_BYTES: Final = 4 * 2**20
"""JSON from here on has a second process: what takes tenths of a second must not wait for what takes seconds."""
INDEX_BYTES_MAX: Final = 64 * 1024
"""Of a question for the repository's index."""
DISCARDED_BYTES_MAX: Final = 16 * 2**20
STATUS: Final = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.UNIMPLEMENTED: 501,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNAUTHENTICATED: 401,
    grpc.StatusCode.PERMISSION_DENIED: 403,
}
"""Triton's own where it has one; all others are 400, as its are."""

_MODEL = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|ready|config|stats|generate|generate_stream|trace/setting))?"
)
_HEALTH = re.compile(r"/v2/health/(live|ready)")
_REPOSITORY = re.compile(r"/v2/repository(?:/[^/]+)?/(index|models/[^/]+/(load|unload))")
_SHARED_MEMORY = re.compile(r"/v2/(system|cuda)sharedmemory(?:/region/[^/]+)?/(status|register|unregister)")
_SETTINGS = {"/v2/trace/setting": "TraceSetting", "/v2/logging": "LogSettings"}
_NO_GENERATE: Final = "generate is not offered. Remedy: send /infer"


@dataclass(frozen=True, slots=True)
class HttpReply:
    """HTTP response; `headers` beyond the content's type and length."""

    status: int
    body: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    content_type: bytes = b"application/json"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """HTTP request without its body. `peer`: address of its client, as gRPC writes it."""

    method: str
    path: str
    headers: dict[str, str]
    receive: Receive
    peer: str = ""

    def needs(self, method: str) -> None:
        """Check the method; raises HttpError 405 for another one."""
        if self.method != method:
            raise HttpError(HttpReply(405, _error("Method Not Allowed"), ((b"allow", method.encode()),)))


class HttpError(Exception):
    """HTTP reply that is no gRPC status."""

    def __init__(self, reply: HttpReply) -> None:
        super().__init__(reply)
        self.reply = reply


class RestApp:
    """ASGI application of the REST port. Belongs to one event loop."""

    def __init__(self, fronts: Fronts) -> None:
        settings = fronts.local.settings
        self._kserve, self._inference = fronts.kserve, fronts.inference
        self._contracts, self._access = fronts.contracts, fronts.access
        self._body_bytes_max = settings.message_bytes_max if settings.message_bytes_max >= 0 else math.inf
        json_bytes_max = settings.rest_json_bytes_max
        self._json_bytes_max = json_bytes_max if json_bytes_max >= 0 else self._body_bytes_max
        self._json_limit = "rest_json_bytes_max" if json_bytes_max >= 0 else "message_bytes_max"
        self._large, self._huge = (CodecProcess(settings.rest_json_memory_bytes_max) for _ in range(2))

    async def close(self) -> None:
        """Give back what the application holds."""
        await asyncio.gather(self._large.close(), self._huge.close())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One ASGI scope."""
        if scope["type"] != "http":
            return
        headers = _combined(scope["headers"])
        unread = headers.get("expect", "").lower() == "100-continue"

        async def read() -> MutableMapping[str, Any]:
            nonlocal unread
            unread = False
            return await receive()

        peer = peer_of(tuple(scope.get("client") or ()))
        try:
            reply = await self._reply(HttpRequest(scope["method"], scope["path"], headers, read, peer))
        except HttpError as wrong:
            reply = wrong.reply
        except ClientDisconnected:
            return
        except StatusError as refused:
            reply = _refusal(refused)
        except TrefoilError as error:
            reply = _refusal(StatusError(status_of(error), str(error)))
        content = ((b"content-type", reply.content_type),) if reply.body else ()
        length = (b"content-length", str(len(reply.body)).encode())
        # A client that was not asked for its body may send it or the next request: only the connection's end is clear.
        close = ((b"connection", b"close"),) if unread else ()
        more = [*content, length, *reply.headers, *close]
        await send({"type": "http.response.start", "status": reply.status, "headers": more})
        await send({"type": "http.response.body", "body": reply.body})

    async def _reply(self, ask: HttpRequest) -> HttpReply:
        if found := _HEALTH.fullmatch(ask.path):
            return await self._health(ask, found[1])
        tenant = self._access.authenticate(ask.headers.get("authorization", ""))
        if found := _MODEL.fullmatch(ask.path):
            model, version, what = found[1], found[2] or "", found[3]
            if what == "infer":
                ask.needs("POST")
                return await self._infer(ask, tenant, model, version)
            if ask.path != "/v2/models/stats":
                return await self._model(ask, model, version, what)
        if ask.path == "/v2":
            return _answer(await self._get(ask, self._kserve.ServerMetadata, pb.ServerMetadataRequest()))
        if ask.path == "/v2/models/stats":
            return _answer(await self._get(ask, self._kserve.ModelStatistics, pb.ModelStatisticsRequest()))
        if found := _REPOSITORY.fullmatch(ask.path):
            ask.needs("POST")
            if found[1] == "index":
                return await self._index(ask)
            self._access.require_role(tenant, ADMIN)
            raise _unimplemented("RepositoryModelLoad" if found[2] == "load" else "RepositoryModelUnload")
        if found := _SHARED_MEMORY.fullmatch(ask.path):
            if found[2] == "status":
                ask.needs("GET")
                return HttpReply(200, b"[]")
            raise _unimplemented(f"{found[1].capitalize()}SharedMemory{found[2].capitalize()}")
        if ask.path in _SETTINGS:
            raise _unimplemented(_SETTINGS[ask.path])
        raise HttpError(HttpReply(404, _error("Not Found")))

    async def _health(self, ask: HttpRequest, what: str) -> HttpReply:
        ask.needs("GET")
        if what == "live":
            good = (await self._kserve.ServerLive(pb.ServerLiveRequest(), None)).live
        else:
            good = (await self._kserve.ServerReady(pb.ServerReadyRequest(), None)).ready
        # Triton's body is empty and its client looks at the status alone; KServe's own client reads this key.
        return HttpReply(200 if good else 400, codec.dumps({what: good}))

    async def _model(self, ask: HttpRequest, model: str, version: str, what: str | None) -> HttpReply:
        named = {"name": model, "version": version}
        if what == "ready":
            ready = await self._get(ask, self._kserve.ModelReady, pb.ModelReadyRequest(**named))
            return HttpReply(200) if ready.ready else HttpReply(400, _error("Model version not ready"))
        if what == "config":
            return _answer((await self._get(ask, self._kserve.ModelConfig, pb.ModelConfigRequest(**named))).config)
        if what == "stats":
            return _answer(await self._get(ask, self._kserve.ModelStatistics, pb.ModelStatisticsRequest(**named)))
        if what == "trace/setting":
            raise _unimplemented("TraceSetting")
        if what is not None:
            raise StatusError(grpc.StatusCode.UNIMPLEMENTED, _NO_GENERATE)
        return _answer(await self._get(ask, self._kserve.ModelMetadata, pb.ModelMetadataRequest(**named)))

    async def _get(self, ask: HttpRequest, method: Any, request: Any) -> Any:
        ask.needs("GET")
        return await method(request, None)

    async def _index(self, ask: HttpRequest) -> HttpReply:
        body = await self._body(ask, INDEX_BYTES_MAX, "INDEX_BYTES_MAX")
        given = json_text.parse(body) if body else {}
        ready = given.get("ready", False)
        if type(ready) is not bool:
            raise InvalidInput(
                "Invalid value for 'ready': expected a boolean", field="ready", value=ready, remedy="true or false"
            )
        index = await self._kserve.RepositoryIndex(pb.RepositoryIndexRequest(ready=ready), None)
        models = [{name: value for name, value in codec.to_json(model).items() if value} for model in index.models]
        return HttpReply(200, codec.dumps(models))

    async def _infer(self, ask: HttpRequest, tenant: Tenant, model: str, version: str) -> HttpReply:
        if JSON_LENGTH in ask.headers or "content-encoding" in ask.headers:
            body = await self._body(ask, self._body_bytes_max)
        else:  # it is JSON, all of it
            body = await self._body(ask, min(self._body_bytes_max, self._json_bytes_max), self._json_limit)
        self._access.admit(tenant, len(body))
        body = await compression.decompress(body, ask.headers.get("content-encoding", ""), self._body_bytes_max)
        if len(body) > self._body_bytes_max:
            raise _too_large("the request is too large once decompressed", "message_bytes_max", self._body_bytes_max)
        data, form = await self._decoded(ask, body, model, version)
        if len(data) > self._body_bytes_max:
            raise _too_large(f"the tensors have {len(data)} bytes", "message_bytes_max", self._body_bytes_max)
        flow = self._access.flow(tenant, ask.peer, ask.headers.items)
        trace = trace_of(ask.headers.items())
        caller = Caller(tenant=tenant.name, trace=trace, flow=flow, weight=tenant.weight)
        answer = await self._while_there(ask.receive, self._inference.answer(data, caller))
        joined = answer.data
        if len(joined) < PROCESS_BYTES or form.all_binary:
            written, length = codec.encode(joined, form)
        else:
            written, length = await self._process(len(joined)).encode(joined, form)
        headers: tuple[tuple[bytes, bytes], ...] = ()
        content_type = b"application/json"
        if length is not None:
            headers = ((JSON_LENGTH.encode(), str(length).encode()),)
            content_type = b"application/octet-stream"
        encoding = compression.chosen(ask.headers.get("accept-encoding", ""))
        if encoding:
            written = await compression.compress(written, encoding)
            headers += ((b"content-encoding", encoding.encode()),)
        return HttpReply(200, written, headers, content_type)

    async def _decoded(self, ask: HttpRequest, body: bytes, model: str, version: str) -> tuple[bytes, codec.OutputForm]:
        length = _json_length(ask.headers.get(JSON_LENGTH), len(body))
        if length == 0 and body:
            config = (await self._contracts.fetch(model)).config.config
            return codec.decode_raw(body, config, version), codec.ALL_BINARY
        if length > self._json_bytes_max:
            raise _too_large(f"the JSON of a request has {length} bytes", self._json_limit, self._json_bytes_max)
        if length < PROCESS_BYTES:
            return codec.decode(body, length, model, version)
        return await self._process(length).decode(body, length, model, version)

    def _process(self, size: int) -> CodecProcess:
        return self._large if size < HUGE_BYTES else self._huge

    async def _body(self, ask: HttpRequest, most: float, limit: str = "message_bytes_max") -> bytes:
        """The whole body; raises ClientDisconnected, or HttpError when it is too large."""
        declared = ask.headers.get("content-length", "")
        parts, received = [], 0
        over = declared.isdigit() and int(declared) > most
        while True:
            event = await ask.receive()
            if event["type"] == "http.disconnect":
                raise ClientDisconnected
            part = event.get("body", b"")
            received += len(part)
            over = over or received > most
            if not over:
                parts.append(part)
            # The rest is read and dropped, so that the client reads the refusal instead of a reset connection.
            if not event.get("more_body", False) or (over and received > most + DISCARDED_BYTES_MAX):
                break
        if over:
            raise _too_large("the request is too large", limit, most)
        return bytes(parts[0]) if len(parts) == 1 else b"".join(parts)

    async def _while_there(self, receive: Receive, answering: Any) -> Any:
        """The answer; a client that leaves takes its request out of the queue or off its slice.

        Raises:
            ClientDisconnected: it left.
        """
        task = asyncio.ensure_future(answering)
        leaving = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise ClientDisconnected
            return task.result()
        finally:
            leaving.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))


class ClientDisconnected(Exception):
    """Client that hung up before its answer."""


def _combined(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    """Headers by name; lines of one name are one list (RFC 9110 5.3), so that none of them hides another."""
    found: dict[str, str] = {}
    for name, value in headers:
        key, text = name.decode("latin-1"), value.decode("latin-1")
        found[key] = f"{found[key]}, {text}" if key in found else text
    return found


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _json_length(given: str | None, size: int) -> int:
    """Bytes of JSON in a body of `size`. 0 of a body that is not empty = it is the only input's raw data."""
    if given is None:
        return size
    try:
        length = int(given)
    except ValueError:
        length = -1
    if not 0 <= length <= size:
        raise InvalidInput(
            f"inference header size should be in range (0, {size})", field="Inference-Header-Content-Length",
            value=given, remedy="say how many bytes of JSON the body begins with",
        )  # fmt: skip
    return length


def _too_large(what: str, setting: str, most: float) -> HttpError:
    return HttpError(HttpReply(413, _error(f"{what}. Remedy: send at most {setting} = {most:.0f}")))


def _error(text: str) -> bytes:
    return codec.dumps({"error": text})


def _refusal(refused: StatusError) -> HttpReply:
    """A status as HTTP has it. Access control's time to wait becomes Retry-After, in whole seconds, rounded up."""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    for name, value in refused.trailers or ():
        if name == "grpc-retry-pushback-ms":
            headers += ((b"retry-after", str(-(-int(value) // 1000)).encode()),)
    if refused.code is grpc.StatusCode.UNAUTHENTICATED:
        headers += ((b"www-authenticate", b"Bearer"),)
    return HttpReply(STATUS.get(refused.code, 400), _error(refused.details), headers)


def _answer(message: Any) -> HttpReply:
    return HttpReply(200, codec.dumps(codec.to_json(message)))


def _unimplemented(method: str) -> StatusError:
    return StatusError(grpc.StatusCode.UNIMPLEMENTED, kserve.UNIMPLEMENTED[method])

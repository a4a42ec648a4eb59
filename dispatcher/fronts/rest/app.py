"""The ASGI application: Triton's URLs, methods, statuses and errors.

Health stays open without a token, for load balancers. Everything else asks access control first.
"""

import asyncio
import math
import re
from collections.abc import Mapping, MutableMapping
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts import kserve
from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai.app import NO_ROUTES, OpenAi, Route
from dispatcher.fronts.rest import codec, compression, json_text
from dispatcher.fronts.rest.calls import (
    PROMPT_BYTES_MAX,
    ClientDisconnected,
    HttpError,
    HttpReply,
    HttpRequest,
    Receive,
    Room,
    Send,
    Unread,
    combined,
    error_body,
    read_body,
    read_text,
    refusal,
    too_large,
    while_there,
)
from dispatcher.fronts.rest.codec_process import PROCESS_BYTES, CodecProcess
from dispatcher.fronts.rest.generate import Generate
from dispatcher.request.admission import StatusError
from dispatcher.request.core.tenants import ADMIN, Tenant
from dispatcher.transport.accepting import peer_of
from trefoil.core.errors import InvalidInput, TrefoilError

JSON_LENGTH: Final = "inference-header-content-length"
HUGE_BYTES: Final = 4 * 2**20
"""JSON from here on has a second process: what takes tenths of a second must not wait for what takes seconds."""
JSON_S: Final = 120.0
"""Of one body in such a process [s]: many times what the largest takes."""
INDEX_BYTES_MAX: Final = 64 * 1024
"""Of a question for the repository's index."""

_MODEL = re.compile(
    r"/v2/models/([^/]+)(?:/versions/([0-9]+))?(?:/(infer|ready|config|stats|generate|generate_stream|trace/setting))?"
)
_HEALTH = re.compile(r"/v2/health/(live|ready)")
_REPOSITORY = re.compile(r"/v2/repository(?:/[^/]+)?/(index|models/[^/]+/(load|unload))")
_SHARED_MEMORY = re.compile(r"/v2/(system|cuda)sharedmemory(?:/region/[^/]+)?/(status|register|unregister)")
_SETTINGS = {"/v2/trace/setting": "TraceSetting", "/v2/logging": "LogSettings"}


class RestApp:
    """ASGI application of the REST port. Belongs to one event loop."""

    def __init__(self, fronts: Fronts, routes: Mapping[str, Route] = NO_ROUTES) -> None:
        """`routes`: as `OpenAi` has them."""
        settings = fronts.local.settings
        self._kserve, self._inference = fronts.kserve, fronts.inference
        self._contracts, self._access = fronts.contracts, fronts.access
        self._held, self._unread = fronts.held, Unread(fronts.held)
        self._body_bytes_max = settings.message_bytes_max if settings.message_bytes_max >= 0 else math.inf
        json_bytes_max = settings.rest_json_bytes_max
        self._json_bytes_max = json_bytes_max if json_bytes_max >= 0 else self._body_bytes_max
        self._json_limit = "rest_json_bytes_max" if json_bytes_max >= 0 else "message_bytes_max"
        most = min((PROMPT_BYTES_MAX, "a prompt"), (self._body_bytes_max, "message_bytes_max"))
        self._text_limit = min(most, (self._json_bytes_max, self._json_limit))
        self._large, self._huge = (CodecProcess(settings.rest_json_memory_bytes_max, JSON_S) for _ in range(2))
        self._generate = Generate(fronts, self._process)
        self._openai = OpenAi(fronts, self._text_limit, self._process, routes)

    async def close(self) -> None:
        """Give back what the application holds."""
        await asyncio.gather(self._large.close(), self._huge.close(), self._openai.close())

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """One ASGI scope."""
        if scope["type"] != "http":
            return
        headers = combined(scope["headers"])
        unread = headers.get("expect", "").lower() == "100-continue"

        async def read() -> MutableMapping[str, Any]:
            nonlocal unread
            unread = False
            return await receive()

        peer, room = peer_of(tuple(scope.get("client") or ())), Room(self._held)
        try:
            query = scope["query_string"].decode("latin-1")
            ask = HttpRequest(scope["method"], scope["path"], headers, read, send, peer, query, room)
            reply = await self._reply(ask)
        except (HttpError, StatusError, TrefoilError) as error:
            reply = refusal(error)
        except ClientDisconnected:
            return
        finally:
            room.free()
        if reply is None:  # it has been sent
            return
        content = ((b"content-type", reply.content_type),) if reply.body else ()
        length = (b"content-length", str(len(reply.body)).encode())
        # A client that was not asked for its body may send it or the next request: only the connection's end is clear.
        close = ((b"connection", b"close"),) if unread else ()
        more = [*content, length, *reply.headers, *close]
        await send({"type": "http.response.start", "status": reply.status, "headers": more})
        await self._unread.send(send, scope["extensions"]["client"]["transport"], reply.body)

    async def _reply(self, ask: HttpRequest) -> HttpReply | None:
        if found := _HEALTH.fullmatch(ask.path):
            return await self._health(ask, found[1])
        if ask.path.startswith("/v1/"):
            return await self._openai.reply(ask)
        tenant = self._access.authenticate(ask.headers.get("authorization", ""))
        if found := _MODEL.fullmatch(ask.path):
            model, version, what = found[1], found[2] or "", found[3]
            if what == "infer":
                ask.needs("POST")
                return await self._infer(ask, tenant, model, version)
            if what in ("generate", "generate_stream"):
                ask.needs("POST")
                body = await read_text(ask, self._access, tenant, *self._text_limit)
                caller = ask.caller(self._access, tenant)
                return await self._generate.reply(ask, caller, body, model, version, what == "generate")
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
        raise HttpError(404, "Not Found")

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
            return HttpReply(200) if ready.ready else HttpReply(400, error_body("Model version not ready"))
        if what == "config":
            return _answer((await self._get(ask, self._kserve.ModelConfig, pb.ModelConfigRequest(**named))).config)
        if what == "stats":
            return _answer(await self._get(ask, self._kserve.ModelStatistics, pb.ModelStatisticsRequest(**named)))
        if what == "trace/setting":
            raise _unimplemented("TraceSetting")
        return _answer(await self._get(ask, self._kserve.ModelMetadata, pb.ModelMetadataRequest(**named)))

    async def _get(self, ask: HttpRequest, method: Any, request: Any) -> Any:
        ask.needs("GET")
        return await method(request, None)

    async def _index(self, ask: HttpRequest) -> HttpReply:
        body = await read_body(ask, INDEX_BYTES_MAX, "INDEX_BYTES_MAX")
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
            body = await read_body(ask, self._body_bytes_max)
        else:  # it is JSON, all of it
            body = await read_body(ask, min(self._body_bytes_max, self._json_bytes_max), self._json_limit)
        self._access.admit(tenant, len(body))
        encoding = ask.headers.get("content-encoding", "")
        body = await compression.decompress(body, encoding, self._body_bytes_max, ask.room.take)
        if len(body) > self._body_bytes_max:
            raise too_large("the request is too large once decompressed", "message_bytes_max", self._body_bytes_max)
        caller = ask.caller(self._access, tenant)
        data, form = await self._decoded(ask, body, model, version, caller.flow[0])
        if len(data) > self._body_bytes_max:
            raise too_large(f"the tensors have {len(data)} bytes", "message_bytes_max", self._body_bytes_max)
        ask.room.take(len(data) - len(body))
        del body  # the tensors are all that is held while the request waits
        answer = await while_there(ask.receive, self._inference.answer(data, caller))
        joined = answer.data
        if len(joined) < PROCESS_BYTES or form.all_binary:
            written, length = codec.encode(joined, form)
        else:
            writing = self._process(len(joined)).call(caller.flow[0], codec.encode, joined, form)
            written, length = await while_there(ask.receive, writing)
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

    async def _decoded(
        self, ask: HttpRequest, body: bytes, model: str, version: str, line: str
    ) -> tuple[bytes, codec.OutputForm]:
        length = _json_length(ask.headers.get(JSON_LENGTH), len(body))
        if length == 0 and body:
            config = (await self._contracts.fetch(model)).config.config
            return codec.decode_raw(body, config, version), codec.ALL_BINARY
        if length > self._json_bytes_max:
            raise too_large(f"the JSON of a request has {length} bytes", self._json_limit, self._json_bytes_max)
        if length < PROCESS_BYTES:
            return codec.decode(body, length, model, version)
        reading = self._process(length).call(line, codec.decode, body, length, model, version)
        return await while_there(ask.receive, reading)  # type: ignore[no-any-return]

    def _process(self, size: int) -> CodecProcess:
        return self._large if size < HUGE_BYTES else self._huge


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


def _answer(message: Any) -> HttpReply:
    return HttpReply(200, codec.dumps(codec.to_json(message)))


def _unimplemented(method: str) -> StatusError:
    return StatusError(grpc.StatusCode.UNIMPLEMENTED, kserve.UNIMPLEMENTED[method])

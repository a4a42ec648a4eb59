"""OpenAI's routes on the REST port: /v1/models, completions, chat completions, embeddings; those of batches elsewhere.

A request becomes one of the generate extension and goes the way of every other one. Errors have OpenAI's shape.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai.bodies import ENDPOINTS, AskedVectors
from dispatcher.fronts.openai.completions import Completions, openai_refusal, unknown_model
from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.calls import (
    STOPPING,
    EventStream,
    HttpError,
    HttpReply,
    HttpRequest,
    read_text,
    while_there,
)
from dispatcher.fronts.rest.codec_process import ProcessOf
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.core.tenants import Tenant
from trefoil.core.errors import NotFound, TrefoilError, Unavailable
from trefoil.engine_api import Calls
from trefoil.runtime.given.llm_backends import api_of, embeds

DONE: Final = b"[DONE]"
_MODEL: Final = re.compile(r"/v1/models/([^/]+)")


Route = Callable[[HttpRequest, Tenant], Awaitable[HttpReply | None]]
"""Replies to a request of a tenant; None: the reply has been sent. Raises HttpError, StatusError, TrefoilError."""

NO_ROUTES: Final[Mapping[str, Route]] = {}


class OpenAi:
    """OpenAI's API. Belongs to one event loop. `limit`: most bytes of a body, and what says so. `process`: codec of
    large bodies by bytes. `routes`: more of its routes, by the first part of their path below /v1/."""

    def __init__(
        self, fronts: Fronts, limit: tuple[float, str], process: ProcessOf, routes: Mapping[str, Route]
    ) -> None:
        self._contracts, self._access, self._local = fronts.contracts, fronts.access, fronts.local
        self._limit, self._routes = limit, routes
        self._completions = Completions(fronts, process)

    async def close(self) -> None:
        """Give back what it holds."""
        await self._completions.close()

    async def reply(self, ask: HttpRequest) -> HttpReply | None:
        """Reply to a request below /v1/; None: it has been sent as events. Raises ClientDisconnected."""
        try:
            return await self._reply(ask)
        except (HttpError, StatusError, TrefoilError) as error:
            return openai_refusal(error)

    async def _reply(self, ask: HttpRequest) -> HttpReply | None:
        tenant = self._access.authenticate(ask.headers.get("authorization", ""))
        if ask.path == "/v1/models":
            ask.needs("GET")
            names = [name for name in sorted(self._local.routing.table.chains) if await self._answers(name)]
            return HttpReply(200, codec.dumps({"object": "list", "data": [self._model(name) for name in names]}))
        if found := _MODEL.fullmatch(ask.path):
            ask.needs("GET")
            if not await self._answers(found[1]):
                raise unknown_model(found[1])
            return HttpReply(200, codec.dumps(self._model(found[1])))
        if (route := self._routes.get(ask.path.split("/")[2])) is not None:
            return await route(ask, tenant)
        if ask.path not in ENDPOINTS:
            raise HttpError(404, f"{ask.path} is not offered. Remedy: see GET /v1/models, POST {', '.join(ENDPOINTS)}")
        ask.needs("POST")
        body = await read_text(ask, self._access, tenant, *self._limit)
        caller = ask.caller(self._access, tenant)
        answer: HttpReply | None = await while_there(ask.receive, self._answer(ask, body, caller))
        return answer

    async def _answers(self, family: str) -> bool:
        """Whether a family is known to generate text, or embeddings."""
        try:
            config = (await self._contracts.fetch(family)).config.config
            return bool(api_of(config)) or embeds(config)
        except (NotFound, Unavailable):
            return False

    def _model(self, family: str) -> dict[str, Any]:
        return {"id": family, "object": "model", "created": 0, "owned_by": "trefoil"}

    async def _answer(self, ask: HttpRequest, body: bytes, caller: Caller) -> HttpReply | None:
        asked = await self._completions.read(body, ask.headers, ask.path, caller.flow[0])
        if isinstance(asked, AskedVectors) or not asked.stream:
            return HttpReply(200, (await self._completions.whole(asked, caller))[0])
        begun, events = await self._completions.begin(asked, caller), EventStream(ask.send)

        async def take(text: str, calls: Calls) -> None:
            await events.event(begun.chunks.part(text, calls))

        try:
            rest = await self._completions.run(begun, caller, take)
        except (StatusError, TrefoilError) as error:
            if not events.started:
                raise
            await events.event(openai_refusal(error).body)
            await events.end()
            return None
        except asyncio.CancelledError:
            if self._local.draining:
                await events.cut(openai_refusal(STOPPING).body)
            raise
        if rest:
            await events.event(begun.chunks.part(rest))
        for chunk in begun.chunks.last():
            await events.event(chunk)
        await events.event(DONE)
        await events.end()
        return None

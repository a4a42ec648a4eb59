"""OpenAI's routes on the REST port: /v1/models, /v1/completions, /v1/chat/completions.

A request becomes one of the generate extension and goes the way of every other one. Errors have OpenAI's shape.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Final

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai import bodies
from dispatcher.fronts.openai.bodies import Asked
from dispatcher.fronts.openai.engines import TextAnswer, text_api, text_inputs
from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.calls import (
    STOPPING,
    EventStream,
    HttpError,
    HttpReply,
    HttpRequest,
    read_text,
    refusal,
    while_there,
)
from dispatcher.fronts.rest.codec_process import PROCESS_TEXT_BYTES, CodecProcess
from dispatcher.fronts.rest.generate_codec import PARAMETERS, encode
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.contracts import Contract
from dispatcher.request.decoupled import REFUSED, Enough
from trefoil.core.errors import InvalidInput, NotFound, TrefoilError, Unavailable
from trefoil.runtime.given.llm_backends import api_of
from trefoil.runtime.model_files import CHAT_TEMPLATE
from trefoil.runtime.rpc import status_of

NAMES: Final = ("bos_token", "eos_token")
"""Parameters of a family's config.pbtxt that its chat template may use."""
RENDERING_BYTES: Final = 2**27
RENDERING_S: Final = 30.0
"""Of one rendering, the start of the process included, which has its own bound of processor time."""
RENDERINGS_MAX: Final = 32
"""Of one tenant or host at once."""
TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES: Final = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}
DONE: Final = b"[DONE]"
_MODEL: Final = re.compile(r"/v1/models/([^/]+)")
_CONTEXT: Final = re.compile(r"maximum (model|context) length|PROMPT has \d+ (tokens|bytes)")


class OpenAi:
    """OpenAI's API. Belongs to one event loop. `limit`: most bytes of a body, and what says so. `process`: codec of
    large bodies by bytes."""

    def __init__(self, fronts: Fronts, limit: tuple[float, str], process: Callable[[int], CodecProcess]) -> None:
        self._contracts, self._streams, self._access = fronts.contracts, fronts.streams, fronts.access
        self._local = fronts.local
        self._limit, self._process = limit, process
        self._templates = CodecProcess(RENDERING_BYTES, RENDERING_S, RENDERINGS_MAX)

    async def close(self) -> None:
        """Give back what it holds."""
        await self._templates.close()

    async def reply(self, ask: HttpRequest) -> HttpReply | None:
        """Reply to a request below /v1/; None: it has been sent as events. Raises ClientDisconnected."""
        try:
            return await self._reply(ask)
        except (HttpError, StatusError, TrefoilError) as error:
            return _refusal(error)

    async def _reply(self, ask: HttpRequest) -> HttpReply | None:
        tenant = self._access.authenticate(ask.headers.get("authorization", ""))
        if ask.path == "/v1/models":
            ask.needs("GET")
            names = [name for name in sorted(self._local.routing.table.chains) if await self._generates(name)]
            return HttpReply(200, codec.dumps({"object": "list", "data": [self._model(name) for name in names]}))
        if found := _MODEL.fullmatch(ask.path):
            ask.needs("GET")
            if not await self._generates(found[1]):
                raise _unknown(found[1])
            return HttpReply(200, codec.dumps(self._model(found[1])))
        chat = ask.path == "/v1/chat/completions"
        if not chat and ask.path != "/v1/completions":
            raise HttpError(404, f"{ask.path} is not offered. Remedy: see GET /v1/models, POST /v1/chat/completions")
        ask.needs("POST")
        body = await read_text(ask, self._access, tenant, *self._limit)
        caller = ask.caller(self._access, tenant)
        answer: HttpReply | None = await while_there(ask.receive, self._answer(ask, body, chat, caller))
        return answer

    async def _generates(self, family: str) -> bool:
        """Whether a family is known to generate text."""
        try:
            return bool(api_of((await self._contracts.fetch(family)).config.config))
        except (NotFound, Unavailable):
            return False

    def _model(self, family: str) -> dict[str, Any]:
        return {"id": family, "object": "model", "created": 0, "owned_by": "trefoil"}

    async def _answer(self, ask: HttpRequest, body: bytes, chat: bool, caller: Caller) -> HttpReply | None:
        if len(body) < PROCESS_TEXT_BYTES:
            asked = bodies.read_text(body, ask.headers, chat)
        else:
            asked = await self._process(len(body)).asked(body, ask.headers, chat, line=caller.flow[0])
        try:
            contract = await self._contracts.fetch(asked.model)
        except NotFound:
            raise _unknown(asked.model) from None
        api = text_api(contract, asked.model)
        prompt = await self._prompt(contract, asked, caller) if chat else asked.prompt
        inputs = text_inputs(contract, asked, prompt)
        id_ = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        data = encode({**inputs, "id": id_, PARAMETERS: dict(asked.parameters)}, contract.metadata, asked.model)
        answer = TextAnswer(asked, prompt)
        chunks = _Chunks(asked, chat, id_, int(self._local.clock.now_s()), answer)
        texts, events = list[str](), EventStream(ask.send)

        async def take(response: Any) -> None:
            text = answer.add(response, api)
            if text and asked.stream:
                await events.event(chunks.text(text))
            elif text:
                texts.append(text)
            if answer.stopped and response.outputs:
                raise Enough

        try:
            await self._streams.answer(asked.model, data, caller, take)
            rest = answer.end()
        except (StatusError, TrefoilError) as error:
            if not events.started:
                raise
            await events.event(_refusal(error).body)
            await events.end()
            return None
        except asyncio.CancelledError:
            if self._local.draining:
                await events.cut(_refusal(STOPPING).body)
            raise
        if not asked.stream:
            return HttpReply(200, chunks.whole("".join((*texts, rest))))
        if rest:
            await events.event(chunks.text(rest))
        for chunk in chunks.last():
            await events.event(chunk)
        await events.event(DONE)
        await events.end()
        return None

    async def _prompt(self, contract: Contract, asked: Asked, caller: Caller) -> str:
        given = contract.config.config.parameters
        if CHAT_TEMPLATE not in given:
            raise InvalidInput(
                f"{asked.model} has no chat template", field="messages",
                remedy=f"send POST /v1/completions; or add {CHAT_TEMPLATE}.jinja to the family's folder",
            )  # fmt: skip
        names = {name: given[name].string_value for name in NAMES if name in given}
        template = given[CHAT_TEMPLATE].string_value
        return await self._templates.render(template, asked.messages, names, line=caller.flow[0])


class _Chunks:
    """JSON of an answer: chunk by chunk, or whole."""

    def __init__(self, asked: Asked, chat: bool, id_: str, created: int, answer: TextAnswer) -> None:
        self._asked, self._chat, self._answer = asked, chat, answer
        self._head = {"id": id_, "created": created, "model": asked.model}
        self._first = True

    def text(self, text: str) -> bytes:
        """Chunk of text."""
        return self._chunk([self._choice(text, None)])

    def last(self) -> list[bytes]:
        """Chunks after the text: the reason, and usage if it was asked for; the last one has the receipt."""
        usage = {"usage": self._answer.usage()} if self._asked.include_usage else {}
        receipt = {"trefoil": self._answer.receipt} if self._answer.receipt else {}
        end = [self._choice("", self._answer.finish_reason)]
        return [self._chunk(end), self._chunk([], usage | receipt)] if usage else [self._chunk(end, receipt)]

    def whole(self, text: str) -> bytes:
        """The answer at once."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._answer.finish_reason}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        receipt = {"trefoil": self._answer.receipt} if self._answer.receipt else {}
        return self._dumps(kind, {"choices": [choice], "usage": self._answer.usage()} | receipt)

    def _choice(self, text: str, reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self._chat:
            return choice | {"text": text}
        role = {"role": "assistant", "content": text} if self._first else {}
        self._first = False
        return choice | {"delta": role | ({"content": text} if text else {})}

    def _chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._asked.include_usage else {}
        return self._dumps(kind, {"choices": choices} | usage | dict(more or {}))

    def _dumps(self, kind: str, values: Mapping[str, Any]) -> bytes:
        return codec.dumps({**self._head, "object": kind, "system_fingerprint": self._answer.variant, **values})


def _unknown(family: str) -> HttpError:
    return HttpError(404, f"The model '{family}' does not exist. Remedy: GET /v1/models names those that do")


def _refusal(error: HttpError | StatusError | TrefoilError) -> HttpReply:
    """An error as OpenAI has it."""
    if isinstance(error, HttpError):
        reply, text = error.reply, error.text
    else:
        known = error if isinstance(error, StatusError) else StatusError(status_of(error), str(error))
        reply, text = refusal(known), known.details.replace(REFUSED, "", 1)
    status = reply.status
    code, field = CODES.get(status), error.field if isinstance(error, TrefoilError) else ""
    if status == 404 and text.startswith("The model"):
        code, field = "model_not_found", "model"
    elif status == 400 and _CONTEXT.search(text):
        code = "context_length_exceeded"
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": text, "type": kind, "param": field or None, "code": code}}
    return HttpReply(status, codec.dumps(body), reply.headers)

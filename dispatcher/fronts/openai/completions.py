"""Answers to OpenAI's completions, chat completions and embeddings, by requests to the family's slices, in its shape.

For the REST port, and for items of batches. Errors have OpenAI's shape.
"""

import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.openai import batch_lines, bodies
from dispatcher.fronts.openai.bodies import Asked, AskedVectors
from dispatcher.fronts.openai.chat_templates import render
from dispatcher.fronts.openai.embeddings import Embeddings
from dispatcher.fronts.openai.engines import TextAnswer, check_tools, text_api, text_inputs, whole_calls
from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.calls import HttpError, HttpReply, Refused, refusal
from dispatcher.fronts.rest.codec_process import CodecProcess, ProcessOf, here_or_there
from dispatcher.fronts.rest.generate_codec import PARAMETERS, encode
from dispatcher.request.admission import Caller
from dispatcher.request.contracts import Contract
from dispatcher.request.decoupled import REFUSED, Enough
from trefoil.core.errors import InvalidInput, NotFound, TrefoilError, brief
from trefoil.engine_api import Calls
from trefoil.runtime.given.llm_backends import OPENAI
from trefoil.runtime.model_files import CHAT_TEMPLATE

NAMES: Final = ("bos_token", "eos_token")
"""Parameters of a family's config.pbtxt that its chat template may use."""
RENDERING_BYTES: Final = 2**27
RENDERING_S: Final = 30.0
"""Of one rendering, the start of the process included, which has its own bound of processor time."""
RENDERINGS_MAX: Final = 32
"""Of one tenant or host at once."""
TYPES: Final = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES: Final = {401: "invalid_api_key", 413: "request_too_large", 429: "rate_limit_exceeded"}
_CONTEXT: Final = re.compile(r"maximum (model|context) length|PROMPT has \d+ (tokens|bytes)")


@dataclass(frozen=True, slots=True)
class Begun:
    """A request for text on its way: bytes of its ModelInferRequest, the API of its family, its answer so far."""

    model: str
    data: bytes
    api: str
    answer: TextAnswer
    chunks: "Chunks"


class Completions:
    """Answers requests for text and embeddings. Belongs to one event loop. `process`: codec of large bodies by bytes;
    None: that of chat templates, in which lines of batches wait, however many slices take at once."""

    def __init__(self, fronts: Fronts, process: ProcessOf | None = None) -> None:
        self._contracts, self._streams, self._clock = fronts.contracts, fronts.streams, fronts.local.clock
        self._templates = CodecProcess(RENDERING_BYTES, RENDERING_S, math.inf if process is None else RENDERINGS_MAX)
        self._process = process or (lambda _: self._templates)
        self._embeddings = Embeddings(fronts.inference, self._process)

    async def close(self) -> None:
        """Give back what it holds."""
        await self._templates.close()

    async def read(self, body: bytes, headers: Mapping[str, str], endpoint: str, line: str) -> Asked | AskedVectors:
        """Read a body, a large one in a process. Raises InvalidInput, Unavailable."""
        return await here_or_there(self._process, len(body), line, bodies.read_text, body, headers, endpoint)

    async def read_line(self, data: bytes, line: str) -> tuple[str, Asked | AskedVectors | TrefoilError]:
        """Read a line of a batch as `batch_lines.read_line`, a large one in a process. Raises as `read`."""
        return await here_or_there(self._process, len(data), line, batch_lines.read_line, data)

    async def begin(self, asked: Asked, caller: Caller) -> Begun:
        """Make the request of a body for text.

        Raises:
            HttpError: there is no such family.
            InvalidInput: the family generates no text, or cannot take it.
            Unavailable: no slice tells its contract.
        """
        contract, chat = await self._contract(asked.model), bool(asked.messages)
        api = text_api(contract, asked.model)
        check_tools(contract, asked)
        prompt = await self._prompt(contract, asked, caller) if chat else asked.prompt
        inputs = text_inputs(contract, asked, prompt)
        id_ = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(12)
        data = encode({**inputs, "id": id_, PARAMETERS: dict(asked.parameters)}, contract.metadata, asked.model)
        answer = TextAnswer(asked, prompt)
        return Begun(asked.model, data, api, answer, Chunks(asked, chat, id_, int(self._clock.now_s()), answer))

    async def run(self, begun: Begun, caller: Caller, take: Callable[[str, Calls], Awaitable[None]]) -> str:
        """Pass on text and parts of calls as they come; returns what is left of the text at the end.

        Raises:
            StatusError, TrefoilError: it failed, before or after its first text.
        """

        async def add(response: Any) -> None:
            text, calls = begun.answer.add(response, begun.api)
            if text or calls:
                await take(text, calls)
            if begun.answer.stopped and response.outputs:
                raise Enough

        await self._streams.answer(begun.model, begun.data, caller, add)
        return begun.answer.end()

    async def whole(self, asked: Asked | AskedVectors, caller: Caller) -> tuple[bytes, Mapping[str, Any]]:
        """JSON of the answer, and its receipt. Raises as `begin` and `run`."""
        if isinstance(asked, AskedVectors):
            return await self._embeddings.answer(await self._contract(asked.model), asked, caller)
        begun, texts, parts = await self.begin(asked, caller), list[str](), list[Mapping[str, Any]]()

        async def take(text: str, calls: Calls) -> None:
            texts.append(text)
            parts.extend(calls)

        texts.append(await self.run(begun, caller, take))
        return begun.chunks.whole("".join(texts), whole_calls(parts)), begun.answer.receipt

    async def _contract(self, model: str) -> Contract:
        try:
            return await self._contracts.fetch(model)
        except NotFound:
            raise unknown_model(model) from None

    async def _prompt(self, contract: Contract, asked: Asked, caller: Caller) -> str:
        if contract.config.config.backend == OPENAI:  # which has the model's template; the text is for estimates
            return "\n".join(message["content"] or "" for message in asked.messages)
        given = contract.config.config.parameters
        if CHAT_TEMPLATE not in given:
            raise InvalidInput(
                f"{asked.model} has no chat template", field="messages",
                remedy=f"send POST /v1/completions; or add {CHAT_TEMPLATE}.jinja to the family's folder",
            )  # fmt: skip
        names = {name: given[name].string_value for name in NAMES if name in given}
        template = given[CHAT_TEMPLATE].string_value
        return await self._templates.call(caller.flow[0], render, template, asked.messages, names)


class Chunks:
    """JSON of an answer: chunk by chunk, or whole."""

    def __init__(self, asked: Asked, chat: bool, id_: str, created: int, answer: TextAnswer) -> None:
        self._asked, self._chat, self._answer = asked, chat, answer
        self._head = {"id": id_, "created": created, "model": asked.model}
        self._first = True

    def part(self, text: str, calls: Calls = ()) -> bytes:
        """Chunk of text, or of calls of tools."""
        return self._chunk([self._choice(text, None, calls)])

    def last(self) -> list[bytes]:
        """Chunks after the text: the reason, and usage if it was asked for; the last one has the receipt."""
        usage = {"usage": self._answer.usage()} if self._asked.include_usage else {}
        receipt = {"trefoil": self._answer.receipt} if self._answer.receipt else {}
        end = [self._choice("", self._answer.finish_reason)]
        return [self._chunk(end), self._chunk([], usage | receipt)] if usage else [self._chunk(end, receipt)]

    def whole(self, text: str, calls: Calls) -> bytes:
        """The answer at once."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": self._answer.finish_reason}
        if self._chat:
            made = {"tool_calls": calls} if calls else {}
            choice["message"] = {
                "role": "assistant",
                "content": text or (None if calls else ""),
                "refusal": None,
                **made,
            }
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        receipt = {"trefoil": self._answer.receipt} if self._answer.receipt else {}
        return self._dumps(kind, {"choices": [choice], "usage": self._answer.usage()} | receipt)

    def _choice(self, text: str, reason: str | None, calls: Calls = ()) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if not self._chat:
            return choice | {"text": text}
        role = {"role": "assistant", "content": text} if self._first else {}
        self._first = False
        made = {"tool_calls": calls} if calls else {}
        return choice | {"delta": role | ({"content": text} if text else {}) | made}

    def _chunk(self, choices: list[dict[str, Any]], more: Mapping[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        usage = {"usage": None} if self._asked.include_usage else {}
        return self._dumps(kind, {"choices": choices} | usage | dict(more or {}))

    def _dumps(self, kind: str, values: Mapping[str, Any]) -> bytes:
        return codec.dumps({**self._head, "object": kind, "system_fingerprint": self._answer.variant, **values})


def unknown_model(family: str) -> HttpError:
    return HttpError(404, f"The model '{family}' does not exist. Remedy: GET /v1/models names those that do")


def openai_refusal(error: Refused) -> HttpReply:
    """An error as OpenAI has it."""
    reply = refusal(error)
    status, text = reply.status, brief(str(error)) if isinstance(error, TrefoilError) else error.details
    text = text.replace(REFUSED, "", 1)
    code, field = CODES.get(status), error.field if isinstance(error, TrefoilError) else ""
    if status == 404 and text.startswith("The model"):
        code, field = "model_not_found", "model"
    elif status == 400 and _CONTEXT.search(text):
        code = "context_length_exceeded"
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    body = {"error": {"message": text, "type": kind, "param": field or None, "code": code}}
    return HttpReply(status, codec.dumps(body), reply.headers)

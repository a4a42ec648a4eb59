"""OpenAI's API of an engine that already runs (vLLM, SGLang, TensorRT-LLM, llama.cpp): one completion as a stream, or
the embeddings of texts.

A completion is whole once a choice has a `finish_reason`: llama.cpp's server ends a stream that it cuts off for the
next request with [DONE] alone. Source: OpenAI's reference of streamed completions, chat completions and embeddings.
"""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final, Literal, Self

import httpx
import numpy as np
import numpy.typing as npt
from pydantic_core import from_json

from trefoil.core.errors import SettingError, Unavailable
from trefoil.core.outside.addresses import PORT_MAX, TRITON_SCHEME, is_host_port
from trefoil.runtime.security.key_file import HIDDEN, KeyFile

CONNECT_S: Final = 5.0
SILENCE_S: Final = 30.0
"""Longest pause between two events of a stream, and before its first."""
IDLE_S: Final = 1.0
"""A connection without a request is closed after this, before an engine closes it (uvicorn: 5 s)."""
END_S: Final = 10.0
"""For the end of a stream, counts included, once its answer has its reason."""
AT_ONCE: Final = 32
"""Lines, or parts, of an answer that come together: then others are served."""
EVENT_BYTES_MAX: Final = 1 << 20
ANSWER_CHARS_MAX: Final = 1 << 24
"""Of one answer, which may be held whole: millions of tokens."""
VECTORS_BYTES_MAX: Final = 1 << 26
ERROR_BYTES_MAX: Final = 1 << 14
REFUSED: Final = (400, 413, 422)
"""Statuses of a request's own fault. Others below 500 are of the server: 405 of one that is not an engine, 408 of a
proxy, 424 of text-generation-inference whose model failed."""
SHOWN_CHARS: Final = 300
DATA: Final = b"data:"
DONE: Final = b"[DONE]"
MESSAGES: Final = "messages"
EMBED: Final = "embed"
"""Task of an engine that makes embeddings."""
PROBE: Final[Mapping[str, Any]] = {"prompt": "0", "max_tokens": 1, "temperature": 0}
Kind = Literal["unreachable", "busy", "refused", "cut", "lost", "silent", "fault"]


class EngineError(Unavailable):
    """An engine that gave no answer, or only a part of one.

    `kind` is unreachable (the request was not taken), busy (429) or refused (the request's own fault). Or it is cut
    (its stream ended before the answer did), lost (the connection ended), silent (for too long) or fault (all else).
    """

    def __init__(self, message: str, kind: Kind, remedy: str = "", *, field: str = "", value: object = None) -> None:
        super().__init__(message, field=field, value=value, remedy=remedy)
        self.kind: Kind = kind


@dataclass(frozen=True, slots=True)
class EngineTarget:
    """Address of an engine as its clients write it (`http://host:8000/v1`), and its name for the model. `task`: EMBED;
    empty: it completes texts."""

    base: str
    model: str
    task: str = ""

    @classmethod
    def parse(cls, target: str) -> Self:
        """Read the form in which an agent publishes it: address, ? and task, # and model."""
        address, _, model = target.partition("#")
        base, _, task = address.partition("?")
        return cls(base, model, task)

    def __str__(self) -> str:
        return f"{self.base}{self.task and f'?{self.task}'}#{self.model}"


@dataclass(frozen=True, slots=True)
class TritonTarget:
    """Model of a running Triton: its gRPC address (host:port), its name there, and its family and version here."""

    address: str
    model: str
    family: str
    version: int

    @classmethod
    def parse(cls, target: str) -> Self:
        """Read the form in which an agent publishes it."""
        place, _, model = target.removeprefix(TRITON_SCHEME).partition("#")
        address, family, version = place.split("/")
        return cls(address, model, family, int(version))

    def __str__(self) -> str:
        return f"{TRITON_SCHEME}{self.address}/{self.family}/{self.version}#{self.model}"


def check_triton_address(address: str, field: str) -> str:
    """Check the address of a Triton's gRPC port; raises SettingError."""
    if not is_host_port(address):
        remedy = "write host:port of its gRPC port, e.g. 127.0.0.1:8001"
        raise SettingError("is not a Triton address", field=field, value=address.rpartition("@")[2], remedy=remedy)
    return address


def check_address(address: str, field: str) -> str:
    """Check an engine's address; returns it without a last slash.

    Raises:
        SettingError: it is none.
    """
    url = _url(address)
    if url is not None and not (url.query or url.fragment or url.userinfo):
        return address.rstrip("/")
    remedy = "write what its clients have as base URL, e.g. http://127.0.0.1:8000/v1"
    shown = address.rpartition("@")[2]  # never a password
    raise SettingError("is not an address of an engine", field=field, value=shown, remedy=remedy)


def _url(address: str) -> httpx.URL | None:
    """An address that can be connected to; None: it is none."""
    try:
        url = httpx.URL(address)
        fits = url.scheme in ("http", "https") and url.host and 0 <= (url.port or 0) <= PORT_MAX
    except (httpx.InvalidURL, UnicodeError):  # a host that is not a name
        return None
    return url if fits else None


Calls = Sequence[Mapping[str, Any]]
"""Parts of calls of tools, as `delta.tool_calls` has them."""
Hide = Callable[[str], str]
"""Takes an engine's key out of a text that clients see."""


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """Part of an answer. `tokens_in`, `tokens_out`: of all of it, where this part says so."""

    text: str = ""
    calls: Calls = ()
    finish_reason: str = ""
    tokens_in: int | None = None
    tokens_out: int | None = None


@dataclass(frozen=True, slots=True)
class Vectors:
    """Embeddings of texts [texts, size], and the tokens of these texts where the engine says so."""

    numbers: npt.NDArray[np.float32]
    tokens_in: int | None


class EngineClient:
    """Client of engines. Belongs to one event loop. `key`: of the one engine that it is for."""

    def __init__(self, silence_s: float = SILENCE_S, *, key: KeyFile | None = None) -> None:
        self._silence_s, self._key = silence_s, key
        self._hide: Hide = key.hidden_in if key else str
        self._http = httpx.AsyncClient(
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S, pool=None), trust_env=False, follow_redirects=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=IDLE_S),
            headers={"accept-encoding": "identity"},
        )  # fmt: skip

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def stream(self, target: EngineTarget, asked: Mapping[str, Any]) -> AsyncGenerator[AnswerPart, None]:
        """Pieces of one answer, the last one with its reason. `asked`: `prompt` or `messages`, and parameters.

        Closing it closes its connection, which cancels the request at the engine.

        Raises:
            EngineError: there is no answer, or not all of it.
        """
        path = "/chat/completions" if MESSAGES in asked else "/completions"
        body = {**asked, "model": target.model, "stream": True, "stream_options": {"include_usage": True}}
        chars, begun, ends_s = 0, False, None
        async with self._answer(target, "POST", path, body) as answer:
            kind = answer.headers.get("content-type", "none").partition(";")[0].strip().lower()
            if kind != "text/event-stream":
                why = f"{target.base}{path} answers {kind}, no stream of events: {await _said(answer, self._hide)}"
                raise EngineError(why, "fault", _ADDRESS)
            async with aclosing(events_of(_parts(answer), self._hide)) as events:
                while (event := await _until(ends_s, events)) is not None:
                    piece, begun = piece_of(event, self._hide), True
                    chars += len(piece.text) + sum(len(str(call)) for call in piece.calls)
                    if chars > ANSWER_CHARS_MAX:
                        raise EngineError(f"the engine answers more than {ANSWER_CHARS_MAX} characters", "fault")
                    if piece.finish_reason and ends_s is None:
                        ends_s = asyncio.get_running_loop().time() + END_S
                    yield piece
            if ends_s is None:  # llama.cpp's server may close the connection after it: not for the next request
                await answer.extensions["network_stream"].aclose()
        if not begun:
            why = f"{target.base} aborted the answer: its stream ended without an event"
            raise EngineError(why, "cut", "see its log; llama.cpp's server does so for a prompt beyond its context")
        if ends_s is None:
            why = f"{target.base} aborted the answer: its stream ended without a finish_reason"
            raise EngineError(why, "cut", "try again; llama.cpp's server needs --interrupt_requests false")

    async def embed(self, target: EngineTarget, texts: Sequence[str], dimensions: int | None = None) -> Vectors:
        """Embeddings of texts, of so many dimensions if they are given; raises EngineError.

        Asked for base64, which is a fifth of JSON's numbers; an engine that sends these all the same is taken, too.
        """
        body: dict[str, Any] = {"model": target.model, "input": list(texts), "encoding_format": "base64"}
        body |= {"dimensions": dimensions} if dimensions else {}
        path, data = "/embeddings", bytearray()  # not bytes: they would be copied for each part
        async with self._answer(target, "POST", path, body) as answer:
            async for part in _parts(answer):
                data += part
                if len(data) > VECTORS_BYTES_MAX:
                    raise EngineError(f"{target.base}{path} answers more than {VECTORS_BYTES_MAX} bytes", "fault")
        found = vectors_of(data, len(texts), self._hide)
        if dimensions and found.numbers.shape[1] != dimensions:
            why = f"the engine cuts no vectors, they have {found.numbers.shape[1]} numbers"
            raise EngineError(why, "refused", "leave it out", field="dimensions", value=dimensions)
        return found

    async def probe(self, target: EngineTarget) -> None:
        """Have one token answered, or one text embedded, which alone proves an engine. An engine that is full answers.

        Raises:
            EngineError: it does not.
        """
        try:
            if target.task == EMBED:
                await self.embed(target, (PROBE["prompt"],))
                return
            async with aclosing(self.stream(target, PROBE)) as pieces:
                async for _ in pieces:
                    pass
        except EngineError as error:
            if error.kind != "busy":
                raise

    async def alive(self, target: EngineTarget) -> None:
        """Ask for its base URL: any answer shows that it lives, also that nothing is there; raises EngineError.

        Never for its models: llama.cpp's server cuts the stream that runs for every request to its API.
        """
        try:
            async with self._answer(target, "GET", "", None):
                pass
        except EngineError as error:
            if error.kind in ("unreachable", "lost", "silent"):
                raise

    @asynccontextmanager
    async def _answer(
        self, target: EngineTarget, method: str, path: str, body: Mapping[str, Any] | None
    ) -> AsyncIterator[httpx.Response]:
        """Answer with status 200, to be read; raises EngineError, of its reading too."""
        headers = {"authorization": f"Bearer {self._key.read()}"} if self._key else {}
        data = None if body is None else _sent(body)
        headers |= {} if data is None else {"content-type": "application/json"}
        url = _url(target.base + path)
        if url is None:
            raise EngineError(
                f"failed to connect to {target.base[:SHOWN_CHARS]}: not an engine's address", "unreachable", _ADDRESS
            )
        try:
            async with self._http.stream(method, url, content=data, headers=headers) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise await _refusal(target, path, answer, self._hide, bool(self._key))
                yield answer
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            said = str(error) or f"no connection within {CONNECT_S:g} s"
            raise EngineError(f"failed to connect to {target.base}: {said}", "unreachable", _ADDRESS) from error
        except httpx.TimeoutException as error:
            why = f"{target.base} said nothing for {self._silence_s:g} s"
            raise EngineError(why, "silent", "see its log; then try again") from error
        except httpx.HTTPError as error:
            why = str(error).rstrip(".") or type(error).__name__
            raise EngineError(f"{target.base} ended the connection: {why}", "lost", "see its log") from error


_ADDRESS: Final = "check that the engine runs there and speaks OpenAI's API"


def _sent(body: Mapping[str, Any]) -> bytes:
    """A body as JSON; raises EngineError for what JSON cannot say: NaN, half a pair of surrogates, endless nesting."""
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        remedy = "send Unicode texts and finite numbers, not nested without end"
        raise EngineError(f"the request is not JSON: {error}", "refused", remedy) from error


async def _parts(answer: httpx.Response) -> AsyncGenerator[bytes, None]:
    """Bytes of an answer as they come."""
    number = 0
    async for part in answer.aiter_raw():
        yield part
        number += 1
        if number % AT_ONCE == 0:
            await asyncio.sleep(0)


async def _until(ends_s: float | None, events: AsyncGenerator[Mapping[str, Any], None]) -> Mapping[str, Any] | None:
    """The next event; None: there is none, or not until then."""
    try:
        async with asyncio.timeout_at(ends_s):
            return await anext(events, None)
    except TimeoutError:
        return None


async def _said(answer: httpx.Response, hide: Hide) -> str:
    """The engine's own words in an answer that is none."""
    text = b""
    async for part in _parts(answer):
        text += part
        if len(text) > ERROR_BYTES_MAX:
            break
    return _words(hide(text.decode("utf-8", "replace")))


async def _refusal(target: EngineTarget, path: str, answer: httpx.Response, hide: Hide, keyed: bool) -> EngineError:
    """The error that a status other than 200 is, with the engine's own words."""
    said, status = await _said(answer, hide), answer.status_code
    if status == httpx.codes.TOO_MANY_REQUESTS:
        return EngineError(f"the engine is full, it answers 429: {said}", "busy", "try again later")
    if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        why = f"{target.base}{path} answers {status}: {said}"
        remedy = "put that engine's API key into the file" if keyed else "name a file that holds its API key"
        return EngineError(why, "fault", remedy, field="key_file", value=HIDDEN if keyed else "none")
    if status == httpx.codes.NOT_FOUND:
        why = f"{target.base}{path} answers {status} for model {target.model}: {said}"
        return EngineError(why, "fault", "correct address or model")
    if status in REFUSED:
        return EngineError(said, "refused")
    return EngineError(f"{target.base}{path} answers {status}: {said}", "fault", "see its log")


def _words(text: str) -> str:
    """Words of an error's body: OpenAI's message, FastAPI's detail, else how the text begins."""
    try:
        given = json.loads(text)
        found = given.get("error", given.get("detail", given.get("message", text)))
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError, RecursionError):
        pass  # no JSON: shown as it begins
    return " ".join(text.split())[:SHOWN_CHARS] or "without a word"


def vectors_of(data: bytes | bytearray, texts: int, hide: Hide = str) -> Vectors:
    """Embeddings in the JSON of an answer; raises EngineError."""
    try:
        given = from_json(data)  # numbers in a third of json's time, in which nothing else is served
        rows = sorted(given["data"], key=lambda each: each["index"])
        made = [_vector(each["embedding"]) for each in rows]
        if [each["index"] for each in rows] != list(range(texts)) or len({len(each) for each in made}) != 1:
            raise ValueError(f"{len(rows)} embeddings for {texts} texts, or of several sizes")
        return Vectors(np.stack(made), _count(given.get("usage") or {}, "prompt_tokens"))
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        why = f"the engine answers no embeddings: {error!r:.80}: {_shown(data, hide)}"
        raise EngineError(why, "fault", "check that its model embeds texts, by a pooling") from error


def _vector(given: Any) -> npt.NDArray[np.float32]:
    if isinstance(given, str):
        return np.frombuffer(base64.b64decode(given, validate=True), "<f4")
    numbers = np.asarray(given, np.float32)
    if numbers.ndim != 1:  # llama.cpp's server without a pooling
        raise ValueError("vectors of tokens, not of a text")
    return numbers


async def events_of(parts: AsyncIterator[bytes], hide: Hide = str) -> AsyncGenerator[Mapping[str, Any], None]:
    """Objects of a stream's events, up to its end; raises EngineError for what is not an event."""
    held = bytearray()  # the begin of a line
    async for part in parts:
        held += part
        ended = held.rfind(b"\n", -len(part)) + 1
        lines, held = bytes(held[:ended]).splitlines(), held[ended:] if ended else held
        for number, line in enumerate(lines, 1):
            text = line.removeprefix(DATA).strip()
            if text == DONE:
                return
            if line.startswith(DATA) and text:
                yield _event(text, hide)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        if len(held) > EVENT_BYTES_MAX:
            raise EngineError(f"an event of the engine is longer than {EVENT_BYTES_MAX} bytes", "fault")
    if held.strip() and held.removeprefix(DATA).strip() != DONE:
        raise EngineError(f"the engine ended within an event: {_shown(held, hide)}", "fault", "try again")


def _event(text: bytes, hide: Hide) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"an engine event is not JSON: {_shown(text, hide)}", "fault") from error
    if not isinstance(found, dict):
        raise EngineError(f"an engine event is not an object: {_shown(text, hide)}", "fault")
    if said := found.get("error"):
        code = said.get("code") if isinstance(said, dict) else None  # vLLM: the status that it had been
        why = f"the engine aborted the answer: {_words(hide(text.decode('utf-8', 'replace')))}"
        full = code == httpx.codes.TOO_MANY_REQUESTS
        raise EngineError(why, "refused" if code in REFUSED else "busy" if full else "fault")
    return found


def _shown(text: bytes | bytearray, hide: Hide) -> str:
    return hide(text.decode("utf-8", "replace"))[:SHOWN_CHARS]


def piece_of(event: Mapping[str, Any], hide: Hide = str) -> AnswerPart:
    """AnswerPart of an answer that an event is; raises EngineError."""
    try:
        choice: Mapping[str, Any] = next((one for one in event.get("choices") or () if not one.get("index")), {})
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or ""
        if not isinstance(text, str):
            raise TypeError("its text is not text")
        calls = [_call(at, call) for at, call in enumerate(delta.get("tool_calls") or ())]
        usage = event.get("usage") or {}
        return AnswerPart(
            text, calls, str(choice.get("finish_reason") or ""), _count(usage, "prompt_tokens"),
            _count(usage, "completion_tokens"),
        )  # fmt: skip
    except (AttributeError, TypeError) as error:
        why = f"an engine event is not a completion: {_shown(str(event).encode('utf-8', 'replace'), hide)}"
        raise EngineError(why, "fault") from error


def _call(at: int, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A part of a call of a tool, without what OpenAI's API does not have; raises TypeError, AttributeError."""
    index, function = given.get("index"), given.get("function") or {}
    texts = {name: given[name] for name in ("id", "type") if given.get(name) is not None}
    named = {name: function[name] for name in ("name", "arguments") if function.get(name) is not None}
    if type(index) not in (int, NoneType) or not all(type(one) is str for one in (*texts.values(), *named.values())):
        raise TypeError("a call of a tool has no number, or is not text")
    return {**texts, "index": at if index is None else index, "function": named}


def _count(usage: Mapping[str, Any], name: str) -> int | None:
    count = usage.get(name)
    return count if type(count) is int and count >= 0 else None

"""A scripted engine that speaks OpenAI's API, with the faults of real ones.

Alone: `python -m tests.support.openai_engine PORT [KEY]`.

It embeds a text as [its length, its first letter, 1]; with a key it refuses who has another one, and repeats that. It
answers "w0 w1 ..." up to `max_tokens`, or what a prompt that begins with ! asks for:
    !429 !503 !404 !405 !424 !html another answer than a stream
    !json !chunks !ssh             an error with status 200, chunks that are none, no HTTP
    !half !broken !error !cut      after two words: half an event, no JSON, an error, [DONE] without a reason
    !empty                         a stream of nothing, and then the connection closed, though it may be kept
    !silence !close                after two words: nothing more, the connection is closed
    !deaf                          nothing at all
    !plain                         no usage, as llama.cpp's server
    !null !undone                  usage that is null, no [DONE] after the reason
    !tools !repeat                 calls of its tools, piece by piece; with id and name in each, as llama.cpp's server
    !mad                           calls that are none
    !redirect                      307 to another address
"""

import asyncio
import base64
import json
import struct
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

MODEL = "org/tiny"


@dataclass
class Engine:
    """`bodies`: of all completions. `full`: answers 429. `running`: streams under way. `key`: API key that it asks for.
    `closes_s`: until it closes a connection that serves no more. `too_many`: tokens that it counts and did not make.
    `shown`: keys that clients showed."""

    step_s: float = 0.001
    closes_s: float = 0.0
    too_many: int = 0
    full: bool = False
    key: str = ""
    elsewhere: str = ""
    running: int = 0
    left: int = 0  # streams whose client left before their end
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    address: str = ""
    server: asyncio.Server | None = None
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    def stop(self) -> None:
        """End it as a kill does: nothing listens any more, connections are reset."""
        assert self.server is not None
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        self.writers.add(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().split("\r\n")
                headers = {
                    name.lower(): value.strip() for name, _, value in (each.partition(":") for each in lines[1:])
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.shown.append(headers.get("authorization", "").removeprefix("Bearer "))
                await self._answer(head.split(b" ")[1].decode(), json.loads(body or b"{}"), reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.writers.discard(writer)
            writer.close()

    async def _answer(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.paths.append(path)
        if self.key and self.shown[-1] != self.key:
            _reply(writer, 401, "application/json", f'{{"error": {{"message": "no such key: {self.shown[-1]}"}}}}')
            return
        if path.endswith("embeddings"):
            self._embed(body, writer)
            return
        if not path.endswith("completions"):
            _reply(writer, 200 if path == "/v1/models" else 404, "application/json", '{"data": []}')
            return
        self.bodies.append(body)
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        word = prompt.split(" ")[0]
        if self.full or word == "!429":
            _reply(writer, 429, "application/json", '{"error": {"message": "too many requests"}}')
        elif word == "!404" or body["model"] != MODEL:
            _reply(writer, 404, "application/json", '{"error": {"message": "The model does not exist"}}')
        elif word == "!503":
            _reply(writer, 503, "text/plain", "loading the model")
        elif word in ("!405", "!424"):
            _reply(writer, int(word[1:]), "application/json", '{"detail": "not here"}')
        elif word == "!json":
            _reply(writer, 200, "application/json", '{"error": {"message": "no streams today"}}')
        elif word in NO_HTTP:
            writer.write(NO_HTTP[word])
            await asyncio.sleep(self.closes_s)
            raise ConnectionResetError
        elif word == "!redirect":
            _reply(writer, 307, "text/plain", "", f"location: {self.elsewhere}\r\n")
        elif word == "!html":
            _reply(writer, 200, "text/html", "<html>It works!</html>")
        elif len(prompt) > 1000:
            _reply(writer, 400, "application/json", '{"error": {"message": "the maximum context length is 1000"}}')
        elif word == "!deaf":
            await asyncio.sleep(3600)
        else:
            gone = asyncio.ensure_future(reader.read(1))
            self.running += 1
            try:
                await self._stream(word, body, writer, gone)
            finally:
                self.running -= 1
                gone.cancel()

    def _embed(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.bodies.append(body)
        texts, size = body["input"], body.get("dimensions", 3)
        if self.full or texts[0] == "!429":
            _reply(writer, 429, "application/json", '{"error": {"message": "too many requests"}}')
        elif body["model"] != MODEL or size > 3:
            _reply(writer, 400, "application/json", '{"error": {"message": "no such model, or size"}}')
        elif texts[0] == "!short":
            _reply(writer, 200, "application/json", '{"data": []}')
        elif texts[0] == "!html":
            _reply(writer, 200, "text/html", "<html>It works!</html>")
        else:
            size = 3 if texts[0] == "!whole" else size  # whatever it is asked for, as llama.cpp's server
            rows = [[float(len(text)), float(ord(text[0])), 1.0][:size] for text in texts]
            data = [{"index": at, "embedding": _coded(row, texts[at])} for at, row in enumerate(rows)]
            answer = {"data": data[::-1], "usage": {"prompt_tokens": sum(map(len, texts))}}
            _reply(writer, 200, "application/json", json.dumps(answer))

    async def _stream(
        self, word: str, body: dict[str, Any], writer: asyncio.StreamWriter, gone: "asyncio.Future[bytes]"
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nconnection: close\r\n\r\n")
        chat, most, reason = "messages" in body, body.get("max_tokens", 8), "length"
        if word in ("!tools", "!repeat", "!mad"):
            most, reason = 0, "tool_calls"
            mad = ({"tool_calls": [{"function": {"name": 5}}]},)
            for delta in mad if word == "!mad" else _calls(body["tools"], word == "!repeat"):
                _event(writer, {"choices": [{"index": 0, "finish_reason": None, "delta": delta}]})
        for at in range(most):
            if gone.done():
                self.left += 1
                raise ConnectionResetError
            text = f"w{at} "
            part = {"delta": {"content": text}} if chat else {"text": text}
            _event(writer, {"choices": [{"index": 0, "finish_reason": None, **part}]})
            await writer.drain()
            await asyncio.sleep(self.step_s)
            if at == 1 and word in FAULTS:
                writer.write(FAULTS[word])
                await writer.drain()
                if word == "!silence":
                    await gone
                raise ConnectionResetError
        _event(
            writer, {"choices": [{"index": 0, "finish_reason": reason, **({"delta": {}} if chat else {"text": ""})}]}
        )
        if word != "!plain" and body.get("stream_options", {}).get("include_usage"):
            usage = None if word == "!null" else {"prompt_tokens": 7, "completion_tokens": most + self.too_many}
            _event(writer, {"choices": [], "usage": usage})
        writer.write(b"" if word == "!undone" else b"data: [DONE]\n\n")
        await writer.drain()
        raise ConnectionResetError  # the end of the connection ends the stream


NO_HTTP = {
    "!chunks": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\nzz\r\ndata",
    "!ssh": b"SSH-2.0-OpenSSH_9.2p1\r\n",
    "!empty": b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 0\r\n\r\n",
}
FAULTS = {
    "!half": b'data: {"choices": [{"index": 0, "te',
    "!broken": b"data: {choices}\n\n",
    "!error": b'data: {"error": {"message": "the engine core died"}}\n\n',
    "!cut": b"data: [DONE]\n\n",
    "!silence": b": ping\n\n",
    "!close": b"",
}


def _calls(tools: list[Any], repeat: bool) -> Iterator[dict[str, Any]]:
    """Deltas with one call of each tool, as vLLM has them: the name first, then its arguments."""
    yield {"role": "assistant", "content": ""}
    for at, tool in enumerate(tools):
        name = tool["function"]["name"]
        first = {"index": at, "id": f"call-{at}", "type": "function", "function": {"name": name, "arguments": ""}}
        yield {"tool_calls": [first]}
        for text in ('{"of": ', f'"{name}"', "}"):
            function = {"name": name, "arguments": text} if repeat else {"arguments": text}
            yield {"tool_calls": [{**(first if repeat else {}), "index": at, "function": function}]}


def _event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _coded(row: list[float], text: str) -> Any:
    """A vector in base64; as numbers for "!numbers", as engines do that know no other form."""
    return row if text == "!numbers" else base64.b64encode(struct.pack(f"<{len(row)}f", *row)).decode()


def _reply(writer: asyncio.StreamWriter, status: int, kind: str, text: str, more: str = "") -> None:
    head = f"HTTP/1.1 {status} X\r\ncontent-type: {kind}\r\n{more}content-length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text.encode())


@asynccontextmanager
async def serving(port: int = 0, **settings: Any) -> AsyncIterator[Engine]:
    """An engine in this process, on loopback."""
    engine = Engine(**settings)
    engine.server = server = await asyncio.start_server(engine.serve, "127.0.0.1", port)
    engine.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield engine
    finally:
        server.close()


async def _main(port: int, key: str) -> None:
    async with serving(port, key=key):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), *sys.argv[2:] or [""]))

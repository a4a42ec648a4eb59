"""Drive one slice's Triton with streams: so many at once, each an answer of the family's mean length.

A point of b streams is what a row of the profile says of a batch of b: the time of an answer of `tokens_mean` tokens
next to b - 1 others. Prompts are those of the family's heldout.json (a list of texts, or of [prompt, answer]), else
PROMPT_WORDS made-up words. Each made-up prompt begins differently, so that no engine answers it from its prefix cache.
Engines that can are set to go on to the last token. Answers that end before are scaled to the mean length by their time
per token.
"""

import json
from itertools import count
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2

from trefoil.core.catalog import Family
from trefoil.core.errors import CatalogError, InvalidInput, Unavailable
from trefoil.core.units import MS_PER_S
from trefoil.profiler.triton_load import TritonSlice, Window
from trefoil.runtime.clock import Clock
from trefoil.runtime.given.llm_backends import TOKENS_OUT, api_of, stream_inputs
from trefoil.runtime.given.repository_names import CONFIG_BYTES_MAX, read_text
from trefoil.runtime.security.tls import Tls

PROMPT_WORDS: Final = 128
WORDS: Final = ("tell", "me", "how", "the", "river", "finds", "its", "way", "to", "sea")
ANSWER_TIMEOUT_S: Final = 600.0
HELD_OUT: Final = "heldout.json"


class StreamSlice(TritonSlice):
    """Client of one slice's Triton that measures a generative family."""

    def __init__(
        self, target: str, family: Family, folder: Path, clock: Clock, tls: Tls | None = None, name: str = ""
    ) -> None:
        """Raises CatalogError: the family's held-out prompts are malformed."""
        super().__init__(target, family.name, clock, {}, folder, tls, name)
        self._tokens = family.tokens_mean
        self._prompts, self._number = held_out(folder / HELD_OUT), count()
        self.ttft_ms: list[float] = []
        self.tpot_ms: list[float] = []
        self.failure = ""  # what the last answer that failed said

    async def make_request(self, version: int, batch: int) -> Any:
        """Make a request of one stream by the API that the model speaks; its prompt is put in when it is sent.

        Raises:
            InvalidInput: it speaks none, or decodes fewer streams at once.
        """
        asked = service_pb2.ModelConfigRequest(name=self.model, version=str(version))
        try:
            config = (await self._stub.ModelConfig(asked, timeout=5)).config
        except grpc.aio.AioRpcError as error:
            raise InvalidInput(f"is not served ({error.details()})", field="version", value=version) from error
        refuse_streams(config, batch)
        request = service_pb2.ModelInferRequest(model_name=self.model, model_version=str(version))
        tokens = max(2, round(self._tokens))
        shape = [1, 1] if config.max_batch_size else [1]
        for name, value in stream_inputs(config, b"", tokens, ignore_eos=True, temperature=0.0).items():
            kind = "BYTES" if isinstance(value, bytes) else "BOOL" if isinstance(value, bool) else "INT32"
            request.inputs.add(name=name, datatype=kind, shape=shape)
            raw = _text(value) if isinstance(value, bytes) else bytes([value]) if kind == "BOOL" else _int(value)
            request.raw_input_contents.append(raw)
        request.parameters["triton_enable_empty_final_response"].bool_param = True
        return request

    async def warm_up(self, request: Any) -> None:
        """Have one stream answered that is not counted.

        Raises:
            Unavailable: it fails; says what it said.
        """
        window = Window(0.0, 0.0, 1)
        await self._infer(request, window)
        if window.failed:
            name = f"{request.model_name}/{request.model_version}"
            raise Unavailable(f"does not answer: {self.failure}", field="model", value=name)

    async def streams(self, request: Any, at_once: int, seconds: float) -> Window:
        """Keep so many streams under way for so many seconds, and let each end."""
        self.ttft_ms, self.tpot_ms = [], []
        return await self.closed_loop(request, at_once, seconds, at_once)

    async def _infer(self, request: Any, window: Window, since_s: float | None = None) -> None:
        number = next(self._number)
        own = service_pb2.ModelInferRequest()
        own.CopyFrom(request)
        own.raw_input_contents[0] = _text(self._prompt(number))
        began_s = self._clock.monotonic_s() if since_s is None else since_s
        try:
            first_s, last_s, tokens = await self._stream(own)
        except (grpc.aio.AioRpcError, Unavailable, TimeoutError) as error:
            self.failure = str(error.details() if isinstance(error, grpc.aio.AioRpcError) else error)
            window.failed += 1
            await self._clock.sleep(0.01)
            return
        if tokens < 2:  # says nothing of the time of a token
            return
        token_s = (last_s - first_s) / (tokens - 1)
        self.ttft_ms.append((first_s - began_s) * MS_PER_S)
        self.tpot_ms.append(token_s * MS_PER_S)
        window.latency_ms.append((first_s - began_s + token_s * (self._tokens - 1)) * MS_PER_S)

    async def _stream(self, request: Any) -> tuple[float, float, int]:
        """When the first and the last token of an answer came, and how many there were; raises Unavailable."""
        call = self._stub.ModelStreamInfer(timeout=ANSWER_TIMEOUT_S)
        first_s, last_s, tokens = 0.0, 0.0, 0
        try:
            await call.write(request)
            await call.done_writing()
            while (answer := await call.read()) is not grpc.aio.EOF:
                if answer.error_message:
                    raise Unavailable(answer.error_message)
                if answer.infer_response.outputs:
                    last_s = self._clock.monotonic_s()
                    first_s = first_s or last_s
                    tokens += _tokens_in(answer.infer_response)
        finally:
            call.cancel()
        return first_s, last_s, tokens

    def _prompt(self, number: int) -> bytes:
        if self._prompts:
            return self._prompts[number % len(self._prompts)].encode()
        return " ".join([str(number), *(WORDS[i % len(WORDS)] for i in range(PROMPT_WORDS - 1))]).encode()


def refuse_streams(config: model_config_pb2.ModelConfig, streams: int) -> None:
    """Refuse a model that speaks no API of generative families, or decodes fewer streams at once.

    Raises:
        InvalidInput: naming the model.
    """
    if not api_of(config):
        remedy = "write its profile by hand, as model_repository/pydoc/make_profile.py does"
        raise InvalidInput("speaks no API of language models", field="family", value=config.name, remedy=remedy)
    if 0 < config.max_batch_size < streams:
        why = f"{config.name} decodes {config.max_batch_size} streams at once"
        raise InvalidInput(why, field="--batches", value=streams, remedy="ask for fewer")


def held_out(path: Path) -> tuple[str, ...]:
    """Prompts of a family's heldout.json; none where there is no such file.

    Raises:
        CatalogError: it is not a list of texts, or of lists that begin with one.
    """
    if not path.is_file():
        return ()
    try:
        rows = json.loads(read_text(path, path.parent.resolve(), 16 * CONFIG_BYTES_MAX))
        found = tuple(row if isinstance(row, str) else row[0] for row in rows)
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise CatalogError(f"{path} is not a list of prompts: {error}", remedy='write ["a prompt", ...]') from error
    if not found or not all(isinstance(prompt, str) and prompt for prompt in found):
        raise CatalogError(f"{path} is not a list of prompts", remedy='write ["a prompt", ...]')
    return found


def _text(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def _int(value: int) -> bytes:
    return value.to_bytes(4, "little")


def _tokens_in(response: Any) -> int:
    """Tokens of one answer: as the engine counts them, else one."""
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == TOKENS_OUT:
            return int(np.frombuffer(raw, "<u4").sum())
    return 1

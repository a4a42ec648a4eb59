"""Answers to OpenAI's embeddings: texts by as many as the family takes at once, their vectors together.

A request holds one credit at a time, so that one with thousands of texts leaves the other slices to others.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.openai import vectors
from dispatcher.fronts.openai.bodies import AskedVectors
from dispatcher.fronts.openai.engines import BYTES_PER_TOKEN, PROMPT_ESTIMATED
from dispatcher.fronts.rest import codec
from dispatcher.fronts.rest.codec_process import ProcessOf, here_or_there
from dispatcher.fronts.rest.generate_codec import PARAMETERS, encode
from dispatcher.request.admission import Caller
from dispatcher.request.contracts import Contract
from dispatcher.request.decoupled import engine_count
from dispatcher.request.inference import Inference
from dispatcher.routing.core.receipts import CARBON, ENERGY, SLICE
from trefoil.core.errors import InvalidInput, TrefoilError
from trefoil.runtime.given.llm_backends import DIMENSIONS, EMBEDDING, PROMPT, TOKENS_IN, embeds

JSON_BYTES, BASE64_BYTES = 20, 6
"""Of one number, rounded up."""
OPEN_BATCH: Final = 64
"""Texts of one request to a family whose text_input is of any length."""


class Embeddings:
    """Answers requests for embeddings. Belongs to one event loop. `process`: codec of large answers by bytes."""

    def __init__(self, inference: Inference, process: ProcessOf) -> None:
        self._inference, self._process = inference, process

    async def answer(self, contract: Contract, asked: AskedVectors, caller: Caller) -> tuple[bytes, Mapping[str, Any]]:
        """JSON of the answer, and its receipt.

        Raises:
            InvalidInput: the family makes no embeddings, or none of that size.
            StatusError, TrefoilError: it failed.
        """
        check_embeds(contract, asked.model)
        size, cuts = _size(contract, asked)
        found, tokens, receipt = list[npt.NDArray[np.float32]](), list[int | None](), dict[str, Any]()
        at_once = _at_once(contract)
        for at in range(0, len(asked.texts), at_once):
            texts = list(asked.texts[at : at + at_once])
            sizes = {DIMENSIONS: [asked.dimensions] * (len(texts) if contract.batches else 1)} if cuts else {}
            given = {PROMPT: texts, **sizes, PARAMETERS: dict(asked.parameters)}
            data = encode(given, contract.metadata, asked.model)
            answer = pb.ModelInferResponse.FromString((await self._inference.answer(data, caller)).data)
            found.append(_vectors(answer, len(texts)))
            tokens.append(engine_count(answer, TOKENS_IN))
            receipt = _receipt(answer, receipt)
        if len({each.shape[1] for each in found}) > 1:
            raise TrefoilError(f"variants of {asked.model} make vectors of different sizes", remedy="see the family")
        whole = np.concatenate(found)
        whole = vectors.cut(whole, size) if size and size < whole.shape[1] else whole
        written = await self._written(whole, asked, caller.flow[0])
        usage = codec.dumps(_usage(asked, tokens))
        extra = b',"trefoil":' + codec.dumps(receipt) if receipt else b""
        model = codec.dumps(asked.model)
        return b'{"object":"list","data":%b,"model":%b,"usage":%b%b}' % (written, model, usage, extra), receipt

    async def _written(self, whole: npt.NDArray[np.float32], asked: AskedVectors, line: str) -> bytes:
        raw, size = np.ascontiguousarray(whole, "<f4").tobytes(), whole.shape[1]
        count = whole.size * (BASE64_BYTES if asked.as_base64 else JSON_BYTES)
        return await here_or_there(self._process, count, line, vectors.written, raw, size, asked.as_base64)


def check_embeds(contract: Contract, model: str) -> None:
    """Raise InvalidInput for a family that makes no embeddings."""
    if not embeds(contract.config.config):
        remedy = f"ask a family with input {PROMPT} and output {EMBEDDING}: GET /v1/models"
        raise InvalidInput("makes no embeddings", field="model", value=model, remedy=remedy)


def _at_once(contract: Contract) -> int:
    """Most texts of one request to the family."""
    if contract.batches:
        return contract.items_max
    [tensor] = [tensor for tensor in contract.metadata.inputs if tensor.name == PROMPT]
    return OPEN_BATCH if -1 in tensor.shape else 1


def _size(contract: Contract, asked: AskedVectors) -> tuple[int, bool]:
    """Size that vectors are cut to here (0: they are not), and whether the family cuts them itself."""
    if asked.dimensions is None:
        return 0, False
    config = contract.config.config
    if any(tensor.name == DIMENSIONS for tensor in config.input):
        return 0, True
    [tensor] = [tensor for tensor in config.output if tensor.name == EMBEDDING]
    stated = config.parameters[DIMENSIONS].string_value if DIMENSIONS in config.parameters else ""
    sizes = [int(one) for one in stated.split(",") if one.strip().isdecimal()]
    sizes += [size for size in tensor.dims[-1:] if size > 0]
    if asked.dimensions not in sizes:
        remedy = f"leave it out{', or send ' + ' or '.join(map(str, sizes)) if sizes else ''}"
        why = f"{asked.model} has no vectors of that size"
        raise InvalidInput(why, field=DIMENSIONS, value=asked.dimensions, remedy=remedy)
    return asked.dimensions, False


def _vectors(answer: Any, texts: int) -> npt.NDArray[np.float32]:
    """Vectors of an answer [texts, size]; raises TrefoilError where it is none."""
    for at, output in enumerate(answer.outputs):
        raw = answer.raw_output_contents[at] if at < len(answer.raw_output_contents) else b""
        if output.name == EMBEDDING and output.datatype == "FP32" and raw and not len(raw) % (4 * texts):
            return np.frombuffer(raw, "<f4").reshape(texts, -1)
    shapes = {output.name: list(output.shape) for output in answer.outputs}
    raise TrefoilError(f"the model answers {texts} texts with {shapes}", field=EMBEDDING, remedy="see the model")


def _receipt(answer: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """Receipt of all requests so far: energy and carbon are sums, which are known where all of them are."""
    found = {name: codec.parameter_value(each) for name, each in answer.parameters.items()}
    if SLICE not in found:
        return {}
    found = {name: value for name, value in found.items() if name.startswith("trefoil_")}
    for name in (ENERGY, CARBON) if before else ():
        both = before.get(name), found.pop(name, None)
        if both[0] is not None and both[1] is not None:
            found[name] = both[0] + both[1]
    return found


def _usage(asked: AskedVectors, tokens: list[int | None]) -> dict[str, Any]:
    """Tokens by what the model says, else an estimate that is named."""
    known = [count for count in tokens if count is not None]
    if len(known) == len(tokens):
        return {"prompt_tokens": sum(known), "total_tokens": sum(known)}
    count = sum(math.ceil(len(text.encode("utf-8", "replace")) / BYTES_PER_TOKEN) for text in asked.texts)
    return {"prompt_tokens": count, "total_tokens": count, "trefoil_estimated": PROMPT_ESTIMATED}

"""The family pydoc in tests: its prompts, what the model alone answers, and streams to a Triton or a dispatcher."""

import json
import subprocess
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.triton_process import ENVIRONMENT, MODELS
from trefoil.core.fleet import Hosted

FAMILY = "pydoc"
NAMES = ("pydoc-xs", "pydoc-s", "pydoc-m", "pydoc-l")
PLACES = 8  # streams that a slice decodes together
ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1] + "/_shared")
from decoding import Decoder
decoder = Decoder(f"{sys.argv[1]}/pydoc/{sys.argv[2]}/model.onnx", 1)
asked = json.load(sys.stdin)
print(json.dumps([[token.hex() for token in decoder.answer(prompt.encode(), most)] for prompt, most in asked]))
"""


def hosted(version: int) -> Hosted:
    return Hosted(FAMILY, NAMES[version - 1], version, 0, 1, 1, PLACES)


@cache
def prompts() -> tuple[str, ...]:
    """Signatures that were never trained on."""
    return tuple(prompt for prompt, _ in json.loads((MODELS / FAMILY / "heldout.json").read_text()))


def alone(asked: Sequence[tuple[str, int | None]], version: int) -> list[list[bytes]]:
    """Tokens of each prompt, with the most it may have, by onnxruntime itself, one stream at a time."""
    done = subprocess.run(
        [str(ENVIRONMENT / "bin" / "python3"), "-c", ALONE, str(MODELS), str(version)],
        input=json.dumps(list(asked)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [[bytes.fromhex(token) for token in answer] for answer in json.loads(done.stdout)]


def request(prompt: str | bytes, most: int | None = None, id_: str = "", **parameters: bool) -> Any:
    """A ModelInferRequest of one prompt; most tokens. Its empty final response is asked for."""
    text = prompt.encode() if isinstance(prompt, str) else prompt
    made = pb.ModelInferRequest(model_name=FAMILY, id=id_)
    made.inputs.add(name="PROMPT", datatype="BYTES", shape=[1, 1])
    made.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
    if most is not None:
        made.inputs.add(name="MAX_TOKENS", datatype="INT32", shape=[1, 1])
        made.raw_input_contents.append(np.int32(most).tobytes())
    for name, value in {"triton_enable_empty_final_response": True, **parameters}.items():
        made.parameters[name].bool_param = value
    return made


@dataclass
class Told:
    """What came of one request."""

    tokens: list[bytes] = field(default_factory=list)
    error: str = ""
    final: Any = None  # the final response's parameters

    @property
    def text(self) -> str:
        return b"".join(self.tokens).decode(errors="replace")


def token(answer: Any) -> bytes | None:
    """The token of a ModelStreamInferResponse."""
    raw = answer.infer_response.raw_output_contents
    return bytes(raw[0][4:]) if raw else None


def connection(address: str) -> grpc.aio.Channel:
    """A connection that no other channel shares."""
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


Target = str | grpc.aio.Channel  # an address: a separate connection


async def answers(target: Target, asked: Any, timeout_s: float = 60.0, **metadata: str) -> AsyncIterator[Any]:
    """The answers of one request on a separate stream. Leaving the loop cancels it."""
    async with AsyncExitStack() as opened:
        channel = await opened.enter_async_context(connection(target)) if isinstance(target, str) else target
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        call = stub.ModelStreamInfer(timeout=timeout_s, metadata=tuple(metadata.items()))
        try:
            await call.write(asked)
            await call.done_writing()
            while (answer := await call.read()) is not grpc.aio.EOF:
                yield answer
            code, details = await call.code(), await call.details()
            assert code is grpc.StatusCode.OK, f"{code.name} {details}"
        finally:
            call.cancel()


async def ask(target: Target, asked: Any, timeout_s: float = 60.0, **metadata: str) -> Told:
    """All of one request."""
    told = Told()
    async for answer in answers(target, asked, timeout_s, **metadata):
        if answer.error_message:
            told.error = answer.error_message
        elif (made := token(answer)) is not None:
            told.tokens.append(made)
        if answer.infer_response.parameters["triton_final_response"].bool_param:
            told.final = {
                name: getattr(value, value.WhichOneof("parameter_choice"))
                for name, value in answer.infer_response.parameters.items()
            }
    return told

"""Triton's generate extension: /generate and /generate_stream (docs/protocol/extension_generate.md, http_server.cc).

A key of the JSON object is an input of the model, or else a parameter; so are those of its member `parameters`. An
answer is one object: id, model, parameters and outputs by name; an output of one element stands without its list.
"""

from collections.abc import Mapping
from typing import Any, Final

from tritonclient.grpc import service_pb2 as pb

from dispatcher.fronts.grpc.server import Fronts
from dispatcher.fronts.rest import codec, json_text, tensors
from dispatcher.fronts.rest.calls import EventStream, HttpReply, HttpRequest, error_body, while_there
from dispatcher.request.admission import Caller, StatusError
from dispatcher.request.contracts import Contract
from dispatcher.routing.core.receipts import SLICE
from dispatcher.transport.core import kserve_wire
from trefoil.core.errors import InvalidInput

NOT_ONE: Final = "generate expects model to produce exactly 1 response"
PARAMETERS: Final = "parameters"


class Generate:
    """Generate extension of the REST port. Belongs to one event loop."""

    def __init__(self, fronts: Fronts) -> None:
        self._contracts, self._streams = fronts.contracts, fronts.streams

    async def reply(
        self, ask: HttpRequest, caller: Caller, body: bytes, model: str, version: str, one: bool
    ) -> HttpReply | None:
        """Reply with the `one` answer that there must be, or with an event for each; None: they have been sent.

        Raises:
            TrefoilError, StatusError, ClientDisconnected: before the first event.
        """
        contract = await self._contracts.fetch(model)
        data = encode(json_text.parse(body), contract, model, version)
        answering = self._one(model, data, caller) if one else self._events(ask, model, data, caller)
        reply: HttpReply | None = await while_there(ask.receive, answering)
        return reply

    async def _one(self, model: str, data: bytes, caller: Caller) -> HttpReply:
        found: dict[str, Any] = {}
        answers = 0

        async def take(answer: Any) -> None:
            nonlocal answers
            answers += not ends(answer)
            if answers > 1:
                raise InvalidInput(NOT_ONE, remedy="ask generate_stream, which brings any number of responses")
            if tells(answer):
                found.update(decode(answer))

        await self._streams.answer(model, data, caller, take)
        if not answers:
            raise InvalidInput(f"{NOT_ONE}, and it gave none", remedy="ask generate_stream")
        return HttpReply(200, codec.dumps(found))

    async def _events(self, ask: HttpRequest, model: str, data: bytes, caller: Caller) -> None:
        events = EventStream(ask.send)

        async def take(answer: Any) -> None:
            if tells(answer):
                await events.event(codec.dumps(decode(answer)))

        try:
            await self._streams.answer(model, data, caller, take)
        except StatusError as refused:
            if not events.started:
                raise
            await events.event(error_body(refused.details))
        await events.end()


def encode(given: Mapping[str, Any], contract: Contract, model: str, version: str = "") -> bytes:
    """Encode a JSON object as the bytes of a ModelInferRequest for a model with this contract.

    Raises:
        InvalidInput: naming the key.
    """
    message = pb.ModelInferRequest(model_name=model, model_version=version)
    inputs = {tensor.name: tensor for tensor in contract.metadata.inputs}
    if PARAMETERS in inputs:
        raise InvalidInput(
            "keyword for nested schema also given as input tensor name", field=PARAMETERS, remedy="use /infer"
        )
    try:
        message.id = codec.member(given, "id", str, "request", "")
        rest = {name: value for name, value in given.items() if name not in ("id", PARAMETERS)}
        for values in (rest, codec.member(given, PARAMETERS, dict, "request", {})):
            for name, value in values.items():
                if name in inputs:
                    _add(message, inputs[name], value)
            codec.set_parameters(message, {name: value for name, value in values.items() if name not in inputs})
        return bytes(message.SerializeToString())
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a text is not Unicode ({error.reason})", remedy="send UTF-8") from error


def _add(message: Any, tensor: Any, value: Any) -> None:
    """Add an input: elements fill fixed sizes, what is left goes to the innermost open one."""
    elements = value if type(value) is list else [value]
    left, odd = len(elements), 0
    for size in tensor.shape:
        if size >= 0 and not odd:
            left, odd = divmod(left, size) if size else (0, 1)
    shape = []
    for size in reversed(tensor.shape):
        shape.append(left if size < 0 else size)
        left = 1 if size < 0 else left
    if odd or left != 1:
        raise InvalidInput(
            f"{len(elements)} elements do not fill the shape {list(tensor.shape)}", field=tensor.name,
            remedy="send one value, or a list of as many as the shape has (-1 = any number)",
        )  # fmt: skip
    raw = tensors.to_bytes(tensor.name, tensor.datatype, shape[::-1], elements)
    message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape[::-1])
    message.raw_input_contents.append(raw)


def decode(answer: Any) -> dict[str, Any]:
    """Decode a ModelInferResponse; texts that are not UTF-8 keep their bytes as lone surrogates."""
    found = {name: codec.parameter_value(each) for name, each in answer.parameters.items()}
    found.pop(kserve_wire.IS_FINAL, None)
    for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        elements = tensors.from_bytes(tensor.name, tensor.datatype, tensor.shape, raw)
        found[tensor.name] = elements[0] if len(elements) == 1 else elements
    found |= {"model_name": answer.model_name, "model_version": answer.model_version}
    if answer.id:
        found["id"] = answer.id
    return dict(sorted(found.items()))


def tells(answer: Any) -> bool:
    """Whether a response says more than that a stream ends: outputs, or a receipt."""
    return SLICE in answer.parameters or not ends(answer)


def ends(answer: Any) -> bool:
    """Whether a response only ends a stream."""
    return not answer.outputs and kserve_wire.IS_FINAL in answer.parameters

"""Requests of the stages of a family that is split: what one stage answers is what the next one is asked.

A stage's outputs are the next one's inputs, under their names. All stages get the id and the parameters of the client's
request. The last one gets the outputs that the client wants.
"""

from typing import Any

from tritonclient.grpc import service_pb2 as pb


def first_request(data: bytes, model: str) -> tuple[bytes, Any]:
    """Request of the first stage by a client's, and of that what the others need."""
    request = pb.ModelInferRequest.FromString(data)
    kept = pb.ModelInferRequest(id=request.id, outputs=request.outputs)
    for name, parameter in request.parameters.items():
        kept.parameters[name].CopyFrom(parameter)
    request.model_name = model
    request.ClearField("outputs")
    return bytes(request.SerializeToString()), kept


def next_request(kept: Any, answer: bytes, model: str, *, last: bool) -> bytes:
    """Request of a stage by the answer of the one before."""
    told, request = pb.ModelInferResponse.FromString(answer), pb.ModelInferRequest()
    request.CopyFrom(kept)
    request.model_name = model
    if not last:
        request.ClearField("outputs")
    for tensor in told.outputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    request.raw_input_contents.extend(told.raw_output_contents)
    return bytes(request.SerializeToString())

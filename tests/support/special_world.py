"""A dispatcher in front of real Tritons with special models, and requests for them."""

import contextlib
from collections.abc import AsyncIterator

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.support.dispatching import Plane, Running, dispatching, until
from tests.support.special_models import SpecialTriton, special_node, special_plan
from tests.unit.dispatcher.worlds import key

START_FLAG = "must specify the START flag on the first request of the sequence"


class World:
    def __init__(self, running: Running, plane: Plane, tritons: list[SpecialTriton]) -> None:
        self.running, self.plane, self.tritons = running, plane, tritons
        self.address = running.address
        self.plans = 0

    @property
    def local(self):
        return self.running.local

    async def serve(self, credits: int = 4, draining=()):
        self.plans += 1
        await self.plane.node(special_node(self.tritons))
        made = special_plan(self.tritons, self.plans, credits, draining)
        await self.plane.plan(made)
        await until(lambda: self.local.routing.table.revision == made.revision)
        names = {name for triton in self.tritons for name in triton.names}
        await until(lambda: all(self.running.contracts.known(name) for name in names))

    def open_on(self, number: int) -> int:
        return sum(load.open_sequences for load in self.local.routing.loads() if load.slice == key(number))

    @property
    def idle(self) -> bool:
        return not self.local.routing.in_flight() and not any(
            pump.waiting for pump in self.local.routing.queues.values()
        )


@contextlib.asynccontextmanager
async def serving(state, folder, tritons, credits: int = 4, **settings) -> AsyncIterator[World]:
    async with dispatching(state, folder, **settings) as running:
        world = World(running, Plane(state), tritons)
        await world.serve(credits)
        yield world


def number(module, name: str, value: int):
    tensor = module.InferInput(name, [1, 1], "INT32")
    tensor.set_data_from_numpy(np.array([[value]], np.int32))
    return tensor


def raw(model: str, id_: str, parameters=(), **values: int):
    """A ModelInferRequest of int32 scalars."""
    request = pb.ModelInferRequest(model_name=model, id=id_)
    for name, value in values.items():
        request.inputs.add(name=name, datatype="INT32", shape=[1, 1])
        request.raw_input_contents.append(np.int32(value).tobytes())
    for name, value in dict(parameters).items():
        setattr(request.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    return request


def item(result, name: str) -> int:
    return int(result.as_numpy(name).ravel()[0])


def in_sequence(id_: int, start: bool = False, end: bool = False) -> dict:
    return {"sequence_id": id_, "sequence_start": start, "sequence_end": end}

"""A dispatcher in front of real Tritons with special models, and requests for them."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from tests.support.dispatching import DispatcherSystem, dispatching, until
from tests.support.special_models import SpecialTriton, special_node, special_plan
from tests.unit.dispatcher.worlds import key
from trefoil.runtime.state import State

START_FLAG = "must specify the START flag on the first request of the sequence"


class World(DispatcherSystem):
    """Its slices are Tritons with special models."""

    async def serve_special(self, credits: int = 4, draining: Sequence[int] = ()) -> None:
        """Publish all Tritons and a route for each model; wait until the dispatcher knows the contracts of all."""
        made = special_plan(self.slices, self.number + 1, credits, draining)
        await self.publish(special_node(self.slices), made.routes)
        names = {name for triton in self.slices for name in triton.names}
        await until(lambda: all(self.running.contracts.known(name) for name in names))

    def open_on(self, number: int) -> int:
        return sum(load.open_sequences for load in self.local.routing.loads() if load.slice == key(number))

    @property
    def idle(self) -> bool:
        return not self.local.routing.in_flight() and not any(
            pump.waiting for pump in self.local.routing.queues.values()
        )


@contextlib.asynccontextmanager
async def serving(
    state: State, folder: Path, tritons: Sequence[SpecialTriton], credits: int = 4, **settings: Any
) -> AsyncIterator[World]:
    async with dispatching(state, folder, **settings) as running:
        world = World(running, state, tritons)
        await world.serve_special(credits)
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

"""A full queue next to real clients: a request of the flood is pushed out, and others are taken, on each front."""

import asyncio

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as rest
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import Plane, dispatching, image, until
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import node, plan, route, status, target

pytestmark = pytest.mark.integration
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
WAITING_MAX = 4


def client_of(running) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(running.address, channel_args=OWN_CONNECTION)


@pytest.fixture
async def world(state, tmp_path):
    async with FakeTriton(version=4) as slice_, dispatching(state, tmp_path, rest_address="127.0.0.1:0") as running:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0, credits=1)], requests_max=WAITING_MAX)]))
        await until(lambda: running.local.routing.table.live("digits"))
        yield slice_, running


async def _flood(slice_, running, client) -> list[asyncio.Task]:
    """One request on the slice, and as many as may wait."""
    slice_.gate.clear()
    asked = [asyncio.create_task(client.infer("digits", [image(3)])) for _ in range(1 + WAITING_MAX)]
    await until(lambda: running.local.routing.queues["digits"].waiting == WAITING_MAX)
    return asked


async def _ends(slice_, asked, light) -> None:
    await until(lambda: any(task.done() for task in asked))
    assert sum(task.done() for task in asked) == 1
    assert not light.done()
    slice_.gate.set()
    results = await asyncio.gather(*asked, return_exceptions=True)
    [refused] = [each for each in results if isinstance(each, Exception)]
    assert isinstance(refused, InferenceServerException)
    assert refused.status() == "StatusCode.RESOURCE_EXHAUSTED"
    assert "its client has most of what waits" in str(refused)


async def test_another_connection_takes_the_place_of_the_newest_of_a_flood(world):
    slice_, running = world
    async with client_of(running) as flooding, client_of(running) as other:
        asked = await _flood(slice_, running, flooding)
        with pytest.raises(InferenceServerException, match="holds 4 requests, limit 4"):
            await flooding.infer("digits", [image(3)])
        light = asyncio.create_task(other.infer("digits", [image(5)]))
        await _ends(slice_, asked, light)
        assert (await light).as_numpy("PROBABILITIES").argmax() == 5
        assert slice_.requests[2].raw_input_contents[0][0] == 5, "its turn comes after one of the flood"


async def test_a_connection_of_rest_is_as_good_as_one_of_grpc(world):
    slice_, running = world
    given = rest.InferInput("IMAGE", [1, 8, 8], "UINT8")
    given.set_data_from_numpy(np.full((1, 8, 8), 7, np.uint8))
    async with client_of(running) as flooding, rest.InferenceServerClient(running.rest_address) as other:
        asked = await _flood(slice_, running, flooding)
        light = asyncio.create_task(other.infer("digits", [given]))
        await _ends(slice_, asked, light)
        assert (await light).as_numpy("PROBABILITIES").argmax() == 7

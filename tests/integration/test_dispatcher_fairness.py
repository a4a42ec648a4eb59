"""A full queue next to real clients: a request of the flood is pushed out, and others are taken, on each front."""

import asyncio
import contextlib
from collections import Counter

import numpy as np
import pytest
import tritonclient.grpc.aio as triton
import tritonclient.http.aio as rest
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import dispatcher_system, image, until
from tests.support.fake_triton import FakeTriton

pytestmark = pytest.mark.integration
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
WAITING_MAX = 4


def client_of(running) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(running.address, channel_args=OWN_CONNECTION)


@pytest.fixture
async def system(state, tmp_path):
    slice_ = FakeTriton(version=4)
    async with dispatcher_system(state, tmp_path, slice_, serve=False, rest_address="127.0.0.1:0") as made:
        await made.serve(credits=1, requests_max=WAITING_MAX)
        yield made


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


async def test_another_connection_takes_the_place_of_the_newest_of_a_flood(system):
    slice_, running = system.slice, system.running
    async with client_of(running) as flooding, client_of(running) as other:
        asked = await _flood(slice_, running, flooding)
        with pytest.raises(InferenceServerException, match="holds 4 requests, limit 4"):
            await flooding.infer("digits", [image(3)])
        light = asyncio.create_task(other.infer("digits", [image(5)]))
        await _ends(slice_, asked, light)
        assert (await light).as_numpy("PROBABILITIES").argmax() == 5
        assert slice_.requests[2].raw_input_contents[0][0] == 5, "its turn comes after one of the flood"


async def test_a_connection_of_rest_is_as_good_as_one_of_grpc(system):
    slice_, running = system.slice, system.running
    given = rest.InferInput("IMAGE", [1, 8, 8], "UINT8")
    given.set_data_from_numpy(np.full((1, 8, 8), 7, np.uint8))
    async with client_of(running) as flooding, rest.InferenceServerClient(running.rest_address) as other:
        asked = await _flood(slice_, running, flooding)
        light = asyncio.create_task(other.infer("digits", [given]))
        await _ends(slice_, asked, light)
        assert (await light).as_numpy("PROBABILITIES").argmax() == 7


TENANTS = """
[[tenant]]
name = "one"
token_env = "TENANT_ONE"
[[tenant]]
name = "three"
token_env = "TENANT_THREE"
weight = 3
[[tenant]]
name = "light"
token_env = "TENANT_LIGHT"
[[tenant]]
name = "limited"
token_env = "TENANT_LIMITED"
rate_per_s = 5
"""


@pytest.fixture
async def tenants(state, tmp_path, monkeypatch):
    for name in ("one", "three", "light", "limited"):
        monkeypatch.setenv(f"TENANT_{name.upper()}", name)
    (tmp_path / "tenants.toml").write_text(TENANTS)
    settings = {"tenants_file": tmp_path / "tenants.toml"}
    async with dispatcher_system(
        state, tmp_path, FakeTriton(version=4, latency_s=0.01), serve=False, **settings
    ) as made:
        await made.serve(credits=1, requests_max=64)
        yield made.running


async def keep_asking(running, tenant: str, served: Counter, connections: int = 1, at_once: int = 1) -> None:
    """So many requests at once on each connection, again as soon as they end, forever."""

    async def ask(client) -> None:
        while True:
            try:
                await client.infer("digits", [image(3)], headers={"authorization": f"Bearer {tenant}"})
                served[tenant] += 1
            except InferenceServerException as error:
                served[f"{tenant} {error.status()}"] += 1
                await asyncio.sleep(0.5)

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        for _ in range(connections):
            client = await stack.enter_async_context(client_of(running))
            for _ in range(at_once):
                group.create_task(ask(client))


async def play(running, seconds: float, *asking) -> Counter:
    """What was served of each tenant in that time, after a second in which queues fill."""
    served: Counter = Counter()
    tasks = [asyncio.create_task(keep_asking(running, tenant, served, *more)) for tenant, *more in asking]
    await asyncio.sleep(1.0)
    before = Counter(served)
    await asyncio.sleep(seconds)
    found = served - before
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def test_tenants_of_weights_one_and_three_are_served_one_to_three_however_many_connections(tenants):
    served = await play(tenants, 6.0, ("one", 10, 2), ("three", 1, 40))
    assert served.keys() == {"one", "three"}
    assert served["one"] + served["three"] > 100
    assert served["three"] / served["one"] == pytest.approx(3.0, rel=0.1)


async def test_next_to_a_flood_of_connections_another_tenant_is_never_refused(tenants):
    served = await play(tenants, 4.0, ("one", 10, 8), ("light", 1, 2), ("limited", 1, 1))
    refused = {name for name in served if "RESOURCE_EXHAUSTED" in name}
    assert served["one StatusCode.RESOURCE_EXHAUSTED"] > 20, "a flood"
    assert refused <= {"one StatusCode.RESOURCE_EXHAUSTED", "limited StatusCode.RESOURCE_EXHAUSTED"}
    assert served["light"] > 20
    assert served["limited"] > 5, "of its five a second"

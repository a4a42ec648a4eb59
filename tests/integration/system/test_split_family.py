"""mu-Serve by `trefoil up`: its planner splits a family over two GPUs, whose clocks fall as far as their stages let
them; answers are those of the whole, to the last bit. Then one of the two GPUs is lost."""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_client

from tests.support.stages import FAMILY, planned_repository, triton, whole
from tests.support.system import RunningSystem, plan_in_force, slices, until
from tests.support.triton_process import MODELS
from trefoil.core.fleet import SliceState

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SLO_MS, RATE_PER_S, LOADED_S, IMAGES = 110.0, 8.0, 45.0, 16
GPUS = ("node0/gpu0", "node0/gpu1")


@pytest.fixture
def repository(tmp_path) -> Path:
    return planned_repository(tmp_path)


@pytest.fixture
def system(repository):
    one = RunningSystem({
        "policy": "muserve", "params.group_size": 2, "objective_type": "instant", "slo.latency_ms": SLO_MS,
        "family.repository": str(repository), "demand_initial_per_s": RATE_PER_S,
        "availability.replicas_min": 1, "availability.spread_min": 1,
    })  # fmt: skip
    try:
        one.up()
        yield one
    finally:
        one.close()


async def answers(address: str, images: np.ndarray) -> tuple[np.ndarray, set[str]]:
    """What a family answers to each image, and the slices that are named as its stages'."""
    found, named = [], set()
    async with triton_client.InferenceServerClient(address) as client:
        for at in range(len(images)):
            asked = triton_client.InferInput("IMAGE", [1, *images.shape[1:]], "UINT8")
            asked.set_data_from_numpy(images[at : at + 1])
            result = await client.infer(FAMILY, [asked], client_timeout=30)
            found.append(result.as_numpy("PROBABILITIES")[0])
            said = result.get_response().parameters
            named.add(said["trefoil_stage_slices"].string_param if "trefoil_stage_slices" in said else "")
    return np.array(found), named


@pytest.mark.timeout(400)
def test_the_shipped_planner_splits_a_family_and_each_gpu_has_the_clock_that_its_stage_needs(
    system, repository, tmp_path
):
    with np.load(MODELS / FAMILY / "heldout.npz") as data:
        images = data["images"][:IMAGES]
    alone = triton(tmp_path, repository, "alone", whole())
    try:

        async def expected() -> np.ndarray:
            await alone.ready([whole()], 90.0)
            return (await answers(alone.launch.grpc_target, images))[0]

        wanted = asyncio.run(expected())
    finally:
        alone.close()
    system.wait_for_rollout()

    async def seen() -> tuple[dict[str, tuple[str, ...]], str]:
        async with system.client() as client:
            hosted = {key.device: tuple(h.model for h in one.hosted) for key, one in (await slices(client)).items()}
            return hosted, (await plan_in_force(client)).why

    hosted, why = asyncio.run(seen())
    assert hosted == {GPUS[0]: (f"{FAMILY}@1of2",), GPUS[1]: (f"{FAMILY}@2of2",)}, why
    found, named = asyncio.run(answers(system.inference, images))
    np.testing.assert_array_equal(found, wanted)
    assert named == {"node0-gpu0-7g.40gb-0, node0-gpu1-7g.40gb-0"}

    async def loaded() -> tuple[int, list[tuple[int, ...]]]:
        """One user who asks again as soon as he is answered, so that nobody waits: all answers are right."""
        clocks, asked, began_s = list[tuple[int, ...]](), 0, time.monotonic()
        async with system.client() as client:
            while time.monotonic() < began_s + LOADED_S:
                found, _ = await answers(system.inference, images)
                np.testing.assert_array_equal(found, wanted)
                asked += len(found)
                devices = {d.device: d.clock_mhz for node in await client.nodes() for d in node.devices}
                clocks.append(tuple(devices[name] for name in GPUS))
        return asked, clocks

    asked, clocks = asyncio.run(loaded())
    insensitive, sensitive = np.median(clocks[len(clocks) // 2 :], axis=0)  # by then they came down from the top
    print(f"{asked} right answers; medians {insensitive:.0f} and {sensitive:.0f} MHz of {clocks}")
    assert insensitive < 0.8 * sensitive, "a stage that no clock touches has no reason for any but the lowest"
    assert sensitive < 1410

    node = system.node()
    try:
        node.admin("lose", index=1)  # one GPU is left: the model is whole there, under the name that it always had
    finally:
        node.close()

    async def served_whole() -> bool:
        async with system.client() as client:
            standing = {k: one for k, one in (await slices(client)).items() if one.state == SliceState.READY}
            return [h.model for key in standing for h in standing[key].hosted] == [FAMILY]

    asyncio.run(until(served_whole, 120.0))
    system.wait_for_rollout()
    again, named = asyncio.run(answers(system.inference, images))
    np.testing.assert_array_equal(again, wanted)
    assert named == {""}

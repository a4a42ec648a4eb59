"""Language models of Triton's vLLM backend under an agent: served, refused by vLLM, healed, their orphans ended."""

import asyncio
import itertools
import json
import shutil
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.support import engine_family
from tests.support.agent_cluster import AgentCluster, Load, key, node_plan, until
from tests.support.engine_family import answer, outputs, request, write_family
from tests.support.generation import answers
from tests.support.triton_process import MODELS, hosted
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad
from trefoil.core.fleet import Hosted, SliceState
from trefoil.core.plan import PlannedSlice

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
BOOT_S = 60.0
LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)
numbers = itertools.count(1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    folder = Path(tempfile.mkdtemp(prefix="trefoil-engine-"))  # pytest's are closed to the users of Tritons
    folder.chmod(0o755)
    models = folder / "models"
    write_family(models)
    (models / "chat" / "2" / "model.json").write_text(json.dumps({"model": "chat-large", "max_modl_len": 5}))
    (models / "_shared").symlink_to(MODELS / "_shared")
    shutil.copytree(MODELS / "digits", models / "digits", ignore=shutil.ignore_patterns("*.npz"))
    settings = {"model_repository": models, "triton_environment": engine_family.environment(folder)}
    async with AgentCluster(quiet_probe_s=3, **settings) as one:
        yield one
    shutil.rmtree(folder)


async def plan(cluster: AgentCluster, chat: Hosted) -> None:
    """Digits on the right, a language model on the left."""
    parts = PlannedSlice(LEFT, (chat,), 8), PlannedSlice(RIGHT, (hosted(2),), 2)
    await cluster.acknowledge(Revision(9))
    await cluster.apply(node_plan(next(numbers), *parts))


async def say(cluster: AgentCluster, prompt: str) -> str:
    target = (await cluster.slices())[LEFT].grpc_target
    found = [one async for one in answers(target, request(prompt))]
    assert not any(one.error_message for one in found)
    return "".join(outputs(one)["text_output"][0].decode() for one in found)


async def test_a_language_model_and_graphs_serve_side_by_side(cluster):
    await plan(cluster, engine_family.hosted(1))
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    assert await say(cluster, "how far is the moon") == answer(1, "how far is the moon")[0][0]


async def test_a_killed_stub_comes_back_with_a_new_triton_and_leaves_no_engine_behind(cluster):
    await plan(cluster, engine_family.hosted(1))
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    before = cluster.triton(LEFT)
    [stub] = [child for child in before.children(recursive=True) if "stub" in child.name()]
    [core] = stub.children()
    stub.kill()

    async def replaced() -> bool:
        found = (await cluster.slices()).get(LEFT)
        return found is not None and found.state == SliceState.READY and cluster.triton(LEFT).pid != before.pid

    await until(replaced, BOOT_S)
    assert not psutil.pid_exists(core.pid) or core.status() == psutil.STATUS_ZOMBIE
    assert await say(cluster, "again") == answer(1, "again")[0][0]


async def test_what_vllm_refuses_is_told_in_its_words_and_others_serve_on(cluster):
    await plan(cluster, engine_family.hosted(1))
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    load = Load((await cluster.slices())[RIGHT].grpc_target, clients=1)
    try:
        await plan(cluster, engine_family.hosted(2))

        async def told() -> bool:
            found = (await cluster.slices()).get(LEFT)
            return found is not None and "unexpected keyword argument 'max_modl_len'" in found.why

        await until(told, BOOT_S)
        seen = load.answered
        await until(lambda: load.answered > seen + 10, BOOT_S)
    finally:
        await load.stop()
    assert load.failed == []
    assert await say(cluster, "still there") == answer(1, "still there")[0][0], "the variant before goes on"


async def busy_s(cluster: AgentCluster, since_s: float) -> float:
    """Seconds for which the language model was busy, by the energy stream."""
    parts = [part for sample in await cluster.samples() if sample.starts_at_s >= since_s for part in sample.slices]
    return sum(one.compute_s for part in parts if part.key == LEFT for one in part.hosted if one.family == "chat")


async def test_a_model_that_triton_does_not_time_is_busy_while_dispatchers_have_requests_on_it(cluster):
    await plan(cluster, engine_family.hosted(1))
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    await cluster.acknowledge(Revision(9), SliceLoad(LEFT, in_flight=0, family="chat"))
    idle_from_s = time.time()
    await asyncio.sleep(3.0)
    began_s = time.time()
    while time.time() - began_s < 6.0:
        await cluster.acknowledge(Revision(9), SliceLoad(LEFT, in_flight=2, family="chat"))
        await asyncio.sleep(0.2)
    await cluster.acknowledge(Revision(9), SliceLoad(LEFT, in_flight=0, family="chat"))
    await until(lambda: _has_energy_of(cluster, began_s + 8.0), BOOT_S)
    assert 4.0 <= await busy_s(cluster, began_s - 1.0) <= 8.0
    assert await busy_s(cluster, idle_from_s) - await busy_s(cluster, began_s - 1.0) <= 0.5


async def _has_energy_of(cluster: AgentCluster, at_s: float) -> bool:
    return any(sample.ends_at_s >= at_s for sample in await cluster.samples())

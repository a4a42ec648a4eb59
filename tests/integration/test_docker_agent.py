"""The power agent with its Tritons in containers: they outlive it, it restarts them, and it ends what nobody wants."""

import asyncio
from collections.abc import AsyncIterator

import docker.models.containers
import pytest
import pytest_asyncio

from protos.power_agent.v1 import power_agent_pb2
from tests.support.agent_cluster import NODE, AgentCluster, Load, key, node_plan, planned, until
from tests.support.docker_engine import DockerEngine, OwnEngine
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey, SliceState

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BOOT_S = 180.0  # generous: a shared machine, on which a Triton may take the better part of a minute
LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(docker_engine: DockerEngine) -> AsyncIterator[AgentCluster]:
    one = AgentCluster(
        runtime="docker",
        docker_image=docker_engine.image,
        docker_url=docker_engine.url,
        docker_gpu="none",
        ready_timeout_s=90.0,
    )
    try:
        async with one:
            yield one
    finally:
        for container in docker_engine.containers():
            container.remove(v=True, force=True)


def container(engine: DockerEngine, part: SliceKey) -> docker.models.containers.Container:
    """The one that runs a slice's Triton."""
    [found] = [one for one in engine.containers() if one.labels["trefoil.tag"].startswith(f"{part.name}.g")]
    return found


async def test_containers_serve_through_the_death_of_the_agent_and_the_next_one_adopts_them(cluster, docker_engine):
    wanted = node_plan(1, planned("4g.20gb", 0, 4), planned("3g.20gb", 4, 2))
    await cluster.acknowledge(Revision(9))
    await cluster.apply(wanted)
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    await cluster.settled(wanted)
    before = {part: container(docker_engine, part).id for part in (LEFT, RIGHT)}
    load = Load((await cluster.slices())[LEFT].grpc_target)
    labels = {"cluster": "default", "node": NODE, "tag": "orphan.g1"}  # its slice is none of this node's
    docker_engine.client.containers.run(
        docker_engine.image,
        ["python3", "-c", "import signal; signal.signal(signal.SIGTERM, lambda *_: exit()); signal.pause()"],
        labels={f"trefoil.{name}": value for name, value in labels.items()},
        network_mode="none",
        detach=True,
    )

    cluster.kill_agent()
    await asyncio.sleep(0.5)
    answered = load.answered
    await until(lambda: load.answered > answered + 10, 60)
    await cluster.start_agent()
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    node = await cluster.node()
    [unproven] = [text for text in node.missing if text.startswith("unproven: ")]
    assert "Triton orphan.g1" in unproven
    assert len(docker_engine.containers()) == 3  # it is left, until an operator says otherwise
    await cluster.stub.Reset(power_agent_pb2.ResetRequest(name=["orphan.g1"], epoch=node.highest_epoch_seen))
    await until(lambda: len(docker_engine.containers()) == 2, 60)
    assert {part: container(docker_engine, part).id for part in (LEFT, RIGHT)} == before
    await load.stop()
    assert (load.failed, load.versions) == ([], {"4"})


async def test_a_container_killed_behind_the_agents_back_is_started_again(cluster, docker_engine):
    killed = container(docker_engine, LEFT)
    neighbour = container(docker_engine, RIGHT).id
    killed.kill("SIGKILL")

    async def noticed() -> bool:
        return (await cluster.slices())[LEFT].state != SliceState.READY

    await until(noticed, 60)
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    assert container(docker_engine, LEFT).id != killed.id
    assert container(docker_engine, RIGHT).id == neighbour
    load = Load((await cluster.slices())[LEFT].grpc_target)
    await until(lambda: load.answered >= 10, 60)
    await load.stop()
    assert (load.failed, load.versions) == ([], {"4"})


async def test_an_engine_that_is_restarted_takes_its_containers_along_and_the_agent_brings_them_back(
    cluster, docker_engine
):
    if not isinstance(docker_engine, OwnEngine):
        pytest.skip("the engine of this machine is not ours to restart")
    before = {container(docker_engine, part).id for part in (LEFT, RIGHT)}
    await asyncio.to_thread(docker_engine.stop)

    async def missed() -> bool:
        return any("no Docker engine answers" in why for why in (await cluster.node()).missing)

    await until(missed, 60)
    docker_engine.start()  # by this thread, whose end would be the engine's
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    await until(lambda: len(docker_engine.containers()) == 2, 60)
    assert before.isdisjoint({one.id for one in docker_engine.containers()})
    assert not await missed()


async def test_a_plan_without_slices_leaves_no_container_and_no_instance(cluster, docker_engine):
    wanted = node_plan(2)
    await cluster.apply(wanted)
    await cluster.settled(wanted, BOOT_S)
    assert docker_engine.containers() == []
    assert await cluster.slices() == {}
    log = cluster.folder / "agent" / "logs" / f"{LEFT.name}.log"
    assert "Started GRPCInferenceService" in log.read_text()

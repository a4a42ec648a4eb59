"""The power agent with its Tritons in containers: they outlive it, it restarts them, and it ends what nobody wants."""

import asyncio
from collections.abc import AsyncIterator

import docker.models.containers
import pytest
import pytest_asyncio

from power_agent.runtimes.docker import DockerOptions, DockerRuntime
from power_agent.runtimes.docker_engine import Engine
from power_agent.triton_slice import SliceSpec, prepare_slice
from tests.support.agent_cluster import NODE, AgentCluster, Load, key, node_plan, planned, until
from tests.support.docker_engine import DockerEngine
from tests.support.triton_process import MODELS, free_ports, hosted
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey, SliceState

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BOOT_S = 60.0  # generous: a shared machine
LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(docker_engine: DockerEngine) -> AsyncIterator[AgentCluster]:
    one = AgentCluster(
        runtime="docker", docker_image=docker_engine.image, docker_url=docker_engine.url, docker_gpu="none"
    )
    try:
        await one.start()
        yield one
    finally:
        await one.close()
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
    options = DockerOptions("default", NODE, docker_engine.image, gpu="none")
    foreign = DockerRuntime(Engine(docker_engine.url), options)  # a predecessor that was killed before it noted a start
    spec = SliceSpec("orphan", cluster.folder / "orphan", MODELS, [hosted(1)], *free_ports(2), gpu_uuid="")
    foreign.start("orphan.g1", prepare_slice(foreign.install(), spec), cluster.folder / "orphan.log")

    cluster.kill_agent()
    await asyncio.sleep(0.5)
    answered = load.answered
    await until(lambda: load.answered > answered + 10, 10)
    await cluster.start_agent()
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    await until(lambda: len(docker_engine.containers()) == 2, 20)
    assert {part: container(docker_engine, part).id for part in (LEFT, RIGHT)} == before
    await load.stop()
    assert (load.failed, load.versions) == ([], {"4"})


async def test_a_container_killed_behind_the_agents_back_is_started_again(cluster, docker_engine):
    killed = container(docker_engine, LEFT)
    neighbour = container(docker_engine, RIGHT).id
    killed.kill("SIGKILL")

    async def noticed() -> bool:
        return (await cluster.slices())[LEFT].state != SliceState.READY

    await until(noticed, 15)
    await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
    assert container(docker_engine, LEFT).id != killed.id
    assert container(docker_engine, RIGHT).id == neighbour
    load = Load((await cluster.slices())[LEFT].grpc_target)
    await until(lambda: load.answered >= 10, 10)
    await load.stop()
    assert (load.failed, load.versions) == ([], {"4"})


async def test_a_plan_without_slices_leaves_no_container_and_no_instance(cluster, docker_engine):
    wanted = node_plan(2)
    await cluster.apply(wanted)
    await cluster.settled(wanted, BOOT_S)
    assert docker_engine.containers() == []
    assert await cluster.slices() == {}
    log = cluster.folder / "agent" / "logs" / f"{LEFT.name}.log"
    assert "Started GRPCInferenceService" in log.read_text()

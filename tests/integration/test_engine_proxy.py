"""The power agent by way of the engine's proxy: its slices serve, and the proxy lets nothing else through."""

import os
import subprocess
import sys
from pathlib import Path

import docker
import docker.errors
import pytest

from tests.support.agent_cluster import MODELS, NODE, AgentCluster, Load, key, node_plan, planned, until
from tests.support.docker_engine import DockerEngine
from trefoil.core.common import Revision

pytestmark = [pytest.mark.integration, pytest.mark.slow]
BOOT_S = 180.0  # generous: a shared machine


async def test_an_agent_serves_by_the_proxy_and_gets_no_more_of_the_engine(docker_engine: DockerEngine) -> None:
    cluster = AgentCluster(runtime="docker", docker_image=docker_engine.image, docker_gpu="none", ready_timeout_s="90")
    door = cluster.folder / "engine.sock"
    cluster._settings["docker_url"] = f"unix://{door}"
    url = docker_engine.url or os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    engine = url.removeprefix("unix://")
    argv = [sys.executable, "-m", "power_agent.runtimes.engine_proxy", "--socket", str(door), "--engine", engine]
    argv += ["--node", NODE, "--folder", str(cluster.folder / "agent"), "--folder", str(Path(MODELS).resolve())]
    proxy = subprocess.Popen(argv)
    try:
        await until(door.exists, 60)
        await cluster.start()
        wanted = node_plan(1, planned("7g.40gb", 0, 4))
        await cluster.acknowledge(Revision(9))
        await cluster.apply(wanted)
        part = key("7g.40gb", 0)
        await cluster.ready(part, timeout_s=BOOT_S)
        load = Load((await cluster.slices())[part].grpc_target)
        await until(lambda: load.answered > 10, 60)
        await load.stop()
        assert load.failed == []
        client = docker.DockerClient(f"unix://{door}")
        with pytest.raises(docker.errors.APIError, match="does not carry the labels of this agent"):
            client.containers.create(docker_engine.image, privileged=True)
        with pytest.raises(docker.errors.APIError, match="it lists containers of others"):
            client.containers.list(all=True)
        client.close()
    finally:
        await cluster.close()
        for container in docker_engine.containers():
            container.remove(v=True, force=True)
        proxy.terminate()
        proxy.wait(30)

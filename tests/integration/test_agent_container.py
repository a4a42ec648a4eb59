"""The power agent in a container that is replaced, as an update of its image does: its Tritons serve on."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.agent_cluster import AgentCluster, Load, key, node_plan, planned, until
from tests.support.docker_engine import DockerEngine, OwnEngine
from trefoil.core.common import Revision

pytestmark = [pytest.mark.integration, pytest.mark.slow]

BOOT_S = 180.0  # generous: a shared machine
ROOT = Path(__file__).parents[2]
OURS = {"label": "trefoil.node"}
LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)


class AgentInContainer(AgentCluster):
    """Its agent is a container of the same engine; its files are this machine's, at the same paths."""

    def __init__(self, engine: DockerEngine, **settings: str) -> None:
        super().__init__(**settings)
        self._engine = engine

    def _spawn(self, module: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        if module != "power_agent":
            return super()._spawn(module, arguments)
        seen = {Path(sys.base_prefix), Path(sys.prefix), ROOT, Path("/usr"), Path("/etc")}
        mounts = [f"--volume={folder}:{folder}:ro" for folder in sorted(seen)]
        written = [self.folder, Path(self._engine.url.removeprefix("unix://")).parent]
        mounts += [f"--volume={folder}:{folder}" for folder in written]
        command = ["docker", f"--host={self._engine.url}", "run", "--name=trefoil-test-agent", "--network=host"]
        command += [*mounts, f"--workdir={ROOT}", self._engine.image, sys.executable, "-m", module, *arguments]
        with (self.folder / f"{module}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def kill_agent(self) -> None:
        """As whoever replaces its container."""
        self._engine.client.containers.get("trefoil-test-agent").remove(force=True)
        assert self.agent is not None
        self.agent.wait()

    async def close(self) -> None:
        self.kill_agent()
        await super().close()


async def test_an_agents_container_is_replaced_and_no_triton_is_started_again(docker_engine):
    if not isinstance(docker_engine, OwnEngine) or shutil.which("docker") is None:
        pytest.skip("needs the command `docker`, and an engine whose socket this test may hand on")
    image = {"runtime": "docker", "docker_image": docker_engine.image, "docker_url": docker_engine.url}
    cluster = AgentInContainer(docker_engine, **image, docker_gpu="none", ready_timeout_s="90")
    try:
        await cluster.start()
        wanted = node_plan(1, planned("4g.20gb", 0, 4), planned("3g.20gb", 4, 2))
        await cluster.acknowledge(Revision(9))
        await cluster.apply(wanted)
        await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
        await cluster.settled(wanted)

        def running() -> set[tuple[str, str]]:
            found = [*docker_engine.containers(), *docker_engine.client.networks.list(filters=OURS)]
            return {(one.id, one.attrs.get("State", {}).get("StartedAt", "")) for one in found}

        before, load = running(), Load((await cluster.slices())[LEFT].grpc_target)
        assert len(before) == 3  # two Tritons and their network
        cluster.kill_agent()
        answered = load.answered
        await until(lambda: load.answered > answered + 10, 60)
        await cluster.start_agent()
        await cluster.ready(LEFT, RIGHT, timeout_s=BOOT_S)
        await cluster.settled(wanted)
        await load.stop()
        assert running() == before
        assert (load.failed, load.versions) == ([], {"4"})
    finally:
        await cluster.close()
        for left in docker_engine.containers():
            left.remove(v=True, force=True)

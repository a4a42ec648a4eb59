"""Runtimes of this host, with real processes: a simulated node's, and the host's own."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from power_agent.devices.gpus import boot_id
from power_agent.devices.inventory import Inventory
from power_agent.devices.node_client import NodeClient
from power_agent.devices.nvml_shim import install_simulated_node, uninstall_simulated
from power_agent.runtimes.cgroup import Cgroups, find_cgroups
from power_agent.runtimes.confinement import Confinement, find_confinement
from power_agent.runtimes.kubernetes import KubernetesRuntime
from power_agent.runtimes.kubernetes_api import ApiServer
from power_agent.runtimes.process import ProcessRuntime
from power_agent.runtimes.simulated_node import NodeRuntime, SplitRuntime
from power_agent.settings import PowerAgentSettings
from tests.support.fake_kubernetes import NODE, FakeKubernetes
from tests.support.runtime_contract import Kit, RuntimeContract, end_all
from tests.support.simulated_driver import NodeProcess, create_slice
from trefoil.runtime.clock import WallClock


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeClient]:
    node = NodeProcess(tmp_path_factory.mktemp("node"))
    client = node.start()
    yield client
    client.close()
    node.end()


@pytest.fixture(scope="module")
def gpu_uuid(client: NodeClient) -> str:
    shim = install_simulated_node(client._path)
    inventory = Inventory("node0")
    try:
        inventory.open()
        return create_slice(inventory, "node0/gpu0", "7g.40gb", 0).mig_uuid
    finally:
        inventory.close()
        uninstall_simulated()
        shim.close()


def confined(state_dir: Path) -> Confinement:
    """As the agent confines its Tritons, where these tests run as root; separate users, for several run at once."""
    return find_confinement("auto", 2_100_000_000, state_dir)


class TestNodeRuntime(RuntimeContract):
    @pytest.fixture
    def kit(self, client: NodeClient, gpu_uuid: str, tmp_path: Path) -> Iterator[Kit]:
        confinement = confined(tmp_path)
        yield Kit(
            lambda: NodeRuntime(client, confinement),
            sys.executable,
            tmp_path,
            gpu_uuid,
            isolates=not confinement.missing,
        )
        end_all(NodeRuntime(client))


class TestProcessRuntime(RuntimeContract):
    @pytest.fixture
    def kit(self, tmp_path: Path) -> Iterator[Kit]:
        cgroups = find_cgroups(f"test-{tmp_path.name}")

        def again() -> ProcessRuntime:
            return ProcessRuntime(tmp_path / "runtime", cgroups, WallClock(), boot_id(), confinement)

        confinement = confined(tmp_path)
        yield Kit(again, sys.executable, tmp_path, isolates=not confinement.missing)
        end_all(again())
        assert not any(folder.exists() for folder in cgroups.parents.values())


class TestSplitRuntimeOnCpus(RuntimeContract):
    """What a simulated node with serving CPUs does with slices that have no GPU."""

    @pytest.fixture
    def kit(self, client: NodeClient, tmp_path: Path) -> Iterator[Kit]:
        def again() -> SplitRuntime:
            process = ProcessRuntime(tmp_path / "runtime", Cgroups(0, {}, {}), WallClock(), boot_id(), confinement)
            return SplitRuntime(NodeRuntime(client, confinement), process)

        confinement = confined(tmp_path)
        yield Kit(again, sys.executable, tmp_path, isolates=not confinement.missing)
        end_all(again())


class TestKubernetesRuntime(RuntimeContract):
    """On a fake API server, whose kubelet runs the commands of pods as processes of this host: it isolates nothing."""

    @pytest.fixture
    def kit(self, tmp_path: Path) -> Iterator[Kit]:
        cluster = FakeKubernetes(tmp_path / "cluster")
        settings = PowerAgentSettings(
            cluster="test", node=NODE, runtime="kubernetes", kubernetes_image="triton:1", state_dir=tmp_path / "state",
            kubernetes_pod="trefoil-gpu-x", kubernetes_url=cluster.url,
        )  # fmt: skip
        made = []

        def again() -> KubernetesRuntime:
            made.append(KubernetesRuntime(ApiServer(cluster.url, cluster.account), settings))
            return made[-1]

        yield Kit(again, sys.executable, tmp_path, pid=lambda triton: cluster.pid(triton.id), isolates=False)
        for runtime in made:
            runtime.close()
        cluster.close()


def test_a_split_runtime_knows_whose_slice_it_is(client: NodeClient, gpu_uuid: str, tmp_path: Path) -> None:
    kit = Kit(lambda: NodeRuntime(client), sys.executable, tmp_path, gpu_uuid)
    host = ProcessRuntime(tmp_path / "runtime", Cgroups(0, {}, {}), WallClock(), boot_id())
    runtime = SplitRuntime(NodeRuntime(client), host)
    on_gpu = kit.launch()
    runtime.start("gpu.g1", on_gpu, kit.log)
    runtime.start("cpu.g1", replace(kit.launch(), gpu_uuid=""), kit.log)
    assert runtime.name == "node+process"
    assert [one.tag for one in NodeRuntime(client).list()] == ["gpu.g1"]
    assert [one.tag for one in host.list()] == ["cpu.g1"]
    assert {one.tag for one in runtime.list()} == {"gpu.g1", "cpu.g1"}
    for tag in ("gpu.g1", "cpu.g1"):
        runtime.stop(tag, 5)
        runtime.forget(tag)
    assert runtime.list() == ()

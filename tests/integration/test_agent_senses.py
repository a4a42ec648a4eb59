"""What the agent tells of its node: capabilities as probed, and GPUs that report separate errors accord."""

import json
import time
from collections.abc import Iterator

import pytest

from power_agent.devices.errors import NoPermission
from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import install_simulated_node, uninstall_simulated
from power_agent.watch.capabilities import NOT_ROOT, probe_devices
from tests.support.fast_cluster import NODE, FastCluster, Stage
from tests.support.simulated_driver import NodeProcess, is_reset
from trefoil.core.fleet import DeviceState

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GPU0, GPU1, GPU2 = (f"{NODE}/gpu{index}" for index in range(3))
NOTICED_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[FastCluster]:
    stage = Stage()
    one = FastCluster(
        stage,
        devices=("A100-SXM4-40GB", "Tesla T4", "Tesla P4"),
        node={"driver_version": "570.86.15"},  # it tells whether a GPU was reset
        dcgm_exporter_url="http://127.0.0.1:9/metrics",
        health_poll_s=0.5,
        drift_poll_s=2.0,
    )
    try:
        one.until(lambda: hears(one, 43), "events to be heard", NOTICED_S)
        yield one
    finally:
        one.close()
        stage.close()


def device(cluster: FastCluster, name: str):
    return next(found for found in cluster.status().devices if found.device == name)


def xids(cluster: FastCluster) -> list[tuple[str, int]]:
    whole, _, _ = (cluster.folder / "agent.log").read_text().rpartition("\n")  # the last line may be half written
    lines = whole.splitlines()
    events = [json.loads(line) for line in lines if '"event": "xid"' in line]
    return [(event["device"], event["xid"]) for event in events]


def hears(cluster: FastCluster, code: int) -> bool:
    """Whether an error that GPU 0 reports now is noticed; what is reported before somebody listens never is."""
    cluster.client.admin("xid", index=0, code=code)
    time.sleep(0.1)
    return (GPU0, code) in xids(cluster)


def test_capabilities_are_probed_and_what_is_missing_says_why(cluster):
    status = cluster.status()
    assert {"mig", "clock_lock", "energy_counter", "events", "root", "triton"} <= set(status.capabilities)
    assert not {"gpm", "dcgm", "docker", "rapl"} & set(status.capabilities)
    missing = dict(entry.split(": ", 1) for entry in status.missing)
    assert missing["mig gpu1"].startswith("Tesla T4 is not MIG capable")
    assert missing["clock_lock gpu2"].startswith("Tesla P4 is older than Volta")
    assert "power is integrated" in missing["energy_counter gpu2"]
    assert "Hopper" in missing["gpm gpu0"]
    assert "127.0.0.1:9" in missing["dcgm"]


def test_an_error_of_an_application_is_reported_and_nothing_else(cluster):
    cluster.client.admin("xid", index=0, code=13)
    cluster.until(lambda: (GPU0, 13) in xids(cluster), "the Xid to be logged", NOTICED_S)
    assert device(cluster, GPU0).state != DeviceState.LOST


def test_a_gpu_with_a_fatal_error_is_fenced_until_its_reset(cluster):
    cluster.client.admin("xid", index=1, code=48)
    cluster.until(lambda: device(cluster, GPU1).state == DeviceState.LOST, "the fence", NOTICED_S)
    told = (f"{GPU1}: Xid 48", f"{GPU1}: its driver asks for a reset")  # whichever came first
    assert any(entry.startswith(told) for entry in cluster.status().missing)
    time.sleep(0.5)  # ten seconds of the agent's clock: it answers all the while, and is looked at
    assert device(cluster, GPU1).state == DeviceState.LOST
    assert device(cluster, GPU0).state != DeviceState.LOST
    cluster.until(lambda: is_reset(cluster.client, 1), "it to be let go of", NOTICED_S)
    cluster.until(lambda: device(cluster, GPU1).state != DeviceState.LOST, "the GPU to be back", NOTICED_S)
    cluster.until(lambda: not any(e.startswith(GPU1) for e in cluster.status().missing), "it to be well", NOTICED_S)


def test_a_gpu_that_falls_off_the_bus_says_so_itself(cluster):
    cluster.client.admin("lose", index=2)
    cluster.until(lambda: device(cluster, GPU2).state == DeviceState.LOST, "the fence", NOTICED_S)
    cluster.until(lambda: (GPU2, 79) in xids(cluster), "the Xid to be logged", NOTICED_S)
    cluster.until(lambda: is_reset(cluster.client, 2), "it to be let go of", NOTICED_S)
    cluster.until(lambda: device(cluster, GPU2).state != DeviceState.LOST, "the GPU to be back", NOTICED_S)


def test_events_are_heard_from_a_driver_that_was_loaded_again(cluster):
    before = cluster.status().driver_load_id
    cluster.client.admin("reload_driver")
    cluster.until(lambda: cluster.status().driver_load_id != before, "the agent to notice", NOTICED_S)
    cluster.until(lambda: hears(cluster, 31), "an Xid of the new driver", NOTICED_S)
    assert "events" in cluster.status().capabilities


def test_without_privileges_and_on_an_old_driver_the_agent_runs_with_the_rest(tmp_path):
    node = NodeProcess(
        tmp_path,
        "root=false",
        'symbols_missing=["nvmlDeviceCreateGpuInstanceWithPlacement", "nvmlGpmQueryDeviceSupport"]',
    )
    client = node.start()
    try:
        assert client.describe()["root"] is False
        install_simulated_node(node.socket)
        inventory = Inventory(NODE, None)
        inventory.open()
        assert not inventory.has_symbol("nvmlDeviceCreateGpuInstanceWithPlacement")
        assert inventory.has_symbol("nvmlDeviceSetGpuLockedClocks")
        with pytest.raises(NoPermission, match="as root or with CAP_SYS_ADMIN"):
            inventory.lock_clock(GPU0, 300, 600)
        found = probe_devices(inventory, inventory.list_devices(), NOT_ROOT)
        assert found.have == ("energy_counter", "events", "persistence")
        assert "update it to R470" in found.missing["mig"]
    finally:
        uninstall_simulated()
        node.end()

"""The simulated node as a process: what survives whose death, and that nothing is left behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from power_agent.devices.errors import DeviceBusy, DriverUnavailable, NodeRefused, NodeUnreachable
from power_agent.devices.gpus import driver_load_id
from power_agent.devices.inventory import Inventory
from power_agent.devices.node_client import NodeClient
from power_agent.devices.nvml_shim import install_simulated_node, uninstall_simulated
from power_agent.runtimes.simulated_node import NodeRuntime
from tests.support.awake import Awake
from tests.support.runtime_contract import until
from tests.support.simulated_driver import ROOT, NodeProcess, create_slice, destroy_slice, launch_on
from trefoil.core.errors import StartError

pytestmark = pytest.mark.integration
CHILD = ROOT / "tests" / "support" / "paced_child.py"
GPU0, GPU1 = "node0/gpu0", "node0/gpu1"


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="trefoil-node-") as name:  # short: socket paths end at 107 bytes
        yield Path(name)


@pytest.fixture
def node(folder):
    process = NodeProcess(folder, "noise_ratio=0")
    yield process
    if process.process is not None and process.process.poll() is None:
        assert process.end() == 0


@pytest.fixture
def client(node):
    opened = node.start()
    yield opened
    opened.close()


@pytest.fixture
def inventory(node, client):
    used = install_simulated_node(node.socket)
    opened = Inventory("node0")
    opened.open()
    yield opened
    used.close()
    uninstall_simulated()


def start(client, folder, mig_uuid, *arguments, tag="a"):
    """The pid of what was started."""
    launch = launch_on(mig_uuid, folder, sys.executable, "-S", "-E", str(CHILD), *map(str, arguments))
    return int(NodeRuntime(client).start(tag, launch, log_of(folder, tag)).id)


def log_of(folder, tag="a"):
    return folder / "logs" / f"{tag}.log"


def only(client):
    (found,) = NodeRuntime(client).list()
    return found


def end_of(client):
    """How the only process ended, once it has."""
    until(lambda: not only(client).alive)
    return only(client).exit_code


def device_truth(client, index=0):
    return client.truth()["devices"][index]


def gone(pid):
    """No process and no zombie of that pid."""
    return not psutil.pid_exists(pid)


def ended(pid):
    """Whether it computes no more; somebody else reaps it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_work_in_the_pace_file_becomes_energy_in_its_own_account(client, inventory, folder):
    made = create_slice(inventory, GPU0, "7g.40gb", 0)
    assert inventory.power_w(GPU0) == pytest.approx(35.0)
    until(lambda: inventory.energy_j(GPU0) > 0)
    child = start(client, folder, made.mig_uuid, 4, 21, 25, f"until={folder / 'warm'}")
    assert inventory.pids(made.mig_uuid) == (child,)
    warm_up = until(lambda: [v for s in device_truth(client)["slices"] for v in s["versions"] if v["batches"]])
    (folder / "warm").touch()
    until(lambda: "done" in log_of(folder).read_text())
    until(lambda: [v["batches"] for s in device_truth(client)["slices"] for v in s["versions"]] == [21])
    until(lambda: inventory.power_w(GPU0) == pytest.approx(55.0))
    truth = device_truth(client)
    (account,) = truth["slices"]
    (version,) = account["versions"]
    assert (account["slice_type"], account["start"], account["mig_uuid"]) == ("7g.40gb", 0, made.mig_uuid)
    assert (version["variant"], version["batches"], version["items"]) == ("digits-l", 21, 21)
    active_s = version["busy_s"] - warm_up[0]["busy_s"]
    assert version["active_j"] == pytest.approx(250.0 * active_s, rel=0.03)
    assert version["active_j"] + truth["unallocated"]["warm_up_j"] == pytest.approx(250.0 * version["busy_s"], rel=0.03)
    assert truth["active_j"] + truth["idle_j"] + truth["unallocated_j"] == pytest.approx(truth["counter_j"], rel=1e-9)
    assert truth["idle_j"] > 0
    assert truth["unallocated"]["asleep_j"] > 0
    assert inventory.energy_j(GPU0) >= int(truth["counter_j"] * 1e3) / 1e3
    summary = client.pace_summary()
    assert (summary.batches, summary.overruns) == (21, 0)


def test_a_process_is_listed_stopped_and_forgotten(client, inventory, node, folder):
    made = create_slice(inventory, GPU1, "1g.5gb", 3)
    child = start(client, folder, made.mig_uuid, 1, 0, 1)
    assert start(client, folder, made.mig_uuid, 1, 0, 1) == child  # idempotent
    with pytest.raises(StartError, match="another command"):
        start(client, folder, made.mig_uuid, 2, 0, 1)
    with pytest.raises(NodeRefused, match="alive"):
        NodeRuntime(client).forget("a")
    with pytest.raises(DeviceBusy):
        destroy_slice(inventory, made.key)
    assert len(list((node.folder / "pace").iterdir())) == 1
    NodeRuntime(client).stop("a", 8.0)
    assert list((node.folder / "pace").iterdir()) == []
    destroy_slice(inventory, made.key)
    assert end_of(client) == -signal.SIGTERM
    assert gone(child)
    NodeRuntime(client).forget("a")
    assert NodeRuntime(client).list() == ()


def test_a_stubborn_session_is_killed_whole(client, inventory, folder):
    made = create_slice(inventory, GPU0, "1g.5gb", 3)
    child = start(client, folder, made.mig_uuid, 1, 0, 1, "ignore")
    until(lambda: "done" in log_of(folder).read_text())
    (below,) = psutil.Process(child).children()
    NodeRuntime(client).stop("a", 0.2)
    assert end_of(client) == -signal.SIGKILL
    assert gone(child)
    until(lambda: gone(below.pid))


def test_a_killed_leader_takes_its_session_along(client, inventory, folder):
    made = create_slice(inventory, GPU0, "1g.5gb", 3)
    child = start(client, folder, made.mig_uuid, 1, 0, 1, "ignore")
    until(lambda: "done" in log_of(folder).read_text())
    (below,) = psutil.Process(child).children()
    os.kill(child, signal.SIGKILL)
    assert end_of(client) == -signal.SIGKILL
    assert gone(child)
    until(lambda: gone(below.pid))
    assert inventory.pids(made.mig_uuid) == ()
    assert start(client, folder, made.mig_uuid, 1, 0, 1) != child


CLIENT_THAT_DIES = """
import os, signal, sys
from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import install_simulated_node
from tests.integration.test_simulated_node import start
from tests.support.simulated_driver import create_slice
from pathlib import Path
folder = Path(sys.argv[1])
client = install_simulated_node(folder / "node.sock")
inventory = Inventory("node0")
inventory.open()
made = create_slice(inventory, "node0/gpu0", "3g.20gb", 4)
start(client, folder, made.mig_uuid, 4, 10000, 10)
inventory.create_gpu_instance("node0/gpu0", "2g.10gb", 0)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_agent_loses_nothing(client, inventory, folder):
    dead = subprocess.run([sys.executable, "-c", CLIENT_THAT_DIES, str(folder)], cwd=ROOT, check=False)
    assert dead.returncode == -signal.SIGKILL
    half, whole = inventory.gpu_instances(GPU0)
    assert (half.key.slice_type, half.mig_uuid) == ("2g.10gb", "")
    assert only(client).alive
    assert inventory.pids(whole.mig_uuid) == (int(only(client).id),)
    before_j, before = inventory.energy_j(GPU0), client.pace_summary().batches
    until(lambda: client.pace_summary().batches > before + 5)
    assert inventory.energy_j(GPU0) > before_j


def test_sigterm_ends_everything_and_leaves_nothing(node, client, inventory, folder):
    made = create_slice(inventory, GPU0, "3g.20gb", 4)
    polite = start(client, folder, made.mig_uuid, 4, 10000, 10, tag="polite")
    stubborn = start(client, folder, made.mig_uuid, 4, 0, 10, "ignore", tag="stubborn")
    with Awake() as took:
        assert node.end() == 0
    assert took.seconds < 5.0
    assert gone(polite)
    assert gone(stubborn)
    assert not node.socket.exists()
    assert list((folder / "pace").iterdir()) == []
    with pytest.raises(NodeUnreachable, match="start it"):
        client.describe()


@pytest.mark.gate
def test_a_killed_node_takes_its_processes_along_and_is_another_driver_load(node, client, inventory, folder):
    first_load = driver_load_id(folder / "driver_load_id")
    assert client.describe()["driver_load_id"] == first_load
    made = create_slice(inventory, GPU0, "3g.20gb", 4)
    child = start(client, folder, made.mig_uuid, 4, 10000, 10)
    region = Path(f"/dev/shm/trefoil-test-{made.mig_uuid}-region")
    region.touch()
    node.process.kill()
    node.process.wait()
    until(lambda: ended(child))
    with pytest.raises(DriverUnavailable):
        inventory.energy_j(GPU0)
    node.start()
    assert not region.exists()
    assert driver_load_id(folder / "driver_load_id") != first_load
    with pytest.raises(DriverUnavailable):
        inventory.gpu_instances(GPU0)
    inventory.open()
    assert inventory.gpu_instances(GPU0) == ()
    assert NodeRuntime(client).list() == ()  # the same client, reconnected


def test_rehearsed_trouble_reaches_the_driver(client, inventory):
    made = create_slice(inventory, GPU0, "3g.20gb", 4)
    client.admin("fault", symbol="nvmlComputeInstanceDestroy", code=19, times=1)
    with pytest.raises(DeviceBusy):
        destroy_slice(inventory, made.key)
    destroy_slice(inventory, made.key)
    client.admin("foreign_load", index=1, watts=100.0)
    until(lambda: inventory.power_w(GPU1) > 140.0)
    client.admin("foreign_load", index=1, watts=0.0)
    truth = until(lambda: inventory.power_w(GPU1) == 35.0 and device_truth(client, 1))
    assert truth["unallocated"]["foreign_j"] > 0
    assert truth["idle_j"] == 0
    with pytest.raises(NodeRefused, match="one of fault"):
        client.admin("explode")
    with pytest.raises(NodeRefused, match="malformed request"):
        client.call("process_stop")


def test_a_driver_restart_ends_what_runs_and_is_another_load(client, inventory, folder):
    made = create_slice(inventory, GPU0, "3g.20gb", 4)
    child = start(client, folder, made.mig_uuid, 4, 10000, 10)
    until(lambda: inventory.energy_j(GPU0) > 0)
    first_load, pid = driver_load_id(folder / "driver_load_id"), client.describe()["pid"]
    client.admin("reload_driver")
    assert driver_load_id(folder / "driver_load_id") not in (first_load, "")
    assert client.describe()["pid"] == pid
    with pytest.raises(DriverUnavailable):
        inventory.gpu_instances(GPU0)
    inventory.open()
    assert inventory.gpu_instances(GPU0) == ()
    assert end_of(client) == -signal.SIGKILL
    assert gone(child)
    assert list((folder / "pace").iterdir()) == []
    counted_j, truth = inventory.energy_j(GPU0), device_truth(client)
    assert counted_j < truth["counter_j"]  # the counter began again, the true split went on
    total_j = truth["active_j"] + truth["idle_j"] + truth["unallocated_j"]
    assert total_j == pytest.approx(truth["counter_j"], rel=1e-9)


def test_others_at_the_gpus_through_the_socket(client, inventory):
    uuid = client.admin("create_gi", index=1, slice_type="2g.10gb", start=2)
    assert [found.mig_uuid for found in inventory.gpu_instances(GPU1)] == [uuid]
    with pytest.raises(NodeRefused, match="overheat: missing a required argument"):
        client.admin("overheat", index=1)


def test_a_process_on_a_whole_gpu_is_paced_and_metered(node, folder):
    node._argv += ["--set", 'devices=["Tesla P4"]']
    client = node.start()
    described = install_simulated_node(node.socket)
    opened = Inventory("node0")
    opened.open()
    try:
        (device,) = opened.list_devices()
        child = start(client, folder, device.uuid, 4, 5, 78)
        assert opened.pids(device.uuid) == (child,)
        until(lambda: "done" in log_of(folder).read_text())
        (account,) = until(lambda: device_truth(client)["active_j"] > 0 and device_truth(client)["slices"])
        assert (account["slice_type"], account["start"], account["size"]) == ("whole", 0, 1)
        assert [version["variant"] for version in account["versions"]] == ["digits-l"]
        assert opened.energy_j(GPU0) is None
        assert opened.power_w(GPU0) > 0
    finally:
        described.close()
        client.close()
        uninstall_simulated()


def test_a_process_needs_a_slice_that_exists(client, inventory, folder):
    with pytest.raises(StartError, match="names no device"):
        start(client, folder, "MIG-00000000-0000-0000-0000-000000000000", 1, 0, 1)
    with pytest.raises(StartError, match="is in MIG mode"):
        start(client, folder, inventory.list_devices()[0].uuid, 1, 0, 1)
    made = create_slice(inventory, GPU0, "1g.5gb", 0)
    with pytest.raises(StartError, match=r"/nonexistent.*Remedy: check"):
        NodeRuntime(client).start("b", launch_on(made.mig_uuid, folder, "/nonexistent"), folder / "b.log")
    assert list((folder / "pace").iterdir()) == []


def test_an_idle_node_is_cheap(client):
    process, shares = psutil.Process(client.describe()["pid"]), []
    for _ in range(5):  # whoever shares the core's caches only makes it more
        before, began_s = process.cpu_times(), time.monotonic()
        time.sleep(2.0)
        after, ended_s = process.cpu_times(), time.monotonic()
        shares.append((after.user + after.system - before.user - before.system) / (ended_s - began_s))
        if shares[-1] < 0.04:
            break
    assert min(shares) < 0.04  # measured 0.8 %; twice the target of 2 %, for noisy machines


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ('devices=["B2000"]', "no simulated device 'B2000'"),
        ("tick_ms=500", "tick_ms"),
        ("colour=red", "unknown setting"),
        ("model_repository=/nonexistent", "nonexistent"),
    ],
)
def test_bad_settings_are_one_line_and_exit_code_2(folder, setting, expected):
    argv = [sys.executable, "-m", "trefoil.simulated_node", "--socket", str(folder / "s"), "--set", setting]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert expected in line
    assert "Remedy" in line
    assert not (folder / "s").exists()


def test_two_nodes_cannot_share_a_socket(node, client):
    second = NodeProcess(node.folder)
    ended = subprocess.run(second._argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "a node listens there already" in ended.stderr
    assert NodeClient(node.socket).describe()["node"] == "node0"

"""The simulated node with what it is for: a real Triton on a slice."""

import asyncio
import os
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_shim import install_simulated_node, uninstall_simulated
from power_agent.runtimes.simulated_node import NodeRuntime
from power_agent.triton.client import TritonClient, TritonUnready
from power_agent.triton.slice_launch import SliceSpec, prepare_slice
from tests.support.awake import Awake
from tests.support.ports import free_ports
from tests.support.simulated_driver import NodeProcess, create_slice
from tests.support.triton_process import MODELS, hosted, install
from trefoil.runtime.clock import WallClock

pytestmark = pytest.mark.integration
GPU = "node0/gpu0"
SERVICE_S = 0.044  # digits-l on 3g.20gb at batch 1, by profile
ACTIVE_W = 250.0 * 42 / 98


def regions(launch):
    return list(Path("/dev/shm").glob(f"{launch.shm_prefix}*"))


async def books(client, batches):
    """What the node says of its first device and of the one version on it, once it has booked as many batches."""
    async with asyncio.timeout(60):
        while True:
            truth = client.truth()["devices"][0]
            versions = truth["slices"][0]["versions"]
            if versions and versions[0]["batches"] >= batches:
                break
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.2)  # four ticks: were there more, they would be seen
    truth = client.truth()["devices"][0]
    (version,) = truth["slices"][0]["versions"]
    return truth, version


async def test_a_real_triton_is_paced_metered_killed_and_cleaned_up():
    with tempfile.TemporaryDirectory(prefix="trefoil-node-") as name:
        folder = Path(name)
        node = NodeProcess(folder, "noise_ratio=0")
        client = node.start()
        install_simulated_node(folder / "node.sock")
        inventory = Inventory("node0")
        inventory.open()
        made = create_slice(inventory, GPU, "3g.20gb", 4)
        grpc_port, metrics_port = free_ports(2)
        parts = (hosted(4),)
        spec = SliceSpec(made.key.name, folder / "slice", MODELS, parts, grpc_port, metrics_port, made.mig_uuid)
        launch = prepare_slice(install(), spec)
        triton = TritonClient(launch.grpc_target, launch.metrics_url, launch.repository, WallClock())

        def start():
            return int(NodeRuntime(client).start(made.key.name, launch, folder / "triton.log").id)

        try:
            pid = start()
            await triton.wait_ready(parts, 60.0)
            await triton.probe("digits", 4)
            truth, version = await books(client, 2)  # a warm-up and the probe
            assert (version["variant"], version["batches"]) == ("digits-l", 2)
            # A batch in which this machine stands still takes longer, and a tick that comes late bends what it spends.
            for _ in range(3):
                before, paced = version, client.pace_summary()
                for _ in range(21):
                    took_s = await triton.probe("digits", 4)
                    assert took_s >= 0.7 * SERVICE_S
                truth, version = await books(client, before["batches"] + 21)
                assert version["batches"] - before["batches"] == 21
                busy_s, overruns = version["busy_s"] - before["busy_s"], client.pace_summary().overruns - paced.overruns
                spent_j = version["active_j"] + truth["unallocated"]["warm_up_j"]
                due_j = pytest.approx(ACTIVE_W * version["busy_s"], rel=0.03)
                if busy_s == pytest.approx(21 * SERVICE_S, rel=0.1) and overruns <= 1 and spent_j == due_j:
                    break
            assert busy_s == pytest.approx(21 * SERVICE_S, rel=0.1)
            assert overruns <= 1
            assert spent_j == due_j
            assert truth["idle_j"] > 0
            assert truth["unallocated"]["starting_j"] > 0

            tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
            assert len(tree) > 1
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(60):
                while NodeRuntime(client).list()[0].alive or any(psutil.pid_exists(one.pid) for one in tree):
                    await asyncio.sleep(0.02)
            assert NodeRuntime(client).list()[0].exit_code == -signal.SIGKILL
            assert regions(launch) == []
            with pytest.raises(TritonUnready):
                await triton.probe("digits", 4)

            again = start()
            await triton.wait_ready(parts, 60.0)
            await triton.probe("digits", 4)
            with Awake() as took:
                assert node.end() == 0
            assert took.seconds < 5.0
            assert not psutil.pid_exists(again)
            assert regions(launch) == []
        finally:
            await triton.close()
            uninstall_simulated()
            if node.process.poll() is None:
                node.end()

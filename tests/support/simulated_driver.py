"""An in-process simulated driver behind the real pynvml, and a simulated node as a process."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from power_agent.devices.errors import NodeRefused, NodeUnreachable
from power_agent.devices.inventory import Inventory, ObservedSlice
from power_agent.devices.node_client import NodeClient
from power_agent.devices.nvml_shim import Send, install_simulated_driver, uninstall_simulated
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.fleet import SliceKey
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.driver import Driver
from trefoil.simulated_node.faults import FaultPlan
from trefoil.simulated_node.gpu_models import GpuModel, gpu_model
from trefoil.simulated_node.gpu_state import Nvml, NvmlFault
from trefoil.simulated_node.machine import Machine

ROOT = Path(__file__).resolve().parents[2]
A100_40GB = gpu_model("A100-SXM4-40GB")
H100_80GB, V100_32GB = gpu_model("H100-SXM5-80GB"), gpu_model("Tesla V100-SXM2-32GB")
T4, P4 = gpu_model("Tesla T4"), gpu_model("Tesla P4")


def make_driver(*models: GpuModel, **options: Any) -> Driver:
    return Driver("node0", models or (A100_40GB,), **{"load_number": 7, **options})


def launch_on(uuid: str, folder: Path, *argv: str) -> SliceLaunch:
    """A program, whatever it is, on a slice."""
    env = {"CUDA_VISIBLE_DEVICES": uuid, "PATH": os.environ["PATH"]}
    return SliceLaunch(
        argv, env, folder, folder, "127.0.0.1:0", "", "", "", f"trefoil-test-{uuid}-", folder, gpu_uuid=uuid
    )


def create_slice(inventory: Inventory, device: str, slice_type: str, start: int) -> ObservedSlice:
    """GPU instance and compute instance at that start; what exists already is completed or returned."""
    return inventory.create_compute_instance(inventory.create_gpu_instance(device, slice_type, start).key)


def destroy_slice(inventory: Inventory, key: SliceKey) -> None:
    """Compute instances, then the GPU instance."""
    inventory.destroy_compute_instances(key)
    inventory.destroy_gpu_instance(key)


def outcome(call: Any, *args: Any) -> tuple[Any, Nvml]:
    """What a driver call gave: (value, SUCCESS) or (None, the code of its refusal)."""
    try:
        return call(*args), Nvml.SUCCESS
    except NvmlFault as refusal:
        return None, refusal.code


@contextmanager
def pynvml_on(driver: Driver | Machine, faults: FaultPlan | None = None) -> Iterator[None]:
    """pynvml of this process answers from `driver` inside the block; a Machine has faults of its own."""
    if isinstance(driver, Machine):
        with _pynvml_through(driver.send):
            yield
        return

    def send(symbol: str, args: Any) -> tuple[int, list[Any]]:
        fault = faults.next_fault(symbol) if faults else None
        if fault is not None:
            return (fault.code, []) if fault.effect == "fail" else (0, [])
        try:
            return 0, CALLS[symbol](driver, *args)
        except NvmlFault as refusal:
            return int(refusal.code), []

    with _pynvml_through(send):
        yield


@contextmanager
def inventory_on(driver: Driver | Machine) -> Iterator[Inventory]:
    """An open inventory of its GPUs, by pynvml."""
    with pynvml_on(driver):
        opened = Inventory("node0", None)
        opened.open()
        yield opened


@contextmanager
def _pynvml_through(send: Send) -> Iterator[None]:
    install_simulated_driver(send)
    try:
        yield
    finally:
        uninstall_simulated()


def is_reset(client: NodeClient, index: int) -> bool:
    """Reset a GPU of a node; whether that was possible: not while an agent, or anybody, has it open."""
    try:
        client.admin("reset", index=index)
    except NodeRefused:
        return False
    return True


class NodeProcess:
    """`python -m trefoil.simulated_node`, started and ended by a test."""

    def __init__(self, folder: Path, *settings: str) -> None:
        self.folder = folder
        self.socket = folder / "node.sock"
        self._argv = [sys.executable, "-m", "trefoil.simulated_node", "--node", "node0"]
        self._argv += ["--socket", str(self.socket), "--set", f"model_repository={ROOT / 'model_repository'}"]
        self._argv += [word for setting in ("call_latency=false", *settings) for word in ("--set", setting)]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, deadline_s: float = 60.0) -> NodeClient:
        with open(self.folder / "node.log", "ab") as log:
            self.process = subprocess.Popen(self._argv, stderr=log, start_new_session=True, cwd=ROOT)
        client = NodeClient(self.socket)
        give_up_s = time.monotonic() + deadline_s
        while True:
            try:
                client.describe()
                return client
            except NodeUnreachable:
                assert self.process.poll() is None, (self.folder / "node.log").read_text()
                assert time.monotonic() < give_up_s
                time.sleep(0.02)

    def end(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(30)

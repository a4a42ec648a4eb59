"""GPUs that must not be used although they answer, and what condemns them."""

import asyncio

import pytest

from power_agent.devices.inventory import Inventory
from power_agent.durability.journal import Journal
from power_agent.settings import PowerAgentSettings
from power_agent.slices.node_state import Device, Node
from power_agent.watch.driver_watch import DriverWatch
from power_agent.watch.xid_watch import Quarantine
from tests.support.plans import CATALOG
from tests.support.simulated_driver import pynvml_on
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceState
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics
from trefoil.simulated_node.machine import Machine

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"
WHY = "Xid 48: double-bit ECC error; reset the GPU"


@pytest.fixture
def machine():
    made = Machine(devices=("A100-SXM4-40GB", "Tesla P4"))
    made.advance(60.0)
    with pynvml_on(made):
        yield made


@pytest.fixture
def inventory(machine):
    opened = Inventory("node0", None)
    opened.open()
    opened.list_devices()
    return opened


@pytest.fixture
def quarantine(inventory):
    return Quarantine(inventory)


def test_a_gpu_is_condemned_while_its_counter_goes_on(quarantine, machine):
    assert quarantine.reason(GPU0) == ""
    quarantine.add(GPU0, WHY)
    for _ in range(3):
        machine.advance(1.0)
        assert quarantine.reason(GPU0) == WHY
    assert quarantine.reason(GPU1) == ""


def test_the_first_reason_stands_until_its_reset_and_a_new_driver_clears_all(quarantine):
    for name in (GPU0, GPU1):
        quarantine.add(name, WHY)
        quarantine.add(name, "Xid 79")
        assert quarantine.reason(name) == WHY
    quarantine.release(GPU0)
    assert (quarantine.reason(GPU0), quarantine.reason(GPU1)) == ("", WHY)
    quarantine.clear()
    assert quarantine.reason(GPU1) == ""


def test_a_driver_that_asks_for_a_reset_is_believed_without_an_event(quarantine, inventory, monkeypatch):
    monkeypatch.setattr(inventory, "recovery_action", lambda device: "a reset of the GPU" if device == GPU0 else "")
    assert quarantine.reason(GPU0) == "its driver asks for a reset of the GPU"
    assert quarantine.reason(GPU1) == ""


class SlowCalls:
    """What a call reads is known only when `go_on` is set."""

    def __init__(self):
        self.go_on = asyncio.Event()

    async def call(self, device, call):
        read = call()
        await self.go_on.wait()
        return read


async def test_a_look_from_before_the_xid_does_not_take_the_fence_back(tmp_path, inventory, quarantine):
    settings = PowerAgentSettings(node_socket=tmp_path / "node.sock", state_dir=tmp_path)
    metrics = Metrics("power_agent", simulated=True)
    node = Node(settings, ManualClock(1e9), Journal(tmp_path, "boot", "1"), CATALOG, metrics)
    device = node.devices[GPU0] = Device(GPU0, A100_40GB, DeviceState.AWAKE)
    calls = SlowCalls()
    watch = DriverWatch(node, None, None, calls, inventory, quarantine)
    look = asyncio.create_task(watch.poll(device))
    await asyncio.sleep(0)
    quarantine.add(GPU0, WHY)
    await watch.fence(device, WHY)
    calls.go_on.set()
    await look
    assert (device.state, node.missing) == (DeviceState.LOST, (f"{GPU0}: {WHY}",))

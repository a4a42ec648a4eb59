"""Xids reach whoever listens, through the real pynvml and its event sets."""

import queue

import pytest

from power_agent.devices.inventory import Inventory
from power_agent.devices.xid_events import FATAL_XIDS, EventWatch, GpuEvent
from tests.support.runtime_contract import until
from tests.support.simulated_driver import A100_40GB, T4, inventory_on, make_driver, pynvml_on
from trefoil.runtime.clock import WallClock
from trefoil.simulated_node.calls import CALLS

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"
PATIENCE_S = 5.0


@pytest.fixture
def driver():
    return make_driver(A100_40GB, T4)


@pytest.fixture
def heard():
    return queue.Queue()


@pytest.fixture
def watch(driver, heard):
    with inventory_on(driver) as inventory:
        inventory.list_devices()
        watching = EventWatch(inventory, WallClock(), heard.put, wait_ms=20)
        yield watching
        watching.stop()


def test_an_xid_names_its_gpu_and_instance(watch, driver, heard):
    watch.start([GPU0, GPU1])
    until(lambda: watch.watching == (GPU0, GPU1))
    driver.xid(driver.gpus[1], 13)
    assert heard.get(timeout=PATIENCE_S) == GpuEvent(GPU1, 13)
    instance = driver.create_gpu_instance(driver.gpus[0], 9, (4, 4))
    driver.xid(driver.gpus[0], 94, instance)
    assert heard.get(timeout=PATIENCE_S) == GpuEvent(GPU0, 94, instance.id)


def test_a_gpu_that_falls_off_the_bus_is_still_named(watch, driver, heard):
    watch.start([GPU0, GPU1])
    until(lambda: watch.watching)
    driver.lose(driver.gpus[0])
    event = heard.get(timeout=PATIENCE_S)
    assert (event.device, event.xid, event.fatal) == (GPU0, 79, True)
    driver.xid(driver.gpus[1], 31)
    assert heard.get(timeout=PATIENCE_S) == GpuEvent(GPU1, 31)


def test_only_what_needs_a_reset_is_fatal():
    assert {xid for xid in range(200) if GpuEvent(GPU0, xid).fatal} == set(FATAL_XIDS)
    assert {48, 79, 95} <= set(FATAL_XIDS)
    assert not {13, 31, 43, 45, 63, 94} & set(FATAL_XIDS)
    assert "fallen off the bus" in GpuEvent(GPU0, 79).text
    assert "catalog" in GpuEvent(GPU0, 31).text


def test_a_driver_without_events_leaves_the_thread_in_peace(driver, heard, monkeypatch):
    with pynvml_on(driver):
        import pynvml

        del pynvml.nvmlLib.nvmlEventSetCreate
        inventory = Inventory("node0", None)
        inventory.open()
        watching = EventWatch(inventory, WallClock(), heard.put, wait_ms=20)
        watching.start([GPU0])
        watching.stop()
        assert watching.watching == ()
        assert heard.empty()


def test_a_node_without_gpus_has_nothing_to_wait_for(heard):
    watching = EventWatch(Inventory("node0", None), WallClock(), heard.put, wait_ms=20)  # NVML is not even opened
    watching.start([])
    watching.stop()
    assert heard.empty()


def test_it_goes_on_after_the_driver_was_loaded_again(watch, driver, heard):
    watch.start([GPU0])
    until(lambda: watch.watching == (GPU0,))
    driver.reload(driver.load_number + 1)
    watch._inventory.open()
    watch._inventory.list_devices()
    watch.start([GPU0])
    until(lambda: watch.watching == (GPU0,) and driver.events._by_handle)
    driver.xid(driver.gpus[0], 48)
    assert heard.get(timeout=PATIENCE_S) == GpuEvent(GPU0, 48)


def test_every_symbol_of_it_is_simulated():
    wanted = {"nvmlEventSetCreate", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2", "nvmlEventSetFree"}
    assert wanted <= set(CALLS)

"""Names, values and gauges as NVML may give them."""

from types import SimpleNamespace

import pynvml
import pytest

from power_agent.devices.inventory import Inventory
from power_agent.devices.nvml_words import device_type_name
from tests.support.simulated_driver import inventory_on, make_driver, pynvml_on
from trefoil.core.device_types import DEVICE_TYPES, DRIVERS

GPU = "node0/gpu0"


@pytest.fixture
def inventory():
    with inventory_on(make_driver()) as opened:
        opened.list_devices()
        yield opened


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM4-40GB", "A100-SXM4-40GB"),
        ("A100-SXM-80GB", "A100-SXM4-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM5-80GB"),
        ("Tesla V100-SXM2-32GB", "Tesla V100-SXM2-32GB"),
        ("Tesla T4", "Tesla T4"),
        ("NVIDIA T4", "Tesla T4"),
        ("Tesla  P4 ", "Tesla P4"),
    ],
)
def test_products_go_by_the_name_of_their_type(name, kind):
    assert device_type_name(name) == kind
    assert kind in DRIVERS


def test_an_unknown_product_keeps_its_name():
    assert device_type_name("NVIDIA RTX 6000 Ada Generation") == "RTX 6000 Ada Generation"
    assert device_type_name("NVIDIA RTX 6000 Ada Generation") not in DEVICE_TYPES
    assert device_type_name("NVIDIA A100-PCIE-40GB") != device_type_name("NVIDIA A100-SXM4-40GB")  # its power differs


def field(kind, attribute, value, code=0):
    return SimpleNamespace(valueType=kind, nvmlReturn=code, value=SimpleNamespace(**{attribute: value}))


@pytest.mark.parametrize(
    ("answer", "watts"),
    [
        (field(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 71_500), 71.5),
        (field(pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, "ullVal", 71_500), 71.5),
        (field(pynvml.NVML_VALUE_TYPE_DOUBLE, "dVal", 71_500.0), 71.5),
        (field(99, "dVal", 0.0), 60.0),  # a type of the future: the other getter is asked
        (field(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", 0, pynvml.NVML_ERROR_NOT_SUPPORTED), 60.0),
    ],
)
def test_power_is_read_as_its_type_says_or_by_the_older_getter(inventory, monkeypatch, answer, watts):
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda _handle, _fields: [answer])
    monkeypatch.setattr(pynvml, "nvmlDeviceGetPowerUsage", lambda _handle: 60_000)
    assert inventory.power_w(GPU) == pytest.approx(watts)


def test_a_driver_says_what_a_gpu_needs(inventory, monkeypatch):
    assert inventory.recovery_action(GPU) is None, "a driver from before that"
    for action, says in ((1, "a reset of the GPU"), (2, "a reboot of the node"), (0, "")):
        answer = field(pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, "uiVal", action)
        monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", lambda _handle, _fields, answer=answer: [answer])
        assert inventory.recovery_action(GPU) == says


def test_event_reasons_were_called_throttle_reasons_before(inventory):
    for gone in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        assert inventory.clock_event_reasons(GPU) == ("idle",)
        pynvml._nvmlGetFunctionPointer_cache.clear()
        delattr(pynvml.nvmlLib, gone)
    assert inventory.clock_event_reasons(GPU) == ()


def test_a_gpu_keeps_its_name_when_a_driver_without_its_neighbour_counts_anew():
    driver = make_driver(*[make_driver().gpus[0].model] * 3)
    with inventory_on(driver) as inventory:
        first, broken, third = inventory.list_devices()
        driver.gpus = tuple(gpu for gpu in driver.gpus if gpu.uuid != broken.uuid)
        for index, gpu in enumerate(driver.gpus):
            gpu.index = index
        inventory.open()
        assert [(d.device, d.uuid) for d in inventory.list_devices()] == [
            (first.device, first.uuid),
            (third.device, third.uuid),
        ]
        assert inventory.observe("node0/gpu2").index == 1


def without(driver, *gone):
    """The driver counts again, without these GPUs."""
    driver.gpus = tuple(gpu for gpu in driver.gpus if gpu not in gone)
    for index, gpu in enumerate(driver.gpus):
        driver._by_uuid[gpu.uuid], gpu.index = gpu, index
    for gpu in gone:
        del driver._by_uuid[gpu.uuid]


def test_a_gpu_keeps_its_name_over_a_restart_without_its_neighbour_and_no_other_gets_that_name():
    driver = make_driver(*[make_driver().gpus[0].model] * 4)
    first, second, third, fourth = driver.gpus
    known = {f"node0/gpu{index}": gpu.uuid for index, gpu in enumerate((first, second, third))}
    with pynvml_on(driver):
        without(driver, first)
        inventory = Inventory("node0", None)
        inventory.remember_names(known)
        inventory.open()
        names = {device.device: device.uuid for device in inventory.list_devices()}
        assert names == {"node0/gpu1": second.uuid, "node0/gpu2": third.uuid, "node0/gpu3": fourth.uuid}
        assert inventory.lost == {}


def test_a_gpu_that_is_lost_goes_by_its_own_name_whatever_its_index_is_now():
    driver = make_driver(*[make_driver().gpus[0].model] * 4)
    first, second, third, _ = driver.gpus
    known = {f"node0/gpu{index}": gpu.uuid for index, gpu in enumerate((first, second, third))}
    with pynvml_on(driver):
        without(driver, first)  # and by that the second is at index 0
        second.lost = True
        inventory = Inventory("node0", None)
        inventory.remember_names(known)
        inventory.open()
        assert [device.device for device in inventory.list_devices()] == ["node0/gpu2", "node0/gpu3"]
        assert list(inventory.lost) == ["node0/gpu1"]
        assert "GPU at index 0" in str(inventory.lost["node0/gpu1"])
        second.lost, third.lost = False, True
        assert [device.device for device in inventory.list_devices()] == ["node0/gpu1", "node0/gpu3"]
        assert list(inventory.lost) == ["node0/gpu2"]


def test_a_gpu_that_is_lost_at_the_start_hides_no_other():
    driver = make_driver(*[make_driver().gpus[0].model] * 2)
    driver.gpus[0].lost = True
    with inventory_on(driver) as inventory:
        assert [device.device for device in inventory.list_devices()] == ["node0/gpu1"]
        assert "GPU is lost" in str(inventory.lost["node0/gpu0"])

"""GPUs that must not be used although they answer: what condemns them, and what proves a reset."""

import pytest

from power_agent.devices.errors import DeviceLost
from power_agent.devices.inventory import Inventory
from power_agent.devices.machine import Machine
from power_agent.xids import Condemned
from tests.support.simulated_driver import pynvml_on

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
def condemned(inventory):
    return Condemned(inventory)


def test_a_gpu_is_condemned_while_its_counter_goes_on(condemned, machine):
    assert condemned.why(GPU0) == ""
    condemned.mark(GPU0, WHY)
    for _ in range(3):
        machine.advance(1.0)
        assert condemned.why(GPU0) == WHY
    assert condemned.why(GPU1) == ""


def test_a_counter_that_begins_anew_proves_a_reset(condemned, machine):
    condemned.why(GPU0)
    condemned.mark(GPU0, WHY)
    machine.reset(machine.gpu(0))
    machine.advance(1.0)
    assert condemned.why(GPU0) == ""
    assert condemned.why(GPU0) == ""


def test_a_gpu_that_was_gone_and_answers_again_was_reset_even_without_a_counter(condemned, machine):
    condemned.mark(GPU1, "Xid 79: the GPU has fallen off the bus; reset the GPU")
    machine.foreign.lose(1)
    with pytest.raises(DeviceLost):
        condemned.why(GPU1)
    machine.reset(machine.gpu(1))
    assert condemned.why(GPU1) == ""


def test_the_first_reason_stands_and_a_new_driver_clears_all(condemned):
    condemned.mark(GPU0, WHY)
    condemned.mark(GPU0, "Xid 79")
    assert condemned.why(GPU0) == WHY
    condemned.clear()
    assert condemned.why(GPU0) == ""


def test_a_driver_that_asks_for_a_reset_is_believed_without_an_event(condemned, inventory, monkeypatch):
    monkeypatch.setattr(inventory, "recovery_action", lambda device: "a reset of the GPU" if device == GPU0 else "")
    assert condemned.why(GPU0) == "its driver asks for a reset of the GPU"
    assert condemned.why(GPU1) == ""

"""A GPU that must be reset is let go of, and the others of the node are used as before."""

import threading

import pytest

from power_agent.devices.errors import DeviceBusy, DeviceReleased, DriverUnavailable, SliceMissing
from power_agent.devices.gpm import Gpm
from power_agent.devices.gpus import Place
from power_agent.devices.inventory import Inventory
from power_agent.devices.session import Session
from tests.support.simulated_driver import create_slice, pynvml_on
from trefoil.simulated_node.clients import OWN
from trefoil.simulated_node.gpu_state import Nvml
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Machine

A100, H100 = "A100-SXM4-40GB", "H100-SXM5-80GB"
GPU0, GPU1, GPU2 = (f"node0/gpu{index}" for index in range(3))


@pytest.fixture
def machine():
    made = Machine(devices=[A100, A100, H100])
    with pynvml_on(made):
        yield made


@pytest.fixture
def inventory(machine):
    opened = Inventory("node0", None, lambda index: machine.driver.holders(machine.gpu(index)))
    opened.open()
    opened.list_devices()
    return opened


def test_it_can_be_reset_while_everything_is_asked_of_the_others(machine, inventory):
    made = create_slice(inventory, GPU2, "3g.40gb", 4)
    machine.attach(77, made.mig_uuid)
    machine.advance(5.0)
    before_j = inventory.energy_j(GPU2)
    inventory.let_go(GPU1)
    assert inventory.released == {GPU1}
    for call in (inventory.energy_j, inventory.mig_mode, inventory.gpu_instances, inventory.observe):
        with pytest.raises(DeviceReleased, match=f"{GPU1}: this agent has let go of it"):
            call(GPU1)
    machine.advance(5.0)
    assert inventory.energy_j(GPU2) > before_j > 0
    assert inventory.gpu_instances(GPU2) == (made,)
    assert inventory.pids(made.mig_uuid) == (77,)
    with pytest.raises(SliceMissing):
        inventory.pids(machine.driver.gpus[1].uuid)
    create_slice(inventory, GPU0, "1g.5gb", 0)
    assert [device.device for device in inventory.list_devices()] == [GPU0, GPU2]
    assert inventory.set_mig_mode(GPU0, True).mig_current
    Interference(machine).reset(1)
    inventory.take_back(GPU1)
    assert inventory.energy_j(GPU1) == 0.0
    assert {device.device for device in inventory.list_devices()} == {GPU0, GPU1, GPU2}


def test_each_opening_is_paired_with_a_shutdown(machine, inventory):
    inventory.open()
    inventory.list_devices()
    inventory.let_go(GPU0)
    Interference(machine).reset(0)
    inventory.close()
    for index in (1, 2):
        Interference(machine).reset(index)


def test_an_agent_that_opens_nvml_anew_for_another_driver_lets_go_of_nothing(machine, inventory):
    inventory.let_go(GPU0)
    machine.reload()
    inventory.open()
    assert len(inventory.list_devices()) == 3
    assert inventory.released == frozenset()


def test_a_gpu_that_is_lost_from_the_start_is_let_go_of(machine):
    Interference(machine).lose(1)
    inventory = Inventory("node0", None)
    inventory.open()
    assert len(inventory.list_devices()) == 2
    assert inventory.place(GPU1) == Place(index=1)
    inventory.let_go(GPU1)
    assert len(inventory.list_devices()) == 2
    Interference(machine).reset(1)
    inventory.take_back(GPU1)
    assert inventory.list_devices()[1].device == GPU1


def test_samples_of_activity_go_with_their_session(machine, inventory):
    gpm, made = Gpm(inventory), create_slice(inventory, GPU2, "3g.40gb", 4)
    gpm.activity(GPU2, {made.key: 1})
    machine.advance(1.0)
    inventory.let_go(GPU1)
    assert gpm.activity(GPU2, {made.key: 1}) == {}, "nothing to compare with"
    machine.advance(1.0)
    assert gpm.activity(GPU2, {made.key: 1}) == {made.key: 0.0}


def test_nvml_that_does_not_open_again_is_resumed_and_what_was_let_go_of_stays_so(machine, inventory):
    machine.faults.plan("nvmlInitWithFlags", code=Nvml.DRIVER_NOT_LOADED)
    with pytest.raises(DriverUnavailable):
        inventory.let_go(GPU0)
    assert not inventory.is_open
    with pytest.raises(DriverUnavailable):
        inventory.energy_j(GPU1)
    inventory.resume()
    assert inventory.energy_j(GPU1) is not None
    Interference(machine).reset(0)


def test_a_call_that_does_not_return_keeps_the_session_as_it_is(machine, inventory, monkeypatch):
    monkeypatch.setattr("power_agent.devices.gpus.QUIET_MAX_S", 0.05)
    with inventory.session.use(), pytest.raises(DeviceBusy, match="1 calls have not returned"):
        inventory.let_go(GPU0)
    assert inventory.released == frozenset()
    assert OWN in machine.driver.clients.attached_to(0)


def test_whoever_changes_the_session_is_alone_and_new_callers_wait():
    session, began, log = Session(), threading.Event(), []

    def long_call():
        with session.use():
            began.set()
            while not session.is_wanted:
                began.wait(0.001)
            log.append("left")

    def new_call():
        with session.use():
            log.append("call")

    first, second = threading.Thread(target=long_call), threading.Thread(target=new_call)
    first.start()
    began.wait(10)
    with session.change(10.0):
        second.start()
        log.append("changed")
    second.join()
    first.join()
    assert log == ["left", "changed", "call"]


def test_the_remedy_names_who_has_it_open_and_the_commands_by_uuid(machine, inventory):
    uuid = machine.driver.gpus[0].uuid
    reset = f"sudo nvidia-smi -i {uuid} --gpu-reset"
    inventory.let_go(GPU0)
    assert inventory.reset_remedy(GPU0) == reset
    machine.execute_call(machine.begin_call("nvmlDeviceGetHandleByIndex_v2", [0]), [0], 4711)
    assert inventory.reset_remedy(GPU0) == f"stop who has it open: 4711; then {reset}"
    Interference(machine).persistenced(True)
    off = f"sudo nvidia-smi -i {uuid} -pm 0, as nvidia-persistenced has it open"
    on = f"sudo nvidia-smi -i {uuid} -pm 1"
    assert inventory.reset_remedy(GPU0) == f"stop who has it open: 4711; then {off}; then {reset}; then {on}"

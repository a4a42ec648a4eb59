"""GPUs that need a reset: let go of, said how, looked at, taken back; what proves that one was reset."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from power_agent.devices.core.reset_proof import NO_PROOF, BeforeReset, GpuLook, unreset_reason
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceLost, DeviceReleased, NodeRefused
from power_agent.devices.inventory import Inventory
from power_agent.durability.journal import Journal
from power_agent.energy.core.meter import MeterState, advance
from power_agent.energy.device_meters import DeviceMeters
from power_agent.settings import PowerAgentSettings
from power_agent.slices.adoption import list_devices
from power_agent.slices.core.attribution import DeviceReading
from power_agent.slices.node_state import Node
from power_agent.slices.slice_state import Slice
from power_agent.watch.driver_watch import DriverWatch
from power_agent.watch.xid_watch import Quarantine
from tests.support.plans import CATALOG
from tests.support.simulated_driver import pynvml_on
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceState, SliceKey, SliceState
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics
from trefoil.simulated_node.gpu_state import Nvml
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Machine

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"
OFTEN = 10.0
LOOKER = 99

CONDEMNED = BeforeReset(condemned=True, counter_j=500.0, persistence=True)
WELL = GpuLook(True, True, None, 600.0, True)
ANEW = replace(WELL, counter_j=1.0)


@pytest.mark.parametrize(
    ("before", "seen", "why"),
    [
        (BeforeReset(), WELL, ""),  # it did not answer, and does
        (BeforeReset(), replace(WELL, recovery_action="a reset of the GPU"), "its driver asks for a reset of the GPU"),
        (CONDEMNED, WELL, NO_PROOF),
        (CONDEMNED, ANEW, ""),
        (CONDEMNED, replace(ANEW, persistence=False), NO_PROOF),  # in the middle of it
        (replace(CONDEMNED, persistence=False), replace(ANEW, persistence=False), NO_PROOF),  # as whenever it is closed
        (replace(CONDEMNED, counter_j=None), replace(ANEW, counter_j=None), NO_PROOF),
        (replace(CONDEMNED, asked=True), replace(WELL, recovery_action=""), ""),
        (CONDEMNED, replace(WELL, recovery_action=""), NO_PROOF),  # it never asked, so that its silence says nothing
        (BeforeReset(waits_for_mig=True), replace(WELL, mig_current=False), "its MIG mode waits for the reset"),
        (BeforeReset(waits_for_mig=True), WELL, ""),
    ],
)
def test_what_proves_a_reset(before, seen, why):
    assert unreset_reason(before, seen) == why


class Bench:
    """The watch of a node with two GPUs, on a machine whose time it moves; looks come from another process."""

    def __init__(self, folder, machine: Machine, **settings) -> None:
        self.machine = machine
        self.clock = ManualClock(1e9)
        made = PowerAgentSettings(node_socket=folder / "node.sock", state_dir=folder, reset_poll_s=OFTEN, **settings)
        journal = Journal(folder, "boot", "1")
        journal.open()
        self.node = Node(made, self.clock, journal, CATALOG, Metrics("power_agent", simulated=True))
        self.inventory = Inventory("node0", None, lambda index: machine.driver.holders(machine.gpu(index)))
        self.calls = DriverCalls(self.inventory)
        self.quarantine = Quarantine(self.inventory)
        parts = (self.node, NoSlices(), None, self.calls, self.inventory, self.quarantine)
        self.watch = DriverWatch(*parts, self.look)
        self.looks = 0

    async def look(self, device, uuid, bus_id, node_socket) -> GpuLook:
        self.looks += 1
        machine = self.machine

        def ask(symbol, *args):
            code, out = machine.execute_call(machine.begin_call(symbol, args), args, LOOKER)
            if code != Nvml.SUCCESS:
                raise DeviceLost(f"NVML {code}")
            return out

        ask("nvmlInitWithFlags", 0)
        try:
            (gpu,) = ask("nvmlDeviceGetHandleByPciBusId_v2", bus_id)
            (action,) = ask("nvmlDeviceGetFieldValues", gpu, [230])[0]
            told = None if action["nvmlReturn"] else ("a reset of the GPU" if action["value"] else "")
            (counted_mj,) = ask("nvmlDeviceGetTotalEnergyConsumption", gpu)
            (persistence,) = ask("nvmlDeviceGetPersistenceMode", gpu)
            return GpuLook(*map(bool, ask("nvmlDeviceGetMigMode", gpu)), told, counted_mj / 1e3, bool(persistence))
        finally:
            ask("nvmlShutdown")

    async def poll(self, seconds: float = 0.0) -> None:
        self.clock.move(seconds)
        self.machine.advance(seconds or 0.1)
        for device in self.node.devices.values():
            await self.watch.poll(device)

    async def xid(self, name: str, why: str = "Xid 48: double-bit ECC error; reset the GPU") -> None:
        Interference(self.machine).xid(int(name[-1]), 48)
        self.quarantine.add(name, why)
        await self.watch.fence(self.node.devices[name], why)

    def is_reset(self, index: int) -> bool:
        try:
            Interference(self.machine).reset(index)
        except NodeRefused:
            return False
        return True

    def missing(self, name: str) -> str:
        return next((entry for entry in self.node.missing if entry.startswith(f"{name}:")), "")

    def state(self, name: str) -> DeviceState:
        return self.node.devices[name].state


class NoSlices:
    """In place of the reconciler."""

    def busy(self, part) -> bool:
        return False

    def interrupt(self, part) -> None: ...


@asynccontextmanager
async def running(folder, machine: Machine, **settings) -> AsyncIterator[Bench]:
    """An agent's watch that has found its GPUs, an hour after the machine began."""
    with pynvml_on(machine):
        one = Bench(folder, machine, **settings)
        machine.advance(3600.0)
        await list_devices(one.node, one.calls, one.inventory, await one.calls.reopen())
        one.node.driver_load_id = "1"
        try:
            yield one
        finally:
            await one.calls.close()
            one.node.journal.close()


def a100s(**options) -> Machine:
    return Machine(devices=("A100-SXM4-40GB",) * 2, **options)


@pytest.mark.parametrize("version", ["535.161.08", "570.86.15"])
async def test_a_condemned_gpu_can_be_reset_under_the_agent_which_uses_it_again(tmp_path, version):
    async with running(tmp_path, a100s(driver_version=version)) as one:
        await one.xid(GPU1)
        assert not one.is_reset(1), "the agent has it open"
        before_j = one.inventory.energy_j(GPU0)
        await one.poll()
        uuid = one.node.devices[GPU1].uuid
        assert one.missing(GPU1) == (
            f"{GPU1}: Xid 48: double-bit ECC error; reset the GPU. This agent has let go of it. "
            f"Remedy: sudo nvidia-smi -i {uuid} --gpu-reset"
        )
        await one.poll(OFTEN)
        assert (one.looks, one.state(GPU1)) == (1, DeviceState.LOST), "it answers, and was not reset"
        assert one.state(GPU0) != DeviceState.LOST
        assert one.inventory.energy_j(GPU0) > before_j, "its neighbour is metered all the while"
        assert one.is_reset(1)
        await one.poll(OFTEN / 2)
        assert one.looks == 1, "a look has it open for a moment: they are few"
        await one.poll(OFTEN / 2)
        assert (one.state(GPU1), one.node.missing) == (DeviceState.ASLEEP, ())
        assert one.quarantine.reason(GPU1) == ""
        assert not one.is_reset(1), "it is in use"


async def test_a_gpu_off_the_bus_is_used_again_when_it_answers(tmp_path):
    async with running(tmp_path, a100s()) as one:
        Interference(one.machine).lose(0)
        await one.poll()
        assert (one.state(GPU0), GPU0 in one.inventory.released) == (DeviceState.LOST, True)
        await one.poll(OFTEN)
        assert "NVML 15" in one.missing(GPU0)
        assert one.is_reset(0)
        await one.poll(OFTEN)
        assert (one.state(GPU0), one.node.missing) == (DeviceState.ASLEEP, ())


async def test_who_else_has_the_gpu_open_is_named_and_persistenced_with_its_remedy(tmp_path):
    async with running(tmp_path, a100s()) as one:
        Interference(one.machine).persistenced(True)
        await one.xid(GPU0)
        await one.poll()
        uuid = one.node.devices[GPU0].uuid
        off = f"sudo nvidia-smi -i {uuid} -pm 0, as nvidia-persistenced has it open"
        assert f"Remedy: {off}; then sudo" in one.missing(GPU0)
        assert not one.is_reset(0)
        Interference(one.machine).set_persistence(0, False)
        one.machine.deinitialise(one.machine.gpu(0))  # nobody has it open any more: its counter begins again
        await one.poll(OFTEN)
        assert (one.state(GPU0), NO_PROOF in one.missing(GPU0)) == (DeviceState.LOST, True), "that is not a reset"
        assert one.is_reset(0)
        await one.poll(OFTEN)
        assert one.state(GPU0) == DeviceState.LOST
        Interference(one.machine).set_persistence(0, True)
        await one.poll(OFTEN)
        assert (one.state(GPU0), one.node.missing) == (DeviceState.ASLEEP, ())


async def test_mig_mode_that_waits_for_a_reset_gets_it_under_the_agent(tmp_path):
    async with running(tmp_path, a100s(mig_enabled=False), mig_mode="enable") as one:
        await one.poll()
        uuid = one.node.devices[GPU0].uuid
        waits = f"{GPU0} mig: MIG mode waits for a reset of the GPU"
        remedy = f"This agent has let go of it. Remedy: sudo nvidia-smi -i {uuid} --gpu-reset"
        assert one.missing(f"{GPU0} mig") == f"{waits}. {remedy}"
        assert one.state(GPU0) == DeviceState.ASLEEP, "it is not lost"
        await one.poll(OFTEN)
        assert one.missing(f"{GPU0} mig") == f"{waits}; its MIG mode waits for the reset. {remedy}"
        assert one.is_reset(0)
        await one.poll(OFTEN)
        assert one.node.devices[GPU0].mig_current
        assert not one.missing(f"{GPU0} mig")
        assert one.missing(f"{GPU1} mig"), "the other one waits on"


async def test_a_driver_that_is_loaded_again_ends_all_waiting(tmp_path):
    async with running(tmp_path, a100s(), driver_marker_path=tmp_path / "load") as one:
        await one.xid(GPU0)
        await one.poll()
        one.machine.reload()
        (tmp_path / "load").write_text("2")
        await one.watch._check_driver()
        await one.poll()
        assert (one.inventory.released, one.state(GPU0)) == (frozenset(), DeviceState.ASLEEP)
        await one.xid(GPU0)
        await one.poll()
        assert one.inventory.released == {GPU0}, "at once, whenever the last one was"


async def test_nvml_that_could_not_be_opened_again_is_opened_by_the_watch(tmp_path):
    async with running(tmp_path, a100s(), driver_marker_path=tmp_path / "load") as one:
        (tmp_path / "load").write_text("1")
        one.machine.faults.plan("nvmlInitWithFlags", code=Nvml.DRIVER_NOT_LOADED)
        await one.xid(GPU0)
        await one.poll()
        assert not one.inventory.is_open
        await one.watch._check_driver()
        await one.poll()
        assert one.inventory.energy_j(GPU1) is not None
        assert one.is_reset(0)
        await one.poll(OFTEN)
        assert one.state(GPU0) == DeviceState.ASLEEP


async def test_a_gpu_is_not_let_go_of_while_a_call_to_it_hangs(tmp_path):
    async with running(tmp_path, a100s()) as one:
        one.calls._call_timeout_s, go_on = 0.05, threading.Event()
        with pytest.raises(DeviceLost):
            await one.calls.call(GPU0, lambda: go_on.wait(60))
        one.calls._call_timeout_s = 60.0
        await one.poll()
        assert (one.state(GPU0), one.inventory.released) == (DeviceState.LOST, frozenset())
        assert "a restart before it" in one.missing(GPU0)
        go_on.set()
        await one.calls._hung[GPU0]
        await one.poll()
        assert (one.state(GPU0), one.looks) == (DeviceState.ASLEEP, 0)


class Meter:
    """Meters one GPU by the agent's own meter; `booked_j` is what all samples together hold."""

    def __init__(self, one: Bench, name: str) -> None:
        self.name, self.booked_j, self.state = name, 0.0, MeterState(name)
        self.sources = DeviceMeters(one.inventory, one.clock)

    def read(self) -> bool:
        try:
            found = self.sources.read(self.name, A100_40GB, "boot/1", {}, False)
        except DeviceReleased:
            return False
        reading = DeviceReading(
            self.name, found.at_s, found.monotonic_s, found.origin, found.counter_j, A100_40GB.idle_w, 0.0,
            DeviceState.AWAKE, found.clock_mhz, serving_s=0.0, method=found.method, power_max_w=A100_40GB.max_w,
        )  # fmt: skip
        self.state, sample = advance(self.state, reading, "node0", True)
        self.booked_j += sample.counter_j if sample is not None else 0.0
        return True


async def test_each_joule_is_booked_once_through_the_reset_of_one_gpu(tmp_path):
    def drawn_j(index: int) -> float:
        return float(one.machine.truth()["devices"][index]["counter_j"])

    async with running(tmp_path, a100s()) as one:
        meters = [Meter(one, name) for name in (GPU0, GPU1)]
        one.clock.move(1.0)
        assert [meter.read() for meter in meters] == [True, True]
        from_j = drawn_j(0)
        await one.xid(GPU1)
        for _ in range(3):
            await one.poll(OFTEN)
            assert [meter.read() for meter in meters] == [True, False]
        reset_j = drawn_j(1)
        assert one.is_reset(1)
        await one.poll(OFTEN)
        assert [meter.read() for meter in meters] == [True, True]
        assert meters[0].booked_j == pytest.approx(drawn_j(0) - from_j, abs=0.01)
        assert meters[1].booked_j == pytest.approx(drawn_j(1) - reset_j, abs=0.01), "all since the reset"
        assert [meter.state.counter_resets for meter in meters] == [0, 1]


async def test_a_slice_that_could_not_start_without_a_driver_starts_at_once_with_the_next_one(tmp_path):
    async with running(tmp_path, a100s()) as one:
        key = SliceKey(GPU0, "7g.40gb", 0, 8)
        part = one.node.slices[key] = Slice(key, 1, SliceState.FAILED, 0.0, lambda *_: None)
        part.failures, part.retry_at_s = 6, one.clock.monotonic_s() + 15.0
        (tmp_path / "driver_load_id").write_text("2")
        watching = asyncio.create_task(one.watch.run())
        async with asyncio.timeout(10.0):
            while one.node.driver_load_id != "2":
                await asyncio.sleep(0.01)
        watching.cancel()
        assert (part.failures, part.retry_at_s) == (0, 0.0)

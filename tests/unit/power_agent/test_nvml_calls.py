"""How often the driver is called: each NVML call takes a lock that all of the machine's GPUs share."""

from collections import Counter

import pynvml
import pytest

from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.inventory import Inventory
from power_agent.slices.core.reconcile import CREATE, SeenDevice, SeenSlice, reconcile
from power_agent.slices.mig import MigInstances
from tests.support.plans import CATALOG, LARGE, SMALL, planned
from tests.support.simulated_driver import create_slice, destroy_slice, make_driver, pynvml_on
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.fleet import DeviceState, SliceState
from trefoil.core.plan import NodePlan, PlannedDevice
from trefoil.core.plan_check import sealed
from trefoil.runtime.clock import WallClock

GPU = "node0/gpu0"
CHANGES = {
    "nvmlComputeInstanceDestroy": 1,
    "nvmlGpuInstanceDestroy": 1,
    "nvmlDeviceCreateGpuInstanceWithPlacement": 7,
    "nvmlGpuInstanceCreateComputeInstance": 7,
}
READS_PER_CHANGE = 2.6  # the ids of compute-instance profiles are read too, once per driver load
NOTHING_TO_DO = 2  # look at the instance that we hold, list its profile


@pytest.fixture
def driver():
    """An A100 whose driver counts its calls by symbol."""
    with pynvml_on(make_driver()):
        shim = pynvml.nvmlLib
        send, counts = shim._send, Counter()

        def counting(symbol, args):
            counts[symbol] += 1
            return send(symbol, args)

        shim._send = counting
        inventory = Inventory("node0", proc=None)
        inventory.open()
        yield inventory, counts
        inventory.close()


async def carry_out(mig: MigInstances, tasks) -> None:
    verbs = {verb: getattr(mig, verb) for verb in ("destroy_ci", "destroy_gi", *CREATE)}
    for task in tasks:
        if task.verb in verbs:
            await verbs[task.verb](task.slice)


async def test_a_repartition_calls_the_driver_as_little_as_can_be(driver, capsys):
    inventory, counts = driver
    calls = DriverCalls(inventory)
    mig = MigInstances(calls, inventory, WallClock(), 0, 0.1)
    whole = planned("7g.40gb", 0, LARGE)
    create_slice(inventory, GPU, "7g.40gb", 0)
    sevenths = tuple(planned("1g.5gb", start, SMALL) for start in range(7))
    plan = sealed(NodePlan(node="node0", devices=(PlannedDevice(GPU, DeviceState.AWAKE, sevenths),)), Revision(1, 1))
    seen = SeenSlice(whole.key, SliceState.GONE)
    tasks = reconcile((SeenDevice(GPU, A100_40GB, DeviceState.AWAKE, slices=(seen,)),), plan, CATALOG)
    counts.clear()
    await carry_out(mig, tasks)
    changing = {symbol: count for symbol, count in counts.items() if symbol in CHANGES}
    reads = counts.total() - sum(changing.values())
    with capsys.disabled():
        by_symbol = ", ".join(f"{symbol.removeprefix('nvml')} {count}" for symbol, count in counts.most_common())
        print(f"\n 7g to 7 x 1g: {sum(changing.values())} changing NVML calls and {reads} reads: {by_symbol}")
    assert changing == CHANGES
    assert reads <= READS_PER_CHANGE * sum(CHANGES.values())
    assert [s.key.slice_type for s in inventory.gpu_instances(GPU)] == ["1g.5gb"] * 7
    await calls.close()


async def test_what_is_as_it_ought_to_be_costs_almost_nothing(driver):
    inventory, counts = driver
    calls = DriverCalls(inventory)
    mig = MigInstances(calls, inventory, WallClock(), 0, 0.1)
    made = create_slice(inventory, GPU, "3g.20gb", 4)
    counts.clear()
    assert (await mig.create_ci(made.key)).mig_uuid == made.mig_uuid
    assert not {"nvmlDeviceGetGpuInstances", "nvmlDeviceGetHandleByIndex_v2"} & set(counts)
    destroy_slice(inventory, made.key)
    counts.clear()
    await mig.destroy_ci(made.key)
    await mig.destroy_gi(made.key)
    assert counts.total() <= 2 * NOTHING_TO_DO
    await calls.close()


def test_a_handle_that_became_somebody_elses_instance_is_not_used(driver):
    inventory, _ = driver
    mine = create_slice(inventory, GPU, "3g.20gb", 4).key
    other = Inventory("node0", proc=None)  # another client of the same driver
    other.open()
    destroy_slice(other, mine)
    theirs = create_slice(other, GPU, "2g.10gb", 4)
    destroy_slice(inventory, mine)
    assert [s.mig_uuid for s in inventory.gpu_instances(GPU)] == [theirs.mig_uuid]
    other.close()

"""Rehearsed trouble: each fault that hardware has shown, others at the GPUs, and what is told to those who watch."""

import ctypes

import pynvml
import pytest

from power_agent.devices.errors import NodeRefused
from tests.support.simulated_driver import pynvml_on
from trefoil.simulated_node.calls import CALLS
from trefoil.simulated_node.faults import RULES_MAX, FaultPlan
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import LATENCY_S, SYMBOLS_PRIVILEGED, Load, Machine
from trefoil.simulated_node.monitoring import SAMPLES_MAX, SETS_MAX

A100, H100 = "A100-SXM4-40GB", "H100-SXM5-80GB"


@pytest.fixture
def machine():
    made = Machine(devices=[A100, A100])
    with pynvml_on(made):
        pynvml.nvmlInit()
        yield made


@pytest.fixture
def gpu(machine):
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def make(gpu):
    place = pynvml.c_nvmlGpuInstancePlacement_t(4, 4)
    instance = pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(gpu, 9, ctypes.byref(place))
    return instance, pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 2)


def instances(gpu):
    found, count = (pynvml.c_nvmlGpuInstance_t * 2)(), ctypes.c_uint(2)
    pynvml.nvmlDeviceGetGpuInstances(gpu, 9, found, ctypes.byref(count))
    return list(found[: count.value])


# --- the fault plan ---


def test_a_hidden_client_holds_an_instance_until_it_lets_go(machine, gpu):
    instance, compute = make(gpu)
    pynvml.nvmlComputeInstanceDestroy(compute)
    Interference(machine).leak_handle(0, 4)
    for _ in range(5):
        with pytest.raises(pynvml.NVMLError_InUse):
            pynvml.nvmlGpuInstanceDestroy(instance)
    assert pynvml.nvmlDeviceGetComputeRunningProcesses(gpu) == []
    Interference(machine).release_handles(0)
    pynvml.nvmlGpuInstanceDestroy(instance)


def test_a_destroy_that_only_pretends(machine, gpu):
    instance, compute = make(gpu)
    pynvml.nvmlComputeInstanceDestroy(compute)
    machine.faults.plan("nvmlGpuInstanceDestroy", effect="pretend")
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert len(instances(gpu)) == 1
    pynvml.nvmlGpuInstanceDestroy(instance)
    assert instances(gpu) == []


@pytest.mark.parametrize(
    ("symbol", "rule", "error", "left"),
    [
        ("nvmlGpuInstanceCreateComputeInstance", {"code": 23}, pynvml.NVMLError_InsufficientResources, 1),
        ("nvmlDeviceCreateGpuInstanceWithPlacement", {"effect": "fail_after"}, pynvml.NVMLError_Unknown, 1),
        ("nvmlGpuInstanceCreateComputeInstance", {"effect": "reload"}, pynvml.NVMLError_Uninitialized, 0),
    ],
    ids=["no room in the GPU instance", "carried out, answered by an error", "a driver restart in mid plan"],
)
def test_a_creation_that_fails_leaves_what_was_made_before(machine, gpu, symbol, rule, error, left):
    machine.faults.plan(symbol, **rule)
    with pytest.raises(error):
        make(gpu)
    assert len(instances(pynvml.nvmlDeviceGetHandleByIndex(0))) == left


def test_an_unknown_error_while_locking_clocks(machine, gpu):
    machine.faults.plan("nvmlDeviceSetGpuLockedClocks", after=1)
    pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 210, 900)
    with pytest.raises(pynvml.NVMLError_Unknown):
        pynvml.nvmlDeviceSetGpuLockedClocks(gpu, 210, 600)
    assert machine.driver.gpus[0].locked_mhz == (210, 900)


def test_a_slow_call_takes_the_machine_s_time(machine, gpu):
    machine.faults.plan("nvmlDeviceGetHandleByUUID", effect="delay", delay_s=10.0)
    pynvml.nvmlDeviceGetHandleByUUID(pynvml.nvmlDeviceGetUUID(gpu))
    assert machine.driver.now_s == pytest.approx(10.0)


def test_a_gpu_lost_in_the_middle_of_a_plan_answers_nothing_else_until_its_reset(machine, gpu):
    other = pynvml.nvmlDeviceGetHandleByIndex(1)
    machine.faults.plan("*", effect="lose", after=2, index=0)
    make(gpu)  # two calls
    for call in (pynvml.nvmlDeviceGetMigMode, pynvml.nvmlDeviceGetPowerUsage, pynvml.nvmlDeviceGetUUID, instances):
        with pytest.raises(pynvml.NVMLError_GpuIsLost):
            call(gpu)
    with pytest.raises(pynvml.NVMLError_GpuIsLost):
        pynvml.nvmlDeviceGetHandleByIndex(0)
    assert pynvml.nvmlDeviceGetMigMode(other) == [1, 1]
    pynvml.nvmlShutdown()
    Interference(machine).reset(0)
    pynvml.nvmlInit()
    assert instances(gpu) == []


def test_chance_is_seeded():
    def pattern(seed):
        plan = FaultPlan(seed)
        plan.plan("nvmlGpuInstanceDestroy", code=19, times=1000, probability=0.3)
        return [plan.next_fault("nvmlGpuInstanceDestroy") is not None for _ in range(200)]

    assert pattern(1) == pattern(1) != pattern(2)
    assert 30 < sum(pattern(1)) < 90


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"symbol": "nvmlNothing"}, "no symbol 'nvmlNothing'"),
        ({"symbol": "*", "effect": "explode"}, "one of fail, fail_after"),
        ({"symbol": "nvmlDeviceGetMigMode", "effect": "pretend"}, "it returns something"),
        ({"symbol": "*", "probability": 2.0}, "between 0 and 1"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule, says):
    with pytest.raises(NodeRefused, match=says):
        FaultPlan().plan(**rule)


def test_rules_are_bounded_and_can_be_cleared():
    plan = FaultPlan()
    for _ in range(RULES_MAX):
        plan.plan("*")
    with pytest.raises(NodeRefused, match="clear them"):
        plan.plan("*")
    plan.clear()
    assert plan.next_fault("nvmlInitWithFlags") is None


def test_tables_name_symbols_that_exist():
    assert set(CALLS) >= SYMBOLS_PRIVILEGED
    assert set(CALLS) >= set(LATENCY_S)


def test_mig_mode_takes_longest_on_ampere():
    took_s, told = {}, {}
    for model in (A100, H100):
        slow = Machine(devices=[model], mig_enabled=False, call_latency=True)
        with pynvml_on(slow):
            pynvml.nvmlInit()
            told[model] = pynvml.nvmlDeviceSetMigMode(pynvml.nvmlDeviceGetHandleByIndex(0), 1)
        took_s[model] = slow.driver.now_s
    assert told == {A100: pynvml.NVML_ERROR_RESET_REQUIRED, H100: pynvml.NVML_SUCCESS}
    assert 4.8 <= took_s[A100] <= 7.2
    assert 0.8 <= took_s[H100] <= 1.2


# --- somebody else ---


def test_somebody_else_creates_locks_limits_and_destroys(machine, gpu):
    uuid = Interference(machine).create_gi(0, "3g.20gb", 4)
    Interference(machine).lock_clocks(0, 210, 705)
    Interference(machine).set_power_limit(0, 250.0)
    assert [pynvml.nvmlGpuInstanceGetInfo(instance).placement.start for instance in instances(gpu)] == [4]
    assert pynvml.nvmlDeviceGetEnforcedPowerLimit(gpu) == 250_000
    Interference(machine).attach(0, 4711, start=4)
    mig = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    assert [row.pid for row in pynvml.nvmlDeviceGetComputeRunningProcesses(mig)] == [4711]
    assert pynvml.nvmlDeviceGetClockInfo(gpu, pynvml.NVML_CLOCK_SM) == 705
    with pytest.raises(NodeRefused, match=r"IN_USE.*stop its processes"):
        Interference(machine).destroy(0, 4)
    Interference(machine).detach(4711)
    Interference(machine).destroy(0, 4, compute_only=True)
    assert len(instances(gpu)) == 1
    Interference(machine).destroy(0, 4)
    Interference(machine).reset_clocks(0)
    assert instances(gpu) == []


def test_what_others_cannot_do_says_why(machine):
    Interference(machine).create_gi(0, "3g.20gb", 4, compute=False)
    for act, says in (
        (lambda: Interference(machine).create_gi(0, "2g.10gb", 4), "INSUFFICIENT_RESOURCES.*the place is taken"),
        (lambda: Interference(machine).create_gi(0, "2g.20gb", 0), "one of 1g.5gb"),
        (lambda: Interference(machine).create_gi(7, "2g.10gb", 0), r"no GPU 7.*0 to 1"),
        (lambda: Interference(machine).destroy(0, 0), "one of 4"),
        (lambda: Interference(machine).attach(0, 1, start=4), "create one first"),
        (lambda: Interference(machine).attach(0, 1), "INVALID_ARGUMENT"),
        (lambda: Interference(machine).lock_clocks(0, 1, 2), "INVALID_ARGUMENT"),
    ):
        with pytest.raises(NodeRefused, match=says):
            act()


def test_a_stale_session_goes_on_listing_what_somebody_else_destroyed():
    machine = Machine(stale_listing=True)
    with pynvml_on(machine):
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        uuid = Interference(machine).create_gi(0, "3g.20gb", 4)
        mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0)
        assert pynvml.nvmlDeviceGetUUID(mig) == uuid
        assert len(instances(gpu)) == 1
        Interference(machine).destroy(0, 4)
        (stale,) = instances(gpu)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            pynvml.nvmlGpuInstanceGetInfo(stale)
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 0))
        pynvml.nvmlInit()
        assert instances(gpu) == []


# --- events ---


def listen(gpu):
    events = pynvml.nvmlEventSetCreate()
    assert pynvml.nvmlDeviceGetSupportedEventTypes(gpu) & pynvml.nvmlEventTypeXidCriticalError
    pynvml.nvmlDeviceRegisterEvents(gpu, pynvml.nvmlEventTypeXidCriticalError, events)
    return events


def test_an_error_reaches_those_who_listen_to_that_gpu(machine, gpu):
    events = listen(gpu)
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait(events, 0)
    gi_id = pynvml.nvmlGpuInstanceGetInfo(make(gpu)[0]).id
    Interference(machine).xid(0, 31, start=4)
    Interference(machine).xid(1, 13)
    Interference(machine).lose(0)
    first, second = (pynvml.nvmlEventSetWait(events, 0) for _ in range(2))
    assert (first.eventType, first.eventData, first.gpuInstanceId) == (8, 31, gi_id)
    assert (second.eventData, second.gpuInstanceId) == (79, 0xFFFFFFFF)
    handles = [ctypes.cast(handle, ctypes.c_void_p).value for handle in (first.device, second.device, gpu)]
    assert len(set(handles)) == 1
    with pytest.raises(pynvml.NVMLError_Timeout):
        pynvml.nvmlEventSetWait(events, 0)
    pynvml.nvmlEventSetFree(events)
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlEventSetWait(events, 0)


def test_event_sets_of_killed_clients_do_not_pile_up(machine, gpu):
    sets = [listen(gpu) for _ in range(SETS_MAX + 1)]
    with pytest.raises(pynvml.NVMLError_InvalidArgument):
        pynvml.nvmlEventSetWait(sets[0], 0)
    machine.reload()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlEventSetWait(sets[-1], 0)


# --- performance monitoring ---


def metrics(first, second, *wanted):
    query = pynvml.c_nvmlGpmMetricsGet_t()
    query.version, query.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(wanted)
    query.sample1, query.sample2 = first, second
    for row, metric in enumerate(wanted):
        query.metrics[row].metricId = metric
    pynvml.nvmlGpmMetricsGet(query)
    return [(query.metrics[row].nvmlReturn, query.metrics[row].value) for row in range(len(wanted))]


def test_gpm_tells_what_each_slice_of_a_hopper_did():
    machine = Machine(devices=[H100])
    with pynvml_on(machine):
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
        assert pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice == 1
        busy, calm = (Interference(machine).create_gi(0, "3g.40gb", start) for start in (0, 4))
        ids = [pynvml.nvmlDeviceGetGpuInstanceId(pynvml.nvmlDeviceGetHandleByUUID(uuid)) for uuid in (busy, calm)]
        machine.attach(1, busy)
        machine.attach(2, calm)
        before = [pynvml.nvmlGpmMigSampleGet(gpu, gi, pynvml.nvmlGpmSampleAlloc()) for gi in ids]
        whole = pynvml.nvmlGpmSampleGet(gpu, pynvml.nvmlGpmSampleAlloc())
        machine.advance(1.0, [Load(busy, 0.8, density=0.5), Load(calm, 0.1)])
        after = [pynvml.nvmlGpmMigSampleGet(gpu, gi, pynvml.nvmlGpmSampleAlloc()) for gi in ids]
        later = pynvml.nvmlGpmSampleGet(gpu, pynvml.nvmlGpmSampleAlloc())
        assert metrics(before[0], after[0], 1, 2, 99) == [(0, pytest.approx(80)), (0, pytest.approx(40)), (3, 0.0)]
        assert metrics(before[1], after[1], 1) == [(0, pytest.approx(10))]
        assert metrics(whole, later, 1) == [(0, pytest.approx(90 * 60 / 132))]
        assert metrics(after[0], later, 1) == [(pynvml.NVML_ERROR_NO_DATA, 0.0)]  # no time has passed
        pynvml.nvmlGpmSampleFree(later)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            metrics(after[0], later, 1)
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            metrics(pynvml.nvmlGpmSampleAlloc(), after[0], 1)
        with pytest.raises(pynvml.NVMLError_NotFound):
            pynvml.nvmlGpmMigSampleGet(gpu, 14, pynvml.nvmlGpmSampleAlloc())
        for _ in range(SAMPLES_MAX):
            pynvml.nvmlGpmSampleAlloc()  # leaked by a killed client
        with pytest.raises(pynvml.NVMLError_InvalidArgument):
            metrics(before[0], after[0], 1)


def test_gpm_is_for_hopper(machine, gpu):
    assert pynvml.nvmlGpmQueryDeviceSupport(gpu).isSupportedDevice == 0
    with pytest.raises(pynvml.NVMLError_NotSupported):
        pynvml.nvmlGpmSampleGet(gpu, pynvml.nvmlGpmSampleAlloc())

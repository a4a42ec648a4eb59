"""What is documented of real drivers, replayed through the unmodified pynvml: profiles, placements, counts, ids, codes.

Sources: MIG user guide r580; `nvidia-smi mig -lgip` and `-lgipp` of A100 and H100; CLOVER's partition table.
"""

import ctypes
from itertools import permutations

import pynvml
import pytest

from tests.support.simulated_driver import A100_40GB, pynvml_on
from trefoil.simulated_node.driver import Driver
from trefoil.simulated_node.gpu_state import NvmlFault
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Machine

ID = {1: 19, 2: 14, 3: 9, 4: 5, 7: 0}  # compute slices -> profile id
DOUBLE_MEMORY = 15  # profile id of 1g with two memory slices
# name, id, instances, MiB, SMs
LGIP = {
    "A100-SXM4-40GB": (
        ("1g.5gb", 19, 7, 4864, 14),
        ("1g.5gb+me", 20, 1, 4864, 14),
        ("1g.10gb", 15, 4, 9856, 14),
        ("2g.10gb", 14, 3, 9856, 28),
        ("3g.20gb", 9, 2, 19968, 42),
        ("4g.20gb", 5, 1, 19968, 56),
        ("7g.40gb", 0, 1, 40192, 98),
    ),
    "A100-SXM4-80GB": (
        ("1g.10gb", 19, 7, 9728, 14),
        ("1g.10gb+me", 20, 1, 9728, 14),
        ("1g.20gb", 15, 4, 19968, 14),
        ("2g.20gb", 14, 3, 19968, 28),
        ("3g.40gb", 9, 2, 40192, 42),
        ("4g.40gb", 5, 1, 40192, 56),
        ("7g.80gb", 0, 1, 80896, 98),
    ),
    "H100-SXM5-80GB": (
        ("1g.10gb", 19, 7, 9984, 16),
        ("1g.10gb+me", 20, 1, 9984, 16),
        ("1g.20gb", 15, 4, 20096, 26),
        ("2g.20gb", 14, 3, 20096, 32),
        ("3g.40gb", 9, 2, 40448, 60),
        ("4g.40gb", 5, 1, 40448, 64),
        ("7g.80gb", 0, 1, 81152, 132),
    ),
}
LGIPP = {
    19: [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)],
    20: [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1)],
    15: [(0, 2), (2, 2), (4, 2), (6, 2)],
    14: [(0, 2), (2, 2), (4, 2)],
    9: [(0, 4), (4, 4)],
    5: [(0, 4)],
    0: [(0, 8)],
}
# The constant of a compute-instance profile is its id: profile id of the GPU instance -> {ci id: how many fit}.
LCIP = {19: {0: 1}, 20: {7: 1}, 15: {0: 1}, 14: {0: 2, 1: 1}, 9: {0: 3, 1: 1, 2: 1}, 5: {0: 4, 1: 2, 3: 1}}
LCIP |= {0: {0: 7, 1: 3, 2: 2, 3: 1, 4: 1}}


@pytest.fixture
def gpu():
    with pynvml_on(Machine()):
        pynvml.nvmlInit()
        yield pynvml.nvmlDeviceGetHandleByIndex(0)


def placements(handle, profile_id):
    count = ctypes.c_uint(0)
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, None, ctypes.byref(count))
    found = (pynvml.c_nvmlGpuInstancePlacement_t * count.value)()
    pynvml.nvmlDeviceGetGpuInstancePossiblePlacements(handle, profile_id, found, ctypes.byref(count))
    return [(place.start, place.size) for place in found]


def info(instance):
    return pynvml.nvmlGpuInstanceGetInfo(instance)


@pytest.mark.parametrize("model", LGIP)
def test_the_table_of_profiles_is_that_of_nvidia_smi(model):
    with pynvml_on(Machine(devices=[model])):
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        for name, profile_id, instances, mib, sms in LGIP[model]:
            found = pynvml.nvmlDeviceGetGpuInstanceProfileInfoById(handle, profile_id)
            assert (found.name, found.id, found.instanceCount) == (f"MIG {name}", profile_id, instances)
            assert (found.memorySizeMB, found.multiprocessorCount) == (mib, sms)
            assert placements(handle, profile_id) == LGIPP[profile_id]
            assert pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, profile_id) == instances


def test_the_constant_of_a_profile_is_not_its_id(gpu):
    found = {}
    for constant in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            found[constant] = pynvml.nvmlDeviceGetGpuInstanceProfileInfo(gpu, constant).id
        except pynvml.NVMLError_NotSupported:
            continue
        except pynvml.NVMLError_InvalidArgument:
            break
    assert found == {0: 19, 1: 14, 2: 9, 3: 5, 4: 0, 7: 20, 9: 15}


# --- what can be placed ---


def reachable(options, version="535"):
    """Every set of (profile id, start) that the driver lets exist at once, found by asking it."""
    driver = Driver("n", (A100_40GB,), version=version)
    (card,) = driver.gpus
    seen = {frozenset()}

    def grow(state):
        for option in options:
            if option in state:
                continue
            profile = driver.profile(card, option[0])
            try:
                instance = driver.create_gpu_instance(card, option[0], (option[1], profile.memory_slices))
            except NvmlFault:
                continue
            if (larger := state | {option}) not in seen:
                seen.add(larger)
                grow(larger)
            driver.destroy_gpu_instance(instance)

    grow(frozenset())
    return seen


def maximal(states):
    return [state for state in states if not any(state < other for other in states)]


def multisets(states):
    return {tuple(sorted(profile for profile, _ in state)) for state in states}


FIVE = [(ID[width], start) for width in ID for start, _ in LGIPP[ID[width]]]


def test_there_are_298_sets_19_of_them_maximal_of_14_multisets():
    states = reachable(FIVE)
    assert len(states) == 298
    assert len(maximal(states)) == 19
    assert len(multisets(maximal(states))) == 14


def test_drivers_before_510_refuse_4g_beside_3g_and_have_18():
    old, new = (maximal(reachable(FIVE, version)) for version in ("470.82", "535"))
    without = [state for state in new if {profile for profile, _ in state} != {5, 9}]
    assert len(without) == 18
    assert [state for state in old if {5, 9} <= {profile for profile, _ in state}] == []
    assert {frozenset(s) for s in without} <= {frozenset(s) for s in old}


def test_with_the_double_memory_profile_there_are_78_of_38_multisets():
    states = maximal(reachable([*FIVE, *((DOUBLE_MEMORY, start) for start, _ in LGIPP[DOUBLE_MEMORY])]))
    assert len(states) == 78
    assert len(multisets(states)) == 38


# --- what the driver does when it is given no placement ---


@pytest.mark.parametrize(
    ("width", "order"), [(1, [6, 4, 5, 0, 1, 2, 3]), (2, [4, 0, 2]), (3, [4, 0]), (4, [0]), (7, [0])]
)
def test_the_order_of_its_own_placements(gpu, width, order):
    made = [pynvml.nvmlDeviceCreateGpuInstance(gpu, ID[width]) for _ in order]
    assert [info(instance).placement.start for instance in made] == order
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlDeviceCreateGpuInstance(gpu, ID[width])


def create_all(gpu, profile_ids):
    made = []
    try:
        for profile_id in profile_ids:
            made.append(pynvml.nvmlDeviceCreateGpuInstance(gpu, profile_id))
        return sorted((info(instance).profileId, info(instance).placement.start) for instance in made)
    finally:
        for instance in made:
            pynvml.nvmlGpuInstanceDestroy(instance)


def test_examples_of_the_user_guide(gpu):
    assert create_all(gpu, [9, 9]) == [(9, 0), (9, 4)]
    assert create_all(gpu, [9, 14, 19, 19]) == [(9, 4), (14, 0), (19, 2), (19, 3)]
    assert create_all(gpu, [19] * 7) == [(19, start) for start in range(7)]
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        create_all(gpu, [19, 19, 14, 9])


def test_15_of_the_65_creation_orders_fail(gpu):
    orders = {order for multiset in multisets(maximal(reachable(FIVE))) for order in permutations(multiset)}
    failed = 0
    for order in sorted(orders):
        try:
            create_all(gpu, order)
        except pynvml.NVMLError_InsufficientResources:
            failed += 1
    assert (len(orders), failed) == (65, 15)


def test_ids_of_gpu_instances_come_from_their_size_and_are_reused_at_once(gpu):
    ids = {}
    for profile_id in (0, 5, 9, 14, 19):
        count = 7 if profile_id == 19 else len(LGIPP[profile_id])
        made = [pynvml.nvmlDeviceCreateGpuInstance(gpu, profile_id) for _ in range(count)]
        ids[profile_id] = [info(instance).id for instance in made]
        for instance in made:
            pynvml.nvmlGpuInstanceDestroy(instance)
    assert ids == {0: [0], 5: [1], 9: [1, 2], 14: [3, 4, 5], 19: [7, 8, 9, 10, 11, 12, 13]}


# --- compute instances ---


@pytest.mark.parametrize("profile_id", LCIP)
def test_profiles_of_compute_instances(gpu, profile_id):
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, profile_id)
    shared = pynvml.NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED
    found = {}
    for constant in range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT):
        try:
            profile = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, constant, shared)
        except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
            continue
        assert profile.id == constant
        found[profile.id] = pynvml.nvmlGpuInstanceGetComputeInstanceRemainingCapacity(instance, profile.id)
    assert found == LCIP[profile_id]


def test_compute_instances_with_a_placement_inside_their_gpu_instance(gpu):
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, ID[7])
    for start in (4, 0):
        place = pynvml.c_nvmlComputeInstancePlacement_t(start, 3)
        compute = pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(instance, 2, ctypes.byref(place))
        assert pynvml.nvmlComputeInstanceGetInfo(compute).placement.start == start
    with pytest.raises(pynvml.NVMLError_InsufficientResources):
        pynvml.nvmlGpuInstanceCreateComputeInstance(instance, 1)
    with pytest.raises(pynvml.NVMLError_InUse):
        pynvml.nvmlGpuInstanceDestroy(instance)


def test_uuids_change_at_re_creation_and_repeat_on_r470():
    for fresh, expected in ((True, 3), (False, 1)):
        machine = Machine(fresh_uuids=fresh)
        seen = set()
        for _ in range(3):
            seen.add(Interference(machine).create_gi(0, "3g.20gb", 4))
            Interference(machine).destroy(0, 4)
        assert len(seen) == expected

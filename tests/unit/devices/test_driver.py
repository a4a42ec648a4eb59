"""MIG's rules as the driver enforces them: first the documented facts, then each refusal with its code."""

import math

import pytest

from tests.support.simulated_driver import H100_80GB, make_driver
from trefoil.core import device_types
from trefoil.core.fleet import DeviceKind
from trefoil.simulated_node.gpu_models import gpu_model
from trefoil.simulated_node.gpu_state import Gpu, Nvml, NvmlFault

ID = {1: 19, 2: 14, 3: 9, 4: 5, 7: 0}  # compute slices -> profile id
SIZE = {1: 1, 2: 2, 3: 4, 4: 4, 7: 8}
LOWER = (((4, 0),), ((3, 0),), ((2, 0), (2, 2)), ((2, 0), (1, 2), (1, 3)), ((1, 0), (1, 1), (2, 2)))
LOWER += (((1, 0), (1, 1), (1, 2), (1, 3)),)
UPPER = (((3, 4),), ((2, 4), (1, 6)), ((1, 4), (1, 5), (1, 6)))
GPU_MODELS = [gpu_model(name) for name in device_types.DRIVERS]
A30 = gpu_model("A30")
MIG_MODELS = [model for model in GPU_MODELS if model.mig_capable and model is not A30]
A30_MAXIMAL = (((4, 0),), ((2, 0), (2, 2)), ((2, 0), (1, 2), (1, 3)), ((1, 0), (1, 1), (2, 2)))
A30_MAXIMAL += (((1, 0), (1, 1), (1, 2), (1, 3)),)
MAXIMAL = (((7, 0),), *((*low, *high) for low in LOWER for high in UPPER))


def refused(code, call, *args):
    with pytest.raises(NvmlFault) as caught:
        call(*args)
    assert caught.value.code is code


def layout(gpu: Gpu):
    return sorted((i.profile.compute_slices, i.start) for i in gpu.instances.values())


@pytest.mark.parametrize("model", MIG_MODELS, ids=lambda m: m.type.name)
@pytest.mark.parametrize("configuration", MAXIMAL, ids=str)
def test_every_maximal_configuration_can_be_placed_and_then_nothing_more_fits(model, configuration):
    driver = make_driver(model)
    (gpu,) = driver.gpus
    for width, start in configuration:
        driver.create_gpu_instance(gpu, ID[width], (start, SIZE[width]))
    assert layout(gpu) == sorted(configuration)
    for width in ID:
        assert driver.remaining_capacity(gpu, driver.profile(gpu, ID[width])) == 0
        refused(Nvml.INSUFFICIENT_RESOURCES, driver.create_gpu_instance, gpu, ID[width])


@pytest.mark.parametrize("configuration", A30_MAXIMAL, ids=str)
def test_an_a30_is_cut_into_four(configuration):
    driver = make_driver(A30)
    (gpu,) = driver.gpus
    for width, start in configuration:
        driver.create_gpu_instance(gpu, {1: 14, 2: 5, 4: 0}[width], (start, width))
    assert layout(gpu) == sorted(configuration)
    for profile in A30.profiles:
        assert driver.remaining_capacity(gpu, profile) == 0


@pytest.mark.parametrize("model", GPU_MODELS, ids=lambda m: m.type.name)
def test_the_core_device_type_and_the_driver_table_agree(model):
    core = model.type
    assert core.kind == (DeviceKind.MIG_GPU if model.mig_capable else DeviceKind.WHOLE_GPU)
    assert core.clocks_mhz == (model.clocks_mhz if model.lockable else ())
    assert (core.clock_lockable, core.energy_counter) == (model.lockable, model.energy_counter)
    low_w, default_w, high_w = model.power_limit_w
    assert (core.power_limit_min_w, core.power_limit_max_w) == (low_w, high_w)
    assert core.max_w == default_w
    if not model.mig_capable:
        (whole,) = core.slice_types
        assert (whole.name, whole.starts, whole.memory_slices) == ("whole", (0,), 1)
        assert 0 <= model.memory_mib - whole.memory_mib < 300
        return
    by_name = {profile.name: profile for profile in model.profiles}
    for kind in core.slice_types:
        profile = by_name[kind.name]
        assert (kind.compute_slices, kind.memory_slices) == (profile.compute_slices, profile.memory_slices)
        assert (kind.sm_count, kind.memory_mib) == (profile.sm_count, profile.memory_mib)
        assert sorted(kind.starts) == sorted(profile.starts)
    placed = {tuple((name, start) for name, start, _ in p) for p in device_types.placements(core)}
    names = {kind.compute_slices: kind.name for kind in core.slice_types}
    if model is A30:
        assert placed == {tuple((names[width], start) for width, start in c) for c in A30_MAXIMAL}
        return
    assert placed == {tuple((names[width], start) for width, start in c) for c in MAXIMAL}


# The driver's own placement: examples of the MIG user guide, and what it cannot do.


# Refusals.


@pytest.mark.parametrize("placement", [(1, 2), (4, 1), (6, 2), (7, 2)])
def test_an_illegal_placement_is_an_invalid_argument(placement):
    driver = make_driver()
    refused(Nvml.INVALID_ARGUMENT, driver.create_gpu_instance, driver.gpus[0], 14, placement)


def test_only_one_instance_has_the_media_engines():
    driver = make_driver()
    driver.create_gpu_instance(driver.gpus[0], 20)
    refused(Nvml.INSUFFICIENT_RESOURCES, driver.create_gpu_instance, driver.gpus[0], 20)


def test_a_process_holds_its_compute_instance_and_only_that():
    driver = make_driver()
    (gpu,) = driver.gpus
    held, free = (driver.create_gpu_instance(gpu, 9) for _ in range(2))
    held_ci, free_ci = (driver.create_compute_instance(instance, 2) for instance in (held, free))
    driver.attach(42, held_ci, 450)
    refused(Nvml.IN_USE, driver.destroy_compute_instance, held_ci)
    driver.destroy_compute_instance(free_ci)
    driver.destroy_gpu_instance(free)
    driver.detach(42)
    driver.destroy_compute_instance(held_ci)


def test_compute_instances_share_a_gpu_instance_by_width():
    driver = make_driver()
    instance = driver.create_gpu_instance(driver.gpus[0], 0)
    starts = [driver.create_compute_instance(instance, ci).start for ci in (2, 2)]
    assert starts == [0, 4]
    refused(Nvml.INSUFFICIENT_RESOURCES, driver.create_compute_instance, instance, 1)
    assert driver.create_compute_instance(instance, 0).start == 3


def test_a_width_that_the_instance_lacks_is_not_supported():
    driver = make_driver()
    instance = driver.create_gpu_instance(driver.gpus[0], 14)
    refused(Nvml.NOT_SUPPORTED, driver.create_compute_instance, instance, 2)


def test_stale_handles_are_refused_by_kind():
    driver = make_driver()
    instance = driver.create_gpu_instance(driver.gpus[0], 9)
    compute = driver.create_compute_instance(instance, 2)
    gi, ci = driver.handle(instance), driver.handle(compute)
    driver.destroy_compute_instance(compute)
    driver.destroy_gpu_instance(instance)
    refused(Nvml.INVALID_ARGUMENT, driver.gpu_instance, gi)
    refused(Nvml.INVALID_ARGUMENT, driver.compute_instance, ci)
    refused(Nvml.NOT_FOUND, driver.device, ci)
    refused(Nvml.INVALID_ARGUMENT, driver.gpu_instance, driver.handle(driver.gpus[0]))


# MIG mode.


def test_h100_changes_mig_mode_at_once_and_loses_it_at_a_reset():
    driver = make_driver(H100_80GB, mig_enabled=False)
    (gpu,) = driver.gpus
    assert driver.set_mig_mode(gpu, True) is Nvml.SUCCESS
    assert gpu.mig_current
    driver.reset(gpu)
    assert not gpu.mig_current


# Clocks and limits.


def test_locked_clocks_snap_down_and_bad_ranges_are_refused():
    driver = make_driver()
    (gpu,) = driver.gpus
    driver.lock_clocks(gpu, 300, 1001)
    assert gpu.locked_mhz == (300, 990)
    assert gpu.clock_at_mhz(math.inf) == 300
    instance = driver.create_gpu_instance(gpu, 9)
    driver.attach(1, driver.create_compute_instance(instance, 2), 450)
    assert gpu.clock_at_mhz(math.inf) == 990
    for low, high in ((900, 600), (100, 600), (300, 2000)):
        refused(Nvml.INVALID_ARGUMENT, driver.lock_clocks, gpu, low, high)


def test_a_power_limit_outside_the_constraints_is_refused():
    driver = make_driver()
    driver.set_power_limit(driver.gpus[0], 250.0)
    refused(Nvml.INVALID_ARGUMENT, driver.set_power_limit, driver.gpus[0], 99.0)
    refused(Nvml.INVALID_ARGUMENT, driver.set_power_limit, driver.gpus[0], 401.0)


def test_cuda_refuses_a_whole_gpu_in_mig_mode():
    driver = make_driver()
    refused(Nvml.INVALID_ARGUMENT, driver.attach, 1, driver.gpus[0], 450)
    driver = make_driver(mig_enabled=False)
    driver.attach(1, driver.gpus[0], 450)
    assert driver.gpus[0].clock_at_mhz(math.inf) == 1410

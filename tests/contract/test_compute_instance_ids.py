"""Constants of compute-instance profiles are not ids: a driver that numbers them otherwise shows the same slices."""

import pynvml
import pytest

from tests.support.simulated_driver import H100_80GB, create_slice, destroy_slice, inventory_on, make_driver
from trefoil.core.fleet import SliceKey

GPU0 = "node0/gpu0"
SHIFT = 20  # added to every id; the simulated driver's ids equal the constants, as on all documented boards


@pytest.fixture
def inventory(monkeypatch):
    info_of, listed, created = (
        pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo,
        pynvml.nvmlGpuInstanceGetComputeInstances,
        pynvml.nvmlGpuInstanceCreateComputeInstance,
    )

    def shifted_info(*arguments):
        info = info_of(*arguments)
        info.id += SHIFT
        return info

    def plain(profile_id):
        if profile_id < SHIFT:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return profile_id - SHIFT

    monkeypatch.setattr(pynvml, "nvmlGpuInstanceGetComputeInstanceProfileInfo", shifted_info)
    monkeypatch.setattr(
        pynvml, "nvmlGpuInstanceGetComputeInstances", lambda gi, id_, *rest: listed(gi, plain(id_), *rest)
    )
    monkeypatch.setattr(pynvml, "nvmlGpuInstanceCreateComputeInstance", lambda gi, id_: created(gi, plain(id_)))
    with inventory_on(make_driver(H100_80GB)) as opened:
        yield opened


@pytest.mark.parametrize("slice_type", ["1g.10gb", "1g.10gb+me", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"])
def test_a_slice_is_seen_with_its_compute_instance_and_destroyed(inventory, slice_type):
    made = create_slice(inventory, GPU0, slice_type, 0)
    assert made.mig_uuid
    assert inventory.gpu_instances(GPU0) == (made,)
    destroy_slice(inventory, made.key)
    assert inventory.gpu_instances(GPU0) == ()


def test_a_driver_that_lists_no_compute_instances_makes_no_slice_vanish(inventory, monkeypatch):
    key = create_slice(inventory, GPU0, "2g.20gb", 0).key

    def refuse(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)

    monkeypatch.setattr(pynvml, "nvmlGpuInstanceGetComputeInstances", refuse)
    assert [seen.key for seen in inventory.gpu_instances(GPU0)] == [key]
    assert key == SliceKey(GPU0, "2g.20gb", 0, 2)

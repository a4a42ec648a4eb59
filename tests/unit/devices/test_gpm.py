"""Activity per slice by GPM samples on Hopper; nothing where there is no GPM."""

import pytest

from power_agent.devices.errors import DeviceLost
from power_agent.devices.gpm import Gpm
from tests.support.simulated_driver import A100_40GB, H100_80GB, create_slice, destroy_slice, inventory_on, make_driver
from trefoil.core.energy import AttributionMethod

GPU0, GPU1 = "node0/gpu0", "node0/gpu1"


@pytest.fixture
def driver():
    return make_driver(H100_80GB, A100_40GB)


@pytest.fixture
def inventory(driver):
    with inventory_on(driver) as opened:
        yield opened


@pytest.fixture
def gpm(inventory):
    sensor = Gpm(inventory)
    yield sensor
    sensor.close()


def work(driver, seconds, **busy_s):
    """Time passes; each GPU-instance generation (g<n>; g0 the whole GPU) computes that long."""
    gpu = driver.gpus[0]
    driver.now_s += seconds
    for name, amount in busy_s.items():
        before = gpu.busy_s.get(int(name[1:]), (0.0, 0.0))
        gpu.busy_s[int(name[1:])] = (before[0] + amount, before[1] + amount)


def held(driver):
    return len(driver.gpm._by_handle)


def test_the_share_of_time_that_each_slice_worked(gpm, inventory, driver):
    big, small = create_slice(inventory, GPU0, "3g.40gb", 4), create_slice(inventory, GPU0, "1g.10gb", 0)
    generations = {big.key: 1, small.key: 1}
    assert gpm.method == AttributionMethod.GPM
    assert gpm.activity(GPU0, generations) == {}
    work(driver, 2.0, g1=1.0, g2=0.5)
    assert gpm.activity(GPU0, generations) == {big.key: pytest.approx(0.5), small.key: pytest.approx(0.25)}
    work(driver, 1.0, g2=1.5)
    assert gpm.activity(GPU0, generations) == {big.key: 0.0, small.key: 1.0}
    assert held(driver) == 2
    gpm.close()
    assert held(driver) == 0


def test_a_slice_that_was_created_anew_inherits_nothing(gpm, inventory, driver):
    made = create_slice(inventory, GPU0, "3g.40gb", 4)
    gpm.activity(GPU0, {made.key: 1})
    work(driver, 1.0, g1=1.0)
    destroy_slice(inventory, made.key)
    again = create_slice(inventory, GPU0, "3g.40gb", 4)
    assert again.gi_id == made.gi_id
    assert gpm.activity(GPU0, {again.key: 2}) == {}
    work(driver, 1.0, g2=0.75)
    assert gpm.activity(GPU0, {again.key: 2}) == {again.key: pytest.approx(0.75)}
    assert held(driver) == 1


def test_a_whole_gpu_has_one_value(driver):
    driver.gpus[0].mig_current = driver.gpus[0].mig_pending = False
    with inventory_on(driver) as inventory:
        gpm, whole = Gpm(inventory), inventory.whole_slice(GPU0)
        assert gpm.activity(GPU0, {whole.key: 1}) == {}
        work(driver, 4.0, g0=1.0)
        assert gpm.activity(GPU0, {whole.key: 1}) == {whole.key: pytest.approx(0.25)}


def test_before_hopper_there_is_nothing(gpm, inventory, driver):
    made = create_slice(inventory, GPU1, "3g.20gb", 4)
    for _ in range(2):
        assert gpm.activity(GPU1, {made.key: 1}) == {}
        work(driver, 1.0)
    assert held(driver) == 0


def test_a_lost_gpu_is_told_and_comes_back_without_a_past(gpm, inventory, driver):
    made = create_slice(inventory, GPU0, "3g.40gb", 4)
    gpm.activity(GPU0, {made.key: 1})
    driver.gpus[0].lost = True
    with pytest.raises(DeviceLost):
        gpm.activity(GPU0, {made.key: 1})
    driver.gpus[0].lost = False
    work(driver, 1.0, g1=1.0)
    assert gpm.activity(GPU0, {made.key: 1}) == {}

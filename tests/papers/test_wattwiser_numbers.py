"""Numbers of WattWiser's text: Fig. 2 (1:1, 2:1, 5:1), Algorithm 2 as printed and fixed, Algorithm .1 over time."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.planners.gpu_allocation import AllocationSettings
from controller.planners.gpu_sharing import (
    Gpu,
    literal_weights,
    serving_set,
    sharing_load_weights,
    sharing_weights,
    uniform_weights,
    with_left,
)
from controller.planners.wattwiser import (
    UniformSettings,
    WattWiserPlanner,
    WattWiserSettings,
    packed_uniform,
    sharing_aware,
    uniform,
)
from tests.support.sharing import decide, serving, settled, shared, weights_of
from trefoil.core.errors import InvalidInput
from trefoil.core.plan_check import check
from trefoil.core.policies import PRESETS
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.wattwiser.experiment import swim
from trefoil.reproduce.wattwiser.study import asleep_at_most_pct

LOADS = [round(0.1 * n, 1) for n in range(1, 21)]  # in multiples of model_max_rps, here 1
RULES = (uniform_weights, sharing_weights, sharing_load_weights)


def gpu(number: int, factor: int = 1, max_rps: float = 1.0) -> Gpu:
    return Gpu(SimpleNamespace(key=SimpleNamespace(device=f"gpu{number}")), None, max_rps, factor)


def gpus(*factors: int, max_rps: float = 1.0) -> list[Gpu]:
    return [gpu(number, factor, max_rps) for number, factor in enumerate(factors)]


def normal(weights):
    return [weight / sum(weights) for weight in weights]


def test_sharing_aware_is_2_to_1_at_sharing_factors_1_and_2():
    assert sharing_weights(0.3, gpus(1, 2)) == [2, 1]
    assert sharing_weights(0.3, gpus(1, 2, 3)) == [6, 3, 2]
    assert sharing_weights(0.3, gpus(2, 2)) == [1, 1]


def test_fig_2d_is_5_to_1_at_1_2_times_what_a_gpu_takes():
    assert normal(sharing_load_weights(1.2, gpus(1, 2))) == pytest.approx([5 / 6, 1 / 6])
    assert literal_weights(1.2, gpus(1, 2)) == pytest.approx([5, 1])


@pytest.mark.parametrize(
    ("make", "split"), [(packed_uniform, (1, 1)), (sharing_aware, (2, 1)), (WattWiserPlanner, (5, 1))]
)
def test_fig_2_in_whole_plans(make, split):
    """Two models, three GPUs, the middle one shared, both at 60 % of two GPUs."""
    one = shared([1.2, 1.2])
    plan = decide(make(UniformSettings() if make is uniform else AllocationSettings()), one).plan
    check(plan, one.fleet, one.catalog, one.demand)
    own, common = (n / sum(split) for n in split)
    assert weights_of(plan, "f0") == pytest.approx({"gpu0": own, "gpu1": common}, abs=1e-6)
    assert weights_of(plan, "f1") == pytest.approx({"gpu2": own, "gpu1": common}, abs=1e-6)
    (middle,) = (d for d in plan.nodes[0].devices if d.device.endswith("gpu1"))
    assert [h.family for h in middle.slices[0].hosted] == ["f0", "f1"]


def test_fig_2a_is_four_gpus_none_shared_all_awake():
    plan = decide(uniform(UniformSettings()), shared([0.1, 1.2], 5)).plan
    assert weights_of(plan, "f0") == {"gpu0": 0.5, "gpu1": 0.5}
    assert weights_of(plan, "f1") == {"gpu2": 0.5, "gpu3": 0.5}
    assert [d.target.name for d in plan.nodes[0].devices] == ["AWAKE"] * 4 + ["ASLEEP"]


def test_fig_3_below_half_of_two_gpus_the_shared_one_may_sleep_and_above_it_serves():
    plan = settled(WattWiserPlanner(), [0.5, 0.5])
    assert (serving(plan, "f0"), serving(plan, "f1")) == (["gpu0"], ["gpu2"])
    assert plan.nodes[0].devices[1].target.name == "ASLEEP"
    plan = settled(WattWiserPlanner(), [0.5, 1.1], current=plan)
    assert (serving(plan, "f0"), serving(plan, "f1")) == (["gpu0"], ["gpu1", "gpu2"])
    assert weights_of(plan, "f0") == {"gpu0": 1.0}


@pytest.mark.parametrize("load", LOADS)
def test_printed_and_mended_differ_where_unshared_gpus_are_enough_and_nowhere_else(load):
    mended = normal(sharing_load_weights(load, gpus(1, 2)))
    if load <= 1.0:  # below: a shared GPU gets less than nothing; at it: a division by zero
        assert mended == [1.0, 0.0]
        with pytest.raises(InvalidInput, match="as printed"):
            literal_weights(load, gpus(1, 2))
    else:
        assert normal(literal_weights(load, gpus(1, 2))) == pytest.approx(mended)


@pytest.mark.parametrize("load", LOADS)
def test_printed_leaves_gpus_after_the_break_unset(load):
    mended = normal(sharing_load_weights(load, gpus(1, 2, 2)))
    if load < 1.5:
        assert mended[2] == 0
        with pytest.raises(InvalidInput):
            literal_weights(load, gpus(1, 2, 2))
    elif load == 1.5:  # the last one's share is zero, and divided by
        with pytest.raises(InvalidInput):
            literal_weights(load, gpus(1, 2, 2))
    else:
        assert normal(literal_weights(load, gpus(1, 2, 2))) == pytest.approx(mended)


@pytest.mark.parametrize("load", LOADS)
def test_printed_knows_no_load_among_unshared_gpus(load):
    assert literal_weights(load, gpus(1, 1)) == [1, 1]
    assert sharing_load_weights(load, gpus(1, 1)) == pytest.approx([min(load, 1.0), max(0.0, load - 1.0)])


def test_printed_decides_nothing_where_it_has_no_weights():
    before = settled(WattWiserPlanner(), [1.2, 1.2])
    decision = decide(WattWiserPlanner(WattWiserSettings(literal=True)), shared([0.95, 1.2], current=before))
    assert decision.plan is None
    assert decision.degraded.startswith("literal: gpu_rps")


def test_what_the_other_family_leaves_is_counted_on_and_never_less_than_an_equal_part():
    """Two families, the middle GPU shared: f0 asks for 1.8 GPUs, f1 for 1.1, together for less than three."""
    mine = {"f0": (gpu(0), gpu(1, 2)), "f1": (gpu(2), gpu(1, 2))}
    left = with_left(mine, {"f0": 1.8, "f1": 1.1})
    assert [one.cap_rps for one in left["f0"]] == pytest.approx([1.0, 0.9])
    assert [one.cap_rps for one in left["f1"]] == pytest.approx([1.0, 0.5])
    assert sum(one.cap_rps for one in mine["f0"]) == 1.5, "equal parts: Algorithm 2 turns 0.3 of f0's 1.8 away"


def test_preset_shared_left_carries_in_whole_plans_what_equal_parts_do_not():
    settings = WattWiserSettings(**PRESETS["shared_left"])
    for planner, short in ((WattWiserPlanner(), True), (WattWiserPlanner(settings), False)):
        decision = decide(planner, shared([1.8, 1.1], current=settled(planner, [1.8, 1.1])))
        assert decision.degraded.startswith("short_of_capacity") == short, planner.settings


def test_hours_of_swim_can_sleep_through_27_percent_at_most_and_bins_of_two_minutes_through_more():
    """The paper saves 34 %: its bins are not hours."""
    if data_folder() is None:
        pytest.skip("no TREFOIL_DATA: SWIM is not here")
    assert asleep_at_most_pct((swim(0), swim(1))) == pytest.approx(27.1, abs=0.05)
    assert asleep_at_most_pct((swim(0, 2), swim(1, 2))) == pytest.approx(45.5, abs=0.05)


factors = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(sorted)


@given(factors=factors, load=st.floats(1e-3, 10.0), max_rps=st.floats(0.1, 1000.0))
def test_weights_are_shares(factors, load, max_rps):
    for rule in RULES:
        found = rule(load * max_rps, gpus(*factors, max_rps=max_rps))
        assert all(weight >= 0 for weight in found)
        assert sum(normal(found)) == pytest.approx(1)


@given(factors=factors, part=st.floats(1e-3, 1.0), max_rps=st.floats(0.1, 1000.0))
def test_mended_weights_overload_no_gpu_while_all_together_can_carry_the_load(factors, part, max_rps):
    mine = gpus(*factors, max_rps=max_rps)
    load = part * sum(one.cap_rps for one in mine)
    found = normal(sharing_load_weights(load, mine))
    assert all(load * w <= one.cap_rps * (1 + 1e-9) for w, one in zip(found, mine, strict=True))


def played(loads, mine, hysteresis=0.1):
    """Sizes of the serving set, a decision a second."""
    now, sizes = [], []
    for load in loads:
        now, _ = serving_set(mine, now, load, hysteresis)
        sizes.append(len(now))
    return sizes


@given(
    low=st.floats(0.05, 1.5),
    high=st.floats(0.05, 1.5),
    half_s=st.integers(1, 12),
    phase=st.lists(st.floats(0.05, 1.5), max_size=3),
)
def test_a_square_wave_of_load_adds_and_removes_at_most_one_gpu_a_period(low, high, half_s, phase):
    """Of the two GPUs of a model, whatever came before."""
    sizes = played(phase + ([low] * half_s + [high] * half_s) * 4, gpus(1, 2))[len(phase) :]
    for period in range(4):
        steps = [b - a for a, b in pairwise(sizes[period * 2 * half_s : (period + 1) * 2 * half_s + 1])]
        assert sum(step > 0 for step in steps) <= 1
        assert sum(step < 0 for step in steps) <= 1


def test_a_square_wave_across_one_threshold_adds_once_and_removes_once_a_period():
    sizes = played(([0.8] * 5 + [1.2] * 5) * 3, gpus(1, 2))
    assert sizes == ([1] * 5 + [2] * 5) * 3


def test_a_wave_within_the_hysteresis_moves_nothing_again():
    sizes = played(([0.95] * 5 + [1.05] * 5) * 3, gpus(1, 2))
    assert sizes == [1] * 5 + [2] * 25


def test_unshared_gpus_come_first_and_the_last_to_come_goes_first():
    mine = gpus(1, 1, 2, 3)
    now, came, gone = [mine[0]], [], []
    for _ in range(4):
        now, done = serving_set(mine, now, 10.0, 0.1)
        came += [done]
    assert [text.split(":")[0] for text in came if text] == ["adds gpu1", "adds gpu2", "adds gpu3"]
    for _ in range(4):
        now, done = serving_set(mine, now, 0.1, 0.1)
        gone += [done]
    assert [text.split(":")[0] for text in gone if text] == ["removes gpu3", "removes gpu2", "removes gpu1"]
    assert now == mine[:1]

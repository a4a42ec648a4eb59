"""Who gets the joules: which source splits an interval; what a counter, an integral and a quiet device are worth."""

import dataclasses
import math

import numpy as np
import pytest

from power_agent.energy.core.meter import (
    QUIET_S,
    SENSOR_UNCERTAINTY,
    Baseline,
    CounterStep,
    MeterState,
    PowerIntegral,
    advance,
    counter_step,
    max_step_j,
)
from power_agent.slices.core.attribution import SENSORS, DeviceReading, SliceReading, Work
from tests.support.metered import MeteredDevice
from tests.unit.power_agent.test_meter import IDLE_W, KEYS, SHARES, meter, part, reading
from trefoil.core.device_types import A100_40GB, device_type
from trefoil.core.energy import AttributionMethod, EnergyMethod
from trefoil.core.fleet import DeviceState, SliceKey

AUTO, GPM, DCGM = "auto", AttributionMethod.GPM, AttributionMethod.DCGM


def sensed(first: dict, second: dict, attribution: str = AUTO, length_s: float = 1.0, **more):
    """One interval of two slices that Triton says were busy for 0.6 and 0.8 s, under what sensors say of them."""
    before = reading(0, 0, part(0, 0), part(1, 0))
    now = reading(
        length_s,
        IDLE_W * length_s + 100,
        part(0, 0.6, 6, **first),
        part(1, 0.8, 8, **second),
        **{"attribution": attribution, "serving_s": length_s, **more},
    )
    return meter(before, now)[1][0]


def own(sample) -> dict:
    return {p.key: p for p in sample.slices}


def shares(sample) -> tuple[float, ...]:
    return tuple(own(sample)[key].active_j for key in KEYS)


def expected(first: float, second: float) -> tuple[float, float]:
    weights = (first * SHARES[0], second * SHARES[1])
    return tuple(100 * weight / sum(weights) for weight in weights)


@pytest.mark.parametrize(
    ("attribution", "first", "second", "method", "activity"),
    [
        ("auto", {"gpm": 0.2, "dcgm": 0.1}, {"gpm": 0.4, "dcgm": 0.5}, "DCGM", (0.1, 0.5)),
        ("auto", {"gpm": 0.2}, {"gpm": 0.4}, "GPM", (0.2, 0.4)),
        ("auto", {"gpm": 0.2, "dcgm": 0.1}, {"gpm": 0.4}, "GPM", (0.2, 0.4)),  # DCGM is stale for one of them
        ("auto", {"gpm": 0.2, "dcgm": 0.1}, {}, "TRITON_COMPUTE", (0.6, 0.8)),
        ("auto", {"gpm": 0.2}, {"gpm": math.nan}, "TRITON_COMPUTE", (0.6, 0.8)),
        ("auto", {"gpm": -0.2}, {"gpm": 0.4}, "TRITON_COMPUTE", (0.6, 0.8)),
        ("auto", {"gpm": 0.0}, {"gpm": 0.0}, "TRITON_COMPUTE", (0.6, 0.8)),  # Triton knows better than a stuck sensor
        ("auto", {"gpm": 1.7}, {"gpm": 0.4}, "GPM", (1.0, 0.4)),  # DCGM and GPM may exceed 1 on MIG
        ("gpm", {"gpm": 0.2, "dcgm": 0.1}, {"gpm": 0.4, "dcgm": 0.5}, "GPM", (0.2, 0.4)),
        ("dcgm", {"gpm": 0.2}, {"gpm": 0.4}, "TRITON_COMPUTE", (0.6, 0.8)),
        ("triton", {"gpm": 0.2, "dcgm": 0.1}, {"gpm": 0.4, "dcgm": 0.5}, "TRITON_COMPUTE", (0.6, 0.8)),
    ],
)
def test_the_first_source_that_knows_all_slices_splits_the_interval_and_is_named(
    attribution, first, second, method, activity
):
    sample = sensed(first, second, attribution)
    assert sample.attribution.name == method
    assert shares(sample) == pytest.approx(expected(*activity))
    assert sum(p.hosted[0].compute_s for p in sample.slices) == pytest.approx(1.4), (
        "Triton's seconds stay what they are"
    )


def test_every_setting_names_its_sensors():
    assert set(SENSORS) == {"auto", "triton", "gpm", "dcgm"}


def test_sensors_do_not_speak_for_a_time_that_they_did_not_watch():
    both = ({"dcgm": 0.1}, {"dcgm": 0.5})
    assert sensed(*both, serving_s=None).attribution == AttributionMethod.TRITON_COMPUTE
    assert sensed(*both, length_s=4.0).attribution == DCGM
    assert sensed(*both, length_s=30.0).attribution == AttributionMethod.TRITON_COMPUTE


def test_a_long_batch_that_triton_has_not_counted_yet_is_seen_by_a_sensor():
    before = reading(0, 0, part(0, 1.0, gpm=0.5), part(1, 1.0, gpm=0.5))
    now = reading(1, IDLE_W + 100, part(0, 1.0, gpm=0.9), part(1, 1.0, gpm=0.0))
    _, (sample,) = meter(before, now)
    assert shares(sample) == pytest.approx((100, 0))
    assert own(sample)[KEYS[0]].hosted[0].active_j == pytest.approx(100)
    assert sample.attribution == AttributionMethod.SOLE


def test_a_triton_that_does_not_answer_still_gets_what_a_sensor_saw():
    before = reading(0, 0, part(0, 1.0), part(1, 1.0))
    silent = dataclasses.replace(part(0, 0, gpm=0.5), work=())
    _, (sample,) = meter(before, reading(1, IDLE_W + 100, silent, part(1, 1.5, gpm=0.5)))
    assert shares(sample) == pytest.approx(expected(0.5, 0.5))
    assert own(sample)[KEYS[0]].hosted[0].variant == "toy-l", "what it hosts is known"


def test_a_slice_that_never_said_what_it_hosts_serves_nobody():
    silent = dataclasses.replace(part(0, 0, gpm=0.5), work=())
    _, (sample,) = meter(reading(0, 0), reading(1, IDLE_W + 100, silent, part(1, 0.5, gpm=0.5)))
    assert shares(sample) == pytest.approx((0, 100))


def test_warm_up_is_taken_out_of_what_a_sensor_saw():
    sample = sensed({"gpm": 0.6, "overhead_s": 0.3}, {"gpm": 0.0})
    assert shares(sample) == pytest.approx((50, 0))
    assert sample.unallocated_j == pytest.approx(50)


# --- CPUs -------------------------------------------------------------------------------------------------------------

CPU = device_type("cpu:8")


def cpu_sample(busy_s: float | None, *slices: tuple[SliceKey, float, float], delta_j: float = 44.0):
    def at(second: int) -> DeviceReading:
        return DeviceReading(
            device="node0/cpu", at_s=1e9 + second, monotonic_s=100.0 + second, driver="rapl-1",
            counter_j=second * delta_j, baseline_w=CPU.idle_w, active_w_max=CPU.max_w - CPU.idle_w,
            state=DeviceState.AWAKE, clock_mhz=0, serving_s=1.0 if slices else 0.0, busy_s=busy_s,
            method=EnergyMethod.RAPL, slices=tuple(
                SliceReading(key, 1, "a", share, True, (Work("toy", "toy-l", second * seconds, second),))
                for key, share, seconds in slices
            ),
        )  # fmt: skip

    state, _ = advance(MeterState("node0/cpu"), at(0), "node0", True)
    return advance(state, at(1), "node0", True)[1]


def test_cpus_that_host_nothing_are_unallocated_whatever_they_do():
    sample = cpu_sample(0.5)
    assert (sample.method, sample.idle_j, sample.slices) == (EnergyMethod.RAPL, 0.0, ())
    assert sample.unallocated_j == pytest.approx(44)


def test_a_cpu_slice_shares_with_everything_else_that_the_host_runs():
    key = SliceKey("node0/cpu", "cpu:2", 0, 2)
    sample = cpu_sample(0.5, (key, 2 / 8, 1.0))
    assert sample.idle_j == pytest.approx(12)
    assert sample.slices[0].active_j == pytest.approx(32 * 0.25 / 0.5)
    assert sample.unallocated_j == pytest.approx(32 * 0.25 / 0.5)


def test_two_cpu_slices_that_are_all_that_runs_share_by_cores():
    four, quota = SliceKey("node0/cpu", "cpu:4", 0, 4), SliceKey("node0/cpu", "quota:0.5", 40, 5)
    sample = cpu_sample(0.45, (four, 4 / 8, 0.8), (quota, 0.5 / 8, 1.0))
    found = own(sample)
    assert found[four].active_j == pytest.approx(32 * 0.4 / 0.4625)
    assert found[quota].active_j == pytest.approx(32 * 0.0625 / 0.4625)


# --- counters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before_j", "now_j", "same", "found"),
    [
        (100.0, 150.0, True, CounterStep(50.0, 150.0, False)),
        (1e6, 1e6 - 0.5, True, CounterStep(0.0, 1e6, False)),  # a wobble waits for its mark
        (1e6, 40.0, True, CounterStep(40.0, 40.0, True)),
        (1e6, 5e5, True, CounterStep(None, 5e5, True)),  # neither a reset nor a wobble
        (100.0, 1e9, True, CounterStep(None, 1e9, True)),  # nothing draws that much
        (1e6, 40.0, False, CounterStep(40.0, 40.0, True)),
        (1e6, 1e6 + 40.0, False, CounterStep(40.0, 1e6 + 40.0, False)),  # the marker changed, the counter went on
        (1e6, 2e6, False, CounterStep(None, 2e6, True)),
        (None, 1e6, True, CounterStep(None, 1e6, False)),
        (None, 40.0, False, CounterStep(40.0, 40.0, True)),
    ],
)
def test_a_counter_moves_only_as_far_as_a_device_can_draw(before_j, now_j, same, found):
    assert counter_step(before_j, now_j, same, max_step_j(400.0, 1.0)) == found


def test_an_interval_of_unknown_energy_says_so_and_the_next_goes_on():
    _, samples = meter(reading(0, 1e6), reading(1, 5e5), reading(2, 5e5 + 70))
    assert [(s.method.name, s.counter_j) for s in samples] == [("NONE", 0), ("NVML_COUNTER", 70)]
    assert [s.counter_resets for s in samples] == [1, 1]


def test_an_integral_is_exact_for_lines_and_says_how_far_it_may_be_off():
    integral = PowerIntegral()
    for tick in range(11):
        integral.add(5 + tick / 10, 100 + 10 * tick)
    assert integral.joules == pytest.approx(150)
    assert integral.take_uncertainty() == pytest.approx(SENSOR_UNCERTAINTY + 10 * 0.5 / 150)
    assert integral.take_uncertainty() == SENSOR_UNCERTAINTY


def test_an_integral_ignores_what_is_no_power_and_doubts_what_it_has_not_seen():
    integral = PowerIntegral()
    for at_s, power_w in ((0.0, 100.0), (0.1, math.nan), (0.2, -5.0), (0.2, 100.0), (0.2, 900.0), (0.1, 900.0)):
        integral.add(at_s, power_w)
    assert integral.joules == pytest.approx(20)
    integral.add(4.2, 100.0)
    assert integral.joules == pytest.approx(420)
    assert integral.take_uncertainty() == 1.0


def test_an_integral_that_began_with_the_agent_leaves_the_gap_before_it():
    state, _ = meter(reading(0, 50, driver="b/1/integral 1", method=EnergyMethod.POWER_INTEGRAL))
    later = reading(60, 0, driver="b/1/integral 2", method=EnergyMethod.POWER_INTEGRAL, serving_s=None)
    state, none = meter(later, state=state)
    assert none == []
    more = {"driver": "b/1/integral 2", "method": EnergyMethod.POWER_INTEGRAL, "counter_uncertainty": 0.06}
    _, (sample,) = meter(reading(61, 30, **more), state=state)
    assert (sample.method, sample.counter_j) == (EnergyMethod.POWER_INTEGRAL, 30)
    assert sample.uncertainty_ratio == pytest.approx(0.07)


# --- baseline ---------------------------------------------------------------------------------------------------------


def test_the_lowest_quiet_stretch_at_each_clock_stands():
    baseline = Baseline()
    for clock, watts in ((1410, 60.0), (1410, 52.0), (1410, 58.0), (705, 45.0)):
        for _ in range(5):
            baseline = baseline.after_quiet(clock, QUIET_S / 5, watts * QUIET_S / 5, IDLE_W)
    assert baseline.watts_at(1410, 99.0) == pytest.approx(52)
    assert baseline.watts_at(705, 99.0) == pytest.approx(45)
    assert baseline.watts_at(1000, 99.0) == 99.0


def test_a_stretch_counts_only_when_it_was_quiet_throughout_at_one_clock_and_plausible():
    short = Baseline().after_quiet(1410, 4.0, 200.0, IDLE_W)
    assert short.learned == ()
    assert short.after_busy().after_quiet(1410, 4.0, 200.0, IDLE_W).learned == ()
    assert short.after_quiet(705, 4.0, 200.0, IDLE_W).learned == ()
    assert short.after_quiet(1410, 1.0, 50.0, IDLE_W).learned == ((1410, 50.0),)
    assert Baseline().after_quiet(1410, 10.0, 3000.0, IDLE_W).learned == (), "something else was at work"


def test_a_board_that_idles_higher_than_its_type_is_metered_by_what_it_was_seen_to_draw():
    hot = dataclasses.replace(A100_40GB, idle_w=70.0)
    errors = {}
    for learn in (False, True):
        device = MeteredDevice(hot, np.random.default_rng(1), learn=learn)
        loaded = [device.start("4g.20gb", 0, 4, 0.02, 1.0, 0.0), device.start("3g.20gb", 4, 4, 0.02, 1.0, 0.0)]
        device.kind = A100_40GB  # what the agent believes
        device.read()
        for second in range(30):
            for index, one in enumerate(loaded):
                one.load = 0.0 if second < 10 else (0.1, 0.3)[index]
            device.run(1.0, 0.04)
            device.read()
        ours, true = device.metered(), device.books()
        errors[learn] = max(abs(ours.active_j[place] / joules - 1) for place, joules in true.active_j.items())
    print(f"worst error of a slice: {errors[False]:.1%} by the type's idle power, {errors[True]:.1%} learned")
    assert errors[True] <= 0.05 < errors[False]

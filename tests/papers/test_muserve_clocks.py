"""muServe's Algorithm 3 (MIAD) by hand: its step table, where the printed loop and ours differ, where it settles."""

import timeit
from dataclasses import replace
from time import thread_time

import numpy as np
import pytest

from power_agent.governors.miad import STEP_MHZ, Miad, MiadSettings
from trefoil.core.brains import GovernedStage, GovernorView
from trefoil.core.device_types import V100_32GB
from trefoil.core.fleet import DeviceState
from trefoil.core.power import active_w, idle_w, stretch

V100 = tuple(range(200, 1381, 10))  # the paper's range
TOP, FLOOR = V100[-1], V100[0]


def stage(latency: float, weight: float = 1.0, family: str = "bert", samples: int = 100) -> GovernedStage:
    """Latency in parts of an SLO of 100 ms."""
    return GovernedStage(family, 0, 100.0, 100.0 * latency, weight, 0.0, 130.0 * latency, samples)


def view(now_s: float, *stages: GovernedStage, ends=(0, 0), honoured=True, age_s=0.5) -> GovernorView:
    return GovernorView(now_s, "node0/gpu0", TOP, ends, V100, stages, honoured, age_s)


def walk(*seen: tuple[GovernedStage, ...], **settings) -> list[int]:
    """Clocks of a governor that sees one after the other, a second apart; the first is the start at the top."""
    one = Miad(MiadSettings(**settings))
    return [one.step(view(float(second), *stages)).clock_mhz for second, stages in enumerate((seen[0], *seen))]


@pytest.mark.parametrize("literal", [True, False])
@pytest.mark.parametrize(
    ("latencies", "clocks"),
    [
        ((0.96,), [1380, 1380]),  # line 11: slack 0.04 < 0.05, and line 22: no more than MAX
        ((0.95,), [1380, 1380]),  # slack 0.05 is enough, and leaves nothing for a step
        ((0.5, 0.5, 0.5), [1380, 1280, 1180, 1080]),  # line 24: a STEP at a time
        ((0.5, 0.5, 0.96, 0.5), [1380, 1280, 1180, 1380, 1280]),  # doubled, up to MAX
        ((0.1,) * 10 + (0.97, 0.1), [1380, *range(1280, 379, -100), 760, 660]),
        ((0.1,) * 13, [1380, *range(1280, 199, -100), 200, 200]),  # line 24: no less than MIN
        ((0.9, 0.88), [1380, 1380, 1280]),  # a step adds 0.9 x 100 / 1380 = 0.065 > 0.05; 0.88: 0.064 < 0.07
    ],
)
def test_the_step_table(latencies, clocks, literal):
    assert walk(*((stage(latency),) for latency in latencies), literal=literal) == clocks


def test_printed_one_stage_with_slack_is_enough_and_here_the_tightest_decides():
    tight, loose = stage(0.9, family="tight"), stage(0.3, family="loose")
    for stages in ((tight, loose), (loose, tight)):
        assert walk(stages, literal=True) == [1380, 1280], (
            "a later one with 0.05 < slack < its degradation cancels nothing"
        )
        assert walk(stages) == [1380, 1380]
    for literal in (True, False):  # UP goes before DOWN in both
        assert walk((loose, loose), (loose, stage(0.97)), literal=literal) == [1380, 1280, 1380]


def test_a_step_is_printed_as_a_line_and_here_costs_what_the_law_says():
    falls = [(stage(0.1),)] * 11
    for literal in (True, False):  # 0.65 x 80 / 200 = 0.26 < 0.30
        assert walk(*falls, (stage(0.65),), literal=literal)[-2:] == [280, 200]
    assert walk(*falls, (stage(0.69),), literal=True)[-2:] == [280, 200]  # 0.69 x 100 / 280 = 0.246 < 0.26 ...
    assert walk(*falls, (stage(0.69),))[-2:] == [280, 280], "... but 0.69 x 280 / 200 = 0.97 leaves no slack"


def test_a_stage_without_sensitivity_is_at_the_floor_without_a_miss_and_one_with_all_of_it_stops_in_time():
    for weight, literal in ((0.0, False), (0.0, True), (1.0, False), (0.5, False)):
        one, clock_mhz, seen = Miad(MiadSettings(literal=literal)), TOP, []
        for second in range(40):
            latency = 0.6 * stretch(TOP, clock_mhz, weight)
            assert latency < 1.0 - 0.05 + 1e-9, "within the SLO, and the slack is left"
            clock_mhz = one.step(view(float(second), stage(latency, weight))).clock_mhz
            seen.append(clock_mhz)
        assert seen[20:] == [seen[20]] * 20, "it rests"
        assert seen[-1] == FLOOR if not weight else FLOOR < seen[-1] < TOP
        if weight == 1.0:  # today's law: time follows the clock
            assert 0.6 * TOP / seen[-1] <= 0.95 < 0.6 * TOP / (seen[-1] - STEP_MHZ)


def test_the_laws_have_the_shape_of_fig_2_and_the_point_that_the_text_gives():
    """Section 2.2: V100, 1300 to 200 MHz; gpt2-large (832 ms, Table 1) is within 1000 ms at 800 MHz, 120 of 214 W."""
    clocks = np.arange(200, 1301, 100)
    watts = [idle_w(V100_32GB, DeviceState.AWAKE, mhz) + active_w(V100_32GB, "whole", mhz) for mhz in clocks.tolist()]
    assert np.corrcoef(clocks, watts)[0, 1] ** 2 > 0.95, "power is nearly linear"
    assert watts[6] / watts[-1] == pytest.approx(120 / 214, rel=0.05)
    sensitivity = (1000 / 832 - 1) / (1300 / 800 - 1)  # the most that this point allows
    assert sensitivity == pytest.approx(0.32, abs=0.01)
    longer = np.array([stretch(1300, mhz, sensitivity) for mhz in clocks.tolist()])
    steps = -np.diff(longer)
    assert (np.diff(steps) < 0).all(), "a steep decline at low clocks ..."
    assert steps[-3:].sum() < 0.1 < steps[0], "... and flat at high ones"


def test_few_answers_hold_and_a_stage_that_nobody_asks_has_no_say():
    assert walk((stage(0.1, samples=4),), (stage(0.99, samples=4),), samples_min=5) == [1380, 1380, 1380]
    assert walk((stage(0.1, samples=1),), (stage(0.99, samples=1),)) == [1380, 1280, 1380]
    assert walk((stage(0.1), stage(0.99, samples=0))) == [1380, 1280]
    assert walk((stage(0.1), stage(0.1, samples=4)), samples_min=5) == [1380, 1380]
    assert walk((stage(0.1, samples=0),)) == [1380, 1380]


def test_the_quantile_is_an_option():
    assert walk((stage(0.8),)) == [1380, 1280]
    assert walk((stage(0.8),), statistic="p95") == [1380, 1380]


def test_between_two_steps_nothing_moves_and_the_bounds_are_the_plans():
    one, ends = Miad(MiadSettings()), (600, 900)
    found = [one.step(view(t, stage(0.1), ends=ends)) for t in (0.0, 0.5, 1.0, 1.9, 2.0, 3.0, 4.0, 5.0)]
    assert [decision.clock_mhz for decision in found] == [900, 900, 800, 800, 700, 600, 600, 600]
    assert [decision.next_tick_at_s for decision in found[:3]] == [1.0, 1.0, 2.0]
    assert one.step(view(5.2, stage(0.1), ends=(800, 1000))).clock_mhz == 1000, "a new plan: from its top"
    assert one.step(view(6.2, stage(0.1), stage(0.1, family="other"), ends=(800, 1000))).clock_mhz == 1000


def test_it_asks_for_capacity_when_it_is_called_up_again_at_the_top():
    one = Miad(MiadSettings())
    asked = [one.step(view(float(t), stage(x))).scale_out for t, x in enumerate((0.5, 0.5, 0.99, 0.99, 0.99, 0.5))]
    assert asked == [False, False, False, True, True, False]
    low = Miad(MiadSettings())
    asked = [low.step(view(float(t), stage(0.99), ends=(200, 800))).scale_out for t in range(3)]
    assert asked == [False, False, True], "the top of the plan's range counts"


@pytest.mark.parametrize("trouble", [{"honoured": False}, {"age_s": 2.1}, {"age_s": float("inf")}])
def test_what_it_cannot_trust_takes_it_to_the_top_at_once(trouble):
    one = Miad(MiadSettings())
    for t in range(5):
        one.step(view(float(t), stage(0.1), ends=(200, 1000)))
    assert one.step(view(4.5, stage(0.1), ends=(200, 1000), **trouble)).clock_mhz == 1000
    assert one.step(view(5.6, stage(0.1), ends=(200, 1000))).clock_mhz == 900, "and then down by steps"


def test_a_step_takes_less_than_50_us():
    """Of the processor; with a family on each slice that an A100 can have."""
    one, stages = Miad(MiadSettings(interval_s=0.001)), tuple(stage(0.5, weight=0.5, family=str(i)) for i in range(7))
    views = iter([view(float(t), *(replace(s, latency_ms=50.0 + t % 2) for s in stages)) for t in range(2001)])
    assert min(timeit.repeat(lambda: one.step(next(views)), timer=thread_time, number=100, repeat=20)) / 100 < 50e-6

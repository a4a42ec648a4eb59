"""The keeper of clocks and power limits on a driver of a few lines: what it sets, when, and what outlives it."""

import itertools
import json

import pytest

from power_agent.devices.errors import DeviceError, DeviceUnsupported, NoPermission
from power_agent.devices.gpus import PowerLimits
from power_agent.durability.journal_state import Override
from tests.support.clock_bench import GPU, HANDS, Bench, Hand, clock_plan
from trefoil.core.device_types import P4
from trefoil.core.errors import Fenced, InvalidInput, NotFound, PlanError, Unavailable
from trefoil.core.fleet import ClockLease, DeviceState


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


@pytest.fixture(params=HANDS, ids=lambda hand: hand.lever)
def hand(request) -> Hand:
    return request.param


def lease(max_mhz=600, holder="governor", epoch=1):
    return ClockLease(GPU, 0, max_mhz, holder, epoch)


def unknown():
    return DeviceError("could not lock: Unknown Error (NVML 999)", code=999)


def names(bench):
    return [name for _, name in bench.gpus.calls]


def journalled(bench):
    lines = (bench.folder / "journal.jsonl").read_text().splitlines()
    kinds = [json.loads(line.partition("\t")[0]) for line in lines]
    return [
        next(kind for kind in ("override", "restored") if kind in k) for k in kinds if {"override", "restored"} & {*k}
    ]


async def test_a_plan_without_clocks_touches_nothing(bench):
    await bench.start(clock_plan())
    await bench.pass_s(60)
    assert names(bench) == []
    assert bench.keeper.settled()
    await bench.end()
    assert names(bench) == []


async def test_a_lease_is_set_at_once_renewed_without_a_call_and_reset_when_it_ends(bench):
    await bench.start()
    answer = bench.keeper.set_clocks(lease(607), 5.0)
    assert (answer.min_mhz, answer.max_mhz, answer.expires_at_s) == (210, 600, bench.clock.now_s() + 5)
    await bench.pass_s(0.0)
    assert bench.gpus.locked == (210, 600)
    assert bench.node.status().devices[0].clock_lease == answer
    for _ in range(4):
        await bench.pass_s(4)
        bench.keeper.set_clocks(lease(607), 5.0)
    assert names(bench) == ["set"]
    bench.clock.jump(-3600.0)  # the wall clock of the machine is set back: leases do not care
    await bench.pass_s(4.9)
    assert bench.gpus.locked == (210, 600)
    await bench.pass_s(0.2)
    assert bench.gpus.locked is None
    assert bench.node.status().devices[0].clock_lease is None
    assert names(bench) == ["set", "reset"]
    assert journalled(bench) == ["override", "restored"]
    await bench.kill()


async def test_a_lease_is_renewed_without_a_call_and_ends_by_itself(bench, hand):
    low, *_ = hand.values
    await bench.start()
    for _ in range(4):
        bench.keeper.set_clocks(hand.lease(low), 5.0)
        await bench.pass_s(4)
        assert hand.in_force(bench.gpus) == low
    assert names(bench) == ["set"]
    await bench.pass_s(1.1)
    assert hand.in_force(bench.gpus) is None
    assert journalled(bench) == ["override", "restored"]
    await bench.kill()


async def test_a_released_lease_returns_to_the_plans_range_once_a_second(bench, hand):
    low, middle, _ = hand.values
    await bench.start(hand.plan(middle))
    await bench.pass_s(0.1)
    bench.keeper.set_clocks(hand.lease(low), 60.0)
    await bench.pass_s(0.1)
    with pytest.raises(Fenced, match="held by governor"):
        bench.keeper.release_clocks(GPU, "other", 1)
    bench.keeper.release_clocks(GPU, "governor", 1)
    bench.keeper.release_clocks(GPU, "governor", 1)
    await bench.pass_s(5)
    assert hand.in_force(bench.gpus) == middle
    assert names(bench) == ["set"]  # the lease was gone before its turn came
    await bench.end()
    assert hand.in_force(bench.gpus) is None


async def test_many_wishes_are_one_change_a_second_and_the_last_one_stays(bench, hand):
    low, step = hand.values[0], 15 if hand.is_clock else 5
    await bench.start()
    for number in range(40):
        bench.keeper.set_clocks(hand.lease(low + step * number), 60.0)
        await bench.pass_s(0.1)
    await bench.pass_s(2)
    times = [at_s for at_s, _ in bench.gpus.calls]
    assert all(later - earlier >= 1.0 for earlier, later in itertools.pairwise(times))
    assert len(times) <= 6
    assert hand.in_force(bench.gpus) == low + 39 * step
    await bench.end()


async def test_what_must_not_outlive_the_agent_is_put_back_when_it_ends(bench):
    await bench.start(clock_plan(600, 900, limit_w=250.0))
    await bench.pass_s(3)
    assert (bench.gpus.locked, bench.gpus.limit_w) == ((600, 900), 250.0)
    assert bench.keeper.settled()
    started_s = bench.clock.monotonic_s()
    await bench.end()
    assert (bench.gpus.locked, bench.gpus.limit_w) == (None, 400.0)
    assert bench.clock.monotonic_s() - started_s <= 2.5
    await bench.start()
    assert bench.node.journal.state.overrides == {}
    await bench.kill()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_kill_between_journal_and_driver_is_put_right_by_the_successor(bench, hand, moment):
    low, *_ = hand.values
    bench.crash = moment
    await bench.start()
    bench.keeper.set_clocks(hand.lease(low), 60.0)
    await bench.pass_s(0.1)
    assert bench.crashed
    await bench.kill()
    assert hand.in_force(bench.gpus) == (low if moment == "after" else None)
    await bench.start()
    await bench.pass_s(0.1)
    assert hand.in_force(bench.gpus) is None
    assert bench.node.journal.state.overrides == {}
    await bench.kill()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_kill_while_one_limit_replaces_another_leaves_the_one_that_was_found(bench, moment):
    bench.gpus.limit_w = bench.gpus.found_w = 350.0  # an operator's
    await bench.start(clock_plan(limit_w=250.0))
    await bench.pass_s(2)
    bench.crash = moment
    bench.take(clock_plan(limit_w=150.0))
    await bench.pass_s(2)
    assert bench.crashed
    await bench.kill()
    await bench.start()
    await bench.pass_s(0.1)
    assert (bench.gpus.limit_w, bench.node.journal.state.overrides) == (350.0, {})
    await bench.end()


async def test_a_limit_that_a_predecessor_left_is_put_back_to_what_it_found(bench):
    bench.gpus.limit_w, bench.gpus.found_w = 250.0, 300.0
    await bench.start()
    bench.node.journal.begin_override(Override(GPU, "power_limit", 300.0, 250.0, "boot/load-1"))
    await bench.kill()
    await bench.start()
    await bench.pass_s(0.1)
    assert (bench.gpus.limit_w, bench.node.journal.state.overrides) == (300.0, {})
    await bench.end()
    assert names(bench) == ["reset"]


@pytest.mark.parametrize(("in_force_w", "after_w"), [(250.0, 300.0), (350.0, 350.0)])
async def test_a_limit_is_not_put_back_where_a_driver_loaded_again_has_another(bench, in_force_w, after_w):
    await bench.start()
    bench.node.journal.begin_override(Override(GPU, "power_limit", 300.0, 250.0, "boot/load-0"))
    await bench.kill()
    bench.gpus.limit_w = in_force_w
    await bench.start()
    await bench.pass_s(0.1)
    assert (bench.gpus.limit_w, bench.node.journal.state.overrides) == (after_w, {})
    bench.take(clock_plan(limit_w=150.0))
    await bench.pass_s(2)
    assert bench.gpus.limit_w == 150.0
    await bench.end()
    assert bench.gpus.limit_w == after_w


async def test_no_limit_is_set_while_a_board_does_not_tell_which_to_put_back(bench):
    await bench.start()
    await bench.pass_s(2)
    before_w, bench.gpus.limit_w = bench.gpus.limit_w, None
    bench.take(clock_plan(limit_w=150.0))
    await bench.pass_s(3)
    assert (bench.gpus.limit_w, journalled(bench)) == (None, [])
    bench.gpus.limit_w = before_w
    await bench.pass_s(60)
    assert bench.gpus.limit_w == 150.0
    await bench.end()
    assert bench.gpus.limit_w == before_w


async def test_a_limit_that_an_operator_sets_is_published_and_put_back(bench):
    await bench.start()
    await bench.pass_s(2)
    bench.gpus.limit_w = bench.gpus.found_w = 300.0
    await bench.pass_s(6)
    assert bench.node.status().devices[0].power_limit_w == 300.0
    bench.take(clock_plan(limit_w=300.0))
    await bench.pass_s(2)
    assert bench.keeper.settled()
    assert names(bench) == []
    bench.take(clock_plan(limit_w=150.0))
    await bench.pass_s(6)
    assert bench.node.status().devices[0].power_limit_w == 150.0
    bench.gpus.limit_w = 200.0  # somebody else's, while ours is in force
    await bench.pass_s(8)
    assert bench.node.status().devices[0].drift == ("power limit 150 W is not in force: another process set 200 W",)
    await bench.end()
    assert bench.gpus.limit_w == 300.0


async def test_no_plan_and_no_lease_raises_the_limit_that_an_operator_set(bench):
    bench.gpus.limit_w = bench.gpus.found_w = 250.0
    await bench.start(clock_plan(limit_w=400.0))
    await bench.pass_s(5)
    assert (names(bench), bench.keeper.settled()) == ([], True)
    with pytest.raises(InvalidInput, match=r"not a power limit of this board.*100 to 250 W"):
        bench.keeper.set_clocks(ClockLease(GPU, 0, 0, "x", 1, power_limit_w=300.0), 5.0)
    bench.gpus.limit_w = bench.gpus.found_w = 200.0  # between two readings
    bench.take(clock_plan(limit_w=220.0))
    await bench.pass_s(8)
    assert (names(bench), bench.gpus.limit_w, bench.keeper.settled()) == ([], 200.0, True)
    bench.take(clock_plan(limit_w=150.0))
    await bench.pass_s(3)
    assert bench.gpus.limit_w == 150.0
    bench.take(clock_plan(limit_w=400.0))
    await bench.pass_s(3)
    assert bench.gpus.limit_w == 200.0
    await bench.kill()


async def test_a_limit_of_the_type_is_taken_by_a_board_with_a_narrower_range(bench, monkeypatch):
    monkeypatch.setattr(bench.gpus, "power_limits", lambda _: PowerLimits(200.0, 350.0, 350.0))
    bench.gpus.limit_w = bench.gpus.found_w = 350.0
    await bench.start()
    for asked_w, in_force_w in ((150.0, 200.0), (300.0, 300.0), (400.0, 350.0)):
        plan = clock_plan(limit_w=asked_w)
        bench.keeper.refuse(plan)
        bench.take(plan)
        await bench.pass_s(3)
        assert (bench.gpus.limit_w, bench.keeper.settled()) == (in_force_w, True)
    await bench.kill()


async def test_a_successor_sets_again_what_the_plan_still_asks_for(bench, hand):
    _, middle, _ = hand.values
    await bench.start(hand.plan(middle))
    await bench.pass_s(1)
    await bench.kill()
    await bench.start(hand.plan(middle))
    await bench.pass_s(0.1)
    assert names(bench) == ["set", "set"]  # what is locked cannot be read: it is set again
    assert hand.in_force(bench.gpus) == middle
    await bench.end()
    assert hand.in_force(bench.gpus) is None


async def test_a_sleeping_device_has_the_default_and_its_range_back_when_it_wakes(bench, hand):
    plan = hand.plan(hand.values[1])
    await bench.start(plan)
    await bench.pass_s(2)
    bench.take(plan, DeviceState.ASLEEP)
    await bench.pass_s(2)
    assert hand.in_force(bench.gpus) is None
    assert bench.keeper.settled()
    bench.take(plan)
    assert not bench.keeper.settled()
    await bench.pass_s(2)
    assert hand.in_force(bench.gpus) == hand.values[1]
    await bench.end()


async def test_an_unknown_error_is_tried_three_times_then_reported_and_tried_slowly(bench, hand):
    low, *_ = hand.values
    await bench.start()
    bench.gpus.refusals = [unknown() for _ in range(4)]
    bench.keeper.set_clocks(hand.lease(low), 500.0)
    await bench.pass_s(2.9)
    assert names(bench) == ["set"] * 3
    (text,) = bench.node.status().devices[0].drift
    assert text == f"{hand.lever.text} cannot be set to {hand.said(low)}: could not lock: Unknown Error (NVML 999)"
    assert not bench.keeper.settled()
    await bench.pass_s(29)
    assert len(names(bench)) == 3
    await bench.pass_s(31)
    assert names(bench) == ["set"] * 5
    assert hand.in_force(bench.gpus) == low
    assert bench.node.status().devices[0].drift == ()
    await bench.end()


async def test_a_reset_that_fails_is_tried_again_and_left_to_the_successor_at_the_end(bench, hand):
    low, *_ = hand.values
    await bench.start()
    bench.keeper.set_clocks(hand.lease(low), 2.0)
    await bench.pass_s(1)
    bench.gpus.refusals = [unknown(), unknown()]
    await bench.pass_s(4)
    assert names(bench) == ["set", "reset", "reset", "reset"]
    assert hand.in_force(bench.gpus) is None
    bench.keeper.set_clocks(hand.lease(low), 60.0)
    await bench.pass_s(2)
    bench.gpus.refusals = [unknown() for _ in range(20)]
    await bench.end()
    assert hand.in_force(bench.gpus) == low
    bench.gpus.refusals.clear()
    await bench.start()
    await bench.pass_s(0.1)
    assert hand.in_force(bench.gpus) is None
    await bench.end()


async def test_a_driver_that_was_loaded_again_gets_the_range_anew(bench, hand):
    _, middle, _ = hand.values
    await bench.start(hand.plan(middle))
    await bench.pass_s(3)
    bench.gpus.reload()
    bench.node.driver_load_id = "load-2"
    bench.node.changed()
    await bench.pass_s(3)
    assert hand.in_force(bench.gpus) == middle
    await bench.end()
    assert hand.in_force(bench.gpus) is None


async def test_nothing_is_called_on_a_lost_gpu_and_its_return_is_noticed(bench, hand):
    low, middle, high = hand.values
    await bench.start(hand.plan(middle))
    await bench.pass_s(2)
    bench.gpus.lost = True
    bench.take(hand.plan(low))
    await bench.pass_s(2)
    assert bench.device.state == DeviceState.LOST
    count = len(names(bench))
    bench.take(hand.plan(high), DeviceState.LOST)
    with pytest.raises(Unavailable, match="the device is lost"):
        bench.keeper.set_clocks(hand.lease(low), 5.0)
    assert bench.keeper.steps(hand.plan(low)) == ()
    await bench.pass_s(60)
    assert len(names(bench)) == count
    bench.gpus.lost = False
    bench.gpus.reload()  # it was reset
    bench.take(hand.plan(high))
    await bench.pass_s(2)
    assert hand.in_force(bench.gpus) == high
    await bench.end()
    assert hand.in_force(bench.gpus) is None


async def test_a_power_cap_and_a_foreign_hand_are_reported_and_not_fought(bench):
    await bench.start(clock_plan(0, 900))
    await bench.pass_s(2)
    bench.gpus.reasons, bench.gpus.reading = ("software_power_cap",), 700
    await bench.pass_s(6)
    assert bench.node.status().devices[0].drift == ("clock range 210-900 MHz is not honoured: software_power_cap",)
    bench.gpus.reasons, bench.gpus.locked = (), None  # somebody reset the clocks
    bench.gpus.reading = 1410
    await bench.pass_s(6)
    (text,) = bench.node.status().devices[0].drift
    assert "is exceeded: another process" in text
    assert names(bench) == ["set"]
    bench.take(clock_plan())
    await bench.pass_s(2)
    bench.gpus.locked = (300, 300)
    await bench.pass_s(6)
    assert bench.node.status().devices[0].drift == ("clocks are locked, and not by this agent",)
    bench.gpus.default_mhz = 300  # as it comes from the board
    await bench.pass_s(6)
    assert bench.node.status().devices[0].drift == ()
    await bench.end()
    assert names(bench) == ["set", "reset"]
    assert bench.gpus.locked == (300, 300)


async def test_a_plan_says_its_clock_steps_before_anything_is_touched(bench):
    await bench.start()
    steps = bench.keeper.steps(clock_plan(0, 900, 250.0))
    assert [(step.verb, step.slice.device, step.slice.slice_type, step.why) for step in steps] == [
        ("lock_clock", GPU, "", "210-900 MHz"),
        ("limit_power", GPU, "", "250 W"),
    ]
    assert bench.keeper.steps(clock_plan()) == ()
    assert bench.keeper.steps(clock_plan(0, 1410, 400.0)) == ()  # what the hardware does anyway
    assert names(bench) == []
    await bench.kill()


async def test_a_p4_refuses_and_says_why(tmp_path):
    bench = Bench(tmp_path, P4)
    await bench.start()
    with pytest.raises(InvalidInput, match=r"a Tesla P4 cannot lock clocks: that came with Volta\. Remedy"):
        bench.keeper.set_clocks(lease(), 5.0)
    with pytest.raises(PlanError, match="a Tesla P4 cannot lock clocks"):
        bench.keeper.refuse(clock_plan(0, 900))
    await bench.pass_s(10)
    assert names(bench) == []
    await bench.kill()


async def test_a_limit_beyond_the_board_is_refused_and_nothing_is_touched(bench):
    await bench.start()
    text = r"node0/gpu0\.power_limit_w = 401: not a power limit of this board\. Remedy: 100 to 400 W"
    with pytest.raises(PlanError, match=text):
        bench.keeper.refuse(clock_plan(limit_w=401))
    with pytest.raises(InvalidInput, match="power_limit_w = 99: not a power limit of this board"):
        bench.keeper.set_clocks(ClockLease(GPU, 0, 0, "x", 1, power_limit_w=99), 5.0)
    await bench.pass_s(5)
    assert names(bench) == []
    await bench.kill()


async def test_what_probing_found_missing_is_the_reason_of_the_refusal(bench, hand):
    low, middle, _ = hand.values
    await bench.start()
    bench.node.set_missing(f"{hand.lever.capability} gpu0", "needs root. Remedy: run it as its unit does")
    with pytest.raises(PlanError) as error:
        bench.keeper.refuse(hand.plan(middle))
    field, value, otherwise = ("clock_mhz", (0, 900), "0 and 0") if hand.is_clock else ("power_limit_w", 250, "0")
    assert str(error.value) == (
        f"device node0/gpu0.{field} = {value}: {hand.lever.text} cannot be set here: needs root."
        f" Remedy: run it as its unit does; or plan {otherwise}"
    )
    bench.keeper.refuse(clock_plan())
    with pytest.raises(InvalidInput, match="needs root"):
        bench.keeper.set_clocks(hand.lease(low), 5.0)
    (other,) = (each for each in HANDS if each != hand)
    bench.keeper.set_clocks(other.lease(other.values[0]), 5.0)
    with pytest.raises(NotFound, match="one of node0/gpu0"):
        bench.keeper.set_clocks(ClockLease("node0/gpu7", 0, 600, "x", 1), 5.0)
    await bench.kill()


@pytest.mark.parametrize("refusal", [DeviceUnsupported("not supported", code=3), NoPermission("no", code=4)], ids=str)
async def test_what_the_driver_never_does_is_missing_and_holds_no_plan_up(bench, hand, refusal):
    await bench.start()
    bench.gpus.refusals = [refusal]
    bench.take(hand.plan(hand.values[0]))
    await bench.pass_s(25)
    assert hand.in_force(bench.gpus) is None
    assert bench.node.missing == (f"{hand.lever.capability} gpu0: {refusal}",)
    assert bench.keeper.settled()
    assert bench.node.journal.state.overrides == {}
    assert names(bench) == ["set"]
    bench.node.driver_load_id = "load-2"  # another driver may
    bench.node.changed()
    await bench.pass_s(5)
    assert hand.in_force(bench.gpus) == hand.values[0]
    assert bench.node.missing == ()
    await bench.end()


async def test_a_driver_that_does_not_support_it_after_all_ends_nothing(bench):
    await bench.start()
    bench.gpus.refusals = [DeviceUnsupported("not supported", code=3) for _ in range(3)]
    bench.keeper.set_clocks(lease(), 20.0)
    await bench.pass_s(25)
    assert bench.gpus.locked is None
    await bench.end()

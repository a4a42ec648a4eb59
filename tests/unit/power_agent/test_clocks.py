"""What clocks and power limits ought to be, and the one action that leads there."""

import dataclasses
import math
from typing import NamedTuple

import pytest

from power_agent.clocks.core.clock_control import (
    SLOW_RETRY_S,
    Ability,
    ClockRange,
    HeldLease,
    Lever,
    LeverReading,
    LeverState,
    LeverValue,
    LeverVerb,
    LeverView,
    PowerLimit,
    check_lease_epoch,
    decide,
    drift,
    grant_lease,
    is_settled,
    planned_range,
    refuse_levers,
    snap_down,
)
from tests.support.simulated_driver import inventory_on
from trefoil.core.errors import Fenced, InvalidInput, PlanError, StaleRevision
from trefoil.core.fleet import ClockLease, DeviceState
from trefoil.core.plan import PlannedDevice
from trefoil.simulated_node.interference import Interference
from trefoil.simulated_node.machine import Machine

GPU = "node0/gpu0"
STEPS = tuple(range(210, 1411, 15))
A100 = Ability(GPU, "A100-SXM4-40GB", STEPS, limits_w=(100.0, 400.0), cannot_limit="")
NO_LOCK, NO_LIMIT = "a Tesla P4 cannot lock clocks: that came with Volta", "the power limit of this Tesla P4 is fixed"
P4 = Ability(GPU, "Tesla P4", (), cannot_lock=NO_LOCK, cannot_limit=NO_LIMIT)


class On(NamedTuple):
    """A lever with two values, and its default."""

    lever: Lever
    slow: LeverValue
    fast: LeverValue
    free: LeverValue

    def view(self, **more):
        return LeverView(self.lever, **{"state": DeviceState.AWAKE, "default": self.free} | more)

    def lease(self, value=None, until_s=10.0):
        value = value or self.slow
        if self.lever is Lever.CLOCK:
            return HeldLease("governor", 3, value, until_s, 0.0)
        return HeldLease("governor", 3, None, until_s, 0.0, value)


CLOCK = On(Lever.CLOCK, ClockRange(210, 600), ClockRange(210, 1200), A100.full)
LIMIT = On(Lever.POWER_LIMIT, PowerLimit(150.0), PowerLimit(300.0), PowerLimit(400.0))
SLOW = CLOCK.slow
UNTOUCHED, FAST_NOW = LeverState(), LeverReading(1410)
both = pytest.mark.parametrize("on", [CLOCK, LIMIT], ids=lambda on: on.lever)


def one(view, now_s):
    return decide([view], now_s)


def reported(clock=UNTOUCHED, reading=FAST_NOW, limit=UNTOUCHED):
    return drift({Lever.CLOCK: clock, Lever.POWER_LIMIT: limit}, reading)


def lease(held=SLOW, until_s=10.0, holder="governor", epoch=3):
    return HeldLease(holder, epoch, held, until_s, 0.0)


def asked(min_mhz=0, max_mhz=600, holder="governor", epoch=3, limit_w=0.0):
    return ClockLease(GPU, min_mhz, max_mhz, holder, epoch, power_limit_w=limit_w)


def granted(message, held=None, highest=1, ttl_s=5.0, ability=A100, now_s=100.0):
    return grant_lease(message, ttl_s, ability, held, highest, ttl_max_s=60.0, now_s=now_s, at_s=1e9)


# --- what ought to be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asks", "gets"), [(210, 210), (224, 210), (225, 225), (1410, 1410), (1500, 1410), (100, 210)])
def test_a_clock_snaps_down_to_a_supported_one(asks, gets):
    assert snap_down(STEPS, asks) == gets


@pytest.mark.parametrize(
    ("ends", "gives"),
    [((0, 0), None), ((0, 600), SLOW), ((600, 0), ClockRange(600, 1410)), ((900, 900), ClockRange(900, 900))],
)
def test_a_plan_that_names_one_end_leaves_the_other_free(ends, gives):
    planned = PlannedDevice(GPU, clock_min_mhz=ends[0], clock_max_mhz=ends[1])
    assert planned_range(planned, STEPS) == gives


@both
@pytest.mark.parametrize(
    ("view", "verb", "why"),
    [
        (lambda _: {}, LeverVerb.NOTHING, "as wanted"),
        (lambda on: {"planned": on.slow}, LeverVerb.SET, "planned"),
        (lambda on: {"planned": on.slow, "lease": on.lease(on.fast)}, LeverVerb.SET, "lease of governor, epoch 3"),
        (lambda on: {"planned": on.slow, "held": LeverState(on.slow)}, LeverVerb.NOTHING, "as wanted"),
        (lambda on: {"planned": on.slow, "held": LeverState(on.slow, certain=False)}, LeverVerb.SET, "planned"),
        (lambda on: {"held": LeverState(on.slow)}, LeverVerb.RESET, "no lease and no plan asks for a"),
        (lambda _: {"held": LeverState(None, certain=False)}, LeverVerb.RESET, "no lease and no plan"),
        (
            lambda on: {"state": DeviceState.ASLEEP, "planned": on.slow, "held": LeverState(on.slow)},
            LeverVerb.RESET,
            "the device sleeps",
        ),
        (lambda on: {"planned": on.free, "held": LeverState(on.slow)}, LeverVerb.RESET, "planned"),
        (
            lambda on: {"planned": on.slow, "held": LeverState(on.slow), "leaving": True},
            LeverVerb.RESET,
            "the agent ends",
        ),
        (
            lambda on: {"state": DeviceState.LOST, "planned": on.slow},
            LeverVerb.NOTHING,
            "nothing is called on it",
        ),
    ],
)
def test_one_action_follows_with_its_reason(on, view, verb, why):
    seen = on.view(**view(on))
    action = one(seen, 5.0)
    assert action.verb == verb
    assert action.lever is (on.lever if verb != LeverVerb.NOTHING else Lever.CLOCK)
    assert why in action.why
    assert is_settled(seen, 5.0) == (verb == LeverVerb.NOTHING)


@both
def test_a_lease_ends_by_itself(on):
    view = on.view(lease=on.lease(until_s=10.0), held=LeverState(on.slow), planned=on.fast)
    assert one(view, 9.9) == one(view, 0.0)
    assert one(view, 9.9).until_s == 10.0
    assert one(view, 10.0).value == on.fast
    assert one(dataclasses.replace(view, planned=None), 10.0).verb == LeverVerb.RESET


@pytest.mark.parametrize(("on", "other"), [(CLOCK, LIMIT), (LIMIT, CLOCK)], ids=lambda on: on.lever)
def test_a_lease_leaves_the_other_lever_to_the_plan(on, other):
    assert one(other.view(lease=on.lease(), planned=other.fast), 5.0).value == other.fast
    assert one(other.view(lease=on.lease()), 5.0).verb == LeverVerb.NOTHING


@both
def test_at_most_one_change_a_second(on):
    view = on.view(planned=on.slow, held=LeverState(actuated_s=5.0))
    waits = one(view, 5.4)
    assert (waits.verb, waits.until_s) == (LeverVerb.NOTHING, 6.0)
    assert one(view, 6.0).verb == LeverVerb.SET
    held = on.view(planned=on.fast, held=LeverState(on.slow, actuated_s=6.0))
    assert one(held, 6.5).until_s == 7.0
    assert one(held, 7.0).value == on.fast


def test_of_two_levers_each_has_its_turn():
    waits, due = CLOCK.view(planned=CLOCK.slow, held=LeverState(actuated_s=5.0)), LIMIT.view(planned=LIMIT.slow)
    assert decide([waits, due], 5.4).lever is Lever.POWER_LIMIT
    settled = LIMIT.view(planned=LIMIT.slow, held=LeverState(LIMIT.slow, actuated_s=5.4))
    assert decide([waits, settled], 5.5).until_s == 6.0


@both
def test_what_the_driver_refuses_is_tried_three_times_then_slowly_and_reported(on):
    held, now_s, tries = LeverState(), 0.0, []
    while now_s < 100:
        action = one(on.view(planned=on.slow, held=held), now_s)
        if action.verb == LeverVerb.SET:
            tries.append(now_s)
            held = held.failed(action.value, "Unknown Error (NVML 999)", now_s)
            assert len(reported(**{{CLOCK: "clock", LIMIT: "limit"}[on]: held})) == (len(tries) >= 3)
        now_s += 0.5
    assert tries == [0.0, 1.0, 2.0, 32.0, 62.0, 92.0]
    assert reported(**{{CLOCK: "clock", LIMIT: "limit"}[on]: held}) == (
        f"{on.lever.text} cannot be set to {on.slow}: Unknown Error (NVML 999)",
    )
    assert one(on.view(held=held), 93.0).verb == LeverVerb.RESET  # another value does not wait
    leaving = on.view(held=held.failed(None, "999", 95.0), leaving=True)
    assert one(leaving, 95.0).verb == LeverVerb.RESET  # nor does the last try
    assert SLOW_RETRY_S == 30.0


# --- whether it came out so ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "says"),
    [
        (LeverReading(600, ("locked_or_application_clocks",)), ""),
        (LeverReading(210, ("idle",)), ""),
        (LeverReading(450, ("software_power_cap",)), "210-600 MHz is not honoured: software_power_cap"),
        (
            LeverReading(300, ("hardware_thermal", "software_thermal")),
            "not honoured: hardware_thermal, software_thermal",
        ),
        (LeverReading(1410), "210-600 MHz is exceeded: another process reset or locked the clocks"),
        (LeverReading(0), ""),
    ],
)
def test_a_range_that_is_not_honoured_is_reported(reading, says):
    found = reported(LeverState(SLOW), reading)
    assert (len(found) == 1 and says in found[0]) if says else not found


def test_a_clock_below_the_range_is_no_drift_while_the_gpu_idles():
    high = LeverState(ClockRange(900, 1200))
    assert reported(high, LeverReading(210, ("idle",))) == ()
    assert "is not reached" in reported(high, LeverReading(600))[0]


def test_the_cap_of_a_limit_that_this_agent_set_is_no_drift():
    capped = LeverReading(450, ("software_power_cap",), limit_w=150.0)
    assert reported(LeverState(SLOW), capped)
    assert reported(LeverState(SLOW), capped, LeverState(LIMIT.slow)) == ()
    assert reported(LeverState(ClockRange(600, 600)), capped, LeverState(LIMIT.slow)) == ()


@pytest.mark.parametrize(("found_w", "says"), [(150.2, ""), (None, ""), (300.0, "another process set 300 W")])
def test_a_limit_that_another_changed_is_reported(found_w, says):
    found = reported(reading=LeverReading(1410, limit_w=found_w), limit=LeverState(LIMIT.slow))
    assert found == ((f"power limit 150 W is not in force: {says}",) if says else ())
    assert reported(reading=LeverReading(1410, limit_w=found_w)) == ()


def test_foreign_settings_are_reported():
    assert reported(reading=LeverReading(600, ("locked_or_application_clocks",))) == (
        "clocks are locked, and not by this agent",
    )


@pytest.mark.parametrize(
    ("clock_mhz", "more", "foreign"),
    [
        (1095, (), False),  # where the board's own application clocks hold it
        (900, ("software_power_cap",), False),  # and lower, for a separate reason
        (600, (), True),
        (1410, (), True),  # application clocks, or a lock, above the default
    ],
)
def test_default_application_clocks_are_no_foreign_lock(clock_mhz, more, foreign):
    reading = LeverReading(clock_mhz, ("locked_or_application_clocks", *more), default_mhz=1095)
    assert bool(reported(reading=reading)) == foreign


def test_a_board_that_stays_at_its_own_application_clock_is_not_taken_for_locked_by_others():
    machine = Machine(mig_enabled=False)
    with inventory_on(machine) as inventory:
        inventory.list_devices()
        machine.attach(7, machine.gpu(0).uuid)

        def seen() -> tuple[int, tuple[str, ...]]:
            default_mhz = inventory.default_application_clock_mhz(GPU)
            reading = LeverReading(inventory.clock_mhz(GPU), inventory.clock_event_reasons(GPU), default_mhz)
            return reading.clock_mhz, reported(reading=reading)

        assert seen() == (1410, ())
        Interference(machine).application_clock(0, 1095)
        assert inventory.clock_event_reasons(GPU) == ("locked_or_application_clocks",)
        assert seen() == (1095, ())
        Interference(machine).lock_clocks(0, 600, 600)
        assert seen() == (600, ("clocks are locked, and not by this agent",))


# --- refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ability", "planned", "text"),
    [
        (
            P4,
            PlannedDevice(GPU, clock_max_mhz=600),
            "device node0/gpu0.clock_mhz = (0, 600): a Tesla P4 cannot lock clocks: that came with Volta."
            " Remedy: plan 0 and 0",
        ),
        (
            A100,
            PlannedDevice(GPU, clock_max_mhz=2000),
            "device node0/gpu0.clock_mhz = 2000: not a clock of this device. Remedy: 210-1410 MHz, or 0 for no limit",
        ),
        (A100, PlannedDevice(GPU, clock_min_mhz=900, clock_max_mhz=600), "the lowest is above the highest"),
        (
            A100,
            PlannedDevice(GPU, power_limit_w=50.0),
            "device node0/gpu0.power_limit_w = 50.0: not a power limit of this board."
            " Remedy: 100 to 400 W, or 0 for the board's own",
        ),
        (A100, PlannedDevice(GPU, power_limit_w=401.0), "power_limit_w = 401.0: not a power limit of this board"),
        (A100, PlannedDevice(GPU, power_limit_w=math.nan), "power_limit_w = nan: not a power limit of this board"),
        (P4, PlannedDevice(GPU, power_limit_w=50.0), f"power_limit_w = 50.0: {NO_LIMIT}. Remedy: plan 0"),
    ],
)
def test_what_a_device_cannot_do_is_refused_with_a_remedy(ability, planned, text):
    with pytest.raises(PlanError) as error:
        refuse_levers(planned, ability)
    assert text in str(error.value)


def test_a_plan_without_clocks_suits_every_device():
    for ability in (A100, P4, dataclasses.replace(A100, cannot_lock="no")):
        refuse_levers(PlannedDevice(GPU), ability)


@pytest.mark.parametrize(
    ("message", "ttl_s", "ability", "text"),
    [
        (asked(), 5.0, P4, "lease node0/gpu0.device = 'node0/gpu0': a Tesla P4 cannot lock clocks"),
        (asked(holder=""), 5.0, A100, "lease node0/gpu0.holder = '': empty. Remedy: say who holds it"),
        (asked(), 0.0, A100, "ttl_s = 0.0: not a time to live. Remedy: above 0 and at most 60 s"),
        (asked(), 61.0, A100, "ttl_s = 61.0"),
        (asked(max_mhz=0), 5.0, A100, "mhz = (0, 0): not a clock range. Remedy: min <= max inside 210-1410 MHz"),
        (asked(900, 600), 5.0, A100, "mhz = (900, 600): not a clock range"),
        (asked(0, 1500), 5.0, A100, "mhz = (0, 1500): not a clock range"),
        (
            asked(0, 0, limit_w=50.0),
            5.0,
            A100,
            "power_limit_w = 50.0: not a power limit of this board. Remedy: 100 to 400",
        ),
        (asked(0, 0, limit_w=-1.0), 5.0, A100, "power_limit_w = -1.0: not a power limit of this board"),
        (asked(900, 0, limit_w=150.0), 5.0, A100, "mhz = (900, 0): not a clock range"),
        (asked(0, 0, limit_w=50.0), 5.0, P4, f"device = 'node0/gpu0': {NO_LIMIT}"),
        (asked(0, 600, limit_w=150.0), 5.0, dataclasses.replace(A100, cannot_limit=NO_LIMIT), NO_LIMIT),
    ],
)
def test_a_lease_that_cannot_be_is_refused(message, ttl_s, ability, text):
    with pytest.raises(InvalidInput) as error:
        granted(message, ttl_s=ttl_s, ability=ability)
    assert text in str(error.value)


def test_a_lease_is_snapped_renewed_taken_over_and_fenced():
    first = granted(asked(0, 607))
    assert first.range == ClockRange(210, 600)
    assert (first.expires_s, first.expires_at_s) == (105.0, 1e9 + 5)
    again = granted(asked(300, 900), first, now_s=102.0)
    assert (again.range, again.expires_s) == (ClockRange(300, 900), 107.0)
    with pytest.raises(Fenced, match=r"held by governor under epoch 3 for another 3.0 s.*newer epoch"):
        granted(asked(holder="other"), first, now_s=102.0)
    assert granted(asked(holder="other"), first, now_s=105.0).holder == "other"  # it has expired
    assert granted(asked(holder="other", epoch=4), first, now_s=102.0).holder == "other"  # elected after it
    with pytest.raises(StaleRevision, match=r"node0/gpu0 obeys epoch 3; epoch 2 of other is older"):
        granted(asked(holder="other", epoch=2), first, now_s=1000.0)  # even when nothing lives
    with pytest.raises(StaleRevision, match="obeys epoch 7; epoch 3 of governor"):
        granted(asked(), first, highest=7)


@pytest.mark.parametrize(
    ("message", "range_", "limit"),
    [
        (asked(0, 607), SLOW, None),
        (asked(0, 0, limit_w=150.0), None, PowerLimit(150.0)),
        (asked(0, 607, limit_w=150.0), SLOW, PowerLimit(150.0)),
    ],
)
def test_a_lease_names_clocks_a_limit_or_both(message, range_, limit):
    held = granted(message)
    assert (held.range, held.limit) == (range_, limit)
    answer = held.message(GPU)
    assert (answer.max_mhz, answer.power_limit_w) == (600 if range_ else 0, message.power_limit_w)
    no_lock = dataclasses.replace(A100, cannot_lock=NO_LOCK)
    if range_ is None:
        assert granted(message, ability=no_lock).limit == limit  # what it does not name need not be there


def test_only_the_holder_may_release():
    check_lease_epoch(GPU, "governor", 3, lease(), 1, 5.0)
    check_lease_epoch(GPU, "anybody", 3, None, 3, 5.0)  # nothing to release is not an error
    with pytest.raises(Fenced, match="held by governor"):
        check_lease_epoch(GPU, "other", 3, lease(), 1, 5.0)

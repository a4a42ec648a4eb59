"""What clocks ought to be, and the one action that leads there."""

import dataclasses

import pytest

from power_agent.clocks.core.clock_control import (
    SLOW_RETRY_S,
    Ability,
    ClockLock,
    ClockRange,
    ClockReading,
    ClockVerb,
    ClockView,
    HeldLease,
    check_lease_epoch,
    decide,
    drift,
    grant_lease,
    is_settled,
    planned_range,
    refuse_clocks,
    refuse_power_limit,
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
A100 = Ability(GPU, "A100-SXM4-40GB", STEPS)
P4 = Ability(GPU, "Tesla P4", (), cannot_lock="a Tesla P4 cannot lock clocks: that came with Volta")
SLOW, FAST = ClockRange(210, 600), ClockRange(210, 1200)
FREE = ClockView(A100, DeviceState.AWAKE)


def lease(held=SLOW, until_s=10.0, holder="governor", epoch=3):
    return HeldLease(holder, epoch, held, until_s, 0.0)


def asked(min_mhz=0, max_mhz=600, holder="governor", epoch=3):
    return ClockLease(GPU, min_mhz, max_mhz, holder, epoch)


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


@pytest.mark.parametrize(
    ("view", "verb", "why"),
    [
        (FREE, ClockVerb.NOTHING, "as it ought to be"),
        (dataclasses.replace(FREE, planned=SLOW), ClockVerb.LOCK, "planned"),
        (dataclasses.replace(FREE, planned=SLOW, lease=lease(FAST)), ClockVerb.LOCK, "lease of governor, epoch 3"),
        (dataclasses.replace(FREE, planned=SLOW, lock=ClockLock(SLOW)), ClockVerb.NOTHING, "as it ought to be"),
        (dataclasses.replace(FREE, planned=SLOW, lock=ClockLock(SLOW, certain=False)), ClockVerb.LOCK, "planned"),
        (dataclasses.replace(FREE, lock=ClockLock(SLOW)), ClockVerb.RESET, "no lease and no plan asks for a range"),
        (dataclasses.replace(FREE, lock=ClockLock(None, certain=False)), ClockVerb.RESET, "no lease and no plan"),
        (
            dataclasses.replace(FREE, state=DeviceState.ASLEEP, planned=SLOW, lock=ClockLock(SLOW)),
            ClockVerb.RESET,
            "the device sleeps",
        ),
        (dataclasses.replace(FREE, planned=A100.full, lock=ClockLock(SLOW)), ClockVerb.RESET, "planned"),
        (
            dataclasses.replace(FREE, planned=SLOW, lock=ClockLock(SLOW), leaving=True),
            ClockVerb.RESET,
            "the agent ends",
        ),
        (dataclasses.replace(FREE, state=DeviceState.LOST, planned=SLOW), ClockVerb.NOTHING, "nothing is called on it"),
    ],
)
def test_one_action_follows_with_its_reason(view, verb, why):
    action = decide(view, 5.0)
    assert action.verb == verb
    assert why in action.why
    assert is_settled(view, 5.0) == (verb == ClockVerb.NOTHING)


def test_a_lease_ends_by_itself():
    view = dataclasses.replace(FREE, lease=lease(until_s=10.0), lock=ClockLock(SLOW), planned=FAST)
    assert decide(view, 9.9) == decide(view, 0.0)
    assert decide(view, 9.9).until_s == 10.0
    assert decide(view, 10.0).range == FAST
    assert decide(dataclasses.replace(view, planned=None), 10.0).verb == ClockVerb.RESET


def test_at_most_one_change_a_second():
    view = dataclasses.replace(FREE, planned=SLOW, actuated_s=5.0)
    waits = decide(view, 5.4)
    assert (waits.verb, waits.until_s) == (ClockVerb.NOTHING, 6.0)
    assert decide(view, 6.0).verb == ClockVerb.LOCK
    locked = dataclasses.replace(view, planned=FAST, lock=ClockLock(SLOW), actuated_s=6.0)
    assert decide(locked, 6.5).until_s == 7.0
    assert decide(locked, 7.0).range == FAST


def test_what_the_driver_refuses_is_tried_three_times_then_slowly_and_reported():
    lock, now_s, tries = ClockLock(), 0.0, []
    while now_s < 100:
        view = dataclasses.replace(FREE, planned=SLOW, lock=lock)
        action = decide(view, now_s)
        if action.verb == ClockVerb.LOCK:
            tries.append(now_s)
            lock = lock.failed(action.range, "Unknown Error (NVML 999)", now_s)
            assert len(drift(dataclasses.replace(view, lock=lock), ClockReading(1410))) == (len(tries) >= 3)
        now_s += 0.5
    assert tries == [0.0, 1.0, 2.0, 32.0, 62.0, 92.0]
    assert drift(dataclasses.replace(FREE, lock=lock), ClockReading(1410)) == (
        "clocks cannot be set to 210-600 MHz: Unknown Error (NVML 999)",
    )
    assert decide(dataclasses.replace(FREE, lock=lock), 93.0).verb == ClockVerb.RESET  # another value does not wait
    leaving = dataclasses.replace(FREE, lock=lock.failed(None, "999", 95.0), leaving=True)
    assert decide(leaving, 95.0).verb == ClockVerb.RESET  # nor does the last try
    assert SLOW_RETRY_S == 30.0


# --- whether it came out so ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reading", "says"),
    [
        (ClockReading(600, ("locked_or_application_clocks",)), ""),
        (ClockReading(210, ("idle",)), ""),
        (ClockReading(450, ("software_power_cap",)), "210-600 MHz is not honoured: software_power_cap"),
        (
            ClockReading(300, ("hardware_thermal", "software_thermal")),
            "not honoured: hardware_thermal, software_thermal",
        ),
        (ClockReading(1410), "210-600 MHz is exceeded: somebody else reset or locked the clocks"),
        (ClockReading(0), ""),
    ],
)
def test_a_range_that_is_not_honoured_is_reported(reading, says):
    found = drift(dataclasses.replace(FREE, planned=SLOW, lock=ClockLock(SLOW)), reading)
    assert (len(found) == 1 and says in found[0]) if says else not found


def test_a_clock_below_the_range_is_no_drift_while_the_gpu_idles():
    high = dataclasses.replace(FREE, lock=ClockLock(ClockRange(900, 1200)))
    assert drift(high, ClockReading(210, ("idle",))) == ()
    assert "is not reached" in drift(high, ClockReading(600))[0]


def test_foreign_settings_are_reported():
    assert drift(FREE, ClockReading(600, ("locked_or_application_clocks",))) == (
        "clocks are locked, and not by this agent",
    )


@pytest.mark.parametrize(
    ("clock_mhz", "more", "foreign"),
    [
        (1095, (), False),  # where the board's own application clocks hold it
        (900, ("software_power_cap",), False),  # and lower, for a reason of its own
        (600, (), True),
        (1410, (), True),  # application clocks, or a lock, above the default
    ],
)
def test_default_application_clocks_are_no_foreign_lock(clock_mhz, more, foreign):
    reading = ClockReading(clock_mhz, ("locked_or_application_clocks", *more), default_mhz=1095)
    assert bool(drift(FREE, reading)) == foreign


def test_a_board_that_stays_at_its_own_application_clock_is_not_taken_for_locked_by_others():
    machine = Machine(mig_enabled=False)
    with inventory_on(machine) as inventory:
        inventory.list_devices()
        machine.attach(7, machine.gpu(0).uuid)

        def reported() -> tuple[int, tuple[str, ...]]:
            default_mhz = inventory.default_application_clock_mhz(GPU)
            reading = ClockReading(inventory.clock_mhz(GPU), inventory.clock_event_reasons(GPU), default_mhz)
            return reading.clock_mhz, drift(FREE, reading)

        assert reported() == (1410, ())
        Interference(machine).application_clock(0, 1095)
        assert inventory.clock_event_reasons(GPU) == ("locked_or_application_clocks",)
        assert reported() == (1095, ())
        Interference(machine).lock_clocks(0, 600, 600)
        assert reported() == (600, ("clocks are locked, and not by this agent",))


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
    ],
)
def test_what_a_device_cannot_do_is_refused_with_a_remedy(ability, planned, text):
    with pytest.raises(PlanError) as error:
        refuse_clocks(planned, ability)
    assert text in str(error.value)


def test_a_power_limit_is_refused_with_a_remedy():
    with pytest.raises(PlanError) as error:
        refuse_power_limit(PlannedDevice(GPU, power_limit_w=250.0))
    assert str(error.value) == (
        "device node0/gpu0.power_limit_w = 250.0: the agent sets no power limits. Remedy: plan 0; clock_max_mhz lowers"
        " what the device draws, or an operator sets a limit by nvidia-smi -pl"
    )
    refuse_power_limit(PlannedDevice(GPU))


def test_a_plan_without_clocks_suits_every_device():
    for ability in (A100, P4, dataclasses.replace(A100, cannot_lock="no")):
        refuse_clocks(PlannedDevice(GPU), ability)


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


def test_only_the_holder_may_release():
    check_lease_epoch(GPU, "governor", 3, lease(), 1, 5.0)
    check_lease_epoch(GPU, "anybody", 3, None, 3, 5.0)  # nothing to release is no error
    with pytest.raises(Fenced, match="held by governor"):
        check_lease_epoch(GPU, "other", 3, lease(), 1, 5.0)

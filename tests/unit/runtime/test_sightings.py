"""What other processes stamp, in the time of who reads it: by their clocks where those agree, else by sight."""

import pytest

from trefoil.runtime.clock import ManualClock, SteadyClock
from trefoil.runtime.sightings import FRESH_S, WATCH_S, Sightings

NOW_S = 1_795_000_000.0


async def seen(sightings: Sightings, clock: ManualClock, ahead_s: float, seconds: int) -> float:
    """Stamps of a writer whose clock is ahead, each second a new one, read half a second later."""
    own_s = 0.0
    for _ in range(seconds):
        stamp_s = clock.now_s() + ahead_s
        await clock.advance(0.5)
        own_s = sightings.look("writer", stamp_s)
        await clock.advance(0.5)
    return own_s


@pytest.mark.parametrize("ahead_s", [0.0, 0.9, -0.9])
async def test_clocks_that_agree_are_one_clock(ahead_s):
    clock = ManualClock(NOW_S)
    sightings = Sightings(clock)
    assert await seen(sightings, clock, ahead_s, 5) == NOW_S + 4.0 + ahead_s
    assert sightings.offset_s("writer") == 0.0


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_who_renews_is_fresh_whatever_its_clock_says_and_old_when_it_stops(ahead_s):
    clock = ManualClock(NOW_S)
    sightings = Sightings(clock)
    await seen(sightings, clock, 0.0, 3)
    own_s = await seen(sightings, clock, ahead_s, 3)
    assert 0.0 <= clock.now_s() - own_s <= 1.0
    assert sightings.offset_s("writer") == pytest.approx(-ahead_s, abs=0.5)
    last_s = clock.now_s() - 1.0 + ahead_s
    await clock.advance(60.0)
    assert clock.now_s() - sightings.look("writer", last_s) == pytest.approx(60.5, abs=1.0)
    own_s = await seen(sightings, clock, 0.0, 1)
    assert (own_s, sightings.offset_s("writer")) == (clock.now_s() - 1.0, 0.0), "its clock was set right"


@pytest.mark.parametrize("ahead_s", [3600.0, -3600.0])
async def test_at_the_first_look_the_dead_cannot_be_told_from_who_has_another_clock(ahead_s):
    clock = ManualClock(NOW_S)
    sightings = Sightings(clock)
    stamp_s = NOW_S + ahead_s
    assert sightings.look("writer", stamp_s) == min(stamp_s, NOW_S)
    assert sightings.offset_s("writer") is None
    await seen(sightings, clock, ahead_s, 2)
    assert sightings.offset_s("writer") == pytest.approx(-ahead_s, abs=0.5)
    dead = Sightings(clock)
    dead.look("writer", stamp_s)
    await clock.advance(WATCH_S)
    assert dead.look("writer", stamp_s) == min(stamp_s, clock.now_s() - WATCH_S)
    assert dead.offset_s("writer") == 0.0
    expires = Sightings(clock, FRESH_S)
    expires.look("writer", stamp_s)
    assert expires.offset_s("writer") == pytest.approx(-ahead_s, abs=10.0), "it would not be there any more"


def test_a_steady_clock_goes_on_whoever_steps_the_wall_clock():
    wall = ManualClock(NOW_S)
    clock = SteadyClock(wall)
    wall.move(10.0)
    wall.jump(-3600.0)
    assert (clock.now_s(), clock.monotonic_s(), clock.calendar_ahead_s()) == (NOW_S + 10.0, 10.0, -3600.0)
    wall.jump(3600.25)
    assert clock.calendar_ahead_s() == 0.0, "as good as right"
    assert SteadyClock(wall).now_s() == wall.now_s(), "a restart takes the calendar of then"

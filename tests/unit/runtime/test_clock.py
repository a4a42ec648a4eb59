import asyncio

import pytest

from trefoil.runtime.clock import ManualClock, WallClock


async def test_sleepers_wake_in_order_at_their_own_time():
    clock = ManualClock(100.0)
    woken: list[tuple[str, float]] = []

    async def sleeper(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append((name, clock.now_s()))

    async with asyncio.TaskGroup() as group:
        group.create_task(sleeper("late", 3.0))
        group.create_task(sleeper("early", 1.0))
        await clock.advance(5.0)
    assert woken == [("early", 101.0), ("late", 103.0)]
    assert (clock.now_s(), clock.monotonic_s()) == (105.0, 5.0)


async def test_a_loop_ticks_as_often_as_in_real_time():
    clock = ManualClock()
    ticks: list[float] = []

    async def loop() -> None:
        while True:
            await clock.sleep(0.5)
            ticks.append(clock.monotonic_s())

    task = asyncio.create_task(loop())
    await clock.advance(2.0)
    assert ticks == [0.5, 1.0, 1.5, 2.0]
    task.cancel()


async def test_no_time_passes_for_a_sleep_of_zero():
    clock = ManualClock()
    await clock.sleep(0)
    assert clock.monotonic_s() == 0


def test_the_wall_clock_may_jump_and_monotonic_time_does_not():
    clock = ManualClock(1000.0)
    clock.jump(-500.0)
    assert (clock.now_s(), clock.monotonic_s()) == (500.0, 0.0)
    with pytest.raises(AssertionError):
        clock.move(-1.0)


async def test_real_time_goes_forward():
    clock = WallClock()
    before_s = clock.monotonic_s()
    await clock.sleep(0.001)
    assert clock.monotonic_s() > before_s
    assert clock.now_s() > 1_700_000_000

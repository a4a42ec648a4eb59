"""Full garbage collections of the controller wait for the hour."""

import asyncio
import gc

import pytest

from controller.loop.garbage import COLLECT_S, collect_by_the_hour, put_off_full_collections


@pytest.fixture
def full_collections():
    """Number of full collections so far, where Python starts them when it likes."""
    enabled, before = gc.isenabled(), gc.get_threshold()
    gc.enable()
    gc.set_threshold(100, 2, 2)
    gc.freeze()
    gc.collect()  # what is frozen counts no more
    yield lambda: gc.get_stats()[2]["collections"]
    gc.unfreeze()
    gc.set_threshold(*before)
    if not enabled:
        gc.disable()


def test_none_runs_in_the_midst_of_work_once_they_are_put_off(full_collections):
    first = full_collections()
    kept = [[] for _ in range(20_000)]
    assert full_collections() > first
    put_off_full_collections()
    first = full_collections()
    kept += [[] for _ in range(20_000)]
    assert full_collections() == first


async def test_one_runs_each_hour(full_collections):
    slept = []

    class Clock:
        async def sleep(self, seconds: float) -> None:
            if len(slept) == 3:
                await asyncio.Event().wait()
            slept.append(seconds)

    put_off_full_collections()
    first = full_collections()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await collect_by_the_hour(Clock())
    assert slept == [COLLECT_S] * 3
    assert full_collections() == first + 3

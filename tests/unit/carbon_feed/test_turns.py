"""Who is woken by the same news goes on a few at a time, and everybody does."""

import asyncio

from carbon_feed.serving.servicer import WAKEUPS_AT_ONCE, FairWakeup


async def test_others_get_their_turn_in_between():
    turns, order = FairWakeup(), []

    async def watcher(n):
        await turns.wait_turn()
        order.append(n)

    async def asker():
        for _ in range(30):
            order.append("asked")
            await asyncio.sleep(0)

    await asyncio.gather(*(watcher(n) for n in range(40)), asker())
    told = [n for n in order if n != "asked"]
    assert told == list(range(40)), "first come, first served"
    longest = max(len(run.split()) for run in " ".join(map(str, order)).replace("asked", "|").split("|"))
    assert longest <= WAKEUPS_AT_ONCE


async def test_who_leaves_does_not_hold_up_the_others():
    turns = FairWakeup()
    tasks = [asyncio.create_task(turns.wait_turn()) for _ in range(12)]
    await asyncio.sleep(0)
    for task in tasks[:6]:
        task.cancel()
    await asyncio.wait_for(asyncio.gather(*tasks[6:]), 10)
    await asyncio.wait_for(turns.wait_turn(), 10)
    assert all(task.cancelled() for task in tasks[:6])

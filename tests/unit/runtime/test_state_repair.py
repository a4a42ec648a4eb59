"""What a lease's holder looks after in Redis, and for how long."""

import pytest

from tests.support.stores import state_on
from tests.support.virtual.redis import Pipeline, Server
from trefoil.core.common import Revision
from trefoil.core.plan import Plan
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.fenced import SetFields
from trefoil.runtime.state import LEASE_TTL_S, TYPES_S


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1_795_000_200.0)


@pytest.fixture
def server(clock) -> Server:
    return Server(clock)


async def test_totals_of_hours_long_past_are_not_looked_after(clock, server, monkeypatch):
    state = state_on(server, "c", clock)
    lease = await state.acquire("controller", "a", ttl_s=1e9)
    for hour in range(24):
        await state.write(lease, [SetFields(state.keys.totals("f", str(hour)), {"joules": 1.0})])
        await clock.advance(3600.0)
    asked: list[str] = []
    monkeypatch.setattr(Pipeline, "type", lambda _self, key: asked.append(key))
    with pytest.raises(ValueError, match="zip"):  # the stand-in above answers nothing
        await state.renew(lease, 1e9)
    assert len(asked) <= TYPES_S / 3600.0


async def test_what_was_written_under_a_lease_that_ran_out_unseen_is_not_written_again(clock, server):
    one, other = state_on(server, "c", clock), state_on(server, "c", clock)
    lease = await one.acquire("controller", "a")
    await one.put(lease, one.keys.plan(), Plan(Revision(1, 1)))
    await clock.advance(LEASE_TTL_S + 1.0)
    second = await other.acquire("controller", "b")
    await other.delete(second, other.keys.plan())
    assert not await one.renew(lease)
    await other.release(second)
    again = await one.acquire("controller", "a")
    await clock.advance(3.0)
    assert await one.renew(again)
    assert await one.get(one.keys.plan(), Plan) is None

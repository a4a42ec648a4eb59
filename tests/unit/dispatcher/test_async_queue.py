"""No coroutine is forgotten, whatever happens in the same turn of the loop."""

from dataclasses import replace

import pytest

from dispatcher.queues.fifo import QueueFull
from dispatcher.routing.async_queue import AsyncFamilyQueue, ServedElsewhere
from tests.unit.dispatcher.worlds import OK, key, route, target, ticket
from trefoil.core.errors import Unavailable
from trefoil.runtime.clock import ManualClock


def pump_of(*targets, clock=None, **more):
    pump = AsyncFamilyQueue("digits", clock or ManualClock(), no_slice_wait_s=5.0)
    pump.apply_route(route(targets, **more), "")
    return pump


async def test_a_pick_that_was_made_while_its_client_left_gives_the_credit_back():
    pump = pump_of(target(0, credits=1))
    first = pump.submit(ticket(1))
    waiting = pump.submit(ticket(2))
    third = pump.submit(ticket(3))
    pump.done(ticket(1), first, OK)
    assert waiting.done()
    pump.abandon(ticket(2), waiting)  # its task was cancelled before it ran
    assert third.done()
    pump.done(ticket(3), third.result(), OK)
    assert pump.in_flight == {}
    assert (pump.waiting, pump.in_flight_count) == (0, 0)


async def test_a_thousand_clients_that_leave_at_once_do_not_overflow_the_stack():
    pump = pump_of(target(0, credits=1), requests_max=2000)
    first = pump.submit(ticket(0))
    waiting = [pump.submit(ticket(n)) for n in range(1, 1500)]
    for future in waiting:
        future.cancel()
    last = pump.submit(ticket(1500))
    pump.done(ticket(0), first, OK)
    assert last.done()
    for n, future in enumerate(waiting, 1):
        pump.abandon(ticket(n), future)
    assert pump.in_flight == {key(0): 1}
    assert pump.waiting == 0


async def test_waiting_for_a_lost_slice_ends_with_the_reason():
    clock = ManualClock()
    pump = pump_of(target(0, credits=1), clock=clock)
    pump.submit(ticket(1))
    pump.apply_route(route([]), "no live slice: it burns")
    waiting = pump.submit(ticket(2))
    clock.move(4.9)
    pump.expire()
    assert not waiting.done()
    clock.move(0.2)
    pump.expire()
    with pytest.raises(Unavailable, match="no slice serves digits now: no live slice: it burns"):
        await waiting
    with pytest.raises(Unavailable, match="it burns"):
        pump.submit(ticket(3))


async def test_a_family_that_never_had_a_slice_is_refused_at_once():
    pump = AsyncFamilyQueue("digits", ManualClock(), no_slice_wait_s=5.0)
    with pytest.raises(Unavailable):
        pump.submit(ticket(1))
    pump.apply_route(route([]), "no live slice: STARTING")
    with pytest.raises(Unavailable, match="STARTING"):
        pump.submit(ticket(1))


async def test_new_slices_share_what_waits():
    pump = pump_of(target(0, credits=2))
    for n in range(6):
        pump.submit(ticket(n))
    pump.apply_route(route([target(n, credits=2) for n in range(3)]), "")
    assert pump.in_flight == {key(0): 2, key(1): 2, key(2): 2}
    pump = pump_of(target(0, credits=1))
    for n in range(3):
        pump.submit(ticket(n))
    pump.apply_route(route([target(0, credits=1), target(1, credits=2), target(2, credits=2)]), "")
    assert pump.in_flight == {key(0): 1, key(1): 1, key(2): 1}, "one each, not two on the first"


async def test_a_smaller_queue_of_another_router_refuses_whom_it_cannot_hold():
    pump = pump_of(target(0, credits=1))
    flying = pump.submit(ticket(0))
    waiting = [pump.submit(ticket(n)) for n in range(1, 5)]
    pump.apply_route(route([target(0, credits=1)], router="fifo", requests_max=2), "")
    done = [future.done() for future in waiting]
    assert done == [True, False, False, True], "the new router knows nothing in flight; its queue holds two"
    assert isinstance(waiting[3].exception(), QueueFull)
    pump.done(ticket(0), flying, OK)
    pump.done(ticket(1), waiting[0].result(), OK)
    assert waiting[1].done()


async def test_the_end_of_the_last_request_on_a_draining_slice_is_told():
    told = []
    pump = AsyncFamilyQueue("digits", ManualClock(), 5.0, lambda: told.append(True))
    pump.apply_route(route([target(0), target(1)]), "")
    picks = [pump.submit(ticket(n)) for n in range(2)]
    pump.done(ticket(0), picks[0], OK)
    assert not told
    pump.apply_route(route([target(1 - picks[1].slice.start)]), "")
    pump.done(ticket(1), picks[1], OK)
    assert told == [True]


async def test_who_may_go_anywhere_moves_to_other_workers_and_sequences_wait_on():
    clock = ManualClock()
    pump = pump_of(target(0, credits=1), clock=clock)
    first = pump.submit(ticket(1))
    plain, bound = pump.submit(ticket(2)), pump.submit(replace(ticket(3), sequence_id="s"))
    pump.apply_route(route([]), "", elsewhere=True)
    pump.redirect_waiting(sequences=False)
    with pytest.raises(ServedElsewhere, match="served by other workers"):
        plain.result()
    assert not bound.done()
    later = pump.submit(ticket(4))  # worth waiting for: there are live slices, only not here
    clock.move(4.9)
    pump.expire()
    assert (pump.waiting, later.done()) == (2, False)
    pump.redirect_waiting(sequences=True)
    assert isinstance(bound.exception(), ServedElsewhere)
    assert isinstance(later.exception(), ServedElsewhere)
    pump.done(ticket(1), first, OK)
    assert (pump.waiting, pump.in_flight_count, pump.in_flight) == (0, 0, {})

"""Faults that were fixed once, put back: the whole system in virtual time tells of each, and of none without it."""

import inspect
import textwrap
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

from controller.loop.core.control import ControlCore
from controller.rollout.core.executor import RolloutExecutor
from dispatcher.routing.async_queue import AsyncFamilyQueue
from tests.support.virtual.faults import strike
from tests.support.virtual.promises import told
from tests.support.virtual.system import System, history
from trefoil.core.fleet import SliceState
from trefoil.core.plan import RolloutState
from trefoil.runtime.sightings import LiveAcks

SEEDS = range(2)
pytestmark = pytest.mark.long


def at(system: System, when_s: float, kind: str, draw: float = 0.5) -> None:
    system.loop.call_later(when_s, strike, system, kind, np.full(4, draw))


def hang(system: System, seconds: float) -> None:
    """Every slice that serves stands still for a while, with the requests that it has and gets."""
    system.hung |= {key for n in system.nodes.values() for key, s in n.slices.items() if s.state == SliceState.READY}
    system.loop.call_later(seconds, system.hung.clear)


def while_a_drain_hangs(system: System, then: Callable[[], None]) -> None:
    """A plan of other partitions rolls out, and the slices that are to go stand still under requests."""
    system.loop.call_later(10.0, hang, system, 12.0)
    at(system, 10.4, "carbon jumps", 0.9)
    done: list[float] = []

    def look() -> None:
        rollout = system.promises.rollout
        if not done and rollout is not None and rollout.state == RolloutState.WAITING_DRAIN:
            done.append(system.loop.time())
            system.loop.call_later(0.3, then)

    system.every(0.05, 10.5, look)


def acks_lost(system: System) -> None:
    """Redis loses the acknowledgements of living workers, and for half a second each new one."""

    def lost() -> None:
        for i in range(6):
            system.loop.call_later(0.1 * i, system.server.flush)

    while_a_drain_hangs(system, lost)


def nobody_is_known(system: System) -> None:
    """Redis is emptied, workers stand still for a moment, and a controller comes that has read no acknowledgement."""

    def anew() -> None:
        system.controller.kill()
        for worker in system.workers:
            assert worker.process is not None
            worker.process.stop(system.loop.time())
            system.loop.call_later(1.5, worker.process.go_on, system.loop)
        system.server.flush()
        for node in system.nodes.values():
            system.published(node)
        system.controller.start()

    while_a_drain_hangs(system, anew)


def not_written(system: System) -> None:
    """Redis begins to refuse writes while a planner is at work."""
    at(system, 9.0, "carbon jumps", 0.9)
    done: list[float] = []

    def look() -> None:
        if not done and system.loop.busy_until_s > system.loop.time():
            done.append(system.loop.time())
            strike(system, "redis refuses writes", np.zeros(4))

    system.every(0.05, 9.0, look)


def released_unwritten(system: System) -> None:
    """An operator releases the controller while Redis refuses to write."""
    at(system, 9.0, "frozen", 0.4)
    at(system, 11.5, "redis refuses writes", 0.9)


def clients_wait(system: System) -> None:
    """Slices stand still; some of those who wait meanwhile go in the turn in which they are given one."""
    system.rate_per_s = 14.0
    for when_s in (9.0, 14.0):
        system.loop.call_later(when_s, hang, system, 3.0)


# What was fixed (the commit that did it), the method, its text now, the text put back, and what brings it to light.
CASES: list[tuple[str, type, str, str, str, Callable[[System], None], str]] = [
    (
        "acknowledgements are forgotten with Redis' data (eee52c3)",
        LiveAcks,
        "read",
        "return tuple(seen.own for seen in last if self.sight_s - seen.at_s < ACK_TTL_S)",
        "return tuple(there[worker] for worker in sorted(there))",
        acks_lost,
        "under requests",
    ),
    (
        "a controller that has seen nobody takes it that nobody is there (3d95a6f)",
        RolloutExecutor,
        "_not_acked",
        "return self._observation.inputs.blind",
        'return ""',
        nobody_is_known,
        "under requests",
    ),
    (
        "a decision that could not be written counts as made (3d95a6f)",
        ControlCore,
        "_judge",
        "await self._record(view",
        "await self._set_basis(view, verdict)\n    await self._record(view",
        not_written,
        "no decision was recorded since",
    ),
    (
        "what an operator asked for is forgotten when it cannot be written (3d95a6f)",
        ControlCore,
        "step",
        "self.pending_trigger = forced",
        "pass",
        released_unwritten,
        "released the controller",
    ),
    (
        "a client that goes as it is given a slice keeps its credit forever (bbf0dbe)",
        AsyncFamilyQueue,
        "abandon",
        "elif future.done() and not future.cancelled() and future.exception() is None:",
        "elif False:",
        clients_wait,
        "open requests, its pumps know of",
    ),
]


def put_back(owner: type, method: str, now: str, before: str) -> Any:
    """The class with a method as it was."""
    made = getattr(owner, method)
    text = textwrap.dedent(inspect.getsource(made))
    assert text.count(now) == 1, f"{owner.__name__}.{method} does not read so any more"
    space: dict[str, Any] = {}
    exec(compile(text.replace(now, before), inspect.getfile(owner), "exec"), made.__globals__, space)
    return mock.patch.object(owner, method, space[method])


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_a_mended_fault_that_is_put_back_is_found(case):
    _, owner, method, now, before, faults, says = case
    for seed in SEEDS:
        found, system = history(seed, faults)
        assert not found, f"without the fault, seed {seed}: {told(found, system.log)}"
    with put_back(owner, method, now, before):
        told_of = [text for seed in SEEDS for text in history(seed, faults)[0]]
    assert any(says in text for text in told_of), told_of

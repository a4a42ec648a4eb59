"""Attacks on what readers fence by: one well-formed wrong value in Redis, at a key that plans or epochs go by.

Each is written once, under load: the leader puts it right, no dispatcher obeys it, and nothing fences the leader. After
each the controller has to be obeyed again: `Row.recovered_s` waits for a decision, and `obeyed` for its plan.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_redis import connect
from benchmarks.chaos_rows import RATE_PER_S, SEED, WORKERS, Trouble, measure
from benchmarks.echo_system import Arrangement, EchoSystem, running
from benchmarks.redteam import Check, Outcome, of_row
from trefoil.core.common import Lease, Revision
from trefoil.core.demand import TableAck
from trefoil.core.errors import TrefoilError
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import codec
from trefoil.runtime.state import State

LASTS_S: Final = 3.0
OBEYED_MAX_S: Final = 10.0
MOVED_MAX_S: Final = 40.0  # what a controller plans that knows nothing may move slices
FORGETFUL: Final = {"controller": "controller", "power_agent": "agent"}  # service: its folder
POLL_S: Final = 0.1
NOBODY: Final = "nobody"
EPOCH_MAX: Final = 10**12
Attack = Callable[[EchoSystem, Plan], Awaitable[None]]


async def write(system: EchoSystem, key: str, value: Any) -> None:
    """Write one value over a key, as somebody who is none of its writers, and tell readers at once."""
    client, data = connect(system), value if isinstance(value, bytes) else codec.encode(value)
    await client.set(key, data)
    await client.publish(system.client.state.keys.changed(), key)


def forged(change: Callable[[Plan], Plan]) -> Attack:
    """The plan in Redis, changed, with whatever signature it had."""

    async def attack(system: EchoSystem, plan: Plan) -> None:
        await write(system, system.client.state.keys.plan(), change(plan))

    return attack


def revised(plan: Plan, epoch: int = 0, number: int = 0) -> Plan:
    """A plan without routes under another revision."""
    return replace(plan, routes=(), revision=Revision(epoch or plan.revision.epoch, number or plan.revision.number))


def at(key: Callable[[State], str], value: Callable[[Plan], Any]) -> Attack:
    """One value at another key."""

    async def attack(system: EchoSystem, plan: Plan) -> None:
        await write(system, key(system.client.state), value(plan))

    return attack


async def replayed(system: EchoSystem, plan: Plan) -> None:
    """The plan that is in force now is written again once a newer one is: signed, and of this leader."""
    await system.pin(Arrangement())
    await asyncio.sleep(1.0)
    await write(system, system.client.state.keys.plan(), plan)


async def deleted(system: EchoSystem, _: Plan) -> None:
    """The plan is deleted."""
    await connect(system).delete(system.client.state.keys.plan())


def made(attack: Attack) -> Callable[[EchoSystem], AbstractAsyncContextManager[None]]:
    """The attack once; at the end the controller's plan has to be the one that every worker routes by."""

    @asynccontextmanager
    async def make(system: EchoSystem) -> AsyncIterator[None]:
        state = system.client.state
        plan = await state.get(state.keys.plan(), Plan)
        assert plan is not None, "the controller has written a plan"
        await attack(system, plan)
        try:
            yield
            await obeyed(system)
        finally:
            await connect(system).delete(state.keys.ack(NOBODY, 0))

    return make


async def obeyed(system: EchoSystem, limit_s: float = OBEYED_MAX_S) -> None:
    """Every worker routes by the controller's plan, refuses none, and shares no credits with NOBODY.

    Raises:
        AssertionError: not within `limit_s`.
    """
    state, why, wanted = system.client.state, "no controller answers", None
    for _ in range(round(limit_s / POLL_S)):
        with suppress(TrefoilError):  # its controller is not there yet
            answer = await system.client.plan()
            wanted = codec.from_proto(answer.rollout)
        live = [ack for ack in await acks(state) if ack.dispatcher != NOBODY]
        late = [a for a in live if wanted is None or a.table != wanted.target or f"{NOBODY}:0" in a.counts]
        if wanted is not None:
            why = f"{wanted.target} is wanted; {[(str(a.table), a.counts, a.refused) for a in late]}"
        if live and not late:
            return
        await asyncio.sleep(POLL_S)
    raise AssertionError(f"not obeyed after {limit_s:g} s: {why}")


async def acks(state: State) -> list[TableAck]:
    """Acknowledgements as they stand in Redis."""
    return list((await state.scan(state.keys.ack_prefix(), TableAck)).values())


def stray_ack(revision: Callable[[Plan], Revision]) -> Attack:
    """Acknowledgement of a worker that is none; it never expires."""
    return at(lambda state: state.keys.ack(NOBODY, 0), lambda plan: TableAck(NOBODY, 0, revision(plan)))


ATTACKS: Final[dict[str, Attack]] = {
    "plan without routes, next epoch": forged(lambda plan: revised(plan, plan.revision.epoch + 1)),
    "plan without routes, epoch 10^12": forged(lambda plan: revised(plan, EPOCH_MAX)),
    "plan without routes, number 2^62": forged(lambda plan: revised(plan, number=2**62)),
    "plan whose routes name slices that do not exist": forged(
        lambda plan: replace(
            plan,
            revision=Revision(plan.revision.epoch, plan.revision.number + 9),
            routes=tuple(
                replace(r, targets=tuple(replace(t, slice=replace(t.slice, device="no/gpu")) for t in r.targets))
                for r in plan.routes
            ),
        )
    ),
    "an older signed plan": replayed,
    "plan deleted": deleted,
    "epoch of controllers 10^11": at(lambda s: s.keys.epoch("controller"), lambda _: b"%d" % (10**11)),
    "epoch of controllers + 500,000": at(
        lambda s: s.keys.epoch("controller"), lambda plan: b"%d" % (plan.revision.epoch + 500_000)
    ),
    "epoch of controllers 1": at(lambda s: s.keys.epoch("controller"), lambda _: b"1"),
    "lease of another controller": at(
        lambda s: s.keys.lease("controller"),
        lambda plan: Lease("controller", NOBODY, plan.revision.epoch + 1, 1e12),
    ),
    "acknowledgement of epoch 10^12, forever": stray_ack(lambda _: Revision(EPOCH_MAX, 1)),
    "acknowledgement of epoch + 500,000, forever": stray_ack(lambda plan: Revision(plan.revision.epoch + 500_000)),
    "acknowledgement of an old table, forever": stray_ack(lambda _: Revision()),
    "node plan of epoch 10^12": at(
        lambda s: s.keys.plan_node("node0"), lambda _: NodePlan(Revision(EPOCH_MAX, 1), "node0")
    ),
}


@asynccontextmanager
async def forgotten(system: EchoSystem) -> AsyncIterator[None]:
    """The states of controller, agent and Redis are lost at once; the dispatcher keeps the plan that it obeys."""
    ended = [system.launcher.pid(service) for service in FORGETFUL]
    for pid in ended:
        os.kill(pid, signal.SIGSTOP)
    for folder in FORGETFUL.values():
        shutil.rmtree(system.launcher.paths.state_dir / folder)
    await connect(system).flushall()
    for pid in ended:
        os.kill(pid, signal.SIGKILL)
    yield
    await obeyed(system, MOVED_MAX_S)


def troubles() -> tuple[Trouble, ...]:
    """Attacks on the shared system."""
    return tuple(Trouble(f"fences: {what}", made(attack), LASTS_S) for what, attack in ATTACKS.items())


def checks() -> tuple[Check, ...]:
    """On a system alone: the joules that were booked are lost as well."""
    what = "fences: states of controller, agent and Redis are lost, the dispatcher's is not"

    async def play(folder: Path) -> Outcome:
        async with running(folder / "system", Arrangement(), workers=WORKERS) as system:
            trouble = Trouble(what, forgotten, LASTS_S, frozenset(FORGETFUL))
            return of_row(await measure(system, trouble, RATE_PER_S, SEED))

    return (Check(what, play),)

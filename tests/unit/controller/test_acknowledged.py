"""A rollout is DONE when every live worker routes by its last revision; a worker that refuses it is quoted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from controller.forecasters.last_max import LastMax
from controller.loop.core.effects import CommandNode, CoreTime, FindPath, Publish, RefreshStatuses, Wait
from controller.observe.core.observation import Observation
from controller.rollout.core.executor import RolloutExecutor, find_path
from controller.settings import ControllerSettings
from tests.support.plans import CATALOG
from tests.unit.controller.views import PLAN, running, view
from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.plan import Rollout, RolloutState
from trefoil.core.plan_check import sealed
from trefoil.runtime.keys import Keys

Answer = Callable[[TableAck, Revision], TableAck]
WHY = "routes[digits].router = 'nonsense': no such router"


class Nobody:
    unallocated_j = 0.0


def rolled(answers: dict[int, Answer]) -> tuple[Rollout, list[RolloutState], float]:
    """A rollout of a plan whose slices run; workers answer each published plan. Its end, states and seconds."""
    at, states = CoreTime(1000.0, 5.0), []
    seen = Observation(ControllerSettings(), Keys("test"), CATALOG, LastMax(), 1000.0)
    status = running().nodes[0]
    seen.inputs.nodes = {status.node: status}
    seen.inputs.acks = tuple(TableAck("d", worker, PLAN.revision) for worker in answers)
    told = {node.node: sealed(node, Revision(1, 1)) for node in PLAN.nodes}
    rollouts = RolloutExecutor(ControllerSettings().rollout, seen, Nobody(), at, PLAN, told)
    steps, answer, published = rollouts.begin(replace(PLAN, revision=Revision(1, 9)), view), None, Revision()
    try:
        while True:
            effect, answer = steps.send(answer), None
            match effect:
                case FindPath():
                    answer = find_path(effect)
                case CommandNode():
                    answer = True
                case Publish(plan, rollout):
                    published = plan.revision if plan is not None else published
                    states += [rollout.state] if rollout is not None else []
                case RefreshStatuses():
                    seen.inputs.nodes = {status.node: replace(status, observed_at_s=at.now_s)}
                    seen.inputs.acks = tuple(answers[ack.worker](ack, published) for ack in seen.inputs.acks)
                case Wait():
                    at.monotonic_s += 0.5
                    at.now_s += 0.5
    except StopIteration:
        return rollouts.rollout, states, at.monotonic_s - 5.0


def follows(ack: TableAck, published: Revision) -> TableAck:
    return replace(ack, table=published, refused="")


def refuses(ack: TableAck, published: Revision) -> TableAck:
    return replace(ack, refused=WHY, refused_plan=published)


def stays(ack: TableAck, published: Revision) -> TableAck:
    return ack


def runs_ahead(ack: TableAck, published: Revision) -> TableAck:
    return replace(ack, table=Revision(9, 9))


def test_it_is_done_once_every_worker_routes_by_its_last_revision() -> None:
    rollout, states, _ = rolled({0: follows, 1: follows})
    assert rollout.state == RolloutState.DONE
    assert RolloutState.WAITING_ACK in states
    assert rolled({})[0].state == RolloutState.DONE, "without dispatchers nobody has to"


@pytest.mark.parametrize(
    ("last", "why"),
    [
        (refuses, f"worker d:1 routes by {PLAN.revision}; it refuses 1.9.0: {WHY}"),
        (stays, f"worker d:1 routes by {PLAN.revision}"),
        (runs_ahead, "worker d:1 routes by 9.9.0"),
    ],
)
def test_one_worker_that_does_not_follow_halts_it_with_its_reason(last: Answer, why: str) -> None:
    rollout, _, took_s = rolled({0: follows, 1: last})
    assert (rollout.state, rollout.why) == (RolloutState.HALTED, f"not acknowledged after 10 s: {why}")
    assert took_s >= ControllerSettings().rollout.ack_timeout_s

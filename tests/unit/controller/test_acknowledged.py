"""A rollout is DONE when every live worker routes by its last revision; a worker that refuses it is quoted."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from controller.forecasters.last_max import LastMax
from controller.observe.core.observation import Observation
from controller.rollout.core.executor import RolloutExecutor
from controller.settings import ControllerSettings
from tests.support.obedient import Obedient
from tests.support.plans import CATALOG
from tests.unit.controller.views import PLAN, running, view
from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.plan import Rollout, RolloutState
from trefoil.core.plan_check import sealed
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.keys import Keys
from trefoil.simulator.simulation import at_once

Answer = Callable[[TableAck, Revision], TableAck]
WHY = "routes[digits].router = 'nonsense': no such router"


class Nobody:
    unallocated_j = 0.0


class Workers(Obedient):
    """Workers that answer each published plan, half a second a look."""

    def __init__(self, answers: dict[int, Answer]) -> None:
        super().__init__()
        self.answers, self.clock = answers, ManualClock(1000.0)
        self.states: list[RolloutState] = []
        self.published = Revision()
        self.seen = Observation(ControllerSettings(), Keys("test"), CATALOG, LastMax(), 1000.0)
        self.seen.inputs.acks = tuple(TableAck("d", worker, PLAN.revision) for worker in answers)
        self.note_status()

    def note_status(self) -> None:
        status = running().nodes[0]
        self.seen.inputs.nodes = {status.node: replace(status, observed_at_s=self.clock.now_s())}

    async def publish(self, *, plan=None, rollout=None, node=None, drained=frozenset()) -> None:
        self.published = plan.revision if plan is not None else self.published
        self.states += [rollout.state] if rollout is not None else []

    async def refresh_statuses(self) -> None:
        self.note_status()
        inputs = self.seen.inputs
        inputs.acks = tuple(self.answers[ack.worker](ack, self.published) for ack in inputs.acks)

    async def wait(self, until_s: float) -> None:
        self.clock.move(0.5)


def rolled(answers: dict[int, Answer]) -> tuple[Rollout, list[RolloutState], float]:
    """A rollout of a plan whose slices run. Its end, states and seconds."""
    workers = Workers(answers)
    told = {node.node: sealed(node, Revision(1, 1)) for node in PLAN.nodes}
    settings = ControllerSettings().rollout
    rollouts = RolloutExecutor(settings, workers.seen, Nobody(), workers.clock, workers, PLAN, told)
    at_once(rollouts.begin(replace(PLAN, revision=Revision(1, 9)), view))
    return rollouts.rollout, workers.states, workers.clock.monotonic_s()


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

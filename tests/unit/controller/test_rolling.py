"""The rollout's core, played by hand: what it commands, step by step."""

from dataclasses import replace

from controller.forecasters.last_max import LastMax
from controller.observe.core.observation import Observation
from controller.rollout.core.executor import RolloutExecutor
from controller.settings import ControllerSettings
from tests.support.obedient import Obedient
from tests.support.plans import CATALOG
from tests.unit.controller.views import PLAN, running, view
from trefoil.core.common import Revision
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import NodePlan, Plan, RolloutState
from trefoil.core.plan_check import sealed
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.keys import Keys
from trefoil.simulator.simulation import at_once


class Nobody:
    unallocated_j = 0.0


def named_backwards(plan: Plan) -> Plan:
    """The same plan; every device names its slices from the last to the first."""
    nodes = tuple(replace(n, devices=tuple(replace(d, slices=d.slices[::-1]) for d in n.devices)) for n in plan.nodes)
    return replace(plan, nodes=nodes)


def commands(rollouts: RolloutExecutor, ports: Obedient, plan: Plan) -> list[NodePlan]:
    """What nodes are told on the way to a plan; agents do at once what they are told."""
    ports.commanded.clear()
    at_once(rollouts.begin(plan, view))
    assert rollouts.rollout.state == RolloutState.DONE, rollouts.rollout
    return list(ports.commanded)


def test_what_a_node_was_told_is_told_again_once_after_a_start_and_then_no_more() -> None:
    status: NodeStatus = running().nodes[0]
    seen = Observation(ControllerSettings(), Keys("test"), CATALOG, LastMax(), 1000.0)
    seen.inputs.nodes = {status.node: status}
    told = {n.node: sealed(n, Revision(1, 1)) for n in named_backwards(PLAN).nodes}
    ports, settings = Obedient(), ControllerSettings().rollout
    rollouts = RolloutExecutor(settings, seen, Nobody(), ManualClock(1000.0), ports, PLAN, told)

    first = commands(rollouts, ports, replace(PLAN, revision=Revision(1, 2)))
    again = commands(rollouts, ports, replace(named_backwards(PLAN), revision=Revision(1, 3)))

    assert rollouts.rollout.step == rollouts.rollout.steps > 0, "the last step of all is done"
    assert [n.node for n in first] == [status.node], "its agent may have been started anew"
    assert again == [], "slices that are named in another order are the same slices"

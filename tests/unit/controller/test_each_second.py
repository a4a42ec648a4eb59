"""A planner that decides each second: what of it is recorded, put in force and rolled out, and what is not."""

import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from controller.explore.core.exploration_state import ExplorationTotals
from controller.explore.core.ports import PlannerAnswer
from controller.loop.core import deciding
from controller.loop.core.control import ControlCore
from controller.loop.core.deciding import SOON_S
from controller.loop.core.decision import ControlState
from controller.loop.core.saved_state import SavedState
from controller.loop.live_ports import LiveControlPorts
from controller.rollout.core.path import FleetSnapshot, plan_path
from controller.rollout.core.ports import NullPorts
from controller.rollout.core.rollout_inputs import rollout_inputs
from controller.settings import ControllerSettings
from tests.support.plans import plan_of, planned
from tests.unit.controller import views
from trefoil.core.brains import Decision
from trefoil.core.common import Revision
from trefoil.core.objective import ActMode
from trefoil.core.plan import Plan, RolloutState
from trefoil.core.policies import POLICIES
from trefoil.runtime.clock import ManualClock
from trefoil.simulator.simulation import at_once

FIRST = views.PLAN
OTHER = replace(plan_of(planned("7g.40gb")), expected=FIRST.expected, objectives=FIRST.objectives)


def shares(*weights: float) -> Plan:
    """The first plan with other shares."""
    (route,) = FIRST.routes
    targets = tuple(replace(t, weight=w) for t, w in zip(route.targets, weights, strict=True))
    return replace(FIRST, routes=(replace(route, targets=targets),))


@dataclass
class Rollouts:
    rolling: bool = False
    outcome: tuple[RolloutState, str] = (RolloutState.DONE, "")
    retry_at_s: float | None = None


@dataclass
class Driven(NullPorts):
    """A core whose planner says what the test says, a second a step."""

    control: ControlState = ControlState()
    pause_s: float = 1.0
    rollouts: Rollouts = field(default_factory=Rollouts)
    done: list[str] = field(default_factory=list)
    decision: Decision | None = None
    computes: int = 0

    def __post_init__(self) -> None:
        self.clock = ManualClock(1000.0)
        seen = SimpleNamespace(
            windows=None,
            inputs=SimpleNamespace(carbon=True, scale_signals=()),
            allowed_triggers=lambda triggers, _now_s: triggers,
            awaits_nodes=lambda _plan, _now_s: False,
            input_stamps=lambda _now_s: (),
            view=lambda _o, current, _m, _g, now_s: views.view(now_s, current=current),
        )
        meter = SimpleNamespace(grams_per_request=lambda _families, _now_s: {})
        kept = SavedState({"toy": views.OBJECTIVE}, [], self.control, ExplorationTotals())
        self.core = ControlCore(
            ControllerSettings(), POLICIES["wattwiser"], 0.0, None, seen, meter, self.rollouts, self.clock, kept, self
        )

    def says(self, plan: Plan | None, degraded: str = "") -> list[str]:
        """What one step does, a second after the one before."""
        self.clock.move(1.0)
        self.decision, self.done = Decision(plan, "as the test says", self.clock.now_s() + self.pause_s, degraded), []
        at_once(self.core.step())
        return self.done

    def show(self, view, control, verdict) -> None: ...

    def require_room(self) -> None: ...

    async def think(self, view, seed, *, ask=False) -> PlannerAnswer:
        self.done.append("think")
        return PlannerAnswer(self.decision, seed)

    async def record(self, taken) -> None:
        self.done.append("record")

    async def compute(self, function):
        self.computes += 1
        try:
            return function()
        finally:
            self.computes -= 1

    async def save_plans(self, plans) -> None:
        self.done.append("save")

    async def roll(self, plan, why, view) -> None:
        self.done.append("roll")


ALL = ["think", "record", "save", "roll"]
NOTHING = ["think"]


def test_what_changes_nothing_leaves_no_record_and_is_asked_again_the_next_second():
    driven = Driven()
    assert driven.says(FIRST) == ALL
    for _ in range(3):
        assert driven.says(replace(FIRST, why="in other words")) == NOTHING
    assert driven.says(None) == NOTHING
    assert driven.says(OTHER) == ALL


def test_a_planner_that_decides_by_the_minute_is_recorded_each_time():
    driven = Driven(pause_s=SOON_S + 1)
    assert driven.says(FIRST) == ALL
    assert [driven.says(FIRST) for _ in range(3)] == [[], [], ["think", "record"]]


def test_shares_alone_wait_for_the_rollout_under_way_and_anything_more_takes_its_place():
    driven = Driven()
    driven.says(FIRST)
    driven.rollouts.rolling = True
    assert driven.says(shares(0.9, 0.1)) == NOTHING
    assert driven.core.current.routes == FIRST.routes
    driven.rollouts.rolling = False
    assert driven.says(shares(0.8, 0.2)) == ALL
    driven.rollouts.rolling = True
    assert driven.says(OTHER) == ALL


def test_a_limit_is_recorded_when_it_comes_and_when_it_goes():
    driven = Driven()
    driven.says(FIRST)
    limited = replace(FIRST, degraded="short_of_capacity")
    found = [driven.says(plan) for plan in (limited, limited, FIRST, FIRST)]
    assert found == [["think", "record"], NOTHING] * 2
    found = [driven.says(None, "literal"), driven.says(None, "literal"), driven.says(FIRST), driven.says(FIRST)]
    assert found == [["think", "record"], NOTHING] * 2


@pytest.mark.parametrize("control", [ControlState(ActMode.ADVISE), ControlState(frozen=True)])
def test_advice_is_recorded_once_while_only_shares_differ(control):
    driven = Driven()
    driven.says(FIRST)
    driven.core.control = control
    found = [driven.says(plan) for plan in (shares(0.9, 0.1), shares(0.8, 0.2), OTHER, OTHER)]
    assert found == [["think", "record"], NOTHING] * 2


def test_other_shares_are_one_step_that_starts_drains_and_stops_nothing():
    """So that it goes by without a restart also where it follows a rollout that has halted."""
    one = views.view()
    target = replace(shares(0.9, 0.1), revision=Revision(1, 2))
    devices = {d.device: d for node in FIRST.nodes for d in node.devices}
    parts = {p.key: p for d in devices.values() for p in d.slices}
    path = plan_path(FleetSnapshot(devices, parts, frozenset(parts), FIRST.routes), target, rollout_inputs(one))
    assert not path.reconfigures
    (settle,) = path.steps
    assert (settle.drained, settle.ready, settle.routes) == (frozenset(), {}, target.routes)


def test_what_grows_with_the_fleet_is_computed_where_it_keeps_nothing_waiting(monkeypatch):
    driven, found = Driven(), []
    for name in ("judge", "plan_basis"):
        real = getattr(deciding, name)
        noted = lambda *args, name=name, real=real: (found.append((name, driven.computes)), real(*args))[1]  # noqa: E731
        monkeypatch.setattr(deciding, name, noted)
    assert driven.says(FIRST) == ALL
    assert found == [("judge", 1), ("plan_basis", 1)]


async def test_live_it_is_computed_in_a_thread():
    ports = object.__new__(LiveControlPorts)
    assert await ports.compute(threading.get_ident) != threading.get_ident()

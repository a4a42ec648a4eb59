"""An exploration as a value."""

from collections.abc import Sequence
from dataclasses import replace

from controller.explore.core.exploration_state import Exploration, Phase, unplanned_slices_stand
from controller.observe.core.triggers import Trigger
from controller.settings import ExploreSettings
from tests.support.plans import SMALL, plan_of, planned
from tests.unit.controller import views
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceState
from trefoil.core.plan import Plan

START = Trigger("start", "no plan is in force")


def test_a_queue_from_before_anything_served_may_drain_as_long_as_it_shrinks() -> None:
    settings, plan = ExploreSettings(settle_s=2.0, settle_max_s=10.0), replace(views.PLAN, revision=Revision(1, 1))

    def given(before: Plan | None, waits: Sequence[int]) -> int:
        """For how many seconds a candidate whose rollout ended at 0 s is given time."""
        run = Exploration(START, before, 0.0, Phase.SETTLE, settled_s=2.0)
        return next((now_s for now_s, n in enumerate(waits) if not run.drains(n, 5, now_s, settings)), len(waits))

    shrinking, growing = range(100, 0, -2), range(100, 200)
    assert given(None, shrinking) == 48, "until no more wait than a candidate bears"
    assert given(plan, shrinking) == 10, "settle_max_s"
    assert given(None, growing) == 10
    assert given(plan, growing) == 10
    assert given(None, [*range(100, 60, -2), *[70] * 50]) == 19 + 10, "a queue that shrinks no more gets settle_max_s"


def test_slices_of_a_rollout_that_was_given_up_are_waited_for_until_they_are_gone() -> None:
    stands = plan_of(*views.PARTS, planned("7g.40gb", variant=SMALL, device="node0/gpu1"))
    given_up = stands.nodes[0].devices[1].slices[0].key
    plan = replace(
        views.PLAN,
        nodes=(
            replace(
                stands.nodes[0], devices=(stands.nodes[0].devices[0], replace(stands.nodes[0].devices[1], slices=()))
            ),
        ),
    )

    def given(state: SliceState) -> bool:
        return unplanned_slices_stand(replace(views.view(current=plan), fleet=views.running(stands, {given_up: state})))

    assert [given(s) for s in (SliceState.STARTING, SliceState.READY, SliceState.DRAINING)] == [True] * 3
    assert not given(SliceState.GONE)
    assert not given(SliceState.FAILED), "it may stay for long"
    assert not unplanned_slices_stand(replace(views.view(current=None), fleet=views.running(stands))), "no plan yet"
    assert not unplanned_slices_stand(replace(views.view(), fleet=views.running(stands))), "not a GPU of the plan"

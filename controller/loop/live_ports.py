"""Ports of the control loop's core, live: planner, records, Redis and rollouts."""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from controller.explore.core.exploration_state import Evaluation
from controller.explore.core.ports import PlannerAnswer
from controller.loop.core.decision import ControlState, Verdict
from controller.loop.core.ports import TakenDecision
from controller.loop.core_ports import LiveCorePorts, Signals
from controller.loop.decision_records import DecisionRecords
from controller.loop.planner_runner import PlannerRunner
from controller.loop.rollout_runner import RolloutRunner
from controller.loop.view_metrics import set_view_metrics
from controller.observe.core.observation import Observation
from controller.observe.core.triggers import Trigger
from controller.role.disk_store import DiskStore
from controller.role.leadership import Leadership
from trefoil.core.brains import Candidate, Measurement, PlanView
from trefoil.core.common import Revision
from trefoil.core.objective import Objective
from trefoil.core.plan import Plan
from trefoil.runtime.fenced import Put
from trefoil.runtime.keys import Keys
from trefoil.runtime.telemetry import Metrics

T = TypeVar("T")


class LiveControlPorts(LiveCorePorts):
    """`ControlPorts` on asyncio."""

    def __init__(
        self,
        disk: DiskStore,
        metrics: Metrics,
        signals: Signals,
        keys: Keys,
        leadership: Leadership,
        observation: Observation,
        planner_runner: PlannerRunner,
        records: DecisionRecords,
        rollout_runner: RolloutRunner,
    ) -> None:
        super().__init__(disk, metrics, signals)
        self._keys, self._leadership, self._observation = keys, leadership, observation
        self.planner_runner, self.records, self.rollout_runner = planner_runner, records, rollout_runner

    def show(self, view: PlanView, control: ControlState, verdict: Verdict | None) -> None:
        refused = self._observation.plannable_carbon(view.now_s).rung
        aside = self._observation.inputs.set_aside.take_counts()
        set_view_metrics(self._metrics, view, control, self.rollout_runner.rollout, verdict, refused, aside)

    def require_room(self) -> None:
        self._disk.check()

    async def think(self, view: PlanView, seed: int, *, ask: bool = False) -> PlannerAnswer:
        return await self.planner_runner.call(view, seed, ask)

    async def compute(self, function: Callable[[], T]) -> T:
        return await asyncio.to_thread(function)

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        self.planner_runner.tell(candidate, measurement)

    def save_memory(self) -> None:
        self.planner_runner.save()

    def evaluated(self, trigger: Trigger, evaluation: Evaluation) -> None:
        found = evaluation.measurement
        assert found is not None, "it has ended"
        self.log("evaluation", text=str(evaluation), spent_s=round(found.spent_s, 1), spent_j=round(found.spent_j, 1))

    def open_records(self, epoch: int) -> int:
        return self.records.newest(epoch)

    async def record(self, taken: TakenDecision) -> None:
        await self.records.write(taken)

    async def save_plans(self, plans: Sequence[Plan]) -> None:
        await asyncio.to_thread(self._disk.save_all, "plans", plans)

    async def write_objectives(self, objectives: tuple[Objective, ...]) -> None:
        await self._leadership.write([Put(self._keys.objective(o.family), o) for o in objectives])

    async def roll(self, plan: Plan, why: str, view: Callable[[], PlanView]) -> None:
        await self.rollout_runner.begin(plan, why, view)

    async def stop_rollout(self) -> None:
        await self.rollout_runner.settle()

    async def republish(self, revision: Revision) -> None:
        await self.rollout_runner.republish(revision)

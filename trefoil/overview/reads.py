"""Questions to a controller that change nothing."""

from abc import ABC, abstractmethod
from typing import Any

from protos.controller.v1 import controller_pb2
from trefoil.core.errors import UnknownCall
from trefoil.core.objective import Objective
from trefoil.core.plan import DecisionRecord
from trefoil.runtime import codec


class ControllerReads(ABC):
    """Questions to a controller; a subclass says how they reach it."""

    @abstractmethod
    async def call(self, method: str, request: Any) -> Any:
        """Call an RPC of the controller; raises the TrefoilError that it met."""

    async def call_if_known(self, method: str, request: Any) -> Any:
        """Call an RPC that an older controller may not have; None: this one does not know it."""
        try:
            return await self.call(method, request)
        except UnknownCall:
            return None

    async def plan(self) -> Any:
        """The plan in force (GetPlanResponse: plan, rollout, mode, frozen, pinned)."""
        return await self.call("GetPlan", controller_pb2.GetPlanRequest())

    async def explain(self, family: str) -> Any:
        """Why a family's plan is what it is (ExplainResponse)."""
        return await self.call("Explain", controller_pb2.ExplainRequest(family=family))

    async def objectives(self, family: str = "") -> tuple[list[Objective], float]:
        """Objectives in force by family (of one, if named), and the cap on the fleet's planned power [W], 0 = none."""
        answer = await self.call("GetObjectives", controller_pb2.GetObjectivesRequest(family=family))
        return [codec.from_proto(each) for each in answer.objectives], answer.max_watts

    async def budgets(self) -> Any:
        """Budgets of tenants, each with what of it is spent (GetBudgetsResponse)."""
        return await self.call("GetBudgets", controller_pb2.GetBudgetsRequest())

    async def fleet(self) -> Any:
        """Nodes as their agents publish them, carbon now, workers (GetFleetResponse)."""
        return await self.call("GetFleet", controller_pb2.GetFleetRequest())

    async def served(self) -> Any:
        """What was served of late, by family and class (GetServedResponse)."""
        return await self.call("GetServed", controller_pb2.GetServedRequest())

    async def decisions(self, since_s: float = 0.0, newest: int = 0) -> list[DecisionRecord]:
        """Decisions that are kept and were taken at a time [UTC s] or later, or the newest of them, oldest first."""
        request = controller_pb2.ListDecisionsRequest(newest=newest)
        request.since.FromNanoseconds(round(since_s * 1e9))
        return [codec.from_proto(one) for one in (await self.call("ListDecisions", request)).decisions]

    async def report(self, since_s: float, until_s: float = 0.0) -> Any:
        """Books of the hours since a time [UTC s] (GetReportResponse); `until_s` 0: now."""
        request = controller_pb2.GetReportRequest()
        request.since.FromNanoseconds(round(since_s * 1e9))
        request.until.FromNanoseconds(round(until_s * 1e9))
        return await self.call("GetReport", request)

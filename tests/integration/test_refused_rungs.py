"""A rung that the controller refuses, through a real controller: it keeps its plan, says why, and goes on later."""

import pytest

from protos.controller.v1 import controller_pb2 as pb
from tests.support.control_plane import ControlPlane
from trefoil.core.carbon import Rung

pytestmark = pytest.mark.integration
REFUSED = ("carried", "profile", "static", "expired")


async def test_a_refused_rung_moves_nothing_until_the_provider_is_back():
    plane = ControlPlane(planner="tests.support.planners:ByCarbon", refused=REFUSED)
    try:
        plane.intensity = 100.0
        await plane.start()
        await plane.until(plane.settled)
        before = await plane.plan()
        assert before is not None
        plane.rung, plane.intensity = Rung.STATIC, 900.0

        async def refused() -> str:
            found = await plane.stub.GetPlan(pb.GetPlanRequest(), timeout=10)
            return str(found.carbon_refused)

        why = await plane.until(refused)
        assert why.startswith("rung static in force (fake unavailable: made up) is refused by carbon.rungs_refused")
        explained = await plane.stub.Explain(pb.ExplainRequest(family="digits"), timeout=10)
        assert f"carbon: 100 g/kWh in demo, rung 0: {why}" in explained.why
        asked = await plane.stub.Replan(pb.ReplanRequest(why="look"), timeout=20)
        assert "clean: 100 g/kWh" in asked.why
        after = await plane.plan()
        assert after is not None
        assert [n.digest for n in after.nodes] == [n.digest for n in before.nodes]
        explained = await plane.stub.Explain(pb.ExplainRequest(family="digits"), timeout=10)
        assert explained.replans_by_cause["carbon"] == 0
        plane.rung = Rung.NORMAL

        async def moved() -> bool:
            found = await plane.stub.Explain(pb.ExplainRequest(family="digits"), timeout=10)
            return bool(found.reconfigurations_by_cause["carbon"] >= 1 and not await refused())

        await plane.until(moved)
    finally:
        await plane.close()

"""What commands meet instead of a running system."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from protos.controller.v1 import controller_pb2
from protos.dispatcher.v1 import dispatcher_pb2
from trefoil.cli.main import app
from trefoil.cli.operate import overview
from trefoil.cli.run.state_directory import SERVICES, Launch, StatePaths
from trefoil.cli.system_client import SystemClient
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.errors import InvalidInput, NotFound
from trefoil.core.fleet import (
    DeviceState,
    DeviceStatus,
    Hosted,
    NodeStatus,
    SliceKey,
    SliceState,
    SliceStatus,
)
from trefoil.core.objective import ActMode, Budget, Objective, ObjectiveMode
from trefoil.core.plan import (
    DecisionRecord,
    NodePlan,
    Plan,
    PlannedDevice,
    PlannedSlice,
    Rollout,
    RolloutState,
    Route,
    RouteTarget,
)
from trefoil.overview import known
from trefoil.runtime import codec
from trefoil.runtime.proc import Identity

KEY = SliceKey("node0/gpu0", "7g.40gb", 0, 8)

HOSTED = (Hosted("digits", "digits-l", 4, 0, 1, 1, 8),)

PLAN = Plan(
    revision=Revision(1, 3),
    policy="exact",
    planner="exact",
    nodes=(
        NodePlan(
            Revision(1, 3), "node0", (PlannedDevice("node0/gpu0", DeviceState.AWAKE, (PlannedSlice(KEY, HOSTED, 1),)),)
        ),
    ),
    routes=(Route("digits", "weighted", "fifo", (RouteTarget(KEY, "digits-l", weight=1.0, credits=1),)),),
    why="carbon fell",
)

ROLLOUT = Rollout(
    Revision(1, 4), RolloutState.WAITING_READY, 2, 3, (KEY,), {"digits": 40.0}, why="carbon fell", spent_j=512.0
)

OBJECTIVE = Objective(
    "digits",
    ObjectiveMode.BUDGET,
    slo_ms=75,
    slo_quantile=0.95,
    min_accuracy=0.97,
    hard_min_accuracy=0.9,
    number=4,
    window_s=86_400.0,
)

BUDGETS = [
    controller_pb2.BudgetUse(
        budget=codec.to_proto(Budget("acme", grams_per_day=500.0, least_accuracy=0.9, number=2)), grams=505.0,
        joules=3.6e6, rung=3, free_at={"seconds": 1_750_032_000},
    ),
    controller_pb2.BudgetUse(budget=codec.to_proto(Budget("", "digits", joules_per_day=2e6, number=1))),
]  # fmt: skip

NODE = NodeStatus(
    node="node0",
    simulated=True,
    devices=(
        DeviceStatus(
            "node0/gpu0",
            A100_40GB,
            DeviceState.AWAKE,
            (SliceStatus(KEY, state=SliceState.READY, hosted=HOSTED),),
            clock_mhz=1410,
            power_w=231.5,
            power_limit_w=300.0,
        ),
        DeviceStatus("node0/gpu1", A100_40GB, DeviceState.ASLEEP),
    ),
)

READING = CarbonReading(
    Series("demo", Method.AVERAGE, Factors.LIFECYCLE), intensity_g_per_kwh=249.0, provider="trace", simulated=True,
    estimation_method="mean of 4 h, replayed 12 times as fast",
)  # fmt: skip

TOTALS = {  # of the launch's hours, by family
    "cats": [{"joules": 10.0, "grams": 1.0, "base_joules": 20.0, "base_grams": 3.0, "active_joules": 5.0}],
    "digits": [
        {"joules": 90.0, "grams": 9.0, "base_joules": 110.0, "base_grams": 11.0, "requests": 500.0},
        {"requests": 500.0, "active_joules": 1000.0, "receipt_joules": 970.0},
    ],
}


def decision(number: int, trigger: str, plan: int, **versions: str) -> DecisionRecord:
    why = f"{trigger}: it moved; exact: so and so"
    return DecisionRecord(
        f"1.{number:06d}", Revision(1, plan), trigger, at_s=100.0 * number, why=why, versions=versions
    )


DECISIONS = [
    decision(1, "start", 1, outcome="new_plan", effect="reconfigure", rollout_before="unspecified"),
    decision(2, "carbon", 2, outcome="new_plan", effect="reconfigure", rollout_before="done"),
    decision(3, "load", 3, outcome="new_plan", effect="reroute", rollout_before="applying"),
    decision(4, "tick", 3, outcome="unchanged", effect="unchanged", rollout_before="done"),
    decision(5, "slo", 4, outcome="new_plan", effect="reroute", rollout_before="done"),
]


class Running:
    """What commands meet instead of a running system; keeps what they asked the controller."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.ratio: float | None = 0.87
        self.totals = TOTALS
        self.attained, self.accuracy = 0.963, 0.981
        self.accuracies: dict[str, float] = {}
        self.tokens: Any = None
        self.waits: Any = None
        self.rollout = Rollout(Revision(1, 4), RolloutState.DONE)

    def changed(self) -> Any:
        """The only change of the objectives that were set last."""
        method, request = self.asked[-1]
        assert method == "SetObjectives"
        [change] = request.objectives
        return change

    async def ask(self, method: str, request: Any) -> Any:
        self.asked.append((method, request))
        revision = codec.to_proto(Revision(1, 4))
        match method:
            case "GetPlan":
                return controller_pb2.GetPlanResponse(
                    plan=codec.to_proto(PLAN), rollout=codec.to_proto(self.rollout), mode=int(ActMode.ACT), frozen=True,
                    models_refused=["node0: model digits/2: its files have digest bb, and node1 has aa"],
                    places_refused=["node0-gpu0-1g.5gb-0: no plan made this instance"],
                    agents_unreached=["node1: advertise_host = '10.0.0.7:8103': the agent of node1 does not answer"],
                    overrides=["digits.slo.latency_ms = 75 by command, 90 in the settings"],
                )  # fmt: skip
            case "GetServed":
                whole = {"family": "digits", "slo_ms": 75.0, "rate_per_s": 20.0, "answered": 1200}
                whole["accuracy"] = self.accuracy
                silent = controller_pb2.Served(family="digits", slo_class="gold", slo_ms=30.0, rate_per_s=0.0)
                kept = controller_pb2.Served(**whole, slo_attainment=self.attained, grams_per_request=0.0021)
                kept.MergeFrom(controller_pb2.Served(tokens=self.tokens))
                kept.MergeFrom(self.waits or controller_pb2.Served())
                rows = [kept, silent]
                return controller_pb2.GetServedResponse(window_s=60.0, served=rows, base_basis="digits-l everywhere")
            case "Explain":
                return controller_pb2.ExplainResponse(
                    why="carbon fell", trigger="carbon", replans_by_cause={"carbon": 2}
                )
            case "GetObjectives" if request.family == "new":
                raise NotFound("no objective for family 'new'")
            case "GetObjectives":
                cats = replace(OBJECTIVE, family="cats", mode=ObjectiveMode.INSTANT, number=2)
                found = [codec.to_proto(each) for each in (cats, OBJECTIVE) if request.family in ("", each.family)]
                return controller_pb2.GetObjectivesResponse(objectives=found, max_watts=900.0)
            case "SetObjectives":
                if any(each.objective.slo_ms == 1 for each in request.objectives):
                    raise InvalidInput("family cats: slo_ms = 1.0: no variant of cats is that fast")
                objectives = [each.objective for each in request.objectives]
                return controller_pb2.SetObjectivesResponse(
                    objectives=objectives, max_watts=request.max_watts, degraded="watt_cap: too few watts"
                )
            case "GetBudgets":
                return controller_pb2.GetBudgetsResponse(budgets=BUDGETS)
            case "SetBudget" if request.reset:
                return controller_pb2.SetBudgetResponse()
            case "SetBudget":
                return controller_pb2.SetBudgetResponse(use={"budget": request.budget, "grams": 0, "joules": 0})
            case "ClearBudget":
                return controller_pb2.ClearBudgetResponse()
            case "LoadFamily":
                found = controller_pb2.AllocatedDevice(device=request.device, sharing_factor=2)
                return controller_pb2.LoadFamilyResponse(devices=[found])
            case "StopFamily":
                return controller_pb2.StopFamilyResponse(held="frozen")
            case "StartFamily":
                return controller_pb2.StartFamilyResponse(degraded="too slow for it")
            case "SetMode":
                return controller_pb2.SetModeResponse(mode=request.mode or int(ActMode.ADVISE))
            case "Freeze":
                return controller_pb2.FreezeResponse(frozen=request.frozen, revision=revision)
            case "Pin":
                return controller_pb2.PinResponse(revision=revision)
            case "Rollback":
                return controller_pb2.RollbackResponse(revision=revision, why="back to 1.2")
            case "Replan":
                return controller_pb2.ReplanResponse(
                    decision_id="1.000007", outcome="unchanged", effect="unchanged", why=f"asked for: {request.why}",
                    revision=revision,
                )  # fmt: skip
            case "GetDecision":
                record = DecisionRecord(id=request.id or "1.000009", trigger="carbon", policy="exact", why="it rose")
                return controller_pb2.GetDecisionResponse(decision=codec.to_proto(record), made=codec.to_proto(PLAN))
        return self._stored(method, request)

    def _stored(self, method: str, request: Any) -> Any:
        """What stands in Redis."""
        match method:
            case "GetFleet":
                return controller_pb2.GetFleetResponse(
                    cluster="test", nodes=[codec.to_proto(NODE)], carbon=[codec.to_proto(READING)]
                )
            case "ListDecisions":
                kept = [codec.to_proto(one) for one in DECISIONS if one.at_s >= request.since.seconds]
                return controller_pb2.ListDecisionsResponse(decisions=kept[-request.newest :])
            case "GetReport":
                hours = [
                    controller_pb2.FamilyHour(family=f, sums=one) for f, each in self.totals.items() for one in each
                ]
                return controller_pb2.GetReportResponse(
                    hours=hours, embodied_lifetime_years=4.0, accuracies=self.accuracies
                )
        raise AssertionError(method)


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Running:
    """A launch file of a living supervisor (this test), with a controller and a Redis that answer from above."""
    import os

    fake = Running()
    launch = Launch(
        launch_id="test",
        cluster="test",
        state_dir=str(tmp_path),
        supervisor=Identity.of_pid(os.getpid()),
        redis_url="redis://127.0.0.1:1/0",
        addresses=dict.fromkeys([*SERVICES, "inference"], "127.0.0.1:1"),
        metrics={"controller": "127.0.0.1:2"},
        node_socket="",
        family="digits",
        node="node0",
        zone="demo",
        triton_ports=(1, 2),
        started_at_s=0.0,
    )
    StatePaths(tmp_path).write_launch(launch)

    async def is_serving(_: str) -> bool:
        return True

    async def explained(_: Any, channel: Any, family: str, params: Any) -> Any:
        fake.asked.append((family, dict(params)))
        target = codec.to_proto(RouteTarget(KEY, "digits-l", weight=1.0, credits=2, accuracy=0.993, version=4))
        rows = (
            dispatcher_pb2.ScoredTarget(target=target, eligible=True, score=0.25, in_flight=1, why="class digits-l"),
            dispatcher_pb2.ScoredTarget(target=target, eligible=True, score=float("inf"), in_flight=2, why="full"),
            dispatcher_pb2.ScoredTarget(target=target, eligible=False, in_flight=0, why="ejected: UNAVAILABLE"),
        )
        table = codec.to_proto(Revision(1, 3))
        return dispatcher_pb2.ExplainRequestResponse(
            table=table, router="weighted", targets=rows, waiting=3, why="goes to node0/gpu0 at once"
        )

    monkeypatch.setattr(SystemClient, "explain_request", explained)
    monkeypatch.setattr(SystemClient, "call", lambda _self, method, request: fake.ask(method, request))
    monkeypatch.setattr(known, "current_ratio", lambda *_: fake.ratio)
    monkeypatch.setattr(overview, "is_serving", is_serving)
    return fake


def run(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, [*arguments, "--state-dir", str(tmp_path)], catch_exceptions=False)


def document(tmp_path: Path, *arguments: str) -> Any:
    result = run(tmp_path, *arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)

"""Every command: a helpful --help, JSON with --json, and one line with exit code 2 when it cannot."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from protos.controller.v1 import controller_pb2
from protos.dispatcher.v1 import dispatcher_pb2
from protos.types.v1 import plan_pb2
from tests.support.commands import commands
from trefoil.cli.main import app
from trefoil.cli.operate import overview
from trefoil.cli.run.state_directory import SERVICES, Failing, Launch, StatePaths
from trefoil.cli.system_client import SystemClient
from trefoil.core.carbon import CarbonReading, Factors, Method, Series
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.errors import InvalidInput, NotFound, Unavailable
from trefoil.core.fleet import (
    FAILED_LAST,
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

COMMANDS = [
    ["up"], ["down"], ["status"], ["plan"], ["top"], ["report"],
    ["objective", "set"], ["objective", "show"], ["mode"], ["freeze"], ["pin"],
    ["rollback"], ["replan"], ["rollout"], ["load"], ["state", "dump"], ["replay"], ["demo"], ["simulate"],
    ["reproduce", "clover"], ["family", "list"], ["family", "check"], ["family", "import"], ["family", "engine"],
    ["family", "assume"], ["compare"], ["policy"], ["assess"],
    ["node", "show"], ["node", "preview"], ["node", "clocks"], ["node", "unlock"], ["node", "energy"],
    ["node", "drain"], ["node", "doctor"], ["node", "adopt"], ["node", "reset"],
    ["explain-request"], ["carbon", "backtest"], ["carbon", "now"], ["carbon", "watch"], ["carbon", "forecast"],
    ["carbon", "history"], ["carbon", "health"], ["carbon", "zones"], ["reproduce", "wattwiser"],
    ["reproduce", "muserve"], ["reproduce", "muserve-scheduler"],
    ["reproduce", "carbondis"],
    ["family", "load"], ["family", "unload"], ["family", "stop"], ["family", "start"],
    ["family", "profile"], ["family", "sensitivity"], ["family", "generate"],
    ["objective", "fleet"], ["apply"], ["diff"], ["export"], ["state", "restore"], ["setup", "triton"],
    ["forecast", "train"], ["forecast", "backtest"], ["deploy", "env"], ["reproduce", "infadapter"],
    ["lengths", "train"], ["budget", "set"], ["budget", "clear"], ["budget", "list"], ["budget", "show"],
    ["jobs", "submit"], ["jobs", "list"], ["jobs", "show"], ["jobs", "watch"], ["jobs", "cancel"], ["jobs", "results"],
]  # fmt: skip
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
    estimation_method="mean of 4 h, played 12 times as fast",
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
                rollout = plan_pb2.Rollout(target=revision, state=int(RolloutState.DONE))
                return controller_pb2.GetPlanResponse(
                    plan=codec.to_proto(PLAN), rollout=rollout, mode=int(ActMode.ACT), frozen=True,
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
            case "GetRollout":
                return controller_pb2.GetRolloutResponse(rollout=codec.to_proto(ROLLOUT), plan=revision)
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


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_says_what_it_does_and_offers_json(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout or "JSON lines" in result.stdout
    about = result.stdout.split("\n\n")[1].strip()
    assert len(about.split()) >= 5, "a sentence, not a name"


def test_a_family_is_loaded_onto_a_device(running: Running, tmp_path: Path) -> None:
    wanted = {"family": "digits", "devices": {"node0/gpu1": 2}, "degraded": ""}
    assert document(tmp_path, "family", "load", "digits", "node0/gpu1") == wanted
    said = run(tmp_path, "family", "load", "digits", "node0/gpu1")
    assert "digits may use node0/gpu1 (shared by 2)" in said.stdout


def test_a_family_is_stopped_and_started(running: Running, tmp_path: Path) -> None:
    wanted = {"family": "digits", "stopped": True, "held": "frozen", "degraded": ""}
    assert document(tmp_path, "family", "stop", "digits") == wanted
    said = run(tmp_path, "family", "stop", "digits").stdout
    assert said.splitlines() == ["digits is out of service", "the plan in force stays for now: frozen"]
    wanted = {"family": "digits", "stopped": False, "held": "", "degraded": "too slow for it"}
    assert document(tmp_path, "family", "start", "digits") == wanted
    said = run(tmp_path, "family", "start", "digits").stdout
    assert said.splitlines() == ["digits is in service", "the fleet cannot meet its objective: too slow for it"]


def test_no_command_is_missing_from_the_tests() -> None:
    words = [path for path, one in commands() if not hasattr(one, "commands") and not one.hidden]
    assert sorted(" ".join(command) for command in COMMANDS) == sorted(words)


@pytest.mark.parametrize(("name", "arguments"), [
    ("profile", ["nosuch"]), ("sensitivity", ["nosuch.onnx"]), ("generate", ["hello", "--state-dir", "nosuch"]),
])  # fmt: skip
def test_a_verb_of_families_works_for_now_under_its_old_words_and_names_the_new_ones(
    name: str, arguments: list[str]
) -> None:
    new = CliRunner().invoke(app, ["family", name, *arguments])
    old = CliRunner().invoke(app, [name, *arguments])
    said, rest = old.stderr.split("\n", 1)
    assert said == f"`trefoil {name}` is `trefoil family {name}` from now on; the next release drops the old words"
    assert (old.exit_code, old.stdout, rest) == (new.exit_code, new.stdout, new.stderr)
    assert new.exit_code in (1, 2)
    assert f" {name} " not in CliRunner().invoke(app, ["--help"]).stdout.partition("Commands:")[2]
    assert f" {name} " in CliRunner().invoke(app, ["family", "--help"]).stdout.partition("Commands:")[2]


@pytest.mark.parametrize(
    ("arguments", "named", "remedy"),
    [
        (["family", "profile", "nosuch"], "nosuch/family.toml", "name the right folder"),
        (["simulate", "nosuch.toml"], "nosuch.toml", "clover_fleet, cpus, digits"),
        (["reproduce", "clover", "--family", "nosuch"], "--family = 'nosuch'", "efficientnet"),
        (["family", "list", "--repository", "nosuch"], "nosuch'", "name the right folder"),
        (["family", "check", "nosuch"], "no such family in", "digits"),
        (
            ["family", "import", "nosuch", "--as", "new=a,b", "--slo-latency-ms", "10"],
            "no accuracy of a",
            "--accuracies",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_needs_no_running_system_says_in_one_line_what_is_wrong(
    arguments: list[str], named: str, remedy: str
) -> None:
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 2
    assert result.stderr.startswith("trefoil: ")
    assert named in result.stderr
    assert remedy in result.stderr.partition("Remedy: ")[2]
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["status"],
        ["plan"],
        ["objective", "show"],
        ["mode", "act"],
        ["freeze"],
        ["rollback"],
        ["replan"],
        ["rollout"],
        ["state", "dump"],
        ["load"],
    ],
    ids=" ".join,
)
def test_without_a_running_system_one_line_says_so(tmp_path: Path, command: list[str]) -> None:
    result = run(tmp_path, *command)
    assert result.exit_code == 2
    assert result.stderr.startswith("trefoil: state_dir")
    assert "trefoil up" in result.stderr
    assert result.stderr.count("\n") == 1


def test_down_without_a_system_is_no_error(tmp_path: Path) -> None:
    assert document(tmp_path, "down") == {"stopped": False, "said": []}


def test_status(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "status")
    assert found["mode"] == "act"
    assert found["frozen"] is True
    assert found["rollout"] == "done"
    assert found["services"] == dict.fromkeys(SERVICES, True)
    assert found["failing"] == {}
    assert found["nodes"][0]["devices"][0]["power_w"] == 231.5
    said = run(tmp_path, "status").stdout
    assert "cannot command node1: advertise_host = '10.0.0.7:8103': the agent of node1 does" in said.replace("\n", " ")
    for part in (
        "SIMULATED",
        "7g.40gb digits-l",
        "of 300 W",
        "asleep",
        "249 g/kWh",
        "frozen",
        "receipts digits",
        "-3.0 %",
    ):
        assert part in said
    assert "receipts cats: no traffic yet" in said
    assert found["overrides"] == ["digits.slo.latency_ms = 75 by command, 90 in the settings"]
    assert found["overrides"][0] in said
    carbon = "249 g/kWh (simulated: mean of 4 h, played 12 times as fast); over its mean: 0.87"
    assert carbon in said.replace("\n", " ")
    running.ratio = None
    assert document(tmp_path, "status")["carbon_ratio"][0]["ratio"] is None
    assert "over its mean: not known, routers that go by it do without" in run(tmp_path, "status").stdout


@pytest.mark.parametrize("place", ["carbon_feed/epoch.json.bad", "dispatcher/dispatcher/table.jsonl.bad.1"])
def test_status_names_files_that_any_service_has_set_aside(tmp_path: Path, running: Running, place: str) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True)
    path.touch()
    assert document(tmp_path, "status")["set_aside_here"] == [str(path)]
    said = " ".join(run(tmp_path, "status").stdout.split())
    assert "could not be understood and stands aside. Remedy: look at it" in said
    path.unlink()
    assert document(tmp_path, "status")["set_aside_here"] == []


def test_status_gives_the_reason_of_every_slice_that_failed(
    tmp_path: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = "Triton exited with 1; its Triton logged: model output 'label' must specify 'dims'"
    states = [
        (SliceState.FAILED, dims),
        (SliceState.STARTING, f"planned; {FAILED_LAST}{dims}"),
        (SliceState.FAILED, f"start: no port; {FAILED_LAST}older"),
        (SliceState.FAILED, ""),
        (SliceState.STARTING, "planned"),
        (SliceState.READY, "could not load digits-l"),
    ]
    slices = tuple(
        SliceStatus(replace(KEY, slice_type="1g.5gb", start=n), state=state, why=why, hosted=HOSTED)
        for n, (state, why) in enumerate(states)
    )
    device = replace(NODE.devices[0], slices=slices)
    monkeypatch.setitem(globals(), "NODE", replace(NODE, devices=(device,)))
    said = run(tmp_path, "status").stdout.replace("\n", " ")
    name = "node0-gpu0-1g.5gb"
    assert f"{name}-0, {name}-1 failed: {dims}" in said
    assert f"{name}-2 failed: start: no port; " in said
    assert f"{name}-3 failed: its agent gives no reason" in said
    assert f"{name}-4 failed" not in said
    assert f"{name}-5 failed" not in said


def test_status_says_what_is_served_and_saved_and_where_metrics_are(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "status")
    assert found["metrics"] == {"controller": "http://127.0.0.1:2/metrics"}
    whole, gold = found["served"]["by_class"]
    assert (whole["slo_attainment"], whole["grams_per_request"], whole["joules_per_request"]) == (0.963, 0.0021, None)
    assert (gold["slo_class"], gold["rate_per_s"], gold["latency_ms_p95"], gold["slo_attainment"]) == (
        "gold",
        0.0,
        None,
        None,
    )
    assert found["saving"]["saving_pct"] == pytest.approx(100 * (1 - 10 / 14))
    assert (found["saving"]["requests"], found["saving"]["basis"]) == (1000, "digits-l everywhere")
    said = run(tmp_path, "status").stdout
    for part in ("http://127.0.0.1:2/metrics", "last 60 s", "96.3%", "2.100", "30 ms", "+28.6 % against modelled BASE"):
        assert part in said


def test_status_shows_tokens_of_families_that_stream_and_withholds_a_saving_where_they_came_too_late(
    tmp_path: Path, running: Running
) -> None:
    assert document(tmp_path, "status")["served"]["by_class"][0]["tokens"] is None
    assert "TTFT" not in run(tmp_path, "status").stdout
    running.tokens = controller_pb2.ServedTokens(
        tokens=5120, prompt_tokens=700, ttft_ms=400.0, ttft_quantile=0.95, ttft_ms_p95=312.5, ttft_attainment=0.981,
        tpot_ms_p95=21.5, joules_per_token=0.512,
    )  # fmt: skip
    found = document(tmp_path, "status")
    tokens = found["served"]["by_class"][0]["tokens"]
    assert (tokens["tokens"], tokens["ttft_attainment"], tokens["tpot_attainment"]) == (5120, 0.981, None)
    assert (tokens["joules_per_token"], tokens["grams_per_token"]) == (0.512, None)
    assert found["saving"]["withheld"] == ""
    said = run(tmp_path, "status").stdout
    for part in ("5,120", "700", "312.5 ms (400 ms)", "98.1% (95.0%)", "21.5 ms", "0.512"):
        assert part in said
    running.tokens.ttft_attainment = 0.94
    assert document(tmp_path, "status")["saving"]["withheld"] == "digits misses its TTFT"


@pytest.mark.parametrize("totals", [{"base_unknown_s": 3.0}, {"grams": 0.0}], ids=["no model", "no meter"])
def test_a_saving_that_is_not_known_is_null_and_says_why(
    tmp_path: Path, running: Running, totals: dict[str, float]
) -> None:
    one = {"joules": 90.0, "grams": 9.0, "base_joules": 110.0, "base_grams": 11.0, "requests": 500.0, **totals}
    if not one["grams"]:
        one = {"requests": 500.0, "unmeasured_s": 20.0}
    running.totals = {"digits": [one]}
    assert document(tmp_path, "status")["saving"]["saving_pct"] is None
    assert "no saving is shown: " in run(tmp_path, "status").stdout


HOUR = {
    "joules": 90.0,
    "grams": 9.0,
    "base_joules": 110.0,
    "base_grams": 11.0,
    "active_joules": 20.0,
    "receipt_joules": 20.0,
}


@pytest.mark.parametrize(
    ("hour", "attained", "accuracy", "why"),
    [
        (
            {"requests": 1.0, "tenant_requests:(trefoil)": 1.0, "receipt_joules": 0.0},
            1.0,
            0.98,
            "200 more requests are needed (0 of 200)",
        ),
        (
            {"requests": 151.0, "tenant_requests:(trefoil)": 1.0, "receipt_joules": 0.0},
            1.0,
            0.98,
            "50 more requests are needed (150 of 200)",
        ),
        ({"requests": 200.0}, 0.949, 0.98, "digits misses its SLO (94.90% in time, 95.00% asked)"),
        ({"requests": 200.0}, 0.96, 0.9, "digits is below its accuracy floor (0.9000, 0.9700 asked)"),
        (
            {"requests": 200.0, "requests:digits-l": 100.0, "requests:digits-m": 100.0},
            0.96,
            0.98,
            "digits is below its accuracy floor (0.9510, 0.9700 asked)",
        ),
        ({"requests": 200.0, "requests:digits-l": 200.0}, 0.96, 0.9, ""),
        ({"requests": 200.0}, 0.95, 0.97, ""),
    ],
    ids=["the probe of up", "too few", "SLO", "floor of the minute", "floor of the mean", "mean of a budget", "enough"],
)
def test_no_saving_stands_before_enough_requests_nor_beside_a_missed_slo_or_floor(
    tmp_path: Path,
    running: Running,
    hour: dict[str, float],
    attained: float,
    accuracy: float,
    why: str,
) -> None:
    running.accuracies = {"digits/digits-l": 0.972, "digits/digits-m": 0.93}
    running.totals, running.attained, running.accuracy = {"digits": [HOUR | hour]}, attained, accuracy
    saving = document(tmp_path, "status")["saving"]
    assert saving["withheld"] == why
    said = run(tmp_path, "status").stdout.replace("\n", " ")
    if not why:
        assert saving["saving_pct"] == pytest.approx(100 * (1 - 9 / 11))
        assert "+18.2 % against modelled BASE" in said
        return
    assert saving["saving_pct"] is None
    assert f"no saving is shown: {why}" in said
    assert " % against" not in said
    assert "-100" not in said


def test_top_prints_one_frame_and_the_same_as_json(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "top", "--once")
    assert found["decisions"][-1]["id"] == "1.000005"
    assert found["served"]["by_class"][0]["rate_per_s"] == 20.0
    said = run(tmp_path, "top", "--once").stdout
    for part in ("7g.40gb digits-l", "249 g/kWh", "modelled BASE", "plan 1.3 of exact", "slo: it moved", "gold"):
        assert part in said
    assert "add --once" in run(tmp_path, "top", "--json").stderr


def test_plan_since_lists_decisions_with_what_came_of_them(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "plan", "--since", "1970-01-01T00:02Z")["decisions"]
    assert [(one["id"], one["plan"], one["came_of_it"]) for one in found] == [
        ("1.000002", "1.2", "superseded"),
        ("1.000003", "1.3", "carried out"),
        ("1.000004", "", "unchanged"),
        ("1.000005", "1.4", "carried out"),
    ]
    assert "superseded" in run(tmp_path, "plan", "--since", "1970-01-01").stdout
    assert "no decision since" in run(tmp_path, "plan", "--since", "1min").stdout
    assert "not a time" in run(tmp_path, "plan", "--since", "yesterday").stderr


def test_status_shows_what_fails_also_when_it_is_the_controller(
    tmp_path: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = StatePaths(tmp_path)
    paths.write_process("redis", None, Failing(12, "exit code 1", "no [moon]", 1e12))
    said = run(tmp_path, "status").stdout
    assert "redis fails: it ended 12 times in a row, last with exit code 1" in said
    assert "no [moon]" in said
    assert "mode act" in said

    async def gone(*_: Any) -> Any:
        raise Unavailable("nobody listens")

    monkeypatch.setattr(SystemClient, "call", gone)
    paths.write_process("redis", None, None)
    paths.write_process("controller", None, Failing(1, "signal 9", "killed", 0.0))
    found = document(tmp_path, "status")
    assert found["failing"] == {"controller": {"ends": 1, "how": "signal 9", "last_error": "killed", "again_at_s": 0.0}}
    assert "nobody listens" in found["unknown"]
    said = run(tmp_path, "status").stdout
    assert "the rest is not known: nobody listens" in said
    assert "controller fails: it ended with signal 9, started again: killed" in said


def test_plan_says_why_and_its_json_can_be_pinned(tmp_path: Path, running: Running) -> None:
    said = run(tmp_path, "plan").stdout
    for part in ("plan 1.3", "carbon fell", "7g.40gb digits-l", "100.0 %"):
        assert part in said
    file = tmp_path / "plan.json"
    file.write_text(run(tmp_path, "plan", "--json").stdout)
    assert document(tmp_path, "pin", str(file))["pinned"] is True
    method, request = running.asked[-1]
    assert method == "Pin"
    assert codec.from_proto(request.plan) == PLAN


def test_pin_off_unpins(tmp_path: Path, running: Running) -> None:
    assert document(tmp_path, "pin", "--off")["pinned"] is False
    assert not running.asked[-1][1].HasField("plan")


@pytest.mark.parametrize(
    ("text", "said"),
    [("{", "not JSON"), ("[" * 200_000, "nested too deeply"), ('{"plan": {"nonsense": 1}}', "nonsense")],
    ids=["torn", "deep", "strange"],
)
def test_a_malformed_plan_file_is_refused(tmp_path: Path, running: Running, text: str, said: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(text)
    result = run(tmp_path, "pin", str(file))
    assert result.exit_code == 2
    assert said in result.stderr
    assert running.asked == []


def test_budgets_are_set_and_shown_with_what_is_spent(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "budget", "set", "--tenant", "acme", "--grams-per-day", "500")["budget"]
    assert codec.from_proto(running.asked[-1][1].budget) == Budget("acme", grams_per_day=500.0, time_zone="UTC")
    assert (found["tenant"], found["used"], found["rung"]) == ("acme", 0.0, "within")
    assert "check the names" in run(tmp_path, "budget", "set", "--tenant", "acme", "--grams-per-day", "5").stdout
    assert "as in the settings" in run(tmp_path, "budget", "set", "--tenant", "acme", "--reset").stdout
    rows = document(tmp_path, "budget", "list")["budgets"]
    assert [(row["tenant"], row["family"], row["used"]) for row in rows] == [("acme", "", 1.01), ("", "digits", None)]
    text = run(tmp_path, "budget", "list").stdout
    assert [word for word in ("505 of 500", "refused", "not metered") if word not in text] == []
    assert document(tmp_path, "budget", "show", "--family", "digits")["budgets"] == rows[1:]
    assert document(tmp_path, "budget", "clear", "--tenant", "acme") == {"cleared": {"tenant": "acme", "family": ""}}
    said = run(tmp_path, "status").stdout
    assert "requests are refused: budget of acme, 500 g a day: 101% spent, refused" in said
    assert "budget of all tenants on digits, 2000000 J a day: nothing was metered, within" in said


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("set", "--tenant", "acme", "--grams-per-day", "0"), "--grams-per-day = 0.0: must be above 0"),
        (("set", "--tenant", "acme", "--grams-per-day", "-5"), "--grams-per-day = -5.0: must be above 0"),
        (("set", "--tenant", "acme", "--joules-per-day", "nan"), "--joules-per-day = nan: must be above 0"),
        (("set", "--tenant", "acme", "--grams-per-day", "5", "--reset"), "--reset: goes back to the settings"),
        (("show", "--tenant", "acne"), "did you mean acme?"),
    ],
)
def test_a_budget_that_cannot_be_is_refused_before_it_is_sent(
    tmp_path: Path, running: Running, given: tuple[str, ...], named: str
) -> None:
    result = run(tmp_path, "budget", *given)
    assert result.exit_code == 2
    assert named in result.stderr
    assert [method for method, _ in running.asked if method == "SetBudget"] == []


def test_objective_set_changes_only_what_is_given(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "objective", "set", "--accuracy-floor", "0.98", "--slo-percentile", "99")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert (sent.min_accuracy, sent.slo_quantile, sent.slo_ms) == (0.98, 0.99, 75)
    assert running.changed().expected_number == 4
    assert not running.asked[-1][1].HasField("max_watts")
    assert found["degraded"] == "watt_cap: too few watts"
    assert (
        "cannot meet it: watt_cap: too few watts" in run(tmp_path, "objective", "set", "--slo-latency-ms", "2").stdout
    )


def test_objective_set_brings_a_family_into_service_by_its_floor(tmp_path: Path, running: Running) -> None:
    refused = run(tmp_path, "objective", "set", "--family", "new", "--slo-latency-ms", "70")
    assert refused.exit_code == 2
    assert [method for method, _ in running.asked] == ["GetObjectives"]
    run(tmp_path, "objective", "set", "--family", "new", "--accuracy-floor", "0.9")
    assert running.changed().expected_number == 0
    wanted = codec.from_proto(running.changed().objective)
    assert wanted == Objective("new", ObjectiveMode.BUDGET, min_accuracy=0.9)


def test_objective_set_chooses_type_and_window(tmp_path: Path, running: Running) -> None:
    document(tmp_path, "objective", "set", "--type", "budget", "--window-s", "3600")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert (sent.mode, sent.window_s, sent.min_accuracy) == (ObjectiveMode.BUDGET, 3600.0, 0.97)
    document(tmp_path, "objective", "set", "--type", "instant")
    assert running.changed().objective.mode == ObjectiveMode.INSTANT
    document(tmp_path, "objective", "set", "--type", "lambda")  # as much weight as it had, or the controller's default
    assert running.changed().objective.mode == ObjectiveMode.LAMBDA


def test_objective_show_says_what_each_floor_binds_and_the_cap(tmp_path: Path, running: Running) -> None:
    said = run(tmp_path, "objective", "show").stdout
    assert "cats: p95 <= 75 ms; accuracy >= 0.9700 at every instant (number 2)" in said
    assert "digits: p95 <= 75 ms; accuracy >= 0.9700 in the mean of 24 h, not at every instant (never < 0.9000)" in said
    assert "fleet: 900 W at most" in said
    told = run(tmp_path, "status").stdout
    assert "accuracy >= 0.9700 in the mean of 24 h, not at every instant" in told
    assert "fleet: 900 W at most" in told
    found = document(tmp_path, "objective", "show", "--family", "digits")
    assert [each["family"] for each in found["objectives"]] == ["digits"]
    assert found["max_watts"] == 900.0
    assert "one of: cats, digits" in run(tmp_path, "objective", "show", "--family", "dogs").stderr


def test_the_cap_of_the_fleet_is_set_taken_away_and_shown(tmp_path: Path, running: Running) -> None:
    said = run(tmp_path, "objective", "fleet", "--max-watts", "700").stdout
    assert "fleet: 700 W at most" in said
    assert "the fleet cannot meet it: watt_cap: too few watts" in said
    assert document(tmp_path, "objective", "fleet", "--no-max-watts")["max_watts"] is None
    assert (running.asked[-1][0], running.asked[-1][1].max_watts) == ("SetObjectives", 0.0)
    assert running.asked[-1][1].HasField("max_watts")
    assert document(tmp_path, "objective", "fleet") == {"max_watts": 900.0}


def test_objectives_of_a_file_are_sent_together(tmp_path: Path, running: Running) -> None:
    file = tmp_path / "objectives.toml"
    file.write_text(
        "[fleet]\nmax_watts = 650\n[families.digits]\naccuracy.floor = 0.98\n"
        '[families.cats]\ntype = "budget"\nwindow_s = 7200\nslo.percentile = 99\nparams = {credits = 3}\n'
    )
    found = document(tmp_path, "objective", "set", "--file", str(file))
    method, request = running.asked[-1]
    assert [method for method, _ in running.asked] == ["GetObjectives", "SetObjectives"]
    assert (method, request.max_watts, len(request.objectives)) == ("SetObjectives", 650.0, 2)
    digits, cats = (codec.from_proto(each.objective) for each in request.objectives)
    assert (digits.min_accuracy, digits.slo_ms) == (0.98, 75)
    assert (cats.mode, cats.window_s, cats.slo_quantile, cats.params) == (
        ObjectiveMode.BUDGET,
        7200,
        0.99,
        {"credits": 3},
    )
    assert [each.expected_number for each in request.objectives] == [4, 2]
    assert [each["family"] for each in found["objectives"]] == ["digits", "cats"]


@pytest.mark.parametrize(("text", "words"), [
    ("[families.digits]\nslo.latency_ms = -3", ("objectives.toml", "families.digits.slo.latency_ms = -3")),
    ("[families.digits]\nslo_ms = 3", ("objectives.toml", "families.digits.slo_ms", "set slo.latency_ms")),
    ("[families.dogs]\nslo.latency_ms = 3", ("objectives.toml", "families.dogs", "one of: cats, digits")),
    ("[families.digits]\ntype = 'instant'\nwindow_s = 9", ("objectives.toml", "family digits", "window_s", "budget")),
    ("[families.digits]\naccuracy.floor = 0.98\n[families.cats]\nslo.latency_ms = 1",
     ("objectives.toml", "family cats: slo_ms")),
    ("", ("objectives.toml", "says nothing")),
])  # fmt: skip
def test_a_file_of_objectives_that_is_wrong_somewhere_changes_nothing(
    tmp_path: Path, running: Running, text: str, words: tuple[str, ...]
) -> None:
    file = tmp_path / "objectives.toml"
    file.write_text(text)
    result = run(tmp_path, "objective", "set", "--file", str(file))
    assert result.exit_code == 2
    assert all(word in result.stderr for word in words), result.stderr
    assert result.stderr.count("\n") == 1
    only_the_controller_knows = words[-1] == "family cats: slo_ms"
    assert ("SetObjectives" in {method for method, _ in running.asked}) == only_the_controller_knows


def test_objectives_of_tokens_are_set_changed_and_taken_back(tmp_path: Path, running: Running) -> None:
    file = tmp_path / "objectives.toml"
    changes = (
        (("--slo-ttft-ms", "400", "--slo-tpot-ms", "30"), (400.0, 0.0, 30.0, 0.0)),
        (("--slo-tpot-percentile", "90"), (0.0, 0.0, 0.0, 0.9)),
        (("--no-slo-tokens",), (0.0, 0.0, 0.0, 0.0)),
        (("--file", str(file)), (250.0, 0.99, 0.0, 0.0)),
    )
    file.write_text("[families.digits]\nslo.ttft_ms = 250\nslo.ttft_percentile = 99\n")
    for flags, wanted in changes:
        document(tmp_path, "objective", "set", *flags)
        sent: Objective = codec.from_proto(running.changed().objective)
        assert (sent.ttft_ms, sent.ttft_quantile, sent.tpot_ms, sent.tpot_quantile) == pytest.approx(wanted)
        assert sent.slo_ms == 75


def test_lambda_selects_lambda_mode(tmp_path: Path, running: Running) -> None:
    document(tmp_path, "objective", "set", "--lambda", "0.1")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert (sent.mode, sent.lambda_weight) == (ObjectiveMode.LAMBDA, 0.1)


@pytest.mark.parametrize("flags", [[], ["--lambda", "0.1", "--accuracy-floor", "0.9"], ["--accuracy-floor", "1.5"],
    ["--type", "hourly"], ["--type", "instant", "--window-s", "60"], ["--type", "budget", "--lambda", "0.1"],
    ["--slo-latency-ms", "60", "--file", "objectives.toml"], ["--slo-ttft-ms", "0"], ["--slo-tpot-ms", "nan"],
    ["--slo-ttft-ms", "60", "--no-slo-tokens"], ["--slo-tpot-percentile", "100"],
])  # fmt: skip
def test_objective_set_refuses_what_means_nothing(tmp_path: Path, running: Running, flags: list[str]) -> None:
    result = run(tmp_path, "objective", "set", *flags)
    assert result.exit_code == 2
    assert not [method for method, _ in running.asked if method == "SetObjectives"]


def test_a_hard_floor_never_lies_above_the_floor(tmp_path: Path, running: Running) -> None:
    document(tmp_path, "objective", "set", "--accuracy-floor", "0.8")
    sent: Objective = codec.from_proto(running.changed().objective)
    assert sent.hard_min_accuracy == 0.8


def test_replan_says_what_came_of_it(tmp_path: Path, running: Running) -> None:
    found = document(tmp_path, "replan", "--cause", "carbon", "--why", "rehearsal")
    assert (running.asked[-1][1].cause, found["outcome"], found["decision"]) == ("carbon", "unchanged", "1.000007")
    assert "why: asked for: rehearsal" in run(tmp_path, "replan", "--why", "rehearsal").stdout


def test_rollout_says_how_far_it_is(tmp_path: Path, running: Running) -> None:
    assert document(tmp_path, "rollout")["rollout"]["step"] == 2
    said = run(tmp_path, "rollout").stdout
    for part in ("waiting_ready, step 2 of 3", "moving: ", "7g.40gb", "40.0/s for digits", "spent: 512 J"):
        assert part in said


def test_a_decision_is_shown_by_its_id_and_the_newest_as_last(tmp_path: Path, running: Running) -> None:
    assert document(tmp_path, "plan", "--decision", "1.000003")["decision"]["id"] == "1.000003"
    said = run(tmp_path, "plan", "--decision", "last").stdout
    for part in ("decision 1.000009", "trigger carbon", "7g.40gb digits-l", "it rose", "trefoil replay 1.000009"):
        assert part in said


@pytest.mark.parametrize("mode", ["observe", "advise", "act"])
def test_mode(tmp_path: Path, running: Running, mode: str) -> None:
    assert document(tmp_path, "mode", mode) == {"mode": mode}


def test_an_unknown_mode_names_those_that_exist(tmp_path: Path, running: Running) -> None:
    result = run(tmp_path, "mode", "panic")
    assert result.exit_code == 2
    assert "observe, advise, act" in result.stderr


def test_reset_goes_back_to_the_settings(tmp_path: Path, running: Running) -> None:
    run(tmp_path, "objective", "set", "--family", "digits", "--reset")
    change = running.changed()
    assert (change.objective.family, change.objective.slo_ms, change.reset) == ("digits", 0.0, True)
    run(tmp_path, "objective", "fleet", "--reset")
    method, request = running.asked[-1]
    assert (method, request.reset_max_watts, request.HasField("max_watts")) == ("SetObjectives", True, False)
    assert document(tmp_path, "mode", "--reset") == {"mode": "advise"}
    assert (running.asked[-1][1].mode, running.asked[-1][1].reset) == (0, True)


@pytest.mark.parametrize(
    "words",
    [
        ["objective", "set", "--reset", "--slo-latency-ms", "90"],
        ["objective", "set", "--reset", "--file", "objectives.toml"],
        ["objective", "fleet", "--reset", "--max-watts", "900"],
        ["objective", "fleet", "--reset", "--no-max-watts"],
        ["mode", "act", "--reset"],
        ["mode"],
    ],
    ids=" ".join,
)
def test_a_reset_and_a_value_are_refused_together(tmp_path: Path, running: Running, words: list[str]) -> None:
    result = run(tmp_path, *words)
    assert result.exit_code == 2
    assert "--reset" in result.stderr
    assert running.asked == []


def test_freeze_and_thaw(tmp_path: Path, running: Running) -> None:
    assert document(tmp_path, "freeze")["frozen"] is True
    assert document(tmp_path, "freeze", "--off")["frozen"] is False


def test_rollback(tmp_path: Path, running: Running) -> None:
    assert "back to 1.2" in run(tmp_path, "rollback").stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--profile", "0:26;10"], "--profile"),
        (["--batch", "a"], "--batch"),
        (["--images", "/nowhere.npz"], "nowhere.npz"),
        (["--trace", "/nowhere.csv"], "nowhere.csv"),
        (["--address", "127.0.0.1:1"], "--address"),
    ],
)
def test_load_names_what_is_wrong(tmp_path: Path, running: Running, flags: list[str], named: str) -> None:
    result = run(tmp_path, "load", *flags)
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_bad_setting_stops_up_with_one_line(tmp_path: Path) -> None:
    result = run(tmp_path, "up", "--set", "polcy=exact")
    assert result.exit_code == 2
    assert "polcy" in result.stderr


def test_an_unknown_policy_is_refused_by_name(tmp_path: Path) -> None:
    result = run(tmp_path, "up", "--policy", "magic", "--port-offset", "20000")
    assert result.exit_code == 2
    assert "magic" in result.stderr
    assert not (tmp_path / "lock").exists()


def test_demo_refuses_a_bad_scenario(tmp_path: Path) -> None:
    config = tmp_path / "demo.toml"
    config.write_text("policies = ['base']\n")
    result = CliRunner().invoke(app, ["demo", "--config", str(config), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "exact" in result.stderr
    assert not (tmp_path / "out").exists()


def test_replay_without_decisions_is_named(tmp_path: Path) -> None:
    result = run(tmp_path, "replay")
    assert result.exit_code == 2
    assert "decisions" in result.stderr


def test_explain_request_names_the_slice_the_scores_and_the_reasons(tmp_path: Path, running: Running) -> None:
    told = document(tmp_path, "explain-request", "trefoil_min_accuracy=0.95", "priority=1")
    assert running.asked == [("digits", {"trefoil_min_accuracy": "0.95", "priority": "1"})]
    assert (told["router"], told["waiting"], told["table"]["number"]) == ("weighted", 3, 3)
    assert [(row["eligible"], row["score"]) for row in told["targets"]] == [(True, 0.25), (True, None), (False, None)]
    said = run(tmp_path, "explain-request").stdout
    assert said.startswith("goes to node0/gpu0 at once")
    assert "ejected" in said
    assert run(tmp_path, "explain-request", "nonsense").exit_code == 2


def test_objective_set_takes_constants_of_the_policy_and_takes_them_back(tmp_path: Path, running: Running) -> None:
    told = document(tmp_path, "objective", "set", "--param", "credits=3", "--param", "accuracy_margin=0.05")
    assert told["objective"]["params"] == {"credits": 3.0, "accuracy_margin": 0.05}
    told = document(tmp_path, "objective", "set", "--param", "accuracy_margin=0", "--slo-latency-ms", "80")
    assert told["objective"]["params"] == {}
    wrong = run(tmp_path, "objective", "set", "--param", "accuracy_margin=much")
    assert wrong.exit_code == 2
    assert "accuracy_margin" in wrong.output

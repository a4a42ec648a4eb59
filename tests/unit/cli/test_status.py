"""`trefoil status`, `top`, `plan` and `rollout`: what they say of a running system, as text and as JSON."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from protos.controller.v1 import controller_pb2
from tests.support import running_system
from tests.support.running_system import HOSTED, KEY, NODE, PLAN, ROLLOUT, Running, document, run
from trefoil.cli.run.state_directory import SERVICES, Failing, StatePaths
from trefoil.cli.system_client import SystemClient
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import (
    FAILED_LAST,
    SliceState,
    SliceStatus,
)
from trefoil.core.plan import Expected, Route
from trefoil.overview.served import order_lines
from trefoil.runtime import codec


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
    carbon = "249 g/kWh (simulated: mean of 4 h, replayed 12 times as fast); over its mean: 0.87"
    assert carbon in said.replace("\n", " ")
    running.ratio = None
    assert document(tmp_path, "status")["carbon_ratio"][0]["ratio"] is None
    assert "over its mean: not known, routers that go by it do without" in run(tmp_path, "status").stdout


@pytest.mark.parametrize(
    "place", ["carbon_feed/epoch.json.bad", "dispatcher/dispatcher/table.jsonl.bad.1", "agent/journal.jsonl.bad"]
)
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
    monkeypatch.setattr(running_system, "NODE", replace(NODE, devices=(device,)))
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


def test_status_says_what_shortest_first_gains_and_that_nothing_is_gained_until_requests_queue(
    tmp_path: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    running.waits = controller_pb2.Served(waited_share=0.0, wait_ms_mean=3.0, length_cv=1.0)
    assert "shortest first" not in run(tmp_path, "status").stdout, "its queue is first come, first served"
    routes = (Route("digits", "weighted", "ssjf"),)
    plan = replace(PLAN, routes=routes, expected={"digits": Expected(capacity_per_s=25.0)})
    monkeypatch.setattr(running_system, "PLAN", plan)
    said = " ".join(run(tmp_path, "status").stdout.split())
    assert "shortest first for digits: no answer of the last 60 s waited for a place" in said
    assert "nothing is gained until requests queue" in said
    running.waits = controller_pb2.Served(waited_share=0.25, wait_ms_mean=340.0, length_cv=1.0)
    said = " ".join(run(tmp_path, "status").stdout.split())
    assert "25.0% of the answers of the last 60 s waited for a place, the mean wait of all was 340 ms" in said
    assert "at 80% of capacity it saves at most 47% of the wait" in said
    empty = replace(plan, expected={"digits": Expected(capacity_per_s=0.0)})
    monkeypatch.setattr(running_system, "PLAN", empty)
    assert "shortest first for digits: its capacity is not known" in " ".join(run(tmp_path, "status").stdout.split())
    running.waits = controller_pb2.Served(waited_share=0.25, wait_ms_mean=340.0)
    assert "shortest first" not in run(tmp_path, "status").stdout, "its answers have no lengths"


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
    for text, why in (("yesterday", "not a time"), ("999999d", "not a time"), ("1969-12-31", "before 1970")):
        assert f"--since = '{text}': {why}" in run(tmp_path, "plan", "--since", text).stderr


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


def test_rollout_says_how_far_it_is(tmp_path: Path, running: Running) -> None:
    running.rollout = ROLLOUT
    assert document(tmp_path, "rollout")["rollout"]["step"] == 2
    said = run(tmp_path, "rollout").stdout
    for part in ("waiting_ready, step 2 of 3", "moving: ", "7g.40gb", "40.0/s for digits", "spent: 512 J"):
        assert part in said


def test_a_decision_is_shown_by_its_id_and_the_newest_as_last(tmp_path: Path, running: Running) -> None:
    assert document(tmp_path, "plan", "--decision", "1.000003")["decision"]["id"] == "1.000003"
    said = run(tmp_path, "plan", "--decision", "last").stdout
    for part in ("decision 1.000009", "trigger carbon", "7g.40gb digits-l", "it rose", "trefoil replay 1.000009"):
        assert part in said


def test_explain_request_names_the_slice_the_scores_and_the_reasons(tmp_path: Path, running: Running) -> None:
    told = document(tmp_path, "explain-request", "trefoil_min_accuracy=0.95", "priority=1")
    assert running.asked == [("digits", {"trefoil_min_accuracy": "0.95", "priority": "1"})]
    assert (told["router"], told["waiting"], told["table"]["number"]) == ("weighted", 3, 3)
    assert [(row["eligible"], row["score"]) for row in told["targets"]] == [(True, 0.25), (True, None), (False, None)]
    said = run(tmp_path, "explain-request").stdout
    assert said.startswith("goes to node0/gpu0 at once")
    assert "ejected" in said
    assert run(tmp_path, "explain-request", "nonsense").exit_code == 2


def test_what_shortest_first_saves_is_not_known_without_a_rate() -> None:
    row = {"family": "digits", "slo_class": "", "waited_share": 0.25, "length_cv": 1.0, "rate_per_s": None}
    found = {
        "served": {"window_s": 60.0, "by_class": [{**row, "wait_ms_mean": 340.0}]},
        "queues": {"digits": "ssjf"},
        "capacity_per_s": {"digits": 25.0},
    }
    assert order_lines(found) == ["shortest first for digits: its rate is not known, nor what that saves"]

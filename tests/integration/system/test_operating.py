"""Each command on the running system, as a user types it; what it says is what then happens."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.system.conftest import DEMAND_PER_S, Serving, wanted
from tests.support.system import load, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]  # dozens of commands, each a process

RATE_PER_S = 24.0
CHANGES_WITHIN_S = 60.0


def shares(answer: dict[str, Any]) -> dict[str, float]:
    """Planned share of each variant."""
    (route,) = answer["plan"]["routes"]
    total: dict[str, float] = {}
    for target in route["targets"]:
        total[target["variant"]] = total.get(target["variant"], 0.0) + target["weight"]
    return total


def number(answer: dict[str, Any]) -> tuple[int, int]:
    revision = answer["plan"]["revision"]
    return revision["epoch"], revision["number"]


def test_status_shows_what_runs_and_that_it_is_simulated(serving: Serving):
    names = {"carbon_feed", "controller", "power_agent", "dispatcher"}
    assert serving.system.wait_for_services().keys() == names
    status = serving.system.ask("status")
    assert (status["mode"], status["frozen"], status["rollout"]) == ("act", True, "done")
    (node,) = status["nodes"]
    assert node["simulated"]
    states = [part["state"] for device in node["devices"] for part in device["slices"]]
    assert states == ["READY"] * len(states)
    (reading,) = status["carbon"]
    assert reading["simulated"]
    assert reading["intensity_g_per_kwh"] > 0
    shown = serving.system.run("status").stdout
    assert "SIMULATED" in shown
    assert "digits-l" in shown


def test_plan_says_why_in_words_and_numbers(serving: Serving):
    answer = serving.system.ask("plan")
    assert shares(answer) == pytest.approx({"digits-l": 0.82, "digits-m": 0.18}, abs=0.15)
    assert f"{DEMAND_PER_S:.1f}/s" in answer["why"]
    expected = answer["expected"]
    assert expected["capacity_per_s"] > 60
    assert expected["accuracy"] > 0.97
    shown = serving.system.run("plan").stdout
    assert f"plan {number(answer)[0]}.{number(answer)[1]} of policy exact" in shown
    assert "why: " in shown


def test_state_dump_shows_every_key_decoded(serving: Serving):
    found = serving.system.ask("state", "dump")
    families = {key.split(":")[0] for key in found}
    assert families >= {"epoch", "lease", "carbon", "objective", "plan", "rollout", "decisions", "node", "energy",
                        "load", "ack", "writes"}  # fmt: skip
    assert found["plan"]["policy"] == "exact"
    assert found["node:node0"]["node"] == "node0"
    assert all(entry["simulated"] for entry in found["energy:node0"])
    assert set(serving.system.ask("state", "dump", "plan:")) == {"plan:node:node0"}


def test_load_checks_every_answer(serving: Serving):
    honest = serving.system.ask("load", "--rate", "40", "--duration", "4")
    assert honest["failed"] == 0
    assert honest["accuracy"] > 0.95
    assert set(honest["variant_shares"]) == {"digits-m", "digits-l"}
    permuted = serving.system.ask("load", "--rate", "40", "--duration", "4", "--permute-labels")
    print(f"accuracy {honest['accuracy']:.3f}; with permuted labels {permuted['accuracy']:.3f}")
    assert permuted["failed"] == 0
    assert 0.02 < permuted["accuracy"] < 0.20  # 10 classes; four standard deviations of 160 draws


@pytest.mark.gate
async def test_objective_mode_rollback_and_pin_steer_the_running_system_without_a_failed_request(serving: Serving):
    """Under load throughout: whatever an operator does, requests continue being answered."""
    system = serving.system

    def say(*words: str) -> "asyncio.Future[Any]":
        return asyncio.ensure_future(asyncio.to_thread(system.ask, *words))

    async def replanned(check: Any) -> dict[str, Any]:
        async def done() -> dict[str, Any] | None:
            answer = await say("plan")
            return answer if answer["rollout"]["state"] == "DONE" and check(answer) else None

        found: dict[str, Any] = await until(done, CHANGES_WITHIN_S, "no such plan within")
        return found

    enough = asyncio.Event()
    loading = asyncio.create_task(load(system.inference, RATE_PER_S, 4 * CHANGES_WITHIN_S, stop=enough))
    try:
        await asyncio.sleep(3.0)
        assert (await say("freeze", "--off"))["frozen"] is False
        before = next(o for o in (await say("objective", "show"))["objectives"] if o["family"] == "digits")
        strict = await say("objective", "set", "--accuracy-floor", "0.992", "--slo-latency-ms", "120")
        assert strict["objective"]["number"] > before["number"]
        assert strict["degraded"] == ""
        tight = await replanned(  # the plan that keeps the floor, not the first that looks like it
            lambda a: shares(a).get("digits-l", 0.0) > 0.9 and a["expected"]["accuracy"] >= 0.992 - 1e-6
        )
        assert number(tight) > number(serving.first_plan)

        out_of_reach = await say(
            "objective", "set", "--slo-latency-ms", "12"
        )  # below one execution of the best variant
        assert out_of_reach["degraded"]
        await say("objective", "set", "--accuracy-floor", str(before["min_accuracy"]), "--slo-latency-ms", "100")

        assert (await say("mode", "observe"))["mode"] == "observe"
        assert (await say("status"))["mode"] == "observe"
        assert (await say("mode", "act"))["mode"] == "act"

        await say("freeze")
        frozen = await replanned(lambda answer: answer["frozen"])
        back = await say("rollback")
        rolled = await replanned(lambda answer: number(answer) > number(frozen))
        assert "rolled back" in back["why"]
        assert rolled["frozen"]
        assert wanted(rolled) != wanted(frozen)

        await asyncio.to_thread(system.pin, serving.first_plan)
        pinned = await replanned(lambda answer: answer["pinned"])
        assert wanted(pinned) == wanted(serving.first_plan)
        enough.set()
        result = await loading
    finally:
        loading.cancel()
    summary = result.summary(slo_ms=100.0)
    print(f"{summary.requests} requests, {summary.failed} failed, accuracy {summary.accuracy:.3f}, "
          f"attainment {summary.slo_attainment:.3f}")  # fmt: skip
    assert (await say("pin", "--off"))["pinned"] is False
    assert summary.failed == 0, summary.failed_by_code


def test_bad_input_is_one_line_and_changes_nothing(serving: Serving, tmp_path: Path):
    system = serving.system
    before = wanted(system.ask("plan"))
    nonsense = tmp_path / "nonsense.json"
    nonsense.write_text('{"plan": {"nodes": "all of them"}}')
    refusals = {
        ("mode", "sometimes"): "observe, advise, act",
        ("objective", "set", "--accuracy-floor", "0.999"): "at most 0.993311",
        ("objective", "set", "--lambda", "0.1", "--accuracy-floor", "0.9"): "--lambda",
        ("pin", str(nonsense)): "nodes",
        ("replay", "9.999999"): "no such decision",
    }
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda words: system.refused(*words), refusals))
    for line, expected in zip(said, refusals.values(), strict=True):
        assert expected in line
    assert wanted(system.ask("plan")) == before


@pytest.mark.gate
def test_a_second_system_on_the_same_folder_or_ports_is_refused_before_anything_starts(
    serving: Serving, tmp_path: Path
):
    system = serving.system
    offset = ("--port-offset", str(system.port_offset))
    attempts = {
        ("up", *offset): (system.state_dir, "already running"),
        ("up", *offset, "--set", "cluster=other"): (tmp_path / "other", "in use"),
        ("up", "--set", "colour=green"): (tmp_path / "green", "colour"),
        ("status",): (tmp_path / "none", "no system is running there"),
    }
    with ThreadPoolExecutor(2) as pool:
        said = list(pool.map(lambda item: system.refused(*item[0], state_dir=item[1][0]), attempts.items()))
    for line, (_, expected) in zip(said, attempts.values(), strict=True):
        assert expected in line
    assert not list(tmp_path.glob("*/run/*.json"))
    assert all(system.wait_for_services().values())

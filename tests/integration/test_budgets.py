"""What a tenant meets at a dispatcher once its budget is spent: on gRPC, on REST and with jobs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tritonclient.utils import InferenceServerException

from dispatcher.request.core.tenants import digest
from protos.dispatcher.v1 import jobs_pb2
from tests.support.dispatching import DispatcherSystem, dispatcher_system, image, until
from tests.support.fake_triton import FakeTriton
from tests.support.job_serving import Jobs, item, jobs_of
from trefoil.core.jobs.planned import OpenJobs
from trefoil.core.objective import BudgetRung, TenantRung, TenantRungs
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.plan_keys import PlanKeys, routes_key
from trefoil.runtime.state import State

pytestmark = pytest.mark.integration
KEY = "k" * 40
TENANTS = "".join(f'[[tenant]]\nname = "{name}"\ntoken_sha256 = "{digest(name)}"\n' for name in ("acme", "other"))


class Budgets:
    """Publishes rungs as the controller does, and asks as tenants."""

    def __init__(self, system: DispatcherSystem) -> None:
        self.system, self.keys = system, PlanKeys("")

    async def set(self, *rungs: TenantRung, epoch: int = 1) -> None:
        told = self.keys.sign_rungs(TenantRungs(rungs, epoch, WallClock().now_s()))
        await self.system.plane.put("controller", self.system.plane.state.keys.tenant_rungs(), told)

    async def acme(self, rung: BudgetRung, **more: Any) -> None:
        """Put acme on a rung, and wait until the dispatcher knows."""
        free_at_s = WallClock().now_s() + 7200.0
        await self.set(TenantRung("acme", "", rung, "500 g a day", free_at_s=free_at_s, **more))
        now, budgets = WallClock().now_s, self.system.local.budgets
        await until(lambda: (found := budgets.find("acme", "digits", now())) and found.rung is rung)

    async def ask(self, tenant: str, **parameters: Any) -> dict[str, Any]:
        """Parameters of an answer."""
        result = await self.system.client.infer(
            "digits", [image(3)], headers={"authorization": f"Bearer {tenant}"},
            parameters={"trefoil_receipt": True} | parameters,
        )  # fmt: skip
        found = result.get_response().parameters
        return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in found.items()}


@pytest.fixture
async def budgets(state, tmp_path: Path) -> AsyncIterator[Budgets]:
    (tmp_path / "tenants.toml").write_text(TENANTS)
    chosen = {"tenants_file": tmp_path / "tenants.toml", "rest_address": "127.0.0.1:0"}
    async with dispatcher_system(state, tmp_path, FakeTriton(version=1), FakeTriton(version=4), **chosen) as system:
        yield Budgets(system)


async def test_a_tenant_is_refused_with_the_time_and_others_are_served(budgets):
    await budgets.acme(BudgetRung.REFUSED)
    system = budgets.system
    says = r"the budget of acme, 500 g a day, is spent\. Remedy: try again at \d{4}-.*Z, in (2 h 0|1 h 59) min"
    with pytest.raises(InferenceServerException, match=says) as refused:
        await budgets.ask("acme")
    assert "RESOURCE_EXHAUSTED" in str(refused.value.status())
    async with httpx.AsyncClient(base_url=f"http://{system.running.rest_address}") as client:
        body = {"inputs": [{"name": "IMAGE", "datatype": "UINT8", "shape": [1, 8, 8], "data": [3] * 64}]}
        headers = {"authorization": "Bearer acme"}
        answer = await client.post("/v2/models/digits/infer", content=json.dumps(body), headers=headers)
    assert answer.status_code == 429
    assert re.search(says, answer.json()["error"])
    assert 7100 < int(answer.headers["retry-after"]) <= 7200
    assert "trefoil_budget_rung" not in await budgets.ask("other")
    totals = system.local.accounting.load.totals["digits"]
    assert (totals.failed, totals.answered) == (0, 1), "what was refused is not demand"
    await budgets.set()
    await until(lambda: system.local.budgets.find("acme", "digits", WallClock().now_s()) is None)
    assert "trefoil_budget_rung" not in await budgets.ask("acme")
    counted = r'trefoil_budget_refusals_total\{[^}]*family="digits"[^}]*tenant="acme"\} 2\.0'
    await until(lambda: re.search(counted, system.running.metrics.text()))


async def test_accuracy_floors_fall_to_what_the_budget_allows_and_receipts_say_so(budgets):
    for _ in range(4):
        assert (await budgets.ask("acme", trefoil_min_accuracy=0.95))["trefoil_variant"] == "digits-l"
    await budgets.acme(BudgetRung.LOWER_ACCURACY, least_accuracy=0.85)
    found = [await budgets.ask("acme", trefoil_min_accuracy=0.95) for _ in range(12)]
    assert {one["trefoil_variant"] for one in found} == {"digits-xs", "digits-l"}
    assert {(one["trefoil_budget_rung"], one["trefoil_min_accuracy"]) for one in found} == {("lower accuracy", 0.85)}
    assert (await budgets.ask("acme", trefoil_min_accuracy=0.5))["trefoil_min_accuracy"] == 0.5, "none is raised"
    assert (await budgets.ask("other", trefoil_min_accuracy=0.95))["trefoil_variant"] == "digits-l"
    await budgets.acme(BudgetRung.JOBS_WAIT)
    assert (await budgets.ask("acme", trefoil_min_accuracy=0.95))["trefoil_variant"] == "digits-l"
    await budgets.acme(BudgetRung.LOWER_ACCURACY)
    assert (await budgets.ask("acme", trefoil_min_accuracy=0.95))["trefoil_variant"] == "digits-l", "not allowed"


async def test_rungs_that_the_controller_has_not_signed_refuse_nobody(budgets):
    system, cluster = budgets.system, budgets.system.plane.state.keys.cluster
    system.running.loop.plan_keys = PlanKeys(cluster, [routes_key(KEY)])
    await budgets.set(TenantRung("acme", "", BudgetRung.REFUSED, free_at_s=WallClock().now_s() + 9e3))
    await until(lambda: "only what is signed is taken here" in system.running.loop.trouble)
    await budgets.ask("acme")
    budgets.keys = PlanKeys(cluster, [KEY])
    await budgets.acme(BudgetRung.REFUSED)


async def test_rungs_of_an_epoch_that_no_controller_led_under_refuse_nobody_and_fence_none(budgets):
    forged = TenantRung("", "digits", BudgetRung.REFUSED, free_at_s=WallClock().now_s() + 9e3)
    await budgets.set(forged, epoch=10**6)
    await until(lambda: "tenant_rungs in Redis = '1000000.0.0'" in budgets.system.running.loop.trouble)
    await budgets.ask("acme")
    await budgets.acme(BudgetRung.REFUSED)


async def open_jobs(jobs: Jobs, state: State) -> list[str]:
    """Jobs that the controller plans."""
    told = await state.get(state.keys.jobs_open(jobs.owner.hours.folder), OpenJobs)
    return [one.job_id for one in told.jobs] if told is not None else []


async def test_jobs_of_a_tenant_wait_and_those_of_others_run(budgets, state):
    system, one = budgets.system, [item(3)]
    await budgets.acme(BudgetRung.JOBS_WAIT)
    async with jobs_of(system.running, state) as jobs:
        await jobs.submit(one, id="a", tenant="acme")
        await jobs.submit(one, id="b", tenant="other")
        assert (await jobs.ended("b")).state == jobs_pb2.JOB_STATE_DONE

        async def waits() -> str:
            return (await jobs.status("a")).why

        async with asyncio.timeout(60.0):
            while "jobs wait until" not in (why := await waits()):
                await asyncio.sleep(0.05)
        assert why.startswith("the budget of acme, 500 g a day, is on rung jobs wait: jobs wait until 20")
        assert await open_jobs(jobs, state) == [], "no device is kept awake for it"
        await budgets.set()
        assert (await jobs.ended("a")).state == jobs_pb2.JOB_STATE_DONE

"""Budgets of tenants at the controller: what is accepted, counted, published, kept, and what commands change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from controller.accounting.budgets import LOOK_S, BudgetRungs
from controller.accounting.core.budgets import BUDGETS_MAX, accept_budget
from controller.loop import declared
from controller.role.by_command import KeptBudgets
from controller.role.disk_store import DiskStore
from controller.role.kept_files import KeptFiles
from protos.controller.v1 import controller_pb2 as pb
from tests.support.planning import digits
from tests.support.virtual import system as virtual
from tests.support.virtual.planner import FAMILY
from tests.unit.controller.test_by_command import Operator, played
from tests.unit.controller.test_receipt_shell import KEYS, NOW_S, World, node, sample
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.errors import InvalidInput, NotFound, PlanError, StaleRevision, StateUnavailable
from trefoil.core.objective import Budget, BudgetRung, TenantRung, TenantRungs
from trefoil.runtime import codec
from trefoil.runtime.security.plan_keys import PlanKeys

ACME = Budget("acme", grams_per_day=500.0, time_zone="UTC")
CATALOG = digits()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tenant": ""}, "tenant = '': neither tenant nor family. Remedy: name one of the two, or both"),
        ({"tenant": "a/b"}, "tenant = 'a/b': cannot be a tenant's name. Remedy: write its name"),
        ({"tenant": "(trefoil)"}, r"tenant = '\(trefoil\)': cannot be a tenant's name"),
        ({"family": "digit"}, "family = 'digit': no such family in the model repository. Remedy: did you mean digits"),
        ({"grams_per_day": 0.0}, "grams_per_day = 0: must be above 0. Remedy: set it, or joules_per_day"),
        ({"grams_per_day": -5.0}, "grams_per_day = -5.0: must be above 0"),
        ({"grams_per_day": float("nan")}, "grams_per_day = nan: must be above 0"),
        ({"grams_per_day": 1e300}, r"grams_per_day = 1e\+300: must be 0 or between"),
        ({"joules_per_day": float("inf")}, "joules_per_day = inf: must be 0 or between"),
        ({"least_accuracy": 95.0}, "least_accuracy = 95.0: must be a fraction. Remedy: write e.g. 0.9 for 90 %"),
        ({"least_accuracy": float("nan")}, "least_accuracy = nan: must be a fraction"),
        ({"time_zone": "Mars/Olympus"}, "time_zone = 'Mars/Olympus': no such time zone. Remedy: write an IANA name"),
        ({"time_zone": "../etc"}, "time_zone = '../etc': no such time zone"),
        ({"time_zone": "Europe"}, "time_zone = 'Europe': no such time zone"),
        ({"time_zone": "x" * 5000}, "time_zone = .*: no such time zone"),
    ],
)
def test_what_a_budget_cannot_be(change, says):
    with pytest.raises(InvalidInput, match=says):
        accept_budget(replace(ACME, **change), {}, CATALOG)


def test_a_budget_is_numbered_and_a_change_that_another_has_overtaken_is_refused():
    first = accept_budget(ACME, {}, CATALOG)
    assert first == replace(ACME, number=1)
    stored = {first.key: first}
    assert accept_budget(ACME, stored, CATALOG, 1).number == 2
    with pytest.raises(StaleRevision, match="the stored budget of acme has number 1, not 4"):
        accept_budget(ACME, stored, CATALOG, 4)


def test_budgets_are_bounded():
    stored = {(f"t{n}", ""): replace(ACME, tenant=f"t{n}", number=1) for n in range(BUDGETS_MAX)}
    accept_budget(replace(ACME, tenant="t7"), stored, CATALOG)
    with pytest.raises(InvalidInput, match=r"1000 budgets are the most\. Remedy: take one away"):
        accept_budget(ACME, stored, CATALOG)


def test_kept_budgets_of_a_zone_that_is_none_are_set_aside(tmp_path):
    disk = DiskStore(tmp_path, 10)
    disk.save("tenant_budgets", KeptBudgets((ACME,)))
    path = tmp_path / "tenant_budgets.json"
    path.write_text(path.read_text().replace('"UTC"', '"Mars/Olympus"'))
    assert DiskStore(tmp_path, 10).load("tenant_budgets", KeptBudgets) is None
    assert path.with_name("tenant_budgets.json.bad").exists()


# What is counted


class Books(World):
    """A controller's books of tenants who ask one family, and the rungs of their budgets."""

    def __init__(self, folder: Path, before: World | None = None) -> None:
        super().__init__(folder, before=before)
        self.keys = PlanKeys("default", ["k" * 40])
        self.rungs = BudgetRungs(self.state.keys, self.accountant, self.authority, self.keys, self.metrics, self.clock)

    async def asked(self, **joules: float) -> None:
        """A second in which tenants cost so much, by receipts and by meter."""
        await self.clock.advance(1.0)
        await self.authority._step()
        if self._agent is None or not self.state.holds(self._agent):
            self._agent = await self.state.acquire("agent:n", "test", ttl_s=3600.0)
            await self.state.put(self._agent, self.state.keys.node("n"), node({KEYS[0]: "s"}))
        now_s = self.clock.now_s()
        cells = tuple(
            LoadCell(LoadKey("digits", "s", KEYS[0], tenant), answered=1, items=1, receipt_j=cost, receipts=1)
            for tenant, cost in joules.items()
        )
        window = LoadWindow("d", 0, round(now_s - NOW_S), now_s - 1, now_s, cells=cells)
        await self.state.append_unfenced(self.state.keys.load("d", 0), window)
        drawn = sample(KEYS[0], "s", sum(joules.values()), now_s)
        await self.state.append(self._agent, self.state.keys.energy("n"), drawn, 1000)
        await self.reader.refresh()
        await self.accountant.refresh(["digits"])

    def joules(self) -> dict[str, float]:
        """Of today, by tenant."""
        budgets = {(name, ""): Budget(name, joules_per_day=1.0) for name in ("a", "b")}
        return {use.budget.tenant: (use.costs or (0.0, 0.0))[0] for use in self.rungs.uses(budgets)}

    async def published(self) -> TenantRungs | None:
        return await self.state.get(self.state.keys.tenant_rungs(), TenantRungs)


async def four_hours(folder: Path) -> Books:
    """Books of four hours, of which the first two are not among those that are written again."""
    books = Books(folder)
    for hour in range(4):
        for _ in range(10):
            await books.asked(a=3.0, b=1.0)
        await books.accountant.flush()
        await books.clock.advance(3600.0 if hour < 3 else 0.0)
    return books


async def test_a_day_is_counted_by_tenant_what_is_not_written_yet_included(tmp_path):
    books = await four_hours(tmp_path)
    assert books.joules() == pytest.approx({"a": 120.0, "b": 40.0})
    await books.asked(a=1.0, b=1.0)
    found = books.joules()
    assert found == pytest.approx({"a": 121.0, "b": 41.0}, abs=0.5), "an hour is split as a whole"
    assert sum(found.values()) == pytest.approx(162.0)


@pytest.mark.parametrize("lost", ["nothing", "Redis", "the disk"])
async def test_a_day_outlives_a_controller_and_either_of_its_stores(tmp_path, lost):
    books = await four_hours(tmp_path / "one")
    await books.authority.release()
    if lost == "Redis":
        books.server.flush()
    disk = DiskStore(tmp_path / ("two" if lost == "the disk" else "one"), 10)
    await KeptFiles(disk, books.state, PlanKeys("default")).take_over()
    after = Books(disk._root, before=books)
    await after.asked()
    assert after.joules() == pytest.approx({"a": 120.0, "b": 40.0})


async def test_an_emptied_redis_takes_nothing_from_a_controller_that_goes_on(tmp_path):
    books = await four_hours(tmp_path)
    books.server.flush()
    books._agent = None
    for _ in range(3):
        await books.asked()
    assert books.joules() == pytest.approx({"a": 120.0, "b": 40.0})


async def test_the_next_day_begins_with_nothing_spent(tmp_path):
    books = await four_hours(tmp_path)
    await books.clock.advance(10 * 3600.0)
    for _ in range(3):
        await books.asked(a=2.0)
    assert books.joules() == pytest.approx({"a": 6.0, "b": 0.0})


# What is published


async def test_rungs_are_published_when_they_change_and_again_while_they_hold(tmp_path):
    books, budgets = Books(tmp_path), {("a", ""): Budget("a", joules_per_day=100.0, number=1)}

    async def seconds(count: int, **joules: float) -> TenantRungs | None:
        for _ in range(count):
            await books.asked(**joules)
            await books.rungs.publish(budgets)
        return await books.published()

    told = await seconds(7, a=10.0, b=50.0)
    assert told is not None
    assert told.rungs == ()
    free_at_s = (NOW_S // 86_400 + 1) * 86_400
    for rung in (BudgetRung.JOBS_WAIT, BudgetRung.LOWER_ACCURACY, BudgetRung.REFUSED):
        await seconds(3, a=4.0)
        told = await seconds(3)
        assert told is not None
        assert told.rungs == (TenantRung("a", "", rung, "100 J a day", 0.0, free_at_s),)
        books.keys.verify_rungs(told)
        with pytest.raises(PlanError, match="is not what the controller signed"):
            books.keys.verify_rungs(replace(told, rungs=()))
    assert books.metric("trefoil_budget_rung", "a") == 3
    assert books.metric("trefoil_budget_used_ratio", "a") == pytest.approx(1.06)
    at_s = told.observed_at_s
    told = await seconds(15)
    assert told is not None
    assert told.observed_at_s == at_s, "nothing has changed"
    told = await seconds(10)
    assert told is not None
    assert told.observed_at_s > at_s, "it is repeated"
    budgets["a", ""] = Budget("a", joules_per_day=115.0, number=2)
    told = await seconds(3)
    assert told is not None
    assert told.rungs[0].rung is BudgetRung.LOWER_ACCURACY, "a budget that was raised is judged afresh"
    del budgets["a", ""]
    told = await seconds(3)
    assert told is not None
    assert told.rungs == ()
    assert books.metric("trefoil_budget_rung", "a") is None


async def test_a_leader_without_budgets_puts_forged_rungs_right(tmp_path):
    books = Books(tmp_path)
    for _ in range(3):
        await books.asked()
        await books.rungs.publish({})
    true = await books.published()
    assert true is not None
    assert (true.rungs, true.epoch) == ((), books.authority.epoch)
    forged = TenantRungs((TenantRung("", FAMILY, BudgetRung.REFUSED),), 10**6, NOW_S)
    for stray in (codec.encode(forged), b"\xff", None):
        books.server.spoil(books.state.keys.tenant_rungs(), stray)
        for _ in range(3):
            await books.asked()
            await books.rungs.publish({})
        assert await books.published() == true, "it is not written without need"


async def test_without_redis_nothing_is_taken_for_published(tmp_path):
    books, budgets = Books(tmp_path), {("a", ""): Budget("a", joules_per_day=1.0, number=1)}
    for _ in range(3):
        await books.asked(a=10.0)
    books.server.fall()
    await books.clock.advance(LOOK_S)
    with pytest.raises(StateUnavailable):
        await books.rungs.publish(budgets)
    books.server.rise()
    await books.clock.advance(LOOK_S)
    await books.authority._step()
    await books.rungs.publish(budgets)
    told = await books.published()
    assert told is not None
    assert told.rungs[0].rung is BudgetRung.REFUSED


# What commands and settings change


def setting(grams: float = 500.0, **more: Any) -> pb.SetBudgetRequest:
    number = more.pop("expected_number", 0)
    budget = Budget(**{"tenant": "acme", "grams_per_day": grams} | more)
    return pb.SetBudgetRequest(budget=codec.to_proto(budget), expected_number=number)


def budgets_of(answer: Any) -> list[tuple[str, str, float, int]]:
    found = [use.budget for use in answer.budgets]
    return [(one.tenant, one.family, one.grams_per_day, one.number) for one in found]


STATED = ({"tenant": "acme", "grams_per_day": 100.0}, {"family": FAMILY, "grams_per_day": 900.0})
BACK = pb.SetBudgetRequest(budget=codec.to_proto(Budget("acme")), reset=True)


def test_commands_on_budgets_win_over_the_settings_until_reset_also_after_a_restart(monkeypatch):
    def work(operator: Operator) -> None:
        def look(name: str) -> None:
            operator.asks(name, "GetBudgets", pb.GetBudgetsRequest())
            operator.asks(f"{name} plan", "GetPlan", pb.GetPlanRequest())

        operator.asks("set", "SetBudget", setting(300.0, family=FAMILY))
        operator.restarts({"budgets": STATED})
        look("stated")
        operator.asks("changed", "SetBudget", setting(50.0))
        operator.asks("overtaken", "SetBudget", setting(60.0, expected_number=1))
        operator.asks("cleared", "ClearBudget", pb.ClearBudgetRequest(family=FAMILY))
        operator.does(operator.system.server.flush)
        operator.restarts({})
        look("held")
        operator.asks("reset", "SetBudget", BACK)
        operator.asks("no reset", "SetBudget", pb.SetBudgetRequest(budget={"tenant": "ghost"}, reset=True))
        operator.asks("no budget", "ClearBudget", pb.ClearBudgetRequest(tenant="acne"))
        look("after")

    seen, _ = played(monkeypatch, work)
    own = ("acme", FAMILY, 300.0, 1)
    assert budgets_of(seen["stated"]) == [("", FAMILY, 900.0, 1), ("acme", "", 100.0, 1), own]
    line = f"budget of acme on {FAMILY} = 300 g a day by command, none in the settings"
    assert list(seen["stated plan"].overrides) == [line]
    assert seen["changed"].use.budget.number == 2
    assert isinstance(seen["overtaken"], StaleRevision)
    assert budgets_of(seen["held"]) == [("acme", "", 50.0, 2), own]
    assert list(seen["held plan"].overrides) == [
        f"budget of all tenants on {FAMILY} = none by command, 900 g a day in the settings",
        "budget of acme = 50 g a day by command, 100 g a day in the settings",
        line,
    ]
    assert budgets_of(seen["after"]) == [("acme", "", 100.0, 3), own]
    assert isinstance(seen["no reset"], NotFound)
    assert "did you mean acme?" in str(seen["no budget"])


def test_declared_budgets_are_what_the_files_say_and_commands_are_refused(monkeypatch):
    def work(operator: Operator) -> None:
        look = ("GetBudgets", pb.GetBudgetsRequest())
        operator.asks("begun", *look)
        operator.asks("refused", "SetBudget", setting())
        operator.asks("not cleared", "ClearBudget", pb.ClearBudgetRequest(tenant="acme"))
        operator.does(lambda: operator.edit({"budgets": STATED}), 2 * declared.PERIOD_S + 1.0)
        operator.asks("edited", *look)
        wrong = ({"tenant": "acme", "grams_per_day": 100.0, "family": "ghost"},)
        operator.does(lambda: operator.edit({"budgets": wrong}), 2 * declared.PERIOD_S + 1.0)
        operator.asks("wrong", *look)
        operator.looks("wrong plan")

    monkeypatch.setattr(declared, "PERIOD_S", 1.0)
    for name, value in (("declared", True), ("budgets", STATED[:1])):
        monkeypatch.setitem(virtual.SETTINGS, name, value)  # type: ignore[arg-type]
    seen, _ = played(monkeypatch, work)
    assert budgets_of(seen["begun"]) == [("acme", "", 100.0, 1)]
    for name in ("refused", "not cleared"):
        assert "declared = 'budgets': the settings declare it. Remedy: change controller.toml" in str(seen[name])
    assert budgets_of(seen["edited"]) == [("", FAMILY, 900.0, 1), ("acme", "", 100.0, 1)]
    assert budgets_of(seen["wrong"]) == budgets_of(seen["edited"]), "a wrong file changes nothing"
    assert any("budgets[0]" in line and "did you mean" not in line for line in seen["wrong plan"].overrides)

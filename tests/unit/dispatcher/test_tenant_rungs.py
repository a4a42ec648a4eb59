"""Which rung of a budget a dispatcher obeys, and for how long."""

from dataclasses import replace

import pytest

from dispatcher.service.core.tenant_rungs import KEEP_S, BudgetLadder, jobs_wait
from trefoil.core.objective import BudgetRung, TenantRung, TenantRungs

NOW_S = 1_795_046_400.0
ACME = TenantRung("acme", "", BudgetRung.REFUSED, "500 g a day", free_at_s=NOW_S + 11_520.0)
DIGITS = TenantRung("", "digits", BudgetRung.LOWER_ACCURACY, "9 J a day", 0.9, NOW_S + 9e3)
BOTH = TenantRung("acme", "digits", BudgetRung.JOBS_WAIT, "7 J a day", 0.8, NOW_S + 9e3)


def ladder(*rungs: TenantRung, epoch: int = 1, ahead_s: float = 0.0) -> BudgetLadder:
    found = BudgetLadder()
    found.set(TenantRungs(rungs, epoch, NOW_S + ahead_s), NOW_S)
    return found


@pytest.mark.parametrize(
    ("tenant", "family", "rung", "least"),
    [
        ("acme", "cats", BudgetRung.REFUSED, 0.0),
        ("acme", "digits", BudgetRung.REFUSED, 0.9),
        ("other", "digits", BudgetRung.LOWER_ACCURACY, 0.9),
        ("", "digits", BudgetRung.LOWER_ACCURACY, 0.9),
        ("other", "cats", None, 0.0),
        ("", "cats", None, 0.0),
    ],
)
def test_the_highest_rung_that_covers_a_request_holds_and_no_other_tenants(tenant, family, rung, least):
    found = ladder(ACME, DIGITS, BOTH).find(tenant, family, NOW_S)
    assert (found and found.rung, found.least_accuracy if found else 0.0) == (rung, least)


def test_floors_fall_to_the_lowest_that_a_budget_of_that_rung_allows():
    found = ladder(DIGITS, replace(BOTH, rung=BudgetRung.LOWER_ACCURACY)).find("acme", "digits", NOW_S)
    assert found is not None
    assert found.least_accuracy == 0.8


def test_rungs_are_obeyed_for_a_bounded_time_then_every_tenant_is_served():
    rungs = ladder(ACME)
    assert rungs.find("acme", "digits", NOW_S + KEEP_S - 0.1) is not None
    assert rungs.find("acme", "digits", NOW_S + KEEP_S) is None
    rungs.set(TenantRungs((ACME,), 1, NOW_S + 50.0), NOW_S + 50.0)
    assert rungs.find("acme", "digits", NOW_S + KEEP_S) is not None


def test_a_budgets_next_day_frees_its_tenant_without_news():
    rungs = ladder(replace(ACME, free_at_s=NOW_S + 5.0), DIGITS)
    assert rungs.find("acme", "digits", NOW_S + 4.9).rung is BudgetRung.REFUSED
    assert rungs.find("acme", "digits", NOW_S + 5.0).rung is BudgetRung.LOWER_ACCURACY
    assert rungs.find("acme", "cats", NOW_S + 5.0) is None


def test_an_older_publication_changes_nothing():
    rungs = ladder(epoch=2)
    rungs.set(TenantRungs((ACME,), 1, NOW_S + 30.0), NOW_S + 30.0)
    rungs.set(TenantRungs((ACME,), 2, NOW_S - 1.0), NOW_S + 30.0)
    assert rungs.find("acme", "digits", NOW_S + 30.0) is None
    rungs.set(TenantRungs((ACME,), 3, NOW_S - 1.0), NOW_S + 30.0)
    assert rungs.find("acme", "digits", NOW_S + 30.0) is not None


@pytest.mark.parametrize(("epoch", "ahead_s"), [(10**11, 0.0), (1, 1e9)])
def test_a_false_publication_keeps_true_ones_out_for_no_longer_than_it_is_obeyed(epoch, ahead_s):
    rungs = ladder(epoch=epoch, ahead_s=ahead_s)
    for later_s in (20.0, KEEP_S - 0.1):
        rungs.set(TenantRungs((ACME,), 1, NOW_S + later_s), NOW_S + later_s)
        assert rungs.find("acme", "cats", NOW_S + later_s) is None
    rungs.set(TenantRungs((ACME,), 1, NOW_S + KEEP_S), NOW_S + KEEP_S)
    assert rungs.find("acme", "cats", NOW_S + KEEP_S).rung is BudgetRung.REFUSED


def test_an_unsigned_publication_of_a_time_to_come_keeps_no_true_one_out():
    rungs = BudgetLadder()
    rungs.set(TenantRungs((replace(ACME, free_at_s=1e11),), 2, NOW_S + 1e9), NOW_S, signed=False)
    rungs.set(TenantRungs((), 1, NOW_S + 1.0), NOW_S + 1.0, signed=False)
    assert rungs.find("acme", "digits", NOW_S + 2.0) is not None, "of the leader before"
    rungs.set(TenantRungs((), 2, NOW_S - 9.0), NOW_S + 3.0, signed=False)
    assert rungs.find("acme", "digits", NOW_S + 3.0) is None


@pytest.mark.parametrize("ahead_s", [0.0, -86_400.0, 7200.0])
def test_times_are_told_by_the_controllers_clock_and_waited_by_ones_own(ahead_s):
    rung = replace(ACME, free_at_s=ACME.free_at_s + ahead_s)
    rungs = ladder(rung, ahead_s=ahead_s)
    assert rungs.find("acme", "digits", NOW_S + 10.0) == rung
    assert rungs.wait_s(rung, NOW_S) == 11_520.0
    assert "in 3 h 12 min" in rungs.refusal(rung, NOW_S)


def test_refusals_and_waiting_jobs_name_budget_and_time():
    refusal = ladder(ACME).refusal(ACME, NOW_S)
    assert refusal == (
        "the budget of acme, 500 g a day, is spent. Remedy: try again at 2026-11-19 03:12Z, in 3 h 12 min, "
        "or ask the operator for more"
    )
    why = "the budget of acme on digits, 7 J a day, is on rung jobs wait: jobs wait until 2026-11-19 02:30Z"
    assert jobs_wait(BOTH) == why

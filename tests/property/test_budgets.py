"""Budgets of tenants: parts sum to the whole, rungs follow what is spent, and a day ends within its budget."""

from collections import defaultdict
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.accounting.core.budgets import (
    BACK,
    BEGINS,
    day_of,
    free_at_s,
    hour_spend,
    rung_of,
    spent,
    used_of,
)
from dispatcher.service.core.tenant_rungs import BudgetLadder
from tests.property.test_report_sums import FAMILIES, report_of
from trefoil.cli.operate.report_document import report_document
from trefoil.core.objective import Budget, BudgetRung, TenantRung, TenantRungs, zone_of
from trefoil.core.outside.plausible import HOUR
from trefoil.core.units import DAY_S, HOUR_S

NAMES = ("", "a", "b", "c:d")
AMOUNTS = st.floats(0, 1e5).map(lambda amount: round(amount, 3))
SUMS = st.dictionaries(
    st.sampled_from(
        [
            f"{kind}:{name}"
            for kind in ("tenant_requests", "tenant_receipt_joules", "tenant_unanswered_joules")
            for name in NAMES
        ]
    ),
    AMOUNTS,
).map(lambda sums: sums | {"unanswered": 1.0})
METERED = st.builds(lambda sums, joules, co2: sums | {"joules": joules, "grams": co2}, SUMS, AMOUNTS, AMOUNTS)
STARTS_S = 1_795_046_400.0  # a midnight of UTC


@given(st.dictionaries(st.tuples(st.sampled_from(FAMILIES), st.integers(0, 3)), METERED, max_size=8))
def test_tenants_sum_to_the_whole_and_are_what_reports_say(booked):
    hours: dict[str, dict[str, dict[str, float]]] = defaultdict(dict)
    for (family, hour), sums in booked.items():
        hours[f"20261119{hour:02d}"][family] = sums
    found = {hour: hour_spend(families) for hour, families in hours.items()}
    now_s = datetime(2026, 11, 19, 3, 30, tzinfo=UTC).timestamp()

    def costs(tenant: str = "", family: str = "") -> tuple[float, float]:
        return spent(Budget(tenant, family, 1.0), found, now_s) or (0.0, 0.0)

    for at, name in enumerate(("joules", "grams")):
        whole = sum(sums[name] for sums in booked.values())
        assert costs()[at] == pytest.approx(whole, abs=1e-6)
        assert sum(costs(family=family)[at] for family in FAMILIES) == pytest.approx(whole, abs=1e-6)
    reported = report_document(report_of(booked))["tenants"]
    for family in FAMILIES:
        rows = {row["tenant"]: row for row in reported if row["family"] == family}
        for tenant in NAMES[1:]:
            row = rows.get(tenant, {"joules": 0.0, "grams": 0.0})
            assert costs(tenant, family) == pytest.approx((row["joules"], row["grams"]), abs=1e-6)


@given(st.lists(st.floats(0, 3), max_size=30).map(sorted))
def test_rungs_never_fall_while_more_is_spent_and_each_begins_where_it_says(used):
    rungs = [BudgetRung.WITHIN]
    for part in used:
        rungs.append(rung_of(part, rungs[-1]))
        assert rungs[-1] == sum(part >= begins for begins in BEGINS.values())
    assert rungs == sorted(rungs)


@given(st.floats(0, 2), st.floats(0, 2), st.sampled_from(BudgetRung), st.sampled_from(BudgetRung))
def test_more_spent_or_a_higher_rung_before_never_gives_a_lower_rung(used, other, before, earlier):
    low, high = sorted((used, other))
    assert rung_of(low, min(before, earlier)) <= rung_of(high, max(before, earlier))


@given(st.sampled_from(BudgetRung), st.floats(0, 2), st.floats(-BACK, BACK).map(lambda by: 0.98 * by))
def test_a_rung_does_not_flap_within_its_margin(before, used, by):
    first = rung_of(used, before)
    assert rung_of(used + by, rung_of(used - abs(by), first)) >= rung_of(used - abs(by), first)
    if by < 0 and first > BudgetRung.WITHIN and used >= BEGINS[first]:
        assert rung_of(used + by, first) == first


@given(
    st.integers(0, 400 * 24 * 60).map(lambda minutes: STARTS_S + 60.0 * minutes),
    st.sampled_from(
        ("UTC", "Europe/London", "Asia/Kolkata", "America/St_Johns", "Pacific/Apia", "Australia/Lord_Howe")
    ),
)
def test_each_hour_is_of_one_day_and_the_next_day_begins_when_said(now_s, name):
    zone = zone_of(name)
    free_s = free_at_s(now_s, zone)
    assert 0 < free_s - now_s <= 25 * HOUR_S
    assert free_s % HOUR_S == 0
    assert day_of(now_s, zone) == day_of(free_s - 1.0, zone) < day_of(free_s, zone)
    assert datetime.fromtimestamp(free_s, zone).time() < (datetime.min + timedelta(hours=1)).time()


class Day:
    """A day of tenants that ask one family, whose books are `late_s` behind; dispatchers obey what is decided."""

    def __init__(self, budget: Budget | None, asks_j: dict[str, float], idle_w: float, late_s: float) -> None:
        self.budget, self.asks_j, self.idle_w, self.late_s = budget, asks_j, idle_w, late_s
        self.ladder, self.rung = BudgetLadder(), BudgetRung.WITHIN
        self.books: dict[str, dict[str, dict[str, float]]] = {}
        self.unbooked: list[tuple[float, str, float]] = []
        self.served: dict[str, float] = defaultdict(float)
        self.refused_s: float | None = None

    def play(self, step_s: float) -> "Day":
        now_s = STARTS_S
        while now_s < STARTS_S + DAY_S:
            for tenant, joules in self.asks_j.items():
                found = self.ladder.find(tenant, "digits", now_s)
                if found is not None and found.rung is BudgetRung.REFUSED:
                    self.refused_s = self.refused_s or now_s
                    continue
                self.served[tenant] += joules * step_s
                self.unbooked.append((now_s, tenant, joules * step_s))
            self.unbooked.append((now_s, "", self.idle_w * step_s))
            now_s += step_s
            self._book(now_s)
            self._decide(now_s)
        self._book(now_s + self.late_s)
        return self

    def _book(self, now_s: float) -> None:
        while self.unbooked and self.unbooked[0][0] <= now_s - self.late_s:
            at_s, tenant, joules = self.unbooked.pop(0)
            hour = datetime.fromtimestamp(at_s, UTC).strftime(HOUR)
            sums = self.books.setdefault(hour, {}).setdefault("digits", defaultdict(float))
            sums["joules"] += joules
            if tenant:
                sums[f"tenant_receipt_joules:{tenant}"] += joules

    def costs(self, tenant: str, now_s: float) -> float:
        hours = {hour: hour_spend(families) for hour, families in self.books.items()}
        return (spent(Budget(tenant, joules_per_day=1.0), hours, now_s) or (0.0, 0.0))[0]

    def _decide(self, now_s: float) -> None:
        if self.budget is None or now_s >= STARTS_S + DAY_S:
            return
        used = used_of(self.budget, (self.costs(self.budget.tenant, now_s), 0.0))
        self.rung = rung_of(used, self.rung)
        told = TenantRung(*self.budget.key, self.rung, free_at_s=free_at_s(now_s, UTC))
        self.ladder.set(TenantRungs((told,), 1, now_s), now_s)


@settings(max_examples=12)
@given(st.floats(1, 50), st.floats(1, 50), st.floats(0.05, 0.95), st.sampled_from((0.0, 5.0)), st.floats(0, 300))
def test_a_day_ends_within_its_budget_and_what_was_in_flight_and_no_other_tenant_notices(
    a_w, b_w, part, idle_w, late_s
):
    step_s, asks = 120.0, {"a": a_w, "b": b_w}
    free = Day(None, asks, idle_w, late_s).play(step_s)
    budget = Budget("a", joules_per_day=part * free.costs("a", STARTS_S + DAY_S - 1))
    held = Day(budget, asks, idle_w, late_s).play(step_s)
    assert held.refused_s is not None
    in_flight_j = (a_w + idle_w) * (late_s + 2 * step_s)
    idle_j = idle_w * HOUR_S  # of the hour under way, which is split among its tenants to its end
    assert held.costs("a", STARTS_S + DAY_S - 1) <= budget.joules_per_day + in_flight_j + idle_j
    assert held.costs("a", STARTS_S + DAY_S - 1) >= (1 - BACK) * budget.joules_per_day - idle_j
    assert held.served["b"] == free.served["b"]

"""CARBONDIS, Algorithm 1, branch by branch; what the paper leaves open; the routers that it is compared with."""

from dataclasses import replace
from functools import partial

import pytest

from dispatcher.queues.fair import FairQueue
from dispatcher.queues.fifo import FifoQueue
from dispatcher.routers.tiers import KEPT_MAX, RECENT, CarbonDis, DyBatch, LeastGrams, Random, Times
from dispatcher.routing.core.family_queue import FamilyQueue
from dispatcher.routing.core.routing_table import check_plan
from tests.support.steps import Steps
from tests.unit.dispatcher.worlds import plan, ticket
from trefoil.core.brains import Outcome, Ticket
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.policies import policy
from trefoil.simulator.scenario.policy_check import check_policy

HIGH = SliceKey("node/a100", "whole", 0, 8)
SLO_MS, LOW_MS, HIGH_MS = 100.0, 60.0, 20.0


def low(family):
    return SliceKey(f"node/p4-{family}", "whole", 0, 8)


def route(family, router="carbondis", **params):
    found = [(low(family), "low"), (HIGH, "high")]
    targets = tuple(RouteTarget(key, "only", 0, 0.5, 1, tier=tier, accuracy=0.9) for key, tier in found)
    return Route(family, router, "fifo", targets, 0, 0, params)


def group(make=CarbonDis, families=("a", "b"), **params):
    """A router, and its queue, whose families have seen batches of 1 take LOW_MS and HIGH_MS."""
    router = make("group", FairQueue("group", partial(FifoQueue, "group")))
    for family in families:
        router.on_table(route(family, **params), 0.0)
    for family in families:
        learn(router, family, 1, LOW_MS)
        learn(router, family, 1, HIGH_MS, HIGH)
    return router


def learn(router, family, items, took_ms, key=None):
    """One request of that batch size, bound to a GPU so that the algorithm has no say, in time."""
    made = asks(family, 10**6, items=items, arrived_s=0.0)
    pick = router.on_pinned(made, key or low(family), 0.0)
    router.on_done(made, pick, Outcome("OK", 1.0, took_ms, 0, True), 0.0)


def asks(family, id_, items=1, arrived_s=10.0, slo_ms=SLO_MS, slo_class="") -> Ticket:
    return replace(ticket(id_, arrived_s=arrived_s), family=family, items=items, slo_ms=slo_ms, slo_class=slo_class)


def device(pick):
    return None if pick is None else {"a100": "high"}.get(pick.slice.device.split("/")[1], "low")


def done(router, made, pick, now_s, latency_ms=50.0, took_ms=LOW_MS):
    router.on_done(made, pick, Outcome("OK", latency_ms, took_ms, 0, True), now_s)


def test_branch_1_might_be_late_takes_the_high_end_if_it_is_free():
    """Lines 11 to 15: ESFT = 10.05 + 0.06 > EXFT = 10.1."""
    router = group()
    assert device(router.on_arrival(asks("a", 1), 10.05)) == "high"
    assert device(router.on_arrival(asks("b", 2), 10.05)) == "low"


def test_branch_2_in_time_but_dirty_takes_the_high_end_if_it_is_free():
    """Lines 16 to 20."""
    router = group()
    router.on_carbon(1.01, 0.0)
    assert device(router.on_arrival(asks("a", 1), 10.0)) == "high"
    assert device(router.on_arrival(asks("b", 2), 10.0)) == "low"


@pytest.mark.parametrize("ratio", [1.0, 0.4, None])
def test_branch_3_in_time_and_clean_takes_the_low_end(ratio):
    """Lines 21, 22; without a ratio too. On the very threshold CIR <= CIT holds, and ESFT <= EXFT."""
    router = group()
    router.on_carbon(ratio, 0.0)
    assert device(router.on_arrival(asks("a", 1), 10.04)) == "low"


@pytest.mark.parametrize(("cit", "expected"), [(0.8, "high"), (0.9, "low"), (1.2, "low")])
def test_cit_is_the_threshold(cit, expected):
    router = group(cit=cit)
    router.on_carbon(0.85, 0.0)
    assert device(router.on_arrival(asks("a", 1), 10.0)) == expected


def test_estimates_are_means_of_the_very_batch_size():
    router = group()
    learn(router, "a", 8, 90.0)
    learn(router, "a", 8, 130.0)
    assert device(router.on_arrival(asks("a", 1, items=8), 10.0)) == "high"  # 110 ms in the mean
    assert device(router.on_arrival(asks("a", 2, items=9), 10.0)) == "low"  # no history: tried on the low-end
    other = group(quantile=0.4)
    learn(other, "a", 8, 90.0)
    learn(other, "a", 8, 130.0)
    assert device(other.on_arrival(asks("a", 1, items=8), 10.0)) == "low"  # 90 ms


def test_a_busy_low_end_counts_until_it_is_expected_to_end():
    """CT is when the request would start: 60 + 60 ms > 100 ms. As printed CT is the clock, and it waits there."""
    router = group()
    first = router.on_arrival(asks("a", 1), 10.0)
    assert device(first) == "low"
    assert device(router.on_arrival(asks("a", 2), 10.0)) == "high"
    literal = group(literal=1.0)
    assert device(literal.on_arrival(asks("a", 1), 10.0)) == "low"
    assert literal.on_arrival(asks("a", 2), 10.0) is None
    assert literal.on_credit(HIGH, 10.05) is None, "the low-end is final"


def test_literal_and_paper_agree_where_the_low_end_is_idle():
    for ratio, arrived_s in ((None, 10.0), (1.2, 10.0), (0.9, 10.0), (0.9, 9.95)):
        said = []
        for params in ({}, {"literal": 1.0}):
            router = group(**params)
            router.on_carbon(ratio, 0.0)
            said.append(device(router.on_arrival(asks("a", 1, arrived_s=arrived_s), 10.0)))
        assert said[0] == said[1]


def test_it_asks_for_the_time_at_which_who_waits_would_be_late():
    """Nothing else happens: its low-end overruns, and at EXFT - EL it goes to the high-end."""
    queue = FamilyQueue(5.0)
    for family in ("a", "b"):
        queue.table(route(family), "", 0.0)
    router = queue.router
    for family in ("a", "b"):
        learn(router, family, 1, 20.0)
    assert device(queue.submit(asks("a", 1), 10.0)) == "low"
    assert queue.submit(asks("a", 2), 10.0) is None
    due_s = queue.next_s()
    assert due_s == pytest.approx(10.08, abs=1e-4)
    assert not queue.tick(due_s - 0.001)
    ((made, pick),) = queue.tick(due_s)
    assert (made.id, device(pick)) == (2, "high")
    assert queue.next_s() is None


def test_the_job_with_the_most_late_answers_goes_first_then_who_came_first():
    router = group()
    held = router.on_arrival(asks("a", 1), 10.05), router.on_arrival(asks("a", 2), 10.05)
    other = router.on_arrival(asks("b", 3), 10.05)
    assert [device(each) for each in (*held, other)] == ["high", "low", "low"]
    assert router.on_arrival(asks("a", 4, arrived_s=10.06), 10.06) is None
    assert router.on_arrival(asks("b", 5, arrived_s=10.07), 10.07) is None
    done(router, asks("a", 1), held[0], 10.2)
    made, again = router.on_credit(HIGH, 10.2)
    assert made.id == 4, "none was late: the first that came"
    assert router.on_arrival(asks("a", 6, arrived_s=10.08), 10.21) is None
    done(router, asks("b", 3), other, 10.22, latency_ms=SLO_MS + 1)
    assert router.on_credit(low("b"), 10.22)[0].id == 5
    assert router.on_arrival(asks("b", 7, arrived_s=10.09), 10.23) is None
    done(router, made, again, 10.3)
    assert router.on_credit(HIGH, 10.3)[0].id == 7, "b was late once"


def test_a_job_is_a_family_and_a_class():
    """Both classes of one family wait in separate lines, each by its own objective."""
    router = group()
    picked = [router.on_arrival(asks("a", n), 10.05) for n in (1, 2)]
    assert [device(each) for each in picked] == ["high", "low"]
    for id_, slo_class, slo_ms in ((3, "slow", 10_000.0), (4, "fast", 80.0)):
        assert router.on_arrival(asks("a", id_, slo_class=slo_class, slo_ms=slo_ms), 10.06) is None
    done(router, asks("a", 1), picked[0], 10.07)
    assert router.on_credit(HIGH, 10.07)[0].id == 4, "the other one has time"


def test_when_carbon_comes_who_waits_goes():
    router = group(families=("a", "b"))
    learn(router, "a", 2, 1.0)
    assert device(router.on_arrival(asks("a", 1), 10.0)) == "low"
    assert router.on_arrival(asks("a", 2, items=2, slo_ms=1000.0), 10.0) is None
    assert router.on_credit(HIGH, 10.01) is None
    router.on_carbon(1.5, 10.02)
    assert device(router.on_credit(HIGH, 10.02)[1]) == "high"


def test_dybatch_gives_the_high_end_to_the_job_that_used_it_least():
    router = group(DyBatch, router="dybatch")
    first = router.on_arrival(asks("a", 1), 10.0)
    assert device(first) == "high", "whenever it is free"
    assert device(router.on_arrival(asks("a", 2), 10.0)) == "low"
    assert device(router.on_arrival(asks("b", 3), 10.0)) == "low"
    assert router.on_arrival(asks("a", 4), 10.0) is None
    assert router.on_arrival(asks("b", 5, arrived_s=10.1), 10.1) is None
    done(router, asks("a", 1), first, 10.2, took_ms=30.0)
    assert router.on_credit(HIGH, 10.2)[0].id == 5


def test_random_gives_each_job_about_as_many_turns_on_the_high_end():
    router, turns, rounds = group(Random, ("a", "b", "c"), router="random"), dict.fromkeys("abc", 0), 3000
    for number in range(rounds):
        family = "abc"[number % 3]
        made = asks(family, number, arrived_s=float(number))
        pick = router.on_arrival(made, float(number))
        turns[family] += device(pick) == "high"
        done(router, made, pick, number + 0.5)
    assert sum(turns.values()) < rounds / 2, "it waits for the job that was drawn"
    assert max(turns.values()) < 1.2 * min(turns.values())


def test_least_grams_takes_the_fewest_joules_in_time_and_leaves_the_high_end_to_who_needs_it():
    cheap_high = {"low_j": 4.0, "high_j": 3.0}
    router = group(LeastGrams, **cheap_high)
    assert device(router.on_arrival(asks("a", 1), 10.0)) == "high"
    router = group(LeastGrams, low_j=2.0, high_j=3.0)
    assert device(router.on_arrival(asks("a", 1), 10.0)) == "low"
    assert device(router.on_arrival(asks("a", 2, arrived_s=9.95), 10.0)) == "high", "in time nowhere else"
    router = group(LeastGrams, **cheap_high)
    learn(router, "a", 8, 90.0, HIGH)  # b, which is used to 20 ms of 100, could not wait for it
    assert device(router.on_arrival(asks("a", 1, items=8, slo_ms=10_000.0), 10.0)) == "low"


def test_least_grams_waits_for_a_busy_high_end_only_while_it_is_in_time_there():
    router = group(LeastGrams, low_j=4.0, high_j=3.0)
    busy = router.on_arrival(asks("a", 1), 10.0)
    assert device(busy) == "high"
    assert router.on_arrival(asks("b", 2, slo_ms=50.0), 10.0) is None, "60 ms on its own, 40 ms behind the other"
    assert device(router.on_arrival(asks("a", 3, slo_ms=30.0), 10.0)) == "low", "late everywhere"
    late = router.on_credit(low("b"), 10.04)
    assert (late[0].id, device(late[1])) == (2, "low"), "the high-end does not answer"


def test_what_is_remembered_is_bounded():
    router = group()
    for items in range(KEPT_MAX + 100):
        learn(router, "a", items, 5.0)
    assert len(router._times) == KEPT_MAX
    times = Times()
    for number in range(10 * RECENT):
        times.add(float(number))
    assert len(times.ordered) == RECENT
    assert times.ordered == sorted(times.recent)


def test_a_threshold_beyond_its_range_is_refused_with_the_plan():
    for cit in (0.0, 10.0):
        with pytest.raises(PlanError, match=r"routes\[a\].*cit"):
            check_plan(plan([route("a", cit=cit)]), Revision())
    check_plan(plan([route("a", cit=9.9)]), Revision())
    with pytest.raises(PlanError, match="a family has two routes"):
        check_plan(plan([route("a"), route("a", router="dybatch")]), Revision())


@pytest.mark.parametrize("settings", [{"cit": 0.0}, {"cit": 10.0}, {"quantile": 1.0}, {"CIT": 1.0}])
def test_a_setting_out_of_range_is_refused_before_anything_starts(settings):
    (name,) = settings
    with pytest.raises(SettingError, match=rf"router setting {name}"):
        check_policy(replace(policy("carbondis"), settings={"router": settings}))


def test_an_explained_request_says_where_it_would_go_now_and_by_what():
    router = group()
    found = router.scores(asks("a", 1, arrived_s=9.99))
    assert {key.device: score for key, (score, _) in found.items()} == {"node/p4-a": 0.0, "node/a100": 1.0}
    assert "ESFT <= EXFT" in found[low("a")][1]
    assert "1 items: 60.0 ms" in found[low("a")][1]


@pytest.mark.parametrize("make", [CarbonDis, DyBatch, Random, LeastGrams])
def test_a_decision_of_ten_jobs_on_six_gpus_is_fast(make):
    """In steps of Python, which no busy machine changes: at most what a whole request may cost beside it."""
    families = [f"f{number}" for number in range(10)]
    router = group(make, families, router=make.name)
    flying = [(made := asks(f, n), router.on_arrival(made, 10.0)) for n, f in enumerate(families)]
    flying += [(made := asks(f, 20 + n), router.on_arrival(made, 10.0)) for n, f in enumerate(families)]
    assert any(pick is None for _, pick in flying)
    made, pick = next((made, pick) for made, pick in flying if device(pick) == "high")
    with Steps() as taken:
        done(router, made, pick, 10.1)
        router.on_credit(HIGH, 10.1)
    print(f"{make.name}: {taken.count} steps")
    assert taken.count < 4000

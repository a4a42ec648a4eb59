"""Families that share slices, simulated: batches form as Triton's, slow each other by the law, and joules add up."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planners.muserve.pipelines import Pipelines, Stage
from dispatcher.routers import ROUTERS
from dispatcher.routers.fifo import Fifo
from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import key, route, target
from trefoil.core.interference import INTERFERENCE, stretch
from trefoil.core.parts import Kind, load_part
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.engines.engine import Flow, OperatingPoint, SliceService
from trefoil.simulator.engines.lines import operating_point

WATTS = 100.0


class Reader(Fifo):
    """A router that the engine does not know: it gets full tickets and outcomes."""

    def on_done(self, ticket, pick, outcome, now_s):
        assert ticket.slo_ms == pytest.approx(50.0)
        assert outcome.service_ms > 0
        super().on_done(ticket, pick, outcome, now_s)


@pytest.fixture(autouse=True, scope="module")
def _own_router() -> None:
    load_part(Kind.ROUTER, f"{__name__}:Reader", ROUTERS)


def service(family, mean_ms=10.0, cv=0.0, gap_ms=0.0, activity=0.6, more_ms=1.0, instances=1):
    """Operating points of 1 to 8 items, each of which takes `more_ms` more."""
    points = tuple(OperatingPoint(n, mean_ms + more_ms * (n - 1), cv, WATTS, activity) for n in (1, 2, 4, 8))
    joules = WATTS * mean_ms / 1e3
    return SliceService(ServiceTime(mean_ms, cv), 0.9, joules, f"{family}-l", family, gap_ms, points, instances)


def shared(services, router="fifo", credits=64, seed=3, weights=None, **flow):
    """Every family on all slices; `services`: by family, one for each slice."""
    routes, found, flows = {}, {}, {}
    for family, each in services.items():
        targets = [target(i, one.variant, (weights or {}).get(i, 1.0), credits) for i, one in enumerate(each)]
        routes[family] = replace(route(targets, router, 10**6), family=family)
        found[family] = {t.slice: one for t, one in zip(targets, each, strict=True)}
        flows[family] = Flow(None, 50.0, **{"items_max": 8.0, **flow})
    return request_engine(routes, found, np.random.default_rng(seed), flows, shares=True)


def seconds(*ms):
    return np.array(ms) / 1e3


def test_a_free_instance_takes_all_that_wait_up_to_the_largest_batch():
    level = shared({"a": [service("a")]}, batch_delay_s=0.0)
    found = level.windows({"a": seconds(0, 1, 2, *range(3, 12))}, 1.0)["a"]
    # the first alone until 10; then 1 to 8 (17 ms); then 9, 10, 11 and, at 10 and 11, the two after them
    assert found.latency_ms == pytest.approx([10, *(27 - at for at in range(1, 9)), *(39 - at for at in range(9, 12))])
    assert found.joules[key(0)] == pytest.approx(WATTS * (0.010 + 0.017 + 0.012))


def test_a_batch_waits_for_more_until_its_first_has_waited_the_delay_or_it_is_full():
    level = shared({"a": [service("a")]}, batch_delay_s=0.005)
    assert level.windows({"a": seconds(0, 3, 7)}, 1.0)["a"].latency_ms == pytest.approx([5 + 11, 2 + 11, 9 + 10])
    full = shared({"a": [service("a")]}, batch_delay_s=0.005, items=4.0)
    assert full.windows({"a": seconds(0, 1)}, 1.0)["a"].latency_ms == pytest.approx([18, 17])
    crowded = shared({"a": [service("a")]}, batch_delay_s=0.005, items=5.0)  # the second does not fit beside it
    assert crowded.windows({"a": seconds(0, 1)}, 1.0)["a"].latency_ms == pytest.approx([1 + 14, 14 + 14])


def test_without_batching_every_request_is_a_batch_and_instances_share_the_slice():
    one, two = (shared({"a": [service("a", activity=0.5, instances=n)]}) for n in (1, 2))
    assert one.windows({"a": seconds(0, 0)}, 1.0)["a"].latency_ms == pytest.approx([10, 20])
    both_ms = 10 * stretch(0.5, 0.5)
    assert two.windows({"a": seconds(0, 0)}, 1.0)["a"].latency_ms == pytest.approx([both_ms, both_ms])


def test_two_families_slow_each_other_by_the_law_while_both_compute():
    level = shared({"a": [service("a", 10.0)], "b": [service("b", 30.0)]})
    found = level.windows({"a": seconds(0), "b": seconds(5)}, 1.0)
    slower = stretch(0.6, 0.6)
    a_ms = 5 + 5 * slower
    assert found["a"].latency_ms == pytest.approx([a_ms])
    assert found["b"].latency_ms == pytest.approx([5 * slower + 25])
    assert slower == pytest.approx(1.2 * (1 + INTERFERENCE * 0.6))
    for family, alone_s in (("a", 0.010), ("b", 0.030)):
        assert found[family].busy_s[key(0)] == pytest.approx(alone_s)
        assert found[family].joules[key(0)] == pytest.approx(WATTS * alone_s)


ARRIVALS = st.lists(st.floats(0.0, 0.5), min_size=1, max_size=40).map(lambda at: np.sort(np.array(at)))


@given(
    ARRIVALS, st.integers(1, 3), st.integers(1, 3), st.sampled_from([0.0, 2.0]), st.sampled_from(["fifo", "weighted"])
)
def test_alone_and_unbatched_it_is_a_slice_of_ones_own(at, slices, credits, gap_ms, router):
    services = [service("a", 10.0 + 3 * i, gap_ms=gap_ms) for i in range(slices)]
    level = shared({"a": services}, router, credits)
    targets = [target(i, "a-l", 1.0, credits) for i in range(slices)]
    table = replace(route(targets, router, 10**6), family="a")
    alone = {t.slice: one for t, one in zip(targets, services, strict=True)}
    other = request_engine({"a": table}, {"a": alone}, np.random.default_rng(3))
    for until_s in (0.2, 5.0):
        part = at[(at < until_s) & (at >= until_s - 4.8)] if until_s > 1 else at[at < until_s]
        here, there = (kernel.windows({"a": part}, until_s)["a"] for kernel in (level, other))
        assert sorted(here.latency_ms) == pytest.approx(sorted(there.latency_ms))
        assert (here.queued, here.answered_by) == (there.queued, there.answered_by)
        assert here.busy_s == pytest.approx(there.busy_s)
        assert here.joules == pytest.approx(there.joules)


@settings(max_examples=60)
@given(ARRIVALS, ARRIVALS, st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.sampled_from([0.0, 0.3]), st.integers(1, 2))
def test_nobody_is_faster_beside_others_than_alone_and_joules_add_up(mine, others, activity, theirs, cv, instances):
    def served(arrivals):
        a, b = service("a", cv=cv, activity=activity, instances=instances), service("b", 25.0, cv, activity=theirs)
        return shared({"a": [a], "b": [b]}).windows({"a": mine, "b": arrivals}, 20.0)

    together, alone = served(others), served(np.empty(0))["a"]
    assert together["a"].answered == alone.answered == mine.size
    faster = together["a"].latency_ms < alone.latency_ms - 1e-6
    assert not faster.any() or instances > 1  # two instances may answer in another order
    assert together["a"].latency_ms.sum() >= alone.latency_ms.sum() - 1e-6
    for one in (*together.values(), alone):
        assert one.joules[key(0)] == pytest.approx(WATTS * one.busy_s[key(0)], rel=1e-9)
    assert together["a"].busy_s[key(0)] == pytest.approx(alone.busy_s[key(0)], rel=1e-9)


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([None, 0.0, 0.004]), st.sampled_from([0.0, 2.0]))
def test_tickets_in_full_the_numbers_are_the_same(seed, delay_s, items_sd):
    rng = np.random.default_rng(seed)
    at = {f: np.sort(rng.uniform(0, 2.0, 150)) for f in "ab"}
    found = []
    for router in ("fifo", f"{__name__}:Reader"):
        services = {f: [service(f, 8.0, 0.2, 1.0), service(f, 11.0, 0.2, 1.0)] for f in "ab"}
        level = shared(services, router, 3, batch_delay_s=delay_s, items=2.0, items_sd=items_sd)
        first = level.windows({f: a[a < 1.0] for f, a in at.items()}, 1.0)
        second = level.windows({f: a[a >= 1.0] for f, a in at.items()}, 9.0)
        found.append(
            [(w.latency_ms.tolist(), dict(w.joules), w.queued) for one in (first, second) for w in one.values()]
        )
    assert found[0] == found[1]


def test_items_are_drawn_by_request_and_cost_time_and_joules():
    level = shared({"a": [service("a")]}, items=4.0, items_sd=2.0)
    at = np.arange(3000) * 0.1
    found = level.windows({"a": at}, 301.0)["a"]
    items = found.latency_ms - 10.0 + 1.0
    assert np.allclose(items, np.rint(items))
    assert (items.min(), items.max()) == pytest.approx((1.0, 8.0))
    assert np.mean(items) == pytest.approx(4.05, abs=0.15)
    assert found.joules[key(0)] == pytest.approx(WATTS * found.latency_ms.sum() / 1e3)


def test_between_profiled_batches_it_is_interpolated_and_beyond_them_in_proportion():
    points = service("a").points
    assert operating_point(points, 3.0).mean_ms == pytest.approx(12.0)
    assert operating_point(points, 0.5) == points[0]
    assert operating_point(points, 16.0).mean_ms == pytest.approx(34.0)


STAGES = ("a@1of2", "a@2of2")


def chained(first_ms=10.0, second_ms=6.0, credits=64, gap_ms=0.0, same=False, **flow):
    """A family in two stages on separate slices, or on one and the same, and a neighbour on the second's."""
    routes, found = {}, {}
    places = {STAGES[0]: (0, first_ms), STAGES[1]: (0 if same else 1, second_ms), "b": (1, 6.0)}
    for model, (slice_, mean_ms) in places.items():
        one = target(slice_, f"{model[0]}-l", 1.0, credits)
        routes[model] = replace(route([one], "fifo", 10**6), family=model)
        found[model] = {key(slice_): service(model, mean_ms, gap_ms=gap_ms)}
    flows = dict.fromkeys("ab", Flow(None, 50.0, **{"items_max": 8.0, **flow}))
    return request_engine(routes, found, np.random.default_rng(3), flows, shares=True)


def test_what_a_stage_answers_the_next_is_asked_and_it_is_one_answer():
    level = chained(gap_ms=2.0)
    found = level.windows({"a": seconds(0, 1), "b": seconds()}, 1.0)
    first, second, b = (found[model] for model in (*STAGES, "b"))
    # 1 there, 10 computed, 1 back; as much again with 6. The second request waits for the first stage, not the second.
    assert second.latency_ms == pytest.approx([20.0, 29.0])
    assert (first.arrived, first.answered, second.arrived, second.answered, b.answered) == (2, 0, 0, 2, 0)
    assert first.joules[key(0)] == pytest.approx(WATTS * 0.020)
    assert second.joules[key(1)] == pytest.approx(WATTS * 0.012)
    assert [s * 1e3 for s in first.passed_s_by[key(0)]] == pytest.approx([20.0, 29.0])  # the latency of the whole
    assert first.latency_s_by == {key(0): []}
    assert not second.passed_s_by


def test_a_pipeline_is_that_by_which_the_planner_places():
    """The same requests as in the simulator that guides AlpaServe's selection."""
    at = np.cumsum(np.random.default_rng(5).exponential(0.012, 400))
    guided = Pipelines({"a": ((Stage(0, 0.010), Stage(1, 0.006)),)}, 2, 1410)
    expected = sorted(answer.latency_s for answer in guided.serve([(s, "a") for s in at], np.inf))
    found = chained().windows({"a": at, "b": seconds()}, 60.0)[STAGES[1]]
    assert sorted(found.latency_ms / 1e3) == pytest.approx(expected)


def test_stages_on_one_slice_slow_each_other_and_routes_may_change_between_them():
    level = chained(same=True)
    alone = level.windows({"a": seconds(0), "b": seconds()}, 0.5)[STAGES[1]]
    assert alone.latency_ms == pytest.approx([16.0])
    both = level.windows({"a": 0.5 + seconds(0, 9), "b": seconds()}, 1.0)[STAGES[1]]
    assert both.latency_ms[0] == pytest.approx(10 + stretch(0.6, 0.6) * 6)  # the second one's first stage is beside
    # A plan that serves it whole: who is between two stages has no stage to go to, and is refused once none comes back.
    level.windows({"a": 1.0 + seconds(0), "b": seconds()}, 1.005)
    whole = replace(route([target(1, "a-l", 1.0, 64)], "fifo", 10**6), family="a")
    level.set_routes(1.005, {"a": whole}, {"a": {key(1): service("a", 5.0)}})
    later = level.windows({"a": seconds(1100), "b": seconds()}, 40.0)
    assert later["a"].latency_ms == pytest.approx([5.0])
    assert later[STAGES[1]].rejected == 1
    assert not level._under_way


def test_a_request_has_as_many_items_in_each_stage():
    level = chained(items=2.0, items_sd=1.0, batch_delay_s=None)
    level.windows({"a": seconds(*range(0, 400, 40)), "b": seconds()}, 0.365)
    rest = level.windows({"a": seconds(), "b": seconds()}, 2.0)[STAGES[1]]
    more_ms = (rest.latency_ms - 16.0) / 2
    assert more_ms == pytest.approx(np.rint(more_ms))  # a millisecond for each item more, twice

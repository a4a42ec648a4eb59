"""The engine of single requests: each ends once. Then the laws of queues."""

import math
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dispatcher.routers import ROUTERS
from dispatcher.routers.fifo import Fifo
from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import key, route, target
from trefoil.core.errors import SettingError
from trefoil.core.parts import Kind, load_part
from trefoil.core.queueing import ServerClass, ServiceTime, arrivals_s, erlang_c, serve_shared, serve_weighted
from trefoil.simulator.engines.engine import SliceService
from trefoil.simulator.scenario.arrivals import ArrivalStream, Rate

VARIANTS = ("digits-xs", "digits-m", "digits-l")


class Level:
    """One family alone."""

    def __init__(self, table, services, rng, overhead_ms=0.0):
        self.whole = request_engine({"digits": table}, {"digits": services}, rng, overhead_ms=overhead_ms)

    def set_routes(self, now_s, table, services):
        self.whole.set_routes(now_s, {"digits": table}, {"digits": services})

    def serve(self, arrivals_s, until_s):
        return self.whole.windows({"digits": arrivals_s}, until_s)["digits"]


class Reader(Fifo):
    """A router that checks what it gets."""

    def on_done(self, ticket, pick, outcome, now_s):
        assert ticket.family == "digits"
        assert outcome.latency_ms >= outcome.service_ms - 1e-6
        super().on_done(ticket, pick, outcome, now_s)


@pytest.fixture(autouse=True, scope="module")
def _own_router() -> None:
    load_part(Kind.ROUTER, f"{__name__}:Reader", ROUTERS)


def service(variant="digits-l", mean_ms=20.0, cv=0.1, gap_ms=0.0):
    return SliceService(ServiceTime(mean_ms, cv), 0.9, 1.0, variant, "digits", gap_ms)


def engine(slices, rate_per_s, requests, router="fifo", credits=1, seed=3, requests_max=10**6, **kwargs):
    """A pool of `slices` = [(weight, SliceService)] under Poisson arrivals; all but the first tenth of the requests."""
    targets = [target(i, s.variant, w, credits) for i, (w, s) in enumerate(slices)]
    services = {t.slice: s for t, (_, s) in zip(targets, slices, strict=True)}
    rng = np.random.default_rng(seed)
    made = Level(route(targets, router, requests_max), services, rng, **kwargs)
    at = arrivals_s(rate_per_s, 1.0, requests, rng)
    first = requests // 10
    made.serve(at[:first], at[first])
    return made.serve(at[first:], at[-1] + 1e-6)


tables = st.lists(
    st.tuples(
        st.integers(0, 5),
        st.sampled_from(VARIANTS),
        st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0]),
        st.integers(1, 3),
        st.booleans(),
    ),
    max_size=6,
    unique_by=lambda each: each[0],
)
routers = st.sampled_from(["fifo", "weighted", "tests.unit.simulator.test_request_engine:Reader"])
steps = st.lists(
    st.tuples(
        tables,
        routers,
        st.integers(0, 60),  # arrivals
        st.floats(0.001, 2.0),  # over so many seconds
        st.sampled_from([3, 20, 10**6]),  # queue bound
        st.sampled_from([0.0, 0.2, 1.0]),  # cv
        st.sampled_from([0.0, 3.0, 40.0]),  # gap
        st.booleans(),  # a window without a new table
    ),
    min_size=1,
    max_size=6,
)
CARRY = [
    ([(0, "digits-l", 1.0, 2, False), (1, "digits-xs", 1.0, 1, False)], "weighted", 60, 0.1, 20, 0.2, 3.0, False),
    ([(1, "digits-xs", 1.0, 1, False), (0, "digits-l", 1.0, 1, True)], "fifo", 30, 0.1, 3, 0.2, 3.0, False),
    ([], "fifo", 5, 30.0, 20, 0.2, 3.0, False),
    ([(2, "digits-m", 1.0, 3, False)], "weighted", 40, 1.0, 20, 0.0, 40.0, True),
]


@given(steps=steps, seed=st.integers(0, 2**32 - 1), lattice=st.booleans())
@example(steps=CARRY, seed=1, lattice=False)
@example(steps=CARRY, seed=1, lattice=True)
@settings(max_examples=150, deadline=None)
def test_every_request_ends_once_and_no_slice_computes_longer_than_a_window(steps, seed, lattice):
    """Over tables that come and go, other routers, variants swapped on a live slice, full queues, carried requests."""
    chance = np.random.default_rng(seed)
    made = Level(route([]), {}, np.random.default_rng(seed), 2.0)
    now_s, arrived, ended = 0.0, 0, 0
    for table, router, count, length_s, bound, cv, gap_ms, keep in steps:
        if not keep:
            targets = [target(n, v, w, c, d) for n, v, w, c, d in table]
            services = {
                t.slice: service(t.variant, 10.0 * (1 + VARIANTS.index(t.variant)), cv, gap_ms) for t in targets
            }
            made.set_routes(now_s, route(targets, router, bound), services)
        at = np.sort(now_s + length_s * chance.random(count))
        if lattice:  # arrivals and answers at the same instants
            at = np.floor(at * 200) / 200
        at = at[(at >= now_s) & (at < now_s + length_s)]
        now_s += length_s
        one = made.serve(at, now_s)
        assert one.answered == sum(one.answered_by.values()) == one.latency_ms.size
        arrived += one.arrived
        ended += one.answered + one.rejected
        assert arrived - ended >= one.queued >= 0
        assert all(0 <= busy <= length_s + 1e-9 for busy in one.busy_s.values())
    targets = [target(9, "digits-xs", 1.0, 1)]
    made.set_routes(now_s, route(targets, "fifo", 10**6), {key(9): service("digits-xs", 1.0)})
    last = made.serve(np.empty(0), now_s + 1000.0)
    assert ended + last.answered + last.rejected == arrived
    assert last.queued == 0


def test_windows_of_any_length_add_up_to_the_same():
    at = arrivals_s(90.0, 1.0, 4000, np.random.default_rng(1))
    targets = [target(n, VARIANTS[n % 2], 0.5, 2) for n in range(2)]
    services = {t.slice: service(t.variant, gap_ms=4.0) for t in targets}

    def run(edges):
        made = Level(route(targets, "weighted", 100), services, np.random.default_rng(2))
        return [made.serve(at[(at >= a) & (at < b)], b) for a, b in pairwise(edges)]

    (whole,) = run([0.0, 60.0])
    parts = run([0.0, 0.001, 7.0, 7.5, 33.3, 60.0])
    assert np.concatenate([each.latency_ms for each in parts]).tolist() == whole.latency_ms.tolist()
    assert sum(each.rejected for each in parts) == whole.rejected
    for slice_ in services:
        assert sum(each.busy_s[slice_] for each in parts) == pytest.approx(whole.busy_s[slice_])


@pytest.mark.parametrize("router", ["fifo", "weighted"])
def test_of_what_was_served_nothing_is_kept(router):
    targets = [target(n, VARIANTS[n % 2], 0.25, 2) for n in range(4)]
    services = {t.slice: service(t.variant) for t in targets}
    made = Level(route(targets, router, 20), services, np.random.default_rng(2))
    source = ArrivalStream(Rate(np.zeros(1), np.full(1, 250.0)), 1.0, np.random.default_rng(3))  # 5/4 of what they can
    sizes = []
    tracemalloc.start()
    for block in range(1, 25):
        window = made.serve(source.until(block * 4.0), block * 4.0)
        assert window.rejected > 0 or block == 1
        del window
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert sizes[-1] < sizes[4] + 150_000  # 20,000 requests later; a block of gaps comes and goes


# ------------------------------------------------------------------------------------------------ theory


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (2, 0.7), (8, 0.85)])
def test_exponential_service_waits_as_erlang_says(servers, load):
    window = engine([(1 / servers, service(mean_ms=100.0, cv=1.0))] * servers, 10.0 * servers * load, 150_000)
    expected_ms = 100.0 * (1 + erlang_c(servers, load) / (servers * (1 - load)))
    assert np.mean(window.latency_ms) == pytest.approx(expected_ms, rel=0.04)
    busy = sum(window.busy_s.values()) / servers / (window.ends_s - window.starts_s)
    assert busy == pytest.approx(load, rel=0.02)


def test_constant_service_waits_as_pollaczek_and_khinchine_say():
    window = engine([(1.0, service(mean_ms=100.0, cv=0.0))], 7.0, 150_000)
    assert np.mean(window.latency_ms) == pytest.approx(100.0 * (1 + 0.7 / (2 * 0.3)), rel=0.03)


def test_a_pool_of_unequal_slices_follows_the_kernel_of_the_planner():
    fast, slow = service("digits-xs", 10.0, 0.2), service("digits-l", 40.0, 0.2)
    window = engine([(0.25, fast)] * 2 + [(0.25, slow)] * 2, 180.0, 120_000)
    at = arrivals_s(180.0, 1.0, 120_000, np.random.default_rng(8))
    kernel = serve_shared([ServerClass(2, fast.service), ServerClass(2, slow.service)], at, np.random.default_rng(9))
    share = (window.answered_by[key(0)] + window.answered_by[key(1)]) / window.answered
    assert share == pytest.approx(float(np.mean(kernel.chosen == 0)), abs=0.02)
    assert np.quantile(window.latency_ms, 0.95) == pytest.approx(kernel.quantile_ms(0.95), rel=0.05)


def test_the_weighted_router_is_never_worse_than_the_kernel_that_splits_by_chance():
    """The kernel sends each request by an independent draw; turns are more regular, so waits are shorter."""
    fast, slow = service("digits-xs", 10.0, 0.2), service("digits-l", 40.0, 0.2)
    window = engine([(0.4, fast), (0.4, fast), (0.1, slow), (0.1, slow)], 150.0, 120_000, "weighted")
    at = arrivals_s(150.0, 1.0, 120_000, np.random.default_rng(8))
    classes = [ServerClass(2, fast.service, 0.8), ServerClass(2, slow.service, 0.2)]
    kernel = serve_weighted(classes, at, np.random.default_rng(9))
    share = (window.answered_by[key(0)] + window.answered_by[key(1)]) / window.answered
    assert share == pytest.approx(0.8, abs=0.001)
    p95_ms = np.quantile(window.latency_ms, 0.95)
    assert 0.75 * kernel.quantile_ms(0.95) < p95_ms < 1.02 * kernel.quantile_ms(0.95)


def test_one_server_under_the_weighted_router_is_the_kernel_of_the_planner():
    window = engine([(1.0, service(mean_ms=20.0, cv=0.3))], 35.0, 120_000, "weighted")
    at = arrivals_s(35.0, 1.0, 120_000, np.random.default_rng(8))
    kernel = serve_weighted([ServerClass(1, ServiceTime(20.0, 0.3))], at, np.random.default_rng(9))
    for q in (0.5, 0.95):
        assert np.quantile(window.latency_ms, q) == pytest.approx(kernel.quantile_ms(q), rel=0.05)


# ------------------------------------------------------------------------------------------------ gap, credits, bounds


def saturated_per_s(credits, gap_ms):
    window = engine([(1.0, service(mean_ms=10.0, cv=0.0, gap_ms=gap_ms))], 1000.0, 4000, "fifo", credits)
    return window.answered / (window.ends_s - window.starts_s)


def test_one_credit_leaves_the_slice_idle_for_a_gap_and_a_second_one_hides_it():
    assert saturated_per_s(1, 0.0) == pytest.approx(100.0, rel=0.01)
    assert saturated_per_s(1, 2.0) == pytest.approx(1000.0 / 12.0, rel=0.01)
    assert saturated_per_s(2, 2.0) == pytest.approx(100.0, rel=0.01)


def test_a_lone_request_takes_service_gap_and_overhead():
    made = Level(route([target(0)]), {key(0): service(mean_ms=10.0, cv=0.0, gap_ms=2.0)}, np.random.default_rng(1), 3.0)
    window = made.serve(np.array([0.5]), 1.0)
    assert window.latency_ms == pytest.approx([15.0])
    assert window.busy_s[key(0)] == pytest.approx(0.010)


def test_busy_time_belongs_to_the_window_in_which_it_passes():
    made = Level(route([target(0)]), {key(0): service(mean_ms=100.0, cv=0.0)}, np.random.default_rng(1))
    first = made.serve(np.array([0.0, 0.05]), 0.13)
    second = made.serve(np.empty(0), 0.30)
    assert first.answered_by[key(0)] == 1
    assert first.busy_s[key(0)] == pytest.approx(0.13)
    assert second.busy_s[key(0)] == pytest.approx(0.07)
    assert second.latency_ms == pytest.approx([150.0])


def test_beyond_the_bound_of_the_queue_requests_are_refused():
    window = engine([(1.0, service(mean_ms=10.0, cv=0.0))], 300.0, 20_000, requests_max=5)
    assert window.rejected / window.arrived == pytest.approx(2 / 3, abs=0.02)
    assert window.queued <= 5
    assert max(window.latency_ms) <= 61.0


def test_a_slice_that_drains_finishes_what_it_holds_and_who_waits_goes_elsewhere():
    made = Level(
        route([target(0, credits=1)], "weighted"),
        {key(0): service(mean_ms=100.0, cv=0.0)},
        np.random.default_rng(1),
    )
    made.serve(np.array([0.0, 0.01, 0.02]), 0.05)
    fast = service("digits-xs", 10.0, 0.0)
    both = [target(0, credits=1, draining=True), target(1, "digits-xs", credits=1)]
    made.set_routes(0.05, route(both, "weighted"), {key(0): service(mean_ms=100.0, cv=0.0), key(1): fast})
    window = made.serve(np.empty(0), 1.0)
    assert window.answered_by == {key(0): 1, key(1): 2}
    assert sorted(window.latency_ms) == pytest.approx([50.0, 50.0, 100.0])


def test_a_family_that_lost_its_last_slice_waits_for_a_while_and_then_fails():
    made = Level(route([target(0)]), {key(0): service()}, np.random.default_rng(1))
    made.set_routes(1.0, route([]), {})
    assert made.serve(np.array([2.0, 3.0]), 20.9).queued == 2
    late = made.serve(np.array([21.5]), 22.0)
    assert (late.rejected, late.queued) == (3, 0)


def test_unknown_routers_and_queues_are_named():
    rng = np.random.default_rng(1)
    with pytest.raises(SettingError, match="fastest"):
        Level(route([target(0)], "fastest"), {key(0): service()}, rng)


def test_one_slice_draws_the_same_times_whatever_the_others_do():
    """Common random numbers: two plans that share a slice see the same service times there."""

    def lone(extra):
        targets = [target(0, credits=1)] + [target(n, "digits-xs", 0.0, 1, draining=True) for n in range(1, 1 + extra)]
        services = {t.slice: service(t.variant, cv=0.5) for t in targets}
        made = Level(route(targets), services, np.random.default_rng(4))
        return made.serve(np.arange(20) * 1.0, 30.0).latency_ms.tolist()

    assert lone(0) == lone(3)


def test_the_service_law_has_the_mean_and_the_variation_that_it_was_given():
    window = engine([(1.0, service(mean_ms=10.0, cv=0.5))], 0.01, 20_000)  # hardly ever two at once
    alone = window.latency_ms
    assert np.mean(alone) == pytest.approx(10.0, rel=0.03)
    assert np.std(alone) / np.mean(alone) == pytest.approx(0.5, rel=0.04)
    assert Counter(window.answered_by) == {key(0): window.answered}
    assert math.isclose(sum(window.busy_s.values()), np.sum(alone) / 1e3, rel_tol=1e-3)

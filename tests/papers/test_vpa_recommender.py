"""Kubernetes' recommender by hand on three series, and the shares that quotas become against the artifact's turns."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from controller.planners.policy_parts import planner_of
from dispatcher.queues.fifo import FifoQueue
from dispatcher.routers.weighted import Weighted
from tests.support.cpus import cpu_view
from trefoil.core.brains import Ticket
from trefoil.core.cpus.use import HALF_LIFE_S, CpuHistory, bucket_start
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.policies import Policy


def end_of(cores):
    """End of the bucket that a use lies in, written out: 0.01, 0.0205, ... each 5 % wider."""
    edge, width = 0.0, 0.01
    while edge <= cores:
        edge, width = edge + width, width * 1.05
    return edge


def history(*samples):
    """(times, cores, weight, at_s) in turn."""
    found = CpuHistory("resnets", "resnet50")
    for times, cores, weight, at_s in samples:
        for _ in range(times):
            found = found.with_sample(cores, weight, at_s)
    return found


def test_a_steady_use_is_recommended_with_its_margin():
    found = history((30, 2.0, 4.0, 0.0))
    assert found.percentile(0.9) == pytest.approx(end_of(2.0))
    assert end_of(2.0) == pytest.approx(2.0935, abs=1e-4)
    row = Policy("t", "vpa_plus", settings={"planner": {"version": 3, "initial_cores": 1.0}})
    decision = planner_of("", row).plan(replace(cpu_view(), cpu_histories=(found,)), np.random.default_rng(1))
    (part,) = decision.plan.nodes[0].devices[0].slices
    assert (part.key.slice_type, part.hosted[0].variant) == ("cpu:3", "resnet50"), "2.0935 x 1.15 = 2.41, upwards"
    assert "2.41 recommended" in decision.why
    assert decision.degraded.startswith("short_of_capacity"), "the use of a slice that is full says no more"


@pytest.mark.parametrize(("peaks", "cores"), [(10, 1.0), (11, 4.0)])
def test_the_ninetieth_percentile_leaves_out_a_tenth(peaks, cores):
    assert history((100 - peaks, 1.0, 4.0, 0.0), (peaks, 4.0, 4.0, 0.0)).percentile(0.9) == pytest.approx(end_of(cores))


@pytest.mark.parametrize(("days", "cores"), [(1, 4.0), (3, 1.0)])
def test_a_peak_is_forgotten_by_halves_a_day(days, cores):
    """60 samples of 4 cores weigh 30 a day later, of 130: above a tenth; after three days 7.5 of 107.5: below."""
    found = history((60, 4.0, 1.0, 0.0), (100, 1.0, 1.0, days * HALF_LIFE_S))
    assert found.percentile(0.9) == pytest.approx(end_of(cores))
    assert sum(weight for _, weight in found.weights) == pytest.approx(100 + 60 / 2**days)


def test_buckets_and_weights_are_those_of_the_recommender():
    assert [bucket_start(n) for n in range(3)] == pytest.approx([0.0, 0.01, 0.0205])
    assert history((1, 0.0, 0.0, 0.0)).weights == ((0, 0.1),), "a sample weighs a tenth of a core at least"
    assert history((1, 4.0, 8.0, 0.0), (8, 1.0, 0.5, 0.0)).percentile(0.5) == pytest.approx(end_of(4.0))


def turns(quotas, number):
    """The artifact's dispatcher: in round r everybody whose quota is r or more gets a request."""
    found, r = [], 1
    while len(found) < number:
        found += [name for name, quota in quotas.items() if quota >= r]
        r = r + 1 if r < max(quotas.values()) else 1
    return found[:number]


def test_shares_are_those_of_the_artifacts_turns_and_never_further_off():
    quotas = {"resnet50": 17, "resnet101": 27, "resnet152": 31}
    total = sum(quotas.values())
    keys = {name: SliceKey("node0/cpu", "cpu:4", 4 * i, 4) for i, name in enumerate(quotas)}
    router = Weighted("resnets", FifoQueue("resnets"))
    router.on_table(
        Route("resnets", "weighted", "fifo", tuple(
            RouteTarget(keys[name], name, weight=quota / total, credits=1000) for name, quota in quotas.items()
        ), 100, 1 << 20), 0.0,
    )  # fmt: skip
    ours = [
        router.on_arrival(Ticket(i, "resnets", "", "", 1, 0, 0.0, None, 0.0, 0, "", False, False, None), 0.0).variant
        for i in range(total)
    ]
    theirs = turns(quotas, total)
    assert Counter(ours) == Counter(theirs) == quotas, "after a round of all, both have given the quotas"

    def furthest(order):
        given = Counter()
        return max(
            abs((given := given + Counter([name]))[name] - (n + 1) * quotas[name] / total)
            for n, name in enumerate(order)
        )

    assert furthest(ours) <= 1 + 1e-9 < math.floor(furthest(theirs)), "theirs gives the rarest its share first"

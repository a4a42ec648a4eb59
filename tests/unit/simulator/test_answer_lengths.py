"""Queue `ssjf` in simulations: lengths come with requests, predictions by a confusion matrix, on slices of any kind."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import key, route, target
from trefoil.core.queueing import LENGTH_BORDERS, ServiceTime, shortest_first
from trefoil.simulator.engines.answer_lengths import AnswerLengths
from trefoil.simulator.engines.engine import Flow, OperatingPoint, SliceService

PERFECT = tuple(tuple(float(i == j) for j in range(5)) for i in range(5))
BLIND = ((1.0,) * 5,) * 5
MEAN_MS, CV = 100.0, 1.0
AT_S = np.cumsum(np.random.default_rng(4).exponential(MEAN_MS / 1e3 / 0.9, 6000))


def window(shares: bool, queue: str, confusion=None):
    served = replace(route([target(0, credits=1)], "fifo", 10**6), queue=queue)
    point = OperatingPoint(1.0, MEAN_MS, CV, 100.0, 0.5)
    one = {"digits": {key(0): SliceService(ServiceTime(MEAN_MS, CV), 0.9, 10.0, "v", "digits", 0.0, (point,))}}
    rng, until_s = np.random.default_rng(3), float(AT_S[-1]) + 1e5
    flows = {"digits": Flow(None, 50.0, confusion=confusion)}
    level = request_engine({"digits": served}, one, rng, flows, shares=shares)
    return level.windows({"digits": AT_S}, until_s)["digits"]


@pytest.mark.parametrize("shares", [False, True])
def test_predicted_lengths_shorten_the_mean_and_a_blind_prediction_or_none_does_not(shares):
    found = {
        name: window(shares, queue, confusion)
        for name, queue, confusion in (
            ("fifo", "fifo", PERFECT), ("none", "ssjf", ()), ("blind", "ssjf", BLIND), ("perfect", "ssjf", PERFECT),
        )
    }  # fmt: skip
    assert {one.answered for one in found.values()} == {6000}
    mean = {name: float(one.latency_ms.mean()) for name, one in found.items()}
    assert mean["perfect"] < 0.75 * mean["none"]
    assert mean["blind"] == pytest.approx(mean["none"], rel=0.1)
    busy = {name: one.busy_s[key(0)] for name, one in found.items()}
    assert busy["none"] == pytest.approx(busy["perfect"], rel=1e-9), "the same requests take the same time"
    assert busy["fifo"] == pytest.approx(6000 * MEAN_MS / 1e3, rel=0.06)


def test_a_share_is_its_class_and_the_quantile_of_the_law():
    lengths = AnswerLengths(PERFECT, np.random.default_rng(1))
    scores = [lengths.come(n) for n in range(20_000)]
    times = np.array([lengths.service_s(n, ServiceTime(MEAN_MS, CV)) for n in range(20_000)])
    assert lengths.service_s(0, ServiceTime(MEAN_MS, CV)) is None
    assert (times.mean(), times.std()) == (pytest.approx(0.1, rel=0.03), pytest.approx(0.1, rel=0.05))
    borders = np.quantile(times, LENGTH_BORDERS)
    assert np.mean(np.searchsorted(borders, times) == np.array(scores)) > 0.98
    assert AnswerLengths((), np.random.default_rng(1)).come(0) is None


def test_what_shortest_first_saves_is_what_the_law_of_its_classes_says():
    """Of the wait alone, at 0.9 of capacity: the same requests take the same time in both orders."""
    fifo, shortest = (window(False, queue, PERFECT) for queue in ("fifo", "ssjf"))
    service_ms = 1e3 * fifo.busy_s[key(0)] / 6000
    found = (shortest.latency_ms.mean() - service_ms) / (fifo.latency_ms.mean() - service_ms)
    assert found == pytest.approx(shortest_first(CV, 0.9), abs=0.08)
    assert shortest_first(CV, 0.5) > shortest_first(CV, 0.9), "there is more to gain under more load"
    assert shortest_first(0.0, 0.9) == pytest.approx(1.0, abs=0.01), "and nothing where all answers are alike"

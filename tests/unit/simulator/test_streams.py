"""Streams that a simulated slice runs together: by the profile's times and joules of so many, and by the one law."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import key, route, target
from trefoil.core.demand import TokenTimes
from trefoil.core.objective import FamilyOutcome, TokenSlo
from trefoil.core.queueing import ServiceTime, StreamLaw, StreamLimits, arrivals_s
from trefoil.simulator.engines.engine import Flow, OperatingPoint, SliceService, StreamTerms
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Scenario, Served, Zone
from trefoil.simulator.simulation import Simulation

STEPS = 10.0
SLO = TokenSlo(ttft_ms=12.0, ttft_quantile=0.95, tpot_ms=12.0, tpot_quantile=0.95)
POINTS = (OperatingPoint(1.0, 100.0, 0.0, 40.0, 0.5), OperatingPoint(2.0, 150.0, 0.0, 60.0, 0.7))


def engine(points=POINTS, slo=SLO, credits=2, requests_max=10**6):
    """One slice of one family whose streams run together, as many as its largest point has."""
    service = SliceService(ServiceTime(points[0].mean_ms, points[0].cv), 0.9, 4.0, "chat-l", "chat", 0.0, points=points)
    table = replace(route([target(0, "chat-l", 1.0, credits)], "fifo", requests_max), family="chat")
    flow = Flow(None, 0.0, streams=StreamTerms(STEPS, slo))
    return request_engine({"chat": table}, {"chat": {key(0): service}}, np.random.default_rng(3), {"chat": flow})


def test_a_stream_that_joins_slows_the_other_as_the_profile_says_and_both_draw_its_power():
    """The first is half done when the second comes; beside it each takes half as long again."""
    window = engine().windows({"chat": np.array([0.0, 0.05])}, 1.0)["chat"]
    assert window.latency_ms == pytest.approx([50 + 75, 75 + 50])
    assert window.joules[key(0)] == pytest.approx(40.0 * 0.05 + 60.0 * 0.075 + 40.0 * 0.05)
    streams = window.streams
    assert (streams.ttft.total, streams.tpot.total) == (2, 2)
    assert (streams.ttft_asked, streams.tpot_asked) == (2, 2)
    assert streams.ttft_within == 1, "alone it comes after a step of 10 ms; the other waits for the one under way"
    assert 15.0 <= streams.ttft.max_ms <= 30.0
    assert streams.tpot_within == 0
    assert window.tpot_s_by[key(0)] == pytest.approx([(125 - 10) / 9e3, (175 - 65) / 9e3])


def test_a_third_stream_waits_for_a_place_and_one_that_is_refused_misses_its_first_token():
    window = engine(credits=3).windows({"chat": np.array([0.0, 0.0, 0.0])}, 1.0)["chat"]
    assert window.latency_ms == pytest.approx([150, 150, 250])
    assert window.streams.ttft.max_ms == pytest.approx(160)
    refused = engine(requests_max=1).windows({"chat": np.zeros(4)}, 1.0)["chat"]
    assert (refused.rejected, refused.streams.ttft.total, refused.streams.ttft_asked) == (1, 3, 4)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.75])
def test_shares_within_the_limits_are_those_of_the_law_that_plans(load):
    points = tuple(OperatingPoint(n, 400.0 + 60.0 * n, 0.8, 50.0 + 10.0 * n, 0.5) for n in (1, 2, 4, 8))
    answers = tuple(ServiceTime(400.0 + 60.0 * n, 0.8) for n in range(1, 9))
    law = StreamLaw(answers, STEPS)
    rate = load * law.saturation_per_s
    limits = StreamLimits(2000.0, 0.9, TokenSlo(140.0, 0.9, 82.0, 0.9))
    at = arrivals_s(rate, 1.0, 8000, np.random.default_rng(5))
    window = engine(points, limits.tokens, credits=8).windows({"chat": at}, at[-1] + 1e-6)["chat"]
    wanted, found = law.load(rate, limits), window.streams
    assert np.mean(window.latency_ms <= limits.latency_ms) == pytest.approx(wanted.latency, abs=0.04)
    assert found.ttft_within / found.ttft_asked == pytest.approx(wanted.ttft, abs=0.05)
    assert found.tpot_within / found.tpot_asked == pytest.approx(wanted.tpot, abs=0.07)


def test_miad_governs_by_the_time_from_token_to_token():
    wanted = FamilyObjective(slo={"latency_ms": 3000.0, "ttft_ms": 300.0, "tpot_ms": 40.0})
    found = {}
    for governor, own in (("fixed", {}), ("miad", {"governor": {"statistic": "slo"}})):
        asked = Scenario(
            duration_s=200.0,
            policy="base",
            governor=governor,
            parts=own,
            nodes=(Node(devices=("A100-SXM4-40GB",) * 2),),
            families=(Served(name="pydoc", arrivals=Arrivals(rate_per_s=7.0), objective=wanted),),
            carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=200.0)}),
        )
        shell = Simulation(prepare(asked))
        shell.run(shell.end_s)
        found[governor] = result(shell).summary.families["pydoc"]
    for one in found.values():
        assert one.tokens.ttft_attainment >= 0.95
        assert one.tokens.tpot_attainment >= 0.95
        assert one.outcome("pydoc").misses == []
    assert found["miad"].joules_per_request < 0.8 * found["fixed"].joules_per_request
    assert found["fixed"].tokens.tpot_ms_p95 < 20.0 < found["miad"].tokens.tpot_ms_p95 < 40.0


def test_a_run_that_misses_its_objective_of_tokens_saves_nothing():
    times = TokenTimes(50.0, 0.99, 9.0, 0.91)
    slow = times.slow(TokenSlo(60.0, 0.95, 8.0, 0.95))
    kept, late = (FamilyOutcome("chat", 0.95, 1.0, 0.0, None, 10.0, 10.0, each) for each in ((), slow))
    assert not kept.slo_missed
    assert late.slo_missed
    assert late.misses == ["chat misses its TPOT (91.00% in time, 95.00% asked)"]

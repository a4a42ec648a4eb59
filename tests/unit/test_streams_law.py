"""The law of continuous batching against streams that are played step by step."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from trefoil.core.common import ProfileRow
from trefoil.core.objective import TokenSlo
from trefoil.core.queueing import STREAMS_MAX, ServiceTime, StreamLaw, StreamLimits, stream_answers, streams_rate_max

STEPS = 20.0
STEP_MS = (40.0, 44.0, 48.0, 52.0, 56.0, 60.0, 64.0, 68.0)  # by the streams that run
ANSWERS = tuple(ServiceTime(STEPS * step_ms, 0.8) for step_ms in STEP_MS)


def played(rate_per_s, streams, seed):
    """TTFT, TPOT and latency [ms] of streams that join and leave between two steps, shape (3, n)."""
    rng = np.random.default_rng(seed)
    arrive_s = np.cumsum(rng.exponential(1 / rate_per_s, streams))
    lengths = np.maximum(2, np.rint(rng.gamma(1 / 0.64, 0.64 * STEPS, streams))).astype(int)
    now_s, running, waiting, coming, found = 0.0, [], [], 0, []
    while len(found) < streams:
        while coming < streams and arrive_s[coming] <= now_s:
            waiting.append(coming)
            coming += 1
        while waiting and len(running) < len(STEP_MS):
            running.append([waiting.pop(0), 0, 0.0])
        if not running:
            now_s = arrive_s[coming]
            continue
        now_s += STEP_MS[len(running) - 1] / 1e3
        for one in running:
            one[1] += 1
            one[2] = one[2] or now_s
        for number, tokens, first_s in [one for one in running if one[1] >= lengths[one[0]]]:
            found.append((first_s - arrive_s[number], (now_s - first_s) / (tokens - 1), now_s - arrive_s[number]))
        running = [one for one in running if one[1] < lengths[one[0]]]
    return 1e3 * np.array(found[streams // 10 :]).T


def quantile_ms(share, q):
    """The limit [ms] that a share q is within, of a share that grows with it."""
    low, high = 0.0, 60_000.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < q else (low, middle)
    return high


@pytest.mark.parametrize("load", [0.2, 0.5, 0.7, 0.85])
@pytest.mark.parametrize("q", [0.5, 0.9, 0.95])
def test_quantiles_are_those_of_played_streams(load, q):
    law = StreamLaw(ANSWERS, STEPS)
    rate = load * law.saturation_per_s
    for name, times_ms in zip(("ttft", "tpot", "latency"), played(rate, 6000, seed=3), strict=True):

        def share(limit_ms, name=name):
            tokens = TokenSlo(limit_ms, q, limit_ms, q)
            return getattr(law.load(rate, StreamLimits(limit_ms, q, tokens)), name)

        if (
            name != "ttft" or load < 0.8 or q > 0.8
        ):  # a share that waits at all jumps there: no quantile of it is stable
            near = 0.2 if name == "ttft" and load * q > 0.6 else 0.08  # few wait, and those in rows: their p95 is noisy
            assert quantile_ms(share, q) == pytest.approx(np.quantile(times_ms, q), rel=near), name


def test_the_largest_rate_keeps_each_limit_and_a_tighter_one_costs_rate():
    loose = StreamLimits(5000.0, 0.95, TokenSlo())
    rates = [
        streams_rate_max(ANSWERS, STEPS, limits)[0]
        for limits in (
            loose,
            StreamLimits(5000.0, 0.95, TokenSlo(tpot_ms=60.0, tpot_quantile=0.95)),
            StreamLimits(5000.0, 0.95, TokenSlo(tpot_ms=48.0, tpot_quantile=0.95)),
            StreamLimits(5000.0, 0.95, TokenSlo(tpot_ms=40.0, tpot_quantile=0.9)),
            StreamLimits(5000.0, 0.95, TokenSlo(tpot_ms=39.9, tpot_quantile=0.9)),
        )
    ]
    assert all(wide > tight for wide, tight in pairwise(rates[:4]))
    assert rates[4] == 0.0, "not even one alone"
    early = StreamLimits(5000.0, 0.95, TokenSlo(ttft_ms=60.0, ttft_quantile=0.95))
    assert streams_rate_max(ANSWERS, STEPS, early)[0] < rates[0]
    for limits in (loose, StreamLimits(3000.0, 0.9, TokenSlo(120.0, 0.95, 56.0, 0.9))):
        rate, running = streams_rate_max(ANSWERS, STEPS, limits)
        ttft_ms, tpot_ms, latency_ms = played(rate, 6000, seed=5)
        assert np.mean(latency_ms <= limits.latency_ms) >= limits.quantile - 0.03
        if limits.tokens.ttft_ms:
            assert np.mean(ttft_ms <= 120.0) >= 0.95 - 0.03
            assert np.mean(tpot_ms <= 56.0) >= 0.9 - 0.03
        assert running <= 1.05 * rate * latency_ms.mean() / 1e3, "Little's law, without those that wait"
    assert math.isclose(StreamLaw(ANSWERS[:1], STEPS).saturation_per_s, 1e3 / ANSWERS[0].mean_ms)


def test_streams_of_one_slice_are_counted_up_to_a_bound():
    row = ProfileRow("A100-SXM4-40GB", "whole", "chat", "m", 0, 1, 1410, (), 20.0, 22.0, 23.0, 50.0, 5.0, 100.0, 100)
    assert len(stream_answers((row, replace(row, batch=65_536)))) == STREAMS_MAX
    assert len(stream_answers((row, replace(row, batch=64)))) == 64

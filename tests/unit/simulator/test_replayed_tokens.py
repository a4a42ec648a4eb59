"""Traces of language models' requests, replayed: each request at its time, with the tokens of its prompt and answer."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.engines import request_engine
from tests.unit.dispatcher.worlds import key, route, target
from trefoil.comparison.runs import compare
from trefoil.core.errors import SettingError, TraceError
from trefoil.core.objective import TokenSlo
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.engines.engine import Flow, OperatingPoint, SliceService, StreamTerms
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.arrivals import ReplayedArrivals
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.request_trace import read_trace
from trefoil.simulator.scenario.schema import Arrivals, Carbon, FamilyObjective, Node, Scenario, Served, Zone
from trefoil.simulator.simulation import Simulation

HEADER = "arrival_s,context_tokens,generated_tokens\n"
STEP_MS = 10.0


def write(folder, *rows, header=HEADER):
    path = folder / "llm.csv"
    path.write_text(header + "".join(",".join(map(str, row)) + "\n" for row in rows))
    return path


def replayed(path, rate_per_s=0.0, now_s=0.0, per_step=0.0, context=0):
    return ReplayedArrivals(read_trace(path, tokens=True), rate_per_s, now_s, per_step, context)


def window_of(source, until_s, streams_max=2):
    """Window of a slice whose steps take 10 ms, 15 ms for two streams."""
    mean_ms = source.steps.mean() * STEP_MS
    points = (OperatingPoint(1.0, mean_ms, 0.5, 40.0, 0.5), OperatingPoint(2.0, 1.5 * mean_ms, 0.5, 60.0, 0.7))
    service = SliceService(ServiceTime(mean_ms, 0.5), 0.9, 4.0, "l", "chat", 0.0, points=points[:streams_max])
    table = replace(route([target(0, "l", 1.0, streams_max)], "fifo", 100), family="chat")
    terms = StreamTerms(float(source.steps.mean()), TokenSlo(51.0, 0.95, 12.0, 0.95))
    flow = Flow(source, 0.0, streams=terms)
    engine = request_engine({"chat": table}, {"chat": {key(0): service}}, np.random.default_rng(3), {"chat": flow})
    return engine.windows({"chat": source.until(until_s)}, until_s)["chat"]


def test_each_request_takes_the_steps_of_its_own_prompt_and_answer(tmp_path):
    """100 prompt tokens take a step; answers of 9 and 19 tokens take 10 and 20 more."""
    path = write(tmp_path, (0.0, 100, 9), (1.0, 400, 19), (4.0, 100, 9))
    window = window_of(replayed(path, per_step=100.0), 4.0)
    assert window.latency_ms == pytest.approx([110, 240])
    assert window.tokens == 9 + 19
    assert [window.streams.ttft.max_ms, window.streams.ttft_within] == [pytest.approx(50), 2]
    assert window.tpot_s_by[key(0)] == pytest.approx([0.010, 0.010]), "the prompt's steps are not of later tokens"
    assert window.joules[key(0)] == pytest.approx(40.0 * 0.35)


def test_a_request_beyond_the_context_is_refused_and_misses_its_first_token(tmp_path):
    path = write(tmp_path, (0.0, 100, 9), (1.0, 4000, 97), (2.0, 4000, 96))
    window = window_of(replayed(path, context=4096), 3.0)
    assert (window.arrived, window.answered, window.rejected) == (3, 2, 1)
    assert window.latency_ms == pytest.approx([100, 970]), "the one that is refused takes no turn of the next"
    assert (window.streams.ttft_asked, window.streams.ttft_within, window.streams.tpot_asked) == (3, 2, 2)
    assert window.tokens == 9 + 96


def test_a_trace_begins_again_and_is_stretched_to_a_rate_whatever_steps_it_is_read_in(tmp_path):
    path = write(tmp_path, (0.5, 1, 2), (1.0, 3, 4), (3.5, 5, 6))
    source = replayed(path, rate_per_s=1.5, now_s=-2.0)  # 3 requests in 4 s as recorded, in 2 s now
    found = source.until(4.0)
    assert found == pytest.approx([-1.75, -1.5, -0.25, 0.25, 0.5, 1.75, 2.25, 2.5, 3.75])
    assert [source.row(n) for n in range(4)] == [0, 1, 2, 0]
    assert source.mean_per_s(0.0, 200.0) == pytest.approx(1.5)
    stepwise = replayed(path, rate_per_s=1.5, now_s=-2.0)
    assert np.concatenate([stepwise.until(at) for at in (-1.5, -1.5, 0.0, 1.75, 4.0)]).tobytes() == found.tobytes()
    late = replayed(path, rate_per_s=1.5, now_s=-0.5)
    assert late.row(0) == 2, "a shorter warm-up begins at a later request"


def scenario(trace, policy="base", **served):
    wanted = FamilyObjective(slo={"latency_ms": 20_000.0, "ttft_ms": 500.0, "tpot_ms": 60.0})
    terms = {"context_tokens": 1000, "prompt_tokens_per_step": 100.0, **served}
    family = Served(name="pydoc", arrivals=Arrivals(trace=trace, replay=True), objective=wanted, **terms)
    return Scenario(
        duration_s=60.0,
        policy=policy,
        nodes=(Node(devices=("A100-SXM4-40GB",) * 2),),
        families=(family,),
        carbon=Carbon(zones={"demo": Zone(constant_g_per_kwh=300.0)}),
    )


@pytest.fixture
def small(tmp_path):
    """A minute of 60 requests, of which two are beyond 1,000 tokens; 100 in the mean of the others' answers."""
    rows = [(float(n), 1000 if n in (20, 40) else 50 + 10 * (n % 9), 50 + 100 * (n % 2)) for n in range(60)]
    return write(tmp_path, *rows)


def test_a_scenario_plans_for_the_trace_and_counts_its_tokens(small):
    shell = Simulation(prepare(scenario(small)))
    assert shell.inputs.estimate.catalog.family("pydoc").tokens_mean == 100
    shell.run(shell.end_s)
    found = result(shell).summary
    one = found.families["pydoc"]
    assert (one.arrived, one.rejected) == (60, 2)
    assert one.tokens.ttft_attainment == pytest.approx(58 / 60, abs=1 / 60)
    assert one.tokens.tpot_attainment == 1.0
    tokens = 1e3 * one.grams_per_request * one.answered / one.grams_per_1000_tokens
    assert tokens == pytest.approx(100 * one.answered, rel=0.03)
    assert tokens == pytest.approx(round(tokens)), "whole tokens, counted"


def test_policies_are_compared_at_the_trace(small):
    found = compare(scenario(small), ("base", "exact"), jobs=1)
    (case,) = found.cases
    assert "60 requests in 60 s, mean 1/s; " in case.traces[0]
    assert "prompt tokens and 100 answer tokens in the mean" in case.traces[0]
    for row in case.rows:
        assert row.mean("rejected") == 2
        assert row.mean("tpot_attainment") >= 0.95
        assert row.mean("grams_per_1000_tokens") > 0
    grams = {row.name: row.mean("grams_per_1000_tokens") for row in case.rows}
    assert grams["exact"] < grams["base"]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"objective": FamilyObjective(slo={"latency_ms": 900.0})}, "arrivals.replay needs an objective of tokens"),
        ({"arrivals": Arrivals(rate_per_s=1.0)}, "context_tokens is of requests of a replayed trace"),
    ],
)
def test_settings_that_mean_nothing_are_refused(small, changed, words):
    served = scenario(small).families[0]
    given = {name: getattr(served, name) for name in ("name", "arrivals", "objective", "context_tokens")}
    with pytest.raises(SettingError, match=words):
        Served(**{**given, **changed})
    with pytest.raises(SettingError, match="set trace, and leave gap_scv out"):
        Arrivals(rate_per_s=1.0, replay=True)


@pytest.mark.parametrize(
    ("header", "row", "words"),
    [
        (
            HEADER,
            (0.0, 12, 0),
            "generated_tokens = 0.0: .*line 2: no number of tokens.*fix or remove that line",
        ),
        (HEADER, (0.0, 1.5, 3), "no number of tokens"),
        (HEADER, (0.0, "x", 3), "no number"),
        (
            "arrival_s,context_tokens\n",
            (0.0, 12),
            "arrivals.replay = .*no columns with the tokens",
        ),
        ("second,requests\n", (0, 12), "rows are not single requests"),
    ],
)
def test_a_trace_without_each_request_s_tokens_is_refused_by_line(tmp_path, header, row, words):
    with pytest.raises(TraceError, match=f"(?s){words}"):
        prepare(scenario(write(tmp_path, row, header=header)))


@pytest.mark.parametrize(
    "header",
    ["TIMESTAMP,ContextTokens,GeneratedTokens\n", "Timestamp,Model,Request tokens,Response tokens\n"],
    ids=["azure", "burstgpt"],
)
def test_published_formats_have_their_tokens(tmp_path, header):
    model = ("m",) if "Model" in header else ()
    times = ("2023-11-16 18:15:46.68", "2023-11-16 18:15:50.99") if not model else (5, 9)
    path = write(tmp_path, *[(at, *model, 374, 44) for at in times], header=header)
    assert read_trace(path, tokens=True).tokens.tolist() == [[374, 44], [374, 44]]
    assert read_trace(path).tokens is None

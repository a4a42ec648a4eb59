"""Streams of a real decoder, live and simulated: equal arrivals and answers, the same first and later tokens."""

import asyncio
import csv
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest

from tests.support.generation import FAMILY, Told, ask, connection, prompts, request
from tests.support.system import RunningSystem, running_system
from tests.support.triton_process import MODELS
from trefoil.core.demand import StreamCounts
from trefoil.core.latency import quantile_ms
from trefoil.core.queueing import service_time
from trefoil.runtime.repository import load_family
from trefoil.simulator.scenario.inputs import prepare
from trefoil.simulator.scenario.schema import Arrivals, Costs, FamilyObjective, Node, Scenario, Served
from trefoil.simulator.simulation import Simulation

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]
SLOWER = 8.0
"""Steps of 104 ms and more: what processes add on a busy machine is little in comparison."""
RATE_PER_S, STREAMS, LONE = 1.4, 80, 9
LEAD_S = 20.0  # until the simulated slice serves
ERROR_MAX = 0.15
BOARD = "A100-SXM4-40GB"
SLO = {"latency_ms": 60_000.0, "ttft_ms": 5_000.0, "tpot_ms": 1_000.0}


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The family's profile, so many times slower."""
    path = tmp_path_factory.mktemp("parity") / "profile.csv"
    lines = (MODELS / FAMILY / "profile.csv").read_text().splitlines()
    head = [line for line in lines if line.startswith("#")]
    rows = list(csv.DictReader(lines[len(head) :]))
    for row in rows:
        for name in ("latency_ms_p50", "latency_ms_p95", "latency_ms_p99", "energy_active_j_per_batch"):
            row[name] = f"{SLOWER * float(row[name]):.6f}"
        row["throughput_per_s"] = f"{float(row['throughput_per_s']) / SLOWER:.6f}"
    with path.open("w", newline="") as file:
        file.write("\n".join(head) + "\n")
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture(scope="module")
def system(profile: Path) -> Iterator[RunningSystem]:
    settings = {
        "family.name": FAMILY, "family.profile_override": profile, "policy": "base", "fleet.devices": f'["{BOARD}"]',
        "demand_initial_per_s": RATE_PER_S, **{f"slo.{name}": value for name, value in SLO.items()},
    }  # fmt: skip
    with running_system(settings, frozen=True) as one:
        yield one


async def added_ms(address: str, profile: Path) -> float:
    """What dispatcher, Triton and its stub add to a step: median of streams alone, none of those that are judged."""
    family, rows = load_family(MODELS / FAMILY, profile)
    row = next(r for r in rows if (r.variant, r.slice_type, r.batch) == (family.best.name, "7g.40gb", 1))
    step_ms = service_time(row).mean_ms / (family.tokens_mean + 1)
    alone = [await ask(address, request(prompts()[-n], 2, trefoil_receipt=True)) for n in range(1, LONE + 1)]
    return max(0.0, median([one.final["trefoil_ttft_ms"] for one in alone]) - step_ms)


async def played_live(address: str) -> tuple[list[float], list[Told]]:
    """When each stream was asked for [s], and its outcome."""
    wanted_s = np.cumsum(np.random.default_rng(11).exponential(1 / RATE_PER_S, STREAMS)).tolist()
    async with connection(address) as channel:
        began_s = time.monotonic()

        async def one(number: int) -> tuple[float, Told]:
            await asyncio.sleep(began_s + wanted_s[number] - time.monotonic())
            asked_s = time.monotonic() - began_s
            return asked_s, await ask(channel, request(prompts()[number], trefoil_receipt=True), timeout_s=120.0)

        found = await asyncio.gather(*map(one, range(STREAMS)))
    return [at_s for at_s, _ in found], [told for _, told in found]


def simulated(profile: Path, trace: Path, ends_s: float, gap_ms: float) -> StreamCounts:
    """The same streams in the simulator, which has ended before the trace begins again."""
    arrivals = Arrivals(trace=trace, replay=True)
    served = Served(name=FAMILY, profile=profile, arrivals=arrivals, objective=FamilyObjective(slo=SLO))
    span_s, nodes, costs = ends_s + LEAD_S, (Node(devices=(BOARD,)),), Costs(gap_ms=gap_ms)
    played = Scenario(policy="base", duration_s=span_s, warmup_s=0, nodes=nodes, families=(served,), costs=costs)
    shell = Simulation(prepare(played))
    shell.run(shell.end_s)
    return shell.ledger.total[FAMILY].streams


async def test_first_and_later_tokens_come_as_the_simulator_says(
    system: RunningSystem, profile: Path, tmp_path: Path
) -> None:
    gap_ms = await added_ms(system.inference, profile)
    asked_s, told = await played_live(system.inference)
    assert not [one.error for one in told if one.error]
    trace = tmp_path / "streams.csv"
    rows = sorted((LEAD_S + at_s, 1, len(one.tokens)) for at_s, one in zip(asked_s, told, strict=True))
    text = "".join(f"{at_s:.6f},{prompt},{tokens}\n" for at_s, prompt, tokens in rows)
    trace.write_text("arrival_s,context_tokens,generated_tokens\n" + text)
    played, missed = simulated(profile, trace, rows[-1][0], gap_ms), list[str]()
    print(f"processes add {gap_ms:.1f} ms to a stream alone")
    for name, of in (("ttft", played.ttft), ("tpot", played.tpot)):
        live = [one.final[f"trefoil_{name}_ms"] for one in told if f"trefoil_{name}_ms" in one.final]
        assert len(live) == of.total > 0.9 * STREAMS
        pairs = {
            "mean": (fmean(live), of.sum_ms / of.total),
            "p50": (float(np.quantile(live, 0.5)), quantile_ms(of, 0.5)),
            "p95": (float(np.quantile(live, 0.95)), quantile_ms(of, 0.95)),
        }
        print(
            name, {what: f"live {a:.1f} ms, simulated {b:.1f} ms, {b / a - 1:+.1%}" for what, (a, b) in pairs.items()}
        )
        missed += [name] if abs(pairs["mean"][1] / pairs["mean"][0] - 1) > ERROR_MAX else []
    assert not missed

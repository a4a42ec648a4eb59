"""Two families on three GPUs by `trefoil up`: they pack, one GPU sleeps, wakes under load, and sleeps again."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.system import DEADLINE_S, RunningSystem
from tests.support.twin_family import TWIN, two_families
from trefoil.cli.load.generator import LoadSpec, RateProfile, run_load
from trefoil.cli.load.result import LoadResult
from trefoil.core.fleet import DeviceState
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GPUS = ("node0/gpu0", "node0/gpu1", "node0/gpu2")
SHARED = GPUS[1]


@pytest.fixture(params=["wattwiser", "packed_uniform"])
def system(request, tmp_path):
    repository = two_families(tmp_path / "models", batched=True)
    one = RunningSystem({
        "policy": request.param, "objective_type": "instant", "family.repository": str(repository),
        "more_families": f'[{{name = "{TWIN}", demand_initial_per_s = 10.0}}]',
        "fleet.devices": json.dumps(["A100-SXM4-40GB"] * 3), "demand_initial_per_s": 10.0, "slo.latency_ms": 250.0,
        "availability.replicas_min": 1, "availability.spread_min": 1,
    })  # fmt: skip
    try:
        one.up()
        yield one
    finally:
        one.close()


async def served(system: RunningSystem, images: Path) -> tuple[dict[str, LoadResult], list[frozenset[str]]]:
    """A wave of one family beside a steady other one; the GPUs awake, second by second."""
    waves = {
        "digits": ((0.0, 10.0), (8.0, 10.0), (12.0, 62.0), (30.0, 62.0), (33.0, 10.0), (60.0, 10.0)),
        TWIN: ((0.0, 10.0), (60.0, 10.0)),
    }
    awake: list[frozenset[str]] = []

    async def watch() -> None:
        async with system.client() as client:
            while True:
                nodes = await client.nodes()
                awake.append(frozenset(d.device for n in nodes for d in n.devices if d.state == DeviceState.AWAKE))
                await asyncio.sleep(0.5)

    watching = asyncio.create_task(watch())
    specs = {
        family: LoadSpec(RateProfile(points), images, family, seed=3, deadline_s=DEADLINE_S)
        for family, points in waves.items()
    }
    try:
        loads = [run_load(spec, system.inference, clock=WallClock()) for spec in specs.values()]
        return dict(zip(specs, await asyncio.gather(*loads), strict=True)), awake
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def test_exact_puts_two_families_on_one_gpu_and_the_other_sleeps(tmp_path):
    system = RunningSystem({
        "policy": "exact", "preset": "shared_slices", "objective_type": "instant", "slo.latency_ms": 300.0,
        "family.repository": str(two_families(tmp_path / "models")), "demand_initial_per_s": 4.0,
        "more_families": f'[{{name = "{TWIN}", demand_initial_per_s = 4.0}}]',
        "fleet.devices": json.dumps(["Tesla V100-SXM2-32GB"] * 2), "accuracy.below_best_pct": 5.0,
        "availability.replicas_min": 1, "availability.spread_min": 1,
    })  # fmt: skip
    images = Path("model_repository/digits/heldout.npz")
    specs = [LoadSpec(RateProfile.constant(4.0, 10.0), images, f, seed=3) for f in ("digits", TWIN)]

    async def served():
        loads = await asyncio.gather(*(run_load(spec, system.inference, clock=WallClock()) for spec in specs))
        async with system.client() as client:
            return loads, [d for node in await client.nodes() for d in node.devices]

    try:
        system.up()
        results, devices = asyncio.run(served())
    finally:
        system.close()
    for result in results:
        assert {record.code for record in result.records} == {"OK"}
        assert np.mean([record.correct for record in result.records]) > 0.8
    awake = [d for d in devices if d.state == DeviceState.AWAKE]
    assert [[h.family for h in s.hosted] for d in awake for s in d.slices] == [["digits", TWIN]]


def test_the_shared_gpu_sleeps_until_it_is_needed_and_no_request_fails(system):
    images = Path("model_repository/digits/heldout.npz")
    found, awake = asyncio.run(served(system, images))
    for family, result in found.items():
        assert {record.code for record in result.records} == {"OK"}, family
        assert np.mean([record.correct / record.items for record in result.records]) > 0.95, family
    assert all({GPUS[0], GPUS[2]} <= each for each in awake)
    slept = [SHARED not in each for each in awake]
    woken = slept.index(False)
    print(
        f"{[len(r.records) for r in found.values()]} requests; awake by half seconds: {[len(each) for each in awake]}"
    )
    assert all(slept[:6]), "it sleeps while one GPU a family is enough"
    assert woken > 6
    assert slept[-1], "and again when the wave is over"
    loaded = system.ask("family", "load", TWIN, GPUS[0])
    assert loaded["devices"] == {GPUS[2]: 1, GPUS[0]: 2, SHARED: 2}
    assert "the last copy" not in system.ask("family", "unload", "digits", SHARED)["degraded"]
    assert "the last copy of digits" in system.refused("family", "unload", "digits", GPUS[0])
    assert "no node reports this device" in system.refused("family", "load", "digits", "node0/gpu7")

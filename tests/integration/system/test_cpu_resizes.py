"""Slices of this machine's CPUs that are resized under load, and shares by quotas: `trefoil up`, real Tritons."""

import asyncio
import hashlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from power_agent.runtimes.cgroup import PERIOD_US
from tests.support import leftovers
from tests.support.system import DEADLINE_S, RunningSystem
from trefoil.cli.load.generator import LoadSpec, RateProfile, run_load
from trefoil.cli.load.result import OK, LoadResult
from trefoil.cli.system_client import SystemClient
from trefoil.core.device_types import QUOTA_PLACES, slice_cores, slice_servers
from trefoil.core.fleet import SliceState, SliceStatus
from trefoil.core.plan import RolloutState
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.slow]

FAMILY = "resnets"
IMAGES = Path(f"model_repository/{FAMILY}/heldout.npz")
RATE_PER_S = 5.0
MIXED_PER_S = 22.0  # planned for: more than the best variant carries on one core
RESIZES = 50
# Version and cores: up and down, from one instance to two and back, another variant now and then.
SIZES = ((1, 0.3), (1, 0.6), (1, 1.2), (1, 0.4), (2, 0.8), (2, 0.5), (2, 1.1))
RESIZE_S_MAX = 120.0
REGIONS = Path("/dev/shm")
GROUPS = Path("/sys/fs/cgroup")
SERVING = (SliceState.READY, SliceState.SWAPPING)


def system_of(policy: str, **settings: Any) -> RunningSystem:
    """One family on quotas of this machine's cores."""
    return RunningSystem({
        "policy": policy, "objective_type": "instant", "family.name": FAMILY, "fleet.kind": "real",
        "power_agent.cpu": "serve", "slo.percentile": 99.0, "slo.latency_ms": 750.0,
        "availability.replicas_min": 1, "availability.spread_min": 1, "params.core_step": 0.1, **settings,
    })  # fmt: skip


@pytest.fixture
def resized() -> Iterator[RunningSystem]:
    version, cores = SIZES[-1]
    one = system_of("fixed_size", **{"params.version": version, "params.initial_cores": cores})
    try:
        one.up()
        ports, name = range(*one.launch.triton_ports), agent_name(one)
        assert list(GROUPS.rglob(name)), "it has control groups"
        yield one
    finally:
        one.close()
    assert leftovers.processes(one.state_dir) == []
    assert [path for path in GROUPS.rglob(name) if path.is_dir()] == []
    assert [region for port in ports for region in REGIONS.glob(f"trefoil-*-{port}-*")] == []


def agent_name(system: RunningSystem) -> str:
    """Name of the control groups of a system's agent (power_agent/runtimes/factory.py)."""
    return f"trefoil-{hashlib.sha256(os.fsencode(system.state_dir.resolve() / 'agent')).hexdigest()[:8]}"


@dataclass
class Seen:
    """Cores of slices of CPUs as they were seen during one resize: those that stood, those that served."""

    standing: list[float] = field(default_factory=list)
    serving: list[float] = field(default_factory=list)


async def slices(client: SystemClient) -> list[SliceStatus]:
    return [s for n in await client.nodes() for d in n.devices for s in d.slices if s.state is not SliceState.GONE]


@asynccontextmanager
async def watched(client: SystemClient, seen: list[Seen]) -> AsyncIterator[None]:
    """Every 0.1 s what stands and what serves goes to the last of `seen`."""

    async def watch() -> None:
        while True:
            parts = [(slice_cores(part.key.slice_type), part.state) for part in await slices(client)]
            seen[-1].standing.append(sum(cores for cores, _ in parts))
            seen[-1].serving.append(sum(cores for cores, state in parts if state in SERVING))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(ended, asyncio.CancelledError), ended


async def resize(client: SystemClient, version: int, cores: float) -> SliceStatus:
    """Have another size, and wait until it alone is there."""
    wanted = await client.objective(FAMILY)
    params = {**wanted.params, "version": float(version), "initial_cores": cores}
    await client.set_objective(replace(wanted, params=params))
    async with asyncio.timeout(RESIZE_S_MAX):
        while True:
            found = await slices(client)
            done = (await client.plan()).rollout.state == RolloutState.DONE
            if done and [(p.key.slice_type, p.state) for p in found] == [(f"quota:{cores:.1f}", SliceState.READY)]:
                return found[0]
            await asyncio.sleep(0.1)


@asynccontextmanager
async def loaded(system: RunningSystem, results: list[LoadResult]) -> AsyncIterator[None]:
    """Load as long as the block runs; it continues for a moment, so that what comes last is answered too."""
    stop = asyncio.Event()
    spec = LoadSpec(RateProfile.constant(RATE_PER_S, 3600.0), IMAGES, FAMILY, seed=3, deadline_s=DEADLINE_S)
    playing = asyncio.create_task(run_load(spec, system.inference, clock=WallClock(), stop=stop))
    try:
        await asyncio.sleep(2.0)
        yield
        await asyncio.sleep(2.0)
    finally:
        stop.set()
        results.append(await playing)


def of_slice(system: RunningSystem, part: SliceStatus) -> list[psutil.Process]:
    """Triton of a slice, then its stubs."""
    port = part.grpc_target.rpartition(":")[2]
    triton = next(p for p in system.processes() if p.name() == "tritonserver" and f"--grpc-port={port}" in p.cmdline())
    return [triton, *triton.children(recursive=True)]


def quota_cores(pid: int) -> float:
    """Cores that the kernel lets the control group of a process use."""
    paths = dict(line.split(":", 2)[1:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines())
    if "cpu" in paths:
        folder = GROUPS / "cpu" / paths["cpu"].lstrip("/")
        used, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    else:
        used, period = (GROUPS / paths[""].lstrip("/") / "cpu.max").read_text().split()
    assert int(period) == PERIOD_US
    return int(used) / int(period)


def check_limits(system: RunningSystem, part: SliceStatus, cores: float) -> None:
    """A stub for each request at once, one thread of computing in each, and the quota on all of them."""
    own = of_slice(system, part)
    stubs = [process for process in own if "python_backend_stub" in process.name()]
    assert len(stubs) == slice_servers(part.key.slice_type) >= cores
    for process in own:
        assert quota_cores(process.pid) == pytest.approx(cores)
        assert process.cpu_affinity() == sorted(os.sched_getaffinity(0)), "a quota is pinned nowhere"
        assert process.environ()["OMP_NUM_THREADS"] == "1"


@pytest.mark.timeout(2400)
async def test_fifty_resizes_under_load_fail_no_request_and_stay_within_their_bounds(resized):
    seen, results = [Seen()], list[LoadResult]()
    sizes = [SIZES[n % len(SIZES)] for n in range(-1, RESIZES)]
    async with resized.client() as client, loaded(resized, results), watched(client, seen):
        for version, cores in sizes[1:]:
            seen.append(Seen())
            check_limits(resized, await resize(client, version, cores), cores)
    (result,) = results
    assert Counter(record.code for record in result.records) == {OK: len(result.records)}
    assert result.summary(750.0, 0.99).accuracy > 0.9, "right values"
    bound = QUOTA_PLACES * len(os.sched_getaffinity(0))
    for (old, new), one in zip(pairwise(sizes), seen[1:], strict=True):
        assert min(one.serving) >= min(old[1], new[1]) - 1e-9, (old, new, one.serving)
        assert max(one.standing) <= min(old[1] + new[1], bound) + 1e-9, (old, new, one.standing)
    both = sum(max(one.standing) > max(one.serving[0], one.serving[-1]) + 1e-9 for one in seen[1:])
    print(f"{len(result.records)} requests, {RESIZES} resizes, old and new side by side in {both}")
    assert both > RESIZES / 2


@pytest.mark.timeout(600)
async def test_answers_are_shared_as_the_quotas_of_the_load_say():
    system = system_of(
        "infadapter",
        **{"params.budget_cores": 1.0, "params.tick_s": 600.0},
        demand_initial_per_s=MIXED_PER_S,
    )
    try:
        system.up()
        async with system.client() as client:
            while (plan := await client.plan()).rollout.state != RolloutState.DONE:
                await asyncio.sleep(0.1)
            weights = {target.variant: target.weight for route in plan.plan.routes for target in route.targets}
            assert len(weights) > 1, plan.plan.why
            offered = RateProfile.constant(0.7 * MIXED_PER_S, 30.0)
            spec = LoadSpec(offered, IMAGES, FAMILY, seed=3, deadline_s=DEADLINE_S)
            result = await run_load(spec, system.inference, clock=WallClock())
            assert (await client.plan()).plan.revision == plan.plan.revision
    finally:
        system.close()
    counts = Counter(record.variant for record in result.records if record.code == OK)
    assert counts.total() == len(result.records)
    for variant, weight in weights.items():
        assert counts[variant] / counts.total() == pytest.approx(weight / sum(weights.values()), abs=0.02)


@pytest.mark.timeout(300)
async def test_an_overload_longer_than_the_deadline_is_answered_as_far_as_the_slice_can_and_ends_with_the_load():
    low_per_s, high_per_s, over_s, deadline_s = 8.0, 30.0, 31.0, 5.0
    points = (
        (0.0, low_per_s),
        (5.0, low_per_s),
        (6.0, high_per_s),
        (over_s, high_per_s),
        (32.0, low_per_s),
        (52.0, low_per_s),
    )
    system = system_of("fixed_size", **{"params.version": 4, "params.initial_cores": 0.6})
    try:
        system.up()
        spec = LoadSpec(RateProfile(points), IMAGES, FAMILY, seed=3, deadline_s=deadline_s)
        result = await run_load(spec, system.inference, clock=WallClock())
    finally:
        system.close()
    print(Counter(record.code for record in result.records))
    assert {record.code for record in result.records} == {OK, "DEADLINE_EXCEEDED"}, "more than the slice can serve"
    within_s = over_s - 2 * deadline_s
    within = [record.code for record in result.records if over_s - within_s <= record.intended_s < over_s]
    assert within.count(OK) / within_s > low_per_s, "of about 13 a second"
    assert {record.code for record in result.records if record.intended_s > over_s + 2 * deadline_s} == {OK}

"""Jobs under interactive load, on real Tritons: every item once and right, whatever dies, and requests are not slower.

Three slices of digits-l on CPUs, two dispatchers that share a jobs folder, one Redis. Requests come open loop (Poisson)
to the second dispatcher. First their latency with and without a job beside them, in turns of a few seconds, so that a
noisy machine is the same for both. Joules are compared with a counter: a row has ROW_J by its receipt rate, and Tritons
count the rows that they execute. Then one long job, through which processes are killed with SIGKILL (the dispatcher
that owns it, a Triton), Redis is emptied and the disk of the jobs is full for a while. Each item's answer is compared
with onnxruntime's own for the variant that gave it.

Run: `make e2e-jobs` (`ARGS='--items 10000 --rounds 2'` for a look). Prints a table, writes it to
out/bench/jobs_served.json, exits with 1 where an item is missing, twice or wrong, a request failed, or p95 moved by
more than P95_RATIO_MAX.
"""

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import tritonclient.grpc.aio as triton
from rich.console import Console
from tritonclient.utils import InferenceServerException

from dispatcher.jobs.batching import SHARED
from dispatcher.routing.request_parameters import RECEIPT
from tests.support.dispatching import SERIES, Plane
from tests.support.failing_disk import fill, small_disk
from tests.support.ports import free_ports
from tests.support.redis_server import RedisServer
from tests.support.triton_process import TritonProcess, expected, heldout, hosted
from tests.support.workers import Dispatcher
from tests.unit.dispatcher.worlds import VERSIONS, node, plan, route, status, target
from trefoil.api.jobs import Jobs, JobStatus
from trefoil.cli.demo.results import git_commit, machine, write_json
from trefoil.cli.output import grid
from trefoil.core.common import Basis, Revision
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.fleet import SliceState
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

OUT: Final = CHECKOUT / "out" / "bench"
VERSION: Final = 4
SLICES: Final = 3
SLO_MS: Final = 100.0
READY_S: Final = 90.0
DISK_FULL_S: Final = 10.0
P95_RATIO_MAX: Final = 1.02
ROW_J: Final = 0.5
JOULES_ERROR_MAX: Final = 0.02  # Tritons count probes, too
CLOCK: Final = WallClock()


@dataclass(slots=True)
class Latencies:
    """Latencies of requests [ms] while there was no job (calm) and while there was one (busy), and their errors."""

    calm: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)

    def p95(self, which: str) -> float:
        """95th percentile [ms]."""
        return float(np.quantile(getattr(self, which), 0.95))

    def late(self, which: str) -> int:
        """Requests beyond the objective."""
        return sum(each > SLO_MS for each in getattr(self, which))


class Requests:
    """Open-loop requests to one dispatcher; `into` says where a latency is counted, None = nowhere."""

    def __init__(self, address: str, rate_per_s: float) -> None:
        self.latencies = Latencies()
        self.into: list[float] | None = None
        self.joules = 0.0
        self._client = triton.InferenceServerClient(address)
        self._rate_per_s, self._rng = rate_per_s, np.random.default_rng(5)
        self._under_way: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._send())

    async def _send(self) -> None:
        due_s = CLOCK.monotonic_s()
        while True:
            due_s += self._rng.exponential(1 / self._rate_per_s)
            await asyncio.sleep(max(0.0, due_s - CLOCK.monotonic_s()))
            task = asyncio.create_task(self._one(int(self._rng.integers(300))))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _one(self, n: int) -> None:
        images, _ = heldout()
        tensor = triton.InferInput("IMAGE", [1, 8, 8], "UINT8")
        tensor.set_data_from_numpy(images[n : n + 1])
        began_s, into = CLOCK.monotonic_s(), self.into
        try:
            answer = await self._client.infer("digits", [tensor], client_timeout=30, parameters={RECEIPT: True})
        except InferenceServerException as error:
            self.latencies.failed[str(error.status())] += 1
            return
        self.joules += answer.get_response().parameters[SHARED[0]].double_param
        if into is not None:
            into.append((CLOCK.monotonic_s() - began_s) * 1e3)

    async def stop(self) -> None:
        """Wait for the last answers."""
        self._task.cancel()
        await asyncio.gather(self._task, *self._under_way, return_exceptions=True)
        await self._client.close()


class Machines:
    """Tritons, dispatchers and Redis, and what tells the dispatchers of them."""

    def __init__(self, folder: Path, jobs_dir: Path) -> None:
        self.folder, self.jobs_dir, self.redis = folder, jobs_dir, RedisServer()
        self.state = State.connect(self.redis.url, "jobs", timeout_s=30.0)
        self.plane = Plane(self.state)
        self.tritons: list[TritonProcess] = []
        self.dispatchers: list[Dispatcher] = []
        self._number = 0
        self._keeping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start everything, and wait until requests are answered."""
        for n in range(SLICES):
            self.tritons.append(self._triton(n))
        for one in self.tritons:
            await one.ready([hosted(VERSION)], READY_S)
        await self.publish()
        self._keeping = asyncio.create_task(self._keep())
        for name in ("a", "b"):
            await self.start_dispatcher(name)

    def _triton(self, n: int) -> TritonProcess:
        place = self.folder / f"slice{n}-{self._number}"
        place.mkdir()
        return TritonProcess(place, VERSION)

    async def start_dispatcher(self, name: str) -> Dispatcher:
        """One dispatcher more, that shares the jobs folder."""
        self._number += 1
        peer = f"127.0.0.1:{free_ports(1)[0]}"
        one = Dispatcher(
            self.folder, self.redis.url, "jobs", 1, f"{name}{self._number}", jobs_dir=str(self.jobs_dir), drain_s=0.0,
            peer_address=peer,
        )  # fmt: skip
        self.dispatchers.append(one)
        await one.start()
        async with triton.InferenceServerClient(one.inference) as client:
            await one.serving(client)
        return one

    async def publish(self) -> None:
        """Write nodes and plan as agents and controller do."""
        self._number += 1
        targets = [target(n, "digits-l", 1 / SLICES) for n in range(SLICES)]
        await self._tell_nodes()
        rates = tuple(
            ReceiptRate(target(n).slice, "digits", "digits-l", 0.0, ROW_J, 0.0, Basis.MEASURED) for n in range(SLICES)
        )
        told = ReceiptRates(rates, CLOCK.now_s(), SERIES, 1.0, Revision(1, 1))
        await self.plane.put("controller", self.state.keys.receipts(), told)
        await self.plane.plan(plan([route(targets)], self._number, slo_ms=SLO_MS))

    async def _tell_nodes(self) -> None:
        states = [
            replace(status(n, one.launch.grpc_target, SliceState.READY, "digits-l"), generation=n + 1 + self._number)
            for n, one in enumerate(self.tritons)
        ]
        await self.plane.node(node(states))

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            with contextlib.suppress(Exception):  # of a Redis that is just emptied: the next time
                await self._tell_nodes()

    async def counted_joules(self) -> float:
        """Joules of all rows that the Tritons have executed."""
        rows = 0
        for one in self.tritons:
            async with triton.InferenceServerClient(one.launch.grpc_target) as client:
                told = await client.get_inference_statistics("digits")
                rows += sum(each.inference_count for each in told.model_stats)
        return rows * ROW_J

    async def kill_triton(self) -> None:
        """Kill the last Triton and start it again, as an agent does."""
        self.tritons[-1].process.kill()
        self._number += 1
        self.tritons[-1].close()
        self.tritons[-1] = self._triton(SLICES - 1)
        await self.tritons[-1].ready([hosted(VERSION)], READY_S)
        await self.publish()

    async def empty_redis(self) -> None:
        """Empty Redis; agents and controller write again what they have."""
        self.redis.flush()
        self.plane = Plane(self.state)
        await self.publish()

    async def kill_first_dispatcher(self) -> None:
        """Kill the first dispatcher, whether or not it owns the jobs, and start it again."""
        dying = self.dispatchers.pop(0)
        assert dying.process is not None
        dying.process.kill()
        await dying.process.wait()
        dying.log.close()
        again = await self.start_dispatcher("a")
        self.dispatchers.insert(0, self.dispatchers.pop(self.dispatchers.index(again)))

    def jobs(self) -> Jobs:
        """Client of the second dispatcher's admin port, which is never killed."""
        return Jobs.connect(self.dispatchers[-1].admin_address)

    async def close(self) -> None:
        """Stop everything."""
        if self._keeping is not None:
            self._keeping.cancel()
        for dispatcher in self.dispatchers:
            await dispatcher.stop()
        for one in self.tritons:
            one.close()
        await self.state.close()
        self.redis.close()


@dataclass(frozen=True, slots=True)
class Found:
    """What a run came to. Latencies in ms; `ratio` of p95 with a job to without. `joules`: by
    the receipts of requests and jobs of the first part, and by the counter."""

    items: int
    answered: int
    failed: int
    missing: int
    twice: int
    wrong: int
    seconds: float
    beside_items_per_s: float
    requests: int
    requests_failed: int
    p95_calm_ms: float
    p95_busy_ms: float
    ratio: float
    joules: float
    joules_counted: float
    late_calm: int
    late_busy: int
    epochs: int

    def faults(self, judged: bool) -> list[str]:
        """What is not as it should be; `judged`: latency too."""
        counts = {name: getattr(self, name) for name in ("failed", "missing", "twice", "wrong", "requests_failed")}
        found = [f"{name} = {count}" for name, count in counts.items() if count]
        if judged and self.ratio > P95_RATIO_MAX:
            found.append(f"p95 moved by {100 * (self.ratio - 1):.1f} %")
        if abs(self.joules - self.joules_counted) > JOULES_ERROR_MAX * self.joules_counted:
            found.append(f"joules = {self.joules:.1f}, counted {self.joules_counted:.1f}")
        return found


@contextlib.asynccontextmanager
async def machines(folder: Path, jobs_dir: Path) -> AsyncIterator[Machines]:
    """Machines that run."""
    made = Machines(folder, jobs_dir)
    try:
        await made.start()
        yield made
    finally:
        await made.close()


async def watched(jobs: Jobs, name: str) -> JobStatus:
    """Last status of a job."""
    return await asyncio.to_thread(lambda: list(jobs.watch(name))[-1])


async def submitted(jobs: Jobs, items: int, name: str) -> JobStatus:
    """A job of so many held-out images."""
    images, _ = heldout()
    given = {"IMAGE": images[np.arange(items) % len(images)]}
    by_s = CLOCK.now_s() + 6 * 3600
    return await asyncio.to_thread(lambda: jobs.submit("digits", given, complete_by_s=by_s, id=name))


async def in_turns(run: Machines, requests: Requests, rounds: int, turn_s: float, say: Any) -> float:
    """Requests alone and with a job beside them, in turns; returns items a second of the jobs."""
    jobs, done, busy_s = run.jobs(), 0, 0.0
    for n in range(rounds):
        requests.into = requests.latencies.calm
        await asyncio.sleep(turn_s)
        requests.into = None
        await submitted(jobs, 200_000, f"turn-{n}")
        while (await asyncio.to_thread(jobs.get, f"turn-{n}")).state != "running":
            await asyncio.sleep(0.05)
        before, began_s = (await asyncio.to_thread(jobs.get, f"turn-{n}")).answered, CLOCK.monotonic_s()
        requests.into = requests.latencies.busy
        await asyncio.sleep(turn_s)
        requests.into = None
        done += (await asyncio.to_thread(jobs.get, f"turn-{n}")).answered - before
        busy_s += CLOCK.monotonic_s() - began_s
        await asyncio.to_thread(jobs.cancel, f"turn-{n}")
        await watched(jobs, f"turn-{n}")
        calm_ms, beside_ms = (requests.latencies.p95(which) for which in ("calm", "busy"))
        say(
            f"turn {n + 1} of {rounds}: {done / busy_s:.0f} items/s, p95 {calm_ms:.2f} ms, {beside_ms:.2f} with the job"
        )
    return done / busy_s if busy_s else 0.0


async def troubled(run: Machines, jobs: Jobs, name: str, faults: Sequence[str], items: int, say: Any) -> None:
    """Strike faults one after the other, each once the job has come on."""
    for n, fault in enumerate(faults):
        wanted = items * (n + 1) // (len(faults) + 2)
        while (now := await asyncio.to_thread(jobs.get, name)).answered < wanted and not now.ended:
            await asyncio.sleep(0.02)
        say(f"{fault}, at {now.answered} of {items} items")
        match fault:
            case "kill a dispatcher":
                await run.kill_first_dispatcher()
            case "kill a Triton":
                await run.kill_triton()
            case "empty Redis":
                await run.empty_redis()
            case "fill the disk":
                ballast = fill(run.jobs_dir)
                await asyncio.sleep(DISK_FULL_S)
                say(f"the disk was full: {(await asyncio.to_thread(jobs.get, name)).why[:100]}")
                ballast.unlink()


async def measure(
    folder: Path, jobs_dir: Path, items: int, rate_per_s: float, rounds: int, turn_s: float, faults: Sequence[str],
    say: Any,
) -> Found:  # fmt: skip
    """Run both parts on fresh machines."""
    answers = dict(zip(VERSIONS, expected(folder).values(), strict=True))
    async with machines(folder, jobs_dir) as run:
        counted = -await run.counted_joules()
        requests = Requests(run.dispatchers[1].inference, rate_per_s)
        rate = await in_turns(run, requests, rounds, turn_s, say)
        joules = sum(each.joules for each in await asyncio.to_thread(run.jobs().all)) + requests.joules
        counted += await run.counted_joules()
        jobs, began_s = run.jobs(), CLOCK.monotonic_s()
        await submitted(jobs, items, "long")
        await troubled(run, jobs, "long", faults, items, say)
        last = await watched(jobs, "long")
        seconds = CLOCK.monotonic_s() - began_s
        results = await asyncio.to_thread(lambda: list(jobs.results("long")))
        await requests.stop()
        epochs = len(list((jobs_dir / "long").glob("journal.*")))
    times = Counter(each.item for each in results)
    wrong = 0
    for each in results:
        if each.answer is not None:
            values = answers[each.answer.variant]
            close = np.allclose(each.answer.outputs["PROBABILITIES"][0], values[each.item % len(values)], atol=1e-5)
            wrong += not close
    seen = requests.latencies
    ratio = seen.p95("busy") / seen.p95("calm") if seen.calm and seen.busy else 0.0
    return Found(
        items, last.answered, last.failed, items - len(times), sum(n > 1 for n in times.values()), wrong, seconds,
        rate, len(seen.calm) + len(seen.busy), sum(seen.failed.values()), seen.p95("calm") if seen.calm else 0.0,
        seen.p95("busy") if seen.busy else 0.0, ratio, joules, counted, seen.late("calm"), seen.late("busy"), epochs,
    )  # fmt: skip


FAULTS: Final = ("kill a dispatcher", "empty Redis", "kill a Triton", "fill the disk")


def main(argv: Sequence[str]) -> int:
    """Run it by its options; returns the exit code."""
    parser = argparse.ArgumentParser(description="Jobs under interactive load, on real Tritons.")
    parser.add_argument("--items", type=int, default=100_000)
    parser.add_argument("--rate", type=float, default=30.0, help="interactive requests a second")
    parser.add_argument("--rounds", type=int, default=8, help="turns alone and beside a job")
    parser.add_argument("--turn-s", type=float, default=15.0)
    options = parser.parse_args(argv)
    console = Console(width=140)
    with tempfile.TemporaryDirectory(prefix="trefoil-jobs-") as folder, contextlib.ExitStack() as stack:
        jobs_dir, faults = Path(folder) / "jobs", FAULTS[:-1]
        if os.geteuid() == 0:  # else nothing can be mounted, and no disk is filled
            jobs_dir, faults = stack.enter_context(small_disk(Path(folder) / "disk", "1g")), FAULTS
        found = asyncio.run(
            measure(
                Path(folder), jobs_dir, options.items, options.rate, options.rounds, options.turn_s, faults,
                console.print,
            )
        )  # fmt: skip
    rows = [(name, f"{value:.4g}" if isinstance(value, float) else str(value)) for name, value in asdict(found).items()]
    console.print(grid("Jobs", ("", ""), rows))
    write_json(OUT / "jobs_served.json", {"commit": git_commit(), "machine": machine(), **asdict(found)})
    faults_found = found.faults(judged=True)
    console.print("; ".join(faults_found) or "every item once and right; no request failed or slower")
    return 1 if faults_found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

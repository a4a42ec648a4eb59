"""Several workers, several dispatchers, as processes: killed, added, taken away under load that checks its answers."""

import asyncio
import os
import re
import signal
import urllib.request
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import pytest
import tritonclient.grpc.aio as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb

from protos.dispatcher.v1 import dispatcher_pb2
from tests.support.dispatching import Plane, percents, until
from tests.support.fake_triton import FakeTriton
from tests.support.workers import METHOD, Dispatcher, Load, answered, ask, dispatcher
from tests.unit.dispatcher.worlds import node, plan, route, status, target
from trefoil.runtime.clock import WallClock
from trefoil.runtime.proc import Identity

pytestmark = [pytest.mark.integration, pytest.mark.slow]


class Slice(FakeTriton):
    """Knows how many requests it held at once."""

    in_flight = in_flight_max = 0

    async def ModelInfer(self, request, context):
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        try:
            return await super().ModelInfer(request, context)
        finally:
            self.in_flight -= 1


@pytest.fixture
async def slices(state):
    async with Slice(version=1, latency_s=0.002) as xs, Slice(version=4, latency_s=0.002) as large:
        plane = Plane(state)
        await plane.node(node([status(0, xs.target, variant="digits-xs"), status(1, large.target)]))
        yield plane, xs, large


async def serve(plane, credits, weights=(0.25, 0.75), number=1):
    targets = [target(0, "digits-xs", weights[0], credits), target(1, "digits-l", weights[1], credits)]
    await plane.plan(plan([route(targets)], number=number))


def up(workers, credits):
    """All workers are heard, and all credits are out."""

    def check(table):
        shared = [t.credits for r in table.routes for t in r.targets] == [credits, credits]
        return shared and len(table.workers) == workers and not any(w.why for w in table.workers)

    return check


async def until_told(ask, fits):
    """The first answer that fits. Whoever is asked for all workers leaves out those that take longer than a second."""
    last = None
    try:
        async with asyncio.timeout(60):
            while not fits(last := await ask()):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"still {last}") from None
    return last


async def drain(stub, **request):
    """What every worker says to it."""

    async def ask():
        return await stub.Drain(dispatcher_pb2.DrainRequest(**request))

    return (await until_told(ask, lambda told: not any("DEADLINE_EXCEEDED" in w.why for w in told.workers))).workers


async def counted(address):
    async with triton.InferenceServerClient(address) as client:
        (stats,) = (await client.get_inference_statistics("digits")).model_stats
        return stats.inference_stats.success.count, stats.inference_stats.queue.count, stats.inference_count


async def metrics(one):
    url = f"http://127.0.0.1:{one.ports[2]}/metrics"
    return (await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=30).read())).decode()


def served(text):
    """How many requests each worker has answered."""
    found = Counter()
    for worker, count in re.findall(r'trefoil_requests_served_total\{worker="(\d)".*\} (\S+)', text):
        found[int(worker)] += float(count)
    return found


async def test_three_workers_serve_a_family_with_two_credits_and_survive_a_kill(
    shared_redis, state, slices, tmp_path, awake
):
    """With fewer credits than workers, one worker of three has none: what comes to it is forwarded."""
    plane, xs, large = slices
    await serve(plane, credits=2)
    # The slices live in this process: where it stands still, they would be taken for hung.
    async with dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 3, "one", hang_quiet_s=60.0) as one:
        await one.until(up(3, 2), 90)
        async with Load(one.inference, clients=12) as load:
            await until(lambda: load.answered >= 600, 60)
        assert (load.wrong, load.failed) == (0, Counter())
        assert percents([xs.executed, large.executed]) == pytest.approx([0.25, 0.75], abs=0.01), "over all workers"
        await until_told(lambda: counted(one.inference), lambda counts: counts == 3 * (load.answered,))
        text = await until_told(lambda: metrics(one), lambda text: served(text).total() == load.answered)
        serving = set(served(text))
        assert serving <= {0, 1, 2}
        assert len(serving) == 2, "two have credits"
        assert text.count("# TYPE trefoil_requests_served_total") == 1

        clock, before = WallClock(), one.pids()
        executed = xs.executed + large.executed
        async with Load(one.inference, clients=12) as load:
            await until(lambda: load.answered >= 200, 60)
            os.kill(before[min(serving)], signal.SIGKILL)
            killed_s = clock.monotonic_s()
            await until(lambda: clock.monotonic_s() > killed_s + 2.5 and load.answered >= 600, 60)
        assert load.wrong == 0
        # One in flight on each connection at most; and who was faster than a sibling to hear of the death may have had
        # one more forwarded by it. That one's link is closed then.
        assert max(load.failed_of.values(), default=0) <= 2, load.failed
        for at_s in load.failed_at_s:
            assert awake.between(killed_s, at_s) < 1.0, "in flight when it was killed, no later"
        later = [at_s for at_s in load.answered_at_s if at_s > killed_s]
        gaps = [awake.between(a, b) for a, b in zip([killed_s, *later], later, strict=False)]
        assert max(gaps) <= 2.0
        assert xs.executed + large.executed - executed <= load.answered + sum(load.failed.values()), "none twice"
        table = await one.until(up(3, 2), 90)  # it is back, under a separate number
        assert max(w.worker for w in table.workers) >= 1000
        after = one.pids()
        assert [place for place in sorted(after) if after[place] != before[place]] == [min(serving)]

        workers = [Identity.of_pid(pid) for pid in after.values()]
        one.process.kill()  # the supervisor: nothing of it may stay behind
        await until(lambda: not any(worker.alive() for worker in workers))


@pytest.mark.gate
async def test_a_replica_comes_and_goes_under_load_and_nothing_fails(shared_redis, state, slices, tmp_path):
    plane, xs, large = slices
    await serve(plane, credits=4)
    async with dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 1, "one") as one:
        await one.until(up(1, 4), 90)
        async with Load(one.inference, clients=6) as load:
            two = Dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 1, "two", drain_s=4.0)
            await two.start()
            try:
                await two.until(up(1, 2), 90)
                await one.until(up(1, 2))
                other = Load(two.inference, clients=6)
                async with other, ready(two.inference) as is_ready:
                    await until(lambda: other.answered >= 200 and load.answered >= 200, 60)
                    two.process.send_signal(signal.SIGTERM)
                    await until(lambda: not is_ready())  # clients go where they are wanted
                assert (other.wrong, other.failed) == (0, Counter())
            finally:
                assert await two.stop() == 0
            seen = load.answered
            await one.until(up(1, 4))
            await until(lambda: load.answered >= seen + 100, 60)
        assert (load.wrong, load.failed) == (0, Counter())
        # Four credits, and what was under way at the other worker when its part became free: two.
        assert max(xs.in_flight_max, large.in_flight_max) <= 4 + 2


@asynccontextmanager
async def ready(address):
    """What the health service says, as a load balancer watches it."""
    says = [True]

    async def watch():
        async with grpc.aio.insecure_channel(address) as channel:
            request = health_pb2.HealthCheckRequest()
            async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
                says[0] = answer.status == health_pb2.HealthCheckResponse.SERVING

    task = asyncio.create_task(watch())
    try:
        yield lambda: says[0]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.gate
async def test_drain_takes_all_workers_out_and_back_and_a_stop_lets_what_runs_finish(
    shared_redis, state, slices, tmp_path
):
    plane, xs, large = slices
    await serve(plane, credits=2)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(
            dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 2, "one", drain_s=2.0)
        )
        await one.until(up(2, 2), 90)
        stub = one.admin()
        with pytest.raises(grpc.aio.AioRpcError, match="epoch 0 is older than that of the table, 1"):
            await stub.Drain(dispatcher_pb2.DrainRequest(why="an older one"))
        assert [worker.draining for worker in await drain(stub, epoch=1, why="new disks")] == [True, True]
        client = await stack.enter_async_context(triton.InferenceServerClient(one.inference))
        assert not await client.is_server_ready()
        assert not await client.is_model_ready("digits")
        async with Load(one.inference, clients=4) as load:  # whoever comes all the same is answered
            await until(lambda: load.answered >= 50, 60)
        assert (load.wrong, load.failed) == (0, Counter())
        os.kill(one.pids()[1], signal.SIGKILL)
        table = await one.until(lambda t: len(t.workers) == 2 and all(w.draining for w in t.workers), 90)
        assert max(w.worker for w in table.workers) == 1001, "a new life of a drained dispatcher is drained"
        assert not any(worker.draining for worker in await drain(stub, epoch=1, release=True))
        await one.until(up(2, 2))
        assert await client.is_server_ready()

        xs.gate.clear()
        large.gate.clear()
        asked = len(xs.requests) + len(large.requests)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(one.inference))
        infer = channel.unary_unary(METHOD, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
        calls = [infer(ask(n, str(n)), timeout=20) for n in range(6)]
        await until(lambda: len(xs.requests) + len(large.requests) >= asked + 2)
        one.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        xs.gate.set()
        large.gate.set()
        assert [answered(await call) for call in calls] == [(n, str(n)) for n in range(6)]
        assert await one.stop() == 0


async def test_a_taken_port_is_one_line_for_all_workers(shared_redis, tmp_path):
    async with FakeTriton() as taken:
        one = Dispatcher(tmp_path, shared_redis.url, "unused", 3, "one")
        text = one.config.read_text().replace(f":{one.ports[0]}", f":{taken.port}")
        one.config.write_text(text)
        await one.start()
        assert await asyncio.wait_for(one.process.wait(), 60) == 2
        one.log.close()
    (line,) = [each for each in (one.folder / "log").read_text().splitlines() if each.startswith("error")]
    assert "in use" in line
    assert str(taken.port) in line

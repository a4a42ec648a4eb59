"""Two controllers, each on a separate disk, and one Redis: who leads next knows what the one before knew, and whoever
was overtaken writes nothing."""

import contextlib
import signal
import threading
import time
from collections import defaultdict

import grpc
import pytest
import redis

from protos.controller.v1 import controller_pb2 as pb
from protos.controller.v1 import controller_pb2_grpc
from tests.support.control_plane import ControlPlane
from tests.support.ports import free_ports
from trefoil.core.objective import ActMode

pytestmark = pytest.mark.integration
NEXT_EPOCH_S = 8.0


class WriteLog:
    """Epochs that each named client of Redis has tried to write the controller's keys under, as MONITOR shows them."""

    def __init__(self, port: int) -> None:
        self._client = redis.Redis(port=port)
        self._names: dict[str, str] = {}
        self.writers: dict[int, set[str]] = defaultdict(set)
        self._monitor = self._client.monitor()
        self._monitor.__enter__()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(redis.ConnectionError, ValueError, OSError):  # closed
            for told in self._monitor.listen():
                words, client = told["command"].split(" "), f"{told['client_address']}:{told['client_port']}"
                if words[0] == "EVALSHA" and words[4].endswith(":writes:controller"):
                    if client not in self._names:  # Redis 6 does not show CLIENT SETNAME
                        self._names |= {one["addr"]: one["name"] for one in self._client.client_list()}
                    self.writers[int(words[3 + int(words[2])])].add(self._names[client])

    def close(self) -> None:
        self._monitor.connection.disconnect()
        self._thread.join(10)
        self._client.close()


async def stands_by(stub) -> bool:
    try:
        await stub.GetPlan(pb.GetPlanRequest(), timeout=5)
    except grpc.aio.AioRpcError as error:
        return "stands by" in (error.details() or "")
    return False


async def leads(plane: ControlPlane, stub, above: int) -> int:
    """The epoch that this controller answers under, once it is a later one."""
    epoch = await plane.state.epoch_of("controller")
    if epoch > above:
        with contextlib.suppress(grpc.aio.AioRpcError):
            plan = (await stub.GetPlan(pb.GetPlanRequest(), timeout=5)).plan
            return epoch if plan.revision.epoch == epoch else 0
    return 0


async def wanted(stub) -> pb.GetObjectivesResponse:
    return await stub.GetObjectives(pb.GetObjectivesRequest(), timeout=10)


async def change(stub, min_accuracy: float, max_watts: float) -> pb.GetObjectivesResponse:
    [stored] = (await wanted(stub)).objectives
    stored.min_accuracy = min_accuracy
    asked = pb.ObjectiveChange(objective=stored, expected_number=stored.number)
    await stub.SetObjectives(pb.SetObjectivesRequest(objectives=[asked], max_watts=max_watts), timeout=30)
    return await wanted(stub)


async def test_whoever_leads_next_knows_all_of_it_and_whoever_was_overtaken_writes_nothing():
    port = free_ports(1)[0]
    plane = ControlPlane(planner="tests.support.planners:ByCarbon", redis_port=port)
    log, second = WriteLog(port), None
    try:
        await plane.start()
        await plane.until(plane.settled)
        asked = await change(plane.stub, 0.951, 900.0)
        await plane.stub.SetMode(pb.SetModeRequest(mode=ActMode.ADVISE))
        await plane.stub.Freeze(pb.FreezeRequest(frozen=True))
        decision = (await plane.stub.GetDecision(pb.GetDecisionRequest())).decision
        first_epoch, routes = await plane.state.epoch_of("controller"), (await plane.plan()).routes

        second, second_port = plane.start_second()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{second_port}") as channel:
            stub = controller_pb2_grpc.ControllerStub(channel)
            await plane.until(lambda: stands_by(stub))
            plane.signal_controller(signal.SIGSTOP)
            epoch = await plane.until(lambda: leads(plane, stub, first_epoch))
            state = await stub.GetPlan(pb.GetPlanRequest())
            assert await wanted(stub) == asked
            assert (state.mode, state.frozen, state.plan.policy) == (ActMode.ADVISE, True, "exact")
            assert [r.family for r in state.plan.routes] == [r.family for r in routes]
            assert (await stub.GetDecision(pb.GetDecisionRequest(id=decision.id))).decision == decision

            plane.signal_controller(signal.SIGCONT)
            await plane.until(lambda: stands_by(plane.stub))
            asked = await change(stub, 0.952, 800.0)
            await stub.Freeze(pb.FreezeRequest(frozen=False))
            second.kill()
            killed_s = time.monotonic()
            await plane.until(lambda: leads(plane, plane.stub, epoch))
            took_s = time.monotonic() - killed_s
        assert await wanted(plane.stub) == asked
        state = await plane.stub.GetPlan(pb.GetPlanRequest())
        assert (state.mode, state.frozen) == (ActMode.ADVISE, False)
        print(f"next epoch after {took_s:.1f} s")
        assert took_s <= NEXT_EPOCH_S
        with redis.Redis(port=port) as client:
            written = [int(entry[b"epoch"]) for _, entry in client.xrange("trefoil:default:writes:controller")]
        assert written == sorted(written)
        assert {frozenset(names) for names in log.writers.values()} == {frozenset({"first"}), frozenset({"second"})}
        assert len(set(written)) >= 3
        assert set(written) <= log.writers.keys()
        assert plane.agent.violations == []
    finally:
        log.close()
        if second is not None:
            second.kill()
            second.wait()
        plane.signal_controller(signal.SIGCONT)
        await plane.close()

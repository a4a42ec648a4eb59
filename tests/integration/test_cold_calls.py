"""A model's first call of a kind takes 20 s, as one that compiles does: no slice is restarted for it, only for one that
does not end (real Tritons)."""

import asyncio
import time

import grpc
import numpy as np
import pytest
import pytest_asyncio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.agent_cluster import AgentCluster, Load, key, node_plan, until
from tests.support.triton_process import MODELS, hosted
from tests.support.twin_family import TWIN, twin, two_families
from trefoil.core.common import Revision
from trefoil.core.demand import FIRST_CALL_S, SliceLoad
from trefoil.core.fleet import SliceState
from trefoil.core.plan import PlannedSlice

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

COLD_S, ENDLESS = 20, 8
PLACES = key("4g.20gb"), key("3g.20gb", 4)
COLD_CALLS = f'''

class TritonPythonModel(TritonPythonModel):
    """The project's model, whose twin's first batch of each size from 3 on takes {COLD_S} s."""

    def initialize(self, args):
        super().initialize(args)
        self._warm = set(range(3 if args["model_name"] == "{TWIN}" else 99))

    def _run(self, arrays):
        size = next(iter(arrays.values())).shape[0]
        if size not in self._warm:
            time.sleep(3600 if size == {ENDLESS} else {COLD_S})
            self._warm.add(size)
        return super()._run(arrays)
'''


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory):
    models = two_families(tmp_path_factory.mktemp("models"))
    (models / "_shared").unlink()
    (models / "_shared").mkdir()
    for source in sorted((MODELS / "_shared").glob("*.py")):
        (models / "_shared" / source.name).write_text(source.read_text())
    with (models / "_shared" / "model.py").open("a") as model:
        model.write(COLD_CALLS)
    async with AgentCluster(model_repository=models) as one:
        yield one


async def ask(target: str, items: int) -> None:
    """Ask for so many items at once."""
    async with grpc.aio.insecure_channel(target) as channel:
        request = service_pb2.ModelInferRequest(model_name=TWIN)
        request.inputs.add(name="IMAGE", datatype="UINT8", shape=[items, 8, 8])
        request.raw_input_contents.append(np.zeros((items, 8, 8), np.uint8).tobytes())
        reply = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=120)
        assert len(reply.raw_output_contents[0]) == 40 * items


@pytest.mark.timeout(300)
@pytest.mark.parametrize("items", [4, 5])
async def test_a_long_first_call_restarts_no_slice_and_its_neighbour_serves_on(cluster, items):
    """On a slice that a worker has ejected, beside another family, and on one that is quiet; by batches of 5 also where
    the agent starts again meanwhile."""
    shared, alone = PLACES
    wanted = node_plan(
        items, PlannedSlice(shared, (hosted(4), twin(hosted(2))), 4), PlannedSlice(alone, (twin(hosted(2)),), 4)
    )
    await cluster.apply(wanted)
    await cluster.settled(wanted)
    before = await cluster.slices()
    pids = {place: cluster.triton(place).pid for place in PLACES}
    load = Load(before[shared].grpc_target, clients=1, gap_s=0.05)
    calls = [asyncio.create_task(ask(before[place].grpc_target, items)) for place in PLACES]
    ejected = SliceLoad(shared, 1, family=TWIN, ejected=True)
    try:
        again = items == 5
        while not all(call.done() for call in calls):
            await cluster.acknowledge(Revision(9), ejected, SliceLoad(alone, 1, family=TWIN))
            assert {one.state for one in (await cluster.slices()).values()} == {SliceState.READY}
            answered = load.answered
            await until(lambda n=answered: load.answered > n + 2, 60)
            if again and load.answered > 30:
                again = False
                cluster.kill_agent()
                await cluster.start_agent()
        await asyncio.gather(*calls)
    finally:
        await load.stop()
    assert not again
    assert (load.failed, {place: cluster.triton(place).pid for place in PLACES}) == ([], pids)
    assert (await cluster.slices())[alone].since_s == before[alone].since_s or items == 5
    print(f"{load.answered} answers of its neighbour while first calls took {COLD_S} s")


@pytest.mark.timeout(300)
async def test_a_slice_whose_model_does_not_come_back_is_restarted(cluster):
    alone = PLACES[1]
    wanted = node_plan(ENDLESS, PlannedSlice(alone, (twin(hosted(2)),), 4))
    await cluster.apply(wanted)
    await cluster.settled(wanted)
    pid, began_s = cluster.triton(alone).pid, time.monotonic()
    call = asyncio.create_task(ask((await cluster.slices())[alone].grpc_target, ENDLESS))
    await until(call.done, 120)
    assert isinstance(call.exception(), grpc.aio.AioRpcError)
    took_s = time.monotonic() - began_s
    await cluster.ready(alone)
    assert cluster.triton(alone).pid != pid
    assert took_s >= FIRST_CALL_S
    print(f"restarted after {took_s:.0f} s")

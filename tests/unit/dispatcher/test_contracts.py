"""Contracts of families: asked without waiting for who hangs, renewed when slices are replaced, the least of variants;
and an answer that is none costs no credit.
"""

import asyncio

import grpc
import pytest
from tritonclient.grpc import model_config_pb2
from tritonclient.grpc import service_pb2 as pb

from dispatcher.request.admission import ITEMS_MAX, Admission, Caller, StatusError
from dispatcher.request.contracts import Contracts, published
from dispatcher.request.inference import Inference
from dispatcher.service.local_worker import LocalWorker
from dispatcher.settings import DispatcherSettings
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import SliceKey
from trefoil.runtime.clock import WallClock


class Slices:
    """What each slice tells of digits; `hung` ones never answer."""

    def __init__(self, contracts: Contracts) -> None:
        self.batches: dict[SliceKey, int] = {}
        self.hung: set[SliceKey] = set()
        self.asked: list[SliceKey] = []
        contracts.from_slice = self._from_slice

    async def _from_slice(self, family: str, slice_: SliceKey):
        self.asked.append(slice_)
        if slice_ in self.hung:
            await asyncio.Event().wait()
        metadata = pb.ModelMetadataResponse(name=family)
        return published(family, metadata, model_config_pb2.ModelConfig(max_batch_size=self.batches[slice_]))


@pytest.fixture
async def local():
    made = LocalWorker(DispatcherSettings(), "d", WallClock())
    yield made
    await made.routing.connections.close()


def serve(local: LocalWorker, variants: dict[int, str], generation: int = 1) -> None:
    local.routing.set_nodes([node([status(n, variant=v, generation=generation) for n, v in variants.items()])])
    local.routing.set_plan(plan([route([target(n, v, 1 / len(variants)) for n, v in variants.items()])]))


def batch_max(contracts: Contracts) -> int:
    return contracts.known("digits").config.config.max_batch_size


async def test_a_known_contract_waits_for_no_slice_that_hangs(local):
    contracts = Contracts(local)
    slices = Slices(contracts)
    serve(local, {0: "digits-l", 1: "digits-xs"})
    slices.batches, slices.hung = {key(0): 8}, {key(1)}
    await contracts.fetch("digits")
    learning = asyncio.create_task(contracts.learn("digits"))
    async with asyncio.timeout(1.0):
        while key(1) not in slices.asked:
            await asyncio.sleep(0)
        assert (await contracts.fetch("digits")).config.config.max_batch_size == 8
    learning.cancel()


async def test_the_largest_batch_is_the_least_of_all_variants_that_serve(local):
    contracts = Contracts(local)
    slices = Slices(contracts)
    serve(local, {0: "digits-l", 1: "digits-xs", 2: "digits-xs"})
    slices.batches = {key(0): 8, key(1): 32, key(2): 32}
    await contracts.learn("digits")
    assert (slices.asked, batch_max(contracts)) == ([key(0), key(1)], 8)
    serve(local, {1: "digits-xs", 2: "digits-xs"})
    assert not contracts.to_ask("digits")
    serve(local, {2: "digits-xs"})
    await contracts.learn("digits")
    assert batch_max(contracts) == 32


@pytest.mark.parametrize(("batch", "items"), [(None, ITEMS_MAX), (8, 8), (100, 100), (0, 1)])
async def test_a_request_counts_no_more_items_than_its_family_takes_at_once(local, batch, items):
    """A slice refuses a larger batch at once: books, costs and shares must not follow the client's number."""
    contracts = Contracts(local)
    slices = Slices(contracts)
    serve(local, {0: "digits-l"})
    if batch is not None:
        slices.batches = {key(0): batch}
        await contracts.learn("digits")
    request = pb.ModelInferRequest(model_name="digits")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[2**20, 0])
    ticket = Admission(local, contracts).admit(request.SerializeToString(), Caller(), 100.0).ticket
    assert ticket.items == items
    assert ticket.cost_s == local.costs.expected_s("digits", items)


async def test_a_family_that_comes_back_with_another_contract_is_asked_again(local):
    contracts = Contracts(local)
    slices = Slices(contracts)
    serve(local, {0: "digits-l"})
    slices.batches = {key(0): 8}
    await contracts.learn("digits")
    serve(local, {0: "digits-l"}, generation=2)
    slices.batches = {key(0): 4}
    assert contracts.to_ask("digits") == {"digits-l": key(0)}
    await contracts.learn("digits")
    assert batch_max(contracts) == 4
    assert not contracts.to_ask("digits")


async def test_a_slice_that_does_not_tell_is_told_of_and_asked_again(local):
    contracts = Contracts(local)
    serve(local, {0: "digits-l"})
    with pytest.raises(Unavailable, match="is not renewed"):  # nobody listens there
        await contracts.learn("digits")
    assert contracts.known("digits") is None
    assert contracts.to_ask("digits")


class Junk:
    """Connection whose slice answers with bytes that are not a message."""

    cut_reason = ""

    async def infer(self, parts, timeout_s, metadata, leaving):
        return b"\xff\xff\xff", ()


async def test_an_answer_that_is_no_message_is_an_internal_error_and_gives_its_credit_back(local, monkeypatch):
    serve(local, {0: "digits-l"})  # two credits
    monkeypatch.setattr(local.routing.connections, "connection", lambda _: Junk())
    inference = Inference(local, Contracts(local))
    request = pb.ModelInferRequest(model_name="digits", id="x")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=[1, 8, 8])
    request.raw_input_contents.append(bytes(64))
    for _ in range(3):
        with pytest.raises(StatusError, match="not an inference response") as refused:
            async with asyncio.timeout(1.0):
                await inference.answer(request.SerializeToString(), Caller())
        assert refused.value.code is grpc.StatusCode.INTERNAL
    assert local.accounting.load.totals["digits"].by_code == {"INTERNAL": 3}


def test_clients_read_metadata_in_parameters_and_a_probe_has_the_shape_that_is_stated():
    config = model_config_pb2.ModelConfig(max_batch_size=8)
    config.input.add(name="x", data_type=model_config_pb2.TYPE_FP32, dims=[3, -1])
    for name, text in (("classes", "a,b"), ("trefoil_shape.x", "3,32"), ("intra_op_thread_count", "2")):
        config.parameters[name].string_value = text
    metadata = pb.ModelMetadataResponse(name="toy")
    metadata.inputs.add(name="x", datatype="FP32", shape=[-1, 3, -1])
    public = published("toy", metadata, config)
    told = public.config.config.parameters
    assert {name: told[name].string_value for name in told} == {"classes": "a,b", "trefoil_shape.x": "3,32"}
    assert list(public.zeros("toy").inputs[0].shape) == [1, 3, 32]

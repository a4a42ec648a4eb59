"""What a client is told of an answer's cost: as rates and carbon come, age and go."""

import asyncio
from dataclasses import replace

import grpc
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import Plane, dispatching, image, until
from tests.support.fake_triton import QUEUE_FULL, FakeTriton
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Basis, Revision
from trefoil.core.demand import LoadWindow
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.runtime.clock import WallClock

pytestmark = pytest.mark.integration

CREDITS = 2
SERIES = Series("z", Method.AVERAGE, Factors.LIFECYCLE)
RATE = ReceiptRate(key(0), "digits", "digits-l", 0.5, 1.5, 1.1, Basis.MEASURED, 60.0)


def told(result) -> dict:
    parameters = result.get_response().parameters
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in parameters.items()
        if name.startswith("trefoil_")
    }


class World:
    def __init__(self, plane: Plane, running, client, slice_: FakeTriton) -> None:
        self.plane, self.running, self.client, self.slice = plane, running, client, slice_

    async def ask(self, items: int = 1, receipt: object = True) -> dict:
        result = await self.client.infer("digits", [image(3, items)], parameters={"trefoil_receipt": receipt})
        assert len(result.as_numpy("PROBABILITIES")) == items, "tensors are untouched"
        return told(result)

    async def rates(self, *rates: ReceiptRate, age_s: float = 0.0) -> None:
        published = ReceiptRates(rates, WallClock().now_s() - age_s, SERIES, 1.2, Revision(1, 1))
        await self.plane.put("controller", self.plane.state.keys.receipts(), published)
        receipts = self.running.local.accounting.receipts
        await until(lambda: all(receipts.rate(r.slice, r.family, r.variant) == r for r in rates))

    async def carbon(self, intensity: float, age_s: float = 0.0) -> None:
        now_s = WallClock().now_s()
        reading = CarbonReading(
            SERIES, now_s - age_s, now_s - age_s + 60.0, intensity, Quality.MEASURED, observed_at_s=now_s - age_s
        )
        await self.plane.put("feed:z", self.plane.state.keys.carbon_now(SERIES), reading)


@pytest.fixture
async def world(state, tmp_path):
    async with (
        FakeTriton(version=4) as slice_,
        dispatching(state, tmp_path) as running,
        triton.InferenceServerClient(running.address) as client,
    ):
        made = World(Plane(state), running, client, slice_)
        await made.plane.node(node([status(0, slice_.target)]))
        await made.plane.plan(plan([route([target(0)])]))
        await until(lambda: running.local.routing.table.live("digits"))
        yield made


async def test_energy_and_carbon_are_told_with_what_they_rest_on(world):
    await world.carbon(360.0)
    await world.rates(RATE)
    found = await world.ask(items=2)
    assert found["trefoil_energy_j_estimate"] == 3.5
    assert found["trefoil_carbon_mg_estimate"] == pytest.approx(3.5 / 3.6e6 * 360 * 1.2 * 1e3)
    assert (found["trefoil_slice"], found["trefoil_variant"]) == (key(0).name, "digits-l")
    assert found["trefoil_receipt_basis"] == "measured"
    expected = "active energy only; metered over estimated 1.1, memory 60 s; 360 g/kWh (measured), PUE 1.2"
    assert found["trefoil_receipt_method"] == expected
    assert "trefoil_receipt" not in world.slice.requests[-1].parameters, "it does not reach Triton"


async def test_who_does_not_ask_is_told_the_variant_and_no_more(world):
    await world.rates(RATE)
    assert (await world.ask(receipt=False)) == {"trefoil_variant": "digits-l"}


async def test_unknown_energy_is_absent_and_never_zero(world):
    found = await world.ask()
    assert found["trefoil_receipt_basis"] == "none"
    assert "trefoil_energy_j_estimate" not in found
    assert "trefoil_carbon_mg_estimate" not in found
    assert found["trefoil_receipt_method"] == "no rates have been published yet"
    await world.rates(replace(RATE, slice=key(1)))
    assert "not measured" in (await world.ask())["trefoil_receipt_method"]
    await world.rates(RATE)
    found = await world.ask()
    assert found["trefoil_energy_j_estimate"] == 2.0
    assert "trefoil_carbon_mg_estimate" not in found
    assert "no carbon reading" in found["trefoil_receipt_method"]


async def test_old_values_are_carried_on_and_said_to_be(world):
    await world.carbon(360.0, age_s=600.0)
    await world.rates(RATE, age_s=600.0)

    async def said() -> str:
        return (await world.ask())["trefoil_receipt_method"]

    assert "the rates are old and carried on; the carbon reading is old and carried on" in await said()
    await world.plane.state._client.flushall()
    assert "the rates are old" in await said()
    assert (await world.ask())["trefoil_energy_j_estimate"] == 2.0


async def test_every_answer_is_in_the_windows_at_the_price_of_its_time(world):
    await world.ask()
    await world.rates(RATE)
    asked = [(await world.ask())["trefoil_energy_j_estimate"] for _ in range(3)]
    await world.rates(replace(RATE, request_j=5.0))
    asked.append((await world.ask())["trefoil_energy_j_estimate"])
    await world.ask(receipt=False)

    async def booked() -> tuple[float, int, int]:
        keys = world.plane.state.keys
        entries = await world.plane.state.stream(keys.load(*world.running.local.id), LoadWindow)
        cells = [cell for _, window in entries for cell in window.cells]
        return sum(c.receipt_j for c in cells), sum(c.receipts for c in cells), sum(c.answered for c in cells)

    found = await booked()
    while found[2] < 6:
        await world.running.local.clock.sleep(0.05)
        found = await booked()
    assert found == (pytest.approx(sum(asked) + 6.5), 5, 6)


@pytest.mark.parametrize("value", ["yes please", 2])
async def test_what_is_neither_true_nor_false_is_refused(world, value):
    with pytest.raises(InferenceServerException, match="trefoil_receipt") as refused:
        await world.ask(receipt=value)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_what_is_executed_for_a_client_that_left_is_booked_to_its_tenant_and_what_waited_is_not(world):
    """One request is on the slice, two wait: all three clients leave."""
    await world.rates(RATE)
    world.slice.gate.clear()
    leaving = [asyncio.create_task(world.ask(items=2)) for _ in range(2 + CREDITS)]
    await until(lambda: len(world.slice.requests) == CREDITS)
    await until(lambda: world.running.local.routing.queues["digits"].waiting == 2)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    world.slice.gate.set()

    found = await unanswered(world, len(leaving), CREDITS)
    assert found == (CREDITS, 2.0 * CREDITS, pytest.approx(CREDITS * RATE.energy_j(2)), len(leaving))


async def unanswered(world, failed: int, executed: int) -> tuple[int, float, float, int]:
    """What is booked without an answer (requests, items, joules) and how many failed, once that many have."""
    while True:
        keys = world.plane.state.keys
        entries = await world.plane.state.stream(keys.load(*world.running.local.id), LoadWindow)
        cells = [cell for _, window in entries for cell in window.cells]
        failures = sum(sum(cell.failed_by_code.values()) for cell in cells)
        count = sum(cell.unanswered for cell in cells)
        if failures >= failed and count >= executed:
            return count, sum(c.unanswered_items for c in cells), sum(c.unanswered_j for c in cells), failures
        await world.running.local.clock.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "executed"),
    [((grpc.StatusCode.INTERNAL, "the model failed"), 1), (QUEUE_FULL, 0)],
)
async def test_what_fails_on_its_slice_is_booked_and_what_the_slice_did_not_begin_is_not(world, error, executed):
    await world.rates(RATE)
    world.slice.error = error
    with pytest.raises(InferenceServerException):
        await world.ask()
    assert await unanswered(world, 1, executed) == (executed, executed, executed * RATE.energy_j(1), 1)

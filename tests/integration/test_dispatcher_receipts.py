"""What a client is told of an answer's cost: as rates and carbon come, age and go."""

import asyncio
from dataclasses import replace

import grpc
import pytest
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import DispatcherSystem, dispatcher_system, until
from tests.support.fake_triton import QUEUE_FULL, FakeTriton
from tests.unit.dispatcher.worlds import key
from trefoil.core.common import Basis
from trefoil.core.demand import LoadWindow
from trefoil.core.energy import ReceiptRate

pytestmark = pytest.mark.integration

CREDITS = 2
RATE = ReceiptRate(key(0), "digits", "digits-l", 0.5, 1.5, 1.1, Basis.MEASURED, 60.0)


def told(result) -> dict:
    parameters = result.get_response().parameters
    return {
        name: getattr(value, value.WhichOneof("parameter_choice"))
        for name, value in parameters.items()
        if name.startswith("trefoil_")
    }


async def ask(system: DispatcherSystem, items: int = 1, receipt: object = True) -> dict:
    result = await system.infer(3, items, parameters={"trefoil_receipt": receipt})
    assert len(result.as_numpy("PROBABILITIES")) == items, "tensors are untouched"
    return told(result)


@pytest.fixture
async def system(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(version=4)) as made:
        yield made


async def test_energy_and_carbon_are_told_with_what_they_rest_on(system):
    await system.carbon(360.0)
    await system.rates(RATE)
    found = await ask(system, items=2)
    assert found["trefoil_energy_j_estimate"] == 3.5
    assert found["trefoil_carbon_mg_estimate"] == pytest.approx(3.5 / 3.6e6 * 360 * 1.2 * 1e3)
    assert (found["trefoil_slice"], found["trefoil_variant"]) == (key(0).name, "digits-l")
    assert found["trefoil_receipt_basis"] == "measured"
    expected = "active energy only; metered over estimated 1.1, memory 60 s; 360 g/kWh (measured), PUE 1.2"
    assert found["trefoil_receipt_method"] == expected
    assert "trefoil_receipt" not in system.slice.requests[-1].parameters, "it does not reach Triton"


async def test_who_does_not_ask_is_told_the_variant_and_no_more(system):
    await system.rates(RATE)
    assert (await ask(system, receipt=False)) == {"trefoil_variant": "digits-l"}


async def test_unknown_energy_is_absent_and_never_zero(system):
    found = await ask(system)
    assert found["trefoil_receipt_basis"] == "none"
    assert "trefoil_energy_j_estimate" not in found
    assert "trefoil_carbon_mg_estimate" not in found
    assert found["trefoil_receipt_method"] == "no rates have been published yet"
    await system.rates(replace(RATE, slice=key(1)))
    assert "not measured" in (await ask(system))["trefoil_receipt_method"]
    await system.rates(RATE)
    found = await ask(system)
    assert found["trefoil_energy_j_estimate"] == 2.0
    assert "trefoil_carbon_mg_estimate" not in found
    assert "no carbon reading" in found["trefoil_receipt_method"]


async def test_old_values_are_carried_on_and_said_to_be(system):
    await system.carbon(360.0, age_s=600.0)
    await system.rates(RATE, age_s=600.0)

    async def said() -> str:
        return (await ask(system))["trefoil_receipt_method"]

    assert "the rates are old and carried on; the carbon reading is old and carried on" in await said()
    await system.plane.state._client.flushall()
    assert "the rates are old" in await said()
    assert (await ask(system))["trefoil_energy_j_estimate"] == 2.0


async def test_every_answer_is_in_the_windows_at_the_price_of_its_time(system):
    await ask(system)
    await system.rates(RATE)
    asked = [(await ask(system))["trefoil_energy_j_estimate"] for _ in range(3)]
    await system.rates(replace(RATE, request_j=5.0))
    asked.append((await ask(system))["trefoil_energy_j_estimate"])
    await ask(system, receipt=False)

    async def booked() -> tuple[float, int, int]:
        keys = system.plane.state.keys
        entries = await system.plane.state.stream(keys.load(*system.local.id), LoadWindow)
        cells = [cell for _, window in entries for cell in window.cells]
        return sum(c.receipt_j for c in cells), sum(c.receipts for c in cells), sum(c.answered for c in cells)

    found = await booked()
    while found[2] < 6:
        await system.local.clock.sleep(0.05)
        found = await booked()
    assert found == (pytest.approx(sum(asked) + 6.5), 5, 6)


@pytest.mark.parametrize("value", ["yes please", 2])
async def test_what_is_neither_true_nor_false_is_refused(system, value):
    with pytest.raises(InferenceServerException, match="trefoil_receipt") as refused:
        await ask(system, receipt=value)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


async def test_what_is_executed_for_a_client_that_left_is_booked_to_its_tenant_and_what_waited_is_not(system):
    """One request is on the slice, two wait: all three clients leave."""
    await system.rates(RATE)
    system.slice.gate.clear()
    leaving = [asyncio.create_task(ask(system, items=2)) for _ in range(2 + CREDITS)]
    await until(lambda: len(system.slice.requests) == CREDITS)
    await until(lambda: system.queue.waiting == 2)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    system.slice.gate.set()

    found = await unanswered(system, len(leaving), CREDITS)
    assert found == (CREDITS, 2.0 * CREDITS, pytest.approx(CREDITS * RATE.energy_j(2)), len(leaving))


async def test_what_is_refused_after_its_client_left_is_booked_by_its_time(system):
    system.local.costs.record("digits", 1, 3600.0)
    system.slice.error = (grpc.StatusCode.INVALID_ARGUMENT, "batch-size must be <= 8")
    system.slice.gate.clear()
    leaving = asyncio.create_task(ask(system))
    await until(lambda: len(system.slice.requests) == 1)
    leaving.cancel()
    await asyncio.wait([leaving])
    await until(lambda: system.local.accounting.load.totals["digits"].failed == 1)
    system.slice.gate.set()
    count, items, _, _ = await unanswered(system, 1, 1)
    assert count == 1
    assert items <= 0.1


async def unanswered(system, failed: int, executed: int) -> tuple[int, float, float, int]:
    """What is booked without an answer (requests, items, joules) and how many failed, once that many have."""
    while True:
        keys = system.plane.state.keys
        entries = await system.plane.state.stream(keys.load(*system.local.id), LoadWindow)
        cells = [cell for _, window in entries for cell in window.cells]
        failures = sum(sum(cell.failed_by_code.values()) for cell in cells)
        count = sum(cell.unanswered for cell in cells)
        if failures >= failed and count >= executed:
            return count, sum(c.unanswered_items for c in cells), sum(c.unanswered_j for c in cells), failures
        await system.local.clock.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "executed", "usual_s", "least"),
    [
        ((grpc.StatusCode.INTERNAL, "the model failed"), 1, 1e-6, 1.0),
        ((grpc.StatusCode.INVALID_ARGUMENT, "batch-size must be <= 8"), 1, 3600.0, 0.0),
        (QUEUE_FULL, 0, 1e-6, 0.0),
    ],
)
async def test_what_fails_on_its_slice_is_booked_by_its_time_and_what_the_slice_did_not_begin_is_not(
    system, error, executed, usual_s, least
):
    """Of a slice that has not answered; like requests take `usual_s` elsewhere."""
    await system.rates(RATE)
    system.local.costs.record("digits", 1, usual_s)
    system.slice.error = error
    with pytest.raises(InferenceServerException):
        await ask(system)
    count, items, joules, failed = await unanswered(system, 1, executed)
    assert (count, failed) == (executed, 1)
    assert least <= items <= max(least, 0.1)
    assert joules == pytest.approx(items * RATE.energy_j(1))

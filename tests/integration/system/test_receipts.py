"""Receipts of a real system: told to clients as they ask, and in sum what the counters say."""

import asyncio
import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as triton

from tests.integration.system.conftest import Serving
from tests.support.system import FAMILY, begun_anew, metered_until, plan_in_force, until, windows
from tests.support.triton_process import heldout
from trefoil.cli.system_client import SystemClient
from trefoil.core.demand import LoadCell
from trefoil.core.energy import ReceiptRates

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

RATE_PER_S, WARM_UP_S, DURATION_S = 55.0, 3.0, 12.0
STRETCHES_MAX = 10  # one, unless the machine was busy elsewhere
ERROR_MAX = 0.05
PUE = 1.2


class Asker:
    """Open-loop requests that all ask for a receipt; sums what they were told."""

    def __init__(self, target: str) -> None:
        self._client = triton.InferenceServerClient(target)
        self._images, _ = heldout()
        self.told: list[dict[str, Any]] = []

    async def ask(self, n: int, items: int = 1) -> dict[str, Any]:
        rows = np.resize(self._images[n % 500 : n % 500 + items], (items, *self._images.shape[1:]))
        tensor = triton.InferInput("IMAGE", list(rows.shape), "UINT8")
        tensor.set_data_from_numpy(rows)
        answer = await self._client.infer(FAMILY, [tensor], parameters={"trefoil_receipt": True})
        found = {
            name: getattr(parameter, parameter.WhichOneof("parameter_choice"))
            for name, parameter in answer.get_response().parameters.items()
            if name.startswith("trefoil_")
        }
        self.told.append(found)
        return found

    async def load(self, rate_per_s: float, duration_s: float) -> None:
        rng = np.random.default_rng(5)
        began_s, due_s = time.monotonic(), 0.0
        async with asyncio.TaskGroup() as group:
            for n in itertools.count():
                due_s += rng.exponential(1 / rate_per_s)
                if due_s > duration_s:
                    return
                await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
                group.create_task(self.ask(n))

    async def close(self) -> None:
        await self._client.close()


@dataclass(frozen=True)
class Stretch:
    """Some seconds of load: what clients were told, what windows hold of it, what was metered."""

    told: list[dict[str, Any]]
    booked_j: float
    booked: int
    metered_j: float

    @property
    def error(self) -> float:
        """Of receipts against the counters."""
        return self.booked_j / self.metered_j - 1


async def stretch(client: SystemClient, asker: Asker) -> Stretch:
    """Load, apart from what was before and comes after."""
    since_s = await begun_anew(client)
    await metered_until(client, time.time())  # nor does a sample hold both
    asker.told.clear()
    began_s = time.time()
    await asker.load(RATE_PER_S, DURATION_S)
    ended_s = time.time()

    async def flushed() -> list[LoadCell] | None:
        found = [cell for window in await windows(client, since_s) for cell in window.cells]
        return found if sum(cell.receipts for cell in found) >= len(asker.told) else None

    cells = await until(flushed, 60.0, "not every receipt is booked within")
    metered_j = sum(
        part.active_j
        for sample in await metered_until(client, ended_s + 1.0)
        if sample.ends_at_s > began_s and sample.starts_at_s < ended_s + 1.0
        for part in sample.slices
    )
    return Stretch(list(asker.told), sum(c.receipt_j for c in cells), sum(c.receipts for c in cells), metered_j)


async def test_receipts_add_up_to_the_metered_active_energy(serving: Serving):
    async with serving.system.client() as client:
        asker = Asker(serving.system.inference)
        try:
            await until(lambda: rated(client), 60.0, "no receipt rates within")
            await asker.load(RATE_PER_S, WARM_UP_S)
            await until(lambda: rated(client, metered=True), 60.0, "no rates that follow the counters within")
            # Rates follow about a minute of counters: what a machine that was busy elsewhere did to it has to pass.
            for _ in range(STRETCHES_MAX):
                before = await totals(serving)
                one = await stretch(client, asker)
                print(f"{len(one.told)} receipts, {one.booked_j:.1f} J booked, {one.metered_j:.1f} J: {one.error:+.2%}")
                told_j = sum(receipt["trefoil_energy_j_estimate"] for receipt in one.told)
                assert told_j == pytest.approx(one.booked_j, rel=1e-6), "what clients are told is what is booked"
                assert one.booked == len(one.told)
                assert len(one.told) >= 0.8 * RATE_PER_S * DURATION_S
                if abs(one.error) <= ERROR_MAX:
                    break

            async def told() -> dict[str, Any] | None:
                now = await totals(serving)
                return now if since(before, now)["receipt_j"] >= 0.95 * one.booked_j else None

            status = await until(told, 60.0, "the status does not tell of these receipts within")
            several = await asker.ask(0, items=4)
        finally:
            await asker.close()
        (reading,) = [r for r in await client.carbon() if r.series.zone == "demo"]
    assert abs(one.error) <= ERROR_MAX

    for receipt in asker.told:
        assert receipt["trefoil_receipt_basis"] == "simulated"
        assert receipt["trefoil_slice"].startswith(serving.system.launch.node)
        assert "active energy only" in receipt["trefoil_receipt_method"]
    single = np.mean(
        [r["trefoil_energy_j_estimate"] for r in asker.told[:-1] if r["trefoil_variant"] == several["trefoil_variant"]]
    )
    assert single < several["trefoil_energy_j_estimate"] < 4 * single
    intensity = several["trefoil_carbon_mg_estimate"] / several["trefoil_energy_j_estimate"] * 3.6e6 / 1e3 / PUE
    print(f"carbon {intensity:.1f} g/kWh on the receipt, {reading.intensity_g_per_kwh:.1f} g/kWh now")
    assert 20 < intensity < 1500

    # The status counts from the last full hour, what other tests and a machine that stood still did included.
    assert status["family"] == FAMILY
    assert status["residual"] == pytest.approx(status["receipt_j"] / status["active_j"] - 1, abs=0.01)
    own = since(before, status)
    assert abs(own["receipt_j"] / own["active_j"] - 1) <= 3 * ERROR_MAX


async def totals(serving: Serving) -> dict[str, Any]:
    """What `trefoil status` says of receipts."""
    found = (await asyncio.to_thread(serving.system.ask, "status"))["receipts"]
    return found[0] if found else {"receipt_j": 0.0, "active_j": 0.0}


def since(before: dict[str, Any], now: dict[str, Any]) -> dict[str, float]:
    """What was added; all of it where another hour has begun."""
    again = now["receipt_j"] < before["receipt_j"]
    return {name: now[name] - (0.0 if again else before[name]) for name in ("receipt_j", "active_j")}


async def rated(client: SystemClient, metered: bool = False) -> bool:
    """Every slice of the plan has a rate, which follows the counters of its kind if that is asked."""
    told = await client.state.get(client.state.keys.receipts(), ReceiptRates)
    targets = {t.slice for route in (await plan_in_force(client)).routes for t in route.targets}
    return told is not None and targets == {r.slice for r in told.rates if r.slice in targets and r.window_s >= metered}

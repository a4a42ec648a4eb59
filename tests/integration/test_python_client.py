"""`trefoil.Client` before a real dispatcher: an answer in a line, its receipt, and our errors only."""

import asyncio

import numpy as np
import pytest

import trefoil
from tests.support.dispatching import Plane, dispatching, until
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import key, node, plan, route, status, target
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Basis, Revision
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.errors import Infeasible, InvalidInput, NotFound, SettingError, Unavailable
from trefoil.runtime.clock import WallClock

pytestmark = pytest.mark.integration
SERIES = Series("z", Method.AVERAGE, Factors.LIFECYCLE)
RATE = ReceiptRate(key(0), "digits", "digits-l", 0.5, 1.5, 1.1, Basis.MEASURED, 60.0)
IMAGES = np.zeros((2, 8, 8), np.uint8)
IMAGES[:, 0, 0] = (3, 7)


@pytest.fixture
async def world(state, tmp_path):
    async with FakeTriton(version=4) as slice_, dispatching(state, tmp_path) as running:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0)])]))
        await until(lambda: running.local.routing.table.live("digits"))
        yield plane, running, slice_


async def test_one_line_gives_outputs_variant_slice_and_receipt(world):
    plane, running, _ = world
    now_s = WallClock().now_s()
    reading = CarbonReading(SERIES, now_s, now_s + 600.0, 360.0, Quality.MEASURED, observed_at_s=now_s)
    await plane.put("feed:z", plane.state.keys.carbon_now(SERIES), reading)
    rates = ReceiptRates((RATE,), now_s, SERIES, 1.2, Revision(1, 1))
    await plane.put("controller", plane.state.keys.receipts(), rates)
    await until(lambda: running.local.accounting.receipts.rate(key(0), "digits", "digits-l") == RATE)
    with trefoil.Client(running.address) as client:
        answer = await asyncio.to_thread(client.infer, "digits", IMAGES)
        assert answer.outputs["PROBABILITIES"].argmax(axis=1).tolist() == [3, 7]
        assert (answer.variant, answer.slice, answer.basis) == ("digits-l", key(0).name, "measured")
        assert answer.joules == pytest.approx(3.5)
        assert answer.grams == pytest.approx(3.5 / 3.6e6 * 360 * 1.2)
        plain = await asyncio.to_thread(client.infer, "digits", {"IMAGE": IMAGES}, receipt=False)
        assert (plain.variant, plain.slice, plain.joules, plain.grams) == ("digits-l", "", None, None)


async def test_what_goes_wrong_is_one_of_our_errors(world):
    _, running, slice_ = world

    async def refused(error, named, *arguments, **more):
        with pytest.raises(error, match=named):
            await asyncio.to_thread(client.infer, *arguments, **more)

    with trefoil.Client(running.address) as client:
        await refused(NotFound, "nobody", "nobody", IMAGES)
        await refused(InvalidInput, r"inputs = \['PIXELS'\]: digits takes other inputs. Remedy: give \['IMAGE'\]",
                      "digits", {"PIXELS": IMAGES})  # fmt: skip
        await refused(InvalidInput, "inputs.IMAGE = 'float64': cannot be cast to UINT8", "digits", IMAGES / 2)
        await refused(Infeasible, "0.999", "digits", IMAGES, min_accuracy=0.999)
        slice_.gate.clear()
        await refused(Unavailable, "DEADLINE_EXCEEDED", "digits", IMAGES, timeout_s=0.3)
        slice_.gate.set()
    with trefoil.Client("127.0.0.1:1") as client:
        await refused(Unavailable, "127.0.0.1:1", "digits", IMAGES)
    with pytest.raises(SettingError, match="address = 'localhost': is no address"):
        trefoil.Client("localhost")

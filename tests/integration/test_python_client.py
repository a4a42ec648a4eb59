"""`trefoil.Client` before a real dispatcher: an answer in a line, its receipt, and our errors only."""

import asyncio

import numpy as np
import pytest

import trefoil
from tests.support.dispatching import dispatcher_system, until
from tests.support.fake_triton import FakeTriton
from tests.unit.dispatcher.worlds import key
from trefoil.core.common import Basis
from trefoil.core.energy import ReceiptRate
from trefoil.core.errors import Infeasible, InvalidInput, NotFound, SettingError, Unavailable

pytestmark = pytest.mark.integration
RATE = ReceiptRate(key(0), "digits", "digits-l", 0.5, 1.5, 1.1, Basis.MEASURED, 60.0)
IMAGES = np.zeros((2, 8, 8), np.uint8)
IMAGES[:, 0, 0] = (3, 7)


@pytest.fixture
async def system(state, tmp_path):
    async with dispatcher_system(state, tmp_path, FakeTriton(version=4)) as made:
        yield made


async def test_one_line_gives_outputs_variant_slice_and_receipt(system):
    await system.carbon()
    await system.rates(RATE)
    await until(lambda: system.local.accounting.receipts.price(key(0), "digits", "digits-l", 1, 1).carbon_mg > 0)
    with trefoil.Client(system.address) as client:
        answer = await asyncio.to_thread(client.infer, "digits", IMAGES)
        assert answer.outputs["PROBABILITIES"].argmax(axis=1).tolist() == [3, 7]
        assert (answer.variant, answer.slice, answer.basis) == ("digits-l", key(0).name, "measured")
        assert answer.joules == pytest.approx(3.5)
        assert answer.grams == pytest.approx(3.5 / 3.6e6 * 360 * 1.2)
        plain = await asyncio.to_thread(client.infer, "digits", {"IMAGE": IMAGES}, receipt=False)
        assert (plain.variant, plain.slice, plain.joules, plain.grams) == ("digits-l", "", None, None)


async def test_what_goes_wrong_is_one_of_our_errors(system):

    async def refused(error, named, *arguments, **more):
        with pytest.raises(error, match=named):
            await asyncio.to_thread(client.infer, *arguments, **more)

    with trefoil.Client(system.address) as client:
        await refused(NotFound, "nobody", "nobody", IMAGES)
        await refused(InvalidInput, r"inputs = \['PIXELS'\]: digits takes other inputs. Remedy: give \['IMAGE'\]",
                      "digits", {"PIXELS": IMAGES})  # fmt: skip
        await refused(InvalidInput, "inputs.IMAGE = 'float64': cannot be cast to UINT8", "digits", IMAGES / 2)
        await refused(Infeasible, "0.999", "digits", IMAGES, min_accuracy=0.999)
        system.slice.gate.clear()
        await refused(Unavailable, "DEADLINE_EXCEEDED", "digits", IMAGES, timeout_s=0.3)
        system.slice.gate.set()
    with trefoil.Client("127.0.0.1:1") as client:
        await refused(Unavailable, "127.0.0.1:1", "digits", IMAGES)
    with pytest.raises(SettingError, match="address = 'localhost': is no address"):
        trefoil.Client("localhost")

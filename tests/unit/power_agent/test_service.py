"""Epochs that no controller can have reached."""

from types import SimpleNamespace

import pytest

from power_agent.service import EPOCHS_AHEAD_MAX, PowerAgentServicer
from protos.power_agent.v1 import power_agent_pb2 as pb
from trefoil.core.errors import InvalidInput, StaleRevision, StateUnavailable


class Obeyed(Exception):
    """It would have been obeyed."""


async def nobody_leads():
    return 0


def servicer(highest, led_epoch=nobody_leads):
    async def apply(_):
        raise Obeyed

    def set_clocks(*_):
        raise Obeyed

    settings = SimpleNamespace(node="node0")
    node = SimpleNamespace(journal=SimpleNamespace(state=SimpleNamespace(highest_epoch=highest)), settings=settings)
    reconciler, clocks = SimpleNamespace(apply=apply), SimpleNamespace(set_clocks=set_clocks)
    return PowerAgentServicer(node, reconciler, clocks, None, led_epoch)


@pytest.mark.parametrize("highest", [0, 41])
async def test_an_epoch_far_ahead_fences_nobody_out(highest):
    for ahead, expected in ((1, Obeyed), (EPOCHS_AHEAD_MAX, Obeyed), (EPOCHS_AHEAD_MAX + 1, InvalidInput)):
        epoch = highest + ahead
        with pytest.raises(expected):
            await servicer(highest).Apply(pb.ApplyRequest(plan={"revision": {"epoch": epoch}}), None)
        with pytest.raises(expected):
            await servicer(highest).SetClocks(pb.SetClocksRequest(lease={"epoch": epoch}), None)
    with pytest.raises(InvalidInput, match=rf"epoch = {2**64 - 1}: is more than 1000000 ahead of {highest}"):
        await servicer(highest).Apply(pb.ApplyRequest(plan={"revision": {"epoch": 2**64 - 1}}), None)


async def test_a_controller_that_another_has_overtaken_in_redis_is_refused_before_that_one_was_heard_of():
    async def led():
        return 3

    async def gone():
        raise StateUnavailable("down")

    def apply(epoch, led_epoch):
        return servicer(2, led_epoch).Apply(pb.ApplyRequest(plan={"revision": {"epoch": epoch}}), None)

    with pytest.raises(StaleRevision, match="epoch 2 is overtaken, controllers lead under 3"):
        await apply(2, led)
    for epoch, led_epoch in ((3, led), (2, gone)):
        with pytest.raises(Obeyed):
            await apply(epoch, led_epoch)

"""Epochs that no controller can have reached."""

from types import SimpleNamespace

import pytest

from power_agent.service import EPOCHS_AHEAD_MAX, PowerAgentServicer
from protos.power_agent.v1 import power_agent_pb2 as pb
from trefoil.core.errors import InvalidInput


class Obeyed(Exception):
    """It would have been obeyed."""


def servicer(highest):
    async def apply(_):
        raise Obeyed

    def set_clocks(*_):
        raise Obeyed

    node = SimpleNamespace(journal=SimpleNamespace(state=SimpleNamespace(highest_epoch=highest)))
    reconciler, clocks = SimpleNamespace(apply=apply), SimpleNamespace(set_clocks=set_clocks)
    return PowerAgentServicer(node, reconciler, clocks, None)


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

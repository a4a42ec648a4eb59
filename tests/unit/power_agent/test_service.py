"""Epochs that commands may come under: what a node has obeyed fences older ones, so that nobody may make one up."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from power_agent.service import PowerAgentServicer
from protos.power_agent.v1 import power_agent_pb2 as pb
from trefoil.core.errors import Fenced, StaleRevision, StateUnavailable, TrefoilError, Unavailable
from trefoil.core.plan import NodePlan


class Agent:
    """An agent that has obeyed an epoch; `led`: what Redis says of controllers, None: nothing."""

    def __init__(self, highest: int, led: int | None) -> None:
        self.state, self.led = SimpleNamespace(highest_epoch=highest), led
        self.missing: dict[str, str] = {"plan": "refused at the start"}
        node: Any = SimpleNamespace(
            journal=self, settings=SimpleNamespace(node="node0"), report_missing=self.missing.__setitem__, devices=()
        )
        me: Any = self
        self.servicer = PowerAgentServicer(node, me, me, me, self.led_epoch, me)

    async def led_epoch(self) -> int:
        if self.led is None:
            raise StateUnavailable("down")
        return self.led

    async def apply(self, plan: NodePlan) -> Any:
        if plan.revision.epoch < self.state.highest_epoch:
            raise StaleRevision("older")
        self.state.highest_epoch = plan.revision.epoch
        return SimpleNamespace(changed=True, steps=())

    async def void_fence(self, epoch: int) -> None:
        self.state.highest_epoch = epoch

    def set_clocks(self, lease: Any, ttl_s: float) -> Any:
        if lease.epoch < self.state.highest_epoch:
            raise StaleRevision("older")
        self.state.highest_epoch = lease.epoch
        return lease

    async def sends(self, command: str, epoch: int) -> None:
        if command == "Apply":
            await self.servicer.Apply(pb.ApplyRequest(plan={"revision": {"epoch": epoch}}), None)
        else:
            await self.servicer.SetClocks(pb.SetClocksRequest(lease={"epoch": epoch}), None)


@pytest.mark.parametrize("command", ["Apply", "SetClocks"])
@pytest.mark.parametrize(
    ("highest", "led", "epoch", "refusal"),
    [
        (2, 3, 3, None),
        (0, 900, 900, None),  # a new node
        (2, 1_000_004, 1_000_004, None),  # the controller has believed a report that was too high
        (2, 3, 4, r"epoch = 4: no controller leads under it; the leader's epoch is 3\. Remedy: acquire the role"),
        (2, 3, 2**64 - 1, "no controller leads under it"),
        (2, 0, 3, None),  # Redis was emptied, or nobody has led yet
        (2, None, 3, None),
        (2, 10**12, 3, None),  # somebody wrote that epoch into Redis
        (2, 10**12, 10**12, "beyond 2"),
        (2, None, 4, r"epoch = 4: beyond 2, the highest seen, and Redis does not say who leads\. Remedy: repeat when"),
        (0, 0, 2**64 - 1, "beyond 0"),
        (5 * 10**11, 3, 3, None),  # a fence that no lease was ever counted to
        (5 * 10**11, 3, 2, "2 is older|controllers lead under 3|older"),
        (5 * 10**11, 3, 4, "older"),
        (5 * 10**11, None, 3, "older"),
        (1_000_000, 3, 3, "older"),  # the controller takes a higher one
    ],
)
async def test_only_an_epoch_that_controllers_lead_under_is_taken(
    command: str, highest: int, led: int | None, epoch: int, refusal: str | None
) -> None:
    agent = Agent(highest, led)
    if refusal is None:
        await agent.sends(command, epoch)
        assert agent.state.highest_epoch == epoch
        return
    with pytest.raises(Unavailable if "beyond" in refusal else Fenced, match=refusal):
        await agent.sends(command, epoch)
    assert agent.state.highest_epoch == highest


async def test_a_controller_that_another_has_overtaken_in_redis_is_refused_before_that_one_was_heard_of() -> None:
    with pytest.raises(StaleRevision, match=r"epoch = 2: overtaken, controllers lead under 3\. Remedy: acquire"):
        await Agent(2, 3).sends("Apply", 2)
    await Agent(2, None).sends("Apply", 2)
    await Agent(2, 3).sends("SetClocks", 2)  # a person reads the node's highest_epoch_seen


@pytest.mark.parametrize("command", ["Drain", "Adopt", "Reset"])
async def test_an_overtaken_controller_empties_no_device_and_takes_nothing_over(command: str) -> None:
    request = getattr(pb, f"{command}Request")(epoch=1)
    with pytest.raises(StaleRevision, match="epoch = 1: a newer controller, of epoch 2, is obeyed"):
        await getattr(Agent(2, 2).servicer, command)(request, None)


@given(
    st.lists(st.tuples(st.sampled_from(["Apply", "SetClocks"]), st.integers(0, 2**64 - 1)), max_size=20),
    st.sampled_from(["answers", "silent", "emptied"]),
)
async def test_whoever_sends_what_the_next_controller_is_obeyed(commands: list[tuple[str, int]], redis: str) -> None:
    agent = Agent(5, {"answers": 5, "silent": None, "emptied": 0}[redis])
    for command, epoch in commands:
        try:
            await agent.sends(command, epoch)
        except TrefoilError:
            continue
    assert agent.state.highest_epoch <= 5 + (0 if redis == "answers" else len(commands))
    agent.led = max(5, agent.state.highest_epoch) + 1  # as controllers take theirs
    await agent.sends("Apply", agent.led)
    assert agent.missing == {"plan": ""}

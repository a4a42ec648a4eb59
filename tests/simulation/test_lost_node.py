"""A node that is gone with all that it runs: within fifteen seconds a plan does without it, until it is back."""

import pytest

from tests.support.virtual.promises import told
from tests.support.virtual.system import System, history
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import Plan
from trefoil.runtime import codec

AT_S, PLANNED_S, BACK_S = 8.0, 15.0, 20.0


def planned_devices(system: System) -> set[str]:
    """Devices of node1 that the plan in force has slices on, or routes to."""
    plan = codec.decode(Plan, system.server.value(system.keys.plan()))
    hosting = {d.device for node in plan.nodes for d in node.devices if d.slices}
    routed = {target.slice.device for route in plan.routes for target in route.targets}
    return {device for device in hosting | routed if device.startswith("node1/")}


@pytest.mark.parametrize("reached", [False, True])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_a_plan_does_without_a_node_that_is_gone_and_keeps_one_whose_agent_alone_is(seed, reached):
    seen: dict[str, set[str]] = {}

    def lost(system: System) -> None:
        node = system.nodes["node1"]

        def gone() -> None:
            seen["before"] = planned_devices(system)
            node.answers = False
            system.promises.excuse(BACK_S + 6.0)
            for device in () if reached else node.devices:
                node.lose(device)

        def look() -> None:
            seen["after"] = planned_devices(system)
            loop = system.controller.service._loop
            fleet = loop.observation.fleet(loop.clock.now_s())
            seen["lost"] = {d.device for n in fleet.nodes for d in n.devices if d.state == DeviceState.LOST}

        def back() -> None:
            for device in node.devices:
                node.find(device)
            node.restart()

        system.loop.call_later(AT_S, gone)
        system.loop.call_later(AT_S + PLANNED_S, look)
        system.loop.call_later(AT_S + BACK_S, back)

    found, system = history(seed, lost)
    assert not found, told(found, system.log)
    assert seen["before"], "the history is about a node that serves"
    if reached:
        assert seen["lost"] == set(), told([], system.log)
        assert {end for request in system.requests for end in request.ends} == {"OK"}
    else:
        assert seen["after"] == set(), told([], system.log)
        assert seen["lost"] >= seen["before"], told([], system.log)

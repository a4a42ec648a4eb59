"""Ports of a rollout whose agents do at once what they are told."""

from controller.rollout.core.ports import NullPorts
from controller.rollout.core.rollout_inputs import best_path
from trefoil.core.plan import NodePlan


class Obedient(NullPorts):
    """What nodes were told is in `commanded`."""

    find_path = staticmethod(best_path)

    def __init__(self) -> None:
        self.commanded: list[NodePlan] = []

    async def query_agents(self, nodes) -> None: ...

    async def refresh_statuses(self) -> None: ...

    async def wait(self, until_s: float) -> None: ...

    async def publish(self, *, plan=None, rollout=None, node=None, drained=frozenset()) -> None: ...

    def ended(self) -> None: ...

    async def command(self, status, plan: NodePlan) -> bool:
        """Take a plan."""
        self.commanded.append(plan)
        return True

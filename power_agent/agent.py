"""The life of the agent: adopt, then pursue, watch, meter and publish until the end; the slices outlive it."""

import asyncio
from collections.abc import Sequence
from typing import Final

import structlog

from power_agent.adopt import adopt, list_devices
from power_agent.devices.inventory import Inventory
from power_agent.health import Health
from power_agent.loop import Publisher
from power_agent.metering import Metering
from power_agent.mig import Mig
from power_agent.node import Node
from power_agent.pursuit import Pursuit
from power_agent.runtimes.choose import install_triton
from power_agent.slices import Slice
from power_agent.verbs import Verbs
from trefoil.core.errors import Fenced, PlanError, StateUnavailable, TrefoilError
from trefoil.core.plan import NodePlan
from trefoil.runtime.state import State

EXIT_PATIENCE_S: Final = 1.5  # a service has 4 s to be gone


class AgentPart:
    """All that works on the node, in one part, because it starts and ends together."""

    def __init__(
        self,
        node: Node,
        inventory: Inventory,
        mig: Mig,
        verbs: Verbs,
        pursuit: Pursuit,
        health: Health,
        metering: Metering,
        publisher: Publisher,
        state: State,
    ) -> None:
        self._node = node
        self._inventory = inventory
        self._mig = mig
        self._verbs = verbs
        self._pursuit = pursuit
        self._health = health
        self._metering = metering
        self._publisher = publisher
        self._state = state
        self._log = structlog.get_logger()

    async def init(self) -> None:
        """Take over what runs, and the plan it runs by."""
        node, settings = self._node, self._node.settings
        self._verbs.install = await asyncio.to_thread(install_triton, settings, self._verbs.runtime)
        observed = await self._mig.reopen()
        await self._mig.call(lambda: list_devices(node, self._inventory, observed))
        node.journal.open()
        self._metering.open()
        node.capabilities = ("mig", "triton", *(("energy_counter",) if settings.meter == "nvml" else ()))
        await adopt(node, self._mig, self._verbs)
        if node.journal.memory.plan is not None:
            self._pursuit.resume(node.journal.memory.plan)
        await self._newer_plan()

    async def _newer_plan(self) -> None:
        """What was decided while no agent was here."""
        try:
            plan = await self._state.get(self._state.keys.plan_node(self._node.settings.node), NodePlan)
            if plan is not None and (self._node.plan is None or plan.revision > self._node.plan.revision):
                await self._pursuit.apply(plan)
        except (StateUnavailable, PlanError, Fenced) as error:
            self._log.warning("no plan was taken from Redis", why=str(error))

    async def run(self) -> None:
        """Until cancelled; a bug in one of them ends all."""
        loops = (self._pursuit.run, self._health.run, self._metering.run, self._publisher.run)
        tasks = [asyncio.create_task(loop(), name=loop.__qualname__) for loop in loops]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def shutdown(self) -> None:
        """Stop working, say so; the Tritons go on unless the settings say otherwise."""
        await self._pursuit.stop()
        await self._health.stop()
        slices = list(self._node.slices.values())
        if self._node.settings.stop_slices_on_exit:
            await asyncio.gather(*(self._end(part) for part in slices if part.running))
        await self._metering.stop()
        await self._publisher.stop()
        await _close(slices)
        self._node.journal.close()
        await self._mig.call(self._inventory.close)

    async def _end(self, part: Slice) -> None:
        try:
            await self._verbs.stop_process(part, EXIT_PATIENCE_S)
        except TrefoilError as error:
            self._log.warning("could not stop", slice=part.key.name, why=str(error))


async def _close(slices: Sequence[Slice]) -> None:
    for part in slices:
        if part.server is not None:
            await part.server.close()

"""Life cycle of the agent: adopt, then reconcile, watch, meter and publish until the end; the slices outlive it."""

import asyncio
from dataclasses import dataclass
from typing import Final

import structlog

from power_agent.clocks.clock_keeper import ClockKeeper
from power_agent.devices.cpu import Cpu
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceError, DriverUnavailable
from power_agent.devices.gpus import driver_load_id
from power_agent.devices.inventory import Inventory
from power_agent.energy.metering import Metering
from power_agent.publisher import Publisher
from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.factory import install_triton
from power_agent.slices.adoption import add_cpu, adopt, list_devices
from power_agent.slices.core.epochs import refuse_made_up_epoch
from power_agent.slices.mig import MigInstances, enable_mig
from power_agent.slices.node_state import PLAN, Device, Node
from power_agent.slices.reconciler import TEARDOWN, Reconciler
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import StepExecutor
from power_agent.slices.unproven import Unproven
from power_agent.watch.capability_watch import CapabilityWatch
from power_agent.watch.driver_watch import DriverWatch
from power_agent.watch.model_watch import ModelWatch
from power_agent.watch.slice_health import SliceHealth
from power_agent.watch.xid_watch import XidWatch
from trefoil.core.errors import Fenced, PlanError, StartError, TrefoilError, Unavailable
from trefoil.core.outside.plausible import LED_AHEAD_MAX
from trefoil.core.plan import NodePlan
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.state import State
from trefoil.runtime.state_errors import believed_epoch

CONTROLLER: Final = "controller"
"""Role whose epoch plans come under."""
EXIT_PATIENCE_S: Final = 1.5  # a service has 4 s to be gone
WAIT_FIRST_S: Final = 0.1
WAIT_MAX_S: Final = 5.0


@dataclass(slots=True, eq=False)
class AgentComponent:
    """Agent of a node: all that works on it, in one part, because it starts and ends together."""

    node: Node
    inventory: Inventory
    calls: DriverCalls
    mig: MigInstances
    executor: StepExecutor
    reconciler: Reconciler
    clocks: ClockKeeper
    health: SliceHealth
    watch: DriverWatch
    xids: XidWatch
    capabilities: CapabilityWatch
    models: ModelWatch
    metering: Metering
    publisher: Publisher
    unproven: Unproven
    state: State
    plan_keys: PlanKeys
    cpu: Cpu | None
    cpu_serves: bool
    no_plan: str = ""  # why none was taken from Redis

    async def init(self) -> None:
        """Adopt what runs, and the plan it runs by."""
        node, settings = self.node, self.node.settings
        node.journal.open()  # first: from here on this is the only agent of the node on this machine
        await self.publisher.refuse_namesake()
        node.cordons.resume()
        try:
            self.executor.install = await asyncio.to_thread(install_triton, settings, self.executor.runtime)
        except (StartError, Unavailable) as error:  # without one it still meters and keeps the devices
            self.executor.install_failure = str(error)
            node.set_missing("triton", str(error))
        processes = await self._find_devices()
        self.metering.open()
        self.metering.catch_up(await self.publisher.newest())
        await self.capabilities.open()
        await adopt(node, self.mig, self.executor, self.unproven, processes)
        await self.clocks.open()
        if node.journal.state.plan is not None:
            self.reconciler.resume(node.journal.state.plan)
        await self._newer_plan()

    async def _find_devices(self) -> dict[str, RunningTriton]:
        """Find the devices of the node; returns what runs on them, by tag.

        Waits as long as the driver, the simulated node or what runs Tritons is there, or meant, and not ready: without
        them it is not known what runs, and what runs serves on.
        """
        log, clock, pause_s, said = structlog.get_logger(), self.node.clock, WAIT_FIRST_S, ""
        while True:
            try:
                processes = await self._open_devices()
            except (DeviceError, Unavailable) as error:
                if str(error) != said:
                    log.warning("waiting for the devices of this node", why=str(error))
                    said = str(error)
                await clock.sleep(pause_s)
                pause_s = min(2 * pause_s, WAIT_MAX_S)
                continue
            if said:
                log.info("the devices of this node are ready", devices=sorted(self.node.devices))
            return processes

    async def _open_devices(self) -> dict[str, RunningTriton]:
        """GPUs if there is a driver, and the CPUs if they are wanted; a node may have either.

        Raises:
            DeviceError, Unavailable: the driver, the simulated node or what runs Tritons is not ready.
        """
        node, settings = self.node, self.node.settings
        node.devices.clear()  # of a try before
        loaded = driver_load_id(settings.driver_marker)
        self.inventory.remember_names({name: uuid for name, (_, uuid) in node.journal.state.devices.items()})
        try:
            observed = await self.calls.reopen()
            node.set_missing("driver", "")
        except DriverUnavailable as error:
            if settings.node_socket is not None or loaded:
                raise
            node.set_missing("driver", str(error))  # no driver is loaded: `DriverWatch` sees it when one is
            observed = ()
        if loaded != node.driver_load_id:  # it came while we waited
            node.driver_load_id = loaded
            node.journal.driver_changed(loaded)
        await list_devices(node, self.calls, self.inventory, observed)
        for device in list(node.devices.values()):
            await self._enable_mig(device)
        if self.cpu is not None:
            add_cpu(node, self.cpu, self.cpu_serves)
        return await self.executor.processes()

    async def _enable_mig(self, device: Device) -> None:
        try:
            await enable_mig(self.node, self.calls, self.inventory, device)
        except DriverUnavailable:
            raise
        except DeviceError as error:  # of this GPU: it hides no other, and is asked again by `DriverWatch`
            self.node.report_missing(device.device, str(error))

    async def _newer_plan(self) -> None:
        """What was decided while no agent was here."""
        node, settings, state = self.node, self.node.settings, self.state
        try:
            plan = await state.get(state.keys.plan_node(settings.node), NodePlan)
            if plan is None or (self.node.plan is not None and plan.revision <= self.node.plan.revision):
                return
            self.plan_keys.require(settings.redis_url.get_secret_value(), settings.insecure)
            try:
                plan = self.plan_keys.verify(plan)
            except PlanError as error:
                self.node.report_missing(PLAN, str(error))
                return
            highest = self.node.journal.state.highest_epoch
            refuse_made_up_epoch(
                plan.revision.epoch, highest, believed_epoch(await state.epoch_of(CONTROLLER), highest, LED_AHEAD_MAX)
            )
            if node.journal.fresh:
                self._refuse_to_end(plan)
            await self.reconciler.apply(plan)
        except (Unavailable, PlanError, Fenced) as error:
            if str(error) != self.no_plan:
                structlog.get_logger().warning("no plan was taken from Redis", why=str(error))
            self.no_plan = str(error)

    def _refuse_to_end(self, plan: NodePlan) -> None:
        """Refuse a plan that would end what serves: without a journal it is unknown whether an older one was put there.

        Raises:
            PlanError: naming the first slice that would end.
        """
        ends = [step.slice.name for step in self.reconciler.preview(plan).steps if step.verb in TEARDOWN]
        if ends:
            raise PlanError(
                f"without a journal it is not known to be the newest, and it would end {ends[0]}",
                field="plan", value=str(plan.revision), remedy="none: the plan that the controller sends is taken",
            )  # fmt: skip

    async def _seek_plan(self) -> None:
        """Look for a plan in Redis as long as slices were adopted and none is known."""
        while True:
            await self.node.clock.sleep(self.node.settings.drift_poll_s)
            if self.node.plan is None and self.node.slices:
                await self._newer_plan()

    async def run(self) -> None:
        """Run all loops until cancelled; a bug in one of them ends all."""
        loops = [part.run for part in (self.reconciler, self.clocks, self.health, self.watch, self.metering)]
        loops += [part.run for part in (self.xids, self.capabilities, self.models, self.publisher, self.unproven)]
        loops.append(self._seek_plan)
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
        """Stop working, and say so; the Tritons go on unless the settings say otherwise."""
        restoring = asyncio.create_task(self.clocks.restore())
        await self.reconciler.stop()
        await self.health.stop()
        await self.watch.stop()
        await self.xids.stop()
        self.capabilities.close()
        slices = list(self.node.slices.values())
        if self.node.settings.stop_slices_on_exit:
            await asyncio.gather(*(self._end(part) for part in slices if part.running))
        await self.metering.stop()
        await self.publisher.stop()
        await asyncio.gather(*(part.triton.close() for part in slices if part.triton is not None))
        await restoring
        self.node.journal.close()
        await self.calls.close()

    async def _end(self, part: Slice) -> None:
        try:
            await self.executor.stop_process(part, EXIT_PATIENCE_S)
        except TrefoilError as error:
            structlog.get_logger().warning("could not stop", slice=part.key.name, why=str(error))

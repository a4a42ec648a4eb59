"""A power agent without hardware: it speaks the agent's protocol and its slices turn READY after a delay.

It keeps the agent's side of the rollout contract, and notes in `violations` every breach of the other side: a stop of a
slice that is still routed to or busy, overlapping placements, a revision that goes back.
"""

import asyncio
import contextlib
from dataclasses import replace

import grpc

from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from trefoil.core.common import Lease, Revision
from trefoil.core.demand import TableAck
from trefoil.core.device_types import A100_40GB
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.fleet import DeviceState, DeviceStatus, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, Plan, PlannedSlice
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State


class FakeAgent(power_agent_pb2_grpc.PowerAgentServicer):
    """One node in this process; `await start()`, `await close()`."""

    def __init__(
        self, url: str, node: str = "node0", gpus: int = 2, start_s: float = 0.3, power_w: float = 60.0
    ) -> None:
        self.node, self.start_s, self.power_w = node, start_s, power_w
        self.devices = {f"{node}/gpu{i}": DeviceState.ASLEEP for i in range(gpus)}
        self.slices: dict[SliceKey, SliceStatus] = {}
        self.plan: NodePlan | None = None
        self.plans: list[NodePlan] = []
        self.violations: list[str] = []
        self.highest_epoch = 0
        self.silent = False
        self.holds_starts = False
        self.cordons: dict[str, str] = {}
        self._state = State.connect(url, "default", timeout_s=30.0)
        self._clock = WallClock()
        self._lease: Lease | None = None
        self._server: grpc.aio.Server | None = None
        self._target = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._seq = 0
        self._work = asyncio.Event()

    async def start(self) -> None:
        self._server = grpc.aio.server()
        power_agent_pb2_grpc.add_PowerAgentServicer_to_server(self, self._server)
        self._target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        self._tasks = [asyncio.create_task(self._publish()), asyncio.create_task(self._work_on())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.stop(0)
        await self._state.close()

    # --- the protocol -------------------------------------------------------------------------------------------------

    async def Apply(self, request, context):
        plan: NodePlan = codec.from_proto(request.plan)
        newest = self.plan.revision if self.plan else Revision()
        if plan.revision.epoch < self.highest_epoch or plan.revision < newest:
            message = f"revision {plan.revision} is older than {newest} or epoch {self.highest_epoch}"
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, message, (("trefoil-error", "StaleRevision"),))
        self.highest_epoch = max(self.highest_epoch, plan.revision.epoch)
        changed = self.plan is None or self.plan.digest != plan.digest
        self.plan = plan
        self.plans.append(plan)
        self._check_placements(plan)
        self._work.set()
        return power_agent_pb2.ApplyResponse(accepted=True, changed=changed)

    async def GetNode(self, request, context):
        return power_agent_pb2.GetNodeResponse(node=codec.to_proto(self.status()))

    def status(self) -> NodeStatus:
        """What is published."""
        return NodeStatus(
            node=self.node,
            zone="demo",
            epoch=self._lease.epoch if self._lease else 0,
            applied=self.plan.revision if self.plan else Revision(),
            devices=tuple(
                DeviceStatus(
                    device=name,
                    type=A100_40GB,
                    state=state,
                    slices=tuple(s for k, s in sorted(self.slices.items()) if k.device == name),
                    mig_current=True,
                    cordon=self.cordons.get(name, ""),
                )
                for name, state in sorted(self.devices.items())
            ),
            observed_at_s=self._clock.now_s(),
            simulated=True,
            agent_target=self._target,
            highest_epoch_seen=self.highest_epoch,
        )

    def _check_placements(self, plan: NodePlan) -> None:
        for device in plan.devices:
            keys = [p.key for p in device.slices]
            if any(a.overlaps(b) for i, a in enumerate(keys) for b in keys[i + 1 :]):
                self.violations.append(f"overlap on {device.device}")

    # --- what an agent does -------------------------------------------------------------------------------------------

    async def _work_on(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._work.wait()
            self._work.clear()
            if self.plan is not None:
                await self._reconcile(self.plan)

    async def _reconcile(self, plan: NodePlan) -> None:
        wanted = {p.key: p for d in plan.devices for p in d.slices}
        now_s = self._clock.now_s()
        present = [d for d in plan.devices if self.devices[d.device] != DeviceState.LOST]
        for device in present:
            self.devices[device.device] = device.target if device.slices else self.devices[device.device]
        for key, status in list(self.slices.items()):
            if key not in wanted and status.state != SliceState.DRAINING:
                await self._leave(key, plan)
            elif status.state == SliceState.DRAINING and now_s - status.since_s > 0.05:
                del self.slices[key]
        for key, part in wanted.items():
            self._pursue(key, part, plan, now_s)
        for device in present:
            if not any(k.device == device.device for k in self.slices) and not device.slices:
                self.devices[device.device] = device.target
        await self._put()

    def _pursue(self, key: SliceKey, part: PlannedSlice, plan: NodePlan, now_s: float) -> None:
        status = self.slices.get(key)
        if status is None:
            if self.devices[key.device] == DeviceState.AWAKE and not any(key.overlaps(o) for o in self.slices):
                self.slices[key] = SliceStatus(
                    key, 1, "MIG-fake", SliceState.STARTING, "", part.hosted, "127.0.0.1:1", "", plan.revision, now_s, 2
                )
        elif status.state == SliceState.STARTING and now_s - status.since_s >= self.start_s and not self.holds_starts:
            self.slices[key] = replace(status, state=SliceState.READY, since_s=now_s)
        elif status.state == SliceState.READY and status.hosted != part.hosted:
            self.slices[key] = replace(status, state=SliceState.SWAPPING, since_s=now_s)
        elif status.state == SliceState.SWAPPING and now_s - status.since_s >= self.start_s / 2:
            self.slices[key] = replace(status, state=SliceState.READY, hosted=part.hosted, since_s=now_s)

    async def _leave(self, key: SliceKey, plan: NodePlan) -> None:
        status = self.slices[key]
        published = await self._state.get(self._state.keys.plan(), Plan)
        routed = {t.slice for r in (published.routes if published else ()) for t in r.targets if not t.draining}
        if status.state == SliceState.READY and key in routed:
            self.violations.append(f"{key.name} is stopped by {plan.revision} and routed to")
        acks = await self._state.scan(self._state.keys.ack_prefix(), TableAck)
        for ack in acks.values():
            if ack.table < plan.revision or any(s.slice == key and s.in_flight for s in ack.slices):
                return  # not yet: a worker may still send to it
        self.slices[key] = replace(status, state=SliceState.DRAINING, since_s=self._clock.now_s())

    async def _publish(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # Redis may be down in a test
                if self._lease is None or not await self._state.renew(self._lease):
                    self._lease = await self._state.acquire(
                        f"agent:{self.node}", "fake", floor_epoch=self.highest_epoch
                    )
                await self._put()
                await self._meter()
            await self._clock.sleep(0.25)

    async def _put(self) -> None:
        if self._lease is not None and not self.silent:
            with contextlib.suppress(Exception):
                await self._state.put(self._lease, self._state.keys.node(self.node), self.status())

    async def _meter(self) -> None:
        """A constant draw per device, all of it idle."""
        assert self._lease is not None
        self._seq += 1
        now_s = self._clock.now_s()
        for name in self.devices:
            joules = self.power_w * 0.25
            sample = EnergySample(
                self.node, name, self._seq, now_s - 0.25, now_s, joules, EnergyMethod.NVML_COUNTER, idle_j=joules,
                simulated=True,
            )  # fmt: skip
            await self._state.append(self._lease, self._state.keys.energy(self.node), sample, 10_000)

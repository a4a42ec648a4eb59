"""Publisher: writes NodeStatus every second and on change, and EnergySamples as they are read.

Holds the lease `agent:<node>`. Without Redis everything else goes on; when it is back, the samples that the stream
lacks are sent again from the energy log's ring, by `seq`. A write whose answer was lost may have been done, so the same
comparison follows every trouble.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Final

import structlog

from power_agent.energy.energy_log import EnergyLog
from power_agent.slices.node_state import Node
from trefoil.core.common import Lease
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Fenced, StateUnavailable
from trefoil.runtime.fenced import Append, Put
from trefoil.runtime.state import State

PERIOD_S: Final = 1.0
GAP_S: Final = 0.05  # changes come in bursts
STREAM_S: Final = 6 * 3600.0
TAIL_PER_DEVICE: Final = 8  # newest entries that surely hold the newest of each device
BATCH_MAX: Final = 200


class Publisher:
    """Publisher, the only writer, of node:<node> and energy:<node>."""

    def __init__(self, node: Node, state: State, energy_log: EnergyLog) -> None:
        self._node = node
        self._state = state
        self._energy_log = energy_log
        self._role = f"agent:{node.settings.node}"
        self._lease: Lease | None = None
        self._renew_at_s = 0.0
        self._pending: deque[EnergySample] = deque()
        self._stream_in_step = False  # the stream holds everything up to what is pending
        self._trouble = ""
        self._log = structlog.get_logger()

    def publish(self, samples: Sequence[EnergySample]) -> None:
        """Queue samples to send; they are in the energy log already."""
        if self._stream_in_step:
            self._pending.extend(samples)
        self._node.changes.notify()

    async def run(self) -> None:
        """Publish until cancelled."""
        seen = -1
        while True:
            with contextlib.suppress(TimeoutError):  # nothing changed: publish all the same
                async with asyncio.timeout(PERIOD_S):
                    seen = await self._node.changes.wait(seen)
            await self.step()
            await self._node.clock.sleep(GAP_S)

    async def step(self) -> None:
        """Publish once, if the lease is ours and Redis takes it. Public so that tests can drive it."""
        try:
            if await self._hold_lease():
                await self._write()
                self._trouble = ""
        except (StateUnavailable, Fenced) as error:
            self._stream_in_step = False
            self._pending.clear()
            if isinstance(error, Fenced):
                self._lease = None
            if type(error).__name__ != self._trouble:
                self._trouble = type(error).__name__
                self._log.warning("cannot publish", why=str(error))

    async def _hold_lease(self) -> bool:
        """Whether the lease is ours: acquired or renewed in time."""
        ttl_s, clock = self._node.settings.lease_ttl_s, self._node.clock
        if self._lease is not None:
            if clock.monotonic_s() < self._renew_at_s:
                return True
            if await self._state.renew(self._lease, ttl_s):
                self._renew_at_s = clock.monotonic_s() + min(PERIOD_S, ttl_s / 3)
                return True
            self._log.warning("lease lost", role=self._role, epoch=self._lease.epoch)
        self._stream_in_step = False
        floor = self._node.journal.state.lease_epoch
        holder = f"{self._node.settings.node}:{os.getpid()}"
        self._lease = await self._state.acquire(self._role, holder, ttl_s, floor)
        if self._lease is None:
            return False
        self._renew_at_s = clock.monotonic_s() + min(PERIOD_S, ttl_s / 3)
        self._node.journal.raise_lease_epoch(self._lease.epoch)
        self._node.epoch = self._lease.epoch
        self._node.metrics.set("trefoil_lease_epoch", self._lease.epoch, role=self._role)
        self._log.info("lease", role=self._role, epoch=self._lease.epoch)
        return True

    async def _write(self) -> None:
        assert self._lease is not None
        keys, node = self._state.keys, self._node.settings.node
        if not self._stream_in_step:
            await self._line_up_stream()
        maxlen = int(STREAM_S / self._node.settings.sample_period_s) * max(1, len(self._node.devices))
        status = self._node.status()
        batch = [self._pending[i] for i in range(min(BATCH_MAX, len(self._pending)))]
        await self._state.write(
            self._lease,
            [
                Put(keys.node(node), status),
                *(Append(keys.energy(node), sample, maxlen) for sample in batch),
            ],
        )
        self._node.note_published(status)
        for _ in batch:
            self._pending.popleft()
        if self._pending:
            self._node.changes.notify()

    async def _line_up_stream(self) -> None:
        """Line up the samples that the stream does not hold."""
        count = TAIL_PER_DEVICE * max(1, len(self._node.devices))
        newest: dict[str, int] = {}
        for _, sample in await self._state.tail(self._state.keys.energy(self._node.settings.node), EnergySample, count):
            newest[sample.device] = max(sample.seq, newest.get(sample.device, 0))
        missing = [sample for sample in self._energy_log.ring if sample.seq > newest.get(sample.device, 0)]
        self._pending = deque(missing)
        self._stream_in_step = True
        if missing:
            self._log.info("energy samples to send again", count=len(missing))

    async def stop(self) -> None:
        """Publish the last status and samples, then free the lease for a successor."""
        if self._lease is None:
            return
        try:
            if await self._state.renew(self._lease, self._node.settings.lease_ttl_s):
                while True:
                    await self._write()
                    if not self._pending:
                        break
                await self._state.release(self._lease)
        except (StateUnavailable, Fenced) as error:
            self._log.warning("could not publish a last time", why=str(error))

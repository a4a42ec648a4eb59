"""Publisher: writes NodeStatus every second and on change, EnergySamples as they are read, and who wants capacity.

Holds the lease `agent:<node>`. Without Redis everything else continues; when it is back, the samples that the stream
lacks are sent again from the energy log's ring, by `seq`. A write whose answer was lost may have been done, so the same
comparison follows every trouble.
"""

import asyncio
import contextlib
import os
import re
import socket
from collections import deque
from collections.abc import Sequence
from typing import Final

import structlog

from power_agent.energy.energy_log import EnergyLog
from power_agent.slices.node_state import Node
from trefoil.core.common import Lease
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Fenced, StartError, StateUnavailable
from trefoil.core.outside.stream_order import FOLDED_MAX, StreamOrder
from trefoil.runtime.fenced import Append, Put
from trefoil.runtime.proc import Identity
from trefoil.runtime.state import SIGNAL_TTL_S, State

PERIOD_S: Final = 1.0
GAP_S: Final = 0.05  # changes come in bursts
STREAM_S: Final = 6 * 3600.0
TAIL_PER_DEVICE: Final = 8  # newest entries that surely hold the newest of each device
BATCH_MAX: Final = 200
NAMESAKE_S: Final = 3.0  # an agent renews its lease every second
NAMESAKE_POLL_S: Final = 0.25
PID: Final = re.compile("[0-9]{1,10}")  # str.isdigit takes "²" too, of which int makes no number


class Publisher:
    """Publisher, the only writer, of node:<node>, energy:<node> and signal:scale:<device> of its devices."""

    def __init__(self, node: Node, state: State, energy_log: EnergyLog) -> None:
        self._node = node
        self._state = state
        self._energy_log = energy_log
        self._role = f"agent:{node.settings.node}"
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._lease: Lease | None = None
        self._seen: Lease | None = None  # another agent's of this role
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
        self._lease = await self._state.acquire(self._role, self._holder, ttl_s, floor)
        if self._lease is None:
            error = await self._namesake()
            if error and str(error) != self._trouble:  # this one runs already: it continues, unpublished
                self._trouble = str(error)
                self._log.error("cannot publish", why=str(error))
            return False
        self._renew_at_s = clock.monotonic_s() + min(PERIOD_S, ttl_s / 3)
        self._node.journal.raise_lease_epoch(self._lease.epoch)
        self._node.epoch = self._lease.epoch
        self._node.metrics.set("trefoil_lease_epoch", self._lease.epoch, role=self._role)
        self._log.info("lease", role=self._role, epoch=self._lease.epoch)
        return True

    async def refuse_namesake(self) -> None:
        """Refuse to start beside an agent that publishes under this node's name: its lease is seen to be renewed.

        Raises:
            StartError: naming who does.
        """
        clock = self._node.clock
        until_s = clock.monotonic_s() + NAMESAKE_S
        try:
            while not (error := await self._namesake()) and self._seen and clock.monotonic_s() < until_s:
                await clock.sleep(NAMESAKE_POLL_S)
        except StateUnavailable as unknown:
            self._log.warning("cannot check whether another agent has this node's name", why=str(unknown))
            return
        if error:
            raise error

    async def _namesake(self) -> StartError | None:
        """Another agent that publishes under this node's name; the status of an agent that is gone does not count."""
        holder = await self._state.holder(self._role)
        before, self._seen = self._seen, None if holder is None or self._is_gone(holder.holder) else holder
        if holder is None or before is None or self._seen in (None, before):
            return None
        return StartError(
            f"another power agent, {holder.holder}, publishes under this name", field="node",
            value=self._node.settings.node, remedy="give each node a name of its own, or stop that agent",
        )  # fmt: skip

    def _is_gone(self, holder: str) -> bool:
        """Whether it was an agent of this machine, and no process has its number now."""
        host, _, pid = holder.rpartition(":")
        own_host, _, own_pid = self._holder.rpartition(":")
        if host != own_host or not PID.fullmatch(pid):
            return False
        return pid == own_pid or not Identity.of_pid(int(pid)).alive()

    async def _write(self) -> None:
        assert self._lease is not None
        keys, node = self._state.keys, self._node.settings.node
        if not self._stream_in_step:
            await self._line_up_stream()
        maxlen = int(STREAM_S / self._node.settings.sample_period_s) * max(1, len(self._node.devices))
        status = self._node.status()
        signals = [device.scale_signal for device in self._node.devices.values() if device.scale_signal is not None]
        batch = [self._pending[i] for i in range(min(BATCH_MAX, len(self._pending)))]
        await self._state.write(
            self._lease,
            [
                Put(keys.node(node), status),
                *(Append(keys.energy(node), sample, maxlen) for sample in batch),
                *(Put(keys.scale_signal(signal.device), signal, SIGNAL_TTL_S) for signal in signals),
            ],
        )
        self._node.note_published(status)
        for _ in batch:
            self._pending.popleft()
        if self._pending:
            self._node.changes.notify()

    async def newest(self) -> dict[str, EnergySample]:
        """Newest sample of each device that the stream holds and that continues one there; none where Redis does not
        answer."""
        try:
            return await self._newest()
        except StateUnavailable as error:
            self._log.warning("published energy samples cannot be read", why=str(error))
            return {}

    async def _tail(self) -> list[EnergySample]:
        key, count = self._state.keys.energy(self._node.settings.node), max(1, len(self._node.devices))
        return [sample for _, sample in await self._state.tail(key, EnergySample, TAIL_PER_DEVICE * count)]

    async def _newest(self) -> dict[str, EnergySample]:
        order, newest = StreamOrder[EnergySample](lambda *_: None, FOLDED_MAX), dict[str, EnergySample]()
        for sample in await self._tail():
            newest |= {one.device: one for one in order.take(sample.device, sample, proven=True)}
        return newest

    async def _line_up_stream(self) -> None:
        """Line up the samples that the stream does not hold: those after the newest of ours there, whatever else it
        holds."""
        there = {(one.device, one.seq, one.counter_j) for one in await self._tail()}
        ring = self._energy_log.ring
        newest = {one.device: one.seq for one in ring if (one.device, one.seq, one.counter_j) in there}
        missing = [sample for sample in ring if sample.seq > newest.get(sample.device, 0)]
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

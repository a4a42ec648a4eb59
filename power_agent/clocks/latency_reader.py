"""Latency reader: load windows and objectives out of Redis, for governors that go by the latency of their stages.

Nothing is read while no plan names such a governor. When the reader meets a stream for the first time, it skips the
windows that stand there, because they are old. Without Redis no window comes, and governors go to the top of their
range. A window that does not continue its worker's stream is set aside.
"""

from typing import Final

import structlog

from power_agent.clocks.core.slice_latencies import SliceLatencies
from power_agent.governors import reads_latency
from power_agent.slices.node_state import Node
from trefoil.core.demand import LoadWindow
from trefoil.core.errors import StateUnavailable
from trefoil.core.objective import Objective
from trefoil.core.outside.stream_order import StreamOrder
from trefoil.runtime.state import State

PERIOD_S: Final = 0.5  # as muServe samples, and as long as a window is


class LatencyReader:
    """Reader of what dispatchers say of the slices of this node."""

    def __init__(self, node: Node, state: State) -> None:
        self.latencies = SliceLatencies(node.catalog)
        self._node, self._state = node, state
        self._read_to: dict[str, str] = {}
        self._order = StreamOrder[LoadWindow](self._set_aside)
        self._trouble = False

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.step()
            await self._node.clock.sleep(PERIOD_S)

    async def step(self) -> None:
        """Read once, if a governor wants it. Public so that tests can drive it."""
        plan, override = self._node.plan, self._node.settings.governor
        if plan is None or not any(reads_latency(override or device.governor) for device in plan.devices):
            self._read_to.clear()
            self._order.keep(())
            return
        try:
            await self._read()
            self._trouble = False
        except StateUnavailable as error:
            if not self._trouble:
                self._trouble = True
                structlog.get_logger().warning("latencies cannot be read: clocks go to the top", why=str(error))

    async def _read(self) -> None:
        state, families = self._state, {family.name: family for family in self._node.catalog.families}
        wanted = (await state.scan(state.keys.objective_prefix(), Objective)).values()
        own = {name: family.classes.get("", (0.0, 0.0)) for name, family in families.items()}
        self.latencies.aim(wanted, own)
        names = await state.names(state.keys.load_prefix())
        for name in names:
            if name not in self._read_to:
                newest = await state.tail(name, LoadWindow)
                self._read_to[name] = newest[-1][0] if newest else "0"
                continue
            for entry_id, window in await state.stream(name, LoadWindow, self._read_to[name]):
                self._read_to[name] = entry_id
                for one in self._order.take(name, window):
                    self.latencies.add_window(one, self._node.clock.monotonic_s())
        self._read_to = {name: self._read_to[name] for name in names}
        self._order.keep(names)

    def _set_aside(self, window: LoadWindow, why: str) -> None:
        self._node.metrics.inc("trefoil_set_aside_total", kind="window")
        structlog.get_logger().warning("a load window is set aside", worker=window.worker, why=why)

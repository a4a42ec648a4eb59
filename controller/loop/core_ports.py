"""Ports of every core, live: its disk, its logs and metrics, and whom it wakes."""

import asyncio
from collections.abc import Mapping

import structlog

from controller.role.disk_store import DiskStore
from trefoil.runtime.telemetry import Metrics


class Signals:
    """Wake-ups of the control loop."""

    def __init__(self) -> None:
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Wake the control loop: it ticks now instead of at the next period."""
        self._wake.set()

    async def woken(self, timeout_s: float) -> None:
        """Wait until woken, or until the period is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            pass  # the period is over: tick
        self._wake.clear()


class LiveCorePorts:
    """`CorePorts` on a disk, structlog, Prometheus' metrics and signals."""

    def __init__(self, disk: DiskStore, metrics: Metrics, signals: Signals) -> None:
        self._disk, self._metrics, self._log = disk, metrics, structlog.get_logger()
        self.save_later = disk.save_later
        self.gauge, self.duration = metrics.set, metrics.observe
        self.wake = signals.wake

    def save(self, values: Mapping[str, object]) -> None:
        self._disk.save_together(values)

    def log(self, event: str, /, *, warning: bool = False, **fields: object) -> None:
        (self._log.warning if warning else self._log.info)(event, **fields)

    def count(self, metric: str, amount: float = 1.0, **labels: str) -> None:
        self._metrics.inc(metric, amount, **labels)

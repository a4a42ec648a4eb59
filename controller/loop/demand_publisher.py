"""Publisher of demand: a series by the second, and its forecast."""

from typing import Final

from controller.observe.reader import ObservationReader
from controller.role.leadership import Leadership
from trefoil.core.brains import HISTORY_MAX_S
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Append, Put, Write
from trefoil.runtime.state import Keys

DEMAND_MAX: Final = int(HISTORY_MAX_S)  # seconds
BACKLOG_S: Final = 600  # load windows of workers reach back so far


class DemandPublisher:
    """Publisher of the forecast of each family, and of the arrivals of each second that is over, once a second.

    A new leader continues after the last second that is written, at most `BACKLOG_S` back.
    """

    def __init__(self, keys: Keys, reader: ObservationReader, leadership: Leadership, clock: Clock) -> None:
        self._keys, self._reader, self._leadership, self._clock = keys, reader, leadership, clock
        self._at_s = 0.0
        self._epoch = 0
        self._written: dict[str, int] = {}

    async def publish(self) -> None:
        """Publish when a second has passed since the last time."""
        now_s = self._clock.now_s()
        if now_s - self._at_s < 1.0:
            return
        self._at_s = now_s
        if self._epoch != self._leadership.epoch:
            self._epoch, self._written = self._leadership.epoch, {}
        writes: list[Write] = []
        written = dict(self._written)
        for family, forecast in sorted(self._reader.observation.forecasts.items()):
            first, counts = self._reader.observation.windows.steps(family, now_s, past_s=BACKLOG_S)
            end = first + len(counts)
            if family not in written:
                newest, _ = await self._reader.newest_demand(family)
                written[family] = first - 1 if newest is None else newest
            begins = max(first, written[family] + 1, end - BACKLOG_S)
            writes += (self._second(family, second, counts[second - first]) for second in range(begins, end))
            writes.append(Put(self._keys.forecast_load(family), forecast))
            written[family] = end - 1
        if writes:
            await self._leadership.write(writes)
        self._written = written

    def _second(self, family: str, second: int, count: float) -> Write:
        cell = LoadCell(LoadKey(family), arrived=round(count), arrived_per_s=(round(count),))
        window = LoadWindow(starts_at_s=float(second), ends_at_s=second + 1.0, cells=(cell,))
        return Append(self._keys.demand(family), window, DEMAND_MAX, ttl_s=float(DEMAND_MAX))

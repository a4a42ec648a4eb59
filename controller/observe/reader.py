"""Observation live: read from Redis, published as demand series and metrics.

On trouble the last values stand, and the observation says why."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import structlog

from controller.observe.core.observation import Observation
from controller.settings import CarbonSettings
from controller.thresholds import CARBON_HISTORY_MAX
from trefoil.core import errors
from trefoil.core.carbon import CarbonForecast, CarbonReading, Series, shift_forecast, shift_reading
from trefoil.core.demand import LoadWindow, ScaleSignal
from trefoil.core.fleet import NodeStatus
from trefoil.core.outside.stream_order import StreamOrder
from trefoil.runtime.clock import Clock
from trefoil.runtime.sightings import AGREE_S, LiveAcks, Sightings
from trefoil.runtime.state import LOADS_MAX, SIGNAL_TTL_S, State

LOG = structlog.get_logger()
WRITTEN_S: Final = 5.0  # after its end a second is written down, unless its writer's clock is another
AHEAD_S: Final = 2.0  # by which a stamp may be in the future: clocks that agree, and a value on its way
PAGE: Final = 3600  # entries read at once
JOINED_S: Final = 0.5  # by which two seconds that were written one after the other differ


class ObservationReader:
    """Reader of Redis into an observation, in which all times are this process's; remembers how far each stream has
    been read."""

    def __init__(self, observation: Observation, state: State, carbon: CarbonSettings, clock: Clock) -> None:
        self.observation = observation
        self._state, self._carbon, self._clock = state, carbon, clock
        self._live, self._sightings = LiveAcks(state, clock), Sightings(clock)
        self._ahead_s = clock.calendar_ahead_s()
        self._load_ids: dict[str, str] = {}
        self._order = StreamOrder[LoadWindow](self._set_aside)
        self._history_id = "0"
        self._restored = False
        noted = observation.inputs.set_aside.note
        state.on_unreadable = lambda key, why: noted(key, "value", why, clock.now_s())

    async def refresh(self) -> None:
        """Read everything once; on trouble keep the last values and say in `inputs.down` why."""
        inputs = self.observation.inputs
        try:
            await self._refresh()
            unsure = sorted(node for node, offset_s in inputs.clock_offsets_s.items() if offset_s is None)
            inputs.down = f"not seen yet whether {', '.join(unsure)} is stale or on another clock" if unsure else ""
        except errors.StateUnavailable as error:
            inputs.down = str(error)
        except errors.InvalidInput as error:
            inputs.down = f"Redis holds what this version cannot read: {error}"
        self.observation.windows.forget(self._clock.now_s())

    async def refresh_nodes(self) -> None:
        """Read node statuses and acks only: what a rollout waits for.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        inputs = self.observation.inputs
        self.note_nodes((await self._state.scan(self._state.keys.node_prefix(), NodeStatus)).values())
        inputs.acks = await self._live.read()
        inputs.blind = self._live.blind

    def note_nodes(self, found: Iterable[NodeStatus]) -> None:
        """Note statuses as their agents wrote them; one that may be stale is taken as current."""
        inputs = self.observation.inputs
        for node in found:
            own_s, offset_s = self._sightings.look(node.node, node.observed_at_s), self._sightings.offset_s(node.node)
            own_s = own_s if offset_s is not None else self._clock.now_s()
            inputs.nodes[node.node] = node if own_s == node.observed_at_s else replace(node, observed_at_s=own_s)
            if offset_s == 0:
                inputs.clock_offsets_s.pop(node.node, None)
            else:
                inputs.clock_offsets_s[node.node] = offset_s

    async def _refresh(self) -> None:
        keys, series, inputs = self._state.keys, self._carbon.series, self.observation.inputs
        await self.refresh_nodes()
        self._follow_calendar()
        inputs.carbon = await self._reading(series) or inputs.carbon
        forecast = await self._state.get(keys.carbon_forecast(series), CarbonForecast)
        inputs.carbon_forecast = shift_forecast(forecast, -self._ahead_s) if forecast is not None else None
        count = CARBON_HISTORY_MAX
        if self._history_id == "0":
            entries = await self._state.tail(keys.carbon_history(series), CarbonReading, count)
        else:
            entries = await self._state.stream(keys.carbon_history(series), CarbonReading, self._history_id, count)
        for entry_id, reading in entries:
            self._history_id = entry_id
            inputs.carbon_history.append(shift_reading(reading, -self._ahead_s))
        await self._refresh_other_zones()
        self.observation.note_carbon()
        signals = await self._state.scan(keys.scale_signal_prefix(), ScaleSignal, SIGNAL_TTL_S)
        inputs.scale_signals = tuple(signals[name] for name in sorted(signals))
        load_keys = await self._state.names(keys.load_prefix())
        self._order.keep(load_keys)
        for key in load_keys:
            for entry_id, window in await self._state.stream(key, LoadWindow, self._load_ids.get(key, "0"), LOADS_MAX):
                self._load_ids[key] = entry_id
                proven = self._live.offset_s(window.dispatcher, window.worker) is not None
                for one in self._order.take(key, window, proven) if self._is_over(window) else ():
                    self.observation.windows.add(self._in_own_time(one), self.observation.catalog)
        if self.observation.windows.restorable and not self._restored:
            await self._restore_history()
            self._restored = True

    def _is_over(self, window: LoadWindow) -> bool:
        """Whether a window is over by our clock; one that is not is set aside."""
        ahead_s = self._in_own_time(window).ends_at_s - self._clock.now_s()
        if ahead_s > AHEAD_S:
            self._set_aside(window, f"a window that ends {ahead_s:.0f} s from now")
        return ahead_s <= AHEAD_S

    def _set_aside(self, window: LoadWindow, why: str) -> None:
        key = self._state.keys.load(window.dispatcher, window.worker)
        if self.observation.inputs.set_aside.note(key, "window", why, self._clock.now_s()):
            LOG.warning("a load window is set aside", key=key, why=why)

    async def _restore_history(self) -> None:
        """Arrivals from before this process, as far back as the forecaster looks: an hour at a time."""
        prefix = self._state.keys.demand("")
        for name in await self._state.names(prefix):
            family = name.removeprefix(prefix)
            _, shift_s = await self.newest_demand(family)
            begins_s = self._clock.now_s() - await self._state.clock_offset_s() - self.observation.history_s
            after = f"{max(0, int(begins_s * 1000))}-0"
            while entries := await self._state.stream(name, LoadWindow, after, PAGE):
                after = entries[-1][0]
                counts: dict[int, float] = {}
                for _, window in _in_a_row(entries):
                    counts.setdefault(int(window.starts_at_s + shift_s), float(sum(c.arrived for c in window.cells)))
                self.observation.windows.restore(family, counts)

    async def newest_demand(self, family: str) -> tuple[int | None, float]:
        """The last second of a family that is written down, and what its writer's stamps lack to be in our time [s].

        It was stamped when it was written, which the id of its entry tells by Redis' clock. Of the last three entries
        one may be stray: the newest counts that has a neighbour.
        """
        entries = await self._state.tail(self._state.keys.demand(family), LoadWindow, 3)
        if not entries:
            return None, 0.0
        entry_id, window = (_in_a_row(entries) or entries)[-1]
        written_s = int(entry_id.partition("-")[0]) / 1e3 + await self._state.clock_offset_s()
        lacks_s = float(round(written_s - window.ends_at_s))
        shift_s = lacks_s if abs(lacks_s) > WRITTEN_S else 0.0
        return int(window.starts_at_s + shift_s), shift_s

    def _in_own_time(self, window: LoadWindow) -> LoadWindow:
        """A window by our clock; of a worker that acknowledges nothing any more it ended now at the latest."""
        offset_s = self._live.offset_s(window.dispatcher, window.worker)
        if offset_s is None:
            offset_s = min(0.0, self._clock.now_s() - window.ends_at_s)
            offset_s = offset_s if offset_s < -AGREE_S else 0.0
        if not offset_s:
            return window
        return replace(window, starts_at_s=window.starts_at_s + offset_s, ends_at_s=window.ends_at_s + offset_s)

    async def _reading(self, series: Series) -> CarbonReading | None:
        reading = await self._state.get(self._state.keys.carbon_now(series), CarbonReading)
        return shift_reading(reading, -self._ahead_s) if reading is not None else None

    def _follow_calendar(self) -> None:
        """Carbon is calendar time: after a step of the wall clock all of it lies elsewhere on ours."""
        ahead_s, inputs = self._clock.calendar_ahead_s(), self.observation.inputs
        step_s, self._ahead_s = ahead_s - self._ahead_s, ahead_s
        if not step_s:
            return
        LOG.warning("the wall clock was stepped: carbon follows it, nothing else does", step_s=round(step_s, 1))
        inputs.carbon = shift_reading(inputs.carbon, -step_s) if inputs.carbon is not None else None
        if inputs.carbon_allowed is not None:
            inputs.carbon_allowed = shift_reading(inputs.carbon_allowed, -step_s)
        history = [shift_reading(reading, -step_s) for reading in inputs.carbon_history]
        inputs.carbon_history.clear()
        inputs.carbon_history.extend(history)
        inputs.zones = tuple(shift_reading(reading, -step_s) for reading in inputs.zones)

    async def _refresh_other_zones(self) -> None:
        """Readings of the other zones that nodes lie in."""
        series, inputs = self._carbon.series, self.observation.inputs
        held = {reading.series.zone: reading for reading in inputs.zones}
        for zone in sorted({node.zone for node in inputs.nodes.values()} - {series.zone, ""}):
            reading = await self._reading(replace(series, zone=zone))
            if reading is not None:
                held[zone] = reading
        inputs.zones = tuple(held[zone] for zone in sorted(held))


def _in_a_row(entries: Sequence[tuple[str, LoadWindow]]) -> list[tuple[str, LoadWindow]]:
    """Entries that begin where the one before ends, or end where the next one begins: a stray one does neither."""
    joined = [abs(after.starts_at_s - before.ends_at_s) < JOINED_S for (_, before), (_, after) in pairwise(entries)]
    pairs = zip(entries, [False, *joined], [*joined, False], strict=True)
    return [entry for entry, after, before in pairs if after or before]

"""Reads Redis into an observation. On trouble the last values stand, and the observation says why."""

from dataclasses import replace

from controller.core.observation import Observation
from controller.settings import CarbonSettings
from trefoil.core import errors
from trefoil.core.carbon import CarbonForecast, CarbonReading
from trefoil.core.demand import LoadWindow
from trefoil.core.fleet import NodeStatus
from trefoil.runtime.acks import LiveAcks
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State


class Reader:
    """Remembers how far each stream has been read."""

    def __init__(self, seen: Observation, state: State, carbon: CarbonSettings, clock: Clock) -> None:
        self.seen = seen
        self._state, self._carbon, self._clock = state, carbon, clock
        self._live = LiveAcks(state, clock)
        self._load_ids: dict[str, str] = {}
        self._history_id = "0"

    async def refresh(self) -> None:
        """Read everything once; on trouble keep the last values and say in `inputs.down` why."""
        inputs = self.seen.inputs
        try:
            await self._refresh()
            inputs.down = ""
        except errors.StateUnavailable as error:
            inputs.down = str(error)
        except errors.InvalidInput as error:
            inputs.down = f"Redis holds what this version cannot read: {error}"
        self.seen.windows.forget(self._clock.now_s())

    async def refresh_nodes(self) -> None:
        """Read node statuses and acks only: what a rollout waits for.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        keys, inputs = self._state.keys, self.seen.inputs
        inputs.nodes |= {n.node: n for n in (await self._state.scan(keys.node_prefix(), NodeStatus)).values()}
        inputs.acks = await self._live.read()
        inputs.blind = self._live.blind

    async def _refresh(self) -> None:
        keys, series, inputs = self._state.keys, self._carbon.series, self.seen.inputs
        await self.refresh_nodes()
        inputs.carbon = await self._state.get(keys.carbon_now(series), CarbonReading) or inputs.carbon
        inputs.carbon_forecast = await self._state.get(keys.carbon_forecast(series), CarbonForecast)
        count = self._carbon.history_max
        if self._history_id == "0":
            entries = await self._state.tail(keys.carbon_history(series), CarbonReading, count)
        else:
            entries = await self._state.stream(keys.carbon_history(series), CarbonReading, self._history_id, count)
        for entry_id, reading in entries:
            self._history_id = entry_id
            inputs.carbon_history.append(reading)
        await self._zones()
        self.seen.note_carbon()
        for key in await self._state.names(keys.load_prefix()):
            for entry_id, window in await self._state.stream(key, LoadWindow, self._load_ids.get(key, "0")):
                self._load_ids[key] = entry_id
                self.seen.windows.add(window, self.seen.catalog)

    async def _zones(self) -> None:
        """Readings of the other zones that nodes lie in."""
        series, inputs = self._carbon.series, self.seen.inputs
        held = {reading.series.zone: reading for reading in inputs.zones}
        for zone in sorted({node.zone for node in inputs.nodes.values()} - {series.zone, ""}):
            reading = await self._state.get(self._state.keys.carbon_now(replace(series, zone=zone)), CarbonReading)
            if reading is not None:
                held[zone] = reading
        inputs.zones = tuple(held[zone] for zone in sorted(held))

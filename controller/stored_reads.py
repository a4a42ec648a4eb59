"""What operators ask of Redis, asked through the controller: clients of any deployment need no password of Redis."""

from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from controller.observe.core.observation import Observation
from controller.settings import ControllerSettings
from protos.controller.v1 import controller_pb2 as pb
from trefoil.core import errors
from trefoil.core.carbon import CarbonForecast, CarbonRatio, CarbonReading
from trefoil.core.demand import TableAck
from trefoil.core.fleet import NodeStatus
from trefoil.core.jobs.planned import PlannedJobs
from trefoil.core.outside.plausible import hour_starts_s
from trefoil.core.plan import DecisionRecord
from trefoil.core.units import HOUR_S
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State

PAGE: Final = 100
FORECAST_BANDS: Final = 96


class StoredReads:
    """Answers from what stands in Redis now. Every method raises errors.StateUnavailable when it does not answer."""

    def __init__(self, settings: ControllerSettings, state: State, observation: Observation, clock: Clock) -> None:
        self._settings, self._state, self._observation, self._clock = settings, state, observation, clock

    async def fleet(self) -> Any:
        """Nodes, carbon now, and workers (GetFleetResponse)."""
        keys = self._state.keys
        nodes = await self._state.scan(keys.node_prefix(), NodeStatus)
        readings = await self._state.scan(keys.carbon_now_prefix(), CarbonReading)
        ratios = [
            await self._state.get(keys.carbon_ratio(reading.series), CarbonRatio) for reading in readings.values()
        ]
        forecasts = [
            await self._state.get(keys.carbon_forecast(reading.series), CarbonForecast) for reading in readings.values()
        ]
        acks = await self._state.scan(keys.ack_prefix(), TableAck)
        jobs = await self._state.get(keys.jobs_plan(), PlannedJobs)
        return pb.GetFleetResponse(
            cluster=self._settings.cluster,
            nodes=[codec.to_proto(nodes[key]) for key in sorted(nodes)],
            stale_nodes=sorted(self._observation.fleet(self._clock.now_s()).stale),
            carbon=[codec.to_proto(readings[key]) for key in sorted(readings)],
            carbon_ratios=[codec.to_proto(ratio) for ratio in ratios if ratio is not None],
            carbon_forecasts=[codec.to_proto(_ahead(one, self._clock.now_s())) for one in forecasts if one is not None],
            workers=sorted(f"{ack.dispatcher}:{ack.worker}" for ack in acks.values()),
            plans_refused=[
                f"worker {ack.dispatcher}:{ack.worker} routes by plan {ack.table}: {ack.refused}"
                for _, ack in sorted(acks.items())
                if ack.refused
            ],
            jobs=codec.to_proto(jobs) if jobs is not None else None,
        )

    async def decisions(self, since_s: float, newest: int) -> Any:
        """Decisions since a time, at most so many of the newest, 0 = all (ListDecisionsResponse)."""
        key, last = self._state.keys.decisions(), "0"
        found = []
        if newest:
            found = [_brief(record) for _, record in await self._state.tail(key, DecisionRecord, newest)]
        else:
            while entries := await self._state.stream(key, DecisionRecord, last, PAGE):
                last = entries[-1][0]
                found += [_brief(record) for _, record in entries]
        kept = (codec.to_proto(record) for record in found if record.at_s >= since_s)
        return pb.ListDecisionsResponse(decisions=kept)

    async def report(self, since_s: float, until_s: float) -> Any:
        """Books of the hours that an interval touches (GetReportResponse).

        Raises:
            errors.InvalidInput: it ends before it begins.
        """
        now_s = self._clock.now_s()
        until_s = min(until_s, now_s) if until_s else now_s
        if since_s >= until_s:
            raise errors.InvalidInput("not before its end", field="since", value=_text(since_s), remedy="begin earlier")
        prefix, found = self._state.keys.totals_prefix(), []
        for key in await self._state.names(prefix):
            family, _, hour = key.removeprefix(prefix).rpartition(":")
            starts_s = hour_starts_s(hour)
            if starts_s is not None and starts_s + HOUR_S > since_s and starts_s < until_s:
                found.append((family, starts_s, await self._state.totals(key)))
        response = pb.GetReportResponse(
            simulated=any(node.simulated for node in self._observation.inputs.nodes.values()),
            embodied_lifetime_years=self._settings.embodied_lifetime_years,
            embodied_unknown=self._embodied_unknown(),
            accuracies={
                f"{family.name}/{variant.name}": variant.accuracy
                for family in self._observation.catalog.families
                for variant in family.variants
            },
        )
        starts = [starts_s for _, starts_s, _ in found]
        response.since.FromSeconds(int(min(starts, default=since_s // HOUR_S * HOUR_S)))
        response.until.FromSeconds(int(min(now_s, max(starts, default=until_s - HOUR_S) + HOUR_S)))
        for family, starts_s, sums in sorted(found, key=lambda one: one[:2]):
            response.hours.add(family=family, sums=sums).starts_at.FromSeconds(int(starts_s))
        return response

    def _embodied_unknown(self) -> Iterable[str]:
        types = {d.type for node in self._observation.inputs.nodes.values() for d in node.devices}
        return sorted(kind.name for kind in types if not kind.embodied_g)


def _brief(record: DecisionRecord) -> DecisionRecord:
    """Without what was known then and what the planner remembered: thousands of bytes each."""
    versions = {name: value for name, value in record.versions.items() if name != "memory"}
    return replace(record, view_json="", versions=versions)


def _ahead(forecast: CarbonForecast, now_s: float) -> CarbonForecast:
    """The intervals of a forecast that have not ended, the next FORECAST_BANDS of them."""
    bands = tuple(band for band in forecast.bands if band.ends_at_s > now_s)
    return replace(forecast, bands=bands[:FORECAST_BANDS])


def _text(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")

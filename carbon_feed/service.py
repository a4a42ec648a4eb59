"""Wiring of the carbon feed, and its gRPC servicer, which only translates."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import structlog

from carbon_feed.loop import FeedLoop
from carbon_feed.providers import PROVIDERS
from carbon_feed.settings import CarbonFeedSettings
from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading
from trefoil.runtime import codec, config, rpc, service, telemetry
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

FULL_NAME = "trefoil.carbon_feed.v1.CarbonFeed"


class CarbonFeedServicer(pb_grpc.CarbonFeedServicer):  # type: ignore[misc]
    """Answers from memory; nobody waits for a provider or for Redis."""

    def __init__(self, loops: Sequence[FeedLoop]) -> None:
        self._loops = {loop.series.zone: loop for loop in loops}

    async def GetIntensity(self, request: Any, context: Any) -> Any:
        loop = self._loop(request.zone)
        if loop.reading is None:
            raise errors.Unavailable(
                f"no reading of {request.zone} yet", remedy="look at the feed's log for what its provider says"
            )
        return pb.GetIntensityResponse(reading=codec.to_proto(loop.reading))

    async def WatchIntensity(self, request: Any, context: Any) -> AsyncIterator[Any]:
        readings: AsyncIterator[CarbonReading] = self._loop(request.zone).watch()
        async for reading in readings:
            yield pb.WatchIntensityResponse(reading=codec.to_proto(reading))

    def _loop(self, zone: str) -> FeedLoop:
        if zone not in self._loops:
            known = ", ".join(sorted(self._loops))
            raise errors.NotFound("no such zone", field="zone", value=zone, remedy=f"use one of: {known}")
        return self._loops[zone]


def build(argv: Sequence[str]) -> list[service.Part]:
    """Settings, provider, loop, server: the one place where they meet."""
    settings = config.parser_main(CarbonFeedSettings, "carbon_feed", argv)
    telemetry.setup_logging("carbon_feed", settings.log_level, settings.log_json)
    structlog.get_logger().info("settings", **config.masked(settings))
    clock = WallClock()
    metrics = telemetry.Metrics("carbon_feed")
    provider = PROVIDERS[settings.provider](settings, clock.now_s())
    state = State.connect(settings.redis_url, settings.cluster, clock=clock, metrics=metrics)
    loop = FeedLoop(settings, provider, state, clock, metrics)
    entries: list[rpc.ServiceEntry] = [
        (pb_grpc.add_CarbonFeedServicer_to_server, CarbonFeedServicer([loop]), FULL_NAME)
    ]
    return [
        service.StatePart(state),
        service.MetricsPart(metrics, settings.metrics_address),
        loop,
        service.ServerPart(lambda: rpc.make_server(settings, entries, metrics=metrics)),
    ]

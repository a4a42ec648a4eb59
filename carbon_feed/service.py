"""Wiring of the carbon feed."""

from collections.abc import Sequence

import structlog

from carbon_feed.providers import make_providers
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.serving.servicer import WATCHERS_MAX, CarbonFeedServicer
from carbon_feed.settings import CarbonFeedSettings
from carbon_feed.zones import load_zones
from protos.carbon_feed.v1 import carbon_feed_pb2_grpc as pb_grpc
from trefoil.runtime import config, rpc, service, telemetry
from trefoil.runtime.clock import WallClock
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.state import State

FULL_NAME = "trefoil.carbon_feed.v1.CarbonFeed"
ARCHIVES_MAX = 100  # clients that read archived forecasts at once, beside the watchers


def build(argv: Sequence[str]) -> list[service.Component]:
    """Build the service from its settings: providers, loops, servicer, server."""
    settings = config.parser_main(CarbonFeedSettings, "carbon_feed", argv)
    telemetry.setup_logging("carbon_feed", settings.log_level, settings.log_json)
    structlog.get_logger().info("settings", **config.masked(settings))
    clock = WallClock()
    metrics = telemetry.Metrics("carbon_feed")
    made = [(zone, make_providers(zone, clock.now_s())) for zone in settings.per_zone()]
    state = State.connect(settings.redis_url, settings.cluster, clock=clock, metrics=metrics)
    loops = [ZoneLoop(zone, provider, state, clock, metrics, *others) for zone, (provider, *others) in made]
    servicer = CarbonFeedServicer(loops, load_zones(settings.zones_file), clock)
    entries: list[rpc.ServiceEntry] = [(pb_grpc.add_CarbonFeedServicer_to_server, servicer, FULL_NAME)]
    tls = Tls.of(settings)
    streams_max = WATCHERS_MAX + ARCHIVES_MAX
    server = service.ServerComponent(
        lambda: rpc.make_server(settings, entries, metrics=metrics, streams_max=streams_max, tls=tls)
    )
    connections = service.StateComponent(state, clock, metrics)
    return [
        connections,
        service.MetricsComponent(metrics, settings.metrics_address, clock, server.not_ready, connections.not_ready),
        *loops,
        service.RenewalsComponent(*service.renewals(settings, tls), clock, metrics),
        server,
    ]

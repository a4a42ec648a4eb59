"""python -m dispatcher --config <toml>: routes requests to slices."""

import uuid
from collections.abc import Sequence

import structlog

from dispatcher import service
from dispatcher.admin import NAME, DispatcherAdmin
from dispatcher.contracts import Contracts
from dispatcher.hub import Hub
from dispatcher.loop import Loop
from dispatcher.prober import Prober
from dispatcher.settings import DispatcherSettings
from dispatcher.telemetry import Gauges
from protos.dispatcher.v1 import dispatcher_pb2_grpc
from trefoil.runtime import config, rpc
from trefoil.runtime.clock import WallClock
from trefoil.runtime.service import MetricsPart, Part, ServerPart, StatePart, main
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics, setup_logging

HEALTH_TICK_S = 0.1


class InferencePart(ServerPart):
    """Serves clients; at the end it turns them away first and lets what is in flight finish."""

    def __init__(self, hub: Hub, contracts: Contracts) -> None:
        super().__init__(lambda: service.make_server(hub, contracts), grace_s=hub.settings.drain_s)
        self._hub = hub

    async def run(self) -> None:
        """Health follows readiness."""
        assert self.server is not None
        ready = None
        while True:
            if ready is not (ready := not self._hub.not_ready()):
                for name in ("", *self.server.names):
                    await self.server.serving(name, ready)
            await self._hub.clock.sleep(HEALTH_TICK_S)

    async def shutdown(self) -> None:
        """Not ready from now on; requests under way, queued ones included, have drain_s to end."""
        self._hub.draining = True
        await super().shutdown()
        await self._hub.transport.close()


def build(argv: Sequence[str]) -> list[Part]:
    """The one wiring function."""
    settings = config.parser_main(DispatcherSettings, "dispatcher", argv)
    setup_logging("dispatcher", settings.log_level, settings.log_json)
    structlog.get_logger().info("settings", **config.masked(settings))
    clock = WallClock()
    metrics = Metrics("dispatcher")
    state = State.connect(settings.redis_url, settings.cluster, clock=clock, metrics=metrics)
    hub = Hub(settings, f"dispatcher-{uuid.uuid4().hex[:12]}", clock)
    contracts = Contracts(hub)
    loop = Loop(hub, state, Gauges(hub, metrics))
    admin = (dispatcher_pb2_grpc.add_DispatcherServicer_to_server, DispatcherAdmin(hub, loop), NAME)
    return [
        StatePart(state),
        MetricsPart(metrics, settings.metrics_address),
        loop,
        Prober(hub, contracts),
        ServerPart(lambda: rpc.make_server(settings, [admin], metrics=metrics)),
        InferencePart(hub, contracts),
    ]


if __name__ == "__main__":
    raise SystemExit(main(build))

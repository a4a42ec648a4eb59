"""`python -m controller --config controller.toml`: all wiring of the service, in one place."""

import asyncio
from collections.abc import Sequence

import structlog

from controller.act import Actor
from controller.agents import Agents
from controller.authority import Authority
from controller.disk import Disk
from controller.loop import Loop
from controller.objectives import accept
from controller.observe import Observer
from controller.planning import constants_of, forecaster_of, planner_of, row_of
from controller.receipts import Receipts
from controller.report import Accountant
from controller.service import FULL_NAME, ControllerService
from controller.settings import ControllerSettings
from controller.shares import known
from protos.controller.v1 import controller_pb2_grpc
from trefoil.core.catalog import Catalog
from trefoil.core.errors import SettingError, TrefoilError
from trefoil.core.objective import Objective
from trefoil.runtime import rpc, service, telemetry
from trefoil.runtime.clock import Clock, WallClock
from trefoil.runtime.config import masked, parser_main
from trefoil.runtime.repository import load_catalog
from trefoil.runtime.service import MetricsPart, Part, ServerPart, StatePart
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


class ControlPart:
    """The lease keeper and the loop. It gives the role back at the end, so that a successor need not wait."""

    def __init__(self, loop: Loop, authority: Authority, agents: Agents, accountant: Accountant) -> None:
        self._loop, self._authority, self._agents, self._accountant = loop, authority, agents, accountant

    async def init(self) -> None:
        await self._loop.observer.refresh()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._authority.keep(), name="lease")
            tasks.create_task(self._loop.run(), name="loop")

    async def shutdown(self) -> None:
        await self._loop.stop()
        await self._accountant.flush()
        await self._authority.release()
        await self._agents.close()


def parts(settings: ControllerSettings, clock: Clock) -> Sequence[Part]:
    """Everything that runs in this process, in the order of its start."""
    row = row_of(settings)
    catalog = load_catalog(settings.model_repository, settings.profile_overrides)
    planner = planner_of("", row)
    state = State.connect(settings.redis_url, settings.cluster, clock=clock)
    metrics = Metrics("controller")
    disk = Disk(settings.state_dir, settings.decisions_max)
    observer = Observer(settings, state, catalog, forecaster_of(settings, row), clock)

    def highest_seen() -> int:
        return max((n.highest_epoch_seen for n in observer.inputs.nodes.values()), default=0)

    authority = Authority(state, disk, clock, metrics, highest_seen)
    token = settings.token.get_secret_value() if settings.token else None
    agents = Agents(clock, settings.rollout.apply_timeout_s, settings.rollout.apply_tries, token)
    actor = Actor(settings.rollout, state.keys, authority, agents, observer, disk, clock)
    actor.complete = lambda routes: known(routes, catalog)
    receipts = Receipts(catalog, settings.receipts.memory_s, settings.receipts.items_min)
    observer.windows.on_window = receipts.window
    accountant = Accountant(settings, state, authority, observer, receipts, disk, metrics, clock)
    loop = Loop(settings, row, planner, state, authority, observer, actor, accountant, disk, metrics, clock)
    loop.objectives = starting_objectives(settings, loop.objectives, catalog)
    disk.save_all("objectives", loop.objectives.values())
    servicer = ControllerService(loop, catalog, constants_of("", row), disk)
    add = controller_pb2_grpc.add_ControllerServicer_to_server
    return (
        StatePart(state),
        MetricsPart(metrics, settings.metrics_address),
        ControlPart(loop, authority, agents, accountant),
        ServerPart(lambda: rpc.make_server(settings, [(add, servicer, FULL_NAME)], metrics=metrics)),
    )


def starting_objectives(
    settings: ControllerSettings, stored: dict[str, Objective], catalog: Catalog
) -> dict[str, Objective]:
    """Objectives of the settings, unless an operator has changed them since (number > 1)."""
    found = dict(stored)
    for position, wanted in enumerate(settings.objectives):
        if wanted.family in stored and stored[wanted.family].number > 1:
            continue
        try:
            found[wanted.family] = accept(wanted.objective(), {}, catalog, None, pue=settings.pue)
        except TrefoilError as error:
            raise SettingError(str(error), field=f"objectives[{position}] ({wanted.family})") from error
    return found


def build(argv: Sequence[str]) -> Sequence[Part]:
    """Settings, logs, parts."""
    settings = parser_main(ControllerSettings, "controller", argv)
    telemetry.setup_logging("controller", settings.log_level, settings.log_json)
    rpc.check_listener(settings, settings.admin_address)
    rpc.check_port(settings.admin_address)
    structlog.get_logger().info("settings", **masked(settings))
    return parts(settings, WallClock())


if __name__ == "__main__":
    raise SystemExit(service.main(build))

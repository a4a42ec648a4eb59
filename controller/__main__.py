"""`python -m controller --config controller.toml`: all wiring of the service, in one place."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import structlog

from controller.accounting.accountant import Accountant
from controller.accounting.budgets import BudgetRungs
from controller.accounting.core.receipts import Receipts
from controller.jobs.planning_loop import JobsPlanning
from controller.jobs.zone_offers import ZoneOffers
from controller.loop.control_loop import ControlLoop, load_by_command, load_saved_state
from controller.loop.core.control import ControlCore
from controller.loop.core.objectives import accept_objective
from controller.loop.core.saved_state import SavedState, settled_budgets
from controller.loop.core_ports import Signals
from controller.loop.decision_records import DecisionRecords
from controller.loop.declared import DeclaredSettings
from controller.loop.garbage import collect_by_the_hour, put_off_full_collections
from controller.loop.live_ports import LiveControlPorts
from controller.loop.planner_runner import PlannerRunner
from controller.loop.rollout_runner import LiveRolloutPorts, RolloutRunner
from controller.observe.core.observation import LatestInputs, Observation
from controller.observe.forecast_model import open_network
from controller.observe.reader import ObservationReader
from controller.planners.policy_parts import forecaster_of, planner_of, planner_settings, row_of
from controller.planners.table import PLANNERS
from controller.role.by_command import NO_BUDGETS, TENANT_BUDGETS, KeptBudgets
from controller.role.disk_store import DiskStore
from controller.role.kept_files import KeptFiles
from controller.role.leader_answers import LeaderAnswers
from controller.role.leadership import Leadership
from controller.rollout.agent_clients import AgentClients
from controller.rollout.core.executor import RolloutExecutor
from controller.service import FULL_NAME, ControllerService
from controller.settings import ControllerSettings
from controller.stored_reads import StoredReads
from protos.controller.v1 import controller_pb2_grpc
from trefoil.core import errors
from trefoil.core.catalog import Catalog
from trefoil.core.errors import RoleFree, SettingError, TrefoilError
from trefoil.core.fleet import MODEL_DIGEST_CHARS
from trefoil.core.objective import Objective
from trefoil.core.parts import Kind, find
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import rpc, service, telemetry
from trefoil.runtime.clock import Clock, SteadyClock, WallClock
from trefoil.runtime.config import masked, parser_main, settings_source
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.repository import load_catalog
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.service import (
    Component,
    MetricsComponent,
    RenewalsComponent,
    ServerComponent,
    StateComponent,
    renewals,
)
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics


class ControlComponent:
    """The lease keeper, the loop and the watch of the model repository.

    It gives the role back at the end, so that a successor need not wait.
    """

    def __init__(
        self,
        loop: ControlLoop,
        reader: ObservationReader,
        leadership: Leadership,
        agents: AgentClients,
        accountant: Accountant,
        files: CatalogFiles,
        declared: DeclaredSettings,
        jobs: JobsPlanning,
    ) -> None:
        self._jobs = jobs
        self._loop, self._reader, self._leadership, self._files = loop, reader, leadership, files
        self._agents, self._accountant, self._declared = agents, accountant, declared

    async def init(self) -> None:
        """Read Redis once before anything is decided."""
        await self._reader.refresh()

    async def run(self) -> None:
        """Run the lease keeper and the control loop until one of them fails.

        Raises:
            RoleFree: another controller has led meanwhile; start again.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._leadership.maintain(), name="lease")
                tasks.create_task(self._loop.run(), name="loop")
                tasks.create_task(self._jobs.run(), name="jobs")
                tasks.create_task(self._files.run(self._loop.clock), name="catalogue")
                tasks.create_task(self._declared.run(), name="declared")
                tasks.create_task(collect_by_the_hour(self._loop.clock), name="garbage")
        except ExceptionGroup as ended:  # Python 3.11.2 wraps again what is raised in an `except*`
            free, others = ended.split(RoleFree)
            if free is None or others is not None:
                raise
            raise free.exceptions[0] from None

    async def shutdown(self) -> None:
        """Stop the loop, write pending totals, give the lease back and close channels."""
        await self._loop.stop()
        await self._accountant.flush()
        await self._leadership.release()
        await self._agents.close()
        await self._jobs.close()


def parts(
    settings: ControllerSettings, clock: Clock, source: str = "", read: Callable[[], ControllerSettings] | None = None
) -> Sequence[Component]:
    """Everything that runs in this process, in the order of its start. `read` reads the settings in `source` again."""
    row = row_of(settings)
    files = CatalogFiles(settings.model_repository, settings.profile_overrides, load_catalog)
    catalog = files.catalog
    planner, traits = planner_of("", row), find(Kind.PLANNER, row.planner, PLANNERS).traits
    metrics, signals = Metrics("controller"), Signals()
    state = State.connect(settings.redis_url, settings.cluster, clock=clock, metrics=metrics)
    disk = DiskStore(settings.state_dir, settings.decisions_max, metrics)
    plan_keys, receipts = PlanKeys.read(settings.cluster, settings.plan_key_file), Receipts(catalog)
    forecaster = forecaster_of(row, open_network=open_network, monotonic_s=clock.monotonic_s)
    observation = Observation(settings, state.keys, catalog, forecaster, clock.now_s(), receipts.window, _stated(files))
    reader = ObservationReader(observation, state, settings.carbon, clock)
    leadership = Leadership(state, disk, clock, metrics, lambda: obeyed_epochs(observation.inputs), plan_keys)
    tls = Tls.of(settings)
    patience = (settings.rollout.apply_timeout_s, settings.rollout.apply_tries)
    agents = AgentClients(clock, *patience, settings.token, tls, settings.insecure, settings.agent_tls_name)
    accountant = Accountant(settings, state, leadership, observation, receipts, disk, metrics, clock)
    commanded = {n.node: n for n in disk.load_all("commanded", NodePlan)}
    rollout_ports = LiveRolloutPorts(
        disk, metrics, signals, settings.rollout.poll_s, state.keys, plan_keys, leadership, agents, reader, clock
    )
    published = disk.load("published", Plan)
    rollouts = RolloutExecutor(settings.rollout, observation, accountant, clock, rollout_ports, published, commanded)
    left = _left(disk, settings, catalog)
    planner_runner = PlannerRunner(planner, row.planner, disk, clock, settings.solve_timeout_s)
    records = DecisionRecords(settings, row, state.keys, leadership, disk, metrics, observation.windows.dump_budgets)
    runner = RolloutRunner(rollouts, rollout_ports)
    ports = LiveControlPorts(
        disk, metrics, signals, state.keys, leadership, observation, planner_runner, records, runner
    )
    core = ControlCore(
        settings, row, traits.tick_grace_s, planner_runner.live, observation, accountant, rollouts, clock, left, ports
    )
    rungs = BudgetRungs(state.keys, accountant, leadership, plan_keys, metrics, clock)
    loop = ControlLoop(core, ports, settings, state, leadership, reader, accountant, rungs, disk, signals, clock)
    zones = _zones(settings, catalog, clock)
    jobs = JobsPlanning(state, leadership, loop.view, observation.inputs, plan_keys, metrics, clock, zones)

    def adopt() -> None:
        observation.learn(files.catalog, _stated(files))
        receipts.learn(files.catalog)

    files.in_use, files.adopt = loop.in_use, adopt
    stored_reads = StoredReads(settings, state, observation, clock)
    declared = DeclaredSettings(source, read or (lambda: settings), loop, files, leadership)
    answers = ControllerService(loop, files, planner_settings(row), disk, stored_reads, declared, jobs)
    servicer = LeaderAnswers(answers, lambda: leadership.leader)
    entry = (controller_pb2_grpc.add_ControllerServicer_to_server, servicer, FULL_NAME)
    server = ServerComponent(lambda: rpc.make_server(settings, [entry], metrics=metrics, tls=tls))
    return (
        connections := StateComponent(state, clock, metrics),
        MetricsComponent(metrics, settings.metrics_address, clock, server.not_ready, connections.not_ready),
        ControlComponent(loop, reader, leadership, agents, accountant, files, declared, jobs),
        RenewalsComponent(*renewals(settings, tls, plan_keys, settings.other_zones), clock, metrics),
        server,
        *_page(settings, servicer, clock),
    )


def _zones(settings: ControllerSettings, catalog: Catalog, clock: Clock) -> ZoneOffers:
    """Other zones. Raises SettingError: a family whose requests they may answer is not known."""
    for index, name in ((i, name) for i, peer in enumerate(settings.other_zones) for name in peer.families):
        try:
            catalog.family(name)
        except errors.NotFound as error:
            why, where = "no such family in the model repository", f"other_zones.{index}.families"
            raise SettingError(why, field=where, value=name, remedy=error.remedy) from error
    return ZoneOffers(settings.other_zones, settings, clock)


def _left(disk: DiskStore, settings: ControllerSettings, catalog: Catalog) -> SavedState:
    """State to begin with."""
    stored = {o.family: o for o in disk.load_all("objectives", Objective)}
    marks = load_by_command(disk, settings)
    kept = {*marks.families, *marks.stopped}
    left = load_saved_state(disk, settings, starting_objectives(settings, stored, kept, catalog))
    left.budgets = settled_budgets(settings, disk.load(TENANT_BUDGETS, KeptBudgets) or NO_BUDGETS, catalog)
    return left


def _page(settings: ControllerSettings, servicer: LeaderAnswers, clock: Clock) -> Sequence[Component]:
    if not settings.page_address:
        return ()
    from controller.page.server import PageComponent  # brings the packages of a web server

    return (PageComponent(settings, servicer, clock),)


def _stated(files: CatalogFiles) -> dict[str, str]:
    return {f"{family}/{version}": sha[:MODEL_DIGEST_CHARS] for (family, version), sha in files.stated.items()}


def obeyed_epochs(inputs: LatestInputs) -> list[int]:
    """Epochs that nodes and dispatcher workers obey, as they say themselves."""
    return [node.highest_epoch_seen for node in inputs.nodes.values()] + [ack.table.epoch for ack in inputs.acks]


def starting_objectives(
    settings: ControllerSettings, stored: Mapping[str, Objective], commanded: Collection[str], catalog: Catalog
) -> dict[str, Objective]:
    """Objectives of the settings, with the next number where they have changed, and stored ones of commands.

    Objectives of the families in `commanded` stay as stored. A family goes out of service if the settings no longer
    name it and no command has set it.
    """
    named = {wanted.family for wanted in settings.objectives}
    found = {family: objective for family, objective in stored.items() if family in named or family in commanded}
    for family in sorted(stored.keys() - found.keys()):
        structlog.get_logger().warning("out of service: no setting names it any more", family=family)
    for position, wanted in enumerate(settings.objectives):
        if wanted.family in commanded:
            continue
        try:
            accepted = accept_objective(wanted.stated(), stored, catalog, None, pue=settings.pue)
        except TrefoilError as error:
            raise SettingError(str(error), field=f"objectives[{position}] ({wanted.family})") from error
        before = stored.get(wanted.family)
        if before is None or replace(accepted, number=before.number) != before:
            found[wanted.family] = accepted
    return found


async def take_over(settings: ControllerSettings) -> None:
    """Take over on disk what another controller has left in Redis. Without Redis this one begins with its own disk, and
    takes no role before it has looked.
    """
    disk = DiskStore(settings.state_dir, settings.decisions_max)
    disk.check_shapes()
    state = State.connect(settings.redis_url, settings.cluster)
    try:
        await KeptFiles(disk, state, PlanKeys.read(settings.cluster, settings.plan_key_file)).take_over()
    except (errors.StateUnavailable, errors.DiskUnavailable) as error:
        structlog.get_logger().warning("not known yet whether another controller has led", error=str(error))
    finally:
        await state.close()


def build(argv: Sequence[str]) -> Sequence[Component]:
    """Build the service from its arguments: settings, logs, parts."""
    read = partial(parser_main, ControllerSettings, "controller", argv)
    settings = read()
    telemetry.setup_logging("controller", settings.log_level, settings.log_json)
    rpc.check_listener(settings, settings.admin_address)
    rpc.check_port(settings.admin_address)
    structlog.get_logger().info("settings", **masked(settings))
    asyncio.run(take_over(settings))
    put_off_full_collections()
    return parts(settings, SteadyClock(WallClock()), settings_source(argv), read)


if __name__ == "__main__":
    raise SystemExit(service.main(build))

"""One worker of a dispatcher, a whole process: what it is wired from."""

import uuid
from collections.abc import Sequence

import structlog

from dispatcher.fronts.admin import NAME, AllWorkers
from dispatcher.fronts.grpc.server import Fronts, InferenceComponent
from dispatcher.fronts.rest.server import RestComponent
from dispatcher.jobs.batches import BatchApi
from dispatcher.jobs.folder import JobsFolder
from dispatcher.jobs.owner import JobsOwner
from dispatcher.jobs.service import NAME as JOBS
from dispatcher.jobs.service import JobsAdmin, add_jobs
from dispatcher.request.contracts import Contracts
from dispatcher.request.prober import Prober
from dispatcher.service.graceful_shutdown import GracefulShutdown
from dispatcher.service.local_worker import LocalWorker
from dispatcher.service.metrics import DispatcherMetrics, ExpositionComponent
from dispatcher.service.state_sync import StateSync
from dispatcher.settings import DispatcherSettings
from dispatcher.workers.peer_server import PeerServer
from dispatcher.workers.supervisor import end_with_supervisor
from protos.dispatcher.v1 import dispatcher_pb2_grpc
from trefoil.runtime import config, rpc
from trefoil.runtime.clock import SteadyClock, WallClock
from trefoil.runtime.service import (
    Component,
    MetricsComponent,
    RenewalsComponent,
    ServerComponent,
    StateComponent,
    renewals,
)
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics, setup_logging


def build(argv: Sequence[str]) -> list[Component]:
    """Wire a dispatcher worker: its parts, in the order in which they start."""
    settings = config.parser_main(DispatcherSettings, "dispatcher", argv)
    setup_logging("dispatcher", settings.log_level, settings.log_json)
    structlog.get_logger().info("settings", **config.masked(settings))
    clock = SteadyClock(WallClock())
    metrics = Metrics("dispatcher")
    state = State.connect(settings.redis_url, settings.cluster, clock=clock, metrics=metrics)
    if settings.supervisor_pid:
        end_with_supervisor(settings.supervisor_pid)
    local = LocalWorker(settings, settings.dispatcher or f"dispatcher-{uuid.uuid4().hex[:12]}", clock)
    contracts = Contracts(local)
    sync = StateSync(local, state, DispatcherMetrics(local, metrics))
    fronts = Fronts.build(local, contracts, metrics)
    tokens = fronts.access if settings.tenants_file is not None else None
    drain = GracefulShutdown(local)
    tls = local.tls
    ends, files = renewals(settings, tls, sync.plan_keys, settings.other_zones)
    files.append(fronts.access.files)
    if settings.front_tls_certificate is not None and (front := settings.front_tls()) is not None:
        ends["clients' ports"] = front.end_s
        files.append(front.files)
    all_workers = AllWorkers(local, fronts.peers, metrics)
    one_of_many = settings.workers > 1
    shown = (
        ExpositionComponent(settings.metrics_address, all_workers.metrics, local.not_ready)
        if one_of_many
        else MetricsComponent(metrics, settings.metrics_address, clock, local.not_ready)
    )
    admin = (dispatcher_pb2_grpc.add_DispatcherServicer_to_server, all_workers, NAME)
    folder = JobsFolder.of(settings)
    owner = JobsOwner(fronts, sync, all_workers, state, folder, metrics)
    jobs = JobsAdmin(fronts, folder, owner)
    batches = BatchApi(fronts, folder, jobs)
    services = [admin, (add_jobs, jobs, JOBS)]
    return [
        StateComponent(state, clock, metrics),
        shown,
        PeerServer(local, fronts.inference, all_workers.answers(), sync),  # before the sync says where it listens
        sync,
        fronts.peers,
        fronts.inference.zones,
        Prober(local, contracts),
        local.lengths,
        RenewalsComponent(ends, files, clock, metrics),
        ServerComponent(
            lambda: rpc.make_server(settings, services, metrics=metrics, tokens=tokens, reuse_port=one_of_many, tls=tls)
        ),
        fronts.access,
        InferenceComponent(fronts, drain),
        batches,
        # Ends before the connections to the slices, which the other closes.
        RestComponent(fronts, drain, batches.routes),
        owner,
        drain,
    ]

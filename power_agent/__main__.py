"""`python -m power_agent --config settings.toml`: the only privileged process of a node."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import structlog

from power_agent.addresses import check_addresses
from power_agent.agent import CONTROLLER, AgentComponent
from power_agent.clocks.clock_keeper import ClockKeeper
from power_agent.clocks.latency_reader import LatencyReader
from power_agent.devices.cpu import Cpu, cpu_mode
from power_agent.devices.dcgm import Dcgm
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.driver_lock import DriverLock
from power_agent.devices.gpm import Gpm
from power_agent.devices.gpus import boot_id, driver_load_id
from power_agent.devices.inventory import Inventory
from power_agent.devices.node_client import NodeClient
from power_agent.devices.nvml_shim import install_simulated_node
from power_agent.devices.rapl import RaplCounter, RaplUnavailable
from power_agent.durability.journal import Journal
from power_agent.energy.device_meters import DeviceMeters
from power_agent.energy.energy_log import EnergyFeed, EnergyLog
from power_agent.energy.metering import Metering
from power_agent.governors import governor_of
from power_agent.publisher import Publisher
from power_agent.runtimes.base import Runtime
from power_agent.runtimes.factory import build_runtime, missing_resources
from power_agent.runtimes.process import ProcessRuntime
from power_agent.runtimes.simulated_node import SplitRuntime
from power_agent.service import FULL_NAME, PowerAgentServicer
from power_agent.settings import PowerAgentSettings
from power_agent.slices.mig import MigInstances
from power_agent.slices.node_state import Node
from power_agent.slices.reconciler import Reconciler
from power_agent.slices.step_executor import StepExecutor
from power_agent.slices.triton_metrics import TritonMetrics
from power_agent.slices.unproven import Unproven
from power_agent.triton.access import TritonAccess
from power_agent.triton.model_digests import ModelDigests
from power_agent.watch.capabilities import NOT_ROOT, effective_root, mig_device
from power_agent.watch.capability_watch import CapabilityWatch
from power_agent.watch.driver_watch import DriverWatch
from power_agent.watch.model_watch import ModelWatch
from power_agent.watch.slice_health import SliceHealth
from power_agent.watch.xid_watch import Quarantine, XidWatch
from protos.power_agent.v1 import power_agent_pb2_grpc
from trefoil.runtime import rpc
from trefoil.runtime.clock import Clock, SteadyClock, WallClock
from trefoil.runtime.config import masked, parser_main
from trefoil.runtime.given.catalog_files import CatalogFiles
from trefoil.runtime.repository import load_catalog
from trefoil.runtime.security.audit import AuditLog
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.service import (
    Component,
    MetricsComponent,
    NetworkComponent,
    RenewalsComponent,
    ServerComponent,
    StateComponent,
    main,
    renewals,
)
from trefoil.runtime.state import State
from trefoil.runtime.telemetry import Metrics, setup_logging

RING_S: Final = 600.0  # of the energy stream that is kept on disk, to be sent again after Redis was away


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs of the node: energy counter of their packages, the CPUs as a device, and whether slices run on them."""

    rapl: RaplCounter | None = None
    device: Cpu | None = None
    serve: bool = False


def build(argv: Sequence[str]) -> Sequence[Component]:
    """Build all components of the service: its whole wiring.

    Raises:
        TrefoilError: bad settings, or a bad model repository.
    """
    settings = parser_main(PowerAgentSettings, "power_agent", argv)
    setup_logging("power_agent", settings.log_level, settings.log_json)
    structlog.get_logger().info("settings", **masked(settings))
    check_addresses(settings)
    tls = Tls.of(settings)
    access = TritonAccess(settings, tls)
    if settings.governor:
        governor_of(settings.governor, settings.parts.get("governor", {}))
    plan_keys = PlanKeys.read(settings.cluster, settings.plan_key_file)
    clock = SteadyClock(WallClock())
    client = install_simulated_node(settings.node_socket) if settings.node_socket else None
    metrics = Metrics("power_agent", simulated=client is not None)
    runtime = build_runtime(settings, client)
    state = State.connect(settings.redis_url, settings.cluster, clock=clock, metrics=metrics)
    proc, holders = (Path("/proc"), None) if client is None else (None, client.holders)
    inventory = Inventory(settings.node, proc, holders)
    calls = DriverCalls(inventory, lock=DriverLock(settings.driver_marker))
    mig = MigInstances(calls, inventory, clock, settings.in_use_retries_max)
    owner = f"{settings.cluster}/{settings.node}"
    journal = Journal(settings.state_dir, boot_id(), driver_load_id(settings.driver_marker), metrics, owner)
    files = CatalogFiles(settings.model_repository, load=load_catalog)
    node = Node(settings, clock, journal, files.catalog, metrics)
    node.boot_id, node.driver_load_id = boot_id(), driver_load_id(settings.driver_marker)
    threads = ThreadPoolExecutor(4, "node")
    digests = ModelDigests(settings.model_repository.absolute(), files.catalog, files.stated)
    made = (mig, runtime, threads, state, journal, digests, node.catalog)
    executor = StepExecutor(settings, clock, *made, node.keep_last_reading, access, plan_keys)
    unproven = Unproven(node, mig, executor)
    clocks = ClockKeeper(node, inventory, calls.call, reader := LatencyReader(node, state))
    _learn_families(files, node, executor, digests, reader)
    reconciler = Reconciler(node, executor, clocks)
    energy_log = EnergyLog(settings.state_dir, int(RING_S / settings.sample_period_s), metrics)
    publisher = Publisher(node, state, energy_log)
    feed = EnergyFeed(energy_log)
    cpus = _cpus(settings, clock, node, simulated=metrics.simulated)
    for name, why in missing_resources(runtime).items() if cpus.serve else ():
        node.set_missing(name, why)
    dcgm = Dcgm(settings.dcgm_exporter_url, inventory, clock) if settings.dcgm_exporter_url else None
    meters = _meters(settings, inventory, clock, cpus, dcgm)
    metering = Metering(node, meters, energy_log, publisher.publish, feed.notify, used_cpu_s=_cpu_counter(runtime))
    health = SliceHealth(node, reconciler, executor)
    watch = DriverWatch(node, reconciler, executor, calls, inventory, quarantine := Quarantine(inventory))
    xids = XidWatch(node, inventory, quarantine, watch.fence, watch.poll_soon)
    capabilities = CapabilityWatch(node, inventory, calls, _rights(client), runtime, dcgm)
    parts = (node, inventory, calls, mig, executor, reconciler, clocks)
    watches = (health, watch, xids, capabilities, ModelWatch(node, files, digests, executor.in_thread))
    agent = AgentComponent(*parts, *watches, metering, publisher, unproven, state, plan_keys, cpus.device, cpus.serve)
    servicer = PowerAgentServicer(node, reconciler, clocks, feed, partial(state.epoch_of, CONTROLLER), unproven)
    server = _server(settings, servicer, node, tls)
    metrics.pass_on(TritonMetrics(node))
    connections = StateComponent(state, clock, metrics, partial(node.set_missing, "clock"))
    page = MetricsComponent(metrics, settings.metrics_address, clock, server.not_ready, connections.not_ready)
    return [connections, page, NetworkComponent(clock), agent, _renewals(tls, plan_keys, access, node, metrics), server]


def _learn_families(
    files: CatalogFiles, node: Node, executor: StepExecutor, digests: ModelDigests, reader: LatencyReader
) -> None:
    """Wire what goes by the catalogue to the files that it is read from."""

    def adopt() -> None:
        node.catalog = executor.catalog = files.catalog
        digests.learn(files.catalog, files.stated)
        reader.latencies.learn(files.catalog)

    files.in_use, files.adopt, node.learn_models = node.families, adopt, files.refresh_for


def _server(settings: PowerAgentSettings, servicer: PowerAgentServicer, node: Node, tls: Tls | None) -> ServerComponent:
    entry = (power_agent_pb2_grpc.add_PowerAgentServicer_to_server, servicer, FULL_NAME)
    audit = AuditLog(settings.state_dir, node.clock, node.metrics)
    make = partial(rpc.make_server, settings, [entry], metrics=node.metrics, audit=audit, tls=tls)
    return ServerComponent(make, report=node.report_health)


def _renewals(
    tls: Tls | None, plan_keys: PlanKeys, access: TritonAccess, node: Node, metrics: Metrics
) -> RenewalsComponent:
    ends, files = renewals(node.settings, tls, plan_keys)
    if access.own is not None:
        ends["tritons"] = lambda: access.end_s([part.key.name for part in node.slices.values() if part.running])
    return RenewalsComponent(ends, files, node.clock, metrics, partial(node.set_missing, "tls"))


def _cpu_counter(runtime: Runtime) -> Callable[[str], float | None] | None:
    """CPU seconds of a slice's processes by its tag; None where containers are the engine's."""
    return runtime.used_cpu_s if isinstance(runtime, ProcessRuntime | SplitRuntime) else None


def _meters(
    settings: PowerAgentSettings, inventory: Inventory, clock: Clock, cpus: Cpus, dcgm: Dcgm | None
) -> DeviceMeters:
    sensors = (Gpm(inventory), *((dcgm,) if dcgm else ()))
    metered = settings.meter == "nvml"
    return DeviceMeters(inventory, clock, metered=metered, rapl=cpus.rapl, cpu=cpus.device, sensors=sensors)


def _rights(client: NodeClient | None) -> Callable[[], tuple[str, str]]:
    """Reasons why GPUs, and MIG, may not be changed; on a simulated node it is the node that is root, or not."""
    if client is None:
        return lambda: (effective_root(), mig_device())
    return lambda: ("" if client.describe().get("root", True) else NOT_ROOT,) * 2


def _cpus(settings: PowerAgentSettings, clock: Clock, node: Node, *, simulated: bool) -> Cpus:
    rapl: RaplCounter | None = None
    try:
        if settings.cpu != "off":
            rapl = RaplCounter(settings.powercap_root, clock, node.boot_id, settings.state_dir / "rapl.json")
    except RaplUnavailable as error:
        node.set_missing("rapl", str(error))
    mode = cpu_mode(settings.cpu, simulated=simulated, readable=rapl is not None)
    if mode == "off":
        return Cpus()
    return Cpus(rapl, Cpu(settings.node), serve=mode == "serve")


if __name__ == "__main__":
    raise SystemExit(main(build))

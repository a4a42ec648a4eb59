"""State of the node: its devices and slices as they are, and the NodeStatus that is published of them.

`slices/reconciler.py` changes it, `watch/slice_health.py` declares failures, `energy/metering.py` reads counters,
`power_agent/publisher.py` writes it to Redis.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from power_agent.devices.boards import closed_reason
from power_agent.durability.journal import Journal
from power_agent.settings import PowerAgentSettings
from power_agent.slices.cordons import Cordons, without_devices
from power_agent.slices.core.attribution import SliceReading
from power_agent.slices.core.reconcile import SeenDevice
from power_agent.slices.slice_state import Slice
from trefoil.core.catalog import Catalog
from trefoil.core.common import Revision
from trefoil.core.demand import ScaleSignal
from trefoil.core.device_types import device_share
from trefoil.core.errors import NotFound
from trefoil.core.fleet import (
    SERVING,
    ClockLease,
    DeviceKind,
    DeviceState,
    DeviceStatus,
    DeviceType,
    NodeStatus,
    SliceKey,
    SliceState,
)
from trefoil.core.plan import NodePlan
from trefoil.runtime.clock import Clock
from trefoil.runtime.rpc import RpcServer
from trefoil.runtime.telemetry import Metrics

SLICE_STATES: Final = tuple(state.name for state in SliceState if state)
PLAN: Final = "plan"
"""What is missing where a plan in Redis was refused."""
UNPROVEN: Final = "unproven"
"""What is missing where something runs on the node that is not proven to be this agent's."""
NAMED_MAX: Final = 8  # of those that are unproven, by name
ADOPT: Final = "`trefoil node adopt NAME` takes it over, `trefoil node reset NAME` ends it"
DEVICE_STATES: Final = tuple(state.name for state in DeviceState if state)


@dataclass(slots=True)
class Device:
    """Device: one GPU, or the CPUs. `ended_readings`: the last of processes that ended since the last metering."""

    device: str
    type: DeviceType
    state: DeviceState
    uuid: str = ""  # of a GPU
    closed: str = ""  # why nothing may be planned on it, and what to do about it
    mig_current: bool = False
    mig_pending: bool = False
    power_limit_w: float = 0.0
    power_w: float = 0.0
    temperature_c: float = 0.0
    clock_mhz: int = 0
    clock_event_reasons: tuple[str, ...] = ()
    foreign: tuple[SliceKey, ...] = ()
    holders: tuple[int, ...] = ()  # processes of others on a whole GPU without any of ours, at the last look
    lacks: tuple[str, ...] = ()  # slice types of its type that its driver does not offer
    clock_lease: ClockLease | None = None
    clock_drift: tuple[str, ...] = ()  # clocks that another process changed, or that are not honoured
    scale_signal: ScaleSignal | None = None  # its governor is at the top and wants capacity
    ended_readings: list[SliceReading] = field(default_factory=list)
    serving_count: int = 0
    serving_since_s: float = 0.0
    served_s: float = 0.0

    @property
    def has_instances(self) -> bool:
        """Whether the driver can list GPU instances of it; a whole GPU and CPUs never have any."""
        return self.type.kind == DeviceKind.MIG_GPU and self.mig_current

    @property
    def drift(self) -> tuple[str, ...]:
        """Drift: all that others changed, in words; reported, never fought."""
        return (*(f"foreign instance {key.slice_type}@{key.start}" for key in self.foreign), *self.clock_drift)

    def take_served_s(self, now_s: float) -> float:
        """Seconds with at least one slice serving between the last call and `now_s` (monotonic), when gauges were read.

        A slice may have begun to serve after that reading: its time is of the next one.
        """
        served_s, self.served_s = self.served_s, 0.0
        if self.serving_count and now_s > self.serving_since_s:
            served_s += now_s - self.serving_since_s
            self.serving_since_s = now_s
        return served_s


class ChangeNotifier:
    """Notifier that wakes everyone who waits for the node to change."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def notify(self) -> None:
        """Wake all who wait: something changed."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int) -> int:
        """Wait until the count differs from `seen`; returns it."""
        while self.count == seen:
            await self._event.wait()
        return self.count


class Node:
    """State of one node: all its devices and slices."""

    def __init__(
        self, settings: PowerAgentSettings, clock: Clock, journal: Journal, catalog: Catalog, metrics: Metrics
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.journal = journal
        self.catalog = catalog
        self.learn_models: Callable[[Iterable[tuple[str, str]]], Awaitable[None]] | None = None
        """Reads the model repository again, if one of these (family, variant) is not in the catalogue."""
        self.metrics = metrics
        self.devices: dict[str, Device] = {}
        self.slices: dict[SliceKey, Slice] = {}
        self.plan: NodePlan | None = None
        self.cordons = Cordons(clock, journal, self.changed)
        self.applied = Revision()
        self.changes = ChangeNotifier()
        self.boot_id = self.driver_load_id = ""
        self.epoch = 0
        self._missing: dict[str, str] = {}
        self.capabilities: tuple[str, ...] = ()
        self.models: tuple[str, ...] = ()
        self.unproven: dict[str, str] = {}  # Tritons that are not proven to be ours, by tag: why not
        self.work = asyncio.Event()  # set: there may be something to do
        self._log = structlog.get_logger()

    # --- what is ------------------------------------------------------------------------------------------------------

    def new_slice(self, key: SliceKey, generation: int, state: SliceState) -> Slice:
        """Add a new record of a slice."""
        part = Slice(key, generation, state, self.clock.now_s(), self.on_slice_moved)
        self.add_slice(part)
        return part

    def add_slice(self, part: Slice) -> None:
        """Add a slice, adopted or new."""
        device = self.devices[part.key.device]
        if device.type.kind == DeviceKind.WHOLE_GPU:
            part.mig_uuid = device.uuid  # nothing is created that could have one of its own
        self.slices[part.key] = part
        self._show_state(part)
        if part.serving:
            self._count_serving(part, 1)

    def on_slice_moved(self, part: Slice, before: SliceState) -> None:
        """Count, remember and publish that a slice has changed its state, or the reason for it."""
        if before != part.state:
            was, now = self._serves(before), self._serves(part.state)
            if was != now:
                self._count_serving(part, 1 if now else -1)
            self._log.info(
                "slice", slice=part.key.name, generation=part.generation, was=before.name, now=part.state.name,
                why=part.why,
            )  # fmt: skip
            self._show_state(part)
            if part.exists:
                self.journal.remember_slice(part.record())
        self.changed()

    def _show_state(self, part: Slice) -> None:
        self.metrics.set_one_of("trefoil_slice_state", "state", part.state.name, SLICE_STATES, slice=part.key.name)

    def changed(self) -> None:
        """Notify those who watch, and those who work, of a change."""
        self.changes.notify()
        self.work.set()

    @property
    def missing(self) -> tuple[str, ...]:
        """Entries of what this node lacks now, each as `name: why and remedy`."""
        return tuple(f"{name}: {why}" for name, why in sorted(self._missing.items()))

    def set_missing(self, name: str, why: str) -> bool:
        """Set why something is missing, or with an empty `why` that it is not; says whether that is news."""
        if self._missing.get(name, "") == why:
            return False
        if why:
            self._missing[name] = why
        else:
            del self._missing[name]
        self.changed()
        return True

    def set_models(self, models: tuple[str, ...]) -> None:
        """Set the digests of the model files that this node has."""
        if models != self.models:
            self.models = models
            self.changed()

    def report_unproven(self) -> None:
        """Say what runs here and is not proven to be this agent's, and what an operator can do about it."""
        foreign = [key.name for device in self.devices.values() for key in device.foreign]
        named = [f"Triton {tag} ({why})" for tag, why in sorted(self.unproven.items())]
        named += [f"instance {name}" for name in foreign]
        more = f" and {len(named) - NAMED_MAX} more" if len(named) > NAMED_MAX else ""
        why = f"left as it is, not proven to be of this agent: {', '.join(named[:NAMED_MAX])}{more}. Remedy: {ADOPT}"
        self.report_missing(UNPROVEN, why if named else "")
        self.metrics.set("trefoil_unproven", len(self.unproven), kind="tritons")
        self.metrics.set("trefoil_unproven", len(foreign), kind="instances")

    async def report_health(self, server: RpcServer) -> None:
        """Keep the health of `unproven`: NOT_SERVING while something runs here that is not proven to be ours."""
        seen = -1
        while True:
            seen = await self.changes.wait(seen)
            await server.serving(UNPROVEN, UNPROVEN not in self._missing)

    def report_missing(self, name: str, why: str) -> None:
        """Set why something is missing, and log it when that is news; an empty `why`: it is back."""
        if self.set_missing(name, why):
            if name == PLAN:
                self.metrics.set("trefoil_plan_refused", bool(why))
            (self._log.error if why else self._log.info)("missing" if why else "back", what=name, why=why)

    @staticmethod
    def _serves(state: SliceState) -> bool:
        return state in SERVING or state == SliceState.DRAINING

    def _count_serving(self, part: Slice, change: int) -> None:
        device, now_s = self.devices[part.key.device], self.clock.monotonic_s()
        if device.serving_count:
            device.served_s += now_s - device.serving_since_s
        device.serving_since_s = now_s
        device.serving_count += change
        assert device.serving_count >= 0

    def replace_gone(self, part: Slice, why: str) -> Slice:
        """Replace the record of a slice that is GONE by a new one, for what is still there or wanted again."""
        assert part.state == SliceState.GONE, part.state
        fresh = self.new_slice(part.key, part.generation, SliceState.PENDING)
        fresh.has_instance, fresh.has_compute = part.has_instance, part.has_compute
        fresh.mig_uuid, fresh.why = part.mig_uuid, why
        fresh.revision, fresh.credits, fresh.failures = part.revision, part.credits, part.failures
        return fresh

    def keep_last_reading(self, part: Slice) -> None:
        """Keep the last reading of a slice whose process has ended until the next metering."""
        if part.incarnation:
            reading = replace(self.take_reading(part), serving=True)
            self.devices[part.key.device].ended_readings.append(reading)

    def take_reading(self, part: Slice) -> SliceReading:
        """Take the reading of a slice for the meter; its overhead counts again from here."""
        kind = self.devices[part.key.device].type
        return part.take_reading(device_share(kind, part.key.slice_type), self._metered_variant)

    def _metered_variant(self, family: str, version: int) -> str:
        """Variant for the meter, also of a family that the repository has lost and a Triton still serves."""
        try:
            return self.variant_of(family, version)
        except NotFound:
            return f"version-{version}"

    def families(self) -> set[str]:
        """Families that slices host, or are to host."""
        planned = [part.hosted for device in (self.plan.devices if self.plan else ()) for part in device.slices]
        standing = [part.hosted for part in self.slices.values()]
        return {one.family for hosted in (*planned, *standing) for one in hosted}

    def variant_of(self, family: str, version: int) -> str:
        """Variant behind a version at the Triton edge."""
        for variant in self.catalog.family(family).variants:
            if variant.version == version:
                return variant.name
        return f"version-{version}"

    def seen_devices(self) -> tuple[SeenDevice, ...]:
        """Devices as reconciliation sees them."""
        by_device: dict[str, list[Slice]] = {name: [] for name in self.devices}
        for part in self.slices.values():
            by_device[part.key.device].append(part)
        return tuple(
            SeenDevice(
                device.device,
                device.type,
                device.state,
                device.mig_current,
                tuple(part.observe() for part in by_device[device.device]),
                device.foreign,
                self.cordons.reason(device.device),
                self.cordons.evicted(device.device),
                device.closed,
                device.uuid,
                device.lacks,
            )
            for device in self.devices.values()
        )

    def note_published(self, status: NodeStatus) -> None:
        """Note that a status has been published: from now on dispatchers can know which slices drain."""
        for seen in (seen for device in status.devices for seen in device.slices):
            part = self.slices.get(seen.key)
            if part is not None and seen.state == part.state == SliceState.DRAINING and seen.since_s == part.since_s:
                part.published_s = min(part.published_s, self.clock.now_s())

    def status(self) -> NodeStatus:
        """NodeStatus as it is published."""
        slices: dict[str, list[Slice]] = {name: [] for name in self.devices}
        for part in sorted(self.slices.values(), key=lambda s: s.key):
            slices[part.key.device].append(part)
        return NodeStatus(
            node=self.settings.node,
            zone=self.settings.zone,
            site=self.settings.site,
            epoch=self.epoch,
            boot_id=self.boot_id,
            driver_load_id=self.driver_load_id,
            applied=self.applied,
            devices=tuple(
                DeviceStatus(
                    device=d.device,
                    type=d.type,
                    state=d.state,
                    slices=tuple(part.status() for part in slices[d.device]),
                    clock_mhz=d.clock_mhz,
                    clock_lease=d.clock_lease,
                    power_limit_w=d.power_limit_w,
                    mig_current=d.mig_current,
                    mig_pending=d.mig_pending,
                    clock_event_reasons=d.clock_event_reasons,
                    drift=d.drift,
                    power_w=d.power_w,
                    temperature_c=d.temperature_c,
                    cordon=self.cordons.reason(d.device),
                    foreign=d.foreign,
                    closed=d.closed,
                    lacks=d.lacks,
                )
                for d in self.devices.values()
            ),
            capabilities=self.capabilities,
            missing=self.missing,
            observed_at_s=self.clock.now_s(),
            simulated=self.metrics.simulated,
            agent_target=self.settings.agent_target,
            highest_epoch_seen=self.journal.state.highest_epoch,
            models=self.models,
        )

    def plan_in_force(self) -> NodePlan | None:
        """Plan as far as it may be carried out now: nothing on devices that have to be empty by now."""
        return without_devices(self.plan, self.cordons.all_evicted()) if self.plan else None

    def closed_reason(self, device: Device, mig_current: bool, holders: Sequence[int] = ()) -> str:
        """Reason why nothing may be planned on a GPU, with the remedy; empty when something may. `holders`: processes
        of others on a whole GPU on which nothing of ours runs."""
        engine = self.settings.engine_on(device.device)
        if engine is None:
            return closed_reason(device.type, device.uuid, mig_current, holders)
        if mig_current:
            return f"an engine has a whole GPU, and MIG mode is on. Remedy: nvidia-smi -i {device.uuid} -mig 0"
        try:
            self.catalog.family(engine.family).variant(engine.variant)
        except NotFound as error:
            return f"its engine serves what this node's model repository lacks: {error}"
        return ""

    # --- changes ------------------------------------------------------------------------------------------------------

    def set_device(self, device: Device, state: DeviceState) -> None:
        """Set the state of a device."""
        if device.state != state:
            self._log.info("device", device=device.device, was=device.state.name, now=state.name)
            device.state = state
            self.metrics.set_one_of("trefoil_device_state", "state", state.name, DEVICE_STATES, device=device.device)
            self.changed()

    def forget_slice(self, part: Slice) -> None:
        """Forget a slice that does not exist."""
        assert part.state == SliceState.GONE, part.state
        assert not part.exists
        del self.slices[part.key]
        self.journal.forget_slice(part.key)
        for state in SLICE_STATES:
            self.metrics.drop("trefoil_slice_state", part.key.name, state)
        self.changed()

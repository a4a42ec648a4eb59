"""Adoption: find out what the agent's predecessor left running, and take it over without touching it.

The driver says which instances exist, the runtime says what runs, the journal says which of it is ours and what it
ought to be. A Triton that answers an inference is READY at once: dispatchers never see it leave. What the journal does
not know is adopted where it proves whose it is (unproven.py), else foreign: reported, never touched. A process of the
journal without its instance is ended. On a whole GPU and on CPUs nothing is created, so there a slice exists as long as
its process does.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Final

import structlog

from power_agent.devices.boards import board_type
from power_agent.devices.cpu import Cpu
from power_agent.devices.driver_calls import DriverCalls
from power_agent.devices.errors import DeviceError, DriverUnavailable, NodeUnreachable
from power_agent.devices.gpus import ObservedDevice
from power_agent.devices.inventory import Inventory, ObservedSlice
from power_agent.durability.journal_state import SliceRecord
from power_agent.runtimes.base import RunningTriton
from power_agent.slices.mig import ENABLE, MigInstances
from power_agent.slices.node_state import Device, Node
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import StepExecutor
from power_agent.slices.unproven import Unproven
from power_agent.triton.client import TritonSlow
from trefoil.core.device_types import device_type, engine_type
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SERVING, DeviceKind, DeviceState, DeviceType, SliceKey, SliceState

PROBE_S: Final = 3.0
NO_COMPUTE: Final = -1


async def list_devices(
    node: Node, calls: DriverCalls, inventory: Inventory, observed: Sequence[ObservedDevice]
) -> None:
    """List the GPUs into the node; one that it cannot govern is named in `missing` and hides none of the others.

    Raises:
        DriverUnavailable: the driver went away.
    """
    for seen in observed:
        try:
            kind = await calls.call(seen.device, partial(board_type, inventory, seen, node.settings.mig_mode == ENABLE))
        except DriverUnavailable:
            raise
        except DeviceError as error:
            inventory.lost[seen.device] = error
            continue
        node.set_missing(seen.device, "")
        device = node.devices.setdefault(seen.device, Device(seen.device, kind, DeviceState.ASLEEP))
        node.journal.remember_device(seen.device, kind.name, seen.uuid)
        device.type, device.uuid = _with_engine(node, seen.device, kind), seen.uuid
        device.closed = node.closed_reason(device, seen.mig_current)
        device.mig_current, device.mig_pending = seen.mig_current, seen.mig_pending
    for name, trouble in inventory.lost.items():
        node.set_missing(name, str(trouble))
        known = node.journal.state.devices.get(name)
        if name not in node.devices and known is not None:
            kind = _with_engine(node, name, device_type(known[0]))
            node.devices[name] = Device(name, kind, DeviceState.ASLEEP, known[1])
    for engine in node.settings.engines:
        absent = [name for name in engine.devices if f"{node.settings.node}/{name}" not in node.devices]
        why = f"{', '.join(absent)} is not a GPU of this node. Remedy: correct engines.devices" if absent else ""
        node.set_missing(f"engine {engine.family}/{engine.variant}", why)
    answering = {seen.device for seen in observed} - set(inventory.lost)
    gpus = [device for device in node.devices.values() if device.type.kind != DeviceKind.CPU]
    for device in gpus:
        if device.device not in answering:  # lost, or the driver does not even count it any more
            node.set_device(device, DeviceState.LOST)
    here = (device for device in gpus if device.device in answering)
    await asyncio.gather(*(_read_gauges(node, calls, inventory, device) for device in here))


def _with_engine(node: Node, device: str, kind: DeviceType) -> DeviceType:
    engine = node.settings.engine_on(device)
    return kind if engine is None else engine_type(kind, engine.family, engine.variant, bool(engine.sleep))


async def _read_gauges(node: Node, calls: DriverCalls, inventory: Inventory, device: Device) -> None:
    def read() -> tuple[float, int]:
        return inventory.power_limit_w(device.device) or 0.0, inventory.clock_mhz(device.device)

    try:
        device.power_limit_w, device.clock_mhz = await calls.call(device.device, read)
    except DriverUnavailable:
        raise  # gone for all of them
    except DeviceError as error:
        structlog.get_logger().error("device lost", device=device.device, why=str(error))
        node.set_device(device, DeviceState.LOST)


def add_cpu(node: Node, cpu: Cpu, serve: bool) -> None:
    """Add the CPUs to the node; where they are only metered, nothing may be planned on them."""
    closed = "" if serve else "the CPUs of this node are metered, but do not serve; setting cpu = serve lets them"
    node.devices[cpu.device] = Device(cpu.device, cpu.type, DeviceState.ASLEEP, closed=closed)


async def adopt(
    node: Node, mig: MigInstances, executor: StepExecutor, unproven: Unproven, processes: dict[str, RunningTriton]
) -> None:
    """Adopt all instances and processes that are ours, by the journal or by proof (`unproven`).

    Of `processes`, by tag, those that the journal names are ended where their slice is gone; all others stay.
    """
    log = structlog.get_logger()
    adopted: list[Slice] = []
    found: dict[SliceKey, str] = {}
    for device in node.devices.values():
        listed = await _find_slices(node, mig, device, processes)
        for seen in listed:
            record = node.journal.state.slices.get(seen.key)
            found[seen.key] = device.device
            if record is not None and not _is_older(unproven, seen, record, processes):
                adopted += await _adopt_one(node, executor, seen, record, processes.get(record.tag))
        if device.state != DeviceState.LOST:
            device.state = DeviceState.AWAKE if listed else DeviceState.ASLEEP
    if node.journal.fresh and (processes or found):  # the numbers that a predecessor has used up are not known
        log.warning("no journal: running Tritons are adopted only by proof", tritons=len(processes), slices=len(found))
        node.journal.raise_generation(int(node.clock.now_s()))
    proven = await unproven.proven_tags(processes)
    lost = {tag: process for tag, process in processes.items() if tag not in proven}
    await _end_gone(node, executor, lost, set(node.journal.state.slices) - set(found))
    await asyncio.gather(*(_verify_serving(node, executor, part) for part in adopted if part.running))
    await unproven.adopt_first(processes)
    for device in node.devices.values():
        names = (key for key, of in found.items() if of == device.device)
        device.foreign = tuple(key for key in names if key not in node.slices)
    node.report_unproven()
    for step in node.journal.close_unfinished():
        log.warning("unfinished step of a predecessor", slice=step.slice.name, verb=step.verb)
    node.changed()


def _is_older(
    unproven: Unproven, seen: ObservedSlice, record: SliceRecord, processes: Mapping[str, RunningTriton]
) -> bool:
    """Whether the journal is older than what runs, or wrong: the Triton that it names is gone or of another slice, and
    another proves that it is ours."""
    known = processes.get(record.tag)
    if known is not None and known.alive and not unproven.objection(seen, known):
        return False
    return any(process.alive and not unproven.objection(seen, process) for process in processes.values())


async def _end_gone(
    node: Node, executor: StepExecutor, processes: Mapping[str, RunningTriton], gone: Collection[SliceKey]
) -> None:
    """Forget slices that do not exist any more, and end what the journal knows to have run on them."""
    log = structlog.get_logger()
    for key in gone:
        if key.device in node.devices:  # else it may be back one day, with what is ours on it
            node.journal.forget_slice(key)
    own = {part.tag for part in node.slices.values()} | {part.tag for part in node.journal.state.slices.values()}
    for tag, process in processes.items():
        if process.alive and tag in node.journal.state.tags - own:
            log.warning("ending a process whose slice is gone", tag=tag, id=process.id)
            await _end_orphan(executor, tag)


async def _find_slices(
    node: Node, mig: MigInstances, device: Device, processes: Mapping[str, RunningTriton]
) -> tuple[ObservedSlice, ...]:
    """Slices that exist on a device now; all that are remembered of one that does not answer."""
    remembered = [part for key, part in node.journal.state.slices.items() if key.device == device.device]
    if device.state != DeviceState.LOST and device.has_instances:
        try:
            return await mig.list(device.device)
        except DeviceError as error:
            structlog.get_logger().error("device lost", device=device.device, why=str(error))
            node.set_device(device, DeviceState.LOST)
    if device.state == DeviceState.LOST:  # what it holds will be seen when it is back; until then it stays ours
        return tuple(ObservedSlice(part.key, NO_COMPUTE, NO_COMPUTE, device.uuid, 0, 0) for part in remembered)
    if device.type.kind == DeviceKind.MIG_GPU:
        return ()  # MIG mode is off
    alive = (part for part in remembered if part.tag in processes and processes[part.tag].alive)
    return tuple(ObservedSlice(part.key, NO_COMPUTE, None, device.uuid, 0, 0) for part in alive)


async def _adopt_one(
    node: Node, executor: StepExecutor, seen: ObservedSlice, record: SliceRecord, process: RunningTriton | None
) -> list[Slice]:
    """Adopt a slice of the journal; none where its Triton runs and cannot be kept: it is named, and serves on."""
    device = node.devices[seen.key.device]
    cut = device.type.kind == DeviceKind.MIG_GPU
    running = process is not None and process.alive and (seen.ci_id is not None or not cut)
    if not running:
        state = SliceState.PENDING
    elif record.state in SERVING or record.state == SliceState.DRAINING:
        state = record.state
    else:
        state = SliceState.STARTING
    part = Slice(record.key, record.generation, state, node.clock.now_s(), node.on_slice_moved, "adopted")
    part.hosted, part.revision, part.credits = record.hosted, record.revision, record.credits
    part.has_instance, part.has_compute = cut, cut and seen.ci_id is not None
    part.mig_uuid = seen.mig_uuid
    if running and process is not None:
        try:
            await executor.attach(part, process)
        except TrefoilError as error:
            structlog.get_logger().error("cannot be adopted", slice=part.key.name, why=str(error))
            return []
    node.add_slice(part)
    if device.state == DeviceState.LOST:
        part.fail("device lost", node.clock.now_s())
    return [part]


async def _end_orphan(executor: StepExecutor, tag: str) -> None:
    try:
        await executor.end_orphan(tag)
    except NodeUnreachable as error:
        structlog.get_logger().warning("it ended with its node", tag=tag, why=str(error))


async def _verify_serving(node: Node, executor: StepExecutor, part: Slice) -> None:
    """Ask a Triton what it serves, and for one real inference; one that does not answer is FAILED. One that says what
    it serves may be at a long call: it is asked again while it serves."""
    log, told = structlog.get_logger(), False
    assert part.triton is not None
    try:
        async with asyncio.timeout(PROBE_S):
            part.hosted = await executor.read_hosted(part, node.variant_of)
            told = True
            if part.state in SERVING or part.state == SliceState.STARTING:
                for hosted in part.hosted:
                    await part.triton.probe(hosted.model, hosted.version, PROBE_S)
                part.overhead_requests += len(part.hosted)
    except (TrefoilError, TimeoutError) as error:
        if not (told and part.state == SliceState.READY and isinstance(error, TritonSlow | TimeoutError)):
            if part.state in SERVING:
                part.fail(f"adopted, but does not infer: {error}", node.clock.now_s())
            return
    else:
        part.last_success_s = node.clock.now_s()
    if part.state == SliceState.SWAPPING:  # whichever it serves now, it serves
        part.move(SliceState.READY, "adopted in the middle of a swap", node.clock.now_s())
    if part.state == SliceState.STARTING and part.hosted:  # its start had ended, and the journal did not know
        part.move(SliceState.READY, "adopted: it answers inferences", node.clock.now_s())
    part.loaded = part.serving
    log.info("adopted", slice=part.key.name, generation=part.generation, state=part.state.name)

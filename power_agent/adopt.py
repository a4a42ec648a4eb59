"""What an agent does first: find out what its predecessor left running, and take it over without touching it.

The driver says which instances exist, the runtime says what runs, the journal says which of it is ours and what it
ought to be. A Triton that answers an inference is READY at once: dispatchers never see it leave. What the journal does
not know is foreign: reported as drift, never touched. A process without its instance is ended.
"""

import asyncio
from collections.abc import Sequence

import structlog

from power_agent.devices.inventory import Inventory, ObservedDevice, ObservedSlice
from power_agent.journal import SliceMemory
from power_agent.mig import Mig
from power_agent.node import Device, Node
from power_agent.runtimes.base import RunningTriton
from power_agent.slices import Slice
from power_agent.verbs import Verbs
from trefoil.core.device_types import device_type
from trefoil.core.errors import TrefoilError
from trefoil.core.fleet import SERVING, DeviceState, SliceState

PROBE_S = 3.0


def list_devices(node: Node, inventory: Inventory, observed: Sequence[ObservedDevice]) -> None:
    """Make the node know its devices. Blocking.

    Raises:
        NotFound: a GPU of a type that nobody has described.
        DeviceError: the driver refuses.
    """
    for seen in observed:
        kind = device_type(seen.type)
        device = node.devices.setdefault(seen.device, Device(seen.device, kind, DeviceState.ASLEEP))
        device.mig_current, device.mig_pending = seen.mig_current, seen.mig_pending
        device.power_limit_w = inventory.power_limit_w(seen.device) or 0.0
        device.clock_mhz = inventory.clock_mhz(seen.device)


async def adopt(node: Node, mig: Mig, verbs: Verbs) -> None:
    """Take over all instances and processes that are ours; end orphaned processes."""
    log = structlog.get_logger()
    processes = await verbs.processes()
    adopted: list[Slice] = []
    for step in node.journal.memory.unfinished.values():
        log.warning("unfinished step of a predecessor", slice=step.slice.name, verb=step.verb)
    node.journal.memory.unfinished.clear()
    for device in node.devices.values():
        instances = await mig.instances(device.device)
        for instance in instances:
            memory = node.journal.memory.slices.get(instance.key)
            if memory is not None:
                adopted.append(await _adopt_one(node, verbs, instance, memory, processes.pop(memory.tag, None)))
        ours = {part.key for part in adopted}
        device.foreign = tuple(instance.key for instance in instances if instance.key not in ours)
        device.drift = tuple(f"foreign instance {key.slice_type}@{key.start}" for key in device.foreign)
        device.state = DeviceState.AWAKE if instances else DeviceState.ASLEEP
    for key in set(node.journal.memory.slices) - {part.key for part in adopted}:
        node.journal.forget(key)
    for tag, process in processes.items():
        if process.alive:
            log.warning("ending a process whose slice is gone", tag=tag, id=process.id)
            await verbs.end_orphan(tag)
    await asyncio.gather(*(_greet(node, verbs, part) for part in adopted if part.running))
    node.changed()


async def _adopt_one(
    node: Node, verbs: Verbs, instance: ObservedSlice, memory: SliceMemory, process: RunningTriton | None
) -> Slice:
    running = process is not None and process.alive and instance.ci_id is not None
    if not running:
        state = SliceState.PENDING
    elif memory.state in SERVING or memory.state == SliceState.DRAINING:
        state = memory.state
    else:
        state = SliceState.STARTING
    part = Slice(memory.key, memory.generation, state, node.clock.now_s(), node.moved, "adopted")
    part.hosted, part.revision, part.credits = memory.hosted, memory.revision, memory.credits
    part.has_instance, part.has_compute = True, instance.ci_id is not None
    part.mig_uuid = instance.mig_uuid
    if running and process is not None:
        await verbs.attach(part, process)
    node.add_slice(part)
    return part


async def _greet(node: Node, verbs: Verbs, part: Slice) -> None:
    """Ask a Triton what it serves, and for one real inference; one that does not answer is FAILED."""
    log = structlog.get_logger()
    assert part.server is not None
    try:
        async with asyncio.timeout(PROBE_S):
            part.hosted = await verbs.loaded(part, node.variant_of)
            if part.state in SERVING:
                for hosted in part.hosted:
                    await part.server.probe(hosted.family, hosted.version, PROBE_S)
                part.overhead_requests += len(part.hosted)
    except (TrefoilError, TimeoutError) as error:
        if part.state in SERVING:
            part.fail(f"adopted, but does not infer: {error}", node.clock.now_s())
        return
    part.last_success_s = node.clock.now_s()
    part.loaded = part.serving
    if part.state == SliceState.SWAPPING:  # whichever it serves now, it serves
        part.move(SliceState.READY, "adopted in the middle of a swap", node.clock.now_s())
    log.info("adopted", slice=part.key.name, generation=part.generation, state=part.state.name)

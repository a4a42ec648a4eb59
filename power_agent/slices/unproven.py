"""Tritons and instances that the journal does not know: adopted where they prove whose they are, else left and named.

A Triton is adopted as READY once `core/proof.py` has no objection and each model that it hosts has answered an
inference. One that is proven and answers nothing is asked again until `ready_timeout_s` have passed. Then it is FAILED,
and is started again where it is planned. All others are never ended here: an operator says `adopt` or `reset`.
"""

import asyncio
import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from power_agent.devices.errors import DeviceError
from power_agent.devices.inventory import ObservedSlice
from power_agent.durability.journal_state import Override
from power_agent.runtimes.base import RunningTriton
from power_agent.slices.core.proof import Running, objection, split_tag, uncut_keys
from power_agent.slices.mig import MigInstances
from power_agent.slices.node_state import Device, Node
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import StepExecutor
from trefoil.core.errors import (
    DiskUnavailable,
    InvalidInput,
    SettingError,
    StateUnavailable,
    TrefoilError,
    Unavailable,
)
from trefoil.core.fleet import DeviceKind, DeviceState, SliceKey, SliceState

ASK_S: Final = 3.0  # for the answers of one Triton
FIRST_ASK_S: Final = 6.0  # at the agent's start: a Triton may be starting
PAUSE_S: Final = 0.5
CLOCK: Final = "clock"


@dataclass(frozen=True, slots=True)
class Claim:
    """A slice that exists, and the Triton that says it is its own."""

    seen: ObservedSlice
    process: RunningTriton
    why_not: str  # empty: proven


class Unproven:
    """What runs on the node without an entry of the journal."""

    def __init__(self, node: Node, mig: MigInstances, executor: StepExecutor) -> None:
        self._node = node
        self._mig = mig
        self._executor = executor
        self._turn = asyncio.Lock()  # an operator's command and a look wait for each other
        self._silent_since_s: dict[str, float] = {}  # of proven Tritons that answer nothing, by tag
        self._log = structlog.get_logger()

    async def adopt_first(self, processes: Mapping[str, RunningTriton]) -> None:
        """Adopt at the agent's start, with some patience for Tritons that are starting."""
        clock = self._node.clock
        until_s = clock.monotonic_s() + FIRST_ASK_S
        await self._adopt(dict(processes))
        while self._silent_since_s and clock.monotonic_s() < until_s:
            await clock.sleep(PAUSE_S)
            await self._look()

    async def proven_tags(self, processes: Mapping[str, RunningTriton]) -> set[str]:
        """Tags of Tritons that are proven to be of a slice that is not ours yet."""
        return {claim.process.tag for claim in await self._claims(processes.values()) if not claim.why_not}

    async def run(self) -> None:
        """Look again at what is not proven, until cancelled: a Triton may answer, or a device be back, later."""
        while True:
            await self._node.clock.sleep(self._node.settings.drift_poll_s)
            if self._node.unproven:
                try:
                    async with self._turn:
                        await self._look()
                except Unavailable as error:
                    self._log.info("unproven slices cannot be inspected", why=str(error))

    async def _look(self) -> dict[str, RunningTriton]:
        """Adopt what is proven by now; returns the Tritons that are not."""
        before = self._own_tags()  # what ends meanwhile is listed, and ours
        processes = await self._executor.processes()
        unknown = {tag: process for tag, process in processes.items() if tag not in before}
        await self._adopt(unknown)
        return {tag: process for tag, process in unknown.items() if tag in self._node.unproven}

    async def _adopt(self, processes: Mapping[str, RunningTriton]) -> None:
        """Adopt what is proven, and say what is not."""
        own = self._own_tags()
        unknown = {tag: process for tag, process in processes.items() if process.alive and tag not in own}
        claims = await self._claims(unknown.values())
        reasons = dict.fromkeys(unknown, "no slice of this node is its own")
        for claim in claims:
            reasons[claim.process.tag] = claim.why_not
        proven = _newest(claim for claim in claims if not claim.why_not)
        outcomes = await asyncio.gather(*(self._adopt_one(claim) for claim in proven))
        for claim, why in zip(proven, outcomes, strict=True):
            reasons[claim.process.tag] = why
            if not why:
                del reasons[claim.process.tag]
        for tag in reasons:
            reasons[tag] = reasons[tag] or "another Triton of the same slice is newer"
        self._silent_since_s = {tag: at_s for tag, at_s in self._silent_since_s.items() if tag in reasons}
        self._node.unproven = reasons
        self._node.report_unproven()

    def _own_tags(self) -> set[str]:
        return {part.tag for part in self._node.slices.values()}

    # --- by an operator's word ----------------------------------------------------------------------------------------

    async def take_over(self, names: Collection[str]) -> None:
        """Adopt Tritons and instances although they are not proven; all where none is named.

        Raises:
            InvalidInput: no such thing is here, or it can only be reset.
            Unavailable: its Triton does not infer.
        """
        async with self._turn:
            unknown = await self._look()
            tags, keys = self._named(names)
            await self._take_over_tritons([unknown[tag] for tag in tags], named=bool(names))
            for device in self._node.devices.values():
                for seen in await self._mig.list(device.device) if device.has_instances and keys else ():
                    if seen.key in keys and seen.key not in self._node.slices:
                        self._take(await self._empty_slice(seen))
            await self._look()

    async def _take_over_tritons(self, processes: Collection[RunningTriton], *, named: bool) -> None:
        claims, tags = await self._claims(processes), {process.tag for process in processes}
        lone = {tag for tag in tags if tag not in {claim.process.tag for claim in claims}}
        if lone and named:
            remedy = "reset it: trefoil node reset"
            raise InvalidInput("a Triton without its slice", field="name", value=sorted(lone)[0], remedy=remedy)
        for claim in _newest(claims):
            if f"--grpc-port={self._executor.expected(claim.seen.key, '').grpc_port}" not in claim.process.argv:
                remedy = "reset it: trefoil node reset"
                raise InvalidInput("listens on another port", field="name", value=claim.process.tag, remedy=remedy)
            if why := await self._adopt_one(claim):
                raise Unavailable(f"{claim.process.tag} cannot be taken over: {why}", remedy="repeat, or reset it")

    async def _empty_slice(self, seen: ObservedSlice) -> Slice:
        """Slice of an instance on which no Triton runs."""
        node = self._node
        generation = node.journal.next_generation()
        await node.journal.sync()
        state, why = SliceState.PENDING, "taken over by an operator"
        part = Slice(seen.key, generation, state, node.clock.now_s(), node.on_slice_moved, why)
        part.has_instance, part.has_compute, part.mig_uuid = True, seen.ci_id is not None, seen.mig_uuid
        return part

    async def end(self, names: Collection[str], *, force: bool) -> None:
        """End Tritons that are not proven, and destroy their instances; all where none is named.

        Raises:
            InvalidInput: no such thing is here, or it serves and `force` is not given: then nothing is touched.
            DeviceBusy: processes of others hold an instance.
        """
        async with self._turn:
            unknown = await self._look()
            tags, keys = self._named(names)
            if not force and (serving := await self._serving([unknown[tag] for tag in sorted(tags)])):
                raise InvalidInput("it serves", field="name", value=serving, remedy="drain it, or give --force")
            for tag in sorted(tags):
                self._log.warning("ended by an operator", tag=tag)
                await self._executor.end_orphan(tag)
            for key in sorted(keys):
                self._log.warning("instance destroyed by an operator", slice=key.name)
                await self._mig.destroy_ci(key)
                await self._mig.destroy_gi(key)
                device = self._node.devices[key.device]
                device.foreign = tuple(other for other in device.foreign if other != key)
                self.free_clock(device)
            await self._look()

    def _named(self, names: Collection[str]) -> tuple[set[str], set[SliceKey]]:
        """Tags of unproven Tritons and keys of foreign instances by these names, each with what belongs to it."""
        node = self._node
        foreign = {key.name: key for device in node.devices.values() for key in device.foreign}
        own = {part.tag for part in node.slices.values()} | {key.name for key in node.slices}
        for name in names:
            if name not in node.unproven and name not in foreign and name not in own:
                here = ", ".join([*sorted(node.unproven), *sorted(foreign)]) or "nothing: all is proven"
                raise InvalidInput(
                    "no such Triton or instance is here", field="name", value=name, remedy=f"one of {here}"
                )
        wanted = {split_tag(name)[0] or name for name in names} if names else None
        keys = {key for name, key in foreign.items() if wanted is None or name in wanted}
        tags = {tag for tag in node.unproven if wanted is None or tag in names or (split_tag(tag)[0] or tag) in wanted}
        return tags, keys

    async def _serving(self, processes: Sequence[RunningTriton]) -> str:
        """Tag of one to which dispatchers send, or which answers requests now; "" for none."""
        try:
            routed = {load.slice.name for ack in await self._executor.acks.read() for load in ack.slices}
        except StateUnavailable:
            routed = {split_tag(process.tag)[0] for process in processes}  # who sends there cannot be known
        for process in processes:
            if split_tag(process.tag)[0] in routed:
                return process.tag
        return ""

    # --- whose it is --------------------------------------------------------------------------------------------------

    async def _claims(self, unknown: Iterable[RunningTriton]) -> list[Claim]:
        found = []
        processes = list(unknown)
        if not processes:
            return []
        for device in self._node.devices.values():
            for seen in await self._free_slices(device, processes):
                named = (process for process in processes if split_tag(process.tag)[0] == seen.key.name)
                found += [Claim(seen, process, self.objection(seen, process)) for process in named]
        return found

    async def _free_slices(self, device: Device, processes: Iterable[RunningTriton]) -> list[ObservedSlice]:
        """Slices of a device that exist, or would by a Triton on them, and are not ours yet."""
        if device.state == DeviceState.LOST:
            return []
        if device.has_instances:
            try:
                listed = await self._mig.list(device.device)
            except DeviceError as error:  # whether it is lost is for `DriverWatch` to find out
                self._log.warning("instances cannot be listed", device=device.device, why=str(error))
                return []
            return [seen for seen in listed if seen.key not in self._node.slices]
        if device.type.kind == DeviceKind.MIG_GPU:
            return []
        keys = uncut_keys(device.device, device.type, [split_tag(process.tag)[0] for process in processes])
        return [ObservedSlice(key, -1, None, device.uuid, 0, 0) for key in keys if key not in self._node.slices]

    def objection(self, seen: ObservedSlice, process: RunningTriton) -> str:
        """Why a Triton is not proven to be that of a slice; "" where it is."""
        try:
            expected = self._executor.expected(seen.key, seen.mig_uuid)
        except SettingError as error:
            return str(error)
        return objection(Running(process.tag, process.owner, process.argv, process.gpu_uuid), expected)

    # --- adopted ------------------------------------------------------------------------------------------------------

    async def _adopt_one(self, claim: Claim) -> str:
        """Adopt the slice of a proven Triton; returns why not, empty when it is adopted."""
        node, seen, process = self._node, claim.seen, claim.process
        clock, key = node.clock, seen.key
        state, why, trouble = SliceState.READY, "adopted without a journal: proven by its launch and an inference", ""
        part = Slice(key, split_tag(process.tag)[1], state, clock.now_s(), node.on_slice_moved, why)
        part.has_instance = node.devices[key.device].type.kind == DeviceKind.MIG_GPU
        part.has_compute, part.mig_uuid = part.has_instance and seen.ci_id is not None, seen.mig_uuid
        try:
            part.hosted = await self._executor.ask_hosted(part, process, node.variant_of, ASK_S)
            trouble = "" if part.hosted else "it has loaded nothing yet"
        except (TrefoilError, TimeoutError) as error:
            trouble = f"it does not infer: {error or f'no answer within {ASK_S:g} s'}"
        if trouble:
            since_s = self._silent_since_s.setdefault(process.tag, clock.monotonic_s())
            if clock.monotonic_s() - since_s < node.settings.ready_timeout_s:
                return trouble
            part.state, part.heal_failure = SliceState.STARTING, trouble
        try:
            await self._executor.attach(part, process)
        except TrefoilError as error:
            return f"it cannot be kept: {error}"
        if key in node.slices:
            return "its slice has been planned again meanwhile"
        self._take(part)
        if trouble:
            part.fail(f"adopted without a journal, {trouble}", clock.now_s())
        else:
            part.loaded, part.last_success_s = True, clock.now_s()
            part.overhead_requests += len(part.hosted)
        self._log.info("adopted", slice=key.name, generation=part.generation, state=part.state.name, proven=True)
        return ""

    def _take(self, part: Slice) -> None:
        node, device = self._node, self._node.devices[part.key.device]
        part.proven = part.running
        node.journal.raise_generation(part.generation)
        node.add_slice(part)
        node.journal.remember_slice(part.record())
        device.foreign = tuple(key for key in device.foreign if key != part.key)
        if device.state == DeviceState.ASLEEP:
            node.set_device(device, DeviceState.AWAKE)
        self.free_clock(device)
        node.changed()

    def free_clock(self, device: Device) -> None:
        """Let the clock keeper put the clock right: a lock that a predecessor left cannot be read from the driver."""
        node = self._node
        if device.type.clock_lockable and (device.device, CLOCK) not in node.journal.state.overrides:
            load = f"{node.boot_id}/{node.driver_load_id}"
            with contextlib.suppress(DiskUnavailable):  # said by the journal, which nothing can be written to now
                node.journal.begin_override(Override(device.device, CLOCK, 0.0, 0.0, load))


def _newest(claims: Iterable[Claim]) -> list[Claim]:
    """Of each slice the Triton of the highest generation: two cannot listen on its port."""
    found: dict[SliceKey, Claim] = {}
    for claim in claims:
        before = found.get(claim.seen.key)
        if before is None or split_tag(claim.process.tag)[1] > split_tag(before.process.tag)[1]:
            found[claim.seen.key] = claim
    return list(found.values())

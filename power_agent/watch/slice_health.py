"""Slice health: notices a Triton that exits and a python stub that dies. It only declares; `reconciler` fixes.
`driver_watch.py` looks at the driver and its devices.

Readiness shows none of the second kind: only a real inference does. One is made when a dispatcher has ejected the
slice, when its calls fail, or when nothing has succeeded on it for `quiet_probe_s`. An adopted engine is not asked for
the last reason while dispatchers have requests on it: they see the outcome.

A probe that times out may stand behind a first call, which loads or compiles. So while the server answers, a model is
slow and not failed until its probes have timed out for FIRST_CALL_S. Its neighbours on the slice serve meanwhile.
"""

import asyncio
import math
from collections.abc import Sequence
from typing import Final

import structlog

from power_agent.slices.adopted_engine import AdoptedEngine
from power_agent.slices.node_state import Node
from power_agent.slices.reconciler import Reconciler
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import PROBE_TIMEOUT_S, StepExecutor
from power_agent.triton.client import StubDead, TritonClient, TritonSlow
from trefoil.core.demand import FIRST_CALL_S, TableAck
from trefoil.core.errors import StateUnavailable, TrefoilError, Unavailable
from trefoil.core.fleet import SERVING, SliceKey, SliceState
from trefoil.runtime.model_files import CONFIG
from trefoil.runtime.state import ACK_TTL_S

STABLE_S: Final = 20.0  # healthy for so long: the next failure is the first again
CLEARED_POLLS: Final = 4  # for so many polls a good probe outweighs ejections and failing calls
LOOKS_MAX: Final = 3  # periods for which one look at what is in flight stands at most
TIMEOUTS_MAX: Final = 2  # a probe that only times out may stand behind a queue
SLOW_MAX: Final = math.ceil(FIRST_CALL_S / PROBE_TIMEOUT_S)  # probes that time out while the server answers
ALIVE_S: Final = 1.0  # within which a server answers whatever its models do


def probe_reason(ejected: bool, failing: bool, quiet_s: float, quiet_probe_s: float) -> str:
    """Reason why a READY slice should be probed by an inference; empty when there is no reason."""
    if ejected:
        return "a dispatcher ejected it"
    if failing:
        return "its calls fail"
    if quiet_s >= quiet_probe_s:
        return f"no success for {quiet_s:.1f} s"
    return ""


def ejected_slices(acks: Sequence[TableAck], now_s: float) -> frozenset[SliceKey]:
    """Slices that a live dispatcher worker does not send to because they fail."""
    live = (ack for ack in acks if now_s - ack.observed_at_s <= ACK_TTL_S)
    return frozenset(load.slice for ack in live for load in ack.slices if load.ejected)


class SliceHealth:
    """Health checks of all slices, by the runtime, the acknowledgements and probes."""

    def __init__(self, node: Node, reconciler: Reconciler, executor: StepExecutor) -> None:
        self._node = node
        self._reconciler = reconciler
        self._executor = executor
        self._probes: dict[SliceKey, asyncio.Task[None]] = {}
        self._timeouts: dict[SliceKey, int] = {}
        self._passed_at_s: dict[SliceKey, float] = {}
        self._looked_at_s = node.clock.monotonic_s()
        self._asked = set[SliceKey]()

    async def run(self) -> None:
        """Check all slices every `health_poll_s` until cancelled."""
        settings, clock = self._node.settings, self._node.clock
        while True:
            try:
                await self._check_processes()
                self._node.report_missing("node", "")
            except Unavailable as error:
                self._node.report_missing("node", str(error))
            self._node.journal.keep_place()
            self._node.report_missing("disk", self._node.journal.catch_up())
            await self._keep_files()
            await self._check_inference()  # also, and all the more, when the node does not answer
            self._raise_bugs()
            await clock.sleep(settings.health_poll_s)

    async def stop(self) -> None:
        """Cancel probes in flight."""
        for probe in self._probes.values():
            probe.cancel()
        await asyncio.gather(*self._probes.values(), return_exceptions=True)

    def _raise_bugs(self) -> None:
        for key, probe in list(self._probes.items()):
            if probe.done():
                del self._probes[key]
                if not probe.cancelled():
                    probe.result()  # a bug in a probe ends the service

    # --- processes ----------------------------------------------------------------------------------------------------

    async def _check_processes(self) -> None:
        running = [(part, part.incarnation) for part in self._node.slices.values() if part.running]
        processes = await self._executor.processes()
        for part, incarnation in running:
            process = processes.get(part.tag)
            if part.incarnation != incarnation or self._reconciler.current_verb(part) == "stop":
                continue  # another process meanwhile, or one that ought to end
            if process is None or not process.alive:
                code = process.exit_code if process is not None else None
                how = "vanished" if process is None else "ended" if code is None else f"exited with {code}"
                words = await self._executor.triton_words(part, process_gone=True)
                if part.incarnation == incarnation:  # else it was ended meanwhile
                    reported = f" ({process.why})" if process is not None and process.why else ""
                    why = f"Triton {how}{reported}" + (f"; {words}" if words else "")
                    await self._declare_failed(part, why, "exit", process_gone=True)

    async def _declare_failed(self, part: Slice, why: str, cause: str, *, process_gone: bool) -> None:
        """A slice has failed: say so, and let it be fixed at once if it was healthy for long."""
        now_s = self._node.clock.now_s()
        if part.state in SERVING and now_s - part.since_s >= STABLE_S:
            part.failures, part.retry_at_s = 0, 0.0
        if part.failures or part.state not in SERVING:
            self._reconciler.retry_later(part)
        else:
            part.failures = 1
        self._reconciler.interrupt(part)
        part.fail(why, now_s)
        self._node.metrics.inc("trefoil_slice_restarts_total", slice=part.key.name, cause=cause)
        if process_gone:
            await self._executor.process_ended(part)
            self._node.work.set()

    async def _keep_files(self) -> None:
        """Write the files of slices again that were deleted under their Tritons, which can load nothing any more."""
        for part in [part for part in self._node.slices.values() if part.running and part.launch is not None]:
            assert part.launch is not None
            configs = [part.launch.repository / hosted.model / CONFIG for hosted in part.hosted]
            if not all(path.is_file() for path in configs) and not self._reconciler.busy(part):
                structlog.get_logger().error("files of a slice lost: written again", slice=part.key.name)
                part.stale_files = True
                await self._executor.renew_files(part)

    # --- inference ----------------------------------------------------------------------------------------------------

    async def _check_inference(self) -> None:
        settings, clock = self._node.settings, self._node.clock
        try:
            acks = await self._executor.acks.read()
            ejected = ejected_slices(acks, clock.now_s())
            self._record_in_flight(acks)
            self._node.report_missing("redis", "")
        except StateUnavailable as error:
            ejected = frozenset()
            self._node.report_missing("redis", str(error))
        now_s = clock.now_s()
        for part in self._node.slices.values():
            if part.state != SliceState.READY or part.key in self._probes or self._reconciler.busy(part):
                continue
            # A doubt that a good probe has answered is not raised again every half second.
            doubtful = now_s - self._passed_at_s.get(part.key, 0.0) >= settings.health_poll_s * CLEARED_POLLS
            why = probe_reason(
                part.key in ejected and doubtful,
                part.failing and doubtful,
                0.0 if part.key in self._asked else now_s - part.last_success_s,
                settings.quiet_probe_s,
            )
            if why:
                self._probes[part.key] = asyncio.create_task(self._probe(part, why))

    def _record_in_flight(self, acks: Sequence[TableAck]) -> None:
        """Take the time since the last look for busy, of families that Triton does not time and that have requests."""
        now_s = self._node.clock.monotonic_s()
        passed_s = min(now_s - self._looked_at_s, LOOKS_MAX * self._node.settings.health_poll_s)
        self._looked_at_s = now_s
        asked = {(load.slice, load.family) for ack in acks for load in ack.slices if load.in_flight}
        engines = {part.key for part in self._node.slices.values() if isinstance(part.triton, AdoptedEngine)}
        self._asked = engines & {key for key, _ in asked}
        for part in self._node.slices.values():
            untimed = self._executor.untimed(part)
            part.record_in_flight({family for family in untimed if (part.key, family) in asked}, passed_s)

    async def _probe(self, part: Slice, why: str) -> None:
        triton = part.triton
        if triton is None:
            return  # it has ended since the decision to ask it
        incarnation = part.incarnation
        try:
            for hosted in part.hosted:
                await triton.probe(hosted.model, hosted.version, PROBE_TIMEOUT_S)
        except TrefoilError as error:
            slow = False
            if isinstance(triton, TritonClient) and isinstance(error, TritonSlow):
                slow = await triton.is_ready(hosted, ALIVE_S)
            if part.incarnation != incarnation or part.state != SliceState.READY or self._reconciler.busy(part):
                return  # another step has dealt with it meanwhile
            self._timeouts[part.key] = self._timeouts.get(part.key, 0) + 1
            if not isinstance(error, StubDead):
                if self._timeouts[part.key] < (SLOW_MAX if slow else TIMEOUTS_MAX):
                    return
                part.heal_failure = str(error)
            self._timeouts.pop(part.key)
            await self._declare_failed(part, f"{why}: {error}", "stub", process_gone=False)
            return
        self._timeouts.pop(part.key, None)
        part.overhead_requests += len(part.hosted)
        part.last_success_s, part.failing = self._node.clock.now_s(), False
        self._passed_at_s[part.key] = part.last_success_s

"""Reconciler: takes plans and brings the node to its planned state, one step per slice at a time.

`apply` takes a plan. `start_due_steps` asks the core (`core.reconcile`) what is left to do and starts what may start
now. The end of a step, each move of a slice and each new plan makes it look again.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

import structlog

from power_agent.devices.errors import DeviceLost, DriverUnavailable
from power_agent.slices.core.reconcile import Task, check_fits, reconcile, refuse_cordoned, refuse_plan
from power_agent.slices.node_state import Device, Node
from power_agent.slices.slice_state import Slice
from power_agent.slices.step_executor import StepExecutor
from trefoil.core.common import Revision
from trefoil.core.errors import PlanError, StaleRevision, TrefoilError
from trefoil.core.fleet import SERVING, DeviceState, SliceKey, SliceState, Step, serves_alike
from trefoil.core.plan import NodePlan

FIRST_BACKOFF_S: Final = 0.5
TEARDOWN: Final = frozenset({"drain", "stop", "destroy_ci", "destroy_gi"})
# A start takes milliseconds and must not be interrupted: its process would run unknown.
INTERRUPTIBLE: Final = frozenset({"load", "warm_up"})
SETTLED: Final = frozenset({DeviceState.AWAKE, DeviceState.ASLEEP, DeviceState.LOST})


class Clocks(Protocol):
    """What slices ask of the clocks of their GPUs (`clocks.clock_keeper.ClockKeeper`)."""

    def refuse(self, plan: NodePlan) -> None:
        """Refuse a plan whose clocks, power limits or governors a device cannot have. Raises PlanError."""

    def refuse_governors(self, plan: NodePlan) -> None:
        """Refuse a plan that names a governor which is not there. Raises PlanError."""

    def settled(self) -> bool:
        """Whether every device surely has the range that it ought to have."""

    def steps(self, plan: NodePlan) -> tuple[Step, ...]:
        """The lock_clock steps that a plan needs now, one per device."""


@dataclass(frozen=True, slots=True)
class ApplyResult:
    """Answer to Apply: whether the plan is another one, and its steps."""

    changed: bool
    steps: tuple[Step, ...] = ()


def hosted_of(plan: NodePlan) -> set[tuple[str, str]]:
    """Family and variant of all that a plan hosts."""
    return {(hosted.family, hosted.variant) for d in plan.devices for part in d.slices for hosted in part.hosted}


class Reconciler:
    """Reconciler of a node, the only one that gives slices their steps."""

    def __init__(self, node: Node, executor: StepExecutor, clocks: Clocks) -> None:
        self._node = node
        self._executor = executor
        self._clocks = clocks
        self._jobs: dict[SliceKey, tuple[str, asyncio.Task[None]]] = {}
        self._starting: set[SliceKey] = set()  # those that hold one of the places for parallel starts
        self._waking: dict[str, asyncio.Task[None]] = {}
        self._apply = asyncio.Lock()
        self._stopping = False
        self._bug: BaseException | None = None
        self._log = structlog.get_logger()

    # --- what ought to be ---------------------------------------------------------------------------------------------

    async def apply(self, plan: NodePlan) -> ApplyResult:
        """Apply a plan. Idempotent by revision and digest.

        Raises:
            StaleRevision: older than one already taken; names both.
            PlanError: this node cannot carry it out; nothing was touched.
        """
        plan = replace(plan, digest=plan.digest or plan.content_digest)
        if self._node.learn_models is not None:
            await self._node.learn_models(hosted_of(plan))
        async with self._apply:
            found = self._evaluate(plan)
            if self._node.plan is not None and self._node.plan.revision == plan.revision:
                return found
            await self._node.journal.accept_plan(plan)
            self._adopt_plan(plan)
            self._log.info("plan", revision=str(plan.revision), changed=found.changed, steps=len(found.steps))
            return found

    async def void_fence(self, epoch: int) -> None:
        """Obey this epoch from now on, although a higher one was obeyed, or is in the journal."""
        async with self._apply:
            await self._node.journal.lower_fence(epoch)
            plan = self._node.plan
            if plan is not None and plan.revision.epoch > epoch:
                self._node.plan = replace(plan, revision=Revision(epoch))
        self._log.warning("a fence that no controller led under is void", obeys_epoch=epoch)

    def preview(self, plan: NodePlan) -> ApplyResult:
        """Preview what `apply` would answer now; touches nothing.

        Raises:
            StaleRevision, PlanError: as `apply`.
        """
        return self._evaluate(replace(plan, digest=plan.digest or plan.content_digest))

    def _evaluate(self, plan: NodePlan) -> ApplyResult:
        self._refuse_stale(plan)
        seen = self._node.seen_devices()
        refuse_plan(plan, self._node.settings.node, seen, self._node.catalog)
        self._clocks.refuse(plan)
        current = self._node.plan
        if current is not None and current.revision == plan.revision:
            if current.digest != plan.digest:
                raise PlanError(
                    f"this revision was taken with digest {current.digest}",
                    field="digest",
                    value=plan.digest,
                    remedy="give a changed plan a new revision",
                )
            return ApplyResult(False)
        refuse_cordoned(plan, seen)
        steps = tuple(task.step() for task in reconcile(seen, plan, self._node.catalog))
        return ApplyResult(current is None or current.digest != plan.digest, (*steps, *self._clocks.steps(plan)))

    def _refuse_stale(self, plan: NodePlan) -> None:
        highest = self._node.journal.state.highest_epoch
        newest = self._node.plan.revision if self._node.plan else Revision()
        if plan.revision.epoch < highest or plan.revision < newest:
            raise StaleRevision(
                f"node {self._node.settings.node} obeys epoch {highest} and revision {newest}; "
                f"epoch {plan.revision.epoch} and revision {plan.revision} are older",
                remedy="none, if a controller leads: it takes a newer epoch, or this node obeys it at its next command",
            )

    def resume(self, plan: NodePlan) -> None:
        """Resume the plan that the journal remembers, also where devices are in trouble now: that may pass."""
        here = tuple(planned for planned in plan.devices if planned.device in self._node.devices)
        if len(here) < len(plan.devices):
            gone = [planned.device for planned in plan.devices if planned not in here]
            self._log.warning("devices of the stored plan are not here", devices=gone)
        plan = replace(plan, devices=here)  # the digest stays that of the whole, which a controller may send again
        whole = [replace(seen, state=DeviceState.AWAKE) for seen in self._node.seen_devices()]
        try:
            check_fits(plan, whole, self._node.catalog)
            self._clocks.refuse_governors(plan)
        except PlanError as error:
            self._log.warning("the stored plan no longer fits this node", why=str(error))
            return
        self._adopt_plan(plan)

    def _adopt_plan(self, plan: NodePlan) -> None:
        self._node.plan = plan
        for known in self._node.slices.values():
            known.retry_at_s = 0.0  # a new plan is a new try
        self._add_planned_slices()
        self._node.changed()

    def _add_planned_slices(self) -> None:
        """Add every slice that the plan wants."""
        plan = self._node.plan_in_force()
        for wanted in (wanted for device in (plan.devices if plan else ()) for wanted in device.slices):
            assert plan is not None
            part = self._node.slices.get(wanted.key)
            if part is None:
                part = self._node.new_slice(wanted.key, 0, SliceState.PENDING)
                part.why = "planned"
            elif part.proven and serves_alike(part.hosted, wanted.hosted):
                part.hosted, part.proven = wanted.hosted, False
            part.revision, part.credits = plan.revision, wanted.credits

    # --- the way there ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Reconcile at each change until cancelled; a bug in a step ends it."""
        while True:
            await self._node.work.wait()
            self._node.work.clear()
            if self._bug is not None:
                raise self._bug
            self.start_due_steps()

    def start_due_steps(self) -> None:
        """Start every step that may start now."""
        plan = self._node.plan_in_force()
        if plan is None:
            return
        self._prune({part.key for device in plan.devices for part in device.slices})
        self._add_planned_slices()
        self._update_device_states(plan)
        tasks = reconcile(self._node.seen_devices(), plan, self._node.catalog)
        for task in tasks:
            if task.slice in self._jobs:
                continue
            if not task.after and self._may_start(task):
                self._start_step(task)
            elif task.after:
                self._report_blocker(self._node.slices[task.slice], [tasks[index].slice for index in task.after])
        settled = all(device.state in SETTLED for device in self._node.devices.values())
        settled = settled and plan is self._node.plan  # what a cordon keeps away is not applied
        settled = settled and self._clocks.settled()
        if not tasks and not self._jobs and settled and self._node.applied != plan.revision:
            self._node.applied = plan.revision
            self._node.changes.notify()

    def _report_blocker(self, part: Slice, blockers: Sequence[SliceKey]) -> None:
        for key in blockers:
            other = self._node.slices[key]
            why = f"waits for the place of {key.name}: {other.why}"
            if key != part.key and part.state == SliceState.PENDING and other.state == SliceState.FAILED:
                if part.why != why:
                    part.why = why
                    self._node.changed()
                return

    def _may_start(self, task: Task) -> bool:
        device, part = self._node.devices[task.slice.device], self._node.slices[task.slice]
        if task.verb not in TEARDOWN and device.state != DeviceState.AWAKE:
            return False
        if self._node.clock.monotonic_s() < part.retry_at_s:
            return False
        if task.verb == "start" and task.slice not in self._starting:
            if len(self._starting) >= self._node.settings.starts_parallel:
                return False
            self._starting.add(task.slice)
        return True

    def _prune(self, planned: set[SliceKey]) -> None:
        """Drop records of what is gone; stop starting what is not wanted any more; renew what is wanted again."""
        now_s = self._node.clock.now_s()
        for key, part in list(self._node.slices.items()):
            if part.state in (SliceState.READY, SliceState.FAILED, SliceState.GONE):
                self._starting.discard(key)
            if key in self._jobs:
                if key not in planned and part.state not in SERVING:
                    self.interrupt(part)
            elif part.state == SliceState.GONE and key in planned:
                self._node.replace_gone(part, "planned again")
            elif key not in planned and not part.exists:
                if part.state != SliceState.GONE:
                    part.fail("not planned any more", now_s)
                    part.move(SliceState.GONE, "not planned any more", now_s)
                self._node.forget_slice(part)

    def _start_step(self, task: Task) -> None:
        job = asyncio.create_task(
            self._run_step(self._node.slices[task.slice], task), name=f"{task.verb} {task.slice.name}"
        )
        self._jobs[task.slice] = (task.verb, job)
        job.add_done_callback(partial(self._on_step_ended, task.slice))

    def _on_step_ended(self, key: SliceKey, job: asyncio.Task[None]) -> None:
        del self._jobs[key]
        if not job.cancelled() and (bug := job.exception()) is not None:
            self._bug = bug
        self._node.work.set()

    async def _run_step(self, part: Slice, task: Task) -> None:
        clock = self._node.clock
        started_s = clock.monotonic_s()
        outcome, why = "done", task.why
        try:
            await self._node.journal.begin_step(task.step("begun"))
            await self._executor.run(part, task)
        except asyncio.CancelledError:
            outcome, why = "failed", "interrupted"
            if not self._stopping:
                part.fail("interrupted", clock.now_s())
        except (TrefoilError, OSError) as error:
            outcome, why = "failed", str(error)
            self._on_step_failed(part, task, error)
        took_ms = (clock.monotonic_s() - started_s) * 1e3
        self._node.journal.end_step(task.step(outcome, took_ms, why))
        log = self._log.info if outcome == "done" else self._log.warning
        log("step", slice=task.slice.name, verb=task.verb, outcome=outcome, took_ms=round(took_ms, 1), why=why)
        self._node.metrics.inc("trefoil_steps_total", verb=task.verb, outcome=outcome)
        self._node.metrics.observe("trefoil_step_duration_seconds", took_ms / 1e3, verb=task.verb)

    def _on_step_failed(self, part: Slice, task: Task, error: Exception) -> None:
        if isinstance(error, DeviceLost | DriverUnavailable):
            self._node.set_device(self._node.devices[part.key.device], DeviceState.LOST)
        why, now_s = f"{task.verb}: {error}", self._node.clock.now_s()
        if part.state == SliceState.GONE:  # ended, but its instance cannot be destroyed
            part = self._node.replace_gone(part, why)
        if part.state == SliceState.FAILED and part.why != why:
            part.why = why
            self._node.changed()
        if part.state not in SERVING:
            part.fail(why, now_s)
        self.retry_later(part)

    def retry_later(self, part: Slice) -> None:
        """Retry a slice: at once the first time, then after longer and longer pauses."""
        part.failures += 1
        if part.failures == 1:
            return
        pause_s = min(self._node.settings.retry_backoff_max_s, FIRST_BACKOFF_S * 2.0 ** (part.failures - 2))
        part.retry_at_s = self._node.clock.monotonic_s() + pause_s
        asyncio.get_running_loop().call_later(pause_s, self._node.work.set)

    def interrupt(self, part: Slice) -> None:
        """Interrupt the load or warm-up that a slice is in: what it works on is gone, or not wanted."""
        verb, job = self._jobs.get(part.key, ("", None))
        if job is not None and verb in INTERRUPTIBLE:
            job.cancel()

    def busy(self, part: Slice) -> bool:
        """Whether a step works on this slice now."""
        return part.key in self._jobs

    def current_verb(self, part: Slice) -> str:
        """Verb of the step that works on this slice now; empty for none."""
        return self._jobs[part.key][0] if part.key in self._jobs else ""

    async def stop(self) -> None:
        """Stop all steps; the processes on slices stay."""
        self._stopping = True
        jobs = [*(job for _, job in self._jobs.values()), *self._waking.values()]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)

    # --- sleep and wake -----------------------------------------------------------------------------------------------

    def _update_device_states(self, plan: NodePlan) -> None:
        targets = {planned.device: planned.target for planned in plan.devices}
        occupied = {key.device for key, part in self._node.slices.items() if part.exists}
        for device in self._node.devices.values():
            asleep = targets.get(device.device, DeviceState.ASLEEP) == DeviceState.ASLEEP
            if device.state == DeviceState.AWAKE and asleep:
                next_state = DeviceState.FALLING_ASLEEP if device.device in occupied else DeviceState.ASLEEP
                self._node.set_device(device, next_state)
            elif device.state == DeviceState.FALLING_ASLEEP and not asleep:
                self._node.set_device(device, DeviceState.AWAKE)
            elif device.state == DeviceState.FALLING_ASLEEP and device.device not in occupied:
                self._node.set_device(device, DeviceState.ASLEEP)
            elif device.state == DeviceState.ASLEEP and not asleep:
                self._node.set_device(device, DeviceState.WAKING)
                self._waking[device.device] = asyncio.create_task(self._wake_up(device))
            elif device.state == DeviceState.WAKING and asleep:
                self._waking[device.device].cancel()
                self._node.set_device(device, DeviceState.ASLEEP)

    async def _wake_up(self, device: Device) -> None:
        await self._node.clock.sleep(device.type.wake_s)
        self._node.set_device(device, DeviceState.AWAKE)

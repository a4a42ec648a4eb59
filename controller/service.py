"""gRPC service of the controller, for operators and the command line."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import lru_cache
from typing import Any

from controller.explore.core.exploration import Explorer
from controller.jobs.planning_loop import JobsPlanning
from controller.jobs.zone_offers import offers_message
from controller.loop.budgets import BudgetCommands
from controller.loop.control_loop import ControlLoop
from controller.loop.core.control import Change
from controller.loop.core.decision import predicted_saving
from controller.loop.core.loans import LEASE_MAX_S, Loan
from controller.loop.core.objectives import accept_objective
from controller.loop.core.saved_state import STOPPED, start_command
from controller.loop.declared import Declaration, DeclaredSettings, accept_all, accept_budgets
from controller.observe.core.plannable import check_obeyed, places_refused
from controller.observe.core.triggers import OPERATOR, Trigger
from controller.planners.fleet_power import check_power
from controller.planners.gpu_allocation import AllocationSettings, with_device
from controller.planners.planning_input import read_view
from controller.role.by_command import ByCommand
from controller.role.disk_store import DiskStore
from controller.rollout.core.executor import FINAL_STATES
from controller.stored_reads import StoredReads
from controller.thresholds import CAUSES
from protos.controller.v1 import controller_pb2 as pb
from protos.controller.v1 import controller_pb2_grpc
from trefoil.core import errors
from trefoil.core.brains import PlanView
from trefoil.core.common import IdentityKey, Revision
from trefoil.core.demand import Measured
from trefoil.core.objective import ActMode, Objective
from trefoil.core.parts import PartSettings
from trefoil.core.plan import Expected, NodePlan, Plan, PlannedDevice, RolloutState
from trefoil.core.plan_check import check, check_node, check_parts
from trefoil.runtime import codec
from trefoil.runtime.given.catalog_files import CatalogFiles

FULL_NAME = "trefoil.controller.v1.Controller"


class ControllerService(BudgetCommands, controller_pb2_grpc.ControllerServicer):  # type: ignore[misc]
    """gRPC service `Controller`. Thin: checks what it is given, then asks the loop."""

    def __init__(
        self,
        loop: ControlLoop,
        files: CatalogFiles,
        planner: PartSettings | None,
        disk: DiskStore,
        stored: StoredReads,
        declared: DeclaredSettings,
        jobs: JobsPlanning,
    ) -> None:
        self._loop, self._files, self._planner, self._disk = loop, files, planner, disk
        self._stored, self._declared, self._jobs = stored, declared, jobs

    async def GetPlan(self, request: Any, context: Any) -> Any:
        """Plan in force with its rollout, mode and holds."""
        control = self._loop.core.control
        return pb.GetPlanResponse(
            plan=self._plan(),
            rollout=codec.to_proto(self._loop.rollout_runner.rollout),
            mode=_wire(control.mode),
            frozen=control.frozen,
            pinned=control.pinned,
            carbon_refused=self._loop.observation.plannable_carbon(self._loop.clock.now_s()).why,
            disk_trouble=self._disk.trouble,
            loans=[
                pb.Loan(device=loan.device, holder=loan.holder, left_s=loan.ends_s - self._loop.clock.monotonic_s())
                for loan in self._loop.core.loans.lent.values()
            ],
            models_refused=[
                f"{node}: {why}" for node, whys in self._loop.observation.differing.items() for why in whys
            ],
            agents_unreached=self._unreached(),
            places_refused=self._places_refused(),
            files_set_aside=self._disk.set_aside(),
            set_aside=self._loop.not_believed(),
            overrides=[*self._loop.overrides(), *([self._declared.why] if self._declared.why else [])],
            catalog_refused=self._files.why,
        )

    def _places_refused(self) -> list[str]:
        """Places and devices that plans go around, with the reason."""
        observation = self._loop.observation
        fleet = observation.fleet(self._loop.clock.now_s())
        return [f"{name}: {why}" for name, why in places_refused(fleet, observation.refusals.reasons).items()]

    def _unreached(self) -> list[str]:
        """Agents that publish, so that they run, and do not answer."""
        fleet = self._loop.observation.fleet(self._loop.clock.now_s())
        fresh = {node.node for node in fleet.nodes}.difference(fleet.stale)
        return [f"{node}: {why}" for node, why in sorted(self._loop.rollout_runner.unreached.items()) if node in fresh]

    async def GetOffers(self, request: Any, context: Any) -> Any:
        """Device seconds that this zone has left over for jobs of others."""
        return offers_message(await self._jobs.offers())

    async def SetObjectives(self, request: Any, context: Any) -> Any:
        """Set objectives and the fleet's watt cap, all or none; answers what of them cannot be met."""
        self._declared.refuse("objectives")
        if not request.objectives and not request.HasField("max_watts") and not request.reset_max_watts:
            raise errors.InvalidInput("missing", field="objectives", remedy="give one, or max_watts")
        if not all(each.HasField("objective") for each in request.objectives):
            raise errors.InvalidInput("missing", field="objectives.objective", remedy="give each change one")
        await self._files.refresh_for([each.objective.family for each in request.objectives])
        accepted: dict[str, Objective] = {}
        max_watts = _watts(request)
        if request.reset_max_watts:
            if max_watts is not None:
                remedy = "give max_watts, or reset_max_watts"
                raise errors.InvalidInput("given with a reset", field="max_watts", value=max_watts, remedy=remedy)
            max_watts = self._loop.settings.max_watts
        reset = _reset_of(*request.objectives, max_watts=request.reset_max_watts)

        def make() -> Change:
            accepted.update(self._all_accepted(request.objectives))
            return Change(tuple(accepted.values()), max_watts, reset)

        degraded = await self._loop.set_objectives(make)
        return pb.SetObjectivesResponse(
            objectives=[codec.to_proto(each) for each in accepted.values()],
            max_watts=self._loop.core.max_watts,
            degraded=degraded,
        )

    async def Apply(self, request: Any, context: Any) -> Any:
        """Put what a file declares in force, all or none; answers what differs from it."""
        if not request.dry_run:
            self._declared.refuse("objectives")
        core, mode = self._loop.core, request.mode or None
        if mode is not None and mode not in [int(m) for m in ActMode]:
            raise errors.InvalidInput("no such mode", field="mode", value=mode, remedy="observe, advise or act")
        if request.prune and not request.objectives:
            raise errors.InvalidInput(
                "it would stop every family", field="prune", value=True, remedy="declare the families that are to serve"
            )
        named = [*request.objectives, *(each for each in request.budgets if each.family)]
        await self._files.refresh_for([each.family for each in named])
        catalog, prune, stated = self._files.catalog, request.prune, self._loop.settings.stated_budgets
        wanted = [codec.from_proto(each) for each in request.objectives]
        kept = [codec.from_proto(each) for each in request.budgets]
        changes: list[pb.FieldChange] = []

        def make() -> Change | None:
            accepted = accept_all(core, wanted, catalog, self._planner, self._loop.settings.pue)
            budgets = accept_budgets(core.budgets, kept, stated, catalog, prune=prune)
            declaration = Declaration(accepted, _watts(request), ActMode(mode) if mode else None, prune, budgets)
            differing = declaration.changes(core)
            changes.extend(pb.FieldChange(field=f, now=now, wanted=then) for f, now, then in differing)
            return declaration.change(core, by_command=True) if changes and not request.dry_run else None

        degraded = await self._loop.set_objectives(make)
        return pb.ApplyResponse(changes=changes, degraded=degraded, held=core.control.hold_reason)

    async def GetObjectives(self, request: Any, context: Any) -> Any:
        """Objectives in force by family (of one, if the request names it), and the fleet's watt cap."""
        core = self._loop.core
        families = [request.family] if request.family else sorted(core.objectives)
        objectives = [codec.to_proto(self._objective(family)) for family in families]
        return pb.GetObjectivesResponse(objectives=objectives, max_watts=core.max_watts)

    async def LoadFamily(self, request: Any, context: Any) -> Any:
        """Let a family use one more device; answers all of its devices, and how many families share each."""
        devices, degraded = await self._allocate(request.family, request.device, True)
        return pb.LoadFamilyResponse(devices=devices, degraded=degraded)

    async def UnloadFamily(self, request: Any, context: Any) -> Any:
        """Take a device from a family; answers those that it keeps."""
        devices, degraded = await self._allocate(request.family, request.device, False)
        return pb.UnloadFamilyResponse(devices=devices, degraded=degraded)

    async def StopFamily(self, request: Any, context: Any) -> Any:
        """Take a family out of service; answers why the plan in force stays, if it does."""
        self._declared.refuse("objectives")
        await self._loop.set_service(request.family, serves=False)
        return pb.StopFamilyResponse(held=self._loop.core.control.hold_reason)

    async def StartFamily(self, request: Any, context: Any) -> Any:
        """Bring a stopped family back into service; answers what of its objective cannot be met."""
        self._declared.refuse("objectives")
        await self._files.refresh_for((request.family,))
        if (stored := self._loop.core.stopped.get(request.family)) is not None:
            accept_objective(stored, {}, self._files.catalog, None)  # its files may have changed meanwhile
        degraded = await self._loop.set_service(request.family, serves=True)
        return pb.StartFamilyResponse(held=self._loop.core.control.hold_reason, degraded=degraded)

    async def _allocate(self, family: str, device: str, load: bool) -> tuple[list[Any], str]:
        self._declared.refuse("objectives")
        policy, settings = self._loop.settings.policy, self._planner
        if not isinstance(settings, AllocationSettings):
            raise errors.InvalidInput(
                f"policy {policy} decides itself where families live",
                field="policy",
                value=policy,
                remedy="run one that allocates whole devices, e.g. wattwiser",
            )
        answer: list[Any] = []

        def make() -> Change:
            objective, view = self._objective(family), self._loop.core.view()
            found = with_device(read_view(view, settings.rate_floor_per_s, whole=True), settings, family, device, load)
            wanted, factor = replace(objective, devices=found.gpus[family]), found.sharing_factor
            answer.extend(pb.AllocatedDevice(device=d, sharing_factor=factor[d]) for d in found.gpus[family])
            return Change((accept_objective(wanted, self._loop.core.objectives, self._files.catalog, settings),))

        return answer, await self._loop.set_objectives(make)

    def _all_accepted(self, changes: Sequence[Any]) -> dict[str, Objective]:
        """The objectives that ObjectiveChanges ask for, by family."""
        accepted: dict[str, Objective] = {}
        for each in changes:
            family = each.objective.family
            if family in accepted:
                raise errors.InvalidInput("given twice", field="family", value=family, remedy="give each once")
            try:
                accepted[family] = self._accepted(each)
            except errors.TrefoilError as error:
                raise type(error)(f"family {family}: {error}") from error
        return accepted

    def _accepted(self, request: Any) -> Objective:
        """The objective that an ObjectiveChange asks for."""
        wanted: Objective = codec.from_proto(request.objective)
        planner, settings = self._planner, self._loop.settings
        self._refuse_stopped((wanted.family,))
        if request.reset:
            said = {one.family: one.stated() for one in settings.objectives}
            if wanted.family not in said:
                raise errors.InvalidInput(
                    "the settings have no objective of it", field="family", value=wanted.family,
                    remedy=errors.one_of(sorted(said), wanted.family, none="add [[objectives]] to the settings"),
                )  # fmt: skip
            wanted, planner = said[wanted.family], None  # accepted as at a start
        stored = self._loop.core.objectives
        return accept_objective(wanted, stored, self._files.catalog, planner, request.expected_number, settings.pue)

    async def Explain(self, request: Any, context: Any) -> Any:
        """Explain the plan in force for a family: reason, trigger, advice, exploration."""
        loop = self._loop
        objective = self._objective(request.family or self._only_family())
        view = loop.view()
        plan, last = loop.core.current, loop.core.last_verdict
        response = pb.ExplainResponse(
            why=explain(view, plan, objective, loop.rollout_runner.rollout.state, loop.rollout_runner.rollout.why),
            trigger=f"{loop.core.last_trigger.cause}: {loop.core.last_trigger.why}" if loop.core.last_trigger else "",
            replans_by_cause=dict(loop.core.causes),
            reconfigurations_by_cause={cause: n for cause, n in loop.core.reconfigurations.items() if n},
        )
        if self._disk.trouble:
            response.why += f"\nnothing new is decided: {self._disk.trouble}"
        if loop.core.explorer.live is not None:
            response.exploration.CopyFrom(exploration(loop.core.explorer, plan))
        if plan is not None and objective.family in plan.expected:
            response.expected.CopyFrom(codec.to_proto(plan.expected[objective.family]))
        if last is not None and last.plan is None and (last.advised is not None or last.degraded):
            response.advice = last.why
            if last.advised is not None:
                reason = loop.core.control.hold_reason or "was held"
                response.advice = f"{reason}: {predicted_saving(view, last.advised)}. {last.advised.why}"
                response.advised.CopyFrom(codec.to_proto(last.advised.expected.get(objective.family, Expected())))
        return response

    async def SetMode(self, request: Any, context: Any) -> Any:
        """Set how far the controller may go: observe, advise or act."""
        self._declared.refuse("mode")
        known = {int(m): m for m in ActMode if m}
        if request.mode not in known and not request.reset:
            names = errors.one_of(m.name.lower() for m in known.values())
            raise errors.InvalidInput("no such mode", field="mode", value=request.mode, remedy=names)
        if request.mode and request.reset:
            raise errors.InvalidInput(
                "given with a reset", field="mode", value=request.mode, remedy="give mode, or reset"
            )
        mode = self._loop.settings.act_mode if request.reset else known[request.mode]
        control = replace(self._loop.core.control, mode=mode)
        await self._loop.operate(control, mode_by_command=not request.reset)
        return pb.SetModeResponse(mode=_wire(self._loop.core.control.mode))

    async def Freeze(self, request: Any, context: Any) -> Any:
        """Freeze the plan in force, or release it."""
        await self._loop.operate(replace(self._loop.core.control, frozen=request.frozen))
        return pb.FreezeResponse(frozen=self._loop.core.control.frozen, revision=self._revision())

    async def Pin(self, request: Any, context: Any) -> Any:
        """Pin an operator's plan and roll it out; without a plan, unpin."""
        control = self._loop.core.control
        if not request.HasField("plan"):
            await self._loop.operate(replace(control, pinned=False))
            return pb.PinResponse(revision=self._revision())
        self._may_act("Pin")
        view = self._loop.view()
        planned = sum(len(node.devices) for node in request.plan.nodes)
        if planned > (known := sum(len(node.devices) for node in view.fleet.nodes)):
            raise errors.PlanError(
                f"more devices than the {known} that nodes report", field="plan.nodes.devices", value=planned,
                remedy="plan on devices in `trefoil status`",
            )  # fmt: skip
        plan: Plan = codec.from_proto(request.plan)
        if not plan.nodes:
            raise errors.PlanError("a plan without node plans", field="plan.nodes", value=(), remedy="take GetPlan's")
        routed = {route.family for route in plan.routes if any(not target.draining for target in route.targets)}
        if left_out := sorted(self._loop.core.objectives.keys() - routed):
            raise errors.PlanError(
                "families that have an objective and no route: no slice would serve them", field="plan.routes",
                value=left_out, remedy="route them",
            )  # fmt: skip
        self._refuse_stopped(routed)
        plan = replace(plan, objectives=view.objectives)
        check_parts(plan)
        check(plan, view.fleet, self._files.catalog, view.demand, view.objectives)
        check_power(view, plan)
        check_obeyed(view, plan)
        why = f"pinned by the operator; {plan.why}" if plan.why else "pinned by the operator"
        await self._loop.operate(replace(control, pinned=True), plan, why)
        return pb.PinResponse(revision=self._revision())

    async def Rollback(self, request: Any, context: Any) -> Any:
        """Roll back to the plan before, and freeze it."""
        self._may_act("Rollback")
        plans = self._loop.core.plans
        if len(plans) < 2:
            raise errors.NotFound("there is no earlier plan to go back to", remedy="pin a plan instead")
        before, now = plans[-2], plans[-1]
        view = self._loop.view()
        self._refuse_stopped(route.family for route in before.routes)
        plan = replace(before, objectives=view.objectives)
        check_parts(plan)
        check(plan, view.fleet, self._files.catalog, (), view.objectives)
        check_power(view, plan)
        check_obeyed(view, plan)
        why = f"rolled back from {_number(now)} to {_number(before)} and frozen; {before.why}"
        await self._loop.operate(replace(self._loop.core.control, frozen=True), plan, why)
        return pb.RollbackResponse(revision=self._revision(), why=why)

    async def Replan(self, request: Any, context: Any) -> Any:
        """Decide now, whatever the triggers say; answers the decision."""
        cause = request.cause or OPERATOR
        known = (OPERATOR, *CAUSES)
        if cause not in known:
            raise errors.InvalidInput("no such cause", field="cause", value=cause, remedy=errors.one_of(known, cause))
        if self._loop.core.control.mode == ActMode.OBSERVE:
            raise errors.InvalidInput(
                "mode observe plans nothing", field="mode", value="observe", remedy="set mode advise or act first"
            )
        if not self._loop.core.objectives:
            raise errors.NotFound("no family has an objective yet", remedy="trefoil objective set")
        current = self._loop.core.current
        if request.HasField("revision") and current is not None:
            seen: Revision = codec.from_proto(request.revision)
            if (seen.epoch, seen.number) != (current.revision.epoch, current.revision.number):
                raise errors.StaleRevision(
                    f"plan {_number(current)} is in force, not {seen.epoch}.{seen.number}", remedy="look again"
                )
        why = f"asked for: {request.why}" if request.why else "asked for"
        record = await self._loop.replan(Trigger(cause, why))
        return pb.ReplanResponse(
            decision_id=record.id,
            outcome=record.versions["outcome"],
            effect=record.versions["effect"],
            why=record.why,
            revision=self._revision(),
        )

    async def GetDecision(self, request: Any, context: Any) -> Any:
        """Decision record by id, with the plan that the planner made."""
        found = await self._loop.decision(request.id)
        if found is None:
            raise errors.NotFound(
                "no such decision is kept", field="id", value=request.id, remedy="trefoil state dump decisions"
            )
        record, made = found
        return pb.GetDecisionResponse(
            decision=codec.to_proto(record), made=codec.to_proto(made) if made is not None else None
        )

    async def LendDevice(self, request: Any, context: Any) -> Any:
        """Lend a device to a command that uses it alone, or renew its loan."""
        if not request.holder:
            raise errors.InvalidInput("missing", field="holder", remedy="name the caller")
        if not 1 <= request.lease_s <= LEASE_MAX_S:
            raise errors.InvalidInput(
                f"1 to {LEASE_MAX_S:g} s", field="lease_s", value=request.lease_s, remedy="ask again before it is over"
            )
        planned: PlannedDevice = codec.from_proto(request.device)
        if not planned.device:
            raise errors.InvalidInput("missing", field="device.device", remedy="name one of `trefoil status`")
        await self._files.refresh_for([h.family for part in planned.slices for h in part.hosted])
        view, alone = self._loop.view(), NodePlan(node=planned.device.partition("/")[0], devices=(planned,))
        check_parts(Plan(nodes=(alone,)))  # before anything is touched
        check_node(alone, view.fleet, self._files.catalog)  # with every family of the repository
        refused = view.fleet.unloadable
        for hosted in (h for part in planned.slices for h in part.hosted):
            if why := refused.get(f"{hosted.family}/{hosted.version}"):
                raise errors.SettingError(
                    f"cannot be loaded: {why}", field="device.slices.hosted", value=hosted.variant,
                    remedy="see `trefoil family check`",
                )  # fmt: skip
        cordon = next((d.cordon for n in view.fleet.nodes for d in n.devices if d.device == planned.device), "")
        if cordon and planned.device not in self._loop.core.loans.lent:
            raise errors.SettingError(f"out of service ({cordon})", field="device", value=planned.device)
        loan = Loan(planned, request.holder, self._loop.clock.monotonic_s() + request.lease_s)
        await self._loop.lend(loan, force=request.force)
        return pb.LendDeviceResponse(revision=self._revision())

    async def ReturnDevice(self, request: Any, context: Any) -> Any:
        """End a loan."""
        await self._loop.end_loan(request.device, request.holder)
        return pb.ReturnDeviceResponse()

    async def GetServed(self, request: Any, context: Any) -> Any:
        """What was served of late, by family and class."""
        window_s, served, base = self._loop.served()
        rows = [pb.Served(**asdict(one)) for one in served]
        return pb.GetServedResponse(window_s=window_s, served=rows, base_basis=base.basis, base_unknown=base.unknown)

    async def GetFleet(self, request: Any, context: Any) -> Any:
        """Nodes as they publish themselves, carbon now, and the workers of dispatchers."""
        return await self._stored.fleet()

    async def ListDecisions(self, request: Any, context: Any) -> Any:
        """Decisions that are kept, without what was known then."""
        return await self._stored.decisions(request.since.ToNanoseconds() / 1e9, request.newest)

    async def GetReport(self, request: Any, context: Any) -> Any:
        """Books by family and hour."""
        return await self._stored.report(request.since.ToNanoseconds() / 1e9, request.until.ToNanoseconds() / 1e9)

    # --- small parts --------------------------------------------------------------------------------------------------

    def _plan(self) -> Any:
        return _plan_message(IdentityKey(self._loop.core.current)) if self._loop.core.current is not None else None

    def _revision(self) -> Any:
        return codec.to_proto(self._loop.core.current.revision) if self._loop.core.current is not None else None

    def _may_act(self, what: str) -> None:
        mode = self._loop.core.control.mode
        if mode != ActMode.ACT:
            raise errors.InvalidInput(
                f"{what} rolls a plan out, mode {mode.name.lower()} touches nothing",
                field="mode",
                value=mode.name.lower(),
                remedy="set mode act first",
            )

    def _refuse_stopped(self, families: Iterable[str]) -> None:
        if stopped := sorted(self._loop.core.stopped.keys() & set(families)):
            raise errors.InvalidInput(STOPPED, field="family", value=stopped[0], remedy=start_command(stopped[0]))

    def _objective(self, family: str) -> Objective:
        self._refuse_stopped((family,))
        if family not in self._loop.core.objectives:
            raise errors.NotFound(
                f"no objective for family {family!r}",
                remedy=errors.one_of(
                    sorted(self._loop.core.objectives),
                    family,
                    also="a family of the repository: give it --accuracy-floor",
                ),
            )
        return self._loop.core.objectives[family]

    def _only_family(self) -> str:
        names = sorted(self._loop.core.objectives)
        if len(names) != 1:
            raise errors.InvalidInput("which family?", field="family", value="", remedy=f"one of {names}")
        return names[0]


def _reset_of(*requests: Any, max_watts: bool = False) -> ByCommand:
    """What ObjectiveChanges take back to the settings."""
    return ByCommand(tuple(each.objective.family for each in requests if each.reset), max_watts=max_watts)


def _watts(request: Any) -> float | None:
    """Cap on the fleet's planned power [W] of a request; None: it says nothing of it."""
    if not request.HasField("max_watts"):
        return None
    if not 0 <= request.max_watts < math.inf:
        raise errors.InvalidInput(
            "must be watts", field="max_watts", value=request.max_watts, remedy="above 0, or 0: no cap"
        )
    return float(request.max_watts)


def explain(view: PlanView, plan: Plan | None, objective: Objective, state: RolloutState, rolling: str) -> str:
    """Explanation of the plan in force, in words and numbers."""
    family = objective.family
    demand = next((d for d in view.demand if d.family == family), None)
    measured = next((m for m in view.measured if m.family == family), None)
    lines = []
    if plan is None:
        lines.append("no plan is in force yet")
    else:
        lines.append(f"plan {_number(plan)} ({plan.policy or plan.planner}): {plan.why}")
        expected = plan.expected.get(family)
        if expected is not None:
            lines.append(
                f"expected: {expected.grams_per_request * 1e3:.3g} mg and {expected.joules_per_request:.3g} J "
                f"a request, p95 {expected.latency_ms_p95:.0f} ms, accuracy {expected.accuracy:.4f}, "
                f"capacity {expected.capacity_per_s:.1f}/s"
            )
        if plan.degraded:
            lines.append(f"degraded: {plan.degraded}")
    if demand is not None:
        lines.append(f"demand: {demand.rate_per_s:.1f}/s, p90 {demand.rate_p90_per_s:.1f}/s")
    if measured is not None:
        grams = "not measured"
        if measured.grams_per_request is not None:
            grams = f"{measured.grams_per_request * 1e3:.3g} mg a request"
        lines.append(
            f"measured over {measured.window_s:g} s: p95 {measured.latency_ms_p95:.0f} ms, "
            f"{measured.slo_attainment:.1%} within {objective.slo_ms:g} ms{_tokens_text(measured, objective)}, "
            f"accuracy {measured.accuracy:.4f}, {grams}"
        )
    lines += _carbon_lines(view)
    if view.fleet.stale:
        lines.append(f"stale nodes, nothing moves there: {', '.join(view.fleet.stale)}")
    if plan is not None and plan.exploration:
        lines.append("this plan is for a measurement: a candidate, or devices that are lent")
    if state not in FINAL_STATES or state == RolloutState.HALTED:
        lines.append(f"rollout {state.name}: {rolling}")
    return "\n".join(lines)


def _tokens_text(measured: Measured, objective: Objective) -> str:
    """What the tokens of streams took, each against its objective; "" of a family without streams."""
    tokens, text = measured.tokens, ""
    found = ((tokens.ttft_ms_p95, tokens.ttft_attainment), (tokens.tpot_ms_p95, tokens.tpot_attainment))
    for (name, limit_ms, _), (p95_ms, share) in zip(objective.token_slo.each, found, strict=True):
        if p95_ms is not None:
            text += f", {name.upper()} p95 {p95_ms:.1f} ms"
        if limit_ms and share is not None:
            text += f" ({share:.1%} within {limit_ms:g} ms)"
    return text


def _carbon_lines(view: PlanView) -> list[str]:
    """Which reading and which forecast is planned by, and why no better one."""
    carbon, forecast = view.carbon, view.carbon_forecast
    rung = f", rung {carbon.rung}: {carbon.fallback_reason}" if carbon.rung or carbon.fallback_reason else ""
    lines = [f"carbon: {carbon.intensity_g_per_kwh:.0f} g/kWh in {carbon.series.zone}{rung}"]
    if forecast is not None:
        short = f", {forecast.fallback_reason}" if forecast.fallback_reason else ""
        known = f"{len(forecast.bands)} intervals ahead" if forecast.bands else "not planned by"
        age_s = max(0.0, view.now_s - forecast.issued_at_s)
        lines.append(f"forecast: {forecast.model}, issued {age_s:.0f} s ago, {known}{short}")
    return lines


def exploration(explorer: Explorer, plan: Plan | None) -> Any:
    """Exploration under way with its costs, as a message. It continues until what it decided is in force."""
    under_way = explorer.run is not None or (plan is not None and plan.exploration)
    return pb.Exploration(under_way=under_way, text=explorer.text(), **explorer.totals.plain())


@lru_cache(maxsize=2)  # made once, however many watch
def _plan_message(plan: IdentityKey[Plan]) -> Any:
    return codec.to_proto(plan.value)


def _wire(mode: ActMode) -> Any:
    """The enum value as the generated stubs take it."""
    return int(mode)


def _number(plan: Plan) -> str:
    return f"{plan.revision.epoch}.{plan.revision.number}"

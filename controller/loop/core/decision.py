"""Decision on a view: a plan to roll out, an advice, or nothing, with the reason.

Source: DESIGN section 5 (modes of operation, Freeze, Pin, Rollback); rungs ours.
Data: the view, the trigger, how far the controller may go (`ControlState`), a planner.
Decision: `Verdict`. Nothing is numbered or written here.
Formulation: rung 0 is the planner's plan. Rung 1 is its plan, degraded by a limit that it names. Rung 2 is the last
good plan: the planner found no plan, or `check`, `check_power` (the fleet's watt cap) or `check_obeyed` refused it.
OBSERVE does not plan. ADVISE, a frozen and a pinned controller plan, predict the saving against what runs, and touch
nothing.
Deviations: none.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from controller.observe.core.plannable import check_obeyed
from controller.observe.core.triggers import Trigger
from controller.planners.fleet_power import check_power
from trefoil.core.brains import Candidate, Decision, Planner, PlanView
from trefoil.core.errors import PlanError, TrefoilError
from trefoil.core.fleet import DeviceState
from trefoil.core.objective import ActMode
from trefoil.core.parts import as_live_planner
from trefoil.core.plan import Plan, PlannedDevice
from trefoil.core.plan_check import check, sealed
from trefoil.core.units import grams

NEW, UNCHANGED, DEGRADED, FAILED, ADVISED = "new_plan", "unchanged", "degraded", "failed", "advised"
CANDIDATE: Final = "candidate"  # of an exploration: deployed to be measured
RUNG_PLANNED: Final = 0
RUNG_DEGRADED: Final = 1
RUNG_KEPT: Final = 2


@dataclass(frozen=True, slots=True)
class ControlState:
    """Mode of control as operators set it. `pinned`: an operator's plan is in force until it is unpinned."""

    mode: ActMode = ActMode.ACT
    frozen: bool = False
    pinned: bool = False

    def plain(self) -> dict[str, Any]:
        """These values as they are saved."""
        return {"mode": self.mode.name, "frozen": self.frozen, "pinned": self.pinned}

    @property
    def hold_reason(self) -> str:
        """Reason why plans are not carried out now; "" when they are."""
        if self.mode == ActMode.ADVISE:
            return "mode advise"
        if self.mode == ActMode.OBSERVE:
            return "mode observe"
        return "frozen" if self.frozen else "a plan is pinned" if self.pinned else ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on one decision. `plan` is to be rolled out; `advised` was not carried out."""

    outcome: str
    why: str
    decision: Decision | None
    plan: Plan | None = None
    advised: Plan | None = None
    rung: int = RUNG_PLANNED
    degraded: str = ""

    @property
    def digest(self) -> str:
        """Digest of the plan that the planner made, "" for none: what `trefoil replay` compares."""
        made = self.decision.plan if self.decision else None
        return made.content_digest if made else ""


def run_planner(view: PlanView, planner: Planner, seed: int) -> Decision:
    """Run the planner once (`plan`), the same way live and in a replay; what it cannot do is a degraded decision. Where
    no family is in service no planner is asked."""
    if not view.objectives:
        return _nothing_served(view)
    try:
        return planner.plan(view, np.random.default_rng(seed))
    except TrefoilError as error:
        return Decision(None, f"the planner found no plan: {error}", float("inf"), str(error))


def _nothing_served(view: PlanView) -> Decision:
    """Every device of the plan in force sleeps."""
    nodes, why = (view.current.nodes if view.current else ()), "no family is in service"
    asleep = (
        replace(
            node, devices=tuple(PlannedDevice(d.device, DeviceState.ASLEEP, governor=d.governor) for d in node.devices)
        )
        for node in nodes
    )
    return Decision(Plan(nodes=tuple(sealed(node, node.revision) for node in asleep), why=why), why, math.inf)


def ask_planner(view: PlanView, planner: Planner, seed: int) -> Candidate | Decision:
    """Ask a planner that measures for its next step (`ask`), the same way live and in a replay."""
    live = as_live_planner(planner)
    assert live is not None, f"{planner} has no ask"
    try:
        return live.ask(view, np.random.default_rng(seed))
    except TrefoilError as error:
        return Decision(None, f"the planner found no plan: {error}", float("inf"), str(error))


def judge(view: PlanView, trigger: Trigger, decision: Decision, control: ControlState) -> Verdict:
    """Judge a planner's decision: roll out, advise, keep the plan, or refuse, with the reason."""
    why = f"{trigger.cause}: {trigger.why}; {decision.why}"
    plan = decision.plan
    if plan is None:
        kept = "the last good plan stays" if view.current else "there is no plan to keep"
        degraded = decision.degraded
        text = f"{why}; rung {RUNG_KEPT}: {kept}" + (f", because {degraded}" if degraded else "")
        outcome = DEGRADED if degraded else UNCHANGED
        return Verdict(outcome, text if degraded else why, decision, None, None, RUNG_KEPT if degraded else 0, degraded)
    try:
        check(plan, view.fleet, view.catalog, view.demand, view.objectives)
        check_power(view, plan)
        check_obeyed(view, plan)
    except PlanError as error:
        text = f"{why}; rung {RUNG_KEPT}: the planner's plan is refused ({error}), the last good plan stays"
        return Verdict(FAILED, text, decision, None, None, RUNG_KEPT, str(error))
    degraded = plan.degraded or decision.degraded
    plan = replace(plan, why=why, degraded=degraded)
    rung = RUNG_DEGRADED if degraded else RUNG_PLANNED
    if degraded:
        why = f"{why}; rung {RUNG_DEGRADED}: {degraded}"
    if view.current is not None and plan.content_digest == view.current.content_digest:
        return Verdict(UNCHANGED, f"{why}; the plan stays as it is", decision, None, None, rung, degraded)
    if control.hold_reason:
        return Verdict(
            ADVISED,
            f"{why}; {control.hold_reason}: {predicted_saving(view, plan)}",
            decision,
            None,
            plan,
            rung,
            degraded,
        )
    return Verdict(NEW, why, decision, plan, None, rung, degraded)


def reconfigures(current: Plan | None, plan: Plan) -> bool:
    """Whether a plan changes what any node has to do, and not the shares alone."""
    before = {node.node: node.content_digest for node in current.nodes} if current else {}
    return {node.node: node.content_digest for node in plan.nodes} != before


def predicted_saving(view: PlanView, plan: Plan) -> str:
    """Saving that a plan is predicted to bring against what runs, in words; measured grams of what runs come first."""
    measured = {m.family: m.grams_per_request for m in view.measured}
    parts = []
    for family, expected in sorted(plan.expected.items()):
        now = measured.get(family)
        basis = "measured"
        if now is None and view.current is not None and family in view.current.expected:
            joules = view.current.expected[family].joules_per_request
            now, basis = grams(joules, view.carbon.intensity_g_per_kwh, view.pue), "predicted"
        if not now:
            parts.append(f"{family}: {expected.grams_per_request:.3g} g/request, nothing runs to compare with")
            continue
        ratio = 1 - expected.grams_per_request / now
        parts.append(
            f"{family}: {expected.grams_per_request:.3g} g/request instead of {now:.3g} ({basis}), "
            f"{'saves' if ratio >= 0 else 'costs'} {abs(ratio):.1%}"
        )
    return "; ".join(parts) or "no prediction"

"""State of an exploration: phase, candidates with their outcomes, what all of it has cost, what may be deployed."""

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from controller.observe.core.plannable import check_obeyed
from controller.observe.core.triggers import Trigger
from controller.planners.fleet_power import check_power
from controller.rollout.core.interim_routes import capacity_of
from controller.rollout.core.rollout_inputs import rollout_inputs, rollout_refusal
from controller.settings import ExploreSettings
from trefoil.core.brains import Candidate, Measurement, PlanView
from trefoil.core.demand import LoadWindow
from trefoil.core.errors import PlanError
from trefoil.core.fleet import DeviceState, SliceState
from trefoil.core.plan import Plan
from trefoil.core.plan_check import check

OUTGROWN: Final = ("load", "slo", "loss")  # after these, the plan of before does not suit any more
MEASURED, REFUSED, HALTED = "measured", "refused", "halted"
BROKEN_OFF, INTERRUPTED, DECIDED = "broken_off", "interrupted", "decided"


class Phase(StrEnum):
    """Phase of an exploration."""

    ASK = "asking the planner"
    DEPLOY = "about to deploy"
    ROLL = "rolling out"
    SETTLE = "settling"
    MEASURE = "measuring"
    METER = "waiting for the meter"
    BACK = "going back"


@dataclass(slots=True)
class Evaluation:
    """Evaluation of one candidate: its outcome and what was measured."""

    number: int
    candidate: Candidate
    outcome: str = ""  # "" while it is under way
    why: str = ""
    measurement: Measurement | None = None

    def __str__(self) -> str:
        text = f"{self.number}: {self.candidate.why}: {self.outcome or 'under way'}"
        if self.why:
            text += f" ({self.why})"
        if self.outcome == MEASURED and self.measurement is not None:
            for m in self.measurement.measured:
                joules = "" if m.joules_per_request is None else f", {m.joules_per_request:.3g} J"
                text += f" {m.family} p95 {m.latency_ms_p95:.0f} ms, accuracy {m.accuracy:.4f}{joules}"
        return text


@dataclass(slots=True)
class ExplorationTotals:
    """Totals of exploring: time, joules and violations of one exploration, or of all since the controller first ran."""

    explorations: int = 0
    evaluations: int = 0
    refused: int = 0
    broken_off: int = 0
    spent_s: float = 0.0
    spent_j: float = 0.0
    violations: int = 0

    def charge(self, spent_s: float, spent_j: float, violations: int) -> None:
        """Add what was spent since the last charge."""
        self.spent_s += spent_s
        self.spent_j += spent_j
        self.violations += violations

    def count(self, outcome: str) -> None:
        """Add one candidate: deployed, or refused before that."""
        self.evaluations += outcome in (MEASURED, BROKEN_OFF, HALTED)
        self.refused += outcome == REFUSED
        self.broken_off += outcome in (BROKEN_OFF, HALTED)

    def plain(self) -> dict[str, Any]:
        """Fields by name, for disk, records and the wire."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(slots=True)
class Exploration:
    """Exploration that is under way. Times are UTC, as those of windows and samples are."""

    trigger: Trigger
    before: Plan | None
    began_s: float
    phase: Phase = Phase.ASK
    deployed: Plan | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    totals: ExplorationTotals = field(default_factory=ExplorationTotals)
    charged_from_s: float = 0.0  # up to here time is booked,
    windows_from_s: float = 0.0  # requests (windows come later than what they tell of),
    metered_from_s: float = 0.0  # and energy
    seen_s: float = 0.0
    settled_s: float = math.inf  # windows that begin later count
    found: tuple[LoadWindow, ...] = ()
    waited_s: float = 0.0  # without any load: not time of the exploration
    waits_min: float = math.inf  # the shortest queue since it began,
    drained_s: float = -math.inf  # and when it was seen

    @property
    def now(self) -> Evaluation:
        """Evaluation under way, or the last one."""
        return self.evaluations[-1]

    @property
    def cold(self) -> bool:
        """Nothing served before, and the first candidate is not up and settled: that requests wait is not its doing."""
        first = all(one.outcome == REFUSED for one in self.evaluations[:-1])
        return self.before is None and first and self.phase in (Phase.ROLL, Phase.SETTLE)

    def drains(self, waits: float, borne: float, now_s: float, settings: ExploreSettings) -> bool:
        """Whether a settling candidate gets time for the queue that it found: of `waits` requests it bears `borne`.

        `settle_max_s` from its rollout on; where nothing served before, from the last time that the queue was shorter
        than ever.
        """
        if waits < self.waits_min:
            self.waits_min, self.drained_s = waits, now_s
        from_s = self.settled_s - settings.settle_s
        if self.cold:
            from_s = max(from_s, self.drained_s)
        return waits > borne and now_s < from_s + settings.settle_max_s


def fallback_plan(run: Exploration, view: PlanView) -> Plan | None:
    """Plan to fall back on: the one before, or one measured within its SLOs; None: what is deployed has to do."""
    quantile = {o.family: o.slo_quantile for o in view.objectives}
    met = []
    for one in run.evaluations:
        measured = one.measurement.measured if one.measurement is not None and one.outcome == MEASURED else ()
        if measured and all(m.slo_attainment >= quantile.get(m.family, 0.0) for m in measured):
            met.append((sum(m.joules_per_request or 0.0 for m in measured), one.number, one.candidate.plan))
    found = [plan for _, _, plan in sorted(met, key=lambda row: row[:2])]
    before = [run.before] if run.before is not None else []
    order = [*found, *before] if run.trigger.cause in OUTGROWN else [*before, *found]
    return next((plan for plan in order if not deployment_refusal(view, plan)), None)


def unplanned_slices_stand(view: PlanView) -> bool:
    """Whether slices still stand that the plan in force has no place for, those of a rollout that was given up, say.

    They go. Until then a candidate that needs their room would be refused.
    """
    if view.current is None:
        return False
    planned = {d.device: {part.key for part in d.slices} for node in view.current.nodes for d in node.devices}
    return any(
        part.key not in planned[device.device]
        for node in view.fleet.nodes
        if node.node not in view.fleet.stale
        for device in node.devices
        if device.device in planned and device.state != DeviceState.LOST
        for part in device.slices
        if part.state not in (SliceState.GONE, SliceState.FAILED)
    )


def text(run: Exploration, ended: str = "") -> str:
    """Exploration in words."""
    t = run.totals
    head = f"exploring for {run.trigger.cause}: {ended or run.phase.value}"
    spent = f"{t.evaluations} evaluated, {t.refused} refused, {t.broken_off} broken off; {t.spent_s:.0f} s, "
    spent += f"{t.spent_j:.0f} J, {t.violations} requests out of the SLO"
    return "\n".join([f"{head} ({spent})", *(f"  candidate {e}" for e in run.evaluations)])


def deployment_refusal(view: PlanView, plan: Plan) -> str:
    """Reason why a plan may not be deployed now; "" when it may. Its SLO is the planner's business, capacity is not."""
    return deployment_refusal_by_family(view, plan)[0]


def deployment_refusal_by_family(view: PlanView, plan: Plan) -> tuple[str, str]:
    """Reason as of `deployment_refusal`, and the family whose part is too small; "" where it is the plan as a whole."""
    try:
        check(replace(plan, degraded=plan.degraded or "a candidate"), view.fleet, view.catalog, (), view.objectives)
        check_power(view, plan)
        check_obeyed(view, plan)
    except PlanError as error:
        return str(error), ""
    if view.current is not None and plan.content_digest == view.current.content_digest:
        return "", ""  # it runs already: what it does will be seen
    inputs = rollout_inputs(view, relaxed=True)
    parts = [p for node in plan.nodes for d in node.devices for p in d.slices]
    for demand in view.demand:
        if not any(r.family == demand.family for r in view.catalog.rows):
            continue  # no profile: nothing is known before it is measured
        carries = capacity_of(demand.family, parts, inputs)
        if carries < inputs.needs.get(demand.family, 0.0):
            short = f"carries {carries:.1f}/s of {demand.family}, the load needs {demand.rate_per_s:.1f}/s"
            return short, demand.family
    return rollout_refusal(view, plan), ""

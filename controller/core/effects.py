"""What a core wants done, as values; the answer to each is what a shell sends back.

A core's method is a generator: it yields one effect, is given its answer, and goes on; `return` ends the step. What
cannot be done is raised inside it (`errors.Fenced`, `errors.StateUnavailable`, `errors.Unavailable`, ...), so that a
step that was not recorded leaves nothing behind that says it was. Time comes with each answer, in its `CoreTime`.
Effects are not frozen: a simulated year makes half a million, and a frozen one takes three times as long to make.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from controller.core.decide import Verdict
from controller.core.rollout import FleetSnapshot
from controller.core.triggers import Trigger
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.common import Revision
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.objective import Objective
from trefoil.core.plan import NodePlan, Plan, Rollout

T = TypeVar("T")
Steps = Generator[Any, Any, T]
"""A core's step: yields effects, is sent their answers, returns T."""
Level = Literal["info", "warning"]


@dataclass(slots=True)
class CoreTime:
    """The time that a core goes by; its shell sets it before each step and with each answer."""

    now_s: float = 0.0
    """UTC."""
    monotonic_s: float = 0.0
    """For what is waited for."""


@dataclass(frozen=True, slots=True)
class PlannerAnswer:
    """What a planner answered, and all that is needed to ask it again. `memory` is JSON from before; "" = it has none.

    `asked`: a step of an exploration (`ask`), not a whole decision (`plan`).
    """

    step: Candidate | Decision
    seed: int
    solve_ms: float = 0.0
    wall_limit_hit: bool = False
    memory: str = ""
    asked: bool = False

    @property
    def decision(self) -> Decision:
        """The step, where it is a decision."""
        assert isinstance(self.step, Decision), self.step
        return self.step

    @property
    def versions(self) -> dict[str, str]:
        """What a record keeps of it beside view and seed."""
        found = {"memory": self.memory} if self.memory else {}
        return found | ({"call": "ask"} if self.asked else {})


# --- of control and exploration --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Viewed:
    """The view that this step goes by."""

    view: PlanView


@dataclass(slots=True)
class CallPlanner:
    """Call the planner. Answer: a `PlannerAnswer`."""

    view: PlanView
    seed: int
    ask: bool = False


@dataclass(slots=True)
class TellPlanner:
    """Tell a planner that measures what came of its candidate, and keep what it remembers."""

    candidate: Candidate
    measurement: Measurement


@dataclass(slots=True)
class SavePlannerMemory:
    """Keep what the planner remembers."""


@dataclass(slots=True)
class OpenRecords:
    """Number decisions under a new epoch. Answer: the highest number that is kept of this epoch already, 0 for none."""

    epoch: int


@dataclass(slots=True)
class RecordDecision:
    """Keep a decision. Raises Fenced, StateUnavailable: nothing may come of it."""

    id: str
    view: PlanView
    trigger: Trigger
    thought: PlannerAnswer
    verdict: Verdict
    effect: str
    """reconfigure, reroute, or the outcome."""
    plan: Plan | None
    """What it led to."""
    versions: Mapping[str, str]
    causes: Mapping[str, int]
    reconfigurations: Mapping[str, int]


@dataclass(slots=True)
class WriteObjectives:
    """Put objectives where everybody reads them. Raises Fenced, StateUnavailable."""

    objectives: tuple[Objective, ...]


@dataclass(slots=True)
class Save:
    """Keep a value on disk under a name."""

    name: str
    value: Any


@dataclass(slots=True)
class StartRollout:
    """Roll a numbered plan out, in place of what is under way."""

    plan: Plan
    why: str


@dataclass(slots=True)
class StopRollout:
    """End the rollout under way where that is safe."""


@dataclass(slots=True)
class Republish:
    """Write what stands again, under a new revision. Raises Fenced, StateUnavailable."""

    revision: Revision


@dataclass(slots=True)
class WakeLoop:
    """Take the next step at once instead of at the next period."""


@dataclass(slots=True)
class NotifyWatchers:
    """Tell watchers that plan, rollout or mode has changed."""


@dataclass(slots=True)
class CandidateEvaluated:
    """A candidate's end: what became of it and what it cost."""

    at_s: float
    trigger: Trigger
    candidate: Candidate
    outcome: str
    why: str
    measurement: Measurement
    text: str


@dataclass(slots=True)
class Log:
    """One line of the log."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    level: Level = "info"


@dataclass(slots=True)
class AddMetric:
    """Move a metric: add to a counter, or set a gauge."""

    name: str
    amount: float = 1.0
    labels: Mapping[str, str] = field(default_factory=dict)
    gauge: bool = False


# --- of an exploration, to the control core that it belongs to -------------------------------------------------------


@dataclass(slots=True)
class RecordCandidate:
    """Record a candidate; a refused one is not deployed. Answer: its plan, numbered. Raises as `RecordDecision`."""

    view: PlanView
    trigger: Trigger
    thought: PlannerAnswer
    refused: str


@dataclass(slots=True)
class Deploy:
    """Put a plan in force in place of the candidate before it, and roll it out. Answer: the plan in force then."""

    plan: Plan


@dataclass(slots=True)
class ConcludeExploration:
    """Record a decision and put in force what it has become. Answer: the plan in force then. Raises as
    `RecordDecision`.
    """

    view: PlanView
    trigger: Trigger
    thought: PlannerAnswer
    decision: Decision
    versions: Mapping[str, str]


@dataclass(slots=True)
class NextSeed:
    """Answer: the seed of a new decision."""


# --- of a rollout ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class QueryAgents:
    """See the status of these nodes as their agents have it now, not as it was last written."""

    nodes: Mapping[str, NodeStatus]


@dataclass(slots=True)
class FindPath:
    """The way from what stands to a plan. Answer: a `RolloutPath`."""

    view: PlanView
    snapshot: FleetSnapshot
    plan: Plan


@dataclass(slots=True)
class RefreshStatuses:
    """Read what nodes and dispatchers say now. Raises StateUnavailable."""


@dataclass(slots=True)
class Publish:
    """Write routes, where the rollout stands, and what a node was commanded; all or nothing.

    `drained`: slices that get no new request by this plan, and stop when they are idle.
    Raises Fenced, StateUnavailable.
    """

    plan: Plan | None = None
    rollout: Rollout | None = None
    node: NodePlan | None = None
    drained: frozenset[SliceKey] = frozenset()


@dataclass(slots=True)
class CommandNode:
    """Hand a node its desired state. Answer: whether it changes anything.

    Raises Fenced: the agent obeys a newer epoch; Unavailable, InvalidInput.
    """

    status: NodeStatus
    plan: NodePlan


@dataclass(slots=True)
class Wait:
    """Look again when something may have changed, at the latest at a time of the monotonic clock."""

    until_s: float = math.inf


@dataclass(slots=True)
class TimeMetric:
    """How long something took, for its histogram [s]."""

    name: str
    seconds: float

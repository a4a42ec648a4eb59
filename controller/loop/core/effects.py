"""Effects: what a core wants done, as values; the answer to each is what a shell sends back.

A core's method is a generator: it yields one effect, is given its answer, and goes on; `return` ends the step. What
cannot be done is raised inside it (`errors.Fenced`, `errors.StateUnavailable`, `errors.DiskUnavailable`, ...), so
that a step that was not recorded leaves nothing behind that says it was. Time comes with each answer (`CoreTime`).
Effects are not frozen: a simulated year makes half a million, and a frozen one takes three times as long to make.
"""

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from controller.loop.core.decision import Verdict
from controller.loop.core.triggers import Trigger
from controller.rollout.core.path import FleetSnapshot
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
    """Time that a core goes by [s]; its shell sets it before each step and with each answer."""

    now_s: float = 0.0
    """UTC."""
    monotonic_s: float = 0.0
    """For what is waited for."""


@dataclass(frozen=True, slots=True)
class PlannerAnswer:
    """Answer of a planner with all that is needed to ask again. `memory` is JSON from before; "" = it has none.

    `is_exploration`: a step of an exploration (`ask`), not a whole decision (`plan`).
    """

    step: Candidate | Decision
    seed: int
    solve_ms: float = 0.0
    wall_limit_hit: bool = False
    memory: str = ""
    is_exploration: bool = False

    @property
    def decision(self) -> Decision:
        """The step, where it is a decision."""
        assert isinstance(self.step, Decision), self.step
        return self.step

    @property
    def versions(self) -> dict[str, str]:
        """What a record keeps of it beside view and seed."""
        found = {"memory": self.memory} if self.memory else {}
        return found | ({"call": "ask"} if self.is_exploration else {})


# --- of control and exploration --------------------------------------------------------------------------------------


@dataclass(slots=True)
class UseView:
    """The view that this step goes by."""

    view: PlanView


@dataclass(slots=True)
class CallPlanner:
    """Call the planner on a view (`plan`, or `ask` of one that measures). Answer: a `PlannerAnswer`."""

    view: PlanView
    seed: int
    ask: bool = False


@dataclass(slots=True)
class TellPlanner:
    """Tell a planner that measures the result of its candidate, and save its memory."""

    candidate: Candidate
    measurement: Measurement


@dataclass(slots=True)
class SavePlannerMemory:
    """Save what the planner remembers on disk."""


@dataclass(slots=True)
class OpenRecords:
    """Number decisions under a new epoch. Answer: the highest number that is kept of this epoch already, 0 for none."""

    epoch: int


@dataclass(slots=True)
class RequireRoom:
    """Require room on the disk before deciding. Raises DiskUnavailable: what came of it could not be kept."""


@dataclass(slots=True)
class RecordDecision:
    """Record a decision. Raises Fenced, StateUnavailable, DiskUnavailable: nothing may come of it."""

    id: str
    view: PlanView
    trigger: Trigger
    answer: PlannerAnswer
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
    """Write objectives to Redis. Raises Fenced, StateUnavailable."""

    objectives: tuple[Objective, ...]


@dataclass(slots=True)
class Save:
    """Save values on disk by name, all or none. Raises DiskUnavailable: nothing may come of them."""

    values: Mapping[str, Any]


@dataclass(slots=True)
class SaveLater:
    """Save a value on disk under a name, as soon as there is room; a restart before that does without."""

    name: str
    value: Any


@dataclass(slots=True)
class StartRollout:
    """Start the rollout of a numbered plan, in place of the one under way."""

    plan: Plan
    why: str


@dataclass(slots=True)
class StopRollout:
    """Stop the rollout under way where that is safe."""


@dataclass(slots=True)
class Republish:
    """Rewrite plan, rollout and node plans under a new revision. Raises Fenced, StateUnavailable."""

    revision: Revision


@dataclass(slots=True)
class WakeLoop:
    """Wake the loop: the next step at once instead of at the next period."""


@dataclass(slots=True)
class NotifyWatchers:
    """Notify watchers that plan, rollout or mode has changed."""


@dataclass(slots=True)
class CandidateEvaluated:
    """Evaluation of a candidate has ended: its outcome and its cost."""

    at_s: float
    trigger: Trigger
    candidate: Candidate
    outcome: str
    why: str
    measurement: Measurement
    text: str


@dataclass(slots=True)
class Log:
    """Log one line with an event name and fields."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    level: Level = "info"


@dataclass(slots=True)
class AddMetric:
    """Metric: add to a counter, or set a gauge."""

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
    answer: PlannerAnswer
    refusal: str


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
    answer: PlannerAnswer
    decision: Decision
    versions: Mapping[str, str]


@dataclass(slots=True)
class NextSeed:
    """Seed of a new decision. Answer: the seed."""


# --- of a rollout ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class QueryAgents:
    """Query node statuses from the agents themselves, not as they were last written."""

    nodes: Mapping[str, NodeStatus]


@dataclass(slots=True)
class FindPath:
    """Find the rollout path from what stands to a plan. Answer: a `RolloutPath`."""

    view: PlanView
    snapshot: FleetSnapshot
    plan: Plan


@dataclass(slots=True)
class RefreshStatuses:
    """Refresh statuses of nodes and acks of dispatchers. Raises StateUnavailable."""


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
    """Command a node to its desired state. Answer: whether it changes anything.

    Raises Fenced: the agent obeys a newer epoch; Unavailable, InvalidInput.
    """

    status: NodeStatus
    plan: NodePlan


@dataclass(slots=True)
class Wait:
    """Wait for a change, at the latest until a time of the monotonic clock [s]."""

    until_s: float = math.inf


@dataclass(slots=True)
class TimeMetric:
    """Duration for the histogram of a metric [s]."""

    name: str
    seconds: float

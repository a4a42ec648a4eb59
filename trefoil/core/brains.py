"""Protocols and values between brains and shells: what a brain is given, and what it answers.

A brain is pure and synchronous: values in, a decision and its reason out. Time enters as `now_s`, chance as a
`numpy.random.Generator`. The canonical JSON of a `PlanView` is what `DecisionRecord.view_json` holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

from trefoil.core.carbon import CarbonForecast, CarbonReading
from trefoil.core.catalog import Catalog
from trefoil.core.cpus.use import CpuHistory, CpuUse
from trefoil.core.demand import Demand, LoadForecast, Measured
from trefoil.core.fleet import FleetState, SliceKey
from trefoil.core.jobs.planned import FlexibleDemand
from trefoil.core.objective import Objective
from trefoil.core.plan import Plan, Route

if TYPE_CHECKING:
    from numpy.random import Generator


@dataclass(frozen=True, slots=True)
class BudgetState:
    """Accuracy budget: what a family's window has served so far. `accuracy_sum` adds each answer's variant accuracy.

    `day`: requests of each hour of the day (UTC), as it last was; empty until a whole day is known.
    """

    family: str
    window_s: float
    elapsed_s: float
    requests: int
    accuracy_sum: float
    day: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanView:
    """View of a planner: all that it may know. `carbon_history`, oldest first, is the distribution of intensity.

    `carbon` is the reading of every zone that has none of its own in `zones` (one per zone, by `series.zone`).
    `max_watts` caps the planned power of the fleet (`controller/planners/fleet_power.py`); 0 = no cap.
    `cpu_uses` and `cpu_histories`: what slices of CPUs use of their cores, and used for days.
    """

    now_s: float
    fleet: FleetState
    catalog: Catalog
    objectives: tuple[Objective, ...]
    demand: tuple[Demand, ...]
    carbon: CarbonReading
    carbon_forecast: CarbonForecast | None
    measured: tuple[Measured, ...]
    current: Plan | None
    trigger: str
    move_horizon_s: float
    pue: float
    budgets: tuple[BudgetState, ...] = ()
    carbon_history: tuple[CarbonReading, ...] = ()
    zones: tuple[CarbonReading, ...] = ()
    max_watts: float = 0.0
    cpu_uses: tuple[CpuUse, ...] = ()
    cpu_histories: tuple[CpuHistory, ...] = ()
    flexible: tuple[FlexibleDemand, ...] = ()
    """What jobs run in this hour: demand without a latency objective."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision of a planner. `plan` None keeps the current one; `degraded`: rung and limit not met, "" = none."""

    plan: Plan | None
    why: str
    next_tick_at_s: float
    degraded: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate that a live planner wants measured for at least `requests_min` requests, at most `measure_s`."""

    plan: Plan
    why: str
    measure_s: float
    requests_min: int = 200


@dataclass(frozen=True, slots=True)
class Measurement:
    """Measurement of a candidate, and what it cost."""

    measured: tuple[Measured, ...]
    spent_s: float
    spent_j: float
    violations: int


@dataclass(slots=True)
class Ticket:
    """Ticket of one request, as a router sees it: never its payload.

    `min_accuracy` is what its client asked for, 0.0 = nothing. `slo_ms` is what it asked for, else the objective of its
    class, else its family's; 0.0 = none is known. `priority` is Triton's: 1 comes first, 0 is the default.
    `length_score` is the predicted class of its answer's length, 0 the shortest, and None without a prediction.
    `flow` is what shares a full queue: its tenant, or its client's host where tenants are not known, and its
    connection. `weight` is its tenant's share against others'. `cost_s` is the time of requests like it on a slice.

    Mutable, but never changed: each simulated request makes one, and a frozen one takes ten times as long to make.
    """

    id: int
    family: str
    slo_class: str
    tenant: str
    items: int
    bytes: int
    arrived_s: float
    deadline_s: float | None
    min_accuracy: float
    priority: int
    sequence_id: str
    sequence_start: bool
    sequence_end: bool
    length_score: float | None
    slo_ms: float = 0.0
    flow: tuple[str, str] = ("", "")
    weight: float = 1.0
    cost_s: float = 0.01


@dataclass(frozen=True, slots=True)
class Pick:
    """Pick of a router: where a request goes, and why."""

    slice: SliceKey
    variant: str
    stage: int
    why: str


@dataclass(slots=True)
class Outcome:
    """Outcome of a picked request. `executed` is False when the slice certainly never ran it. Mutable, as `Ticket`."""

    code: str
    latency_ms: float
    service_ms: float
    tokens_out: int
    executed: bool


@dataclass(frozen=True, slots=True)
class GovernedStage:
    """Stage that a clock governs, on one slice. Latencies, the mean and quantiles, are those of the newest `samples`
    answers, as they would be at the clock of now; `sensitivity_weight`: the part of its time that follows the clock.
    """

    family: str
    stage: int
    slo_ms: float
    latency_ms: float
    sensitivity_weight: float
    observed_at_s: float
    latency_ms_p95: float = 0.0
    samples: int = 0
    slo_quantile: float = 0.95
    latency_ms_slo: float = 0.0  # at `slo_quantile`
    attained: float = 1.0  # share within the SLO of the last minute's answers, whatever the clock was
    attained_of: int = 0


@dataclass(frozen=True, slots=True)
class GovernorView:
    """View of a governor: all that it may know of its device."""

    now_s: float
    device: str
    clock_mhz: int
    range_mhz: tuple[int, int]
    supported_mhz: tuple[int, ...]
    stages: tuple[GovernedStage, ...]
    honoured: bool
    windows_age_s: float


@dataclass(frozen=True, slots=True)
class ClockDecision:
    """Decision of a governor: the clock until `next_tick_at_s`; `scale_out` asks the controller for capacity."""

    clock_mhz: int
    why: str
    next_tick_at_s: float
    scale_out: bool


class Planner(Protocol):
    """Planner of the fleet: a pure function of its view."""

    def plan(self, view: PlanView, rng: "Generator") -> Decision:
        """Plan the fleet: the decision, with its reason. Equal views and generators give equal decisions."""
        ...


class LivePlanner(Planner, Protocol):
    """Planner that measures candidates on the running system (or a simulator of it).

    While `asks(view)` is true the shell calls `ask`, deploys the candidate, measures it, calls `tell`, and asks again
    until a `Decision` comes: its plan is the best one found, complete (None: keep what runs). Otherwise, where there
    are profiles to explore on, `plan` does all of it in one call. `tell` of a candidate that was refused, or whose
    measurement was broken off, gets attainment 0 and an infinite latency.

    A view may differ from ask to ask in everything: time, fleet, intensity, demand. What was measured is remembered;
    `memory` is all that is needed to continue from here elsewhere (JSON: dicts, lists, strings, numbers, None), so that
    a restarted controller does not measure again and a decision replays: `recall(memory before an ask)`, then `ask`
    with the same view and an equal generator gives the same step.
    """

    def asks(self, view: PlanView) -> bool:
        """Tell whether candidates are to be measured for this view."""
        ...

    def ask(self, view: PlanView, rng: "Generator") -> Candidate | Decision:
        """Ask for the next candidate to measure; a Decision ends the exploration."""
        ...

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """Tell what a candidate measured."""
        ...

    def memory(self) -> Mapping[str, Any]:
        """Memory to continue from elsewhere, as JSON values."""
        ...

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Recall a memory, in place of all that was measured so far."""
        ...


class Queue(Protocol):
    """Queue of waiting requests, in lanes of the router's choice; all lanes share a bound in requests and bytes.

    `waiting` and `bytes` are what it holds. A lane is any hashable value. `check` raises
    `dispatcher.queues.fifo.QueueFull` (a `TrefoilError`) where one more ticket would exceed the bound. `push` never
    refuses. It puts a ticket that comes back at the place that its arrival gives it.
    """

    waiting: int
    bytes: int

    def limit(self, requests_max: int, bytes_max: int) -> None:
        """Limit what may wait, in requests and bytes; 0 = the queue's default."""
        ...

    def check(self, ticket: Ticket) -> None:
        """Check that one more ticket has room.

        Raises:
            QueueFull: it would exceed the bound.
        """
        ...

    def push(self, lane: Any, ticket: Ticket) -> None:
        """Push a ticket into a lane."""
        ...

    def pop(self, lane: Any) -> Ticket | None:
        """Pop the ticket of a lane whose turn is first; None = the lane is empty."""
        ...

    def pop_first(self, lanes: Sequence[Any]) -> Ticket | None:
        """Pop the ticket whose turn is first in several lanes."""
        ...

    def first(self, lane: Any) -> Ticket | None:
        """Ticket of a lane that `pop` would give, which stays; None = the lane is empty."""
        ...

    def remove(self, ticket: Ticket) -> bool:
        """Remove a ticket; False = it does not wait here."""
        ...

    def depth(self, lane: Any) -> int:
        """Depth of a lane in tickets."""
        ...

    def lanes(self) -> tuple[Any, ...]:
        """Lanes with waiting requests."""
        ...

    def tickets(self) -> list[Ticket]:
        """Tickets of everybody who waits, by turn."""
        ...


class Router(Protocol):
    """Router of one family, or a group of them, in one worker. A pure state machine; called in order.

    `on_table` brings the route of one family (`route.family`); one without targets takes its slices away. `on_carbon`
    comes first of all, and whenever the ratio changes; None = not known, or old. At `next_s` the shell offers every
    slice again, by `on_credit`, though nothing else has happened. A router that holds requests back for a time needs no
    more than that. It is asked for that time while requests wait, and called once for each time that it names.
    """

    def on_table(self, route: Route, now_s: float) -> None:
        """Take a family's new route."""
        ...

    def on_carbon(self, ratio: float | None, now_s: float) -> None:
        """Take the carbon intensity's ratio to its average; None = not known, or old."""
        ...

    def on_arrival(self, ticket: Ticket, now_s: float) -> Pick | None:
        """Pick a slice for a request that arrives; None = queued."""
        ...

    def on_credit(self, slice: SliceKey, now_s: float) -> tuple[Ticket, Pick] | None:
        """Pick the request that gets a free credit of a slice; None: no request. A router of a group may pick another
        slice that has one: it is offered what is free, and orders all who wait."""
        ...

    def on_done(self, ticket: Ticket, pick: Pick, outcome: Outcome, now_s: float) -> None:
        """Take the end of a picked request."""
        ...

    def on_cancel(self, ticket: Ticket, now_s: float) -> None:
        """Forget a request that waits no longer."""
        ...

    def on_pinned(self, ticket: Ticket, slice: SliceKey, now_s: float) -> Pick | None:
        """Pick this very slice for a request bound to it; None = no credit there."""
        ...

    def next_s(self) -> float | None:
        """Time at which it wants to be called though nothing happens; None = never."""
        ...


class Governor(Protocol):
    """Governor of one device's clocks. It sees the answers of 10 s; one with an attribute `remembers_s`, of so long."""

    def step(self, view: GovernorView) -> ClockDecision:
        """Decide the device's clock, with the reason."""
        ...


class Forecaster(Protocol):
    """Forecaster of a family's rate `lead_s` ahead, from its arrivals in bins of `bin_s`, oldest first.

    It sees the last minute in fine bins; one that has an attribute `history_s` so much of the past, second by second.
    """

    def forecast(
        self, family: str, arrivals: Sequence[float], bin_s: float, now_s: float, lead_s: float
    ) -> LoadForecast:
        """Forecast the rate `lead_s` after `now_s`."""
        ...


HISTORY_MAX_S: Final = 86_400.0
"""Arrivals per second are kept for so long, in Redis and for forecasters."""


def history_s_of(forecaster: Forecaster) -> float:
    """How much of the past a forecaster asks for [s]; 0: the last minute, in fine bins."""
    return min(HISTORY_MAX_S, max(0.0, float(getattr(forecaster, "history_s", 0.0))))

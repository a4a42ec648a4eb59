"""Where a request would go now, and how every target of its family stands: what ExplainRequest answers.

Source: ours; llm-d and Envoy have the like for their pickers.
Data: a family's planned and live targets, why others are not live, what its router says of each, requests in flight.
Decision: none; nothing is sent and nothing changes.
Formulation: targets that may have the request are in the order of the router's own score. Then come those that may not,
    with the first reason that holds: draining, not live, without a credit of this worker, not accurate enough, without
    a share.
Deviations: a user's router need not have `scores`; its targets stand by the share of their credits that is taken.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dispatcher.routing.core.accuracy_floors import AccuracyReach
from trefoil.core.brains import Ticket
from trefoil.core.errors import Infeasible
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget

Scores = Mapping[SliceKey, tuple[float, str]]


@dataclass(frozen=True, slots=True)
class FamilySnapshot:
    """State of a family in one worker. `scores` None: its router does not tell."""

    planned: Route
    live: Route
    missing: Mapping[SliceKey, str]
    in_flight: Mapping[SliceKey, int]
    waiting: int
    reach: AccuracyReach
    scores: Scores | None


@dataclass(frozen=True, slots=True)
class Scored:
    """Target with its score, which has no meaning where it is not eligible."""

    target: RouteTarget
    eligible: bool
    score: float
    in_flight: int
    why: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """Targets, best first, and what would happen, in words."""

    targets: tuple[Scored, ...] = ()
    why: str = ""
    router: str = field(default="", kw_only=True)


def explain(standing: FamilySnapshot, ticket: Ticket) -> Explanation:
    """Explain how each target stands for a request that arrived now."""
    live = {target.slice: target for target in standing.live.targets}
    scores = standing.scores if standing.scores is not None else _by_credits(standing, ticket)
    found = []
    for planned in standing.planned.targets:
        target, busy = live.get(planned.slice, planned), standing.in_flight.get(planned.slice, 0)
        known = scores.get(planned.slice) if planned.slice in live else None
        if known is not None:
            found.append(Scored(target, True, known[0], busy, known[1]))
        else:
            found.append(Scored(target, False, 0.0, busy, _why_not(standing, planned, live, ticket)))
    found.sort(key=lambda each: (not each.eligible, each.score, each.target.slice))
    return Explanation(tuple(found), _outcome(standing, found, ticket), router=standing.live.router)


def _by_credits(standing: FamilySnapshot, ticket: Ticket) -> Scores:
    return {
        t.slice: (standing.in_flight.get(t.slice, 0) / t.credits, "share of its credits that is taken")
        for t in standing.live.targets
        if t.accuracy >= ticket.min_accuracy
    }


def _why_not(
    standing: FamilySnapshot, planned: RouteTarget, live: Mapping[SliceKey, RouteTarget], ticket: Ticket
) -> str:
    if planned.draining:
        return "draining"
    if planned.slice in standing.missing:
        return standing.missing[planned.slice]
    target = live.get(planned.slice)
    if target is None:
        return "this worker has no credit of it: others serve it"
    if target.accuracy < ticket.min_accuracy:
        return f"accuracy {target.accuracy:g} is below {ticket.min_accuracy:g}"
    return "has no share of the traffic"


def _outcome(standing: FamilySnapshot, found: list[Scored], ticket: Ticket) -> str:
    family = standing.planned.family
    if ticket.min_accuracy:
        try:
            standing.reach.check(family, ticket.min_accuracy)
        except Infeasible as error:
            return f"refused: {error}"
    first = next((each for each in found if each.eligible), None)
    if first is None:
        return f"waits: no slice that is live may have it ({standing.waiting} wait already)"
    where = f"{first.target.slice.name} ({first.target.variant})"
    if any(each.eligible and each.in_flight < each.target.credits for each in found[:1]):
        return f"goes to {where} at once"
    return f"waits ({standing.waiting} wait already); as things stand, for {where}"

"""Which credits of which slices a worker may use: parts that keep a plan's mix, and that never overlap.

Source: CONTRACTS section 3 (credits are divided over live workers); DESIGN section 4 (weights bind between classes).
Data: the plan's targets of a family with their credits, in classes (routers/weighted.py: slices that share one line);
    who shares, best-ranked first; whether all workers are known to share the same way; what this worker held before.
Decision: who serves the family (`serving_workers`), which credits each has (`entitled_credits`), which a
    worker uses now (`usable_credits`).
Formulation: m = the largest number of workers among which the credits C_k of every class can be dealt evenly enough. No
    worker may have more than UNEVEN times its equal part: max_k ceil(C_k / m) m / C_k <= UNEVEN, C_k >= m. The m
    best-ranked serve. The credits of all classes are dealt in turn, slice by slice, as cards are: credit number j goes
    to rank j mod m. So a slice with credits for all is divided equally, and one with fewer goes to some of the workers.
    But each worker has its part of every class: class k keeps its share w_k at each of them, spread over the slices
    that the worker has.
    The sharers and the plan change for one worker after the other. From a change on, a worker uses what it held *and*
    has a right to now. It uses all that it has a right to only once every other worker reports the same sharers and the
    same plan. Then no credit is ever used twice. If one worker uses a part of the new deal, all others know of that
    deal and use at most their part. If none does, all use parts of the old deal.
Deviations: CONTRACTS gives a slice with fewer credits than workers to one worker, by rendezvous hashing of the slice.
    Then workers would have other classes, and spread a share over those that they happen to have: the mix would not
    hold (docs/adr/0014).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

from dispatcher.routers.weighted import group_equal_targets
from dispatcher.routing.core.membership import WorkerId, rank_workers
from trefoil.core.fleet import SliceKey
from trefoil.core.plan import RouteTarget

UNEVEN: Final = 1.25
Part = Mapping[SliceKey, frozenset[int]]  # of each slice, the numbers of its credits
Class = Sequence[RouteTarget]


def credit_classes(targets: Sequence[RouteTarget]) -> list[Class]:
    """Group the planned targets that get requests into classes; in the same order for every worker."""
    wanted = sorted((target for target in targets if not target.draining), key=lambda target: target.slice)
    return [group for groups in group_equal_targets(wanted).values() for group in groups]


def serving_workers(family: str, workers: Sequence[WorkerId], dealt: Sequence[Class]) -> tuple[WorkerId, ...]:
    """Choose the workers that serve a family, best first."""
    # Classes without weight do not count: one slice that gets no requests must not bring the family down to one worker.
    weighed = [group for group in dealt if any(target.weight > 0 for target in group)]
    totals = [sum(target.credits for target in group) for group in weighed or dealt]
    for number in range(min([len(workers), *totals]), 1, -1):
        if all(-(-total // number) * number <= UNEVEN * total for total in totals):
            return tuple(rank_workers(family, workers)[:number])
    return tuple(rank_workers(family, workers)[:1])


def entitled_credits(dealt: Sequence[Class], among: Sequence[WorkerId], me: WorkerId) -> Part:
    """Credits that a worker has a right to, by slice."""
    if me not in among:
        return {}
    rank, number = among.index(me), 0
    mine: dict[SliceKey, set[int]] = defaultdict(set)
    for target in (target for group in dealt for target in group):
        for credit in range(target.credits):
            if number % len(among) == rank:
                mine[target.slice].add(credit)
            number += 1
    return {slice_: frozenset(credits) for slice_, credits in mine.items()}


def usable_credits(right: Part, before: Part, agreed: bool) -> Part:
    """Credits that a worker may use: what it has a right to, once all agree; until then, of it what it held."""
    if agreed:
        return right
    common = {slice_: credits & before.get(slice_, frozenset()) for slice_, credits in right.items()}
    return {slice_: credits for slice_, credits in common.items() if credits}


def own_targets(dealt: Sequence[Class], live: Sequence[RouteTarget], mine: Part) -> list[RouteTarget]:
    """Live targets that a worker has credits of. Its slices of a class have the weight of all that are live."""
    group_of = {target.slice: number for number, group in enumerate(dealt) for target in group}
    here: dict[int, list[RouteTarget]] = defaultdict(list)
    whole: dict[int, float] = defaultdict(float)
    for target in live:
        whole[group_of[target.slice]] += target.weight
        if target.slice in mine:
            here[group_of[target.slice]].append(target)
    found = []
    for target in (each for each in live if each.slice in mine):
        group = group_of[target.slice]
        known = sum(each.weight for each in here[group])
        weight = target.weight / known if known > 0 else 1 / len(here[group])
        found.append(replace(target, credits=len(mine[target.slice]), weight=weight * whole[group]))
    return found

"""Variants on trial: a canary serves a small share before it takes quota, a mirror is compared and answers nobody.

Source: ours; the words are those of progressive delivery (canary analysis, traffic mirroring).
Data: `canary_version`, `canary_share`, `mirror_version`, `mirror_share` of an objective's params (0 = none).
Decision: which variants a plan has to host beside what it would host anyway, and the traffic that they get.
Formulation: for a version on trial with share s (a mirror: 0), over its classes k: sum x_k >= 1, sum r_k = s * demand;
    its slices are no replicas. So a canary's capacity, energy and accuracy count like everybody's, and it gets nothing
    beyond its share. Where a fleet cannot serve all demand, trials give way: at most s * demand, no slice of their own.
Deviations: planners that do not read these params refuse them by name: only `exact` and `static_mix` do.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from trefoil.core.catalog import Family
from trefoil.core.errors import InvalidInput
from trefoil.core.objective import Objective

PARAMS: Final[Mapping[str, float]] = {
    "canary_version": 0.0,
    "canary_share": 0.0,
    "mirror_version": 0.0,
    "mirror_share": 0.0,
}


@dataclass(frozen=True, slots=True)
class Trial:
    """A version on trial and its share of the traffic."""

    version: int
    share: float


def trials(objective: Objective) -> tuple[Trial, ...]:
    """What an objective has on trial; a mirror's copies are no traffic."""
    params = objective.params
    canary, mirror = int(params.get("canary_version", 0)), int(params.get("mirror_version", 0))
    found = [Trial(canary, params.get("canary_share", 0.0))] if canary else []
    if mirror and mirror != canary:
        found.append(Trial(mirror, 0.0))
    return tuple(found)


def route_params(objective: Objective) -> dict[str, float]:
    """What a route tells the dispatchers of them."""
    return {name: objective.params[name] for name in PARAMS if objective.params.get(name)}


def check(objective: Objective, family: Family) -> None:
    """Refuse trials that cannot be what was meant.

    Raises:
        InvalidInput: naming the param.
    """
    versions = {variant.version: variant for variant in family.variants}
    for kind in ("canary", "mirror"):
        version, share = objective.params.get(f"{kind}_version", 0.0), objective.params.get(f"{kind}_share", 0.0)
        if not 0 <= share <= 1 or (share == 1 and kind == "canary"):
            remedy = "a fraction of the traffic: 0.05 for 5 %"
            raise InvalidInput("is no share", field=f"params.{kind}_share", value=share, remedy=remedy)
        if version and version not in versions:
            known = ", ".join(f"{v.version} ({v.name})" for v in family.variants)
            raise InvalidInput(
                f"{family.name} has no such version", field=f"params.{kind}_version", value=version, remedy=known
            )
        if bool(version) != bool(share):
            missing = "share" if version else "version"
            raise InvalidInput("needs the other one too", field=f"params.{kind}_{missing}", value=0, remedy="set both")
    on_trial = {trial.version for trial in trials(objective)}
    rest = [variant for variant in family.variants if variant.version not in on_trial]
    floor = max(objective.min_accuracy, objective.hard_min_accuracy)
    best = max((variant.accuracy for variant in rest), default=0.0)
    if on_trial and (not rest or floor > best):
        raise InvalidInput(
            f"what is not on trial reaches an accuracy of {best:g} only",
            field="params",
            value=sorted(on_trial),
            remedy="lower min_accuracy, or let the variant take quota without a trial",
        )

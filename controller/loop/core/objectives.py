"""Acceptance of objectives before they are put in force: values in, an objective or one clear refusal out."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Final

from trefoil.core.catalog import Catalog, Family
from trefoil.core.errors import InvalidInput, NotFound, SettingError, StaleRevision
from trefoil.core.objective import PERCENTILE, Objective, ObjectiveMode, check_token_slo
from trefoil.core.outside.ranges import complaint
from trefoil.core.parts import PartSettings

WINDOW_S: Final = 86_400.0
LAMBDA: Final = 0.5  # CLOVER section 5.1
REPLICAS_MIN: Final = 2
SPREAD_MIN: Final = 2


def accept_objective(
    wanted: Objective,
    stored: Mapping[str, Objective],
    catalog: Catalog,
    planner: PartSettings | None,
    expected_number: int = 0,
    pue: float = 1.0,
) -> Objective:
    """Accept an objective: defaults filled in and the next number. `planner`: settings over which its `params` go;
    None: they are not known.

    Raises:
        InvalidInput: naming field, value and remedy.
        StaleRevision: another caller has changed the objective since.
    """
    before = stored.get(wanted.family)
    number = before.number if before else 0
    if expected_number and expected_number != number:
        raise StaleRevision(
            f"the stored objective of {wanted.family} has number {number}, not {expected_number}",
            remedy="read it again, then repeat",
        )
    family = _family(wanted, catalog)
    slo_ms, quantile = family.classes.get("", (0.0, 0.0))
    slo = replace(wanted, slo_ms=wanted.slo_ms or slo_ms, slo_quantile=wanted.slo_quantile or quantile)
    filled = replace(with_defaults(slo, pue), number=number + 1)
    _numbers(filled)
    check_token_slo(filled.token_slo, filled.slo_ms, generative=family.generative)
    _reachable(filled, family, catalog)
    if planner is not None:
        for name, value in filled.params.items():
            if name in planner.FLEET:
                remedy = f"set parts.planner.{name} of the controller"
                raise InvalidInput("holds for the whole fleet", field=f"params.{name}", value=value, remedy=remedy)
            try:
                planner.over({name: value})
            except SettingError as error:
                raise InvalidInput(error.message, field=f"params.{name}", value=value, remedy=error.remedy) from error
    return filled


def with_defaults(wanted: Objective, pue: float) -> Objective:
    """The objective with defaults for what it leaves open; `pue` of the site."""
    return replace(
        wanted,
        window_s=wanted.window_s or WINDOW_S,
        pue=wanted.pue or pue,
        replicas_min=wanted.replicas_min or REPLICAS_MIN,
        spread_min=wanted.spread_min or SPREAD_MIN,
        ttft_quantile=wanted.ttft_quantile or (PERCENTILE / 100 if wanted.ttft_ms else 0.0),
        tpot_quantile=wanted.tpot_quantile or (PERCENTILE / 100 if wanted.tpot_ms else 0.0),
        lambda_weight=(wanted.lambda_weight or LAMBDA) if wanted.mode == ObjectiveMode.LAMBDA else wanted.lambda_weight,
    )


def _numbers(objective: Objective) -> None:
    if objective.mode == ObjectiveMode.UNSPECIFIED:
        raise InvalidInput("no type", field="type", value="unspecified", remedy="one of budget, instant, lambda")
    given = {each.name: getattr(objective, each.name) for each in fields(objective)}
    for name, value in (given | {f"params.{key}": value for key, value in objective.params.items()}).items():
        if why := complaint(name, value):
            raise InvalidInput(why, field=name, value=value, remedy="correct it")
    for name in ("slo_ms", "slo_quantile", "window_s", "pue"):
        if not given[name] > 0:
            raise InvalidInput("must be above 0", field=name, value=given[name], remedy="correct it")
    for name in ("min_accuracy", "hard_min_accuracy", "lambda_weight"):
        value = getattr(objective, name)
        if not 0 <= value <= 1:
            raise InvalidInput("must be a fraction", field=name, value=value, remedy="write e.g. 0.95 for 95 %")
    for name in ("base_intensity_g_per_kwh", "base_j_per_request"):
        value = getattr(objective, name)
        if not 0 <= value < math.inf:
            raise InvalidInput("must not be negative", field=name, value=value, remedy="0 = from BASE's plan")
    if objective.mode == ObjectiveMode.BUDGET and objective.hard_min_accuracy > objective.min_accuracy:
        raise InvalidInput(
            f"is above accuracy.floor {objective.min_accuracy:g}",
            field="accuracy.hard_floor",
            value=objective.hard_min_accuracy,
            remedy="the hard minimum is the lower of the two",
        )


def _family(objective: Objective, catalog: Catalog) -> Family:
    try:
        return catalog.family(objective.family)
    except NotFound as error:
        raise InvalidInput(
            "no such family in the model repository", field="family", value=objective.family, remedy=error.remedy
        ) from error


def _reachable(objective: Objective, family: Family, catalog: Catalog) -> None:
    """Refuse what no variant on any slice can meet, however little load there is."""
    floor = max(objective.min_accuracy, objective.hard_min_accuracy)
    if floor > family.best.accuracy:
        raise InvalidInput(
            f"no variant of {family.name} is that accurate",
            field="accuracy.floor" if objective.min_accuracy >= floor else "accuracy.hard_floor",
            value=floor,
            remedy=f"at most {family.best.accuracy:g} ({family.best.name})",
        )
    rows = [r for r in catalog.rows if r.family == family.name and r.batch == 1 and not r.stage]
    fastest = min(rows, key=lambda r: r.latency_ms_p50, default=None)
    if fastest is not None and fastest.latency_ms_p50 > objective.slo_ms:
        raise InvalidInput(
            f"no variant of {family.name} is that fast on any profiled slice",
            field="slo.latency_ms",
            value=objective.slo_ms,
            remedy=f"at least {fastest.latency_ms_p95:g} ({fastest.variant} on {fastest.slice_type})",
        )
    step_ms = fastest.latency_ms_p50 / family.tokens_mean if fastest is not None and family.tokens_mean else 0.0
    for name in ("ttft_ms", "tpot_ms"):
        if fastest is not None and 0 < getattr(objective, name) < step_ms:
            raise InvalidInput(
                f"no variant of {family.name} makes a token that fast on any profiled slice",
                field=f"slo.{name}",
                value=getattr(objective, name),
                remedy=f"at least {math.ceil(1e3 * step_ms) / 1e3:g} ({fastest.variant} on {fastest.slice_type})",
            )

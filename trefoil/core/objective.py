"""Objective: what the operator wants, and when a saving may be stated.

A run has saved something against another one only where each of its families kept its SLO and its accuracy floor. Both
runs must have answered equally many requests, within the error of their sample. Their accuracies must be equal, or have
a price (`trefoil.comparison.saving`). Every command, report and dashboard goes by this rule. Source: DESIGN section 7.
"""

import math
import zoneinfo
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, tzinfo
from enum import IntEnum
from typing import Final

from trefoil.core.errors import InvalidInput

SETTING_NAMES: Final = {
    "mode": "type",
    "slo_ms": "slo.latency_ms",
    "slo_quantile": "slo.percentile",
    "ttft_ms": "slo.ttft_ms",
    "ttft_quantile": "slo.ttft_percentile",
    "tpot_ms": "slo.tpot_ms",
    "tpot_quantile": "slo.tpot_percentile",
    "min_accuracy": "accuracy.floor",
    "hard_min_accuracy": "accuracy.hard_floor",
    "replicas_min": "availability.replicas_min",
    "spread_min": "availability.spread_min",
}
"""Fields of an objective as settings, files and flags name them; a percentile is 100 times the quantile."""
FLOOR_TOLERANCE: Final = 5e-4  # of accuracy
WORK_TOLERANCE: Final = 1e-3  # of the requests: the last digit of a printed saving
ERRORS: Final = 3.0  # standard errors of the difference of two counts of unanswered requests


class ObjectiveMode(IntEnum):
    """Mode. BUDGET: mean accuracy over a window. INSTANT: at every instant. LAMBDA: CLOVER Eq. 3."""

    UNSPECIFIED = 0
    BUDGET = 1
    INSTANT = 2
    LAMBDA = 3


class ActMode(IntEnum):
    """Mode of acting: how far the controller may go."""

    UNSPECIFIED = 0
    OBSERVE = 1
    ADVISE = 2
    ACT = 3


@dataclass(frozen=True, slots=True)
class TokenSlo:
    """SLO of a stream's tokens. TTFT: time from the request's arrival to its first token. TPOT: mean time from one
    token to the next. Each has the share of streams that meet it, in (0, 1). 0: none."""

    ttft_ms: float = 0.0
    ttft_quantile: float = 0.0
    tpot_ms: float = 0.0
    tpot_quantile: float = 0.0

    @property
    def each(self) -> tuple[tuple[str, float, float], ...]:
        """Name, limit [ms] and quantile of each; of limit 0 there is none."""
        return ("ttft", self.ttft_ms, self.ttft_quantile), ("tpot", self.tpot_ms, self.tpot_quantile)

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self.ttft_ms or self.tpot_ms)


NO_TOKEN_SLO: Final = TokenSlo()
PERCENTILE: Final = 95.0
"""Percentile of an objective that names none."""


def token_slo(ttft_ms: float | None, ttft_percentile: float, tpot_ms: float | None, tpot_percentile: float) -> TokenSlo:
    """Objectives of tokens as settings state them: None is none, and takes its percentile along."""
    return TokenSlo(
        ttft_ms or 0.0,
        ttft_percentile / 100 if ttft_ms else 0.0,
        tpot_ms or 0.0,
        tpot_percentile / 100 if tpot_ms else 0.0,
    )


def check_token_slo(slo: TokenSlo, slo_ms: float, *, generative: bool) -> None:
    """Refuse objectives of tokens that mean nothing. `slo_ms`: of the whole answer, 0: none.

    Raises:
        InvalidInput: naming field, value and remedy.
    """
    for name, limit_ms, quantile in slo.each:
        field_, share = f"slo.{name}_ms", f"slo.{name}_percentile"
        if not limit_ms:
            if quantile:
                raise InvalidInput(
                    f"promises nothing without {field_}", field=share, value=100 * quantile, remedy=f"set {field_}"
                )
            continue
        if not generative:
            raise InvalidInput(
                "of a family that streams no tokens",
                field=field_,
                value=limit_ms,
                remedy="leave it out; slo.latency_ms is of its answers",
            )
        if not 0 < limit_ms < math.inf:
            raise InvalidInput(
                "must be above 0", field=field_, value=limit_ms, remedy="set milliseconds, or leave it out for none"
            )
        if not 0 < quantile < 1:
            raise InvalidInput("must be between 0 and 100", field=share, value=100 * quantile, remedy="write e.g. 95")
        if slo_ms and limit_ms > slo_ms:
            raise InvalidInput(
                f"is above slo.latency_ms {slo_ms:g}, which is of all tokens",
                field=field_,
                value=limit_ms,
                remedy=f"at most {slo_ms:g}, or raise slo.latency_ms",
            )


@dataclass(frozen=True, slots=True)
class Objective:
    """Objective of one family. Accuracies are absolute fractions; `slo_quantile` in (0, 1).

    `ttft_ms` to `tpot_quantile`: as in `TokenSlo`, of families that stream tokens.
    `devices`: those that it may use, for planners that allocate whole devices; none: as the planner deals them.
    """

    family: str = ""
    mode: ObjectiveMode = ObjectiveMode.UNSPECIFIED
    slo_ms: float = 0.0
    slo_quantile: float = 0.0
    min_accuracy: float = 0.0
    lambda_weight: float = 0.0
    base_intensity_g_per_kwh: float = 0.0
    base_j_per_request: float = 0.0
    pue: float = 0.0
    number: int = 0
    params: Mapping[str, float] = field(default_factory=dict)
    window_s: float = 0.0
    hard_min_accuracy: float = 0.0
    replicas_min: int = 0
    spread_min: int = 0
    devices: tuple[str, ...] = ()
    ttft_ms: float = 0.0
    ttft_quantile: float = 0.0
    tpot_ms: float = 0.0
    tpot_quantile: float = 0.0

    @property
    def governed(self) -> tuple[float, float]:
        """Limit [ms] and quantile that clocks are governed by: those of TPOT, or without one of latency."""
        return (self.tpot_ms, self.tpot_quantile) if self.tpot_ms else (self.slo_ms, self.slo_quantile)

    @property
    def token_slo(self) -> TokenSlo:
        """Objectives of its tokens."""
        return TokenSlo(self.ttft_ms, self.ttft_quantile, self.tpot_ms, self.tpot_quantile)


class BudgetRung(IntEnum):
    """Rung of a tenant's budget; each includes those before it."""

    WITHIN = 0
    JOBS_WAIT = 1
    LOWER_ACCURACY = 2
    REFUSED = 3

    @property
    def text(self) -> str:
        """Name as people read it."""
        return self.name.lower().replace("_", " ")


BudgetKey = tuple[str, str]
"""Tenant and family of a budget; "": every one."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Budget of a tenant for a day; tenant or family "": of all together. A limit of 0: none.

    `least_accuracy`: what the accuracy floors of its requests may fall to; 0: they stay. `time_zone`: IANA name of the
    zone whose midnight begins a day; "": UTC.
    """

    tenant: str = ""
    family: str = ""
    grams_per_day: float = 0.0
    joules_per_day: float = 0.0
    least_accuracy: float = 0.0
    time_zone: str = ""
    number: int = 0

    @property
    def key(self) -> BudgetKey:
        """Tenant and family."""
        return self.tenant, self.family

    @property
    def limits(self) -> str:
        """Limits in words."""
        given = ((self.grams_per_day, "g"), (self.joules_per_day, "J"))
        return " and ".join(f"{limit:.12g} {unit} a day" for limit, unit in given if limit)

    def used(self, joules: float, grams: float) -> float:
        """Part of it that these costs are: of the limit that is nearer to its end."""
        limits = ((joules, self.joules_per_day), (grams, self.grams_per_day))
        return max((cost / limit for cost, limit in limits if limit), default=0.0)

    @property
    def text(self) -> str:
        """Limits, and what else it says, in words."""
        least = f", accuracy floors down to {self.least_accuracy:g}" if self.least_accuracy else ""
        return f"{self.limits}{least}{f', days of {self.time_zone}' if self.time_zone not in ('', 'UTC') else ''}"


def zone_of(name: str) -> tzinfo:
    """Time zone by its IANA name.

    Raises:
        InvalidInput: there is none of that name.
    """
    try:
        return UTC if name in ("", "UTC") else zoneinfo.ZoneInfo(name)  # UTC needs no database of time zones
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise InvalidInput(
            "no such time zone", field="time_zone", value=name, remedy="write an IANA name, e.g. Europe/London"
        ) from error


def whose_budget(tenant: str, family: str) -> str:
    """Tenant and family of a budget, in words."""
    return f"{tenant or 'all tenants'}{family and f' on {family}'}"


@dataclass(frozen=True, slots=True)
class TenantRung:
    """Rung of one budget, as dispatchers obey it. `limits` in words; `free_at_s`: when its next day begins."""

    tenant: str = ""
    family: str = ""
    rung: BudgetRung = BudgetRung.WITHIN
    limits: str = ""
    least_accuracy: float = 0.0
    free_at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TenantRungs:
    """Rungs of all budgets that are above WITHIN, as the controller publishes and signs them."""

    rungs: tuple[TenantRung, ...] = ()
    epoch: int = 0
    observed_at_s: float = 0.0
    signature: str = ""


def objective_text(objective: Objective) -> str:
    """What an objective asks for, in one line: SLO, and what the accuracy floor binds: a mean, or every instant."""
    text = f"{objective.family}: p{100 * objective.slo_quantile:g} <= {objective.slo_ms:g} ms; "
    for name, limit_ms, quantile in objective.token_slo.each:
        text += f"{name.upper()} p{100 * quantile:g} <= {limit_ms:g} ms; " if limit_ms else ""
    floor, never = f"accuracy >= {objective.min_accuracy:.4f}", f"never < {objective.hard_min_accuracy:.4f}"
    match objective.mode:
        case ObjectiveMode.INSTANT:
            return f"{text}{floor} at every instant"
        case ObjectiveMode.LAMBDA:
            return f"{text}carbon weighs {objective.lambda_weight:g} against accuracy (CLOVER Eq. 3), {never}"
        case _:
            span = f"{objective.window_s / 3600:g} h" if objective.window_s >= 3600 else f"{objective.window_s:g} s"
            return f"{text}{floor} in the mean of {span}, not at every instant ({never})"


def floor_missed(accuracy: float, floor: float) -> bool:
    """Whether a mean accuracy over a window is below its floor by more than `FLOOR_TOLERANCE`: it saved nothing then.

    The one rule of every report. One rollout of 10 s between variants 0.06 apart moves the mean of 20 minutes by the
    tolerance. No plan times its last rollout better. The tolerance is also a seventh of one image of the 299 that the
    digits are measured on.
    """
    return not accuracy >= floor - FLOOR_TOLERANCE  # NaN misses it


@dataclass(frozen=True, slots=True)
class FamilyOutcome:
    """Outcome of a run for one family, or one class of its requests, and what was asked for.

    None: not known, or there is none, as of a family without requests; NaN misses the objective.
    """

    name: str
    slo_quantile: float
    attainment: float | None
    floor: float
    accuracy: float | None
    arrived: float = 0.0
    answered: float = 0.0
    slow: tuple[str, ...] = ()
    """Objectives of tokens that it misses, each with the share that was in time and what was asked for."""

    @property
    def slo_missed(self) -> bool:
        """Whether too few requests were answered in time, or requests came and none has ended."""
        if self.slow:
            return True
        if self.attainment is None:
            return self.arrived > 0
        return not self.attainment >= self.slo_quantile

    @property
    def floor_missed(self) -> bool:
        """Whether the accuracy is below its floor by more than the tolerance of every report."""
        return self.accuracy is not None and floor_missed(self.accuracy, self.floor)

    @property
    def misses(self) -> list[str]:
        """What it missed, with the figure and what was asked for."""
        found = []
        if self.slo_missed and self.attainment is None:
            found.append(f"none of {self.arrived:,.0f} requests of {self.name} ended")
        elif self.attainment is not None and not self.attainment >= self.slo_quantile:
            found.append(f"{self.name} misses its SLO ({self.attainment:.2%} in time, {self.slo_quantile:.2%} asked)")
        found += [f"{self.name} misses its {one}" for one in self.slow]
        if self.floor_missed:
            found.append(f"{self.name} is below its accuracy floor ({self.accuracy:.4f}, {self.floor:.4f} asked)")
        return found


def missed(outcomes: Sequence[FamilyOutcome]) -> str:
    """What a run missed of what was asked for; "" if nothing."""
    return " and ".join(line for one in outcomes for line in one.misses)


def no_saving(ours: Sequence[FamilyOutcome], theirs: Sequence[FamilyOutcome], *, priced: bool) -> str:
    """Why a run has saved nothing against another one; "" where a saving may be stated.

    Args:
        ours: families of the run.
        theirs: families of the other run, in the same order.
        priced: whether accuracy has a price, so that runs of unequal accuracy can be compared.
    """
    if why := missed(ours):
        return why
    for mine, other in zip(ours, theirs, strict=True):
        unanswered = mine.arrived - mine.answered + other.arrived - other.answered
        allowed = max(WORK_TOLERANCE * other.arrived, ERRORS * math.sqrt(max(0.0, unanswered)))
        if not abs(mine.answered - other.answered) <= allowed:
            return f"unequal work: {mine.answered:,.0f} requests of {mine.name} answered against {other.answered:,.0f}"
        if not mine.answered and not other.answered:
            continue
        if mine.accuracy is None or other.accuracy is None or not math.isfinite(mine.accuracy - other.accuracy):
            return f"accuracy of {mine.name} is not known"
        apart = mine.accuracy - other.accuracy
        if not priced and abs(apart) > FLOOR_TOLERANCE:
            return f"accuracy of {mine.name} differs by {apart:+.4f} and has no price here"
    return ""

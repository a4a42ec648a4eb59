"""Objective: what the operator wants."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

SETTING_NAMES: Final = {
    "mode": "type",
    "slo_ms": "slo.latency_ms",
    "slo_quantile": "slo.percentile",
    "min_accuracy": "accuracy.floor",
    "hard_min_accuracy": "accuracy.hard_floor",
    "replicas_min": "availability.replicas_min",
    "spread_min": "availability.spread_min",
}
"""Fields of an objective as settings, files and flags name them; a percentile is 100 times the quantile."""
FLOOR_TOLERANCE: Final = 5e-4  # of accuracy


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
class Objective:
    """Objective of one family. Accuracies are absolute fractions; `slo_quantile` in (0, 1).

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


def objective_text(objective: Objective) -> str:
    """What an objective asks for, in one line: SLO, and what the accuracy floor binds: a mean, or every instant."""
    text = f"{objective.family}: p{100 * objective.slo_quantile:g} <= {objective.slo_ms:g} ms; "
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

    The one rule of every report. So much one rollout of 10 s moves the mean of 20 minutes between variants 0.06 apart,
    and no plan times its last one better; and it is a seventh of one image of the 299 that the digits are measured on.
    """
    return accuracy < floor - FLOOR_TOLERANCE

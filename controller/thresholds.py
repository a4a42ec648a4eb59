"""Numbers and names that cores go by and settings give."""

from dataclasses import dataclass
from typing import Final

from trefoil.core.carbon import RUNGS

CAUSES: Final = ("start", "loss", "objective", "load", "slo", "scale", "accuracy", "carbon", "tick")
REFUSABLE: Final = RUNGS[1:]
CARBON_HISTORY_MAX: Final = 96  # readings of carbon:history that a planner sees
RATE_SPAN_S: Final = 4.0  # over which a rate is counted, or a tick where that is longer; as `last_max` smooths


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Thresholds of the triggers. Times are wall seconds; ratios are of the planned value."""

    carbon_ratio: float = 0.05
    carbon_base_g_per_kwh: float = 0.0
    load_up_ratio: float = 0.20
    load_down_ratio: float = 0.25
    load_sigmas: float = 2.5
    load_hold_s: float = 5.0
    slo_margin: float = 0.02
    slo_hold_s: float = 3.0
    slo_rest_s: float = 10.0
    slo_requests_min: int = 50
    loss_hold_s: float = 3.0
    tick_grace_s: float = 2.0
    """A tick is often asked for when the intensity is due to change: the change itself shall be the cause."""
    rate_span_s: float = 3.0
    """Time over which a rate was counted: its standard error is sqrt(rate / span)."""


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """Settings of load windows: how long load is remembered and over how long it is measured."""

    bin_s: float = 0.5
    keep_s: float = 60.0
    measure_s: float = 10.0
    worker_silent_s: float = 2.0

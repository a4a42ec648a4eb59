"""Settings of CLOVER, BLOVER and ORACLE."""

from typing import ClassVar, Literal

from pydantic import Field

from controller.planners.planner_settings import PlannerSettings


class CloverSettings(PlannerSettings):
    """Settings of `clover`, `blover` and `oracle`. Source: CLOVER (SC 23) sections 4 and 5, and its public code."""

    REMOVED: ClassVar = {
        **PlannerSettings.REMOVED,
        "lambda": "call it lambda_weight",
        "base_intensity": "call it base_intensity_g_per_kwh",
        "accuracy_loss_max": "call it accuracy_loss_max_pct",
        "artifact": "call it neighbours, raw or uniform",
        "raw_draws": "call it neighbours, raw or uniform",
        "guided": "call it neighbours, guided",
    }
    FLEET: ClassVar[frozenset[str]] = PlannerSettings.FLEET | {
        "base_intensity_g_per_kwh",
        "temperature",
        "cooling",
        "temperature_min",
        "patience",
        "limit_s",
        "measured_max",
        "requests_min",
        "measure_spare_s",
        "measure_on",
        "rate_tolerance",
        "standardised",
        "literal",
        "first_accepted",
        "neighbours",
        "warm",
        "carbon_base_g_per_kwh",
        "kernel_requests",
    }

    credits: int = Field(default=1, ge=0)
    """Requests in flight on one slice; the paper's: one."""
    lambda_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of carbon in Eq. 3, where the objective's type is not lambda."""
    base_intensity_g_per_kwh: float = Field(default=250.0, gt=0)
    """Carbon intensity of C_base, where the objective gives none; the artifact's."""
    accuracy_loss_max_pct: float = Field(default=0.0, ge=0)
    """Most accuracy that may be lost, in percent of A_base (Fig. 14b); 0: only the objective's floor holds."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature at which the annealing begins."""
    cooling: float = Field(default=0.05, ge=0)
    """What each step takes off the temperature."""
    temperature_min: float = Field(default=0.1, ge=0)
    """Temperature at which the annealing stays."""
    patience: int = Field(default=5, ge=0)
    """Evaluations in a row without a better graph that end a round."""
    limit_s: float = Field(default=300.0, ge=0)
    """Longest time of a round; 0: unbounded."""
    measured_max: int = Field(default=0, ge=0)
    """Most measurements of a round; 0: unbounded."""
    requests_min: int = Field(default=200, ge=1)
    """Requests that one measurement needs."""
    measure_spare_s: float = Field(default=5.0, ge=0)
    """Time of a measurement beyond what so many requests take."""
    measure_on: Literal["system", "profiles"] = "system"
    """Where candidates are measured: on the running system, or on profiles."""
    rate_tolerance: float = Field(default=0.1, ge=0)
    """Relative difference in load up to which a measurement still holds."""
    standardised: bool = True
    """Every GPU is cut and hosted alike, as in the public code."""
    literal: bool = False
    """Use Eq. 6 as the paper prints it."""
    first_accepted: bool = False
    """The first neighbour of a round becomes the centre whatever it is worth; the artifact's."""
    neighbours: Literal["raw", "uniform", "guided"] = "raw"
    """Draw raw partitions and variants until one is near, as the public code does; or among distinct near graphs, all
    alike or by how known graphs near them keep the SLO: ours."""
    warm: bool = False
    """A round begins at the best graph known, by the intensity of now, and not at the deployed one; ours."""
    carbon_base_g_per_kwh: float = Field(default=0.0, ge=0)
    """Fixed base of the carbon trigger's threshold; 0: the intensity that was planned with."""
    pod_devices: int = Field(default=0, ge=0)
    """Devices of a family's pod; 0: families take the devices in turn."""
    kernel_requests: int = Field(default=5000, ge=100)
    """Requests by which a profile says what a graph does."""

"""Settings of the controller: every bound and period it has, with its unit."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import Field, field_validator, model_validator

from controller.thresholds import CAUSES, RATE_SPAN_S, REFUSABLE, Thresholds, WindowSettings
from trefoil.core import policies
from trefoil.core.carbon import RUNGS, Factors, Method, Series
from trefoil.core.demand import Demand, LoadForecast
from trefoil.core.errors import NotFound
from trefoil.core.objective import (
    PERCENTILE,
    SETTING_NAMES,
    ActMode,
    Budget,
    BudgetKey,
    Objective,
    ObjectiveMode,
    TokenSlo,
    token_slo,
)
from trefoil.core.parts import Kind, Value, load_own_parts
from trefoil.runtime.config import FIXED, NodeNameForm, ServiceSettings, Settings
from trefoil.runtime.security.other_zones import OfferingZone, check_other_zones

PARTS: Final = (Kind.PLANNER, Kind.FORECASTER)


class CarbonSettings(Settings):
    """Settings of carbon: which series of the feed to plan by, and which readings to refuse."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(("history_max", "forecast_age_share_max"), FIXED)

    zone: str = "demo"
    """Zone of the feed that plans go by."""
    method: str = "average"
    """average or marginal: as the feed reads it."""
    factors: str = "lifecycle"
    """direct or lifecycle: as the feed reads it."""

    static_g_per_kwh: float = Field(default=400.0, gt=0)
    """Planned by until the feed's first reading."""
    wait_s: float = Field(default=10.0, ge=0)
    """How long the first plan waits for that reading."""
    rungs_refused: tuple[str, ...] = ()
    """Rungs of the carbon ladder that are not planned by."""
    forecast: bool = True
    """Plan budgets by carbon:forecast, where the feed has one; false: by the intensities seen."""

    @field_validator("rungs_refused")
    @classmethod
    def _rungs(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in REFUSABLE:
                why = "is what plans are made by" if name in RUNGS else "is not a rung"
                raise ValueError(f"{name!r} {why}; use some of {', '.join(REFUSABLE)}")
        return value

    @field_validator("method", "factors")
    @classmethod
    def _known(cls, value: str, info: Any) -> str:
        names = [m.name.lower() for m in (Method if info.field_name == "method" else Factors) if m]
        if value not in names:
            raise ValueError(f"use one of {', '.join(names)}")
        return value

    @property
    def series(self) -> Series:
        """Series of the feed that these settings name."""
        return Series(self.zone, Method[self.method.upper()], Factors[self.factors.upper()])


class Slo(Settings):
    """SLO: the latency that is promised, and to how many requests."""

    percentile: float = Field(default=95.0, gt=0, lt=100)
    """Percent of requests that must meet it."""
    latency_ms: float = Field(gt=0)
    """Limit of their latency."""
    ttft_ms: float | None = Field(default=None, gt=0)
    """Of a family that streams tokens: limit of the time to the first token."""
    ttft_percentile: float = Field(default=PERCENTILE, gt=0, lt=100)
    """Percent of streams that must meet it."""
    tpot_ms: float | None = Field(default=None, gt=0)
    """Of a family that streams tokens: limit of a stream's mean time from one token to the next."""
    tpot_percentile: float = Field(default=PERCENTILE, gt=0, lt=100)
    """Percent of streams that must meet it."""

    @property
    def tokens(self) -> TokenSlo:
        """Its objectives of tokens."""
        return token_slo(self.ttft_ms, self.ttft_percentile, self.tpot_ms, self.tpot_percentile)


class Accuracy(Settings):
    """Floors of the accuracy, as fractions of 1."""

    floor: float = Field(default=0.0, ge=0, le=1)
    """What the objective's type binds: the mean, or every moment."""
    hard_floor: float = Field(default=0.0, ge=0, le=1)
    """Floor at any moment, of types budget and lambda."""


class RelativeAccuracy(Accuracy):
    """Floors of the accuracy, absolute or relative to the best variant's."""

    below_best_pct: float | None = Field(default=None, ge=0, lt=100)
    """Percent of the best variant's accuracy that floor is below it; where floor is 0."""
    hard_below_best_pct: float | None = Field(default=None, ge=0, lt=100)
    """Percent of the best variant's accuracy that hard_floor is below it; where hard_floor is 0."""

    def floors(self, best: float) -> tuple[float, float]:
        """Floors of the mean and of any moment [0..1], from the accuracy of the best variant."""
        return _floor(self.floor, self.below_best_pct, best), _floor(self.hard_floor, self.hard_below_best_pct, best)


def _floor(floor: float, below_best_pct: float | None, best: float) -> float:
    return floor if floor or below_best_pct is None else best * (1 - below_best_pct / 100)


class Availability(Settings):
    """Availability that must survive a failure."""

    replicas_min: int = Field(default=2, ge=1)
    """Slices that serve a family at least."""
    spread_min: int = Field(default=2, ge=1)
    """Devices that they lie on at least."""


class PolicyChoice(Settings):
    """Policy, and what is put in the place of its parts: names of their tables, or module:Class."""

    policy: str = "exact"
    """A row of the table, or one's own as module:ROW."""
    planner: str = ""
    """Instead of the policy's."""
    forecaster: str = ""
    """Instead of the policy's."""
    router: str = ""
    """Instead of the policy's."""
    queue: str = ""
    """Instead of the policy's."""
    governor: str = ""
    """Instead of the policy's."""
    parts: dict[str, dict[str, Value]] = Field(default_factory=dict)
    """Settings of the parts by kind and name, e.g. parts.forecaster.smooth_s, parts.planner.tick_s."""
    params: dict[str, float] = Field(default_factory=dict)
    """Settings of the planner by way of the objectives, as `trefoil objective set --param` gives them."""

    def policy_row(self, policy: str = "", kinds: Iterable[Kind] = Kind) -> policies.Policy:
        """Row of a policy (default: the one that is chosen) with the parts of these kinds that are chosen.

        Raises:
            NotFound, SettingError: no such policy.
        """
        row = policies.policy(policy or self.policy)
        return policies.chosen(row, {kind: getattr(self, kind) for kind in kinds}, self.parts)


class ObjectiveTerms(Settings):
    """Terms of an objective, in the words of every file: `slo`, `accuracy`, `availability`."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        **{old: f"set {new}" for old, new in SETTING_NAMES.items()},
        "below_best_pct": "set accuracy.below_best_pct",
        "hard_below_best_pct": "set accuracy.hard_below_best_pct",
        "pue": "set pue of the controller",
    }

    type: Literal["budget", "instant", "lambda"] = "budget"
    """What the floor binds. budget: the mean of window_s; instant: every moment; lambda: nothing."""
    slo: Slo
    accuracy: Accuracy = Accuracy()
    availability: Availability = Availability()
    lambda_weight: float = Field(default=0.5, ge=0, le=1)
    """Weight of carbon against accuracy of type lambda (CLOVER Eq. 3)."""
    base_intensity_g_per_kwh: float = Field(default=0.0, ge=0)
    """Intensity of the reference of type lambda; 0: the planner's."""
    base_j_per_request: float = Field(default=0.0, ge=0)
    """Joules of the reference of type lambda; 0: BASE's at this demand."""
    window_s: float = Field(default=86_400.0, gt=0)
    """Rolling window of type budget."""
    params: dict[str, float] = Field(default_factory=dict)
    """Settings of the planner for this family, by name."""

    def objective(self, family: str, **other: Any) -> Objective:
        """Objective of a family by these terms; `other`: fields that differ from them."""
        terms = {
            "mode": ObjectiveMode[self.type.upper()],
            "slo_ms": self.slo.latency_ms,
            "slo_quantile": self.slo.percentile / 100,
            **asdict(self.slo.tokens),
            "min_accuracy": self.accuracy.floor,
            "hard_min_accuracy": self.accuracy.hard_floor,
            "lambda_weight": self.lambda_weight,
            "base_intensity_g_per_kwh": self.base_intensity_g_per_kwh,
            "base_j_per_request": self.base_j_per_request,
            "params": self.params,
            "window_s": self.window_s,
            "replicas_min": self.availability.replicas_min,
            "spread_min": self.availability.spread_min,
        }
        return Objective(family, **{**terms, **other})


class ObjectiveSettings(ObjectiveTerms):
    """Objective of a family, until `trefoil objective set`, and after its `--reset`."""

    family: str
    """Whose objective it is."""

    def stated(self) -> Objective:
        """Objective of these settings, number 1."""
        return self.objective(self.family, number=1)

    @classmethod
    def of(cls, stored: Objective) -> "ObjectiveSettings":
        """Settings that state this objective: all but its pue and devices, which no settings of it hold."""
        return cls(
            family=stored.family,
            type=stored.mode.name.lower(),  # type: ignore[arg-type]
            slo=Slo(
                latency_ms=stored.slo_ms,
                percentile=_percentile(stored.slo_quantile),
                ttft_ms=stored.ttft_ms or None,
                ttft_percentile=_percentile(stored.ttft_quantile) or PERCENTILE,
                tpot_ms=stored.tpot_ms or None,
                tpot_percentile=_percentile(stored.tpot_quantile) or PERCENTILE,
            ),
            accuracy=Accuracy(floor=stored.min_accuracy, hard_floor=stored.hard_min_accuracy),
            availability=Availability(replicas_min=stored.replicas_min, spread_min=stored.spread_min),
            lambda_weight=stored.lambda_weight,
            base_intensity_g_per_kwh=stored.base_intensity_g_per_kwh,
            base_j_per_request=stored.base_j_per_request,
            window_s=stored.window_s,
            params=dict(stored.params),
        )


def _percentile(quantile: float) -> float:
    """Percentile of a quantile, without the error of its division by 100."""
    return round(100 * quantile, 10)


def act_mode_name(value: str) -> str:
    """Name of a mode of acting; raises ValueError."""
    names = [m.name.lower() for m in ActMode if m]
    if value not in names:
        raise ValueError(f"use one of {', '.join(names)}")
    return value


class BudgetSettings(Settings):
    """Budget of a tenant, a family or both, until `trefoil budget set`, and after its `--reset`."""

    tenant: str = ""
    """Name in the dispatchers' tenants_file; empty: all tenants together."""
    family: str = ""
    """Empty: all families together."""
    grams_per_day: float = Field(default=0.0, ge=0)
    """Grams of CO2 a day, as reports book them; 0: no limit."""
    joules_per_day: float = Field(default=0.0, ge=0)
    """Joules of devices a day; 0: no limit."""
    least_accuracy: float = Field(default=0.0, ge=0, le=1)
    """What accuracy floors of requests may fall to once 90 % are spent; 0: they stay."""
    time_zone: str = "UTC"
    """IANA name of the zone whose midnight begins a day."""

    def stated(self) -> Budget:
        """Budget of these settings."""
        return Budget(**self.model_dump())

    @classmethod
    def of(cls, stored: Budget) -> "BudgetSettings":
        """Settings that state this budget."""
        values = asdict(stored) | {"time_zone": stored.time_zone or "UTC"}
        return cls(**{name: value for name, value in values.items() if name != "number"})


class TriggerSettings(Settings):
    """Settings of the triggers: thresholds of controller/observe/core/triggers.py, by the same names."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("carbon_base_g_per_kwh", "load_down_ratio", "load_sigmas", "load_up_ratio", "slo_margin", "slo_requests_min"),
        FIXED,
    )

    carbon_ratio: float = Field(default=0.05, gt=0)
    """By how much intensity must have moved since the last plan."""
    load_hold_s: float = Field(default=5.0, ge=0)
    """How long p90 demand must be off the planned one."""
    slo_hold_s: float = Field(default=3.0, ge=0)
    """How long attainment must be below the quantile."""
    slo_rest_s: float = Field(default=10.0, ge=0)
    """No plan for the SLO sooner than this after another."""
    loss_hold_s: float = Field(default=3.0, ge=0)
    """For how long a device or slice of the plan must be gone."""


class RolloutSettings(Settings):
    """Settings of rollouts: timeouts, tries and periods."""

    REMOVED: ClassVar[Mapping[str, str]] = {"refusal_retry_s": FIXED}

    apply_timeout_s: float = Field(default=5.0, gt=0)
    """How long an agent may take to accept its plan."""
    apply_tries: int = Field(default=3, ge=1)
    """How often it is asked in a row."""
    ready_timeout_s: float = Field(default=90.0, gt=0)
    """How long a step may take until its slices answer."""
    ack_timeout_s: float = Field(default=10.0, gt=0)
    """How long to wait for a dispatcher that is alive but does not take the table."""
    drain_timeout_s: float = Field(default=30.0, gt=0)
    """After it the agent stops the slice; its requests in flight may fail."""
    poll_s: float = Field(default=0.1, gt=0)
    """How often agents and acknowledgements are looked at."""
    retry_s: float = Field(default=10.0, gt=0)
    """Between attempts at a halted rollout."""


class ExploreSettings(Settings):
    """How candidates are measured on the running system."""

    REMOVED: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("meter_wait_s", "pause_s", "p95_requests_min", "backlog_s_max", "queue_share_max"), FIXED
    )

    settle_s: float = Field(default=2.0, ge=0)
    """After a rollout, before load windows count."""
    settle_max_s: float = Field(default=10.0, gt=0)
    """How long the queue left by the rollout may take to drain; from cold, to shrink."""
    exploration_max_s: float = Field(default=900.0, gt=0)
    """After it an exploration ends, whatever its planner wants; time without any load does not count."""
    p95_ratio_max: float = Field(default=4.0, gt=1)
    """A p95 of more than this times the SLO breaks a measurement off."""


class FixedDemand(Settings):
    """Demand that is planned for whatever comes: a capacity that was promised, or an experiment."""

    rate_per_s: float = Field(gt=0)
    """Mean rate."""
    rate_p90_per_s: float = Field(default=0.0, ge=0)
    """0: the rate itself."""
    items_mean: float = Field(default=1.0, gt=0)
    """Items of a request."""
    gap_scv: float = Field(default=1.0, ge=0)
    """Squared coefficient of variation of the gaps between arrivals; 1: Poisson."""

    def demand(self, family: str, now_s: float) -> Demand:
        """Demand as a planner sees it; its forecast says where it comes from."""
        high_per_s = max(self.rate_per_s, self.rate_p90_per_s)
        forecast = LoadForecast(
            family, "fixed", now_s, mean_per_s=self.rate_per_s, p90_per_s=high_per_s, max_per_s=high_per_s
        )
        return Demand(family, "", self.rate_per_s, high_per_s, self.items_mean, self.gap_scv, forecast)


class ControlSettings(Settings):
    """Settings by which the controller decides; `control` of a scenario is this table."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        **{name: f"set parts.forecaster.{name}" for name in ("smooth_s", "slope_s")},
        **dict.fromkeys(
            (
                "demand_initial_hold_s", "growth_ratio_max", "history_max", "lookback_s", "receipts", "slo_boost_max",
                "slo_boost_ratio", "slope_sigmas",
            ),
            FIXED,
        ),
        "retry_s": "set rollout.retry_s, in a scenario control.rollout.retry_s",
    }  # fmt: skip

    max_watts: float = Field(default=0.0, ge=0)
    """Cap on the fleet's planned mean power [W]; 0: none. A command (`trefoil objective fleet`) wins until its
    `--reset`."""
    pue: float = Field(default=1.2, ge=1)
    """Power usage effectiveness of the site: joules of devices times this are counted."""
    tick_s: float | None = Field(default=None, gt=0)
    """Period of the loop; scenarios: 1 s by request, `step_s` in fluid."""
    tick_min_s: float = Field(default=0.0, ge=0)
    """Least time after a decision before a planner's timer runs it again."""
    move_horizon_s: float = Field(default=600.0, gt=0)
    """Wall time over which a reconfiguration has to pay back."""
    demand_initial_per_s: dict[str, float] = Field(default_factory=dict)
    """Demand to plan for at first, by family; scenarios: the mean of the first ten minutes."""
    demand_fixed: dict[str, FixedDemand] = Field(default_factory=dict)
    """Planned for instead of what is observed, by family; what arrives is still counted and reported."""
    causes: tuple[str, ...] | None = None
    """Triggers instead of the policy's; start, loss, objective and tick are always on."""
    start_s: float | None = Field(default=None, ge=0)
    """Start of a Triton, by which growing load is foreseen; scenarios: `costs.start_s`."""
    slo_boost_wear_s: float = Field(default=60.0, gt=0)
    """Decay time of the raised demand after SLO breaches; longer with modelled profiles."""
    measure_s: float | None = Field(default=None, gt=0)
    """Span of load windows for latency and attainment; scenarios: 10 s, at least a tick."""
    triggers: TriggerSettings = TriggerSettings()
    rollout: RolloutSettings = RolloutSettings()
    explore: ExploreSettings = ExploreSettings()

    @field_validator("causes")
    @classmethod
    def _causes(cls, value: tuple[str, ...] | None) -> tuple[str, ...] | None:
        for cause in value or ():
            if cause not in CAUSES:
                raise ValueError(f"no such trigger {cause!r}; use some of {', '.join(CAUSES)}")
        return value


class ControllerSettings(ServiceSettings, ControlSettings):
    """Settings of `python -m controller`."""

    admin_address: str = "127.0.0.1:8102"
    page_address: str = ""
    """host:port of the live page, which asks for the tokens of the admin server; empty = none."""
    tick_s: float = Field(default=0.5, gt=0)
    start_s: float = Field(default=3.0, ge=0)
    measure_s: float = Field(default=10.0, gt=0)
    policy: str = "exact"
    """Row of the table, or one's own as module:ROW."""
    preset: str = ""
    """Named set of settings of the planner, e.g. artifact; trefoil/core/policies.py."""
    planner: str = ""
    """Another one of the table, or one's own as module:Class; empty: the policy's."""
    forecaster: str = ""
    """Another one of the table, or one's own as module:Class; empty: the policy's."""
    parts: dict[str, dict[str, Value]] = Field(default_factory=dict)
    """Settings of planner and forecaster by their names, e.g. parts.forecaster.smooth_s; over those of the policy."""
    own_parts: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Your routers, queues and governors (module:Class, by kind) that pinned plans may name."""
    model_repository: Path = Path("model_repository")
    """Folder of families."""
    profile_overrides: dict[str, Path] = Field(default_factory=dict)
    """Another profile.csv than the family's own, by family."""
    objectives: tuple[ObjectiveSettings, ...] = ()
    budgets: tuple[BudgetSettings, ...] = ()
    carbon: CarbonSettings = CarbonSettings()
    mode: str = "act"
    """observe: meter only; advise: plan; act: roll out. `trefoil mode` wins until its `--reset`."""
    declared: bool = False
    """Objectives, budgets, mode and max_watts are what the settings files say, also once they change: commands are
    refused."""
    seed: int = Field(default=0, ge=0)
    """Of planners that draw."""
    other_zones: tuple[OfferingZone, ...] = ()
    """Controllers of other zones, whose offers jobs that name these zones are planned with."""
    agent_tls_name: NodeNameForm = "{node}"
    """Name that the certificate of a power agent must have (subjectAltName); {node} is the node's. Equal for controller
    and agents."""
    plan_key_file: Path | None = None
    """File with the key that signs plans (docs/howto/secrets.md)."""
    embodied_lifetime_years: float = Field(default=4.0, gt=0)
    """Years over which reports spread a device's `embodied_g`."""
    solve_timeout_s: float = Field(default=20.0, gt=0)
    """A planner that takes longer is abandoned: the last plan stays and the decision says so."""
    node_stale_s: float = Field(default=5.0, gt=0)
    """A node whose status is older is out of plans."""
    carbon_stale_intervals: float = Field(default=2.0, gt=0)
    """A reading is called carried once it is older than so many of its intervals."""
    decisions_max: int = Field(default=2_000, ge=1)
    """Decisions that are kept, on disk and in Redis."""
    plans_kept: int = Field(default=20, ge=2)
    """Plans that can be gone back to."""

    @field_validator("mode")
    @classmethod
    def _mode(cls, value: str) -> str:
        return act_mode_name(value)

    @field_validator("policy")
    @classmethod
    def _policy(cls, value: str) -> str:
        try:
            policies.policy(value)
        except NotFound as error:
            raise ValueError(error.remedy) from error
        return value

    @field_validator("own_parts")
    @classmethod
    def _own(cls, value: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        load_own_parts(value, {}, named=True)
        return value

    @field_validator("parts")
    @classmethod
    def _kinds(cls, value: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
        for kind in value:
            if kind not in PARTS:
                raise ValueError(f"the controller has no part {kind!r}; use {' or '.join(PARTS)}")
        return value

    @model_validator(mode="after")
    def _families(self) -> "ControllerSettings":
        names = [o.family for o in self.objectives]
        if len(set(names)) < len(names):
            raise ValueError("one objective a family")
        if len(self.stated_budgets) < len(self.budgets):
            raise ValueError("one budget a tenant and family")
        check_other_zones(self.other_zones, self.carbon.zone)
        return self

    @property
    def stated_budgets(self) -> dict[BudgetKey, Budget]:
        """Budgets by tenant and family."""
        return {one.key: one for one in (each.stated() for each in self.budgets)}

    @property
    def act_mode(self) -> ActMode:
        """Mode as an enum."""
        return ActMode[self.mode.upper()]

    @property
    def thresholds(self) -> Thresholds:
        """Thresholds of the triggers, of settings and preset."""
        found = Thresholds(rate_span_s=self.rate_span_s, **self.triggers.model_dump())
        base = float(policies.PRESETS.get(self.preset, {}).get("carbon_base_g_per_kwh", 0.0))
        return replace(found, carbon_base_g_per_kwh=base) if base else found

    @property
    def rate_span_s(self) -> float:
        """Time over which a rate is counted [s]."""
        return max(RATE_SPAN_S, self.tick_s)

    @property
    def windows(self) -> WindowSettings:
        """Settings of load windows, long enough for `measure_s`."""
        return WindowSettings(measure_s=self.measure_s, keep_s=max(60.0, self.measure_s))

"""Settings of `trefoil up` and `trefoil demo`: the two files of deploy/config, typed.

`System` is what `trefoil up` starts; `Scenario` is a system plus the load and the rules that the demo fixes before it
measures anything. Unknown keys are refused, every error names field, value and remedy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self, TypeVar

from pydantic import Field, model_validator

from controller.settings import Availability, PolicyChoice, RelativeAccuracy, Slo
from trefoil.core import policies
from trefoil.core.device_types import DRIVERS
from trefoil.core.errors import NotFound, SettingError
from trefoil.core.parts import Kind, load_part
from trefoil.core.units import HOUR_S
from trefoil.installation import MODELS
from trefoil.runtime import config
from trefoil.runtime.config import FIXED, Settings

PORT_MAX: Final = 65535
# Triton ports of a simulated node: two per memory slice, eight memory slices a device (power_agent).
TRITON_PORTS_PER_DEVICE: Final = 16
PROVISIONAL_MS: Final = 200.0  # SLO while BASE is being measured; it decides nothing
# A candidate takes some 20 s to start, settle and answer 200 requests; a run of each policy, at most 15 minutes in all.
EXPLORED_STEPS: Final = 4
EXPLORED_STEP_S: Final = 70.0
QUICK_STEPS: Final = 3
QUICK_RUN_S: Final = 60.0
QUICK_SEEDS: Final = 3
SEED_STEP: Final = 1000  # between families: further apart than the seeds that are simulated
SLO_STEP_MS: Final = 1.0  # a measured SLO is rounded to it
AnySystem = TypeVar("AnySystem", bound="System")


class Fleet(Settings):
    """Fleet of one node: simulated, or this machine."""

    node: str = "node0"  # name of the node
    kind: Literal["simulated", "real"] = "simulated"  # real: the GPUs that NVML finds here, and the CPUs if they serve
    devices: tuple[str, ...] = ("A100-SXM4-40GB", "A100-SXM4-40GB")  # that are simulated; real: those of a demo

    @property
    def real(self) -> bool:
        """Whether the node is this machine."""
        return self.kind == "real"

    @property
    def devices_simulated(self) -> int:
        """Number of simulated devices."""
        return 0 if self.real else len(self.devices)

    @model_validator(mode="after")
    def _known(self) -> Self:
        for device in self.devices:
            if device not in DRIVERS and not (self.real and device.startswith("cpu:")):
                raise ValueError(f"unknown device type {device!r}; use one of {sorted(DRIVERS)}")
        if not self.devices:
            raise ValueError("a node needs at least one device")
        return self


class ServedFamily(Settings):
    """Family that is served, and whose profile of it is used."""

    name: str = "digits"  # folder of the family
    repository: Path = MODELS  # where it lies; by default one's own families, then those that ship
    # A profile.csv that stands for the family's own, e.g. one of equal joules, with which no plan can save anything.
    profile_override: Path | None = None


class OwnLatency(Settings):
    """Limits of a further family's SLO, whose percentiles are the first's."""

    latency_ms: float = Field(default=0.0, ge=0)  # 0: the first's
    ttft_ms: float | None = Field(default=None, gt=0)  # of one that streams tokens
    tpot_ms: float | None = Field(default=None, gt=0)  # of one that streams tokens


class FamilyBeside(Settings):
    """A further family, of the same repository; floors and availability are the first's."""

    REMOVED: ClassVar[Mapping[str, str]] = {"latency_ms": "set slo.latency_ms"}

    name: str  # folder of the family
    slo: OwnLatency = OwnLatency()
    demand_initial_per_s: float = Field(default=10.0, ge=0)  # to plan for until the first arrivals


class CarbonTrace(Settings):
    """Carbon trace, shown `speedup` times faster than it happened. Nothing else is scaled."""

    zone: str = "demo"  # name of the zone
    trace: Path | None = None  # None: the synthetic duck curve that ships
    trace_h: float = Field(default=48.0, gt=0)  # hours of the trace
    step_h: float = Field(default=4.0, gt=0)  # trace hours of one step
    steps: int = Field(default=12, ge=1)  # how many a demo plays
    step_s: float = Field(default=7.0, gt=0)  # wall seconds that one step lasts

    @property
    def speedup(self) -> float:
        """Speed of the trace: its seconds per wall second."""
        return self.step_h * HOUR_S / self.step_s

    @property
    def duration_s(self) -> float:
        """Length of all steps [wall s]."""
        return self.steps * self.step_s

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.steps * self.step_h > self.trace_h:
            raise ValueError(f"{self.steps} steps of {self.step_h} h are more than the trace's {self.trace_h} h")
        return self


class Floors(RelativeAccuracy):
    """Floors of the accuracy, absolute or relative to the best variant's."""

    below_best_pct: float | None = Field(default=2.0, ge=0, lt=100)
    hard_below_best_pct: float | None = Field(default=10.0, ge=0, lt=100)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.hard_floor > self.floor > 0:
            raise ValueError("hard_floor must be at most floor: it is the lower of the two")
        if (self.hard_below_best_pct or 0.0) < (self.below_best_pct or 0.0):
            raise ValueError("hard_below_best_pct must be at least below_best_pct: it is the lower of the two floors")
        return self


class FixedSlo(Slo):
    """SLO that is fixed."""

    latency_ms: float = Field(default=100.0, gt=0)


class SloRule(Settings):
    """SLO that is measured once, before the runs, and then fixed for all of them."""

    REMOVED: ClassVar[Mapping[str, str]] = {"provisional_ms": FIXED}

    percentile: float = Field(default=95.0, gt=0, lt=100)  # percentile that is measured
    factor: float = Field(default=1.5, ge=0)  # the SLO is so many times what was measured; 0: that of [slo], unchanged
    policy: str = "base"  # policy under which it is measured
    measure_s: float = Field(default=8.0, gt=0)  # seconds of one round
    rounds: int = Field(default=3, ge=1)  # of measure_s each; the median counts, so that a stumble does not decide it


class Ports(Settings):
    """Ports of everything that listens, all on loopback."""

    inference: int = 8001  # KServe v2 over gRPC
    rest: int = 0  # KServe v2 over HTTP; 0 = none
    carbon_feed_admin: int = 8101  # admin gRPC of the feed
    controller_admin: int = 8102  # ... of the controller
    power_agent_admin: int = 8103  # ... of the agent
    dispatcher_admin: int = 8104  # ... of the dispatcher
    page: int = 8106  # live page for a browser; 0 = none
    carbon_feed_metrics: int = 8111  # metrics of the feed
    controller_metrics: int = 8112  # ... of the controller
    power_agent_metrics: int = 8113  # ... of the agent
    dispatcher_metrics: int = 8114  # ... of the dispatcher
    redis: int = 8179  # Redis
    triton_base: int = 8200  # first port of the Tritons

    def shifted(self, offset: int) -> "Ports":
        """The same ports, all moved by an offset: a second system beside the first."""
        return Ports(**{name: port + offset if port else 0 for name, port in self.model_dump().items()})

    def all(self, devices: int) -> dict[str, int]:
        """Ports that may be listened on, by what they are for."""
        named = {name: port for name, port in self.model_dump().items() if port and name != "triton_base"}
        return named | {f"triton_{port - self.triton_base}": port for port in self.tritons(devices)}

    def tritons(self, devices: int) -> range:
        """Ports of the Tritons of a simulated node."""
        return range(self.triton_base, self.triton_base + TRITON_PORTS_PER_DEVICE * devices)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        ports = list(self.model_dump().values())
        if len(set(ports)) != len(ports):
            raise ValueError(f"two services share a port: {sorted(p for p in ports if ports.count(p) > 1)}")
        return self


class System(PolicyChoice):
    """Settings of a system, as `trefoil up` starts it."""

    REMOVED: ClassVar[Mapping[str, str]] = {"objective_mode": "set objective_type"}

    cluster: str = Field(default="default", pattern=r"^[a-z0-9][a-z0-9_-]{0,31}$")  # prefix of every Redis key
    preset: str = ""  # of the planner's settings, e.g. artifact for clover
    mode: Literal["observe", "advise", "act"] = "act"  # observe: meter only; advise: plan and predict; act: roll out
    objective_type: Literal["budget", "instant", "lambda"] = "budget"
    """What the floor binds: the mean of window_s, every moment, or nothing."""
    lambda_weight: float = Field(default=0.5, ge=0, le=1)  # of carbon against accuracy (CLOVER Eq. 3), of type lambda
    window_s: float = Field(default=86400.0, gt=0)  # of type budget
    move_horizon_s: float = Field(default=600.0, gt=0)  # wall time over which a reconfiguration has to pay back
    demand_initial_per_s: float = Field(default=10.0, ge=0)  # to plan for until the first arrivals
    pue: float = Field(default=1.2, ge=1)  # power usage effectiveness of the site
    triton_environment: Path | None = None  # None: the one that `trefoil setup triton` makes
    meter: Literal["nvml", "none"] = "nvml"  # none: joules and grams are unknown, and say so
    workers: int = Field(default=1, ge=1, le=64)  # processes of the dispatcher, behind one port
    seed: int = Field(default=20240607, ge=0)  # of everything that draws
    log_level: Literal["debug", "info", "warning", "error"] = "info"  # least severe lines that services log
    log_mib: int = Field(default=16, ge=1)  # size at which a log is rotated; two files of it stay of each process
    fleet: Fleet = Fleet()
    family: ServedFamily = ServedFamily()
    more_families: tuple[FamilyBeside, ...] = ()
    carbon: CarbonTrace = CarbonTrace()
    carbon_feed: dict[str, Any] = Field(default_factory=dict)  # settings of the feed, e.g. provider = "neso"
    power_agent: dict[str, Any] = Field(default_factory=dict)  # settings of the agent, e.g. docker_image, cpu = "serve"
    slo: FixedSlo = FixedSlo()
    accuracy: Floors = Floors()
    availability: Availability = Availability()
    ports: Ports = Ports()
    port_offset: int = 0  # added to every port, for a second system on this machine

    @property
    def demands_initial_per_s(self) -> dict[str, float]:
        """Demand of every family to plan for until its first arrivals."""
        first = {self.family.name: self.demand_initial_per_s}
        return first | {each.name: each.demand_initial_per_s for each in self.more_families}

    def slo_of(self, family: str) -> Slo:
        """SLO of a family: a further one has the first's percentiles, and its latency where it states none."""
        own = {each.name: each.slo.model_dump() for each in self.more_families}.get(family)
        if own is None:
            return self.slo
        return self.slo.model_copy(update=own | {"latency_ms": own["latency_ms"] or self.slo.latency_ms})

    @property
    def listening_ports(self) -> Ports:
        """Ports that are really used: with the offset."""
        return self.ports.shifted(self.port_offset)

    @property
    def policies_run(self) -> tuple[str, ...]:
        """Names of the policies that will run."""
        return (self.policy,)

    @model_validator(mode="after")
    def _parts_exist(self) -> Self:
        from trefoil.simulator.scenario.policy_check import check_policy

        for name in self.policies_run:
            try:
                check_policy(self.policy_row(name))
            except NotFound as error:
                raise SettingError("unknown policy", field="policy", value=name, remedy=error.remedy) from error
        return self

    @model_validator(mode="after")
    def _families_once(self) -> Self:
        if len(self.demands_initial_per_s) <= len(self.more_families):
            raise ValueError("more_families names a family twice, or the first one again; give each a name of its own")
        return self

    @model_validator(mode="after")
    def _ports_exist(self) -> Self:
        moved = [port + self.port_offset for port in self.ports.all(self.fleet.devices_simulated).values()]
        if min(moved) < 1 or max(moved) > PORT_MAX:
            raise ValueError(f"port_offset {self.port_offset} moves a port out of 1..{PORT_MAX}")
        return self


class OfferedLoad(Settings):
    """Offered load: Poisson at a rate that doubles once and returns."""

    base_per_s: float = Field(default=26.0, gt=0)  # rate at first and at last
    peak_per_s: float = Field(default=52.0, gt=0)  # rate in between
    peak_from: float = Field(default=0.35, ge=0, le=1)  # share of the run at which the ramp up starts
    peak_until: float = Field(default=0.70, ge=0, le=1)  # share of the run at which the ramp down ends
    ramp_s: float = Field(default=6.0, gt=0)  # how long the way up takes, and the way down
    permute_labels: bool = False  # a control: with permuted labels the measured accuracy must fall to chance
    items_mean: float = Field(default=1.0, ge=1)  # images of a request: normal, rounded, clipped to 1 and items_max
    items_sd: float = Field(default=0.0, ge=0)  # standard deviation of that law
    items_max: int = Field(default=1, ge=1)  # at most the max_batch_size of the family's config.pbtxt

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.items_mean > self.items_max:
            raise ValueError(f"items_mean {self.items_mean} is above items_max {self.items_max}; raise items_max")
        if self.peak_from >= self.peak_until:
            raise ValueError(f"peak_from {self.peak_from} must be before peak_until {self.peak_until}")
        return self

    def points(self, duration_s: float) -> tuple[tuple[float, float], ...]:
        """Points (second, rate per second) between which the offered rate is linear."""
        up, down = self.peak_from * duration_s, self.peak_until * duration_s
        ramp = min(self.ramp_s, (down - up) / 3)  # a short run keeps a plateau
        return (
            (0.0, self.base_per_s),
            (up, self.base_per_s),
            (up + ramp, self.peak_per_s),
            (down - ramp, self.peak_per_s),
            (down, self.base_per_s),
            (duration_s, self.base_per_s),
        )


class FamilyOffered(FamilyBeside):
    """A further family of a demo, with its load."""

    copy_of: str = ""  # a copy of that family by this name: its weights, versions, profile and labelled images
    load: OfferedLoad = OfferedLoad()


class DemoScenario(System):
    """Scenario of a demo: a system, the load on it, and the policies that meet both in turn."""

    name: str = "demo"  # name in the report
    policies: tuple[str, ...] = ("base", "static_mix", "exact")  # policies that are played, one after the other
    more_families: tuple[FamilyOffered, ...] = ()
    dynamic_batching: bool = False  # Triton makes a batch of the requests that wait
    stages: dict[str, int] = Field(default_factory=dict)  # that best variants of families are cut into, by family
    stages_items: int = Field(default=1, ge=1)  # in the pass by whose roofline they are cut and feel the clock
    warmup_s: float = Field(default=6.0, ge=0)  # of load at the base rate before each run; sent, answered, not counted
    simulated_seeds: int = Field(default=8, ge=1)  # that say how far one live run is to be believed, its own first
    load: OfferedLoad = OfferedLoad()
    slo_rule: SloRule = SloRule()

    @property
    def duration_s(self) -> float:
        """Length of one run [wall s]."""
        return self.carbon.duration_s

    @property
    def loads(self) -> dict[str, OfferedLoad]:
        """Offered load by family, the first one's first."""
        return {self.family.name: self.load} | {each.name: each.load for each in self.more_families}

    @property
    def seeds(self) -> dict[str, int]:
        """Seed of each family's arrivals: apart, or equal loads would arrive together."""
        return {name: self.seed + SEED_STEP * n for n, name in enumerate(self.loads)}

    def judged(self, measured_ms: Mapping[str, float]) -> "DemoScenario":
        """The same scenario with each family's SLO by the rule, from its measured percentile [ms]."""
        rule = self.slo_rule
        slo_ms = {name: max(SLO_STEP_MS, float(round(rule.factor * found))) for name, found in measured_ms.items()}
        found = {"percentile": rule.percentile, "latency_ms": slo_ms[self.family.name]}
        slo = self.slo.model_copy(update=found)
        others = tuple(
            each.model_copy(update={"slo": each.slo.model_copy(update={"latency_ms": slo_ms[each.name]})})
            for each in self.more_families
        )
        return self.model_copy(update={"slo": slo, "more_families": others})

    @property
    def policies_run(self) -> tuple[str, ...]:
        """Names of the policies that will run, with the one that the SLO is measured with."""
        return (*self.policies, *([self.slo_rule.policy] if self.slo_rule.factor else []))

    @model_validator(mode="after")
    def _comparable(self) -> Self:
        if self.carbon_feed:
            raise ValueError("a demo plays a trace; use carbon_feed with trefoil up")
        cpus = all(device.startswith("cpu:") for device in self.fleet.devices)
        if self.fleet.real and not (cpus and self.power_agent.get("cpu") == "serve"):
            raise ValueError(
                "a demo plays simulated GPUs, or this machine's CPUs: fleet.devices = ['cpu:2'] and power_agent.cpu = "
                "'serve'; use GPUs with trefoil up"
            )
        if len(set(self.policies)) < 2:
            raise ValueError("policies must name one and one to compare it with, e.g. ['base', 'exact']")
        if len(set(self.policies)) != len(self.policies):
            raise ValueError(f"policies {self.policies} names one twice")
        if wrong := [f"{name} = {n}" for name, n in self.stages.items() if name not in self.loads or n < 2]:
            raise ValueError(f"stages {wrong}: name families that are served, each with 2 or more")
        return self

    def shortened(self) -> "DemoScenario":
        """The same scenario for a first look: its last two policies, and runs of QUICK_RUN_S.

        The SLO is the one that the file gives, where it gives one. Where a planner measures candidates, steps stay as
        long as they are, and are QUICK_STEPS.
        """
        names = self.policies[-2:]
        carbon, rule = self.carbon, self.slo_rule
        if any(measures_candidates(self.policy_row(name)) for name in names):
            shorter: dict[str, Any] = {"steps": min(carbon.steps, QUICK_STEPS)}
        else:
            shorter = {"step_s": min(carbon.step_s, QUICK_RUN_S / carbon.steps)}
        ratio = shorter.get("step_s", carbon.step_s) / carbon.step_s
        given = "slo" in self.model_fields_set
        shorter_rule = {"measure_s": min(rule.measure_s, 4.0)} | ({"factor": 0.0} if given else {})
        load = self.load.model_copy(update={"ramp_s": self.load.ramp_s * ratio})
        return self.model_copy(
            update={
                "policies": names,
                "carbon": carbon.model_copy(update=shorter),
                "slo_rule": rule.model_copy(update=shorter_rule),
                "load": load,
                "move_horizon_s": self.move_horizon_s * ratio,
                "simulated_seeds": min(self.simulated_seeds, QUICK_SEEDS),
            }
        )


def load_system(path: Path, kind: type[AnySystem], overrides: Mapping[str, Any] | None = None) -> AnySystem:
    """Read a settings file of deploy/config; `TREFOIL_UP_...` of the environment and flags (dotted keys) win over it.

    Raises:
        SettingError: naming file, field, value and remedy.
    """
    return config.load(kind, path, "TREFOIL_UP_", overrides)


def overrides_against_base(policy: str, preset: str = "") -> dict[str, Any]:
    """Overrides that play `base` and one policy; in longer steps when that policy measures on the system.

    Raises:
        NotFound: no such policy.
        SettingError: no such preset of its planner.
    """
    from controller.planners.policy_parts import with_preset

    row = policies.policy(policy)
    with_preset(row, preset)
    overrides: dict[str, Any] = {"policies": ["base", row.name] if row.name != "base" else ["base", "exact"]}
    if measures_candidates(row):
        overrides |= {"preset": preset, "carbon.steps": EXPLORED_STEPS, "carbon.step_s": EXPLORED_STEP_S}
    return {**overrides, "preset": preset} if preset else overrides


def measures_candidates(row: policies.Policy) -> bool:
    """Whether a policy's planner may measure candidates on the system."""
    from controller.planners.table import PLANNERS

    return load_part(Kind.PLANNER, row.planner, PLANNERS).traits.measures

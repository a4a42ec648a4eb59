"""What to simulate, typed: fleet, zones, families, arrivals, carbon, policy, fidelity, noise, costs.

A TOML file, or the same models made in Python. Unknown keys are refused; every error names field, value and remedy.
Times are simulated seconds; nothing is scaled but the carbon trace (`carbon.speedup`, as in the live feed).
Relative paths of a file are searched in its folder, then in the working folder, then among shipped files.
"""

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from carbon_feed.settings import TraceReading
from controller.settings import Availability, ControlSettings, ObjectiveTerms, PolicyChoice, RelativeAccuracy, Slo
from trefoil.core import policies
from trefoil.core.device_types import CPUS, device_type, profile_type
from trefoil.core.errors import NotFound, SettingError
from trefoil.core.interference import INTERFERENCE
from trefoil.core.parts import Kind
from trefoil.core.units import HOUR_S
from trefoil.installation import MODELS, find_scenario, resolve_path
from trefoil.runtime import config
from trefoil.runtime.config import FIXED, Settings
from trefoil.runtime.given.table import TimeUnit
from trefoil.simulator.scenario.policy_check import check_policy
from trefoil.simulator.scenario.request_columns import TraceOptions
from trefoil.simulator.scenario.request_trace import RequestTrace, read_trace

JOBS_MAX: Final = 10_000  # of one entry


class Node(Settings):
    """Nodes that are alike; with `count` > 1 a number is appended to the name."""

    name: str = Field(default="node", pattern=r"^[a-z0-9][a-z0-9-]*$")
    """Name of the node."""
    zone: str = "demo"
    """Zone that it draws from."""
    devices: tuple[str, ...] = Field(default=("A100-SXM4-40GB",), min_length=1)
    """Device types of its devices, in order."""
    count: int = Field(default=1, ge=1)
    """How many there are of it."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        config.register_own_device_types()  # also where no file of settings was read: a Scenario made in Python
        for device in self.devices:
            try:
                device_type(device)
            except NotFound as error:
                raise ValueError(f"{error}") from error
        if sum(profile_type(device) == CPUS for device in self.devices) > 1:
            raise ValueError("the CPUs of a node are one device; give one cpu:<cores>, or more nodes")
        return self

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all nodes."""
        return (self.name,) if self.count == 1 else tuple(f"{self.name}{i}" for i in range(self.count))


class Arrivals(Settings):
    """Arrivals of one family. One of `rate_per_s`, `points` and `trace` gives the rate; `gap_scv` its burstiness.

    `points` are (simulated second, requests per second), straight lines between them, constant beyond. A `trace` is a
    table of counts, or of single requests, which are counted by the second unless `replay` is set. It is repeated when
    it ends. Both are scaled to a mean of `rate_per_s` (of points: over what is counted); 0: as they are.
    """

    rate_per_s: float = Field(default=0.0, ge=0)
    """Mean rate."""
    points: tuple[tuple[float, float], ...] = ()
    """(simulated second, rate): straight lines between."""
    trace: Path | None = None
    """CSV or JSON lines: counts of intervals, or a row for each request."""
    column: str = ""
    """Column of the trace's counts; empty: by the header. Azure Functions: a function, app or owner."""
    time_column: str = ""
    """Of the times in the trace; empty: by the header."""
    time_unit: TimeUnit = ""
    """Of that column; empty: by the header, or as dates and seconds since 1970 say."""
    bin_s: float = Field(default=0.0, ge=0)
    """Seconds that a row counts; 0: by the header, or the rows' distance."""
    replay: bool = False
    """Play each row as one request, at its time and with the tokens of its prompt and answer. Of families with
    objectives of tokens."""
    gap_scv: float = Field(default=1.0, ge=0)
    """Squared coefficient of variation of the gaps; 1: Poisson, 0: a metronome."""
    process: Literal["renewal", "deeprecsys"] = "renewal"
    """deeprecsys: gaps of whole milliseconds, as DeepRecSys's load generator draws them; of `rate_per_s` alone."""

    def read_trace(self) -> RequestTrace:
        """Read the trace.

        Raises:
            errors.TraceError: names file, line, column and remedy.
        """
        assert self.trace is not None, "no trace"
        options = TraceOptions(self.column, self.time_column, self.time_unit, self.bin_s)
        return read_trace(self.trace, options, tokens=self.replay)

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.points and self.trace:
            raise ValueError("points and trace both give the rate; keep one of them")
        if not self.points and self.trace is None and self.rate_per_s <= 0:
            raise ValueError("no arrivals; set rate_per_s, points or trace")
        times = [at for at, _ in self.points]
        if times != sorted(times) or any(rate < 0 for _, rate in self.points):
            raise ValueError("points must ascend in time and have rates >= 0")
        if self.replay and (self.trace is None or self.gap_scv != 1.0):
            raise ValueError("replay plays the requests of a trace at their times: set trace, and leave gap_scv out")
        if self.process == "deeprecsys":
            for name, value, kept in (
                ("points", self.points, ()),
                ("trace", self.trace, None),
                ("gap_scv", self.gap_scv, 1.0),
            ):
                if value != kept:
                    why = f"{name} {value} with process deeprecsys, which is one rate_per_s and a law of its own"
                    raise ValueError(f"{why}; leave {name} out, or set process to renewal")
        return self


class FamilySlo(Slo):
    """SLO of a family: that of its family.toml, where `latency_ms` is 0."""

    latency_ms: float = Field(default=0.0, ge=0)
    """0: as family.toml says, with the percentile there."""


class SimulatedAvailability(Availability):
    """Availability of a simulation, where nothing fails."""

    replicas_min: int = Field(default=1, ge=1)
    spread_min: int = Field(default=1, ge=1)


class FamilyObjective(ObjectiveTerms):
    """Objective of a family; accuracies may be given relative to the best variant."""

    slo: FamilySlo = FamilySlo()
    accuracy: RelativeAccuracy = RelativeAccuracy()
    availability: SimulatedAvailability = SimulatedAvailability()


class Served(Settings):
    """Family that is served: whose profile, how much is asked of it, what is wanted."""

    name: str
    """Folder of the family."""
    repository: Path = MODELS
    """Where it lies; by default one's own families, then those that ship."""
    profile: Path | None = None
    """Instead of the family's own profile.csv."""
    items: float = Field(default=1.0, gt=0)
    """Rows of one request; their mean, where `items_sd` is above 0."""
    items_sd: float = Field(default=0.0, ge=0)
    """Of a normal law, clipped to 1 and the largest profiled batch. Only on shared slices."""
    batch_delay_ms: float | None = Field(default=None, ge=0)
    """How long a batch waits for more requests; null: every request is a batch."""
    allow_missing: bool = False
    """Go on when slices of the fleet are not profiled; they are not used then."""
    context_tokens: int = Field(default=0, ge=0)
    """Most tokens of prompt and answer together that its engine takes: a request of a replayed trace with more is
    refused. 0: no bound."""
    prompt_tokens_per_step: float = Field(default=0.0, ge=0)
    """Tokens of a replayed request's prompt that take its engine as long as a step of one stream; 0: none takes time
    beyond what the profile's answers have."""
    arrivals: Arrivals
    objective: FamilyObjective = FamilyObjective()

    @model_validator(mode="after")
    def _replays(self) -> Self:
        if self.arrivals.replay and not self.objective.slo.tokens:
            raise ValueError("arrivals.replay needs an objective of tokens: set objective.slo.ttft_ms or tpot_ms")
        for name in ("context_tokens", "prompt_tokens_per_step"):
            if getattr(self, name) and not self.arrivals.replay:
                raise ValueError(f"{name} is of requests of a replayed trace: set arrivals.replay, or leave it out")
        return self


class SimulatedJobs(Settings):
    """Jobs of one family that can wait: one, or one every so many hours. Terms as in `trefoil jobs submit`.

    One of `items` and `share` says how much there is to do.
    """

    family: str
    """Family of the items; one of the scenario."""
    items: int = Field(default=0, ge=0)
    """Items of each job; an item is one row."""
    share: float = Field(default=0.0, ge=0)
    """Or: rows of each job, as a share of the rows that the family's requests have until the next one, or the end."""
    arrives_h: float = Field(default=0.0, ge=0)
    """When the first is submitted."""
    every_h: float = Field(default=0.0, ge=0)
    """And again every so many hours, while its deadline is within the run; 0: once."""
    complete_by_h: float
    """Deadline, in hours after a job is submitted."""
    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Floor of the variants that answer."""
    priority: int = Field(default=0, ge=0)
    """The highest goes first; of equal ones the next deadline."""
    grams_max: float = Field(default=0.0, ge=0)
    """Most grams that the items of a job may cause; 0: no bound."""

    def arrivals_s(self, span_s: float) -> list[float]:
        """Times at which the jobs are submitted in a run [s]."""
        last_s, every_s = span_s - self.complete_by_h * HOUR_S, self.every_h * HOUR_S
        count = math.floor((last_s - self.arrives_h * HOUR_S) / every_s + 1e-9) + 1 if every_s else 1
        return [self.arrives_h * HOUR_S + n * every_s for n in range(count)]

    def check(self, place: str, families: Collection[str], span_s: float) -> None:
        """Check the terms against the scenario that they stand in.

        Raises:
            SettingError: names field, value and remedy.
        """
        if self.family not in families:
            remedy = f"one of {', '.join(sorted(families))}, or add [[families]]"
            raise SettingError("no family of this scenario", field=f"{place}.family", value=self.family, remedy=remedy)
        if (self.items > 0) == (self.share > 0):
            remedy = "set items or share, one of them, above 0"
            raise SettingError("no one size", field=f"{place}.items", value=self.items, remedy=remedy)
        if self.share > 1:
            remedy = "at most 1, as many rows as requests have; or set items"
            raise SettingError("a share above 1", field=f"{place}.share", value=self.share, remedy=remedy)
        if self.complete_by_h <= 0:
            raise SettingError(
                "a deadline in the past", field=f"{place}.complete_by_h", value=self.complete_by_h,
                remedy="hours after the job is submitted, above 0",
            )  # fmt: skip
        if (self.arrives_h + self.complete_by_h) * HOUR_S > span_s + 1e-6:
            raise SettingError(
                "a deadline after the run's end", field=f"{place}.complete_by_h", value=self.complete_by_h,
                remedy=f"at most {span_s / HOUR_S - self.arrives_h:g} for a job of hour {self.arrives_h:g}, "
                "or a longer run (hours)",
            )  # fmt: skip
        if self.every_h and len(self.arrivals_s(span_s)) > JOBS_MAX:
            raise SettingError(
                f"more than {JOBS_MAX:,} jobs", field=f"{place}.every_h", value=self.every_h,
                remedy="fewer and larger jobs",
            )  # fmt: skip


class Zone(TraceReading):
    """Source of a zone's intensity: a CSV trace, one value, or else the synthetic duck curve."""

    REMOVED: ClassVar[Mapping[str, str]] = {"column": "set value_column"}

    trace: Path | None = None
    """CSV of times and intensities."""
    constant_g_per_kwh: float | None = Field(default=None, ge=0, le=1500)
    """One value forever."""
    offset_h: float = Field(default=0.0, ge=0)
    """Begin this late in the trace."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.trace is not None and self.constant_g_per_kwh is not None:
            raise ValueError("trace and constant_g_per_kwh both give the intensity; keep one of them")
        return self


class Carbon(Settings):
    """Carbon of zones by name. The first zone of the fleet is the one that triggers."""

    zones: dict[str, Zone] = Field(default_factory=lambda: {"demo": Zone()})
    method: Literal["average", "marginal"] = "average"
    """As the trace has it."""
    factors: Literal["direct", "lifecycle"] = "lifecycle"
    """As the trace has it."""
    step_h: float = Field(default=0.0, ge=0)
    """Resample to means over this; 0: as in the trace."""
    speedup: float = Field(default=1.0, gt=0)
    """Trace seconds in a simulated second."""
    ratio_after_h: float = Field(default=24.0, ge=0)
    """Hours of the trace that must be known before routers get its ratio to the average."""
    forecast: Literal["none", "persistence", "climatology", "blend", "perfect"] = "none"
    """Forecast by which budgets are planned: a model of the feed, or the trace itself."""


class Noise(Settings):
    """Noise between truth and estimate: sigmas of log-normal factors of median 1."""

    latency: float = Field(default=0.0, ge=0, le=1)
    """One factor per device type, slice type and variant."""
    energy: float = Field(default=0.0, ge=0, le=1)
    """The same for joules."""
    device_power: float = Field(default=0.0, ge=0, le=1)
    """One factor per device."""
    seed: int | None = Field(default=None, ge=0)
    """None: the scenario's. Set, to judge several seeds of the load by one truth."""


class Costs(Settings):
    """Costs apart from serving. Defaults: the live system on one machine (docs/policies.md)."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "pue": "set control.pue",
        **dict.fromkeys(("mig_s", "start_activity", "stop_s"), FIXED),
    }

    boundary: Literal["gpu", "node"] = "gpu"
    """What counts: the devices, or host_w as well."""
    host_w: float = Field(default=0.0, ge=0)
    """Of each node without its devices, where the boundary is the node."""
    start_s: float = Field(default=2.0, ge=0)
    """Start of a Triton, before its model loads."""
    ack_s: float = Field(default=0.6, ge=0)
    """Until every dispatcher routes by a new table."""
    overhead_ms: float = Field(default=2.0, ge=0)
    """Client to dispatcher and back."""
    gap_ms: float = Field(default=2.0, ge=0)
    """Dispatcher to slice and back: the slice is taken but does not compute."""
    interference: float | None = Field(default=INTERFERENCE, ge=0)
    """Slowing of families on one slice (trefoil/core/interference.py); null: none."""


JobsRule = Literal["planned", "at_once", "evenly", "wait_awhile", "carbon_scaler"]


class Scenario(PolicyChoice):
    """Scenario of one run."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "explore": "set control.explore",
        "policy.name": "set policy",
        "policy.constants": "set parts.planner.NAME; `trefoil policy` shows the names and values of each policy",
        "policy.triggers": "set control.causes",
        **{f"policy.{name}": f"set {name}" for name in (*Kind, "parts", "params", "blind")},
    }

    name: str = "scenario"
    """Name in results."""
    seed: int = Field(default=20261121, ge=0)
    """Of everything that draws."""
    hours: float = Field(default=0.0, ge=0)
    """Length of the run; or duration_s."""
    duration_s: float = Field(default=0.0, ge=0)
    """Length of the run; or hours."""
    warmup_s: float = Field(default=60.0, ge=0)
    """Served before time zero and not counted."""
    fidelity: Literal["request", "fluid"] = "request"
    """Every request on its own, or rates (docs/simulator.md)."""
    step_s: float = Field(default=300.0, gt=0)
    """Of the fluid model."""
    series_s: float = Field(default=0.0, ge=0)
    """Width of the reported series' bins; 0: some 500 bins."""
    exact_quantiles: bool = False
    """Keep every latency (8 bytes a request): exact p50, p95 and p99."""
    nodes: tuple[Node, ...] = Field(default=(Node(),), min_length=1)
    families: tuple[Served, ...] = Field(min_length=1)
    jobs: tuple[SimulatedJobs, ...] = ()
    """Jobs that can wait."""
    jobs_rule: JobsRule = "planned"
    """When items of jobs run: by the controller's plan, or by a rule to compare it with (docs/simulator.md)."""
    carbon: Carbon = Carbon()
    blind: bool = False
    """The planner sees no profile: it has to measure."""
    control: ControlSettings = ControlSettings()
    noise: Noise = Noise()
    costs: Costs = Costs()

    @field_validator("policy", mode="before")
    @classmethod
    def _one_name(cls, given: Any) -> Any:
        if isinstance(given, Mapping):
            remedies = [f"{key}: {cls.REMOVED.get(f'policy.{key}', 'remove it')}" for key in given]
            raise SettingError("is a name, not a table", field="policy", remedy="; ".join(remedies))
        return given

    @property
    def planned_row(self) -> policies.Policy:
        """Row of the policy as plans bear it. As in a live system, plans know nothing of another router, queue or
        governor that is put in its place."""
        return self.policy_row(kinds=(Kind.PLANNER, Kind.FORECASTER))

    @model_validator(mode="after")
    def _whole(self) -> Self:
        try:
            played = self.policy_row()
        except NotFound as error:
            raise SettingError("unknown policy", field="policy", value=self.policy, remedy=error.remedy) from error
        if (self.hours > 0) == (self.duration_s > 0):
            raise ValueError("set hours or duration_s, one of them, above 0")
        check_policy(played, fluid=self.fidelity == "fluid", simulated=True)
        if self.exact_quantiles and self.fidelity == "fluid":
            raise ValueError("exact_quantiles needs fidelity request: a flow has no single latencies")
        timed = [one.name for one in self.families if one.objective.slo.tokens]
        if timed and self.fidelity == "fluid":
            raise ValueError(f"objectives of tokens need fidelity request: {timed[0]} has slo.ttft_ms or slo.tpot_ms")
        names = [name for node in self.nodes for name in node.names]
        if len(set(names)) < len(names):
            raise ValueError(f"two nodes have one name: {sorted(n for n in names if names.count(n) > 1)}")
        served = [family.name for family in self.families]
        if len(set(served)) < len(served):
            raise ValueError(f"a family occurs twice: {sorted(n for n in served if served.count(n) > 1)}")
        for number, jobs in enumerate(self.jobs):
            jobs.check(f"jobs.{number}", served, self.span_s)
        for node in self.nodes:
            if node.zone not in self.carbon.zones:
                known = ", ".join(sorted(self.carbon.zones))
                raise ValueError(
                    f"node {node.name} lies in zone {node.zone!r}, which has no carbon; known zones: {known}; "
                    f"add [carbon.zones.{node.zone}] or correct the node's zone"
                )
        return self

    @classmethod
    def load(cls, path: Path | str, overrides: Mapping[str, Any] | None = None) -> "Scenario":
        """Read a TOML file, or one that ships by its bare name; keys of `overrides` may be dotted.

        Raises:
            errors.NotFound: no such file; names those that ship.
            errors.SettingError: names field, value and remedy.
        """
        file = find_scenario(Path(path))
        return config.load(cls, file, overrides=overrides)._located(file.parent)

    def _located(self, folder: Path) -> "Scenario":
        """The scenario of a file in this folder, its relative paths as they are meant there."""
        families = tuple(
            served.model_copy(
                update={
                    "repository": _repository(served, folder),
                    "profile": _near(served.profile, folder),
                    "arrivals": served.arrivals.model_copy(update={"trace": _near(served.arrivals.trace, folder)}),
                }
            )
            for served in self.families
        )
        zones = {
            name: zone.model_copy(update={"trace": _near(zone.trace, folder)})
            for name, zone in self.carbon.zones.items()
        }
        return self.model_copy(update={"families": families, "carbon": self.carbon.model_copy(update={"zones": zones})})

    @property
    def span_s(self) -> float:
        """Span that is counted [s]."""
        return self.duration_s or self.hours * 3600.0

    @property
    def tick_s(self) -> float:
        """Period of the controller [s], and the width of load windows."""
        return self.control.tick_s or (1.0 if self.fidelity == "request" else self.step_s)

    @property
    def bin_s(self) -> float:
        """Width of a bin of the reported series."""
        return self.series_s or max(self.tick_s, self.span_s / 500)


def _near(path: Path | None, folder: Path) -> Path | None:
    """A path as a file in `folder` means it: beside that file, else as it is where something is, else as shipped."""
    if path is None or path.is_absolute():
        return path
    beside = folder / path
    return beside if beside.exists() else path if path.exists() else resolve_path(path)


def _repository(served: Served, folder: Path) -> Path:
    """Repository of a family: the one beside the file where that holds it, else as it is."""
    beside = folder / served.repository
    return beside if (beside / served.name).is_dir() else served.repository

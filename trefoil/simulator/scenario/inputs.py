"""From a scenario to what a run needs: truth and estimate, objectives, arrivals, settings. Refuses by name.

Everything may also be given from Python, in memory: a catalogue, a truth, arrival times, intensities, a planner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from controller.loop.core.objectives import accept_objective
from controller.planners.policy_parts import planner_of, planner_settings, shares_slices, with_policy_parts
from controller.planners.profile_rows import effective_row, fits
from controller.settings import CarbonSettings, ControllerSettings
from controller.thresholds import WindowSettings
from power_agent.clocks.core.device_governor import DeviceGovernor
from power_agent.clocks.core.slice_latencies import SliceLatencies
from trefoil.core import errors
from trefoil.core.brains import Planner
from trefoil.core.catalog import Catalog, Family
from trefoil.core.common import ProfileRow
from trefoil.core.cpus.rows import QUOTAS, RANGES
from trefoil.core.device_types import device_type, engine_of, profile_type
from trefoil.core.fleet import DeviceKind, DeviceType
from trefoil.core.objective import Objective
from trefoil.core.parts import Kind, PartSettings, as_live_planner
from trefoil.core.policies import Policy
from trefoil.core.queueing import ServiceTime, quantiles_ms, service_time
from trefoil.runtime import codec
from trefoil.runtime.given.repository_names import CONFIG_BYTES_MAX, boundary, read_text
from trefoil.runtime.repository import family_folder, load_family
from trefoil.simulator.scenario.arrivals import (
    ArrivalSource,
    ArrivalStream,
    DeepRecSysArrivals,
    Rate,
    RecordedArrivals,
    ReplayedArrivals,
    counts_as_rate,
)
from trefoil.simulator.scenario.carbon import Intensity, carbon_read, intensity_of
from trefoil.simulator.scenario.policy_check import load_parts
from trefoil.simulator.scenario.schema import Scenario, Served
from trefoil.simulator.scenario.truth import Estimate, Truth, pair

NEVER_STALE_S: Final = 1e10
CV_MAX: Final = 2.5
"""Most of a coefficient of variation that quantiles of a profile state: beyond it the law has no median."""


@dataclass(frozen=True, slots=True)
class Provided:
    """Values handed over from Python instead of read from files.

    catalog  the planner's estimate (families and rows); truth: what holds before noise, if that is another.
    knows_truth  the planner gets the true figures of these rows, noise included.
    arrivals family -> arrival times [s], ascending, from -warmup_s on.
    carbon   zone -> (seconds per value, values [g/kWh]) from time zero on.
    carbon_before  zone -> values [g/kWh] as long as the zone's own, before time zero, oldest first.
    planner  an object with plan(view, rng), or ask/tell.
    """

    catalog: Catalog | None = None
    truth: Catalog | None = None
    knows_truth: bool = False
    arrivals: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    carbon: Mapping[str, tuple[float, Sequence[float]]] = field(default_factory=dict)
    carbon_before: Mapping[str, Sequence[float]] = field(default_factory=dict)
    planner: Planner | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """Device of the fleet."""

    name: str
    node: str
    zone: str
    type: DeviceType


@dataclass
class Inputs:
    """Inputs of a run: all that it is made of."""

    scenario: Scenario
    devices: tuple[Device, ...]
    truth: Truth
    estimate: Estimate
    objectives: Mapping[str, Objective]
    items: Mapping[str, float]
    arrivals: Mapping[str, ArrivalSource]
    carbon: Mapping[str, Intensity]
    policy: Policy
    planner: Planner

    @property
    def zone(self) -> str:
        """Zone whose carbon triggers: that of the first node."""
        return self.devices[0].zone

    def latencies(self) -> SliceLatencies:
        """Latencies for governors, of which nothing is known yet."""
        found = SliceLatencies(self.estimate.catalog)
        found.aim(self.objectives.values(), {})
        return found

    def governed(self, latencies: SliceLatencies) -> DeviceGovernor:
        """Governor of one device."""
        chosen = self.scenario
        return DeviceGovernor(chosen.governor, chosen.policy_row().settings.get(Kind.GOVERNOR, {}), latencies)


def prepare(scenario: Scenario, given: Provided | None = None) -> Inputs:
    """Prepare a run: read and check everything that its scenario names.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    given = given or Provided()
    devices = _devices(scenario)
    known = _batching(given.catalog or _catalog(scenario), scenario)
    types = sorted({d.type for d in devices}, key=lambda kind: kind.name)
    for served in scenario.families:
        _check_profile(served, known.family(served.name), given.truth or known, types)
    names, arrivals = [d.name for d in devices], arrivals_of(scenario, given)
    known = _as_replayed(known, arrivals)
    truth, estimate = pair(
        known,
        names,
        scenario.noise,
        scenario.seed,
        given.truth and _as_replayed(given.truth, arrivals),
        blind=scenario.blind,
        knows_truth=given.knows_truth,
    )
    policy = scenario.planned_row
    for row in (policy, scenario.policy_row()):
        load_parts(row)
    settings = None if given.planner else planner_settings(policy)
    planner = with_policy_parts(given.planner, policy) if given.planner else planner_of("", policy)
    if scenario.blind and as_live_planner(planner) is None:
        why = f"{policy.planner} cannot plan without profiles"
        remedy = "take one that measures, e.g. clover, or set blind to false"
        raise errors.SettingError(why, field="blind", value=True, remedy=remedy)
    _check_jobs(scenario, known)
    profiled = {profile_type(kind.name) for kind in types}
    fleet_rows = Catalog(known.families, tuple(r for r in known.rows if profile_type(r.device_type) in profiled))
    return Inputs(
        scenario=scenario,
        devices=devices,
        truth=truth,
        estimate=estimate,
        objectives={s.name: _objective(s, scenario, fleet_rows, settings) for s in scenario.families},
        items={s.name: s.items for s in scenario.families},
        arrivals=arrivals,
        carbon={z: _intensity(z, scenario, given) for z in sorted({d.zone for d in devices})},
        policy=policy,
        planner=planner,
    )


def _devices(scenario: Scenario) -> tuple[Device, ...]:
    return tuple(
        Device(f"{name}/{'cpu' if kind.kind == DeviceKind.CPU else f'gpu{i}'}", name, node.zone, kind)
        for node in scenario.nodes
        for name in node.names
        for i, kind in enumerate(map(device_type, node.devices))
    )


def _catalog(scenario: Scenario) -> Catalog:
    families: list[Family] = []
    rows: list[ProfileRow] = []
    for served in scenario.families:
        family, own = load_family(family_folder(served.repository, served.name), served.profile)
        families.append(family)
        rows += own
    return Catalog(tuple(families), tuple(rows))


def _check_jobs(scenario: Scenario, known: Catalog) -> None:
    """Check that items of the scenario's jobs can run: on slices that serve one family each."""
    if scenario.jobs and shares_slices(scenario.policy_row()):
        remedy = "take another policy, e.g. exact, or remove [[jobs]]"
        raise errors.SettingError(
            "shares slices, and items of jobs run on slices of one family", field="policy", value=scenario.policy,
            remedy=remedy,
        )  # fmt: skip
    for number, jobs in enumerate(scenario.jobs):
        family = known.family(jobs.family)
        if family.generative:
            raise errors.SettingError(
                "jobs of generative families are not planned", field=f"jobs.{number}.family", value=jobs.family,
                remedy="name a family that is not generative",
            )  # fmt: skip
        best = max(family.variants, key=lambda variant: variant.accuracy)
        if jobs.min_accuracy > best.accuracy:
            raise errors.SettingError(
                f"no variant of {family.name} is that accurate", field=f"jobs.{number}.min_accuracy",
                value=jobs.min_accuracy, remedy=f"at most {best.accuracy:g}, that of {best.name}",
            )  # fmt: skip


def _batching(known: Catalog, scenario: Scenario) -> Catalog:
    """The catalogue in which those families form batches that do so in the scenario, whatever their files say."""
    joins = {served.name: served.batch_delay_ms is not None for served in scenario.families}
    if all(family.batching == joins.get(family.name, False) for family in known.families):
        return known
    families = tuple(replace(family, batching=joins.get(family.name, False)) for family in known.families)
    return replace(known, families=families)


def _as_replayed(known: Catalog, arrivals: Mapping[str, ArrivalSource]) -> Catalog:
    """The catalogue as a profiler would measure it under replayed traces: steps take as long as before, answers have as
    many as the trace's, with their spread."""
    sources = {name: one for name, one in arrivals.items() if isinstance(one, ReplayedArrivals)}
    if not sources:
        return known
    rows = []
    for row in known.rows:
        if (source := sources.get(row.family)) is not None:
            steps = float(source.steps.mean())
            longer = steps / (known.family(row.family).tokens_mean + 1)
            mean_ms, cv = service_time(row).mean_ms * longer, min(CV_MAX, float(source.steps.std()) / steps)
            p50_ms, p95_ms, p99_ms = quantiles_ms(ServiceTime(mean_ms, cv))
            row = replace(
                row, latency_ms_p50=p50_ms, latency_ms_p95=p95_ms, latency_ms_p99=p99_ms,
                throughput_per_s=row.throughput_per_s / longer,
                energy_active_j_per_batch=row.energy_active_j_per_batch * longer,
            )  # fmt: skip
        rows.append(row)
    families = [replace(f, tokens_mean=sources[f.name].tokens_mean) if f.name in sources else f for f in known.families]
    return Catalog(tuple(families), tuple(rows))


def _check_profile(served: Served, family: Family, catalog: Catalog, types: Sequence[DeviceType]) -> None:
    """The truth has to know every slice that may be made; a planner may do with less."""
    missing, found = [], 0
    for kind in types:
        if kind.kind == DeviceKind.CPU:  # any size follows from those that are profiled
            bare = [v.name for v in family.variants if not _cpu_profiled(catalog, family.name, v.name)]
            if len(bare) < len(family.variants):
                missing += [f"{variant} on {kind.name}" for variant in bare]
                found += len(family.variants) - len(bare)
            continue
        engine = engine_of(kind)
        for shape in kind.slice_types:
            for variant in family.variants:
                if not fits(shape, variant) or engine not in (None, (family.name, variant.name)):
                    continue
                if effective_row(catalog, kind, shape, family, variant, served.items) is None:
                    missing.append(f"{variant.name} on {shape.name} of {kind.name}")
                else:
                    found += 1
    if (missing and not served.allow_missing) or not found:
        absent = missing[:3] or [kind.name for kind in types]
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise errors.ProfileMissing(
            f"the profile has no row for {', '.join(absent)}{more}: the outcome there is unknown",
            field=f"families.{served.name}.profile",
            value=str(served.profile or family_folder(served.repository, served.name) / "profile.csv"),
            remedy="profile these slices, give another profile, or set allow_missing = true to leave them unused"
            if found
            else "profile the family on a device type of the fleet, or give another profile",
        )


def _cpu_profiled(catalog: Catalog, family: str, variant: str) -> bool:
    return any(catalog.cpu_rows.sizes(cut, family, variant) for cut in (RANGES, QUOTAS))


def _objective(served: Served, scenario: Scenario, catalog: Catalog, planner: PartSettings | None) -> Objective:
    family, wanted = catalog.family(served.name), served.objective
    stated = family.classes.get("") if not wanted.slo.latency_ms else None
    slo_ms, quantile = stated or (wanted.slo.latency_ms, wanted.slo.percentile / 100)
    floor, hard = wanted.accuracy.floors(family.best.accuracy)
    objective = wanted.objective(
        served.name,
        slo_ms=slo_ms,
        slo_quantile=quantile,
        min_accuracy=floor,
        hard_min_accuracy=hard,
        params={**scenario.params, **wanted.params},
    )
    try:
        return accept_objective(
            objective, {}, _at_items(catalog, family, served.items), planner, pue=scenario.control.pue
        )
    except errors.InvalidInput as error:
        if error.field.removeprefix("params.") in scenario.params.keys() - wanted.params.keys():
            raise errors.SettingError(
                error.message, field=error.field, value=error.value, remedy=error.remedy
            ) from error
        raise errors.InvalidInput(f"families.{served.name}.objective: {error}") from error


def _at_items(catalog: Catalog, family: Family, items: float) -> Catalog:
    """Rows of one family as whole requests, so that an SLO is compared with what a request takes."""
    rows = []
    for kind in map(device_type, sorted({r.device_type for r in catalog.rows if r.family == family.name})):
        for shape in kind.slice_types:
            for variant in family.variants:
                row = effective_row(catalog, kind, shape, family, variant, items)
                if row is not None and fits(shape, variant):
                    rows.append(replace(row, batch=1))
    return Catalog((family,), tuple(rows))


def arrivals_of(scenario: Scenario, given: Provided | None = None) -> dict[str, ArrivalSource]:
    """Arrivals of each family, from the beginning of the warm-up on; they depend only on load and seed.

    Raises:
        errors.TraceError, errors.SettingError: a trace or rate that cannot be.
    """
    given = given or Provided()
    return {s.name: _arrivals(s, scenario, i, given) for i, s in enumerate(scenario.families)}


def traces_read(scenario: Scenario) -> tuple[str, ...]:
    """What the traces of a scenario were read as, a line each.

    Raises:
        errors.TraceError: one cannot be read.
    """
    requests = [
        f"{served.name}: {served.arrivals.read_trace()}"
        for served in scenario.families
        if served.arrivals.trace is not None
    ]
    return (*requests, *carbon_read(scenario.carbon, sorted({node.zone for node in scenario.nodes})))


def _arrivals(served: Served, scenario: Scenario, index: int, given: Provided) -> ArrivalSource:
    if served.name in given.arrivals:
        return RecordedArrivals(np.asarray(given.arrivals[served.name], dtype=np.float64))
    settings, rng = served.arrivals, np.random.default_rng([scenario.seed, 0xA221, index])
    if settings.process == "deeprecsys":
        return DeepRecSysArrivals(settings.rate_per_s, rng, -scenario.warmup_s)
    if settings.replay:
        terms = served.prompt_tokens_per_step, served.context_tokens
        return ReplayedArrivals(settings.read_trace(), settings.rate_per_s, -scenario.warmup_s, *terms)
    if settings.trace is not None:
        rate = counts_as_rate(*settings.read_trace().counted(), settings.rate_per_s)
    else:
        points = settings.points or ((0.0, settings.rate_per_s),)
        times, rates = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
        rate = Rate(times, rates)
        mean_per_s = rate.mean_per_s(0.0, scenario.span_s) if settings.points and settings.rate_per_s else 0.0
        if mean_per_s:
            rate = Rate(times, rates * (settings.rate_per_s / mean_per_s))
    return ArrivalStream(rate, settings.gap_scv, rng, -scenario.warmup_s)


def _intensity(zone: str, scenario: Scenario, given: Provided) -> Intensity:
    found, before = intensity_of(zone, scenario.carbon, given.carbon.get(zone)), given.carbon_before.get(zone)
    return found if before is None else replace(found, played=replace(found.played, lead_g_per_kwh=tuple(before)))


class SimulatedSettings(ControllerSettings):
    """Settings of the simulated controller; load windows are as wide as the tick."""

    bin_s: float = 0.5
    keep_s: float = 60.0

    @property
    def windows(self) -> WindowSettings:
        """Settings of the load windows."""
        return WindowSettings(self.bin_s, self.keep_s, self.measure_s, max(2.0, 4 * self.bin_s))


def length_confusion(served: Served) -> tuple[tuple[float, ...], ...]:
    """How often a generative family's predictor of lengths says each class of each true one; empty: it has none."""
    folder = family_folder(served.repository, served.name)
    path = folder / "lengths" / "card.json"
    if not path.exists():
        return ()
    card = codec.parse_json(read_text(path, boundary(folder.parent, folder.name), CONFIG_BYTES_MAX))
    rows = card.get("minilm", card.get("tiny"))["ordinal_mse"]["confusion"]
    return tuple(tuple(float(count) for count in row) for row in rows)


def settings_of(inputs: Inputs) -> SimulatedSettings:
    """Settings of the controller as a scenario asks for them."""
    scenario, control = inputs.scenario, inputs.scenario.control
    tick = scenario.tick_s
    measure_s = control.measure_s or max(10.0, tick)
    initial = {
        family: max(source.mean_per_s(-scenario.warmup_s, max(600.0, tick)), 1e-6)
        for family, source in inputs.arrivals.items()
    }
    return SimulatedSettings(
        policy=inputs.policy.name,
        bin_s=tick,
        keep_s=max(60.0 if tick <= 1 else 0.0, 3 * tick, measure_s),
        seed=scenario.seed,
        node_stale_s=NEVER_STALE_S,
        carbon_stale_intervals=NEVER_STALE_S,
        carbon=CarbonSettings(zone=inputs.zone, method=scenario.carbon.method, factors=scenario.carbon.factors),
        **dict(control)
        | {
            "tick_s": tick,
            "measure_s": measure_s,
            "start_s": scenario.costs.start_s if control.start_s is None else control.start_s,
            "demand_initial_per_s": initial | control.demand_initial_per_s,
        },
    )

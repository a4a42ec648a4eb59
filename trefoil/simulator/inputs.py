"""From a scenario to what a run needs: truth and estimate, objectives, arrivals, intensities. Refuses by name.

Everything may also be given from Python, in memory: a catalogue, a truth, arrival times, intensities, a planner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from carbon_feed.core.trace import Playback, bin_fits, playback
from carbon_feed.providers.trace import load_trace
from carbon_feed.settings import DEFAULT_TRACE, TraceSettings
from controller.core.decide import as_live_planner
from controller.core.objectives import accept_objective
from controller.planners.columns import effective_row, fits
from controller.planning import constants_of, planner_of, with_policy_parts
from power_agent.core.governing import Governed
from trefoil.core import errors
from trefoil.core.brains import Planner
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.catalog import Catalog, Family, ProfileRow
from trefoil.core.device_types import device_type
from trefoil.core.fleet import DeviceKind
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.parts import Kind
from trefoil.core.policies import Policy
from trefoil.runtime.repository import load_family
from trefoil.simulator.arrivals import Given, Source, stream
from trefoil.simulator.scenario import Carbon, Scenario, Served, Zone
from trefoil.simulator.truth import Estimate, Truth, pair

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class Provided:
    """What is handed over from Python instead of read from files.

    catalog  what the planner is told (families and rows); truth: what holds before noise, if that is another
    arrivals family -> arrival times [s], ascending, from -warmup_s on
    carbon   zone -> (seconds per value, values [g/kWh]) from time zero on
    planner  an object with plan(view, rng), or ask/tell
    """

    catalog: Catalog | None = None
    truth: Catalog | None = None
    arrivals: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)
    carbon: Mapping[str, tuple[float, Sequence[float]]] = field(default_factory=dict)
    planner: Planner | None = None


@dataclass(frozen=True, slots=True)
class Device:
    """One device of the fleet."""

    name: str
    node: str
    zone: str
    type: str


@dataclass(slots=True)
class Intensity:
    """Intensities of one zone over simulated time."""

    series: Series
    played: Playback
    source: str

    def reading(self, at_s: float, step: int = 0) -> CarbonReading:
        """The reading in force, or the one `step` intervals later."""
        held = self.played.at(at_s + step * self.played.wall_s)
        assert held is not None, "a looping playback never ends"
        return self._reading(held.starts_at_s, held.ends_at_s, held.intensity_g_per_kwh)

    def history(self, at_s: float, count: int) -> list[CarbonReading]:
        """Readings that have begun, oldest first."""
        bins = self.played.history(at_s, count)
        return [self._reading(b.starts_at_s, b.ends_at_s, b.intensity_g_per_kwh) for b in bins]

    def next_s(self, at_s: float) -> float:
        """When the next reading comes."""
        return self.reading(at_s).ends_at_s

    def _reading(self, starts_s: float, ends_s: float, value: float) -> CarbonReading:
        return CarbonReading(
            self.series, starts_s, ends_s, value, Quality.MEASURED, self.source, observed_at_s=starts_s, simulated=True
        )


@dataclass
class Inputs:
    """All that a run is made of."""

    scenario: Scenario
    devices: tuple[Device, ...]
    truth: Truth
    estimate: Estimate
    objectives: Mapping[str, Objective]
    items: Mapping[str, float]
    arrivals: Mapping[str, Source]
    carbon: Mapping[str, Intensity]
    policy: Policy
    planner: Planner

    @property
    def zone(self) -> str:
        """The zone that triggers: of the first node."""
        return self.devices[0].zone

    def governed(self) -> Governed:
        """The governor of one device."""
        chosen = self.scenario.policy
        return Governed(chosen.governor, chosen.runs.settings.get(Kind.GOVERNOR, {}))

    def __getstate__(self) -> dict[str, Any]:
        """Saved without the planner, which is made anew."""
        return {**self.__dict__, "planner": None}


def prepare(scenario: Scenario, given: Provided | None = None) -> Inputs:
    """Read and check everything.

    Raises:
        errors.TrefoilError: names field, value and remedy.
    """
    given = given or Provided()
    devices = _devices(scenario)
    known = given.catalog or _catalog(scenario)
    types = sorted({d.type for d in devices})
    for served in scenario.families:
        _check_profile(served, known.family(served.name), given.truth or known, types)
    names = [d.name for d in devices]
    truth, estimate = pair(known, names, scenario.noise, scenario.seed, given.truth, scenario.policy.blind)
    policy = scenario.policy.row
    params = None if given.planner else constants_of("", policy)
    planner = with_policy_parts(given.planner, policy) if given.planner else planner_of("", policy)
    if scenario.policy.blind and as_live_planner(planner) is None:
        why = f"{policy.planner} cannot plan without profiles"
        remedy = "take one that measures, e.g. clover, or set blind to false"
        raise errors.SettingError(why, field="policy.blind", value=True, remedy=remedy)
    fleet_rows = Catalog(known.families, tuple(r for r in known.rows if r.device_type in types))
    arrivals = {s.name: _arrivals(s, scenario, i, given) for i, s in enumerate(scenario.families)}
    return Inputs(
        scenario=scenario,
        devices=devices,
        truth=truth,
        estimate=estimate,
        objectives={s.name: _objective(s, scenario, fleet_rows, params) for s in scenario.families},
        items={s.name: s.items for s in scenario.families},
        arrivals=arrivals,
        carbon={zone: _intensity(zone, scenario.carbon, given) for zone in sorted({d.zone for d in devices})},
        policy=policy,
        planner=planner,
    )


def planner_for(scenario: Scenario) -> Planner:
    """The planner that a scenario names.

    Raises:
        errors.SettingError: a planner of one's own that cannot be used.
    """
    return planner_of("", scenario.policy.row)


def _devices(scenario: Scenario) -> tuple[Device, ...]:
    return tuple(
        Device(f"{name}/gpu{i}", name, node.zone, kind)
        for node in scenario.nodes
        for name in node.names
        for i, kind in enumerate(node.devices)
    )


def _catalog(scenario: Scenario) -> Catalog:
    families: list[Family] = []
    rows: list[ProfileRow] = []
    for served in scenario.families:
        family, own = load_family(served.repository / served.name, served.profile)
        families.append(family)
        rows += own
    return Catalog(tuple(families), tuple(rows))


def _check_profile(served: Served, family: Family, catalog: Catalog, types: Sequence[str]) -> None:
    """The truth has to know every slice that may be made; a planner may do with less."""
    missing, found = [], 0
    for name in types:
        kind = device_type(name)
        if kind.kind == DeviceKind.CPU:
            continue
        for shape in kind.slice_types:
            for variant in family.variants:
                if not fits(shape, variant):
                    continue
                if effective_row(catalog, kind, shape, family, variant, served.items) is None:
                    missing.append(f"{variant.name} on {shape.name} of {name}")
                else:
                    found += 1
    if missing and (not served.allow_missing or not found):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise errors.ProfileMissing(
            f"the profile has no row for {', '.join(missing[:3])}{more}: nobody knows what would happen there",
            field=f"families.{served.name}.profile",
            value=str(served.profile or served.repository / served.name / "profile.csv"),
            remedy="profile these slices, give another profile, or set allow_missing = true to leave them unused"
            if found
            else "profile the family on a device type of the fleet, or give another profile",
        )


def _objective(served: Served, scenario: Scenario, catalog: Catalog, params: Mapping[str, float] | None) -> Objective:
    family, wanted = catalog.family(served.name), served.objective
    best = family.best.accuracy
    slo_ms, quantile = family.classes.get("", (0.0, wanted.slo_quantile))
    floor, hard = wanted.min_accuracy, wanted.hard_min_accuracy
    if wanted.below_best_pct is not None:
        floor = best * (1 - wanted.below_best_pct / 100)
    if wanted.hard_below_best_pct is not None:
        hard = best * (1 - wanted.hard_below_best_pct / 100)
    objective = Objective(
        family=served.name,
        mode=ObjectiveMode[wanted.mode.upper()],
        slo_ms=wanted.slo_ms or slo_ms,
        slo_quantile=wanted.slo_quantile if wanted.slo_ms else quantile,
        min_accuracy=floor,
        hard_min_accuracy=hard,
        lambda_weight=wanted.lambda_weight,
        base_intensity_g_per_kwh=wanted.base_intensity_g_per_kwh,
        base_j_per_request=wanted.base_j_per_request,
        window_s=wanted.window_s,
        replicas_min=wanted.replicas_min,
        spread_min=wanted.spread_min,
        params=dict(scenario.policy.params),
    )
    try:
        return accept_objective(objective, {}, _at_items(catalog, family, served.items), params, pue=scenario.costs.pue)
    except errors.InvalidInput as error:
        raise errors.InvalidInput(f"families.{served.name}.objective: {error}") from error


def _at_items(catalog: Catalog, family: Family, items: float) -> Catalog:
    """Rows of one family as whole requests, so that an SLO is compared with what a request takes."""
    rows = []
    for kind in sorted({r.device_type for r in catalog.rows if r.family == family.name}):
        for shape in device_type(kind).slice_types:
            for variant in family.variants:
                row = effective_row(catalog, device_type(kind), shape, family, variant, items)
                if row is not None and fits(shape, variant):
                    rows.append(replace(row, batch=1))
    return Catalog((family,), tuple(rows))


def _arrivals(served: Served, scenario: Scenario, index: int, given: Provided) -> Source:
    if served.name in given.arrivals:
        return Given(np.asarray(given.arrivals[served.name], dtype=np.float64))
    rng = np.random.default_rng([scenario.seed, 0xA221, index])
    return stream(served.arrivals, rng, -scenario.warmup_s)


def _intensity(zone: str, carbon: Carbon, given: Provided) -> Intensity:
    series = Series(zone, Method[carbon.method.upper()], Factors[carbon.factors.upper()])
    if zone in given.carbon:
        step_s, values = given.carbon[zone]
        return Intensity(series, Playback((), tuple(map(float, values)), step_s, 0.0, 0.0), "given")
    wanted: Zone = carbon.zones[zone]
    if wanted.constant_g_per_kwh is not None:
        return Intensity(series, Playback((), (wanted.constant_g_per_kwh,), HOUR_S, 0.0, 0.0), "constant")
    options: dict[str, Any] = {"path": wanted.trace or DEFAULT_TRACE, "value_column": wanted.column}
    trace = load_trace(Path(options["path"]), TraceSettings(**options), series.factors)
    trace = replace(trace, lead_in_s=trace.lead_in_s + wanted.offset_h * HOUR_S)
    step_s = carbon.step_h * HOUR_S or trace.step_s
    if not bin_fits(trace, step_s):
        raise errors.TraceError(
            f"only {trace.body_s / HOUR_S:g} h are left of {trace.source}",
            field=f"carbon.zones.{zone}.offset_h, carbon.step_h",
            value=(wanted.offset_h, carbon.step_h),
            remedy="begin earlier, or use a smaller step or a longer trace",
        )
    played = playback(trace, bin_s=step_s, speedup=carbon.speedup, starts_at_s=0.0, created_at_s=0.0, loop=True)
    return Intensity(series, played, trace.source)

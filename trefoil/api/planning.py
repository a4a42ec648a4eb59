"""Plan a fleet from Python: what would run where, with which shares, for how many grams."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from controller.loop.core.objectives import accept_objective
from controller.planners.policy_parts import planner_of, planner_settings
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonReading
from trefoil.core.catalog import Catalog, Family
from trefoil.core.common import ProfileRow
from trefoil.core.demand import Demand
from trefoil.core.device_types import DEVICE_TYPES, device_type, is_outside_mig, profile_type
from trefoil.core.errors import Infeasible, NotFound, ProfileMissing, SettingError, one_of
from trefoil.core.fleet import DeviceState, DeviceStatus, DeviceType, FleetState, NodeStatus
from trefoil.core.objective import Objective, ObjectiveMode, floor_missed
from trefoil.core.plan import Plan
from trefoil.core.policies import policy as policy_row
from trefoil.core.units import DAY_S, HOUR_S
from trefoil.installation import repositories
from trefoil.runtime.config import register_own_device_types
from trefoil.runtime.repository import FAMILY_FILE, family_files, load_family

PER_NODE: Final = 8
QUANTILE: Final = 0.95
BELOW_BEST: Final = 0.02  # of the best variant's accuracy: the floor of `trefoil up`
FORMS: Final = frozenset({"PCIE", "NVL"})  # of a card, where there is a board of the same name without it
FLEET_EXAMPLE: Final = '"10xA100-40GB" or {"A100-40GB": 4, "T4": 2}'


@dataclass(frozen=True, slots=True)
class PlannedShare:
    """Slice of a plan: where it lies, what it serves, and its share (0..1) of the family's requests."""

    device: str
    device_type: str
    slice_type: str
    start: int
    variant: str
    share: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """Plan of a fleet for one family at one rate and intensity.

    Attributes:
        slices: those that serve, by device.
        shares: of the requests, by variant.
        asleep: devices that sleep.
        joules_per_request: of all that the fleet draws, idle and sleeping GPUs included.
        grams_per_request: the same in CO2, with PUE.
        basis: of the profile: measured, modelled or synthetic.
        why: the planner's own words.
        plan: the whole plan.
    """

    family: str
    policy: str
    slices: tuple[PlannedShare, ...]
    shares: Mapping[str, float]
    asleep: tuple[str, ...]
    accuracy: float
    floor: float
    latency_ms_p95: float
    slo_ms: float
    rate_per_s: float
    capacity_per_s: float
    joules_per_request: float
    grams_per_request: float
    basis: str
    why: str
    plan: Plan

    @property
    def missed(self) -> tuple[str, ...]:
        """What the plan misses, of a policy that does not look at it: "SLO", "floor"; its grams save nothing then."""
        late, poor = self.latency_ms_p95 > self.slo_ms, floor_missed(self.accuracy, self.floor)
        return (*(("SLO",) if late else ()), *(("floor",) if poor else ()))

    @property
    def grams_per_h(self) -> float:
        """Grams of CO2 in an hour."""
        return self.grams_per_request * self.rate_per_s * HOUR_S

    @property
    def power_w(self) -> float:
        """Power of the whole fleet [W]."""
        return self.joules_per_request * self.rate_per_s

    def frame(self) -> Any:
        """pandas DataFrame of the slices: one row each.

        Raises:
            StartError: pandas is not installed.
        """
        from trefoil.simulator.report.frames import data_frame

        columns = PlannedShare.__dataclass_fields__
        return data_frame({name: [getattr(one, name) for one in self.slices] for name in columns})


def plan(
    fleet: str | Mapping[str, int],
    family: str | Path | Family,
    rate_per_s: float,
    slo_ms: float,
    intensity: float,
    *,
    min_accuracy: float | None = None,
    profile: Sequence[ProfileRow] = (),
    policy: str = "exact",
    pue: float = 1.2,
) -> FleetPlan:
    """Plan a fleet for one family at one moment. Nothing runs, nothing is asked but the planner.

    Args:
        fleet: GPUs, e.g. "10xA100-40GB", "2xA100-40GB, 1xT4" or {"A100-40GB": 4}; a type may be named in short.
        family: name in one's own repository or among those that ship, its folder, or a `Family` with its `profile`.
        rate_per_s: requests per second, Poisson.
        slo_ms: limit of the 95th percentile of latency [ms]; 0: what family.toml says.
        intensity: of the grid [g CO2/kWh].
        min_accuracy: floor of the mean accuracy, 0..1; None: 2 % below the best variant's, as `trefoil up` has it.
        profile: rows of a `Family` that is given as such.
        policy: whose planner; `base`, `static_mix` and others to compare with.
        pue: power usage effectiveness.

    Raises:
        SettingError: a fleet, rate, SLO or intensity that cannot be.
        NotFound: no such device type, family or policy; names those that there are.
        ProfileMissing: the family is profiled on no GPU of the fleet.
        InvalidInput: an SLO or floor that no variant reaches on any slice.
        Infeasible: the fleet cannot carry that load within SLO and floor; says what is closest.
    """
    register_own_device_types()
    _check_numbers(rate_per_s=(rate_per_s, False), slo_ms=(slo_ms, True), intensity=(intensity, True))
    row, types, known = policy_row(policy), parse_fleet(fleet), _catalog(family, tuple(profile))
    _check_profiled(known, types)
    best = known.families[0].best.accuracy
    wanted = _objective(known.families[0], slo_ms, best * (1 - BELOW_BEST) if min_accuracy is None else min_accuracy)
    objective = accept_objective(wanted, {}, known, planner_settings(row), pue=pue)
    decision = planner_of("", row).plan(_view(types, known, objective, rate_per_s, intensity), np.random.default_rng(0))
    if decision.plan is None or decision.degraded:
        raise Infeasible(
            f"{policy} cannot carry {rate_per_s:g}/s of {objective.family}: {decision.degraded or decision.why}",
            remedy="more GPUs, less load, a later SLO or a lower floor",
        )
    return _told(decision.plan, known, dict(_named(types)), objective, rate_per_s, policy)


def _check_numbers(**given: tuple[float, bool]) -> None:
    """Refuse numbers that are not finite, negative, or 0 where that may not be."""
    for name, (value, zero) in given.items():
        if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
            remedy = "0 or more" if zero else "a number above 0"
            raise SettingError("is no such number", field=name, value=value, remedy=remedy)


def _check_profiled(known: Catalog, types: Sequence[DeviceType]) -> None:
    if not known.profiled_types & {profile_type(kind.name) for kind in types}:
        there = ", ".join(sorted(known.profiled_types)) or "none"
        raise ProfileMissing(
            f"{known.families[0].name} is profiled on no GPU of the fleet, only on: {there}",
            field="fleet",
            value=sorted({kind.name for kind in types}),
            remedy="name one of those, or profile the family: docs/profiles.md",
        )


def _objective(family: Family, slo_ms: float, floor: float) -> Objective:
    """What is wanted at every instant; a GPU may sleep wherever the load leaves one."""
    usual_ms, quantile = family.classes.get("", (0.0, QUANTILE))
    return Objective(
        family=family.name,
        mode=ObjectiveMode.INSTANT,
        slo_ms=slo_ms or usual_ms,
        slo_quantile=QUANTILE if slo_ms else quantile,
        min_accuracy=floor,
        replicas_min=1,
        spread_min=1,
    )


def _view(
    types: Sequence[DeviceType], known: Catalog, objective: Objective, rate_per_s: float, intensity: float
) -> PlanView:
    """An empty fleet under that load, planned for a day: what starting takes hardly counts."""
    return PlanView(
        now_s=0.0,
        fleet=_fleet_state(types),
        catalog=known,
        objectives=(objective,),
        demand=(Demand(objective.family, "", rate_per_s, rate_per_s),),
        carbon=CarbonReading(starts_at_s=0.0, ends_at_s=DAY_S, intensity_g_per_kwh=intensity),
        carbon_forecast=None,
        measured=(),
        current=None,
        trigger="plan",
        move_horizon_s=DAY_S,
        pue=objective.pue,
    )


def parse_fleet(fleet: str | Mapping[str, int]) -> list[DeviceType]:
    """Device types of a fleet, one for each GPU.

    Raises:
        SettingError: nothing in it, or no number of GPUs.
        NotFound: no such device type, or several that the short name may mean.
    """
    if isinstance(fleet, str):
        parts = [re.fullmatch(r"(?:(\d+) ?x ?)?(.+)", part.strip()) for part in fleet.split(",")]
        counted = [(found[2], int(found[1] or 1)) for found in parts if found]
    else:
        counted = list(fleet.items())
    if not counted or any(not isinstance(count, int) or count < 1 for _, count in counted):
        raise SettingError("no GPUs", field="fleet", value=fleet, remedy=f"write e.g. {FLEET_EXAMPLE}")
    return [kind for name, count in counted for kind in [named_type(name)] * count]


def named_type(name: str) -> DeviceType:
    """Device type that may be named in short: A100-40GB for A100-SXM4-40GB, T4 for Tesla T4.

    A card's form is not guessed: PCIe and NVL are said, else the other board is meant.

    Raises:
        NotFound: none has these words, or several have, and as few others beside.
    """
    if name in DEVICE_TYPES:
        return DEVICE_TYPES[name]
    words = Counter(_words(name))
    found = {kind: len(_words(kind)) for kind in DEVICE_TYPES if words <= Counter(_words(kind))}
    found = {kind: n for kind, n in found.items() if not (FORMS & set(_words(kind))) - set(words)} or found
    nearest = sorted(kind for kind, number in found.items() if number == min(found.values()))
    if len(nearest) > 1:
        raise NotFound("may be several device types", field="fleet", value=name, remedy=f"one of {nearest}")
    return device_type(nearest[0] if nearest else name)


def _words(name: str) -> list[str]:
    return re.split(r"[ -]", name.upper())


def _catalog(family: str | Path | Family, profile: tuple[ProfileRow, ...]) -> Catalog:
    if isinstance(family, Family):
        return Catalog((family,), profile)
    if isinstance(family, str):
        folders = [one / family for one in repositories()]
        family = next((folder for folder in folders if (folder / FAMILY_FILE).is_file()), Path())
        if family == Path():
            names = sorted({path.parent.name for one in repositories() for path in family_files(one)})
            given = folders[0].name
            remedy = one_of(names, given, also="its folder")
            raise NotFound("no such family", field="family", value=given, remedy=remedy)
    found, rows = load_family(family)
    return Catalog((found,), rows)


def _fleet_state(types: Sequence[DeviceType]) -> FleetState:
    devices: dict[str, list[DeviceStatus]] = {}
    for name, kind in _named(types):
        status = DeviceStatus(name, kind, DeviceState.AWAKE, mig_current=not is_outside_mig(kind.name))
        devices.setdefault(name.partition("/")[0], []).append(status)
    return FleetState(tuple(NodeStatus(node=node, devices=tuple(held)) for node, held in devices.items()))


def _named(types: Sequence[DeviceType]) -> list[tuple[str, DeviceType]]:
    return [(f"node{n // PER_NODE}/gpu{n % PER_NODE}", kind) for n, kind in enumerate(types)]


def _told(
    made: Plan, known: Catalog, types: Mapping[str, DeviceType], objective: Objective, rate_per_s: float, policy: str
) -> FleetPlan:
    (family,), (route,) = known.families, made.routes
    expected = made.expected[family.name]
    slices = tuple(
        PlannedShare(t.slice.device, types[t.slice.device].name, t.slice.slice_type, t.slice.start, t.variant, t.weight)
        for t in route.targets
    )
    shares = {v.name: sum(s.share for s in slices if s.variant == v.name) for v in family.by_accuracy()}
    bases = {row.provenance.basis.name.lower() for row in known.rows if row.provenance is not None}
    return FleetPlan(
        family=family.name,
        policy=policy,
        slices=slices,
        shares={name: share for name, share in shares.items() if share},
        asleep=tuple(d.device for n in made.nodes for d in n.devices if d.target == DeviceState.ASLEEP),
        accuracy=expected.accuracy,
        floor=objective.min_accuracy,
        latency_ms_p95=expected.latency_ms_p95,
        slo_ms=objective.slo_ms,
        rate_per_s=rate_per_s,
        capacity_per_s=expected.capacity_per_s,
        joules_per_request=expected.joules_per_request,
        grams_per_request=expected.grams_per_request,
        basis=" and ".join(sorted(bases)) or "unknown",
        why=made.why,
        plan=made,
    )

"""Scenario of a found fleet: files that `simulate`, `compare` and `up` take, and the same fleet with one lever each.

Written: scenario.toml, up.toml, a profile.csv of each family, and families/NAME/family.toml of those that no repository
has. The levers are scenarios too: what a lever may not use is left out of family and profile. Where devices have to
stay awake, each family is spread over as many as it has today.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np

from trefoil.assess.families import FittedFamily, Fitting, Terms
from trefoil.assess.finding import Found
from trefoil.assess.fitting import UNKNOWN_SIGMA
from trefoil.assess.series import Floats
from trefoil.core.device_types import DRIVERS, NO_MIG, placements, reported_type
from trefoil.core.errors import InvalidInput
from trefoil.core.fleet import DeviceKind
from trefoil.core.units import DAY_S, HOUR_S
from trefoil.profiler.profile_csv import ProfileProvenance, profile_text, write_profile
from trefoil.runtime.config import to_toml
from trefoil.simulator.scenario.schema import Scenario

REQUESTS_MAX: Final = 20_000  # that are simulated one by one; more are a flow
SPAN_MAX_S: Final = 7 * DAY_S
COVERED_MIN: Final = 0.5
PLANNER: Final = "trefoil.assess.today:AsFound"
DEMAND_STEPS: Final = (1.05, 1.25)  # to which demand is rounded up, of at most 16 devices and of more
FLUID_CONTROL: Final = {"move_horizon_s": HOUR_S, "tick_min_s": 6 * HOUR_S}


@dataclass(slots=True)
class PlayedFleet:
    """Fleet as the simulator has it: families, types by node, what each device hosts (JSON of `today.AsFound`). `zone`:
    keys of a `carbon.zones`. `left_out`: devices of servers that span several."""

    found: Found
    families: Sequence[FittedFamily]
    terms: Terms
    zone: dict[str, Any]
    date: str
    nodes: dict[str, list[str]]
    placed: dict[str, list[Any]]
    left_out: list[str]

    @property
    def shared(self) -> bool:
        """Whether families share a slice."""
        return any(len(models) > 1 for slices in self.placed.values() for _, models in slices)

    def spread(self, family: str) -> int:
        """Devices that a family is on."""
        hosted = ({name for _, models in slices for name, _ in models} for slices in self.placed.values())
        return sum(family in names for names in hosted)


def fleet_of(fitting: Fitting, families: Sequence[FittedFamily], zone: dict[str, Any], date: str) -> PlayedFleet:
    """Fleet of what was found; raises InvalidInput: every server spans several devices."""
    found, replicas = fitting.found, (one for model in fitting.found.models.values() for one in model.replicas)
    wide = {name for one in replicas if len(one.devices) > 1 for name, _ in one.devices}
    served = {model: (one.family.name, variant) for one in families for model, variant in one.served.items()}
    nodes, placed = defaultdict[str, list[str]](list), dict[str, list[Any]]()
    for name in sorted(set(found.devices) - wide, key=lambda name: (found.devices[name].host, name)):
        device, kind = found.devices[name], fitting.types[name]
        node = re.sub(r"[^a-z0-9-]+", "-", device.host.lower()).strip("-") or "node0"
        wanted = Counter(device.slices.values())
        cuts = [cut for cut in placements(kind) if not wanted - Counter(part[0] for part in cut)]
        left = list(min(cuts or placements(kind), key=lambda cut: len(cut)))
        places = dict[str, tuple[str, int, int]]()
        for key, shape in sorted(device.slices.items()):  # of equal slices the first has the lowest id
            places[key] = next((part for part in left if part[0] == shape and part not in places.values()), left[0])
        hosted = defaultdict[tuple[str, int, int], dict[str, str]](dict)
        for number, (model, replica) in enumerate(found.on(name)):
            place = places.get(dict(replica.devices)[name], left[number % len(left)])
            family, variant = served[model.name]
            hosted[place].setdefault(family, variant)
        placed[f"{node}/gpu{len(nodes[node])}"] = [[key, [*models.items()]] for key, models in sorted(hosted.items())]
        nodes[node].append(kind.name)
    if untimed := [model.name for model in found.models.values() if not model.service_ms > 0]:
        remedy = "scrape nv_inference_compute_infer_duration_us (Triton), vllm:e2e_request_latency_seconds (vLLM)"
        raise InvalidInput("no series says how long a request takes", field=", ".join(untimed), remedy=remedy)
    if not any(placed.values()):
        why, remedy = "each server spans several devices, which the simulator has not", "see the table of models"
        raise InvalidInput(why, field="models", value=", ".join(found.models), remedy=remedy)
    there = {family for slices in placed.values() for _, models in slices for family, _ in models}
    families = [one for one in families if one.family.name in there]
    return PlayedFleet(found, families, fitting.terms, zone, date, dict(nodes), placed, sorted(wide))


def rates(found: Found, fitted: FittedFamily) -> Floats:
    """Requests per second of a family by bin; where a bin is hardly covered, the mean of its hour on other days."""
    covered = np.max([model.covered_s for model in fitted.models], axis=0)
    rate = np.sum([model.count("requests") for model in fitted.models], axis=0) / np.maximum(covered, 1e-9)
    known = covered > COVERED_MIN * found.bin_s
    hours = ((found.edges_s[:-1] % DAY_S) // HOUR_S).astype(int)
    for at in np.flatnonzero(~known):
        same = known & (hours == hours[at])
        rate[at] = rate[same].mean() if same.any() else rate[known].mean() if known.any() else 0.0
    return np.asarray(rate)


def write_family(
    folder: Path, one: FittedFamily, profile: Path, date: str, *, variants: bool = True, shapes: Collection[str] = ()
) -> None:
    """Write a family.toml below `folder`, unless that is the family's own, and a profile. `variants` False: of those
    that are served alone; `shapes`: of these slices alone."""
    own = one.family.variants if variants else one.shown
    if folder != one.folder:
        family, folder = one.family, folder / one.family.name
        folder.mkdir(parents=True, exist_ok=True)
        tree: dict[str, Any] = {"name": family.name, "metric": family.metric, "generative": family.generative}
        tree |= {"tokens_mean": family.tokens_mean} if family.generative else {}
        tree["classes"] = {k: {"percentile": 100 * q, "latency_ms": ms} for k, (ms, q) in family.classes.items()}
        tree["variants"] = [asdict(variant) for variant in own]
        (folder / "family.toml").write_text(to_toml(tree), encoding="utf-8")
    source = f"trefoil assess: {'fitted to' if one.folder else 'by a law from'} found points"
    about = ProfileProvenance("the fleet that was read", date, "none", simulated=False, source=source, basis="modelled")
    names = [variant.name for variant in own]
    points = [p for p in one.points if p.variant in names and (not shapes or p.slice_type in shapes)]
    write_profile(profile, folder, profile_text(points, about, estimate_energy=False), names)


def write_files(out: Path, fleet: PlayedFleet) -> Path:
    """Write the files of a found fleet; the path of scenario.toml."""
    found, terms, zone, every, out = fleet.found, fleet.terms, fleet.zone, fleet.families, out.resolve()
    kept = found.edges_s[:-1] >= found.edges_s[-1] - SPAN_MAX_S - 1.0
    hours = {"offset_h": zone["offset_h"] + float((~kept).sum()) * found.bin_s / HOUR_S} if "offset_h" in zone else {}
    load = {one.family.name: rates(found, one)[kept] for one in fleet.families}
    fluid = sum(float(rate.sum()) for rate in load.values()) * found.bin_s > REQUESTS_MAX
    families = list[dict[str, Any]]()
    for one in every:
        name, profile = one.family.name, "profile.csv" if len(every) == 1 else f"profile-{one.family.name}.csv"
        out.mkdir(parents=True, exist_ok=True)
        write_family(one.folder or out / "families", one, out / profile, fleet.date)
        points = [[round((n + 0.5) * found.bin_s, 1), float(f"{rate:.6g}")] for n, rate in enumerate(load[name])]
        repository = str(one.folder.parent) if one.folder else "families"
        slo, items = {"latency_ms": one.slo_ms, "percentile": 95.0}, fmean(model.items for model in one.models)
        objective = {"window_s": DAY_S, "slo": slo, "accuracy": {"floor": one.floor}}
        tree = {"name": name, "repository": repository, "profile": profile, "items": items, "allow_missing": True}
        tree |= {"batch_delay_ms": 0.0 if one.joins else None, "arrivals": {"points": points}, "objective": objective}
        families.append(tree)
    tree = {
        "name": "assess", "policy": "exact", "duration_s": float(kept.sum() * found.bin_s),
        **({"fidelity": "fluid", "step_s": min(300.0, found.bin_s / 4)} if fluid else {}),
        "parts": {"planner": {"demand_step": DEMAND_STEPS[len(fleet.placed) > 16]}} if fluid else {},
        "control": {"pue": terms.pue} | (FLUID_CONTROL if fluid else {}),
        "noise": {"latency": max(o.sigma_ms for o in every), "energy": max(o.sigma_j for o in every)},
        "nodes": [{"name": node, "zone": terms.zone, "devices": kinds} for node, kinds in fleet.nodes.items()],
        "carbon": {"zones": {terms.zone: zone | hours}},
        "families": families,
    }  # fmt: skip
    head = f"# Written by trefoil assess on {fleet.date}: {len(found.devices)} devices, {len(found.models)} models.\n"
    (out / "scenario.toml").write_text(head + to_toml(tree), encoding="utf-8")
    (out / "up.toml").write_text(head + to_toml(_up(fleet, families, out)), encoding="utf-8")
    return out / "scenario.toml"


def _up(fleet: PlayedFleet, families: Sequence[Mapping[str, Any]], out: Path) -> dict[str, Any]:
    """Settings of `trefoil up`: the first node, simulated where its boards can be, else this machine. `families`: as
    the scenario has them; `out`: where their files are."""
    node, kinds = next(iter(fleet.nodes.items()))
    devices = [kind.removesuffix(NO_MIG) for kind in kinds]
    first, floor = families[0], families[0]["objective"]["accuracy"]["floor"]
    paths = {"repository": str(out / first["repository"]), "profile_override": str(out / first["profile"])}
    rate_per_s = fmean(rate for _, rate in first["arrivals"]["points"])
    constant, trace = fleet.zone.get("constant_g_per_kwh"), fleet.zone.get("trace")
    day = {"trace": trace, "trace_h": 24.0, "step_h": 1.0, "steps": 24, "step_s": HOUR_S}
    return {
        "policy": "exact", "pue": fleet.terms.pue, "demand_initial_per_s": rate_per_s,
        "fleet": {"node": node} | ({"devices": devices} if all(d in DRIVERS for d in devices) else {"kind": "real"}),
        "family": {"name": first["name"], **paths},
        "more_families": [{"name": o.family.name, "slo": {"latency_ms": o.slo_ms}} for o in fleet.families[1:]],
        "slo": first["objective"]["slo"],
        "accuracy": {"floor": floor, "hard_floor": 0.9 * floor},
        "availability": {"replicas_min": 1, "spread_min": 1},
        "carbon": {"zone": fleet.terms.zone} | (day if trace else {}),
        "carbon_feed": {} if trace else {"provider": "constant", "static_g_per_kwh": constant},
    }  # fmt: skip


def lever_scenarios(path: Path, scratch: Path, fleet: PlayedFleet) -> tuple[dict[str, Scenario], dict[str, str]]:
    """Scenarios of the fleet as found (`today`) and with each lever, by its name; and of levers that do not apply, why.
    `scratch`: folder for families and profiles of what a lever may use."""
    base, kinds = Scenario.load(path), {kind for node in fleet.nodes.values() for kind in node}
    mig = any(reported_type(kind.removesuffix(NO_MIG)).kind == DeviceKind.MIG_GPU for kind in kinds)
    several = any(len(one.family.variants) > len(one.shown) for one in fleet.families)
    lockable = any(reported_type(kind).clock_lockable for kind in kinds)
    why_not = {
        "variants": "" if several else "no model has another variant (--variants NAME=A,B, --repository)",
        "clocks": "" if lockable else "no board's clock can be locked",
        "mig": "" if mig else "no board has MIG",
        "placing": "" if len(kinds) > 1 else "all devices are alike, and lie in one zone",
    }
    levers = {name: name for name in ("sleep", *why_not) if not why_not.get(name)}
    found = {"today": _scenario(base, scratch, fleet, "today", "base", "")}
    found |= {name: _scenario(base, scratch, fleet, name, "static_mix", name) for name in levers}
    found["together"] = _scenario(base, scratch, fleet, "together", "exact", " ".join(levers))
    return found, {name: why for name, why in why_not.items() if why}


def _scenario(base: Scenario, scratch: Path, fleet: PlayedFleet, name: str, policy: str, levers: str) -> Scenario:
    """Scenario of a policy that may use these levers."""
    variants, mig, sleeps, clocks = (one in levers.split() for one in ("variants", "mig", "sleep", "clocks"))
    shapes = {place[0] for slices in fleet.placed.values() for place, _ in slices}
    served = []
    for one, told in zip(fleet.families, base.families, strict=True):
        folder = scratch / f"{'all' if variants else 'served'}{'-mig' if mig else ''}"
        profile = folder / f"{one.family.name}.csv"
        write_family(folder, one, profile, fleet.date, variants=variants, shapes=() if mig else shapes)
        spread = 1 if sleeps else fleet.spread(one.family.name)
        kept = {"availability": {"spread_min": spread, "replicas_min": spread}}
        own = told.model_dump() | {"repository": folder, "profile": profile}
        served.append(own | {"objective": own["objective"] | kept})
    shared: dict[str, Any] = {"families_per_slice": 4} if fleet.shared else {}
    planner = shared | base.parts.get("planner", {})
    tree = base.model_dump() | {"name": name, "policy": policy, "families": served}
    if policy == "base":
        tree["planner"], planner = PLANNER, {"placement": json.dumps(fleet.placed)} | shared
    elif clocks:
        planner["clocks"] = "planned"
    if mig:
        for node in tree["nodes"]:
            node["devices"] = tuple(kind.removesuffix(NO_MIG) for kind in node["devices"])
        if any(one.folder is None for one in fleet.families):
            tree["noise"]["latency"] = max(UNKNOWN_SIGMA, base.noise.latency)
    return Scenario.model_validate(tree | {"parts": {"planner": planner}})

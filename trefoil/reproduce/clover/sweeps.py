"""Sweeps: levers one by one, loads, lambdas, thresholds, fewer GPUs, and every assumption turned by 30 %.

One seed. Levers, loads and turned assumptions are fluid runs (no single requests): they rank and show shapes; the other
sweeps are request by request, as the headline is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any, Final

from trefoil.core.device_types import A100_40GB, A100_40GB_WHOLE
from trefoil.core.power import SWEEP_IDLE_W
from trefoil.core.units import HOUR_S
from trefoil.reproduce.clover.opportunities import LARGEST
from trefoil.reproduce.clover.study import Study
from trefoil.reproduce.experiment import (
    CONSTANT_G,
    DEVICE,
    GPUS,
    LOAD,
    Reference,
    reference_of,
    reference_spec,
    spec_of,
)
from trefoil.reproduce.runs import REPOSITORY, Spec, StudyRun
from trefoil.reproduce.scores import mean_objective, objective_curve, over_seeds, saving_pct
from trefoil.runtime.repository import load_family

LOADS: Final = (0.1, 0.3, 0.5, 0.6, 0.7, 0.9)
LAMBDAS: Final = (0.1, 0.3, 0.5, 0.7, 0.9)
LOSSES_PCT: Final = (0.2, 0.4, 0.6, 0.8, 1.0, 2.0, 4.0)  # the paper stops at 0.8
FLEETS: Final = (GPUS, 4, 2)
LIGHTER: Final = 0.8  # of that load
BASES: Final[Mapping[str, Mapping[str, Any]]] = {
    "7g": {},
    "4g + 3g (configuration 2)": {"planner": (("configuration", 2),)},
    "outside MIG": {"device": A100_40GB_WHOLE.name},
}
BASES_H: Final = 1.0
SHORT_H: Final = 6.0
FIG14_G: Final = 100.0
SWEEP_RATIO: Final = A100_40GB.idle_w / SWEEP_IDLE_W[DEVICE][0]  # less idle, or more active: one ratio ranks
ASSUMPTIONS: Final[Mapping[str, Mapping[str, Any]]] = {
    "nothing turned": {},
    "active joules x 1.3 (idle / 1.3)": {"energy": (("", 1.3),)},
    "active joules x 0.7 (idle / 0.7)": {"energy": (("", 0.7),)},
    "small slices need 30 % more joules": {"energy": (("1g.5gb", 1.3), ("2g.10gb", 1.3), ("3g.20gb", 1.3))},
    "small slices need 30 % less joules": {"energy": (("1g.5gb", 0.7), ("2g.10gb", 0.7), ("3g.20gb", 0.7))},
    "small slices are 30 % slower": {"latency": (("1g.5gb", 1.3), ("2g.10gb", 1.3), ("3g.20gb", 1.3))},
    "idle 36.1 of 55 W (CLOVER's own sweep), sleep in proportion": {"energy": (("", SWEEP_RATIO),)},
    "sleep draws 30 % more": {"sleep": 1.3},
    "sleep draws 30 % less": {"sleep": 0.7},
    "small slices are 30 % faster": {"latency": (("1g.5gb", 0.7), ("2g.10gb", 0.7), ("3g.20gb", 0.7))},
}
RANKED: Final = ("base", "co2opt", "clover", "oracle", "static_mix", "exact")
HELD: Final = ("static_mix", "exact")  # to CLOVER's accuracy
LOADED: Final = ("base", "clover", "static_mix", "exact")
SERVED_MIN: Final = 0.9  # of the requests in SLO; BASE's own p95 leaves it 0.93 to 0.96
ACCURACY_SLACK: Final = 0.002
TIE_PCT: Final = 0.5  # of grams
TIE_F: Final = 0.05  # of f, which is in percent


def _fluid(spec: Spec) -> Spec:
    return replace(spec, fidelity="fluid", exact_quantiles=False, label=f"{spec.label}, fluid")


def fluid_reference(study: Study, family: str, load: float = LOAD, **changes: Any) -> Reference:
    """Reference of BASE in the fluid model: SLO and C_base of what is compared in it."""
    of = study.options.experiment
    spec = replace(_fluid(reference_spec(family, study.options.seeds[0], of, load)), **changes)
    return reference_of(study.run([spec])[0], of)


def ablation(study: Study, family: str, floor: float, slo_ratio: float = 1.0) -> dict[str, Any]:
    """Ablation: each lever alone, all but each, and all of them, at one accuracy floor: what `exact` makes of it.

    At an SLO that is BASE's own p95 nothing moves while the best variant has to answer everything: `slo_ratio` loosens
    it.
    """
    reference = fluid_reference(study, family)
    reference = replace(reference, slo_ms=slo_ratio * reference.slo_ms)
    best = load_family(REPOSITORY / family)[0].best.name
    locked: dict[str, Any] = {
        "sleep": {"awake_min": GPUS},
        "MIG": {"shapes": (LARGEST,)},
        "variants": {"variants": (best,)},
        "clocks": {"planner": (("clocks", "highest"),)},
    }
    free: dict[str, Any] = {"clocks": {"planner": (("clocks", "planned"),)}}

    def spec(label: str, levers: set[str]) -> Spec:
        changes: dict[str, Any] = {}
        for lever, lock in locked.items():
            changes |= free.get(lever, {}) if lever in levers else lock
        return _fluid(
            spec_of(reference, label, "exact", study.options.side_hours, study.trace, mode="budget",
                    min_accuracy=round(floor, 6), **changes)
        )  # fmt: skip

    every = set(locked)
    wanted = {"none (BASE)": set[str]()} | {lever: {lever} for lever in locked}
    wanted |= {f"all but {lever}": every - {lever} for lever in locked} | {"all": every}
    specs = {label: spec(label, levers) for label, levers in wanted.items()}
    study.run(list(specs.values()))
    base = study.runs[specs["none (BASE)"]]["grams_per_request"]
    return {label: _outcome(study.runs[s], base) for label, s in specs.items()}


def load_sweep(study: Study, family: str) -> dict[str, Any]:
    """Loads: the schemes from a nearly idle to a nearly full fleet; plans keep CLOVER's accuracy at that load."""
    found: dict[str, Any] = {}
    fixed = fluid_reference(study, family)
    for load in LOADS:
        own = fluid_reference(study, family, load)
        reference = replace(own, slo_ms=fixed.slo_ms)  # the SLO is fixed once, at 0.6
        runs = beside_clover(study, reference, LOADED, f"at {load:g}")
        base_g = runs["base"]["grams_per_request"]
        found[f"{load:g}"] = {name: _outcome(run, base_g) for name, run in runs.items()}
    return found


def beside_clover(
    study: Study, reference: Reference, policies: Sequence[str], case: str, **changes: Any
) -> dict[str, StudyRun]:
    """Runs of schemes as flows; those that plan for an accuracy are held to what CLOVER reached in this very case."""

    def spec(policy: str, **more: Any) -> Spec:
        plain = spec_of(reference, policy, policy, study.options.side_hours, study.trace, **more)
        return _fluid(replace(plain, label=f"{policy} {case}", **changes))

    more = {"oracle": {"knows_truth": True}}
    specs = {p: spec(p, **more.get(p, {})) for p in policies if p not in HELD}
    study.run(list(specs.values()))
    floor = round(study.runs[specs["clover"]]["accuracy"], 6)
    specs |= {p: spec(p, mode="budget", min_accuracy=floor) for p in policies if p in HELD}
    study.run(list(specs.values()))
    return {p: study.runs[specs[p]] for p in policies}


def meets_slo(row: Mapping[str, float]) -> bool:
    """True if a scheme kept the SLO often enough for its grams to be compared."""
    return row["slo_attainment"] >= SERVED_MIN


def meets_accuracy(row: Mapping[str, float]) -> bool:
    """True if a scheme serves and reached the accuracy that it was held to: none may exist that keeps the SLO."""
    return meets_slo(row) and row["accuracy"] >= row["min_accuracy"] - ACCURACY_SLACK


def _outcome(run: StudyRun, base_g: float) -> dict[str, float]:
    return {
        "grams_per_request": run["grams_per_request"],
        "saving_pct": saving_pct(run["grams_per_request"], base_g),
        "accuracy": run["accuracy"],
        "slo_attainment": run["slo_attainment"],
        "rejected": run["rejected"],
        "min_accuracy": run.spec.min_accuracy,
    }


def sensitivity(study: Study, family: str) -> dict[str, Any]:
    """Ranking under +-30 % on each assumption, by grams and by f.

    `static_mix` and `exact` are held to CLOVER's accuracy in the same case; ORACLE and CO2OPT lose what they lose: f
    weighs it. Who keeps the SLO for less than `SERVED_MIN` of the requests is not ranked, who misses its accuracy not
    by grams.
    """
    found: dict[str, Any] = {}
    grams: dict[str, dict[str, float]] = {}
    objectives: dict[str, dict[str, float]] = {}
    for name, factors in ASSUMPTIONS.items():
        reference = fluid_reference(study, family, **factors)
        runs = beside_clover(study, reference, RANKED, f"with {name}", **factors)
        base_g = runs["base"]["grams_per_request"]
        found[name] = {
            p: _outcome(run, base_g) | {"objective": mean_objective(run, reference)} for p, run in runs.items()
        }
        ranked = {p: row for p, row in found[name].items() if meets_slo(row)}
        grams[name] = {p: row["saving_pct"] for p, row in ranked.items() if meets_accuracy(row)}
        objectives[name] = {p: row["objective"] for p, row in ranked.items()}
    late = {name: [p for p in RANKED if p not in by] for name, by in grams.items()}
    return {
        "runs": found,
        "not_ranked": {name: policies for name, policies in late.items() if policies},
        "by_grams": ranking(grams, TIE_PCT),
        "by_f": ranking(objectives, TIE_F),
    }


def ranking(scores: Mapping[str, Mapping[str, float]], tie: float) -> dict[str, Any]:
    """Order of the first case, best first, and which pairs another case puts the other way round.

    Pairs that are no further apart than `tie` in either case are level: no order, and no flip.
    """
    (usual, first), *others = scores.items()
    order = sorted(first, key=lambda policy: -first[policy])
    flips = {
        name: [f"{worse} before {better}" for better, worse in combinations(order, 2)
               if better in by and worse in by and first[better] - first[worse] > tie and by[worse] - by[better] > tie]
        for name, by in others
    }  # fmt: skip
    return {
        "order": order,
        "level": [f"{a} and {b}" for a, b in combinations(order, 2) if abs(first[a] - first[b]) <= tie],
        "orders": {name: sorted(by, key=lambda policy: -by[policy]) for name, by in scores.items() if name != usual},
        "flips": flips,
        "flipped": sum(1 for found in flips.values() if found),
    }


def lambda_sweep(study: Study, family: str) -> dict[str, Any]:
    """Weights of Fig. 14 at 100 g/kWh, every seed: (a) lambda from 0.1 to 0.9, (b) a threshold on the accuracy lost.

    CLOVER cuts and fills every GPU alike. So between BASE and the cheapest step down it has nothing that keeps BASE's
    own p95; thresholds below that step leave it BASE. `exact`, held to the same accuracy, mixes across GPUs.
    """
    wanted: dict[tuple[str, str], list[tuple[Spec, Spec]]] = {}
    for seed in study.options.seeds:
        reference = study.reference(family, seed)

        def spec(label: str, policy: str, of: Reference = reference, **changes: Any) -> Spec:
            return spec_of(of, label, policy, SHORT_H, "", constant_g_per_kwh=FIG14_G, **changes)

        base = spec("base at 100 g", "base")
        for weight in LAMBDAS:
            by_lambda = spec(f"clover, lambda {weight:g}", "clover", lambda_weight=weight)
            wanted.setdefault(("lambda", f"{weight:g}"), []).append((by_lambda, base))
        for loss in LOSSES_PCT:
            by_loss = spec(f"clover, loss <= {loss:g} %", "clover", lambda_weight=0.9,
                           planner=(("accuracy_loss_max_pct", loss),))  # fmt: skip
            floor = round(reference.accuracy * (1 - loss / 100), 6)
            by_floor = spec(f"exact, loss <= {loss:g} %", "exact", knows_truth=True, mode="instant", min_accuracy=floor)
            wanted.setdefault(("threshold_pct", f"{loss:g}"), []).append((by_loss, base))
            wanted.setdefault(("threshold_pct_exact", f"{loss:g}"), []).append((by_floor, base))
    study.run([spec for pairs in wanted.values() for pair in pairs for spec in pair])
    found: dict[str, Any] = {}
    for (sweep, value), pairs in wanted.items():
        found.setdefault(sweep, {})[value] = _end_states(study, pairs)
    return found


def _end_states(study: Study, pairs: Sequence[tuple[Spec, Spec]]) -> dict[str, float]:
    """State that runs ended in, each against BASE of its seed: means, and the range of what was saved."""
    savings, losses, runs = [], [], [study.runs[spec] for spec, _ in pairs]
    for run, (_, base) in zip(runs, pairs, strict=True):
        reference = study.reference(run.spec.family, run.spec.seed)
        (share, lost), (base_share, _) = end_state(run, reference), end_state(study.runs[base], reference)
        savings.append(saving_pct(share, base_share))
        losses.append(lost)
    saved = over_seeds(savings)
    return {
        "saving_pct": saved.mean,
        "saving_low": saved.low,
        "saving_high": saved.high,
        "accuracy_loss_pct": over_seeds(losses).mean,
        "evaluations": over_seeds([run["evaluations"] for run in runs]).mean,
        "slo_attainment": over_seeds([run["slo_attainment"] for run in runs]).mean,
    }


def end_state(result: StudyRun, reference: Reference) -> tuple[float, float]:
    """State that a search ended in: (grams per request over C_base, accuracy lost [%]) of the last hour.

    NaN where nothing was answered then.
    """
    found = objective_curve(result, reference)
    at = [i for i, at_s in enumerate(found.at_s) if at_s >= (result.spec.hours - 1) * HOUR_S]
    if not at:
        return math.nan, math.nan
    return 1.0 - sum(found.carbon[i] for i in at) / len(at) / 100.0, -sum(found.accuracy[i] for i in at) / len(at)


def fleet_sweep(study: Study, family: str) -> dict[str, Any]:
    """Fleets of Fig. 15: the load of ten GPUs on ten, four, two; p95 and grams of answers over those of BASE on ten.

    On two once more with less load: where CLOVER does not fit there, the load is why. Rejected ones waited in vain:
    where there are many, p95 is what the queue allows and not what that fleet takes.
    """
    reference = study.reference(family, study.options.seeds[0])
    lighter = replace(reference, rate_per_s=round(LIGHTER * reference.rate_per_s, 3))
    cases = {str(n): (n, reference) for n in FLEETS} | {f"{FLEETS[-1]}, load x {LIGHTER:g}": (FLEETS[-1], lighter)}
    specs = {
        (case, policy): replace(
            spec_of(of, f"{policy} on {case} GPUs", policy, SHORT_H, "", constant_g_per_kwh=FIG14_G * 2), gpus=n
        )
        for case, (n, of) in cases.items()
        for policy in ("base", "clover", "exact")
    }
    study.run(list(specs.values()))
    full_g = study.runs[specs[str(GPUS), "base"]]["grams_per_request"]
    found: dict[str, Any] = {}
    for (case, policy), spec in specs.items():
        run = study.runs[spec]
        found.setdefault(case, {})[policy] = {
            "p95_over_slo": run["p95_ms"] / reference.slo_ms,
            "slo_attainment": run["slo_attainment"],
            "rejected": run["rejected"],
            "accuracy": run["accuracy"],
            "saving_pct": saving_pct(run["grams_per_request"], full_g),
        }
    return found


def base_variants(study: Study, family: str) -> dict[str, Any]:
    """Variants of BASE on an A100: one 7g slice, section 5.2.1's 4g + 3g, or MIG off. The load is 0.6 of ten 7g's.

    Without noise: that of two operating points is drawn apart and is as large as what is between them.
    """
    reference = study.reference(family, study.options.seeds[0])
    specs = {
        name: replace(
            spec_of(reference, f"BASE {name}", "base", BASES_H, "", constant_g_per_kwh=CONSTANT_G),
            noise=0.0, device_noise=0.0, **changes,
        )
        for name, changes in BASES.items()
    }  # fmt: skip
    study.run(list(specs.values()))
    seven = study.runs[specs["7g"]]["joules_per_request"]
    return {
        name: {
            "joules_per_request": (run := study.runs[spec])["joules_per_request"],
            "joules_over_7g_pct": 100 * (run["joules_per_request"] / seven - 1),
            "p50_ms": run["p50_ms"],
            "p95_ms": run["p95_ms"],
            "accuracy": run["accuracy"],
        }
        for name, spec in specs.items()
    }

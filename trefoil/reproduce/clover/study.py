"""`trefoil reproduce clover`: which runs, in which order, and what is said of them.

Source: CLOVER (SC 23) section 5; what its public code does differently: docs/policies.md. Order: BASE at every load
(SLO and C_base come from it), then the schemes at equal load. Last come those that are given CLOVER's own accuracy as
floor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from trefoil.core.device_types import device_type
from trefoil.core.policies import PRESETS
from trefoil.reproduce.clover.optimum import measured_frontiers, optimum_row
from trefoil.reproduce.clover.past import past_of
from trefoil.reproduce.experiment import (
    CODE_LAMBDA,
    PAPER_LOAD_RATIO,
    TRACES,
    Experiment,
    Reference,
    reference_of,
    reference_spec,
    spec_of,
    trace_of,
)
from trefoil.reproduce.runs import Spec, StudyRun, family_folder, run_all
from trefoil.reproduce.scores import ScoreCurve, evaluations_of, objective_curve, over_seeds, saving_pct, scheme_row
from trefoil.runtime.repository import load_family

SEEDS: Final = (1, 2, 3, 4, 5)
HOURS: Final = 48.0
TRUTH: Final[Mapping[str, Any]] = {"knows_truth": True}  # its profile was taken on the very hardware
SEARCHES: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {  # of the paper, with one choice otherwise, and ours
    "blover": ("blover", {}),
    "clover": ("clover", {}),
    "clover, uniform neighbours": ("clover", {"planner": (("neighbours", "uniform"),)}),
    "clover, warm": ("clover", {"planner": (("warm", True),)}),
    "clover, guided": ("clover", {"planner": tuple(sorted(PRESETS["guided"].items()))}),
}
NEAR_ZERO: Final = 1.0  # points: percents of a smaller f say nothing


@dataclass(frozen=True, slots=True)
class CloverOptions:
    """Options of a study: how much to run. `quick` is a first look: one application, one seed, few hours, no sweeps."""

    experiment: Experiment = Experiment()
    seeds: tuple[int, ...] = SEEDS
    hours: float = HOURS
    side_hours: float = HOURS
    speedup: float = 1.0
    jobs: int = 0
    sweeps: bool = True


QUICK: Final = CloverOptions(Experiment(("efficientnet",)), (1,), 12.0, 12.0, 4.0, 0, False)


@dataclass(slots=True)
class Study:
    """Study of one paper: everything that was run so far."""

    options: CloverOptions
    folder: Path
    say: Callable[[str], None]
    references: dict[tuple[str, int], Reference] = field(default_factory=dict)
    runs: dict[Spec, StudyRun] = field(default_factory=dict)

    @property
    def families(self) -> tuple[str, ...]:
        """Families that are played."""
        return self.options.experiment.families

    @property
    def trace(self) -> str:
        """File of the main trace; "" = the synthetic curve."""
        return trace_of(self.options.experiment.trace)

    def run(self, specs: Sequence[Spec]) -> list[StudyRun]:
        """Run what is not there yet; results in the order of `specs`."""
        self.runs.update(run_all(specs, self.folder / "runs", self.options.jobs, self.say))
        return [self.runs[spec] for spec in specs]

    def reference(self, family: str, seed: int) -> Reference:
        """Reference of a family and seed: BASE at the load of the experiment."""
        return self.references[family, seed]

    def run_references(self) -> None:
        """Run BASE first: it gives SLO and C_base."""
        of = self.options.experiment
        specs = [reference_spec(f, s, of) for f in self.families for s in self.options.seeds]
        for result in self.run(specs):
            self.references[result.spec.family, result.spec.seed] = reference_of(result, of)

    def specs(self, family: str, label: str, policy: str, **changes: Any) -> list[Spec]:
        """Specs of one scheme on the main trace, every seed."""
        return [
            spec_of(
                self.reference(family, s),
                label,
                policy,
                self.options.hours,
                self.trace,
                **{"speedup": self.options.speedup} | changes,
            )
            for s in self.options.seeds
        ]


def schemes_of(study: Study, family: str) -> dict[str, list[Spec]]:
    """Specs of the schemes at equal load, SLO, fleet and lambda; CLOVER as printed, and with what is ours in it.

    Those that plan by a profile have taken it on the very hardware, as ORACLE has. `exact` runs once more with the
    modelled profile, whose errors it does not know. Of an experiment with policies: these alone, and BASE.
    """
    of = study.options.experiment
    best, largest = load_family(family_folder(family, of.repository))[0].best.name, device_type(of.device).largest.name
    schemes: dict[str, tuple[str, Mapping[str, Any]]] = {
        "base": ("base", {}),
        "base, fewest GPUs": (
            "exact",
            {**TRUTH, "variants": (best,), "shapes": (largest,), "planner": (("clocks", "highest"),)},
        ),
        "co2opt": ("co2opt", {}),
        **SEARCHES,
        "oracle": ("oracle", TRUTH),
        "exact, all awake": ("exact", {**TRUTH, "awake_min": of.gpus}),
        "exact": ("exact", TRUTH),
        "exact, modelled profile": ("exact", {}),
    }
    if of.policies:
        schemes = {name: schemes.get(name, (name, {})) for name in ("base", *of.policies)}
    return {label: study.specs(family, label, policy, **changes) for label, (policy, changes) in schemes.items()}


def floored_of(study: Study, family: str, accuracy: Mapping[int, float]) -> dict[str, list[Spec]]:
    """Specs of plans that are held to CLOVER's own mean accuracy, seed by seed.

    `exact` plans a budget by the feed's own forecast from the days before. To show what a forecast is worth, it also
    plans without any, and by a perfect one.
    """
    of = study.options.experiment
    past, awake = {"forecast": "blend", "past": past_of(of.trace)}, {**TRUTH, "awake_min": of.gpus}
    schemes: dict[str, tuple[str, Mapping[str, Any]]] = {
        "static_mix": ("static_mix", TRUTH),
        "static_mix, all awake": ("static_mix", awake),
        "static_mix, modelled profile": ("static_mix", {}),
        "exact budget": ("exact", {**TRUTH, **past}),
        "exact budget, all awake": ("exact", {**awake, **past}),
        "exact budget, modelled profile": ("exact", past),
        "exact budget, no past": ("exact", TRUTH),
        "exact budget, perfect forecast": ("exact", {**TRUTH, "forecast": "perfect"}),
    }
    return {
        label: [
            replace(spec, min_accuracy=round(accuracy[spec.seed], 6))
            for spec in study.specs(family, label, policy, mode="budget", **changes)
        ]
        for label, (policy, changes) in schemes.items()
    }


def headline(study: Study) -> dict[str, Any]:
    """Headline at equal load, fleet, SLO: every scheme, application and seed. Figs. 9 to 13 come from these runs."""
    first = {f: schemes_of(study, f) for f in study.families}
    study.run([spec for by in first.values() for specs in by.values() for spec in specs])
    if study.options.experiment.policies:
        return {family: _rows(study, family, by) for family, by in first.items()}
    found: dict[str, Any] = {}
    second: dict[str, dict[str, list[Spec]]] = {}
    for family, by in first.items():
        accuracy = {spec.seed: study.runs[spec]["accuracy"] for spec in by["clover"]}
        second[family] = floored_of(study, family, accuracy)
    study.run([spec for by in second.values() for specs in by.values() for spec in specs])
    frontiers = measured_frontiers(study.run, list(study.references.values()))
    for family in study.families:
        references = {s: study.reference(family, s) for s in study.options.seeds}
        shown = _rows(study, family, first[family] | second[family])
        found[family] = {
            **shown,
            "claims": claims(shown["rows"]),
            "best_graphs": [best_graphs(study.runs[spec]) for spec in first[family]["oracle"]],
            "optimum": {
                s: optimum_row(
                    frontiers[r],
                    {label: study.runs[specs[n]] for label, specs in (first[family] | second[family]).items()},
                    study.runs[second[family]["exact budget"][n]].series["intensity_g_per_kwh"],
                    accuracy=study.runs[first[family]["clover"][n]]["accuracy"],
                )
                for n, (s, r) in enumerate(references.items())
            },
        }
    return found


def _rows(study: Study, family: str, schemes: Mapping[str, Sequence[Spec]]) -> dict[str, Any]:
    """Rows of schemes that were played, and what they have in common."""
    references = {s: study.reference(family, s) for s in study.options.seeds}
    return {
        "rate_per_s": references[study.options.seeds[0]].rate_per_s,
        "slo_ms": {s: r.slo_ms for s, r in references.items()},
        "base_j_per_request": {s: r.joules for s, r in references.items()},
        "rows": {label: scheme_row([study.runs[s] for s in specs], references) for label, specs in schemes.items()},
    }


def at_code_lambda(study: Study) -> dict[str, Any]:
    """Searches and ORACLE at the public code's lambda, next to the text's."""
    schemes = {**SEARCHES, "oracle": ("oracle", TRUTH)}
    wanted = {
        family: {
            label: study.specs(family, label, policy, **changes, lambda_weight=CODE_LAMBDA)
            for label, (policy, changes) in schemes.items()
        }
        for family in study.families
    }
    study.run([spec for by in wanted.values() for specs in by.values() for spec in specs])
    found = {}
    for family, by in wanted.items():
        rows = _rows(study, family, by)["rows"]
        graphs = [best_graphs(study.runs[spec]) for spec in by["oracle"]]
        inside = {label: within_slo_pct(study, [study.runs[s] for s in specs]) for label, specs in by.items()}
        found[family] = {"rows": rows, "claims": claims(rows), "best_graphs": graphs, "within_slo_pct": inside}
    return found


def best_graphs(oracle: StudyRun) -> list[str]:
    """Graphs of one GPU that were ORACLE's answer at some hour, by its decisions."""
    begins = f"{oracle.spec.family}: "
    texts = [one["why"].partition(begins)[2].partition(" per device")[0] for one in oracle.decisions]
    return sorted({text for text in texts if text})


def within_slo_pct(study: Study, runs: Sequence[StudyRun]) -> float | None:
    """Share of the evaluations of runs that kept the SLO [%]; None: nothing was evaluated."""
    inside = [
        e["within_slo"]
        for run in runs
        for e in evaluations_of(run, study.reference(run.spec.family, run.spec.seed).slo_ms)
    ]
    return 100 * sum(inside) / len(inside) if inside else None


def claims(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Comparisons that the paper makes, seed by seed, of the schemes that were played. NaN: a floor was missed.

    Gaps to ORACLE are in points of f, and in percent of its f where that is a point or more: else NaN.
    """

    def each(label: str, name: str) -> tuple[float, ...]:
        return tuple(rows[label][name]["all"])

    def behind(mine: str, name: str) -> list[float]:
        return [o - m for m, o in zip(each(mine, name), each("oracle", name), strict=True)]

    def behind_pct(mine: str, name: str) -> list[float]:
        pairs = zip(behind(mine, name), each("oracle", name), strict=True)
        return [100 * gap / abs(o) if abs(o) >= NEAR_ZERO else math.nan for gap, o in pairs]

    def saved(mine: str, other: str) -> list[float]:
        pairs = zip(each(mine, "grams_per_request"), each(other, "grams_per_request"), strict=True)
        missed = [m or o for m, o in zip(each(mine, "floor_missed"), each(other, "floor_missed"), strict=True)]
        return [math.nan if gone else saving_pct(m, o) for (m, o), gone in zip(pairs, missed, strict=True)]

    def evaluated(mine: str) -> list[float]:
        pairs = zip(each(mine, "evaluations"), each("blover", "evaluations"), strict=True)
        return [c / b if b else math.nan for c, b in pairs]

    late = "objective_after_8h"
    searches = [label for label in SEARCHES if label in rows]
    found: dict[str, Any] = {
        "behind_oracle_after_8h_points": {label: behind(label, late) for label in searches},
        "behind_oracle_after_8h_pct": {label: behind_pct(label, late) for label in searches},
        "ahead_of_blover_after_8h_points": {
            label: [m - b for m, b in zip(each(label, late), each("blover", late), strict=True)] for label in searches
        },
        "evaluations_over_blovers": {label: evaluated(label) for label in searches},
    }
    if "exact" not in rows:
        return found
    return found | {
        "exact_behind_oracle_points": {label: behind(label, "objective") for label in ("exact", "exact, all awake")},
        "saving_of_clover_against_base_pct": saved("clover", "base"),
        "saving_of_exact_against_base_pct": saved("exact", "base"),
        "saving_against_clover_at_its_accuracy_pct": {
            label: saved(label, "clover") for label, row in rows.items() if row["held"]
        },
        "saving_of_exact_budget_against_static_mix_pct": {
            how.removeprefix(", ") or "sleeping": saved(f"exact budget{how}", f"static_mix{how}")
            for how in ("", ", all awake", ", modelled profile")
        },
    }


def paper_method(study: Study) -> dict[str, Any]:
    """Comparison by the public code's method, BASE at a fifth of the others' load: labelled, never a headline."""
    of = study.options.experiment
    load = of.load * PAPER_LOAD_RATIO
    specs = [reference_spec(f, s, of, load) for f in study.families for s in study.options.seeds]
    slow = {(p.spec.family, p.spec.seed): p for p in study.run(specs)}
    found = {}
    for family in study.families:
        clover = [study.runs[s] for s in schemes_of(study, family)["clover"]]
        ratios, alone = [], []
        for run in clover:
            mine, reference = slow[family, run.spec.seed], study.reference(family, run.spec.seed)
            ratios.append(saving_pct(run["joules_per_request"], mine["joules_per_request"]))
            alone.append(saving_pct(reference.joules, mine["joules_per_request"]))
        found[family] = {
            "saving_pct": over_seeds(ratios).all,
            "of_which_base_alone_by_its_load_pct": over_seeds(alone).all,
            "note": "BASE at one fifth of the load of CLOVER, joules per request: the public code's comparison",
        }
    return found


def curves(study: Study, family: str, seed: int) -> dict[str, ScoreCurve]:
    """Curves of Fig. 11: the objective over time, one seed."""
    reference = study.reference(family, seed)
    found = {}
    for label, specs in schemes_of(study, family).items():
        spec = next(s for s in specs if s.seed == seed)
        found[label] = objective_curve(study.runs[spec], reference)
    return found


def traces(study: Study) -> dict[str, Any]:
    """Traces of Fig. 16: seasons and regions; one seed. Without the real ones the synthetic curve, by that name."""
    seed = study.options.seeds[0]
    files = {name: file for name in TRACES if (file := trace_of(name))} or {"synthetic": ""}
    wanted: dict[tuple[str, str, str], Spec] = {}
    for family in study.families:
        reference = study.reference(family, seed)
        for name, file in files.items():
            for policy in ("base", "clover", "exact"):
                wanted[family, name, policy] = spec_of(
                    reference,
                    policy,
                    policy,
                    study.options.side_hours,
                    file,
                    speedup=study.options.speedup,
                    knows_truth=policy == "exact",
                )
    study.run(list(wanted.values()))
    return {
        family: {
            name: {
                policy: {
                    "saving_pct": saving_pct(
                        study.runs[wanted[family, name, policy]]["grams_per_request"],
                        study.runs[wanted[family, name, "base"]]["grams_per_request"],
                    ),
                    "accuracy": study.runs[wanted[family, name, policy]]["accuracy"],
                    "slo_attainment": study.runs[wanted[family, name, policy]]["slo_attainment"],
                }
                for policy in ("base", "clover", "exact")
            }
            for name in files
        }
        for family in study.families
    }

"""Figures in the form in which CLOVER prints them, for claims.toml: a number, one a seed, or true or false.

Source: CLOVER (SC 23), sections 2 to 5. Means over applications are taken seed by seed.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from controller.planners.clover.graph import Graph, edit_distance
from controller.planners.clover.objective import delta_carbon, weighted
from controller.planners.clover.settings import CloverSettings
from trefoil.core.device_types import A100_40GB, placements
from trefoil.core.units import HOUR_S
from trefoil.reproduce.clover.study import Study, schemes_of
from trefoil.reproduce.experiment import CODE_LAMBDA, FAMILIES, GPUS
from trefoil.reproduce.runs import family_folder
from trefoil.reproduce.scores import SETTLED_S, objective_curve, saving_pct
from trefoil.runtime.repository import load_family

OVERLAP: Final = 0.05  # of ORACLE's f: the paper's "within 5 %"
REQUESTS_A_DAY: Final = 25e6
LAST_H: Final = 8.0
BOOKED_S: Final = 30.0  # what the public code books for an evaluation, however long it takes
TABLE_1: Final = {"yolo": 3, "albert": 4, "efficientnet": 4}
SCHEDULE: Final = {
    "temperature": 1.0, "cooling": 0.05, "temperature_min": 0.1, "patience": 5, "limit_s": 300.0, "lambda_weight": 0.5,
}  # fmt: skip
FIG_6: Final = {  # configuration at intensity: E ci, accuracy lost; the paper's lambda there is 0.1, C_base 1000
    "A at 500": (200.0, -4.0),
    "B at 500": (600.0, -2.0),
    "A at 100": (40.0, -4.0),
    "B at 100": (120.0, -2.0),
}


def definitions() -> dict[str, Any]:
    """Figs. 1, 6, 7, Table 1 and the schedule of section 4.2: no run is needed."""
    fig6 = {name: weighted(0.1, delta_carbon(carbon, 1000.0), lost) for name, (carbon, lost) in FIG_6.items()}
    first = {("v1", "", "s1"): 1, ("v1", "", "s2"): 1, ("v2", "", "s3"): 1, ("v3", "", "s3"): 1}
    second = {("v2", "", "s1"): 1, ("v3", "", "s2"): 1, ("v1", "", "s3"): 2}
    variants = {family: len(load_family(family_folder(family))[0].variants) for family in FAMILIES}
    return {
        "configurations": len(placements(A100_40GB)),
        "slice_types": len(A100_40GB.slice_types),
        "slices_of_ten_gpus": GPUS * max(len(placement) for placement in placements(A100_40GB)),
        "fig6": fig6,
        "fig6_with_500_g": weighted(0.1, delta_carbon(500.0, 1000.0), -2.0),
        "fig6_preferences": fig6["A at 500"] > fig6["B at 500"] and fig6["B at 100"] > fig6["A at 100"],
        "fig7_distance": edit_distance(Graph.from_weights(first), Graph.from_weights(second)),
        "table_1": variants == TABLE_1,
        "schedule": all(getattr(CloverSettings(), name) == value for name, value in SCHEDULE.items()),
    }


def motives(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figs. 2 to 4. Of Fig. 2 the application that saves most within a loss, as the paper's is not named."""
    found: dict[str, Any] = {
        f"fig2_saving_at_{loss}_pct_lost": max(
            point["carbon_saving_pct"]
            for points in figures["fig02"].values()
            for point in points
            if point["relative_accuracy"] >= 1 - loss / 100
        )
        for loss in (5, 10)
    }
    fine = [layouts[-1] for layouts in figures["fig03"].values()]
    for name in ("carbon_saving_pct", "p95_over_c1", "busy_carbon_saving_pct", "busy_p95_over_c1"):
        found[f"fig3_{name}"] = fmean(row[name] for row in fine)
    if "note" not in figures["fig04"]:
        found["fig4_largest_change_in_12_h"] = max(one["largest_change_in_12_h"] for one in figures["fig04"].values())
    return found


def printed(study: Study, found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of the whole paper, of what was played."""
    equal, figures = found["equal"], found["figures"]
    result = definitions() | motives(figures) | _effect(equal) | _over_time(study) | _searches(study, found)
    method = [one["saving_pct"] for one in found["paper_method"].values()]
    result["fig9_saving_by_the_codes_method_pct"] = _means(method)
    result["fig11_blover_above_co2opt_at_code_lambda"] = _blover_leads(equal, found["at_code_lambda"], study)
    result["base_alone_by_its_load_pct"] = _means(
        one["of_which_base_alone_by_its_load_pct"] for one in found["paper_method"].values()
    )
    return result | (_sweeps(equal, figures) if "fig14" in figures else {})


def _means(columns: Iterable[Sequence[float]]) -> list[float]:
    """Mean over applications, seed by seed."""
    return [fmean(values) for values in zip(*columns, strict=True)]


def _each(equal: Mapping[str, Any], label: str, name: str) -> list[Sequence[float]]:
    return [one["rows"][label][name]["all"] for one in equal.values()]


def _savings(equal: Mapping[str, Any], label: str) -> dict[str, list[float]]:
    return {
        family: [
            saving_pct(mine, base)
            for mine, base in zip(
                one["rows"][label]["grams_per_request"]["all"], one["rows"]["base"]["grams_per_request"]["all"],
                strict=True,
            )
        ]
        for family, one in equal.items()
    }  # fmt: skip


def _effect(equal: Mapping[str, Any]) -> dict[str, Any]:
    """Figs. 9 and 10 and section 5.2.1."""
    schemes = ("co2opt", "blover", "clover", "oracle")
    saved = {label: _savings(equal, label) for label in schemes}
    lost = {label: {f: one["rows"][label]["accuracy_loss_pct"]["all"] for f, one in equal.items()} for label in schemes}
    f = {label: [fmean(values) for values in _each(equal, label, "objective_after_8h")] for label in schemes}
    grams = {label: _means(_each(equal, label, "grams_per_request")) for label in ("base", "clover")}
    spared = [base - mine for base, mine in zip(grams["base"], grams["clover"], strict=True)]
    late = {label: _means(_each(equal, label, "objective_after_8h")) for label in ("clover", "oracle")}

    def mean(by: Mapping[str, Sequence[float]]) -> dict[str, float]:
        return {family: fmean(values) for family, values in by.items()}

    most = {label: mean(saved[label]) for label in schemes}
    least = {label: mean(lost[label]) for label in schemes}
    return {
        "fig9_saving_pct": saved["clover"] | {"all": _means(saved["clover"].values())},
        "fig9_accuracy_lost_pct": lost["clover"] | {"all": _means(lost["clover"].values())},
        "fig9_p95_over_slo": {family: one["rows"]["clover"]["p95_over_slo"]["all"] for family, one in equal.items()},
        "fig10_saving_below_co2opt_points": _means(
            [[c - m for c, m in zip(saved["co2opt"][f], saved["clover"][f], strict=True)] for f in equal]
        ),
        "fig10_co2opt_is_an_extreme": all(
            most["co2opt"][f] >= most[label][f] and least["co2opt"][f] >= least[label][f]
            for f in equal
            for label in schemes
        ),
        "fig10_closest_to_oracle": all(
            abs(o - c) <= min(abs(o - other) for other in others)
            for o, c, *others in zip(f["oracle"], f["clover"], f["blover"], f["co2opt"], strict=True)
        ),
        "fig10_saves_more_than_blover_points": {
            family: [c - b for c, b in zip(saved["clover"][family], saved["blover"][family], strict=True)]
            for family in equal
        },
        "fig10_loses_more_than_blover_points": {
            family: [c - b for c, b in zip(lost["clover"][family], lost["blover"][family], strict=True)]
            for family in equal
        },
        "behind_oracle_pct": [
            100 * (o - c) / abs(o) for c, o in zip(late["clover"], late["oracle"], strict=True)
        ],
        "spared_g_per_request": spared,
        "spared_kg_per_day": [one * REQUESTS_A_DAY / 1000 for one in spared],
    }  # fmt: skip


def _over_time(study: Study) -> dict[str, Any]:
    """Fig. 11: how long CLOVER's f is within 5 % of ORACLE's, and whether the gap closes."""
    overlaps: list[list[float]] = []
    early, late, ahead = [], [], []
    for family in study.families:
        schemes, shares = schemes_of(study, family), []
        for n, seed in enumerate(study.options.seeds):
            reference = study.reference(family, seed)
            curves = {
                label: objective_curve(study.runs[schemes[label][n]], reference)
                for label in ("oracle", "clover", "blover", "co2opt")
            }
            best = dict(zip(curves["oracle"].at_s, curves["oracle"].objective, strict=True))
            mine = zip(curves["clover"].at_s, curves["clover"].objective, strict=True)
            gaps = {at: best[at] - value for at, value in mine if at in best}
            shares.append(100 * fmean(gap <= OVERLAP * abs(best[at]) for at, gap in gaps.items()))
            early.append(fmean(gap for at, gap in gaps.items() if at < SETTLED_S))
            from_s = (study.options.hours - LAST_H) * HOUR_S
            late.append(fmean(gap for at, gap in gaps.items() if at >= from_s))
            ahead.append(curves["blover"].mean() - curves["co2opt"].mean())
        overlaps.append(shares)
    return {
        "fig11_overlap_pct": _means(overlaps),
        "fig11_gap_closes": fmean(late) < fmean(early),
        "fig11_blover_above_co2opt": fmean(ahead) > 0,
    }


def _blover_leads(equal: Mapping[str, Any], other: Mapping[str, Any], study: Study) -> bool:
    """Whether BLOVER's f is above CO2OPT's at the public code's lambda; CO2OPT's plan is the same at any."""
    ahead, weight = [], study.options.experiment.lambda_weight
    for family, one in equal.items():
        lost = one["rows"]["co2opt"]["accuracy_loss_pct"]["mean"]
        carbon = (one["rows"]["co2opt"]["objective"]["mean"] + (1 - weight) * lost) / weight
        blover = other[family]["rows"]["blover"]["objective"]["mean"]
        ahead.append(blover - weighted(CODE_LAMBDA, carbon, -lost))
    return fmean(ahead) > 0


def _searches(study: Study, found: Mapping[str, Any]) -> dict[str, Any]:
    """Figs. 12 and 13, of the application that the paper shows."""
    twelve = found["figures"]["fig12"]
    family = next(iter(found["figures"]["fig13"])).partition(":")[0]
    shown = list(found["figures"]["fig13"].values())
    share = [100 * fmean(point["within_slo"] for point in points) for points in shown]
    first = [twelve[family][label]["time_pct_by_window"][0] for label in ("blover", "clover")]
    return {
        "fig12": {
            label: {
                "time_pct": one["time_pct"],
                "within_slo_pct": one["within_slo_pct"],
                "time_as_booked_pct": 100 * one["evaluations"] * BOOKED_S / (study.options.hours * HOUR_S),
            }
            for label, one in twelve[family].items()
        },
        "fig12_first_window_pct": min(first),
        "fig12_evaluations_over_blovers": found["equal"][family]["claims"]["evaluations_over_blovers"],
        "fig13_first_within_slo_pct": share[0],
        "fig13_last_within_slo_pct": share[-1],
        "fig13_last_evaluations": len(shown[-1]),
        "best_graphs": {
            str(weight): {f: [len(graphs) for graphs in one["best_graphs"]] for f, one in by.items()}
            for weight, by in (
                (study.options.experiment.lambda_weight, found["equal"]), ("code", found["at_code_lambda"]),
            )
        },
    }  # fmt: skip


def _sweeps(equal: Mapping[str, Any], figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figs. 14 to 16, and BASE on another configuration."""
    weights = {f: list(by["lambda"].values()) for f, by in figures["fig14"].items()}
    within = {
        loss: max(by["threshold_pct"][loss]["saving_pct"] for by in figures["fig14"].values())
        for loss in ("0.2", "0.8")
    }
    fleets = figures["fig15"]
    second = {f: 1 + by["4g + 3g (configuration 2)"]["joules_over_7g_pct"] / 100 for f, by in figures["bases"].items()}
    traces = next(iter(figures["fig16"].values()))
    return {
        "fig14_lambda_trades": all(
            one[-1]["saving_pct"] > one[0]["saving_pct"] and one[-1]["accuracy_loss_pct"] > one[0]["accuracy_loss_pct"]
            for one in weights.values()
        ),
        "fig14_saving_within_loss_pct": within,
        "fig15_base_p95_over_slo": min(by[n]["base"]["p95_over_slo"] for by in fleets.values() for n in ("4", "2")),
        "fig15_clover_p95_over_slo": {f: by["2"]["clover"]["p95_over_slo"] for f, by in fleets.items()},
        "fig15_clover_p95_over_slo_with_less_load": {
            f: by["2, load x 0.8"]["clover"]["p95_over_slo"] for f, by in fleets.items()
        },
        "fig16_saving_pct": {t: min(by[t]["clover"]["saving_pct"] for by in figures["fig16"].values()) for t in traces},
        "saving_against_configuration_2_pct": _means(
            [
                [100 * (1 - (1 - saved / 100) / second[family]) for saved in values]
                for family, values in _savings(equal, "clover").items()
            ]
        ),
    }

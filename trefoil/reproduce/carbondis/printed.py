"""Figures in the form in which CARBONDIS prints them, for claims.toml: a number, one a seed, or true or false."""

import csv
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any, Final

from trefoil.core.device_types import P4
from trefoil.reproduce.carbondis.experiment import A100, JANUARY_H, PAPERS, SETS, TABLE_II, TRACE
from trefoil.reproduce.experiment import data_folder

TABLE_IV: Final = {  # set: its column of the series that is played, another maker's series of the same zone and 2022
    "Set 1": ("em_US-CAL-CISO_2022_hourly.csv", "Carbon Intensity gCO₂eq/kWh (direct)"),
    "Set 2": ("em_AU-NSW_2022_hourly.csv", "Carbon Intensity gCO₂eq/kWh (LCA)"),
}
IDLE_W: Final = TABLE_II[P4] + TABLE_II[A100]  # of Fig. 2's split, at all times
EDGE: Final = 1e-9


def table_iv() -> dict[str, Any]:
    """Mean, standard deviation and their ratio [%] of carbon in 2022, as played and of another series; or nothing."""
    folder = data_folder()
    found: dict[str, Any] = {}
    for name, (file, column) in TABLE_IV.items():
        paths = {"played": (TRACE, SETS[name].zone, JANUARY_H), "other": (file, column, 0)}
        for how, (trace, key, begins) in paths.items():
            if folder is None or not (folder / "carbon" / trace).exists():
                return {}
            with (folder / "carbon" / trace).open(encoding="utf-8", newline="") as lines:
                values = [float(row[key]) for row in csv.DictReader(lines) if row[key]][begins:]
            mean, spread = fmean(values), pstdev(values)
            found.setdefault(name, {})[how] = {"mean": mean, "sd": spread, "cv_pct": 100 * spread / mean}
    return found


def printed(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures and words of section II and V, of what was played as published."""
    one, two = found["published"]["Set 1"], found["published"]["Set 2"]
    split, low, high = (found["fig2"][policy] for policy in ("uniform", "lowenergy", "highperf"))
    result: dict[str, Any] = {
        "table_iv": table_iv(),
        "fig2_low_end_misses": low["mean_ms"] > 100,
        "fig2_high_end_and_split_meet": max(high["mean_ms"], split["mean_ms"]) <= 100,
        "fig2_low_end_is_least": low["grams"] < min(split["grams"], high["grams"]),
        "fig2_low_end_over_high_end": low["grams"] / high["grams"],
        "fig2_split_over_high_end": split["grams"] / high["grams"],
        "fig2_split_over_high_end_half_idle": split["grams"] / high["grams"] * (1 - IDLE_W / 2 / split["power_w"]),
        "set_1_saves_more": _mean(one["carbondis"]["below_highperf_pct"])
        > _mean(two["carbondis"]["below_highperf_pct"]),
    }
    for name, by in found["published"].items():
        result[name] = _orders(by)
    if found["turned"]:  # a P4's joules are modelled
        fewer, usual = found["turned"]["Set 1: low joules x 0.7"], found["turned"]["Set 2: nothing turned"]
        saved = {policy: row["below_highperf_pct"] for policy, row in fewer.items() if policy in PAPERS}
        result["set_1_saves_more_with_fewer_joules"] = saved["carbondis"] > usual["carbondis"]["below_highperf_pct"]
        result["lowenergy_least_with_fewer_joules"] = saved["lowenergy"] == max(saved.values())
    return result | {how: _cit(found[how]) for how in ("fig10_published", "fig10_faster", "fig10") if found[how]}


def _mean(one: Mapping[str, Any]) -> float:
    return float(one["mean"])


def _by_job(row: Mapping[str, Any], key: str) -> list[float]:
    return [_mean(one) for one in row[key].values()]


def _orders(by: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Figs. 6 to 9 of one set."""
    grams = {policy: _mean(by[policy]["grams"]) for policy in PAPERS}
    active = {policy: _mean(by[policy]["active_g"]) for policy in PAPERS}
    uses = {policy: _by_job(by[policy], "high_uses") for policy in ("dybatch", "carbondis")}
    return {
        "highperf_p95_over_sla": max(_by_job(by["highperf"], "p95_over_sla")),
        "lowenergy_misses": _mean(by["lowenergy"]["jobs_over"]) > 0,
        "random_misses": _mean(by["random"]["jobs_over"]) > 0,
        "dybatch_job_1_p95_over_sla": next(iter(by["dybatch"]["p95_over_sla"].values())),
        "fig7_dybatch_median_is_less": _by_job(by["dybatch"], "median_ms")[0]
        < _by_job(by["carbondis"], "median_ms")[0],
        "highperf_active_is_least": active["highperf"] == min(active.values()),
        "highperf_total_is_most": grams["highperf"] == max(grams.values()),
        "lowenergy_total_is_least": grams["lowenergy"] == min(grams.values()),
        "random_above_both": grams["random"] > max(grams["dybatch"], grams["carbondis"]),
        "fig9_dybatch_uses_more": all(d > c for d, c in zip(uses["dybatch"], uses["carbondis"], strict=True)),
    }


def _cit(by: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Fig. 10: what rises and falls with CIT."""
    rows = list(by.values())

    def rises(values: Sequence[float]) -> bool:
        return all(b >= a - EDGE for a, b in pairwise(values)) and values[-1] > values[0]

    late = [_by_job(row, "late") for row in rows]
    return {
        "uses_fall": rises([-sum(_by_job(row, "high_uses")) for row in rows]),
        "active_rises": rises([_mean(row["active_g"]) for row in rows]),
        "total_rises": rises([_mean(row["grams"]) for row in rows]),
        "job_1_late_falls": rises([-jobs[0] for jobs in late]),
        "late_falls": rises([-sum(jobs) for jobs in late]),
        "other_jobs_late_rises": rises([sum(jobs[1:]) for jobs in late]),
    }

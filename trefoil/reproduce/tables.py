"""Tables of benchmarks/RESULTS.md from a study's summary.json: what is printed there is what was played."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

Row = Sequence[Any]
CLAIMS: Final = {
    "behind_oracle_after_8h_points": "behind ORACLE after 8 h, points of f",
    "behind_oracle_after_8h_pct": "behind ORACLE after 8 h, % of f where that is a point or more",
    "ahead_of_blover_after_8h_points": "ahead of BLOVER after 8 h, points of f",
    "evaluations_over_blovers": "evaluations over BLOVER's",
    "exact_behind_oracle_points": "behind ORACLE, all hours, points of f",
}
CARBONDIS_RUNS: Final = {
    "published": "as published",
    "history_2021_10": "the same, average of carbon since October 2021",
    "week": "a week, Poisson",
}
SCORED: Final = {
    "in SLO, %": ("slo_attainment", 100.0, 1),
    "accuracy lost, %": ("accuracy_loss_pct", 1.0, 2),
}


def markdown(columns: Row, rows: Iterable[Row]) -> str:
    """Table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def clover_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `trefoil reproduce clover` by name; `found` is its summary.json."""
    families = list(found["equal"])
    tables = {f"equal-{family}": _equal(found["equal"][family]) for family in families}
    if "paper_method" not in found:
        return tables
    tables["claims"] = _claims(found["equal"])
    if "at_code_lambda" in found:
        tables["at-code-lambda"] = _claims(found["at_code_lambda"])
    tables["savings"] = _savings(found["equal"])
    tables["optimum"] = _optimum(found["equal"])
    tables["paper-method"] = _paper_method(found)
    figures = found["figures"]
    tables["fig12"] = _fig12(figures["fig12"])
    if "fig02" in figures:
        tables["fig2"] = _fig2(figures["fig02"])
        tables["fig3"] = _fig3(figures["fig03"])
    if "loads" in found:
        tables["levers"] = _levers(found)
        tables["loads"] = _by_case(found["loads"], "load")
        tables["fig14"] = _fig14(figures["fig14"])
        tables["fig15"] = _fig15(figures["fig15"])
        tables["fig16"] = _by_case(figures["fig16"], "trace", accuracy=True)
        tables["turned"] = _turned(found["turned_by_30_pct"])
    return tables


def provenance(found: Mapping[str, Any]) -> str:
    """Line that says what a section's tables come from."""
    made = f"commit {found['commit']}"
    made += f", sources {found['sources']}" if "sources" in found else ""
    made += f", seeds {', '.join(str(seed) for seed in found['seeds'])}" if "seeds" in found else ""
    return f"`{found['command']}`, {made}; {found['machine']}."


def _each(values: Iterable[float | None], digits: int = 1) -> str:
    return ", ".join("-" if value is None else f"{value:.{digits}f}" for value in values)


def _spread(one: Mapping[str, Any], scale: float = 1.0, digits: int = 1) -> str:
    return f"{scale * one['mean']:.{digits}f} [{scale * one['low']:.{digits}f}, {scale * one['high']:.{digits}f}]"


def _equal(found: Mapping[str, Any]) -> str:
    rows = []
    base = found["rows"]["base"]["grams_per_request"]["all"]
    for label, row in found["rows"].items():
        saved = [100 * (1 - mine / other) for mine, other in zip(row["grams_per_request"]["all"], base, strict=True)]
        spread = {"mean": sum(saved) / len(saved), "low": min(saved), "high": max(saved)}
        rows.append(
            [
                f"{label}, at clover's accuracy" if row["held"] else label,
                "yes" if row["knows_truth"] else "",
                _spread(spread),
                *(_spread(row[key], scale, digits) for key, scale, digits in SCORED.values()),
                f"{row['objective']['mean']:.2f}",
                _each(row["objective_after_8h"]["all"], 2),
                f"{row['evaluations']['mean']:.0f}",
            ]
        )
    columns = ["scheme", "told the truth", "saving against BASE, %", *SCORED, "f, all hours", "f after 8 h, each seed"]
    return markdown([*columns, "evaluations"], rows)


def _claims(equal: Mapping[str, Any]) -> str:
    first = next(iter(equal.values()))["claims"]
    rows = [
        [f"{label} {text}", *(_each(one["claims"][name][label], 2) for one in equal.values())]
        for name, text in CLAIMS.items()
        for label in first.get(name, ())
        if not (label == "blover" and "blover" in name)
    ]
    if "within_slo_pct" in next(iter(equal.values())):
        shares = {
            label: [one["within_slo_pct"][label] for one in equal.values()] for label in first[next(iter(CLAIMS))]
        }
        rows += [[f"{label} evaluations in SLO, %", *(_each([share]) for share in by)] for label, by in shares.items()]
    return markdown(["each seed", *equal], rows)


def _savings(equal: Mapping[str, Any]) -> str:
    against = {f: one["claims"]["saving_against_clover_at_its_accuracy_pct"] for f, one in equal.items()}
    mixed = {f: one["claims"]["saving_of_exact_budget_against_static_mix_pct"] for f, one in equal.items()}
    labels = list(next(iter(against.values())))
    rows = [[f"{label} against clover", *(_each(by[label]) for by in against.values())] for label in labels]
    hows = next(iter(mixed.values()))
    rows += [[f"exact budget against static_mix, {how}", *(_each(by[how]) for by in mixed.values())] for how in hows]
    return markdown(["grams saved, %, each seed", *equal], rows)


def _optimum(equal: Mapping[str, Any]) -> str:
    """Grams above the offline optimum at the accuracy that each scheme reached."""
    by_family = {f: list(one["optimum"].values()) for f, one in equal.items()}
    labels = list(next(iter(by_family.values()))[0]["above_optimum_pct"])
    rows = [[label, *(_each(s["above_optimum_pct"][label] for s in by_family[f]) for f in equal)] for label in labels]
    errors = [_each((100 * s["optimum"]["grid_error_ratio"] for s in by_family[f] if s["optimum"]), 2) for f in equal]
    return markdown(["above the optimum, %, each seed", *equal], [*rows, ["error of its grid", *errors]])


def _paper_method(found: Mapping[str, Any]) -> str:
    rows = [
        [
            family,
            _each(one["saving_pct"]),
            _each(one["of_which_base_alone_by_its_load_pct"]),
            _each(found["equal"][family]["claims"]["saving_of_clover_against_base_pct"]),
        ]
        for family, one in found["paper_method"].items()
    ]
    return markdown(["%, each seed", "paper's method", "of which BASE alone by its load", "at equal load"], rows)


def _fig2(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    rows = []
    for family, points in found.items():
        kept = max((p for p in points if p["relative_accuracy"] >= 0.95), key=lambda p: p["carbon_saving_pct"])
        most = max(points, key=lambda p: p["carbon_saving_pct"])
        rows.append(
            [family, len(points), f"{kept['carbon_saving_pct']:.1f} at {kept['relative_accuracy']:.3f}", kept["mix"],
             f"{most['carbon_saving_pct']:.1f} at {most['relative_accuracy']:.3f}"]
        )  # fmt: skip
    columns = ["four GPUs", "mixes", "best saving at >= 95 % of the accuracy, %", "its mix", "best of all, %"]
    return markdown(columns, rows)


def _fig3(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    columns = {
        "saving at one load, %": ("carbon_saving_pct", 1),
        "p95 over C1": ("p95_over_c1", 2),
        "saving kept busy, %": ("busy_carbon_saving_pct", 1),
        "its p95 over C1": ("busy_p95_over_c1", 2),
    }
    rows = [
        [family, row["layout"], *(f"{row[key]:.{digits}f}" for key, digits in columns.values())]
        for family, layouts in found.items()
        for row in layouts
    ]
    return markdown(["one GPU", "layout", *columns], rows)


def _fig12(found: Mapping[str, Any]) -> str:
    rows = [
        [family, scheme, _each(one["time_pct_by_window"], 2), f"{one['time_pct']:.2f}", f"{one['evaluations']:.0f}",
         _each([one["within_slo_pct"]])]
        for family, by in found.items() for scheme, one in by.items()
    ]  # fmt: skip
    windows = "% of the time, by windows of 8 h"
    return markdown(["application", "scheme", windows, "in all", "evaluations", "of them in SLO, %"], rows)


def _levers(found: Mapping[str, Any]) -> str:
    tight, loose = found["ablation"], found["ablation_loose_slo"]
    rows = [
        [levers, *(_each(by[f][levers]["saving_pct"] for f in by) for by in (tight, loose))]
        for levers in next(iter(tight.values()))
    ]
    columns = [f"levers ({', '.join(tight)}; saving in %)", "SLO = BASE's p95", "SLO = 2 x BASE's p95"]
    return markdown(columns, rows)


def _by_case(found: Mapping[str, Any], name: str, accuracy: bool = False) -> str:
    """Saving and share in SLO (or accuracy) of each scheme but BASE, a case a row."""
    key, scale, digits = ("accuracy", 1.0, 3) if accuracy else ("slo_attainment", 100.0, 0)
    first = next(iter(found.values()))
    schemes = [scheme for scheme in next(iter(first.values())) if scheme != "base"]
    rows = []
    for case in first:
        cells = []
        for by in found.values():
            pairs = [(by[case][scheme]["saving_pct"], scale * by[case][scheme][key]) for scheme in schemes]
            cells.append(", ".join(f"{saved:.1f} / {other:.{digits}f}" for saved, other in pairs))
        rows.append([case, *cells])
    what = "accuracy" if accuracy else "in SLO, %"
    return markdown([name, *(f"{f}: {', '.join(schemes)} (saving, % / {what})" for f in found)], rows)


def _fig14(found: Mapping[str, Any]) -> str:
    names = {
        "lambda": "clover, lambda",
        "threshold_pct": "clover, loss, %, <=",
        "threshold_pct_exact": "`exact`, loss, %, <=",
    }

    def cell(one: Mapping[str, float]) -> str:
        return f"{one['saving_pct']:.1f} / {one['accuracy_loss_pct']:.2f}"

    rows = [
        [f"{text} {value}", *(cell(by[sweep][value]) for by in found.values())]
        for sweep, text in names.items()
        for value in next(iter(found.values()))[sweep]
    ]
    return markdown(["saving, % / accuracy lost, %", *found], rows)


def _fig15(found: Mapping[str, Any]) -> str:
    rows = []
    for family, by in found.items():
        for gpus, ones in by.items():
            for policy, one in ones.items():
                kept = f"{one['p95_over_slo']:.2f}", f"{100 * one['slo_attainment']:.0f}"
                rows.append([family, gpus, policy, *kept, f"{one['accuracy']:.3f}"])
    return markdown(["application", "GPUs", "scheme", "p95 over the SLO", "in SLO, %", "accuracy"], rows)


def _turned(found: Mapping[str, Any]) -> str:
    rows = []
    for family, one in found.items():
        for by, text in (("by_grams", "grams"), ("by_f", "f")):
            flips = "; ".join(f"{case}: {', '.join(pairs)}" for case, pairs in one[by]["flips"].items() if pairs)
            rows.append([family, text, ", ".join(one[by]["order"]), f"{one[by]['flipped']}", flips or "none"])
    return markdown(["application", "by", "order, best first", "cases that change it", "which"], rows)


def wattwiser_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `trefoil reproduce wattwiser` by name; `found` is its summary.json."""

    rows = [
        (
            pair, policy, _spread(row["power_w"], digits=0), _spread(row["saving_pct"]),
            _spread(row["slo_attainment"], 100, 2),
            " / ".join(f"{one['mean']:.1f}" for one in row["hours_missed"].values()), f"{row['rejected']['mean']:,.0f}",
        )
        for pair, by in found["pairs"].items()
        for policy, row in by.items()
    ]  # fmt: skip
    head = ("pair", "policy", "W", "saving, %", "in SLO, %", "hours with p95 over the SLO, of 24", "refused")
    tables = {"pairs": markdown(head, rows)}
    paper = {policy: f"{pct:g}" for policy, pct in found["paper_saving_pct"].items()}
    savings = [(p, f"{pct:.1f}", paper.get(p, "ours")) for p, pct in found["mean_saving_pct"].items()]
    tables["savings"] = markdown(("policy", "mean saving of the pairs, %", "paper, %"), savings)
    if found["assumed"]:
        means = [(policy, *_outcome(of, paper[policy])) for policy, of in found["assumed"].items()]
        heads = ("policy", "saving, %", "paper, %", "in SLO, %", "bins missed, of 1,440", "refused")
        tables["assumed"] = markdown(heads, means)
    if found["cases"]:
        lines = [(case, label, *_outcome(one)) for case, by in found["cases"].items() for label, one in by.items()]
        cases = ("case, seed 1", "policy", "saving, %", "in SLO, %", "bins missed (hourly ones: of 48)", "refused")
        tables["cases"] = markdown(cases, lines)
    return tables


def _outcome(of: Mapping[str, Any], *published: str) -> tuple[str, ...]:
    """Cells of a row: saving, what is published of it, share in the SLO, bins missed, requests refused."""
    share, missed = f"{100 * of['slo_attainment']:.2f}", f"{of['hours_missed']:.0f}"
    return f"{of['saving_pct']:.1f}", *published, share, missed, f"{of['rejected']:,.0f}"


def carbondis_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `trefoil reproduce carbondis` by name; `found` is its summary.json."""
    claims = {
        "below_highperf_pct": "grams below HIGHPERF, %",
        "above_dybatch_pct": "grams above DYBATCH, %",
        "jobs_over": "jobs with p95 over the SLA",
    }
    hows = {how: text for how, text in CARBONDIS_RUNS.items() if how in found}
    rows = [
        [text, name, paper[key], *(_spread(found[how][name]["carbondis"][key]) for how in hows)]
        for key, text in claims.items()
        for name, paper in found["paper"].items()
    ]
    rows += [
        ["% of the time with CIR above 1", name, "-", *(_spread(found["cir_above_1_pct"][how][name]) for how in hows)]
        for name in found["paper"]
    ]
    tables = {"claims": markdown(["carbondis", "set", "paper", *hows.values()], rows)}
    head = ["set", "policy", "g", "of it idle", "below HIGHPERF, %", "above DYBATCH, %", "idle's share of it, %",
            "p95 over the SLA, job 1 to 5", "late, %", "of 1,000 requests on the A100, job 1 to 5"]  # fmt: skip
    for how in hows:
        rows = [
            [name, policy, *_carbondis_row(row), _spread(row["above_dybatch_pct"])]
            for name, by in found[how].items()
            for policy, row in by.items()
        ]
        tables[f"rows-{how.replace('_', '-')}"] = markdown(head, [[*row[:5], row[-1], *row[5:-1]] for row in rows])
    fig2 = [
        [policy, f"{one['grams']:.2f}", one["paper_g"], f"{one['mean_ms']:.0f}", f"{one['power_w']:.1f}"]
        for policy, one in found["fig2"].items()
    ]
    tables["fig2"] = markdown(["one job", "g", "paper, g", "mean, ms (SLA 100)", "W"], fig2)
    if found["fig10"]:
        cits = [[cit, *_carbondis_row(row)] for cit, row in found["fig10"].items()]
        tables["fig10"] = markdown(["CIT, Set 1, a week", *head[2:5], *head[6:]], cits)
    if found.get("fig10_published"):
        cits = [[cit, *_carbondis_row(row)] for cit, row in found["fig10_published"].items()]
        tables["fig10-published"] = markdown(["CIT, Set 1, as published", *head[2:5], *head[6:]], cits)
    if found["turned"]:
        policies = list(dict.fromkeys(p for by in found["turned"].values() for p in by))
        cases = [
            [
                case,
                *(f"{by[p]['below_highperf_pct']:.1f} / {by[p]['jobs_over']}" if p in by else "" for p in policies),
            ]
            for case, by in found["turned"].items()
        ]
        tables["turned"] = markdown(["below HIGHPERF, % / jobs over the SLA", *policies], cases)
    return tables


def _carbondis_row(row: Mapping[str, Any]) -> list[str]:
    return [
        f"{row['grams']['mean']:.1f}",
        f"{row['idle_g']['mean']:.1f}",
        _spread(row["below_highperf_pct"]),
        _each([row["idle_share_of_saving"] and 100 * row["idle_share_of_saving"]], 0),
        _each((one["mean"] for one in row["p95_over_sla"].values()), 2),
        f"{row['late_pct']['mean']:.2f}",
        _each((one["mean"] for one in row["high_uses"].values()), 0),
    ]


def infadapter_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `trefoil reproduce infadapter` by name; `found` is its summary.json."""
    columns = {
        "late or refused, %": ("late_pct", 2),
        "seconds with p99 over 750 ms": ("violated_s", 0),
        "cores planned": ("cores_planned", 2),
        "cores charged": ("cores", 2),
        "accuracy loss, points": ("loss_pct", 2),
    }
    rows = [
        (block, scheme, *(_spread(row[key], 1, digits) for key, digits in columns.values()))
        for block, by in found["blocks"].items()
        for scheme, row in by.items()
    ]
    paper = found["paper"]
    claims = [
        (trace, name, _claim(one["fewer_violations_pct"]), _claim(one["less_cost_planned_pct"]),
         _claim(one["less_cost_pct"]), f"{one['less_loss_than_ms_plus']:+.2f}", _claim(one["less_loss"], 2))
        for trace, by in found["claims"].items()
        for name, one in by.items()
    ]  # fmt: skip
    said = (
        "load", "planner",
        f"fewer seconds of violation than VPA+ that costs no more, % (paper: up to {paper['fewer_violations_pct']})",
        f"fewer cores planned than VPA+ at least as accurate, % (paper: up to {paper['less_cost_pct']})",
        "fewer charged, %",
        "accuracy gained over MS+ at equal charge, points",
        "accuracy loss less than theirs, points",
    )  # fmt: skip
    fig2 = [
        (cores, name, "nothing carries it" if one is None else f"{one['loss_pct']:.2f}", _sizes(one))
        for cores, by in found["fig2"].items()
        for name, one in by.items()
    ]
    fig4 = [
        (name, f"{one['most_per_s']:.1f}", _each(one["answered_per_s"], 1), _each(one["mean_ms"], 0))
        for name, one in found["fig4"].items()
    ]
    fig6 = [
        (name, f"{one['slope']:.3f}", f"{one['intercept']:+.3f}", f"{one['r2']:.4f}", f"{one['error_max_per_s']:.1f}")
        for name, one in found["fig6"].items()
    ]
    accuracy = [
        (cores, f"{one['most']:.2f} at {one['at_per_s']:.0f}", f"{one['mean']:.2f} up to {one['up_to_per_s']:.0f}")
        for cores, one in found["accuracy"].items()
    ]
    gained = (
        f"accuracy gained by several variants over one: most, points (paper: up to {paper['less_loss_pct']} %), at /s"
    )
    return {
        "claims": markdown(said, claims),
        "runs": markdown(("load", "scheme", *columns), rows),
        "accuracy": markdown(("budget", gained, "in the mean, over loads to /s"), accuracy),
        "fig2": markdown(("75 requests/s", "planner", "accuracy loss, points", "cores"), fig2),
        "fig4": markdown(
            ("images a request, instances x threads", "most images/s", "images/s at loads", "mean latency there, ms"),
            fig4,
        ),
        "fig6": markdown(("variant", "requests/s a core", "intercept", "R2", "largest error, requests/s"), fig6),
    }


def _claim(by: Mapping[str, float], digits: int = 0) -> str:
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in by.items()) or "none such"


def _sizes(one: Mapping[str, Any] | None) -> str:
    return "" if one is None else ", ".join(f"{name} {cores:g}" for name, cores in one["cores"].items())

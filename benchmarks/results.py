"""`make results`: the tables of RESULTS.md from what studies have left, kept beside it as JSON.

Each section names its study, and its tables stand between marks. `--take` keeps a study's newest summary first; without
it only the text is made again. A tidy test holds that text and JSON agree, so that no figure is written by hand.
"""

import argparse
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args

from benchmarks import jobs
from benchmarks.dispatcher import Found, cpu_rows, speed_rows
from benchmarks.planner import DRAWN_AIMS, missed
from trefoil.cli.demo.results import git_commit
from trefoil.cli.reproduce import PAPERS
from trefoil.reproduce import claims
from trefoil.reproduce.muserve.scheduler import scheduler_tables
from trefoil.reproduce.muserve.study import muserve_tables
from trefoil.reproduce.runs import source_hash
from trefoil.reproduce.tables import (
    carbondis_tables,
    clover_tables,
    infadapter_tables,
    markdown,
    provenance,
    wattwiser_tables,
)

HERE: Final = Path(__file__).parent
RESULTS: Final = HERE / "RESULTS.md"
CHART: Final = HERE.parent / "docs" / "images" / "savings.svg"
KEPT: Final = HERE / "results"
PAGES: Final = (RESULTS, HERE.parent / "README.md", *sorted(KEPT.glob("*.md")))


def planner_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `make bench-planner` by name; `found` is its planner.json. Seconds are of CPU."""
    by_case: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in found["rows"]:
        by_case.setdefault(row["gpus"], {})[row["case"]] = row
    rows = [
        [
            f"{gpus:,}",
            *(f"{row['time_s']:.2f} | {row['gap']:.2%}" for row in (of["A"], of["B"])),
            f"{of['B']['next_s']:.2f}",
            f"{of['B']['first_s']:.2f}",
        ]
        for gpus, of in by_case.items()
    ]
    program = ("time_s", "gap")
    columns = ["GPUs", *(f"{case}: {name}" for case in "AB" for name in program), "B: next_s", "B: first_s"]
    drawn = found["drawn"]
    says = {
        "Fleets": f"{drawn['cases']} ({drawn['without_plan']} have no plan)",
        "CPU, median": f"{drawn['median_s']:.2f} s",
        "CPU, 95 % below": f"{drawn['p95_s']:.2f} s",
        "CPU, worst": f"{drawn['worst_s']:.2f} s ({drawn['slower_than_aim']} above the aim)",
        "proven gap, worst": f"{drawn['worst_gap']:.2%} ({drawn['wider_than_aim']} above 1 %)",
    }
    aims = missed(found["rows"], drawn)
    return {
        "sizes": markdown(columns, rows),
        "drawn": "; ".join(f"{name}: {figure}" for name, figure in says.items()) + ".",
        "missed": "Aims missed: " + ("; ".join(aims) if aims else "none") + ".",
    }


def dispatcher_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `make bench-dispatcher` by name; `found` is its dispatcher.json."""
    peers = {name: Found(**one) for name, one in found["peers"].items()}
    measured = [row for row in cpu_rows(peers) if set(row[1:]) != {"-"}]
    tables = {"cpu": measured, "speed": speed_rows(peers)}
    return {name: markdown(rows[0], rows[1:]) for name, rows in tables.items()}


def jobs_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `make bench-jobs` by name; `found` is its jobs.json. Percents are means over the shares of jobs."""
    rules = [rule for rule in jobs.RULES if rule != "planned"]
    rows, worth = [], []
    for zone in found["thirds"]:
        for deadline_h in jobs.DEADLINES_H:
            cases = [c for c in found["cases"] if (c["zone"], c["deadline_h"]) == (zone, deadline_h)]
            saved = (f"{statistics.fmean(jobs.saved_pct(case, rule) for case in cases):+.1f}" for rule in rules)
            away = statistics.fmean(map(jobs.distance_pct, cases))
            rows.append([zone, deadline_h, *saved, f"{away:.1f}"])
        told = [case for case in found["cases"] if case["zone"] == zone and "knows" in case]
        away_by = [[jobs.distance_pct(case, name) for case in told] for name in ("", "none", "truth")]
        worth.append([zone, f"{found['thirds'][zone]:.1f}", *(f"{statistics.fmean(each):.1f}" for each in away_by)])
    pairs = [
        [
            " and ".join(one["zones"]),
            f"{100 * (1 - one['together_g'] / one['alone_g']):+.1f}",
            f"{one['moved_pct']:.0f}",
        ]
        for one in found["pairs"]
    ]
    against = [f"`{rule}`" for rule in rules]
    knows = ["forecasts", "none", "the true carbon"]
    return {
        "savings": markdown(["zone", "deadline, h", *against, "above perfect"], rows),
        "worth": markdown(["zone", "cleanest third below the day", *knows], worth),
        "pairs": markdown(["zones", "saved against each for itself, %", "work moved, %"], pairs),
    }


def demo_tables(found: Mapping[str, Any]) -> dict[str, str]:
    """Tables of `trefoil demo --simulated --json > out/demo/simulated.json` by name."""
    equal, as_it_ran = found["saving_pct"], found["saving_uncorrected_pct"]
    others = [row["policy"] for row in found["cases"][0]["rows"] if row["policy"] in equal]
    rows = [[f"`{name}`", *_percents(equal[name]), _percents(as_it_ran[name])[0]] for name in others]
    columns = [f"`{found['subject']}` against", "saved, %", "lowest", "highest", "as it ran, %"]
    return {"savings": markdown(columns, rows)}


def _percents(of: Mapping[str, float]) -> list[str]:
    return [f"{of[name]:+.1f}" for name in ("mean", "lowest", "highest")]


def kept_of(study: str) -> dict[str, Any]:
    """What is kept of a study."""
    found: dict[str, Any] = json.loads((KEPT / f"{study}.json").read_text(encoding="utf-8"))
    return found


def is_stale(study: str, found: Mapping[str, Any]) -> bool:
    """Whether sources that a study depends on have changed since, or nobody kept which they were."""
    return found.get("sources") != source_hash(*SOURCES[study])


def summary() -> str:
    """What all kept results say, a row each: what was asked for or published, our figure, its ratio to that, SLO and
    floor, verdict. Then, for each study, its command, n, run time and commit."""
    rows: list[list[str]] = []
    made = {study: kept_of(study) for study in ("demo", "planner", "dispatcher", "jobs")}

    def row(study: str, what: str, asked: str, figure: str, verdict: str, ratio: float | None = None) -> None:
        rows.append([f"{study}: {what}", asked, figure, "" if ratio is None else f"{ratio:.2f}", verdict])

    demo, planner, dispatcher, of_jobs = made.values()
    missed_by = [one["policy"] for case in demo["cases"] for one in case["rows"] if one["missed"]]
    for name, of in demo["saving_pct"].items():
        mean, lowest, highest = _percents(of)
        figure = f"{mean} % ({lowest} to {highest}); as it ran {_percents(demo['saving_uncorrected_pct'][name])[0]} %"
        promises = "MISSED" if {name, demo["subject"]} & {*missed_by} else "kept"
        row("demo", f"grams saved against `{name}`", "", figure, f"SLO and floor {promises}")
    for key, (name, scale, unit) in DRAWN.items():
        value, aim = scale * planner["drawn"][key], scale * DRAWN_AIMS[key]
        row("planner", name, f"at most {aim:g} {unit}", f"{value:.2f} {unit}", _kept(value <= aim), value / aim)
    for one in dispatcher["limits"]:
        asked, figure = f"at most {one['limit']:g}", f"{one['value']:.2f} {one['unit']}"
        row("dispatcher", one["what"], asked, figure, _kept(one["passed"]), one["value"] / one["limit"])
    away, once = (
        [found(case) for case in of_jobs["cases"]]
        for found in (jobs.distance_pct, lambda case: jobs.saved_pct(case, "at_once"))
    )
    spread = f"{statistics.fmean(once):+.1f} % ({min(once):+.1f} to {max(once):+.1f})"
    row("jobs", "grams saved against `at_once`", "", spread, "")
    mean, most = statistics.fmean(away), jobs.WITHIN_PCT
    verdict = _kept(mean <= most)
    row("jobs", "above perfect knowledge, mean", f"at most {most:g} %", f"{mean:.1f} %", verdict, mean / most)
    late_h = sum(case["rules"]["planned"]["late_h"] for case in of_jobs["cases"])
    row("jobs", "overdue device hours", "0", f"{late_h:g}", _kept(not late_h))
    rows += headlines()
    made |= {paper: kept_of(paper) for paper in claims.files()}
    assert len(rows) <= ROWS_MAX, "the front page is for the figures that a reader asks for first"
    n = {study: f"{len(found['seeds'])} seeds" for study, found in made.items() if "seeds" in found}
    n |= {"planner": f"{planner['drawn']['cases']} fleets", "dispatcher": f"{dispatcher['rounds']} rounds"}
    n |= {"jobs": f"{len(once)} cases"}
    studies = [f"- {study}: {_made(study, found, n[study])}" for study, found in made.items()]
    machines = "; ".join(dict.fromkeys(found["machine"] for found in made.values()))
    table = markdown(["what", "asked or published", "ours", "ratio", "verdict"], rows)
    return "\n".join((table, "", *studies, "", f"Machines: {machines}."))


def headlines() -> Iterator[list[str]]:
    """By paper, the row of the claim that stands for it on the first page."""
    for paper, path in claims.files().items():
        read = claims.read(path)
        (claim,) = (claim for claim in read.claims if claim.name == read.headline)
        published, figure, ratio = claim.published, "", ""
        if claim.verdict != "not played":
            value = claims.ours(claims.kept(read, KEPT), claim.path)
            figure = claims.shown(claim, value)
            if isinstance(published, claims.Published) and not isinstance(value, bool):
                ratio = f"{2 * statistics.median(value) / (published.low + published.high):.2f}"
        yield [f"{paper}: {claim.says}", f"{published}, {claim.where}", figure, ratio, claim.verdict]


def _made(study: str, found: Mapping[str, Any], n: str) -> str:
    """Command, n, run time and commit of a study, and whether it is stale."""
    took = f"{found['took_s'] / 60:.0f} min" if "took_s" in found else "run time not kept"
    stale = ", stale" if is_stale(study, found) else ""
    return f"`{found['command']}`, {n}, {took}, {found['commit'][:8]}{stale}"


def _kept(passed: bool) -> str:
    return "kept" if passed else "MISSED"


def verdicts(title: str, folder: str, headings: Mapping[claims.Verdict, str]) -> str:
    """How many claims of each paper have which verdict. `folder`: that of the papers' pages, from where the table
    stands."""
    rows = []
    for name, path in claims.files().items():
        read = claims.read(path)
        found = Counter(claim.verdict for claim in read.claims)
        rows.append([f"[{read.paper}]({folder}/{name}.md)", *(found[verdict] for verdict in headings)])
    return markdown([title, *headings.values()], rows)


def draw_savings(found: Mapping[str, Any], path: Path) -> None:
    """README's chart, 800 x 400: grams a request at equal accuracy, in percent of the first policy's."""
    from matplotlib import pyplot as plt

    rows = found["cases"][0]["rows"]
    names = {"base": "do nothing", "static_mix": "carbon-blind plan", "static_miad": "carbon-blind plan,\nsame levers"}
    labels = [names.get(row["policy"], "Trefoil") for row in rows]
    saved = [
        row["saving"]["pct"] if row["saving"] else dict.fromkeys(("mean", "lowest", "highest"), 0.0) for row in rows
    ]
    left = [100.0 - one["mean"] for one in saved]
    spread = [[one["highest"] - one["mean"] for one in saved], [one["mean"] - one["lowest"] for one in saved]]
    with plt.rc_context({"svg.hashsalt": "trefoil", "font.size": 12}):
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        axes.bar(labels, left, yerr=spread, capsize=6, color=["#9aa5a3", "#9aa5a3", "#9aa5a3", "#0f8a7e"], width=0.6)
        for place, value in enumerate(left):
            axes.annotate(f"{value:.0f} %", (place, 4), ha="center", color="white", weight="bold")
        axes.set_ylabel("grams of CO2 a request,\n% of doing nothing")
        axes.set_title(
            f"At equal accuracy; simulated GPUs, {len(found['seeds'])} seeds, lowest to highest", fontsize=12
        )
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


STUDIES: Final[Mapping[str, tuple[Path, Callable[[Mapping[str, Any]], dict[str, str]]]]] = {
    "clover": (Path("out/reproduce/clover/summary.json"), clover_tables),
    "wattwiser": (Path("out/reproduce/wattwiser/summary.json"), wattwiser_tables),
    "carbondis": (Path("out/reproduce/carbondis/summary.json"), carbondis_tables),
    "muserve": (Path("out/reproduce/muserve/summary.json"), muserve_tables),
    "muserve_scheduler": (Path("out/reproduce/muserve_scheduler/summary.json"), scheduler_tables),
    "demo": (Path("out/demo/simulated.json"), demo_tables),
    "planner": (Path("out/bench/planner.json"), planner_tables),
    "jobs": (Path("out/bench/jobs.json"), jobs_tables),
    "dispatcher": (Path("out/bench/dispatcher.json"), dispatcher_tables),
    "infadapter": (Path("out/reproduce/infadapter/summary.json"), infadapter_tables),
}
SOURCES: Final[Mapping[str, tuple[str, str]]] = {  # policy and module whose imports a study depends on
    **{one.command.replace("-", "_"): (one.sources[0], f"trefoil.reproduce.{one.sources[1]}") for one in PAPERS},
    "clover": ("", "trefoil.reproduce.runs"),
    "demo": ("", "trefoil.cli.demo.spread"),
    "planner": ("exact", "controller.planners.exact.planner"),
    "jobs": ("", "controller.jobs.core.planning"),
    "dispatcher": ("", "dispatcher.worker"),
}
ROWS_MAX: Final = 25
DRAWN: Final = {  # by figure of drawn fleets: its name, and what it is shown in
    "median_s": ("CPU of a decision, median", 1.0, "s"),
    "worst_s": ("CPU of a decision, worst", 1.0, "s"),
    "worst_gap": ("proven gap, worst", 100.0, "%"),
}
VERDICTS: Final[Mapping[claims.Verdict, str]] = {verdict: verdict for verdict in get_args(claims.Verdict)}
PLAYED: Final[Mapping[claims.Verdict, str]] = {"holds": "hold", "direction holds": "in direction", "differs": "differ"}
MARK: Final = re.compile(r"<!-- (\w+)/([\w-]+) -->\n.*?<!-- / -->", re.DOTALL)
UNUSED: Final = ("fig04", "fig09", "fig10", "fig11", "fig13", "bases")  # figures that have no table


def take(study: str) -> None:
    """Keep the newest summary of a study, without what no table shows."""
    source, _ = STUDIES[study]
    found = json.loads(source.read_text(encoding="utf-8"))
    for name in UNUSED:
        found.get("figures", {}).pop(name, None)
    for row in (row for case in found["cases"] for row in case["rows"]) if study == "demo" else ():
        row.pop("runs")
    if found["commit"][:8] == git_commit()[:8] and "dirty" not in git_commit():
        found.setdefault("sources", source_hash(*SOURCES[study]))
    KEPT.mkdir(exist_ok=True)
    (KEPT / f"{study}.json").write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def with_tables(text: str) -> str:
    """Text with every table that is marked made again. Raises KeyError for a mark that no study has a table for."""
    wanted = {mark[1] for mark in MARK.finditer(text)}
    tables: dict[str, dict[str, str]] = {}
    for study, (_, make) in STUDIES.items():
        if study in wanted and (KEPT / f"{study}.json").exists():
            found = kept_of(study)
            tables[study] = make(found) | {"made": provenance(found)}
    for paper, path in claims.files().items():
        read = claims.read(path)
        if f"{paper}/published" in text:
            tables.setdefault(paper, {})["published"] = claims.table(read, claims.kept(read, KEPT))
    if "all" in wanted:
        tables["all"] = {"summary": summary()}
    if "papers" in wanted:
        in_readme = verdicts("claims of", "benchmarks/results", PLAYED)
        tables["papers"] = {"verdicts": verdicts("paper", "results", VERDICTS), "played": in_readme}
    return MARK.sub(lambda m: f"<!-- {m[1]}/{m[2]} -->\n{tables[m[1]][m[2]]}\n<!-- / -->", text)


def main() -> None:
    """Make the tables of RESULTS.md, its studies' pages and README.md, and README's chart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--take", nargs="*", choices=[*STUDIES], help="studies whose newest summary is kept first")
    for study in parser.parse_args().take or ():
        take(study)
    draw_savings(kept_of("demo"), CHART)
    for page in PAGES:
        page.write_text(with_tables(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The report: every number that is promised, one file without a network, and nothing invented when nothing metered."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.demo_reports import read_report
from tests.unit.cli import recorded
from trefoil.cli.demo import report, run_demo
from trefoil.cli.demo.results import DemoFamilySummary, Exploration, Report
from trefoil.cli.demo.spread import savings_of

TOP_LEVEL = {
    "simulated", "triton_version", "gpus", "duration_s", "carbon_speedup", "seed", "commit", "pad_overrun_ratio",
    "saving_pct", "saving_uncorrected_pct", "no_saving", "accuracy", "missed_floor", "spread",
    "base", "static_mix", "exact",
}  # fmt: skip
PER_RUN = {
    "requests", "answered", "failed", "slo", "latency_ms_p50", "latency_ms_p95", "latency_ms_p99", "slo_attainment",
    "accuracy", "accuracy_profile", "core_s", "mixes", "failed_by_code",
    "joules_per_request", "grams_per_request", "idle_share", "replans", "reconfigurations", "exploration", "families",
}  # fmt: skip


@pytest.fixture(scope="module")
def page() -> str:
    return report.report_html(recorded.report(), {name: recorded.series(name) for name in recorded.NAMES})


def test_report_json_has_the_promised_fields() -> None:
    values = recorded.report().to_json()
    assert values.keys() >= TOP_LEVEL
    for name in recorded.NAMES:
        assert set(values[name]) == PER_RUN
        assert set(values[name]["slo"]) == {"percentile", "latency_ms"}
        assert set(values[name]["replans"]) >= {"carbon", "load", "slo", "objective"}
        assert set(values[name]["reconfigurations"]) >= {"carbon", "load", "slo", "objective"}
    assert set(values["saving_pct"]) == {"base", "static_mix"}


def test_savings_are_of_grams_per_request_at_the_accuracy_that_we_have() -> None:
    values = recorded.report().to_json()
    assert values["saving_uncorrected_pct"]["base"] == pytest.approx(100 * (1 - 0.0022 / 0.0035))
    assert values["saving_pct"]["base"] == pytest.approx(100 * (1 - 0.0022 / (0.0035 - 0.02 * 0.014)))
    assert values["saving_pct"]["static_mix"] == pytest.approx(100 * (1 - 0.0022 / 0.0024))


def with_family(one: Report, *families: DemoFamilySummary) -> Report:
    ours = replace(one.runs["exact"], families=dict(zip(("digits", "twin"), families, strict=False)))
    return replace(one, runs={**one.runs, "exact": ours})


def test_of_several_families_each_has_its_rows_its_floor_and_its_digest() -> None:
    first, other = recorded.family_summary(), replace(recorded.family_summary(), slo_ms=91.0, schedule_digest="7b0f")
    runs = {
        name: replace(run, families={"digits": first, "twin": other}) for name, run in recorded.report().runs.items()
    }
    both = replace(recorded.report(), runs=runs)
    lines = report.report_lines(both)
    assert "twin: p95, SLO: base=49.0, 91 ms  static_mix=49.0, 91 ms  exact=49.0, 91 ms" in lines
    assert "twin: digest of its schedule: base=7b0f  static_mix=7b0f  exact=7b0f" in lines
    assert not any(line.startswith("digits: ") for line in report.report_lines(recorded.report()))
    assert not both.missed_floor("exact")
    assert with_family(both, first, replace(other, accuracy=0.9)).missed_floor("exact"), "the second family alone"


def test_who_answered_is_said_of_a_fleet_of_several_device_types() -> None:
    one = recorded.report()
    assert not any("answered by" in line for line in report.report_lines(one))
    mixed = replace(recorded.family_summary(), device_type_shares={"A100-SXM4-40GB": 0.25, "Tesla T4": 0.75})
    alone = replace(mixed, device_type_shares={"A100-SXM4-40GB": 0.0, "Tesla T4": 1.0})
    runs = {name: replace(run, families={"digits": mixed}) for name, run in one.runs.items()}
    runs["base"] = replace(runs["base"], families={"digits": alone})
    both = "A100-SXM4-40GB 25.0 %, Tesla T4 75.0 %"
    line = f"digits: answered by: base=Tesla T4 100.0 %  static_mix={both}  exact={both}"
    assert line in report.report_lines(replace(one, runs=runs))


def no_saving(of: Report, missed: str) -> None:
    lines, page = "\n".join(report.report_lines(of)), report.report_html(of, {})
    assert f"saving of exact against base: none: {missed}" in lines
    assert f"no saving: {missed}" in page
    assert "at equal accuracy +" not in lines
    assert "simulated seeds" not in page


@pytest.mark.parametrize(("field", "value"), [("accuracy", 0.9544), ("accuracy_profile", 0.9544)])
def test_a_run_below_its_floor_has_saved_nothing(field: str, value: float) -> None:
    one = recorded.report()
    missed = with_family(one, replace(recorded.family_summary(0.956), **{field: value}))
    values = missed.to_json()
    assert values["missed_floor"] == {"base": False, "static_mix": False, "exact": True}
    assert values["saving_pct"] == {"base": None, "static_mix": None}
    no_saving(missed, "digits is below its accuracy floor (0.9544, 0.9550 asked)")
    assert run_demo.exit_code(missed) == 1
    assert run_demo.exit_code(one) == 0
    held = with_family(one, replace(recorded.family_summary(0.956), **{field: 0.9546}))
    assert not held.missed_floor("exact"), "the tolerance of every report"


def test_the_simulated_seeds_say_how_far_one_run_is_to_be_believed() -> None:
    values = recorded.report().to_json()["spread"]
    each = [100 * (1 - ours / (0.0024 + 0.02 * gap)) for ours, gap in ((22e-4, 0), (23e-4, 0.001), (20e-4, -0.005))]
    assert savings_of(recorded.spread(), "exact")["static_mix"].by_seed == pytest.approx(each)
    assert values["subject"] == "exact"
    assert values["saving_pct"]["static_mix"]["mean"] == pytest.approx(sum(each) / 3)
    assert values["saving_pct"]["static_mix"]["lowest"] == pytest.approx(min(each))
    assert values["cases"][0]["rows"][2]["missed_floor_seeds"] == [9]
    lines = "\n".join(report.report_lines(recorded.report()))
    assert "one draw" in lines
    assert "exact against static_mix, the best carbon-blind policy here with its levers: +" in lines
    assert "simulated, 3 seeds: saving of exact against static_mix at equal accuracy" in lines
    assert "below the floor base under 0 of 3, static_mix under 0 of 3, exact under 1 of 3 seeds" in lines


def test_a_written_report_reads_back(tmp_path: Path) -> None:
    report.write_report(tmp_path, recorded.report(), {})
    assert read_report(tmp_path / "report.json") == recorded.report()
    json.loads((tmp_path / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.mark.parametrize(
    ("wrong", "missed"),
    [({"accuracy": 0.95}, "digits is below its accuracy floor (0.9500, 0.9550 asked)"),
     ({"slo_attainment": 0.9}, "digits misses its SLO (90.00% in time, 95.00% asked)")],
)  # fmt: skip
def test_seeds_that_miss_what_was_asked_for_in_the_mean_make_no_saving(wrong, missed) -> None:
    of = replace(recorded.report(), spread=recorded.spread(**wrong))
    assert of.to_json()["spread"]["saving_pct"] == {"base": None, "static_mix": None}
    assert f"3 seeds: saving of exact against base: none: {missed}, in the mean" in report.savings_caption(of)
    assert "simulated seeds" not in report.report_html(of, {})


def test_without_a_meter_joules_grams_and_savings_are_null_not_zero(tmp_path: Path) -> None:
    unmetered = recorded.report(metered=False)
    report.write_report(tmp_path, unmetered, {name: recorded.series(name, metered=False) for name in recorded.NAMES})
    values = json.loads((tmp_path / "report.json").read_text())
    for name in recorded.NAMES:
        assert values[name]["joules_per_request"] is None
        assert values[name]["grams_per_request"] is None
        assert values[name]["idle_share"] is None
    assert values["saving_pct"] == {"base": None, "static_mix": None}
    assert "not metered" in (tmp_path / "report.html").read_text()


def test_the_page_fetches_nothing(page: str) -> None:
    assert not re.findall(r"""\b(?:src|data|srcset|poster)\s*=""", page)
    assert not re.findall(r"<(?:link|script|iframe|img|object|embed|base)\b", page)
    assert not re.findall(r"@import|url\(\s*['\"]?(?!#)", page)
    links = re.findall(r"""\bhref\s*=\s*["']([^"']*)""", page)
    assert all(link.startswith("#") for link in links)
    outside = set(re.findall(r"https?://[^\s\"'<>]+", page))
    assert outside <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}, "namespaces are not fetched"


def test_references_inside_the_plots_resolve_and_do_not_meet(page: str) -> None:
    ids = re.findall(r'\sid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'href="#([^"]+)"', page)) | set(re.findall(r"url\(#([^)]+)\)", page))
    assert used <= set(ids)


def test_the_page_says_simulated_and_where_numbers_come_from(page: str) -> None:
    for said in ("Simulated GPUs", "2.51.0", "0123abc", "trefoil demo", "2 cores, 8 GiB", "2,057", "37.1 %", "8.3 %"):
        assert said in page


def test_the_page_reads_in_light_and_dark(page: str) -> None:
    assert "prefers-color-scheme: dark" in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        assert "currentColor" in svg
        assert "#010203" not in svg
        assert "#000000" not in svg, "black text would vanish on a dark page"


def test_decisions_are_listed_with_cause_and_reason(page: str) -> None:
    assert "intensity 320 -&gt; 180 g/kWh" in page
    assert "Decisions of exact" in page
    assert "gpu1 asleep" in page


def test_text_from_a_planner_cannot_become_markup() -> None:
    one = recorded.series("exact")
    nasty = [type(one.events[0])(1.0, None, "load", "<script>alert(1)</script>", "", 0, True)]
    series = {name: recorded.series(name) for name in recorded.NAMES}
    series["exact"] = type(one)(**{f: getattr(one, f) for f in one.__dataclass_fields__} | {"events": nasty})
    assert "<script>" not in report.report_html(recorded.report(), series)


def explored() -> Report:
    """BASE and a policy that measures candidates; no run of `exact`."""
    one = recorded.report()
    cost = Exploration(2, 9, 1, 1, 180.0, 41_250.0, 37)
    ours = replace(one.runs["exact"], exploration=cost)
    return replace(one, runs={"base": one.runs["base"], "clover": ours}, spread=None)


def test_a_report_without_exact_is_of_the_policy_named_last(tmp_path: Path) -> None:
    report.write_report(tmp_path, explored(), {"base": recorded.series("base"), "clover": recorded.series("exact")})
    assert read_report(tmp_path / "report.json") == explored()
    assert json.loads((tmp_path / "report.json").read_text())["clover"]["exploration"]["spent_j"] == 41_250.0
    page = (tmp_path / "report.html").read_text()
    assert "clover against base" in page
    assert "41,250 J" in page
    lines = "\n".join(report.report_lines(explored()))
    assert "saving of clover against base: none: accuracy of digits differs by -0.0140 and has no price here" in lines
    assert "evaluations, refused, broken off: base=-  clover=9, 1, 1" in lines
    assert "exploration" not in "\n".join(report.report_lines(recorded.report()))


def test_both_savings_are_printed_whatever_their_sign() -> None:
    lines = "\n".join(report.report_lines(recorded.report()))
    assert "against base: +31.7 % at equal accuracy (+37.1 % as it ran)" in lines
    assert "against static_mix: +8.3 %" in lines


def test_what_was_missed_is_red_and_stands_before_the_saving() -> None:
    one = recorded.report()
    assert report.missed_lines(one) == []
    assert 'role="alert"' not in report.report_html(one, {})
    late = with_family(one, replace(recorded.family_summary(0.956), slo_attainment=0.93))
    assert late.to_json()["missed_slo"] == {"base": False, "static_mix": False, "exact": True}
    said = "exact: digits misses its SLO (93.00% in time, 95.00% asked)"
    assert report.report_lines(late)[0] == f"MISSED {said}"
    page = report.report_html(late, {})
    assert page.index(said) < page.index('class="headline"')
    assert 'class="subject bad"' in page
    assert late.to_json()["saving_pct"] == {"base": None, "static_mix": None}
    no_saving(late, "digits misses its SLO (93.00% in time, 95.00% asked)")
    assert run_demo.exit_code(late) == 1
    base = replace(one.runs["base"], families={"digits": replace(recorded.family_summary(), slo_attainment=0.9)})
    both = replace(late, runs={**late.runs, "base": base})
    assert [line.split(":")[0] for line in report.missed_lines(both)] == ["exact", "base"], (
        "what it is about comes first"
    )


def test_a_decision_that_was_superseded_says_by_which() -> None:
    done = recorded.series("exact").events[0]
    events = [replace(done, took_s=None, plan="", superseded=True), done, replace(done, took_s=None, plan="")]
    page = report.report_html(recorded.report(), {"exact": replace(recorded.series("exact"), events=events)})
    assert page.count("superseded by 2") == 1
    assert page.count("not carried out when the run ended") == 1

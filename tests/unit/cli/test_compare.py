"""`trefoil compare`: equal load for all, checked before anything starts, written where it is asked to."""

import csv
import gc
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trefoil.cli import output
from trefoil.cli.main import app
from trefoil.comparison import runs
from trefoil.core.errors import SettingError
from trefoil.core.policies import POLICIES
from trefoil.reproduce.runs import run_all

ROOT = Path(__file__).resolve().parents[3]
TINY = ("digits", "--set", "duration_s=40", "--set", "warmup_s=5")


def run(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["compare", *arguments])
    return found.exit_code, found.stdout, found.stderr


def test_every_policy_value_and_seed_meets_the_same_load(tmp_path):
    rate = "families.0.arrivals.points.0.1"
    code, out, err = run(
        *TINY, "--policies", "base,co2opt", "--set", f"{rate}=10,20", "--seeds", "2", "--out", str(tmp_path), "--json"
    )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [case["set"] for case in found["cases"]] == [{rate: "10"}, {rate: "20"}]
    for case in found["cases"]:
        assert len(set(case["arrivals"].values())) == 2, "two seeds, two draws"
        assert all({r["arrivals"] for r in row["runs"]} == set(case["arrivals"].values()) for row in case["rows"])
        base, co2opt = case["rows"]
        assert base["saving"] is None
        assert (co2opt["missed"], co2opt["saving"]["pct"]) == (["floor"], None), "fewer grams alone are not a saving"
    assert found["cases"][0]["arrivals"] != found["cases"][1]["arrivals"]
    rows = list(csv.DictReader((tmp_path / "comparison.csv").open()))
    assert [(r[rate], r["policy"]) for r in rows[:4]] == [("10", "base")] * 2 + [("10", "co2opt")] * 2
    page = (tmp_path / "comparison.html").read_text()
    assert "none: digits is below its accuracy floor" in page
    assert "<svg" in page
    assert (tmp_path / "comparison.png").stat().st_size > 1000


class Ends:
    """Garbage that says which process collects it."""

    def __init__(self, file: Path) -> None:
        self.file, self.itself = file, self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@dataclass(frozen=True)
class Collects:
    name: str
    work: float = 1.0

    def play(self) -> int:
        gc.collect()
        return os.getpid()


def test_no_forked_process_collects_what_this_one_left(tmp_path):
    """One that collected a channel of grpc.aio waited forever for its thread, and `compare` with it."""
    Ends(tmp_path / "pids")
    found = run_all([Collects("a"), Collects("b")], None, jobs=2)
    assert os.getpid() not in found.values()
    assert set((tmp_path / "pids").read_text().split()) == {str(os.getpid())}


def test_two_presets_of_a_policy_are_compared_by_its_objective_with_what_exploring_took():
    named = "base,clover@paper,clover@guided"
    longer = ("digits", "--set", "duration_s=120", "--set", "warmup_s=5")
    code, out, err = run(*longer, "--policies", named, "--seeds", "1", "--jobs", "1", "--json")
    assert (code, err) == (0, "")
    (case,) = json.loads(out)["cases"]
    assert [row["policy"] for row in case["rows"]] == named.split(",")
    assert case["lambda_weight"] == 0.5
    base, paper, guided = case["rows"]
    for row in (paper, guided):
        carbon = 100 * (1 - row["grams_per_request"]["mean"] / (base["joules_per_request"]["mean"] * 250 * 1.2 / 3.6e6))
        accuracy = 100 * (row["accuracy"]["mean"] / base["accuracy"]["mean"] - 1)
        assert row["objective"]["mean"] == pytest.approx((carbon + accuracy) / 2)
        assert row["evaluations"]["mean"] > 0
        assert row["exploration_s"]["mean"] > 0
    assert base["evaluations"]["mean"] == 0


def test_progress_is_printed_within_two_seconds_and_while_it_lasts(monkeypatch):
    assert output.FIRST_TICK_S < 2.0
    monkeypatch.setattr(output, "FIRST_TICK_S", 0.01)
    monkeypatch.setattr(output, "TICK_S", 0.01)

    def slow(*arguments):
        time.sleep(0.2)
        raise SettingError("no more", field="x", remedy="none")

    monkeypatch.setattr(runs, "compare", slow)
    _, out, err = run("digits", "--policies", "base,exact")
    assert out == ""
    assert err.count("working, 0 s so far") > 1
    assert err.endswith("trefoil: x: no more. Remedy: none\n")
    assert run("digits", "--policies", "base,exact", "--json")[2].startswith("trefoil: x")


def test_a_comparison_says_how_many_runs_it_needs_and_each_that_is_done():
    code, _, err = run(*TINY, "--policies", "base,static_mix", "--seeds", "1", "--jobs", "1")
    lines = [line for line in err.splitlines() if not line.startswith("working")]
    assert code == 0
    assert lines[0].endswith("runs in simulated time")
    assert len(lines) == 1 + int(lines[0].split()[0])


def test_all_policies_that_apply_are_played_and_the_others_named_with_the_reason(monkeypatch):
    kept = ("base", "static_mix", "carbondis", "infadapter", "muserve")
    monkeypatch.setattr(runs, "TABLE", {name: POLICIES[name] for name in kept})
    code, out, err = run(*TINY, "--seeds", "2", "--jobs", "1", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["policies"] == [row["policy"] for row in found["cases"][0]["rows"]]
    assert found["policies"][:2] == ["base", "static_mix"]
    assert set(found["policies"]) | set(found["cases"][0]["left_out"]) == set(kept)
    assert "low-end" in found["cases"][0]["left_out"]["carbondis"]
    assert len(found["seeds"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--policies", "base,exat"), ("policy = 'exat': unknown policy", "exact")),
        (("--policies", "base,clover@papr"), ("preset = 'papr': no preset of planner clover", "paper")),
        (("--policies", "base"), ("--policies = 'base': nothing to compare", "two or more")),
        (("--set", "policy=base,exact"), ("policy", "--policies")),
        (("--rules", "all"), ("--rules = 'all': the scenario has no jobs", "add [[jobs]]")),
        (("--rules", "all", "--policies", "base,exact"), ("--policies = 'base,exact'", "under one policy")),
        (("jobs", "--rules", "at_once,later"), ("jobs_rule = 'later'", "carbon_scaler")),
        (("jobs", "--rules", "all", "--set", "jobs_rule=planned"), ("jobs_rule: is given by the", "--rules")),
        (("--set", "families.1.name=digits"), ("families: has 1 entry", "families.0")),
        (("--set", "families.0.repository=nowhere,elsewhere"), ("nowhere/digits/family.toml", "No such file")),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_starts(monkeypatch, arguments, words):
    monkeypatch.setattr(runs, "run_all", lambda *_: pytest.fail("something has started"))
    monkeypatch.chdir(ROOT)
    scenario = () if arguments[0] == "jobs" else ("digits",)
    code, out, err = run(*scenario, *arguments)
    assert (code, out, len(err.strip().splitlines())) == (2, "", 1)
    assert all(word in err for word in words), err

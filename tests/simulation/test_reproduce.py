"""A reproduction in small: every scheme at equal everything, figures on disk, and nothing played twice."""

import json

import pytest
from typer.testing import CliRunner

from trefoil.cli.main import app
from trefoil.reproduce.clover import Options, Study
from trefoil.reproduce.figures import all_figures

SMALL = Options(("efficientnet",), (1,), 9.0, 9.0, 18.0, 1, False)


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clover")
    said = []
    return folder, all_figures(Study(SMALL, folder, said.append), folder), said


def test_every_scheme_met_the_same_load_slo_and_fleet(played):
    _, found, _ = played
    rows = found["equal"]["efficientnet"]["rows"]
    assert {"base", "co2opt", "blover", "clover", "oracle", "exact", "static_mix at clover's accuracy"} <= set(rows)
    kept = [json.loads(p.read_text()) for p in (played[0] / "runs").glob("*.json")]
    main = [run for run in kept if not run["spec"]["label"].startswith("reference")]
    for name in ("rate_per_s", "slo_ms", "gpus", "items", "trace", "seed"):
        assert len({run["spec"][name] for run in main}) == 1, name
    arrived = {run["summary"]["arrived"] for run in main}
    assert max(arrived) - min(arrived) <= 1  # the same requests
    assert len({run["summary"]["truth_hash"] for run in main}) == 1


def test_what_must_hold_holds(played):
    rows = played[1]["equal"]["efficientnet"]["rows"]
    assert rows["base"]["accuracy_loss_pct"]["mean"] == pytest.approx(0.0, abs=1e-6)
    assert rows["exact"]["objective"]["mean"] >= rows["exact, all awake"]["objective"]["mean"] - 0.05
    assert rows["exact, all awake"]["objective"]["mean"] >= rows["oracle"]["objective"]["mean"] - 0.15
    assert rows["co2opt"]["grams_per_request"]["mean"] < rows["base"]["grams_per_request"]["mean"]
    assert rows["clover"]["evaluations"]["mean"] > 0
    floor = rows["clover"]["accuracy"]["mean"]
    assert rows["static_mix at clover's accuracy"]["accuracy"]["mean"] >= floor - 0.002


def test_the_papers_method_is_labelled_and_larger(played):
    found = played[1]
    method = found["paper_method"]["efficientnet"]
    assert "fifth of the load" in method["note"]
    equal = found["equal"]["efficientnet"]["claims"]["saving_of_clover_against_base_pct"]
    assert method["saving_pct"][0] > equal[0] + 10


def test_figures_stand_beside_their_numbers_and_nothing_is_played_twice(played):
    folder, found, said = played
    for name in ("fig02", "fig03", "fig09", "fig10", "fig11", "fig12", "fig13"):
        assert (folder / f"{name}.csv").stat().st_size > 50
        assert (folder / f"{name}.png").stat().st_size > 1000
    before = len(said)
    assert before > 5
    again = all_figures(Study(SMALL, folder, said.append), folder)
    assert len(said) == before
    assert json.dumps(again["equal"]) == json.dumps(found["equal"])


def test_an_unknown_application_is_refused_by_name():
    done = CliRunner().invoke(app, ["reproduce", "clover", "--family", "resnet"])
    assert done.exit_code == 2
    assert "resnet" in done.output
    assert "Remedy" in done.output

"""Sensitivity scores: the roofline by hand, the same by measuring, every graph that ships, the command."""

import csv
import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from trefoil.cli.family import sensitivity_command
from trefoil.cli.main import app
from trefoil.core.device_types import A100_40GB, V100_32GB
from trefoil.core.power import at_clock
from trefoil.profiler.assumed import OperatorCost
from trefoil.profiler.graph_costs import costs
from trefoil.profiler.profile_csv import write_sensitivity
from trefoil.profiler.sensitivity import (
    MODELLED,
    Board,
    OperatorTimes,
    board_of,
    measured_scores,
    modelled_scores,
    summary,
)
from trefoil.runtime.repository import load_family

ROOT = Path(__file__).parents[3]
SHIPPED = sorted([*ROOT.glob("model_repository/digits/*/model.onnx"), *ROOT.glob("controller/forecasters/*.onnx")])
BOARD = Board(flops_per_s=1e12, bytes_per_s=1e11, launch_ms=0.005)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime of the environment of the tests, in place of Triton's."""
    monkeypatch.setattr(sensitivity_command, "triton_environment", lambda: Path(sys.prefix))


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["family", "sensitivity", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("flops", "moved", "time_ms", "score"),
    [
        (1e9, 1e6, 1.0, 2.0),  # compute: twice the time at half the clock
        (1e6, 1e8, 1.0, 0.0),  # memory
        (1e3, 1e3, 0.005, 0.0),  # the launch
        (0.75e9, 1e8, 1.0, 1.0),  # memory here, compute there: 1.0 to 1.5 ms
        (0, 0, 0.0, 0.0),  # another name for the same bytes
    ],
)
def test_an_operator_is_scored_by_the_ceiling_that_it_meets_at_each_clock(flops, moved, time_ms, score):
    (found,) = modelled_scores([OperatorCost("x", "Op", flops, moved)], BOARD)
    assert (found.time_ms, found.score) == pytest.approx((time_ms, score))
    assert found.source.startswith("modelled")


def test_a_model_follows_the_law_with_the_s_of_its_operators_by_time():
    costs = [OperatorCost("a", "Gemm", 3e9, 1e6), OperatorCost("b", "Relu", 1e6, 1e8)]
    found = summary(modelled_scores(costs, BOARD))
    assert found["s"] == pytest.approx(0.75)
    halved = sum(BOARD.time_ms(one, 0.5) for one in costs) / sum(BOARD.time_ms(one) for one in costs)
    assert halved == pytest.approx(1 - found["s"] + found["s"] / 0.5)
    assert (found["insensitive_share"], found["insensitive_time_share"]) == pytest.approx((0.5, 0.25))


def test_ceilings_are_those_of_the_board():
    board = board_of(V100_32GB)
    assert board.flops_per_s == pytest.approx(80 * 64 * 2 * 1530e6)
    assert board.bytes_per_s == pytest.approx(900e9)


def test_measured_operators_have_their_own_times_and_others_say_why_they_are_modelled():
    found = [OperatorCost("a", "Gemm", 1e9, 1e6), OperatorCost("b", "If", 1e6, 1e8), OperatorCost("r", "Reshape", 0, 0)]
    modelled = modelled_scores(found, BOARD)
    times, whys = {"a": OperatorTimes(2.0, 3.0, 60)}, {"b": "it has graphs of its own"}
    scores = measured_scores(modelled, times, whys, 0.5, "measured here")
    assert scores[0] == replace(modelled[0], time_ms=2.0, score=1.0, source="measured here", samples=60)
    assert scores[1] == replace(modelled[1], source=f"{MODELLED}: it has graphs of its own")
    assert scores[2] == modelled[2]
    (third,) = measured_scores(modelled[:1], {"a": OperatorTimes(2.0, 5.0, 9)}, {}, 0.4, "")  # 2.5 times at 0.4
    assert third.score == pytest.approx(2.5)
    assert summary(scores)["s"] == pytest.approx(0.5 * (2.0 * 1.0 + 1.0 * 0.0) / 3.0)


@pytest.mark.parametrize("model", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_operator_of_every_graph_that_ships_is_scored(model):
    operators = [OperatorCost(**one) for one in costs(str(model), {})["operators"]]
    scores = modelled_scores(operators, board_of(V100_32GB))
    assert len(scores) >= 8
    assert all(0 <= one.score <= 2 for one in scores)
    products = [one for one in scores if one.operator in ("Gemm", "LSTM")]
    assert products
    assert all(one.flops > 0 and one.bytes > one.flops / 50 and one.time_ms > 0 for one in products)


def test_the_command_writes_each_operator_as_a_row_and_draws_them(runtime, tmp_path):
    result = run(SHIPPED[0], "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    (table,), (_plot,) = tmp_path.glob("*.csv"), tmp_path.glob("*.png")
    rows = list(csv.DictReader(table.open()))
    assert [row["name"] for row in rows] == [one["name"] for one in found["scores"]]
    assert len(rows) == found["operators"] >= 8


def test_the_command_writes_s_into_the_rows_of_the_variant_on_that_device(runtime, tmp_path):
    folder = tmp_path / "digits"
    shutil.copytree(ROOT / "model_repository" / "digits", folder)
    before = load_family(folder)[1]
    family = load_family(folder)[0]
    variant = family.best
    model = folder / str(variant.version) / "model.onnx"
    arguments = (model, "--device", "A100-SXM4-40GB", "--batch", "4096", "--write", "--out", tmp_path, "--json")
    assert run(*arguments).exit_code == 0
    result = run(*arguments)  # again: no second header line
    s = json.loads(result.output)["s"]
    assert 0.1 < s < 0.9
    rows = load_family(folder)[1]
    for old, new in zip(before, rows, strict=True):
        own = old.variant == variant.name and old.device_type.startswith("A100-SXM4-40GB")
        assert new.clock_sensitivity == (pytest.approx(s, abs=1e-4) if own else 1.0)
        assert replace(new, clock_sensitivity=1.0) == old
    assert (folder / "profile.csv").read_text().count("# clock_sensitivity") == 1
    refused = run(model, "--device", "A30", "--write", "--out", tmp_path)
    assert (refused.exit_code, "has no row of digits-l" in refused.output) == (2, True)


def test_s_of_the_highest_clock_is_written_as_the_law_has_it_at_lower_ones_and_its_source_once(tmp_path):
    folder = tmp_path / "digits"
    shutil.copytree(ROOT / "model_repository" / "digits", folder)
    path = folder / "profile.csv"
    slower = [line.replace(",1410,", ",705,") for line in path.read_text().splitlines() if line.startswith("A100")]
    path.write_text(path.read_text() + "\n".join(slower) + "\n")
    write = partial(write_sensitivity, path, folder, "digits-l", "A100-SXM4-40GB", {0: 0.6})
    write("digits-l on an A100: guessed")
    write_sensitivity(path, folder, "digits-m", "A100-SXM4-40GB", {0: 0.5}, "digits-m on an A100: guessed")
    write("digits-l on an A100: measured")
    headers = [line for line in path.read_text().splitlines() if line.startswith("# clock_sensitivity")]
    sources = ("digits-m on an A100: guessed", "digits-l on an A100: measured")
    assert headers == [f"# clock_sensitivity: {source}" for source in sources]
    rows = [row for row in load_family(folder)[1] if (row.variant, row.batch) == ("digits-l", 1)]
    rows = [row for row in rows if row.slice_type == "7g.40gb"]
    (high,), (low,) = ([row for row in rows if row.clock_mhz == mhz] for mhz in (1410, 705))
    assert high.clock_sensitivity == 0.6
    assert low.clock_sensitivity == pytest.approx(at_clock(A100_40GB, high, 705).clock_sensitivity, abs=1e-4)
    assert low.clock_sensitivity == pytest.approx(0.75, abs=1e-4), "1.2 of 1.6 times as long"


def test_what_cannot_be_scored_is_refused_in_a_line(runtime, tmp_path):
    for arguments, words in (
        ((tmp_path / "none.onnx",), "is not a file"),
        ((SHIPPED[0], "--device", "cpu:4"), "no bandwidth"),
        ((SHIPPED[0], "--device", "Voodoo"), "Voodoo"),
    ):
        result = run(*arguments, "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert words in result.output
        assert "Remedy: " in result.output
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_measured_is_refused_in_a_line(runtime, tmp_path):
    """Whoever asks for measurements gets none that are not."""
    digits, forecaster = (next(path for path in SHIPPED if name in path.parts) for name in ("digits", "forecasters"))
    for arguments, words in (
        ((digits,), "no power agent answers"),
        ((forecaster,), "family.toml"),
    ):
        result = run(*arguments, "--agent", "127.0.0.1:1", "--out", tmp_path / "out")
        assert result.exit_code == 2
        assert words in result.output
        assert "Remedy: " in result.output
    assert not list((tmp_path / "out").glob("*.csv"))

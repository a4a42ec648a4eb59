"""Graphs cut into stages: one after the other they say what the whole says, to the last bit; what cannot be cut."""

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from trefoil.cli.family import sensitivity_command
from trefoil.cli.family.stage_models import write_stage_models
from trefoil.cli.main import app
from trefoil.core.device_types import V100_32GB
from trefoil.core.errors import CatalogError, InvalidInput
from trefoil.profiler.assumed import OperatorCost
from trefoil.profiler.graph_costs import costs
from trefoil.profiler.sensitivity import OperatorScore, board_of, modelled_scores
from trefoil.profiler.split import graph_stages, named, write_stages
from trefoil.runtime.model_files import contract

DIGITS = Path(__file__).parents[3] / "model_repository" / "digits"


def outputs(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def perceptron(path: Path, widths: tuple[int, ...], skip: bool = False) -> Path:
    """Products and ReLUs in turn, named by nobody; `skip`: its input is added at the end."""
    rng, nodes, weights, at = np.random.default_rng(1), [], [], "x"
    for number, (a, b) in enumerate(pairwise(widths)):
        weights.append(numpy_helper.from_array(rng.standard_normal((a, b)).astype(np.float32), f"w{number}"))
        nodes.append(helper.make_node("MatMul", [at, f"w{number}"], [f"m{number}"]))
        nodes.append(helper.make_node("Relu", [f"m{number}"], [f"r{number}"]))
        at = f"r{number}"
    nodes.append(helper.make_node("Add", [at, "x" if skip else at], ["y"]))
    x, y = (
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["N", w]) for n, w in (("x", widths[0]), ("y", widths[-1]))
    )
    graph = helper.make_graph(nodes, "perceptron", [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return path


def test_a_weight_that_a_node_hands_on_counts_where_it_is_read(tmp_path):
    model = onnx.load(str(perceptron(tmp_path / "p.onnx", (512, 2048, 512))))
    second = next(node for node in model.graph.node if "w1" in node.input)
    second.input[1] = "same"
    model.graph.node.insert(0, helper.make_node("Identity", ["w1"], ["same"]))
    onnx.save(model, str(tmp_path / "p.onnx"))
    _whole, model, scores = scored(tmp_path / "p.onnx", tmp_path)
    assert [stage.memory_mib for stage in graph_stages(model, scores, 2)] == [pytest.approx(4), pytest.approx(4)]


def scored(path: Path, tmp_path: Path) -> tuple[Path, onnx.ModelProto, list[OperatorScore]]:
    whole = tmp_path / "whole.onnx"
    model = named(path, whole)
    operators = [OperatorCost(**one) for one in costs(str(whole), {"": [64]})["operators"]]
    return whole, model, modelled_scores(operators, board_of(V100_32GB))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_stages_of_a_graph_that_ships_say_what_the_whole_says(version, tmp_path):
    whole, model, scores = scored(DIGITS / str(version) / "model.onnx", tmp_path)
    alternating = [  # so that there are borders: these graphs are launches alone
        OperatorScore(one.name, one.operator, one.flops, one.bytes, 1.0, 2.0 * (n % 2)) for n, one in enumerate(scores)
    ]
    stages = graph_stages(model, alternating, 3)
    assert sum(len(stage.operators) for stage in stages) == len(scores)
    feeds = {"IMAGE": np.random.default_rng(2).integers(0, 17, (5, 8, 8)).astype(np.uint8)}
    expected, passed = outputs(whole, feeds), feeds
    for path in write_stages(whole, stages, tmp_path / "stages"):
        passed = outputs(path, passed)
    assert expected.keys() == passed.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(passed[name], values)
        assert values.std() > 0


def test_stages_are_cut_at_borders_of_clusters_and_balanced(tmp_path):
    _whole, model, scores = scored(perceptron(tmp_path / "p.onnx", (512, 2048, 2048, 512)), tmp_path)
    assert [round(one.score) for one in scores] == [2, 0, 2, 0, 2, 0, 0]  # of 64 items: products follow the clock
    with pytest.raises(CatalogError, match=r"has 0 borders of clusters that a single tensor crosses, 2 stages need 1"):
        graph_stages(model, scores, 2, threshold=3.0)  # one cluster
    stages = graph_stages(model, scores, 2)
    assert [stage.operators[-1] for stage in stages] == ["MatMul#2", "Add#6"]
    assert [(stage.inputs, stage.outputs) for stage in stages] == [(("x",), ("m1",)), (("m1",), ("y",))]
    assert [stage.memory_mib for stage in stages] == [pytest.approx(4 + 16), pytest.approx(4)]
    assert 1 > stages[0].s > 0.5 > stages[1].s > 0.2


def test_a_graph_without_a_single_tensor_cut_is_refused(tmp_path):
    _whole, model, scores = scored(perceptron(tmp_path / "p.onnx", (64, 64, 64), skip=True), tmp_path)
    with pytest.raises(CatalogError, match=r"--stages = 2: has 0 borders .* fewer stages"):
        graph_stages(model, scores, 2, threshold=0.0)


def test_an_operator_without_a_score_and_a_stage_that_fits_nowhere_are_refused_by_name(tmp_path):
    _whole, model, scores = scored(perceptron(tmp_path / "p.onnx", (64, 64, 64)), tmp_path)
    with pytest.raises(InvalidInput, match=r"operator = 'Relu#1': has no sensitivity score"):
        graph_stages(model, [one for one in scores if one.name != "Relu#1"], 2)
    with pytest.raises(InvalidInput, match=r"no cut into 2 stages fits"):
        graph_stages(model, scores, 2, memory_mib_max=0.01, threshold=0.0)


def test_the_command_writes_the_stages(tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity_command, "triton_environment", lambda: Path(sys.prefix))
    model = perceptron(tmp_path / "p.onnx", (64, 64, 64))
    asked = ["family", "sensitivity", str(model), "--stages", "2", "--threshold", "0", "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "stage 1: " in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "p.csv", "p.onnx", "p.png", "p-stage0.onnx", "p-stage1.onnx",
    }  # fmt: skip


def test_stages_become_triton_models_by_the_contract_of_their_family(tmp_path, monkeypatch):
    monkeypatch.setattr(sensitivity_command, "triton_environment", lambda: Path(sys.prefix))
    asked = ["family", "sensitivity", str(DIGITS / "4" / "model.onnx"), "--stages", "2", "--operators", "--batch", "8"]
    asked += ["--repository", str(tmp_path / "models"), "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    first, last = (contract(tmp_path / "models", f"digits@{n}of2") for n in (1, 2))
    assert [(one.name, list(one.dims)) for one in first.input] == [("IMAGE", [8, 8])]
    assert [(one.name, list(one.dims)) for one in last.output] == [("PROBABILITIES", [10])]
    assert first.output[0].name == last.input[0].name
    assert first.output[0].dims == last.input[0].dims
    assert (tmp_path / "models" / "digits@2of2" / "4" / "model.onnx").is_file()


@pytest.mark.parametrize(
    ("place", "shapes", "why"),
    [
        ("digits/4", [(72, 16), ()], "8 items are not first in what is cut"),
        ("loose", [(8, 16), ()], "is not a version"),
    ],
)
def test_stages_that_triton_could_not_serve_are_refused(tmp_path, place, shapes, why):
    with pytest.raises(CatalogError, match=why):
        write_stage_models(DIGITS.parent / place / "model.onnx", [tmp_path, tmp_path], shapes, 8, tmp_path)

"""Every model of the table becomes a variant with all that its configuration says, or is refused with one line."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tritonclient.grpc import model_config_pb2

from tests.public_reports.imports import ADOPTED, REFUSED, Model
from tests.unit.cli.test_family import refused, run
from trefoil.cli.family import config_fields
from trefoil.runtime.model_files import contract
from trefoil.runtime.repository import load_family


def graph(model: Model, path: Path) -> None:
    """Write a graph with these inputs and outputs; outputs take open sizes from the first input, one more is 1."""
    first, (_, from_dims) = next(iter(model.inputs.items()))
    weights = {"zero": np.zeros((), np.float32)}
    nodes = [helper.make_node("Shape", [first], ["sizes"])]
    for name, (kind, dims) in model.outputs.items():
        parts = []
        for place, size in enumerate(dims):
            known = size in from_dims and isinstance(size, str)
            index = f"{name}.{place}"
            weights[index] = np.array(
                [from_dims.index(size) if known else size if isinstance(size, int) else 1], np.int64
            )
            parts.append(f"{index}.size" if known else index)
            if known:
                nodes.append(helper.make_node("Gather", ["sizes", index], [f"{index}.size"]))
        nodes.append(helper.make_node("Concat", parts, [f"{name}.shape"], axis=0))
        nodes.append(helper.make_node("Expand", ["zero", f"{name}.shape"], [f"{name}.float"]))
        nodes.append(helper.make_node("Cast", [f"{name}.float"], [name], to=getattr(TensorProto, kind)))
    tensors = [
        [helper.make_tensor_value_info(name, getattr(TensorProto, kind), dims) for name, (kind, dims) in side.items()]
        for side in (model.inputs, model.outputs)
    ]
    initial = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    if model.weights:
        file = path.parent / model.weights
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(np.zeros((), np.float32).tobytes())
        onnx.external_data_helper.set_external_data(initial[0], model.weights, length=4)
        initial[0].ClearField("raw_data")
    made = helper.make_graph(nodes, "g", *tensors, initializer=initial)
    path.write_bytes(
        helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8).SerializeToString()
    )


def imported(model: Model, folder: Path, family: str = "f", repository: Path | None = None):
    theirs = folder / "theirs" / "m"
    path = theirs / model.model
    path.parent.mkdir(parents=True)
    if path.suffix == ".onnx":
        graph(model, path)
    else:
        path.write_text("a model")
    for name, text in model.files.items():
        (theirs / name).parent.mkdir(exist_ok=True)
        (theirs / name).write_bytes(path.read_bytes() if text == "=" else text.encode())
    if model.config:
        (theirs / "config.pbtxt").write_text(model.config)
    wanted = (
        "import",
        theirs.parent,
        "--as",
        f"{family}=m",
        "--slo-latency-ms",
        50,
        "--accuracy",
        "m=0.5",
        *model.options,
    )
    return run(*wanted, "--repository", repository or folder / "ours")


def value(config: Any, place: str) -> Any:
    """The value at a place like `input[0].reshape.shape`; of a message whether it is set."""
    for name, key in re.findall(r"(\w+)(?:\[([^]]*)\])?", place) if "parameters" not in place else []:
        if place == name and name in ("dynamic_batching", "version_policy"):
            return config.HasField(name)
        config = getattr(config, name)
        config = config[int(key)] if key else config
    if "parameters" in place:
        key = place.removeprefix("parameters[").removesuffix("]")
        return config.parameters[key].string_value if key in config.parameters else None
    if hasattr(config, "DESCRIPTOR"):
        return bool(config.ListFields())
    if isinstance(config, str | bool | int):
        return config
    return list(config) or ([] if place.endswith("shape") else False)


@pytest.mark.parametrize("report", ADOPTED, ids=str)
def test_a_public_model_becomes_a_variant_and_what_is_left_out_is_said(report, tmp_path):
    result = imported(report.input, tmp_path)
    assert result.exit_code == 0, result.output
    config = contract(tmp_path / "ours", "f")
    assert {place: value(config, place) for place in report.expected.config} == report.expected.config
    folder = tmp_path / "ours" / "f"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files - {"config.pbtxt", "family.toml"} == set(report.expected.files)
    notes = [line for line in result.output.splitlines() if line.startswith("  note: ")]
    for words in report.expected.notes:
        assert any(words in note for note in notes), result.output
    if not report.expected.notes:
        assert [note for note in notes if "engines were not run" not in note] == []
    checked = run("check", "f", "--graphs-only", "--repository", tmp_path / "ours").output
    assert checked.startswith("f: 1 of 1 variants"), checked
    assert checked.count("\n  ") == 1, checked


@pytest.mark.parametrize("report", REFUSED, ids=str)
def test_a_public_model_that_cannot_be_a_variant_is_refused_by_name(report, tmp_path):
    result = imported(report.input, tmp_path)
    refused(result)
    assert re.search(report.expected, result.output, re.DOTALL), result.output
    assert sum(not line.startswith("working, ") for line in result.output.splitlines()) == 1  # of a slow machine
    assert not (tmp_path / "ours" / "f").exists()


def test_an_output_that_is_no_tensor_is_refused_by_name(tmp_path):
    """skl2onnx gives probabilities as a sequence of maps, unless asked not to."""
    result = imported(Model("", files={"1/other.onnx": "="}), tmp_path)
    assert result.exit_code == 0, result.output
    path = tmp_path / "theirs" / "m" / "1" / "model.onnx"
    made = onnx.load(path)
    made.graph.output.add(name="output_probability").type.sequence_type.elem_type.map_type.key_type = TensorProto.INT64
    path.write_bytes(made.SerializeToString())
    result = run("import", path.parents[2], "--as", "g=m", "--slo-latency-ms", 50, "--accuracy", "m=0.5",
                 "--repository", tmp_path / "ours")  # fmt: skip
    refused(result)
    assert re.search(r"output_probability.data_type = 'a sequence or map'.*zipmap", result.output), result.output


@pytest.mark.parametrize("words", ["a python backend", "a TensorRT plan of one shape", "a model that batches"])
def test_a_profile_is_assumed_of_graphs_only_and_offered_for_them_only(words, tmp_path):
    model = next(report.input for report in ADOPTED if words in report.source)
    result = imported(model, tmp_path)
    assert result.exit_code == 0, result.output
    checked = run("check", "f", "--graphs-only", "--repository", tmp_path / "ours").output
    for said in (result.output, checked):
        assert "`trefoil family profile f` measures one" in said
        assert ("family assume" in said) == (words == "a model that batches")
    assert (run("assume", "f", "--repository", tmp_path / "ours").exit_code == 0) == (words == "a model that batches")


def test_no_field_of_a_configuration_is_dropped_in_silence():
    judged = config_fields.CARRIED | config_fields.LEFT.keys() | config_fields.REFUSED.keys()
    assert set(model_config_pb2.ModelConfig.DESCRIPTOR.fields_by_name) <= judged


@pytest.mark.parametrize("words", ["quickstart", "texts in", "open sizes", "a scalar"])
def test_a_profile_is_assumed_of_models_without_batches_of_texts_and_of_open_shapes(words, tmp_path):
    model = next(report.input for report in ADOPTED if words in report.source)
    result = imported(replace(model, options=(*model.options, "--assume")), tmp_path)
    assert result.exit_code == 0, result.output
    _, rows = load_family(tmp_path / "ours" / "f")
    batch_max = contract(tmp_path / "ours", "f").max_batch_size
    assert {row.batch for row in rows} == {size for size in (1, 2, 4, 8) if size <= max(1, batch_max)}

"""`trefoil family`: what is adopted, what is refused by name, what is listed and checked."""

import json
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.support.foreign_models import LINEAR, MINUS, UNNAMED, add, graph
from trefoil.cli.main import app
from trefoil.core.common import Basis
from trefoil.profiler.assumed import GraphCost, assumed_points
from trefoil.profiler.cost_law import read_model
from trefoil.profiler.profile_csv import ProfileProvenance, profile_text
from trefoil.runtime.given.llm_backends import api_of
from trefoil.runtime.model_files import contract
from trefoil.runtime.repository import load_family

SHIPPED = Path(__file__).parents[3] / "model_repository"
COST = GraphCost(macs=4_000_000_000, written=37_000_000, kernels=174, weights_bytes=102_000_000, uncounted={})
LAW = read_model(json.loads((SHIPPED / "_profiles" / "constants.json").read_text())).latency
WHERE = ProfileProvenance("none", "2026-11-25", "0000000", True, "by a test")
ACCURACIES = ("--accuracy", "small=0.7", "--accuracy", "large=0.9")


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    repository = tmp_path / "theirs"
    add(repository, "small", LINEAR, graph("linear"))
    add(repository, "large", LINEAR, graph("mlp"))
    return repository


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["family", *map(str, arguments)], catch_exceptions=False)


def imported(
    theirs: Path, *more: object, as_: str = "toy=small,large", accuracies: tuple[str, ...] = ACCURACIES
) -> Result:
    ours = theirs.parent / "ours"
    return run("import", theirs, "--as", as_, "--slo-latency-ms", 50, *accuracies, "--repository", ours, *more)


def done(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.output)
    return found


def refused(result: Result, *texts: str) -> None:
    assert result.exit_code == 2, result.output
    assert "Remedy: " in result.output
    for text in texts:
        assert text in result.output, result.output


def test_separate_models_become_the_versions_of_one_family(theirs, tmp_path):
    said = done(imported(theirs, "--licence", "MIT", "--memory-mib", "large=300", "--json"))
    assert said["variants"] == [
        {"variant": "small", "version": 1, "from_version": 1},
        {"variant": "large", "version": 2, "from_version": 1},
    ]
    family, rows = load_family(tmp_path / "ours" / "toy")
    assert [(v.name, v.version, v.accuracy, v.licence) for v in family.variants] == [
        ("small", 1, 0.7, "MIT"),
        ("large", 2, 0.9, "MIT"),
    ]
    assert (family.variant("large").memory_mib, family.classes, rows) == (300, {"": (50.0, 0.95)}, ())
    config = contract(tmp_path / "ours", "toy")
    assert ([i.name for i in config.input], [o.name for o in config.output]) == (["x"], ["y"])
    assert (tmp_path / "ours" / "toy" / "2" / "model.onnx").read_bytes() == graph("mlp")
    assert (tmp_path / "ours" / "_shared" / "model.py").is_file(), "a slice of the python backend needs it"


def test_links_save_the_space_of_copies(theirs, tmp_path):
    done(imported(theirs, "--link", "--json"))
    linked = tmp_path / "ours" / "toy" / "2" / "model.onnx"
    assert linked.stat().st_nlink == 2
    assert linked.samefile(theirs / "large" / "1" / "model.onnx")


def test_the_newest_version_that_the_policy_serves_is_taken_with_all_its_files(theirs, tmp_path):
    shutil.rmtree(theirs / "large")
    policy = LINEAR + "version_policy { specific { versions: [ 1, 3 ] } } default_model_filename: 'net.onnx'"
    for version in (1, 3, 7):
        folder = theirs / "large" / str(version)
        folder.mkdir(parents=True)
        (folder / "net.onnx").write_bytes(graph("mlp"))
        (folder / "net.bin").write_text(f"weights of {version}")
    (theirs / "large" / "config.pbtxt").write_text(policy)
    said = done(imported(theirs, "--json"))
    assert said["variants"][1]["from_version"] == 3
    assert (tmp_path / "ours" / "toy" / "2" / "net.bin").read_text() == "weights of 3"
    assert (tmp_path / "ours" / "toy" / "2" / "model.onnx").is_file()


def test_tensors_that_triton_completes_itself_are_read_from_the_graph(theirs, tmp_path):
    for name in ("small", "large"):
        (theirs / name / "config.pbtxt").write_text('backend: "onnxruntime" max_batch_size: 4')
    done(imported(theirs, "--json"))
    config = contract(tmp_path / "ours", "toy")
    assert (config.input[0].name, list(config.input[0].dims), config.max_batch_size) == ("x", [4], 4)


def test_variants_that_name_their_tensors_otherwise_are_refused_with_both_names_and_what_to_export(theirs, tmp_path):
    shutil.rmtree(theirs / "large")
    add(theirs, "large", UNNAMED, graph("mlp_unnamed"))
    result = imported(theirs)
    refused(result, "model large", "input.name = 'input.1'", "large has input.1, small has x", "input_names=['x']")
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "ours").exists(), "nothing may be written of a refused import"


@pytest.mark.parametrize(
    ("old", "new", "texts"),
    [
        ("max_batch_size: 8", "max_batch_size: 4", ("model large", "max_batch_size = 4", "make it 8, as small has it")),
        ("max_batch_size: 8", "max_batch_size: 0", ("max_batch_size = 0",)),
        ("dims: [ 4 ]", "dims: [ 5 ]", ("x.dims = [5]", "x is [-1, 4] in its graph, the contract says [-1, 5]")),
        (
            "dims: [ 3 ]",
            "dims: [ 1000 ]",
            ("y.dims = [1000]", "y is [-1, 3] in its graph, the contract says [-1, 1000]"),
        ),
        (
            '"x" data_type: TYPE_FP32',
            '"x" data_type: TYPE_UINT8',
            ("x.data_type = 'TYPE_UINT8'", "x is TYPE_FP32 in its graph, the contract says TYPE_UINT8"),
        ),
        ('"x"', '"input"', ("input = 'input'", "input is not in its graph, which has x")),
        ("platform:", "dynamic_batching { } platform:", ("dynamic_batching = '{  }'", "make it 'none'")),
        ('platform: "onnxruntime_onnx"', 'backend: "python"', ("model.py is missing", "add that file")),
        ("platform:", "sequence_batching { } platform:", ("sequence_batching",)),
        ("platform:", "model_transaction_policy { decoupled: true } platform:", ("decoupled",)),
        ("dims: [ 4 ]", "dims: [ 4 ] reshape { shape: [ 2, 2 ] }", ("x.dims = [4]", "the contract says [-1, 2, 2]")),
        ("platform:", "nonsense {", ("is not a Triton model configuration",)),
    ],
)
def test_a_model_that_does_not_fit_is_refused_by_the_field_that_differs(theirs, tmp_path, old, new, texts):
    assert old in LINEAR
    (theirs / "large" / "config.pbtxt").write_text(LINEAR.replace(old, new))
    refused(imported(theirs), *texts)
    assert not (tmp_path / "ours" / "toy").exists(), "nothing may be left of a refused import"


def test_number_of_tensors_version_file_and_model_are_named(theirs):
    add(theirs, "pair", MINUS, graph("minus"))
    refused(imported(theirs, "--accuracy", "pair=0.5", as_="toy=small,large,pair"), "model pair", "input = ['a', 'b']")
    refused(
        imported(theirs, as_="toy=small,huge", accuracies=("--accuracy=small=0.7", "--accuracy=huge=1")),
        "no model huge",
    )
    (theirs / "large" / "1" / "model.onnx").rename(theirs / "large" / "1" / "other.onnx")
    refused(imported(theirs), "model = 'large'", "large/1/model.onnx is missing")
    shutil.rmtree(theirs / "large" / "1")
    refused(imported(theirs), "has no version to serve")
    (theirs / "large" / "config.pbtxt").unlink()
    refused(imported(theirs), "model large = ", "config.pbtxt")


def test_what_is_no_graph_is_refused(theirs):
    (theirs / "large" / "1" / "model.onnx").write_bytes(b"\xff" * 40)
    refused(imported(theirs), "is not an ONNX model")
    (theirs / "large" / "1" / "model.onnx").write_bytes(b"")
    refused(imported(theirs), "is not an ONNX model")


def test_every_accuracy_is_asked_for_by_name(theirs, tmp_path):
    refused(imported(theirs, accuracies=("--accuracy", "small=0.7")), "no accuracy of large", "--accuracy large=0.7")
    refused(imported(theirs, accuracies=("--accuracy=small=69.8", "--accuracy=large=1")), "69.8", "write 0.698")
    refused(imported(theirs, accuracies=("--accuracy=small", "--accuracy=large=1")), "--accuracy = 'small'")
    refused(imported(theirs, "--accuracy", "lareg=0.9"), "--accuracy = 'lareg'", "'small', 'large'")
    file = tmp_path / "accuracies.toml"
    refused(imported(theirs, accuracies=("--accuracies", str(file))), "--accuracies")
    for name, text in (
        ("deep.json", "[" * 200_000),
        ("deep.toml", "a = " + "[" * 5_000),
        ("large.json", '{"small": 1' + "0" * 400 + "}"),
    ):
        (tmp_path / name).write_text(text)
        refused(imported(theirs, accuracies=("--accuracies", str(tmp_path / name))), "--accuracies")
    file.write_text("small = 0.6\nlarge = 0.8\n")
    done(imported(theirs, "--json", accuracies=("--accuracies", str(file), "--accuracy", "small=0.65")))
    tree = tomllib.loads((tmp_path / "ours" / "toy" / "family.toml").read_text())
    assert [v["accuracy"] for v in tree["variants"]] == [0.65, 0.8]
    refused(imported(theirs), "--as = 'toy'", "exists already")
    refused(imported(theirs, as_="toy"), "--as = 'toy'", "write --as resnet=")


ENGINE = """
platform: "tensorrt_plan" max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP16 dims: [ 4 ] } ]
output [ { name: "y" data_type: TYPE_FP16 dims: [ 3 ] } ]
cc_model_filenames [ { key: "8.0" value: "a100.plan" }, { key: "9.0" value: "hopper.plan" } ]
"""


def engine(repository: Path, name: str, config: str = ENGINE) -> None:
    folder = add(repository, name, config, f"{name} for 8.0".encode(), file="a100.plan")
    (folder / "hopper.plan").write_text(f"{name} for 9.0")


def test_engines_are_taken_for_every_type_of_gpu(tmp_path):
    theirs = tmp_path / "theirs"
    engine(theirs, "small")
    engine(theirs, "large")
    done(imported(theirs, "--json"))
    config = contract(tmp_path / "ours", "toy")
    assert config.backend == "tensorrt"
    assert dict(config.cc_model_filenames) == {"8.0": "model_cc8.0.plan", "9.0": "model_cc9.0.plan"}
    assert (tmp_path / "ours" / "toy" / "2" / "model_cc9.0.plan").read_text() == "large for 9.0"
    checked = run("check", "--graphs-only", "--repository", tmp_path / "ours")
    assert checked.exit_code == 1
    assert checked.output.count("\n  ") == 1
    assert "no profile" in checked.output
    refused(run("assume", "toy", "--repository", tmp_path / "ours"), "engines cannot be looked into")


def test_engines_of_other_gpus_or_with_other_names_are_refused(tmp_path):
    theirs = tmp_path / "theirs"
    engine(theirs, "small")
    engine(theirs, "large", ENGINE.replace('"9.0"', '"8.9"'))
    refused(imported(theirs), "cc_model_filenames = ['8.0', '8.9']", "as small has it")
    (theirs / "large" / "config.pbtxt").write_text(ENGINE.replace('"x"', '"input"'))
    refused(imported(theirs), "input.name = 'input'", "build the engine from a graph with the input names of small")
    (theirs / "large" / "1" / "hopper.plan").unlink()
    refused(imported(theirs), "hopper.plan is missing")


def test_what_a_slice_decides_itself_is_left_out_and_said(theirs):
    (theirs / "small" / "config.pbtxt").write_text(LINEAR + "instance_group [ { count: 4 } ]")
    note = "note: small: instance_group [{ count: 4 }] is left out: the plan decides devices and instances"
    assert note in imported(theirs).output


def test_the_shipped_families_are_in_order_and_those_without_graphs_say_how_to_get_them():
    found = {
        one["family"]: one
        for one in json.loads(run("check", "--graphs-only", "--repository", SHIPPED, "--json").output)
    }
    assert not any(one["problems"] for one in found.values())
    assert found["digits"]["state"].startswith("4 of 4 variants compared with the contract, not run")
    assert "AGPL-3.0" in (SHIPPED / "yolo" / "family.toml").read_text()
    listed = {
        one["family"]: one["variants"] for one in json.loads(run("list", "--repository", SHIPPED, "--json").output)
    }
    assert [v["name"] for v in listed["efficientnet"]] == [f"efficientnet-b{n}" for n in (1, 3, 5, 7)]
    assert [(v["name"], v["version"]) for v in listed["yolo"]] == [("yolov5l", 1), ("yolov5x", 2), ("yolov5x6", 3)]
    assert all(v["files"] for v in listed["digits"])
    assert "digits-xs" in run("list", "--repository", SHIPPED).output


def test_check_names_what_is_wrong(theirs, tmp_path):
    done(imported(theirs, "--json"))
    ours = tmp_path / "ours"
    unprofiled = run("check", "--graphs-only", "toy", "--repository", ours)
    assert unprofiled.exit_code == 1
    assert (
        "no profile: only policies that measure can serve it. Remedy: `trefoil family profile toy`" in unprofiled.output
    )
    points = assumed_points(load_family(ours / "toy")[0], dict.fromkeys(("small", "large"), COST), LAW, 8)
    (ours / "toy" / "profile.csv").write_text(profile_text(points, WHERE, estimate_energy=True))
    assert run("check", "--graphs-only", "toy", "--repository", ours).exit_code == 0
    refused(run("assume", "toy", "--repository", ours), "profile.csv exists already")
    refused(
        run("check", "--graphs-only", "tyo", "--repository", ours),
        "family = 'tyo': no such family",
        "did you mean toy?",
    )
    (ours / "toy" / "2" / "model.onnx").write_bytes(graph("mlp_unnamed"))
    wrong = run("check", "--graphs-only", "--repository", ours)
    assert wrong.exit_code == 1
    assert "version 2: x is not in its graph, which has input.1" in wrong.output
    config = ours / "toy" / "config.pbtxt"
    text = config.read_text()
    config.write_text(text.replace("dims: 3", "dims: 2"))
    assert (
        "version 1: y is [-1, 3] in its graph, the contract says [-1, 2]"
        in run("check", "--graphs-only", "--repository", ours).output
    )
    (ours / "toy" / "2" / "model.onnx").unlink()
    assert "large has no model files" in run("check", "--graphs-only", "--repository", ours).output
    config.unlink()
    assert "no tensor contract" in run("check", "--graphs-only", "--repository", ours).output


def test_what_is_assumed_grows_with_batch_and_shrinks_with_the_slice_and_says_that_nobody_measured(theirs, tmp_path):
    done(imported(theirs, "--json"))
    folder = tmp_path / "ours" / "toy"
    small = replace(COST, macs=COST.macs // 10, written=COST.written // 10)
    points = assumed_points(load_family(folder)[0], {"small": small, "large": COST}, LAW, 8)
    (folder / "profile.csv").write_text(profile_text(points, WHERE, estimate_energy=True))
    _, rows = load_family(folder)  # refuses times or joules that fall with the batch
    assert {row.provenance.basis for row in rows} == {Basis.SYNTHETIC}
    assert {row.device_type for row in rows} >= {"A100-SXM4-40GB", "Tesla T4"}
    of = {(r.device_type, r.slice_type, r.variant, r.batch): r for r in rows}
    assert {batch for *_, batch in of} == {1, 2, 4, 8}
    for variant in ("small", "large"):
        times = [of["A100-SXM4-40GB", kind, variant, 8].latency_ms_p50 for kind in ("1g.5gb", "3g.20gb", "7g.40gb")]
        assert times == sorted(times, reverse=True)
    one = of["A100-SXM4-80GB", "7g.80gb", "large", 1]
    assert 4.0 < one.latency_ms_p50 < 7.0, "a ResNet-50's cost: ParvaGPU measured 5.1 ms on that slice"


def test_an_import_that_cannot_be_assumed_is_no_import(theirs, tmp_path, monkeypatch):
    monkeypatch.setenv("TREFOIL_TRITON_ENVIRONMENT", str(tmp_path / "nowhere"))
    refused(imported(theirs, "--assume"), "no ONNX Runtime", "trefoil setup triton")
    assert not (tmp_path / "ours" / "toy").exists()
    refused(imported(theirs, "--assume", "--shape", "x=0"), "--shape = 'x=0'")


# --- language models --------------------------------------------------------------------------------------------------

CHAT = ('backend: "vllm" instance_group [ { count: 1 kind: KIND_MODEL } ]', b'{"model": "m", "max_model_len": 512}')
STATED = (
    "--accuracy",
    "small=0.5",
    "--accuracy",
    "large=0.6",
    "--memory-mib",
    "small=4000",
    "--memory-mib",
    "large=9000",
)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """A repository of two models of the vLLM backend, as its users write it; weights are in the version of one."""
    for name in ("small", "large"):
        folder = add(tmp_path / "theirs", name, *CHAT, file="model.json")
    (folder / "weights").mkdir()
    (folder / "weights" / "part0.safetensors").write_bytes(b"\x01" * 64)
    return tmp_path / "theirs"


def chat(theirs: Path, *more: object, stated: tuple[str, ...] = STATED) -> Result:
    return imported(theirs, "--tokens-mean", 200, *more, accuracies=stated)


def test_models_of_the_vllm_backend_become_a_family_with_their_whole_folders(chats, tmp_path):
    said = done(chat(chats, "--json"))
    assert any("instance_group" in note for note in said["notes"])
    assert "small: its version holds a model.json alone: weights are not copied, nor hashed" in said["notes"]
    folder = tmp_path / "ours" / "toy"
    assert (folder / "2" / "weights" / "part0.safetensors").read_bytes() == b"\x01" * 64
    assert (folder / "1" / "model.json").read_bytes() == CHAT[1]
    family, _ = load_family(folder)
    assert (family.generative, family.tokens_mean, family.best.memory_mib, family.best.load_s) == (True, 200, 9000, 120)
    config = contract(tmp_path / "ours", "toy")
    assert config.model_transaction_policy.decoupled
    assert {tensor.name for tensor in config.input if not tensor.optional} == {"text_input"}
    assert "num_output_tokens" in {tensor.name for tensor in config.output}
    assert api_of(config) == "vllm"


def test_the_chat_template_comes_with_its_models_and_is_one_for_all(chats, tmp_path):
    for name in ("small", "large"):
        (chats / name / "chat_template.jinja").write_text("{{ messages }}")
    done(chat(chats, "--json"))
    assert contract(tmp_path / "ours", "toy").parameters["chat_template"].string_value == "{{ messages }}"
    shutil.rmtree(tmp_path / "ours" / "toy")
    (chats / "large" / "chat_template.jinja").write_text("{{ other }}")
    refused(chat(chats), "file = 'chat_template.jinja'", "make it equal to small's")


LLM_FAULTS = {
    "no JSON": (
        lambda v: (v / "model.json").write_text('{"model": '),
        "model.json is not JSON: Expecting value: line 1",
    ),
    "no object": (lambda v: (v / "model.json").write_text("[1]"), "is not a JSON object but list"),
    "nested without an end": (lambda v: (v / "model.json").write_text("[" * 100_000), "model.json is not JSON"),
    "two GPUs": (
        lambda v: (v / "model.json").write_text('{"model": "m", "tensor_parallel_size": 2}'),
        "tensor_parallel_size = 2: ",
    ),
    "two GPUs of replicas": (
        lambda v: (v / "model.json").write_text('{"model": "m", "data_parallel_size": 2}'),
        "data_parallel_size = 2: ",
    ),
    "a link out": (lambda v: (v / "weights").symlink_to("/etc/hostname"), "weights"),
    "no model.json": (lambda v: (v / "model.json").unlink(), "model.json is missing"),
    "another GPU": (
        lambda v: (v.parent / "config.pbtxt").write_text(
            'name: "small" backend: "vllm" parameters { key: "GPU_DEVICE_IDS" value { string_value: "0,1" } }'
        ),
        "parameters.GPU_DEVICE_IDS = '0,1'",
    ),
}


@pytest.mark.parametrize("fault", LLM_FAULTS)
def test_a_language_model_that_does_not_fit_is_refused_by_name_and_leaves_nothing(chats, tmp_path, fault):
    spoil, why = LLM_FAULTS[fault]
    spoil(chats / "small" / "1")
    refused(chat(chats), why)
    assert not (tmp_path / "ours" / "toy").exists()


def test_what_only_the_user_knows_of_a_language_model_is_asked_for(chats):
    refused(imported(chats, accuracies=STATED), "--tokens-mean", "answer by streams")
    refused(chat(chats, stated=STATED[:-2]), "--memory-mib", "memory of large is not stated")


def test_models_with_one_answer_have_no_tokens(theirs):
    refused(imported(theirs, "--tokens-mean", 5), "--tokens-mean = 5", "give one answer")


def test_places_of_a_tensorrt_llm_engine_on_another_machine_are_left_out(tmp_path):
    config = """
    backend: "tensorrtllm" model_transaction_policy { decoupled: true }
    input [ { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true } ]
    output [ { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] } ]
    parameters { key: "gpt_model_path" value { string_value: "/engines/x" } }
    parameters { key: "batching_strategy" value { string_value: "inflight_fused_batching" } }
    """
    for name in ("small", "large"):
        folder = add(tmp_path / "theirs", name, config.replace("engines/x", name), b"{}", file="config.json")
        (folder / "rank0.engine").write_bytes(b"engine")
    said = done(chat(tmp_path / "theirs", "--json"))
    assert any("gpt_model_path /small is left out: the engine is that of the version's" in n for n in said["notes"])
    made = contract(tmp_path / "ours", "toy")
    assert dict(made.parameters).keys() == {"batching_strategy"}
    assert (tmp_path / "ours" / "toy" / "2" / "rank0.engine").read_bytes() == b"engine"


def test_of_two_families_that_claim_one_model_name_the_copy_is_refused_and_the_other_stays(chats, tmp_path):
    done(chat(chats, "--json"))
    toy, copy = tmp_path / "ours" / "toy", tmp_path / "ours" / "copy"
    shutil.copytree(toy, copy)
    (copy / "family.toml").write_text((toy / "family.toml").read_text().replace('name = "toy"', 'name = "copy"'))
    found = run("check", "toy", "copy", "--graphs-only", "--repository", tmp_path / "ours", "--json")
    states = {one["family"]: one for one in json.loads(found.output)}
    assert "2 of 2 variants" in states["toy"]["state"]
    assert "config.pbtxt needs name 'copy', input and output" in states["copy"]["problems"][0]

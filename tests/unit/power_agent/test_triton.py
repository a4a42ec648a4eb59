"""Finding Triton, a slice's repository and the pure halves of the client; no Triton runs here."""

import errno
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2

from power_agent.triton import client, installation, slice_launch
from power_agent.triton.installation import (
    STUB,
    TritonInstall,
    find_triton,
    prepare_triton,
    refuse_environment,
    with_backend,
)
from power_agent.triton.slice_launch import (
    BackendChoice,
    SliceSpec,
    backend_of_slice,
    choose_backend,
    prepare_slice,
    slice_config,
)
from trefoil.core.errors import BinaryMissing, CatalogError, StartError
from trefoil.core.fleet import Hosted
from trefoil.runtime.model_files import contract

ROOT = Path(__file__).parents[3]
CONTRACT = """
name: "toy" backend: "onnxruntime" max_batch_size: 8
input [ { name: "IMAGE" data_type: TYPE_UINT8 dims: [ 8, 8 ] } ]
output [ { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 10 ] } ]
"""
TOY = Hosted("toy", "toy-s", 2, 0, 1, 1, 8)


@pytest.fixture
def install(tmp_path: Path) -> TritonInstall:
    root = tmp_path / "tritonserver"
    for version in ("3.10", "3.11"):
        folder = root / "python_backend_stubs" / version
        folder.mkdir(parents=True)
        (folder / STUB).write_text(f"stub of {version}")
    (root / "backends" / "python").mkdir(parents=True)
    (root / "bin").mkdir()
    binary = root / "bin" / "tritonserver"
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    environment = tmp_path / "environment"
    versions = ("3.11", "1.26.4", "1.20", "libpython3.11.so.1.0")
    return TritonInstall(binary, root / "backends", root / "caches", environment, *versions, True, "")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    (models / "_shared").mkdir(parents=True)
    (models / "_shared" / "model.py").write_text("model")
    for version in ("1", "2"):
        (models / "toy" / version).mkdir(parents=True)
        (models / "toy" / version / "model.onnx").write_text(f"graph {version}")
    (models / "toy" / "config.pbtxt").write_text(CONTRACT)
    return models


def spec(tmp_path: Path, source: Path, *hosted: Hosted) -> SliceSpec:
    return SliceSpec("node0-gpu0-3g.20gb-4", tmp_path / "slice", source, hosted or (TOY,), 8200, 8201, "MIG-1")


def test_the_setting_wins_and_a_wrong_one_is_named(install, tmp_path):
    assert find_triton(install.binary, None).binary == install.binary
    with pytest.raises(
        BinaryMissing, match=r"triton_binary = /absent/tritonserver.*Remedy: run `trefoil setup triton`"
    ):
        find_triton(Path("/absent/tritonserver"), None)


def test_nothing_found_names_every_place(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BinaryMissing, match=r"the wheel nvidia-pytriton in .*, tritonserver on PATH"):
        find_triton(None, tmp_path)


def test_path_is_the_last_resort(install, monkeypatch):
    monkeypatch.setenv("PATH", f"{install.binary.parent}{os.pathsep}{os.environ['PATH']}")
    assert find_triton(None, None).binary == install.binary


def test_an_environment_without_python_is_refused(install, tmp_path):
    with pytest.raises(BinaryMissing, match="no Python for Triton's models"):
        find_triton(install.binary, tmp_path / "nowhere")


def test_the_stub_of_the_right_python_is_installed_once(install):
    target = install.backends / "python" / STUB
    prepare_triton(install)
    assert target.read_text() == "stub of 3.11"
    assert target.stat().st_mode & stat.S_IXUSR
    first = target.stat().st_ino
    prepare_triton(install)
    assert target.stat().st_ino == first
    target.write_text("half a st")  # a copy that was cut off, or another Python's
    prepare_triton(install)
    assert target.read_text() == "stub of 3.11"
    assert [p.name for p in target.parent.iterdir()] == [STUB]


def test_a_stub_that_cannot_be_read_is_named(install, monkeypatch):
    target = install.backends / "python" / STUB
    source = install.backends.parent / "python_backend_stubs" / "3.11" / STUB
    prepare_triton(install)
    first, whole = target.stat().st_ino, Path.read_bytes
    monkeypatch.setattr("os.access", lambda path, mode: path != target or not mode & os.R_OK)
    prepare_triton(install)  # the one in place without its read bit: replaced
    assert target.stat().st_ino != first

    def closed(path):
        if path == source:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return whole(path)

    monkeypatch.setattr(Path, "read_bytes", closed)
    with pytest.raises(StartError, match=rf"Permission denied \({source}\).*Remedy: make {source} readable"):
        prepare_triton(install)
    assert [p.name for p in target.parent.iterdir()] == [STUB]


@pytest.mark.parametrize("odd", [" ", "$", ";", "'", "(", "&", "\n", "*"])
def test_a_path_that_a_shell_would_read_otherwise_is_named_from_where_triton_starts(install, tmp_path, source, odd):
    moved = tmp_path / f"my{odd}environment"
    install.backends.parent.rename(moved)
    install = replace(install, backends=moved / install.backends.name)
    launch = prepare_slice(install, replace(spec(tmp_path, source), repository=tmp_path / odd / "slices" / "s0"))
    named = dict(word.split("=", 1) for word in launch.argv if word.startswith(("--model-rep", "--backend-dir")))
    assert not any(odd in path for path in named.values())
    assert {name: (launch.cwd / path).resolve() for name, path in named.items()} == {
        "--model-repository": launch.repository,
        "--backend-directory": install.backends,
    }


def test_other_paths_are_named_whole(install, tmp_path, source):
    launch = prepare_slice(install, replace(spec(tmp_path, source), repository=tmp_path / "mein_Gerät-1.2"))
    assert f"--model-repository={tmp_path}/mein_Gerät-1.2" in launch.argv
    assert f"--backend-directory={install.backends}" in launch.argv


def test_a_python_without_stub_is_told_which_there_are(install):
    with pytest.raises(BinaryMissing, match=r"no stub for Python 3\.14 .*3\.10, 3\.11.*PYTHON=python3\.11"):
        prepare_triton(replace(install, python_version="3.14"))


def test_an_image_that_brings_its_stub_is_left_alone(install):
    stubs = install.backends.parent / "python_backend_stubs"
    stubs.rename(stubs.with_name("gone"))
    with pytest.raises(BinaryMissing, match="none"):
        prepare_triton(install)
    (install.backends / "python" / STUB).write_text("image's own")
    prepare_triton(install)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"libpython_loads": False}, BinaryMissing, r"libpython3\.11\.so\.1\.0 cannot be loaded.*apt-get install"),
        ({"numpy_version": "2.1.0"}, StartError, r"numpy 2\.1\.0 in .*empty.*numpy<2"),
        ({"numpy_version": ""}, StartError, "numpy is missing"),
        ({"onnxruntime_version": ""}, StartError, "onnxruntime is missing"),
    ],
)
def test_an_environment_that_cannot_serve_is_refused_with_its_remedy(install, changes, error, text):
    with pytest.raises(error, match=text):
        refuse_environment(replace(install, **changes))


def test_a_libpython_off_the_loader_path_is_passed_to_triton(install, tmp_path, source):
    told = replace(install, libpython_loads=False, libpython_folder="/opt/python/lib")
    refuse_environment(told)
    assert prepare_slice(told, spec(tmp_path, source)).env["LD_LIBRARY_PATH"] == "/opt/python/lib"
    assert "LD_LIBRARY_PATH" not in prepare_slice(install, spec(tmp_path, source)).env


def test_the_command_listens_on_loopback_only_and_sees_one_device(install, tmp_path, source):
    launch = prepare_slice(install, spec(tmp_path, source))
    addresses = [a for a in launch.argv if "address" in a]
    assert len(addresses) == 3
    assert all(a.endswith("=127.0.0.1") for a in addresses)
    assert {"--model-control-mode=explicit", "--load-model=toy", "--allow-http=false"} <= set(launch.argv)
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert launch.env["PATH"].split(os.pathsep)[0] == str(install.environment / "bin")
    assert "TREFOIL_PACE_FILE" not in launch.env
    assert (launch.grpc_target, launch.metrics_url) == ("127.0.0.1:8200", "http://127.0.0.1:8201/metrics")


@pytest.mark.parametrize(
    ("listen", "published", "own"),
    [("0.0.0.0", "gpu7.example", "127.0.0.1"), ("10.0.0.7", "10.0.0.7", "10.0.0.7")],
)
def test_it_listens_where_told_publishes_the_advertised_host_and_is_asked_nearby(
    install, tmp_path, source, listen, published, own
):
    told = replace(spec(tmp_path, source), listen=listen, published_host=published)
    launch = prepare_slice(install, told)
    assert {f"--grpc-address={listen}", f"--metrics-address={listen}", "--http-address=127.0.0.1"} <= set(launch.argv)
    assert (launch.published_target, launch.published_metrics_url) == (
        f"{published}:8200",
        f"http://{published}:8201/metrics",
    )
    assert (launch.grpc_target, launch.metrics_url) == (f"{own}:8200", f"http://{own}:8201/metrics")


def test_secrets_of_the_agent_do_not_reach_triton(install, tmp_path, source, monkeypatch):
    monkeypatch.setenv("TREFOIL_POWER_AGENT_REDIS_URL", "redis://:hunter2@127.0.0.1")
    assert "hunter2" not in str(prepare_slice(install, spec(tmp_path, source)).env)


def test_the_repository_links_every_version_and_loads_one(install, tmp_path, source):
    launch = prepare_slice(install, spec(tmp_path, source))
    family = launch.repository / "toy"
    assert (family / "1" / "model.onnx").read_text() == "graph 1"
    assert (family / "2" / "model.py").resolve() == (source / "_shared" / "model.py").resolve()
    config = contract(launch.repository, "toy")
    assert config.version_policy.specific.versions == [2]
    assert config.backend == "python"
    assert config.max_batch_size == 8
    assert [(g.kind, g.count) for g in config.instance_group] == [(model_config_pb2.ModelInstanceGroup.KIND_CPU, 1)]
    inodes = {p: p.lstat().st_ino for p in family.rglob("model.*")}
    prepare_slice(install, spec(tmp_path, source))
    assert {p: p.lstat().st_ino for p in family.rglob("model.*")} == inodes  # a running Triton sees no change


def test_labels_and_weights_in_folders_are_linked_and_threads_are_the_slices(install, tmp_path, source):
    path = source / "toy" / "config.pbtxt"
    path.write_text(
        CONTRACT.replace("dims: [ 10 ]", 'dims: [ 10 ] label_filename: "labels.txt"')
        + 'parameters { key: "intra_op_thread_count" value { string_value: "many" } }\n'
        'parameters { key: "classes" value { string_value: "a/b" } }'
    )
    (source / "toy" / "2" / "weights").mkdir()
    (source / "toy" / "2" / "weights" / "part0").write_text("weights")
    (source / "toy" / "2" / "weights.bin").write_text("beside")
    with pytest.raises(CatalogError, match=r"toy/labels\.txt is missing"):
        prepare_slice(install, spec(tmp_path, source))
    (source / "toy" / "labels.txt").write_text("zero\none\n")
    launch = prepare_slice(install, spec(tmp_path, source))
    assert (launch.repository / "toy" / "labels.txt").read_text() == "zero\none\n"
    assert (launch.repository / "toy" / "2" / "weights" / "part0").is_symlink()
    assert (launch.repository / "toy" / "2" / "weights.bin").read_text() == "beside"
    config = contract(launch.repository, "toy")
    assert dict(config.parameters) == {"classes": config.parameters["classes"]}
    assert backend_of_slice(config).threads == 0


def test_a_probe_has_the_shape_that_the_contract_states_and_no_batch_where_there_is_none(source):
    path = source / "toy" / "config.pbtxt"
    shape = 'parameters { key: "trefoil_shape.IMAGE" value { string_value: "8,12" } }'
    path.write_text(CONTRACT.replace("dims: [ 8, 8 ]", "dims: [ 8, -1 ]") + shape)
    assert client.probe_request(contract(source, "toy"), 1).inputs[0].shape == [1, 8, 12]
    path.write_text(path.read_text().replace("max_batch_size: 8", "max_batch_size: 0"))
    assert client.probe_request(contract(source, "toy"), 1).inputs[0].shape == [8, 12]
    path.write_text(path.read_text().replace("8,12", "9,12"))
    with pytest.raises(CatalogError, match=r"trefoil_shape.IMAGE = '9,12'.*fit dims \[8, -1\]"):
        contract(source, "toy")


GENERATIVE = """
name: "toy"
backend: "python"
default_model_filename: "decoder.py"
max_batch_size: 8
model_transaction_policy { decoupled: true }
input [
  { name: "PROMPT" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "MAX_TOKENS" data_type: TYPE_INT32 dims: [ 1 ] optional: true }
]
output [ { name: "TOKEN" data_type: TYPE_STRING dims: [ 1 ] } ]
"""


def test_what_decodes_is_linked_into_a_generative_family_and_serves_it_whatever_the_backend(install, tmp_path, source):
    (source / "toy" / "config.pbtxt").write_text(GENERATIVE)
    with pytest.raises(CatalogError, match=r"_shared/decoder\.py is missing"):
        prepare_slice(install, spec(tmp_path, source))
    for name in ("decoder.py", "decoding.py"):
        (source / "_shared" / name).write_text(name)
    offering = replace(install, offers=("onnxruntime", "python"), backend="onnxruntime")
    family = prepare_slice(offering, spec(tmp_path, source)).repository / "toy"
    linked = {path.name: path.resolve() for path in (family / "2").iterdir() if path.name.endswith(".py")}
    assert linked == {name: (source / "_shared" / name).resolve() for name in ("model.py", "decoder.py", "decoding.py")}
    config = contract(family.parent, "toy")
    assert (config.backend, config.default_model_filename) == ("python", "decoder.py")
    swapped = slice_config(config, replace(TOY, version=1), backend_of_slice(config), tmp_path)
    assert swapped.default_model_filename == "decoder.py"


def test_a_probe_of_texts_sends_one_and_leaves_out_what_is_optional(source):
    (source / "toy" / "config.pbtxt").write_text(GENERATIVE)
    request = client.probe_request(contract(source, "toy"), 2)
    assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [("PROMPT", "BYTES", [1, 1])]
    assert list(request.raw_input_contents) == [b"\x01\x00\x00\x000"]


def test_decode_times_are_of_the_newest_load_of_each_instance():
    line = 'trefoil_decode_seconds_total{instance="a_0_%d",loaded="%d",model="a",version="2"} %g\n'
    page = "# HELP x\n" + line % (0, 100, 7.5) + line % (0, 99, 50.0) + line % (1, 100, 2.0)
    assert client.decode_times(page) == {("a", 2): 9_500_000_000}
    assert client.decode_times("nothing\n") == {}


def test_links_follow_a_repository_that_moved(install, tmp_path, source):
    prepare_slice(install, spec(tmp_path, source))
    moved = source.rename(tmp_path / "moved")
    launch = prepare_slice(install, spec(tmp_path, moved))
    assert (launch.repository / "toy" / "1" / "model.onnx").read_text() == "graph 1"


@pytest.mark.parametrize(
    ("lacking", "text"),
    [
        ("toy/2/model.onnx", r"version 2 of family toy cannot be served: .*toy/2/model\.onnx is missing.*one of \[1\]"),
        ("_shared/model.py", r"_shared/model\.py is missing"),
        ("toy/config.pbtxt", r"config\.pbtxt.: cannot be read .*: family toy has no tensor contract"),
    ],
)
def test_what_the_source_lacks_is_named(install, tmp_path, source, lacking, text):
    (source / lacking).unlink()
    with pytest.raises(CatalogError, match=text):
        prepare_slice(install, spec(tmp_path, source))


@pytest.mark.parametrize(
    "bad", ["nonsense {", 'name: "other" max_batch_size: 8', CONTRACT.replace("size: 8", "size: -1")]
)
def test_a_bad_contract_is_refused(source, bad):
    (source / "toy" / "config.pbtxt").write_text(bad)
    with pytest.raises(CatalogError, match=r"toy/config\.pbtxt"):
        contract(source, "toy")


def test_the_chat_template_is_a_file_beside_the_contract_or_a_parameter_of_it(source, tmp_path):
    path, text = source / "toy" / "chat_template.jinja", "{{ bos_token }}</s>../{{ messages[0].content }}"
    path.write_text(text)
    assert contract(source, "toy").parameters["chat_template"].string_value == text
    path.write_bytes(b"\xff\xfe{")
    with pytest.raises(CatalogError, match=r"chat_template\.jinja is not UTF-8 text"):
        contract(source, "toy")
    path.unlink()
    path.symlink_to(tmp_path)
    with pytest.raises(CatalogError, match=r"chat_template\.jinja"):
        contract(source, "toy")
    own = 'parameters { key: "chat_template" value { string_value: "own" } }'
    (source / "toy" / "config.pbtxt").write_text(CONTRACT + own)
    assert contract(source, "toy").parameters["chat_template"].string_value == "own"


def test_the_override_is_the_same_configuration_as_the_file(source, tmp_path):
    config = slice_config(contract(source, "toy"), TOY, BackendChoice(), tmp_path)
    assert json_format.Parse(slice_launch.config_json(config), model_config_pb2.ModelConfig()) == config
    swapped = slice_config(config, replace(TOY, version=1), backend_of_slice(config), tmp_path)
    assert swapped.version_policy.specific.versions == [1]
    assert config.version_policy.specific.versions == [2]


def test_the_better_backend_is_chosen_except_where_a_pace_must_be_kept(install):
    both = replace(install, offers=("onnxruntime", "python"))
    assert with_backend(both, "auto", simulated=False).backend == "onnxruntime"
    assert with_backend(both, "auto", simulated=True).backend == "python"
    assert not with_backend(both, "auto", simulated=True).sees_gpus
    assert with_backend(both, "python", simulated=False).backend == "python"
    assert with_backend(install, "auto", simulated=False).backend == "python"
    with pytest.raises(BinaryMissing, match=r"no backend onnxruntime \(it has: python\).*Remedy: "):
        with_backend(install, "onnxruntime", simulated=False)


def test_the_onnxruntime_backend_gets_the_slices_gpu_or_as_many_threads_as_it_has_cores(install, tmp_path, source):
    groups = model_config_pb2.ModelInstanceGroup
    onnxruntime, whole = replace(install, backend="onnxruntime"), spec(tmp_path, source)
    for one, kind, threads in (
        (whole, groups.KIND_GPU, ""),
        (replace(whole, gpu_uuid="", cpu_cores=(2, 3)), groups.KIND_CPU, "2"),
        (replace(whole, gpu_uuid="", cpu_quota=1.2), groups.KIND_CPU, "2"),
    ):
        prepare_slice(onnxruntime, one)
        config = contract(one.repository, "toy")
        assert (config.backend, config.instance_group[0].kind) == ("onnxruntime", kind)
        swapped = slice_config(config, replace(TOY, version=1), backend_of_slice(config), tmp_path)
        assert (swapped.backend, swapped.instance_group) == (config.backend, config.instance_group)
        for written in (config, swapped):
            assert written.parameters["intra_op_thread_count"].string_value == threads
    toy = contract(source, "toy")
    assert choose_backend(replace(onnxruntime, sees_gpus=False), whole, toy) == BackendChoice("onnxruntime")
    assert choose_backend(install, whole, toy) == BackendChoice("python")
    assert (tmp_path / "slice" / "toy" / "config.pbtxt").stat().st_mode & 0o777 == 0o644


ENGINES_BY_GPU = CONTRACT.replace(
    'backend: "onnxruntime"',
    'platform: "tensorrt_plan" default_model_filename: "model_other.plan" '
    'cc_model_filenames [ { key: "8.0" value: "model_a100.plan" }, { key: "9.0" value: "model_h100.plan" } ]',
)


def test_engines_for_each_type_of_gpu_reach_the_slices_repository(install, tmp_path, source):
    (source / "toy" / "config.pbtxt").write_text(ENGINES_BY_GPU)
    for version in ("1", "2"):
        for name in ("model_a100.plan", "model_h100.plan", "model_other.plan"):
            (source / "toy" / version / name).write_text(name)
    whole = spec(tmp_path, source)
    prepare_slice(replace(install, offers=("onnxruntime", "python", "tensorrt")), whole)
    config = contract(whole.repository, "toy")
    assert (config.backend, config.default_model_filename) == ("tensorrt", "model_other.plan")
    assert dict(config.cc_model_filenames) == {"8.0": "model_a100.plan", "9.0": "model_h100.plan"}
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_GPU
    swapped = slice_config(config, replace(TOY, version=1), backend_of_slice(config), tmp_path)
    assert (swapped.backend, swapped.cc_model_filenames) == (config.backend, config.cc_model_filenames)
    for version in ("1", "2"):
        linked = whole.repository / "toy" / version / "model_h100.plan"
        assert linked.resolve() == source / "toy" / version / "model_h100.plan"


TENSORRT_LLM = """
name: "toy" backend: "tensorrtllm" max_batch_size: 8
model_transaction_policy { decoupled: true }
input [
  { name: "input_ids" data_type: TYPE_INT32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "input_lengths" data_type: TYPE_INT32 dims: [ 1 ] reshape: { shape: [ ] } },
  { name: "request_output_len" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "streaming" data_type: TYPE_BOOL dims: [ 1 ] optional: true }
]
output [
  { name: "output_ids" data_type: TYPE_INT32 dims: [ -1, -1 ] },
  { name: "generation_logits" data_type: TYPE_FP32 dims: [ -1, -1, -1 ] }
]
parameters { key: "gpt_model_path" value { string_value: "/models/toy/1" } }
"""


def test_a_tensorrt_llm_engine_is_that_of_its_versions_folder(install, tmp_path, source):
    (source / "toy" / "config.pbtxt").write_text(TENSORRT_LLM)
    for version in ("1", "2"):
        (source / "toy" / version / "config.json").write_text("{}")
        (source / "toy" / version / "rank0.engine").write_text(version)
    whole = spec(tmp_path, source)
    able = replace(install, offers=("python", "tensorrtllm"))
    prepare_slice(able, whole)
    text = (whole.repository / "toy" / "config.pbtxt").read_text()
    assert f'string_value: "{whole.repository}/toy/2"' in text
    assert (whole.repository / "toy" / "2" / "rank0.engine").read_text() == "2"
    config = contract(whole.repository, "toy")
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU
    swapped = slice_config(config, replace(TOY, version=1), backend_of_slice(config), whole.repository)
    assert swapped.parameters["gpt_model_path"].string_value == f"{whole.repository}/toy/1"
    probe = client.probe_request(config, 2)
    lengths = {one.name: raw for one, raw in zip(probe.inputs, probe.raw_input_contents, strict=True)}
    assert lengths == {"input_ids": bytes(4), **dict.fromkeys(("input_lengths", "request_output_len"), b"\1\0\0\0")}
    with pytest.raises(CatalogError, match=r"has no backend tensorrtllm.*Remedy: .*docker_image"):
        prepare_slice(install, whole)
    with pytest.raises(CatalogError, match="has no real GPU"):
        prepare_slice(replace(able, sees_gpus=False), whole)


def test_a_vllm_engine_takes_the_gpu_that_its_environment_names(install, tmp_path, source, monkeypatch):
    (source / "toy" / "config.pbtxt").write_text('name: "toy" backend: "vllm"')
    for version in ("1", "2"):
        (source / "toy" / version / "model.json").write_text('{"model": "m"}')
    whole = spec(tmp_path, source)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    for secret in ("HF_TOKEN", "HF_HUB_TOKEN", "VLLM_API_KEY"):
        monkeypatch.setenv(secret, "secret")
    launch = prepare_slice(replace(install, offers=("python", "vllm")), whole)
    assert launch.env["VLLM_CPU_KVCACHE_SPACE"] == "1"
    assert "secret" not in launch.env.values()
    config = contract(whole.repository, "toy")
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_MODEL, "KIND_GPU takes GPU 0"
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "MIG-1"
    assert not (whole.repository / "toy" / "2" / "model.py").exists(), "it is not a python model"
    other = 'parameters { key: "GPU_DEVICE_IDS" value { string_value: "1" } }'
    (source / "toy" / "config.pbtxt").write_text('name: "toy" backend: "vllm"' + other)
    with pytest.raises(CatalogError, match=r"parameters\.GPU_DEVICE_IDS = '1': .*names devices"):
        prepare_slice(replace(install, offers=("python", "vllm")), whole)


def test_engines_without_what_executes_them_are_refused(install, tmp_path, source):
    (source / "toy" / "config.pbtxt").write_text(ENGINES_BY_GPU)
    whole = spec(tmp_path, source)
    with pytest.raises(CatalogError, match=r"family = 'toy': .*TensorRT engines, and .*has no backend tensorrt"):
        prepare_slice(install, whole)
    able = replace(install, offers=("python", "tensorrt"))
    with pytest.raises(CatalogError, match=r"node0-gpu0-3g\.20gb-4 has no real GPU.*Remedy: .*ONNX"):
        prepare_slice(replace(able, sees_gpus=False), whole)
    with pytest.raises(CatalogError, match=r"no model files: .*toy/2/model_a100\.plan is missing.*family import"):
        prepare_slice(able, whole)
    assert with_backend(able, "auto", simulated=False).backend == "python"


@pytest.mark.parametrize(
    ("family", "variant", "maker"),
    [
        ("efficientnet", "efficientnet-b1", "export_efficientnet.py"),
        ("albert", "albert-base", "export_albert.py"),
        ("digits", "digits-xs", "train_digits.py"),
    ],
)
def test_a_family_that_nobody_exported_yet_is_refused_with_the_script_that_does(
    install, tmp_path, family, variant, maker
):
    source = tmp_path / "models"
    for name in (family, "_shared", "_training"):
        shutil.copytree(ROOT / "model_repository" / name, source / name, ignore=shutil.ignore_patterns("[0-9]"))
    with pytest.raises(CatalogError, match=rf"version 1 of family {family} .*no model files.*models/_training/{maker}"):
        prepare_slice(install, spec(tmp_path, source, Hosted(family, variant, 1, 0, 1, 1, 8)))


def test_shared_memory_of_one_slice_only_is_cleaned(tmp_path, monkeypatch):
    monkeypatch.setattr(slice_launch, "SHARED_MEMORY", tmp_path)
    for name in ("trefoil-a-8200-x", "trefoil-a-8200-y", "trefoil-b-8202-x"):
        (tmp_path / name).touch()
    assert slice_launch.clean_shared_memory("trefoil-a-8200-") == 2
    assert slice_launch.clean_shared_memory("") == 0
    assert [p.name for p in tmp_path.iterdir()] == ["trefoil-b-8202-x"]


@pytest.mark.parametrize(
    ("code", "details", "dead"),
    [
        (grpc.StatusCode.INTERNAL, "Failed to process: Stub process 'digits_0_0' is not healthy.", True),
        (grpc.StatusCode.INTERNAL, "onnxruntime failed", False),
        (grpc.StatusCode.UNAVAILABLE, "Stub process is fine, the network is not", False),
        (grpc.StatusCode.INTERNAL, None, False),
    ],
)
def test_only_the_text_of_a_dead_stub_counts_as_one(code, details, dead):
    assert client.is_stub_dead(code, details) is dead


def test_a_probe_fits_the_contract_and_an_empty_answer_is_wrong(source):
    config = contract(source, "toy")
    request = client.probe_request(config, 2)
    assert [(i.name, i.datatype, list(i.shape)) for i in request.inputs] == [("IMAGE", "UINT8", [1, 8, 8])]
    assert [len(raw) for raw in request.raw_input_contents] == [64]
    reply = service_pb2.ModelInferResponse(model_name="toy", model_version="2")
    reply.outputs.add(name="PROBABILITIES", datatype="FP32", shape=[1, 10])
    assert "0 bytes, expected 40" in client.wrong_reply(config, 2, reply)
    reply.raw_output_contents.append(bytes(40))
    assert client.wrong_reply(config, 2, reply) == ""
    assert "version 2 answered instead of 1" in client.wrong_reply(config, 1, reply)


def test_pending_is_summed_and_a_missing_gauge_is_no_zero():
    page = 'nv_inference_request_success{model="a",version="1"} 5\n'
    gauge = 'nv_inference_pending_request_count{model="a",version="%d"} %d\n'
    assert client.pending_requests(page + gauge % (1, 3) + gauge % (2, 4)) == 7
    assert client.pending_requests("# nothing loaded\n") == 0
    with pytest.raises(ValueError, match="is missing"):
        client.pending_requests(page)


def test_counters_tell_busy_time_from_the_sum_over_joined_requests():
    counted = {name: SimpleNamespace(count=count) for name, count in (("success", 4), ("fail", 1))}
    stats = SimpleNamespace(**counted, compute_infer=SimpleNamespace(ns=60))
    batches = [SimpleNamespace(compute_infer=SimpleNamespace(ns=30))]
    told = {"inference_stats": stats, "inference_count": 4, "batch_stats": batches}
    seen = client.counters(SimpleNamespace(name="toy", version="2", **told))
    assert seen.compute_batch_ns == 30


def test_the_wheel_is_found_by_its_files_and_never_imported(tmp_path, monkeypatch):
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    binary = packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text("#!/bin/sh\n")
    binary.chmod(0o755)
    (packages / "pytriton" / "__init__.py").write_text("raise RuntimeError('imported')")
    info = packages / "nvidia_pytriton-0.7.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-pytriton\nVersion: 0.7.0\n")
    (info / "RECORD").write_text("pytriton/__init__.py,,\npytriton/tritonserver/bin/tritonserver,,\n")
    assert installation._in_wheel(tmp_path) == binary
    binary.chmod(0o644)
    assert installation._in_wheel(tmp_path) is None

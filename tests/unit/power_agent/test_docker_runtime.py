"""What the docker runtime asks of an engine: word for word, where only a machine with GPUs could try it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from power_agent.runtimes.docker import DockerOptions, DockerRuntime, container_name, own_user
from power_agent.runtimes.docker_engine import Engine
from power_agent.triton.slice_launch import SliceLaunch
from tests.support.fake_engine import IMAGE, FakeEngine
from trefoil.core.errors import BinaryMissing, StartError, Unavailable

MIG = "MIG-4f9f4a3a-41ff-5b5c-8d0a-6b2f3f7d1c55"
OPTIONS = DockerOptions("prod", "node7", IMAGE, user="65534:65534")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    one = FakeEngine()
    yield one
    one.close()


@pytest.fixture
def launch(tmp_path: Path) -> SliceLaunch:
    (tmp_path / "slice" / "digits").mkdir(parents=True)
    (tmp_path / "slice" / "digits" / "config.pbtxt").touch(0o600)
    return SliceLaunch(
        argv=("/opt/tritonserver/bin/tritonserver", "--grpc-port=8200"),
        env={"PATH": "/host/bin", "HOME": "/root", "CUDA_VISIBLE_DEVICES": MIG, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path / "slice",
        repository=tmp_path / "slice",
        grpc_target="127.0.0.1:8200",
        metrics_url="http://127.0.0.1:8201/metrics",
        published_target="127.0.0.1:8200",
        published_metrics_url="http://127.0.0.1:8201/metrics",
        shm_prefix="trefoil-x-",
        source=tmp_path / "models",
        gpu_uuid=MIG,
    )


def created(engine: FakeEngine, options: DockerOptions, launch: SliceLaunch) -> dict[str, Any]:
    """The body of the create call, without what is empty."""
    DockerRuntime(Engine(engine.url), options).start("a.g1", launch, Path("/logs/a.log"))
    body = engine.created[f"trefoil-prod-{options.node}-a.g1"]
    return {**body, "HostConfig": {name: value for name, value in body["HostConfig"].items() if value is not None}}


def test_a_slice_of_a_gpu_becomes_exactly_this_container(engine, launch, tmp_path):
    body = created(engine, OPTIONS, launch)
    health = body["Healthcheck"].pop("Test")
    assert health[:2] == ["CMD", "/usr/bin/python3"]
    assert health[-2:] == ["127.0.0.1", "8200"]
    assert body["Healthcheck"] == {
        "Interval": 30_000_000_000,
        "Timeout": 5_000_000_000,
        "StartPeriod": 60_000_000_000,
        "Retries": 3,
    }
    assert body["Image"] == "sha256:1234"
    assert body["Cmd"] == ["/opt/tritonserver/bin/tritonserver", "--grpc-port=8200"]
    assert "Entrypoint" not in body or body["Entrypoint"] is None  # the image's own prepares CUDA
    assert sorted(body["Env"]) == [
        f"CUDA_VISIBLE_DEVICES={MIG}", f"NVIDIA_VISIBLE_DEVICES={MIG}", "OMP_NUM_THREADS=1"
    ]  # fmt: skip
    assert (body["User"], body["WorkingDir"]) == ("65534:65534", str(tmp_path / "slice"))
    labels = body["Labels"]
    assert len(labels.pop("trefoil.command")) == 16
    assert labels == {
        "trefoil.cluster": "prod",
        "trefoil.node": "node7",
        "trefoil.tag": "a.g1",
        "trefoil.image": IMAGE,
        "trefoil.log": "/logs/a.log",
    }
    mounts = [
        {"Target": str(folder), "Source": str(folder), "Type": "bind", "ReadOnly": True}
        for folder in (tmp_path / "slice", tmp_path / "models")
    ]
    assert body["HostConfig"] == {
        "DeviceRequests": [
            {
                "Driver": "nvidia",
                "Count": 0,
                "DeviceIDs": [MIG],
                "Capabilities": [["gpu", "compute", "utility"]],
                "Options": {},
            }
        ],
        "NetworkMode": "host",
        "IpcMode": "private",
        "ShmSize": 256 * 2**20,
        "Mounts": mounts,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}},
        "ReadonlyRootfs": True,
        "Tmpfs": {"/tmp": "size=256m,mode=1777"},
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "PidsLimit": 4096,
        "Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}],
    }
    assert (tmp_path / "slice" / "digits" / "config.pbtxt").stat().st_mode & 0o777 == 0o644


def test_families_that_the_repository_only_links_to_are_mounted_too(engine, launch, tmp_path):
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    launch.source.mkdir()
    (launch.source / "mine").symlink_to(tmp_path / "elsewhere" / "mine")
    targets = [mount["Target"] for mount in created(engine, OPTIONS, launch)["HostConfig"]["Mounts"]]
    assert str((tmp_path / "elsewhere" / "mine").resolve()) in targets


def test_a_whole_gpu_is_asked_for_by_its_own_uuid(engine, launch):
    body = created(engine, OPTIONS, replace(launch, gpu_uuid="GPU-1"))
    assert body["HostConfig"]["DeviceRequests"][0]["DeviceIDs"] == ["GPU-1"]
    assert "NVIDIA_VISIBLE_DEVICES=GPU-1" in body["Env"]


def test_a_slice_of_cpus_gets_its_cores_or_its_share_and_no_gpu(engine, launch):
    pinned = created(engine, OPTIONS, replace(launch, gpu_uuid="", cpu_cores=(2, 3)))
    assert pinned["HostConfig"]["CpusetCpus"] == "2,3"
    quota = created(engine, replace(OPTIONS, node="node8"), replace(launch, gpu_uuid="", cpu_quota=0.3))
    assert quota["HostConfig"]["NanoCpus"] == 300_000_000
    for body in (pinned, quota):
        assert "DeviceRequests" not in body["HostConfig"]
        assert "Ulimits" not in body["HostConfig"]
        assert "NVIDIA_VISIBLE_DEVICES=void" in body["Env"]


def test_where_gpus_are_simulated_none_is_asked_for_and_that_is_said(engine, launch, capsys):
    body = created(engine, replace(OPTIONS, gpu="none"), launch)
    assert "DeviceRequests" not in body["HostConfig"]
    assert "containers get no GPU" in capsys.readouterr().out


def test_an_image_without_python_has_no_health_check_and_the_better_backend_comes_first(engine, launch):
    engine.files = engine.files[:-1]
    runtime = DockerRuntime(Engine(engine.url), OPTIONS)
    assert runtime.image().backends == ("onnxruntime", "python")
    assert runtime.install().binary == Path("/opt/tritonserver/bin/tritonserver")
    assert created(engine, OPTIONS, launch).get("Healthcheck") is None
    assert len(engine.containers) == 1  # what looked into the image is gone


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ('could not select device driver "nvidia" with capabilities: [[gpu]]', "install nvidia-container-toolkit"),
        ("nvidia-container-cli: device error: MIG-1: unknown device: unknown", "the MIG instance is gone"),
        ("nvidia-container-cli: initialization error: nvml error", "run `nvidia-smi`"),
        ("something new", "see the engine's own log"),
    ],
)
def test_a_refusal_is_passed_on_with_its_remedy_and_leaves_no_container(engine, launch, said, remedy):
    engine.refuse_start = said
    runtime = DockerRuntime(Engine(engine.url), OPTIONS)
    with pytest.raises(StartError) as caught:
        runtime.start("a.g1", launch, Path("/nowhere/log"))
    assert said in str(caught.value)
    assert remedy in str(caught.value)
    assert engine.containers == {}


def test_an_image_is_pulled_only_where_that_is_allowed(engine):
    engine.has_image = False
    with pytest.raises(StartError, match=rf"docker_image: image {IMAGE} is not on this machine.*docker pull {IMAGE}"):
        DockerRuntime(Engine(engine.url), OPTIONS).image()
    assert DockerRuntime(Engine(engine.url), replace(OPTIONS, pull=True)).image().id == "sha256:1234"


def test_an_image_without_a_backend_is_refused(engine):
    engine.files = engine.files[:1]
    with pytest.raises(BinaryMissing, match=r"neither of Triton's backends onnxruntime, python"):
        DockerRuntime(Engine(engine.url), OPTIONS).image()
    assert engine.containers == {}


def test_a_container_whose_agent_died_before_it_started_is_replaced(engine, launch):
    runtime = DockerRuntime(Engine(engine.url), OPTIONS)
    runtime.start("a.g1", launch, Path("/nowhere/log"))
    [(container, described)] = engine.containers.items()
    described["State"] |= {"Status": "created", "StartedAt": "0001-01-01T00:00:00Z"}
    [left] = DockerRuntime(Engine(engine.url), OPTIONS).list()
    assert (left.alive, left.exit_code, left.started_at_s) == (False, None, 0.0)
    again = runtime.start("a.g1", launch, Path("/nowhere/log"))
    assert again.alive
    assert container not in engine.containers


def test_an_agent_that_died_looking_into_an_image_leaves_no_container_for_good(engine, monkeypatch):
    monkeypatch.setattr("power_agent.runtimes.docker_engine._remove", lambda *_: None)  # as if killed right before
    DockerRuntime(Engine(engine.url), OPTIONS).image()
    monkeypatch.undo()
    assert len(engine.containers) == 1
    DockerRuntime(Engine(engine.url), replace(OPTIONS, node="node8")).image()
    assert len(engine.containers) == 1  # it is another agent's
    runtime = DockerRuntime(Engine(engine.url), OPTIONS)
    assert runtime.list() == ()
    runtime.image()
    assert engine.containers == {}


def test_polling_asks_about_each_container_only_when_its_summary_changes(engine, launch):
    runtime = DockerRuntime(Engine(engine.url), OPTIONS)
    runtime.start("a.g1", launch, Path("/nowhere/log"))
    first = runtime.list()
    engine.calls.clear()
    assert runtime.list() == first
    assert engine.calls == ["GET containers json"]


def test_an_engine_that_went_away_is_named(engine):
    runtime = DockerRuntime(Engine(engine.url), OPTIONS)
    assert runtime.list() == ()
    engine.close()
    with pytest.raises(Unavailable, match=r"no Docker engine answers at tcp://127.*Remedy: start it"):
        runtime.list()


def test_names_and_users():
    assert container_name(OPTIONS, "node7/gpu0 3g@4.g1") == "trefoil-prod-node7-node7_gpu0_3g_4.g1"
    assert own_user() != "0:0"

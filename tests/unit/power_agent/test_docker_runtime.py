"""What the docker runtime asks of an engine: word for word, where only a machine with GPUs could try it."""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from power_agent.runtimes import slice_network
from power_agent.runtimes.docker import DockerRuntime, own_user
from power_agent.runtimes.docker_engine import Engine, failure_of, object_name
from power_agent.runtimes.slice_network import REACHED, RULES
from power_agent.settings import PowerAgentSettings
from power_agent.triton.slice_launch import SliceLaunch
from tests.support.fake_engine import IMAGE, FakeEngine
from trefoil.core.errors import BinaryMissing, StartError, Unavailable

MIG = "MIG-4f9f4a3a-41ff-5b5c-8d0a-6b2f3f7d1c55"
SETTINGS = PowerAgentSettings(cluster="prod", node="node7", docker_image=IMAGE, docker_user="65534:65534")


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
        ports={8200: "127.0.0.1", 8201: "127.0.0.1"},
        gpu_uuid=MIG,
    )


def created(engine: FakeEngine, settings: PowerAgentSettings, launch: SliceLaunch) -> dict[str, Any]:
    """The body of the create call, without what is empty."""
    DockerRuntime(Engine(engine.url), settings).start("a.g1", launch, Path("/logs/a.log"))
    body = engine.created[f"trefoil-prod-{settings.node}-a.g1"]
    return {**body, "HostConfig": {name: value for name, value in body["HostConfig"].items() if value is not None}}


def test_a_slice_of_a_gpu_becomes_exactly_this_container(engine, launch, tmp_path):
    body = created(engine, SETTINGS, launch)
    assert body["Image"] == "sha256:1234"
    assert "Healthcheck" not in body  # the image's own, if it has one
    assert body["Cmd"] == ["/opt/tritonserver/bin/tritonserver", "--grpc-port=8200"]
    assert "Entrypoint" not in body or body["Entrypoint"] is None  # the image's own prepares CUDA
    assert sorted(body["Env"]) == [
        f"CUDA_VISIBLE_DEVICES={MIG}", "NVIDIA_DRIVER_CAPABILITIES=compute,utility", f"NVIDIA_VISIBLE_DEVICES={MIG}",
        "OMP_NUM_THREADS=1",
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
        "Runtime": "nvidia",
        "NetworkMode": "trefoil-prod-node7",
        "PortBindings": {f"{port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": str(port)}] for port in (8200, 8201)},
        "Dns": ["127.0.0.1"],
        "IpcMode": "private",
        "ShmSize": 256 * 2**20,
        "Mounts": mounts,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "json-file", "Config": {"max-size": "16m", "max-file": "2"}},
        "ReadonlyRootfs": True,
        "Tmpfs": {"/tmp": "size=256m,mode=1777"},
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true"],
        "PidsLimit": 4096,
        "Ulimits": [{"Name": "memlock", "Soft": -1, "Hard": -1}],
    }
    assert (tmp_path / "slice" / "digits" / "config.pbtxt").stat().st_mode & 0o777 == 0o644
    [network] = engine.networks.values()
    assert network["Labels"] == {"trefoil.cluster": "prod", "trefoil.node": "node7"}
    options = {name.removeprefix("com.docker.network.bridge."): value for name, value in network["Options"].items()}
    assert len(options["name"]) == 15  # what the kernel allows
    assert options == {"name": options["name"], "enable_icc": "false", "enable_ip_masquerade": "false"}
    assert options["name"].startswith("trefoil")


def test_families_that_the_repository_only_links_to_are_mounted_too(engine, launch, tmp_path):
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    launch.source.mkdir()
    (launch.source / "mine").symlink_to(tmp_path / "elsewhere" / "mine")
    targets = [mount["Target"] for mount in created(engine, SETTINGS, launch)["HostConfig"]["Mounts"]]
    assert str((tmp_path / "elsewhere" / "mine").resolve()) in targets


def test_by_a_device_request_a_device_is_named_by_its_own_uuid(engine, launch):
    body = created(engine, SETTINGS.model_copy(update={"docker_gpu": "request"}), replace(launch, gpu_uuid="GPU-1"))
    assert "Runtime" not in body["HostConfig"]
    [request] = body["HostConfig"]["DeviceRequests"]
    assert request == {
        "Driver": "nvidia",
        "Count": 0,
        "DeviceIDs": ["GPU-1"],
        "Capabilities": [["gpu", "compute", "utility"]],
        "Options": {},
    }
    assert "NVIDIA_VISIBLE_DEVICES=GPU-1" in body["Env"]


def cdi(engine: FakeEngine, folder: Path, refresh: str) -> PowerAgentSettings:
    """Options of an engine whose CDI specifications are in that folder: one, from before a repartition."""
    engine.info = {"ServerVersion": "28.3.0", "Runtimes": {}, "CDISpecDirs": [str(folder), "/nowhere"]}
    folder.mkdir()
    (folder / "nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices:\n- name: MIG-of-before\n")
    return SETTINGS.model_copy(update={"docker_gpu": "cdi", "docker_cdi_refresh": refresh})


@pytest.mark.parametrize("method", ["cdi", "request"])  # an engine that hands devices of a request out by CDI, too
def test_a_cdi_specification_is_written_anew_for_an_instance_that_it_does_not_know(engine, launch, tmp_path, method):
    folder = tmp_path / "cdi"
    script = tmp_path / "generate"
    script.write_text(f"#!/bin/sh\necho ran >> {tmp_path}/runs\necho '- name: {MIG}' >> {folder}/nvidia.yaml\n")
    script.chmod(0o755)
    settings = cdi(engine, folder, str(script)).model_copy(update={"docker_gpu": method})
    body = created(engine, settings, launch)
    [request] = body["HostConfig"]["DeviceRequests"]
    wanted = ("cdi", [f"nvidia.com/gpu={MIG}"]) if method == "cdi" else ("nvidia", [MIG])
    assert (request["Driver"], request["DeviceIDs"], request["Count"], request["Options"]) == (*wanted, 0, {})
    assert ("NVIDIA_VISIBLE_DEVICES=void" in body["Env"]) == (method == "cdi")  # NVIDIA's runtime must not help
    created(engine, settings.model_copy(update={"node": "node8"}), launch)
    assert (tmp_path / "runs").read_text() == "ran\n"


@pytest.mark.parametrize(
    ("refresh", "why"),
    [
        ("nvidia-ctk-that-is-not-there", "No such file or directory: 'nvidia-ctk-that-is-not-there'"),
        ("sh -c 'echo no NVML >&2; exit 3'", "no NVML"),
        ("true", "it was written again"),
        ("", "docker_cdi_refresh is empty"),
    ],
)
def test_an_instance_that_no_specification_gets_to_know_is_refused_before_anything_is_made(
    engine, launch, tmp_path, refresh, why
):
    settings = cdi(engine, tmp_path / "cdi", refresh)
    with pytest.raises(
        StartError, match=rf"docker_gpu = 'cdi': no CDI .* has nvidia.com/gpu={MIG} .*Remedy: "
    ) as caught:
        created(engine, settings, launch)
    assert why in str(caught.value)
    assert engine.created == {}


@pytest.mark.parametrize(
    ("method", "refusal"),
    [
        (
            "runtime",
            r"docker_gpu = 'runtime': the engine has no runtime nvidia. Remedy: install nvidia-container-toolkit",
        ),
        (
            "cdi",
            r"docker_gpu = 'cdi': the engine \(Docker 20.10.24\) hands out no CDI devices. Remedy: take Docker 28.3",
        ),
    ],
)
def test_an_engine_without_toolkit_is_named_before_a_plan_and_refused_with_it(engine, launch, method, refusal):
    engine.info = {"ServerVersion": "20.10.24", "Runtimes": {"runc": {}}}
    runtime = DockerRuntime(Engine(engine.url), SETTINGS.model_copy(update={"docker_gpu": method}))
    assert runtime.missing(gpus=True) == {}  # no image was looked into yet: nothing can be started anyway
    runtime.install()
    with pytest.raises(StartError, match=refusal):
        runtime.start("a.g1", launch, Path("/nowhere/log"))
    assert engine.created == {}
    assert re.search(refusal, runtime.missing(gpus=True)["gpu_access"])
    assert runtime.missing(gpus=False) == {}


def test_what_model_code_reaches_is_looked_at_from_a_container_and_said_with_the_command(engine, launch, monkeypatch):
    refusals = iter(["nft: Operation not permitted", ""])
    monkeypatch.setattr(slice_network, "load_rules", lambda: next(refusals))
    engine.looks_ended = REACHED
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    runtime.install()
    said = runtime.missing(gpus=False)["isolate"]
    assert said == (
        "not isolated: model code reaches this host at 127.0.0.1 (nft: Operation not permitted). "
        f"Remedy: as root, now and at each boot: modprobe br_netfilter; nft -f {RULES}"
    )
    engine.calls.clear()
    assert runtime.missing(gpus=False) == {"isolate": said}
    assert engine.calls == []  # a container each time would be too much
    engine.networks["trefoil-prod-node7"]["Containers"] = {"1": {"IPv4Address": "172.20.0.2/16"}}
    engine.looks_ended = REACHED + 1
    runtime.start("a.g1", launch, Path("/nowhere/log"))  # one more to be reached: looked at again
    assert "model code reaches other slices, as 172.20.0.2:1. Remedy" in runtime.missing(gpus=False)["isolate"]
    engine.looks_ended = 127
    runtime.start("b.g1", replace(launch, ports={}), Path("/nowhere/log"))
    assert (
        "it is unknown what model code reaches: the isolation probe in a container ended with 127"
        in (runtime.missing(gpus=False)["isolate"])
    )
    engine.looks_ended = 0
    runtime.start("c.g1", replace(launch, ports={}), Path("/nowhere/log"))
    assert runtime.missing(gpus=False) == {}
    assert len(engine.containers) == 3  # nothing that looked around is left


def test_the_network_of_a_predecessor_is_taken_and_a_stranger_of_its_name_is_refused(engine, launch):
    created(engine, SETTINGS, launch)
    engine.calls.clear()
    DockerRuntime(Engine(engine.url), SETTINGS).start("b.g1", launch, Path("/logs/b.log"))
    assert "POST networks create" not in engine.calls
    engine.networks["trefoil-prod-node7"]["Options"] = {}
    with pytest.raises(StartError, match=r"network trefoil-prod-node7 exists, .*docker network rm trefoil-prod-node7"):
        DockerRuntime(Engine(engine.url), SETTINGS).start("c.g1", launch, Path("/logs/c.log"))


def test_an_agent_that_is_not_in_the_hosts_network_is_told_so(engine):
    engine.networks["trefoil-prod-node7"] = {}
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    runtime.install()
    del engine.networks["trefoil-prod-node7"]
    runtime.missing(gpus=False)
    engine.networks["trefoil-prod-node7"]["IPAM"] = {"Config": [{"Gateway": "192.0.2.77"}]}
    again = DockerRuntime(Engine(engine.url), SETTINGS)
    again.install()
    assert re.search(
        r"192.0.2.77, .* is none of this agent's. Remedy: .*--network=host", again.missing(gpus=False)["isolate"]
    )


def test_a_slice_of_cpus_gets_its_cores_or_its_share_and_no_gpu(engine, launch):
    pinned = created(engine, SETTINGS, replace(launch, gpu_uuid="", cpu_cores=(2, 3)))
    assert pinned["HostConfig"]["CpusetCpus"] == "2,3"
    quota = created(engine, SETTINGS.model_copy(update={"node": "node8"}), replace(launch, gpu_uuid="", cpu_quota=0.3))
    assert quota["HostConfig"]["NanoCpus"] == 300_000_000
    for body in (pinned, quota):
        assert "DeviceRequests" not in body["HostConfig"]
        assert "Ulimits" not in body["HostConfig"]
        assert "NVIDIA_VISIBLE_DEVICES=void" in body["Env"]


def test_where_gpus_are_simulated_none_is_asked_for_and_that_is_said(engine, launch, capsys):
    body = created(engine, SETTINGS.model_copy(update={"docker_gpu": "none"}), launch)
    assert "DeviceRequests" not in body["HostConfig"]
    assert "containers get no GPU" in capsys.readouterr().out


def test_an_image_is_looked_into_and_its_better_backend_comes_first(engine, launch):
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    assert runtime.image().backends == ("onnxruntime", "python")
    assert runtime.install().binary == Path("/opt/tritonserver/bin/tritonserver")
    assert engine.containers == {}  # what looked into the image is gone


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
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    with pytest.raises(StartError) as caught:
        runtime.start("a.g1", launch, Path("/nowhere/log"))
    assert said in str(caught.value)
    assert remedy in str(caught.value)
    assert engine.containers == {}


def test_an_image_is_pulled_only_where_that_is_allowed(engine):
    engine.has_image = False
    with pytest.raises(StartError, match=rf"docker_image: image {IMAGE} is not on this machine.*docker pull {IMAGE}"):
        DockerRuntime(Engine(engine.url), SETTINGS).image()
    pulling = SETTINGS.model_copy(update={"docker_pull": True})
    assert DockerRuntime(Engine(engine.url), pulling).image().id == "sha256:1234"


def test_an_image_without_a_backend_is_refused(engine):
    engine.files = engine.files[:1]
    with pytest.raises(BinaryMissing, match=r"neither of Triton's backends onnxruntime, python"):
        DockerRuntime(Engine(engine.url), SETTINGS).image()
    assert engine.containers == {}


def test_a_container_whose_agent_died_before_it_started_is_replaced(engine, launch):
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    runtime.start("a.g1", launch, Path("/nowhere/log"))
    [(container, described)] = engine.containers.items()
    described["State"] |= {"Status": "created", "StartedAt": "0001-01-01T00:00:00Z"}
    [left] = DockerRuntime(Engine(engine.url), SETTINGS).list()
    assert (left.alive, left.exit_code, left.started_at_s) == (False, None, 0.0)
    again = runtime.start("a.g1", launch, Path("/nowhere/log"))
    assert again.alive
    assert container not in engine.containers


def test_an_agent_that_died_looking_into_an_image_leaves_no_container_for_good(engine, monkeypatch):
    killed = contextlib.nullcontext
    monkeypatch.setattr("power_agent.runtimes.docker_engine.removed_after", lambda _, container: killed(container))
    DockerRuntime(Engine(engine.url), SETTINGS).image()
    monkeypatch.undo()
    assert len(engine.containers) == 1
    DockerRuntime(Engine(engine.url), SETTINGS.model_copy(update={"node": "node8"})).image()
    assert len(engine.containers) == 1  # it is another agent's
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    assert runtime.list() == ()
    runtime.image()
    assert engine.containers == {}


def test_polling_asks_about_each_container_only_when_its_summary_changes(engine, launch):
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    runtime.start("a.g1", launch, Path("/nowhere/log"))
    first = runtime.list()
    engine.calls.clear()
    assert runtime.list() == first
    assert engine.calls == ["GET containers json"]


def test_an_engine_that_went_away_is_named(engine):
    runtime = DockerRuntime(Engine(engine.url), SETTINGS)
    assert runtime.list() == ()
    engine.close()
    with pytest.raises(Unavailable, match=r"no Docker engine answers at tcp://127.*Remedy: start it"):
        runtime.list()


def test_names_and_users():
    assert object_name("prod", "node7", "node7/gpu0 3g@4.g1") == "trefoil-prod-node7-node7_gpu0_3g_4.g1"
    assert own_user() != "0:0"


def test_a_command_beside_the_engine_that_fails_hangs_or_is_not_there_is_a_reason_and_no_error():
    assert failure_of(["true"], 5.0) == ""
    complains = ["sh", "-c", "echo first >&2; echo last >&2; exit 3"]
    assert (failure_of(complains, 5.0), failure_of(complains, 5.0, line=0)) == ("last", "first")
    assert failure_of(["false"], 5.0) == "1"
    assert "timed out" in failure_of(["sleep", "60"], 0.05)
    assert "nosuchcommand" in failure_of(["nosuchcommand"], 5.0)

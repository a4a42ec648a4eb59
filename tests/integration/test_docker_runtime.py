"""Tritons in containers of a real Docker engine, which the test starts where none runs."""

import contextlib
import errno
import os
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
from docker.models.containers import Container
from tritonclient.grpc import service_pb2, service_pb2_grpc

from power_agent.runtimes.base import RunningTriton
from power_agent.runtimes.docker import DockerRuntime
from power_agent.runtimes.docker_engine import Engine
from power_agent.settings import PowerAgentSettings
from power_agent.triton.client import TritonClient
from power_agent.triton.slice_launch import SliceLaunch, SliceSpec, prepare_slice
from tests.support.docker_engine import DockerEngine
from tests.support.ports import free_ports
from tests.support.runtime_contract import Kit, RuntimeContract, until
from tests.support.triton_process import MODELS, expected, heldout, hosted
from trefoil.core.errors import BinaryMissing, StartError, Unavailable
from trefoil.runtime.clock import WallClock

pytestmark = [pytest.mark.integration, pytest.mark.slow]
READY_S = 60.0
GPU = "MIG-4f9f4a3a-41ff-5b5c-8d0a-6b2f3f7d1c55"


@pytest.fixture
def runtime(docker_engine: DockerEngine) -> Iterator[Callable[..., DockerRuntime]]:
    """Makes runtimes of a node of the test's own, as successive agents would."""

    def make(**changes: object) -> DockerRuntime:
        given = {"cluster": "test", "node": "node0", "docker_image": docker_engine.image, "docker_gpu": "none"}
        return DockerRuntime(Engine(docker_engine.url), PowerAgentSettings(**{**given, **changes}))

    yield make
    for container in docker_engine.containers():
        container.remove(v=True, force=True)


class TestDockerRuntime(RuntimeContract):
    @pytest.fixture
    def kit(self, runtime: Callable[..., DockerRuntime], docker_engine: DockerEngine, tmp_path: Path) -> Kit:
        def pid(triton: RunningTriton) -> int:
            return int(docker_engine.client.containers.get(triton.id).attrs["State"]["Pid"])

        return Kit(runtime, "python3", tmp_path, pid=pid, host="0.0.0.0")


def launch(
    runtime: DockerRuntime, folder: Path, version: int = 2, name: str = "slice", **limits: object
) -> SliceLaunch:
    ports = free_ports(2)
    spec = SliceSpec(name, folder / "slices" / name, MODELS, [hosted(version)], *ports, gpu_uuid="", **limits)
    return prepare_slice(runtime.install(), spec)


async def infer(started: SliceLaunch, version: int, images: np.ndarray) -> np.ndarray:
    server = TritonClient(started.grpc_target, started.metrics_url, started.repository, WallClock())
    await server.wait_ready([hosted(version)], READY_S)
    await server.close()
    request = service_pb2.ModelInferRequest(model_name="digits")
    request.inputs.add(name="IMAGE", datatype="UINT8", shape=images.shape)
    request.raw_input_contents.append(images.tobytes())
    async with grpc.aio.insecure_channel(started.grpc_target) as channel:
        reply = await service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request, timeout=10)
    return np.frombuffer(reply.raw_output_contents[0], "<f4").reshape(-1, 10)


def leader(container: Container) -> int:
    """Its first process, by the number that it has on this machine."""
    container.reload()
    return int(container.attrs["State"]["Pid"])


# What a command prints in a container may be lost: the engine ends the stream of a short one before it has read it, and
# says exit code 0. So a command says what it found by its exit code, or is watched from outside.
TOUCH = """
import sys
try:
    open(sys.argv[1], "w")
except OSError as error:
    sys.exit(error.errno)
"""
BURN = """
while True:
    pass
"""


def begin(engine: DockerEngine, container: Container, code: str, *arguments: str) -> str:
    started = engine.client.api.exec_create(container.id, ["python3", "-c", code, *arguments])["Id"]
    engine.client.api.exec_start(started, detach=True)
    return started


def exit_code(engine: DockerEngine, container: Container, code: str, *arguments: str) -> int:
    started = begin(engine, container, code, *arguments)
    until(lambda: engine.client.api.exec_inspect(started)["ExitCode"] is not None)
    return engine.client.api.exec_inspect(started)["ExitCode"]


def cores_used(engine: DockerEngine, container: Container, cpu_s: float) -> float:
    """How much of a core a process in the container gets at most, until it has had so many CPU seconds."""
    burning = psutil.Process(engine.client.api.exec_inspect(begin(engine, container, BURN))["Pid"])

    def had_s() -> float:
        times = burning.cpu_times()
        return times.user + times.system

    start_s, before_s = time.monotonic(), had_s()
    until(lambda: had_s() >= before_s + cpu_s)
    used_s = had_s() - before_s
    return used_s / (time.monotonic() - start_s)


@pytest.mark.gate
async def test_a_triton_in_a_container_infers_confined_and_ends_when_it_is_told(runtime, docker_engine, tmp_path):
    docker_runtime = runtime()
    started_by = launch(docker_runtime, tmp_path)
    log = tmp_path / "logs" / "slice.log"
    started = docker_runtime.start("slice.g1", started_by, log)
    assert started.alive
    assert started.exit_code is None
    assert abs(started.started_at_s - WallClock().now_s()) < 30
    images, _ = heldout()
    answers = await infer(started_by, 2, images[:8])
    np.testing.assert_allclose(answers, expected(tmp_path)[2][:8], atol=1e-5)

    [container] = docker_engine.containers()
    host = container.attrs["HostConfig"]
    assert container.labels["trefoil.node"] == "node0"
    assert container.labels["trefoil.tag"] == "slice.g1"
    assert host["NetworkMode"] == "trefoil-test-node0"
    assert host["RestartPolicy"]["Name"] == "no"
    assert host["CapDrop"] == ["ALL"]
    assert host["ReadonlyRootfs"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["LogConfig"]["Config"] == {"max-file": "2", "max-size": "16m"}
    assert [mount["RW"] for mount in container.attrs["Mounts"]] == [False, False]
    status = Path(f"/proc/{leader(container)}/status").read_text()
    said = dict(line.split(":\t") for line in status.splitlines() if ":\t" in line)
    assert said["Uid"].split()[0] == "65534"
    assert int(said["CapEff"], 16) == 0
    assert said["NoNewPrivs"] == "1"
    assert exit_code(docker_engine, container, TOUCH, str(started_by.repository / "x")) == errno.EROFS

    with pytest.raises(StartError, match="alive"):
        docker_runtime.forget("slice.g1")
    docker_runtime.stop("slice.g1", kill_after_s=20)
    [ended] = docker_runtime.list()
    assert (ended.alive, ended.exit_code, ended.incarnation) == (False, 0, started.incarnation)
    docker_runtime.stop("slice.g1", kill_after_s=20)
    docker_runtime.forget("slice.g1")
    docker_runtime.forget("slice.g1")
    assert docker_runtime.list() == ()
    assert "Started GRPCInferenceService" in log.read_text()


async def test_the_next_agent_finds_what_runs_and_a_kill_behind_its_back(runtime, docker_engine, tmp_path):
    first = runtime()
    started_by = launch(first, tmp_path)
    started = first.start("slice.g1", started_by, tmp_path / "log")
    elsewhere = runtime(node="node1")
    assert elsewhere.list() == ()

    second = runtime()
    assert second.list() == (started,)
    assert second.start("slice.g1", started_by, tmp_path / "log") == started
    with pytest.raises(StartError, match=r"another command.*Remedy: stop it first"):
        second.start("slice.g1", launch(second, tmp_path, name="other"), tmp_path / "log")
    await infer(started_by, 2, heldout()[0][:1])

    [container] = docker_engine.containers()
    container.kill("SIGKILL")
    until(lambda: not second.list()[0].alive)
    assert second.list()[0].exit_code == -9
    container.start()  # somebody's hand: another life, whose counters begin again
    until(lambda: second.list()[0].alive)
    assert second.list()[0].incarnation != started.incarnation
    container.kill("SIGKILL")
    until(lambda: not second.list()[0].alive)
    again = second.start("slice.g1", started_by, tmp_path / "log")
    assert again.alive
    assert again.id != started.id
    assert len(docker_engine.containers()) == 1
    await infer(started_by, 2, heldout()[0][:1])
    container = docker_engine.containers()[0]
    container.pause()  # as a process that hangs in a driver: SIGTERM cannot reach it
    stopping = time.monotonic()
    second.stop("slice.g1", kill_after_s=0.5)
    assert time.monotonic() - stopping < 10
    assert second.list()[0].exit_code == -9
    container.remove()
    assert second.list() == ()


async def test_a_cpu_slice_computes_on_its_cores_or_its_share_only(runtime, docker_engine, tmp_path):
    docker_runtime = runtime()
    pinned = launch(docker_runtime, tmp_path, name="pinned", cpu_cores=(0,))
    quota = launch(docker_runtime, tmp_path, name="quota", cpu_quota=0.3)
    docker_runtime.start("pinned.g1", pinned, tmp_path / "log")
    docker_runtime.start("quota.g1", quota, tmp_path / "log")
    by_tag = {container.labels["trefoil.tag"]: container for container in docker_engine.containers()}
    await infer(pinned, 2, heldout()[0][:1])
    assert os.sched_getaffinity(leader(by_tag["pinned.g1"])) == {0}
    assert by_tag["pinned.g1"].attrs["HostConfig"]["CpusetCpus"] == "0"
    assert by_tag["quota.g1"].attrs["HostConfig"]["NanoCpus"] == 300_000_000
    await infer(quota, 2, heldout()[0][:1])  # it has started
    assert cores_used(docker_engine, by_tag["quota.g1"], cpu_s=0.6) < 0.36
    with pytest.raises(StartError, match="plan only cores"):
        docker_runtime.start(
            "far.g1", launch(docker_runtime, tmp_path, name="far", cpu_cores=(4000,)), tmp_path / "log"
        )
    assert {one.tag for one in docker_runtime.list()} == {"pinned.g1", "quota.g1"}


def test_what_is_missing_is_named_with_its_remedy(runtime, docker_engine, tmp_path):
    with pytest.raises(Unavailable, match=r"no Docker engine answers at unix:///nowhere.*systemctl start docker"):
        DockerRuntime(Engine("unix:///nowhere"), PowerAgentSettings(docker_image="x")).list()
    with pytest.raises(StartError, match=r"trefoil-test/none:1 is not on this machine.*docker pull"):
        runtime(docker_image="trefoil-test/none:1").image()
    empty = tmp_path / "empty.tar"
    with tarfile.open(empty, "w") as tar:
        tar.addfile(tarfile.TarInfo("readme"))
    docker_engine.client.api.import_image(src=str(empty), repository="trefoil-test/empty", tag="1")
    with contextlib.ExitStack() as undo:
        undo.callback(docker_engine.client.images.remove, "trefoil-test/empty:1")
        with pytest.raises(BinaryMissing, match=r"no /opt/tritonserver/bin/tritonserver"):
            runtime(docker_image="trefoil-test/empty:1").image()
    assert docker_engine.containers() == []
    without_toolkit = {
        "runtime": r"docker_gpu = 'runtime': the engine has no runtime nvidia.*nvidia-container-toolkit",
        "request": r"could not select device driver.*nvidia-container-toolkit",
        "cdi": r"docker_gpu = 'cdi': the engine \(Docker .*\) hands out no CDI devices\. Remedy: take Docker 28",
    }
    for method, refusal in without_toolkit.items():
        real = runtime(docker_gpu=method)
        with pytest.raises(StartError, match=refusal):
            real.start("gpu.g1", replace(launch(real, tmp_path), gpu_uuid=GPU), tmp_path / "log")
        assert docker_engine.containers() == []

"""Engines that already run, under a power agent: adopted, watched, woken, put to sleep, never started otherwise."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.support.fast_cluster import NODE, FastCluster, Stage
from tests.support.openai_engine import MODEL
from tests.support.ports import free_ports
from tests.support.special_models import CONFIGS, SpecialTriton
from tests.support.triton_process import MODELS, hosted
from trefoil.core.common import Revision
from trefoil.core.device_types import WHOLE, engine_slice
from trefoil.core.fleet import DeviceState, DeviceStatus, Hosted, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice
from trefoil.core.plan_check import sealed
from trefoil.runtime.given.llm_backends import complete_embeddings

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
TINY = Hosted("chat", "tiny", 1, 0, 1, 1, 4)
ENGINE = SliceKey(f"{NODE}/gpu0", engine_slice("chat", "tiny"), 0, 1)
DIGITS = SliceKey(f"{NODE}/gpu1", WHOLE, 0, 1)
FAMILY = """
name = "chat"
metric = "accuracy"
generative = true
tokens_mean = 8
[classes.""]
percentile = 95.0
latency_ms = 2000.0
[[variants]]
name = "tiny"
version = 1
accuracy = 0.6
accuracy_source = "stated"
memory_mib = 128
load_s = 1.0
macs = 0
licence = "none"
"""


class Node:
    """A node of two T4s: an engine has the first, digits are served on the second."""

    def __init__(
        self,
        stage: Stage,
        folder: Path,
        key: str = "",
        config: str = 'backend: "openai"',
        model: str = MODEL,
        **engine: Any,
    ) -> None:
        self.port, self.number, self.key = free_ports(1)[0], 0, key
        self.process: subprocess.Popen[bytes] | None = None
        models = folder / "models"
        (models / "chat" / "1").mkdir(parents=True)
        (models / "chat" / "config.pbtxt").write_text(f'name: "chat"\n{config}\n')
        (models / "chat" / "family.toml").write_text(FAMILY)
        (models / "chat" / "1" / "engine.json").write_text(json.dumps({"model": model}))
        for name in ("digits", "_shared"):
            (models / name).symlink_to(MODELS / name)
        self.address = f"http://127.0.0.1:{self.port}/v1"
        told = {"family": "chat", "variant": "tiny", "address": self.address, "devices": ["gpu0"], **engine}
        table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in told.items())
        settings: dict[str, Any] = {"model_repository": str(models), "quiet_probe_s": 10.0}
        settings["engines"] = f"[{{{table}}}]"
        self.cluster = FastCluster(stage, devices=("Tesla T4", "Tesla T4"), **settings)

    def start_engine(self) -> None:
        """Returns when it listens."""
        arguments = [sys.executable, "-m", "tests.support.openai_engine", str(self.port), self.key]
        self.process = subprocess.Popen(arguments, cwd=ROOT)
        deadline_s = time.monotonic() + 60
        while subprocess.run(["curl", "-s", "-o", "/dev/null", f"{self.address}/models"], check=False).returncode:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)

    def kill_engine(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def plan(self, *parts: PlannedSlice) -> NodePlan:
        self.number += 1
        devices = []
        for name in (ENGINE.device, DIGITS.device):
            own = tuple(part for part in parts if part.key.device == name)
            devices.append(PlannedDevice(name, DeviceState.AWAKE if own else DeviceState.ASLEEP, own))
        return sealed(NodePlan(node=NODE, devices=tuple(devices)), Revision(1, self.number))

    def go(self, *parts: PlannedSlice) -> None:
        self.cluster.apply(self.plan(*parts))

    def device(self) -> DeviceStatus:
        return next(d for d in self.cluster.status().devices if d.device == ENGINE.device)

    def slice(self, key: SliceKey = ENGINE) -> SliceStatus | None:
        return next((s for d in self.cluster.status().devices for s in d.slices if s.key == key), None)

    def until_state(self, state: SliceState | None, key: SliceKey = ENGINE, why: str = "") -> None:
        def reached() -> bool:
            found = self.slice(key)
            return (found and found.state) == state and why in (found.why if found else "")

        self.cluster.until(reached, f"{key.name} to be {state} {why}")


@pytest.fixture
def node(stage: Stage, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Node]:
    made = Node(stage, tmp_path, **getattr(request, "param", {}))
    try:
        yield made
    finally:
        made.cluster.close()
        if made.process is not None:
            made.kill_engine()


CHAT, OTHER = PlannedSlice(ENGINE, (TINY,), 4), PlannedSlice(DIGITS, (hosted(1),), 2)


@pytest.mark.gate
def test_an_engine_is_adopted_outlives_its_agent_and_is_missed_where_it_is_gone(node):
    assert node.device().type.name == "Tesla T4:less:engine:chat:tiny"
    node.go(CHAT, OTHER)
    node.until_state(SliceState.FAILED, why="failed to connect to http://127.0.0.1")
    node.until_state(SliceState.READY, DIGITS)
    node.start_engine()
    node.until_state(SliceState.READY)
    before = node.slice()
    assert before.grpc_target == f"{node.address}#{MODEL}"
    node.cluster.kill_agent()
    node.cluster.start_agent()
    node.until_state(SliceState.READY)
    assert (node.slice().generation, node.slice().grpc_target) == (before.generation, before.grpc_target)
    node.kill_engine()
    node.until_state(SliceState.FAILED, why="failed to connect")
    assert node.slice(DIGITS).state == SliceState.READY, "others are unharmed"
    node.start_engine()
    node.until_state(SliceState.READY)
    whole = SliceKey(ENGINE.device, WHOLE, 0, 1)
    for wrong, why in ((PlannedSlice(ENGINE, (hosted(1),), 2), "serves its own variant alone"),
                       (PlannedSlice(whole, (hosted(1),), 2), "has no slice type 'whole'")):  # fmt: skip
        with pytest.raises(grpc.RpcError, match=why):
            node.go(wrong, OTHER)
    node.go(OTHER)
    node.until_state(None)
    assert node.process.poll() is None, "without a command it is not put to sleep"


WAKE = "echo woken >> {0}/log; cd {1}; {2} -m tests.support.openai_engine {3} & echo $! > {0}/pid"
SLEEP = "echo slept >> {0}/log; kill $(cat {0}/pid)"


def test_commands_wake_an_engine_and_put_it_to_sleep(stage, tmp_path):
    shell = ["/bin/sh", str(tmp_path / "wake.sh")], ["/bin/sh", str(tmp_path / "sleep.sh")]
    node = Node(stage, tmp_path, wake=shell[0], sleep=shell[1], command_timeout_s=60.0)
    try:
        for name, script in (("wake", WAKE), ("sleep", SLEEP)):
            text = script.format(tmp_path, ROOT, sys.executable, node.port)
            (tmp_path / f"{name}.sh").write_text(text + "\n")
        assert node.device().type.name.endswith(":sleeps")
        node.go(CHAT)
        node.until_state(SliceState.READY)
        node.cluster.kill_agent()
        node.cluster.start_agent()
        node.until_state(SliceState.READY)
        assert (tmp_path / "log").read_text() == "woken\n", "what answers is not woken"
        node.go()
        node.until_state(None)
        assert (tmp_path / "log").read_text() == "woken\nslept\n"
        (tmp_path / "wake.sh").write_text("echo no room on the GPU; exit 3\n")
        node.go(CHAT)
        node.until_state(SliceState.FAILED, why="exited with 3: no room on the GPU. Remedy: run it by hand")
    finally:
        node.cluster.close()
        subprocess.run(shell[1], stderr=subprocess.DEVNULL, check=False)  # what a failure above has left


@pytest.mark.parametrize("node", [{"address": "http://127.0.0.1:9/v1", "variant": "small"}], indirect=True)
def test_an_engine_of_a_variant_that_no_repository_has_closes_its_device(node):
    assert "family chat has no variant small" in node.device().closed
    node.go(OTHER)
    node.until_state(SliceState.READY, DIGITS)


def test_an_engine_of_embeddings_with_a_key_is_proven_by_them(stage, tmp_path):
    config, file = model_config_pb2.ModelConfig(backend="openai"), tmp_path / "key"
    complete_embeddings(config)
    file.write_text("sk-wrong")
    file.chmod(0o600)
    node = Node(stage, tmp_path, "sk-right", text_format.MessageToString(config), key_file=str(file))
    try:
        node.start_engine()
        node.go(CHAT)
        node.until_state(SliceState.FAILED, why="key_file = '[key]': ")
        assert "no such key: [key]. Remedy: put that engine's API key into the file" in node.slice().why
        file.write_text("sk-right")
        node.until_state(SliceState.READY)
        assert node.slice().grpc_target == f"{node.address}?embed#{MODEL}"
        assert "sk-" not in (node.cluster.folder / "agent.log").read_text()
    finally:
        node.cluster.close()
        node.kill_engine()


def test_a_triton_that_already_runs_is_adopted_and_never_touched(stage, tmp_path):
    triton = SpecialTriton(tmp_path, 0, 3, ("scores", "moody"))
    config = 'backend: "triton" max_batch_size: 8\n' + CONFIGS["scores"].replace(' label_filename: "labels.txt"', "")
    node = Node(stage, tmp_path / "node", config=config, model="scores", api="triton", address=triton.target)
    try:
        asyncio.run(triton.ready())
        node.go(CHAT)
        node.until_state(SliceState.READY)
        assert node.slice().grpc_target == f"triton://{triton.target}/chat/1#scores"
        node.go()
        node.until_state(None)
        assert triton.process.poll() is None
        asyncio.run(triton.ready())
        triton.close()
        node.go(CHAT)
        node.until_state(SliceState.FAILED, why="does not infer with scores")
    finally:
        node.cluster.close()
        triton.close()

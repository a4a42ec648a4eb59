"""`trefoil node` against an agent that answers on a real port."""

import json
import threading
from concurrent import futures

import grpc
import pytest
from typer.testing import CliRunner

from protos.power_agent.v1 import power_agent_pb2 as pb
from protos.power_agent.v1 import power_agent_pb2_grpc as pb_grpc
from trefoil.cli.main import app
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import ClockLease, DeviceState, DeviceStatus, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import codec

SLICE = SliceKey("node0/gpu0", "7g.40gb", 0, 8)


class Agent(pb_grpc.PowerAgentServicer):
    """Remembers what it was asked; its device empties when it has been drained."""

    def __init__(self):
        self.asked = []
        self.tokens = set()
        self.cordon = ""
        self.empties = True
        self.metering_ends = threading.Event()

    def node(self):
        slices = () if self.cordon and self.empties else (SliceStatus(SLICE, 3, state=SliceState.READY),)
        device = DeviceStatus(
            "node0/gpu0",
            A100_40GB,
            DeviceState.AWAKE,
            slices,
            clock_mhz=1410,
            clock_lease=ClockLease("node0/gpu0", 210, 705, "me", 4, 99.0),
            drift=("foreign instance 1g.5gb@6",),
            cordon=self.cordon,
        )
        return NodeStatus("node0", "DE", devices=(device,), capabilities=("mig",), highest_epoch_seen=4, simulated=True)

    def GetNode(self, request, context):
        self.tokens.add(dict(context.invocation_metadata()).get("authorization"))
        return pb.GetNodeResponse(node=codec.to_proto(self.node()))

    def WatchNode(self, request, context):
        yield pb.WatchNodeResponse(node=codec.to_proto(self.node()))
        threading.Event().wait(2)

    def Drain(self, request, context):
        self.asked.append(request)
        self.cordon = "" if request.release else request.why
        return pb.DrainResponse(node=codec.to_proto(self.node()))

    def PreviewPlan(self, request, context):
        self.asked.append(request)
        steps = [pb.Step(slice=codec.to_proto(SLICE), verb="create_gi", why="planned")]
        steps.append(pb.Step(slice=codec.to_proto(SliceKey("node0/gpu0")), verb="lock_clock"))
        return pb.PreviewPlanResponse(changed=True, steps=steps)

    def SetClocks(self, request, context):
        self.asked.append(request)
        return pb.SetClocksResponse(lease=request.lease)

    def ReleaseClocks(self, request, context):
        self.asked.append(request)
        return pb.ReleaseClocksResponse()

    def WatchEnergy(self, request, context):
        for seq in (1, 2):
            yield pb.WatchEnergyResponse(sample=codec.to_proto(EnergySample("node0", "node0/gpu0", seq)))
        self.metering_ends.wait()


@pytest.fixture
def agent():
    return Agent()


@pytest.fixture
def ask(agent, monkeypatch):
    monkeypatch.setenv("TREFOIL_TOKEN", "secret")
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_PowerAgentServicer_to_server(agent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield lambda *words: CliRunner().invoke(app, ["node", *words, "--target", f"127.0.0.1:{port}"])
    agent.metering_ends.set()
    server.stop(0)


def test_show_tells_what_a_person_needs_and_json_tells_all(ask, agent):
    said = ask("show").stdout
    for part in ("SIMULATED", "epoch 4", "can: mig", "210-705 MHz by me", "foreign instance 1g.5gb@6", "READY"):
        assert part in said
    found = json.loads(ask("show", "--json").stdout)["node"]
    assert codec.from_plain(NodeStatus, found, "node") == agent.node()
    assert agent.tokens == {"Bearer secret"}


def test_the_token_may_stand_in_a_file_that_others_cannot_read(ask, agent, tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("filed\n")
    path.chmod(0o600)
    monkeypatch.setenv("TREFOIL_TOKEN_FILE", str(path))
    both = ask("show")
    assert (both.exit_code, agent.tokens) == (2, set())
    assert "TREFOIL_TOKEN is set too" in both.stderr
    monkeypatch.delenv("TREFOIL_TOKEN")
    assert ask("show").exit_code == 0
    assert agent.tokens == {"Bearer filed"}
    path.chmod(0o604)
    readable = ask("show")
    assert readable.exit_code == 2
    assert readable.stderr.startswith(
        f"trefoil: TREFOIL_TOKEN_FILE = '{path}': others may read or change it (mode 0604)"
    )
    assert "filed" not in both.stderr + readable.stderr


def test_preview_sends_this_nodes_part_of_the_plan(ask, agent, tmp_path):
    plan = Plan(Revision(4, 2), nodes=(NodePlan(node="other"), NodePlan(node="node0")))
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(codec.to_plain(plan)))
    said = ask("preview", str(path)).stdout
    assert "create_gi" in said
    assert "lock_clock" in said
    assert agent.asked[0].plan.node == "node0"


def test_preview_of_another_clusters_plan_is_refused(ask, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(codec.to_plain(Plan(nodes=(NodePlan(node="other"),)))))
    result = ask("preview", str(path))
    assert result.exit_code == 2
    assert "node = 'node0'" in result.stderr


def test_drain_uses_the_nodes_epoch_and_waits_until_it_is_empty(ask, agent):
    result = ask("drain", "node0/gpu0", "--why", "new fans", "--patience", "7", "--wait", "5")
    assert result.exit_code == 0, result.stderr
    request = agent.asked[0]
    assert (request.device, request.epoch, request.why, request.patience_s) == ("node0/gpu0", 4, "new fans", 7.0)
    assert "new fans" in result.stdout
    assert ask("drain", "--release").exit_code == 0
    assert agent.asked[1].release


def test_a_drain_that_does_not_end_in_time_names_what_is_left(ask, agent):
    agent.empties = False
    result = ask("drain", "--wait", "0.3")
    assert result.exit_code == 2
    assert SLICE.name in result.stderr


def test_clocks_and_unlock_carry_holder_and_epoch(ask, agent):
    assert "600 MHz for 30 s" in ask("clocks", "node0/gpu0", "--max", "600", "--ttl", "30").stdout
    limited = ask("clocks", "node0/gpu0", "--limit", "250.5", "--max", "600", "--ttl", "30").stdout
    assert "0-600 MHz, 250.5 W for 30 s" in limited
    assert ": 250 W for 60 s" in ask("clocks", "node0/gpu0", "--limit", "250").stdout
    assert ask("unlock", "node0/gpu0").exit_code == 0
    held, both, limit, released = agent.asked
    assert (both.lease.max_mhz, both.lease.power_limit_w) == (600, 250.5)
    assert (limit.lease.max_mhz, limit.lease.power_limit_w) == (0, 250.0)
    assert (held.lease.max_mhz, held.lease.epoch, held.lease.holder, held.ttl_s) == (600, 4, "operator", 30.0)
    assert (released.device, released.holder, released.epoch) == ("node0/gpu0", "operator", 4)


def test_energy_prints_one_sample_a_line(ask, agent):
    agent.metering_ends.set()
    lines = ask("energy", "--seconds", "60").stdout.splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 2]


def test_energy_is_watched_for_as_long_as_was_asked(ask):
    result = ask("energy", "--seconds", "0.5")  # the agent would go on
    assert result.exit_code == 0, result.stderr


def test_no_system_and_no_target_is_one_clear_line(tmp_path):
    result = CliRunner().invoke(app, ["node", "show", "--state-dir", str(tmp_path)])
    assert result.exit_code == 2
    assert "Remedy" in result.stderr

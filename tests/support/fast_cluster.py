"""Redis, a simulated node with fake Tritons and the real power agent, which can be killed at any write of its journal.

Everything that a test waits for is polled every few ms; a repartition takes a tenth of a second, a restart about two.
"""

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc

from power_agent.devices.errors import NodeUnreachable
from power_agent.devices.node_client import NodeClient
from power_agent.durability.journal_state import JournalState, replay
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from tests.support.fast_agent import AFTER, ARMED, BEFORE, DIED, ENDED, READY, WHERE, WRITES, Page
from tests.support.ports import free_block, free_ports
from tests.support.redis_server import RedisServer
from tests.support.triton_process import MODELS
from tests.support.zygote import Zygote
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import NodePlan
from trefoil.runtime import codec

__all__ = ["AFTER", "BEFORE", "NODE", "FastCluster", "Stage"]

NODE: Final = "node0"
PORTS_PER_GPU: Final = 16  # two per memory slice
POLL_S: Final = 0.01
SETTLE_S: Final = 60.0

# What is slow on hardware for good reasons is quick here by settings that an operator has; the clock does the rest.
FAST: Final[dict[str, Any]] = {
    "rate": 20.0,
    "health_poll_s": 1.0,
    "drift_poll_s": 4.0,
    "reset_poll_s": 4.0,
    "sample_period_s": 4.0,
    "in_use_retries_max": 5,
    "retry_backoff_max_s": 0.1,
    "lease_ttl_s": 60.0,
    "quiet_probe_s": 1e6,
    "starts_parallel": 8,
    "log_level": "info",
}


class Stage:
    """What many clusters share: one Redis and one zygote."""

    def __init__(self) -> None:
        self.redis = RedisServer()
        self.zygote = Zygote()

    def close(self) -> None:
        """End both, and all that was forked."""
        self.zygote.close()
        self.redis.close()


class FastCluster:
    """One node and one agent. `close` leaves nothing."""

    def __init__(
        self,
        stage: Stage,
        *,
        devices: Sequence[str] = ("A100-SXM4-40GB",) * 2,
        node: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """`node`: more settings of the simulated node; `settings`: of the agent."""
        self._stage = stage
        self._node_settings = dict(node or {})
        self.folder = Path(tempfile.mkdtemp(prefix="trefoil-fast-"))
        self.page = Page(self.folder / "page")
        self.client = NodeClient(self.folder / "node" / "node.sock")
        (admin,) = free_ports(1)
        self.target = f"127.0.0.1:{admin}"
        self._devices = list(devices)
        self._node_pid = self._agent_pid = 0
        self._channel: grpc.Channel | None = None
        self._settings = {
            **FAST,
            "page": str(self.folder / "page"),
            "node": NODE,
            "node_socket": str(self.folder / "node" / "node.sock"),
            "redis_url": stage.redis.url,
            "cluster": self.folder.name,
            "state_dir": str(self.folder / "agent"),
            "model_repository": str(MODELS),
            "triton_port_base": free_block(PORTS_PER_GPU * len(devices)),
            "admin_address": self.target,
            "metrics_address": "",
            **settings,
        }
        self.start_node()
        self.start_agent()

    def settings(self, **settings: Any) -> None:
        """Other settings for the next agent."""
        self._settings |= settings

    # --- life ---------------------------------------------------------------------------------------------------------

    def start_node(self) -> None:
        """The simulated node; returns when it answers."""
        config = {
            "node": NODE,
            "socket": str(self.folder / "node" / "node.sock"),
            "devices": self._devices,
            "model_repository": str(MODELS),
            "call_latency": False,
            "tick_ms": 50.0,
            **self._node_settings,
        }
        self._node_pid = self._stage.zygote.run("node", self.folder / "node.log", **config)
        self.until(self._node_answers, "the node to answer")

    def _node_answers(self) -> bool:
        try:
            self.client.describe()
        except NodeUnreachable:
            return False
        return True

    def kill_node(self) -> None:
        """As the kernel would; all that runs on its slices goes with it."""
        os.kill(self._node_pid, signal.SIGKILL)
        self._stage.zygote.wait(self._node_pid)
        self._node_pid = 0

    def start_agent(self, timeout_s: float = SETTLE_S, *, or_died: bool = False) -> float:
        """The agent; returns the seconds until it has adopted everything and serves (or has died as it was told)."""
        started_s = time.monotonic()
        self.launch_agent()
        self.until_agent_serves(timeout_s, or_died=or_died)
        return time.monotonic() - started_s

    def launch_agent(self) -> None:
        """The agent's process, as far as it comes."""
        self.page[READY] = self.page[ENDED] = 0
        self._agent_pid = self._stage.zygote.run("agent", self.folder / "agent.log", **self._settings)

    def until_agent_serves(self, timeout_s: float = SETTLE_S, *, or_died: bool = False) -> None:
        """Wait until the agent has adopted everything and serves (or has died as it was told)."""
        self.until(lambda: self.page[READY] == 1 or (or_died and self.died), "the agent to serve", timeout_s)
        if self._channel is not None:
            self._channel.close()
        self._channel = grpc.insecure_channel(self.target, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = power_agent_pb2_grpc.PowerAgentStub(self._channel)

    @property
    def agent_runs(self) -> bool:
        """Whether it was started and not reaped."""
        return self._agent_pid != 0

    def kill_agent(self) -> None:
        """As the kernel would."""
        os.kill(self._agent_pid, signal.SIGKILL)
        self.reap_agent()

    def end_agent(self) -> int:
        """As systemd would; returns the exit code."""
        os.kill(self._agent_pid, signal.SIGTERM)
        return self.reap_agent()

    def reap_agent(self) -> int:
        """Wait for an agent that is dying; returns its exit code, negative for a signal."""
        code = self._stage.zygote.wait(self._agent_pid)
        self._agent_pid = 0
        return code

    def close(self) -> None:
        """End everything of it."""
        if self._channel is not None:
            self._channel.close()
        if self._agent_pid:
            self.kill_agent()
        if self._node_pid:
            self.client.shutdown()
            self._stage.zygote.wait(self._node_pid)
        self.client.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- crash points -------------------------------------------------------------------------------------------------

    def arm(self, write: int, where: int) -> None:
        """Let the agent die before or after that write of its journal, counted from now; 0: let it live."""
        self.page[ARMED] = self.page[DIED] = 0
        self.page[WRITES] = 0
        self.page[WHERE] = where
        self.page[ARMED] = write

    @property
    def writes(self) -> int:
        """Journal writes since `arm`, of this and later agents."""
        return self.page[WRITES]

    @property
    def died(self) -> bool:
        """Whether the armed write has ended the agent."""
        return self.page[DIED] != 0

    # --- what is asked ------------------------------------------------------------------------------------------------

    def apply(self, plan: NodePlan) -> Any:
        """Send a plan; raises grpc.RpcError."""
        return self.stub.Apply(power_agent_pb2.ApplyRequest(plan=codec.to_proto(plan)), timeout=30, wait_for_ready=True)

    def status(self) -> NodeStatus:
        """What the agent says of its node."""
        try:
            answer = self.stub.GetNode(power_agent_pb2.GetNodeRequest(), timeout=30, wait_for_ready=not self.died)
        except grpc.RpcError as error:
            if self.died:
                raise
            raise AssertionError(f"the agent does not answer:\n{self.tail()}") from error
        found: NodeStatus = codec.from_proto(answer.node)
        return found

    def settle(self, plan: NodePlan, timeout_s: float = SETTLE_S) -> None:
        """Wait until the agent says that nothing is left to do for the plan."""
        self.until(lambda: self.status().applied == plan.revision, f"plan {plan.revision}", timeout_s)

    def inspect(self) -> dict[str, Any]:
        """What is really there: instances, locks and limits of the driver, processes."""
        found: dict[str, Any] = self.client.call("inspect")
        return found

    def journal_state(self) -> JournalState:
        """What the journal on disk holds."""
        data = (self.folder / "agent" / "journal.jsonl").read_bytes()
        data = data[: data.rindex(b"\n") + 1]  # of a line that is being written a reader may see the beginning
        load = json.loads(data.splitlines()[-1].partition(b"\t")[0])["load"]
        return replay(data, load)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def until(self, check: Callable[[], bool], what: str, timeout_s: float = SETTLE_S) -> None:
        """Poll."""
        deadline_s = time.monotonic() + timeout_s
        while not check():
            assert not self.page[ENDED], f"the agent ended; waited for {what}:\n{self.tail()}"
            assert time.monotonic() < deadline_s, f"waited {timeout_s:g} s for {what}:\n{self.tail()}"
            time.sleep(POLL_S)

    def tail(self, characters: int = 6000) -> str:
        """The end of both logs, and what is there."""
        logs = [self.folder / "node.log", self.folder / "agent.log"]
        texts = [f"--- {log.name}\n{log.read_text()[-characters:]}" for log in logs if log.exists()]
        return "\n".join(texts)

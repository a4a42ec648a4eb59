"""The controller as a process between a real Redis and fakes: an agent, a carbon feed, a dispatcher with a load."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from tests.support.fake_agent import FakeAgent
from tests.support.ports import free_ports
from tests.support.redis_server import RedisServer
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Lease
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow, SliceLoad, TableAck
from trefoil.core.latency import build_histogram
from trefoil.core.plan import DecisionRecord, Plan, Rollout
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
TICK_S = 0.25

SETTINGS = """
redis_url = "{url}"
state_dir = "{folder}/controller"
admin_address = "127.0.0.1:{port}"
model_repository = "model_repository"
plan_key_file = "{folder}/plan.key"
policy = "{policy}"
planner = "{planner}"
mode = "{mode}"
seed = 7
move_horizon_s = {horizon}
log_json = true
[demand_initial_per_s]
digits = 26.0
[carbon]
zone = "demo"
wait_s = 3.0
[triggers]
load_hold_s = 3.0
loss_hold_s = 1.0
[rollout]
retry_s = 1.0
ready_timeout_s = 20.0
[[objectives]]
family = "digits"
type = "budget"
slo.percentile = 95.0
slo.latency_ms = 75.0
accuracy.floor = 0.955
accuracy.hard_floor = 0.88
availability.replicas_min = 1
availability.spread_min = 1
window_s = 120.0
"""


class ControlPlane:
    """`await start()`, then drive `intensity` and `rate_per_s`; `await close()` leaves nothing."""

    def __init__(
        self,
        policy: str = "exact",
        mode: str = "act",
        planner: str = "",
        horizon_s: float = 600.0,
        redis_port: int = 0,
    ) -> None:
        """`redis_port`: by which controllers reach Redis, each under its own name."""
        self.folder = Path(tempfile.mkdtemp(prefix="trefoil-control-"))
        self.redis = RedisServer(redis_port)
        self.port = free_ports(1)[0]
        self.state = State.connect(self.redis.url, "default", timeout_s=30.0)
        self.agent = FakeAgent(self.redis.url)
        self.intensity = 300.0
        self.rate_per_s = 26.0
        """They come evenly: now and then a few seconds of a random stream look like another load, and start a plan."""
        self.latency_ms = 30.0
        self._settings = SETTINGS.format(
            url=f"redis://127.0.0.1:{redis_port}/0?client_name=first" if redis_port else self.redis.url,
            folder=self.folder,
            port=self.port,
            policy=policy,
            mode=mode,
            planner=planner,
            horizon=horizon_s,
        )
        key = self.folder / "plan.key"
        key.touch(0o600)
        key.write_text(f"{'k' * 32}\n")
        self._clock = WallClock()
        self._rng = np.random.default_rng(3)
        self._tasks: list[asyncio.Task[None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")
        self.stub = controller_pb2_grpc.ControllerStub(self.channel)
        self.dispatcher_id = "disp-1"
        self._due = 0.0  # of a request that is not whole yet

    async def start(self) -> None:
        (self.folder / "controller.toml").write_text(self._settings)
        await self.agent.start()
        self._tasks = [asyncio.create_task(self._feed()), asyncio.create_task(self._dispatch())]
        self.start_controller()
        await self.until(lambda: self._answers(), 60)

    def start_controller(self) -> None:
        self._process = self._controller("controller")

    def start_second(self) -> "tuple[subprocess.Popen[bytes], int]":
        """One more controller, on a separate disk; its process and port."""
        port = free_ports(1)[0]
        text = self._settings.replace(f":{self.port}", f":{port}").replace("client_name=first", "client_name=second")
        (self.folder / "second.toml").write_text(text.replace(f"{self.folder}/controller", f"{self.folder}/second"))
        return self._controller("second"), port

    def _controller(self, name: str) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "controller", "--config", str(self.folder / f"{name}.toml")],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "GRPC_VERBOSITY": "ERROR"},
            )

    def signal_controller(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill_controller(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop_controller(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None and self._process.poll() is None:
            self.kill_controller()
        await self.channel.close()
        await self.agent.close()
        await self.state.close()
        self.redis.close()
        shutil.rmtree(self.folder)

    @property
    def log(self) -> str:
        return (self.folder / "controller.log").read_text()

    async def until(self, done: Callable[[], Any], timeout_s: float = 60) -> Any:
        """Wait for a condition (plain or awaitable) and return what it gave."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = done()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return found
            assert self._process is None or self._process.poll() is None, f"the controller ended:\n{self.log[-4000:]}"
            assert time.monotonic() < deadline_s, f"not within {timeout_s} s; {self.log[-6000:]}"
            await asyncio.sleep(0.05)

    async def plan(self) -> Plan | None:
        """The plan in force, from the controller."""
        response = await self.stub.GetPlan(controller_pb2.GetPlanRequest(), timeout=30)
        return codec.from_proto(response.plan) if response.HasField("plan") else None

    async def rollout(self) -> Rollout:
        response = await self.stub.GetPlan(controller_pb2.GetPlanRequest(), timeout=30)
        return codec.from_proto(response.rollout)

    async def decisions(self) -> list[DecisionRecord]:
        found = await self.state.stream(self.state.keys.decisions(), DecisionRecord)
        return [record for _, record in found]

    async def settled(self) -> bool:
        """The last rollout is done and the agent runs exactly what the plan wants."""
        rollout = await self.rollout()
        plan = await self.plan()
        if plan is None or rollout.state.name != "DONE" or rollout.target.number < plan.revision.number:
            return False
        wanted = {(p.key, p.hosted) for n in plan.nodes for d in n.devices for p in d.slices}
        return wanted == {(k, s.hosted) for k, s in self.agent.slices.items() if s.state.name == "READY"}

    async def _answers(self) -> bool:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self.stub.GetPlan(controller_pb2.GetPlanRequest(), timeout=5)
            return True
        return False

    async def _feed(self) -> None:
        lease: Lease | None = None
        last = 0.0
        while True:
            with contextlib.suppress(Exception):  # Redis may be down in a test
                if lease is None or not await self.state.renew(lease):
                    lease = await self.state.acquire("feed:demo", "fake")
                if lease is not None:
                    now_s = self._clock.now_s()
                    reading = CarbonReading(
                        SERIES, now_s, now_s + 14_400, self.intensity, Quality.MEASURED, observed_at_s=now_s
                    )
                    await self.state.put(lease, self.state.keys.carbon_now(SERIES), reading)
                    if self.intensity != last:
                        last = self.intensity
                        await self.state.append(lease, self.state.keys.carbon_history(SERIES), reading, 1000)
            await self._clock.sleep(TICK_S)

    async def _dispatch(self) -> None:
        seq, before_s = 0, self._clock.now_s()
        while True:
            await self._clock.sleep(TICK_S)
            now_s = self._clock.now_s()
            seq += 1
            with contextlib.suppress(Exception):  # Redis may be down in a test
                plan = await self.state.get(self.state.keys.plan(), Plan)
                if plan is None:
                    continue
                targets = [t for r in plan.routes for t in r.targets]
                loads = tuple(SliceLoad(t.slice, 0) for t in targets)
                ack = TableAck(self.dispatcher_id, 0, plan.revision, loads, now_s)
                await self.state.put_unfenced(self.state.keys.ack(self.dispatcher_id, 0), ack)
                window = self._window(plan, seq, before_s, now_s)
                await self.state.append_unfenced(self.state.keys.load(self.dispatcher_id, 0), window)
            before_s = now_s

    def _window(self, plan: Plan, seq: int, before_s: float, now_s: float) -> LoadWindow:
        live = [t for r in plan.routes for t in r.targets if not t.draining]
        self._due += self.rate_per_s * (now_s - before_s)
        arrived = int(self._due)
        self._due -= arrived
        cells = [LoadCell(LoadKey("digits"), arrived=arrived)]
        weights = np.array([t.weight for t in live])
        split = self._rng.multinomial(arrived, weights / weights.sum()) if live else []
        for target, count in zip(live, split, strict=False):
            n = int(count)
            within = n if self.latency_ms <= 75 else 0
            cells.append(
                LoadCell(
                    LoadKey("digits", target.variant, target.slice),
                    answered=n,
                    items=n,
                    within_slo=within,
                    latency=build_histogram([self.latency_ms] * n),
                )
            )
        return LoadWindow(self.dispatcher_id, 0, seq, before_s, now_s, plan.revision, tuple(cells))

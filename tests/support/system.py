"""The whole system as a user runs it: `trefoil up` in a separate folder on ports of its own, asked by command."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import psutil
from typer.testing import CliRunner

from power_agent.devices.node_client import NodeClient
from tests.support.ports import free_offset
from tests.support.triton_process import MODELS, ROOT
from trefoil.cli.load.generator import LoadSpec, RateProfile, run_load
from trefoil.cli.load.result import LoadResult
from trefoil.cli.main import app
from trefoil.cli.run import processes
from trefoil.cli.run.state_directory import Launch, StatePaths
from trefoil.cli.system_client import SystemClient, connect_system
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import SliceKey, SliceStatus
from trefoil.core.plan import Plan
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import entry_order

TREFOIL = Path(sys.executable).parent / "trefoil"
COMMAND_TIMEOUT_S = 240.0
POLL_S = 0.2
FAMILY = "digits"
DEADLINE_S = 30.0  # of requests whose time is not what a test asks about: a busy machine may queue them for seconds


class RunningSystem:
    """Start with `up()`, end with `close()`; nothing outlives it, whatever happened in between."""

    def __init__(self, settings: Mapping[str, object] | None = None) -> None:
        self.state_dir = Path(tempfile.mkdtemp(prefix="trefoil-sys-"))
        self.port_offset = free_offset()
        self._settings = dict(settings or {})
        self.started: dict[str, Any] = {}
        self.up_took_s = 0.0

    # Commands

    def up(self) -> dict[str, Any]:
        """`trefoil up`; returns what it printed."""
        sets = [word for key, value in self._settings.items() for word in ("--set", f"{key}={value}")]
        began_s = time.monotonic()
        self.started = self.ask("up", "--port-offset", str(self.port_offset), *sets)
        self.up_took_s = time.monotonic() - began_s
        return self.started

    def ask(self, *words: str) -> Any:
        """A command that must succeed, with --json; returns the document."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, f"trefoil {' '.join(words)}: {done.stderr}{done.stdout}"
        return json.loads(done.stdout)

    def look(self, *words: str) -> Any:
        """As `ask`, in a thread of this process: a new process costs a second each time."""
        argv = [*words, "--json", "--state-dir", str(self.state_dir)]
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(CliRunner().invoke, app, argv).result(COMMAND_TIMEOUT_S)
        assert done.exit_code == 0, (words, done.output, done.exception)
        return json.loads(done.stdout)

    def refused(self, *words: str, state_dir: Path | None = None) -> str:
        """A command that must be refused with exit code 2 and one line; returns the line."""
        done = self.run(*words, state_dir=state_dir)
        assert (done.returncode, done.stdout) == (2, ""), done
        assert done.stderr.startswith("trefoil: "), done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def run(self, *words: str, state_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Any command, as a user types it."""
        argv = [str(TREFOIL), *words, "--state-dir", str(state_dir or self.state_dir)]
        env = {name: value for name, value in os.environ.items() if not name.startswith("TREFOIL_")}
        return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)

    def pin(self, plan: Mapping[str, Any]) -> None:
        """Pin a plan as `trefoil plan --json` printed it."""
        path = self.state_dir / "pinned.json"
        path.write_text(json.dumps(plan))
        self.ask("pin", str(path))

    def wait_for_rollout(self, timeout_s: float = 90.0) -> dict[str, Any]:
        """Until the plan in force is what runs; returns `trefoil status`."""
        give_up_s = time.monotonic() + timeout_s
        while (status := self.look("status"))["rollout"] != "done":
            assert time.monotonic() < give_up_s, f"rollout {status['rollout']} after {timeout_s:g} s"
            time.sleep(POLL_S)
        found: dict[str, Any] = status
        return found

    def wait_for_services(self, timeout_s: float = 60.0) -> dict[str, bool]:
        """Until `trefoil status` calls all services healthy; on a busy machine one may not answer within its second."""
        give_up_s = time.monotonic() + timeout_s
        while not all((found := self.look("status")["services"]).values()):
            assert time.monotonic() < give_up_s, f"{found} after {timeout_s:g} s"
            time.sleep(POLL_S)
        services: dict[str, bool] = found
        return services

    # What runs

    @property
    def launch(self) -> Launch:
        return StatePaths(self.state_dir.resolve()).running()

    @property
    def inference(self) -> str:
        return self.launch.addresses["inference"]

    def node(self) -> NodeClient:
        """The simulated node itself; close it."""
        return NodeClient(self.launch.node_socket)

    def processes(self) -> list[psutil.Process]:
        """Supervisor, Redis, node, services, Tritons and their stubs."""
        supervisor = psutil.Process(self.launch.supervisor.pid)
        return [supervisor, *supervisor.children(recursive=True)]

    def service_pid(self, name: str) -> int:
        """Of the service's last start."""
        pid: int = json.loads((self.state_dir / "run" / f"{name}.json").read_text())["pid"]
        return pid

    def log(self, name: str, lines: int = 30) -> str:
        return processes.last_log_lines(self.state_dir / "logs" / f"{name}.log", lines)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[SystemClient]:
        """Redis and the controller, as a command sees them."""
        async with connect_system(self.state_dir) as system:
            yield system

    # End

    def close(self) -> None:
        """`trefoil down`, then by force what it may have left."""
        launch = StatePaths(self.state_dir.resolve()).read_launch()
        try:
            self.run("down")
        finally:
            if launch is not None:
                left = processes.descendants(launch.launch_id)
                for identity in (*left, launch.supervisor):
                    identity.send(signal.SIGKILL)
            shutil.rmtree(self.state_dir, ignore_errors=True)


@contextmanager
def running_system(settings: Mapping[str, object], *, frozen: bool = False) -> Iterator[RunningSystem]:
    """A system whose first plan is carried out (`frozen`: and stays); it is closed at the end."""
    system = RunningSystem(settings)
    try:
        system.up()
        if frozen:
            system.ask("freeze")
        system.wait_for_rollout()
        yield system
    finally:
        system.close()


def pss_bytes(found: list[psutil.Process]) -> dict[str, int]:
    """Proportional set size by kind of process: shared pages are counted once."""
    total: Counter[str] = Counter()
    for process in found:
        try:
            name = Path(process.cmdline()[0]).name
            if name.startswith("python"):
                name = process.cmdline()[2]
            total[name] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, IndexError):
            continue  # it ended between the listing and the look
    return dict(total)


async def slices(system: SystemClient) -> dict[SliceKey, SliceStatus]:
    """All slices of all nodes, as their agents publish them."""
    return {part.key: part for node in await system.nodes() for device in node.devices for part in device.slices}


async def plan_in_force(system: SystemClient) -> Plan:
    answer = await system.plan()
    plan: Plan = codec.from_proto(answer.plan)
    return plan


async def until(check: Callable[[], Awaitable[Any]], timeout_s: float, what: str = "not within") -> Any:
    """Poll until the check gives something; returns that."""
    give_up_s = time.monotonic() + timeout_s
    while not (found := await check()):
        assert time.monotonic() < give_up_s, f"{what} {timeout_s:g} s"
        await asyncio.sleep(0.05)
    return found


async def load(target: str, rate_per_s: float, duration_s: float, stop: asyncio.Event | None = None) -> LoadResult:
    """Poisson arrivals of labelled images, by the project's load generator; `stop` ends them early."""
    profile, heldout = RateProfile.constant(rate_per_s, duration_s), MODELS / FAMILY / "heldout.npz"
    spec = LoadSpec(profile, heldout, FAMILY, deadline_s=DEADLINE_S)
    return await run_load(spec, target, clock=WallClock(), stop=stop)


async def windows(system: SystemClient, since_s: float) -> list[LoadWindow]:
    """Load windows of all dispatcher workers that began after a time."""
    found: list[LoadWindow] = []
    for name in await system.state.names(system.state.keys.load_prefix()):
        found += [window for _, window in await system.state.stream(name, LoadWindow, count=10_000)]
    return [window for window in found if window.starts_at_s >= since_s]


async def begun_anew(system: SystemClient, timeout_s: float = 60.0) -> float:
    """Once every worker has begun a window: windows since the time returned hold what is asked from now on, all of it
    and nothing else."""
    since_s = time.time()

    async def check() -> bool:
        acks = await system.state.scan(system.state.keys.ack_prefix(), TableAck)
        begun = {(window.dispatcher, window.worker) for window in await windows(system, since_s)}
        return bool(acks) and begun >= {(ack.dispatcher, ack.worker) for ack in acks.values()}

    await until(check, timeout_s, "not every worker has begun a window within")
    return since_s


async def energy_samples(system: SystemClient) -> list[EnergySample]:
    """The whole energy stream of the node."""
    key = system.state.keys.energy(system.launch.node)
    return [sample for _, sample in await system.state.stream(key, EnergySample, count=100_000)]


async def metered_until(system: SystemClient, at_s: float, timeout_s: float = 60.0) -> list[EnergySample]:
    """All samples, once every device has one that ends after the given time."""

    async def check() -> list[EnergySample] | None:
        latest: dict[str, float] = {}
        for sample in (found := await energy_samples(system)):
            latest[sample.device] = max(latest.get(sample.device, 0.0), sample.ends_at_s)
        return found if latest and min(latest.values()) > at_s else None

    samples: list[EnergySample] = await until(check, timeout_s, "no energy samples within")
    return samples


async def booked(client: SystemClient, tokens: int) -> tuple[dict[str, float], float] | None:
    """Sums of the only family, to which all is booked, and what counters say until the sample that was booked last."""
    keys = client.state.keys
    before = await client.state.fields(keys.accounted())
    sums: Counter[str] = Counter()
    for name in await client.state.names(keys.totals_prefix()):
        sums.update(await client.state.totals(name))
    counted = 0.0
    for entry, sample in await client.state.stream(keys.energy(client.launch.node), EnergySample, count=100_000):
        if entry_order(entry) <= entry_order(before[client.launch.node]):
            counted += sample.counter_j
    same = before == await client.state.fields(keys.accounted())
    return (dict(sums), counted) if same and sums["tokens"] >= tokens else None

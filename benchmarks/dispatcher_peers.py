"""What stands between a client and one Triton in the benchmark of the dispatcher: started here, ended here.

`small` and `large` are models of one Triton that answer ten numbers at once, whatever they are sent: what is compared
is the way there and back.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from power_agent.triton.installation import find_triton, prepare_triton
from tests.support.dispatching import Plane
from tests.support.ports import free_ports
from tests.support.redis_server import RedisServer
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Basis, Revision
from trefoil.core.device_types import A100_40GB
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.fleet import DeviceState, DeviceStatus, Hosted, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import Plan, Route, RouteTarget
from trefoil.installation import CHECKOUT
from trefoil.runtime.clock import WallClock
from trefoil.runtime.state import State

SLICES: Final = 4  # of the dispatcher's table; all are the same Triton
CREDITS: Final = 8
BEAT_S: Final = 1.0
SERIES: Final = Series("bench", Method.AVERAGE, Factors.LIFECYCLE)
RAY: Final = "Ray Serve"
DISPATCHERS: Final = {"dispatcher": 1, "dispatcher, 2 workers": 2}
"""Workers of each."""
MODELS: Final = {"small": ("TYPE_UINT8", "8, 8"), "large": ("TYPE_FP32", "3, 224, 224")}

_CONFIG: Final = """\
name: "{name}"
backend: "python"
max_batch_size: 8
input [ {{ name: "IMAGE" data_type: {kind} dims: [ {dims} ] }} ]
output [ {{ name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ 10 ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""
_MODEL: Final = """\
import numpy
import triton_python_backend_utils as triton

class TritonPythonModel:
    def execute(self, requests):
        def answer(request):
            rows = triton.get_input_tensor_by_name(request, "IMAGE").shape()[0]
            tensor = triton.Tensor("PROBABILITIES", numpy.zeros((rows, 10), numpy.float32))
            return triton.InferenceResponse([tensor])
        return [answer(request) for request in requests]
"""


@dataclass(slots=True)
class Peer:
    """A running proxy."""

    name: str
    target: str = ""
    process: "subprocess.Popen[bytes] | None" = None

    def memory_bytes(self) -> int:
        """Resident memory of the process and those that it started."""
        if self.process is None:
            return 0
        root = psutil.Process(self.process.pid)
        return sum(int(each.memory_info().rss) for each in (root, *root.children(recursive=True)))

    def cpu_s(self) -> float:
        """CPU time of the process and those that it started, since they began."""
        if self.process is None:
            return 0.0
        root = psutil.Process(self.process.pid)
        return sum(sum(each.cpu_times()[:2]) for each in (root, *root.children(recursive=True)))


class Bench:
    """All processes of a run: `await start()`, then `peers`; `await close()` ends what was started. `ray`: Python of an
    environment with Ray Serve, which is a peer then."""

    def __init__(self, folder: Path, dispatchers: Mapping[str, int] = DISPATCHERS, ray: Path | None = None) -> None:
        self.folder = folder
        self.peers: list[Peer] = []
        self.triton = ""
        self._dispatchers = dispatchers
        self._ray = ray
        self._started: list[subprocess.Popen[bytes]] = []
        self._clock = WallClock()
        self._redis = RedisServer()
        self._planes: list[Plane] = []
        self._beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Triton, then every proxy; raises TimeoutError with what did not come up, BinaryMissing."""
        self.triton = f"127.0.0.1:{free_ports(1)[0]}"
        self._start_triton()
        await self._listening(self.triton, 30.0)
        self.peers = [Peer("direct", self.triton), self._raw()]
        self._planes = [Plane(State.connect(self._redis.url, _cluster(n))) for n in self._dispatchers.values()]
        for plane in self._planes:
            await plane.plan(plan())
        self._beating = asyncio.create_task(self._beat())
        for name, workers in self._dispatchers.items():
            self.peers.append(self._dispatcher(name, workers))
        if self._ray is not None:
            self.peers.append(self._ray_serve(self._ray))
        for peer in self.peers:
            await self._listening(peer.target, 60.0)

    async def close(self) -> None:
        """Nothing stays."""
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
        for plane in self._planes:
            await plane.state.close()
        for process in reversed(self._started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(self._started):
            try:
                await asyncio.to_thread(process.wait, 15.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._redis.close()

    def log(self, name: str) -> str:
        """The last lines that a process wrote."""
        path = self.folder / f"{name}.out"
        return "\n".join(path.read_text(errors="replace").splitlines()[-15:]) if path.is_file() else ""

    # --- processes ----------------------------------------------------------------------------------------------------

    def _spawn(self, name: str, argv: tuple[str, ...], **more: Any) -> "subprocess.Popen[bytes]":
        with (self.folder / f"{name}.out").open("wb") as out:
            process = subprocess.Popen(argv, stdout=out, stderr=subprocess.STDOUT, **more)
        self._started.append(process)
        return process

    def _start_triton(self) -> None:
        install = find_triton(None, CHECKOUT / ".venv-triton")
        prepare_triton(install)
        repository = self.folder / "models"
        for name, (kind, dims) in MODELS.items():
            (repository / name / "1").mkdir(parents=True)
            (repository / name / "config.pbtxt").write_text(_CONFIG.format(name=name, kind=kind, dims=dims))
            (repository / name / "1" / "model.py").write_text(_MODEL)
        env = {name: os.environ[name] for name in ("HOME", "TMPDIR", "LANG") if name in os.environ}
        env |= {"PATH": f"{install.environment / 'bin'}:{os.environ.get('PATH', os.defpath)}", "MALLOC_ARENA_MAX": "2"}
        if not install.libpython_loads:
            env["LD_LIBRARY_PATH"] = install.libpython_folder
        argv = (
            str(install.binary), f"--model-repository={repository}", f"--backend-directory={install.backends}",
            f"--cache-directory={install.caches}", "--allow-http=false", "--allow-metrics=false",
            "--grpc-address=127.0.0.1", f"--grpc-port={self.triton.rpartition(':')[2]}", "--exit-timeout-secs=5",
            f"--backend-config=python,shm-region-prefix-name=trefoil-bench-{os.getpid()}-",
        )  # fmt: skip
        self._spawn("triton", argv, env=env)

    def _raw(self) -> Peer:
        target = f"127.0.0.1:{free_ports(1)[0]}"
        argv = (sys.executable, "-m", "benchmarks.raw_proxy", target, self.triton)
        return Peer("raw grpc.aio", target, self._spawn("raw", argv, cwd=CHECKOUT))

    def _ray_serve(self, python: Path) -> Peer:
        target = f"127.0.0.1:{free_ports(1)[0]}"
        folder = CHECKOUT / "benchmarks"
        env = os.environ | {"PYTHONPATH": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        argv = (str(python), str(folder / "ray_proxy.py"), target, self.triton)
        return Peer(RAY, target, self._spawn("ray", argv, env=env))

    def _dispatcher(self, name: str, workers: int) -> Peer:
        ports, short = free_ports(2), _cluster(workers)
        settings = {
            "redis_url": self._redis.url, "cluster": short, "workers": workers,
            "log_json": True, "state_dir": str(self.folder / short), "inference_address": f"127.0.0.1:{ports[0]}",
            "admin_address": f"127.0.0.1:{ports[1]}", "metrics_address": "",
        }  # fmt: skip
        path = self.folder / f"dispatcher-{short}.toml"
        path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
        argv = (sys.executable, "-m", "dispatcher", "--config", str(path))
        return Peer(name, f"127.0.0.1:{ports[0]}", self._spawn(f"dispatcher-{short}", argv, cwd=CHECKOUT))

    async def _listening(self, target: str, timeout_s: float) -> None:
        host, _, port = target.rpartition(":")
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        _, writer = await asyncio.open_connection(host, int(port))
                    except OSError:
                        await self._clock.sleep(0.05)
                    else:
                        writer.close()
                        return
        except TimeoutError as error:
            logs = "\n".join(f"{path.stem}: {self.log(path.stem)}" for path in sorted(self.folder.glob("*.out")))
            raise TimeoutError(f"nothing listens at {target} after {timeout_s:g} s\n{logs}") from error

    async def _beat(self) -> None:
        """Keep statuses, receipt rates and carbon those of now."""
        while True:
            for plane in self._planes:
                now_s, keys = self._clock.now_s(), plane.state.keys
                await plane.node(node(self.triton, now_s))
                rates = tuple(
                    ReceiptRate(key, family, family, 0.1, 0.4, 1.0, Basis.SIMULATED, 60.0)
                    for key in slice_keys()
                    for family in MODELS
                )
                await plane.put("controller", keys.receipts(), ReceiptRates(rates, now_s, SERIES, 1.2, Revision(1, 1)))
                reading = CarbonReading(SERIES, now_s, now_s + 300.0, 250.0, Quality.MEASURED, observed_at_s=now_s)
                await plane.put("feed:bench", keys.carbon_now(SERIES), reading)
            await self._clock.sleep(BEAT_S)


def _cluster(workers: int) -> str:
    return f"workers-{workers}"


def slice_keys() -> tuple[SliceKey, ...]:
    """Of the table."""
    return tuple(SliceKey("node0/gpu0", "1g.5gb", start, 1) for start in range(SLICES))


def plan() -> Plan:
    """Both families on every slice, in equal shares."""
    routes = tuple(
        Route(
            family, "weighted", "fifo",
            tuple(RouteTarget(key, family, 0, 1 / SLICES, CREDITS, accuracy=0.9) for key in slice_keys()),
            1024, 2**30, {},
        )
        for family in MODELS
    )  # fmt: skip
    objectives = tuple(
        Objective(family=family, mode=ObjectiveMode.INSTANT, slo_ms=200.0, slo_quantile=0.95) for family in MODELS
    )
    return Plan(revision=Revision(1, 1), policy="exact", planner="exact", objectives=objectives, routes=routes)


def node(triton: str, now_s: float) -> NodeStatus:
    """A node whose slices are all the one Triton."""
    hosted = tuple(Hosted(family, family, 1, 0, 1, 1, 8) for family in MODELS)
    slices = tuple(
        SliceStatus(key=key, generation=1, state=SliceState.READY, hosted=hosted, grpc_target=triton, since_s=1.0)
        for key in slice_keys()
    )
    device = DeviceStatus(device="node0/gpu0", type=A100_40GB, state=DeviceState.AWAKE, slices=slices)
    return NodeStatus(node="node0", epoch=1, simulated=True, observed_at_s=now_s, devices=(device,))

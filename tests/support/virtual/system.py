"""A whole system in virtual time, and one history of it from a seed: faults are drawn, promises are checked all along.

Controllers (two at once for a while, by the real leases), two nodes, two dispatcher workers, a carbon feed, clients
that do not wait for each other. Real are the controller as `controller.__main__` wires it, the dispatcher's
tables, loop, queues and routers, and `State` on Redis in this process; nodes, slices, disks and clients are made up.
"""

import asyncio
import contextlib
import functools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import structlog

import controller.__main__ as main
from controller.settings import ControllerSettings
from dispatcher.service.local_worker import LocalWorker
from tests.support.planning import digits
from tests.support.unswept import NO_SWEEPS, unswept
from tests.support.virtual.dispatch import MemoryTable, Request, Worker
from tests.support.virtual.doubles import Files, MemoryDisk, NodeAgents, ProcessDisk, ProcessTable, Silent
from tests.support.virtual.loop import PROCESS, Process, VirtualClock, VirtualLoop, virtual_loop
from tests.support.virtual.nodes import SERVES, Node
from tests.support.virtual.planner import FAMILY, throughput_per_s
from tests.support.virtual.promises import Promises
from tests.support.virtual.redis import Server
from trefoil.core import errors
from trefoil.core.carbon import CarbonReading, Factors, Method, Quality, Series
from trefoil.core.common import Revision
from trefoil.core.energy import EnergySample
from trefoil.core.fleet import SliceKey, SliceState, SliceStatus
from trefoil.runtime import codec, service
from trefoil.runtime.clock import Clock, SteadyClock
from trefoil.runtime.keys import Keys
from trefoil.runtime.state_errors import parse_epoch

SERIES = Series("demo", Method.AVERAGE, Factors.LIFECYCLE)
EPOCH_S = 1_750_000_000.0
FAULTS_S = (6.0, 20.0)  # between these, faults strike
QUIET_S = 20.0  # after the last one, in which everything has to be well again
CATALOG = digits()
PLACES = ("controller", "dispatcher0", "dispatcher1", "node0", "node1", "feed", "redis")  # each with a wall clock
DRAINS_S = 3.0  # drain_timeout_s and ack_timeout_s of the controllers here
ALONE = {"replicas_min": 1, "spread_min": 1}
SETTINGS: Mapping[str, Any] = {
    "policy": "exact",
    "planner": "tests.support.virtual.planner:Drawn",
    "objectives": ({"family": FAMILY, "type": "instant", "slo": {"latency_ms": 400.0}, "availability": ALONE},),
    "tick_s": 1.0,
    "solve_timeout_s": 2.0,
    "node_stale_s": 3.0,
    "demand_initial_per_s": {FAMILY: 6.0},
    "carbon": {"wait_s": 2.0},
    "triggers": {"load_hold_s": 2.0, "loss_hold_s": 1.0},
    "rollout": {
        "apply_timeout_s": 0.5, "apply_tries": 2, "ready_timeout_s": 6.0, "ack_timeout_s": DRAINS_S,
        "drain_timeout_s": DRAINS_S, "poll_s": 0.25, "retry_s": 2.0,
    },
    "decisions_max": 50,
    "plans_kept": 3,
}  # fmt: skip


class Controller:
    """A place where a controller runs, and starts again on the same disk.

    One that stands still is replaced; when it continues there are two for a while, and the lease decides.
    """

    def __init__(self, system: "System") -> None:
        self.files = Files()
        self._system = system
        self._starts = 0
        self.process: Process | None = None
        self.service: Any = None
        self.clock: Clock = system.clock

    def start(self) -> None:
        """A new process."""
        if self.process is None:
            self._starts += 1
            self.process = Process(f"controller.{self._starts}")
            task = self.process.start(self._system.loop, self._live())
            task.add_done_callback(functools.partial(self._ended, self.process))

    def replace(self) -> Process:
        """Start another one beside the process that runs here; the old one is left to the caller."""
        old = self.process
        assert old is not None
        self.process, self.service = None, None
        self.start()
        return old

    def kill(self) -> None:
        """SIGKILL."""
        if self.process is not None:
            self.process.kill()
            self.process, self.service = None, None

    def _settings(self) -> ControllerSettings:
        return ControllerSettings(
            state_dir=self._system.folder / "controller",
            plan_key_file=self._system.plan_key_file,
            **{**SETTINGS, **self._system.settings},
        )

    async def _live(self) -> None:
        self._system.opening, self._system.starting = self.files, self
        self.clock = self._system.clock_of("controller")
        settings = self._settings()
        if self._system.on_disk:
            await main.take_over(settings)
        parts = main.parts(settings, self.clock, "controller.toml", self._settings)
        wanted = [p for p in parts if not isinstance(p, service.MetricsComponent | service.ServerComponent)]
        await service.run(wanted, self.clock, asyncio.Event())

    def _ended(self, process: Process, task: "asyncio.Task[None]") -> None:
        """One that has stood by ends once the role is free; its supervisor starts it again."""
        ended = None if task.cancelled() else task.exception()
        if isinstance(ended, errors.RoleFree):
            process.kill()
            if self.process is process:
                self.process, self.service = None, None
                self._system.loop.call_later(1.0, self.start)
        elif ended is not None:
            self._system.promises.broken(f"a controller ended by {ended!r}")


class System:
    """One history. `play()` returns what promises were broken, in words; nothing when all held."""

    def __init__(self, loop: VirtualLoop, seed: int, folder: Path | None = None) -> None:
        self.loop, self.seed = loop, seed
        self.on_disk = folder is not None
        """Whether services keep real files in the folder, and not what stands for them."""
        self.clock = VirtualClock(loop, EPOCH_S)
        self.walls = {place: VirtualClock(loop, EPOCH_S) for place in PLACES}
        self.rng = np.random.default_rng([seed, 7])
        self.folder = folder or Path("/nowhere")
        self.plan_key_file: Path | None = None
        self.settings: dict[str, Any] = {}
        """Of controllers, in place of those of all histories."""
        self.opening = Files()
        self.starting: Controller | None = None
        self.keys = Keys("default")
        self.server = Server(self.walls["redis"])
        self.promises = Promises(self)
        self.server.on_write, self.server.on_lease = self.promises.written, self.promises.leased
        self.log: deque[str] = deque(maxlen=400)
        self.ended = False
        self.requests: list[Request] = []
        self.intensity, self.rate_per_s = 300.0, 6.0
        self.carbon_flows = True
        self.nodes = {f"node{i}": Node(self, f"node{i}", 2, np.random.default_rng([seed, 8, i])) for i in range(2)}
        self.controller = Controller(self)
        self.workers = [Worker(self, f"dispatcher{i}") for i in range(2)]
        self.serving: Counter[SliceKey] = Counter()
        """Requests on each slice, in truth."""
        self.service_rng = np.random.default_rng([seed, 9])
        self.hung: set[SliceKey] = set()
        self.faults: Counter[str] = Counter()
        self.unwritten: set[str] = set()
        self.lies: list[tuple[float, str]] = []
        """When each lie was told, and at which key, in which file, or as which plan that is obeyed."""
        """Keys at which something stands that none of the services writes."""

    # --- time and noise -----------------------------------------------------------------------------------------------

    def every(self, seconds: float, phase_s: float, call: Callable[[], Any]) -> None:
        """Call again and again, to the end of the history."""

        def again() -> None:
            if not self.ended:
                call()
                self.loop.call_later(seconds, again)

        self.loop.call_later(phase_s, again)

    def note(self, text: str) -> None:
        """A line that a person reads who looks into a history."""
        self.log.append(f"{self.loop.time() - 1000.0:8.3f} {text}")

    def clock_of(self, place: str) -> SteadyClock:
        """Clock of a process that starts at a place now."""
        return SteadyClock(self.walls[place])

    def step_clocks(self, places: Iterable[str], step_s: float) -> None:
        """Step the wall clocks of these places, as an operator or NTP does."""
        for place in places:
            self.walls[place].skew_s += step_s

    # --- what surrounds the services ----------------------------------------------------------------------------------

    @property
    def redis_takes(self) -> bool:
        """Whether an agent or the feed can write now."""
        server = self.server
        return not (server.down or server.stopped or server.refuses or server.refuses_writes)

    def published(self, node: Node) -> None:
        """An agent writes its node's status."""
        if self.redis_takes:
            self.server.set(self.keys.node(node.name), codec.encode(node.status()))
            self.server.publish(self.keys.changed(), self.keys.node(node.name))

    def metered(self, node: Node, sample: EnergySample) -> None:
        """An agent writes an energy sample."""
        if self.redis_takes:
            key = self.keys.energy(node.name)
            if self.server.type(key) != "stream":
                self.server.delete(key)
            self.server.append(key, {b"d": codec.encode(sample)}, 500)

    def led_epoch(self) -> int:
        """Epoch of the newest controller as an agent reads it in Redis; 0: it does not tell."""
        server = self.server
        if server.down or server.stopped or server.mute or server.refuses:
            return 0
        stored = server.value(self.keys.epoch("controller"))
        return parse_epoch(stored) if isinstance(stored, bytes) else 0

    def stopping(self, node: Node, key: SliceKey, revision: Revision) -> None:
        """An agent stops a slice that no plan wants any more."""
        self.promises.stopped(key, revision)

    def reached(self, key: SliceKey, local: LocalWorker) -> SliceStatus | None:
        """The slice as it is, if it takes requests and a worker knows where it listens."""
        node = self.nodes.get(key.device.split("/")[0])
        status = node.slices.get(key) if node is not None else None
        if status is None or status.state not in (*SERVES, SliceState.DRAINING):
            return None
        known = local.routing.table.endpoints.get(key)
        return status if known is None or known.target == status.grpc_target else None

    def slice_serves(self, key: SliceKey, local: LocalWorker) -> bool:
        """Whether an inference on the slice works now."""
        return self.reached(key, local) is not None and key not in self.hung

    async def infer(self, key: SliceKey, local: LocalWorker) -> bool:
        """One inference; False: nobody took it, or what took it died."""
        status = self.reached(key, local)
        if status is None:
            await asyncio.sleep(0.002)
            return False
        self.serving[key] += 1
        try:
            mean_s = 1.0 / throughput_per_s(key.slice_type, status.hosted[0].variant)
            await asyncio.sleep(mean_s * float(self.service_rng.uniform(0.8, 1.4)))
            while key in self.hung and self._same(key, status):
                await asyncio.sleep(0.3)
        finally:
            self.serving[key] -= 1
        return self._same(key, status)

    def _same(self, key: SliceKey, before: SliceStatus) -> bool:
        """Whether a slice has run on since it had this status."""
        after = self.nodes[key.device.split("/")[0]].slices.get(key)
        return after is not None and after.generation == before.generation and after.state != SliceState.FAILED

    def _read_carbon(self) -> None:
        if self.carbon_flows and self.redis_takes:
            now_s = self.walls["feed"].now_s()
            reading = CarbonReading(SERIES, now_s, now_s + 7.0, self.intensity, Quality.MEASURED, observed_at_s=now_s)
            self.server.set(self.keys.carbon_now(SERIES), codec.encode(reading))

    def _arrive(self) -> None:
        if self.ended or self.loop.time() > self._last_arrival_s:
            return
        request = Request(len(self.requests) + 1, self.loop.time())
        self.requests.append(request)
        up = [worker for worker in self.workers if worker.process is not None]
        if up:
            up[request.id % len(up)].take(request)
        else:
            request.ends.append("nobody listens")
        self.loop.call_later(float(self.service_rng.exponential(1.0 / self.rate_per_s)), self._arrive)

    # --- a history ----------------------------------------------------------------------------------------------------

    def play(self, faults: "Callable[[System], None]", end_s: float = FAULTS_S[1] + QUIET_S) -> list[str]:
        """From an empty system through its faults to a quiet end."""
        self._last_arrival_s = self.loop.time() + end_s - 3.0
        self.every(3.0, 0.1, self._read_carbon)
        self.every(0.25, 0.3, self.promises.look)
        for i, one in enumerate((self.controller, *self.workers)):
            self.loop.call_later(0.2 + 0.15 * i, one.start)
        self.loop.call_later(4.0, self._arrive)
        faults(self)

        async def lived() -> None:
            await asyncio.sleep(end_s)

        self.loop.run_until_complete(lived())
        self.server.refusal = lambda _: ""  # faults are for the services: whoever judges them reads in peace
        self.promises.at_the_end()
        self.ended = True
        for place in (self.controller, *self.workers):
            if place.process is not None:
                place.process.kill()
        return self.promises.found


@contextlib.contextmanager
def installed(system: System, *, real_bytes: bool = False) -> Iterator[None]:
    """The services' modules with this system's Redis, disks, agents and silence in them. `real_bytes`: values in Redis
    are what Redis would hold, instead of numbers that stand for them."""

    def said(_logger: Any, name: str, event: Mapping[str, Any]) -> Mapping[str, Any]:
        process = PROCESS.get()
        if process is None or not process.dead:
            fields = " ".join(f"{k}={v}" for k, v in event.items() if k != "event")
            system.note(f"{process.name if process else ''} {name}: {event['event']} {fields}")
        raise structlog.DropEvent

    configured, before = structlog.is_configured(), structlog.get_config()
    structlog.configure(
        processors=[said],
        wrapper_class=structlog.make_filtering_bound_logger(20),
        logger_factory=structlog.ReturnLoggerFactory(),
        cache_logger_on_first_use=False,
    )
    real = main.ControllerService

    def serviced(*args: Any, **kwargs: Any) -> Any:
        made = real(*args, **kwargs)
        assert system.starting is not None
        system.starting.service = made
        return made

    replaced: dict[str, Any] = {
        "controller.__main__.Metrics": lambda _: Silent(),
        "controller.__main__.AgentClients": lambda clock, timeout_s, tries, *_: NodeAgents(
            system.nodes, clock, timeout_s, tries
        ),
        "controller.__main__.load_catalog": lambda *_: CATALOG,
        "controller.__main__.ControllerService": serviced,
        "controller.loop.decision_records.version": lambda _: "virtual",
        "controller.role.leadership.socket.gethostname": lambda: getattr(PROCESS.get(), "name", "here"),
        "trefoil.runtime.service.gc": NO_SWEEPS,
        "trefoil.runtime.state.make_client": lambda *_: system.server.client(PROCESS.get()),
    }
    if system.on_disk:
        replaced |= {
            "controller.__main__.DiskStore": lambda root, decisions_max, *_: ProcessDisk(root, decisions_max),
            "dispatcher.service.state_sync.TableFile": ProcessTable,
            "trefoil.runtime.files.os.fsync": lambda _: None,
        }
    else:
        replaced |= {
            "controller.__main__.DiskStore": lambda _, decisions_max, *__: MemoryDisk(system.opening, decisions_max),
            "dispatcher.service.state_sync.TableFile": lambda _: MemoryTable(system.opening),
        }
    if real_bytes:  # what was read once is not read again, which would take half of the time
        replaced["trefoil.runtime.codec.decode"] = functools.lru_cache(maxsize=2000)(codec.decode)
    else:
        tokens = Tokens()
        replaced |= {"trefoil.runtime.codec.encode": tokens.encode, "trefoil.runtime.codec.decode": tokens.decode}
    with contextlib.ExitStack() as stack:
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value))
        try:
            yield
        finally:
            structlog.configure(**before) if configured else structlog.reset_defaults()


class Tokens:
    """In place of the codec, whose tests are others: a value that never changes is a number in this Redis."""

    def __init__(self) -> None:
        self._known: list[Any] = []

    def encode(self, value: Any) -> bytes:
        self._known.append(value)
        return b"%d" % (len(self._known) - 1)

    def decode(self, cls: type[Any], data: bytes) -> Any:
        number = int(data) if data.isdigit() and len(data) < 10 else len(self._known)
        found = self._known[number] if number < len(self._known) else None
        if not isinstance(found, cls):
            raise errors.InvalidInput(f"{data!r} are not a {cls.__name__}")
        return found


def history(seed: int, faults: Callable[[System], None], *, real_bytes: bool = False) -> tuple[list[str], System]:
    """Play one history; what was broken, and the system as it ended."""
    with unswept(), virtual_loop() as loop:
        system = System(loop, seed)
        with installed(system, real_bytes=real_bytes):
            return system.play(faults), system

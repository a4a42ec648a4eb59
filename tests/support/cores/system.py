"""A whole history of the cores from a seed: the product's simulated shell, with everything around it struck by faults.

Real are the cores of control, exploring, rollouts, observation and queues, the simulated hardware and requests one by
one, `LiveAcks`, and what the controller keeps on a disk. The shell is `trefoil.simulator.simulation`, which
tests/property/test_live_and_simulated_agree.py holds equal to the live one. What fails, fails in a port: a write
that Redis refuses is raised into the core. A controller ends, another begins from the disk, for a moment there are two.
Bytes, asyncio, gRPC and clocks are not here; they are in `tests/support/virtual`.
"""

import functools
import math
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from heapq import heappop, heappush
from operator import is_
from typing import Any, Final

import numpy as np

from controller.explore.core.ports import PlannerAnswer
from controller.loop.control_loop import load_saved_state
from controller.loop.core.ports import TakenDecision
from tests.support.cores.around import Agent, Redis, in_flight_on, told
from tests.support.cores.inputs import END_S, drawn_inputs, prepared, true_services
from tests.support.cores.promises import LOOKS_S, Promises
from tests.support.unswept import unswept
from tests.support.virtual.doubles import Files, MemoryDisk
from tests.support.virtual.planner import SOLVES_S
from trefoil.core import errors
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.carbon import CarbonReading
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, SliceLoad, TableAck
from trefoil.core.fleet import DeviceState, NodeStatus, SliceKey
from trefoil.core.objective import Objective
from trefoil.core.plan import NodePlan, Plan, Rollout, Route
from trefoil.runtime.sightings import LiveAcks
from trefoil.runtime.state import ACK_TTL_S, LEASE_TTL_S
from trefoil.simulator.engines.hardware import SERVES
from trefoil.simulator.simulation import EPSILON_S, Simulation, at_once, until_resumed

Step = Coroutine[object, None, None]
LEADS_S: Final = 0.5  # between two looks at the lease
ADOPTS_S: Final = 0.05  # from the plan in Redis to the dispatcher's table
MINE: Final = (
    "core", "rollouts", "observation", "live_acks", "disk", "epoch", "renewed_s", "off", "pending_windows",
    "_rolling", "_rolling_due_s", "_step", "_viewed",
)  # fmt: skip


class CoreSystem(Simulation):
    """One history. `play()` returns what promises were broken, in words; nothing when all held."""

    def __init__(self, seed: int) -> None:
        self.seed, self.rng = seed, np.random.default_rng([seed, 7])
        self.lines: deque[str] = deque(maxlen=300)
        self.faults: Counter[str] = Counter()
        self._timers: list[tuple[float, int, Callable[..., Any], tuple[Any, ...]]] = []
        self._timer_count = 0
        self.redis = Redis(np.random.default_rng([seed, 12]), epoch=1)
        self.agents = {f"node{i}": Agent(f"node{i}") for i in range(2)}
        self.cordons: dict[str, str] = {}
        self.obeyed: dict[str, NodePlan] = {}
        self.numbered: set[str] = set()  # decisions that are kept on the disk, by id
        self.acks_from_s = 0.0
        """When the dispatcher acknowledges again after its acknowledgement was lost."""
        self.acked_s = 0.0
        self.ghost: dict[str, Any] | None = None
        """A controller that stood still while another took its place."""
        self.files = Files()
        self.disk_refuses: Callable[[], bool] = lambda: False
        self.files.refuses = lambda: self.disk_refuses()
        self.disk = MemoryDisk(self.files, 50)
        self.disk.save("epoch", {"epoch": 1})
        self.epoch, self.renewed_s = 1, 0.0
        self.off = False  # whether the controller is dead or stands still
        self.life = 0  # controllers that have ended here
        self.lagging_since_s: float | None = None
        self.went_on_s, self.silent_s = -math.inf, 0.0
        self.table = Revision()
        self.carbon_flows = True
        self.carbon_in_redis: CarbonReading | None = None
        self.intensity = 0.0
        self.pending_windows: list[LoadWindow] = []
        self.slow_until_s, self.fails_until_s = -math.inf, -math.inf
        self._step: Step | None = None
        self._served_s = 0.0
        self._served_by: Any = None
        self._left_since: tuple[object, object] = None, None
        self._left: list[SliceKey] = []
        self.promises = Promises(self)
        inputs, settings = prepared()
        super().__init__(drawn_inputs(inputs, seed), settings=settings)
        self.hardware._services = true_services()
        self.live_acks = LiveAcks(self.redis, self.clock)  # type: ignore[arg-type]
        self.every(LEADS_S, self._lead)
        self.every(LOOKS_S, self.promises.look)

    # --- time ---------------------------------------------------------------------------------------------------------

    def after(self, seconds: float, call: Callable[..., Any], *args: Any) -> None:
        """Call later."""
        self._timer_count += 1
        heappush(self._timers, (self.clock.at_s + seconds, self._timer_count, call, args))

    def every(self, seconds: float, call: Callable[[], Any]) -> None:
        """Call again and again."""

        def again() -> None:
            call()
            self.after(seconds, again)

        self.after(seconds, again)

    def note(self, text: str) -> None:
        """A line that a person reads who looks into a history."""
        self.lines.append(f"{self.clock.at_s:7.3f} {text}")

    def _next_event(self) -> None:
        """As of the simulation, and what is set for a time; requests are served up to where something may change."""
        soon_s = min(self._timers[0][0], self.end_s) if self._timers else self.end_s
        self.now_s = self.clock.at_s = min(soon_s, max(self.now_s, self._next_s()))
        due_s = self.now_s + EPSILON_S
        while self._timers and self._timers[0][0] <= due_s:
            _, _, call, args = heappop(self._timers)
            call(*args)
        if self.hardware.next_s() <= due_s:
            self.serve()
            if self.hardware.advance(due_s):
                self._set_routes()
                self._continue_rollout()
        elif self._rolling_due_s <= due_s:
            self._continue_rollout()
        if self._carbon_at_s <= due_s:
            self._read_carbon()
        if self._tick_at_s <= due_s:
            self._tick()

    def serve(self) -> None:
        """Serve what has come until now."""
        now_s = self.now_s
        if now_s > self._served_s:
            self.now_s, self._served_s = self._served_s, now_s
            super()._serve_until(now_s)

    def _set_routes(self) -> None:
        """Where routes or what serves have changed."""
        serves = self._published, [self.hardware._served(device) for device in self.hardware.devices.values()]
        if serves != self._served_by:
            self._served_by = serves
            self.serve()
            super()._set_routes()

    # --- what the controller reads ------------------------------------------------------------------------------------

    def _read_carbon(self) -> None:
        [(zone, series)] = self.inputs.carbon.items()
        reading = series.reading(self.now_s)
        if reading.intensity_g_per_kwh != self.intensity:
            if self.intensity:
                self.serve()  # until now at what held until now
            self.intensity = reading.intensity_g_per_kwh
            self.ledger.intensity = {zone: self.intensity}
        if self.carbon_flows and self.redis.takes:
            self.carbon_in_redis = reading
        self._carbon_at_s = series.next_s(self.now_s + EPSILON_S)

    def refresh(self) -> None:
        """Statuses and acknowledgements; raises StateUnavailable."""
        inputs = self.observation.inputs
        self.redis.read()
        self._others_write()
        inputs.nodes = inputs.nodes | self.redis.statuses
        inputs.acks = at_once(self.live_acks.read())
        inputs.blind = self.live_acks.blind

    def _others_write(self) -> None:
        """What agents and the dispatcher have written by now: each change, and something each second."""
        if not self.redis.takes:
            return
        now_s = self.now_s
        for name, status in self.hardware.nodes().items():
            agent, before = self.agents[name], self.redis.statuses.get(name)
            if not agent.answers or now_s < agent.said_s:
                continue
            devices = status.devices
            if self.cordons:
                devices = tuple(replace(d, cordon=self.cordons.get(d.device, "")) for d in devices)
            same = before is not None and (before.devices, before.applied) == (devices, agent.applied)
            if not same or now_s >= agent.said_s + 1.0:
                agent.said_s = now_s
                self.redis.statuses[name] = NodeStatus(
                    name, status.zone, devices=devices, applied=agent.applied, simulated=True, observed_at_s=now_s,
                    highest_epoch_seen=agent.highest_epoch,
                )  # fmt: skip
        ack = self.redis.ack
        if self.lagging_since_s is None and now_s >= self.acks_from_s:
            self.redis.ack = TableAck("simulated", 0, self.table, self._loads(), observed_at_s=now_s)
            self.acked_s = now_s
        elif ack is not None and now_s - ack.observed_at_s > ACK_TTL_S:
            self.redis.ack = None

    def _loads(self) -> tuple[SliceLoad, ...]:
        """What is in flight on slices that serve and get no new requests."""
        since = self._published, self.hardware.nodes()  # other objects when something has changed
        if not all(map(is_, since, self._left_since)):
            live = {t.slice for route in self._published for t in route.targets if not t.draining}
            devices = self.hardware.devices.values()
            left = [key for d in devices for key, one in d.slices.items() if key not in live and one.state in SERVES]
            self._left_since, self._left = since, sorted(left)
        return tuple([SliceLoad(key, in_flight=count) for key in self._left if (count := self.in_flight_on(key))])

    def in_flight_on(self, key: SliceKey) -> int:
        """Requests that a slice has now, in truth."""
        self.serve()
        return in_flight_on(self.engines, key)

    def _tick(self) -> None:
        self.serve()
        self.pending_windows.append(self.load_window())
        self.meter.note(self.now_s)
        tick_s = self.settings.tick_s
        self._tick_at_s = math.floor(self.now_s / tick_s + 1e-6) * tick_s + tick_s
        self._control()

    def _control(self) -> None:
        """A tick of the loop, as `ControlLoop.tick`."""
        if self.off or self._step is not None:
            return
        inputs, windows = self.observation.inputs, self.observation.windows
        try:
            self.refresh()
            inputs.down = ""
        except errors.StateUnavailable as error:
            inputs.down = str(error)
            return
        reading = self.carbon_in_redis
        if reading is not None and reading is not inputs.carbon:
            inputs.carbon = reading
            inputs.carbon_history.append(reading)
        for window in self.pending_windows:
            windows.add(window, self.observation.catalog)
        self.pending_windows.clear()
        windows.forget(self.now_s)
        if self.epoch:
            self._run_step(self._turn())

    async def _turn(self) -> None:
        await self.core.enter_epoch(self.epoch)
        await self.core.step()

    # --- steps of control, one at a time ------------------------------------------------------------------------------

    def _run_step(self, step: Step) -> None:
        self._step = step
        self._go_on(step)

    def _go_on(self, step: Step) -> None:
        """Until the step ends, or the planner is asked: it takes its time, and nobody else's step begins meanwhile."""
        if self._step is not step:
            return  # the process is dead
        if self.off:
            self.after(0.1, self._go_on, step)
            return
        self._woken = False
        try:
            step.send(None)
            return
        except StopIteration:
            self._step = None
        except (
            errors.Fenced,
            errors.StateUnavailable,
            errors.DiskUnavailable,
            errors.Unavailable,
            errors.SettingError,
        ) as refused:
            self._step = None
            self.note(f"no decision: {refused}")
        if self._woken and self.core.explorer.run is not None:
            self._tick_at_s = min(self._tick_at_s, self.now_s + 0.1)

    def _answered(self, step: Step) -> None:
        if self._step is step:
            self._go_on(step)
        elif self.ghost is not None and self.ghost["_step"] is step:
            with self.as_ghost():
                self._go_on(step)

    async def think(self, view: PlanView, seed: int, *, ask: bool = False) -> PlannerAnswer:
        answer, took_s = await self._thought(view, seed, ask)
        self.after(took_s, self._answered, self._step)
        await until_resumed()
        return answer

    async def _thought(self, view: PlanView, seed: int, ask: bool) -> tuple[PlannerAnswer, float]:
        """What the planner answers, and after what time."""
        if self.now_s < self.fails_until_s:
            why = "the planner failed"
            return PlannerAnswer(Decision(None, why, view.now_s + 2.0, why), seed), SOLVES_S
        if self.now_s < self.slow_until_s:
            why = "the planner took more than solve_timeout_s"
            return PlannerAnswer(Decision(None, why, view.now_s + 2.0, why), seed, wall_limit_hit=True), 2.0
        return await super().think(view, seed, ask=ask), SOLVES_S

    def save(self, values: Mapping[str, object]) -> None:
        self.disk.save_together(values)

    def save_later(self, name: str, value: object) -> None:
        self.disk.save_later(name, value)

    def require_room(self) -> None:
        self.disk.check()

    def open_records(self, epoch: int) -> int:
        mine = [int(name.split(".")[1]) for name in self.numbered if name.startswith(f"{epoch}.")]
        return max(mine, default=0)

    async def record(self, taken: TakenDecision) -> None:
        self.disk.check()
        self.numbered.add(taken.id)
        self._write(functools.partial(self.promises.recorded, taken))
        await super().record(taken)

    async def write_objectives(self, objectives: tuple[Objective, ...]) -> None:
        self._write(lambda: None)

    async def republish(self, revision: Revision) -> None:
        stands = self.rollouts.republished(revision)
        if stands is not None:
            self._write(functools.partial(self._publish_routes, stands[0]))

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        super().tell(candidate, measurement)
        self.save_memory()

    def save_memory(self) -> None:
        live = self.core.explorer.live
        if live is not None:
            self.disk.save_later("planner_memory", live.memory())

    def _write(self, commit: Callable[[], Any]) -> None:
        """A fenced write; whether it was done is not known when the answer is lost."""
        self.redis.begin_write(self.epoch)
        commit()
        self.redis.end_write()

    # --- ports of a rollout -------------------------------------------------------------------------------------------

    def _view_of_rollout(self) -> PlanView:
        return self.core.view()

    def _continue_rollout(self) -> None:
        if self.off or self._rolling is None:
            self._rolling_due_s = math.inf
        else:
            super()._continue_rollout()

    async def wait(self, until_s: float) -> None:
        self._rolling_due_s = min(until_s, self.now_s + self.settings.rollout.poll_s)
        await until_resumed()

    async def refresh_statuses(self) -> None:
        self.refresh()

    async def query_agents(self, nodes: Mapping[str, NodeStatus]) -> None:
        for name in nodes:
            if self.agents[name].answers and self.redis.takes:
                self.agents[name].said_s = min(self.agents[name].said_s, self.now_s + EPSILON_S - 1.0)
        self._others_write()
        self.observation.inputs.nodes |= {n: s for n, s in self.redis.statuses.items() if n in nodes}

    async def publish(
        self, *, plan: Plan | None = None, rollout: Rollout | None = None, node: NodePlan | None = None,
        drained: frozenset[SliceKey] = frozenset(),
    ) -> None:  # fmt: skip
        def commit() -> None:
            if plan is not None:
                self._publish_routes(plan)
            if rollout is not None:
                self.promises.rolls(rollout)

        self._write(commit)

    def _publish_routes(self, plan: Plan) -> None:
        self.promises.published(plan, self.epoch)
        self.redis.plan = plan
        self.after(ADOPTS_S, self.adopt)

    @property
    def adopted(self) -> tuple[Route, ...]:
        """Routes of the dispatcher's table."""
        return self._published

    @property
    def deciding(self) -> bool:
        """Whether a step of control is under way."""
        return self._step is not None

    def adopt(self) -> None:
        """The dispatcher takes the plan in Redis, if it can read it; it never goes back."""
        plan = self.redis.plan
        if self.lagging_since_s is not None or self.redis.down:
            return  # it reads again when that is over
        if plan is not None and plan.revision > self.table:
            self.table, self._published = plan.revision, plan.routes
            self._set_routes()

    async def command(self, status: NodeStatus, plan: NodePlan) -> bool:
        agent = self.agents[plan.node]
        led = self.redis.epoch if not self.redis.down else 0
        try:
            agent.obey(plan, led)
        except errors.Fenced:
            seen = status.highest_epoch_seen, agent.highest_epoch, self._kept_epoch()
            self.disk.save_later("epoch", {"epoch": max(seen)})
            if self.epoch == self.redis.epoch:
                self.redis.lease_until_s = 0.0
            self.epoch = 0  # as `Leadership.cede_to`
            raise
        self.obeyed[plan.node] = plan
        self.work(plan.node, self.now_s + EPSILON_S)
        return True

    def work(self, node: str, now_s: float) -> None:
        """An agent makes its devices what they ought to be."""
        plan = self.obeyed.get(node)
        if plan is None or not self.agents[node].answers:
            return
        wanted = {d.device: d for d in plan.devices}
        lost = {name for name in wanted if self.hardware.devices[name].state == DeviceState.LOST}
        self.serve()
        for name in wanted.keys() - lost:
            there = self.hardware.devices[name].slices
            kept = {part.key for part in wanted[name].slices}
            for key in [key for key in there if key not in kept]:
                self.promises.stopped(key, plan.revision)
        self.hardware.command({name: d for name, d in wanted.items() if name not in lost}, now_s)
        self._set_routes()

    # --- the role -----------------------------------------------------------------------------------------------------

    def _kept_epoch(self) -> int:
        return int(self.disk.load_plain("epoch").get("epoch", 0))

    def _lead(self) -> None:
        """Renew the lease or take it, under a higher epoch than Redis, the disk or any agent knows."""
        redis, now_s = self.redis, self.now_s
        if self.off:
            return
        try:
            redis.read()
            if redis.refuses_writes:
                raise errors.StateUnavailable("Redis takes no writes")
        except errors.StateUnavailable:
            if now_s - self.renewed_s > LEASE_TTL_S:
                self.epoch = 0
            return
        if self.epoch and self.epoch == redis.epoch:
            self.renewed_s, redis.lease_until_s = now_s, now_s + LEASE_TTL_S
            return
        self.epoch = 0
        if now_s < redis.lease_until_s:
            return  # somebody's who may live
        seen = max((n.highest_epoch_seen for n in self.observation.inputs.nodes.values()), default=0)
        epoch = max(redis.epoch, self._kept_epoch(), seen) + 1
        try:
            self.disk.save("epoch", {"epoch": epoch})
        except errors.DiskUnavailable:
            return
        self.epoch = redis.epoch = epoch
        self.renewed_s, redis.lease_until_s = now_s, now_s + LEASE_TTL_S
        self.promises.leads(epoch)

    # --- a controller's life ------------------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL."""
        self.life += 1
        self.off, self._step, self._rolling, self._rolling_due_s, self._viewed = True, None, None, math.inf, None

    def start(self) -> None:
        """A new controller on the same disk."""
        if not self.off:
            return
        self.kill()
        self.disk = MemoryDisk(self.files, 50)
        commanded = {n.node: n for n in self.disk.load_all("commanded", NodePlan)}
        objectives = {o.family: o for o in self.disk.load_all("objectives", Objective)} or dict(self.inputs.objectives)
        kept = load_saved_state(self.disk, self.settings, objectives)
        self._start_cores(kept, (self.disk.load("published", Plan), commanded))
        live = self.core.explorer.live
        if live is not None:
            live.recall(self.disk.load_plain("planner_memory"))
        self.live_acks = LiveAcks(self.redis, self.clock)  # type: ignore[arg-type]
        self.epoch, self.off, self.pending_windows = 0, False, []
        self.note("a controller starts")

    def stand_still(self, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after a time."""
        life, self.off = self.life, True

        def go_on() -> None:
            if self.life == life:
                self.off, self._rolling_due_s = False, self.now_s

        self.after(seconds, go_on)

    def replace(self) -> None:
        """Another one takes the place of the one that stands still, on a copy of the disk as it is."""
        copied = Files(self.files)
        self.ghost = {name: getattr(self, name) for name in MINE} | {"disk": MemoryDisk(copied, 50), "off": False}
        self.start()

    @contextmanager
    def as_ghost(self) -> Iterator[None]:
        """Whatever is done meanwhile, the one that stood still does."""
        assert self.ghost is not None
        mine = {name: getattr(self, name) for name in MINE}
        self.__dict__.update(self.ghost)
        try:
            yield
        finally:
            self.ghost = {name: getattr(self, name) for name in MINE}
            self.__dict__.update(mine)

    def ghost_goes_on(self) -> None:
        """It does not know yet that another leads: its rollout goes on, and it takes a step of control."""
        if self.ghost is None:
            return
        self.note("the one that stood still goes on")
        with self.as_ghost():
            self._continue_rollout()
            self._control()

    def ghost_ends(self) -> None:
        """SIGKILL of the one that stood still."""
        self.ghost = None

    # --- operators ----------------------------------------------------------------------------------------------------

    def ask(self, step: Callable[[], Step], done: Callable[[bool], None] = lambda _: None) -> None:
        """An operator asks; refused while nobody leads, later while a step is under way."""
        if self.off or not self.epoch:
            done(False)
        elif self._step is not None:
            self.after(0.3, self.ask, step, done)
        else:
            self._run_step(told(step(), done))

    # --- a history ----------------------------------------------------------------------------------------------------

    def play(self, faults: "Callable[[CoreSystem], None]") -> list[str]:
        """From an empty system through its faults to a quiet end."""
        faults(self)
        self.after(END_S - 8.0, self.promises.mark)
        self.run(self.end_s)
        self.serve()
        self.promises.at_the_end()
        return self.promises.found


def history(seed: int, faults: Callable[[CoreSystem], None]) -> tuple[list[str], CoreSystem]:
    """Play one history; what was broken, and the system as it ended."""
    with unswept():
        system = CoreSystem(seed)
        return system.play(faults), system

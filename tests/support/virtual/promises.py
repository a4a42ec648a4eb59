"""What a system promises whatever happens to it, checked at every write, at every stop of a slice and all along."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from controller.loop.core.deciding import URGENT
from controller.observe.core.triggers import OPERATOR
from tests.support.virtual.loop import START_S
from tests.support.virtual.planner import FAMILY, throughput_per_s
from trefoil.cli.operate.status import decode_keys
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey, SliceState
from trefoil.core.plan import DecisionRecord, NodePlan, Plan, Rollout, RolloutState
from trefoil.runtime import codec
from trefoil.runtime.sightings import FIRST_S
from trefoil.runtime.state import ACK_TTL_S, TIMEOUT_S, State

if TYPE_CHECKING:
    from tests.support.virtual.loop import Process
    from tests.support.virtual.system import System

FOUND_MAX = 20
TOLERANCE = 1e-6
CARBON_RATIO = 0.05  # that carbon may stray from what the last decision saw
STUCK_S = 15.0  # after which a rollout that is under way yet has met no fault for long enough
FINE = ("OK", "client left")
AFRESH = ("start", OPERATOR, *URGENT)
"""Of what is planned afresh; while candidates are measured, what is urgent or asked for takes the place of a start."""
UNDER_WAY = (RolloutState.APPLYING, RolloutState.WAITING_READY, RolloutState.WAITING_ACK, RolloutState.WAITING_DRAIN)


class Promises:
    """What a system promises in any history. Collects what was broken, with the time of it."""

    def __init__(self, system: "System") -> None:
        self._system = system
        self.found: list[str] = []
        self.excused_until_s = 0.0
        """A fault took slices away: until the controller has seen it, less may be routed to than it believes."""
        self.rollout: Rollout | None = None
        self.frozen = False
        self.released_s: float | None = None
        """When an operator let the controller continue by itself."""
        self._plan: Plan | None = None
        self._routed_before = self._first_per_s = 0.0
        self._seen: dict[str, Revision] = {}
        self._published = {Revision()}
        self._left_s: dict[SliceKey, float] = {}
        self._judged: set[str] = set()
        self._started_s = 0.0
        self._writers: dict[int, Process] = {}
        self._granted = 0
        self._looked_s = system.loop.time()
        self._decided: dict[str, str] = {}
        self._last = "{}"
        self._last_put: dict[str, bytes] = {}

    def broken(self, text: str) -> None:
        """A promise was broken."""
        if len(self.found) < FOUND_MAX:
            self.found.append(f"{self._now_s() - START_S:.3f} s: {text}")
        self._system.note(f"BROKEN {text}")

    def excuse(self, seconds: float = 6.0) -> None:
        """Slices are lost by a fault."""
        self.excused_until_s = max(self.excused_until_s, self._now_s() + seconds)

    def _grows(self, who: str, revision: Revision) -> None:
        before = self._seen.get(who)
        if before is not None and revision < before:
            self.broken(f"{who} went back from {before} to {revision}")
        elif revision is not before:
            self._seen[who] = revision

    def _take_plan(self, plan: Plan) -> None:
        self._grows("the published plan", plan.revision)
        self._published.add(plan.revision)
        if self._plan is not None and self._plan.revision.number != plan.revision.number:
            self._routed_before = self._routed(self._plan)
        self._plan = plan
        now_s = self._now_s()
        live = {t.slice for route in plan.routes for t in route.targets if not t.draining}
        for key in self._slices() - live:
            self._left_s.setdefault(key, now_s)
        self._left_s = {key: since_s for key, since_s in self._left_s.items() if key not in live}
        if plan.decision_id and plan.decision_id not in self._judged:
            self._judged.add(plan.decision_id)
            self._judge(plan)

    def _judge(self, plan: Plan) -> None:
        demands = self._demands_of(plan.decision_id)
        if demands is None:
            self.broken(f"plan {plan.revision} is in force, and its decision {plan.decision_id} stands nowhere")
            return
        for family, rate_per_s in demands.items():
            expected = plan.expected.get(family)
            carries = expected.capacity_per_s if expected is not None else 0.0
            if carries < rate_per_s * (1 - TOLERANCE) and not plan.degraded:
                self.broken(f"plan {plan.revision} carries {carries:.1f}/s of {rate_per_s:.1f}/s, unsaid")

    def _take_rollout(self, rollout: Rollout) -> None:
        plan, now_s = self._plan, self._now_s()
        if self.rollout is None or self.rollout.target.number != rollout.target.number:
            self._first_per_s = self._routed_before
        self.rollout = rollout
        floor = min(rollout.capacity_floor_per_s.get(FAMILY, 0.0), self._first_per_s)
        fresh = plan is not None and rollout.target == plan.revision and rollout.state in UNDER_WAY
        if plan is None or not fresh or plan.degraded or now_s < self.excused_until_s or self._own_plans_lie:
            return
        routed = self._routed(plan)
        if routed < floor * (1 - 1e-3):
            self.broken(f"step {plan.revision} routes to {routed:.1f}/s, below the rollout's floor of {floor:.1f}/s")

    @property
    def _own_plans_lie(self) -> bool:
        """Whether a file from which the controller continues holds another plan: right in every respect, so obeyed."""
        return bool(self._system.faults["published"] or self._system.faults["plans"])

    @property
    def _plan_unsigned(self) -> bool:
        """Whether a false plan was put into Redis where nobody signs."""
        system = self._system
        return system.plan_key_file is None and any(name == "plan" for _, name in system.lies)

    def _routed(self, plan: Plan) -> float:
        """What the slices that get requests can do, at most."""
        targets = [t for route in plan.routes if route.family == FAMILY for t in route.targets]
        return sum(self._speed(target.slice) for target in targets if not target.draining)

    def _judge_stopped(self, key: SliceKey, revision: Revision) -> None:
        """Nothing that is routed to is stopped."""
        plan = self._plan
        routed = {t.slice for route in (plan.routes if plan else ()) for t in route.targets if not t.draining}
        if key in routed:
            self.broken(f"{key.name} is stopped by {revision} and routed to by {plan.revision if plan else None}")

    def _judge_decisions(self, intensity: float, planned_by: float) -> None:
        """What carbon and operators asked for was decided."""
        if abs(intensity - planned_by) > (CARBON_RATIO + 0.01) * planned_by:
            self.broken(f"carbon is {intensity:.0f} g/kWh, and no decision was recorded since {planned_by:.0f}")
        if self.released_s is not None and self._started_s < self.released_s:
            self.broken("the operator released the controller, and no decision was recorded since")

    def _judge_last(self, last: Rollout, now_s: float) -> None:
        """The last rollout has ended, and well."""
        if last.state == RolloutState.HALTED or (now_s - last.since_s > STUCK_S and last.state in UNDER_WAY):
            self.broken(f"the last rollout stands at {last.state.name}: {last.why}")

    def _now_s(self) -> float:
        return float(self._system.loop.time())

    def _slices(self) -> set[SliceKey]:
        return {key for node in self._system.nodes.values() for key in node.slices}

    def _speed(self, key: SliceKey) -> float:
        status = self._system.nodes[key.device.split("/")[0]].slices.get(key)
        if status is None or status.state not in (SliceState.READY, SliceState.SWAPPING):
            return 0.0
        return throughput_per_s(key.slice_type, status.hosted[0].variant)

    def _demands_of(self, decision: str) -> Mapping[str, float] | None:
        view = self._decided.get(decision)
        if view is None and self._own_plans_lie:
            return {}
        return {d["family"]: d["rate_per_s"] for d in json.loads(view)["demand"]} if view is not None else None

    # --- Redis --------------------------------------------------------------------------------------------------------

    def leased(self, verb: str, key: str, epoch: int, done: int, who: "Process") -> None:
        """The lease script has run."""
        if verb == "acquire" and done == 1:
            self._system.note(f"{who.name} takes epoch {epoch}")
            if epoch <= self._granted:
                self.broken(f"epoch {epoch} was given to {who.name} after epoch {self._granted}")
            self._granted = max(self._granted, epoch)

    def written(self, kind: str, key: str, value: bytes, epoch: int, who: "Process") -> None:
        """The write script has written a key."""
        writer = self._writers.setdefault(epoch, who)
        if writer is not who:
            self.broken(f"{who.name} and {writer.name} both wrote under epoch {epoch}")
        keys, decode = self._system.keys, codec.decode
        if kind == "set":
            self._last_put[key] = value
        if kind == "delete":
            return
        if key == keys.plan():
            self._take_plan(decode(Plan, value))
        elif key == keys.rollout():
            self._take_rollout(decode(Rollout, value))
        elif key.startswith(keys.plan_node_prefix()) and not self._system.faults["commanded"]:  # its file says another
            self._grows(f"Redis {key}", decode(NodePlan, value).revision)
        elif key == keys.decisions():
            record = decode(DecisionRecord, value)
            self._decided[record.id] = record.view_json
            self._last = record.view_json
            if record.trigger in AFRESH:
                self._started_s = self._system.loop.time()

    def last_put(self, key: str) -> bytes | None:
        """What its writer has last written at a key."""
        return self._last_put.get(key)

    # --- slices and requests ------------------------------------------------------------------------------------------

    def stopped(self, key: SliceKey, revision: Revision) -> None:
        """An agent was told to take a slice away, and does."""
        from tests.support.virtual.system import DRAINS_S

        now_s = self._system.loop.time()
        self._judge_stopped(key, revision)
        in_flight_on = {
            worker.name: sum(pump.in_flight_on(key) for pump in worker.local.routing.each_queue)
            for worker in self._system.workers
            if worker.local is not None and self._counts(worker.process, now_s)
        }
        waited_s = now_s - self._left_s.get(key, now_s)
        if any(in_flight_on.values()) and waited_s < DRAINS_S:
            self.broken(f"{key.name} is stopped by {revision} under requests of {in_flight_on} after {waited_s:.2f} s")

    def _counts(self, process: "Process | None", now_s: float) -> bool:
        """Whether a worker has to be waited for. One that has been silent for long may be taken for dead, until it has
        been heard again."""
        if process is None:
            return False
        if process.stopped:
            return now_s - process.stopped_at_s < FIRST_S
        silent_s = process.went_on_at_s - process.stopped_at_s
        return silent_s < ACK_TTL_S - 2.0 or now_s - process.went_on_at_s > 2.0

    def look(self) -> None:
        """Again and again."""
        now_s = self._system.loop.time()
        if not self._system.redis_takes:  # time without sight is not a time that a drain has waited
            self._left_s = {key: since_s + now_s - self._looked_s for key, since_s in self._left_s.items()}
        self._looked_s = now_s
        for worker in self._system.workers:
            local = worker.local
            if local is None:
                continue
            obeyed = local.routing.table.revision
            # Where a table file was spoilt, what the process before had obeyed is lost with it.
            name = worker.process.name if self._system.faults["table"] and worker.process else worker.name
            # A plan that was forged or replayed where nobody signs: it is obeyed for a while, then beaten.
            if self._seen.get(name, obeyed) not in self._published or self._plan_unsigned:
                self._seen.pop(name, None)
            if obeyed != Revision():  # a new worker that found no table goes back to none
                self._grows(name, obeyed)
            held, open_ = worker.held(), worker.open_here()
            if worker.running and held != open_:
                self.broken(f"{worker.name} has {open_} open requests, its pumps know of {held}")
        for node in self._system.nodes.values():
            self._grows(node.name, node.applied)

    def at_the_end(self) -> None:
        """After a quiet time: every request has ended once, and the system serves as it should."""
        system = self._system
        for request in system.requests:
            waits = system.loop.time() - request.arrived_s
            if len(request.ends) > 1:
                self.broken(f"request {request.id} ended as {' and '.join(request.ends)}")
            if not request.ends and waits > 15.0:
                self.broken(f"request {request.id} was lost: no end after {waits:.1f} s")
        self._judge_decisions(system.intensity, json.loads(self._last)["carbon"]["intensity_g_per_kwh"])
        late = [
            r for r in system.requests if system.loop.time() - r.arrived_s < 8.0 and r.ends and r.ends[0] not in FINE
        ]
        if late:
            self.broken(f"{len(late)} of the last requests ended as {sorted({r.ends[0] for r in late})}")
        asked = system.controller.service.GetPlan(None, None)  # Redis may have missed the end of it
        last: Rollout = codec.from_proto(system.loop.run_until_complete(asked).rollout)
        self._judge_last(last, system.controller.clock.now_s())
        self._judge_keys()

    def _judge_keys(self) -> None:
        """Every key that has a writer can be read, and is what he last wrote."""
        system = self._system
        state = State(system.server.client(), system.keys.cluster, system.clock, TIMEOUT_S)
        system.loop.run_until_complete(decode_keys(state, "", 1))
        alive = [f"{place}:{worker.name}:" for worker in system.workers for place in ("load", "ack")]
        for key, why in state.unreadable.items():
            short = key.removeprefix(system.keys.prefix)
            if "is none" in why or key in system.unwritten:
                continue  # an entry in a stream that somebody else has put there: it goes with the others of its age
            if not short.startswith(("load:", "ack:")) or short.startswith(tuple(alive)):
                self.broken(f"{short} cannot be read: {why}")
        for key, value in self._last_put.items():
            if system.server.value(key) != value and key not in system.unwritten:
                self.broken(f"{key} is not what its writer last wrote, but {system.server.value(key)!r:.80}")


def told(found: list[str], log: Any) -> str:
    """For a person: what was broken, and what was said around it."""
    return "\n".join([*found, "", *log])

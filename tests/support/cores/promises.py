"""What the cores promise whatever happens around them, checked at every write, every stop of a slice and at the end."""

import math
from typing import TYPE_CHECKING, Final

from controller.loop.core.control import URGENT
from controller.loop.core.effects import RecordDecision
from controller.loop.core.triggers import OPERATOR
from tests.support.cores.inputs import DRAINS_S
from tests.support.virtual.planner import FAMILY, throughput_per_s
from tests.support.virtual.promises import CARBON_RATIO, FOUND_MAX, STUCK_S, TOLERANCE, UNDER_WAY
from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey, SliceState
from trefoil.core.plan import Plan, Rollout, RolloutState
from trefoil.runtime.sightings import FIRST_S
from trefoil.runtime.state import ACK_TTL_S
from trefoil.simulator.engines.hardware import SERVES

if TYPE_CHECKING:
    from tests.support.cores.system import CoreSystem

LOOKS_S: Final = 0.25
AFRESH: Final = ("start", OPERATOR, *URGENT)
"""Of what is planned afresh; while candidates are measured, what is urgent or asked for takes the place of a start."""


class Promises:
    """Collects what was broken, with the time of it."""

    def __init__(self, system: "CoreSystem") -> None:
        self._system = system
        self.found: list[str] = []
        self.excused_until_s = 0.0
        """A fault took slices away: until the controller has seen it, less may be routed to than it believes."""
        self.plan: Plan | None = None
        self.rollout: Rollout | None = None
        self.released_s: float | None = None
        """When an operator let the controller go on by itself."""
        self._epoch = 1
        self._seen: dict[str, Revision] = {}
        self._decided: dict[str, RecordDecision] = {}
        self._last: RecordDecision | None = None
        self._started_s = 0.0
        self._judged: set[str] = set()
        self._routed_before = self._first_per_s = 0.0
        self._left_s: dict[SliceKey, float] = {}
        self._looked_s = 0.0
        self._marked: tuple[float, float] = (0.0, 0.0)

    @property
    def state(self) -> RolloutState:
        """Where the rollout stands."""
        return self.rollout.state if self.rollout is not None else RolloutState.UNSPECIFIED

    def broken(self, text: str) -> None:
        """A promise was broken."""
        if len(self.found) < FOUND_MAX:
            self.found.append(f"{self._system.at.now_s:.3f} s: {text}")
        self._system.note(f"BROKEN {text}")

    def excuse(self, seconds: float = 6.0) -> None:
        """Slices are lost by a fault."""
        self.excused_until_s = max(self.excused_until_s, self._system.now_s + seconds)

    def _grows(self, who: str, revision: Revision) -> None:
        before = self._seen.get(who, Revision())
        if revision < before:
            self.broken(f"{who} went back from {before} to {revision}")
        self._seen[who] = max(before, revision)

    # --- what is written ----------------------------------------------------------------------------------------------

    def leads(self, epoch: int) -> None:
        """A controller took the role."""
        self._system.note(f"epoch {epoch}")
        if epoch <= self._epoch:
            self.broken(f"epoch {epoch} was taken after epoch {self._epoch}")
        self._epoch = max(epoch, self._epoch)

    def recorded(self, effect: RecordDecision) -> None:
        """A decision stands in Redis."""
        self._decided[effect.id] = self._last = effect
        self._system.note(f"decision {effect.id} {effect.trigger.cause}: {effect.effect}")
        if effect.trigger.cause in AFRESH:
            self._started_s = self._system.now_s

    def published(self, plan: Plan, epoch: int) -> None:
        """Routes stand in Redis."""
        self._system.note(f"routes {plan.revision}")
        self._grows("the published plan", plan.revision)
        if plan.revision.epoch > epoch:
            self.broken(f"plan {plan.revision} was written under epoch {epoch}")
        if self.plan is not None and self.plan.revision.number != plan.revision.number:
            self._routed_before = self._routed(self.plan)
        self.plan = plan
        now_s = self._system.now_s
        live = {t.slice for route in plan.routes for t in route.targets if not t.draining}
        for key in {key for d in self._system.hardware.devices.values() for key in d.slices} - live:
            self._left_s.setdefault(key, now_s)
        self._left_s = {key: since_s for key, since_s in self._left_s.items() if key not in live}
        if plan.decision_id and plan.decision_id not in self._judged:
            self._judged.add(plan.decision_id)
            self._judge(plan)

    def _judge(self, plan: Plan) -> None:
        made = self._decided.get(plan.decision_id)
        if made is None:
            self.broken(f"plan {plan.revision} is in force, and its decision {plan.decision_id} stands nowhere")
            return
        for demand in made.view.demand:
            expected = plan.expected.get(demand.family)
            carries = expected.capacity_per_s if expected is not None else 0.0
            if carries < demand.rate_per_s * (1 - TOLERANCE) and not plan.degraded:
                self.broken(f"plan {plan.revision} carries {carries:.1f}/s of {demand.rate_per_s:.1f}/s, unsaid")

    def rolls(self, rollout: Rollout) -> None:
        """Where the rollout stands, stands in Redis."""
        plan, now_s = self.plan, self._system.now_s
        if self.rollout is None or self.rollout.target.number != rollout.target.number:
            self._first_per_s = self._routed_before
        if self.rollout is None or self.rollout.state != rollout.state:
            self._system.note(f"rollout {rollout.target} {rollout.state.name} {rollout.why}")
        self.rollout = rollout
        floor = min(rollout.capacity_floor_per_s.get(FAMILY, 0.0), self._first_per_s)
        fresh = plan is not None and rollout.target == plan.revision and rollout.state in UNDER_WAY
        if plan is None or not fresh or plan.degraded or now_s < self.excused_until_s:
            return
        routed = self._routed(plan)
        if routed < floor * (1 - 1e-3):
            self.broken(f"step {plan.revision} routes to {routed:.1f}/s, below the rollout's floor of {floor:.1f}/s")

    def _routed(self, plan: Plan) -> float:
        """What the slices that get requests can do, at most."""
        targets = [t for route in plan.routes for t in route.targets]
        return sum(self._speed(target.slice) for target in targets if not target.draining)

    def _speed(self, key: SliceKey) -> float:
        """What a slice can do now, at most."""
        one = self._system.hardware.devices[key.device].slices.get(key)
        if one is None or one.state not in (SliceState.READY, SliceState.SWAPPING):
            return 0.0
        return throughput_per_s(key.slice_type, one.part.hosted[0].variant)

    # --- slices -------------------------------------------------------------------------------------------------------

    def stopped(self, key: SliceKey, revision: Revision) -> None:
        """An agent was told to take a slice away, and does."""
        system, plan = self._system, self.plan
        self._grows(f"slices of {key.device}", revision)
        routed = {t.slice for route in (plan.routes if plan else ()) for t in route.targets if not t.draining}
        if key in routed:
            self.broken(f"{key.name} is stopped by {revision} and routed to by {plan.revision if plan else None}")
        adopted = {t.slice for route in system.adopted for t in route.targets if not t.draining}
        count, waited_s = system.in_flight_on(key), system.now_s - self._left_s.get(key, system.now_s)
        serves = system.hardware.devices[key.device].slices[key].state in SERVES
        if not serves or waited_s >= DRAINS_S - 2 * LOOKS_S or not self._counts():
            return  # who was killed has no requests any more
        if count:
            self.broken(f"{key.name} is stopped by {revision} under {count} requests after {waited_s:.2f} s")
        if key in adopted:
            self.broken(f"{key.name} is stopped by {revision}, and the dispatcher sends to it yet")

    def _counts(self) -> bool:
        """Whether the dispatcher has to be waited for: one whose acknowledgement nobody has read for long may be taken
        for dead, until it has been heard again. That holds as well where Redis refused it, and nothing that was read.
        """
        system = self._system
        until_s = system.now_s if system.lagging_since_s is None else system.lagging_since_s
        if until_s - system.acked_s >= ACK_TTL_S - 2.0:
            return False
        if system.lagging_since_s is not None:
            return system.now_s - system.lagging_since_s < FIRST_S
        return system.silent_s < ACK_TTL_S - 2.0 or system.now_s - system.went_on_s > 2.0

    def look(self) -> None:
        """Again and again: time without sight is no time that a drain has waited."""
        now_s = self._system.now_s
        if self._system.redis.down or self._system.redis.refuses_some:
            self._left_s = {key: since_s + now_s - self._looked_s for key, since_s in self._left_s.items()}
        self._looked_s = now_s
        self._grows("the dispatcher's table", self._system.table)

    # --- the end ------------------------------------------------------------------------------------------------------

    def mark(self) -> None:
        """The last seconds begin."""
        self._system.serve()
        total = self._system.ledger.total[FAMILY]
        self._marked = total.rejected, total.answered

    def at_the_end(self) -> None:
        """After a quiet time: every request has ended once, and the system serves as it should."""
        system, total = self._system, self._system.ledger.total[FAMILY]
        came = int(system.inputs.arrivals[FAMILY].times_s.size)  # type: ignore[attr-defined]
        open_ = total.queued + sum(system.in_flight_on(k) for d in system.hardware.devices.values() for k in d.slices)
        ended = total.answered + total.rejected
        if total.arrived != came or ended + open_ != came:
            self.broken(f"{came} requests came; {total.arrived:g} were taken, {ended:g} ended and {open_:g} are open")
        rejected = total.rejected - self._marked[0]
        if rejected or total.answered == self._marked[1]:
            self.broken(
                f"{rejected:g} of the last requests were refused, {total.answered - self._marked[1]:g} answered"
            )
        self._judge_energy()
        planned_by = self._last.view.carbon.intensity_g_per_kwh if self._last is not None else math.inf
        if abs(system.intensity / planned_by - 1) > CARBON_RATIO + 0.01:
            self.broken(f"carbon is {system.intensity:.0f} g/kWh, and no decision was recorded since {planned_by:.0f}")
        if self.released_s is not None and self._started_s < self.released_s:
            self.broken("the operator released the controller, and no decision was recorded since")
        last = system.rollouts.rollout
        stuck = system.now_s - last.since_s > STUCK_S and last.state in UNDER_WAY
        if last.state == RolloutState.HALTED or stuck:
            self.broken(f"the last rollout stands at {last.state.name}: {last.why}")
        if not system.epoch or system.core.current is None or system.core.current.revision.epoch != system.epoch:
            self.broken(f"nobody leads, or not by a plan of epoch {system.epoch}")

    def _judge_energy(self) -> None:
        """Every joule is booked once: by device, by what it was for, and in the ledger."""
        devices = self._system.hardware.devices.values()
        drawn_j = sum(device.counter_j for device in devices)
        parts_j = sum(device.active_j + device.idle_j + device.unallocated_j for device in devices)
        booked_j = sum(cost.joules for cost in self._system.ledger.cost.values())
        if not math.isclose(drawn_j, parts_j, rel_tol=1e-9) or not math.isclose(drawn_j, booked_j, rel_tol=1e-9):
            self.broken(f"{drawn_j:.3f} J were drawn, {parts_j:.3f} J split and {booked_j:.3f} J booked")

"""What the cores promise whatever happens around them, checked at every write, every stop of a slice and at the end."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from controller.loop.core.deciding import URGENT
from controller.loop.core.ports import TakenDecision
from controller.observe.core.triggers import OPERATOR
from tests.support.cores.inputs import DRAINS_S
from tests.support.virtual.planner import FAMILY, throughput_per_s
from tests.support.virtual.promises import PlanPromises
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


class Promises(PlanPromises):
    """Those of the cores, of joules and of the requests that the simulator counts too."""

    def __init__(self, system: "CoreSystem") -> None:
        super().__init__(system.note)
        self._system = system
        self._epoch = 1
        self._decided: dict[str, TakenDecision] = {}
        self._last: TakenDecision | None = None
        self._looked_s = 0.0
        self._marked: tuple[float, float] = (0.0, 0.0)

    def _now_s(self) -> float:
        return self._system.now_s

    def _played_s(self) -> float:
        return self._system.clock.at_s

    def _slices(self) -> set[SliceKey]:
        return {key for device in self._system.hardware.devices.values() for key in device.slices}

    def _speed(self, key: SliceKey) -> float:
        one = self._system.hardware.devices[key.device].slices.get(key)
        if one is None or one.state not in (SliceState.READY, SliceState.SWAPPING):
            return 0.0
        return throughput_per_s(key.slice_type, one.part.hosted[0].variant)

    def _demands_of(self, decision: str) -> Mapping[str, float] | None:
        made = self._decided.get(decision)
        return {demand.family: demand.rate_per_s for demand in made.view.demand} if made is not None else None

    @property
    def state(self) -> RolloutState:
        """Where the rollout stands."""
        return self.rollout.state if self.rollout is not None else RolloutState.UNSPECIFIED

    # --- what is written ----------------------------------------------------------------------------------------------

    def leads(self, epoch: int) -> None:
        """A controller took the role."""
        self._system.note(f"epoch {epoch}")
        if epoch <= self._epoch:
            self.broken(f"epoch {epoch} was taken after epoch {self._epoch}")
        self._epoch = max(epoch, self._epoch)

    def recorded(self, taken: TakenDecision) -> None:
        """A decision stands in Redis."""
        self._decided[taken.id] = self._last = taken
        self._system.note(f"decision {taken.id} {taken.trigger.cause}: {taken.effect}")
        if taken.trigger.cause in AFRESH:
            self._started_s = self._system.now_s

    def published(self, plan: Plan, epoch: int) -> None:
        """Routes stand in Redis."""
        self._system.note(f"routes {plan.revision}")
        if plan.revision.epoch > epoch:
            self.broken(f"plan {plan.revision} was written under epoch {epoch}")
        self._take_plan(plan)

    def rolls(self, rollout: Rollout) -> None:
        """Where the rollout stands, stands in Redis."""
        if self.rollout is None or self.rollout.state != rollout.state:
            self._system.note(f"rollout {rollout.target} {rollout.state.name} {rollout.why}")
        self._take_rollout(rollout)

    # --- slices -------------------------------------------------------------------------------------------------------

    def stopped(self, key: SliceKey, revision: Revision) -> None:
        """An agent was told to take a slice away, and does."""
        system = self._system
        self._grows(f"slices of {key.device}", revision)
        self._judge_stopped(key, revision)
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
        self._judge_decisions(system.intensity, planned_by)
        self._judge_last(system.rollouts.rollout, system.now_s)
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

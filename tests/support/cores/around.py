"""What surrounds the cores, at the level of their ports: Redis with values, an agent's obedience, a drawn planner."""

from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from numpy.random import Generator

from power_agent.slices.core.epochs import refuse_made_up_epoch
from tests.support.virtual.planner import Drawn
from trefoil.core import errors
from trefoil.core.brains import Candidate, Decision, Measurement, PlanView
from trefoil.core.common import Revision
from trefoil.core.demand import TableAck
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime.keys import Keys

T = TypeVar("T")
SOME: Final = 0.3  # of the commands that a Redis refuses that refuses some
CANDIDATES: Final = 3  # of one exploration


@dataclass(slots=True)
class Redis:
    """Redis as one controller and one dispatcher use it. `scan` is what `LiveAcks` asks of a `State`."""

    rng: Generator
    down: bool = False
    refuses_writes: bool = False
    refuses_some: bool = False
    mute: bool = False
    """It does what it is told, and the connection is lost before the answer."""
    epoch: int = 0
    """Of the newest controller; 0: it was emptied since."""
    lease_until_s: float = 0.0
    plan: Plan | None = None
    statuses: dict[str, NodeStatus] = field(default_factory=dict)
    ack: TableAck | None = None
    unreadable: Mapping[str, str] = field(default_factory=dict)
    keys: Keys = field(default_factory=lambda: Keys("simulated"))

    @property
    def takes(self) -> bool:
        """Whether others can write now."""
        return not (self.down or self.refuses_writes)

    def read(self) -> None:
        """Every command begins so."""
        if self.down:
            raise errors.StateUnavailable("Redis does not answer")
        if self.refuses_some and self.rng.random() < SOME:
            raise errors.StateUnavailable("Redis refuses this one")

    def begin_write(self, epoch: int) -> None:
        """What the write script refuses, it refuses here."""
        self.read()
        if not epoch or epoch != self.epoch:
            raise errors.Fenced(f"epoch {epoch}, and {self.epoch} stands there")
        if self.refuses_writes:
            raise errors.StateUnavailable("Redis takes no writes")

    def end_write(self) -> None:
        """The answer to a write that is done."""
        if self.mute:
            raise errors.StateUnavailable("the connection was lost")

    def empty(self) -> None:
        """All is lost."""
        self.epoch, self.lease_until_s = 0, 0.0
        self.plan, self.ack = None, None
        self.statuses.clear()

    async def scan(self, prefix: str, cls: type[T]) -> dict[str, T]:
        """Acknowledgements."""
        assert cls is TableAck
        self.read()
        ack: Any = self.ack
        return {self.keys.ack(ack.dispatcher, ack.worker): ack} if ack is not None else {}


@dataclass(slots=True)
class Agent:
    """Obedience of one node's agent: no older epoch or revision, also after it was away."""

    node: str
    answers: bool = True
    applied: Revision = Revision()
    highest_epoch: int = 0
    said_s: float = -1e9
    """When its status was last written to Redis."""

    def obey(self, plan: NodePlan, led: int) -> None:
        """Take a plan. `led`: the newest controller's epoch in Redis; 0: it does not tell.

        Raises:
            Unavailable: it is away, or nobody leads under that epoch.
            StaleRevision: it obeys a newer controller or plan.
        """
        if not self.answers:
            raise errors.Unavailable(f"the agent of {self.node} does not answer")
        refuse_made_up_epoch(plan.revision.epoch, self.highest_epoch, led)
        if plan.revision.epoch < max(self.highest_epoch, led) or plan.revision < self.applied:
            raise errors.StaleRevision(f"{self.node} obeys epoch {self.highest_epoch}, revision {self.applied}")
        self.highest_epoch, self.applied = plan.revision.epoch, plan.revision


class Planning(Drawn):
    """The drawn planner without an event loop."""

    def plan(self, view: PlanView, rng: Generator) -> Decision:
        """Decide at once: the shell says how long it took."""
        return self.decide(view, rng)


class Exploring(Planning):
    """One that wants some drawn plans measured first, and remembers how many of them."""

    def __init__(self) -> None:
        self.told = 0

    def asks(self, view: PlanView) -> bool:
        """Always."""
        return True

    def ask(self, view: PlanView, rng: Generator) -> Candidate | Decision:
        """A candidate, or what it decides after the last one."""
        found = self.decide(view, rng)
        if found.plan is None or found.degraded or self.told % (CANDIDATES + 1) == CANDIDATES:
            self.told = 0
            return found
        return Candidate(replace(found.plan, exploration=True), "drawn", measure_s=1.5, requests_min=4)

    def tell(self, candidate: Candidate, measurement: Measurement) -> None:
        """One more."""
        self.told += 1

    def memory(self) -> Mapping[str, Any]:
        """How many were told."""
        return {"told": self.told}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """The same."""
        self.told = int(memory.get("told", 0))


async def told(step: Coroutine[object, None, None], done: Callable[[bool], None]) -> None:
    """Step of an operator, who is told whether it was taken."""
    try:
        await step
    except errors.TrefoilError:
        done(False)
        raise
    done(True)


def in_flight_on(engines: Iterable[Any], key: SliceKey) -> int:
    """Requests that a slice has, at the time until which was served."""
    return sum(queue.in_flight_on(key) for engine in engines for queue in engine._queues)


def stand_still(engines: Iterable[Any], keys: Iterable[SliceKey], until_s: float) -> None:
    """Slices compute nothing of what they are sent until then."""
    served = [family.lines for engine in engines for family in engine._families.values()]
    for one in (lines[key] for key in keys for lines in served if key in lines):
        one.free_s = max(one.free_s, until_s)

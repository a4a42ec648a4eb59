"""What one dispatcher worker knows: plan, nodes, ejections, and the table, pumps and connections that follow from them.

All methods are synchronous: when one returns, table, routers and connections agree. `changed` wakes the loop that tells
others about it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import structlog

from dispatcher.core import table as tables
from dispatcher.core.crew import Crew, Worker
from dispatcher.core.ejection import OUTLIERS, Ejections, Failure
from dispatcher.core.outliers import Health, panics
from dispatcher.core.receipts import Receipts, ratio_now
from dispatcher.core.retries import RetryBudget
from dispatcher.core.sequences import Pin, Sequences
from dispatcher.core.table import Endpoint, Table
from dispatcher.knobs import Knobs
from dispatcher.load import LoadBook
from dispatcher.pump import Pump
from dispatcher.routers import ROUTERS
from dispatcher.sequencing import SequencePump
from dispatcher.settings import DispatcherSettings
from dispatcher.transport import Transport
from trefoil.core.carbon import CarbonRatio, CarbonReading
from trefoil.core.demand import SliceLoad, TableAck
from trefoil.core.energy import ReceiptRates
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.parts import Kind, find
from trefoil.core.plan import NodePlan, Plan, Route
from trefoil.runtime.clock import Clock

LOG = structlog.get_logger()
DEATHS: Final = frozenset({Failure.UNREACHABLE, Failure.BROKEN, Failure.DEAD_STUB})  # no sequence on a slice survives


class Hub:
    """Belongs to one event loop."""

    def __init__(self, settings: DispatcherSettings, dispatcher: str, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.me: Worker = (dispatcher, settings.worker)
        self.plan: Plan | None = None
        self.nodes: dict[str, NodeStatus] = {}
        self.table = Table()
        self.pumps: dict[str, Pump] = {}  # by family; those behind one router for a group have the same one
        self._pumps: dict[tuple[str, ...], Pump] = {}  # each once: by family, or by the router and queue of a group
        self._ratio: tuple[CarbonRatio | None, CarbonReading | None] = (None, None)
        self.carbon_ratio: float | None = None
        self.sequences: dict[str, SequencePump] = {}  # of the families that have any
        self.open_streams = 0
        self.variants: dict[tuple[str, int], str] = {}
        self.ejections = Ejections()
        self.ejected_total: Counter[tuple[SliceKey, str]] = Counter()
        self.health = Health(settings.hang_quiet_s, settings.late_strikes, settings.fault_strikes)
        self.budget = RetryBudget(settings.retry_ratio, settings.retry_burst)
        self.kept_total: Counter[tuple[SliceKey, str]] = Counter()  # outliers that stay: too many are out already
        self.retries_total: Counter[tuple[str, str]] = Counter()  # family, "retried" or "refused"
        self.transport = Transport()
        self.book = LoadBook(dispatcher, settings.worker, clock.now_s(), settings.classes_max)
        self.receipts = Receipts(settings.receipts_stale_s)
        self.changed = asyncio.Event()
        self.crew = Crew(self.me)
        self.forwarded_total: Counter[str] = Counter()  # by family: requests that another worker answered
        self.unprobed: set[SliceKey] = set()  # known from disk only: worth waiting for
        self.peer_target = ""  # where other workers reach this one
        self.drained_why = ""  # by an operator
        self.rungs: Mapping[str, str] = {}  # what is away, and what serves instead
        self._stopping = False
        self._agreed = True
        self._built_of: tuple[Any, ...] = ()

    def take_plan(self, plan: Plan) -> None:
        """Route by this plan.

        Raises:
            StaleRevision, PlanError: the last good one stays.
        """
        plan = tables.with_parts(plan, self.settings.router, self.settings.queue)
        if plan == self.plan:
            return
        seen = self.plan.revision if self.plan is not None else self.table.revision
        tables.check(plan, seen, self.settings.workers)
        self.plan = plan
        self.rebuild()

    def take_nodes(self, nodes: Iterable[NodeStatus]) -> None:
        """Statuses as they stand in Redis. A node that is not there any more keeps its last status as long as the plan
        routes to it: an emptied Redis must not empty the table."""
        fresh = {node.node: node for node in nodes}
        routed = {t.slice.device.split("/")[0] for r in self.table.planned.values() for t in r.targets}
        kept = {name: node for name, node in self.nodes.items() if name in routed}
        self.nodes = {**kept, **fresh}
        self.ejections.on_nodes(self.nodes.values(), self.clock.monotonic_s())
        self.rebuild()

    def learn_variants(self, plans: Iterable[NodePlan]) -> None:
        """Names of versions that are planned: a slice that swaps answers with the new one before its agent says so."""
        for plan in plans:
            for hosted in (hosted for device in plan.devices for part in device.slices for hosted in part.hosted):
                self.variants[hosted.family, hosted.version] = hosted.variant

    def take_receipts(self, told: ReceiptRates | None, reading: CarbonReading | None) -> None:
        """Price answers by these; those that were given before keep the price that they were told."""
        self.book.settle(self.receipts.rate)
        self.receipts.take(told, reading)
        self.receipts.look(self.clock.now_s())

    def take_ratio(self, found: CarbonRatio | None, reading: CarbonReading | None) -> None:
        """What routers are told of carbon, and the reading that it was made of; None = nobody knows."""
        self._ratio = found, reading
        self.look_at_carbon()

    def look_at_carbon(self) -> None:
        """Tell the routers if the ratio is another one, or too old to go by."""
        ratio = ratio_now(*self._ratio, self.clock.now_s())
        if ratio != self.carbon_ratio:
            self.carbon_ratio = ratio
            for pump in self.each_pump:
                pump.on_carbon(ratio)

    @property
    def draining(self) -> bool:
        """Whether clients should go elsewhere: the process is stopping, or an operator drained it."""
        return self._stopping or bool(self.drained_why)

    @draining.setter
    def draining(self, stopping: bool) -> None:
        """The process is stopping."""
        self._stopping = stopping
        self._leave()

    def drain(self, why: str) -> None:
        """Leave the service for a while, or, with "", come back. Requests that come all the same are answered."""
        self.drained_why = why
        self._leave()

    def take_acks(self, acks: Iterable[TableAck]) -> None:
        """Acknowledgements of all dispatchers as they stand in Redis: their workers share each slice's credits."""
        if self.crew.take(acks, self.clock.monotonic_s()):
            self._reshare()
        else:
            self.settle()

    def settle(self) -> None:
        """Look again whether all agree who shares, as long as they have not: some may never say so."""
        if not self._agreed:
            self.rebuild()

    def follow_siblings(self) -> None:
        """A worker that is started again while its dispatcher is drained is drained, too."""
        others = [member for worker, member in self.crew.members.items() if worker[0] == self.me[0]]
        if others and all(member.leaving for member in others):
            self.drain("its dispatcher is drained")

    def lose_worker(self, worker: Worker) -> None:
        """It is dead: others take over what it had."""
        if self.crew.lose(worker, self.clock.monotonic_s()):
            self._reshare()

    def displace(self) -> None:
        """Tell requests that wait for families which only other workers serve to try those."""
        for family in self.table.elsewhere:
            if not self.table.live(family):
                self.pumps[family].displace(self.draining or family not in self.sequences, family)

    def _leave(self) -> None:
        if self.crew.leave(self.draining):
            self._reshare()

    def _reshare(self) -> None:
        LOG.info("credits are shared anew", workers=len(self.crew.sharers))
        self.rebuild()
        self.changed.set()

    def sequenced(self, family: str, idle_s: float) -> SequencePump:
        """The pump of a family with sequences. `idle_s`: how long one may be idle."""
        if family not in self.sequences:
            settings = self.settings
            book = Sequences(family, idle_s, settings.sequences_max, settings.sequence_requests_max)
            ends = self.changed.set  # drains wait for it
            self.sequences[family] = SequencePump(self.pumps[family], book, self.clock, self._endpoint, ends)
        return self.sequences[family]

    def eject(self, slice_: SliceKey, failure: Failure, why: str) -> None:
        """Send nothing there until a probe works. Outliers stay where half of a family is out as outliers already."""
        if failure in OUTLIERS and slice_ not in self.ejections and (family := self._panics(slice_)):
            self.kept_total[slice_, failure.value] += 1
            if self.kept_total[slice_, failure.value] == 1:
                LOG.warning("outlier kept: half of a family is out", slice=slice_.name, family=family, why=why)
            return
        fresh = self.ejections.eject(slice_, failure, why, self.clock.monotonic_s())
        if failure in DEATHS:  # also of an outlier: it was out, and its sequences went on there
            self._lose_sequences(lambda pin: why if pin.slice == slice_ else "")
        if fresh:
            self.ejected_total[slice_, failure.value] += 1
            self.health.left(slice_, dead=failure not in OUTLIERS)
            LOG.warning("slice ejected", slice=slice_.name, cause=failure.value, why=why)
            self.rebuild()
            self.changed.set()

    def readmit(self, slice_: SliceKey) -> None:
        """A probe worked."""
        self.unprobed.discard(slice_)
        if self.ejections.readmit(slice_):
            LOG.info("slice readmitted", slice=slice_.name)
            planned = (t for route in self.table.planned.values() for t in route.targets if t.slice == slice_)
            self.health.ramps.start(slice_, max((target.credits for target in planned), default=0))
            self.rebuild()
            self.changed.set()

    def trust(self, slices: Iterable[SliceKey]) -> None:
        """Serve these without a probe, and without a ramp: nothing was ever seen to be wrong with them."""
        if [slice_ for slice_ in slices if self.ejections.readmit(slice_)]:
            self.rebuild()

    def rebuild(self) -> None:
        """Derive everything again; tell the pumps what is new to them."""
        if self.plan is None:
            return
        reasons, ceilings = self.ejections.reasons(), self.health.ramps.ceilings()
        crew = self.crew
        self._agreed = crew.agrees(self.plan.revision, self.clock.monotonic_s())
        slices = [(node.node, node.devices) for node in self.nodes.values()]
        given = (self.plan, slices, reasons, crew.sharers, ceilings, self._agreed, self.table.held)
        if given == self._built_of:  # a status a second and node says mostly what the one before said
            return
        built = tables.build(
            self.plan, self.nodes.values(), reasons, crew.sharers, self.me, ceilings, self._agreed, self.table.held
        )
        self._built_of = given
        self.variants.update(built.variants)
        if built == self.table:
            return
        before, self.table = self.table, built
        self._lose_sequences(self._moved)
        self.transport.serve(self._needed(built))
        for family in before.routes:
            if family not in built.routes:
                gone = before.planned[family]
                self.pumps[family].apply(
                    Route(family=family, router=gone.router, queue=gone.queue), "the plan no longer routes it"
                )
        for family, route in built.routes.items():
            pump = self._pump(route)
            pump.promise(family, built.reach[family])
            fresh = (route, built.why[family], built.elsewhere.get(family))
            if fresh != (before.routes.get(family), before.why.get(family), before.elsewhere.get(family)):
                hopeful = any(target.slice in self.unprobed for target in built.planned[family].targets)
                pump.apply(route, built.why[family], hopeful or family in built.elsewhere)
        self.displace()
        if (built.revision, built.routes, built.why) != (before.revision, before.routes, before.why):
            LOG.info("table", revision=str(built.revision), live=_live_count(built), why=built.summary)
            self.changed.set()

    @property
    def each_pump(self) -> Iterable[Pump]:
        """All pumps, each once."""
        return self._pumps.values()

    def slo_ms(self, family: str, asked: Knobs) -> float:
        """The latency objective of a request: its own, its class's or its family's; 0 = none is known."""
        route, objective = self.table.routes.get(family), self.table.objectives.get(family)
        of_class = route.class_slo_ms.get(asked.slo_class, 0.0) if route is not None else 0.0
        return asked.slo_ms or of_class or (objective.slo_ms if objective is not None else 0.0)

    def _pump(self, route: Route) -> Pump:
        """The pump of a family, or of the group that its router takes; it brings along what it had in another one."""
        family = route.family
        group = find(Kind.ROUTER, route.router, ROUTERS).traits.group
        key = (route.router, route.queue) if group else (family,)
        if key not in self._pumps:
            self._pumps[key] = Pump(key[0], self.clock, self.settings.no_slice_wait_s, self.changed.set)
            self._pumps[key].on_carbon(self.carbon_ratio)
        pump, before = self._pumps[key], self.pumps.get(family)
        if before is not None and before is not pump:
            pump.adopt(family, before)
            if family in self.sequences:
                self.sequences[family].follow(pump)
        self.pumps[family] = pump
        return pump

    def _panics(self, slice_: SliceKey) -> str:
        """The family that keeps an outlier. Slices that their agents do not offer, or that are proven dead, do not
        count: they are not out as outliers."""
        offered = {s.key for n in self.nodes.values() for d in n.devices for s in d.slices if s.state in tables.SERVING}
        out, serving = self.ejections.outliers() & offered, {}
        for family, planned in self.table.planned.items():
            live = [target.slice for target in self.table.live(family)]
            serving[family] = live + [target.slice for target in planned.targets if target.slice in out]
        return panics(slice_, serving, out)

    def in_flight(self) -> Counter[SliceKey]:
        """Requests on each slice, over all families."""
        total: Counter[SliceKey] = Counter()
        for pump in self.each_pump:
            total.update(pump.in_flight)
        return total

    def loads(self) -> tuple[SliceLoad, ...]:
        """What an acknowledgement says of every slice that is planned, ejected or still busy."""
        in_flight, sequences = self.in_flight(), self.open_sequences()
        planned = {target.slice for route in self.table.planned.values() for target in route.targets}
        ejected = self.ejections.reasons()
        return tuple(
            SliceLoad(slice_, in_flight.get(slice_, 0), sequences.get(slice_, 0), ejected=slice_ in ejected)
            for slice_ in sorted({*planned, *in_flight, *sequences, *ejected})
        )

    def families_of(self, slice_: SliceKey) -> tuple[str, ...]:
        """The families that the plan routes to a slice."""
        planned = self.table.planned.items()
        return tuple(family for family, route in planned if any(t.slice == slice_ for t in route.targets))

    def not_ready(self) -> str:
        """Why clients should not come, "" when they may."""
        if self._stopping:
            return "the dispatcher is stopping"
        if self.drained_why:
            return f"the dispatcher is drained: {self.drained_why}"
        if not self.table.routes:
            return "no plan has been read"
        empty = [family for family in self.table.routes if not self.table.served(family)]
        return f"no live slice for {', '.join(sorted(empty))}" if empty else ""

    @property
    def standing(self) -> str:
        """In a line: what is not as planned, why clients should not come, what is away."""
        said = (self.table.summary or self.not_ready(), *(self.rungs[cause] for cause in sorted(self.rungs)))
        return "; ".join(each for each in said if each)

    def stale_nodes(self) -> dict[str, float]:
        """Nodes that are routed to and whose status is old, with its age [s]."""
        routed = {t.slice.device.split("/")[0] for r in self.table.planned.values() for t in r.targets}
        now_s, limit_s = self.clock.now_s(), self.settings.node_stale_s
        ages = {name: now_s - node.observed_at_s for name, node in self.nodes.items() if name in routed}
        return {name: age_s for name, age_s in ages.items() if age_s > limit_s}

    def simulated(self) -> bool:
        """Whether anything that is routed to is simulated."""
        return any(node.simulated for node in self.nodes.values())

    def open_sequences(self) -> Counter[SliceKey]:
        """Open sequences on each slice, over all families."""
        total: Counter[SliceKey] = Counter()
        for pump in self.sequences.values():
            total.update(pump.open_on)
        return total

    def _endpoint(self, slice_: SliceKey) -> Endpoint | None:
        return self.table.endpoints.get(slice_)

    def _moved(self, pin: Pin) -> str:
        if self._endpoint(pin.slice) == pin.endpoint:
            return ""
        return f"{pin.slice.name} is gone" if self._endpoint(pin.slice) is None else f"{pin.slice.name} was restarted"

    def _lose_sequences(self, lost: Callable[[Pin], str]) -> None:
        for pump in self.sequences.values():
            pump.lose(lost)

    def _needed(self, table: Table) -> Mapping[SliceKey, Endpoint]:
        """Planned slices that have an address, and whatever still has requests in flight or open sequences."""
        wanted = {t.slice for route in table.planned.values() for t in route.targets}
        wanted |= {*self.in_flight(), *self.open_sequences()}
        return {slice_: endpoint for slice_, endpoint in table.endpoints.items() if slice_ in wanted}


def _live_count(table: Table) -> dict[str, int]:
    return {family: len(route.targets) for family, route in table.routes.items()}

"""What one dispatcher worker knows: plan, nodes, ejections, and the table, pumps and connections that follow from them.

All methods are synchronous: when one returns, table, routers and connections agree. `changed` wakes the loop that tells
others about it.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import structlog

from dispatcher import table as tables
from dispatcher.ejection import Ejections, Failure
from dispatcher.load import LoadBook
from dispatcher.pump import Pump
from dispatcher.settings import DispatcherSettings
from dispatcher.table import Endpoint, Table, Worker
from dispatcher.transport import Transport
from trefoil.core.demand import SliceLoad
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.plan import NodePlan, Plan, Route
from trefoil.runtime.clock import Clock

LOG = structlog.get_logger()


class Hub:
    """Belongs to one event loop."""

    def __init__(self, settings: DispatcherSettings, dispatcher: str, clock: Clock) -> None:
        self.settings = settings
        self.clock = clock
        self.me: Worker = (dispatcher, settings.worker)
        self.plan: Plan | None = None
        self.nodes: dict[str, NodeStatus] = {}
        self.table = Table()
        self.pumps: dict[str, Pump] = {}
        self.variants: dict[tuple[str, int], str] = {}
        self.ejections = Ejections()
        self.ejected_total: Counter[tuple[SliceKey, str]] = Counter()
        self.transport = Transport()
        self.book = LoadBook(dispatcher, settings.worker, clock.now_s(), settings.classes_max)
        self.changed = asyncio.Event()
        self.draining = False
        self._workers: tuple[Worker, ...] = (self.me,)

    def take_plan(self, plan: Plan) -> None:
        """Route by this plan.

        Raises:
            StaleRevision, PlanError: the last good one stays.
        """
        if plan == self.plan:
            return
        tables.check(plan, self.plan.revision if self.plan is not None else self.table.revision)
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

    def take_workers(self, workers: Sequence[Worker]) -> None:
        """The live workers of all dispatchers, which share each slice's credits."""
        crew = tuple(sorted({*workers, self.me}))
        if crew != self._workers:
            LOG.info("credits are shared anew", workers=len(crew))
            self._workers = crew
            self.rebuild()

    def eject(self, slice_: SliceKey, failure: Failure, why: str) -> None:
        """Send nothing there until a probe works."""
        if self.ejections.eject(slice_, failure, why, self.clock.monotonic_s()):
            self.ejected_total[slice_, failure.value] += 1
            LOG.warning("slice ejected", slice=slice_.name, cause=failure.value, why=why)
            self.rebuild()
            self.changed.set()

    def readmit(self, slice_: SliceKey) -> None:
        """A probe worked."""
        if self.ejections.readmit(slice_):
            LOG.info("slice readmitted", slice=slice_.name)
            self.rebuild()
            self.changed.set()

    def rebuild(self) -> None:
        """Derive everything again; tell the pumps what is new to them."""
        if self.plan is None:
            return
        built = tables.build(self.plan, self.nodes.values(), self.ejections.reasons(), self._workers, self.me)
        self.variants.update(built.variants)
        if built == self.table:
            return
        before, self.table = self.table, built
        self.transport.serve(self._needed(built))
        for family, pump in self.pumps.items():
            if family not in built.routes and family in before.routes:
                gone = before.planned[family]
                pump.apply(Route(family=family, router=gone.router, queue=gone.queue), "the plan no longer routes it")
        for family, route in built.routes.items():
            if family not in self.pumps:
                self.pumps[family] = Pump(family, self.clock, self.settings.no_slice_wait_s, self.changed.set)
            if route != before.routes.get(family) or built.why[family] != before.why.get(family):
                self.pumps[family].apply(route, built.why[family])
        if (built.revision, built.routes, built.why) != (before.revision, before.routes, before.why):
            LOG.info("table", revision=str(built.revision), live=_live_count(built), why=built.summary)
            self.changed.set()

    def in_flight(self) -> Counter[SliceKey]:
        """Requests on each slice, over all families."""
        total: Counter[SliceKey] = Counter()
        for pump in self.pumps.values():
            total.update(pump.in_flight)
        return total

    def loads(self) -> tuple[SliceLoad, ...]:
        """What an acknowledgement says of every slice that is planned, ejected or still busy."""
        in_flight = self.in_flight()
        planned = {target.slice for route in self.table.planned.values() for target in route.targets}
        ejected = self.ejections.reasons()
        return tuple(
            SliceLoad(slice=slice_, in_flight=in_flight.get(slice_, 0), open_sequences=0, ejected=slice_ in ejected)
            for slice_ in sorted({*planned, *in_flight, *ejected})
        )

    def families_of(self, slice_: SliceKey) -> tuple[str, ...]:
        """The families that the plan routes to a slice."""
        planned = self.table.planned.items()
        return tuple(family for family, route in planned if any(t.slice == slice_ for t in route.targets))

    def not_ready(self) -> str:
        """Why clients should not come, "" when they may."""
        if self.draining:
            return "the dispatcher is stopping"
        if not self.table.routes:
            return "no plan has been read"
        empty = [family for family, route in self.table.routes.items() if not route.targets]
        return f"no live slice for {', '.join(sorted(empty))}" if empty else ""

    def simulated(self) -> bool:
        """Whether anything that is routed to is simulated."""
        return any(node.simulated for node in self.nodes.values())

    def _needed(self, table: Table) -> Mapping[SliceKey, Endpoint]:
        """Planned slices that have an address, and whatever still has requests in flight."""
        wanted = {t.slice for route in table.planned.values() for t in route.targets} | set(self.in_flight())
        return {slice_: endpoint for slice_, endpoint in table.endpoints.items() if slice_ in wanted}


def _live_count(table: Table) -> dict[str, int]:
    return {family: len(route.targets) for family, route in table.routes.items()}

"""The routing table in force, with the queues and connections that follow from it: plan, nodes and members in.

All methods are synchronous: when one returns, table, queues and connections agree. `changed` wakes the tasks that
inform others about it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import structlog

from dispatcher.queues import QUEUES
from dispatcher.routers import ROUTERS
from dispatcher.routing.async_queue import AsyncFamilyQueue
from dispatcher.routing.core import routing_table as tables
from dispatcher.routing.core.membership import Membership, WorkerId
from dispatcher.routing.core.routing_table import Endpoint, RoutingTable
from dispatcher.routing.core.sequences import Pin, Sequences
from dispatcher.routing.request_parameters import RequestParameters
from dispatcher.routing.sequence_queue import AsyncSequenceQueue
from dispatcher.routing.slices import SliceConnections
from dispatcher.settings import DispatcherSettings
from dispatcher.slice_health.core.ejection import Ejections, Place
from dispatcher.slice_health.core.outliers import SlowStart
from trefoil.core.carbon import CarbonRatio, CarbonReading, current_ratio
from trefoil.core.common import Revision
from trefoil.core.demand import SliceLoad, TableAck
from trefoil.core.errors import PlanError
from trefoil.core.fleet import NodeStatus, SliceKey
from trefoil.core.objective import NO_TOKEN_SLO, TokenSlo
from trefoil.core.parts import Kind, find
from trefoil.core.plan import NodePlan, Plan, Route
from trefoil.runtime.clock import Clock
from trefoil.runtime.security.key_file import KeyFile
from trefoil.runtime.security.tls import Tls

LOG = structlog.get_logger()


class Routing:
    """Routing state of one worker. Belongs to one event loop."""

    def __init__(
        self,
        settings: DispatcherSettings,
        worker: WorkerId,
        clock: Clock,
        ejections: Ejections,
        slow_start: SlowStart,
        tls: Tls | None,
    ) -> None:
        self.plan: Plan | None = None
        self.nodes: dict[str, NodeStatus] = {}
        self.table = RoutingTable()
        # By family; those behind one router for a group have the same one.
        self.queues: dict[str, AsyncFamilyQueue] = {}
        self.sequences: dict[str, AsyncSequenceQueue] = {}  # of the families that have any
        self.variants: dict[tuple[str, int], str] = {}
        keys = {base: KeyFile(path, f"engine_key_files.{base}") for base, path in settings.engine_key_files.items()}
        self.connections = SliceConnections(tls, keys, settings.triton_tls_name)
        self.membership = Membership(worker)
        self.changed = asyncio.Event()
        self.unprobed: set[SliceKey] = set()  # known from disk only: worth waiting for
        self.carbon_ratio: float | None = None
        self.agreed = True  # whether all workers share the credits as this one does
        self._settings = settings
        self._clock = clock
        self._worker = worker
        self._ejections = ejections
        self._slow_start = slow_start
        # Each once: by family, or by the router and queue of a group.
        self._queues: dict[tuple[str, ...], AsyncFamilyQueue] = {}
        self._carbon: tuple[CarbonRatio | None, CarbonReading | None] = (None, None)
        self._built_of: tuple[Any, ...] = ()
        self._families: dict[SliceKey, dict[str, None]] = {}  # by slice, of the routes below
        self._families_of: Mapping[str, Route] = {}

    @property
    def obeyed(self) -> Revision:
        """Revision of the plan that is routed by."""
        return self.plan.revision if self.plan is not None else self.table.revision

    def set_plan(self, plan: Plan, *, beats_fence: bool = False) -> None:
        """Set the plan to route by; `beats_fence`: also one that is older than the one before.

        Raises:
            StaleRevision, PlanError: the last good one stays.
        """
        plan = tables.override_parts(plan, self._settings.router, self._settings.queue)
        if plan == self.plan:
            return
        tables.check_plan(plan, Revision() if beats_fence else self.obeyed)
        self.plan = plan
        self.rebuild()

    def set_nodes(self, nodes: Iterable[NodeStatus]) -> None:
        """Set the nodes' statuses as they stand in Redis. A node that is not there any more keeps its last status as
        long as the plan routes to it: an emptied Redis must not empty the table."""
        fresh = {node.node: node for node in nodes}
        routed = self._routed_nodes()
        kept = {name: node for name, node in self.nodes.items() if name in routed}
        self.nodes = {**kept, **fresh}
        self._ejections.on_nodes(self.nodes.values(), self._clock.monotonic_s())
        self.rebuild()

    def learn_variants(self, plans: Iterable[NodePlan], verify: Callable[[NodePlan], object]) -> None:
        """Names of versions that are planned: a slice that swaps answers with the new one before its agent says so.

        Only names that the table lacks, of nodes that are routed to. `verify` raises PlanError for a plan that the
        controller did not sign.
        """
        routed = self._routed_nodes()
        for plan in plans:
            hosted = [each for device in plan.devices for part in device.slices for each in part.hosted]
            found = {(h.model, h.version): h.variant for h in hosted if (h.model, h.version) not in self.table.variants}
            if not found or plan.node not in routed:
                continue
            with suppress(PlanError):  # its agent says so
                verify(plan)
                self.variants.update(found)

    def set_carbon_ratio(self, found: CarbonRatio | None, reading: CarbonReading | None) -> None:
        """Set the carbon ratio for routers, and its reading; None = unknown."""
        self._carbon = found, reading
        self.refresh_carbon_ratio()

    def refresh_carbon_ratio(self) -> None:
        """Tell the routers if the carbon ratio is another one, or too old to go by."""
        ratio = current_ratio(*self._carbon, self._clock.now_s())
        if ratio != self.carbon_ratio:
            self.carbon_ratio = ratio
            for queue in self.each_queue:
                queue.on_carbon(ratio)

    def set_acks(self, acks: Iterable[TableAck]) -> None:
        """Update the membership by the acknowledgements of all dispatchers as they stand in Redis: their workers share
        each slice's credits."""
        if self.membership.update(acks, self._clock.monotonic_s()):
            self.redivide_credits()
        else:
            self.check_agreement()

    def check_agreement(self) -> None:
        """Check again whether all workers agree who shares, as long as they have not: some may never say so."""
        if not self.agreed:
            self.rebuild()

    def remove_worker(self, worker: WorkerId) -> None:
        """Remove a dead worker: others take over what it had."""
        if self.membership.mark_dead(worker, self._clock.monotonic_s()):
            self.redivide_credits()

    def redirect_waiting(self) -> None:
        """Tell requests that wait for families which only other workers serve to try those."""
        for family in self.table.elsewhere:
            if not self.table.live(family):
                self.queues[family].redirect_waiting(self.membership.leaving or family not in self.sequences, family)

    def sequence_queue(self, family: str, idle_s: float) -> AsyncSequenceQueue:
        """Queue of a family with sequences. `idle_s`: how long one may be idle."""
        if family not in self.sequences:
            settings = self._settings
            book = Sequences(family, idle_s, settings.sequences_max, settings.sequence_requests_max)
            ends = self.changed.set  # drains wait for it
            self.sequences[family] = AsyncSequenceQueue(self.queues[family], book, self._clock, self._endpoint, ends)
        return self.sequences[family]

    def rebuild(self) -> None:
        """Rebuild the routing table; tell queues and connections what is new to them."""
        if self.plan is None:
            return
        reasons, slow_start_limits = self._ejections.reasons(), self._slow_start.limits()
        membership = self.membership
        self.agreed = membership.agrees(self.plan.revision, self._clock.monotonic_s())
        slices = [(node.node, node.devices) for node in self.nodes.values()]
        given = (self.plan, slices, reasons, membership.sharers, slow_start_limits, self.agreed, self.table.held)
        if given == self._built_of:  # a status a second and node says mostly what the one before said
            return
        built = tables.build_table(
            self.plan,
            self.nodes.values(),
            reasons,
            membership.sharers,
            self._worker,
            slow_start_limits,
            self.agreed,
            self.table.held,
        )
        self._built_of = given
        self.variants.update(built.variants)
        if built == self.table:
            return
        before, self.table = self.table, built
        self.lose_sequences(self._moved_to)
        self.connections.connect(self._needed(built))
        for family in before.routes:
            if family not in built.routes:
                gone = before.planned[family]
                self.queues[family].apply_route(
                    Route(family=family, router=gone.router, queue=gone.queue), "the plan no longer routes it"
                )
        for family, route in built.routes.items():
            queue = self._queue_of(route)
            queue.set_reach(family, built.reach[family])
            fresh = (route, built.why[family], built.elsewhere.get(family))
            if fresh != (before.routes.get(family), before.why.get(family), before.elsewhere.get(family)):
                hopeful = any(target.slice in self.unprobed for target in built.planned[family].targets)
                queue.apply_route(route, built.why[family], hopeful or family in built.elsewhere)
        self.redirect_waiting()
        if (built.revision, built.routes, built.why) != (before.revision, before.routes, before.why):
            LOG.info("table", revision=str(built.revision), live=_live_count(built), why=built.summary)
            self.changed.set()

    def reads_lengths(self, family: str = "") -> bool:
        """Whether a family's queue goes by predicted lengths; "": any family's."""
        routes = self.table.routes
        asked = [routes[family]] if family in routes else [] if family else routes.values()
        return any(find(Kind.QUEUE, route.queue, QUEUES).traits.lengths for route in asked)

    @property
    def each_queue(self) -> Iterable[AsyncFamilyQueue]:
        """All family queues, each once."""
        return self._queues.values()

    def slo_ms(self, family: str, parameters: RequestParameters) -> float:
        """Latency objective of a request: its own, its class's or its family's; 0 = none is known."""
        if parameters.slo_ms:
            return parameters.slo_ms
        table = self.table
        if parameters.slo_class:
            route = table.routes.get(table.chains.get(family, ("",))[0])
            of_class = route.class_slo_ms.get(parameters.slo_class, 0.0) if route is not None else 0.0
            if of_class:
                return of_class
        objective = table.objectives.get(family)
        return objective.slo_ms if objective is not None else 0.0

    def token_slo(self, family: str, slo_class: str) -> TokenSlo:
        """Objectives of a stream's tokens: its class's, else its family's."""
        table = self.table
        route = table.routes.get(table.chains.get(family, ("",))[0]) if slo_class else None
        if route is not None and slo_class in route.class_token_slo:
            return route.class_token_slo[slo_class]
        objective = table.objectives.get(family)
        return objective.token_slo if objective is not None else NO_TOKEN_SLO

    def _queue_of(self, route: Route) -> AsyncFamilyQueue:
        """The queue of a family, or of the group that its router takes; it brings along what it had in another one."""
        family = route.family
        group = find(Kind.ROUTER, route.router, ROUTERS).traits.group
        key = (route.router, route.queue) if group else (family,)
        if key not in self._queues:
            self._queues[key] = AsyncFamilyQueue(key[0], self._clock, self._settings.no_slice_wait_s, self.changed.set)
            self._queues[key].on_carbon(self.carbon_ratio)
        queue, before = self._queues[key], self.queues.get(family)
        if before is not None and before is not queue:
            queue.take_over(family, before)
            if family in self.sequences:
                self.sequences[family].switch_queue(queue)
        self.queues[family] = queue
        return queue

    def in_flight(self) -> Counter[SliceKey]:
        """Requests in flight on each slice, over all families."""
        total: Counter[SliceKey] = Counter()
        for queue in self.each_queue:
            total.update(queue.in_flight)
        return total

    def in_flight_by_model(self) -> Counter[Place]:
        """Requests in flight of each model on each slice."""
        total: Counter[Place] = Counter()
        for queue in self.each_queue:
            total.update(queue.in_flight_by_family())
        return total

    def loads(self) -> tuple[SliceLoad, ...]:
        """Loads of every family, or stage of one, on every slice that is planned, ejected or still busy: what an
        acknowledgement says."""
        in_flight, out = self.in_flight_by_model(), self._ejections.out
        sequences = {(slice_, f): n for f, queue in self.sequences.items() for slice_, n in queue.open_on.items()}
        planned = {(target.slice, model) for model, route in self.table.planned.items() for target in route.targets}
        busy = {*planned, *in_flight, *sequences}
        ejected = {slice_ for slice_, _ in self._ejections.reasons()}
        alone = {(slice_, "") for slice_ in ejected - {slice_ for slice_, _ in busy}}
        return tuple(
            SliceLoad(one[0], in_flight[one], sequences.get(one, 0), out(*one) or one in alone, one[1])
            for one in sorted(busy | alone)
        )

    def families_of(self, slice_: SliceKey) -> tuple[str, ...]:
        """Models, of families or of their stages, that the plan routes to a slice."""
        if self._families_of is not self.table.planned:
            self._families_of, self._families = self.table.planned, {}
            for family, route in self._families_of.items():
                for target in route.targets:
                    self._families.setdefault(target.slice, {})[family] = None
        return tuple(self._families.get(slice_, ()))

    def stale_nodes(self) -> dict[str, float]:
        """Nodes that are routed to and whose status is old, with its age [s]."""
        routed = self._routed_nodes()
        now_s, limit_s = self._clock.now_s(), self._settings.node_stale_s
        ages = {name: now_s - node.observed_at_s for name, node in self.nodes.items() if name in routed}
        return {name: age_s for name, age_s in ages.items() if age_s > limit_s}

    def _routed_nodes(self) -> set[str]:
        return {t.slice.device.split("/")[0] for r in self.table.planned.values() for t in r.targets}

    def simulated(self) -> bool:
        """Whether any node that reports is simulated."""
        return any(node.simulated for node in self.nodes.values())

    def open_sequences(self) -> Counter[SliceKey]:
        """Open sequences on each slice, over all families."""
        total: Counter[SliceKey] = Counter()
        for queue in self.sequences.values():
            total.update(queue.open_on)
        return total

    def _endpoint(self, slice_: SliceKey) -> Endpoint | None:
        return self.table.endpoints.get(slice_)

    def _moved_to(self, pin: Pin) -> str:
        if self._endpoint(pin.slice) == pin.endpoint:
            return ""
        return f"{pin.slice.name} is gone" if self._endpoint(pin.slice) is None else f"{pin.slice.name} was restarted"

    def lose_sequences(self, lost: Callable[[Pin], str], model: str = "") -> None:
        """End the sequences, of one model or of all, whose pin is lost; `lost` tells why, "" = it is not."""
        for family, queue in self.sequences.items():
            if model in ("", family):
                queue.lose(lost)

    def _needed(self, table: RoutingTable) -> Mapping[SliceKey, Endpoint]:
        """Planned slices that have an address, and whatever still has requests in flight or open sequences."""
        wanted = {t.slice for route in table.planned.values() for t in route.targets}
        wanted |= {*self.in_flight(), *self.open_sequences()}
        return {slice_: endpoint for slice_, endpoint in table.endpoints.items() if slice_ in wanted}

    def redivide_credits(self) -> None:
        """Divide the credits again: who shares them has changed."""
        LOG.info("credits are divided again", workers=len(self.membership.sharers))
        self.rebuild()
        self.changed.set()


def _live_count(table: RoutingTable) -> dict[str, int]:
    return {family: len(route.targets) for family, route in table.routes.items()}

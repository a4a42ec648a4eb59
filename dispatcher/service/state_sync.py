"""Exchange of state with Redis: plan and nodes in, acknowledgements and load windows out.

No request waits for Redis. While Redis is unavailable the last good table serves. The table is also on disk: a
dispatcher that starts without Redis serves by it, each slice after a successful probe.
"""

import asyncio
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from dispatcher.routing.core.membership import AGREE_ACK_S, RESTART_STEP
from dispatcher.service.core.fallback_rungs import Dependencies, active_rungs
from dispatcher.service.core.plan_fence import Leader, PlanFence, check_epoch
from dispatcher.service.local_worker import LocalWorker
from dispatcher.service.metrics import DispatcherMetrics
from dispatcher.slice_health.core.ejection import Failure
from trefoil.core.carbon import CarbonRatio, CarbonReading, shift_reading
from trefoil.core.common import Revision
from trefoil.core.demand import LoadWindow, TableAck
from trefoil.core.energy import ReceiptRates
from trefoil.core.errors import InvalidInput, PlanError, StartError, StateUnavailable, TrefoilError, brief
from trefoil.core.fleet import NodeStatus
from trefoil.core.jobs.planned import PlannedJobs
from trefoil.core.objective import TenantRungs
from trefoil.core.plan import NodePlan, Plan
from trefoil.runtime import codec
from trefoil.runtime.files import FileTrouble, disk_error, replace_file
from trefoil.runtime.security.plan_keys import PlanKeys
from trefoil.runtime.sightings import Sightings
from trefoil.runtime.state import LEASE_TTL_S, State
from trefoil.runtime.state_files import STRANGE, of_shape, read_bytes, refuse_newer, set_aside

LOG = structlog.get_logger()
ROLE: Final = "controller"
WINDOWS_PENDING_MAX: Final = 120  # kept for Redis while it is away; older ones are dropped and counted
WATCHERS_MAX: Final = 64
WATCHER_WINDOWS_MAX: Final = 20
UNLED_S: Final = LEASE_TTL_S / 2  # a lease that Redis lost, or whose time its clock jumped over, is back by then


class StateSync:
    """Synchronises this worker with Redis: plan and nodes in, acknowledgements and load windows out. A part of the
    service."""

    def __init__(self, local: LocalWorker, state: State, gauges: DispatcherMetrics) -> None:
        self._local = local
        self._health = local.health
        self._accounting = local.accounting
        self._routing = local.routing
        self._clock = local.clock
        self._settings = settings = local.settings
        self.plan_keys = PlanKeys.read(settings.cluster, settings.plan_key_file, routes=True)
        self._fence = PlanFence(bool(self.plan_keys))
        self._plan_read: Plan | None = None  # the one that is routed by, as its writer signed it
        self._refused: tuple[Revision, str] = (Revision(), "")
        self._state = state
        self._gauges = gauges
        self._ack_key = state.keys.ack(*local.id)
        self._load_key = state.keys.load(*local.id)
        self._file = TableFile(local.settings.state_dir / "dispatcher")
        self._disk = FileTrouble("table", "a worker that starts while Redis is away would know an older table", gauges)
        self._pending: deque[LoadWindow] = deque(maxlen=WINDOWS_PENDING_MAX)
        self._watchers: set[asyncio.Queue[LoadWindow]] = set()
        self._acks: dict[str, TableAck] = {}
        self._sightings = Sightings(self._clock)
        self.trouble = ""
        self._away_since_s: float | None = None
        self._from_disk = False
        self._controller, self._led_s = "", 0.0
        self._rungs_read: TenantRungs | None = None
        self._ratio_key = ""  # of the series that the receipts name

    async def init(self) -> None:
        """Serve what was last known, then what Redis says, if it answers; but know first who serves already."""
        await self._delete_predecessor_ack()
        await self._read_acks()
        self._load_saved_table()
        await self._refresh()
        await self._trust_reported_slices()
        self._update_rungs()

    async def run(self) -> None:
        """Watch, acknowledge and flush, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(), name="watch plan and nodes")
            group.create_task(self._acknowledge(), name="acknowledge tables")
            group.create_task(self._flush(), name="flush load windows")

    async def shutdown(self) -> None:
        """Flush a last window and delete the acknowledgement that others would wait for."""
        await self._close_window()
        try:
            await self._state.delete_unfenced(self._ack_key)
        except StateUnavailable as error:
            LOG.warning("acknowledgement left to expire", why=str(error))

    def subscribe(self) -> "asyncio.Queue[LoadWindow]":
        """Subscribe to each load window from now on; the oldest are dropped for a watcher that does not keep up.

        Raises:
            InvalidInput: too many watch already.
        """
        if len(self._watchers) >= WATCHERS_MAX:
            raise InvalidInput(f"{WATCHERS_MAX} clients watch already", remedy="read the stream in Redis")
        queue: asyncio.Queue[LoadWindow] = asyncio.Queue(WATCHER_WINDOWS_MAX)
        self._watchers.add(queue)
        return queue

    def unsubscribe(self, queue: "asyncio.Queue[LoadWindow]") -> None:
        """End a subscription to load windows."""
        self._watchers.discard(queue)

    async def _delete_predecessor_ack(self) -> None:
        """The acknowledgement of the worker whose place we took: it is dead, and no task should wait for it."""
        dispatcher, worker = self._local.id
        if worker >= RESTART_STEP:
            try:
                await self._state.delete_unfenced(self._state.keys.ack(dispatcher, worker - RESTART_STEP))
            except StateUnavailable as error:
                LOG.warning("acknowledgement left to expire", why=str(error))

    async def _watch(self) -> None:
        keys = self._state.keys
        async for key in self._state.changes():
            if key is None or key == keys.plan() or key.startswith(keys.plan_node_prefix()):
                await self._refresh()
            elif key.startswith(keys.node_prefix()):
                await self._refresh(node_key=key)
            elif key.startswith(keys.ack_prefix()) and key != self._ack_key:
                await self._read_acks(key)
            if key is None or key in (keys.receipts(), self._ratio_key):
                await self._read_receipt_rates()
            if key is None or key == keys.tenant_rungs():
                await self._read_tenant_rungs()

    async def _refresh(self, node_key: str | None = None) -> None:
        """Read what is routed by, or one node. Trouble of any kind leaves the last good table in force."""
        before = self._routing.table
        try:
            if node_key is None:
                await self._read_all()
            elif (node := await self._state.get(node_key, NodeStatus)) is not None:
                others = (n for n in self._routing.nodes.values() if n.node != node.node)
                self._routing.set_nodes([*others, self._in_own_time(node)])
        except TrefoilError as error:
            if not isinstance(error, StateUnavailable):
                self._away_since_s = None
            else:
                self._fence.forget()
                self._away_since_s = self._clock.monotonic_s() if self._away_since_s is None else self._away_since_s
            self._log_trouble_once(error)
            return
        self._away_since_s = None
        if self.trouble:
            LOG.info("plan and nodes are read again")
            self.trouble = ""
        if self._routing.table != before or self._disk.why:
            self._save_table()

    async def _read_acks(self, ack_key: str | None = None) -> None:
        """Who else serves: another worker has acknowledged, or has gone; without a key, all of them."""
        try:
            if ack_key is None:
                await self._scan_acks()
            elif (ack := await self._state.get(ack_key, TableAck)) is not None:
                self._acks[ack_key] = ack
            elif ack_key not in self._state.unreadable:
                self._acks.pop(ack_key, None)
        except TrefoilError as error:
            self._log_trouble_once(error)
            return
        self._routing.set_acks(self._acks.values())

    async def _scan_acks(self) -> None:
        """All acknowledgements; of one that cannot be read now, the last one."""
        found = await self._state.scan(self._state.keys.ack_prefix(), TableAck)
        self._acks = {key: ack for key, ack in self._acks.items() if key in self._state.unreadable} | found

    async def _read_all(self) -> None:
        keys = self._state.keys
        plan = await self._state.get(keys.plan(), Plan)
        nodes = await self._state.scan(keys.node_prefix(), NodeStatus)
        node_plans = await self._state.scan(keys.plan_node_prefix(), NodePlan)
        await self._scan_acks()
        self._routing.learn_variants(node_plans.values(), self.plan_keys.verify)
        self._routing.set_nodes(map(self._in_own_time, nodes.values()))
        self._routing.set_acks(self._acks.values())
        holder = await self._state.holder(ROLE)
        leader = Leader(await self._state.epoch_of(ROLE), holder.epoch if holder is not None else 0)
        now_s = self._clock.monotonic_s()
        if holder is not None:
            self._controller, self._led_s = holder.holder, now_s
        elif now_s - self._led_s >= UNLED_S:
            self._controller = ""
        if plan is not None:
            self._obey(plan, leader)
            self._from_disk = False
            return
        self._note_refusal(Revision(), "")
        if why := self._state.unreadable.get(keys.plan()):
            raise PlanError(why)

    def _obey(self, plan: Plan, leader: Leader) -> None:
        """Route by a plan as it stands in Redis; raises TrefoilError where it is refused."""
        if plan != self._plan_read:
            try:
                self.plan_keys.require(self._settings.redis_url.get_secret_value(), self._settings.insecure)
                bare, routing, now_s = self.plan_keys.verify_routes(plan), self._routing, self._clock.monotonic_s()
                forgeable = self._from_disk and not self.plan_keys
                routes = not forgeable and routing.plan is not None and bool(routing.plan.routes)
                beats = self._fence.check(bare.revision, routing.obeyed, leader, now_s, routes=routes)
                routing.set_plan(bare, beats_fence=beats)
            except TrefoilError as error:
                self._note_refusal(plan.revision, str(error))
                raise
            self._plan_read = plan
        self._fence.forget()
        self._note_refusal(Revision(), "")

    def _note_refusal(self, revision: Revision, why: str) -> None:
        """Say in the acknowledgement, and by a metric, which plan is refused and why; "": none."""
        if self._refused != (revision, why):
            self._refused = revision, why
            self._gauges.set("trefoil_plan_refused", bool(why))
            self._routing.changed.set()

    def _in_own_time(self, node: NodeStatus) -> NodeStatus:
        """A status with the time that it is of by our clock."""
        own_s = self._sightings.look(node.node, node.observed_at_s)
        return node if own_s == node.observed_at_s else replace(node, observed_at_s=own_s)

    def _update_rungs(self) -> None:
        """On which rungs we stand."""
        local, away_s = self._local, self._away_since_s
        before = set(local.active_rungs)
        local.active_rungs = active_rungs(
            Dependencies(
                redis_away_s=self._clock.monotonic_s() - away_s if away_s is not None else 0.0,
                from_disk=self._from_disk,
                planned=self._routing.plan is not None,
                controller=self._controller,
                stale_nodes=self._routing.stale_nodes(),
                stale_receipts=self._accounting.receipts.stale_reasons,
                lengths_instead=local.lengths.trouble,
                plan_refused=self._refused[1],
            )
        )
        for cause in set(local.active_rungs) - before:
            LOG.warning("rung", cause=cause, why=local.active_rungs[cause])
        for cause in before - set(local.active_rungs):
            LOG.info("rung left", cause=cause)

    async def _read_receipt_rates(self) -> None:
        """Read what answers cost and the carbon of now. Trouble leaves the last rates in force."""
        keys = self._state.keys
        reading, ratio = None, None
        try:
            told = await self._state.get(keys.receipts(), ReceiptRates)
            if told is not None:
                self._ratio_key = keys.carbon_ratio(told.series)
                reading = await self._state.get(keys.carbon_now(told.series), CarbonReading)
                ratio = await self._state.get(self._ratio_key, CarbonRatio)
        except TrefoilError:  # of Redis the plan's reader complains; receipts say that their rates are old
            told = None
        if told is not None:
            told = replace(told, observed_at_s=self._sightings.look(keys.receipts(), told.observed_at_s))
        if reading is not None:
            reading = shift_reading(reading, -self._clock.calendar_ahead_s())
        if ratio is not None:
            ratio = replace(ratio, observed_at_s=ratio.observed_at_s - self._clock.calendar_ahead_s())
        self._accounting.set_receipt_rates(told, reading, self._clock.now_s())
        self._routing.set_carbon_ratio(ratio, reading)

    async def _read_tenant_rungs(self) -> None:
        """Read the rungs of budgets. Trouble leaves the last ones in force, for as long as they hold."""
        key = self._state.keys.tenant_rungs()
        try:
            told = await self._state.get(key, TenantRungs)
            if told is None or told == self._rungs_read:
                return
            self.plan_keys.require(self._settings.redis_url.get_secret_value(), self._settings.insecure)
            self.plan_keys.verify_rungs(told)
            check_epoch("tenant_rungs in Redis", Revision(told.epoch), await self._state.epoch_of(ROLE))
        except TrefoilError as error:
            if not isinstance(error, StateUnavailable):
                self._log_trouble_once(error)
            return
        self._rungs_read = told
        own_s = self._sightings.look(key, told.observed_at_s)
        self._local.budgets.set(told, own_s, signed=bool(self.plan_keys))

    def verify_jobs(self, plan: PlannedJobs) -> None:
        """Verify that the controller wrote a plan of jobs.

        Raises:
            PlanError: it is not signed where it has to be, or is not what was signed.
        """
        self.plan_keys.require(self._settings.redis_url.get_secret_value(), self._settings.insecure)
        self.plan_keys.verify_jobs(plan)

    def _log_trouble_once(self, error: TrefoilError) -> None:
        """Once for each new trouble."""
        if str(error) != self.trouble:
            self.trouble = str(error)
            LOG.warning("the last good table stays in force", why=str(error))

    async def _acknowledge(self) -> None:
        """At once on every change, every ack_s, and more often until all workers agree."""
        ack_s = self._settings.ack_s
        while True:
            self._routing.check_agreement()
            self._routing.changed.clear()
            ack = self._acknowledgement()
            try:
                await self._state.put_unfenced(self._ack_key, ack)
            except StateUnavailable:
                pass  # counted by State; agents see the acknowledgement expire
            try:
                async with asyncio.timeout(ack_s if self._routing.agreed else min(ack_s, AGREE_ACK_S)):
                    await self._routing.changed.wait()
            except TimeoutError:
                continue

    def _acknowledgement(self) -> TableAck:
        return TableAck(
            dispatcher=self._local.id[0],
            worker=self._local.id[1],
            table=self._routing.table.revision,
            slices=self._routing.loads(),
            observed_at_s=self._clock.now_s(),
            peer_target=self._local.peer_target,
            leaving=self._routing.membership.leaving,
            counts=self._routing.membership.sharer_names,
            refused=brief(self._refused[1]),
            refused_plan=self._refused[0],
        )

    async def _flush(self) -> None:
        while True:
            await self._clock.sleep(self._settings.window_s)
            self._update_rungs()
            self._routing.refresh_carbon_ratio()
            await self._close_window()

    async def _close_window(self) -> None:
        window = self._accounting.close_window(self._clock.now_s(), self._routing.table.revision)
        self._gauges.window(window)
        for queue in self._watchers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(window)
        if len(self._pending) == self._pending.maxlen:
            LOG.warning("load window lost: Redis has been away too long", seq=self._pending[0].seq)
        self._pending.append(window)
        try:
            while self._pending:
                await self._state.append_unfenced(self._load_key, self._pending[0])
                self._pending.popleft()
        except StateUnavailable:
            pass  # counted by State; the window stays pending

    def _load_saved_table(self) -> None:
        """The last table from disk: its slices are out until a probe has found them."""
        try:
            known = self._file.load()
        except TrefoilError as error:
            LOG.warning("the table on disk is not used", why=str(error))
            return
        if known is None:
            return
        plan, nodes = known
        now_s = self._clock.now_s()
        self._routing.set_nodes(replace(node, observed_at_s=min(node.observed_at_s, now_s)) for node in nodes)
        for target in (target for route in plan.routes for target in route.targets):
            self._routing.unprobed.add(target.slice)
            self._health.eject(target.slice, Failure.UNREACHABLE, "known from disk only, not probed yet")
        try:
            self._routing.set_plan(self.plan_keys.verify_routes(plan))
            self._plan_read, self._from_disk = plan, True
        except TrefoilError as error:
            LOG.warning("the plan on disk is not used", why=str(error))

    async def _trust_reported_slices(self) -> None:
        """Slices that their agents tell of through Redis are not known from disk only: a worker that is started again
        serves at once, and with all its credits."""
        try:
            found = await self._state.scan(self._state.keys.node_prefix(), NodeStatus)
        except TrefoilError:  # said already: then probes must tell
            return
        since_s = self._clock.now_s() - self._settings.node_stale_s
        nodes = map(self._in_own_time, found.values())
        told = (device for node in nodes if node.observed_at_s >= since_s for device in node.devices)
        self._health.trust(part.key for device in told for part in device.slices)

    def _save_table(self) -> None:
        if self._plan_read is None:
            return
        try:
            self._file.save(self._plan_read, tuple(self._routing.nodes.values()))
        except OSError as error:
            self._disk.begin(self._file.path, error)
        else:
            self._disk.end()


class TableFile:
    """File of what the table was built from: line 1 the plan, then a node a line, as canonical JSON."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "table.jsonl"

    def save(self, plan: Plan, nodes: tuple[NodeStatus, ...]) -> None:
        """Replace the file in one step, on the loop that serves: what a loss of power tears is not used. Raises
        OSError.
        """
        replace_file(self.path, "".join(f"{codec.to_json(each)}\n" for each in (plan, *nodes)), sync=False)

    def load(self) -> tuple[Plan, tuple[NodeStatus, ...]] | None:
        """None if nothing was saved, or it was set aside: so is one of a newer version, as Redis has what it holds.

        Raises:
            DiskUnavailable: the disk does not give it.
        """
        try:
            data = read_bytes(self.path)
            if data is None:
                return None
            first, *rest = [codec.parse_json(line) for line in data.splitlines()]
            refuse_newer(self.path, first)
            return of_shape(Plan, first), tuple(of_shape(NodeStatus, node) for node in rest)
        except (*STRANGE, StartError) as error:
            set_aside(self.path, str(error))
            return None
        except OSError as error:
            raise disk_error(self.path, error, "read", "it is begun without a table") from error

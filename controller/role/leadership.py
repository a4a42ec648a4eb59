"""Leadership of a controller: one lease, its epoch, and fenced writes under it.

A controller does not lead under an epoch that it cannot keep on disk. Should Redis be emptied and this process end, the
next one could take the same epoch again. Agents and dispatchers would then take its plans for old ones. So the
controller stands by and says why. A controller with a sound disk may take the role, and the plan in force stays
meanwhile. A leader keeps the role.

A controller knows what it read from its disk at its start and what it did since. Once another has led, that is not
enough: objectives, plans and commands may be newer. It stands by and copies to its disk what the other leaves in Redis
(`kept_files.py`). As soon as the role is free, it starts again and reads what is on the disk by then.
"""

import os
import socket
from collections.abc import Callable, Iterable

import structlog

from controller.role.disk_store import DiskStore
from controller.role.kept_files import LED, ROLE, KeptFiles
from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.core.demand import TableAck
from trefoil.core.outside.plausible import LED_AHEAD_MAX
from trefoil.runtime.clock import Clock
from trefoil.runtime.fenced import Write
from trefoil.runtime.security.plan_keys import FIELD, PlanKeys
from trefoil.runtime.state import LEASE_TTL_S, State
from trefoil.runtime.state_errors import believed_epoch
from trefoil.runtime.telemetry import Metrics

RENEWALS_PER_TTL = 4
NO_KEYS = PlanKeys("")
ANEW = "start it again: it continues from the other's state"
KEPT_AHEAD_MAX = LED_AHEAD_MAX // 2  # what is kept may be above a believed report, and is exceeded in turn
COPY_S = 2.0  # a standby copies what the other leaves so often: Redis may be emptied


class Leadership:
    """Lease of the role `controller`, and fenced writes under it. A new epoch is above that of Redis, of this disk, and
    of every agent and dispatcher worker: what they have obeyed fences older plans.
    """

    def __init__(
        self,
        state: State,
        disk: DiskStore,
        clock: Clock,
        metrics: Metrics,
        epochs_seen: Callable[[], Iterable[int]],
        plan_keys: PlanKeys = NO_KEYS,
    ) -> None:
        """`epochs_seen`: what nodes and workers obey, as last observed; acknowledgements are read again."""
        self._state, self._disk, self._clock, self._metrics = state, disk, clock, metrics
        self._files = KeptFiles(disk, state, plan_keys)
        self._plan_keys, self._signed_by = plan_keys, plan_keys.signing
        self._copied_s = clock.monotonic_s()
        self._epochs_seen = epochs_seen
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._lease: Lease | None = None
        self._known_epoch = self._kept_epoch()  # the highest that this process led under, or found at its start
        self._led = self._another_led = False
        self._seen: Lease | None = None  # of another controller, when it was first seen here
        self._log = structlog.get_logger()
        self.why = "not acquired yet"
        self.leader = ""
        """Another controller that leads now, as far as this one has seen it live; "": none is known."""

    @property
    def epoch(self) -> int:
        """Epoch of the lease that is held; 0 when none is."""
        return self._lease.epoch if self._lease is not None and self._state.holds(self._lease) else 0

    def require(self) -> None:
        """Require the lease; raises `errors.Unavailable` unless it is held."""
        if not self.epoch:
            raise errors.Unavailable(f"this controller does not lead: {self.why}")

    async def maintain(self) -> None:
        """Acquire and renew the lease forever; `epoch` changes when it was lost in between.

        Raises:
            errors.RoleFree: another controller has led meanwhile, or another key signs plans now; start again.
        """
        while True:
            try:
                await self._step()
            except errors.StateUnavailable as error:
                self._log_reason(f"Redis is down: {error}")
            except errors.DiskUnavailable as error:
                self._log_reason(f"standing by: no epoch can be kept: {error}")
            self._metrics.set("trefoil_lease_epoch", self.epoch, role=ROLE)
            await self._clock.sleep(LEASE_TTL_S / RENEWALS_PER_TTL if self.epoch else 0.5)

    async def _step(self) -> None:
        if self._plan_keys.signing != self._signed_by:
            raise errors.RoleFree(f"another key of {FIELD} signs: all plans are signed again", remedy=ANEW)
        if self._lease is not None:
            if await self._state.renew(self._lease):
                return
            self._log.warning("lease lost", role=ROLE, epoch=self._lease.epoch)
            self._lease = None
        kept, floor = await self._highest_obeyed()
        if kept > self._known_epoch or (self._led and floor > self._known_epoch):
            self._another_led = True
        if self._another_led:
            await self._await_free()
            return
        if floor > kept or self._disk.trouble:
            self._keep_epoch(floor)  # before the role is taken: each try costs an epoch
        lease = await self._state.acquire(ROLE, self._holder, floor_epoch=floor)
        if lease is None:
            await self._stand_by()
            return
        try:
            self._keep_epoch(lease.epoch)  # before RoleFree: the next start takes a higher epoch
            if await self._files.overtaken(lease.epoch):
                raise errors.RoleFree("another controller has left what this one has not read", remedy=ANEW)
            self._files.lead(lease.epoch)
        except errors.TrefoilError:
            await self._state.release(lease)
            raise
        self._lease, self._led, self.why, self.leader = lease, True, "", ""
        self._log.info("lease acquired", role=ROLE, epoch=lease.epoch)

    async def _highest_obeyed(self) -> tuple[int, int]:
        """Epoch on this disk, and the highest of it and those that readers obey. A reader's epoch too far beyond the
        disk's is left out, so that one false value neither uses epochs up nor hides the others."""
        acks = await self._state.scan(self._state.keys.ack_prefix(), TableAck)
        seen = (*self._epochs_seen(), *(ack.table.epoch for ack in acks.values()))
        known = max(seen, default=0) or await self._state.epoch_of(ROLE)
        kept = self._kept_epoch()
        if not believed_epoch(kept + 1, known, KEPT_AHEAD_MAX):
            self._forget_epochs(known)
            kept = self._known_epoch
        return kept, max([kept, *(believed_epoch(epoch, kept) for epoch in seen)])

    def _forget_epochs(self, known: int) -> None:
        """Forget what a file of this disk says of epochs: it is too far beyond all that readers, or Redis, know. Agents
        would refuse a controller that leads under the next one."""
        self._log.warning("the epoch on disk is void", role=ROLE, epoch=self._kept_epoch(), known=known)
        kept, led = (int(self._disk.load_plain(name).get("epoch", 0)) for name in ("epoch", LED))
        if not believed_epoch(led + 1, known, KEPT_AHEAD_MAX):
            self._disk.save(LED, {"epoch": 0})  # as if it were lost: copies of another controller are taken over
        known = max(known, *(one for one in (0, kept, led) if believed_epoch(one + 1, known, KEPT_AHEAD_MAX)))
        self._disk.save("epoch", {"epoch": known})
        self._known_epoch = known

    async def _stand_by(self) -> Lease | None:
        holder = await self._state.holder(ROLE)
        if holder is not None and holder.holder != self._holder:
            self._seen = self._seen or holder
            self._another_led |= self._led or holder != self._seen  # it is not the one of a process that is dead
            self.leader = holder.holder if self._another_led else ""
            await self._follow(holder)
        self._log_reason(f"standing by: {holder.holder if holder else 'another process'} holds the role")
        return holder

    async def _await_free(self) -> None:
        if await self._stand_by() is None:
            raise errors.RoleFree(
                "another controller has led since this one read its disk, and the role is free now", remedy=ANEW
            )

    async def _follow(self, holder: Lease) -> None:
        """Keep the leader's files, and no epoch below the leader's: Redis may be emptied, and the leader may end."""
        if self._another_led and self._clock.monotonic_s() - self._copied_s >= COPY_S:
            self._copied_s = self._clock.monotonic_s()
            await self._files.take_over()
            if believed_epoch(holder.epoch, self._known_epoch) > self._known_epoch:
                self._keep_epoch(holder.epoch)

    def _keep_epoch(self, epoch: int) -> None:
        self._disk.save("epoch", {"epoch": epoch})
        self._known_epoch = max(self._known_epoch, epoch)

    def _kept_epoch(self) -> int:
        return max(int(self._disk.load_plain(name).get("epoch", 0)) for name in ("epoch", LED))

    def _log_reason(self, why: str) -> None:
        if why != self.why:
            self.why = why
            self._log.warning("no authority", role=ROLE, why=why)

    def can_exceed(self, epoch: int) -> bool:
        """Whether a next epoch can be above this one, which a reader says that it obeys."""
        return believed_epoch(epoch, self._kept_epoch()) == epoch

    async def cede_to(self, epoch: int) -> None:
        """Cede to a higher epoch that an agent obeys (Redis lost ours): release the lease, then take a higher one."""
        kept = self._kept_epoch()
        self._known_epoch = max(believed_epoch(epoch, kept), kept)
        self._disk.save_later("epoch", {"epoch": self._known_epoch})  # the agent tells it again
        await self.release()

    async def write(self, writes: Iterable[Write]) -> None:
        """Write to Redis under the lease, with copies of the files that have changed: fenced, all or nothing.

        Raises:
            errors.Fenced: the role is not held (any more).
            errors.StateUnavailable: Redis does not answer.
        """
        if self._lease is None:
            raise errors.Fenced(f"the role {ROLE} is not held: {self.why}", remedy="acquire it, then repeat")
        copies = self._files.copies()
        await self._state.write(self._lease, [*writes, *copies])
        self._files.copied(copies)

    async def copy_files(self) -> None:
        """Copy the files that have changed to Redis, if no write has done so; raises as `write`."""
        if self._disk.uncopied:
            await self.write(())

    async def release(self) -> None:
        """Release the lease at the end, so that the next controller need not wait."""
        if self._lease is not None:
            try:
                await self.copy_files()
            except (errors.Fenced, errors.StateUnavailable) as error:
                self._log.warning("the copies for the next controller are incomplete", error=str(error))
            lease, self._lease = self._lease, None
            try:
                await self._state.release(lease)
            except errors.StateUnavailable as error:
                self._log.warning("lease not released", error=str(error))

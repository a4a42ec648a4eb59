"""Leader election of a zone: one process of the cluster polls and writes, under a lease with a rising epoch.

Renewed twice a second, so that an emptied Redis is noticed well within one. The epoch is kept on disk, too: an
emptied Redis cannot send it back. While Redis is silent the role is ours for as long as no other process can have it.

A disk that takes no epoch does not keep a feed from leading, because readings are worth more than the guard by that
epoch. The guard matters if Redis is emptied and this process restarts while the disk still refuses. At worst that costs
followers a reading carried on.
"""

import os
import socket
from pathlib import Path
from typing import Final

from trefoil.core.common import Lease
from trefoil.runtime.clock import Clock
from trefoil.runtime.files import FileTrouble, replace_file
from trefoil.runtime.state import State
from trefoil.runtime.state_errors import believed_epoch
from trefoil.runtime.state_files import as_epoch, read_state
from trefoil.runtime.telemetry import Metrics

RENEW_S: Final = 0.5


class LeaderElection:
    """Leader election of one zone, as this process sees it."""

    def __init__(self, state: State, clock: Clock, name: str, epoch_file: Path, metrics: Metrics | None = None) -> None:
        self.name = name
        self.identity = f"{socket.gethostname()}:{os.getpid()}"
        self.holder = ""
        """Holder at the last look."""
        self._state, self._clock, self._epoch_file = state, clock, epoch_file
        self._lease: Lease | None = None
        self._check_at_s = float("-inf")
        self._highest_epoch = 0
        self._trouble = FileTrouble("epoch", "the feed leads on, its epoch in memory", metrics)
        self._metrics = metrics

    @property
    def lease(self) -> Lease | None:
        """Lease of this process, while it can be valid."""
        return self._lease if self._lease is not None and self._state.holds(self._lease) else None

    def check_due(self) -> bool:
        """Whether to check the lease again; true once each time."""
        at_s = self._clock.monotonic_s()
        if at_s < self._check_at_s:
            return False
        self._check_at_s = at_s + RENEW_S
        if self._trouble.why:
            self._save_epoch()
        return True

    async def renew(self) -> bool:
        """Renew the lease; False: it is not ours.

        Raises:
            errors.StateUnavailable: Redis does not answer; `lease` tells how long it can still be ours.
        """
        if self._lease is not None and await self._state.renew(self._lease):
            return True
        self._lease = None
        return False

    async def is_free(self) -> bool:
        """Whether the lease is free.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        held = await self._state.holder(self.name)
        self.holder = held.holder if held is not None else ""
        if held is not None and held.epoch > self._highest_epoch:  # an emptied Redis must not send us back
            known = self._known_epoch()
            believed = max(believed_epoch(held.epoch, known), known)
            if believed > self._highest_epoch:
                self._highest_epoch = believed
                self._save_epoch()
        return held is None

    async def counted_epoch(self) -> int:
        """Highest epoch that the role was taken under, as far as it can be true.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        counted = await self._state.epoch_of(self.name)
        return max(believed_epoch(counted, self._highest_epoch), self._highest_epoch)

    async def acquire(self) -> Lease | None:
        """Acquire the lease; None: another process was faster.

        Raises:
            errors.StateUnavailable: Redis does not answer.
            errors.StartError: a newer version has written the epoch on this disk.
        """
        lease = await self._state.acquire(self.name, self.identity, floor_epoch=self._known_epoch())
        if lease is None:
            return None
        self._lease, self.holder, self._highest_epoch = lease, self.identity, lease.epoch
        self._save_epoch()
        return lease

    def _known_epoch(self) -> int:
        try:
            return max(self._highest_epoch, load_epoch(self._epoch_file, self._metrics))
        except OSError as error:
            self._trouble.begin(self._epoch_file, error)
            return self._highest_epoch

    def _save_epoch(self) -> None:
        try:
            save_epoch(self._epoch_file, self._highest_epoch)
        except OSError as error:
            self._trouble.begin(self._epoch_file, error)
        else:
            self._trouble.end()

    def forget(self) -> None:
        """Forget the lease: another process took it, or Redis was emptied. It is to be taken again at once."""
        self._lease = None
        self._check_at_s = float("-inf")

    async def release(self) -> None:
        """Release the lease, so that a successor need not wait for it to expire."""
        if self._lease is not None:
            await self._state.release(self._lease)
            self._lease = None


def load_epoch(path: Path, metrics: Metrics | None = None) -> int:
    """Load the highest epoch that this disk has seen; 0 when it never saw one, or what stood there was set aside: then
    Redis knows the highest.

    Raises:
        errors.StartError: a newer version has written it.
        OSError: it cannot be read.
    """
    return read_state(path, as_epoch, metrics) or 0


def save_epoch(path: Path, epoch: int) -> None:
    """Save an epoch, whole or not at all. Raises OSError."""
    replace_file(path, f"{epoch}\n")

"""Who asks and writes for a zone: one process of the cluster, under a lease with a rising epoch.

Renewed twice a second, so that an emptied Redis is noticed well within one. The epoch is kept on disk, too: whoever
emptied Redis cannot send it back. While Redis is silent the role is ours for as long as nobody else can have it.
"""

import os
import socket
from pathlib import Path
from typing import Final

from trefoil.core import errors
from trefoil.core.common import Lease
from trefoil.runtime.clock import Clock
from trefoil.runtime.state import State

RENEW_S: Final = 0.5


class Role:
    """The role of one zone, as this process sees it."""

    def __init__(self, state: State, clock: Clock, name: str, epoch_file: Path) -> None:
        self.name = name
        self.me = f"{socket.gethostname()}:{os.getpid()}"
        self.holder = ""
        """Whoever had it when we last looked."""
        self._state, self._clock, self._epoch_file = state, clock, epoch_file
        self._lease: Lease | None = None
        self._look_at_s = float("-inf")
        self._seen = 0

    @property
    def lease(self) -> Lease | None:
        """Ours, while it can be."""
        return self._lease if self._lease is not None and self._state.holds(self._lease) else None

    def due(self) -> bool:
        """Whether to look at it again; true once each time."""
        at_s = self._clock.monotonic_s()
        if at_s < self._look_at_s:
            return False
        self._look_at_s = at_s + RENEW_S
        return True

    async def renewed(self) -> bool:
        """Hold on to it; False: it is not ours.

        Raises:
            errors.StateUnavailable: Redis does not answer; `lease` tells how long it can still be ours.
        """
        if self._lease is not None and await self._state.renew(self._lease):
            return True
        self._lease = None
        return False

    async def free(self) -> bool:
        """Whether nobody has it.

        Raises:
            errors.StateUnavailable: Redis does not answer.
        """
        held = await self._state.holder(self.name)
        self.holder = held.holder if held is not None else ""
        if held is not None and held.epoch > self._seen:  # whoever empties Redis shall not send us back
            self._seen = max(held.epoch, read_epoch(self._epoch_file))
            write_epoch(self._epoch_file, self._seen)
        return held is None

    async def take(self) -> Lease | None:
        """Acquire it; None: somebody was faster.

        Raises:
            errors.StateUnavailable: Redis does not answer.
            errors.StartError: the disk does not hold an epoch where it should.
        """
        lease = await self._state.acquire(self.name, self.me, floor_epoch=read_epoch(self._epoch_file))
        if lease is None:
            return None
        write_epoch(self._epoch_file, lease.epoch)
        self._lease, self.holder, self._seen = lease, self.me, lease.epoch
        return lease

    def lost(self) -> None:
        """Somebody has overtaken us, or Redis was emptied: to be taken again, at once."""
        self._lease = None
        self._look_at_s = float("-inf")

    async def release(self) -> None:
        """Give it back, so that a successor need not wait for the lease to expire."""
        if self._lease is not None:
            await self._state.release(self._lease)
            self._lease = None


def read_epoch(path: Path) -> int:
    """The highest epoch that this disk has seen; 0 when it never saw one.

    Raises:
        errors.StartError: the file holds something else.
    """
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
    except ValueError as error:
        raise errors.StartError(
            "not a number", field=str(path), remedy="delete the file if no cluster uses it"
        ) from error


def write_epoch(path: Path, epoch: int) -> None:
    """Remember an epoch, whole or not at all."""
    beside = path.with_suffix(".new")
    beside.write_text(f"{epoch}\n")
    beside.replace(path)

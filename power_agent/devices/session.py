"""NVML session of a process: many threads call within it, one may end it and begin another.

NVML has one session per process, and GPUs are let go of only by ending it. A call that runs while it ends would read
freed memory. So calls are counted, and a change of the session waits until there is none, while new callers
wait for the change.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from power_agent.devices.errors import DeviceBusy


class Session:
    """Session that is used by many, or changed by one. A user must not enter it twice."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._users = 0
        self._changing = False

    @property
    def is_wanted(self) -> bool:
        """Whether a change waits: long users have to leave now."""
        return self._changing

    @contextmanager
    def use(self) -> Iterator[None]:
        """Use the session for a few calls; waits while it is changed."""
        with self._condition:
            self._condition.wait_for(lambda: not self._changing)
            self._users += 1
        try:
            yield
        finally:
            with self._condition:
                self._users -= 1
                self._condition.notify_all()

    @contextmanager
    def change(self, within_s: float) -> Iterator[None]:
        """Change the session, alone.

        Raises:
            DeviceBusy: a call has not returned `within_s`.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._changing)
            self._changing = True
            alone = self._condition.wait_for(lambda: not self._users, within_s)
        try:
            if not alone:
                raise DeviceBusy(
                    f"NVML cannot be closed: {self._users} calls have not returned for {within_s:g} s",
                    remedy="see the kernel's log for a GPU that hangs; restart this agent, running slices continue",
                )
            yield
        finally:
            with self._condition:
                self._changing = False
                self._condition.notify_all()

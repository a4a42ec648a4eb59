"""Seconds in which this machine ran: what a limit on what a program may take is measured with.

A machine that stands still for a moment (memory is reclaimed, another tenant has the cores) stands still for the
program as well. A thread that beats every 20 ms notices: of a longer gap between two beats
only a tenth of a second counts.
"""

import threading
import time
from types import TracebackType
from typing import Final, Self

BEAT_S: Final = 0.02
GAP_S_MAX: Final = 0.1


class Awake:
    """`with Awake() as took: ...`, then `took.seconds`; `between` any two moments inside."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._beat_at_s = time.monotonic()
        self._gaps: list[tuple[float, float]] = []  # without the part that counts
        self._lock = threading.Lock()  # of the last two: whoever asks right after a gap would see one without the other
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def between(self, start_s: float, end_s: float) -> float:
        """Seconds between two readings of time.monotonic()."""
        with self._lock:
            gaps = [*self._gaps, (self._beat_at_s + GAP_S_MAX, end_s)]  # the last one may still be going on
        return end_s - start_s - sum(max(0.0, min(end_s, b) - max(start_s, a)) for a, b in gaps)

    def _beat(self) -> None:
        before_s, ended = time.monotonic(), False
        while not ended:
            ended = self._end.wait(BEAT_S)
            now_s = time.monotonic()
            self.seconds += min(now_s - before_s, GAP_S_MAX)
            with self._lock:
                if now_s - before_s > GAP_S_MAX:
                    self._gaps.append((before_s + GAP_S_MAX, now_s))
                before_s = self._beat_at_s = now_s

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        self._thread.join()

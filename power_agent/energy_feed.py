"""Energy samples to those who watch: what the ledger's ring still holds, then each new one.

A watcher has a position and no queue. One that is slower than the ring loses the oldest samples, and sees by `seq`
that it did; nobody else notices.
"""

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Final

from power_agent.ledger import Ledger
from power_agent.node import Changes
from trefoil.core.energy import EnergySample
from trefoil.core.errors import Unavailable

CHUNK: Final = 64  # samples that a watcher holds at once
WATCHERS_MAX: Final = 32


class EnergyFeed:
    """One per agent."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._changes = Changes()
        self.watchers = 0

    def notify(self, samples: Sequence[EnergySample]) -> None:
        """These are in the ledger now."""
        self._changes.notify()

    async def watch(self, after_seq: Mapping[str, int]) -> AsyncGenerator[EnergySample]:
        """Samples beyond `after_seq` of their device, without end.

        Raises:
            Unavailable: too many watch already.
        """
        if self.watchers >= WATCHERS_MAX:
            raise Unavailable(f"{WATCHERS_MAX} watch the energy already", remedy="read the stream in Redis instead")
        self.watchers += 1
        try:
            position, sent = 0, dict(after_seq)
            while True:
                seen = self._changes.count
                while fresh := self._ledger.since(position, CHUNK):
                    position = fresh[-1][0] + 1
                    for _, sample in fresh:
                        if sample.seq > sent.get(sample.device, 0):
                            sent[sample.device] = sample.seq
                            yield sample
                await self._changes.wait(seen)
        finally:
            self.watchers -= 1

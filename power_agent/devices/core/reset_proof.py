"""Proof of a reset: whether a GPU that was let go of may be used again, by one look at it.

A GPU may continue answering after a fatal Xid although no result of it can be trusted, so that an answer proves
nothing. Newer drivers say whether they still ask for a reset. Older drivers have only the energy counter, which begins
again with a reset. It also begins again when no process has the GPU open while its persistence mode is off. To be reset
a GPU needs that mode off for a while. So a counter that began again proves a reset once the mode is on again as it was.
Where it was off before, nothing does, and a person has to say so. A pending MIG mode comes into force by a reset alone.
"""

from dataclasses import dataclass
from typing import Final

NOISE_J: Final = 1.0  # some counters wobble
NO_PROOF: Final = "this driver does not tell whether it was reset: after the reset restart this agent"


@dataclass(frozen=True, slots=True)
class BeforeReset:
    """A GPU when it was let go of. `condemned`: it answered, and must not be used. None: it does not tell."""

    condemned: bool = False
    asked: bool = False  # its driver asked for a reset
    waits_for_mig: bool = False
    counter_j: float | None = None
    persistence: bool | None = None


@dataclass(frozen=True, slots=True)
class GpuLook:
    """A GPU that answered: its MIG mode, and what its driver asks for (empty: nothing). None: it does not tell."""

    mig_current: bool
    mig_pending: bool
    recovery_action: str | None
    counter_j: float | None
    persistence: bool | None


def unreset_reason(before: BeforeReset, seen: GpuLook) -> str:
    """Reason why a GPU that answers is not to be used yet; empty when it may be."""
    if before.waits_for_mig and seen.mig_current != seen.mig_pending:
        return "its MIG mode waits for the reset"
    if seen.recovery_action:
        return f"its driver asks for {seen.recovery_action}"
    if not before.condemned or before.asked:
        return ""
    counts_anew = (
        before.counter_j is not None and seen.counter_j is not None and seen.counter_j + NOISE_J < before.counter_j
    )
    return "" if counts_anew and before.persistence and seen.persistence else NO_PROOF

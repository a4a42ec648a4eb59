"""What the agent asks of whatever runs its Tritons. One contract suite holds for all of them.

A Triton outlives the agent: it is found again by its tag after a restart, and adopted. Every method blocks and is
called from a thread; all are idempotent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from power_agent.triton.slice_launch import SliceLaunch


@dataclass(frozen=True, slots=True)
class RunningTriton:
    """One Triton by its tag; listed after its exit until it is forgotten or replaced."""

    tag: str
    id: str  # process or container id, for people and logs
    incarnation: str  # differs between two starts: their counters have nothing in common
    alive: bool
    exit_code: int | None  # negative: the signal that ended it; None while alive or unknown
    started_at_s: float
    # what it was started as, by which an agent without a journal proves whose it is; empty: the runtime does not know
    owner: str = ""  # "<cluster>/<node>" of the agent that started it
    argv: tuple[str, ...] = ()
    gpu_uuid: str = ""  # of the MIG device or GPU that it may use
    host: str = ""  # address of its own, where its runtime gives it one; empty: that of its launch
    why: str = ""  # what its runtime reports of its end beyond the exit code


class Runtime(Protocol):
    """Protocol of what starts, finds and ends Tritons."""

    name: str

    def start(self, tag: str, launch: SliceLaunch, log_path: Path) -> RunningTriton:
        """Start a Triton; a live one of that tag with the same command is returned as it is.

        Raises:
            StartError: what is missing, and what brings it.
            Unavailable: the engine or node does not answer.
        """

    def list(self) -> Sequence[RunningTriton]:
        """List every Triton that this agent's node runs or ran, whichever agent started it."""

    def stop(self, tag: str, kill_after_s: float) -> None:
        """Stop a Triton: SIGTERM, SIGKILL of all of it after `kill_after_s`; returns when all of it is gone."""

    def forget(self, tag: str) -> None:
        """Forget one that has ended, with what it left behind; no-op when unknown."""

    def missing(self, *, gpus: bool) -> Mapping[str, str]:
        """Tell what slices lack by this runtime, by capability: why, and its remedy; polled every few seconds.

        `isolate`: model code may reach more than its slice. `gpus`: whether this node has any.
        """

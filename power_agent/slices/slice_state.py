"""Slice record: its state, what it serves, and where it is on the way there. Moves that are not legal crash.

PENDING > STARTING > READY; READY > SWAPPING > READY; READY or SWAPPING > DRAINING > GONE; any > FAILED > PENDING or
GONE.
`core/reconcile.py` decides the steps, `reconciler.py` starts them in order, `step_executor.py` carries them out.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Final

from power_agent.durability.journal_state import SliceRecord
from power_agent.slices.adopted_engine import AdoptedEngine
from power_agent.slices.core.attribution import SliceReading, Work
from power_agent.slices.core.reconcile import HAS_TRAFFIC, SeenSlice
from power_agent.triton.client import TritonClient, VersionCounters
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.common import Revision
from trefoil.core.fleet import FAILED_LAST, LEGAL_MOVES, Hosted, SliceKey, SliceState, SliceStatus, family_of

NANO: Final = 1e-9


@dataclass(slots=True, eq=False)
class Slice:
    """Record of a slice, mutable, owned by the event loop. `on_move` is called after each move."""

    key: SliceKey
    generation: int
    state: SliceState
    since_s: float
    on_move: Callable[["Slice", SliceState], None]
    why: str = ""
    last_failure: str = ""  # why it failed last, until it is READY again
    hosted: tuple[Hosted, ...] = ()
    revision: Revision = Revision()
    credits: int = 0
    # what exists
    has_instance: bool = False
    has_compute: bool = False
    mig_uuid: str = ""
    running: bool = False
    loaded: bool = False
    log_from: int = 0  # byte of its Triton's log at which its last start begins
    incarnation: str = ""  # of its process: counters of different ones have nothing in common
    adopted: bool = False  # its process ran before this agent did: what it counted until now may be booked already
    drained: bool = False
    stale_files: bool = False  # its Triton was started with files that are gone: it can load nothing any more
    proven: bool = False  # adopted without a journal: what its plan said of what it hosts is not known
    published_s: float = math.inf  # when its DRAINING was published
    proved_idle: bool = False  # ... and every dispatcher has said that nothing is in flight
    launch: SliceLaunch | None = None
    triton: TritonClient | AdoptedEngine | None = None
    # when to try again
    failures: int = 0
    retry_at_s: float = 0.0
    heal_failure: str = ""  # why a reload did not heal it: only a new process can
    # counters
    counters: dict[tuple[str, int], VersionCounters] = field(default_factory=dict)
    in_flight_s: dict[tuple[str, int], float] = field(default_factory=dict)  # see record_in_flight
    metered: dict[tuple[str, int], VersionCounters] = field(default_factory=dict)  # as the meter last read them
    counters_fresh: bool = False  # `counters` were read since the last metering
    overhead_s: float = 0.0
    overhead_requests: int = 0
    last_success_s: float = 0.0
    failing: bool = False

    @property
    def tag(self) -> str:
        """Name of the slice's process at the runtime."""
        return f"{self.key.name}.g{self.generation}"

    @property
    def exists(self) -> bool:
        """Whether anything of it is on the device: its instance or, where there are no instances, its Triton."""
        return self.has_instance or self.running

    @property
    def serving(self) -> bool:
        """Whether requests may be on the slice."""
        return self.state in HAS_TRAFFIC

    @property
    def shown_why(self) -> str:
        """Reason of its state, as the agent publishes it; until it serves again, also that of its last failure."""
        if self.state not in (SliceState.PENDING, SliceState.STARTING) or not self.last_failure:
            return self.why
        return f"{self.why}; {FAILED_LAST}{self.last_failure}"

    def move(self, state: SliceState, why: str, now_s: float) -> None:
        """Move to another state.

        Raises:
            AssertionError: not a legal move: a bug.
        """
        assert state in LEGAL_MOVES[self.state], f"{self.key.name}: {self.state.name} > {state.name}"
        before, self.state, self.why, self.since_s = self.state, state, why, now_s
        if state != SliceState.DRAINING:
            self.drained = False
            self.published_s = math.inf
        if state in (SliceState.PENDING, SliceState.FAILED):
            self.loaded = False
        if state in (SliceState.FAILED, SliceState.READY):
            self.last_failure = why if state == SliceState.FAILED else ""
        self.on_move(self, before)

    def fail(self, why: str, now_s: float) -> None:
        """Fail, if it has not already (the first cause stays)."""
        if self.state not in (SliceState.FAILED, SliceState.GONE):
            self.move(SliceState.FAILED, why, now_s)

    def observe(self) -> SeenSlice:
        """Slice as reconciliation sees it."""
        marks = (self.has_instance, self.has_compute, self.running, self.loaded, self.drained)
        return SeenSlice(self.key, self.state, self.hosted, *marks, self.stale_files, self.proven)

    def record(self) -> SliceRecord:
        """SliceRecord as the journal keeps it."""
        return SliceRecord(self.key, self.generation, self.state, self.tag, self.hosted, self.revision, self.credits)

    def status(self) -> SliceStatus:
        """SliceStatus as it is published."""
        return SliceStatus(
            key=self.key,
            generation=self.generation,
            mig_uuid=self.mig_uuid,
            state=self.state,
            why=self.shown_why,
            hosted=self.hosted,
            grpc_target=self._target,
            metrics_url=self.launch.published_metrics_url if self.launch else "",
            revision=self.revision,
            since_s=self.since_s,
            credits=self.credits,
        )

    @property
    def _target(self) -> str:
        if isinstance(self.triton, AdoptedEngine):
            return str(self.triton.target)
        return self.launch.published_target if self.launch else ""

    def attach_engine(self, engine: AdoptedEngine, incarnation: str) -> None:
        """Attach it to an engine that runs already."""
        self.running, self.incarnation, self.triton = True, incarnation, engine

    # --- counters ----------------------------------------------------------------------------------------------------

    def record_counters(self, counters: tuple[VersionCounters, ...], now_s: float) -> None:
        """Record what Triton counts now, when it last succeeded, and whether calls fail."""
        for now in counters:
            before = self.counters.get((now.family, now.version))
            if before is None or now.successes < before.successes or now.failures < before.failures:
                succeeded, failed = now.successes, now.failures
            else:
                succeeded, failed = now.successes - before.successes, now.failures - before.failures
            if succeeded:
                self.last_success_s, self.failing = now_s, False
            elif failed:
                self.failing = True
            self.counters[now.family, now.version] = now
        self.counters_fresh = True

    def record_overhead(self, counters: tuple[VersionCounters, ...]) -> None:
        """Record all that was done since the meter's last reading as warm-up."""
        self.overhead_s, self.overhead_requests = 0.0, 0
        for now in counters:
            before = self.metered.get((now.family, now.version))
            if before is None or now.successes < before.successes or now.compute_batch_ns < before.compute_batch_ns:
                spent_ns, requests = now.compute_batch_ns, now.successes  # loaded again: its counters began again
            else:
                spent_ns = now.compute_batch_ns - before.compute_batch_ns
                requests = now.successes - before.successes
            self.overhead_s += spent_ns * NANO
            self.overhead_requests += requests

    def record_in_flight(self, families: Collection[str], passed_s: float) -> None:
        """Record that these families, whose work Triton does not time, had requests in flight for so long."""
        for hosted in self.hosted:
            if hosted.family in families:
                place = hosted.model, hosted.version
                self.in_flight_s[place] = self.in_flight_s.get(place, 0.0) + passed_s

    def take_reading(self, sm_share: float, variant_of: Callable[[str, int], str]) -> SliceReading:
        """Take a reading for the meter; hands over the overhead and forgets versions that were unloaded before."""
        done: dict[tuple[str, str], tuple[float, int]] = {}
        for c in self.counters.values():  # stages of one family may be together here
            of = family_of(c.family), variant_of(family_of(c.family), c.version)
            busy_s, requests = done.get(of, (0.0, 0))
            in_flight_s = self.in_flight_s.get((c.family, c.version), 0.0)
            done[of] = busy_s + c.compute_batch_ns * NANO + in_flight_s, requests + c.successes
        if self.state == SliceState.STARTING:  # all work of its Triton was warm-up, noted or not
            counted = sum(c.successes for c in self.counters.values())
            self.overhead_requests = max(self.overhead_requests, counted)
        work = tuple(Work(*of, busy_s, requests) for of, (busy_s, requests) in done.items())
        reading = SliceReading(
            key=self.key,
            generation=self.generation,
            incarnation=self.incarnation,
            sm_share=sm_share,
            serving=self.serving,
            work=work if self.counters_fresh else (),
            overhead_s=self.overhead_s,
            overhead_requests=self.overhead_requests,
            adopted=self.adopted,
        )
        loaded = {(h.model, h.version) for h in self.hosted}
        if self.state != SliceState.SWAPPING:
            self.counters = {model: c for model, c in self.counters.items() if model in loaded}
            self.in_flight_s = {model: s for model, s in self.in_flight_s.items() if model in loaded}
        if self.counters_fresh:  # else the next reading holds the work that it is part of
            self.metered = dict(self.counters)
            self.overhead_s, self.overhead_requests, self.counters_fresh = 0.0, 0, False
        return reading

    def on_process_ended(self) -> None:
        """Note that the slice's Triton has ended: nothing of it can be asked any more."""
        self.running, self.loaded, self.incarnation, self.heal_failure = False, False, "", ""
        self.adopted = self.stale_files = self.proven = False
        self.triton = None
        self.counters, self.metered, self.in_flight_s = {}, {}, {}
        self.overhead_s, self.overhead_requests = 0.0, 0
        self.counters_fresh = self.failing = False

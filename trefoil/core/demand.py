"""Demand: what arrived, how it was answered, what is in flight."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from trefoil.core.common import Revision
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import EMPTY, Histogram, merge, quantile_ms
from trefoil.core.objective import TokenSlo

STREAM_SUMS: Final = ("ttft_asked", "ttft_within", "tpot_asked", "tpot_within", "tokens_in")
"""Counts of `StreamCounts`."""
OWN_NAMES: Final = "("
"""First character of tenants and classes that Trefoil itself books to: clients cannot send a class that begins so."""
PROBE_ID: Final = "trefoil-probe"
"""Id of a request by which Trefoil itself tries a model."""
FIRST_CALL_S: Final = 30.0
"""For a model's first call of a kind, which may load or compile; a model that has not answered then may be stuck."""
PROBE_TENANT: Final = "(trefoil)"
"""Tenant that such a request is booked to, where its caller has none; no tenant of a file can have this name."""
JOB_CLASS: Final = "(job)"
"""Class that answers to items of jobs are counted in: no arrivals, no latency, in time whenever they come."""


@dataclass(frozen=True, slots=True)
class LoadKey:
    """Key of what a cell counts. An unset slice: never dispatched."""

    family: str = ""
    variant: str = ""
    slice: SliceKey | None = None
    tenant: str = ""
    slo_class: str = ""


@dataclass(frozen=True, slots=True)
class StreamCounts:
    """Counts of streams that ended, however they did.

    `ttft` [ms]: arrival to first token, of those that had one; `tpot` [ms]: mean time from one token to the next, of
    those that had later ones. `*_asked`: of those whose family or class has that objective, a stream that failed before
    its first token included; `*_within`: of these the ones that met it. `tokens_in`: of prompts, as engines count them.
    """

    ttft: Histogram = EMPTY
    tpot: Histogram = EMPTY
    ttft_asked: int = 0
    ttft_within: int = 0
    tpot_asked: int = 0
    tpot_within: int = 0
    tokens_in: int = 0

    def __bool__(self) -> bool:
        """Whether any stream ended."""
        return bool(self.ttft.count or self.ttft_asked or self.tokens_in)


NO_STREAMS: Final = StreamCounts()


def merged(streams: Sequence[StreamCounts]) -> StreamCounts:
    """All of these streams."""
    found = [one for one in streams if one]
    if len(found) < 2:
        return found[0] if found else NO_STREAMS
    sums = {name: sum([getattr(one, name) for one in found]) for name in STREAM_SUMS}
    return StreamCounts(merge([one.ttft for one in found]), merge([one.tpot for one in found]), **sums)


@dataclass(frozen=True, slots=True)
class LoadCell:
    """Counts and histograms of one key in one window. `receipt_j` covers `receipts` answers; the rest has none.

    `passed`: whole latencies of answers whose earlier stage was done here; `service` then has what that stage took.
    `unanswered`: requests that were executed without an answer to their client; of those `unanswered_work` in whole
    requests, `unanswered_items` and `unanswered_tokens` were done, which `unanswered_j` prices.
    """

    key: LoadKey = LoadKey()
    arrived: int = 0
    answered: int = 0
    failed_by_code: Mapping[str, int] = field(default_factory=dict)
    items: int = 0
    within_slo: int = 0
    tokens_out: int = 0
    latency: Histogram = EMPTY
    queue: Histogram = EMPTY
    service: Histogram = EMPTY
    in_flight_max: int = 0
    arrived_per_s: tuple[int, ...] = ()
    receipt_j: float = 0.0
    receipts: int = 0
    passed: Histogram = EMPTY
    passed_items: int = 0
    unanswered: int = 0
    unanswered_work: float = 0.0
    unanswered_items: float = 0.0
    unanswered_tokens: float = 0.0
    unanswered_j: float = 0.0
    streams: StreamCounts = NO_STREAMS


@dataclass(frozen=True, slots=True)
class LoadWindow:
    """Load that one dispatcher worker saw in one interval."""

    dispatcher: str = ""
    worker: int = 0
    seq: int = 0
    starts_at_s: float = 0.0
    ends_at_s: float = 0.0
    table: Revision = Revision()
    cells: tuple[LoadCell, ...] = ()


@dataclass(frozen=True, slots=True)
class SliceLoad:
    """Load of a worker in flight on a slice, of one of the families that it serves, or of a stage; "": of no family."""

    slice: SliceKey = SliceKey()
    in_flight: int = 0
    open_sequences: int = 0
    ejected: bool = False
    family: str = ""


@dataclass(frozen=True, slots=True)
class TableAck:
    """Acknowledgement of a worker's table, with what it has in flight and who shares credits as it counts them.

    `refused`: why the worker refuses the plan in Redis, whose revision is `refused_plan`; "": it refuses none.
    """

    dispatcher: str = ""
    worker: int = 0
    table: Revision = Revision()
    slices: tuple[SliceLoad, ...] = ()
    observed_at_s: float = 0.0
    peer_target: str = ""
    leaving: bool = False
    counts: tuple[str, ...] = ()
    refused: str = ""
    refused_plan: Revision = Revision()


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """Forecast of demand over a horizon."""

    family: str = ""
    model: str = ""
    issued_at_s: float = 0.0
    horizon_s: float = 0.0
    mean_per_s: float = 0.0
    p90_per_s: float = 0.0
    max_per_s: float = 0.0
    fallback_reason: str = ""


@dataclass(frozen=True, slots=True)
class ScaleSignal:
    """Signal of a governor at the top of its range that it wants capacity."""

    node: str = ""
    device: str = ""
    families: tuple[str, ...] = ()
    why: str = ""
    since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Demand:
    """Demand of a family. `gap_scv`: squared coefficient of variation of inter-arrival times (Poisson: 1)."""

    family: str
    slo_class: str
    rate_per_s: float
    rate_p90_per_s: float
    items_mean: float = 1.0
    gap_scv: float = 1.0
    forecast: LoadForecast | None = None

    @property
    def mean_per_s(self) -> float:
        """Mean rate that energy and accuracy are counted at; `rate_per_s` may be a peak, as of last_max."""
        if self.forecast is None or self.forecast.mean_per_s <= 0:
            return self.rate_per_s
        return min(self.forecast.mean_per_s, self.rate_per_s)


@dataclass(frozen=True, slots=True)
class TokenTimes:
    """Times of tokens over a span: p95 [ms], and the share of streams that met their objective; None: no stream."""

    ttft_ms_p95: float | None = None
    ttft_attainment: float | None = None
    tpot_ms_p95: float | None = None
    tpot_attainment: float | None = None

    @classmethod
    def of(cls, streams: StreamCounts) -> "TokenTimes":
        """Times of tokens of these streams."""
        return cls(
            quantile_ms(streams.ttft, 0.95) if streams.ttft.total else None,
            streams.ttft_within / streams.ttft_asked if streams.ttft_asked else None,
            quantile_ms(streams.tpot, 0.95) if streams.tpot.total else None,
            streams.tpot_within / streams.tpot_asked if streams.tpot_asked else None,
        )

    def short_of(self, slo: TokenSlo, margin: float = 0.0) -> list[tuple[str, float, float, float]]:
        """Objectives that too few streams met: name, limit [ms], share asked less a margin, share that met it."""
        found = {"ttft": self.ttft_attainment, "tpot": self.tpot_attainment}
        missed = []
        for name, limit_ms, quantile in slo.each:
            share = found[name]
            if limit_ms and share is not None and share < quantile - margin:
                missed.append((name, limit_ms, quantile - margin, share))
        return missed

    def slow(self, slo: TokenSlo) -> tuple[str, ...]:
        """The same in words, for `FamilyOutcome`."""
        return tuple(
            f"{n.upper()} ({share:.2%} in time, {asked:.2%} asked)" for n, _, asked, share in self.short_of(slo)
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Service of a family measured over the last `window_s`. Accuracy is that of the variants that answered.

    Joules and grams are all that its devices drew, idle power included, per answer; None where nothing metered.
    """

    family: str
    latency_ms_p95: float
    latency_ms_p99: float
    slo_attainment: float
    accuracy: float
    grams_per_request: float | None
    rate_per_s: float
    window_s: float
    joules_per_request: float | None = None
    tokens: TokenTimes = TokenTimes()

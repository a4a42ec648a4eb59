"""What arrived and how it ended: windows for the controller, cumulative counters for clients, both from one record.

A request counts as arrived once, when it arrives, in the cell of its family and class without slice: so demand is right
also while a queue grows. Its end counts in the cell of the slice and variant that had it, or, if it never had one, in
the cell without slice. Sums over all cells are therefore exact. What a slice executed of a request that was not
answered counts there, too, for the tenant that asked. `arrived_per_s[i]` belongs to the UTC second
floor(starts_at) + i. The rates that price answers are kept beside.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Final

from dispatcher.routing.core.receipts import Receipts
from trefoil.core.carbon import CarbonReading
from trefoil.core.common import Revision
from trefoil.core.demand import JOB_CLASS, NO_STREAMS, LoadCell, LoadKey, LoadWindow, StreamCounts
from trefoil.core.energy import ReceiptRate, ReceiptRates
from trefoil.core.fleet import SliceKey
from trefoil.core.latency import Histogram, build_histogram, merge
from trefoil.core.objective import TokenSlo

OTHER: Final = "other"
CLASS_WINDOWS: Final = 120
"""A class that no request of so many windows (a minute) had makes room for another one."""
SECONDS_MAX: Final = 60
UNCOUNTED_MAX: Final = 256
NOTHING_SEEN: Final = build_histogram(())


_Answer = tuple[float, float, float, int, float]
"""What it took in all, in the queue and on its last slice [ms]; its items; when it came [UTC s]."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What a stream that ended took [ms]: to its first token, and from one token to the next; None: it had none such.
    `tokens_in`: of its prompt, 0 where the engine does not count them."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    tokens_in: int = 0


@dataclass(slots=True)
class _Streams:
    ttft_asked: int = 0
    ttft_within: int = 0
    tpot_asked: int = 0
    tpot_within: int = 0
    tokens_in: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    ttft: Histogram = NOTHING_SEEN
    tpot: Histogram = NOTHING_SEEN


@dataclass(slots=True)
class _Cell:
    arrived: int = 0
    answered: int = 0
    items: int = 0
    within_slo: int = 0
    in_flight_max: int = 0
    tokens: int = 0
    priced: int = 0  # of `answered`: the receipts are counted up to here
    priced_items: int = 0
    priced_tokens: int = 0
    receipt_j: float = 0.0
    receipts: int = 0
    passed_items: int = 0
    unanswered: int = 0
    unanswered_done: tuple[float, float, float] = (0.0, 0.0, 0.0)  # requests, items and tokens
    unanswered_priced: tuple[float, float, float] = (0.0, 0.0, 0.0)  # of those the receipts are counted
    unanswered_j: float = 0.0
    failed: Counter[str] = field(default_factory=Counter)
    seconds: Counter[int] = field(default_factory=Counter)
    # Counted many at once (`_count`): one alone would cost a request more than its router does.
    answers: list[_Answer] = field(default_factory=list)
    stages: list[tuple[float, float]] = field(default_factory=list)  # [ms]: latency of the whole, time of the stage
    streams: _Streams | None = None
    latency: Histogram = NOTHING_SEEN
    queue: Histogram = NOTHING_SEEN
    service: Histogram = NOTHING_SEEN
    passed: Histogram = NOTHING_SEEN


@dataclass(slots=True)
class Totals:
    """Cumulative counters of one family since the process started. Times in ns, as Triton's statistics have them."""

    answered: int = 0
    failed: int = 0
    items: int = 0
    answered_ns: int = 0
    failed_ns: int = 0
    queue_ns: int = 0
    service_ns: int = 0
    last_at_s: float = 0.0
    by_variant: Counter[str] = field(default_factory=Counter)
    by_code: Counter[str] = field(default_factory=Counter)


CellKey = tuple[str, str, SliceKey | None, str, str]  # family, variant, slice, class, tenant


class LoadCounters:
    """Load of one worker: cells of the open window, and cumulative totals by family."""

    def __init__(self, dispatcher: str, worker: int, now_s: float, classes_max: int) -> None:
        self._totals_by_family: dict[str, Totals] = {}
        self._dispatcher = dispatcher
        self._worker = worker
        self._classes_max = classes_max
        self._classes: dict[str, float] = {"": math.inf}  # the window in which each was seen last
        self._starts_at_s = now_s
        self._seq = 0
        self._cells: dict[CellKey, _Cell] = {}

    @property
    def totals(self) -> Mapping[str, Totals]:
        """Cumulative counters by family."""
        self._count_all()
        return self._totals_by_family

    def class_name(self, slo_class: str) -> str:
        """Name of a class as it is counted: at most classes_max of late are counted separately, the rest as "other"."""
        if not slo_class:
            return slo_class
        if slo_class not in self._classes and len(self._classes) > self._classes_max:
            oldest = min(self._classes, key=self._classes.__getitem__)
            if self._seq - self._classes[oldest] < CLASS_WINDOWS:
                return OTHER
            del self._classes[oldest]
        self._classes[slo_class] = self._seq
        return slo_class

    def arrived(self, family: str, slo_class: str, now_s: float, tenant: str = "") -> None:
        """Count a request that came in. `now_s` is UTC."""
        cell = self._cell((family, "", None, slo_class, tenant))
        cell.arrived += 1
        # Clamped: a wall clock that jumps in mid-window books to the first or last second rather than nowhere.
        cell.seconds[min(max(int(now_s) - int(self._starts_at_s), 0), SECONDS_MAX - 1)] += 1

    def sent(
        self, family: str, variant: str, slice_: SliceKey, slo_class: str, in_flight: int, tenant: str = ""
    ) -> None:
        """Count a request that went to a slice, which now has `in_flight` of them."""
        cell = self._cell((family, variant, slice_, slo_class, tenant))
        if in_flight > cell.in_flight_max:
            cell.in_flight_max = in_flight

    def answered(
        self, family: str, variant: str, slice_: SliceKey, slo_class: str, items: int,
        latency_ms: float, queue_ms: float, slo_ms: float, now_s: float, tenant: str = "", earlier_ms: float = 0.0,
    ) -> None:  # fmt: skip
        """Count an answer. `slo_ms` 0 = the family has no objective: every answer is within it; `earlier_ms` is what
        the stages before its last took."""
        key = (family, variant, slice_, slo_class, tenant)
        cell = self._cell(key)
        if not slo_ms or latency_ms <= slo_ms:
            cell.within_slo += 1
        answers = cell.answers
        answers.append((latency_ms, queue_ms, latency_ms - queue_ms - earlier_ms, items, now_s))
        if len(answers) >= UNCOUNTED_MAX:
            self._count(key, cell)

    def tokens(self, family: str, variant: str, slice_: SliceKey, slo_class: str, count: int, tenant: str = "") -> None:
        """Count tokens when they are answered, however their request ends."""
        self._cell((family, variant, slice_, slo_class, tenant)).tokens += count

    def streamed(
        self, family: str, variant: str, slice_: SliceKey | None, slo_class: str, end: StreamEnd, slo: TokenSlo,
        tenant: str = "",
    ) -> None:  # fmt: skip
        """Count a stream that ended, in the cell in which its answer or failure counts. `slo`: of its class, else its
        family's. One without a first token failed before it, and misses that objective."""
        key = (family, variant, slice_, slo_class, tenant)
        cell = self._cell(key)
        streams = cell.streams = cell.streams or _Streams()
        streams.tokens_in += end.tokens_in
        if end.ttft_ms is not None:
            streams.ttft_ms.append(end.ttft_ms)
        if slo.ttft_ms:
            streams.ttft_asked += 1
            streams.ttft_within += end.ttft_ms is not None and end.ttft_ms <= slo.ttft_ms
        if end.tpot_ms is not None:
            streams.tpot_ms.append(end.tpot_ms)
            if slo.tpot_ms:
                streams.tpot_asked += 1
                streams.tpot_within += end.tpot_ms <= slo.tpot_ms
        if len(streams.ttft_ms) >= UNCOUNTED_MAX:
            self._count(key, cell)

    def passed(
        self, family: str, variant: str, slice_: SliceKey, slo_class: str, items: int,
        latency_ms: float, service_ms: float, receipt_j: float, tenant: str = "",
    ) -> None:  # fmt: skip
        """Count what an earlier stage of an answer took, and the latency of all; the answer counts at its last."""
        key = (family, variant, slice_, slo_class, tenant)
        cell = self._cell(key)
        cell.passed_items += items
        cell.receipt_j += receipt_j
        cell.stages.append((latency_ms, service_ms))
        if len(cell.stages) >= UNCOUNTED_MAX:
            self._count(key, cell)

    def failed(
        self, family: str, variant: str, slice_: SliceKey | None, slo_class: str, code: str, latency_ms: float,
        tenant: str = "",
    ) -> None:  # fmt: skip
        """Count a request that ended without an answer; variant and slice are empty if it was never sent."""
        self._cell((family, variant, slice_, slo_class, tenant)).failed[code] += 1
        totals = self._totals(family)
        totals.failed += 1
        totals.failed_ns += int(latency_ms * 1e6)
        totals.by_code[code] += 1

    def unanswered(
        self, family: str, variant: str, slice_: SliceKey, slo_class: str, done: tuple[float, float, float],
        tenant: str = "",
    ) -> None:  # fmt: skip
        """Count a request that its slice executed and that has no answer: `done` of it in whole requests, items and
        tokens."""
        cell = self._cell((family, variant, slice_, slo_class, tenant))
        cell.unanswered += 1
        before = cell.unanswered_done
        cell.unanswered_done = before[0] + done[0], before[1] + done[1], before[2] + done[2]

    def settle(self, rate: Callable[[SliceKey, str, str], ReceiptRate | None]) -> None:
        """Price what was answered or executed since the last time, before other rates come into force.

        The hot path prices nothing.
        """
        self._count_all()
        for key, cell in self._cells.items():
            family, variant, slice_ = key[:3]
            answered, items = cell.answered - cell.priced, cell.items - cell.priced_items
            tokens = cell.tokens - cell.priced_tokens
            unpriced = [now - then for now, then in zip(cell.unanswered_done, cell.unanswered_priced, strict=True)]
            if not (answered or tokens or any(unpriced)) or slice_ is None:
                continue
            cell.unanswered_priced = cell.unanswered_done
            cell.priced, cell.priced_items, cell.priced_tokens = cell.answered, cell.items, cell.tokens
            known = rate(slice_, family, variant)
            if known is not None:
                cell.receipt_j += known.request_j * answered + known.item_j * items + known.token_j * tokens
                cell.receipts += answered
                cell.unanswered_j += (
                    known.request_j * unpriced[0] + known.item_j * unpriced[1] + known.token_j * unpriced[2]
                )

    def close_window(self, now_s: float, table: Revision) -> LoadWindow:
        """Close the window and begin the next one."""
        self._count_all()
        cells, starts_at_s = self._cells, self._starts_at_s
        self._cells, self._starts_at_s = {}, now_s
        self._seq += 1
        return LoadWindow(
            dispatcher=self._dispatcher,
            worker=self._worker,
            seq=self._seq,
            starts_at_s=starts_at_s,
            ends_at_s=now_s,
            table=table,
            cells=tuple(_frozen(key, cell) for key, cell in cells.items()),
        )

    def _cell(self, key: CellKey) -> _Cell:
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = _Cell()
        return cell

    def _count_all(self) -> None:
        for key, cell in self._cells.items():
            self._count(key, cell)

    def _count(self, key: CellKey, cell: _Cell) -> None:
        """Put what ended since the last time into the cell's histograms and its family's totals."""
        if cell.stages:
            passed_ms, stage_ms = zip(*cell.stages, strict=True)
            cell.stages.clear()
            cell.passed, cell.service = _with(cell.passed, passed_ms), _with(cell.service, stage_ms)
        if (streams := cell.streams) is not None:
            streams.ttft, streams.tpot = _with(streams.ttft, streams.ttft_ms), _with(streams.tpot, streams.tpot_ms)
            streams.ttft_ms.clear()
            streams.tpot_ms.clear()
        if not cell.answers:
            return
        latency_ms, queue_ms, service_ms, items, at_s = zip(*cell.answers, strict=True)
        cell.answers.clear()
        cell.answered += len(items)
        cell.items += sum(items)
        if key[3] != JOB_CLASS:  # no client waits for items of jobs: their times do not concern an objective
            cell.latency, cell.queue = _with(cell.latency, latency_ms), _with(cell.queue, queue_ms)
        cell.service = _with(cell.service, service_ms)
        totals = self._totals(key[0])
        totals.answered += len(items)
        totals.items += sum(items)
        answered_ns, queue_ns = int(sum(latency_ms) * 1e6), int(sum(queue_ms) * 1e6)
        totals.answered_ns += answered_ns
        totals.queue_ns += queue_ns
        totals.service_ns += answered_ns - queue_ns
        totals.last_at_s = max(totals.last_at_s, at_s[-1])
        totals.by_variant[key[1]] += len(items)

    def _totals(self, family: str) -> Totals:
        return self._totals_by_family.setdefault(family, Totals())


class Accounting:
    """Counters of one worker: load windows and totals, receipts, retries and forwarded requests."""

    def __init__(self, dispatcher: str, worker: int, now_s: float, classes_max: int) -> None:
        self.load = LoadCounters(dispatcher, worker, now_s, classes_max)
        self.receipts = Receipts()
        self.retries_total: Counter[tuple[str, str]] = Counter()  # family, "retried" or "refused"
        self.forwarded_total: Counter[str] = Counter()  # by family: requests that another worker answered
        self.zone_total: Counter[tuple[str, str, str]] = Counter()
        """Requests that went to another zone, by family, zone and outcome: answered, returned, left by their client."""
        self.open_streams = 0

    def set_receipt_rates(self, rates: ReceiptRates | None, reading: CarbonReading | None, now_s: float) -> None:
        """Price answers by these; earlier answers keep their price."""
        self.load.settle(self.receipts.rate)
        self.receipts.set_rates(rates, reading)
        self.receipts.check_age(now_s)

    def close_window(self, now_s: float, table: Revision) -> LoadWindow:
        """Price what is not priced yet, close the load window and begin the next one."""
        self.load.settle(self.receipts.rate)
        return self.load.close_window(now_s, table)


def _with(before: Histogram, more_ms: Sequence[float]) -> Histogram:
    return merge((before, build_histogram(more_ms)))


def _frozen(key: CellKey, cell: _Cell) -> LoadCell:
    family, variant, slice_, slo_class, tenant = key
    return LoadCell(
        key=LoadKey(family=family, variant=variant, slice=slice_, tenant=tenant, slo_class=slo_class),
        arrived=cell.arrived,
        answered=cell.answered,
        failed_by_code=dict(cell.failed),
        items=cell.items,
        within_slo=cell.within_slo,
        tokens_out=cell.tokens,
        latency=cell.latency,
        queue=cell.queue,
        service=cell.service,
        in_flight_max=cell.in_flight_max,
        receipt_j=cell.receipt_j,
        receipts=cell.receipts,
        passed=cell.passed,
        passed_items=cell.passed_items,
        unanswered=cell.unanswered,
        unanswered_work=cell.unanswered_done[0],
        unanswered_items=cell.unanswered_done[1],
        unanswered_tokens=cell.unanswered_done[2],
        unanswered_j=cell.unanswered_j,
        streams=_frozen_streams(cell.streams),
        arrived_per_s=tuple(cell.seconds[second] for second in range(max(cell.seconds, default=-1) + 1)),
    )


def _frozen_streams(streams: _Streams | None) -> StreamCounts:
    if streams is None:
        return NO_STREAMS
    return StreamCounts(**{each.name: getattr(streams, each.name) for each in fields(StreamCounts)})

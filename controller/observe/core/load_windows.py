"""Load windows of the dispatchers: arrivals over time, latency, attainment, accuracy, budgets.

Data: `LoadWindow`s of all workers, in any order. No I/O, no clock: `now_s` comes in.
Formulation: arrivals go to bins of `bin_s` in proportion to the overlap, because windows of different workers are not
aligned. The newest bin that counts is the last one that every live worker has reported. SCV of the gaps: the index of
dispersion of arrivals per window, which for a renewal stream tends to the SCV of its gaps. It is 1 unless fewer than 1
in 100 Poisson streams show such an index. It comes from successive differences, so that a ramp does not pass for
burstiness. slo_attainment = answered within the SLO / ended (rejected and failed are misses). accuracy = mean accuracy
of the variants that answered.
Deviations: none.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import numpy as np

from controller.observe.core.arrival_history import ArrivalHistory
from controller.thresholds import WindowSettings
from trefoil.core.brains import BudgetState
from trefoil.core.catalog import Catalog
from trefoil.core.demand import (
    JOB_CLASS,
    STREAM_SUMS,
    LoadCell,
    LoadWindow,
    Measured,
    StreamCounts,
    TokenTimes,
    merged,
)
from trefoil.core.latency import Histogram, merge, quantile_ms
from trefoil.core.units import HOUR_S

DISPERSION_MIN: Final = 20  # windows of a worker below which nothing is said
DISPERSION_SIGMAS: Final = 2.6
BUDGET_BUCKETS: Final = 240
DAY_HOURS: Final = 24


@dataclass(slots=True)
class _Budget:
    window_s: float
    started_at_s: float
    starts_s: "deque[float]" = field(default_factory=deque)  # of the buckets, with what each of them has seen
    requests: "deque[float]" = field(default_factory=deque)
    accuracy_sums: "deque[float]" = field(default_factory=deque)
    rolls: bool = False


def ignore_window(_window: LoadWindow) -> None:
    """Ignore a window: the default of `on_window`, a function with a name so that a simulation can be saved."""


class LoadWindows:
    """The recent load windows of all workers, and the accuracy budgets that they spent."""

    def __init__(
        self,
        settings: WindowSettings,
        on_window: Callable[[LoadWindow], None] = ignore_window,
        history_s: float = 0.0,
    ) -> None:
        """`on_window` gets each window once. `history_s`: for how long arrivals of each second are kept."""
        self._settings = settings
        self._step_bins = max(1, round(1 / settings.bin_s))
        self._history = ArrivalHistory(math.ceil(history_s / self.step_s)) if history_s else None
        self._windows: deque[LoadWindow] = deque()
        self._newest: dict[tuple[str, int], LoadWindow] = {}
        self._budgets: dict[str, _Budget] = {}
        self._arrivals: defaultdict[str, Counter[int]] = defaultdict(Counter)
        self._first_bin: int | None = None
        self._hours: defaultdict[str, Counter[int]] = defaultdict(Counter)  # arrivals of the last day, by hour
        self._days: dict[str, tuple[int, tuple[float, ...]]] = {}  # what `_day` found, and the hour it was in
        self._first_hour: int | None = None
        self.answered: Counter[tuple[str, str]] = Counter()
        self.answered_tenants: Counter[tuple[str, str]] = Counter()
        self.tokens: Counter[tuple[str, str]] = Counter()
        self.streams: Counter[tuple[str, str]] = Counter()
        self.receipt_j_tenants: dict[tuple[str, str], float] = {}
        self.unanswered_tenants: Counter[tuple[str, str]] = Counter()
        self.unanswered_j_tenants: dict[tuple[str, str], float] = {}
        """Answers by family and variant, by family and tenant, tokens by family and variant, counts of streams by
        family and name, joules by receipts [J]; requests that were executed without an answer, and their joules [J]:
        they only grow."""
        self._on_window = on_window
        self.hold_from_s = math.inf  # windows that end after it are kept however old: they are being measured

    @property
    def bin_s(self) -> float:
        """Width of the bins of `arrivals` [s]."""
        return self._settings.bin_s

    @property
    def step_s(self) -> float:
        """Width of the steps of `steps` [s]: whole bins, a second where those are not longer."""
        return self._step_bins * self._settings.bin_s

    def add(self, window: LoadWindow, catalog: Catalog) -> None:
        """Count a window once; a repeated or reordered one of the same worker is dropped by its `seq` and end."""
        worker = (window.dispatcher, window.worker)
        newest = self._newest.get(worker)
        if newest is not None and window.seq <= newest.seq and window.ends_at_s <= newest.ends_at_s:
            return
        self._newest[worker] = window
        self._windows.append(window)
        self._on_window(window)
        for cell in window.cells:
            if cell.arrived:
                self._count_arrivals(cell.key.family, cell.arrived, window)
            if cell.answered:
                self.answered[cell.key.family, cell.key.variant] += cell.answered
                self.answered_tenants[cell.key.family, cell.key.tenant] += cell.answered
                self._charge_budget(cell.key.family, cell.key.variant, cell.answered, window.ends_at_s, catalog)
            if cell.tokens_out:
                self.tokens[cell.key.family, cell.key.variant] += cell.tokens_out
            if cell.streams:
                self._count_streams(cell.key.family, cell.streams)
            if cell.receipt_j:
                of = cell.key.family, cell.key.tenant
                self.receipt_j_tenants[of] = self.receipt_j_tenants.get(of, 0.0) + cell.receipt_j
            if cell.unanswered:
                of = cell.key.family, cell.key.tenant
                self.unanswered_tenants[of] += cell.unanswered
                self.unanswered_j_tenants[of] = self.unanswered_j_tenants.get(of, 0.0) + cell.unanswered_j
        if self._first_hour is None:
            self._first_hour = int(window.starts_at_s // HOUR_S)
        first = int(window.starts_at_s // self._settings.bin_s)
        self._first_bin = first if self._first_bin is None else min(first, self._first_bin)

    def forget(self, now_s: float) -> None:
        """Forget windows and arrivals that are older than `keep_s`."""
        oldest_s = now_s - self._settings.keep_s
        while self._windows and self._windows[0].ends_at_s < min(oldest_s, self.hold_from_s):
            self._windows.popleft()
        self._forget_arrivals(int(oldest_s // self.step_s))
        self._newest = {w: v for w, v in self._newest.items() if v.ends_at_s >= oldest_s}

    def _forget_arrivals(self, end: int) -> None:
        """Forget arrivals of the steps before one; the history, if there is one, keeps them."""
        if self._history is not None and self._first_bin is not None:
            self._history.advance(-(-self._first_bin // self._step_bins), end)
        for family, counts in self._arrivals.items():
            for old in [i for i in counts if i < end * self._step_bins]:
                arrived = counts.pop(old)
                if self._history is not None:
                    self._history.add(family, old // self._step_bins, arrived)

    def arrivals(self, family: str, now_s: float) -> tuple[float, ...]:
        """Arrivals per bin, oldest first, up to the newest bin that every live worker has reported."""
        if self._first_bin is None:
            return ()
        end = self._end_bin(now_s)
        first = max(self._first_bin, end - int(self._settings.keep_s / self._settings.bin_s))
        counts = self._arrivals.get(family, Counter())
        return tuple([float(counts.get(i, 0)) for i in range(first, end)])

    def _end_bin(self, now_s: float) -> int:
        """The bin after the newest one that every live worker has reported."""
        all_ends = [w.ends_at_s for w in self._newest.values()]
        live = [end_s for end_s in all_ends if now_s - end_s <= self._settings.worker_silent_s]
        return int((min(live) if live else max(all_ends, default=0.0)) // self._settings.bin_s)

    def steps(
        self, family: str, now_s: float, bridged_s: float = 0.0, past_s: float = math.inf
    ) -> tuple[int, tuple[float, ...]]:
        """Arrivals per whole step since the last hole longer than `bridged_s`, oldest first, and the number of the
        first: times `step_s` is when it began. As far back as the history goes, or as `past_s` of it; without one as
        `arrivals`."""
        if self._first_bin is None:
            return 0, ()
        width, past = self._step_bins, np.zeros(0, np.float32)
        end = self._end_bin(now_s) // width
        first = max(-(-self._first_bin // width), end - int(self._settings.keep_s / self.step_s))
        if self._history is not None and self._history.end >= 0:
            first = self._history.end
            past = self._history.since_hole(family, int(bridged_s / self.step_s))
            past = past[max(0, len(past) - math.ceil(min(past_s / self.step_s, len(past)))) :]
        counts = self._arrivals.get(family, Counter())
        recent = (float(sum(counts[i * width + j] for j in range(width))) for i in range(first, end))
        return first - len(past), (*past.tolist(), *recent)

    @property
    def restorable(self) -> bool:
        """Whether there is a history, and it is known where what was written down before belongs in it."""
        return self._history is not None and self._history.end >= 0

    def restore(self, family: str, counts: Mapping[int, float]) -> None:
        """Restore arrivals by step that were written down before this process saw any."""
        if self._history is not None:
            self._history.restore(family, counts)

    def families(self) -> tuple[str, ...]:
        """Families that any request has named, sorted."""
        return tuple(sorted(self._arrivals))

    def live(self, now_s: float) -> bool:
        """Whether any worker has reported of late; without one, arrivals are unknown and not zero."""
        return any(now_s - w.ends_at_s <= self._settings.worker_silent_s for w in self._newest.values())

    def gap_scv(self, family: str) -> float:
        """Squared coefficient of variation of the gaps between arrivals; 1.0 where Poisson cannot be refused."""
        if len(self._windows) < DISPERSION_MIN:
            return 1.0
        counts: defaultdict[tuple[str, int], list[tuple[int, float]]] = defaultdict(list)
        for window in self._windows:
            arrived = sum([c.arrived for c in window.cells if c.key.family == family])
            counts[window.dispatcher, window.worker].append((arrived, window.ends_at_s - window.starts_at_s))
        total = sum(n for entries in counts.values() for n, _ in entries) or 1
        found = []
        for entries in counts.values():
            regular = _regular(_begun(entries))
            arrived = sum(n for n, _ in regular)
            if len(regular) >= DISPERSION_MIN and arrived:
                found.append((arrived / total, *_dispersion(regular)))
        if not found:
            return 1.0
        # A worker sees a share p of the stream: thinning moves an index I to 1 + p (I - 1).
        weight = sum(share for share, _, _ in found)
        index = 1 + sum(i - 1 for _, i, _ in found) / weight
        error = math.sqrt(sum(e * e for _, _, e in found)) / weight
        low, high = (_dispersion_of_chance(error, sigmas) for sigmas in (-DISPERSION_SIGMAS, DISPERSION_SIGMAS))
        return 1.0 if low <= index <= high else max(0.05, index)

    def items_mean(self, family: str) -> float:
        """Rows per request; 1.0 while nothing was answered."""
        answered = items = 0
        for window in self._windows:
            for cell in window.cells:
                if cell.key.family == family and cell.key.slo_class != JOB_CLASS:
                    answered += cell.answered
                    items += cell.items
        return items / answered if answered else 1.0

    def answered_since(self, family: str, since_s: float) -> int:
        """Requests answered in windows that ended after a time."""
        recent = (w for w in self._windows if w.ends_at_s > since_s)
        return sum(c.answered for w in recent for c in w.cells if c.key.family == family)

    def kept_since(self, now_s: float) -> float:
        """Since when all windows are kept: `keep_s` ago, or when the first of them began; now when there is none."""
        first_s = self._windows[0].starts_at_s if self._windows else now_s
        return min(now_s, max(first_s, now_s - self._settings.keep_s))

    def begun_since(self, since_s: float) -> tuple[LoadWindow, ...]:
        """Windows of all workers that began at a time or later: nothing of what was before is in them."""
        return tuple(w for w in self._windows if w.starts_at_s >= since_s)

    def measured(self, family: str, now_s: float, catalog: Catalog, grams_per_request: float | None) -> Measured | None:
        """Measurement of a family over the last `measure_s`; None when nothing arrived.

        Attainment is of requests without a class, where there are any: no plan for the family's SLO cures a class that
        asks for more.
        """
        span_s = self._settings.measure_s
        from_s = now_s - span_s
        cells = [c for w in self._windows if w.ends_at_s > from_s for c in w.cells if c.key.family == family]
        found = measured_cells(cells, family, span_s, catalog, grams_per_request)
        if found is None or not any(c.key.slo_class for c in cells):
            return found
        own = measured_cells([c for c in cells if not c.key.slo_class], family, span_s, catalog)
        return found if own is None else replace(found, slo_attainment=own.slo_attainment, tokens=own.tokens)

    def measured_in(
        self,
        recent: Sequence[LoadWindow],
        family: str,
        span_s: float,
        catalog: Catalog,
        grams_per_request: float | None,
        joules_per_request: float | None = None,
    ) -> Measured | None:
        """Measurement of a family over these windows, which cover `span_s`; None when nothing arrived."""
        cells = [c for w in recent for c in w.cells if c.key.family == family]
        return measured_cells(cells, family, span_s, catalog, grams_per_request, joules_per_request)

    def open_budget(self, family: str, window_s: float, now_s: float) -> None:
        """Open an accuracy window; continues when it is open with the same length already."""
        budget = self._budgets.get(family)
        if budget is None or budget.window_s != window_s:
            self._budgets[family] = _Budget(window_s, now_s)

    def restart_budget(self, family: str) -> None:
        """A new objective starts a new accuracy window: what was served under the old one is not held against it."""
        self._budgets.pop(family, None)

    def budgets(self, now_s: float) -> tuple[BudgetState, ...]:
        """Budgets: what each accuracy window has served. It opens with the first answer and rolls once it is full."""
        found = []
        for family, budget in sorted(self._budgets.items()):
            while budget.starts_s and budget.starts_s[0] < now_s - budget.window_s:
                budget.starts_s.popleft()
                budget.requests.popleft()
                budget.accuracy_sums.popleft()
                budget.rolls = True
            first_s = budget.starts_s[0] if budget.starts_s else now_s
            elapsed_s = min(budget.window_s, max(0.0, now_s - first_s))
            budget.rolls = budget.rolls and bool(budget.starts_s)
            if budget.rolls:  # however long ago the oldest bucket that is left began
                elapsed_s = budget.window_s
            requests, accuracy_sum = sum(budget.requests, 0.0), sum(budget.accuracy_sums, 0.0)
            day = self._day(family, now_s)
            found.append(BudgetState(family, budget.window_s, elapsed_s, round(requests), accuracy_sum, day))
        return tuple(found)

    def _day(self, family: str, now_s: float) -> tuple[float, ...]:
        """Arrivals by hour of the day, of the last 24 whole hours; empty where not all of them were seen."""
        this = int(now_s // HOUR_S)
        if self._first_hour is None or self._first_hour >= this - DAY_HOURS:  # the first hour is seen in part
            return ()
        known, day = self._days.get(family, (-1, ()))
        if known != this:
            counts, midnight = self._hours[family], -this % DAY_HOURS
            latest = [float(counts.get(hour, 0)) for hour in range(this - DAY_HOURS, this)]
            day = (*latest[midnight:], *latest[:midnight])
            self._days[family] = this, day
        return day

    def dump_budgets(self) -> dict[str, object]:
        """Dump all budgets as JSON, so that a restart does not forget what was served."""
        return {
            family: {
                "window_s": b.window_s,
                "buckets": [list(row) for row in zip(b.starts_s, b.requests, b.accuracy_sums, strict=True)],
                "hours": [[hour, n] for hour, n in sorted(self._hours.get(family, Counter()).items())],
                "first_hour": self._first_hour,
            }
            for family, b in self._budgets.items()
        }

    def load_budgets(self, dumped: Mapping[str, Mapping[str, object]], now_s: float) -> None:
        """Load budgets that `dump_budgets` wrote. One by a clock that was ahead is shifted, so that it ends now."""
        for family, entry in dumped.items():
            buckets = entry["buckets"]
            assert isinstance(buckets, list)
            window_s = entry["window_s"]
            assert isinstance(window_s, int | float)
            starts_s, requests, sums = (deque(float(row[i]) for row in buckets) for i in range(3))
            ahead_s = max(0.0, max(starts_s, default=now_s) - now_s)
            starts_s = deque(at_s - ahead_s for at_s in starts_s) if ahead_s else starts_s
            self._budgets[family] = _Budget(float(window_s), now_s, starts_s, requests, sums)
            hours, first = entry.get("hours", []), entry.get("first_hour")
            assert isinstance(hours, list)
            self._hours[family] = Counter({int(hour): n for hour, n in hours})
            self._days.pop(family, None)
            self._first_hour = first if isinstance(first, int) else self._first_hour

    def _count_streams(self, family: str, streams: StreamCounts) -> None:
        for name in STREAM_SUMS:
            if count := getattr(streams, name):
                self.streams[family, name] += count

    def _count_arrivals(self, family: str, arrived: int, window: LoadWindow) -> None:
        hour = int((window.starts_at_s + window.ends_at_s) / 2 // HOUR_S)
        hours = self._hours[family]
        if hour not in hours:
            for old in [one for one in hours if one < hour - DAY_HOURS]:
                del hours[old]
        hours[hour] += arrived
        if family in self._days and hour < self._days[family][0]:  # of an hour that was taken for whole
            del self._days[family]
        width = self._settings.bin_s
        counts = self._arrivals[family]
        length_s = window.ends_at_s - window.starts_at_s
        if length_s <= 0:
            counts[int(window.ends_at_s // width)] += arrived
            return
        for i in range(int(window.starts_at_s // width), int(window.ends_at_s // width) + 1):
            inside = min(window.ends_at_s, (i + 1) * width) - max(window.starts_at_s, i * width)
            if inside > 0:
                counts[i] += arrived * inside / length_s  # type: ignore[assignment]

    def _charge_budget(self, family: str, variant: str, answered: int, at_s: float, catalog: Catalog) -> None:
        budget = self._budgets.get(family)
        if budget is None:
            return
        width = budget.window_s / BUDGET_BUCKETS
        starts_at_s = at_s // width * width
        if not budget.starts_s or budget.starts_s[-1] < starts_at_s:
            budget.starts_s.append(starts_at_s)
            budget.requests.append(0.0)
            budget.accuracy_sums.append(0.0)
        budget.requests[-1] += answered
        budget.accuracy_sums[-1] += answered * catalog.accuracies.get(family, {}).get(variant, 0.0)


def measured_cells(
    cells: Sequence[LoadCell],
    family: str,
    span_s: float,
    catalog: Catalog,
    grams_per_request: float | None = None,
    joules_per_request: float | None = None,
) -> Measured | None:
    """Measurement of a family by these cells of its, which cover `span_s`; None when nothing arrived. Items of jobs
    are not part of it."""
    cells = [c for c in cells if c.key.slo_class != JOB_CLASS]
    arrived = sum([c.arrived for c in cells])
    answered = sum([c.answered for c in cells])
    if not arrived and not answered:
        return None
    latency: Histogram = merge(c.latency for c in cells)
    known = catalog.accuracies.get(family, {})
    accuracy = sum([c.answered * known.get(c.key.variant, 0.0) for c in cells if c.answered])
    # What arrived in the window may be answered after it: count against whichever is larger.
    failed = sum([sum(c.failed_by_code.values()) for c in cells if c.failed_by_code])
    ended = answered + failed
    return Measured(
        family=family,
        latency_ms_p95=quantile_ms(latency, 0.95),
        latency_ms_p99=quantile_ms(latency, 0.99),
        slo_attainment=min(1.0, sum([c.within_slo for c in cells]) / max(1, ended)),
        accuracy=accuracy / answered if answered else 0.0,
        grams_per_request=grams_per_request,
        rate_per_s=arrived / span_s,
        window_s=span_s,
        joules_per_request=joules_per_request,
        tokens=TokenTimes.of(merged([c.streams for c in cells])),
    )


def _begun(entries: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Windows after the one in which the load began: a step from nothing is not a burst."""
    first = next((i for i, (n, _) in enumerate(entries) if n), len(entries))
    return entries[first + 1 :] if first else entries


def _regular(entries: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Windows without those of another length (the first one, or one after a stall): they say nothing of the gaps."""
    usual_s = sorted(length_s for _, length_s in entries)[len(entries) // 2] if entries else 0.0
    return [(n, length_s) for n, length_s in entries if length_s > 0 and 0.5 * usual_s <= length_s <= 1.5 * usual_s]


def _dispersion(entries: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Index of dispersion of arrivals by their successive differences, and its standard error for a Poisson stream."""
    pairs = len(entries) - 1
    rate = sum(n for n, _ in entries) / sum(length_s for _, length_s in entries)
    residuals = [(n - rate * length_s) / math.sqrt(rate * length_s) for n, length_s in entries]
    index = sum((b - a) ** 2 for a, b in pairwise(residuals)) / (2 * pairs)
    # Successive differences know as much as 2/3 of that many independent counts.
    return index, math.sqrt(2 / (pairs * 2 / 3))


def _dispersion_of_chance(error: float, sigmas: float) -> float:
    """Index of a Poisson stream at a normal quantile: a chi-squared law, skew to the right (Wilson-Hilferty)."""
    return float((1 - error**2 / 9 + sigmas * error / 3) ** 3)

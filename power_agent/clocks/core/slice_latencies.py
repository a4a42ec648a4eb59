"""Latencies of the slices of a node, from load windows as they come: what governors see of their stages. Pure.

An answer is of the clock that its device had when its window began: that is when the window came less its length, as
stamps of other machines' clocks are not read. At the clock of now it would have taken as much longer as the law of
trefoil/core/power.py says. Of a slice the newest windows count, as many as hold `ENOUGH` answers, at most those that
the governor remembers: where many requests come a change is seen at once, and where few do it is seen at all.

A family that promises TTFT is seen twice: its first tokens are one more stage, with their own limit. Slow steps fill
all places, and then prompts wait, however well TPOT is kept.

Data: load windows, objectives, the profile, the clocks that each device had. Decision: none.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from trefoil.core.brains import GovernedStage
from trefoil.core.catalog import Catalog
from trefoil.core.demand import LoadWindow
from trefoil.core.fleet import Hosted, SliceKey
from trefoil.core.latency import Histogram, merge, quantile_ms, scaled, within
from trefoil.core.objective import Objective
from trefoil.core.plan import PlannedDevice
from trefoil.core.power import stretch

SPAN_S: Final = 600.0  # at most what a governor may remember
ATTAINED_S: Final = 60.0  # over which it is judged whether an SLO is kept
DEFAULT_QUANTILE: Final = 0.95
ENOUGH: Final = 40  # answers: a p95 is then of the two slowest

FIRST_TOKENS: Final = " first tokens"  # after a family's name: its times to the first token

Answers = Mapping[tuple[SliceKey, str], Histogram]
"""Latencies by slice and family, and of its first tokens."""


class ClockPeriod(NamedTuple):
    """Clock of a device from a time on."""

    since_s: float
    clock_mhz: int


class _Window(NamedTuple):
    """Answers of a slice and family in a window. `in_time`: within the SLO of then; None: none was known."""

    began_s: float
    came_s: float
    answers: Histogram
    in_time: int | None


class SliceLatencies:
    """Latencies by slice and family. `slo_ms` and `slo_quantile` by family; of those `by_token` they and the latencies
    are of a stream's mean time from token to token. `heard_s`: when a window came last. Times are monotonic."""

    def __init__(self, catalog: Catalog) -> None:
        self.slo_ms: Mapping[str, float] = {}
        self.slo_quantile: Mapping[str, float] = {}
        self.by_token: frozenset[str] = frozenset()
        self.heard_s = -math.inf
        self._windows: dict[tuple[SliceKey, str], deque[_Window]] = {}
        self.learn(catalog)

    def learn(self, catalog: Catalog) -> None:
        """Go by another catalogue from now on."""
        self._highest: dict[tuple[str, str, str, str, int], tuple[int, float]] = {}  # clock, and s there of all batches
        for row in catalog.rows:
            key = (row.device_type, row.slice_type, row.family, row.variant, row.stage)
            self._highest[key] = max(self._highest.get(key, (0, 0.0)), (row.clock_mhz, row.clock_sensitivity))

    def aim(self, objectives: Iterable[Objective], classes: Mapping[str, tuple[float, float]]) -> None:
        """Go by these objectives from now on. `classes`: limit and quantile of families that leave theirs open."""
        wanted = {one.family: one for one in objectives}
        limits = {**classes, **{name: one.governed for name, one in wanted.items()}}
        self.slo_ms = {name: limit or classes.get(name, (0.0, 0.0))[0] for name, (limit, _) in limits.items()}
        self.slo_quantile = {name: quantile for name, (_, quantile) in limits.items() if 0 < quantile < 1}
        firsts = {name + FIRST_TOKENS: one.token_slo for name, one in wanted.items() if one.ttft_ms}
        self.slo_ms |= {name: slo.ttft_ms for name, slo in firsts.items()}
        self.slo_quantile |= {name: slo.ttft_quantile for name, slo in firsts.items()}
        before, self.by_token = self.by_token, frozenset(name for name, one in wanted.items() if one.tpot_ms)
        if changed := self.by_token ^ before:  # what is known of them is of the other kind
            self._windows = {key: seen for key, seen in self._windows.items() if key[1] not in changed}

    def add_window(self, window: LoadWindow, now_s: float) -> None:
        """Add a window that came now."""
        found: dict[tuple[SliceKey, str], list[Histogram]] = {}
        for cell in window.cells:
            if cell.key.slice is not None:  # of an earlier stage: the latency of the whole
                of_tokens = cell.key.family in self.by_token
                times = (cell.streams.tpot,) if of_tokens else (cell.latency, cell.passed)
                known = [each for each in times if each.index]
                found.setdefault((cell.key.slice, cell.key.family), []).extend(known)
                if cell.streams.ttft.index and cell.key.family + FIRST_TOKENS in self.slo_ms:
                    found.setdefault((cell.key.slice, cell.key.family + FIRST_TOKENS), []).append(cell.streams.ttft)
        answers = {key: merge(parts) for key, parts in found.items() if parts}
        self.add(answers, now_s - (window.ends_at_s - window.starts_at_s), now_s)

    def add(self, answers: Answers, began_s: float, now_s: float) -> None:
        """Add what was answered between two times."""
        self.heard_s = now_s
        for key, one in answers.items():
            slo_ms = self.slo_ms.get(key[1])
            in_time = within(one, slo_ms) if slo_ms else None
            self._windows.setdefault(key, deque()).append(_Window(began_s, now_s, one, in_time))
        for windows in self._windows.values():
            while windows and windows[0].came_s < now_s - SPAN_S:
                windows.popleft()
        self._windows = {key: windows for key, windows in self._windows.items() if windows}

    def stages(
        self, planned: PlannedDevice, device_type: str, clocks: Sequence[ClockPeriod], remembers_s: float
    ) -> tuple[GovernedStage, ...]:
        """Stages of a device, by slice, each with the answers of the last `remembers_s`. Answers are scaled to the last
        of its `clocks`, which ascend in time; answers before the first one do not count."""
        return tuple(
            self._stage(device_type, part.key, hosted, name, clocks, self.heard_s - remembers_s)
            for part in sorted(planned.slices, key=lambda part: part.key)
            for hosted in part.hosted
            for name in (hosted.family, hosted.family + FIRST_TOKENS)
            if name == hosted.family or name in self.slo_ms
        )

    def _stage(
        self, device_type: str, key: SliceKey, hosted: Hosted, name: str, clocks: Sequence[ClockPeriod], from_s: float
    ) -> GovernedStage:
        windows = self._windows.get((key, name), ())
        own = (device_type, key.slice_type, hosted.family, hosted.variant)
        whole = self._highest.get((*own, 0), (1, 1.0))  # all of it follows the clock, whichever was the highest
        top_mhz, weight = self._highest.get((*own, hosted.stage + 1), whole) if hosted.stages > 1 else whole
        known, samples = list[Histogram](), 0
        for window in reversed(windows):
            then_mhz = _clock_at(clocks, window.began_s)
            if then_mhz is None or window.came_s < from_s or samples >= ENOUGH:
                break
            known.append(_moved(window.answers, top_mhz, then_mhz, clocks[-1].clock_mhz, weight))
            samples += window.answers.total
        found = merge(known)
        mean_ms = found.sum_ms / found.total if found.total else 0.0
        quantile = self.slo_quantile.get(name, DEFAULT_QUANTILE)
        counts = [
            (window.in_time, window.answers.total)
            for window in windows
            if window.in_time is not None and window.came_s >= self.heard_s - ATTAINED_S
        ]
        good, total = sum(n for n, _ in counts), sum(n for _, n in counts)
        return GovernedStage(
            name,
            hosted.stage,
            self.slo_ms.get(name, 0.0),
            mean_ms,
            weight,
            self.heard_s,
            quantile_ms(found, 0.95),
            found.total,
            quantile,
            quantile_ms(found, quantile),
            good / total if total else 1.0,
            total,
        )


def _clock_at(clocks: Sequence[ClockPeriod], at_s: float) -> int | None:
    """Clock at a time; None: before the first that is known."""
    return next((period.clock_mhz for period in reversed(clocks) if period.since_s <= at_s), None)


def _moved(answers: Histogram, top_mhz: int, then_mhz: int, now_mhz: int, s: float) -> Histogram:
    """Answers of one clock as they would be at another."""
    if then_mhz == now_mhz or not answers.total:
        return answers
    return scaled(answers, stretch(top_mhz, now_mhz, s) / stretch(top_mhz, then_mhz, s))

"""Result of a load: a record per request, and every number that is reported about them.

Latency counts from the time at which a request was intended to be sent. So it shows a generator or a server that falls
behind (no coordinated omission). A request that was rejected, failed or never sent is a miss of the SLO.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trefoil.runtime.files import replace_file

OK: Final = "OK"
NOT_SENT: Final = "NOT_SENT"  # the generator's bound on requests in flight was reached
BAD_ANSWER: Final = "BAD_ANSWER"  # status OK, but not the tensor or not the id that was asked for


@dataclass(frozen=True, slots=True)
class Record:
    """Record of one request."""

    intended_s: float  # since the start of the load
    sent_late_ms: float  # how far behind the generator itself was
    latency_ms: float  # from intended_s to the answer or failure
    code: str  # OK, a gRPC status name, NOT_SENT or BAD_ANSWER
    items: int
    correct: int  # items whose answer is their label
    variant: str  # as the answer names it; "" = not answered
    slice: str = ""  # as its receipt names it; "" = not answered, or none was asked for


@dataclass(frozen=True, slots=True)
class LoadSummary:
    """Summary of a load. Latencies are of answered requests; None where nothing was answered."""

    requests: int
    answered: int
    failed: int
    failed_by_code: Mapping[str, int]
    duration_s: float
    offered_per_s: float
    slo_ms: float
    slo_quantile: float
    slo_attainment: float
    latency_ms_mean: float | None
    latency_ms_p50: float | None
    latency_ms_p95: float | None
    latency_ms_p99: float | None
    latency_ms_max: float | None
    accuracy: float | None  # right items over answered items; None where they have no labels
    variant_shares: Mapping[str, float]  # of answered requests
    sent_late_ms_p99: float  # of the generator itself: above a few ms this machine was too busy to measure


@dataclass(frozen=True, slots=True)
class LoadSeries:
    """Series of a load, per second of intended time. All lists are as long as `t_s`."""

    t_s: list[float]
    offered_per_s: list[int]
    answered_per_s: list[int]
    failed_per_s: list[int]
    latency_ms_p95: list[float | None]
    answered_by_variant: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one load: all records, in order of intended time."""

    records: tuple[Record, ...]
    started_at_s: float  # UTC, of intended time 0
    duration_s: float
    seed: int
    digest: str  # of the schedule: equal digests, equal arrivals and images
    stopped_early: bool = False
    labelled: bool = True  # else the right answers are unknown

    @property
    def answered(self) -> int:
        """Number of answered requests."""
        return sum(record.code == OK for record in self.records)

    def summary(self, slo_ms: float, slo_quantile: float = 0.95) -> LoadSummary:
        """Summary of the load against one SLO."""
        answered = [r for r in self.records if r.code == OK]
        latency = np.array([r.latency_ms for r in answered])
        items = sum(r.items for r in answered)
        within = int(np.count_nonzero(latency <= slo_ms))
        late = [r.sent_late_ms for r in self.records]
        return LoadSummary(
            requests=len(self.records),
            answered=len(answered),
            failed=len(self.records) - len(answered),
            failed_by_code=dict(sorted(Counter(r.code for r in self.records if r.code != OK).items())),
            duration_s=self.duration_s,
            offered_per_s=len(self.records) / self.duration_s if self.duration_s else 0.0,
            slo_ms=slo_ms,
            slo_quantile=slo_quantile,
            slo_attainment=within / len(self.records) if self.records else 1.0,
            latency_ms_mean=float(latency.mean()) if answered else None,
            latency_ms_p50=quantile(latency, 0.50),
            latency_ms_p95=quantile(latency, 0.95),
            latency_ms_p99=quantile(latency, 0.99),
            latency_ms_max=quantile(latency, 1.0),
            accuracy=sum(r.correct for r in answered) / items if items and self.labelled else None,
            variant_shares={v: n / len(answered) for v, n in sorted(Counter(r.variant for r in answered).items())},
            sent_late_ms_p99=quantile(np.array(late), 0.99) or 0.0,
        )

    def series(self) -> LoadSeries:
        """Series of the load; requests count in the second in which they were due."""
        seconds = max(1, math.ceil(self.duration_s))
        due: list[list[Record]] = [[] for _ in range(seconds)]
        for record in self.records:
            due[min(int(record.intended_s), seconds - 1)].append(record)
        answered = [[r for r in rows if r.code == OK] for rows in due]
        variants = sorted({r.variant for rows in answered for r in rows})
        return LoadSeries(
            t_s=[float(t) for t in range(seconds)],
            offered_per_s=[len(rows) for rows in due],
            answered_per_s=[len(rows) for rows in answered],
            failed_per_s=[len(a) - len(b) for a, b in zip(due, answered, strict=True)],
            latency_ms_p95=[quantile(np.array([r.latency_ms for r in rows]), 0.95) for rows in answered],
            answered_by_variant={v: [sum(r.variant == v for r in rows) for rows in answered] for v in variants},
        )

    def write(self, path: Path, slo_ms: float, slo_quantile: float = 0.95) -> None:
        """Write the result as one JSON file, atomically; records as columns."""
        found = {
            "seed": self.seed,
            "digest": self.digest,
            "started_at_s": self.started_at_s,
            "stopped_early": self.stopped_early,
            "summary": asdict(self.summary(slo_ms, slo_quantile)),
            "series": asdict(self.series()),
            "records": {name: [getattr(r, name) for r in self.records] for name in Record.__dataclass_fields__},
        }
        replace_file(path, json.dumps(found, allow_nan=False), sync=False)


def quantile(values: NDArray[np.float64], q: float) -> float | None:
    """Quantile q of values; None of nothing."""
    return float(np.quantile(values, q)) if len(values) else None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a load. Latency, accuracy and rate are of the last few seconds (loadgen.WINDOW_S)."""

    elapsed_s: float  # below 0: it has not begun
    duration_s: float
    requests: int  # due so far
    answered: int
    failed: int
    in_flight: int
    answered_per_s: float
    latency_ms_p95: float | None
    accuracy: float | None

"""Series of samples, the names that servers and exporters give them, and increases of counters.

Names: Triton 23 to 26 (docs/user_guide/metrics.md), vLLM 0.6 to 0.32, DCGM exporter 3 and 4 (default-counters.csv).
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Labels = Mapping[str, str]

US: Final = 1e-6
MIB: Final = 2.0**-20
GAP_MIN_S: Final = 60.0
LOOKBACK_S: Final = 300.0  # a sample that Prometheus gives may be as old
UPDATE_S: Final = 1.0  # between two updates of an energy counter


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """Samples of one series: name and labels as the source has them, times [s since 1970] ascending, values."""

    name: str
    labels: Labels
    times_s: Floats
    values: Floats


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a series stands for: the quantity, the factor to its unit, and where several names stand for one quantity,
    which is preferred (0 first)."""

    quantity: str
    factor: float = 1.0
    rank: int = 0


MODEL_SERIES: Final[Mapping[str, Meaning]] = {
    "nv_inference_request_success": Meaning("requests", rank=1),
    "nv_inference_count": Meaning("items"),
    "nv_inference_exec_count": Meaning("executions"),
    "nv_inference_request_duration_us": Meaning("request_s", US, rank=1),
    "nv_inference_queue_duration_us": Meaning("queue_s", US, rank=2),
    "nv_inference_compute_input_duration_us": Meaning("input_s", US),
    "nv_inference_compute_infer_duration_us": Meaning("infer_s", US),
    "nv_inference_compute_output_duration_us": Meaning("output_s", US),
    "nv_inference_request_summary_us": Meaning("quantile_s", US),
    "nv_cache_num_hits_per_model": Meaning("cache_hits"),
    "vllm:request_success_total": Meaning("requests"),
    "vllm:e2e_request_latency_seconds_sum": Meaning("request_s"),
    "vllm:e2e_request_latency_seconds_bucket": Meaning("bucket"),
    "vllm:request_queue_time_seconds_sum": Meaning("queue_s"),
    "vllm:time_in_queue_requests_sum": Meaning("queue_s", rank=1),  # 0.6 and 0.7
    "vllm:num_requests_running": Meaning("running"),
}
DEVICE_SERIES: Final[Mapping[str, Meaning]] = {
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": Meaning("joules", 1e-3),
    "nv_energy_consumption": Meaning("joules", rank=1),
    "DCGM_FI_DEV_POWER_USAGE": Meaning("watts"),
    "nv_gpu_power_usage": Meaning("watts", rank=1),
    "DCGM_FI_DEV_POWER_MGMT_LIMIT": Meaning("limit_w"),
    "nv_gpu_power_limit": Meaning("limit_w", rank=1),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": Meaning("activity"),
    "DCGM_FI_DEV_GPU_UTIL": Meaning("activity", 0.01, rank=1),
    "nv_gpu_utilization": Meaning("activity", rank=2),
    "DCGM_FI_DEV_SM_CLOCK": Meaning("clock_mhz"),
    "DCGM_FI_DEV_FB_USED": Meaning("used_mib"),
    "DCGM_FI_DEV_FB_FREE": Meaning("free_mib"),
    "nv_gpu_memory_used_bytes": Meaning("used_mib", MIB, rank=1),
    "nv_gpu_memory_total_bytes": Meaning("memory_mib", MIB),
}
SERIES: Final[Mapping[str, Meaning]] = {**MODEL_SERIES, **DEVICE_SERIES}
MOST: Final = {  # of a gauge in its unit; DCGM's blanks are 2**31 - 16 and more
    "activity": 2.0, "watts": 9e3, "limit_w": 9e3, "clock_mhz": 1e5, "used_mib": 1e7, "free_mib": 1e7,
    "memory_mib": 1e7, "quantile_s": 1e6, "running": 1e6,
}  # fmt: skip
COUNT_MAX: Final = 1e15
COUNTERS: Final = frozenset(one.quantity for one in SERIES.values()) - set(MOST)
CLUSTER_LABELS: Final = ("cluster", "cluster_name", "cluster_id", "k8s_cluster", "k8s_cluster_name")


def known_name(name: str) -> str:
    """Name in `SERIES` of a series as its source names it, also with OpenMetrics' `_total`; "": it is not read."""
    return next((one for one in (name, name.removesuffix("_total")) if one in SERIES), "")


def printable(text: str) -> str:
    """Text without control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else "?" for c in text)


def labels_of(labels: object) -> dict[str, str]:
    """Labels as a source gives them; raises ValueError: they are not strings by strings."""
    if not isinstance(labels, dict) or not all(isinstance(part, str) for pair in labels.items() for part in pair):
        raise ValueError("labels are not strings by strings")
    return {name: printable(value) for name, value in labels.items()}


def sound(series: Sequence[MetricSeries], notes: list[str]) -> list[MetricSeries]:
    """Series by their names in `SERIES`, in the units of quantities. Samples below 0, not finite, or beyond `MOST` are
    left out; `notes` gets their number."""
    found, dropped = list[MetricSeries](), Counter[str]()
    for one in series:
        if (name := known_name(one.name)) in SERIES:
            about, values = SERIES[name], one.values * SERIES[name].factor
            kept = (values >= 0) & (values <= MOST.get(about.quantity, COUNT_MAX))
            dropped[name] += int((~kept & ~np.isnan(values)).sum())
            found += [MetricSeries(name, one.labels, one.times_s[kept], values[kept])] if kept.any() else []
    why = "samples left out: negative, infinite, or blanks of DCGM"
    notes += [f"{name}: {count:,} {why}" for name, count in dropped.items() if count]
    return found


def increases(
    times_s: Floats, values: Floats, edges_s: Floats, most_per_s: float = math.inf
) -> tuple[Floats, Floats, int]:
    """Increase of a counter in each bin, how much of the bin is covered [s], and how many changes were left out.

    Linear between samples. A fall to less than half is a restart at zero: what it shows after has come since. Any other
    fall is an error of one sample, which the next one makes good. Pairs of samples further apart than two bins (at
    least `GAP_MIN_S`), or with a change of more than `most_per_s`, add nothing. `edges_s`: n + 1 ascending edges.
    """
    if times_s.size < 2:
        return np.zeros(edges_s.size - 1), np.zeros(edges_s.size - 1), 0
    widths, rises = np.diff(times_s), np.diff(values)
    changed = np.arange(times_s.size)  # a value may be read several times before the next: a rise is since it changed
    changed[1:][rises == 0] = 0
    since = np.maximum.accumulate(changed)[:-1]
    spans = np.where(since > 0, times_s[1:] - times_s[since], np.maximum(widths, LOOKBACK_S)) + UPDATE_S
    rises = np.where(values[1:] < values[:-1] / 2, values[1:], rises)
    near = widths <= max(GAP_MIN_S, 2 * (edges_s[1] - edges_s[0]))
    known = near & (np.abs(rises) <= most_per_s * spans)
    at = np.diff(np.interp(edges_s, times_s, np.concatenate(([0.0], np.cumsum(np.where(known, rises, 0.0))))))
    covered = np.diff(np.interp(edges_s, times_s, np.concatenate(([0.0], np.cumsum(np.where(known, widths, 0.0))))))
    return np.maximum(at, 0.0), covered, int((near & ~known).sum())


def means(times_s: Floats, values: Floats, edges_s: Floats) -> Floats:
    """Mean of a gauge's samples in each bin; NaN where there is none."""
    count, total = np.histogram(times_s, edges_s)[0], np.histogram(times_s, edges_s, weights=values)[0]
    return np.asarray(np.divide(total, count, out=np.full(edges_s.size - 1, np.nan), where=count > 0))


def merged(parts: Sequence[MetricSeries]) -> tuple[Floats, Floats]:
    """One counter or gauge of which several label sets tell (MIG slices, pods, scrapers): the largest value at each
    time, as a pod that ends leaves its last value behind for minutes."""
    times = np.concatenate([one.times_s for one in parts])
    values = np.concatenate([one.values for one in parts])
    known, place = np.unique(times, return_inverse=True)
    highest = np.full(known.size, np.nan)
    np.fmax.at(highest, place, values)
    return known, highest


def series_of(samples: Iterable[tuple[str, Labels, float, float]]) -> list[MetricSeries]:
    """Series of single samples (name, labels, time [s], value), sorted by time; of two at one time the last holds."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], dict[float, float]] = {}
    for name, labels, at_s, value in samples:
        found.setdefault((name, tuple(sorted(labels.items()))), {})[at_s] = value
    return [
        MetricSeries(name, labels_of(dict(labels)), *np.array(sorted(points.items())).T)
        for (name, labels), points in found.items()
    ]

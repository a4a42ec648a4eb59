"""What is found in series: devices with their watts and joules, models with their rates, times and latencies.

Which model runs on which device: by `gpu_uuid` of the same Triton, else by the pod that DCGM's exporter names, else by
the host. Joules are the board's: in MIG mode each slice's row repeats them, and they are counted once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from trefoil.assess.series import (
    COUNTERS,
    DEVICE_SERIES,
    MODEL_SERIES,
    Floats,
    Labels,
    MetricSeries,
    increases,
    meaning,
    means,
    merged,
    spacing_s,
)
from trefoil.core.errors import InvalidInput
from trefoil.core.units import HOUR_S

BINS: Final = 168
BIN_SAMPLES: Final = 4.0  # samples that a bin holds at least
GAP_SAMPLES: Final = 4.0  # longer without a sample is a gap
GAP_MIN_S: Final = 60.0
QUANTILES: Final = (0.5, 0.95, 0.99)
IDLE_ACTIVITY: Final = 0.005
IDLE_SAMPLES: Final = 5
UTILISED: Final = 0.7  # of a device's time, up to which it is counted as needed


@dataclass(slots=True)
class FoundDevice:
    """Device: its name in series (UUID), host and board, its MIG slices by id, and by bin joules and covered seconds.

    `idle_w` is the median of its watts while nothing computes; None: that was never seen. `pods`: what uses it.
    """

    name: str
    host: str = ""
    board: str = ""
    slices: dict[str, str] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)
    """Pod that uses it -> id of its MIG slice, "" for the whole."""
    joules: Floats = field(default_factory=lambda: np.zeros(0))
    covered_s: Floats = field(default_factory=lambda: np.zeros(0))
    mean_w: float = 0.0
    idle_w: float | None = None
    activity: float | None = None
    clock_mhz: float = 0.0
    limit_w: float = 0.0
    used_mib: float = 0.0
    memory_mib: float = 0.0
    basis: str = ""


@dataclass(slots=True)
class Replica:
    """One server's share of a model: by bin what it counted. `devices`: where it runs, with the MIG slice's id."""

    name: str
    host: str
    counts: dict[str, Floats]
    covered_s: Floats
    devices: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class FoundModel:
    """Model: replicas, latency quantiles [ms] and what they rest on (`histogram`, `summary`, `mean`)."""

    name: str
    engine: str
    replicas: list[Replica] = field(default_factory=list)
    latency_ms: dict[float, float] = field(default_factory=dict)
    latency_basis: str = "mean"
    running: float = 0.0
    """Requests in progress at once, of engines that say so, while there are any."""

    @property
    def version(self) -> str:
        """Version of the model; "" where its server says none."""
        return self.name.rpartition(":")[2] if self.engine == "triton" and ":" in self.name else ""

    @property
    def plain(self) -> str:
        """Name without the version."""
        return self.name.rpartition(":")[0] if self.version else self.name

    def count(self, quantity: str) -> Floats:
        """Sum over the replicas by bin."""
        parts = [one.counts[quantity] for one in self.replicas if quantity in one.counts]
        return np.sum(parts, axis=0) if parts else np.zeros_like(self.replicas[0].covered_s)

    def total(self, quantity: str) -> float:
        """Sum over replicas and bins."""
        return float(self.count(quantity).sum())

    @property
    def covered_s(self) -> Floats:
        """Seconds of each bin in which it was seen."""
        return np.asarray(np.max([one.covered_s for one in self.replicas], axis=0))

    @property
    def computed(self) -> float:
        """Requests that were computed: not those that a response cache answered."""
        return max(0.0, self.total("requests") - self.total("cache_hits"))

    @property
    def batch(self) -> float:
        """Items of one execution; of engines that decode together, requests in progress."""
        if self.engine == "vllm":
            return max(1.0, self.running)
        executions = self.total("executions")
        return max(1.0, self.total("items") / executions) if executions else 1.0

    @property
    def items(self) -> float:
        """Items of one request."""
        return max(1.0, self.total("items") / self.computed) if self.computed and self.total("items") else 1.0

    @property
    def request_ms(self) -> float:
        """Mean time of a request in its server, with waiting."""
        answered = self.total("requests")
        return 1e3 * self.total("request_s") / answered if answered else 0.0

    @property
    def service_ms(self) -> float:
        """Mean time of one execution. A server counts a batch's time once for each of its requests."""
        if not self.computed:
            return 0.0
        seconds = sum(self.total(name) for name in ("input_s", "infer_s", "output_s"))
        if not seconds:
            seconds = self.total("request_s") - self.total("queue_s")
        return 1e3 * max(0.0, seconds) / self.computed

    def executions(self, replica: Replica) -> Floats:
        """Executions of a replica by bin; batches of requests, where the engine counts none."""
        if "executions" in replica.counts:
            return replica.counts["executions"]
        return replica.counts.get("requests", np.zeros_like(replica.covered_s)) / self.batch

    def busy_s(self, replica: Replica) -> Floats:
        """Seconds in which a replica computes, by bin."""
        return self.executions(replica) * self.service_ms / 1e3


@dataclass(slots=True)
class Found:
    """All that was found, in bins of `bin_s` from `begin_s` on. `notes`: what is assumed or missing, a line each."""

    begin_s: float
    bin_s: float
    edges_s: Floats
    devices: dict[str, FoundDevice]
    models: dict[str, FoundModel]
    notes: list[str] = field(default_factory=list)

    @property
    def covered_s(self) -> Floats:
        """Covered seconds by bin: the mean of the devices."""
        return np.asarray(np.mean([one.covered_s for one in self.devices.values()], axis=0))

    @property
    def joules(self) -> float:
        """Joules of all devices while they are covered."""
        return float(sum(one.joules.sum() for one in self.devices.values()))

    def on(self, device: str) -> list[tuple[FoundModel, Replica]]:
        """Models on a device, with the replica of each."""
        return [
            (m, r) for m in self.models.values() for r in m.replicas if any(name == device for name, _ in r.devices)
        ]

    def asleep_h(self) -> float:
        """Device hours in which a device more than the load needs was awake, at `UTILISED` of each one's time."""
        spare = np.zeros_like(self.edges_s[1:])
        for model in self.models.values():
            held = {name for one in model.replicas for name, _ in one.devices}
            busy = np.sum([model.busy_s(one) for one in model.replicas], axis=0) / self.bin_s
            spare += np.maximum(0.0, len(held) - np.maximum(1.0, np.ceil(busy / UTILISED)))
        unused = sum(not self.on(name) for name in self.devices)
        return float((spare + unused).sum() * self.bin_s / 3600.0)


def find(series: Sequence[MetricSeries], begin_s: float = 0.0, end_s: float = 0.0) -> Found:
    """Find devices and models. Times 0: as far as the samples reach.

    Raises:
        InvalidInput: there are none of devices, of models, or of energy; names what was looked for.
    """
    known = [one for one in series if meaning(one.name) is not None and one.times_s.size]
    _check(known)
    begin_s = begin_s or min(one.times_s[0] for one in known)
    end_s = end_s or max(one.times_s[-1] for one in known)
    step_s = max(spacing_s(one.times_s) for one in known)
    if not end_s - begin_s >= max(2 * step_s, 1.0):
        raise InvalidInput("fewer than three samples of a series", field="time", value=end_s - begin_s,
                           remedy="read a longer time: --since, --minutes, or more rows")  # fmt: skip
    bin_s = min(HOUR_S, max((end_s - begin_s) / BINS, BIN_SAMPLES * step_s))
    edges = np.linspace(begin_s, end_s, max(1, round((end_s - begin_s) / bin_s)) + 1)
    found = Found(begin_s, float(edges[1] - edges[0]), edges, {}, {})
    for name, own in sorted(_grouped(known, DEVICE_SERIES, _device_key).items()):
        found.devices[name] = _device(name, own, edges, found.notes)
    models = _grouped(known, MODEL_SERIES, _model_key)
    for name, own in sorted(models.items()):
        model = _model(name, own, edges)
        if model.total("requests") > 0:
            found.models[name] = model
    if idle := sorted(set(models) - set(found.models)):
        found.notes.append(f"not asked in that time, and left out: {', '.join(idle)}")
    if not found.models:
        raise InvalidInput("no request was counted in that time", field="time", remedy="read a time with load")
    place(found, known)
    share = float(found.covered_s.sum() / (end_s - begin_s))
    if share < 0.99:
        found.notes.append(
            f"{1 - share:.1%} of the time has no samples: it is counted nowhere, and load there is assumed"
        )
    return found


def _check(known: Sequence[MetricSeries]) -> None:
    """Check that there is something of models and of energy."""
    there = {meaning(one.name).quantity for one in known}  # type: ignore[union-attr]
    if "requests" not in there:
        raise InvalidInput(
            "no series of models: looked for nv_inference_request_success (Triton), vllm:request_success_total (vLLM)",
            field="series",
            remedy="have Triton's port 8002 or vLLM's /metrics scraped (tritonserver --allow-metrics=true)",
        )
    if not there & {"joules", "watts"}:
        raise InvalidInput(
            "no series of energy: looked for DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION, DCGM_FI_DEV_POWER_USAGE, "
            "nv_energy_consumption and nv_gpu_power_usage",
            field="series",
            remedy="run DCGM's exporter; without MIG Triton tells them too (--allow-gpu-metrics=true)",
        )


def _model_key(labels: Labels) -> str:
    """Model, with its version where a server says one."""
    name, version = labels.get("model") or labels.get("model_name") or "", labels.get("version", "")
    return f"{name}:{version}" if name and version else name


def _device_key(labels: Labels) -> str:
    uuid = labels.get("UUID") or labels.get("uuid") or labels.get("gpu_uuid") or ""
    return uuid or (f"{_host(labels)}/gpu{labels['gpu']}" if labels.get("gpu") else "")


def _host(labels: Labels) -> str:
    return labels.get("Hostname") or labels.get("node") or labels.get("instance", "").rpartition(":")[0]


def _workload(labels: Labels) -> str:
    return labels.get("exported_pod") or labels.get("pod") or ""


def _grouped(
    series: Iterable[MetricSeries], names: Mapping[str, object], key: Callable[[Labels], str]
) -> dict[str, list[MetricSeries]]:
    """Series of these names by a key of their labels; those without one are left out."""
    found = defaultdict[str, list[MetricSeries]](list)
    for one in series:
        if one.name in names or one.name.removesuffix("_total") in names:
            found[key(one.labels)].append(one)
    found.pop("", None)
    return dict(found)


def _best(series: Sequence[MetricSeries], quantity: str) -> tuple[list[MetricSeries], float]:
    """Series of a quantity under the preferred name, and the factor to its unit."""
    parts = [(one, meaning(one.name)) for one in series]
    ranks = [m.rank for _, m in parts if m is not None and m.quantity == quantity]
    own = [(s, m) for s, m in parts if m is not None and m.quantity == quantity and m.rank == min(ranks)]
    return [s for s, _ in own], own[0][1].factor if own else 1.0


def _gap_s(series: MetricSeries) -> float:
    return max(GAP_MIN_S, GAP_SAMPLES * spacing_s(series.times_s))


def _device(name: str, series: Sequence[MetricSeries], edges: Floats, notes: list[str]) -> FoundDevice:
    found, watts, gauges = FoundDevice(name), None, {}
    for one in sorted(series, key=lambda one: "Hostname" not in one.labels):
        found.host = found.host or _host(one.labels)
        found.board = found.board or one.labels.get("modelName", "")
        if instance := one.labels.get("GPU_I_ID"):
            found.slices[instance] = one.labels.get("GPU_I_PROFILE", "")
        if "DCGM" in one.name and (pod := _workload(one.labels)):
            found.pods[pod] = one.labels.get("GPU_I_ID", "")
    for quantity in ("watts", "activity", "clock_mhz", "limit_w", "used_mib", "free_mib", "memory_mib"):
        parts, factor = _best(series, quantity)
        if parts:
            times, values = merged(parts)
            gauges[quantity] = (times, values * factor)
    for quantity in ("clock_mhz", "limit_w", "used_mib", "memory_mib"):
        if quantity in gauges:
            setattr(found, quantity, float(np.median(gauges[quantity][1])))
    if "free_mib" in gauges and not found.memory_mib:
        found.memory_mib = found.used_mib + float(np.median(gauges["free_mib"][1]))
    parts, factor = _best(series, "joules")
    watts = gauges.get("watts")
    if parts:
        found.basis = f"counted ({parts[0].name.removesuffix('_total')})"
        if parts[0].name.startswith("nv_"):  # of two servers on it each counts since its own start
            each = [increases(one.times_s, one.values, edges, _gap_s(one)) for one in parts]
            found.joules, found.covered_s = (np.max([pair[n] for pair in each], axis=0) for n in (0, 1))
        else:
            times, values = merged(parts)
            whole = MetricSeries(parts[0].name, {}, times, values * factor)
            found.joules, found.covered_s = increases(times, whole.values, edges, _gap_s(whole))
    elif watts is not None:
        found.basis = "power gauge, integrated"
        notes.append(f"{name}: no energy counter; its power is integrated, and peaks between samples are missed")
        cumulated = np.concatenate(([0.0], np.cumsum(np.diff(watts[0]) * (watts[1][1:] + watts[1][:-1]) / 2)))
        found.joules, found.covered_s = increases(watts[0], cumulated, edges, _gap_s(MetricSeries("", {}, *watts)))
    else:
        found.basis = "none"
        found.joules, found.covered_s = np.zeros(edges.size - 1), np.zeros(edges.size - 1)
        notes.append(f"{name}: neither joules nor watts: it counts as nothing")
    total_s = found.covered_s.sum()
    found.mean_w = float(found.joules.sum() / total_s) if total_s else 0.0
    if "activity" in gauges:
        times, activity = gauges["activity"]
        found.activity = float(activity.mean())
        if watts is not None:
            still = np.interp(watts[0], times, activity) <= IDLE_ACTIVITY
            if still.sum() >= IDLE_SAMPLES:
                found.idle_w = float(np.median(watts[1][still]))
    return found


def _model(name: str, series: Sequence[MetricSeries], edges: Floats) -> FoundModel:
    engine = "vllm" if any(one.name.startswith("vllm:") for one in series) else "triton"
    found = FoundModel(name, engine)
    by_replica = defaultdict[str, list[MetricSeries]](list)
    for one in series:
        by_replica[_workload(one.labels) or one.labels.get("instance", "")].append(one)
    buckets = defaultdict[float, float](float)
    for replica, own in sorted(by_replica.items()):
        counts, covered = dict[str, Floats](), np.zeros(edges.size - 1)
        for quantity in sorted(COUNTERS - {"joules", "bucket"}):
            parts, factor = _best(own, quantity)
            for group in _same(parts):
                times, values = merged(group)
                whole = MetricSeries(quantity, {}, times, values)
                rise, seen = increases(times, values * factor, edges, _gap_s(whole))
                counts[quantity] = counts.get(quantity, np.zeros_like(rise)) + rise
                covered = np.maximum(covered, seen) if quantity == "requests" else covered
        for group in _same(_best(own, "bucket")[0]):
            times, values = merged(group)
            rise, _ = increases(times, values, edges, _gap_s(MetricSeries("", {}, times, values)))
            buckets[float(group[0].labels.get("le", "inf").replace("+Inf", "inf"))] += float(rise.sum())
        found.replicas.append(Replica(replica, _host(own[0].labels), counts, covered))
    running = [means(*merged(group), edges) for group in _same(_best(series, "running")[0])]
    if running:
        together = np.nansum(running, axis=0) / max(1, len(found.replicas))
        found.running = float(together[together > 0].mean()) if (together > 0).any() else 0.0
    _latency(found, buckets, series, edges)
    return found


def _same(parts: Sequence[MetricSeries]) -> list[list[MetricSeries]]:
    """Series that are one but for who scraped them: of one server, version, reason, bucket."""
    told = ("version", "reason", "finished_reason", "engine", "le", "quantile", "gpu_uuid")
    found = defaultdict[tuple[str, ...], list[MetricSeries]](list)
    for one in parts:
        server = _workload(one.labels) or one.labels.get("instance", "")
        found[(server, *(one.labels.get(label, "") for label in told))].append(one)
    return list(found.values())


def _latency(found: FoundModel, buckets: Mapping[float, float], series: Sequence[MetricSeries], edges: Floats) -> None:
    """Quantiles by a histogram, else by a summary, else none; over all samples, of which a summary's are the mean."""
    if buckets and max(buckets.values()) > 0:
        found.latency_basis = "histogram"
        found.latency_ms = {q: 1e3 * histogram_quantile(buckets, q) for q in QUANTILES}
        return
    parts, factor = _best(series, "quantile_s")
    weight = found.count("requests")
    for one in parts:
        q, seen = float(one.labels.get("quantile", "nan")), means(one.times_s, one.values, edges)
        known = np.isfinite(seen) & (weight > 0)
        if q in QUANTILES and known.any():
            found.latency_basis = "summary"
            ms = 1e3 * factor * float(np.average(seen[known], weights=weight[known]))
            found.latency_ms[q] = max(ms, found.latency_ms.get(q, 0.0))  # quantiles of servers do not add up: the worst


def histogram_quantile(buckets: Mapping[float, float], q: float) -> float:
    """Quantile of cumulative counts by upper bound, linear inside a bucket; beyond the last bound, that bound."""
    bounds = sorted(buckets)
    counts = np.maximum.accumulate([buckets[bound] for bound in bounds])
    rank, low, below = q * counts[-1], 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            if not np.isfinite(bound):
                return low
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, float(count)
    return low


def place(found: Found, series: Sequence[MetricSeries]) -> None:
    """Set where each replica runs."""
    by_server = defaultdict[str, set[str]](set)
    for told in series:
        if told.labels.get("gpu_uuid") in found.devices:
            by_server[_workload(told.labels) or told.labels.get("instance", "")].add(told.labels["gpu_uuid"])
    left = list[tuple[str, Replica]]()
    for model in found.models.values():
        for one in model.replicas:
            own = [(name, device.pods[one.name]) for name, device in found.devices.items() if one.name in device.pods]
            own = own or [(name, "") for name in sorted(by_server[one.name])]
            if not own:  # a host with several devices does not say which
                near = [name for name, device in found.devices.items() if device.host and device.host == one.host]
                own = [(name, "") for name in near] if len(near) == 1 else []
            one.devices = tuple(own)
            if not own:
                left.append((model.name, one))
    names = sorted(found.devices, key=lambda name: (found.devices[name].host, name))
    servers = sorted({one.name for _, one in left})
    for _, one in left:
        one.devices = ((names[servers.index(one.name) % len(names)], ""),)
    if left:
        found.notes.append(
            f"which device serves {', '.join(sorted({name for name, _ in left}))} is not said (no pod, gpu_uuid or "
            "host in common): servers are dealt to devices in order"
        )

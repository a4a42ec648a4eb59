"""Devices and models of a fleet, found in its series: watts, joules, rates, times, latencies.

A model's device is the one whose row of DCGM's exporter names the server's pod. Otherwise it is that of the server's
`gpu_uuid`, or else the only device of its host. Joules are those of the board, which the row of each MIG slice repeats.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from power_agent.devices.nvml_words import device_type_name
from trefoil.assess.series import COUNTERS, MODEL_SERIES, SERIES, Floats, MetricSeries, increases, means, merged, sound
from trefoil.core.device_types import DEVICE_TYPES
from trefoil.core.errors import InvalidInput
from trefoil.core.units import DAY_S, HOUR_S

BINS: Final = 168
BIN_SAMPLES: Final = 4.0  # samples that a bin holds at least
QUANTILES: Final = (0.5, 0.95, 0.99)
GAUGES: Final = ("clock_mhz", "limit_w", "used_mib", "free_mib", "memory_mib")
IDLE_ACTIVITY: Final = 0.005
IDLE_SAMPLES: Final = 5
TIMES_S: Final = (946_684_800.0, 4_102_444_800.0)  # the years 2000 to 2099
SPAN_MAX_S: Final = 800 * DAY_S
ABSURD: Final = 2.0  # times a board's power limit, which no board draws for long
BOARD_MAX_W: Final = 1500.0  # power limit where neither a series nor a table says one
TRITON_ONLY: Final = frozenset({"items", "executions", "input_s", "infer_s", "output_s"})  # wrong for its vLLM backend
POD_LABELS: Final = (("exported_namespace", "exported_pod"), ("pod_namespace", "pod_name"), ("namespace", "pod"))
NEEDED: Final = {  # quantities of which one has to be there, their series, what to enable
    "models": (
        {"requests"}, "nv_inference_request_success (Triton), vllm:request_success_total (vLLM)",
        "have Triton's port 8002 or vLLM's /metrics scraped (tritonserver --allow-metrics=true)",
    ),
    "energy": (
        {"joules", "watts"},
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION, DCGM_FI_DEV_POWER_USAGE, nv_energy_consumption, nv_gpu_power_usage",
        "run DCGM's exporter; without MIG Triton tells them too (--allow-gpu-metrics=true)",
    ),
}  # fmt: skip
UTILISED: Final = 0.7  # of a device's time, up to which it is counted as needed


@dataclass(slots=True)
class FoundDevice:
    """Device: its name in series (UUID), host and board, its MIG slices by id, and by bin joules and covered seconds.
    `idle_w`: the median of its watts while nothing computes; None: that was never seen."""

    name: str
    host: str = ""
    board: str = ""
    slices: dict[str, str] = field(default_factory=dict)
    pods: dict[str, str] = field(default_factory=dict)  # that use it, with the id of their MIG slice, "" for the whole
    joules: Floats = field(default_factory=lambda: np.zeros(0))
    covered_s: Floats = field(default_factory=lambda: np.zeros(0))
    mean_w: float = 0.0
    idle_w: float | None = None
    activity: float | None = None
    gauges: dict[str, float] = field(default_factory=dict)  # medians, of those of GAUGES that are there
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
    """Model: replicas; latency quantiles [ms] with what they rest on (`histogram`, `summary`, `mean`).

    `plain`: its name without the version. `batch`: items of an execution; of engines that decode together, requests in
    progress. `items`: of a request. `request_ms`: mean time in the server, with waiting. `service_ms`: mean time of an
    execution, of requests that no cache answered; a server counts a batch's time once for each of its requests.
    """

    name: str
    engine: str
    version: str
    plain: str
    replicas: list[Replica]
    latency_ms: dict[float, float] = field(default_factory=dict)
    latency_basis: str = "mean"
    batch: float = 1.0
    items: float = 1.0
    request_ms: float = 0.0
    service_ms: float = 0.0
    joins: bool = False  # requests that wait

    def count(self, quantity: str) -> Floats:
        """Sum over the replicas by bin."""
        nothing = np.zeros_like(self.replicas[0].covered_s)
        return np.asarray(np.sum([one.counts.get(quantity, nothing) for one in self.replicas], axis=0))

    @property
    def covered_s(self) -> Floats:
        """Seconds of each bin in which it was seen."""
        return np.asarray(np.max([one.covered_s for one in self.replicas], axis=0))

    def executions(self, replica: Replica) -> Floats:
        """Executions of a replica by bin; batches of requests, where the engine counts none."""
        counted = replica.counts.get("executions")
        return replica.counts["requests"] / self.batch if counted is None else counted

    def busy_s(self, replica: Replica) -> Floats:
        """Seconds in which a replica computes, by bin."""
        return self.executions(replica) * self.service_ms / 1e3


@dataclass(slots=True)
class Found:
    """All that was found, in bins of `bin_s`. `notes`: what is assumed or missing, a line each."""

    bin_s: float
    edges_s: Floats
    devices: dict[str, FoundDevice]
    models: dict[str, FoundModel]
    notes: list[str] = field(default_factory=list)

    @property
    def covered_s(self) -> Floats:
        """Covered seconds by bin: the mean of the devices that say joules."""
        said = [one.covered_s for one in self.devices.values() if one.covered_s.any()]
        return np.asarray(np.mean(said, axis=0)) if said else np.zeros(self.edges_s.size - 1)

    def on(self, device: str) -> list[tuple[FoundModel, Replica]]:
        """Models on a device, with the replica of each."""
        pairs = [(model, one) for model in self.models.values() for one in model.replicas]
        return [(model, one) for model, one in pairs if device in dict(one.devices)]

    def asleep_h(self) -> float:
        """Device hours in which a device more than the load needs was awake, at `UTILISED` of each one's time."""
        groups = [{name} for name in self.devices]  # devices that serve the same models are one group
        for model in self.models.values():
            held = {name for one in model.replicas for name, _ in one.devices}
            groups = [one for one in groups if not one & held] + [held.union(*(one for one in groups if one & held))]
        spare_s = np.zeros_like(self.edges_s[1:])
        for group in groups:
            hosted = {id(one): (model, one) for name in group for model, one in self.on(name)}.values()
            seen_s = np.mean([self.devices[name].covered_s for name in group], axis=0)
            busy_s = np.sum([model.busy_s(one) for model, one in hosted], axis=0) if hosted else 0.0 * seen_s
            needed = np.ceil(busy_s / np.maximum(seen_s, 1e-9) / UTILISED)
            spare_s += seen_s * np.maximum(0.0, len(group) - np.maximum(needed, 1.0 if hosted else 0.0))
        return float(spare_s.sum() / HOUR_S)


def find(series: Sequence[MetricSeries]) -> Found:
    """Find devices and models, as far as the samples reach; raises InvalidInput: what was looked for is not there."""
    known = sound(series, notes := list[str]())
    there = {SERIES[one.name].quantity for one in known}
    for what, (quantities, names, remedy) in NEEDED.items():
        if not there & quantities:
            raise InvalidInput(f"no series of {what}: looked for {names}", field="series", remedy=remedy)
    first, last = min(known, key=lambda one: one.times_s[0]), max(known, key=lambda one: one.times_s[-1])
    begin_s, end_s = float(first.times_s[0]), float(last.times_s[-1])
    if not (TIMES_S[0] <= begin_s and end_s <= TIMES_S[1] and end_s - begin_s <= SPAN_MAX_S):
        why = f"samples of {first.name} begin at {begin_s:.0f}, those of {last.name} end at {end_s:.0f}"
        remedy = f"correct or remove what is wrong: seconds since 1970, at most {SPAN_MAX_S / DAY_S:.0f} days apart"
        raise InvalidInput(why, field="timestamp", remedy=remedy)
    spacings = [np.median(np.diff(one.times_s)) for one in known if one.times_s.size > 2]
    step_s = float(np.median(spacings)) if spacings else end_s - begin_s
    if not end_s - begin_s >= max(2 * step_s, 1.0):
        remedy = "read a longer time (--since, --minutes, more rows), or give a smaller --step"
        raise InvalidInput("fewer than three samples of a series", field="time", remedy=remedy)
    bin_s = min(HOUR_S, max((end_s - begin_s) / BINS, BIN_SAMPLES * step_s))
    edges = np.linspace(begin_s, end_s, max(1, round((end_s - begin_s) / bin_s)) + 1)
    found = Found(float(edges[1] - edges[0]), edges, {}, {}, notes)
    by_key = defaultdict[tuple[bool, str], list[MetricSeries]](list)
    for one in known:
        is_model = one.name in MODEL_SERIES
        by_key[is_model, (_model_key if is_model else _device_key)(one.labels)].append(one)
    for (is_model, name), own in sorted(by_key.items()):
        if name and not is_model:
            found.devices[name] = _device(name, own, edges, found.notes)
        elif name and (model := _model(name, own, edges)) is not None:
            found.models[name] = model
    if idle := sorted({name for is_model, name in by_key if name and is_model} - set(found.models)):
        found.notes.append(f"not asked in that time, and left out: {', '.join(idle)}")
    if not found.models:
        remedy = "read a time with load, and series that have their label model or model_name"
        raise InvalidInput("no request of a model was counted in that time", field="time", remedy=remedy)
    place(found, known)
    share = float(found.covered_s.sum() / (end_s - begin_s))
    if share < 0.99:
        found.notes.append(f"{1 - share:.1%} of the time has no samples: nothing of it counts, its load is assumed")
    return found


def _model_key(labels: Mapping[str, str]) -> str:
    """Model, with its version where a server says one."""
    name, version = labels.get("model") or labels.get("model_name") or "", labels.get("version", "")
    return f"{name}:{version}" if name and version else name


def _device_key(labels: Mapping[str, str]) -> str:
    return labels.get("UUID") or labels.get("uuid") or labels.get("gpu_uuid") or ""


def _host(labels: Mapping[str, str]) -> str:
    return labels.get("Hostname") or labels.get("node") or labels.get("instance", "").rpartition(":")[0]


def _workload(labels: Mapping[str, str]) -> str:
    """Pod, with its namespace where it is said."""
    pods = ((labels.get(space, ""), labels[pod]) for space, pod in POD_LABELS if labels.get(pod))
    return "/".join(filter(None, next(pods, ())))


def _is_pod(one: str, other: str) -> bool:
    """Whether two names are of one pod: without its namespace where one of them says none."""
    (space, _, pod), (other_space, _, other_pod) = one.rpartition("/"), other.rpartition("/")
    return pod == other_pod and (space == other_space or not (space and other_space))


def _server(labels: Mapping[str, str]) -> str:
    return _workload(labels) or labels.get("instance", "")


def _best(series: Sequence[MetricSeries], quantity: str) -> list[MetricSeries]:
    """Series of a quantity under the preferred name."""
    own = [one for one in series if SERIES[one.name].quantity == quantity]
    return [one for one in own if SERIES[one.name].rank == min(SERIES[other.name].rank for other in own)]


def _device(name: str, series: Sequence[MetricSeries], edges: Floats, notes: list[str]) -> FoundDevice:
    found = FoundDevice(name)
    for one in sorted(series, key=lambda one: "Hostname" not in one.labels):
        found.host = found.host or _host(one.labels)
        found.board = found.board or one.labels.get("modelName", "")
        if instance := one.labels.get("GPU_I_ID"):
            found.slices[instance] = one.labels.get("GPU_I_PROFILE", "")
        if "DCGM" in one.name and (pod := _workload(one.labels)):
            found.pods[pod] = one.labels.get("GPU_I_ID", "")
    gauges = {quantity: _gauge(series, quantity) for quantity in GAUGES}
    found.gauges = {quantity: float(np.median(gauge[1])) for quantity, gauge in gauges.items() if gauge is not None}
    watts, activity = _gauge(series, "watts"), _gauge(series, "activity")
    parts = _best([one for one in series if np.ptp(one.values)], "joules")  # some boards say 0 forever
    if parts:  # of two Tritons on a device each counts since its own start
        by_triton = parts[0].name.startswith("nv_")
        found.basis = f"counter of {'Triton' if by_triton else 'DCGM'}"
        counters = [merged(own) for own in (_same(parts) if by_triton else [parts])]
    elif watts is not None:
        steps = np.diff(watts[0]) * (watts[1][1:] + watts[1][:-1]) / 2
        found.basis, counters = "power, integrated", [(watts[0], np.concatenate(([0.0], np.cumsum(steps))))]
        notes.append(f"{name}: no energy counter; its power is integrated, and peaks between samples are missed")
    else:
        found.basis, counters = "none", [(np.zeros(0), np.zeros(0))]
        notes.append(f"{name}: neither joules nor watts: it counts as nothing")
    board = DEVICE_TYPES.get(device_type_name(found.board))
    limits_w = [found.gauges.get("limit_w", 0.0), board.power_limit_max_w if board else 0.0]
    most_w = ABSURD * (max(limits_w) or BOARD_MAX_W)
    rises, covered, dropped = zip(*(increases(*one, edges, most_w) for one in counters), strict=True)
    found.joules, found.covered_s = np.max(rises, axis=0), np.max(covered, axis=0)
    if count := sum(dropped):
        notes.append(f"{name}: {count} changes of its joules left out: above {most_w:.0f} W, twice its power limit")
    found.mean_w = float(found.joules.sum() / max(1e-9, found.covered_s.sum()))
    if activity is not None:
        found.activity = float(activity[1].mean())
    if activity is not None and watts is not None:
        still = np.interp(watts[0], *activity) <= IDLE_ACTIVITY
        found.idle_w = float(np.median(watts[1][still])) if still.sum() >= IDLE_SAMPLES else None
    return found


def _gauge(series: Sequence[MetricSeries], quantity: str) -> tuple[Floats, Floats] | None:
    """Times and values of a gauge; None: there is none."""
    return merged(parts) if (parts := _best(series, quantity)) else None


def _model(name: str, series: Sequence[MetricSeries], edges: Floats) -> FoundModel | None:
    """Model of its series; None where no request of it was counted."""
    version = series[0].labels.get("version", "")
    engine = "vllm" if any(one.name.startswith("vllm:") for one in series) else "triton"
    found = FoundModel(name, engine, version, name.removesuffix(f":{version}"), [])
    by_replica, buckets = defaultdict[str, list[MetricSeries]](list), defaultdict[float, float](float)
    for one in series:
        by_replica[_server(one.labels)].append(one)
    for replica, own in sorted(by_replica.items()):
        covered = np.zeros(edges.size - 1)
        counts = {"requests": covered.copy()}
        for quantity in sorted(COUNTERS - {"joules"} - (TRITON_ONLY if engine == "vllm" else set())):
            for group in _same(_best(own, quantity)):
                rise, seen, _ = increases(*merged(group), edges)
                if quantity == "bucket":
                    buckets[_number(group[0].labels.get("le", ""))] += float(rise.sum())
                    continue
                counts[quantity] = counts.get(quantity, 0.0) + rise
                covered = np.maximum(covered, seen) if quantity == "requests" else covered
        found.replicas.append(Replica(replica, _host(own[0].labels), counts, covered))
    total = {quantity: float(found.count(quantity).sum()) for quantity in COUNTERS}
    computed = total["requests"] - total["cache_hits"]
    if not computed > 0:
        return None
    if total["items"] and total["executions"]:
        found.items, found.batch = max(1.0, total["items"] / computed), max(1.0, total["items"] / total["executions"])
    found.joins = engine == "vllm" or 0 < total["executions"] < 0.9 * computed
    service_s = total["input_s"] + total["infer_s"] + total["output_s"] or total["request_s"] - total["queue_s"]
    found.service_ms = 1e3 * max(0.0, service_s) / computed
    if engine == "vllm":
        found.batch = _together(found, series, edges)
    found.request_ms = 1e3 * total["request_s"] / total["requests"]
    _latency(found, buckets, series, edges)
    return found


def _together(found: FoundModel, series: Sequence[MetricSeries], edges: Floats) -> float:
    """Requests that a busy server has in progress: by its gauge over its engines, else by Little's law."""
    by_server = defaultdict[str, list[Floats]](list)
    for group in _same(_best(series, "running")):
        by_server[_server(group[0].labels)].append(means(*merged(group), edges))
    counts, seconds = [np.nansum(engines, axis=0) for engines in by_server.values()], found.service_ms / 1e3
    counts = counts or [one.counts["requests"] * seconds / np.maximum(one.covered_s, 1e-9) for one in found.replicas]
    busy = (every := np.concatenate(counts))[every > 0]
    return max(1.0, float(busy.mean())) if busy.size else 1.0


def _number(label: str) -> float:
    """Number that a label says; NaN: none."""
    try:
        return float(label)
    except ValueError:
        return math.nan


def _same(parts: Sequence[MetricSeries]) -> list[list[MetricSeries]]:
    """Series that are one but for who scraped them: of one server, version, reason, bucket."""
    told = ("version", "reason", "finished_reason", "engine", "le", "quantile", "gpu_uuid")
    found = defaultdict[tuple[str, ...], list[MetricSeries]](list)
    for one in parts:
        found[(_server(one.labels), *(one.labels.get(label, "") for label in told))].append(one)
    return list(found.values())


def _latency(found: FoundModel, buckets: Mapping[float, float], series: Sequence[MetricSeries], edges: Floats) -> None:
    """Set quantiles: of a histogram over all samples, else the means of a summary's, of servers the worst."""
    if any(math.isfinite(bound) for bound in buckets) and max(buckets.values()) > 0:
        found.latency_basis = "histogram"
        found.latency_ms = {q: 1e3 * histogram_quantile(buckets, q) for q in QUANTILES}
        return
    weight = found.count("requests")
    for one in _best(series, "quantile_s"):
        q, seen = _number(one.labels.get("quantile", "")), means(one.times_s, one.values, edges)
        known = np.isfinite(seen) & (weight > 0)
        if q in QUANTILES and known.any():
            found.latency_basis = "summary"
            ms = 1e3 * float(np.average(seen[known], weights=weight[known]))
            found.latency_ms[q] = max(ms, found.latency_ms.get(q, 0.0))


def histogram_quantile(buckets: Mapping[float, float], q: float) -> float:
    """Quantile of cumulative counts by upper bound, linear inside a bucket; beyond the last bound, that bound."""
    bounds = sorted(bound for bound in buckets if not math.isnan(bound))
    counts = np.maximum.accumulate([buckets[bound] for bound in bounds])
    known = [min(bound, max(b for b in bounds if math.isfinite(b))) for bound in bounds]
    return float(np.interp(q * counts[-1], [0.0, *counts], [0.0, *known]))


def place(found: Found, series: Sequence[MetricSeries]) -> None:
    """Set where each replica runs."""
    reported = {(_server(one.labels), one.labels.get("gpu_uuid")) for one in series}
    left = list[tuple[str, Replica]]()
    for model in found.models.values():
        for one in model.replicas:
            pods = [(name, *pod) for name, device in found.devices.items() for pod in device.pods.items()]
            own = [(name, instance) for name, pod, instance in pods if _is_pod(pod, one.name)]
            own = own or [(name, "") for name in sorted(found.devices) if (one.name, name) in reported]
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
    if unplaced := ", ".join(sorted({name for name, _ in left})):
        found.notes.append(f"no pod, gpu_uuid or host says which device serves {unplaced}: dealt to devices in order")

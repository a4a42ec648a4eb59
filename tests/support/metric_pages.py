"""Metric pages in the shapes of Triton 23 to 26, vLLM 0.6 to 0.32 and DCGM's exporter 3 and 4. The values are made up.

`World` is a fleet whose truth is known: each device draws its idle watts and joules for each execution.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trefoil.assess.finding import Found
from trefoil.assess.given import page_samples
from trefoil.assess.series import MetricSeries, series_of

BEGIN_S = 1_764_288_000.0  # a midnight, UTC
IDLE_W = 60.0
JOULES = 2.0
SERVICE_S = 0.020


@dataclass
class World:
    """Servers, one on each device, whose load follows the hour of the day. Everything is a function of time."""

    model: str = "resnet50"
    version: str = "3"
    servers: int = 2
    board: str = "NVIDIA A100-SXM4-40GB"
    base_per_s: float = 5.0
    period_s: float = 86_400.0
    profile: str = ""
    mean_batch: float = 1.0
    restarts_s: dict[int, float] = field(default_factory=dict)
    """Server -> time at which its counters began again."""
    driver_restarts_s: dict[int, float] = field(default_factory=dict)

    def requests(self, server: int, at_s: float) -> float:
        """Requests of a server since the beginning."""
        share = 1.0 + server / 10
        tau = self.period_s / math.tau
        swing = 0.8 * tau * (1 - math.cos(at_s / tau))  # integral of 1 + 0.8 sin(2 pi t / period)
        return share * self.base_per_s * (at_s + swing)

    def joules(self, device: int, at_s: float) -> float:
        """Joules of a device since the beginning."""
        return IDLE_W * at_s + JOULES * self.requests(device, at_s) / self.mean_batch

    def _since(self, of: dict[int, float], server: int, at_s: float) -> float:
        return of.get(server, 0.0) if at_s >= of.get(server, math.inf) else 0.0

    def triton(self, server: int, at_s: float, release: str = "24") -> str:
        """Page of a Triton."""
        n = self.requests(server, at_s) - self.requests(server, self._since(self.restarts_s, server, at_s))
        labels = f'model="{self.model}",version="{self.version}"'
        if release == "23" and not self.profile:
            labels = f'gpu_uuid="GPU-{server}",{labels}'
        failures = {"23": "", "24": ',reason="OTHER"', "26": ',reason="REJECTED"'}[release]
        us = 1e6 * SERVICE_S * n
        lines = [
            "# HELP nv_inference_request_success Number of successful inference requests, all batch sizes",
            "# TYPE nv_inference_request_success counter",
            f"nv_inference_request_success{{{labels}}} {n:f}",
            "# TYPE nv_inference_request_failure counter",
            f"nv_inference_request_failure{{{labels}{failures}}} 0.000000",
            "# TYPE nv_inference_count counter",
            f"nv_inference_count{{{labels}}} {n:f}",
            "# TYPE nv_inference_exec_count counter",
            f"nv_inference_exec_count{{{labels}}} {n / self.mean_batch:f}",
            "# TYPE nv_inference_request_duration_us counter",
            f"nv_inference_request_duration_us{{{labels}}} {1.5 * us:f}",
            "# TYPE nv_inference_queue_duration_us counter",
            f"nv_inference_queue_duration_us{{{labels}}} {0.5 * us:f}",
            "# TYPE nv_inference_compute_input_duration_us counter",
            f"nv_inference_compute_input_duration_us{{{labels}}} {0.05 * us:f}",
            "# TYPE nv_inference_compute_infer_duration_us counter",
            f"nv_inference_compute_infer_duration_us{{{labels}}} {0.9 * us:f}",
            "# TYPE nv_inference_compute_output_duration_us counter",
            f"nv_inference_compute_output_duration_us{{{labels}}} {0.05 * us:f}",
        ]
        if release != "23":
            lines.append("# TYPE nv_inference_request_summary_us summary")
            for quantile, value in ((0.5, 28e3), (0.95, 55e3), (0.99, 80e3)):
                lines.append(f'nv_inference_request_summary_us{{{labels},quantile="{quantile}"}} {value}')
            lines.append(f'nv_inference_request_summary_us{{{labels},quantile="0.9"}} Nan')
        if release == "26":
            lines.append(f"nv_inference_pending_request_count{{{labels}}} 0")
        if not self.profile:
            uuid = f'gpu_uuid="GPU-{server}"'
            lines += [
                "# TYPE nv_gpu_power_usage gauge",
                f"nv_gpu_power_usage{{{uuid}}} {self.watts(server, at_s):f}",
                f"nv_gpu_power_limit{{{uuid}}} 400.000000",
                "# TYPE nv_energy_consumption counter",
                f"nv_energy_consumption{{{uuid}}} {self.joules(server, at_s) + 1e3:f}",
                f"nv_gpu_memory_total_bytes{{{uuid}}} 42949672960.000000",
            ]
        return "\n".join(lines) + "\n"

    def watts(self, device: int, at_s: float) -> float:
        """Watts of a device now."""
        return self.joules(device, at_s + 0.5) - self.joules(device, at_s - 0.5)

    def dcgm(self, at_s: float, release: str = "3", devices: int = 0, pods: bool = True) -> str:
        """Page of DCGM's exporter, of one host."""
        page = dict[tuple[str, str], list[tuple[str, float]]]()
        for name, kind, value in (
            ("DCGM_FI_DEV_SM_CLOCK", "gauge", lambda _: 1410),
            ("DCGM_FI_DEV_POWER_USAGE", "gauge", lambda d: self.watts(d, at_s)),
            ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "counter", lambda d: 1e3 * self._counted(d, at_s)),
            ("DCGM_FI_DEV_GPU_UTIL", "gauge", lambda _: 30),
            ("DCGM_FI_DEV_FB_FREE", "gauge", lambda _: 38000),
            ("DCGM_FI_DEV_FB_USED", "gauge", lambda _: 2500),
        ):
            if self.profile and name == "DCGM_FI_DEV_GPU_UTIL":
                continue  # not with MIG
            rows = page.setdefault((name, kind), [])
            for device in range(devices or self.servers):
                bus = f',pci_bus_id="00000000:0{device}:00.0"' if release == "4" else ""
                driver = ',DCGM_FI_DRIVER_VERSION="570.86.15"' if release == "4" else ""
                head = f'gpu="{device}",UUID="GPU-{device}"{bus},device="nvidia{device}",modelName="{self.board}"'
                for slice_ in range(2) if self.profile else [None]:
                    mig = "" if slice_ is None else f',GPU_I_PROFILE="{self.profile}",GPU_I_ID="{7 + slice_}"'
                    pod = f',container="triton",namespace="prod",pod="triton-{device}"' if pods and not slice_ else ""
                    if device >= self.servers:
                        pod = ""
                    rows.append((f'{head}{mig},Hostname="gpu-a"{driver}{pod}', value(device)))
        return dcgm_page(page)

    def _counted(self, device: int, at_s: float) -> float:
        began_s = self._since(self.driver_restarts_s, device, at_s)
        return self.joules(device, at_s) - (self.joules(device, began_s) if began_s else -5e4)

    def series(
        self,
        span_s: float,
        step_s: float,
        release: str = "24",
        dcgm: str = "3",
        missing: Sequence[tuple[float, float]] = (),
    ) -> list[MetricSeries]:
        """Series of all pages, sampled every `step_s` but in the spans of `missing`; `dcgm` "": none."""
        samples = []
        for number in range(int(span_s / step_s) + 1):
            at_s = number * step_s
            if any(low < at_s < high for low, high in missing):
                continue
            for server in range(self.servers):
                page = self.triton(server, at_s, release)
                more = {"instance": f"10.0.0.{server}:8002", "pod": f"triton-{server}"}
                samples += page_samples(page, BEGIN_S + at_s, "triton", **more)
            if dcgm:
                samples += page_samples(self.dcgm(at_s, dcgm), BEGIN_S + at_s, "dcgm", instance="gpu-a:9400")
        return series_of(samples)


def dcgm_page(rows: Mapping[tuple[str, str], Sequence[tuple[str, float]]]) -> str:
    """Page of DCGM's exporter: by name and type of a series its rows, labels and value."""
    lines = []
    for (name, kind), values in rows.items():
        lines += [f"# HELP {name} {name}.", f"# TYPE {name} {kind}"]
        lines += [f"{name}{{{labels}}} {value:f}" for labels, value in values]
    return "\n".join(lines) + "\n"


def joules(found: Found) -> float:
    """Joules of all devices that were found."""
    return float(sum(one.joules.sum() for one in found.devices.values()))


def long_csv(series: Sequence[MetricSeries]) -> str:
    """Series as CSV: a row for each sample."""
    names = sorted({label for one in series for label in one.labels})
    rows = ["metric,timestamp,value," + ",".join(names)]
    for one in series:
        labels = ",".join(one.labels.get(name, "") for name in names)
        rows += [f"{one.name},{t},{v!r},{labels}" for t, v in zip(one.times_s, one.values.tolist(), strict=True)]
    return "\n".join(rows) + "\n"


def vllm(model: str, requests: float, release: str = "0.32") -> str:
    """Page of a vLLM after so many requests of 2 s each, of which 0.5 s waiting."""
    old = release in ("0.6", "0.7")
    labels = f'model_name="{model}"' if old else f'engine="0",model_name="{model}"'
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        f"vllm:num_requests_running{{{labels}}} 4.0",
        f"vllm:{'gpu' if old else 'kv'}_cache_usage_perc{{{labels}}} 0.4",
        "# TYPE vllm:request_success_total counter",
        f'vllm:request_success_total{{finished_reason="stop",{labels}}} {0.75 * requests}',
        f'vllm:request_success_total{{finished_reason="length",{labels}}} {0.25 * requests}',
        "# TYPE vllm:generation_tokens_total counter",
        f"vllm:generation_tokens_total{{{labels}}} {128 * requests}",
        "# TYPE vllm:e2e_request_latency_seconds histogram",
    ]
    for bound, share in (("1.0", 0.1), ("1.5", 0.3), ("2.0", 0.5), ("2.5", 0.7), ("5.0", 1.0), ("+Inf", 1.0)):
        lines.append(f'vllm:e2e_request_latency_seconds_bucket{{le="{bound}",{labels}}} {share * requests}')
    lines += [
        f"vllm:e2e_request_latency_seconds_count{{{labels}}} {requests}",
        f"vllm:e2e_request_latency_seconds_sum{{{labels}}} {2 * requests}",
    ]
    queue = "time_in_queue_requests" if old else "request_queue_time_seconds"
    lines += [
        f"# TYPE vllm:{queue} histogram",
        f'vllm:{queue}_bucket{{le="+Inf",{labels}}} {requests}',
        f"vllm:{queue}_count{{{labels}}} {requests}",
        f"vllm:{queue}_sum{{{labels}}} {0.5 * requests}",
    ]
    return "\n".join(lines) + "\n"

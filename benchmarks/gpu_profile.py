"""Latency, energy and idle power of common networks on one NVIDIA GPU (or MIG slice), measured: torch and pynvml only.

Run: `python benchmarks/gpu_profile.py --out gpu.csv` (about 25 minutes with its defaults; `--models`, `--batches` and
`--rates` shorten it), or `--dry-run --device cpu` for a rehearsal without a GPU. It reads the GPU's settings and never
changes them: no clocks, power limits, MIG or persistence modes.

EfficientNet B1/B3/B5/B7, ResNet-18/34/50/101/152 and BERT-base/large (128 tokens) with random weights, fp16, channels
last, batches 1 to 64. Of each (network, batch): at saturation batches follow one another, synchronised once a batch;
at every lower rate they arrive at even gaps. A window is at least 2 s of energy counter, because NVML counters advance
in steps of some 100 ms; where there is no counter, power readings are integrated; where there is neither, joules are
empty. On a MIG slice joules are those of its whole GPU: nothing else may run there. Idle power is taken before each
network, with its context open. Every row says which clocks and throttle reasons its window saw. The header
holds GPU, driver, power limit, MIG mode, versions, date and command.
"""

# ruff: noqa: TID251 (it runs where the package is not installed: it reads the clock itself)

import argparse
import csv
import math
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from gpu_networks import MODELS, build

WINDOW_MIN_S: Final = 2.0
POLL_S: Final = 0.02  # between power readings where there is no counter
COLUMNS: Final = (
    "model", "batch", "rate_share", "offered_per_s", "answered_per_s", "latency_ms_p50", "latency_ms_p95",
    "latency_ms_p99", "window_s", "energy_j", "power_w", "idle_w", "energy_active_j_per_batch", "method",
    "clock_mhz_min", "clock_mhz_max", "throttle", "memory_mib",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- the meter


@dataclass(frozen=True)
class Energy:
    """Joules of a window (None: nobody can say), how they were read, and what the clocks did meanwhile."""

    joules: float | None
    seconds: float
    method: str
    clock_mhz: tuple[int, int]
    throttle: int

    @property
    def watts(self) -> float | None:
        """Mean power."""
        return None if self.joules is None else self.joules / self.seconds


class Meter:
    """Read-only NVML of one GPU. `nvml` is pynvml or something that answers like it; None: no meter."""

    def __init__(self, nvml: Any, handle: Any, clock: Callable[[], float] = time.perf_counter) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self.method = "none" if nvml is None else "counter" if self._counter_j() is not None else "power"
        if self.method == "power" and self._power_w() is None:
            self.method = "none"
        self._start()

    def _ask(self, call: str, *arguments: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, call)(self._handle, *arguments)
        except self._nvml.NVMLError:  # a call that this GPU or driver does not have
            return None

    def _counter_j(self) -> float | None:
        value = self._ask("nvmlDeviceGetTotalEnergyConsumption")
        return None if value is None else value / 1e3

    def _power_w(self) -> float | None:
        value = self._ask("nvmlDeviceGetPowerUsage")
        return None if value is None else value / 1e3

    def _start(self) -> None:
        self._from_s, self._from_j = self._clock(), self._counter_j() if self.method == "counter" else None
        self._trail: list[tuple[float, float]] = []
        self._clocks: list[int] = []
        self._throttle = 0
        self.sample()

    def sample(self) -> None:
        """Called now and then inside a window: clocks, throttle reasons, power where there is no counter."""
        now_s = self._clock()
        if self.method == "power" and (not self._trail or now_s - self._trail[-1][0] >= POLL_S):
            watts = self._power_w()
            if watts is not None:
                self._trail.append((now_s, watts))
        clock = self._ask("nvmlDeviceGetClockInfo", 1)  # NVML_CLOCK_SM
        if clock is not None:
            self._clocks.append(int(clock))
        # bit 0 is "idle": not a throttle
        self._throttle |= int(self._ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0) & ~1

    def window(self) -> Energy:
        """Energy since the last window; begins the next one."""
        self.sample()
        seconds = self._clock() - self._from_s
        joules = None
        if self.method == "counter":
            now_j = self._counter_j()
            if now_j is not None and self._from_j is not None and now_j >= self._from_j:
                joules = now_j - self._from_j
        elif self.method == "power":
            joules = integral(self._trail)
        clocks = (min(self._clocks, default=0), max(self._clocks, default=0))
        found = Energy(joules if seconds >= WINDOW_MIN_S else None, seconds, self.method, clocks, self._throttle)
        self._start()
        return found


def integral(trail: Sequence[tuple[float, float]]) -> float | None:
    """Trapezoids over (seconds, watts); None for less than two readings."""
    if len(trail) < 2:
        return None
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairwise(trail))


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between order statistics."""
    ranked = sorted(values)
    at = q * (len(ranked) - 1)
    low = math.floor(at)
    return ranked[low] + (at - low) * (ranked[min(low + 1, len(ranked) - 1)] - ranked[low])


# ---------------------------------------------------------------------------------------------------- the measurement


def serve(
    once: Callable[[], None],
    meter: Meter,
    seconds: float,
    gap_s: float,
    clock: Callable[[], float] = time.perf_counter,
    nap: Callable[[float], None] = time.sleep,
) -> tuple[list[float], float, Energy]:
    """Batches at even gaps (0: one after another) for that long.

    Result: latencies from the intended start [ms], duration [s], energy.
    """
    meter.window()
    latency: list[float] = []
    start_s, number = clock(), 0
    while True:
        due_s = start_s + number * gap_s if gap_s > 0 else clock()
        if due_s - start_s >= seconds and latency:
            break
        if clock() < due_s:
            meter.sample()
            nap(max(0.0, due_s - clock()))  # reading the clocks takes time too
        once()
        latency.append((clock() - due_s) * 1e3)
        meter.sample()
        number += 1
    duration_s = clock() - start_s
    return latency, duration_s, meter.window()


def measure(name: str, options: argparse.Namespace, meter: Meter) -> list[dict[str, Any]]:
    """All rows of one network. A batch that does not fit the memory ends it."""
    import torch

    device, half = torch.device(options.device), options.device != "cpu" and options.precision == "fp16"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision == "tf32"
    network, inputs = build(name)
    network = network.to(device)
    network = (network.half() if half else network).to(memory_format=torch.channels_last)
    time.sleep(options.window)  # power falls for a while after the network before
    meter.window()
    time.sleep(options.window)
    idle = meter.window()
    rows: list[dict[str, Any]] = []
    for batch in options.batches:
        x = inputs(batch).to(device)
        x = x.half() if half and x.is_floating_point() else x
        x = x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x

        def once(x: Any = x) -> None:
            with torch.inference_mode():
                network(x)
            if device.type == "cuda":
                torch.cuda.synchronize()

        try:
            for _ in range(options.warm_up):
                once()
        except torch.cuda.OutOfMemoryError:
            print(f"{name} batch {batch}: does not fit the memory", file=sys.stderr)
            break
        full: float | None = None
        for share in sorted({1.0, *options.rates}, reverse=True):
            gap_s = 0.0 if full is None else 1.0 / (share * full)
            latency, seconds, energy = serve(once, meter, options.window, gap_s)
            full = len(latency) / seconds if full is None else full
            memory = torch.cuda.max_memory_allocated() // 2**20 if device.type == "cuda" else 0
            rows.append(row(name, batch, share, full, latency, seconds, energy, idle) | {"memory_mib": memory})
            print(f"{name} batch {batch} at {share:.0%}: p50 {quantile(latency, 0.5):.2f} ms", file=sys.stderr)
    return rows


def row(
    name: str, batch: int, share: float, full: float, latency: list[float], seconds: float, energy: Energy, idle: Energy
) -> dict[str, Any]:
    """One line of the CSV; what nobody counted is empty."""
    active = None
    if energy.joules is not None and idle.watts is not None:
        active = (energy.joules - idle.watts * energy.seconds) / len(latency)
    numbers: dict[str, Any] = {
        "model": name, "batch": batch, "rate_share": share, "offered_per_s": share * full,
        "answered_per_s": len(latency) / seconds, "latency_ms_p50": quantile(latency, 0.5),
        "latency_ms_p95": quantile(latency, 0.95), "latency_ms_p99": quantile(latency, 0.99),
        "window_s": energy.seconds,
        "energy_j": energy.joules, "power_w": energy.watts, "idle_w": idle.watts, "energy_active_j_per_batch": active,
        "method": energy.method, "clock_mhz_min": energy.clock_mhz[0], "clock_mhz_max": energy.clock_mhz[1],
        "throttle": hex(energy.throttle),
    }  # fmt: skip
    return {key: "" if v is None else f"{v:.6g}" if isinstance(v, float) else v for key, v in numbers.items()}


def provenance(nvml: Any, handle: Any) -> dict[str, str]:
    """Header lines: what was measured, on what, when, how."""
    lines = {"basis": "measured" if nvml is not None else "rehearsal without a GPU: no measurement of one"}
    lines |= {"source": "benchmarks/gpu_profile.py", "command": " ".join(sys.argv), "python": platform.python_version()}
    lines["date"] = datetime.now(UTC).strftime("%Y-%m-%d")
    if nvml is not None:
        asked = {
            "gpu": "nvmlDeviceGetName", "power_limit_mw": "nvmlDeviceGetEnforcedPowerLimit",
            "mig_mode": "nvmlDeviceGetMigMode", "persistence": "nvmlDeviceGetPersistenceMode",
        }  # fmt: skip
        for key, call in asked.items():
            try:
                lines[key] = str(getattr(nvml, call)(handle))
            except nvml.NVMLError as error:
                lines[key] = f"not told ({error})"
        lines["driver"] = str(nvml.nvmlSystemGetDriverVersion())
    return lines


def write(path: Path, header: dict[str, str], rows: Sequence[dict[str, Any]]) -> None:
    """The CSV, whole, after every network: an interrupted run keeps what it has."""
    draft = path.with_name(path.name + ".draft")
    with draft.open("w", newline="") as file:
        file.writelines(f"# {key}: {value}\n" for key, value in header.items())
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    draft.replace(path)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; complains about what cannot be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="with commas between")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--rates", default="0.25,0.5,0.75", help="shares of saturation, which is always there")
    parser.add_argument("--window", type=float, default=4.0, help="seconds of each measurement")
    parser.add_argument("--warm-up", type=int, default=10, help="batches that nobody counts")
    parser.add_argument("--precision", choices=("fp16", "tf32", "fp32"), default="fp16")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu")
    parser.add_argument("--gpu", type=int, default=0, help="index of the GPU in NVML")
    parser.add_argument("--dry-run", action="store_true", help="smallest network, two batches, short windows")
    parser.add_argument("--out", type=Path, default=Path("out/gpu_profile.csv"))
    options = parser.parse_args(arguments)
    if options.dry_run:
        options.models, options.batches, options.rates = "resnet18", "1,2", "0.5"
        options.window, options.warm_up = 0.3, 1
    try:
        options.batches = sorted({int(part) for part in options.batches.split(",")})
        options.rates = [float(part) for part in options.rates.split(",") if part]
    except ValueError as error:
        parser.error(f"--batches and --rates are numbers with commas between: {error}")
    options.models = options.models.split(",")
    unknown = [name for name in options.models if name not in MODELS]
    if unknown:
        parser.error(f"--models {','.join(unknown)}: choose from {', '.join(MODELS)}")
    if min(options.batches) < 1 or any(not 0 < share < 1 for share in options.rates):
        parser.error("--batches from 1, --rates between 0 and 1")
    if not options.dry_run and options.window < WINDOW_MIN_S:
        parser.error(f"--window {options.window}: at least {WINDOW_MIN_S} s, or the energy counter's steps show")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write."""
    options = parse(arguments)
    try:
        import torch
    except ImportError:
        sys.exit("torch is not installed here: pip install torch nvidia-ml-py")
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit("torch sees no GPU; rehearse with --dry-run --device cpu")
    nvml = handle = None
    if options.device != "cpu":
        import pynvml

        pynvml.nvmlInit()
        nvml, handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(options.gpu)
    header = provenance(nvml, handle) | {"torch": torch.__version__, "precision": options.precision}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    meter, rows = Meter(nvml, handle), []
    for name in options.models:
        rows += measure(name, options, meter)
        write(options.out, header, rows)
    print(f"{len(rows)} rows in {options.out}")


if __name__ == "__main__":
    main()

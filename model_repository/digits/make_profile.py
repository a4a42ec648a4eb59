"""Write profile.csv of the family `digits`: synthetic points of A100-SXM4-40GB slices and of whole V100, T4, P4 GPUs.

Run: `python model_repository/digits/make_profile.py` (in the main environment). Nothing here was measured: four tiny
networks have no interesting speed on a GPU, so each variant is given the service times of a model of its rank in a
realistic family. What the numbers copy from real MIG profiles: large models scale with the slice, small ones flatten
on big slices (they cannot fill them), so small slices answer with fewer joules and more milliseconds.

    mean service time of a batch of b:  t(b) = t(1) * (0.35 + 0.65 b)          batching saves a third of each item
    p50, p95, p99:                      of a gamma distribution with that mean and coefficient of variation 0.05
    throughput_per_s:                   b / t(b), items per second of one slice that never waits
    power_w, energy_active_j_per_batch: trefoil.core.power.active_w with the variant's density; energy = power * t(b)
    a whole GPU:                        as an A100 slice of as many SMs x MHz, interpolated between slices on log scales

`--equal-joules` gives every variant the times and energies of digits-l, so that no plan can save by changing variants:
a control for experiments (a saving found on it is not real).
"""

import argparse
import csv
import io
import math
import subprocess
from itertools import pairwise
from pathlib import Path

from trefoil.core.device_types import A100_40GB, P4, T4, V100_32GB, WHOLE, slice_type
from trefoil.core.fleet import DeviceType
from trefoil.core.power import active_w

HERE = Path(__file__).resolve().parent
CLOCK_MHZ = 1410
BATCHES = (1, 2, 4, 8)
SERVICE_CV = 0.05
BATCH_FIXED, BATCH_PER_ITEM = 0.35, 0.65
NORMAL_QUANTILES = {"p50": 0.0, "p95": 1.6448536269514722, "p99": 2.3263478740408408}
SLICE_TYPES = ("1g.5gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb")
# GPUs without MIG: the clock that their rows state (0: it cannot be chosen), and the one that they reach [MHz].
WHOLE_GPUS: dict[DeviceType, tuple[int, int]] = {V100_32GB: (1530, 1530), T4: (1590, 1590), P4: (0, 1531)}
COLUMNS = (
    "device_type",
    "slice_type",
    "variant",
    "stage",
    "batch",
    "clock_mhz",
    "cohosted",
    "latency_ms_p50",
    "latency_ms_p95",
    "latency_ms_p99",
    "throughput_per_s",
    "energy_active_j_per_batch",
    "power_w",
    "memory_mib",
)

# Mean service time [ms] of one item, in the order of SLICE_TYPES; density (share of the slice's dynamic power); MiB.
VARIANTS: dict[str, tuple[tuple[float, ...], float, int]] = {
    "digits-xs": ((20.0, 13.0, 11.0, 10.0, 9.0), 0.97, 16),
    "digits-s": ((34.0, 20.0, 16.0, 14.5, 12.0), 0.98, 16),
    "digits-m": ((55.0, 31.0, 23.0, 20.0, 16.0), 0.99, 16),
    "digits-l": ((118.0, 62.0, 44.0, 36.0, 25.0), 1.00, 32),
}


def gamma_quantile(mean: float, cv: float, normal: float) -> float:
    """Quantile of a gamma distribution (Wilson and Hilferty's cube; within 1e-4 at a cv of 0.05)."""
    ninth = cv * cv / 9.0
    return float(mean * (1.0 - ninth + normal * ninth**0.5) ** 3)


def whole_gpu_ms(device: DeviceType, clock_mhz: int, times_ms: tuple[float, ...]) -> float:
    """Mean service time of one item on a whole GPU, from those on A100 slices (in the order of SLICE_TYPES)."""
    work = math.log(slice_type(device, WHOLE).sm_count * clock_mhz)
    known = [
        (math.log(slice_type(A100_40GB, name).sm_count * CLOCK_MHZ), math.log(time_ms))
        for name, time_ms in zip(SLICE_TYPES, times_ms, strict=True)
    ]
    (x0, y0), (x1, y1) = next((low, high) for low, high in pairwise(known) if work <= high[0])
    return math.exp(y0 + (y1 - y0) * (work - x0) / (x1 - x0))


def rows(equal_joules: bool) -> list[list[str]]:
    """Every operating point as text, in the order of COLUMNS."""
    table = []
    for variant, own in VARIANTS.items():
        times_ms, density, memory_mib = VARIANTS["digits-l"] if equal_joules else own
        for name, single_ms in zip(SLICE_TYPES, times_ms, strict=True):
            table += points(A100_40GB, name, CLOCK_MHZ, variant, single_ms, density, memory_mib)
    for device, (stated_mhz, reached_mhz) in WHOLE_GPUS.items():
        for variant, own in VARIANTS.items():
            times_ms, density, memory_mib = VARIANTS["digits-l"] if equal_joules else own
            single_ms = whole_gpu_ms(device, reached_mhz, times_ms)
            table += points(device, WHOLE, stated_mhz, variant, single_ms, density, memory_mib)
    return table


def points(
    device: DeviceType, name: str, clock_mhz: int, variant: str, single_ms: float, density: float, memory_mib: int
) -> list[list[str]]:
    """One variant on one slice type at every batch size."""
    table = []
    power_w = active_w(device, name, clock_mhz, density)
    for batch in BATCHES:
        mean_ms = single_ms * (BATCH_FIXED + BATCH_PER_ITEM * batch)
        latency = [f"{gamma_quantile(mean_ms, SERVICE_CV, z):.4f}" for z in NORMAL_QUANTILES.values()]
        numbers = (1e3 * batch / mean_ms, power_w * mean_ms / 1e3, power_w)
        point = [device.name, name, variant, "0", str(batch), str(clock_mhz), ""]
        table.append([*point, *latency, *(f"{n:.6f}" for n in numbers), str(memory_mib)])
    return table


def header(equal_joules: bool) -> str:
    """Say what this file is, from what, when."""
    source = "make_profile.py" + (" --equal-joules (control: every variant costs what digits-l costs)" * equal_joules)
    names = ", ".join(device.name for device in (A100_40GB, *WHOLE_GPUS))
    return origin(f"none: assumed service times for simulated GPUs ({names})", source)


def origin(machine: str, source: str) -> str:
    """Header lines of a synthetic profile."""
    git = subprocess.run(["git", "log", "-1", "--format=%h %cs"], cwd=HERE, capture_output=True, text=True, check=True)
    commit, date = git.stdout.split()
    lines = {"basis": "synthetic", "source": source, "machine": machine, "date": date, "commit": commit}
    return "".join(f"# {key}: {value}\n" for key, value in lines.items())


def main() -> None:
    """Write the profile."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--equal-joules", action="store_true", help="every variant costs what digits-l costs")
    parser.add_argument("--output", type=Path, default=HERE / "profile.csv")
    arguments = parser.parse_args()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(arguments.equal_joules))
    arguments.output.write_text(header(arguments.equal_joules) + text.getvalue())


if __name__ == "__main__":
    main()

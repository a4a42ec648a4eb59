"""Write profile.csv of the family `pydoc`: synthetic points of A100-SXM4-40GB slices.

`make pydoc` runs it after training, in the main environment. No time was measured on a GPU: what a step takes is
assumed, as a language model of each rank would behave. Lengths are measured (card.json).

    one step of b streams:  t(b) = t(1) * (0.86 + 0.14 b)    decoding reads all weights whatever b is: eight streams
                                                             take twice the time of one
    an answer beside b - 1: t(b) * (tokens_mean + 1)         a step a token, and the one that finds the end
    p50, p95, p99:          of a gamma distribution with that mean and the coefficient of variation of the lengths
    throughput_per_s:       b / mean, answers per second of one slice that is never without b streams
    energy_active_j_per_batch: power * mean, of b answers; power = core.power.active_w with the variant's density
"""

import csv
import io
import json
import sys
import tomllib
from pathlib import Path

from trefoil.core.device_types import A100_40GB
from trefoil.core.power import active_w

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "digits"))

from make_profile import CLOCK_MHZ, COLUMNS, NORMAL_QUANTILES, SLICE_TYPES, gamma_quantile, origin  # noqa: E402

BATCHES = (1, 2, 4, 8)
STEP_FIXED, STEP_PER_STREAM = 0.86, 0.14

# A step of one stream [ms], in the order of SLICE_TYPES; density (share of the slice's dynamic power).
VARIANTS: dict[str, tuple[tuple[float, ...], float]] = {
    "pydoc-xs": ((14.0, 10.5, 9.5, 9.0, 8.5), 0.60),
    "pydoc-s": ((22.0, 14.0, 11.5, 10.5, 9.5), 0.70),
    "pydoc-m": ((36.0, 21.0, 15.5, 13.5, 11.0), 0.80),
    "pydoc-l": ((58.0, 32.0, 21.5, 18.0, 13.0), 0.88),
}


def rows() -> list[list[str]]:
    """Every operating point as text, in the order of COLUMNS."""
    family = tomllib.loads((HERE / "family.toml").read_text())
    memory_mib = {variant["name"]: variant["memory_mib"] for variant in family["variants"]}
    cards = json.loads((HERE / "card.json").read_text())["variants"]
    table = []
    for variant, (times_ms, density) in VARIANTS.items():
        for name, step_ms in zip(SLICE_TYPES, times_ms, strict=True):
            power_w = active_w(A100_40GB, name, CLOCK_MHZ, density)
            for batch in BATCHES:
                mean_ms = step_ms * (STEP_FIXED + STEP_PER_STREAM * batch) * (family["tokens_mean"] + 1)
                cv = cards[variant]["tokens_cv"]
                latency = [f"{gamma_quantile(mean_ms, cv, z):.4f}" for z in NORMAL_QUANTILES.values()]
                numbers = (1e3 * batch / mean_ms, power_w * mean_ms / 1e3, power_w)
                point = [A100_40GB.name, name, variant, "0", str(batch), str(CLOCK_MHZ), ""]
                table.append([*point, *latency, *(f"{n:.6f}" for n in numbers), str(memory_mib[variant])])
    return table


def main() -> None:
    """Write the profile."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows())
    head = origin(f"none: assumed times of a step for simulated GPUs ({A100_40GB.name})", "make_profile.py")
    (HERE / "profile.csv").write_text(head + text.getvalue())


if __name__ == "__main__":
    main()

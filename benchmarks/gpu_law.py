"""The latency law of the modelled profiles (docs/profiles.md) beside what `gpu_profile --precision tf32` measured.

Run: `python -m benchmarks.gpu_law benchmarks/results/gpu/h200_tf32.csv`. The law was fitted to one A100-80GB; what it
says of another board is a prediction. Same networks, eager PyTorch, GPU without MIG; batches one after another.
"""

import argparse
import csv
import json
import tomllib
from pathlib import Path
from typing import Final

from trefoil.core.device_types import DRIVERS, NO_MIG, device_type
from trefoil.profiler.assumed import machine_of
from trefoil.profiler.cost_law import Features, LatencyLaw, bare_ms

MODELS: Final = Path(__file__).parents[1] / "model_repository" / "_profiles"


def main() -> None:
    """Print a row for each network and batch at saturation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    lines = parser.parse_args().measured.read_text().splitlines()
    header = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    kind = device_type(next(name for name, row in DRIVERS.items() if row.nvml_name == header["gpu"]) + NO_MIG)
    law = LatencyLaw(**json.loads((MODELS / "constants.json").read_text())["latency"])
    known = tomllib.loads((MODELS / "features.toml").read_text())
    features = {**known["measured"], **known["efficientnet"]}
    print(f"{kind.name}: network, batch, measured p50 ms, law ms, error, launches alone ms")
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        if row["rate_share"] == "1" and row["model"] in features:
            found = Features(*features[row["model"]])
            measured_ms = float(row["latency_ms_p50"])
            law_ms = bare_ms(law, found, machine_of(kind, kind.slice_types[0]), int(row["batch"]))
            numbers = f"{measured_ms:7.2f} {law_ms:7.2f} {law_ms / measured_ms - 1:+5.0%}"
            print(f"{row['model']:16} {row['batch']:>3} {numbers} {law.launch_ms * found.launches:6.2f}")


if __name__ == "__main__":
    main()

"""Write profile.csv of efficientnet, albert and yolo on an A100-40GB from constants.json: modelled, not measured.

Run: `python model_repository/_profiles/make_profiles.py` (--help lists what can be changed). No data are
needed. The law and its constants: trefoil/profiler/cost_law.py and calibrate.py; errors: docs/profiles.md.

`--without-host` leaves out decoding and transport, which CLOVER's services do while they hold their slice: the profile
of a service whose clients send tensors. `--slice-share` sets how much of the joules follows the slice's width rather
than the work (assumed 0.5): 0 and 1 are the ends of what can be believed, for experiments on how far a result needs it.
A row is absent where the variant and a Triton do not fit the slice's memory. The last rows are those of a GPU without
MIG (the slice `whole`): the same constants at 108 SMs, where the fit's unit is the 98 of a 7g slice.
"""

import argparse
import csv
import io
import json
import subprocess
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

from trefoil.core.catalog import Family
from trefoil.core.device_types import A100_40GB, A100_40GB_WHOLE
from trefoil.core.plan_check import CONTEXT_MIB
from trefoil.core.units import MS_PER_S
from trefoil.profiler import cost_law
from trefoil.runtime.repository import COLUMNS, load_family

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
BATCHES = (1, 2, 4, 8)
DEVICES = (A100_40GB, A100_40GB_WHOLE)
CLOCKS_MHZ = (1410, 1275, 1140, 1005, 870, 735)


def read_model(without_host: bool = False, eta: float | None = None) -> cost_law.LawConstants:
    """constants.json, changed as asked. With another eta the joules of BASE stay what was measured."""
    model = cost_law.read_model(json.loads((HERE / "constants.json").read_text()))
    families = dict(model.families)
    if eta is not None:
        shape, other = A100_40GB.slice_types[-1], replace(model, eta=eta)
        for name, family in families.items():
            largest = max(features()[name].values(), key=lambda f: f.macs)
            kept = [cost_law.energy_j(m, name, largest, A100_40GB, shape, family.items) for m in (model, other)]
            families[name] = replace(family, joules=family.joules * kept[0] / kept[1])
        model = other
    if without_host:
        families = {name: replace(family, host_ms=0.0) for name, family in families.items()}
    return replace(model, families=families)


def features() -> dict[str, dict[str, cost_law.Features]]:
    """What the law needs to know of each variant."""
    return cost_law.read_features(tomllib.loads((HERE / "features.toml").read_text()))


def rows(model: cost_law.LawConstants, family: Family) -> list[list[str]]:
    """Every operating point as text, in the order of COLUMNS."""
    table = []
    for device, variant in product(DEVICES, family.variants):
        of = features()[family.name][variant.name]
        for shape in device.slice_types:
            if variant.memory_mib + CONTEXT_MIB > shape.memory_mib:
                continue
            for clock_mhz, batch in product(CLOCKS_MHZ, BATCHES):
                point = cost_law.point(model, family.name, of, device, shape, clock_mhz, batch)
                key = [device.name, shape.name, variant.name, "0", str(batch), str(clock_mhz), ""]
                latency = [f"{point.quantile_ms(name):.4f}" for name in cost_law.NORMAL_QUANTILES]
                per_s = MS_PER_S / point.mean_ms
                numbers = [f"{n:.6g}" for n in (batch * per_s, point.energy_j, point.energy_j * per_s)]
                table.append([*key, *latency, *numbers, str(variant.memory_mib)])
    return table


def header(arguments: argparse.Namespace) -> str:
    """Say what this file is, from what, when."""
    git = subprocess.run(["git", "log", "-1", "--format=%h %cs"], cwd=HERE, capture_output=True, text=True, check=True)
    commit, date = git.stdout.split()
    source = "_profiles/make_profiles.py" + " --without-host" * arguments.without_host
    if arguments.slice_share is not None:
        source += f" --slice-share {arguments.slice_share:g}"
    source += "; law and constants calibrated on ParvaGPU's MIG measurements and CLOVER's load sweep (docs/profiles.md)"
    machine = "none: predicted for A100-SXM4-40GB slices and the GPU without MIG"
    lines = {"basis": "modelled", "source": source, "machine": machine, "date": date, "commit": commit}
    return "".join(f"# {key}: {value}\n" for key, value in lines.items())


def table(model: cost_law.LawConstants, family: Family) -> str:
    """The CSV without its header lines."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows(model, family))
    return text.getvalue()


def main() -> None:
    """Write the profiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--without-host", action="store_true", help="clients send tensors: no decoding on the slice")
    parser.add_argument("--slice-share", type=float, metavar="ETA", help="0 to 1, instead of the stated 0.5")
    parser.add_argument("--only", help="one family")
    parser.add_argument("--to", type=Path, help="folder for <family>.csv, instead of each family's own profile.csv")
    arguments = parser.parse_args()
    if arguments.slice_share is not None and not 0 <= arguments.slice_share <= 1:
        parser.error(f"--slice-share {arguments.slice_share}: between 0 and 1")
    model = read_model(arguments.without_host, arguments.slice_share)
    names = [arguments.only] if arguments.only else sorted(model.families)
    for name in names:
        if name not in model.families:
            parser.error(f"--only {name}: one of {sorted(model.families)}")
        family, _ = load_family(REPOSITORY / name)
        target = arguments.to / f"{name}.csv" if arguments.to else REPOSITORY / name / "profile.csv"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(header(arguments) + table(model, family))


if __name__ == "__main__":
    main()

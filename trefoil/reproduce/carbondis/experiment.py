"""CARBONDIS's experiment: five jobs, a low-end GPU for each and one A100 for all; requests of many batch sizes.

Source: CARBONDIS, Tables II, III and V, Fig. 2, section V-A. Printed are GPUs and their idle watts, jobs and
    SLAs, and of 30 profiles six batches of one model (Table III, Inception-V3). All other points are modelled:
t(n) Inception-V3's time of a batch of n: Table III to n = 6, then MS_PER_ITEM more for each item. A100: what an item
    takes ResNet-50 v1.5 between batches of 16 and 128 (TensorFlow, TF32: 11.82 and 68.23 ms, README of NVIDIA's
    DeepLearningExamples), over the two models' images/s below. P4 and T4, of which nothing is published: the least
    tenth of a ms with which LOWENERGY misses most SLAs of Table V ("it often fails").
E(n) its active joules, latency x (power - idle): Table III to n = 6, then the slope of their least-squares line; so the
    P4 draws 73 W in large batches (Table III: 82 to 89 W, though the board is made for 75 W; the T4's for 70 W).
The other nine: t and E over their lines' values at n = 0 times `work`, these values times `fixed`.
work  images/s of Inception-V3 over theirs: timm's benchmark of an RTX 3090 (model_benchmark_amp_nchw_rtx3090.csv, batch
    256; ResNet-152 for its V2). NASNet-Mobile: MobileNetV2 x 183 / 75, latencies of Table 1 of MnasNet.
fixed ms per step over Inception-V3's, A100 column of keras.io/api/applications; what is not there by blocks:
    EfficientNetV2 (32, 40) as EfficientNet-B3 (26), MobileNetV3 (15, 11) as MobileNetV2 (17).
Every batch of one size takes the same time, as the paper replays means.
Deviations: all jobs send until the slowest has sent its requests. Intensities are hourly, of California and New South
    Wales by the nearest public series (Table IV's is not public). Each seed begins on another day.
The average of carbon (ACI) starts as the paper's traces do, on 1 January 2022. With `history` "2021-10" it starts with
    the series at hand, 85 days earlier.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final, Literal, NamedTuple

import numpy as np

from controller.settings import ControlSettings, FixedDemand
from trefoil.core import power
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import A100_40GB_WHOLE, P4, T4
from trefoil.core.fleet import DeviceType
from trefoil.core.units import HOUR_S, MS_PER_S
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.runs import StudyRun, key_of, source_hash
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.carbon import Intensity, intensity_of
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.schema import (
    Arrivals,
    Carbon,
    Costs,
    FamilyObjective,
    FamilySlo,
    Node,
    Scenario,
    Served,
    Zone,
)
from trefoil.simulator.simulation import Simulation

A100: Final = A100_40GB_WHOLE
TABLE_II: Final = {P4: 25.0, T4: 30.0, A100: 55.0}  # idle power [W]
TABLE_III: Final = {  # Inception-V3, batch 1 to 6: latency [ms], power [W]
    P4: ((18, 81.64), (21, 84.32), (26, 85.09), (29, 86.70), (32, 88.06), (37, 88.66)),
    T4: ((12, 73.78), (16, 76.34), (19, 80.88), (22, 82.59), (26, 83.64), (30, 84.66)),
    A100: ((13.89, 68.17), (13.67, 73.63), (13.70, 83.03), (13.81, 90.11), (14.22, 88.68), (14.35, 111.14)),
}
BATCH_MAX: Final = 128


class PaperJob(NamedTuple):
    """Job of Table V: gaps and batch sizes, their means and the batches' standard deviation; SLA of the p95."""

    model: str
    gap_ms: float
    items: float
    items_sd: float
    sla_ms: float


class JobSet(NamedTuple):
    """Set of jobs; `zone`: its column of TRACE."""

    low: DeviceType
    zone: str
    jobs: tuple[PaperJob, ...]


SET_1: Final = (
    PaperJob("efficientnet-v2-b3", 480, 30, 20, 290),
    PaperJob("efficientnet-v2-s", 750, 50, 10, 1000),
    PaperJob("inception-resnet-v2", 650, 35, 15, 800),
    PaperJob("inception-v3", 590, 65, 10, 500),
    PaperJob("mobilenet-v2", 270, 70, 25, 250),
)
SET_2: Final = (
    PaperJob("mobilenet-v3-large", 360, 55, 30, 120),
    PaperJob("mobilenet-v3-small", 210, 25, 10, 20),
    PaperJob("nasnet-mobile", 480, 45, 15, 150),
    PaperJob("resnet-v2-50", 540, 60, 20, 300),
    PaperJob("resnet-v2-152", 720, 40, 15, 450),
)
# Fig. 2's batch sizes are not printed: those of the other MobileNet on a P4. Its 100 ms are of the mean.
FIG_2: Final = (PaperJob("mobilenet-v3-large", 200, 70, 25, 100),)
SETS: Final[Mapping[str, JobSet]] = {
    "Set 1": JobSet(P4, "us-west-1", SET_1),
    "Set 2": JobSet(T4, "ap-southeast-2", SET_2),
    "Fig. 2": JobSet(P4, "us-west-1", FIG_2),
}
TRACE: Final = "casper_7awsregions_2021-10_2022-09_hourly.csv"
JANUARY_H: Final = 2030  # from its first row, 2021-10-08 10:00 UTC
APART_H: Final = 173  # starts of two seeds: seven days and five hours


class CarbondisModel(NamedTuple):
    """Model: published images/s and ms per step, of which `work` and `fixed` come; accuracy: Keras, ImageNet top 1."""

    images_per_s: float
    step_ms: float
    accuracy: float


MODELS: Final[Mapping[str, CarbondisModel]] = {
    "efficientnet-v2-b3": CarbondisModel(1906.95, 8.8 * 32 / 26, 0.820),
    "efficientnet-v2-s": CarbondisModel(866.61, 8.8 * 40 / 26, 0.839),
    "inception-resnet-v2": CarbondisModel(832.69, 10.0, 0.803),
    "inception-v3": CarbondisModel(2109.39, 6.9, 0.779),
    "mobilenet-v2": CarbondisModel(7541.65, 3.8, 0.713),
    "mobilenet-v3-large": CarbondisModel(7680.05, 3.8 * 15 / 17, 0.756),
    "mobilenet-v3-small": CarbondisModel(18228.81, 3.8 * 11 / 17, 0.681),
    "nasnet-mobile": CarbondisModel(7541.65 * 75 / 183, 6.7, 0.744),
    "resnet-v2-50": CarbondisModel(2678.82, 4.4, 0.760),
    "resnet-v2-152": CarbondisModel(1116.24, 6.6, 0.780),
}
RESNET_50_PER_S: Final = 2584.36  # v1.5, of the same benchmark as the models' images/s
MS_PER_ITEM: Final = {P4: 5.5, T4: 3.7, A100: (68.23 - 11.82) / (128 - 16) * RESNET_50_PER_S / 2109.39}
CHANGED: Final = ("low ms per item", "high ms per item", "low joules", "high joules", "work", "fixed")
MEMORY_MIB: Final = 2000
LOAD_S: Final = 2.0
TICK_S: Final = 10.0  # of the controller: requests are routed one by one all the same

PAPERS: Final = ("highperf", "lowenergy", "random", "dybatch", "carbondis")
OURS: Final = ("least_grams", "exact")
ALONE: Final = ("highperf", "lowenergy")  # their fleets have GPUs of one tier
IGNORED: Final = 100.0  # LOWENERGY "ignores latency constraints", and one out of its reach would be refused
PLANNERS: Final[Mapping[str, Mapping[str, float]]] = {
    "exact": {"families_per_slice": 5},
    "uniform": {"model_max_rps": 1.0, "credits": 1},  # Fig. 2's even split
}


@dataclass(frozen=True, slots=True)
class JobsSpec:
    """Spec of one run. `duration_s`: simulated; `speedup` hours of the trace pass in each hour of it.

    history    month in which the average of carbon starts
    settings   of the router, by name
    changed    factors on constants of the model, by name
    """

    jobs: str
    policy: str
    seed: int
    duration_s: float
    label: str = ""
    arrivals: Literal["deeprecsys", "poisson"] = "deeprecsys"
    speedup: float = 1.0
    trace: str = ""
    history: Literal["2022-01", "2021-10"] = "2022-01"
    settings: tuple[tuple[str, float | bool], ...] = ()
    changed: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.jobs} {self.policy} {self.label} seed {self.seed}"

    @property
    def work(self) -> float:
        """About how many requests are played."""
        return sum(MS_PER_S / job.gap_ms for job in SETS[self.jobs].jobs) * self.duration_s

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        return key_of(self, source_hash(self.policy, __name__))

    def play(self) -> StudyRun:
        """Simulate it."""
        before = {"grid": intensity(self).played.lead_g_per_kwh}
        simulation = Simulation(prepare(scenario_of(self), Provided(catalog=catalog_of(self), carbon_before=before)))
        simulation.run(simulation.end_s)
        found = json.loads(result(simulation).to_json())
        for job in SETS[self.jobs].jobs:  # what the report leaves out
            ms = np.concatenate(simulation.ledger.total[job.model].latencies_ms)
            found["summary"]["families"][job.model] |= {
                "mean_ms": float(ms.mean()),
                "late": int(np.count_nonzero(ms > job.sla_ms)),
                "centiles_ms": np.quantile(ms, np.arange(1, 100) / 100).tolist(),
            }
        return StudyRun(self, found["summary"], found["series"], found["evaluations"], found["decisions"])


def trace_path() -> str:
    """File of intensities; "": the synthetic curve has to do."""
    folder = data_folder()
    return str(folder / "carbon" / TRACE) if folder and (folder / "carbon" / TRACE).exists() else ""


@cache
def _line(device: DeviceType) -> tuple[tuple[float, ...], float, float, float]:
    """Table III's joules by batch; by their line those of one more item and of no item; and the ms of no item."""
    ms, watts = np.transpose(TABLE_III[device])
    joules, sizes = ms * (watts - TABLE_II[device]) / MS_PER_S, np.arange(1, len(ms) + 1)
    each_j, none_j = np.polyfit(sizes, joules, 1).tolist()
    return tuple(joules.tolist()), each_j, none_j, float(np.polyfit(sizes, ms, 1)[1])


def batch(device: DeviceType, model: str, items: int, changed: Mapping[str, float]) -> tuple[float, float]:
    """Time of a batch of a model [ms], and its active joules."""

    def factor(name: str) -> float:
        return changed.get(name, 1.0)

    tier, (printed_j, each_j, none_j, none_ms) = device.tier, _line(device)
    at, beyond = min(items, len(printed_j)) - 1, max(0, items - len(printed_j))
    ms = TABLE_III[device][at][0] + beyond * MS_PER_ITEM[device] * factor(f"{tier} ms per item")
    work = fixed = 1.0
    if model != "inception-v3":
        mine, known = MODELS[model], MODELS["inception-v3"]
        work = known.images_per_s / mine.images_per_s * factor("work")
        fixed = mine.step_ms / known.step_ms * factor("fixed")
    active_j = fixed * none_j + work * (printed_j[at] + beyond * each_j - none_j)
    return fixed * none_ms + work * (ms - none_ms), active_j * factor(f"{tier} joules")


def catalog_of(spec: JobsSpec) -> Catalog:
    """Catalogue of a set's models, on its low-end GPU and the A100."""
    chosen, families, rows = SETS[spec.jobs], [], []
    for job in chosen.jobs:
        variant = Variant(job.model, 1, MODELS[job.model].accuracy, "Keras", MEMORY_MIB, LOAD_S, 0, "")
        families.append(Family(job.model, "top1", (variant,)))
        rows += [
            _row(device, job.model, items, dict(spec.changed))
            for device in (chosen.low, A100)
            for items in range(1, BATCH_MAX + 1)
        ]
    return Catalog(tuple(families), tuple(rows))


def _row(device: DeviceType, model: str, items: int, changed: Mapping[str, float]) -> ProfileRow:
    ms, joules = batch(device, model, items, changed)
    clock_mhz = max(device.clocks_mhz, default=0)
    return ProfileRow(
        device.name, power.WHOLE, model, model, 0, items, clock_mhz, (), ms, ms, ms, items / ms * MS_PER_S, joules,
        joules / ms * MS_PER_S, MEMORY_MIB,
    )  # fmt: skip


def carbon_of(spec: JobsSpec) -> Carbon:
    """Intensities of a run, another start for each seed; its ratio as printed, from the first average on."""
    if not spec.trace:
        zone = Zone(offset_h=24 + (spec.seed - 1) * 5 % 24)
    else:
        start_h = JANUARY_H + (spec.seed - 1) * APART_H
        zone = Zone(trace=Path(spec.trace), value_column=SETS[spec.jobs].zone, unit="g/kWh", offset_h=start_h)
    return Carbon(zones={"grid": zone}, speedup=spec.speedup, ratio_after_h=0.0)


def intensity(spec: JobsSpec) -> Intensity:
    """Intensity of a run: what came before it since its history starts."""
    found = intensity_of("grid", carbon_of(spec))
    hours = (spec.seed - 1) * APART_H
    if spec.history == "2021-10" or not spec.trace:
        return found
    before = found.played.lead_g_per_kwh[-hours:] if hours else ()
    return replace(found, played=replace(found.played, lead_g_per_kwh=before))


def scenario_of(spec: JobsSpec) -> Scenario:
    """Scenario of a spec."""
    chosen, deeprecsys = SETS[spec.jobs], spec.arrivals == "deeprecsys"
    own, shared = (A100,) if spec.policy == "highperf" else (chosen.low,), () if spec.policy in ALONE else (A100,)
    rates = {job.model: MS_PER_S / job.gap_ms for job in chosen.jobs}
    families = tuple(
        Served(
            name=job.model,
            items=job.items,
            items_sd=job.items_sd,
            arrivals=Arrivals(rate_per_s=rates[job.model], process="deeprecsys" if deeprecsys else "renewal"),
            objective=FamilyObjective(
                type="instant",
                slo=FamilySlo(latency_ms=job.sla_ms * (IGNORED if spec.policy == "lowenergy" else 1)),
                params={"items_sd": job.items_sd} if spec.policy == "exact" else {},
            ),
        )
        for job in chosen.jobs
    )
    known = {
        job.model: FixedDemand(
            rate_per_s=rates[job.model], items_mean=job.items, gap_scv=1 / job.gap_ms if deeprecsys else 1.0
        )
        for job in chosen.jobs
    }
    hour_s = HOUR_S / spec.speedup  # nothing changes in between but the intensity, which triggers by itself
    return Scenario(
        name=f"{spec.jobs} {spec.label}".strip(),
        seed=spec.seed,
        duration_s=spec.duration_s,
        exact_quantiles=True,
        nodes=(Node(name="node", zone="grid", devices=tuple(kind.name for kind in own * len(rates) + shared)),),
        families=families,
        carbon=carbon_of(spec),
        policy=spec.policy,
        parts={"router": dict(spec.settings), "planner": dict(PLANNERS.get(spec.policy, {}))},
        control=ControlSettings(tick_s=TICK_S, tick_min_s=hour_s, pue=1.0, demand_fixed=known),
        costs=Costs(gap_ms=0.0, overhead_ms=0.0),
    )

"""WattWiser's experiment: five pairs of models, four GPUs, a load of 24 hours; four policies at equal load.

Source: WattWiser, Table I, sections IV-A, IV-B, Figs. 3, 4, 5. Load: SWIM in bins, each trace scaled to 20 to 95 % of
    what two GPUs of its model answer. The first model follows FB-2009, the second FB-2010. The paper does not say
    which, nor how wide its bins are: the study sweeps them. Every bin lasts `step_s`.
Model of a GPU, since the paper gives only Table I's model_max_rps X and SLO S: the largest batch is B = X S / 2
    requests (Little's law at half the SLO) and takes t(B) = RHO B / X. A batch of n takes
    t(B) (FIXED + (1 - FIXED) n / B). RHO is such that a GPU alone has a p95 of S at X requests/s. So both readings of S
    hold: it is the p95 at full load (the caption), and about twice what a full batch takes (the text). In the fixed
    part a GPU is busy to USE_FIXED, in the rest wholly, and power follows that. GPUs are V100s, of the class of the
    paper's MI50, of which no power is known.
Deviations: bins are shortened, an hour to a minute: wake-ups weigh more than in the paper. Packed
    policies have three GPUs, one of them shared, as in Fig. 3; the fourth sleeps. uniform has two for each model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from controller.settings import ControlSettings
from trefoil.core import power
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import V100_32GB
from trefoil.core.interference import INTERFERENCE
from trefoil.core.parts import Value
from trefoil.core.policies import PRESETS
from trefoil.core.queueing import ServiceTime, quantiles_ms
from trefoil.core.units import MS_PER_S
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.runs import StudyRun, key_of, played, sleeping_at, source_hash
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.request_trace import read_trace
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


class WattwiserModel(NamedTuple):
    """Model of Table I; `rho`: see above; accuracy: ImageNet top 1 as torchvision states it."""

    max_rps: float
    slo_ms: float
    rho: float
    accuracy: float

    @property
    def batch_max(self) -> int:
        """Largest batch."""
        return round(self.max_rps * self.slo_ms / 2 / MS_PER_S)


MODELS: Final[Mapping[str, WattwiserModel]] = {
    "resnext101": WattwiserModel(140, 101, 0.838, 0.793),
    "resnet152": WattwiserModel(150, 76, 0.814, 0.783),
    "vgg19": WattwiserModel(320, 41, 0.823, 0.724),
    "alexnet": WattwiserModel(1750, 25, 0.917, 0.565),
    "squeezenet1": WattwiserModel(2050, 28, 0.930, 0.581),
}
PAIRS: Final = (
    ("resnext101", "resnet152"),
    ("resnet152", "vgg19"),
    ("resnext101", "squeezenet1"),
    ("vgg19", "alexnet"),
    ("alexnet", "squeezenet1"),
)
PAPERS: Final = ("uniform", "packed_uniform", "sharing_aware", "wattwiser")
POLICIES: Final = (*PAPERS, "exact")  # ours beside them, with shared slices
DEVICE: Final = V100_32GB.name
GPUS, GPUS_PER_MODEL = 4, 2
DAY_MIN, HOUR_MIN = 24 * 60, 60
LOW, HIGH = 0.2, 0.95  # of what two GPUs answer
FIXED: Final = 0.3  # of the time of a full batch
USE_FIXED: Final = 0.3  # of the GPU, in that part
CV: Final = 0.05
LOAD_S: Final = 2.0  # of a model
START_S: Final = 2.0
MEMORY_MIB: Final = 2000
HOST_W: Final = 200.0  # beside the GPUs, where the boundary is the node
SWIM: Final = tuple(f"swim_FB-{year}_samples_24_times_1hr_0_per_minute.csv" for year in (2009, 2010))
CHANGED: Final = ("fixed", "use_fixed", "cv", "load_s", "start_s", "interference", "active", "sleep")


def swim(place: int, bin_min: int = HOUR_MIN) -> tuple[float, ...]:
    """Loads of a day in bins, as shares of two GPUs; without the data a day's curve that moves as much."""
    folder = data_folder()
    if folder is None:
        at_h = np.arange(0, DAY_MIN, bin_min) / HOUR_MIN
        loads = np.sin((at_h + 7 * place) / 24 * 2 * np.pi) + 0.5 * np.cos(at_h * (3 + place))
    else:
        jobs, _ = read_trace(folder / "requests" / SWIM[place]).counted()
        loads = jobs[:DAY_MIN].reshape(-1, bin_min).sum(axis=1)
    shares = LOW + (HIGH - LOW) * (loads - loads.min()) / (loads.max() - loads.min())
    return tuple(round(share, 4) for share in shares.tolist())


@dataclass(frozen=True, slots=True)
class PairSpec:
    """Spec of one run. `loads`: of each model, bin by bin; `changed`: factors on constants of the model, by name.

    `contention` False: families on one GPU do not even share its time. `sleep`, `slo`, `max_rps`: factors
    on a sleeping GPU's watts, on SLOs, and on what planners take a GPU's model_max_rps to be.
    """

    first: str
    second: str
    policy: str
    seed: int
    loads: tuple[tuple[float, ...], tuple[float, ...]]
    label: str = ""
    step_s: float = 60.0
    contention: bool = True
    sleep: float = 1.0
    host_w: float = 0.0
    slo: float = 1.0
    max_rps: float = 1.0
    planner: tuple[tuple[str, Value], ...] = ()
    changed: tuple[tuple[str, float], ...] = ()

    @property
    def pair(self) -> str:
        """Name of the pair."""
        return f"{self.first}-{self.second}"

    @property
    def name(self) -> str:
        """Name in messages."""
        return f"{self.pair} {self.policy} {self.label} seed {self.seed}"

    @property
    def work(self) -> float:
        """About how many requests are played."""
        models = (MODELS[self.first], MODELS[self.second])
        return sum(sum(each) * model.max_rps for each, model in zip(self.loads, models, strict=True)) * self.step_s

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        return key_of(self, source_hash(self.policy, __name__))

    @property
    def factors(self) -> dict[str, float]:
        """Factor of every constant that can be changed."""
        return {name: dict(self.changed).get(name, 1.0) for name in CHANGED}

    def play(self) -> StudyRun:
        """Simulate it."""
        with sleeping_at(DEVICE, self.sleep * self.factors["sleep"]):
            return played(self, scenario_of(self), Provided(catalog=catalog_of(self)))


def shares_of_gpus(spec: PairSpec) -> dict[str, dict[str, list[float]]]:
    """Share of a family's requests on each GPU at the end of each bin, by family and GPU: Fig. 3(c)."""
    families = (spec.first, spec.second)
    found = {family: {f"gpu{at}": [0.0] * len(spec.loads[0]) for at in range(GPUS)} for family in families}
    simulation = Simulation(prepare(scenario_of(spec), Provided(catalog=catalog_of(spec))))
    for at in range(len(spec.loads[0])):
        simulation.run((at + 1) * spec.step_s - 1.0)
        assert simulation.core.current is not None, "a plan stands from the first bin on"
        for route in simulation.core.current.routes:
            whole = sum(target.weight for target in route.targets)
            for target in route.targets:
                found[route.family][target.slice.device.rpartition("/")[2]][at] = target.weight / whole
    return found


def catalog_of(spec: PairSpec) -> Catalog:
    """Catalogue of the two models as the constants have it."""
    factor = spec.factors
    families, rows = [], []
    for name in (spec.first, spec.second):
        model = MODELS[name]
        load_s, source = LOAD_S * factor["load_s"], "torchvision, ImageNet top 1"
        variant = Variant(f"{name}-fp32", 1, model.accuracy, source, MEMORY_MIB, load_s, 0, "")
        families.append(Family(name, "top1", (variant,)))
        batches = {2**k for k in range(5) if 2**k < model.batch_max} | {model.batch_max}
        rows += [_row(name, model, items, factor) for items in sorted(batches)]
    return Catalog(tuple(families), tuple(rows))


def _row(name: str, model: WattwiserModel, items: int, factor: Mapping[str, float]) -> ProfileRow:
    kind, fixed, cv = V100_32GB, FIXED * factor["fixed"], CV * factor["cv"]
    share = items / model.batch_max
    mean_ms = model.rho * model.batch_max / model.max_rps * MS_PER_S * (fixed + (1 - fixed) * share)
    busy = (fixed * USE_FIXED * factor["use_fixed"] + (1 - fixed) * share) / (fixed + (1 - fixed) * share)
    clock_mhz = max(kind.clocks_mhz)
    watts = busy * power.active_w(kind, power.WHOLE, clock_mhz) * factor["active"]
    return ProfileRow(
        DEVICE, power.WHOLE, name, f"{name}-fp32", 0, items, clock_mhz, (), *quantiles_ms(ServiceTime(mean_ms, cv)),
        items / mean_ms * MS_PER_S, watts * mean_ms / MS_PER_S, watts, MEMORY_MIB,
    )  # fmt: skip


def scenario_of(spec: PairSpec) -> Scenario:
    """Scenario of a spec."""
    factor, ours = spec.factors, PRESETS["shared_slices"] if spec.policy not in PAPERS else {}
    families = []
    for name, shares in zip((spec.first, spec.second), spec.loads, strict=True):
        model = MODELS[name]
        points: list[tuple[float, float]] = []
        for at, share in enumerate(shares):
            rate = share * GPUS_PER_MODEL * model.max_rps
            points += [(at * spec.step_s, rate), ((at + 1) * spec.step_s - 1e-6, rate)]
        families.append(
            Served(
                name=name,
                arrivals=Arrivals(points=tuple(points)),
                objective=FamilyObjective(
                    type="instant",
                    slo=FamilySlo(latency_ms=model.slo_ms * spec.slo),
                    params={"model_max_rps": model.max_rps * spec.max_rps} if spec.policy in PAPERS else {},
                ),
                batch_delay_ms=0.0,
            )
        )
    return Scenario(
        name=f"{spec.pair} {spec.label}".strip(),
        seed=spec.seed,
        duration_s=len(spec.loads[0]) * spec.step_s,
        series_s=spec.step_s,
        nodes=(Node(name="node", zone="grid", devices=(DEVICE,) * GPUS),),
        families=tuple(families),
        carbon=Carbon(zones={"grid": Zone(constant_g_per_kwh=400.0)}),
        policy=spec.policy,
        parts={"planner": {**ours, **dict(spec.planner)}},
        control=ControlSettings(tick_s=1.0, pue=1.0, move_horizon_s=spec.step_s),
        costs=Costs(
            boundary="node" if spec.host_w else "gpu",
            host_w=spec.host_w,
            start_s=START_S * factor["start_s"],
            gap_ms=0.0,
            overhead_ms=0.0,
            interference=INTERFERENCE * factor["interference"] if spec.contention else None,
        ),
    )

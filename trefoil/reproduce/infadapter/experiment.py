"""InfAdapter's experiment: five residual networks on 20 cores, 21 minutes of Twitter's load and a steady one.

Source: InfAdapter (EuroMLSys 23), section 5, Figs. 5, 7 to 10; its public code for what the paper does not say.
    Capacities: published.py. Load: the public code's slice of 1,260 s. Its steady slice is not public here, so one of
    the same mean and maximum (111 and 206 requests/s over 1,500 s) is made up. Before time zero either runs backwards,
    so that forecasters have their ten minutes of history.
Arrivals: `poisson`, or `repeated` as the public load generator sends them: its generator begins again in every second,
    so that seconds of one rate bring the same gaps.
Deviations: slices serve as the queueing law has it, with service times that carry what was published (published.py).
    So what a planner reads off its line is nearly true. No client gives up; joules are unknown.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from trefoil.core.device_types import slice_cores
from trefoil.core.plan import Plan
from trefoil.core.policies import preset_settings
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.infadapter.published import CORES, QUANTILE, SLO_MS, catalog
from trefoil.reproduce.runs import StudyRun, as_run, key_of, source_hash
from trefoil.simulator.report.result import result
from trefoil.simulator.scenario.arrivals import draw_counted
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.request_trace import read_trace
from trefoil.simulator.scenario.schema import Arrivals, FamilyObjective, FamilySlo, Node, Scenario, Served
from trefoil.simulator.simulation import Simulation

FAMILY: Final = "resnets"
TWITTER: Final = "twitter_2021-08_infadapter_21min_per_second.csv"
BUDGET: Final = 20  # cores
HISTORY_S: Final = 660  # before time zero
BASE: Final[Mapping[str, int]] = {"vpa_plus-18": 1, "vpa_plus-50": 3, "vpa_plus-152": 5}  # version of the variant
SCHEMES: Final = ("infadapter", "ms_plus", *BASE)
SAMPLE_S: Final = 10.0  # a planner of the paper decides every 30 s
STEADY_S, STEADY_MEAN, STEADY_MAX = 1500, 111.0, 206.0


@cache
def load(name: str) -> tuple[tuple[float, ...], str]:
    """Requests of each second of `twitter` or `steady`, and where they are from."""
    if name == "steady":
        return steady(), "made up: mean 111, maximum 206 requests/s"
    folder = data_folder()
    if folder is None:
        return bursty(), "made up in the shape of Twitter's slice, which is not here"
    counts, _ = read_trace(folder / "requests" / TWITTER).counted()
    return tuple(counts.tolist()), "Twitter, 21 minutes (TREFOIL_DATA)"


def steady() -> tuple[float, ...]:
    """A load that wanders slowly about its mean, with single high seconds: mean and maximum are the paper's."""
    rng, slow = np.random.default_rng(23), np.zeros(STEADY_S)
    for i in range(1, STEADY_S):
        slow[i] = 0.99 * slow[i - 1] + rng.normal()
    rate = STEADY_MEAN + 1.5 * slow + 16 * rng.normal(size=STEADY_S)
    rate += STEADY_MEAN - rate.mean()
    stretched = STEADY_MEAN + (rate - STEADY_MEAN) * (STEADY_MAX - STEADY_MEAN) / (rate.max() - STEADY_MEAN)
    return tuple(np.maximum(0, np.rint(stretched)).tolist())


def bursty() -> tuple[float, ...]:
    """Steady, a spike of four times as much at 600 s, a slow decrease, and the load of the beginning again."""
    at_s = np.arange(1260)
    rate = np.interp(at_s, (0, 590, 610, 830, 1050, 1260), (55.0, 55.0, 230.0, 230.0, 110.0, 60.0))
    return tuple(np.random.default_rng(9).poisson(rate).astype(float).tolist())


@dataclass(frozen=True, slots=True)
class InfAdapterSpec:
    """Spec of one run. `scheme`: a policy, or VPA+ of one variant; `planner`: settings over those of the preset."""

    scheme: str
    trace: str
    seed: int
    preset: str = "paper"
    forecaster: str = ""
    """Forecaster; "": the policy's own."""
    arrivals: str = "poisson"
    seconds: int = 0
    """How much of the trace is played; 0: all of it."""
    planner: tuple[tuple[str, float], ...] = ()

    @property
    def policy(self) -> str:
        """Name of the policy."""
        return self.scheme.partition("-")[0]

    @property
    def name(self) -> str:
        """Name in messages."""
        said = " ".join(f"{name} {value:g}" for name, value in self.planner)
        how = f"{self.preset} {self.forecaster or 'own forecaster'} {self.arrivals}"
        return f"{self.trace} {self.scheme} {how} {said} seed {self.seed}"

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Requests of each second."""
        whole = np.array(load(self.trace)[0])
        return whole[: self.seconds] if self.seconds else whole

    @property
    def work(self) -> float:
        """About how many requests are played."""
        return float(self.counts.sum())

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        return key_of(self, source_hash(self.policy, __name__) + load(self.trace)[1])

    def times_s(self) -> npt.NDArray[np.float64]:
        """Arrival times, with what came before time zero."""
        counts = self.counts
        counts = np.concatenate((np.resize(counts, HISTORY_S)[::-1], counts))
        if self.arrivals == "repeated":
            gaps = np.random.default_rng(42).standard_exponential(int(counts.max()))
            times = np.concatenate([at + np.cumsum(gaps[: int(n)]) / n for at, n in enumerate(counts) if n])
            return np.sort(times) - HISTORY_S
        rng = np.random.default_rng([self.seed, 0x1FAD])
        return draw_counted(rng.poisson(counts).astype(float), 1.0, rng) - HISTORY_S

    def play(self) -> StudyRun:
        """Simulate it. `planned_core_s` of its summary: core seconds of the plans in force, while `core_s` also counts
        a slice whose successor is not ready yet.
        """
        provided = Provided(catalog=catalog(), truth=catalog(CORES), arrivals={FAMILY: self.times_s()})
        simulation, planned = Simulation(prepare(scenario_of(self), provided)), 0.0
        while simulation.now_s < simulation.end_s - SAMPLE_S / 2:
            simulation.run(max(0.0, simulation.now_s) + SAMPLE_S)
            planned += SAMPLE_S * cores_of(simulation.core.current)
        run = as_run(self, result(simulation))
        return replace(run, summary={**run.summary, "planned_core_s": planned})


def cores_of(plan: Plan | None) -> float:
    """Cores of a plan's slices."""
    devices = (device for node in (plan.nodes if plan else ()) for device in node.devices)
    return sum(slice_cores(part.key.slice_type) for device in devices for part in device.slices)


def scenario_of(spec: InfAdapterSpec) -> Scenario:
    """Scenario of a spec."""
    settings = {**preset_settings(spec.policy, spec.preset), "budget_cores": float(BUDGET), **dict(spec.planner)}
    if spec.scheme in BASE:
        settings["version"] = BASE[spec.scheme]
    return Scenario(
        name=spec.name,
        seed=spec.seed,
        duration_s=float(spec.counts.size),
        warmup_s=float(HISTORY_S),
        series_s=1.0,
        exact_quantiles=True,
        nodes=(Node(devices=("cpu:48",)),),
        families=(
            Served(
                name=FAMILY,
                arrivals=Arrivals(rate_per_s=1.0),  # those provided come instead
                objective=FamilyObjective(type="instant", slo=FamilySlo(percentile=100 * QUANTILE, latency_ms=SLO_MS)),
            ),
        ),
        policy=spec.policy,
        forecaster=spec.forecaster,
        parts={"planner": settings},
    )


ACCURACY_BEST: Final = max(v.accuracy for v in catalog().families[0].variants)

"""mu-Serve's experiment, with its scheduler or without (A.3): 15 models on V100s, policies at equal load, in pipelines.

Source: mu-Serve sections 4.1, 4.2, A.3. SLO scales are multiples of a request's latency alone under AlpaServe's plan.
    Loads: gamma gaps, not sorted as the authors' public code sorts them. Each model has a separate process, all of one
    rate. Or these processes in time warped by a day of Azure's functions, each of whose minutes lasts MINUTE_S.
    SenseTime's trace is not public in the form that was used.
Policies: `alpaserve` at the highest clock; `alpaserve_scaling`: governor `miad` on each GPU of the same placement;
    `muserve`: clusters of operators as units, and stages placed by sensitivity over all GPUs, with `miad`.
Scheduler (`queue`): "fifo", "ssjf" by predicted classes of length, "oracle" by true ones; lengths and the predictor's
    errors are drawn (lengths.py). The earliest turn of the queue that serves live goes first on each GPU, a model that
    does not generate without a prediction; "oracle": arrival + AGING times the time that the request takes.
Player: controller/planners/muserve/pipelines.py, without batches and rollouts, as AlpaServe's. The governor of each
    GPU, its settings and what it sees of latencies are the power agent's own, once a second.
Power: the paper's V100s have "no idle time" (section 4.2). With `waits_active` a GPU that hosts a model draws the
    active power of its clock also while it waits. That models a runtime that polls or keeps kernels resident.
Deviations: GPUs of 16 GB less CONTEXT_MIB. Algorithm 2 runs over all GPUs, since AlpaServe's groups are often single
    GPUs, in which there is nothing to place. With `grouped` it runs inside the groups. The turn orders all requests of
    a GPU, where the paper has a queue for each model instance. `group_size`: AlpaServe's groups have so many GPUs; 0:
    it chooses.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from controller.planners.muserve.alpaserve import (
    GROUP_SIZES,
    Arrivals,
    Cluster,
    Model,
    Placement,
    by_sensitivity,
    place,
)
from controller.planners.muserve.pipelines import Answer, Arrival, Pipelines
from dispatcher.queues.ssjf import AGING, turn
from power_agent.clocks.core.clock_control import Ability
from power_agent.clocks.core.device_governor import DeviceGovernor
from power_agent.clocks.core.slice_latencies import SliceLatencies
from trefoil.core import power
from trefoil.core.brains import Ticket
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import V100_32GB
from trefoil.core.fleet import DeviceState, Hosted, SliceKey
from trefoil.core.latency import build_histogram
from trefoil.core.parts import Kind
from trefoil.core.plan import PlannedDevice, PlannedSlice
from trefoil.core.policies import BY_P95
from trefoil.core.units import MS_PER_S
from trefoil.reproduce.experiment import data_folder
from trefoil.reproduce.muserve.lengths import Lengths, card_digest
from trefoil.reproduce.muserve.models import FOLLOWS, LOW_MHZ, MODELS, TOP_MHZ, units
from trefoil.reproduce.runs import StudyRun, key_of, source_hash
from trefoil.simulator.scenario.request_trace import read_trace

POLICIES: Final = ("alpaserve", "alpaserve_scaling", "muserve")
GPU_MIB, CONTEXT_MIB = 16160.0, 400.0  # what CUDA shows of 16 GB; the table's sizes have the runtime's part in them
CLOCK_STEP_MHZ: Final = 20
CLOCKS_MHZ: Final = tuple(range(LOW_MHZ, TOP_MHZ + 1, CLOCK_STEP_MHZ))
GPU: Final = replace(V100_32GB, clocks_mhz=CLOCKS_MHZ)
TRANSFER_S: Final = 0.001
MINUTE_S: Final = 1.0
PLAN_SCALE, PLAN_SEED, PLAN_REQUESTS = 5.0, 4711, 600  # the sample by which AlpaServe places
TICK_S: Final = 1.0
MANY: Final = 64  # stages of a model, so that each is looked up as one
HELD: Final = tuple(BY_P95[Kind.GOVERNOR].items())
"""MIAD's settings of the policies that ship: they keep 99 % in time; the paper's slack of 0.05 of the mean: none."""
AZURE: Final = "azure_functions_sample_1day_per_minute.csv"


@dataclass(frozen=True, slots=True)
class MuServeSpec:
    """Spec of one run. `rate_per_s` of all models together; `cv` of the gaps; `active`, `idle`: factors on watts;
    `insensitive`: models whose operators are, no other's being so (None: as modelled)."""

    policy: str
    seed: int
    slo_scale: float = 5.0
    rate_per_s: float = 1.0
    gpus: int = 8
    replicas: int = 1
    cv: float = 1.0
    trace: str = "gamma"
    duration_s: float = 900.0
    follows: float = FOLLOWS
    insensitive: tuple[str, ...] | None = None
    waits_active: bool = False
    overhead: bool = False
    lengthened: float = 1.0
    active: float = 1.0
    idle: float = 1.0
    transfer: float = 1.0
    grouped: bool = False
    group_size: int = 0
    governor: tuple[tuple[str, Any], ...] = HELD
    queue: str = "fifo"
    lengths: str = ""
    """Whose answers' lengths are drawn; "": all alike."""
    aging: float = AGING

    @property
    def name(self) -> str:
        """Name in messages."""
        at = f"scale {self.slo_scale:g} rate {self.rate_per_s:g} GPUs {self.gpus} seed {self.seed}"
        return f"{self.policy} {self.queue} {at}"

    @property
    def work(self) -> float:
        """About how many requests are played."""
        return self.rate_per_s * self.duration_s

    @property
    def key(self) -> str:
        """Key of the run, whatever process computes it."""
        return key_of(self, source_hash("", __name__) + card_digest())

    @property
    def rates(self) -> dict[str, float]:
        """Requests a second of each model."""
        return dict.fromkeys(MODELS, self.rate_per_s / len(MODELS))

    @property
    def cluster(self) -> Cluster:
        """The GPUs."""
        return Cluster(self.gpus, GPU_MIB - CONTEXT_MIB, TOP_MHZ, TRANSFER_S * self.transfer)

    def play(self) -> StudyRun:
        """Simulate it."""
        return _play(self)


def arrivals(spec: MuServeSpec, seed: int, duration_s: float) -> Arrivals:
    """Requests of all models in order, each model's a separate process."""
    found: list[tuple[float, str]] = []
    warp_s, warped = _warp(spec.trace, duration_s)
    for number, (model, rate) in enumerate(spec.rates.items()):
        rng = np.random.default_rng((seed, number))
        shape, count = spec.cv**-2, math.ceil(rate * duration_s * 2 + 50)
        at = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate), count))
        found += [(float(s), model) for s in np.interp(at[at < duration_s], warped, warp_s)]
    return sorted(found)


@cache
def _warp(trace: str, duration_s: float) -> tuple[Any, Any]:
    """Times, and at each the part of the duration's requests that have come, as seconds of a steady process."""
    if trace != "azure":
        return np.array([0.0, duration_s]), np.array([0.0, duration_s])
    folder = data_folder()
    if folder is None:
        minutes = 1.5 + np.sin(np.arange(1440) / 1440 * 4 * np.pi)
    else:
        minutes, _ = read_trace(folder / "requests" / AZURE).counted()
    minutes = minutes[: math.ceil(duration_s / MINUTE_S)] + 1e-9
    at_s = np.linspace(0.0, duration_s, len(minutes) + 1)
    return at_s, np.concatenate(([0.0], np.cumsum(minutes) / minutes.sum() * duration_s))


def requests(spec: MuServeSpec) -> list[Arrival]:
    """Requests in order, each with how much longer than the mean its answer is and with its turn."""
    found = arrivals(spec, spec.seed, spec.duration_s)
    if not spec.lengths:
        return [Arrival(*each) for each in found]
    drawn = Lengths.of(spec.lengths).draw(len(found), spec.seed)
    classes, result = drawn.predicted(spec.queue) if spec.queue == "ssjf" else drawn.classes, list[Arrival]()
    for (at_s, model), size, class_ in zip(found, drawn.sizes.tolist(), classes.tolist(), strict=True):
        generates, alone_s = MODELS[model].autoregressive, MODELS[model].latency_ms / MS_PER_S
        own = size if generates else 1.0
        due_s = None
        if spec.queue == "oracle":
            due_s = at_s + spec.aging * alone_s * own
        elif spec.queue == "ssjf":
            due_s = turn_s(at_s, alone_s, float(class_) if generates else None, spec.aging)
        result.append(Arrival(at_s, model, own, due_s))
    return result


def turn_s(at_s: float, mean_s: float, class_: float | None, aging: float) -> float:
    """Turn of a request by the queue that serves live."""
    ticket = Ticket(0, "", "", "", 1, 0, at_s, None, 0.0, 0, "", False, False, class_)
    return turn(ticket, mean_s, aging)[0]


def models_of(spec: MuServeSpec, slo_s: Mapping[str, float]) -> list[Model]:
    """The models as a policy's planner has them; `lengthened`: times of autoregressive ones."""
    clustered = spec.policy == "muserve"
    found = []
    for name, shape in MODELS.items():
        longer = spec.lengthened if shape.autoregressive else 1.0
        own = units(name, clustered, spec.overhead, spec.follows, spec.insensitive)
        found.append(Model(name, tuple(replace(unit, time_s=unit.time_s * longer) for unit in own), slo_s[name]))
    return found


@cache
def placed(spec: MuServeSpec) -> tuple[Placement, Mapping[str, float]]:
    """Placement of a policy, and latencies alone under AlpaServe's. One of all SLO scales and rates of a cluster."""
    alone = {name: MODELS[name].latency_ms / MS_PER_S for name in MODELS}
    slo_s = {name: PLAN_SCALE * alone[name] for name in MODELS}
    models = models_of(spec, slo_s)
    sample = arrivals(spec, PLAN_SEED, PLAN_REQUESTS / spec.rate_per_s)
    sizes = (spec.group_size,) if spec.group_size else GROUP_SIZES
    found = place(models, spec.cluster, sample, spec.replicas, sizes)
    if spec.policy == "muserve":
        whole = found if spec.grouped else replace(found, groups=(tuple(range(spec.gpus)),))
        found = by_sensitivity(whole, models, spec.cluster, spec.rates, spec.gpus)
        return found, placed(replace(spec, policy="alpaserve"))[1]
    return found, {name: found.latency_alone_s(name, spec.cluster.transfer_s) for name in MODELS}


def plan_of_spec(spec: MuServeSpec) -> MuServeSpec:
    """What a placement depends on, the rest at its default."""
    policy = "alpaserve" if spec.policy == "alpaserve_scaling" else spec.policy
    return MuServeSpec(
        policy, 0, gpus=spec.gpus, replicas=spec.replicas, follows=spec.follows, overhead=spec.overhead,
        lengthened=spec.lengthened, transfer=spec.transfer, grouped=spec.grouped, group_size=spec.group_size,
        insensitive=spec.insensitive,
    )  # fmt: skip


class _Clocks:
    """The power agent's governor of each GPU, asked once a second, and the latencies that it sees."""

    def __init__(self, spec: MuServeSpec, played: Pipelines, placement: Placement, slo_s: Mapping[str, float]) -> None:
        self.played = played
        name = "fixed" if spec.policy == "alpaserve" else "miad"
        stages = [dict[tuple[str, int], float]() for _ in range(spec.gpus)]  # s, by model and number
        for model, replicas in placement.replicas.items():
            for replica in replicas:
                for number, stage in enumerate(replica):
                    stages[stage.gpu][model, number] = stage.s
        self.keys = [SliceKey(f"node0/gpu{gpu}", power.WHOLE, 0, 1) for gpu in range(spec.gpus)]
        rows = [_row(gpu, model, number, s) for gpu, own in enumerate(stages) for (model, number), s in own.items()]
        self.latencies = SliceLatencies(Catalog((), tuple(rows)))
        self.latencies.slo_ms = {model: each * MS_PER_S for model, each in slo_s.items()}
        self.planned = [
            PlannedDevice(key.device, DeviceState.AWAKE, (PlannedSlice(key, _hosted(gpu, own), 1),), governor=name)
            for gpu, (key, own) in enumerate(zip(self.keys, stages, strict=True))
        ]
        settings = dict(spec.governor) if name == "miad" else {}
        self.governors = [DeviceGovernor("", settings, self.latencies) for _ in range(spec.gpus)]
        self.idle = [gpu for gpu, own in enumerate(stages) if not own]
        for gpu in self.idle:
            if name == "miad":  # nothing would ever ask for a clock there
                played.set_clock(gpu, LOW_MHZ)

    def step(self, now_s: float, answers: list[Answer]) -> None:
        """Ask every governor."""
        latencies: dict[tuple[SliceKey, str], list[float]] = {}
        for answer in answers:
            for gpu in {stage.gpu for stage in answer.stages}:
                latencies.setdefault((self.keys[gpu], answer.model), []).append(answer.latency_s * MS_PER_S)
        found = {key: build_histogram(each) for key, each in latencies.items()}
        self.latencies.add(found, now_s - TICK_S, now_s)
        for gpu, (governor, planned) in enumerate(zip(self.governors, self.planned, strict=True)):
            if gpu not in self.idle:
                clock_mhz = self.played.gpus[gpu].clock_mhz
                ability = Ability(planned.device, GPU.name, CLOCKS_MHZ)
                wanted = governor.range(planned, ability, clock_mhz, True, now_s)
                self.played.set_clock(gpu, wanted.max_mhz if wanted is not None else TOP_MHZ)


def _row(gpu: int, model: str, number: int, s: float) -> ProfileRow:
    """Row of a stage on a GPU, of which only the sensitivity is read; the GPU is the variant, as stages differ."""
    return ProfileRow(
        GPU.name, power.WHOLE, model, str(gpu), number + 1, 1, TOP_MHZ, (), 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0,
        clock_sensitivity=s,
    )  # fmt: skip


def _hosted(gpu: int, stages: Mapping[tuple[str, int], float]) -> tuple[Hosted, ...]:
    return tuple(Hosted(model, str(gpu), 1, number, MANY) for model, number in stages)


def _play(spec: MuServeSpec) -> StudyRun:
    placement, alone_s = placed(plan_of_spec(spec))
    slo_s = {name: spec.slo_scale * latency_s for name, latency_s in alone_s.items()}
    active = spec.active

    def active_w(clock_mhz: int) -> float:
        return active * power.active_w(GPU, power.WHOLE, clock_mhz)

    played = Pipelines(placement.replicas, spec.gpus, TOP_MHZ, spec.cluster.transfer_s, active_w)
    clocks = _Clocks(spec, played, placement, slo_s)
    hosting = sorted({stage.gpu for each in placement.replicas.values() for replica in each for stage in replica})
    left, answers, series = requests(spec), list[Answer](), _Series()
    asked, joules, at = len(left), 0.0, 0
    while (now_s := played.now_s) < spec.duration_s:
        until_s, begin = now_s + TICK_S, at
        while at < asked and left[at][0] < until_s:
            at += 1
        mhz = [gpu.clock_mhz for gpu in played.gpus]
        used_w = spec.idle * sum(power.idle_w(GPU, DeviceState.AWAKE, clock) for clock in mhz)
        before_j = sum(gpu.joules for gpu in played.gpus)
        fresh = played.serve(left[begin:at], until_s)
        computed_w = (sum(gpu.joules for gpu in played.gpus) - before_j) / TICK_S
        used_w += sum(active_w(mhz[gpu]) for gpu in hosting) if spec.waits_active else computed_w
        joules += used_w * TICK_S
        series.add(until_s, used_w, sum(mhz) / len(mhz), (at - begin) / TICK_S)
        answers += fresh
        clocks.step(until_s, fresh)
    busy = sum(gpu.busy_s for gpu in played.gpus) / spec.duration_s / spec.gpus
    answers += played.serve((), math.inf)  # who is under way at the end counts too
    assert len(answers) == asked
    return StudyRun(spec, _summary(spec, answers, joules, busy, slo_s, placement), series.columns)


class _Series:
    """Series of a run, second by second."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float]] = {"at_s": [], "power_w": [], "clock_mhz": [], "arrived_per_s": []}

    def add(self, *values: float) -> None:
        """Add a row."""
        for column, value in zip(self.columns.values(), values, strict=True):
            column.append(value)


def _summary(
    spec: MuServeSpec, answers: list[Answer], joules: float, busy: float, slo_s: Mapping[str, float],
    placement: Placement,
) -> dict[str, Any]:  # fmt: skip
    """Figures of a run."""
    ratios = [answer.latency_s / slo_s[answer.model] for answer in answers]
    late = sum(ratio > 1.0 for ratio in ratios)
    by_model: dict[str, list[float]] = {}
    for answer, ratio in zip(answers, ratios, strict=True):
        by_model.setdefault(answer.model, []).append(ratio)
    return {
        "power_w": joules / spec.duration_s,
        "power_w_per_gpu": joules / spec.duration_s / spec.gpus,
        "attainment": 1.0 - late / max(1, len(answers)),
        "answered": len(answers),
        "jct_s": float(np.mean([answer.latency_s for answer in answers])) if answers else math.nan,
        "p99_over_slo": float(np.quantile(ratios, 0.99)) if ratios else math.nan,
        "p99_over_slo_by_model": {name: float(np.quantile(each, 0.99)) for name, each in sorted(by_model.items())},
        "busy": busy,
        "groups": [list(group) for group in placement.groups],
        "gpus_of": {name: [[s.gpu for s in r] for r in each] for name, each in sorted(placement.replicas.items())},
    }

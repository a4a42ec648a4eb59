"""AlpaServe's placement of models on groups of GPUs, and what mu-Serve makes of each group.

Source: AlpaServe (Li et al., OSDI 23) section 4.2, Algorithms 1 (in its fast form) and 2; mu-Serve section 3.2.
Data: models as rows of units (operators, or clusters of them) with time, s and memory. GPUs and the memory of each; a
    sample of arrivals; the SLO of each model.
Decision: models of like latency form buckets, so that no short request waits behind a long one. Each bucket has
    separate GPUs in groups of one size. In a group a model is a pipeline with a stage on each GPU. Of all of these the
    one is taken whose greedy selection attains most in the simulator (pipelines.py); of equals, the one of shorter
    latencies.
Greedy: the model with most requests out of time gets another replica, in the least busy group of those where it fits.
    This is repeated as long as one fits and less than `replicas_max` are there. The best selection on the way is kept.
mu-Serve: in each group the same stages go to GPUs by Algorithm 2 (bins.py); where they do not fit so, they stay on
AlpaServe's GPUs.
Deviations: at most two buckets, whose latencies are at least BUCKET_RATIO apart; no parallelism within an operator.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from controller.planners.muserve.bins import Partition, bins
from controller.planners.muserve.clusters import stage_ends
from controller.planners.muserve.pipelines import Pipelines, Replica, Stage
from trefoil.core.errors import Infeasible, InvalidInput

BUCKET_RATIO = 1.5
GROUP_SIZES = (1, 2, 4, 8, 16)
GPUS_MAX = 16


@dataclass(frozen=True, slots=True)
class OperatorCluster:
    """What is not split further: an operator, or a cluster of them."""

    time_s: float
    s: float
    memory_mib: float


@dataclass(frozen=True, slots=True)
class Model:
    """Model as a row of units, and its SLO. `cut`: the units are stages that were made already, so that it runs in all
    of them or, where `whole` is known, in one piece.
    """

    name: str
    units: tuple[OperatorCluster, ...]
    slo_s: float
    cut: bool = False
    whole: OperatorCluster | None = None

    @property
    def time_s(self) -> float:
        """Time of a request alone at the highest clock."""
        return self.whole.time_s if self.whole else sum(unit.time_s for unit in self.units)

    def stages(self, count: int, memory_mib_max: float) -> tuple[OperatorCluster, ...]:
        """Its units as so many stages, or one each where it has fewer.

        Raises:
            InvalidInput: a stage fits no GPU, or it was not cut so.
        """
        if self.cut:
            return self._as_cut(count, memory_mib_max)
        times, sizes = [unit.time_s for unit in self.units], [unit.memory_mib for unit in self.units]
        ends = stage_ends(times, sizes, min(count, len(self.units)), memory_mib_max)
        return tuple(joined(self.units[a:b]) for a, b in pairwise((0, *ends)))

    def _as_cut(self, count: int, memory_mib_max: float) -> tuple[OperatorCluster, ...]:
        found = self.units if count >= len(self.units) else (self.whole,) if self.whole and count == 1 else ()
        if not found:
            remedy = f"{len(self.units)} of them" + (", or 1" if self.whole else "")
            raise InvalidInput(f"{self.name} is not cut so", field="stages", value=count, remedy=remedy)
        if (most := max(unit.memory_mib for unit in found)) > memory_mib_max:
            raise InvalidInput(
                f"a stage of {self.name} needs {most:.0f} MiB", field="memory_mib", value=memory_mib_max,
                remedy="more stages, or a GPU with more memory",
            )  # fmt: skip
        return found


@dataclass(frozen=True, slots=True)
class Cluster:
    """GPUs, all alike. `transfer_s`: from one to another."""

    gpus: int
    memory_mib: float
    top_mhz: int
    transfer_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement: the replicas of each model, the groups of GPUs, and the share of the sample that was in time."""

    replicas: Mapping[str, tuple[Replica, ...]]
    groups: tuple[tuple[int, ...], ...]
    attainment: float
    latency_s: float

    def latency_alone_s(self, model: str, transfer_s: float) -> float:
        """Latency of a single request."""
        stages = self.replicas[model][0]
        hops = sum(a.gpu != b.gpu for a, b in pairwise(stages))
        return sum(stage.time_s for stage in stages) + hops * transfer_s


Arrivals = Sequence[tuple[float, str]]
Cuts = Mapping[tuple[str, int], tuple[OperatorCluster, ...] | None]
"""Stages of each model by their number; None: one of them fits no GPU."""


def place(
    models: Sequence[Model],
    cluster: Cluster,
    sample: Arrivals,
    replicas_max: int = 1,
    group_sizes: Sequence[int] = GROUP_SIZES,
) -> Placement:
    """Place models on GPUs by AlpaServe. `group_sizes`: those that are tried.

    Raises:
        InvalidInput: more GPUs than GPUS_MAX, or none. Infeasible: no placement holds every model.
    """
    if not 1 <= cluster.gpus <= GPUS_MAX:
        remedy = f"1 to {GPUS_MAX}: larger clusters are placed part by part"
        raise InvalidInput("is not a number of GPUs to enumerate", field="gpus", value=cluster.gpus, remedy=remedy)
    cuts = {(model.name, size): _cut(model, size, cluster.memory_mib) for model in models for size in GROUP_SIZES}
    best: Placement | None = None
    for buckets in _buckets(models):
        for share in _shares(len(buckets), cluster.gpus):
            for sizes in _sizes(share, group_sizes):
                found = _placed(buckets, share, sizes, cluster, cuts, sample, replicas_max)
                if found is not None and (best is None or _merit(found) > _merit(best)):
                    best = found
    if best is None:
        needed = sum(unit.memory_mib for model in models for unit in model.units)
        raise Infeasible(
            f"{len(models)} models of {needed:.0f} MiB fit no {cluster.gpus} GPUs of {cluster.memory_mib:.0f} MiB",
            field="gpus", value=cluster.gpus, remedy="more GPUs, or fewer models",
        )  # fmt: skip
    return best


def by_sensitivity(
    placement: Placement, models: Sequence[Model], cluster: Cluster, rates: Mapping[str, float], gpus_per_model_max: int
) -> Placement:
    """Let each group's stages change places by Algorithm 2, so that GPUs serve what feels the clock alike.

    `rates` [1/s] by model. A GPU is full at the work that each of its group has on the mean.
    """
    named = {model.name: model for model in models}
    replicas: dict[str, list[Replica]] = {name: [] for name in placement.replicas}
    for group in placement.groups:
        here = [
            (name, at, r) for name, each in placement.replicas.items() for at, r in enumerate(each) if r[0].gpu in group
        ]
        here.sort(key=lambda one: -named[one[0]].time_s)
        partitions = [
            Partition(
                name, n, 2.0 * unit.s, unit.memory_mib, unit.time_s,
                unit.time_s * rates[name] / len(placement.replicas[name]), at,
            )
            for name, at, stages in here
            for n, unit in enumerate(named[name].stages(len(stages), cluster.memory_mib))
        ]  # fmt: skip
        full = sum(p.load for p in partitions) / len(group)
        gpu_of = {(name, at, n): stage.gpu for name, at, stages in here for n, stage in enumerate(stages)}
        try:
            found = bins({str(gpu): cluster.memory_mib for gpu in group}, partitions, gpus_per_model_max, full)
            gpu_of = {(p.model, p.replica, p.stage): int(gpu) for gpu, there in found.items() for p in there}
        except InvalidInput:  # the group's memory is too full for it: as AlpaServe has it
            pass
        for name, at, stages in here:
            replicas[name].append(tuple(replace(stage, gpu=gpu_of[name, at, n]) for n, stage in enumerate(stages)))
    return replace(placement, replicas={name: tuple(each) for name, each in replicas.items()})


def joined(units: Sequence[OperatorCluster]) -> OperatorCluster:
    """Several units as one: a cluster, or a stage."""
    time_s = sum(unit.time_s for unit in units)
    s = sum(unit.time_s * unit.s for unit in units) / time_s if time_s else 0.0
    return OperatorCluster(time_s, s, sum(unit.memory_mib for unit in units))


def _merit(found: Placement) -> tuple[float, float]:
    return (round(found.attainment, 3), -found.latency_s)


def _buckets(models: Sequence[Model]) -> Iterator[list[list[Model]]]:
    ordered = sorted(models, key=lambda model: model.time_s)
    yield [ordered]
    for at, (shorter, longer) in enumerate(pairwise(ordered), 1):
        if longer.time_s >= BUCKET_RATIO * shorter.time_s:
            yield [ordered[:at], ordered[at:]]


def _shares(buckets: int, gpus: int) -> list[tuple[int, ...]]:
    """GPUs of each bucket: one of the two has a group of the usual sizes."""
    if buckets == 1:
        return [(gpus,)]
    few = {size for one in GROUP_SIZES if one < gpus for size in (one, gpus - one)}
    return [(size, gpus - size) for size in sorted(few)]


def _sizes(share: Sequence[int], tried: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not share:
        yield ()
        return
    for size in tried:
        if size <= share[0]:
            yield from ((size, *rest) for rest in _sizes(share[1:], tried))


def _placed(
    buckets: Sequence[Sequence[Model]], share: Sequence[int], sizes: Sequence[int], cluster: Cluster, cuts: Cuts,
    sample: Arrivals, replicas_max: int,
) -> Placement | None:  # fmt: skip
    """Placement of buckets on their shares of the GPUs, in groups of these sizes; None: not every model has room."""
    replicas: dict[str, tuple[Replica, ...]] = {}
    groups: list[tuple[int, ...]] = []
    first, in_time, latency_s = 0, 0.0, 0.0
    for bucket, gpus, size in zip(buckets, share, sizes, strict=True):
        own = [tuple(range(at, min(at + size, first + gpus))) for at in range(first, first + gpus, size)]
        names = {model.name for model in bucket}
        arrivals = [one for one in sample if one[1] in names]
        found = _greedy(bucket, own, cluster, cuts, arrivals, replicas_max)
        if found is None:
            return None
        replicas |= found.replicas
        groups += own
        in_time += found.attainment * len(arrivals)
        latency_s += found.latency_s
        first += gpus
    return Placement(replicas, tuple(groups), in_time / len(sample) if sample else 1.0, latency_s)


def _greedy(
    models: Sequence[Model], groups: Sequence[tuple[int, ...]], cluster: Cluster, cuts: Cuts, sample: Arrivals,
    replicas_max: int,
) -> Placement | None:  # fmt: skip
    left = dict.fromkeys((gpu for group in groups for gpu in group), cluster.memory_mib)
    busy = dict.fromkeys(left, 0.0)
    replicas: dict[str, tuple[Replica, ...]] = {}
    late = {model.name: math.inf for model in models}
    best: Placement | None = None
    while True:
        fitting = [
            (late[model.name], model.time_s, -sum(busy[gpu] for gpu in group) / len(group), model.name, stages)
            for model in models
            if late[model.name] and len(replicas.get(model.name, ())) < replicas_max
            for group in groups
            if all(r[0].gpu not in group for r in replicas.get(model.name, ()))
            and (stages := _stages_on(group, cuts[model.name, _size_of(group)], left, busy)) is not None
        ]
        if not fitting:
            return best
        *_, name, stages = max(fitting, key=lambda one: one[:3])
        replicas[name] = (*replicas.get(name, ()), tuple(Stage(gpu, unit.time_s, unit.s) for gpu, unit in stages))
        for gpu, unit in stages:
            left[gpu] -= unit.memory_mib
            busy[gpu] += unit.time_s
        if len(replicas) < len(models):
            late[name] = 0.0  # its turn comes again once every model has room
        else:
            found, late, busy = _attained(models, replicas, groups, cluster, sample)
            if best is None or _merit(found) > _merit(best):
                best = found


def _size_of(group: Sequence[int]) -> int:
    """How many stages a model has there: of a last, smaller group the largest usual size that fits."""
    return max(size for size in GROUP_SIZES if size <= len(group))


def _cut(model: Model, size: int, memory_mib_max: float) -> tuple[OperatorCluster, ...] | None:
    try:
        return model.stages(size, memory_mib_max)
    except InvalidInput:  # does not fit so
        return None


def _stages_on(
    group: Sequence[int],
    stages: tuple[OperatorCluster, ...] | None,
    left: Mapping[int, float],
    busy: Mapping[int, float],
) -> list[tuple[int, OperatorCluster]] | None:
    """GPU of each stage; who has fewer stages than the group has GPUs gets those that are busy least."""
    if stages is None:
        return None
    room = [gpu for gpu in group if left[gpu] >= max(unit.memory_mib for unit in stages)]
    if len(room) < len(stages):
        return None
    return list(zip(sorted(sorted(room, key=lambda gpu: busy[gpu])[: len(stages)]), stages, strict=True))


def _attained(
    models: Sequence[Model], replicas: Mapping[str, tuple[Replica, ...]], groups: Sequence[tuple[int, ...]],
    cluster: Cluster, sample: Arrivals,
) -> tuple[Placement, dict[str, float], dict[int, float]]:  # fmt: skip
    """Placement as the simulator finds it; requests out of time by model; how busy each GPU is."""
    played = Pipelines(replicas, cluster.gpus, cluster.top_mhz, cluster.transfer_s)
    slo_s = {model.name: model.slo_s for model in models}
    answers = played.serve(sample, math.inf)
    late = Counter(answer.model for answer in answers if answer.latency_s > slo_s[answer.model])
    in_time = 1.0 - late.total() / len(sample) if sample else 1.0
    placement = Placement(
        dict(replicas), tuple(groups), in_time, sum(a.latency_s for a in answers) / max(1, len(answers))
    )
    busy = {gpu: one.busy_s for gpu, one in enumerate(played.gpus)}
    return placement, {model.name: float(late[model.name]) for model in models}, busy

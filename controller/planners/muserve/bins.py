"""Algorithm 2 of mu-Serve: partitions of models onto GPUs, like next to like.

Source: mu-Serve section 3.2, Algorithm 2. A bin is a GPU, because a clock is a GPU's.
Data: of each partition its sensitivity, its weight in a mean, memory and load; of each GPU its memory.
Decision: models go in order, the partitions of each by sensitivity. Each goes to a GPU on which it fits, on no more
    than `gpus_per_model_max` (CT) GPUs a model. Of these it takes the one whose mean sensitivity, by weight, is
    nearest.
Deviations: as printed, the bins begin empty, so that none is ever available; nothing beats INFINITY in line 14; and CT
    counts partitions, not GPUs. `literal`: every partition is left over. Ours begins with all GPUs, takes the highest
    similarity, counts GPUs. An empty GPU is as alike as `new_gpu_at`; of GPUs alike the one with the most memory left.
    What the paper does not have: `load_max`, so that like partitions do not all end on one GPU.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from controller.planners.muserve.clusters import THRESHOLD
from trefoil.core.errors import InvalidInput

LEFT_OVER = ""
"""In place of a GPU: None in Algorithm 2."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A stage of a model, of one of its replicas, which keep apart. `sensitivity` 0 to 2, of its operators by time;
    `load`: the part of a GPU's time that it needs.
    """

    model: str
    stage: int
    sensitivity: float
    memory_mib: float
    weight: float = 1.0
    load: float = 0.0
    replica: int = 0


Bins = dict[str, list[Partition]]


def mean_sensitivity(partitions: Sequence[Partition]) -> float:
    """Mean sensitivity of what is on a GPU, by weight."""
    return sum(p.weight * p.sensitivity for p in partitions) / sum(p.weight for p in partitions)


def bins(
    gpus_mib: Mapping[str, float],
    partitions: Sequence[Partition],
    gpus_per_model_max: int,
    load_max: float = math.inf,
    new_gpu_at: float = THRESHOLD,
    literal: bool = False,
) -> Bins:
    """ModelPlacement: the partitions of each GPU. A CT above the number of GPUs binds nothing.

    Raises:
        InvalidInput: CT is none, or a partition finds no GPU.
    """
    if gpus_per_model_max < 1:
        raise InvalidInput("is not a number of GPUs", field="CT", value=gpus_per_model_max, remedy="1 or more")
    ordered = [
        one
        for model in dict.fromkeys(p.model for p in partitions)
        for one in sorted(
            (p for p in partitions if p.model == model), key=lambda p: (p.replica, p.sensitivity, p.stage)
        )
    ]
    if literal:
        return {LEFT_OVER: ordered} if ordered else {}
    found: Bins = {gpu: [] for gpu in gpus_mib}
    for one in ordered:
        gpu = _best(one, found, gpus_mib, gpus_per_model_max, load_max, new_gpu_at)
        found[gpu].append(one)
    return found


def _best(
    one: Partition, found: Bins, gpus_mib: Mapping[str, float], limit: int, load_max: float, new_gpu_at: float
) -> str:
    left = {gpu: gpus_mib[gpu] - sum(p.memory_mib for p in there) for gpu, there in found.items()}
    others = {
        gpu for gpu, there in found.items() if any(p.model == one.model and p.replica != one.replica for p in there)
    }
    fits = [gpu for gpu in found if one.memory_mib <= left[gpu] and gpu not in others]
    if not fits:
        raise InvalidInput(
            f"fits no GPU: {one.memory_mib:.0f} MiB, at most {max(left.values(), default=0.0):.0f} are left",
            field="partition", value=f"{one.model}/{one.stage}", remedy="split the model into more stages, or add GPUs",
        )  # fmt: skip
    own = [gpu for gpu, there in found.items() if gpu not in others and any(p.model == one.model for p in there)]
    if len(own) >= limit:
        fits = [gpu for gpu in fits if gpu in own]
    if not fits:
        raise InvalidInput(
            f"fits none of the {limit} GPUs that its model may have", field="partition",
            value=f"{one.model}/{one.stage}", remedy="a larger CT",
        )  # fmt: skip
    calm = [gpu for gpu in fits if sum(p.load for p in found[gpu]) + one.load <= load_max]

    def similarity(gpu: str) -> tuple[float, float, float]:
        there = found[gpu]
        alike = -abs(one.sensitivity - mean_sensitivity(there)) if there else -new_gpu_at
        return (0.0 if calm else -sum(p.load for p in there), alike, left[gpu])

    return max(calm or fits, key=similarity)

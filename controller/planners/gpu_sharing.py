"""Algorithms .1 and 2 of WattWiser: how many of its GPUs serve a family, and what share of its requests each gets.

Source: WattWiser (Jahanshahi, Rezvani, Wong) section III, Fig. 2 and 3.
Data: cur_rps; of each GPU that the family may use model_max_rps and sf, the number of families that may use it.
Decision: the serving set after one step, and the weight of each of its GPUs.
Formulation: cap = model_max_rps / sf: what a family may count on there; with `share_left` what the other families leave
of model_max_rps, if that is more. GPUs are in order, unshared ones first.
  more needed     cur_rps > sum of cap over the serving set: the first that does not serve comes.
  less needed     cur_rps < (1 - `hysteresis`) x the sum without the last that serves: it goes; a single GPU stays.
  UpdateSharingWeights        lcm(sf) / sf.
  UpdateSharingLoadWeights    GPUs are filled up to cap in order; a GPU that is left out has weight 0.
Deviations: as printed, UpdateSharingLoadWeights gives unshared GPUs model_max_rps at any load. So below that load,
shared ones get negative rates; at it, the rule divides by min(gpu_rps) = 0. It also leaves GPUs after `break` unset.
`literal_weights` is the printed form, and has no weights where one is undefined. The first set is as large as the rate
needs, not one GPU. The paper compares cur_rps with "model_max_rps" alone; in Fig. 3 the shared GPU comes above 50 % of
two GPUs, as by the sum.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from controller.planners.columns import Column
from controller.planners.planning_input import HostedSlice
from trefoil.core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Gpu:
    """GPU that a family may serve on now. `fixed`: its node is silent, so that it can be neither added nor removed.
    `left`: share of it that the other families leave, where a family may count on that; 0: it may not.
    """

    slice: HostedSlice
    column: Column
    max_rps: float
    sharing_factor: int = 1
    fixed: bool = False
    left: float = 0.0

    @property
    def cap_rps(self) -> float:
        """What the family may count on there [1/s]."""
        return self.max_rps * max(self.left, 1 / self.sharing_factor)


WeightRule = Callable[[float, Sequence[Gpu]], Sequence[float]]


def uniform_weights(_cur_rps: float, gpus: Sequence[Gpu]) -> Sequence[float]:
    """Weights that know of neither sharing nor load."""
    return [1.0] * len(gpus)


def sharing_weights(_cur_rps: float, gpus: Sequence[Gpu]) -> Sequence[float]:
    """UpdateSharingWeights of Algorithm 2."""
    lcm = math.lcm(*(gpu.sharing_factor for gpu in gpus))
    return [lcm / gpu.sharing_factor for gpu in gpus]


def sharing_load_weights(cur_rps: float, gpus: Sequence[Gpu]) -> Sequence[float]:
    """UpdateSharingLoadWeights: GPUs are filled in order, unshared ones first."""
    weights, remained_rps = [], cur_rps
    for gpu in gpus:
        weights.append(min(gpu.cap_rps, remained_rps))
        remained_rps -= weights[-1]
    return weights


def literal_weights(cur_rps: float, gpus: Sequence[Gpu]) -> Sequence[float]:
    """UpdateSharingLoadWeights as printed.

    Raises:
        InvalidInput: a weight is negative, unset, or divided by 0.
    """
    gpu_rps, remained_rps = [], cur_rps
    for gpu in gpus:
        if gpu.sharing_factor > 1 and remained_rps < gpu.cap_rps:
            gpu_rps.append(remained_rps)
            break
        gpu_rps.append(gpu.cap_rps)
        remained_rps -= gpu.cap_rps
    if len(gpu_rps) < len(gpus) or min(gpu_rps) <= 0:
        said = f"Algorithm 2 as printed has no weights for {len(gpus)} GPUs"
        raise InvalidInput(said, field="gpu_rps", value=gpu_rps, remedy="use the policy without this preset")
    return [rps / min(gpu_rps) for rps in gpu_rps]


def with_left(gpus: Mapping[str, Sequence[Gpu]], rates_per_s: Mapping[str, float]) -> dict[str, tuple[Gpu, ...]]:
    """GPUs of each family with what the others leave of shared ones: a family fills its unshared GPUs first, and the
    rest of its rate takes equal shares of its shared ones."""
    taken: dict[str, dict[str, float]] = {}
    for family, mine in gpus.items():
        rest = max(0.0, rates_per_s[family] - sum(gpu.max_rps for gpu in mine if gpu.sharing_factor == 1))
        shared = [gpu for gpu in mine if gpu.sharing_factor > 1]
        taken[family] = {gpu.slice.key.device: rest / gpu.max_rps / len(shared) for gpu in shared}
    return {
        family: tuple(
            replace(gpu, left=1 - sum(by.get(gpu.slice.key.device, 0.0) for f, by in taken.items() if f != family))
            for gpu in mine
        )
        for family, mine in gpus.items()
    }


def serving_set(
    gpus: Sequence[Gpu], before: Sequence[Gpu], rate_per_s: float, hysteresis: float
) -> tuple[list[Gpu], str]:
    """AllocateGPUs of Algorithm .1: the serving set after one step, in order, and what was done. `gpus`: in order."""
    now = list(before)
    capacity = sum(gpu.cap_rps for gpu in now)
    asleep = [gpu for gpu in gpus if gpu not in now and not gpu.fixed]
    if not now:
        while asleep and (not now or rate_per_s > capacity):
            now.append(asleep.pop(0))
            capacity += now[-1].cap_rps
        return now, f"begins on {len(now)}"
    if rate_per_s > capacity:
        if not asleep:
            return now, ""
        now.append(asleep[0])
        return sorted(now, key=gpus.index), f"adds {asleep[0].slice.key.device}: above {capacity:.1f}/s"
    last = next((gpu for gpu in reversed(now) if not gpu.fixed), None)
    if last is not None and len(now) > 1 and rate_per_s < (1 - hysteresis) * (capacity - last.cap_rps):
        now.remove(last)
        return now, f"removes {last.slice.key.device}: {capacity - last.cap_rps:.1f}/s are enough"
    return now, ""

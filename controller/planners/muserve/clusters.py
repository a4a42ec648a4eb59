"""Algorithm 1 of mu-Serve, clusters of operators of like sensitivity, and stages of a pipeline built from them.

Source: mu-Serve section 3.1, Algorithm 1; AlpaServe (OSDI 23) section 4.1 for the stages.
Data: operators in an order in which they can run, their sensitivity scores, times and memory.
Decision: runs of neighbours whose score is near the mean of the run so far. From these units, stages whose slowest is
    as fast as can be, by dynamic programming: F(k, j) = min over i of max(F(k - 1, i), time of units i..j).
Deviations: as printed (`literal`), Algorithm 1 compares abs(score) - mean and meets the head twice. It keeps the mean
    of the cluster before when it begins another, and never returns the last. Ours compares abs(score - mean) and does
    none of these. Only splits between operators are stages here; AlpaServe's splits within one are not modelled.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from trefoil.core.errors import InvalidInput

THRESHOLD = 0.5  # of scores from 0 to 2; the paper's THRES is not published


def clusters(
    operators: Sequence[str], scores: Mapping[str, float], threshold: float = THRESHOLD, literal: bool = False
) -> list[list[str]]:
    """OperatorClustering: the operators in runs of like scores.

    Raises:
        InvalidInput: an operator without a score.
    """
    for name in operators:
        if name not in scores:
            raise InvalidInput(
                "has no sensitivity score", field="operator", value=name,
                remedy="score the graph that is split: trefoil family sensitivity",
            )  # fmt: skip
    if not operators:
        return []
    found: list[list[str]] = []
    current, rest = [operators[0]], operators if literal else operators[1:]
    mean = scores[operators[0]]
    for name in rest:
        distance = abs(scores[name]) - mean if literal else abs(scores[name] - mean)
        if distance < threshold:
            current.append(name)
        else:
            found.append(current)
            current = [name]
            if literal:
                continue
        mean = sum(scores[one] for one in current) / len(current)
    return found if literal else [*found, current]


def stage_ends(
    times: Sequence[float], memory_mib: Sequence[float], stages: int, stage_mib_max: float = np.inf
) -> tuple[int, ...]:
    """Ends of each stage among units in a row, so that the slowest stage is as fast as can be and each fits a GPU.

    Raises:
        InvalidInput: fewer units than stages, or no cut whose stages all fit.
    """
    if not 1 <= stages <= len(times):
        raise InvalidInput(
            f"cannot be built from {len(times)} units", field="stages", value=stages, remedy="ask for fewer stages"
        )
    at, size = (np.concatenate(([0.0], np.cumsum(values))) for values in (times, memory_mib))
    count = len(times)
    best = np.where(size <= stage_mib_max, at, np.inf)
    best[0] = np.inf
    chosen: list[list[int]] = []
    for _ in range(1, stages):
        more, from_ = np.full(count + 1, np.inf), [0] * (count + 1)
        for end in range(1, count + 1):
            slowest = np.where(
                size[end] - size[:end] <= stage_mib_max, np.maximum(best[:end], at[end] - at[:end]), np.inf
            )
            from_[end] = int(np.argmin(slowest))
            more[end] = slowest[from_[end]]
        best = more
        chosen.append(from_)
    if not np.isfinite(best[count]):
        raise InvalidInput(
            f"no cut into {stages} stages fits: the largest unit takes {max(memory_mib):.0f} MiB, all {size[-1]:.0f}",
            field="memory_mib", value=stage_mib_max, remedy="more stages, or a GPU with more memory",
        )  # fmt: skip
    ends = [count]
    for from_ in reversed(chosen):
        ends.append(from_[ends[-1]])
    return tuple(reversed(ends))

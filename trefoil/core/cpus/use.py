"""Use of CPUs by slices, and its history as Kubernetes' VPA recommender keeps it.

Source: kubernetes/autoscaler, vertical-pod-autoscaler, pkg/recommender: model/aggregations_config.go,
util/decaying_histogram.go, util/histogram_options.go.
Formulation: the first bucket is 0.01 core wide, each further one 5 % wider than the one before, up to 1,000 cores. A
sample weighs the cores of its slice (0.1 at least), and half as much 24 h later. A percentile is the end of the bucket
that reaches it.
Deviations: weights are decayed when a sample comes, not multiplied up since a reference; those below 1e-4 go.
"""

import math
from dataclasses import dataclass
from typing import Final

from trefoil.core.fleet import SliceKey

FIRST_CORES: Final = 0.01
MOST_CORES: Final = 1000.0
GROWTH: Final = 1.05
HALF_LIFE_S: Final = 86_400.0
WEIGHT_MIN: Final = 0.1
EPSILON: Final = 0.001 * WEIGHT_MIN
BUCKETS: Final = math.ceil(math.log(MOST_CORES * (GROWTH - 1) / FIRST_CORES + 1, GROWTH)) + 1


@dataclass(frozen=True, slots=True)
class CpuUse:
    """Use of one slice by a variant: cores that it kept busy in the mean over the last `window_s`."""

    family: str
    variant: str
    slice: SliceKey
    cores: float
    window_s: float


@dataclass(frozen=True, slots=True)
class CpuHistory:
    """History of a variant's use: (bucket, weight) at `at_s`, ascending."""

    family: str
    variant: str
    at_s: float = 0.0
    weights: tuple[tuple[int, float], ...] = ()

    def with_sample(self, cores: float, weight: float, at_s: float) -> "CpuHistory":
        """History with one sample more, of a slice of `weight` cores."""
        decay = 0.5 ** (max(0.0, at_s - self.at_s) / HALF_LIFE_S)
        weights = {bucket: one * decay for bucket, one in self.weights if one * decay >= EPSILON}
        bucket = bucket_of(cores)
        weights[bucket] = weights.get(bucket, 0.0) + max(weight, WEIGHT_MIN)
        return CpuHistory(self.family, self.variant, max(at_s, self.at_s), tuple(sorted(weights.items())))

    def percentile(self, share: float) -> float:
        """Cores that this share of the weight does not exceed; 0.0 without any sample."""
        total, reached = sum(weight for _, weight in self.weights), 0.0
        for bucket, weight in self.weights:
            reached += weight
            if reached >= share * total:
                return bucket_start(min(bucket + 1, BUCKETS - 1))
        return 0.0


def bucket_of(cores: float) -> int:
    """Bucket of a use."""
    if cores < FIRST_CORES:
        return 0
    return min(int(math.log(cores * (GROWTH - 1) / FIRST_CORES + 1, GROWTH)), BUCKETS - 1)


def bucket_start(bucket: int) -> float:
    """Cores at which a bucket begins."""
    return FIRST_CORES * (GROWTH**bucket - 1) / (GROWTH - 1)

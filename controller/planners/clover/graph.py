"""Configuration graph: variants on one side, slice types on the other, the number of instances as edge weights.

Source: CLOVER section 4.2, definition 1. Two configurations that put the same variants on the same slice types are one
graph, whichever GPU holds what: MIG isolates slices. Slice vertices carry their device type, for mixed fleets.
Graph edit distance: edges and weights only, as all graphs share their vertices. One edit changes a weight by one, so
the distance is the Manhattan distance of the weights. CLOVER's examples: (i) to (ii) of Fig. 7: 8; another variant on
one slice: 2; a copy moved to another slice type: 2.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

Edge = tuple[str, str, str]  # variant, device type, slice type


@dataclass(frozen=True)
class Graph:
    """Configuration graph: positive weights in canonical order; equal graphs are equal values."""

    weights: tuple[tuple[Edge, int], ...]

    @classmethod
    def from_weights(cls, weights: Mapping[Edge, int]) -> "Graph":
        """Graph of weights, without the edges of weight 0.

        Raises:
            AssertionError: a negative weight, which no configuration has.
        """
        assert all(n >= 0 for n in weights.values()), weights
        return cls(tuple(sorted((edge, n) for edge, n in weights.items() if n)))

    @cached_property
    def counter(self) -> Counter[Edge]:
        """Weights by edge; do not change it."""
        return Counter(dict(self.weights))

    @cached_property
    def key(self) -> str:
        """Key by which measurements are remembered: the same for equal graphs."""
        return ";".join(f"{variant}>{kind}/{shape}:{n}" for (variant, kind, shape), n in self.weights)

    @property
    def instances(self) -> int:
        """Number of model copies: the total weight."""
        return sum(n for _, n in self.weights)

    def slices(self) -> Counter[tuple[str, str]]:
        """Number of slices by (device type, slice type)."""
        found: Counter[tuple[str, str]] = Counter()
        for (_, kind, shape), n in self.weights:
            found[(kind, shape)] += n
        return found

    def __add__(self, other: "Graph") -> "Graph":
        """GPUs that join bring their edges."""
        return Graph.from_weights(self.counter + other.counter)

    def __sub__(self, other: "Graph") -> "Graph":
        """GPUs that leave take theirs along; they must have been part of it."""
        left = Counter(self.counter)
        left.subtract(other.counter)
        return Graph.from_weights(left)

    def __mul__(self, times: int) -> "Graph":
        """That many GPUs alike."""
        return Graph.from_weights({edge: n * times for edge, n in self.weights})


def edit_distance(a: Graph, b: Graph) -> int:
    """Graph edit distance (GED), a metric: the sum of the differences of weights."""
    first, second = a.counter, b.counter
    return sum(abs(first[edge] - second[edge]) for edge in first.keys() | second.keys())

"""Space of configurations: what is realisable, what is near, what is drawn at random.

Source: CLOVER section 4.2 (neighbours within a graph edit distance of 4; edges disabled where memory does not fit). Its
artifact, where every GPU takes the same partition and models ("standardised", also the paper's ORACLE).
Data: the devices of a pod by type, the variants of its family.
Formulation: a `Setup` says how many devices take each configuration and which graph results; only such compositions are
realisable. Standardised: the graph of one device per type, of which every device is a copy. This space is enumerated
(1,282 graphs for four variants on an A100). A neighbour comes from raw draws: partition and variants at random until
the graph is within the distance. So a graph of many raw points is drawn more often. Deviations by setting: all graphs
within the distance alike, or by how the known graphs near them keep the SLO (`slo_chance`).
Fleet graph: at most two devices take another configuration and at most two copies another variant. Both are drawn at
random and kept if the distance is within the threshold.
Deviations: every slice hosts a copy, as in CLOVER; a configuration with a slice in which no variant fits is left out.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.random import Generator

from controller.planners.clover.graph import Edge, Graph, edit_distance
from controller.planners.profile_rows import fits
from trefoil.core.catalog import Variant
from trefoil.core.device_types import configurations, engine_of, placements
from trefoil.core.errors import Infeasible, InvalidInput
from trefoil.core.fleet import Configuration, DeviceType

NEAR: Final = 4  # CLOVER's threshold of the graph edit distance
TRIES: Final = 400  # draws before a neighbourhood counts as exhausted, as in the artifact
UNKNOWN: Final = 0.02  # weight of not knowing beside known graphs: one at a distance of 7
EDITS_MAX: Final = 2  # devices, and copies, that one step of the fleet graph changes at most

T = TypeVar("T")
Layouts = tuple[tuple[Configuration, int], ...]

# CLOVER Fig. 1, by compute slices in order of position; number 18 cannot be created through NVML in this order.
FIG_1: Final[Mapping[int, tuple[int, ...]]] = {
    1: (7,),
    2: (4, 3),
    3: (4, 2, 1),
    4: (4, 1, 1, 1),
    5: (3, 3),
    6: (3, 2, 1),
    7: (3, 1, 1, 1),
    8: (2, 2, 3),
    9: (2, 1, 1, 3),
    10: (1, 1, 2, 3),
    11: (1, 1, 1, 1, 3),
    12: (2, 2, 2, 1),
    13: (2, 1, 1, 2, 1),
    14: (1, 1, 2, 2, 1),
    15: (2, 1, 1, 1, 1, 1),
    16: (1, 1, 2, 1, 1, 1),
    17: (1, 1, 1, 1, 2, 1),
    18: (1, 1, 1, 1, 1, 2),
    19: (1, 1, 1, 1, 1, 1, 1),
}
ARTIFACT_DROPS: Final = frozenset({10, 16, 17, 18})  # its partition codes 9, 15, 16, 17: duplicates of others


@dataclass(frozen=True)
class Setup:
    """Setup of a pod: how many devices take each configuration, and the graph; of one device per type where
    standardised.
    """

    layouts: Layouts
    graph: Graph

    @property
    def key(self) -> str:
        """Key of the graph: compositions with the same graph perform alike."""
        return self.graph.key


def mig_configuration(kind: DeviceType, number: int) -> Configuration:
    """MIG configuration of that number in CLOVER's Fig. 1 on this device type.

    Raises:
        InvalidInput: no such number, or the type is not cut like an A100.
    """
    by_width = {s.compute_slices: s.name for s in kind.slice_types}
    if number in FIG_1 and all(width in by_width for width in FIG_1[number]):
        found = tuple(sorted(Counter(by_width[width] for width in FIG_1[number]).items()))
        if any(c.slices == found for c in configurations(kind)):
            return Configuration(kind.name, found)
    raise InvalidInput(
        f"no such MIG configuration of {kind.name}",
        field="configuration",
        value=number,
        remedy="1 to 19 as in CLOVER's Fig. 1, on a GPU with MIG",
    )


def partitions(kind: DeviceType) -> tuple[Configuration, ...]:
    """Partitions to draw from: position-aware placements, as x_p; of an A100 without the artifact's duplicates."""
    if len(placements(kind)) == len(FIG_1):
        return tuple(mig_configuration(kind, n) for n in FIG_1 if n not in ARTIFACT_DROPS)
    return tuple(
        Configuration(kind.name, tuple(sorted(Counter(name for name, _, _ in p).items()))) for p in placements(kind)
    )


@cache
def fitting_variants(kind: DeviceType, variants: tuple[Variant, ...]) -> Mapping[str, tuple[str, ...]]:
    """Variants by slice type whose edge is not disabled: they fit its memory, and an engine serves its own alone."""
    _, own = engine_of(kind) or ("", "")
    return {s.name: tuple(v.name for v in variants if fits(s, v) and own in ("", v.name)) for s in kind.slice_types}


@lru_cache(maxsize=64)
def unit_setups(kind: DeviceType, variants: tuple[Variant, ...]) -> tuple[Setup, ...]:
    """Setups of one device: every distinct graph."""
    allowed = fitting_variants(kind, variants)
    found = []
    for configuration in configurations(kind):
        choices = [
            [[(variant, name) for variant in mix] for mix in itertools.combinations_with_replacement(allowed[name], n)]
            for name, n in configuration.slices
        ]
        for mixes in itertools.product(*choices):
            weights: Counter[Edge] = Counter((v, kind.name, name) for mix in mixes for v, name in mix)
            found.append(Setup(((configuration, 1),), Graph.from_weights(weights)))
    return tuple(found)


@lru_cache(maxsize=64)
def _by_key(kind: DeviceType, variants: tuple[Variant, ...]) -> Mapping[str, Setup]:
    return {setup.key: setup for setup in unit_setups(kind, variants)}


@lru_cache(maxsize=64)
def _matrix(kind: DeviceType, variants: tuple[Variant, ...]) -> tuple[npt.NDArray[np.int64], Mapping[Edge, int]]:
    """Weights of all unit graphs, one row each, and the column of each edge."""
    allowed = fitting_variants(kind, variants)
    edges = {edge: i for i, edge in enumerate((v, kind.name, s) for s in allowed for v in allowed[s])}
    rows = np.zeros((len(unit_setups(kind, variants)), max(1, len(edges))), dtype=np.int64)
    for i, setup in enumerate(unit_setups(kind, variants)):
        for edge, n in setup.graph.weights:
            rows[i, edges[edge]] = n
    return rows, edges


def _vector(graph: Graph, edges: Mapping[Edge, int]) -> tuple[npt.NDArray[np.int64], int]:
    """A graph as a row, and the weight of what has no column."""
    row, other = np.zeros(max(1, len(edges)), dtype=np.int64), 0
    for edge, n in graph.weights:
        if edge in edges:
            row[edges[edge]] = n
        else:
            other += n
    return row, other


def distances(kind: DeviceType, variants: tuple[Variant, ...], graph: Graph, times: int = 1) -> npt.NDArray[np.int64]:
    """Graph edit distance from `times` copies of every unit graph to a graph; edges of other device types are left."""
    rows, edges = _matrix(kind, variants)
    mine = Graph.from_weights({edge: n for edge, n in graph.weights if edge[1] == kind.name})
    row, other = _vector(mine, edges)
    return np.asarray(np.abs(times * rows - row).sum(axis=1) + other)


@dataclass(frozen=True)
class Space:
    """Space of configurations of a pod. `kinds`: its device types and how many devices there are of each, in order.

    `without`: variants of the family that cannot be loaded now; what was measured with them is of another space.
    """

    kinds: tuple[tuple[DeviceType, int], ...]
    variants: tuple[Variant, ...]
    standardised: bool = True
    without: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kind, _ in self.kinds:
            if not self.units(kind):
                raise Infeasible(
                    f"no variant fits the slices of a {kind.name}", remedy="add a smaller variant, or larger devices"
                )

    @property
    def devices(self) -> int:
        """Number of devices of the pod."""
        return sum(n for _, n in self.kinds)

    @property
    def size_key(self) -> str:
        """Key of the pod's size, for which measurements hold."""
        size = ",".join(f"{n}x{kind.name}" for kind, n in self.kinds) + ("" if self.standardised else "/fleet")
        return size + "".join(f"/without {name}" for name in self.without)

    def units(self, kind: DeviceType) -> tuple[Setup, ...]:
        """Setups of one device of that type: every distinct graph."""
        return unit_setups(kind, self.variants)

    def deployed(self, setup: Setup) -> Setup:
        """Setup of the whole pod."""
        if not self.standardised:
            return setup
        number = {kind.name: n for kind, n in self.kinds}
        layouts = tuple((c, n * number[c.device_type]) for c, n in setup.layouts)
        return Setup(layouts, self.whole(setup.graph))

    def whole(self, graph: Graph) -> Graph:
        """Graph of the whole pod."""
        number = {kind.name: n for kind, n in self.kinds}
        return (
            Graph.from_weights({edge: n * number[edge[1]] for edge, n in graph.weights}) if self.standardised else graph
        )

    def uniform(self, layout: Mapping[str, Configuration], variant: str) -> Setup:
        """Setup of one configuration per device type and the same variant everywhere; engines have their own."""
        own = {kind.name: engine[1] for kind, _ in self.kinds if (engine := engine_of(kind)) is not None}
        count = {kind.name: 1 if self.standardised else n for kind, n in self.kinds}
        layouts = tuple((layout[kind.name], count[kind.name]) for kind, _ in self.kinds)
        weights = {
            (own.get(c.device_type, variant), c.device_type, name): k * n for c, n in layouts for name, k in c.slices
        }
        return Setup(layouts, Graph.from_weights(weights))

    def legal(self, setup: Setup) -> bool:
        """Whether the graph is what the devices of the pod, so configured, host; one copy per slice, all of it fits."""
        want = Counter({kind.name: 1 if self.standardised else n for kind, n in self.kinds})
        have: Counter[str] = Counter()
        slices: Counter[tuple[str, str]] = Counter()
        kinds = {kind.name: kind for kind, _ in self.kinds}
        for configuration, n in setup.layouts:
            have[configuration.device_type] += n
            if configuration.device_type not in kinds or n < 1:
                return False
            if configuration not in configurations(kinds[configuration.device_type]):
                return False
            for name, k in configuration.slices:
                slices[(configuration.device_type, name)] += k * n
        fitting = all(
            v in fitting_variants(kinds[k], self.variants)[s] for (v, k, s), _ in setup.graph.weights if k in kinds
        )
        return have == want and slices == setup.graph.slices() and fitting

    # ------------------------------------------------------------------------------------------------ neighbours

    def neighbour(
        self,
        centre: Setup,
        rng: Generator,
        seen: Collection[str],
        raw: bool,
        slo_kept: Mapping[Graph, bool],
        surrogate: Callable[[Sequence[Graph]], npt.NDArray[np.float64]] | None = None,
    ) -> Setup | None:
        """Neighbour within the distance that is not seen yet; None when there is none, or none is found.

        `raw`: the first of raw draws that is near. Otherwise a standardised neighbour is drawn from all near ones. Its
        weight is its chance to keep the SLO, by the known graphs near it (`slo_kept`), times the `surrogate`'s factor.
        """
        if self.standardised and not raw:
            near = [s for s in self.neighbourhood(centre) if s.key not in seen]
            if not near:
                return None
            chance = slo_chance(near, slo_kept)
            if surrogate is not None:
                chance = chance * surrogate([setup.graph for setup in near])
            return near[int(rng.choice(len(near), p=chance / chance.sum()))]
        for _ in range(TRIES):
            drawn = self.random(rng) if self.standardised else self._edited(centre, rng)
            if drawn.key not in seen and 0 < edit_distance(drawn.graph, centre.graph) <= NEAR:
                return drawn
        return None

    def neighbourhood(self, centre: Setup) -> list[Setup]:
        """Neighbours: all standardised setups within the distance, without the centre."""
        per_kind = []
        for kind, _ in self.kinds:
            away = distances(kind, self.variants, centre.graph)
            per_kind.append([(self.units(kind)[i], int(away[i])) for i in np.flatnonzero(away <= NEAR)])
        return [
            _joined([setup for setup, _ in chosen])
            for chosen in itertools.product(*per_kind)
            if 0 < sum(away for _, away in chosen) <= NEAR
        ]

    def _edited(self, centre: Setup, rng: Generator) -> Setup:
        """A step of the fleet graph: some devices cut otherwise, some copies of another variant."""
        layouts = Counter(dict(centre.layouts))
        weights = Counter(centre.graph.counter)
        kinds = {kind.name: kind for kind, _ in self.kinds}
        cuts, swaps = (int(n) for n in rng.integers(0, EDITS_MAX + 1, 2))
        for _ in range(cuts):
            old = _drawn(layouts, rng)
            kind = kinds[old.device_type]
            options = [c for c in configurations(kind) if _change(old, c) and self._hostable(kind, c)]
            if not options:
                continue
            new = options[int(rng.integers(len(options)))]
            layouts[old] -= 1
            layouts[new] += 1
            self._recut(weights, kind, old, new, rng)
        for _ in range(swaps):
            variant, name, shape = _drawn(weights, rng)
            others = [v for v in fitting_variants(kinds[name], self.variants)[shape] if v != variant]
            if others:
                weights[(variant, name, shape)] -= 1
                weights[(others[int(rng.integers(len(others)))], name, shape)] += 1
        return Setup(tuple(sorted(((c, n) for c, n in layouts.items() if n), key=_order)), Graph.from_weights(weights))

    def _hostable(self, kind: DeviceType, configuration: Configuration) -> bool:
        return all(fitting_variants(kind, self.variants)[name] for name, _ in configuration.slices)

    def _recut(
        self, weights: Counter[Edge], kind: DeviceType, old: Configuration, new: Configuration, rng: Generator
    ) -> None:
        """Copies of random variants leave with the slices that go; random variants come with those that come."""
        before, after = Counter(dict(old.slices)), Counter(dict(new.slices))
        for shape in sorted(before.keys() | after.keys()):
            for _ in range(before[shape] - after[shape]):
                weights[_drawn(Counter({e: n for e, n in weights.items() if e[1:] == (kind.name, shape)}), rng)] -= 1
            for _ in range(after[shape] - before[shape]):
                names = fitting_variants(kind, self.variants)[shape]
                weights[(names[int(rng.integers(len(names)))], kind.name, shape)] += 1

    def named(self, key: str) -> Setup | None:
        """Setup of a key, standardised; None for the fleet graph, whose composition a key does not tell."""
        if not self.standardised:
            return None
        parts = [_by_key(kind, self.variants) for kind, _ in self.kinds]
        found: list[Setup] = []
        for (kind, _), known in zip(self.kinds, parts, strict=True):
            mine = ";".join(part for part in key.split(";") if f">{kind.name}/" in part)
            if mine not in known:
                return None
            found.append(known[mine])
        return _joined(found)

    # ------------------------------------------------------------------------------------------------ at random

    def random(self, rng: Generator) -> Setup:
        """Random point of the raw space: a partition x_p per GPU and a variant x_v per slice.

        Standardised: one partition and one list of variants for all GPUs of a type, as in the artifact.
        """
        layouts: Counter[Configuration] = Counter()
        weights: Counter[Edge] = Counter()
        for kind, number in self.kinds:
            options = [c for c in partitions(kind) if self._hostable(kind, c)]
            allowed = fitting_variants(kind, self.variants)
            for _ in range(1 if self.standardised else number):
                configuration = options[int(rng.integers(len(options)))]
                layouts[configuration] += 1
                for name, k in configuration.slices:
                    for _ in range(k):
                        weights[(allowed[name][int(rng.integers(len(allowed[name])))], kind.name, name)] += 1
        return Setup(tuple(sorted(layouts.items(), key=_order)), Graph.from_weights(weights))


def slo_chance(near: Sequence[Setup], slo_kept: Mapping[Graph, bool]) -> npt.NDArray[np.float64]:
    """Chance of each to keep the SLO, as weights: the share of the known graphs that do, each by its edit distance.

    The nearer the more it says (inverse square); an unknown at half a chance is added, so that all remain possible.
    Squared: rather one that keeps it than one that may.
    """
    edges = sorted({edge for s in near for edge, _ in s.graph.weights} | {e for g in slo_kept for e, _ in g.weights})
    column = {edge: i for i, edge in enumerate(edges)}
    rows = np.zeros((len(near) + len(slo_kept), len(edges)))
    for row, graph in enumerate([*(s.graph for s in near), *slo_kept]):
        for edge, n in graph.weights:
            rows[row, column[edge]] = n
    good, total = np.full(len(near), 0.5 * UNKNOWN), np.full(len(near), UNKNOWN)
    for row, keeps in zip(rows[len(near) :], slo_kept.values(), strict=True):
        weight = 1.0 / np.maximum(1.0, np.abs(rows[: len(near)] - row).sum(axis=1)) ** 2
        total += weight
        good += weight * keeps
    return np.asarray((good / total) ** 2)


def _joined(setups: Sequence[Setup]) -> Setup:
    """One setup out of one per device type."""
    if len(setups) == 1:
        return setups[0]
    weights: Counter[Edge] = Counter()
    for setup in setups:
        weights.update(setup.graph.counter)
    return Setup(tuple(layout for setup in setups for layout in setup.layouts), Graph.from_weights(weights))


def _order(item: tuple[Configuration, int]) -> tuple[str, tuple[tuple[str, int], ...]]:
    return item[0].device_type, item[0].slices


def _change(old: Configuration, new: Configuration) -> bool:
    """Whether another configuration is near enough for one step."""
    a, b = Counter(dict(old.slices)), Counter(dict(new.slices))
    return 0 < sum(abs(a[s] - b[s]) for s in a.keys() | b.keys()) <= NEAR


def _drawn(counts: Counter[T], rng: Generator) -> T:
    """One element, by its number."""
    items = [(item, n) for item, n in counts.items() if n > 0]
    at = int(rng.integers(sum(n for _, n in items)))
    for item, n in items:
        at -= n
        if at < 0:
            return item
    raise AssertionError("an empty counter")

"""Numbers of CLOVER's text and artifact: Fig. 1, Fig. 6, Fig. 7, sizes of the search space."""

import math
from collections import Counter

import numpy as np
import pytest

from controller.planners.clover.graph import Graph, edit_distance
from controller.planners.clover.objective import (
    Goal,
    Outcome,
    accepts,
    annealing_energy,
    delta_accuracy,
    delta_carbon,
    weighted,
)
from controller.planners.clover.space import FIG_1, NEAR, Space, mig_configuration, partitions, unit_setups
from tests.support.planning import digits
from trefoil.core.device_types import A100_40GB, configurations, placements

A100 = A100_40GB.name


def variants(number):
    return digits().families[0].by_accuracy()[:number]


def test_19_configurations_and_14_multisets():
    assert len(placements(A100_40GB)) == len(FIG_1) == 19
    assert len(configurations(A100_40GB)) == 14
    assert {mig_configuration(A100_40GB, n) for n in FIG_1} == set(configurations(A100_40GB))
    assert mig_configuration(A100_40GB, 2).slices == (("3g.20gb", 1), ("4g.20gb", 1))
    assert mig_configuration(A100_40GB, 19).slices == (("1g.5gb", 7),)


def test_size_of_the_artifacts_space():
    assert len(partitions(A100_40GB)) == 15
    for number, graphs, raw in ((3, 438, 4071), (4, 1282, 24804)):
        assert len({s.key for s in unit_setups(A100_40GB, variants(number))}) == graphs
        points = [number ** sum(n for _, n in c.slices) for c in partitions(A100_40GB)]
        assert sum(points) == raw


def test_neighbours_are_raw_draws_as_in_the_artifact_and_by_the_deviation_graphs_alike():
    """Of BASE: one whole-GPU partition, two of two slices, and those of three without the repeats of Fig. 1."""
    space, rng = Space(((A100_40GB, 1),), variants(4)), np.random.default_rng(0)
    centre = space.uniform({A100: mig_configuration(A100_40GB, 1)}, variants(4)[-1].name)
    near = space.neighbourhood(centre)
    partitions_by_size = Counter(sum(n for _, n in c.slices) for c in partitions(A100_40GB))
    weights = {1: partitions_by_size[1] * 3 / 4, 2: partitions_by_size[2], 3: partitions_by_size[3]}
    expected = {
        True: {size: weight / sum(weights.values()) for size, weight in weights.items()},
        False: {size: sum(s.graph.instances == size for s in near) / len(near) for size in weights},
    }
    assert expected[True][1] > 7 * expected[False][1], "another variant on the whole GPU is drawn one time in eight"
    for raw, shares in expected.items():
        drawn = Counter(space.neighbour(centre, rng, set(), raw, {}).graph.instances for _ in range(1000))
        assert {size: n / 1000 for size, n in drawn.items()} == pytest.approx(shares, abs=0.05)


def test_base_is_five_edits_from_any_graph_of_four_copies_and_a_step_has_four():
    """Why CLOVER as printed cannot hop between BASE and albert's best mixes; `warm` begins at the best graph known."""
    space = Space(((A100_40GB, 1),), variants(4))
    base = space.uniform({A100: mig_configuration(A100_40GB, 1)}, variants(4)[-1].name)
    assert max(s.graph.instances for s in space.neighbourhood(base)) == 3
    assert min(edit_distance(base.graph, s.graph) for s in space.units(A100_40GB) if s.graph.instances == 4) == 5


def test_fig_6_where_b_at_500_is_a_misprint():
    def objective(carbon, accuracy):
        return weighted(0.1, delta_carbon(carbon, 1000.0), accuracy)

    assert objective(0.4 * 500, -4.0) == pytest.approx(4.4)
    assert objective(1.2 * 500, -2.0) == pytest.approx(2.2)  # printed: 3.2
    assert objective(0.4 * 100, -4.0) == pytest.approx(6.0)
    assert objective(1.2 * 100, -2.0) == pytest.approx(7.0)
    assert delta_accuracy(0.96, 1.0) == pytest.approx(-4.0)


def test_fig_6_through_a_goal():
    """Eq. 1 to 3 with joules and intensities: A is preferred in dirty hours, B in clean ones."""
    a, b = (Outcome(joules, accuracy, 10, 10, 1, 1) for joules, accuracy in ((0.4, 0.96), (1.2, 0.98)))
    for intensity, values in ((500.0, (4.4, 2.2)), (100.0, (6.0, 7.0))):
        goal = Goal(0.1, intensity, base_j=4.0, base_intensity=250.0, base_accuracy=1.0, slo_ms=20, quantile=0.95)
        assert [goal.value(o) for o in (a, b)] == pytest.approx(values)


def test_fig_7_distance_8_and_what_an_edit_is():
    """From (i) to (ii): every edge of weight 1 goes, two of weight 1 and one of weight 2 come."""
    first = Graph.from_weights({(v, A100, s): 1 for v, s in (("v1", "s1"), ("v1", "s2"), ("v2", "s3"), ("v3", "s3"))})
    second = Graph.from_weights({("v2", A100, "s1"): 1, ("v3", A100, "s2"): 1, ("v1", A100, "s3"): 2})
    assert edit_distance(first, second) == 8
    other_variant = Graph.from_weights({**first.counter, ("v1", A100, "s1"): 0, ("v2", A100, "s1"): 1})
    assert edit_distance(first, other_variant) == 2
    other_slice = Graph.from_weights({**first.counter, ("v1", A100, "s1"): 0, ("v1", A100, "s3"): 1})
    assert edit_distance(first, other_slice) == 2
    assert NEAR == 4


def test_eq_6_rewards_violation_where_f_is_negative_and_is_fixed_by_default():
    assert annealing_energy(4.0, 0.5) == annealing_energy(4.0, 0.5, literal=True) == -2.0
    assert annealing_energy(-4.0, 0.5, literal=True) == 2.0  # better than -4 without any violation
    assert annealing_energy(-4.0, 1.0, literal=True) == 4.0
    assert annealing_energy(-4.0, 0.5) == 8.0
    worse = [annealing_energy(f, r) for f in (3.0, -3.0) for r in (1.0, 0.7, 0.3)]
    assert worse[:3] == sorted(worse[:3])
    assert worse[3:] == sorted(worse[3:])


def test_eq_7_accepts_worse_with_the_standard_probability():
    rng = np.random.default_rng(0)
    assert accepts(1.0, 1.0, 0.1, rng)
    share = np.mean([accepts(0.0, 1.0, 1.0, rng) for _ in range(4000)])
    assert share == pytest.approx(math.exp(-1), abs=0.03)
    assert not accepts(0.0, math.inf, 1.0, rng)


def test_oracles_standardised_space_is_that_of_one_gpu():
    space = Space(((A100_40GB, 10),), variants(4))
    one = space.units(A100_40GB)[0]
    assert space.deployed(one).graph == one.graph * 10

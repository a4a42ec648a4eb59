"""Configuration graphs and their spaces: a metric, additive, realisable, within reach."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planners.clover.graph import Graph, edit_distance
from controller.planners.clover.space import (
    NEAR,
    Setup,
    Space,
    distances,
    fitting_variants,
    mig_configuration,
    slo_chance,
    unit_setups,
)
from tests.support.planning import digits
from trefoil.core.catalog import Variant
from trefoil.core.device_types import A100_40GB, V100_32GB
from trefoil.core.errors import Infeasible, InvalidInput

A100 = A100_40GB.name
VARIANTS = digits().families[0].by_accuracy()
EDGES = [(v.name, A100, s.name) for v in VARIANTS for s in A100_40GB.slice_types]
GRAPHS = st.dictionaries(st.sampled_from(EDGES), st.integers(0, 6)).map(Graph.from_weights)


@given(GRAPHS, GRAPHS, GRAPHS)
def test_edit_distance_is_a_metric(a, b, c):
    assert (edit_distance(a, b) == 0) == (a == b)
    assert edit_distance(a, b) == edit_distance(b, a)
    assert edit_distance(a, c) <= edit_distance(a, b) + edit_distance(b, c)


@given(GRAPHS, GRAPHS)
def test_devices_that_join_or_leave_add_and_take_their_edges(a, b):
    assert (a + b) - b == a
    assert (a + b).instances == a.instances + b.instances
    assert edit_distance(a, a + b) == b.instances


@pytest.mark.parametrize(("standardised", "raw"), [(True, True), (True, False), (False, True)])
@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10**6), devices=st.integers(1, 12))
def test_neighbours_and_random_points_are_realisable_and_near(standardised, raw, seed, devices):
    space, rng = Space(((A100_40GB, devices), (V100_32GB, 2)), VARIANTS, standardised), np.random.default_rng(seed)
    centre = space.random(rng)
    assert space.legal(centre)
    for _ in range(5):
        near = space.neighbour(centre, rng, {centre.key}, raw, {})
        if near is None:
            assert standardised, "a step of the fleet graph is near by construction"
            assert raw, "one of all that are near is always found"
            break
        assert space.legal(near)
        assert 0 < edit_distance(centre.graph, near.graph) <= NEAR
        centre = near
    whole = space.deployed(centre)
    assert sum(n for _, n in whole.layouts) == devices + 2
    assert whole.graph.instances == sum(n * k for c, n in whole.layouts for _, k in c.slices)


def test_a_graph_that_no_devices_make_is_not_legal():
    space = Space(((A100_40GB, 2),), VARIANTS, standardised=False)
    seven = mig_configuration(A100_40GB, 19)
    assert space.legal(Setup(((seven, 2),), Graph.from_weights({("xs", A100, "1g.5gb"): 14})))
    assert not space.legal(Setup(((seven, 2),), Graph.from_weights({("xs", A100, "1g.5gb"): 13})))
    assert not space.legal(Setup(((seven, 1),), Graph.from_weights({("xs", A100, "1g.5gb"): 7})))


def test_edges_are_disabled_where_memory_does_not_fit():
    big = Variant("big", 9, 0.999, "", 6000, 1.0, 1, "")
    assert "big" not in fitting_variants(A100_40GB, (*VARIANTS, big))["1g.5gb"]
    assert "big" in fitting_variants(A100_40GB, (*VARIANTS, big))["2g.10gb"]
    only = unit_setups(A100_40GB, (big,))
    assert {s for u in only for _, _, s in u.graph.counter} == {"2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"}
    assert all(v == "big" for u in only for v, _, _ in u.graph.counter)
    with pytest.raises(Infeasible, match="no variant fits"):
        Space(((A100_40GB, 1),), (Variant("huge", 9, 0.999, "", 10**6, 1.0, 1, ""),))


def test_distances_at_once_are_the_edit_distances():
    graph = unit_setups(A100_40GB, VARIANTS)[700].graph
    at_once = distances(A100_40GB, VARIANTS, graph)
    assert [int(d) for d in at_once[:300]] == [
        edit_distance(u.graph, graph) for u in unit_setups(A100_40GB, VARIANTS)[:300]
    ]


def test_a_neighbour_near_a_violator_is_drawn_less():
    space = Space(((A100_40GB, 1),), VARIANTS)
    centre = unit_setups(A100_40GB, VARIANTS)[600]
    near = space.neighbourhood(centre)
    assert len(set(slo_chance(near, {}))) == 1
    violator = near[0].graph
    weights = slo_chance(near, {violator: False, centre.graph: True})
    assert weights[0] < np.median(weights) / 2
    assert min(weights) > 0


def test_names_lead_back_to_setups():
    space = Space(((A100_40GB, 3), (V100_32GB, 1)), VARIANTS)
    setup = space.random(np.random.default_rng(4))
    assert space.named(setup.key) == setup
    assert space.named("nobody>nothing/1g:1") is None


def test_unknown_numbers_are_refused():
    with pytest.raises(InvalidInput, match="1 to 19"):
        mig_configuration(A100_40GB, 20)
    with pytest.raises(InvalidInput, match="1 to 19"):
        mig_configuration(V100_32GB, 1)

"""A slice of a generative family decodes several streams together: so many requests may be on it at once."""

from dataclasses import replace

import numpy as np
import pytest

from controller.planners.exact import ExactPlanner
from tests.support.planning import digits, view
from trefoil.core.catalog import Catalog


@pytest.mark.parametrize(("generative", "credits"), [(True, {4}), (False, {1, 2})])
def test_credits_are_as_many_as_a_slice_decodes_together(generative, credits):
    catalog = digits()
    family = replace(catalog.families[0], generative=generative, tokens_mean=10.0 if generative else 0.0)
    larger = [
        replace(r, batch=4, latency_ms_p50=2 * r.latency_ms_p50, latency_ms_p95=2 * r.latency_ms_p95,
                latency_ms_p99=2 * r.latency_ms_p99, energy_active_j_per_batch=2 * r.energy_active_j_per_batch)
        for r in catalog.rows
    ]  # fmt: skip
    one = view(catalog=Catalog((family,), (*catalog.rows, *larger)))
    plan = ExactPlanner().plan(one, np.random.default_rng(0)).plan
    assert plan is not None
    assert {target.credits for route in plan.routes for target in route.targets} <= credits
    assert {p.credits for node in plan.nodes for d in node.devices for p in d.slices} <= credits

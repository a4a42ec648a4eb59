"""Devices that jobs need in this hour stay awake, or are woken, and never cost requests anything."""

from dataclasses import replace

import numpy as np
import pytest

from controller.planners.exact.planner import ExactPlanner
from tests.support.planning import fleet, view
from trefoil.core.jobs.planned import FlexibleDemand
from trefoil.runtime import codec


def decided(one):
    return ExactPlanner().plan(one, np.random.default_rng(1))


def awake(decision) -> int:
    return sum(bool(device.slices) for node in decision.plan.nodes for device in node.devices)


def needing(devices: int, **changes):
    flexible = (FlexibleDemand("digits", "test", 50.0, devices=devices),)
    return replace(view(rate=5.0, devices=fleet(4)), flexible=flexible, **changes)


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_devices_for_jobs_are_awake(devices):
    alone = decided(view(rate=5.0, devices=fleet(4)))
    assert awake(alone) == 1
    found = decided(needing(devices))
    assert awake(found) == devices
    assert found.why.endswith(f"at least {devices} GPUs awake for requests and jobs of this hour")
    assert found.plan.objectives == alone.plan.objectives, "the objective stays the operator's"


def test_what_requests_need_anyway_is_no_more_for_jobs():
    found, alone = decided(needing(1)), decided(view(rate=5.0, devices=fleet(4)))
    assert [node.devices for node in found.plan.nodes] == [node.devices for node in alone.plan.nodes]


def test_jobs_cost_requests_no_rung():
    """Two devices awake are more than the cap allows: then jobs have none of their own."""
    capped = needing(4, max_watts=200.0)
    alone = decided(replace(capped, flexible=()))
    assert alone.plan is not None
    assert not alone.degraded
    assert decided(capped) == alone


def test_more_devices_than_there_are_is_all_of_them():
    assert awake(decided(needing(100))) == 4


def test_a_view_without_jobs_is_written_as_ever_and_one_with_them_is_read_back():
    assert "flexible" not in codec.to_json(view())
    one = needing(2)
    assert codec.from_json(type(one), codec.to_json(one)) == one

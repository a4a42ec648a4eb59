"""What a column is worth."""

import dataclasses

import pytest

from controller.planners.columns import columns, idle_share
from controller.planners.planner_settings import ExactSettings
from controller.planners.planning_input import read_view
from controller.planners.shared_columns import shared_columns
from tests.support.planning import digits, fleet, objective, row, view
from trefoil.core.catalog import Catalog
from trefoil.core.demand import Demand
from trefoil.core.device_types import RANGED_CORES_MAX, device_type, slice_type
from trefoil.core.fleet import DeviceKind


@pytest.mark.parametrize(
    ("device", "shape", "share"),
    [
        ("A100-SXM4-40GB", "3g.20gb", 0.5),
        ("A100-SXM4-40GB", "7g.40gb", 1.0),
        ("A30", "2g.12gb", 0.5),  # it has four memory slices
        ("A30", "4g.24gb", 1.0),
        ("Tesla T4", "whole", 1.0),
        ("cpu:8", "cpu:4", 0.5),
        ("cpu:8", "quota:0.8", 0.1),
    ],
)
def test_a_slice_that_starts_keeps_its_part_of_the_device_from_serving(device, shape, share):
    kind = device_type(device)
    assert idle_share(kind, slice_type(kind, shape)) == pytest.approx(share)


SETTINGS = ExactSettings(overhead_ms=0.0, transport_gap_ms=0.0, families_per_slice=2)


def batching_class(device, items, points, families=1):
    """Columns of families that form batches, of requests of so many items; points are (batch, ms, items/s)."""
    kind = device_type(device)
    one = digits()
    rows = tuple(
        dataclasses.replace(
            row("l", "7g.40gb", ms, family=f"f{n}"),
            device_type=device,
            slice_type="cpu:4" if kind.kind == DeviceKind.CPU else "7g.40gb",
            batch=batch,
            clock_mhz=0 if kind.kind == DeviceKind.CPU else 1410,
            throughput_per_s=carried_per_s,
        )
        for n in range(families)
        for batch, ms, carried_per_s in points
    )
    catalog = Catalog(
        tuple(dataclasses.replace(one.families[0], name=f"f{n}", batching=True) for n in range(families)), rows
    )
    wanted = [objective(family=f"f{n}", slo_ms=200.0) for n in range(families)]
    demand = [Demand(f"f{n}", "", 5.0, 6.0, items_mean=items) for n in range(families)]
    one = view(catalog=catalog, wanted=wanted, demand=demand, devices=fleet(1, kind=kind))
    inputs = read_view(one, 1.0, cores_max=RANGED_CORES_MAX).in_ranges
    alone = tuple(c for task in inputs.tasks for c in columns(catalog, task, inputs.devices, SETTINGS))
    return alone, shared_columns(catalog, inputs.tasks, inputs.devices, SETTINGS, alone)


@pytest.mark.parametrize("items", [1.0, 4.0])
def test_a_request_that_joins_a_batch_waits_for_one_and_takes_its_own(items):
    """t(b) = 10 + 2 b ms: a request is in time with the largest batch that is likely, so with the usual one."""
    points = [(n, 10.0 + 2.0 * n, 1000.0 * n / (10.0 + 2.0 * n)) for n in (1, 8, 64)]
    (column,), _ = batching_class("A100-SXM4-40GB", items, points)
    batch_ms = 10.0 + 2.0 * column.batch * items
    assert column.batch > 1
    assert column.unqueued_ms_p95 == pytest.approx(2 * batch_ms, rel=0.01)
    assert column.unqueued_ms_p95 <= 200.0
    alone, shared = batching_class("A100-SXM4-40GB", items, points, families=2)
    assert len(shared) == 2
    assert all(0 < c.unqueued_ms_p95 <= 200.0 for c in shared)
    assert max(c.batch for c in shared) <= max(c.batch for c in alone)


def test_on_cpus_batches_carry_no_more_than_was_carried_when_they_were_profiled():
    points = [(n, 10.0 + 2.0 * n, 60.0) for n in (1, 8, 64)]
    alone, _ = batching_class("cpu:4", 1.0, points)
    (column,) = [c for c in alone if c.slice_type == "cpu:4"]
    assert max(rate for _, rate in column.tiers) == pytest.approx(60.0)

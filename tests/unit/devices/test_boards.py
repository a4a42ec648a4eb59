"""Boards: each that is described is planned and cut as planned; one that is not, and one outside MIG, serve whole."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from controller.observe.core.plannable import unplannable_reason
from controller.planners.exact.planner import ExactPlanner
from power_agent.devices.boards import MIG_WENT_ON, board_type, closed_reason
from tests.support.planning import fleet, view
from tests.support.simulated_driver import create_slice, inventory_on
from trefoil.core.catalog import Catalog
from trefoil.core.device_types import DEVICE_TYPES, DRIVERS, NO_MIG, device_type, reported_type, unknown_board_name
from trefoil.core.fleet import DeviceKind, DeviceState, DeviceStatus, DeviceType
from trefoil.profiler.assumed import GB_PER_S, GraphCost, assumed_points
from trefoil.profiler.cost_law import read_model
from trefoil.profiler.profile_csv import ProfileProvenance, profile_text
from trefoil.runtime.repository import load_family
from trefoil.simulated_node.machine import Machine

MODELS = Path(__file__).parents[3] / "model_repository"
COST = GraphCost(macs=100_000_000, written=1_000_000, kernels=60, weights_bytes=20_000_000, uncounted={})
GPU = "node0/gpu0"
ADA = "gpu:RTX 6000 Ada Generation:47GiB:300W:210-3105MHz/15"


@pytest.fixture(scope="module")
def assumed(tmp_path_factory: pytest.TempPathFactory) -> Catalog:
    """The digits with a profile that nobody measured."""
    family, _ = load_family(MODELS / "digits")
    law = read_model(json.loads((MODELS / "_profiles" / "constants.json").read_text())).latency
    points = assumed_points(family, {v.name: COST for v in family.variants}, law, 8)
    file = tmp_path_factory.mktemp("assumed") / "profile.csv"
    file.write_text(
        profile_text(points, ProfileProvenance("none", "2026-11-25", "0", True, "a test"), estimate_energy=True)
    )
    family, rows = load_family(MODELS / "digits", file)
    return Catalog((family,), rows)


@pytest.mark.parametrize("name", DRIVERS)
def test_every_board_is_planned_by_an_assumed_profile_and_cut_as_planned(name: str, assumed: Catalog) -> None:
    kind = device_type(name)
    assert name in GB_PER_S
    planned = ExactPlanner().plan(
        view(rate=40.0, catalog=assumed, devices=fleet(1, kind=kind)), np.random.default_rng(0)
    )
    assert planned.plan is not None, planned.why
    ((device,),) = (node.devices for node in planned.plan.nodes)
    assert device.slices
    with inventory_on(Machine(devices=(name,))) as inventory:
        (seen,) = inventory.list_devices()
        assert board_type(inventory, seen, mig_wanted=False) == kind
        for part in device.slices if kind.kind == DeviceKind.MIG_GPU else ():
            assert create_slice(inventory, GPU, part.key.slice_type, part.key.start).key == part.key


@pytest.mark.parametrize("name", [name for name in DRIVERS if DEVICE_TYPES[name].kind == DeviceKind.MIG_GPU])
def test_a_board_outside_mig_is_whole_until_mig_mode_is_wanted_or_comes(name: str, assumed: Catalog) -> None:
    with inventory_on(Machine(devices=(name,), mig_enabled=False)) as inventory:
        (seen,) = inventory.list_devices()
        whole = board_type(inventory, seen, mig_wanted=False)
        assert (whole.name, whole.kind) == (name + NO_MIG, DeviceKind.WHOLE_GPU)
        assert board_type(inventory, seen, mig_wanted=True).name == name
        assert board_type(inventory, replace(seen, mig_pending=True), mig_wanted=False).name == name
    (shape,) = whole.slice_types
    widest = max(device_type(name).slice_types, key=lambda s: s.sm_count)
    assert shape.sm_count >= widest.sm_count
    assert closed_reason(whole, seen.uuid, mig_current=False) == ""
    assert closed_reason(whole, seen.uuid, mig_current=True) == MIG_WENT_ON
    status = DeviceStatus(GPU, whole, DeviceState.AWAKE)
    assert unplannable_reason(status, [whole.name]) == ""
    assert unplannable_reason(replace(status, mig_current=True), [whole.name]) == "its MIG mode is on"


def test_a_board_that_no_table_describes_goes_by_what_its_driver_says() -> None:
    with inventory_on(Machine(devices=(ADA,))) as inventory:
        (seen,) = inventory.list_devices()
        assert seen.type == "RTX 6000 Ada Generation"
        kind = board_type(inventory, seen, mig_wanted=False)
        assert kind.name == ADA, "so that controller and dispatcher know it by its name alone"
        assert kind.clocks_mhz == inventory.clocks_supported_mhz(GPU)
        assert (inventory.power_w(GPU) or 0.0) > 0
        assert inventory.energy_j(GPU) is not None
    assert [(s.name, s.memory_mib) for s in kind.slice_types] == [("whole", 47 * 1024)]
    assert kind.sleep_w < kind.idle_w < kind.max_w == 300.0
    assert unplannable_reason(DeviceStatus(GPU, kind, DeviceState.AWAKE), [ADA]) == ""
    assert unplannable_reason(DeviceStatus(GPU, kind, DeviceState.AWAKE), []) == f"no variant has a profile on {ADA}"
    assert "MIG mode is on" in closed_reason(kind, seen.uuid, mig_current=True)


@pytest.mark.parametrize(
    ("board", "clocks_mhz", "name"),
    [
        ("RTX A6000", (210, 225, 240), "gpu:RTX A6000:47GiB:300W:210-240MHz/15"),
        ("RTX A6000", device_type("Tesla V100-SXM2-32GB").clocks_mhz, "gpu:RTX A6000:47GiB:300W:135-1530MHz/7.5"),
        ("RTX A6000", (210, 225, 300), "gpu:RTX A6000:47GiB:300W"),
        ("RTX A6000", (), "gpu:RTX A6000:47GiB:300W"),
        ("A/b:c, d", (), "gpu:A-b-c- d:47GiB:300W"),
    ],
)
def test_the_name_of_an_unknown_board_says_all_of_it(board: str, clocks_mhz: tuple[int, ...], name: str) -> None:
    assert unknown_board_name(board, 49140, 300.0, clocks_mhz) == name
    assert device_type(name).clocks_mhz in (tuple(clocks_mhz), ())
    assert device_type(name).clock_lockable == bool(device_type(name).clocks_mhz)


@pytest.mark.parametrize(
    "name", ["gpu:", "gpu:x", "gpu:x:0GiB:300W", "gpu:x:1GiB:300W:0-9MHz/1", "gpu:x:1GiB:300W:1-99999999MHz/1"]
)
def test_a_name_that_says_less_or_too_much_is_no_type(name: str) -> None:
    assert reported_type(name) == DeviceType(name)

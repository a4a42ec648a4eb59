"""What the driver derives from profiles."""

import dataclasses
import gc
import importlib.util
import sys
import time
import types
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trefoil.core import power
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.common import ProfileRow
from trefoil.core.device_types import A100_40GB
from trefoil.core.interference import stretch
from trefoil.core.queueing import ServiceTime, draw_s, service_time
from trefoil.simulated_node.pace_file import PaceEntry, PaceFile, family_crc32
from trefoil.simulated_node.workload import Workload

ROUNDS_MAX = 10
VARIANTS = (Variant("f-s", 1, 0.8, "", 16, 1.0, 1, ""), Variant("f-l", 2, 0.9, "", 16, 1.0, 1, ""))


def row(variant, batch, p50_ms, joules, slice_type="7g.40gb", clock_mhz=1410):
    return ProfileRow(
        A100_40GB.name, slice_type, "f", variant, 0, batch, clock_mhz, (), p50_ms, p50_ms, p50_ms, 0.0, joules, 0.0, 16
    )


def test_service_times_are_those_of_the_simulator_and_of_every_plan():
    profiled = replace(row("f-l", 1, 20.0, 2.5), latency_ms_p95=26.0, latency_ms_p99=31.0)
    (entry,) = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), (profiled,))).entries("7g.40gb", 1410)
    assert (entry.service_ms_mean, entry.service_cv) == dataclasses.astuple(service_time(profiled))
    assert entry.service_cv > 0.1


def test_a_profile_without_spread_is_deterministic():
    (entry,) = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), (row("f-l", 1, 25.0, 2.5),))).entries(
        "7g.40gb", 1410
    )
    assert (entry.service_ms_mean, entry.service_cv) == (25.0, 0.0)


@given(
    small=st.floats(1, 50),
    large=st.floats(1, 50),
    joules=st.floats(0.1, 10),
    kind=st.sampled_from(A100_40GB.slice_types),
)
def test_equal_joules_in_the_profile_are_equal_joules_in_the_world(small, large, joules, kind):
    rows = (row("f-s", 1, small, joules, kind.name), row("f-l", 1, large, joules, kind.name))
    loaded = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), rows)).versions(kind.name, 1410)
    for version, service_ms in ((1, small), (2, large)):
        density = loaded[family_crc32("f"), version].density(1)
        world_j = power.active_w(A100_40GB, kind.name, 1410, density) * service_ms / 1e3
        assert world_j == pytest.approx(joules)


def test_density_is_interpolated_between_batches_and_flat_outside():
    rows = (row("f-l", 2, 10.0, 2.5), row("f-l", 4, 20.0, 10.0))
    loaded = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), rows)).versions("7g.40gb", 1410)
    version = loaded[family_crc32("f"), 2]
    assert [version.density(b) for b in (1, 2, 3, 4, 9)] == pytest.approx([1.0, 1.0, 1.5, 2.0, 2.0])


def test_an_unprofiled_clock_stretches_the_service_time():
    workload = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), (row("f-l", 1, 10.0, 2.5),)))
    (entry,) = workload.entries("7g.40gb", 705)
    assert entry.service_ms_mean == pytest.approx(20.0)
    assert workload.entries("1g.5gb", 1410) == []
    half = replace(row("f-l", 1, 10.0, 2.5), clock_sensitivity=0.5)
    (entry,) = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), (half,))).entries("7g.40gb", 705)
    assert entry.service_ms_mean == pytest.approx(15.0)


def test_a_pace_file_holds_every_family_as_one_may_be_loaded_at_any_time():
    other = Family("g", "m", (Variant("g-s", 1, 0.8, "", 16, 1.0, 1, ""),))
    rows = (row("f-s", 1, 10.0, 2.5), replace(row("g-s", 1, 12.0, 2.5), family="g", clock_mhz=1000))
    workload = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS), other), rows))
    assert sorted(entry.family for entry in workload.entries("7g.40gb", 1410)) == ["f", "g"]
    assert workload.entries_max("7g.40gb") == 2
    assert workload.entries_max("1g.5gb") == 0


@pytest.fixture
def model(monkeypatch):
    """The module that runs inside Triton, in an environment without Trefoil."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", types.ModuleType("triton_python_backend_utils"))
    path = Path(__file__).parents[3] / "model_repository" / "_shared" / "model.py"
    spec = importlib.util.spec_from_file_location("the_shared_model", path)
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    return model


def test_instances_of_families_on_one_slice_book_what_each_computed(tmp_path, model):
    pace = PaceFile(tmp_path / "slice.pace", seed=77, entries_max=2)
    pace.write_table(1410, [PaceEntry("f", 1, 1, 2.0, 0.1), PaceEntry("g", 1, 1, 3.0, 0.1)])
    running = [model.Pace(str(pace.path), *who) for who in (("f", 1, "f_0_0"), ("g", 1, "g_0_0"), ("f", 1, "f_0_1"))]
    again = model.Pace(str(pace.path), "g", 1, "g_0_0")  # its stub was killed and started again
    for items, slice_ in enumerate((*running, again), 1):
        slice_.start(items)
        slice_.finish(items)
    booked = [(w.family_crc32, w.batches, w.items) for w in pace.collect_work(time.monotonic_ns())]
    assert booked == [(family_crc32("f"), 1, 1), (family_crc32("g"), 2, 2 + 4), (family_crc32("f"), 1, 3)]
    assert len({slice_.draw(1) for slice_ in (running[0], running[2])}) == 2  # each draws for itself
    for n in range(model.SLOTS - 3):
        model.Pace(str(pace.path), "f", 1, f"other {n}")
    with pytest.raises(model.PaceError, match="no room for version 1: 64 instances"):
        model.Pace(str(pace.path), "f", 1, "one more")
    del running, again, slice_
    gc.collect()
    pace.close()


@given(activity=st.floats(0.01, 1), others=st.lists(st.floats(0.01, 1), max_size=4))
def test_nothing_is_faster_beside_others_and_a_slice_never_does_more_than_it_can(activity, others):
    whole = [activity, *others]
    stretched = [stretch(one, sum(whole) - one) for one in whole]
    assert min(stretched) >= 1
    assert sum(one / by for one, by in zip(whole, stretched, strict=True)) <= 1 + 1e-9 or sum(whole) <= 1
    assert stretch(activity, sum(others)) <= stretch(activity, sum(others) + 0.1)
    assert stretch(activity, 0.0) == 1


def test_a_batch_beside_another_takes_longer_by_the_law_and_books_its_time_alone(tmp_path, model):
    pace = PaceFile(tmp_path / "slice.pace", seed=77, entries_max=2, interference=0.25)
    pace.write_table(1410, [PaceEntry("f", 1, 1, 60.0, 0.0, 0.8), PaceEntry("g", 1, 1, 5.0, 0.0, 0.6)])
    both = [model.Pace(str(pace.path), family, 1) for family in ("f", "g")]

    def took_s() -> float:
        started_s = time.monotonic()
        both[0].start(1)
        both[0].finish(1)
        return time.monotonic() - started_s

    longer, parted = stretch(0.8, 0.6, 0.25), []  # 1.4 x 1.15
    for _ in range(ROUNDS_MAX):  # between a batch and our look at the clock this thread may wait for a core
        alone_s = took_s()
        both[1].start(1)
        beside_s = took_s()
        both[1].finish(1)
        alone_s += took_s()
        assert (alone_s > 2 * 0.059, beside_s > 0.059 * longer) == (True, True)
        booked_s = {w.family_crc32: w.busy_s for w in pace.collect_work(time.monotonic_ns())}[family_crc32("f")]
        parted.append(booked_s / (alone_s + beside_s / longer) - 1)  # however late it woke up
        if abs(parted[-1]) < 0.03:
            break
    assert min(map(abs, parted)) < 0.03, parted
    both.clear()
    gc.collect()
    pace.close()


def test_the_model_on_a_simulated_slice_draws_by_the_law_of_core(tmp_path, model):
    """It has the law once more: held to be the same, draw by draw."""
    pace = PaceFile(tmp_path / "slice.pace", seed=77, entries_max=2)
    pace.write_table(1410, [PaceEntry("f", 2, 1, 20.0, 0.1), PaceEntry("f", 2, 8, 90.0, 0.1)])
    slice_ = model.Pace(str(pace.path), "f", 2)
    drawn_s = [slice_.draw(8)[0] / 1e9 for _ in range(500)]
    law_s = draw_s(ServiceTime(90.0, 0.1), 500, np.random.default_rng((77, family_crc32("f"), 2, zlib.crc32(b""))))
    assert drawn_s == pytest.approx(law_s, abs=2e-9)
    del slice_
    gc.collect()
    pace.close()


def test_a_stage_has_the_times_of_its_own_rows_under_its_models_name():
    rows = (
        row("f-l", 1, 10.0, 2.5),
        replace(row("f-l", 1, 4.0, 1.0), stage=1),
        replace(row("f-l", 1, 6.0, 1.5), stage=2),
    )
    entries = Workload(A100_40GB, Catalog((Family("f", "m", VARIANTS),), rows)).entries("7g.40gb", 1410)
    assert [(e.family, e.version, e.service_ms_mean) for e in entries] == [
        ("f", 2, 10.0), ("f@1of2", 2, 4.0), ("f@2of2", 2, 6.0),
    ]  # fmt: skip

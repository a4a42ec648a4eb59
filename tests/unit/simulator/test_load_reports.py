"""What a steady flow says is made once: the same objects, and the same sums as when it is made anew."""

import numpy as np
import pytest

from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.books.intervals import Interval, LoadReports
from trefoil.simulator.engines.engine import Flow, SliceService
from trefoil.simulator.engines.fluid import FluidEngine
from trefoil.simulator.scenario.arrivals import ArrivalStream, Rate

KEYS = [SliceKey("n/gpu0", "1g.5gb", n, 1) for n in range(3)]
STEP_S = 300.0


def engine() -> FluidEngine:
    """Three equal slices at 60 % in the first hour of every two, at 30 % in the other."""
    rate = Rate(np.array([0.0, 3600.0]), np.array([90.0, 45.0]), 7200.0, steps=True)
    made = FluidEngine("f", Flow(ArrivalStream(rate, 1.0, np.random.default_rng(1)), 75.0), 2.0, 0.0)
    targets = tuple(RouteTarget(key, "m", 0, 1 / 3, 2) for key in KEYS)
    service = SliceService(ServiceTime(20.0, 0.1), 0.9, 1.5, "m", "f", 2.0)
    made.set_routes(0.0, {"f": Route("f", "weighted", "fifo", targets, 100, 0)}, {"f": dict.fromkeys(KEYS, service)})
    return made


def steps(count: int) -> list[Interval]:
    made = engine()
    return [made.serve((n + 1) * STEP_S)["f"] for n in range(count)]


def test_equal_steps_share_what_they_count_and_come_back_to_it():
    found = steps(26)
    assert all(one.latency is found[0].latency and one.joules is found[0].joules for one in found[:12])
    assert found[12].latency is not found[0].latency
    assert found[24].latency is found[0].latency  # two hours later
    assert [one.starts_s for one in found] == [n * STEP_S for n in range(26)]
    assert found[5].answered == pytest.approx(90.0 * STEP_S)
    assert found[5].latency.sum() == pytest.approx(found[5].answered)


def test_what_is_made_of_equal_steps_is_one_object_until_they_differ():
    reports, works, windows = LoadReports({"f": []}), [], []
    for number, one in enumerate(steps(14), 1):
        reports.add({"f": one})
        works.append(reports.work({"f": one}))
        windows.append(reports.window({"f": 1.0}, number, one.ends_s))
    assert all(work is works[0] for work in works[:12])
    assert works[12] is not works[0]
    assert all(window.cells is windows[0].cells for window in windows[:12])
    assert windows[12].cells is not windows[0].cells
    assert [w.seq for w in windows] == list(range(1, 15))
    assert [(w.starts_at_s, w.ends_at_s) for w in windows] == [(n * STEP_S, (n + 1) * STEP_S) for n in range(14)]
    assert works[0] == {(key, "f"): pytest.approx(90.0 * STEP_S / 3 * 1.5) for key in KEYS}


def test_a_window_of_several_steps_adds_them_and_leaves_them_as_they_are():
    reports, found = LoadReports({"f": []}), steps(3)
    before = found[0].latency.copy()
    for one in found:
        reports.add({"f": one})
    window = reports.window({"f": 1.0}, 1, found[-1].ends_s)
    assert sum(cell.arrived for cell in window.cells) == 3 * 90 * 300
    assert (found[0].latency == before).all()
    assert reports.window({"f": 1.0}, 2, found[-1].ends_s).cells[0].arrived == 0  # nothing since

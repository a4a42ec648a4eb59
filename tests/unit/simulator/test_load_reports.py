"""What is reported of a steady flow: load windows of its steps, and its joules."""

import numpy as np
import pytest

from trefoil.core.fleet import SliceKey
from trefoil.core.plan import Route, RouteTarget
from trefoil.core.queueing import ServiceTime
from trefoil.simulator.books.intervals import Interval, load_window
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


def test_a_window_of_several_steps_adds_them_and_leaves_them_as_they_are():
    found = steps(3)
    before = found[0].latency.copy()
    window = load_window({"f": found}, {"f": 1.0}, 1, found[-1].ends_s)
    assert (window.seq, window.starts_at_s, window.ends_at_s) == (1, 0.0, 3 * STEP_S)
    assert sum(cell.arrived for cell in window.cells) == 3 * 90 * 300
    assert (found[0].latency == before).all()
    later = load_window({"f": []}, {"f": 1.0}, 2, found[-1].ends_s)
    assert later.cells[0].arrived == 0  # nothing since


def test_a_steady_flow_answers_what_comes_at_the_joules_of_a_request():
    (one,) = steps(1)
    assert one.answered == pytest.approx(90.0 * STEP_S)
    assert one.latency.sum() == pytest.approx(one.answered)
    assert one.joules == {key: pytest.approx(90.0 * STEP_S / 3 * 1.5) for key in KEYS}

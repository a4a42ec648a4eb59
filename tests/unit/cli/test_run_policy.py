"""How a run begins: the load, and with its second 0 the clock of the carbon trace."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trefoil.cli.demo import run_policy
from trefoil.cli.demo.results import DemoSeries
from trefoil.cli.demo.run_monitor import PlanChange
from trefoil.cli.load.arrivals import RateProfile
from trefoil.cli.load.generator import LEAD_S
from trefoil.cli.load.process import LoadPlan
from trefoil.cli.load.result import LoadResult, Record
from trefoil.cli.run.scenario import Fleet, OfferedLoad
from trefoil.core.errors import StartError
from trefoil.core.plan import DecisionRecord
from trefoil.runtime.clock import ManualClock

RECORD = Record(0.0, 0.0, 40.0, "OK", 1, 1, "digits-l")
PLAN = LoadPlan(((0.0, 26.0), (10.0, 26.0)), 2.0, "images.npz", "digits", 7)
STEP_S = 5.0


class World:
    """A feed whose restarts take so long, one after another; loads that say when they will begin."""

    def __init__(self, feed_takes_s: list[float]) -> None:
        self.clock = ManualClock(1000.0)
        self.feed_takes_s = feed_takes_s
        self.said: list[str] = []
        self.leads_s: list[float] = []
        self.starts_s: list[float] = []
        self.stopped = 0
        self.setup: Any = SimpleNamespace(
            clock=self.clock, view=SimpleNamespace(say=self.said.append),
            scenario=SimpleNamespace(carbon=SimpleNamespace(step_s=STEP_S)),
        )  # fmt: skip

    async def restart(self, name: str, overrides: Any) -> None:
        assert name == "carbon_feed"
        self.starts_s.append(overrides["trace"]["starts_at_s"])
        if not self.feed_takes_s:
            raise StartError("died", field="carbon_feed")
        self.clock.move(self.feed_takes_s.pop(0))

    def load_process(
        self, played: Sequence[LoadPlan], target: str, folder: Path, launch_id: str, clock: Any, lead_s: float
    ) -> Any:
        self.leads_s.append(lead_s)

        async def started_at_s() -> float:
            return clock.now_s() + lead_s + played[0].warmup_s

        async def stop() -> None:
            self.stopped += 1

        return SimpleNamespace(started_at_s=started_at_s, stop=stop)

    async def begin(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> float:
        monkeypatch.setattr(run_policy, "LoadProcess", self.load_process)
        launch: Any = SimpleNamespace(addresses={"inference": ""}, launch_id="it", state_dir="/state")
        launcher: Any = self
        _, starts_at_s = await run_policy.start_load_and_trace(self.setup, launcher, launch, [PLAN], folder)
        return starts_at_s


async def test_a_feed_that_is_up_before_the_first_step_ends_begins_with_the_load(monkeypatch, tmp_path):
    world = World([6.0])
    assert await world.begin(monkeypatch, tmp_path) == world.starts_s[-1] == 1000.0 + LEAD_S + PLAN.warmup_s
    assert (world.leads_s, world.stopped, world.said) == ([LEAD_S], 0, [])


async def test_a_load_waits_for_a_feed_that_would_miss_a_step(monkeypatch, tmp_path):
    world = World([14.0, 20.0])
    starts_at_s = await world.begin(monkeypatch, tmp_path)
    assert world.leads_s == [LEAD_S, 28.0]
    assert starts_at_s == world.starts_s[-1] == 1014.0 + 28.0 + PLAN.warmup_s
    assert world.clock.now_s() < starts_at_s
    assert world.stopped == 1, "the first load does not go on"
    assert "took 14.0 s to start" in world.said[0]


async def test_a_feed_that_takes_minutes_is_given_up_and_no_load_is_left(monkeypatch, tmp_path):
    world = World([20.0, 60.0, 130.0])
    with pytest.raises(StartError, match=r"carbon_feed: too slow .* read /state/logs"):
        await world.begin(monkeypatch, tmp_path)
    assert world.stopped == 3


async def test_a_feed_that_dies_leaves_no_load(monkeypatch, tmp_path):
    world = World([])
    with pytest.raises(StartError, match="died"):
        await world.begin(monkeypatch, tmp_path)
    assert world.stopped == 1


def test_answers_are_shared_out_by_the_type_of_device_that_gave_them() -> None:
    fleet = Fleet(node="n-1", devices=("A100-SXM4-40GB", "Tesla T4", "Tesla T4"))
    scenario: Any = SimpleNamespace(fleet=fleet)
    slices = ("n-1-gpu0-7g.40gb-0", "n-1-gpu1-whole-0", "n-1-gpu2-whole-0", "n-1-gpu2-whole-0")
    records = [replace(RECORD, slice=name) for name in slices] + [replace(RECORD, code="UNAVAILABLE")]
    result = LoadResult(tuple(records), 0.0, 10.0, 7, "d")
    assert run_policy.device_type_shares(scenario, result) == {"A100-SXM4-40GB": 0.25, "Tesla T4": 0.75}
    assert run_policy.device_type_shares(scenario, replace(result, records=())) == {}


def test_the_mix_is_told_before_in_and_after_the_spike() -> None:
    scenario: Any = SimpleNamespace(load=OfferedLoad(peak_from=0.2, peak_until=0.6), duration_s=10.0)
    answered = {"small": [0, 0, 3, 3, 3, 3, 0, 0, 0, 0], "large": [2, 2, 1, 1, 1, 1, 0, 0, 0, 0]}
    assert run_policy.mixes(DemoSeries("p", answered_by_variant=answered), scenario) == {
        "before": {"large": 1.0},
        "in": {"small": 0.75, "large": 0.25},
        "after": {},
    }


def test_the_slo_is_measured_in_rounds_of_the_same_load() -> None:
    points = ((0.0, 26.0), (3.0, 26.0), (4.0, 40.0), (8.0, 26.0))
    three = run_policy.repeated(points, 3)
    assert three[:4] == points
    assert three[-1] == (24.0, 26.0)
    assert RateProfile(three).expected == pytest.approx(3 * RateProfile(points).expected)


def test_a_stumble_of_a_second_does_not_decide_the_slo() -> None:
    """Every tenth request takes 80 ms; then all of one second take four times as long."""
    calm = [
        replace(RECORD, intended_s=n / 40, latency_ms=80.0 if n % 10 == 0 else 40.0 + n % 7) for n in range(24 * 40)
    ]
    stumbled = [replace(r, latency_ms=4 * r.latency_ms) if 9 <= r.intended_s < 10 else r for r in calm]
    found = [
        run_policy.median_of_rounds(LoadResult(tuple(records), 0.0, 24.0, 7, ""), 8.0, 95.0)
        for records in (calm, stumbled)
    ]
    assert found == [80.0, 80.0]
    once = LoadResult(tuple(stumbled[: 15 * 40]), 0.0, 15.0, 7, "")
    assert run_policy.median_of_rounds(once, 15.0, 95.0) > 150, "as one measurement of 15 s it does"


def test_a_change_that_a_newer_one_took_over_ends_there_and_counts_no_further() -> None:
    records = tuple(replace(RECORD, intended_s=float(n)) for n in range(10))
    result = LoadResult(records, 1000.0, 10.0, 7, "d")
    changes = [
        PlanChange(DecisionRecord("1.1", trigger="load"), 1001.0),
        PlanChange(DecisionRecord("1.2", trigger="carbon"), 1003.5, done_at_s=1005.5, slices_text="gpu0: asleep"),
        PlanChange(DecisionRecord("1.3", trigger="slo"), 1008.5),
        PlanChange(DecisionRecord("1.4", trigger="slo"), 1010.5),
    ]
    events = run_policy.plan_events(changes[:3], result, 10)
    assert [(e.superseded, e.took_s, e.answered) for e in events] == [
        (True, None, 3),
        (False, 2.0, 2),
        (False, None, 1),
    ]
    late = run_policy.plan_events(changes, result, 10)
    assert [e.superseded for e in late] == [True, False, True], "the last one began after the run, and took over"

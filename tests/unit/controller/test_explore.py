"""Explorations on a fake system: a planner with a list of candidates, rollouts that take two ticks, a steady load."""

from collections import deque
from dataclasses import dataclass, field, replace

import pytest

from controller.explore.core.candidate_measurement import Cost, cost, metered_until_s
from controller.explore.core.exploration import Explorer
from controller.explore.core.exploration_state import ExplorationTotals, Phase
from controller.loop.decision_records import replay
from controller.loop.planner_runner import PlannerRunner
from controller.observe.core.load_windows import LoadWindows
from controller.observe.core.triggers import Trigger
from controller.rollout.core.ports import NullPorts
from controller.settings import ExploreSettings
from controller.thresholds import WindowSettings
from tests.support.plans import CATALOG, SMALL, plan_of, planned
from tests.unit.controller import views
from trefoil.core.brains import Candidate, Decision
from trefoil.core.carbon import CarbonReading
from trefoil.core.common import Revision
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow
from trefoil.core.energy import EnergyMethod, EnergySample
from trefoil.core.errors import InvalidInput
from trefoil.core.latency import build_histogram
from trefoil.core.plan import DecisionRecord, Plan, RolloutState
from trefoil.runtime import codec
from trefoil.runtime.clock import ManualClock

TICK_S = 0.5
WATTS = 100.0  # of each of the two GPUs
RATE = 20
CARBON = Trigger("carbon", "intensity 300 g/kWh is +50 %")
FIRST = plan_of(planned("4g.20gb", variant=SMALL), planned("3g.20gb", 4))
SECOND = plan_of(planned("4g.20gb"), planned("3g.20gb", 4, SMALL))
OVERLAPPING = plan_of(planned("4g.20gb"), planned("7g.40gb"))


class Remembers:
    """Asks for its candidates in turn, then decides for the one with the fewest joules within the SLO."""

    def __init__(self, *plans: Plan) -> None:
        self._plans = plans
        self.told: list[list[float]] = []
        self.costs: list[tuple[float, float, int]] = []

    def asks(self, view) -> bool:
        return True

    def plan(self, view, rng) -> Decision:
        raise AssertionError("it measures")

    def ask(self, view, rng):
        if len(self.told) < len(self._plans):
            return Candidate(self._plans[len(self.told)], f"number {len(self.told)}", 30.0)
        good = [(joules, i) for i, (attained, joules) in enumerate(self.told) if attained >= 0.95]
        if not good:
            return Decision(None, "nothing meets the SLO", float("inf"))
        return Decision(self._plans[min(good)[1]], f"best of {len(self.told)}", float("inf"))

    def tell(self, candidate, measurement) -> None:
        (one,) = measurement.measured
        self.told.append([one.slo_attainment, one.joules_per_request or 0.0])
        self.costs.append((measurement.spent_s, measurement.spent_j, measurement.violations))

    def memory(self):
        return {"told": self.told}

    def recall(self, memory) -> None:
        self.told = [list(row) for row in memory["told"]]


class FakeDisk:
    def __init__(self) -> None:
        self.files: dict[str, object] = {}

    def load_plain(self, name):
        return self.files.get(name, {})

    def save_later(self, name, value) -> None:
        self.files[name] = value


class FakeMeter:
    """Two GPUs at constant power, one sample a second."""

    def __init__(self) -> None:
        self.held: deque[EnergySample] = deque()
        self.from_s = float("inf")

    def hold(self, from_s: float) -> None:
        self.from_s = from_s

    def metered_until_s(self, devices) -> float:
        return metered_until_s(self.held, devices)

    def cost(self, families, starts_s: float, ends_s: float, pue: float) -> Cost:
        readings = (CarbonReading(views.SERIES, 0.0, 1e9, 360.0, observed_at_s=0.0),)
        return cost(self.held, readings, families, starts_s, ends_s, pue)

    def sample(self, starts_s: float, ends_s: float) -> None:
        for i in range(2):
            joules = WATTS * (ends_s - starts_s)
            one = EnergySample("node0", f"node0/gpu{i}", 0, starts_s, ends_s, joules, EnergyMethod.NVML_COUNTER)
            self.held.append(replace(one, idle_j=joules))


@dataclass
class Bench(NullPorts):
    """Ports, control and the system in one; `tick()` is half a second of it."""

    planner: Remembers
    clock: ManualClock = field(default_factory=lambda: ManualClock(1000.0))
    disk: FakeDisk = field(default_factory=FakeDisk)
    meter: FakeMeter = field(default_factory=FakeMeter)
    latency_ms: float = 30.0
    rate: int = RATE
    answers: bool = True
    halts: bool = False

    def __post_init__(self) -> None:
        self.windows = LoadWindows(WindowSettings())
        self.current: Plan | None = replace(views.PLAN, revision=Revision(1, 1))
        self.deployed: list[Plan] = []
        self.records: list[DecisionRecord] = []
        self.decided: list[Decision] = []
        self.rolling = 0
        self.seq = 0
        self._late: deque[LoadWindow] = deque()
        self.explorer = self.explorers()

    def explorers(self) -> Explorer:
        self.planner_runner = PlannerRunner(self.planner, "fake", self.disk, self.clock, 10.0)
        totals = ExplorationTotals(**self.disk.load_plain("explorations"))
        live, settings = self.planner_runner.live, ExploreSettings()
        return Explorer(live, self.windows, self.meter, settings, self.clock, totals, self, self)

    # ports and control

    def require_room(self) -> None: ...

    def next_seed(self) -> int:
        return 7

    async def think(self, view, seed, *, ask=False):
        return await self.planner_runner.call(view, seed, ask)

    async def compute(self, function):
        return function()

    def tell(self, candidate, measurement) -> None:
        self.planner_runner.tell(candidate, measurement)

    def save_memory(self) -> None:
        self.planner_runner.save()

    def save_later(self, name, value) -> None:
        self.disk.save_later(name, value)

    def evaluated(self, trigger, evaluation) -> None: ...

    async def record_candidate(self, view, trigger, answer, refusal) -> Plan:
        self._record(view, trigger, answer)
        return replace(answer.step.plan, exploration=True)

    async def deploy(self, plan: Plan) -> Plan:
        return self._deploy(plan)

    async def conclude(self, view, trigger, answer, decision, versions) -> Plan | None:
        self._record(view, trigger, answer)
        self.decided.append(decision)
        if decision.plan is not None:
            self._deploy(replace(decision.plan, exploration=False))
        return self.current

    def rolled(self) -> tuple[RolloutState, str]:
        if self.rolling > 0:
            return RolloutState.APPLYING, ""
        return (RolloutState.HALTED, "not READY after 90 s") if self.halts else (RolloutState.DONE, "")

    def _deploy(self, plan: Plan) -> Plan:
        number = (self.current.revision.number if self.current else 0) + 1
        self.current = replace(plan, revision=Revision(1, number))
        self.deployed.append(self.current)
        self.rolling = 2
        return self.current

    def _record(self, view, trigger, thought) -> None:
        made = thought.step.plan
        versions = {"plan": made.content_digest if made else "", **thought.versions}
        self.records.append(
            DecisionRecord(
                id=str(len(self.records)),
                trigger=trigger.cause,
                view_json=codec.to_json(view),
                seed=thought.seed,
                versions=versions,
            )
        )

    # the system

    def view(self):
        now = views.view(now_s=self.clock.now_s(), rate=float(self.rate), current=self.current)
        return replace(now, fleet=views.running(self.current or views.PLAN))

    async def begin(self, trigger: Trigger = CARBON) -> None:
        await self.explorer.begin(self.view(), trigger, self.current, self.rolled())

    async def stop(self, why: str) -> None:
        await self.explorer.stop(self.view(), why, self.current)

    async def tick(self, seconds: float = TICK_S) -> None:
        before_s = self.clock.now_s()
        self.clock.move(seconds)
        self.rolling = max(0, self.rolling - 1)
        self._late.append(self._window(before_s, self.clock.now_s()))
        if len(self._late) > 3:  # windows come later than what they tell of
            self.windows.add(self._late.popleft(), CATALOG)
        self.meter.sample(before_s, self.clock.now_s())
        self.windows.forget(self.clock.now_s())
        if self.explorer.run is not None:
            await self.explorer.step(self.view(), self.current, self.rolled())

    def _window(self, starts_s: float, ends_s: float) -> LoadWindow:
        self.seq += 1
        n = round(self.rate * (ends_s - starts_s))
        within = n if self.latency_ms <= 100 else 0
        key = LoadKey("toy", "toy-l", views.PARTS[0].key)
        answered = (
            LoadCell(key, answered=n, items=n, within_slo=within, latency=build_histogram([self.latency_ms] * n))
            if n
            else LoadCell()
        )
        cells = (LoadCell(LoadKey("toy"), arrived=n), *((answered,) if self.answers and n else ()))
        return LoadWindow("d", 0, self.seq, starts_s, ends_s, cells=cells)

    async def until(self, phase: Phase | None, seconds: float = 120.0) -> None:
        for _ in range(int(seconds / TICK_S)):
            run = self.explorer.run
            if (run.phase if run else None) == phase:
                return
            await self.tick()
        raise AssertionError(f"never {phase}: {self.explorer.text()}")


@pytest.fixture
def bench() -> Bench:
    return Bench(Remembers(FIRST, SECOND))


async def test_each_candidate_is_deployed_measured_told_and_the_best_one_stays(bench: Bench) -> None:
    await bench.begin()
    assert bench.current.exploration
    await bench.until(None)
    assert [p.content_digest for p in bench.deployed] == [p.content_digest for p in (FIRST, SECOND, FIRST)]
    assert not bench.current.exploration
    assert [attained for attained, _ in bench.planner.told] == [1.0, 1.0]
    # Two GPUs at 100 W for 20 requests a second: 10 J a request, whatever the interval.
    assert [joules for _, joules in bench.planner.told] == pytest.approx([10.0, 10.0], rel=1e-6)
    totals = bench.explorer.totals
    assert (totals.explorations, totals.evaluations, totals.refused, totals.broken_off) == (1, 2, 0, 0)
    assert totals.spent_s == pytest.approx(bench.clock.now_s() - 1000.0)
    assert totals.spent_j == pytest.approx(2 * WATTS * totals.spent_s)
    assert totals.violations == 0
    spent_s, spent_j, _ = bench.planner.costs[0]
    assert spent_s >= 200 / RATE + ExploreSettings().settle_s, "rollout, settling and 200 requests"
    assert spent_j == pytest.approx(2 * WATTS * spent_s)


async def test_the_requests_measured_are_those_of_the_candidate_alone(bench: Bench) -> None:
    bench.latency_ms = 90.0
    await bench.begin()
    await bench.until(Phase.MEASURE)
    bench.latency_ms = 30.0
    await bench.until(Phase.ASK)
    told = bench.explorer.run.now.measurement
    assert told.measured[0].latency_ms_p95 < 40.0
    assert told.measured[0].window_s == pytest.approx(200 / RATE, abs=1.0)


async def test_every_step_replays_from_its_record(bench: Bench) -> None:
    await bench.begin()
    await bench.until(None)
    assert len(bench.records) == 3
    assert [replay(r, Remembers(FIRST, SECOND)).equal for r in bench.records] == [True] * 3
    without = replace(bench.records[1], versions={k: v for k, v in bench.records[1].versions.items() if k != "memory"})
    assert not replay(without, Remembers(FIRST, SECOND)).equal, "what was told before decides"
    for memory in ("{", "[1]"):
        torn = replace(bench.records[1], versions={**bench.records[1].versions, "memory": memory})
        with pytest.raises(InvalidInput, match=r"versions\.memory"):
            replay(torn, Remembers(FIRST, SECOND))


async def test_a_plan_that_is_not_legal_is_refused_told_and_never_deployed(bench: Bench) -> None:
    bench.planner = Remembers(OVERLAPPING, SECOND)
    bench.explorer = bench.explorers()
    await bench.begin()
    await bench.until(None)
    assert [p.content_digest for p in bench.deployed] == [SECOND.content_digest] * 2
    assert bench.planner.told[0] == [0.0, 0.0]
    assert bench.explorer.totals.refused == 1
    assert "two slices overlap" in bench.explorer.text()


async def test_a_p95_beyond_the_bound_ends_a_measurement_and_goes_back(bench: Bench) -> None:
    await bench.begin()
    await bench.until(Phase.MEASURE)
    bench.latency_ms = 500.0  # the SLO is 100 ms, the bound four times that
    await bench.until(Phase.BACK, 10.0)
    assert bench.current.content_digest == views.PLAN.content_digest
    assert bench.planner.told == [[0.0, 0.0]]
    bench.latency_ms = 30.0
    await bench.until(None)
    assert bench.decided[0].plan.content_digest == SECOND.content_digest
    assert bench.explorer.totals.broken_off == 1
    assert bench.explorer.totals.violations > 0


async def test_a_queue_that_grows_ends_even_a_rollout(bench: Bench) -> None:
    await bench.begin()
    bench.rolling = 1000
    bench.answers = False
    await bench.until(Phase.BACK, 10.0)
    assert bench.explorer.run.now.outcome == "broken_off"
    # 4 s of arrivals would be 80, a quarter of the route's queue is 25
    assert "more than 25" in bench.explorer.run.now.why


async def test_what_a_rollout_leaves_waiting_is_judged_once_it_has_settled(bench: Bench) -> None:
    roomy = replace(FIRST, routes=tuple(replace(route, queue_requests_max=10_000) for route in FIRST.routes))
    bench.planner = Remembers(roomy, SECOND)
    bench.explorer = bench.explorers()
    await bench.begin()
    bench.rolling, bench.answers = 20, False
    while bench.explorer.run.phase is Phase.ROLL:  # ten seconds of arrivals wait, four would be too many
        await bench.tick()
    assert bench.explorer.run.phase is Phase.SETTLE
    await bench.until(Phase.MEASURE, 15.0)
    await bench.until(Phase.BACK, 2.0)
    assert "requests of toy wait, more than 80" in bench.explorer.run.now.why


async def test_what_waits_before_anything_serves_is_not_held_against_the_first_candidate(bench: Bench) -> None:
    bench.current, bench.answers = None, False
    await bench.begin()
    for _ in range(12):  # six seconds of requests: more than may wait
        bench.rolling = 2
        await bench.tick()
    assert bench.explorer.run.phase is Phase.ROLL
    assert bench.explorer.totals.broken_off == 0
    for _ in range(40):  # it is up and settled, and nothing answers
        await bench.tick()
    assert bench.explorer.totals.broken_off >= 1
    assert "wait, more than" in bench.explorer.text()


async def test_a_halted_rollout_is_told_and_left(bench: Bench) -> None:
    bench.halts = True
    await bench.begin()
    await bench.until(Phase.BACK, 10.0)
    bench.halts = False
    await bench.until(None)
    assert bench.planner.told[0] == [0.0, 0.0]
    assert bench.current.content_digest == SECOND.content_digest


async def test_an_operator_ends_it_and_the_plan_of_before_is_back(bench: Bench) -> None:
    await bench.begin()
    await bench.until(Phase.MEASURE)
    await bench.stop("frozen")
    assert bench.explorer.run is None
    assert bench.current.content_digest == views.PLAN.content_digest
    assert not bench.current.exploration
    assert "interrupted: frozen" in bench.explorer.text()
    assert bench.planner.told == [], "nothing is told of what was not measured"
    assert bench.windows.hold_from_s == float("inf")


async def test_after_a_loss_what_was_measured_within_the_slo_is_gone_back_to(bench: Bench) -> None:
    await bench.begin(Trigger("loss", "node0/gpu1 is gone"))
    await bench.until(Phase.ASK)
    await bench.tick()
    await bench.stop("frozen")
    assert bench.current.content_digest == FIRST.content_digest


async def test_a_new_trigger_begins_anew_from_a_good_plan(bench: Bench) -> None:
    await bench.begin()
    await bench.until(Phase.MEASURE)
    await bench.begin(Trigger("objective", "number 2"))
    assert bench.explorer.run.before.content_digest == views.PLAN.content_digest
    assert bench.explorer.totals.explorations == 2
    await bench.until(None)
    assert bench.current.content_digest == FIRST.content_digest


async def test_a_pause_begins_the_measurement_anew(bench: Bench) -> None:
    await bench.begin()
    await bench.until(Phase.MEASURE)
    began_s = bench.explorer.run.settled_s
    await bench.tick(8.0)  # Redis was down: nobody looked
    assert bench.explorer.run.phase == Phase.SETTLE
    await bench.until(Phase.ASK)
    assert bench.explorer.run.found[0].starts_at_s > began_s + 8.0


async def test_without_a_load_it_waits(bench: Bench) -> None:
    bench.rate = 0
    await bench.begin()
    await bench.until(Phase.MEASURE)
    for _ in range(2000):
        await bench.tick()
    assert bench.explorer.run.phase == Phase.MEASURE
    bench.rate = RATE
    await bench.until(None)
    assert bench.planner.told[0][0] == 1.0


async def test_it_ends_in_time_whatever_its_planner_wants(bench: Bench) -> None:
    bench.planner = Remembers(*[FIRST, SECOND] * 100)
    bench.explorer = bench.explorers()
    await bench.begin()
    await bench.until(None, 1000.0)
    assert "exploration_max_s" in bench.explorer.text()
    assert bench.current.content_digest == views.PLAN.content_digest


async def test_memory_and_costs_outlive_the_controller(bench: Bench) -> None:
    await bench.begin()
    await bench.until(Phase.ASK)
    bench.explorer.abandon("the role was lost")
    bench.planner = Remembers(FIRST, SECOND)
    again = bench.explorers()
    assert len(bench.planner.told) == 1
    assert again.totals == ExplorationTotals(**bench.disk.files["explorations"])
    assert again.totals.evaluations == 1


async def test_what_cannot_be_recalled_is_begun_anew(bench: Bench) -> None:
    bench.disk.files["planner_memory"] = {"planner": "fake", "memory": {"of": "another version"}}
    bench.explorer = bench.explorers()
    await bench.begin()
    assert bench.explorer.run.phase == Phase.ROLL


async def test_a_decision_to_keep_makes_the_candidate_the_plan(bench: Bench) -> None:
    bench.planner = Remembers(FIRST)
    bench.explorer = bench.explorers()
    bench.latency_ms = 150.0
    await bench.begin()
    await bench.until(None)
    assert bench.decided[0].why == "nothing meets the SLO"
    assert bench.current.content_digest == FIRST.content_digest
    assert not bench.current.exploration

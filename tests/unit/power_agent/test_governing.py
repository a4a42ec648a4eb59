"""A device's governor: made by name, stepped when the plan changes and at its time, kept inside the plan's range."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from power_agent.clocks.core.clock_control import Ability, ClockRange, Lever, PowerLimit
from power_agent.clocks.core.device_governor import DeviceGovernor
from power_agent.clocks.core.slice_latencies import FIRST_TOKENS, ClockPeriod, SliceLatencies
from power_agent.governors import GOVERNORS, governor_of
from power_agent.governors.miad import Miad, MiadSettings
from power_agent.publisher import Publisher
from tests.support.clock_bench import GPU, Bench, clock_plan
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from trefoil.core.brains import ClockDecision, GovernedStage, GovernorView
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow, ScaleSignal, StreamCounts
from trefoil.core.device_types import device_type
from trefoil.core.errors import PlanError, SettingError
from trefoil.core.fleet import ClockLease, Hosted, SliceKey
from trefoil.core.latency import build_histogram
from trefoil.core.objective import Objective
from trefoil.core.parts import Kind, load_part
from trefoil.core.plan import PlannedDevice, PlannedSlice
from trefoil.core.power import clock_under, dynamic_w

STAIRS = "tests.support.seam.governor:Stairs"
load_part(Kind.GOVERNOR, STAIRS, GOVERNORS)
CLOCKS = tuple(range(210, 1411, 15))
A100 = "A100-SXM4-40GB"
ABILITY = Ability(GPU, A100, CLOCKS)


class Wild:
    """Wants what no device has."""

    def step(self, view: GovernorView) -> ClockDecision:
        return ClockDecision(5000 if view.now_s < 1 else 1, "wild", view.now_s + 1, scale_out=False)


def planned(low: int = 0, high: int = 0, governor: str = "") -> PlannedDevice:
    return PlannedDevice(GPU, clock_min_mhz=low, clock_max_mhz=high, governor=governor)


@pytest.mark.parametrize(
    ("low", "high", "locks"),
    [(0, 0, None), (0, 900, ClockRange(210, 900)), (600, 0, ClockRange(600, 1410)), (607, 907, ClockRange(600, 900))],
)
def test_fixed_and_a_plan_that_names_none_hold_the_plans_range(low, high, locks):
    for name in ("", "fixed"):
        one = DeviceGovernor("", {})
        assert one.range(planned(low, high, name), ABILITY, 0, True, 0.0) == locks
        assert one.next_s == float("inf")
    others = DeviceGovernor("", {"statistic": "p95"})  # of a policy whose plan leaves this device out
    assert others.range(planned(low, high), ABILITY, 0, True, 0.0) == locks


def test_a_governor_is_stepped_when_the_plan_changes_and_at_its_time_and_not_between():
    one, plan = DeviceGovernor("", {"step_mhz": 300}), planned(0, 1200, STAIRS)
    ceilings = [one.range(plan, ABILITY, 0, True, t).max_mhz for t in (0.0, 0.5, 1.0, 1.9, 2.0)]
    assert ceilings == [1200, 1200, 900, 900, 600]
    assert one.range(replace(plan, clock_min_mhz=15), ABILITY, 0, True, 2.1).max_mhz == 300


def test_what_a_governor_wants_stays_inside_the_planned_range():
    wild = "tests.unit.power_agent.test_governing:Wild"
    load_part(Kind.GOVERNOR, wild, GOVERNORS)
    one, plan = DeviceGovernor(wild, {}), planned(600, 900, "fixed")
    assert one.range(plan, ABILITY, 0, True, 0.0) == ClockRange(600, 900)
    assert one.range(plan, ABILITY, 0, True, 1.5) == ClockRange(600, 600)


def test_a_device_that_cannot_lock_is_not_governed():
    one = DeviceGovernor(STAIRS, {})
    assert one.range(planned(), replace(ABILITY, cannot_lock="an old one"), 0, True, 0.0) is None
    assert one.decision is None


ONE, OTHER = SliceKey(GPU, "3g.20gb", 0, 4), SliceKey(GPU, "2g.10gb", 4, 2)
SERVING = tuple(PlannedSlice(key, (Hosted("digits", "m", 1), Hosted("words", "s", 2))) for key in (OTHER, ONE))


def window(*cells: tuple[SliceKey, str, list[float]], length_s: float = 0.5, seq: int = 1) -> LoadWindow:
    """Latencies [ms] by slice and family, as a worker on another clock reports them."""
    found = [
        LoadCell(LoadKey(family, "m", key), answered=len(ms), latency=build_histogram(ms)) for key, family, ms in cells
    ]
    starts_s = 5e9 + seq * length_s
    return LoadWindow(
        "d", 0, seq, starts_s, starts_s + length_s, cells=(LoadCell(LoadKey("digits"), arrived=3), *found)
    )


SINCE_10 = [ClockPeriod(10.0, 1410)]


def test_a_governor_sees_who_is_hosted_and_how_late_each_slice_was_since_its_clock_is_known():
    row = ProfileRow(A100, "3g.20gb", "digits", "m", 0, 1, 1410, (), 20.0, 22.0, 23.0, 50.0, 5.0, 100.0, 100)
    slower = replace(row, clock_mhz=735, clock_sensitivity=0.5)  # of its own clock: of the highest it is 0.3
    full, small = replace(row, clock_sensitivity=0.3), replace(row, variant="s", clock_sensitivity=0.7)
    catalog = Catalog((), (full, slower, small))
    seen = SliceLatencies(catalog)
    seen.slo_ms = {"digits": 75.0}
    plan = replace(planned(), slices=SERVING)
    for at_s in (10.0, 10.5, 11.0):
        seen.add_window(window((ONE, "digits", [at_s, 2 * at_s]), (OTHER, "words", [7.0])), at_s)
    found = {(stage.family, stage.samples): stage for stage in seen.stages(plan, A100, SINCE_10, 10.0)}
    assert sorted(found) == [("digits", 0), ("digits", 4), ("words", 0), ("words", 2)], "of each slice its own"
    digits = found["digits", 4]
    assert (digits.slo_ms, digits.sensitivity_weight, digits.observed_at_s) == (75.0, 0.3, 11.0)
    assert digits.latency_ms == pytest.approx((10.5 + 21 + 11 + 22) / 4), "the first window began before"
    assert digits.latency_ms_p95 == pytest.approx(22.0, rel=0.03)
    assert found["digits", 0].sensitivity_weight == 1.0, "nobody profiled it there"
    seen.add_window(window((ONE, "digits", [50.0] * 40)), 11.5)
    (digits,) = (
        stage for stage in seen.stages(plan, A100, SINCE_10, 10.0) if stage.family == "digits" and stage.samples
    )
    assert (digits.latency_ms, digits.samples) == (50.0, 40), "the newest are enough: what is new is not averaged away"
    seen.add_window(window(), 30.0)
    assert not any(stage.samples for stage in seen.stages(plan, A100, SINCE_10, 10.0)), "what is long ago is forgotten"
    assert seen.heard_s == 30.0


def test_first_tokens_that_come_too_late_raise_the_clock_though_the_later_ones_are_in_time():
    """Slow steps fill all places; then prompts wait."""
    terms = {"tpot_ms": 40.0, "tpot_quantile": 0.95, "ttft_ms": 500.0, "ttft_quantile": 0.9}
    device = replace(planned(), slices=SERVING)
    cell = next(each for each in window((ONE, "digits", [600.0])).cells if each.key.slice)

    def found(ttft_ms: float) -> ClockDecision:
        seen, governor = SliceLatencies(Catalog((), ())), Miad(MiadSettings(statistic="slo", slack=0.0))
        seen.aim([Objective("digits", slo_ms=9000.0, slo_quantile=0.95, **terms)], {})
        streams = StreamCounts(build_histogram([ttft_ms] * 40), build_histogram([20.0] * 40))
        seen.add_window(LoadWindow("d", 0, 1, 10.0, 10.5, cells=(replace(cell, streams=streams),)), 11.0)
        stages = seen.stages(device, A100, SINCE_10, 10.0)
        assert {one.slo_ms for one in stages if one.family == "digits"} == {40.0}
        view = GovernorView(12.0, GPU, 1410, (210, 1410), CLOCKS, stages, True, 0.0)
        governor.step(replace(view, now_s=11.0))
        return governor.step(view)

    assert found(100.0).why.startswith("DOWN: ")
    assert found(720.0).why.startswith(f"UP: digits{FIRST_TOKENS} at 7")


def test_a_family_with_an_objective_of_tpot_is_governed_by_it_and_another_by_latency():
    seen, classes = SliceLatencies(Catalog((), ())), {"digits": (90.0, 0.9), "words": (80.0, 0.9)}
    timed = Objective("digits", slo_ms=900.0, slo_quantile=0.95, tpot_ms=40.0, tpot_quantile=0.99)
    seen.aim([timed, Objective("words", slo_quantile=0.95)], classes)
    cells = window((ONE, "digits", [500.0, 600.0]), (ONE, "words", [50.0])).cells
    streams = StreamCounts(tpot=build_histogram([30.0, 34.0, 44.0]))
    seen.add_window(LoadWindow("d", 0, 1, 10.0, 10.5, cells=(*cells, replace(cells[1], streams=streams))), 11.0)
    stages = {
        one.family: one for one in seen.stages(replace(planned(), slices=SERVING), A100, SINCE_10, 10.0) if one.samples
    }
    digits, words = stages["digits"], stages["words"]
    assert (digits.slo_ms, digits.slo_quantile, digits.samples) == (40.0, 0.99, 3)
    assert digits.latency_ms == pytest.approx(36.0)
    assert digits.attained == pytest.approx(2 / 3)
    assert (words.slo_ms, words.slo_quantile, words.latency_ms) == (80.0, 0.95, 50.0)
    assert not [name for name in stages if name.endswith(FIRST_TOKENS)], "no TTFT is promised"
    seen.aim([replace(timed, tpot_ms=0.0, tpot_quantile=0.0)], classes)
    assert (seen.slo_ms["digits"], seen.slo_quantile["digits"]) == (900.0, 0.95)
    left = {one.family for one in seen.stages(replace(planned(), slices=SERVING), A100, SINCE_10, 10.0) if one.samples}
    assert left == {"words"}, "times from token to token are not latencies"


def governed(at_s: float, one: DeviceGovernor, plan: PlannedDevice, honoured: bool = True) -> int:
    return one.range(plan, ABILITY, 0, honoured, at_s).max_mhz


def test_the_family_that_is_nearest_its_slo_decides_for_the_whole_gpu():
    seen, plan = SliceLatencies(Catalog((), ())), replace(planned(0, 1410, "miad"), slices=SERVING)
    seen.slo_ms = {"digits": 100.0, "words": 100.0}
    for literal, then in ((False, [1410, 1410, 1410]), (True, [1410, 1320, 1410])):  # 93 ms are 99 there
        one, clocks = DeviceGovernor("", {"literal": literal}, seen), []
        for second in range(3):
            seen.add_window(
                window((ONE, "digits", [20.0] * 9), (ONE, "words", [93.0] * 9), length_s=0.4), 100.0 + second
            )
            clocks.append(governed(100.0 + second, one, plan))
        assert clocks == then
        seen.add_window(window((ONE, "digits", [20.0] * 9), (ONE, "words", [99.0] * 40), length_s=0.4), 103.0)
        assert governed(103.0, one, plan) == 1410, "one that is late has all of it sped up"


def test_no_window_for_two_seconds_is_the_top_of_the_range():
    seen, plan = SliceLatencies(Catalog((), ())), replace(planned(0, 1200, "miad"), slices=SERVING)
    seen.slo_ms = {"digits": 100.0}
    one, clocks = DeviceGovernor("", {}, seen), []
    for second in range(8):
        if second < 4:
            seen.add_window(window((ONE, "digits", [20.0] * 9)), float(second))
        clocks.append(governed(float(second), one, plan))
    assert clocks == [1200, 1110, 1020, 930, 840, 750, 1200, 1200]


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("turbo", {}, r"governor = 'turbo': no such governor. Remedy: .*one of: fixed, miad, or module:Class"),
        ("fixed", {"step_mhz": 3}, r"governor setting step_mhz = 3: fixed has no such setting"),
        ("nowhere:X", {}, r"governor = 'nowhere:X': no such governor.*own_parts.governor"),
    ],
)
def test_an_unknown_governor_or_setting_is_refused(name, settings, says):
    with pytest.raises(SettingError, match=says):
        governor_of(name, settings)


async def test_the_keeper_locks_what_the_governor_wants_as_time_passes_and_refuses_one_that_is_not_there(tmp_path):
    bench = Bench(tmp_path)
    plan = clock_plan(max_mhz=1200)
    governed = replace(plan, devices=tuple(replace(d, governor=STAIRS) for d in plan.devices))
    await bench.start(governed)
    await bench.pass_s(0.0)
    assert bench.gpus.locked == (210, 1200)
    await bench.pass_s(1.1)
    assert bench.gpus.locked == (210, 1185)
    await bench.pass_s(1.1)
    assert bench.gpus.locked == (210, 1170)
    unknown = replace(plan, devices=tuple(replace(d, governor="turbo") for d in plan.devices))
    with pytest.raises(PlanError, match=r"device node0/gpu0: governor = 'turbo': no such governor. Remedy: .*one of: "):
        bench.keeper.refuse(unknown)
    await bench.end()
    assert bench.gpus.locked is None


async def test_a_governor_that_rests_needs_none_of_the_settings_that_the_agent_has_for_governors(tmp_path):
    bench = Bench(tmp_path)
    await bench.start(clock_plan(max_mhz=1200))
    bench.node.settings = bench.node.settings.model_copy(update={"parts": {"governor": {"statistic": "slo"}}})
    bench.keeper.refuse(clock_plan(max_mhz=1200))
    fixed = replace(clock_plan(), devices=tuple(replace(d, governor="fixed") for d in clock_plan().devices))
    with pytest.raises(PlanError, match="statistic = 'slo': fixed has no such setting"):
        bench.keeper.refuse(fixed)
    await bench.end()


class Serving:
    """An agent whose plan names `miad`, on a Redis to which a dispatcher reports one family every half second.

    `latency_ms` is what it takes at 1200 MHz; None: no dispatcher is there. With a limit the plan gives that [W].
    """

    def __init__(self, folder: Path, limit_w: float = 0.0) -> None:
        self.bench, hosted = Bench(folder), (Hosted("toy", "s", 1),)
        self.server = Server(self.bench.clock)
        self.bench.state = self.state = state_on(self.server, "default", self.bench.clock)
        plan = clock_plan(limit_w=limit_w) if limit_w else clock_plan(0, 1200)
        slices = (PlannedSlice(ONE, hosted),)
        self.plan = replace(plan, devices=tuple(replace(d, governor="miad", slices=slices) for d in plan.devices))
        self.latency_ms: float | None = 20.0

    async def start(self) -> None:
        lease = await self.state.acquire("controller", "c", 60.0)
        assert lease is not None
        await self.state.put(lease, self.state.keys.objective("toy"), Objective("toy", slo_ms=100.0, slo_quantile=0.95))
        await self.bench.start(self.plan)

    @property
    def clock_mhz(self) -> int:
        """Clock that the board runs at, all its SMs busy."""
        gpus = self.bench.gpus
        under_mhz = clock_under(gpus.kind, gpus.limit_w, dynamic_w(gpus.kind))
        return min(under_mhz, (gpus.locked or (0, under_mhz if gpus.limit_w < 400.0 else 1200))[1])

    async def pass_s(self, seconds: float) -> list[int]:
        """Let time pass; the upper ends that were locked meanwhile, each once."""
        seen: list[int] = []
        for _ in range(int(seconds * 10)):
            tenths = round(self.bench.clock.monotonic_s() * 10)
            if self.latency_ms is not None and tenths % 5 == 0:
                key = self.state.keys.load("d", 0)
                found = window((ONE, "toy", [self.latency_ms * 1200 / self.clock_mhz] * 9), seq=tenths // 5)
                await self.state.append_unfenced(key, found)
            await self.bench.pass_s(0.1)
            locked = self.bench.gpus.locked
            seen += [locked[1]] if locked and locked[1] not in seen[-1:] else []
        return seen


async def test_the_agent_steps_down_once_a_second_by_what_dispatchers_report_and_doubles_within_two(tmp_path):
    serving = Serving(tmp_path)
    await serving.start()
    found = await serving.pass_s(18)
    assert found[:4] == [1200, 1110, 1020, 930]
    assert found[-1] == 300, "20 ms at 1200 MHz are 80 there, and would be 114 a step lower"
    times_s = [at_s for at_s, name in serving.bench.gpus.calls if name == "set"]
    assert min(later - before for before, later in pairwise(times_s)) >= 1.0
    serving.latency_ms = 80.0
    assert [mhz for mhz in await serving.pass_s(2) if mhz > 300][:2] == [600, 1200], "doubled each second"
    await serving.bench.end()
    assert serving.bench.gpus.locked is None


STRAYS = [window((ONE, "toy", [6e8] * 1000), seq=seq) for seq in (0, 1, 7, 10**6)]


@pytest.mark.parametrize("worker", [("d", 0), ("nobody", 3)])
@pytest.mark.parametrize("stray", STRAYS, ids=lambda stray: str(stray.seq))
async def test_one_stray_window_lifts_no_clock(tmp_path, stray, worker):
    serving = Serving(tmp_path)
    await serving.start()
    assert (await serving.pass_s(18))[-1] == 300
    stray = replace(stray, dispatcher=worker[0], worker=worker[1])
    await serving.state.append_unfenced(serving.state.keys.load(*worker), stray)
    assert await serving.pass_s(4) == [300]
    assert serving.bench.device.scale_signal is None
    await serving.bench.end()


async def test_called_up_again_at_the_top_it_asks_for_capacity_until_that_is_over(tmp_path):
    serving = Serving(tmp_path)
    await serving.start()
    await serving.pass_s(2)
    assert serving.bench.device.scale_signal is None
    serving.latency_ms = 99.0
    await serving.pass_s(5)
    signal = serving.bench.device.scale_signal
    assert signal is not None
    assert (signal.node, signal.device, signal.families) == ("node0", GPU, ("toy",))
    assert "toy at 99.0 of 100 ms" in signal.why
    publisher = Publisher(serving.bench.node, serving.state, SimpleNamespace(ring=[]))
    await publisher.step()
    stored = await serving.state.get(serving.state.keys.scale_signal(GPU), ScaleSignal)
    assert (stored.device, stored.families, stored.why) == (GPU, ("toy",), signal.why)
    serving.latency_ms = 50.0
    await serving.pass_s(4)
    assert serving.bench.device.scale_signal is None
    await publisher.step()
    assert await serving.state.get(serving.state.keys.scale_signal(GPU), ScaleSignal) is None, "and it lapses"
    await serving.bench.end()


async def test_after_a_lease_a_lock_that_is_not_honoured_and_redis_it_is_at_the_top(tmp_path):
    serving = Serving(tmp_path)
    await serving.start()
    await serving.pass_s(6)
    assert serving.bench.gpus.locked[1] < 1000
    serving.bench.keeper.set_clocks(ClockLease(GPU, 0, 600, "somebody", 1), 3.0)
    assert (await serving.pass_s(3))[-1] == 600
    assert (await serving.pass_s(6))[:3] == [1200, 1110, 1020], "a lapsed lease: from the top, by steps"
    serving.bench.gpus.reasons, serving.bench.gpus.reading = ("software_power_cap",), 700
    assert (await serving.pass_s(3))[-1] == 1200
    assert await serving.pass_s(20) == [1200], "not honoured: what it may have, for as long as that lasts"
    assert "is not honoured: software_power_cap" in serving.bench.device.clock_drift[0]
    serving.bench.gpus.reasons = ()
    assert min(await serving.pass_s(12)) < 1000
    serving.latency_ms, serving.server.down = None, True
    assert (await serving.pass_s(4))[-1] == 1200, "nothing is heard"
    await serving.bench.end()


async def test_a_power_limit_that_the_plan_gives_is_moved_in_place_of_the_clock(tmp_path):
    serving = Serving(tmp_path, limit_w=250.0)
    await serving.start()
    gpus = serving.bench.gpus
    limits = []
    for _ in range(14):
        await serving.pass_s(1)
        limits.append(gpus.limit_w)
    assert limits[0] == 250.0, "from the top of what the plan gives"
    assert limits[:6] == sorted(limits[:6], reverse=True)
    assert min(limits) == limits[-1] == 100.0, "the least that the board takes"
    assert gpus.locked is None
    times_s = [at_s for at_s, name in gpus.calls if name == "set"]
    assert min(later - before for before, later in pairwise(times_s)) >= 1.0
    gpus.reasons = ("software_power_cap",)  # of this very limit: it is honoured
    await serving.pass_s(4)
    assert gpus.limit_w == 100.0
    serving.latency_ms = 99.0
    await serving.pass_s(3)
    assert gpus.limit_w == 250.0, "doubled each second"
    await serving.pass_s(2)
    assert serving.bench.device.scale_signal is not None
    serving.bench.crash = "after"
    serving.latency_ms = 20.0
    await serving.pass_s(5)
    assert serving.bench.crashed
    await serving.bench.kill()
    await serving.bench.start(None)
    await serving.bench.pass_s(0.2)
    assert (gpus.limit_w, serving.bench.node.journal.state.overrides) == (400.0, {})
    await serving.bench.end()


def test_a_limit_leaves_the_clock_that_its_governor_wants():
    kind = device_type(A100)
    wide = replace(ABILITY, limits_w=(100.0, 400.0), cannot_limit="")
    for name, settings, ability, plan in (
        (STAIRS, {}, wide, replace(planned(), power_limit_w=300.0)),
        (STAIRS, {}, replace(wide, cannot_lock="a guest"), planned()),
        ("miad", {"lever": "power_limit"}, wide, planned()),
    ):
        one = DeviceGovernor(name, settings)
        wishes = [one.wishes(plan, ability, 0, True, t) for t in (0.0, 1.0, 2.0)]
        assert all(found[Lever.CLOCK] is None for found in wishes)
        for found in wishes:
            wanted_mhz, limit = one.decision.clock_mhz, found[Lever.POWER_LIMIT]
            if limit not in (None, PowerLimit(300.0)):
                assert 100.0 <= limit.watts <= 400.0
                assert abs(clock_under(kind, limit.watts, dynamic_w(kind)) - wanted_mhz) <= 30
    low = replace(wide, limits_w=(100.0, 200.0))  # an operator's limit
    one = DeviceGovernor("miad", {"lever": "power_limit"})
    for t, plan in enumerate((planned(), replace(planned(), power_limit_w=400.0))):
        limit = one.wishes(plan, low, 0, True, float(t))[Lever.POWER_LIMIT]
        assert limit is None or limit.watts <= 200.0
    for ability in (ABILITY, replace(wide, type="Tesla P4")):  # no limit, or no clocks that it could stand for
        one = DeviceGovernor(STAIRS, {})
        assert one.wishes(planned(0, 900), ability, 0, True, 0.0)[Lever.CLOCK] == ClockRange(210, 900)
        assert one.wishes(planned(0, 900), ability, 0, True, 0.0)[Lever.POWER_LIMIT] is None


async def test_where_this_node_cannot_lock_clocks_the_limit_is_governed_and_without_both_nothing(tmp_path):
    serving = Serving(tmp_path)
    await serving.start()
    assert min(await serving.pass_s(4)) < 1200
    free = replace(serving.plan, devices=(replace(serving.plan.devices[0], clock_max_mhz=0),))
    serving.bench.node.set_missing("clock_lock gpu0", "the agent is not root. Remedy: run it as root")
    serving.bench.take(free)
    await serving.pass_s(6)
    assert serving.bench.gpus.locked is None
    assert serving.bench.gpus.limit_w < 400.0
    serving.bench.node.set_missing("power_limit gpu0", "the agent is not root. Remedy: run it as root")
    serving.bench.take(free)
    await serving.pass_s(2)
    calls = len(serving.bench.gpus.calls)
    assert await serving.pass_s(20) == []
    assert serving.bench.gpus.locked is None, "free, as far as that is in its power"
    assert serving.bench.gpus.limit_w == 400.0
    assert len(serving.bench.gpus.calls) == calls
    await serving.bench.end()


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_an_agent_that_dies_at_a_step_leaves_no_clock_that_its_successor_does_not_explain(tmp_path, moment):
    serving = Serving(tmp_path)
    await serving.start()
    await serving.pass_s(3)
    for _ in range(4):  # at the next step of the governor
        serving.bench.crash = moment
        await serving.pass_s(3)
        assert serving.bench.crashed
        await serving.bench.kill()
        left, (override,) = serving.bench.gpus.locked, serving.bench.node.journal.state.overrides.values()
        assert left is None or override.low <= left[0] <= left[1] <= 1200, "what is locked stands in the journal"
        await serving.bench.start(serving.plan)
        await serving.bench.pass_s(0.2)
        assert serving.bench.gpus.locked == (210, 1200), "the successor begins at the top"
        await serving.pass_s(2)
    serving.bench.crash = moment
    await serving.pass_s(3)
    await serving.bench.kill()
    await serving.bench.start(None)
    await serving.bench.pass_s(0.2)
    assert serving.bench.gpus.locked is None, "without a plan there is no reason for any"
    await serving.bench.end()


def test_by_the_slo_a_clock_falls_only_while_the_promise_is_kept_by_more_than_chance():
    def clocks(attained: float, count: int, latency_ms: float = 50.0) -> list[int]:
        stage = GovernedStage("digits", 0, 100.0, 40.0, 1.0, 0.0, 60.0, 100, 0.9, latency_ms, attained, count)
        one = Miad(MiadSettings(statistic="slo", slack=0.0))
        views = [GovernorView(float(s), GPU, 1410, (0, 0), (1300, 1350, 1410), (stage,), True, 0.5) for s in range(3)]
        return [one.step(view).clock_mhz for view in views]

    assert clocks(0.95, 1000)[-1] < 1410
    assert clocks(0.905, 100)[-1] == 1410, "within the error of a hundred answers"
    assert clocks(0.95, 1000, latency_ms=120.0)[-1] == 1410, "the objective's quantile is over the SLO"
    assert clocks(0.89, 1000)[-1] == 1410, "the last minute missed it"


def test_answers_of_another_clock_count_as_they_would_be_at_the_one_of_now():
    row = ProfileRow(A100, "7g.40gb", "digits", "l", 0, 1, 1410, (), 20.0, 22.0, 23.0, 50.0, 5.0, 100.0, 100)
    key = SliceKey(GPU, "7g.40gb", 0, 8)
    plan = PlannedDevice(GPU, slices=(PlannedSlice(key, (Hosted("digits", "l", 1),), 1),))
    for s, clocks, expected_ms in (
        (1.0, [(0.0, 1410), (5.0, 705)], 200.0),
        (0.5, [(0.0, 1410), (5.0, 705)], 150.0),
        (0.5, [(0.0, 705), (5.0, 1410)], 100.0 / 1.5),
        (0.0, [(0.0, 1410), (5.0, 705)], 100.0),
        (1.0, [(2.0, 705)], 0.0),  # its clock is not known
    ):
        latencies = SliceLatencies(Catalog((), (replace(row, clock_sensitivity=s),)))
        latencies.add({(key, "digits"): build_histogram([100.0] * 10)}, 1.0, 2.0)
        (stage,) = latencies.stages(plan, A100, [ClockPeriod(*each) for each in clocks], 120.0)
        assert stage.latency_ms == pytest.approx(expected_ms)
        assert stage.latency_ms_p95 == pytest.approx(expected_ms, rel=0.05)
    latencies.add({}, 100.0, 130.0)
    assert latencies.stages(plan, A100, [ClockPeriod(0.0, 1410)], 120.0)[0].samples == 0, (
        "what is long ago is forgotten"
    )
    assert latencies.stages(plan, A100, [ClockPeriod(0.0, 1410)], 130.0)[0].samples == 10


def test_of_few_answers_a_clock_goes_down_and_what_was_answered_by_others_is_forgotten():
    """A request a minute: with the answers of ten seconds alone the clock would stay at the top."""
    seen, plan = SliceLatencies(Catalog((), ())), replace(planned(0, 1410, "miad"), slices=SERVING)
    seen.slo_ms = {"digits": 100.0}
    one = DeviceGovernor("", {}, seen)
    clocks = []
    for second in range(12):
        answered = window((ONE, "digits", [20.0])) if second == 1 else window()
        seen.add_window(answered, float(second))
        clocks.append(governed(float(second), one, plan))
    assert clocks[1:9] == [*range(1320, 689, -90)], "by one answer, step by step"
    other = replace(plan, slices=SERVING[:1])
    seen.add_window(window(), 12.0)
    assert [governed(12.0 + second, one, other) for second in range(3)] == [1410] * 3


def test_the_share_in_time_outlives_changes_of_the_clock():
    latencies = SliceLatencies(Catalog((), ()))
    key = SliceKey(GPU, "7g.40gb", 0, 8)
    latencies.slo_ms, latencies.slo_quantile = {"digits": 100.0}, {"digits": 0.9}
    latencies.add({(key, "digits"): build_histogram([50.0] * 8 + [200.0] * 2)}, 0.0, 1.0)
    latencies.add({(key, "digits"): build_histogram([50.0] * 10)}, 1.0, 2.0)
    part = PlannedSlice(key, (Hosted("digits", "l", 1),), 1)
    (stage,) = latencies.stages(PlannedDevice(GPU, slices=(part,)), A100, [ClockPeriod(1.5, 1410)], 10.0)
    assert (stage.samples, stage.attained, stage.attained_of, stage.slo_quantile) == (0, 0.9, 20, 0.9)
    latencies.add({}, 100.0, 100.0)
    (stage,) = latencies.stages(PlannedDevice(GPU, slices=(part,)), A100, [ClockPeriod(1.5, 1410)], 10.0)
    assert stage.attained_of == 0

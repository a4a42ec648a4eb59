"""Which reading and which forecast is planned by: refused rungs, restarts, old and foreign forecasts, who is told."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carbon_feed.core.observation import Observation as CarbonObservation
from carbon_feed.reading.loop import ZoneLoop
from carbon_feed.settings import CarbonFeedSettings
from controller.forecasters.last_max import LastMax
from controller.loop.core.decision import ControlState
from controller.loop.view_metrics import set_view_metrics
from controller.observe.core.carbon_inputs import carried_when_stale, forecast_refusal, plannable_reading
from controller.observe.core.observation import Observation
from controller.observe.core.triggers import HoldTimers, evaluate_triggers, plan_basis
from controller.observe.reader import ObservationReader
from controller.service import explain
from controller.settings import CarbonSettings, ControllerSettings
from controller.thresholds import REFUSABLE, Thresholds
from tests.support.planning import digits
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from tests.unit.controller.views import PLAN
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, Quality, Rung, Series, rung_name
from trefoil.core.errors import SettingError
from trefoil.core.fleet import FleetState, NodeStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import Rollout, RolloutState
from trefoil.core.units import HOUR_S
from trefoil.runtime.clock import ManualClock
from trefoil.runtime.telemetry import Metrics

NOW_S = 1_795_000_000.0
SERIES = CarbonSettings().series
OBJECTIVE = Objective("digits", ObjectiveMode.BUDGET, 75.0, 0.95, 0.95, number=1, window_s=24 * HOUR_S)
STAND_INS = ("carried", "profile", "static", "expired")


def reading(value: float, rung: Rung = Rung.NORMAL, at_s: float = NOW_S) -> CarbonReading:
    quality = Quality.MEASURED if rung <= Rung.SECONDARY else Quality.STATIC
    why = f"neso unavailable: rung {rung.name}" if rung else ""
    return CarbonReading(
        SERIES, at_s, at_s + HOUR_S, value, quality, "neso", observed_at_s=at_s, rung=int(rung), fallback_reason=why
    )


def forecast(issued_s: float = NOW_S, hours: int = 96, series: Series = SERIES) -> CarbonForecast:
    starts = [NOW_S + i * HOUR_S for i in range(hours)]
    bands = tuple(CarbonBand(at, at + HOUR_S, 90.0, 100.0 + i, 300.0) for i, at in enumerate(starts))
    return CarbonForecast(series, "blend", issued_s, bands)


class Negative:
    """Provider of a marginal intensity of -50 g/kWh."""

    name, speedup = "negative", 1.0

    async def read(self, now_s: float) -> CarbonObservation:
        """The value of this minute."""
        starts_s = now_s // 60 * 60
        return CarbonObservation(starts_s, starts_s + 60.0, -50.0, Quality.MEASURED, self.name, "", "", starts_s, False)

    def history(self, _now_s: float, _count_max: int) -> tuple[CarbonObservation, ...]:
        """None."""
        return ()


class World:
    """What a controller sees, on a store in memory, and a feed that writes there."""

    def __init__(self, **carbon: object) -> None:
        self.clock = ManualClock(NOW_S)
        self.state = state_on(Server(self.clock), "default", self.clock)
        self.settings = ControllerSettings(carbon=CarbonSettings(**carbon), demand_initial_per_s={"digits": 20.0})
        self.restart()

    def restart(self) -> None:
        made = LastMax()
        self.seen = Observation(self.settings, self.state.keys, digits(), made, self.clock.now_s())
        self.reader = ObservationReader(self.seen, self.state, self.settings.carbon, self.clock)

    async def say(self, now: CarbonReading, ahead: CarbonForecast | None = None) -> None:
        keys = self.state.keys
        lease = await self.state.acquire("feed:demo", "feed")
        assert lease is not None
        await self.state.put(lease, keys.carbon_now(SERIES), now)
        if now.rung <= Rung.SECONDARY:
            await self.state.append(lease, keys.carbon_history(SERIES), now, 1000)
        if ahead is not None:
            await self.state.put(lease, keys.carbon_forecast(SERIES), ahead)
        await self.state.release(lease)

    async def view(self) -> PlanView:
        await self.reader.refresh()
        assert self.seen.inputs.down == ""
        return self.seen.view({"digits": OBJECTIVE}, PLAN, {}, {}, self.clock.now_s())


async def test_a_refused_rung_triggers_nothing_and_other_triggers_plan_with_the_last_allowed_reading():
    world = World(rungs_refused=STAND_INS)
    await world.say(reading(200.0))
    last = plan_basis(await world.view(), PLAN, NOW_S + 1e9)
    await world.clock.advance(60.0)
    await world.say(reading(900.0, Rung.STATIC, world.clock.now_s()))
    view = await world.view()
    assert (view.carbon.intensity_g_per_kwh, view.carbon.rung, view.carbon.observed_at_s) == (200.0, 0, NOW_S)
    assert "rung static in force (neso unavailable: rung STATIC) is refused" in view.carbon.fallback_reason
    assert "the last reading on rung normal" in view.carbon.fallback_reason
    assert world.seen.allowed_triggers(("carbon", "load"), world.clock.now_s()) == ["load"]
    triggers = world.seen.allowed_triggers(("carbon",), world.clock.now_s())
    assert evaluate_triggers(view, last, HoldTimers(), Thresholds(), triggers)[0] is None
    assert next(s for s in world.seen.input_stamps(world.clock.now_s()) if "carbon:now" in s.key).observed_at_s == NOW_S
    assert world.seen.carbon(world.clock.now_s()).intensity_g_per_kwh == 900.0, (
        "what is metered is weighed with what is in force"
    )


async def test_a_negative_marginal_intensity_goes_from_the_feed_to_a_plan_as_0(tmp_path):
    world = World(method="marginal")
    feed = CarbonFeedSettings(state_dir=tmp_path, zone=SERIES.zone, method="marginal")
    loop = ZoneLoop(feed, Negative(), world.state, world.clock, Metrics("carbon_feed"))
    await loop.init()
    await loop.tick()
    assert loop.reading is not None
    assert (loop.reading.intensity_g_per_kwh, loop.reading.rung) == (-50.0, Rung.NORMAL)
    view = await world.view()
    assert (view.carbon.intensity_g_per_kwh, view.carbon.rung, view.carbon.provider) == (0.0, Rung.NORMAL, "negative")


async def test_an_allowed_rung_is_acted_on_again():
    world = World(rungs_refused=("static",))
    await world.say(reading(200.0))
    last = plan_basis(await world.view(), PLAN, NOW_S + 1e9)
    await world.say(reading(900.0, Rung.STATIC))
    await world.view()
    await world.say(reading(300.0, Rung.PROFILE))
    view = await world.view()
    assert view.carbon == reading(300.0, Rung.PROFILE)
    trigger, _ = evaluate_triggers(
        view, last, HoldTimers(), Thresholds(), world.seen.allowed_triggers(("carbon",), world.clock.now_s())
    )
    assert trigger is not None
    assert trigger.cause == "carbon"


async def test_without_the_setting_every_rung_is_planned_by():
    world = World()
    for rung in Rung:
        await world.say(reading(200.0, rung))
        assert (await world.view()).carbon.rung == rung
    assert world.seen.allowed_triggers(("carbon",), world.clock.now_s()) == ("carbon",)


async def test_a_reading_that_nobody_renews_is_refused_where_carried_is():
    world = World(rungs_refused=STAND_INS)
    await world.say(reading(200.0))
    await world.clock.advance(2.5 * HOUR_S)
    view = await world.view()
    assert (view.carbon.intensity_g_per_kwh, view.carbon.rung) == (200.0, 0)
    assert "rung carried in force (the reading is 9000 s old)" in view.carbon.fallback_reason
    assert "ended 5400 s ago" in view.carbon.fallback_reason


async def test_after_a_restart_the_history_tells_the_last_allowed_reading():
    world = World(rungs_refused=("secondary", *STAND_INS))
    await world.say(reading(200.0, at_s=NOW_S - 2 * HOUR_S))
    await world.say(reading(500.0, Rung.SECONDARY, at_s=NOW_S - HOUR_S))
    await world.say(reading(900.0, Rung.STATIC))
    world.restart()
    view = await world.view()
    assert view.carbon.intensity_g_per_kwh == 200.0


async def test_without_any_allowed_reading_the_setting_stands_in_and_says_so():
    world = World(rungs_refused=("static",), static_g_per_kwh=321.0)
    for _ in range(2):
        view = await world.view()
        assert view.carbon.intensity_g_per_kwh == 321.0
        assert "no reading of an allowed rung exists" in view.carbon.fallback_reason
        await world.say(reading(900.0, Rung.STATIC))


async def test_operators_see_what_is_refused():
    world, metrics = World(rungs_refused=STAND_INS), Metrics("controller")
    await world.say(reading(200.0), forecast())
    await world.view()
    await world.say(reading(900.0, Rung.STATIC))
    view = await world.view()
    text = explain(view, PLAN, OBJECTIVE, RolloutState.DONE, "")
    assert "carbon: 200 g/kWh in demo, rung 0: rung static in force" in text
    assert "forecast: blend, issued 0 s ago, 24 intervals ahead" in text
    set_view_metrics(
        metrics, view, ControlState(), Rollout(), None, world.seen.plannable_carbon(world.clock.now_s()).rung
    )
    shown = {s.name: s for family in metrics.collect() for s in family.samples if s.value == 1.0}
    assert shown["trefoil_carbon_refused"].labels["rung"] == "static"
    assert shown["trefoil_carbon_forecast"].labels["state"] == "used"


async def test_stale_nodes_are_shown_by_name_and_objectives_by_family():
    world, metrics = World(), Metrics("controller")
    await world.say(reading(200.0))
    nodes = tuple(NodeStatus(node, "demo") for node in ("node0", "node1"))
    view = replace(await world.view(), fleet=FleetState(nodes, stale=("node1",)), objectives=(OBJECTIVE,))
    set_view_metrics(metrics, view, ControlState(), Rollout(), None)
    shown = {(s.name, *s.labels.values()): s.value for family in metrics.collect() for s in family.samples}
    assert [shown["trefoil_node_stale", node, "false"] for node in ("node0", "node1")] == [0, 1]
    of_family = ("trefoil_slo_latency_seconds", "trefoil_slo_quantile_ratio", "trefoil_accuracy_floor_ratio")
    assert [shown[name, "digits", "false"] for name in of_family] == [0.075, 0.95, 0.95]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("stale",), "'stale' is not a rung; use some of secondary, carried, profile, static, expired"),
        (("normal",), "'normal' is what plans are made by"),
        (("3",), "is not a rung"),
    ],
)
def test_names_that_are_no_rungs_are_refused(names, words):
    with pytest.raises(SettingError, match=words):
        CarbonSettings(rungs_refused=names)


@given(
    rung=st.sampled_from(list(Rung)),
    last=st.sampled_from([Rung.NORMAL, Rung.SECONDARY]),
    refused=st.frozensets(st.sampled_from(REFUSABLE)),
    age_s=st.floats(0.0, 1e6),
)
def test_what_is_planned_by_never_stands_on_a_refused_rung_while_another_is_known(rung, last, refused, age_s):
    in_force = carried_when_stale(reading(900.0, rung), NOW_S + age_s, 2.0)
    known = None if last.name.lower() in refused else reading(200.0, last)
    found = plannable_reading(in_force, known, refused, 321.0, NOW_S + age_s)
    if rung_name(in_force.rung) not in refused:
        assert found.reading == in_force
        assert (found.rung, found.why) == ("", "")
    else:
        assert found.rung == rung_name(in_force.rung)
        assert found.why in found.reading.fallback_reason
        assert known is None or rung_name(found.reading.rung) not in refused
        assert found.reading.intensity_g_per_kwh == (321.0 if known is None else 200.0)


def test_a_rung_of_a_newer_feed_has_a_number():
    assert rung_name(17) == "17"


# --- forecasts --------------------------------------------------------------------------------------------------------


async def test_a_forecast_is_cut_to_the_budgets_window_and_stamped():
    world = World()
    await world.say(reading(200.0), forecast(hours=96))
    view = await world.view()
    assert view.carbon_forecast is not None
    assert [b.p50_g_per_kwh for b in view.carbon_forecast.bands] == [100.0 + i for i in range(24)]
    assert any(
        "carbon:forecast" in s.key and s.observed_at_s == NOW_S for s in world.seen.input_stamps(world.clock.now_s())
    )
    await world.clock.advance(1.5 * HOUR_S)
    later = (await world.view()).carbon_forecast
    assert later is not None
    assert later.bands[0].p50_g_per_kwh == 101.0


async def test_old_foreign_and_early_forecasts_are_refused_with_a_reason():
    world = World()
    await world.say(reading(200.0), forecast())
    await world.clock.advance(24.5 * HOUR_S)
    found = (await world.view()).carbon_forecast
    assert found is not None
    assert (found.bands, found.model) == ((), "blend")
    assert found.fallback_reason == ("the forecast is 88200 s old, more than 25% of the 345600 s that it looked ahead")
    other = replace(SERIES, zone="mars")
    assert forecast_refusal(forecast(series=other), SERIES, NOW_S) == (
        "the forecast is of mars, average, lifecycle, not of demo, average, lifecycle"
    )
    assert "3600 s in the future" in forecast_refusal(forecast(NOW_S + HOUR_S), SERIES, NOW_S)
    none = CarbonForecast(SERIES, "blend", NOW_S, fallback_reason="nothing is known of the past")
    assert forecast_refusal(none, SERIES, NOW_S) == "nothing is known of the past"


async def test_the_rule_of_age_is_the_same_in_a_replay_that_runs_fast():
    def fast(by: float) -> CarbonForecast:
        whole = forecast()
        bands = tuple(
            replace(b, starts_at_s=NOW_S + (b.starts_at_s - NOW_S) / by, ends_at_s=NOW_S + (b.ends_at_s - NOW_S) / by)
            for b in whole.bands
        )
        return replace(whole, bands=bands)

    for by in (1.0, 144.0, 10_000.0):
        assert forecast_refusal(fast(by), SERIES, NOW_S + 23.9 * HOUR_S / by, 0.25) == ""
        assert forecast_refusal(fast(by), SERIES, NOW_S + 24.1 * HOUR_S / by, 0.25) != ""


async def test_forecasts_can_be_switched_off():
    world = World(forecast=False)
    await world.say(reading(200.0), forecast())
    assert (await world.view()).carbon_forecast is None

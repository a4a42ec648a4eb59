"""What stands in a view, gathered from a store in memory; and that a record replays whatever its catalogue holds."""

import json
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from controller.forecasters.last_max import LastMax
from controller.loop.core.decision import NEW, run_planner
from controller.loop.decision_records import replay
from controller.observe.core.observation import Observation
from controller.observe.core.plannable import loadable_catalog
from controller.observe.reader import ObservationReader
from controller.planners.exact.planner import ExactPlanner
from controller.settings import ControllerSettings
from tests.support.planning import digits, fleet, row
from tests.support.planning import view as planning_view
from tests.support.stores import state_on
from tests.support.virtual.redis import Server
from tests.unit.controller.views import PLAN
from trefoil.core.brains import PlanView
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.demand import LoadCell, LoadKey, LoadWindow, Measured, SliceLoad, TableAck
from trefoil.core.errors import SettingError
from trefoil.core.fleet import DeviceState, Hosted, NodeStatus, SliceKey, SliceState, SliceStatus
from trefoil.core.objective import Objective, ObjectiveMode
from trefoil.core.plan import DecisionRecord, NodePlan, Plan
from trefoil.runtime import codec
from trefoil.runtime.clock import Clock, ManualClock, SteadyClock
from trefoil.runtime.keys import Keys

OBJECTIVE = Objective("digits", ObjectiveMode.BUDGET, 75.0, 0.95, 0.95, number=1)
NOW_S = 1_795_000_000.0


def several() -> Catalog:
    """The digits, and three more families with a profile each."""
    known = digits()
    more = tuple(
        Family(name, "top1", (Variant(f"{name}-s", 1, 0.9, "made up", 32, 1.0, 10, "CC0-1.0"),))
        for name in ("cats", "dogs", "owls")
    )
    rows = tuple(row(f"{f.name}-s", "7g.40gb", 9.0, f.name) for f in more)
    return Catalog((*more, *known.families), (*rows, *known.rows))


class World:
    """What a controller sees, the store that it reads, and a way to write there."""

    def __init__(
        self, fixed: dict[str, float] | None = None, clock: Clock | None = None, stated: Mapping[str, str] | None = None
    ) -> None:
        self.clock = clock or ManualClock(NOW_S)
        self.state = state_on(Server(self.clock), "default", self.clock)
        demand_fixed = {"digits": fixed} if fixed else {}
        settings = ControllerSettings(demand_initial_per_s={"digits": 20.0}, demand_fixed=demand_fixed)
        predictor = LastMax()
        self.seen = Observation(
            settings, self.state.keys, several(), predictor, self.clock.now_s(), stated=stated or {}
        )
        self.reader = ObservationReader(self.seen, self.state, settings.carbon, self.clock)

    async def view(self, current: Plan | None = None) -> PlanView:
        await self.reader.refresh()
        assert self.seen.inputs.down == ""
        return self.seen.view({"digits": OBJECTIVE}, current, {}, {}, self.clock.now_s())


def names(view: PlanView) -> set[str]:
    assert {r.family for r in view.catalog.rows} <= {f.name for f in view.catalog.families}
    return {f.name for f in view.catalog.families}


async def test_a_view_knows_the_families_that_somebody_wants_and_no_others():
    world = World()
    assert names(await world.view()) == {"digits"}
    cell = LoadCell(LoadKey("owls"), arrived=9, arrived_per_s=(3, 3, 3))
    for number in (0, 1):
        window = LoadWindow("d1", 0, number, NOW_S - 2 + number, NOW_S - 1 + number, cells=(cell,))
        await world.state.append_unfenced(world.state.keys.load("d1", 0), window)
    seen = await world.view()
    assert names(seen) == {"digits", "owls"}
    assert {d.family for d in seen.demand} == {"digits", "owls"}


async def test_a_view_knows_what_runs_and_what_is_planned_though_nobody_wants_it():
    world = World()
    (node,) = fleet(1).nodes
    key = SliceKey(node.devices[0].device, "7g.40gb", 0, 8)
    hosted = (Hosted("cats", "cats-s", 1),)
    status = SliceStatus(key, state=SliceState.READY, hosted=hosted)
    running = replace(node, devices=(replace(node.devices[0], slices=(status,)),), observed_at_s=NOW_S)
    lease = await world.state.acquire("agent:node0", "a")
    await world.state.put(lease, world.state.keys.node(node.node), running)
    assert names(await world.view()) == {"digits", "cats"}
    (planned_node,) = PLAN.nodes
    (device,) = planned_node.devices[:1]
    wanted = replace(device, slices=(replace(device.slices[0], hosted=(Hosted("dogs", "dogs-s", 1),)),))
    current = replace(PLAN, nodes=(replace(planned_node, devices=(wanted,)),))
    assert names(await world.view(current)) == {"digits", "cats", "dogs"}


async def test_a_variant_of_which_a_node_has_other_files_is_planned_around_until_it_has_the_same():
    """The planner of a plan for it sees the catalogue without; who asks hears why."""
    world = World(stated={"digits/1": "aaaa"})
    (node,) = fleet(1).nodes
    lease = await world.state.acquire("agent:node0", "a")
    for digest, left in (("bbbb", {2, 3, 4}), ("aaaa", {1, 2, 3, 4})):
        models = (f"digits/1: {digest}", *(f"digits/{version}: cccc" for version in (2, 3, 4)))
        await world.state.put(
            lease, world.state.keys.node(node.node), replace(node, models=models, observed_at_s=NOW_S)
        )
        seen = await world.view()
        usable = loadable_catalog(seen.catalog, seen.fleet)
        assert {variant.version for variant in usable.family("digits").variants} == left
        assert len(world.seen.differing) == (digest == "bbbb")


def recorded(view: PlanView, older: bool = False) -> DecisionRecord:
    """What the controller would have written; `older`: by a version that did not know the newest fields."""
    decision = run_planner(view, ExactPlanner(), 7)
    assert decision.plan is not None
    tree = json.loads(codec.to_json(view))
    if older:
        del tree["zones"]
        for measured in tree["measured"]:
            del measured["joules_per_request"]
    versions = {"plan": decision.plan.content_digest, "outcome": NEW}
    return DecisionRecord("1.000001", trigger="load", view_json=json.dumps(tree), seed=7, versions=versions)


@pytest.mark.parametrize("older", [False, True])
def test_records_replay_with_the_whole_catalogue_and_with_the_part_that_counts(older):
    seen = planning_view(rate=20.0, devices=fleet(2))
    whole = replace(seen, catalog=several(), measured=(Measured("digits", 60.0, 70.0, 1.0, 0.96, 1e-3, 20.0, 10.0),))
    part = replace(whole, catalog=several().restrict({"digits"}))
    old, new = recorded(whole, older), recorded(part)
    assert len(new.view_json) < len(old.view_json)
    assert old.versions["plan"] == new.versions["plan"], "what nobody wants changes no plan"
    assert replay(old, ExactPlanner()).equal
    assert replay(new, ExactPlanner()).equal


async def test_a_fixed_demand_is_planned_for_whatever_comes():
    world = World({"rate_per_s": 30.0, "rate_p90_per_s": 40.0})
    cell = LoadCell(LoadKey("digits"), arrived=900, arrived_per_s=(300, 300, 300), items=1800, answered=900)
    window = LoadWindow("d1", 0, 1, NOW_S - 1, NOW_S, cells=(cell,))
    for view in (await world.view(), await world.view()):
        (demand,) = view.demand
        assert (demand.rate_per_s, demand.rate_p90_per_s, demand.items_mean, demand.gap_scv) == (30.0, 40.0, 1.0, 1.0)
        assert demand.forecast.model == "fixed"
        await world.state.append_unfenced(world.state.keys.load("d1", 0), window)


def test_an_unknown_trigger_is_refused():
    with pytest.raises(SettingError, match="no such trigger 'whim'; use some of start, loss"):
        ControllerSettings(causes=("carbon", "whim"))


async def test_carbon_follows_the_calendar_and_nothing_else_does():
    wall = ManualClock(NOW_S)
    world = World(clock=SteadyClock(wall))
    keys, series = world.state.keys, ControllerSettings().carbon.series
    lease = await world.state.acquire("feed:demo", "a test")
    assert lease is not None

    async def read(age_s: float) -> PlanView:
        now_s = wall.now_s()
        made = CarbonReading(series, now_s - age_s, now_s + 300.0, 250.0, observed_at_s=now_s - age_s)
        band = CarbonBand(now_s, now_s + 300.0, 200.0, 210.0, 220.0)
        forecast = CarbonForecast(series, "persistence", now_s - age_s, (band,))
        await world.state.put(lease, keys.carbon_now(series), made)
        await world.state.put(lease, keys.carbon_forecast(series), forecast)
        await world.state.append(lease, keys.carbon_history(series), made, 10)
        await world.reader.refresh()
        return world.seen.view({"digits": OBJECTIVE}, None, {}, {}, world.clock.now_s())

    before = await read(60.0)
    wall.jump(-3600.0)
    after = await read(60.0)
    assert after.now_s == before.now_s == NOW_S
    assert (after.carbon.observed_at_s, after.carbon.rung) == (before.carbon.observed_at_s, before.carbon.rung)
    assert after.carbon_forecast == before.carbon_forecast
    assert [one.observed_at_s for one in after.carbon_history] == [NOW_S + 3600.0 - 60.0, NOW_S - 60.0], (
        "what was read before the step was of an hour that is to come"
    )


# --- Silent nodes -----------------------------------------------------------------------------------------------------


def two_nodes(silent_for_s: float) -> tuple[NodeStatus, NodeStatus]:
    """Two nodes, one GPU each, that serve; the second has said nothing for so long."""
    found = []
    for node, age_s in zip(fleet(2, nodes=2).nodes, (0.0, silent_for_s), strict=True):
        gpu = node.devices[0].device
        serving = SliceStatus(
            SliceKey(gpu, "7g.40gb", 0, 8), state=SliceState.READY, hosted=(Hosted("digits", "l", 4),)
        )
        device = replace(node.devices[0], state=DeviceState.AWAKE, slices=(serving,))
        found.append(replace(node, devices=(device,), observed_at_s=NOW_S - age_s))
    return found[0], found[1]


def ack(worker: int, *ejected: SliceKey, leaving: bool = False) -> TableAck:
    return TableAck("d1", worker, slices=tuple(SliceLoad(key, ejected=True) for key in ejected), leaving=leaving)


def lost_of(world: World) -> list[str]:
    nodes = world.seen.fleet(world.clock.now_s()).nodes
    return [d.device for node in nodes for d in node.devices if d.state == DeviceState.LOST]


def test_a_device_of_a_silent_node_is_lost_once_no_dispatcher_reaches_it_until_its_node_reports():
    world = World()
    up, silent = two_nodes(silent_for_s=60.0)
    key = silent.devices[0].slices[0].key
    world.seen.inputs.nodes = {n.node: n for n in (up, silent)}
    for acks in ((), (ack(0), ack(1, key)), (ack(0, up.devices[0].slices[0].key),)):
        world.seen.inputs.acks = acks
        assert lost_of(world) == [], "its agent alone may be gone"
    world.seen.inputs.acks = (ack(0, key), ack(1, key), ack(2, leaving=True))
    assert lost_of(world) == [silent.devices[0].device]
    assert world.seen.fleet(world.clock.now_s()).stale == (silent.node,)
    world.seen.inputs.acks = (ack(0, key), ack(1))
    assert lost_of(world) == [silent.devices[0].device], "a worker that has just begun has not asked yet"
    world.seen.inputs.nodes[silent.node] = replace(silent, observed_at_s=NOW_S)
    assert lost_of(world) == []


def test_a_silent_node_is_lost_whole_once_nothing_that_is_asked_there_answers():
    world = World()
    up, silent = two_nodes(silent_for_s=60.0)
    device = silent.devices[0]
    idle = replace(device.slices[0], key=replace(device.slices[0].key, start=9))
    other = replace(device, device=f"{silent.node}/gpu9", slices=())
    silent = replace(silent, devices=(replace(device, slices=(*device.slices, idle)), other))
    world.seen.inputs.nodes = {n.node: n for n in (up, silent)}
    world.seen.inputs.acks = (ack(0, device.slices[0].key),)
    assert lost_of(world) == [device.device, other.device], "nobody asks the idle slice, or anything on the other GPU"
    third = replace(idle, key=replace(idle.key, device=other.device))
    silent = replace(silent, devices=(silent.devices[0], replace(other, slices=(third,))))
    world = World()
    world.seen.inputs.nodes = {n.node: n for n in (up, silent)}
    answering = ack(0, device.slices[0].key)
    world.seen.inputs.acks = (replace(answering, slices=(*answering.slices, SliceLoad(third.key))),)
    assert lost_of(world) == [device.device], "the node is there"


def test_a_node_that_reports_is_not_lost_whatever_dispatchers_say():
    world = World()
    both = two_nodes(silent_for_s=0.0)
    world.seen.inputs.nodes = {n.node: n for n in both}
    world.seen.inputs.acks = (ack(0, *(n.devices[0].slices[0].key for n in both)),)
    assert lost_of(world) == []


def test_a_plan_counts_on_a_silent_node_while_it_is_reached_and_then_without_it():
    world = World(fixed={"rate_per_s": 60.0})
    up, silent = two_nodes(silent_for_s=60.0)
    world.seen.inputs.nodes = {n.node: n for n in (up, silent)}

    def routed() -> set[str]:
        seen = world.seen.view({"digits": OBJECTIVE}, None, {}, {}, world.clock.now_s())
        plan = ExactPlanner().plan(seen, np.random.default_rng(1)).plan
        assert plan is not None
        return {target.slice.device for route in plan.routes for target in route.targets}

    before = routed()
    world.seen.inputs.acks = (ack(0, silent.devices[0].slices[0].key),)
    assert silent.devices[0].device in before
    assert routed() == {up.devices[0].device}


def test_nodes_of_a_plan_are_awaited_as_long_as_a_status_may_be_old():
    plan = replace(PLAN, nodes=(NodePlan(node="node0"), NodePlan(node="node1")))
    limit_s = ControllerSettings().node_stale_s

    def asked(nodes: int) -> Observation:
        one = Observation(ControllerSettings(), Keys("default"), digits(), LastMax(), NOW_S)
        one.inputs.nodes = {n.node: replace(n, observed_at_s=NOW_S) for n in fleet(2, nodes=2).nodes[:nodes]}
        return one

    assert not asked(2).awaits_nodes(plan, NOW_S)
    assert not asked(0).awaits_nodes(None, NOW_S)
    some = asked(1)
    assert some.awaits_nodes(plan, NOW_S)
    assert some.awaits_nodes(plan, NOW_S + limit_s - 0.1)
    assert not some.awaits_nodes(plan, NOW_S + limit_s)
    came = asked(1)
    assert came.awaits_nodes(plan, NOW_S)
    came.inputs.nodes |= asked(2).inputs.nodes
    assert not came.awaits_nodes(plan, NOW_S + 1.0)

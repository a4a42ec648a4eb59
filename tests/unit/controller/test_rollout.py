"""A rollout is played against a model of the agents; the properties hold after every step, for any two layouts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.rollout.core.executor import RolloutExecutor
from controller.rollout.core.interim_routes import RolloutInputs, capacity_of, routed_capacity
from controller.rollout.core.path import FleetSnapshot, RolloutPath, Step, plan_path
from controller.settings import RolloutSettings
from tests.support.plans import LARGE, SMALL, key, planned
from trefoil.core.common import Revision
from trefoil.core.device_types import A100_40GB, placements, slice_type
from trefoil.core.fleet import DeviceState, FleetState, Hosted, NodeStatus, SliceKey
from trefoil.core.plan import NodePlan, Plan, PlannedDevice, PlannedSlice, Route, RouteTarget
from trefoil.runtime.clock import ManualClock

PER_SM = {SMALL.name: 1.5, "between": 0.6, LARGE.name: 0.4}


def capacity(family: str, device: str, kind: str, variant: str, count: int) -> float:
    """Pools of more slices are used better, as in core/queueing."""
    return slice_type(A100_40GB, kind).sm_count * PER_SM[variant] * count * (1 - 0.5 / (1 + count))


def rollout_inputs(need: float, swappable: bool = True, late: frozenset[str] = frozenset()) -> RolloutInputs:
    """`late`: variants that cannot keep the SLO at any rate."""

    def within_slo(family: str, device: str, kind: str, variant: str, count: int) -> float:
        return 0.0 if variant in late else capacity(family, device, kind, variant, count)

    def faster(part: PlannedSlice, steps: int) -> PlannedSlice:
        return replace(part, hosted=(Hosted("toy", SMALL.name, SMALL.version, 0, 1, 1, 8),))

    return RolloutInputs({"toy": need}, within_slo, capacity, lambda *_: swappable, faster, lambda *_: True)


def device_of(name: str, parts: tuple[PlannedSlice, ...]) -> PlannedDevice:
    return PlannedDevice(name, DeviceState.AWAKE if parts else DeviceState.ASLEEP, parts)


def plan_of(layout: dict[str, tuple[PlannedSlice, ...]]) -> Plan:
    parts = [p for parts in layout.values() for p in parts]
    targets = tuple(RouteTarget(p.key, p.hosted[0].variant, 0, 1 / len(parts), 2) for p in parts)
    node = NodePlan(Revision(1, 2), "node0", tuple(device_of(n, p) for n, p in layout.items()))
    return Plan(Revision(1, 2), nodes=(node,), routes=(Route("toy", "weighted", "fifo", targets, 100),))


def standing_of(layout: dict[str, tuple[PlannedSlice, ...]], dead: frozenset[SliceKey] = frozenset()) -> FleetSnapshot:
    plan = plan_of(layout)
    parts = {p.key: p for parts in layout.values() for p in parts}
    return FleetSnapshot(
        {d.device: d for d in plan.nodes[0].devices},
        {k: p for k, p in parts.items() if k not in dead},
        frozenset(parts),
        plan.routes,
    )


@st.composite
def device_layouts(draw: st.DrawFn, name: str) -> tuple[PlannedSlice, ...]:
    if draw(st.integers(0, 3)) == 0:
        return ()
    chosen = draw(st.sampled_from(placements(A100_40GB)))
    kept = draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    variants = draw(st.lists(st.sampled_from([SMALL, LARGE]), min_size=len(chosen), max_size=len(chosen)))
    return tuple(
        planned(kind, start, variant, name)
        for (kind, start, _), keep, variant in zip(chosen, kept, variants, strict=True)
        if keep
    )


@st.composite
def rollouts(draw: st.DrawFn) -> tuple[FleetSnapshot, Plan, RolloutInputs]:
    names = [f"node0/gpu{i}" for i in range(draw(st.integers(1, 3)))]
    now = {name: draw(device_layouts(name)) for name in names}
    then = {name: draw(device_layouts(name)) for name in names}
    if not any(then.values()):
        then[names[0]] = (planned("7g.40gb", 0, SMALL, names[0]),)
    keys = [p.key for parts in now.values() for p in parts]
    dead = frozenset(draw(st.sets(st.sampled_from(keys), max_size=1)) if keys else set())
    late = draw(st.frozensets(st.sampled_from([SMALL.name, LARGE.name])))
    return standing_of(now, dead), plan_of(then), rollout_inputs(draw(st.floats(0, 200)), draw(st.booleans()), late)


class Agents:
    """What the nodes do with a step, and what must hold before, during and after it."""

    def __init__(self, standing: FleetSnapshot, terms: RolloutInputs, target: Plan) -> None:
        self.ready, self.present = dict(standing.ready), set(standing.present)
        self.terms = terms
        wanted = [p for d in target.nodes[0].devices for p in d.slices]
        # Also where nothing keeps the SLO: what serves on the way keeps requests from piling up.
        self.laws = (terms, replace(terms, capacity=terms.sustained))
        self.floors = [
            min(
                law.needs["toy"],
                routed_capacity(standing.routes, self.ready, law).get("toy", 0.0),
                capacity_of("toy", wanted, law),
            )
            for law in self.laws
        ]

    def play(self, step: Step) -> None:
        (route,) = step.routes
        live = {t.slice: t for t in route.targets if not t.draining}
        draining = {t.slice for t in route.targets if t.draining}
        assert set(live) <= set(self.ready), "routes to a slice that does not serve"
        assert sum(t.weight for t in live.values()) == pytest.approx(1 if live else 0)
        assert all(t.credits > 0 for t in live.values())
        assert all(t.weight == 0 for t in route.targets if t.draining)
        assert step.drained == draining
        layout = {p.key: p for d in step.devices.values() for p in d.slices}
        self._placements(step)
        rebuilt = {k for k in step.drained if k in layout}
        stopped = {k for k in self.present if k not in layout}
        assert not (stopped | rebuilt) & set(live), "stops a slice that is routed to"
        assert (stopped | rebuilt) & set(self.ready) <= step.drained, "stops a slice that was not drained"
        for k, part in layout.items():
            if self.ready.get(k) != part:
                assert k in step.ready, "starts or swaps a slice nobody waits for"
        # While the step is under way a swapped slice serves one of two variants; the slower one has to suffice.
        for law, floor in zip(self.laws, self.floors, strict=True):
            during = {
                k: min((self.ready[k], layout[k]), key=lambda p, law=law: capacity_of("toy", [p], law)) for k in live
            }
            if step.name == "start":
                during = {k: self.ready[k] for k in live}
            assert capacity_of("toy", list(during.values()), law) >= floor - 1e-6, "below the floor"
        self.ready, self.present = layout, set(layout)

    def _placements(self, step: Step) -> None:
        for device in step.devices.values():
            assert device.target == DeviceState.AWAKE or not device.slices
            keys = [p.key for p in device.slices]
            assert not any(a.overlaps(b) for i, a in enumerate(keys) for b in keys[i + 1 :])
            assert sum(slice_type(A100_40GB, k.slice_type).compute_slices for k in keys) <= 7


@settings(max_examples=400, deadline=None)
@given(rollouts())
def test_every_step_is_legal_and_the_last_one_is_the_target(case):
    standing, target, rules = case
    found = plan_path(standing, target, rules)
    if found.halted:
        assert not found.steps
        assert "toy" in found.why
        return
    agents = Agents(standing, rules, target)
    for step in found.steps:
        agents.play(step)
    assert agents.ready == {p.key: p for d in target.nodes[0].devices for p in d.slices}
    assert found.steps[-1].routes == target.routes
    assert dict(found.steps[-1].devices) == {d.device: d for d in target.nodes[0].devices}


@settings(max_examples=200, deadline=None)
@given(rollouts(), st.data())
def test_a_newer_plan_in_the_middle_is_as_safe(case, data):
    standing, target, rules = case
    found = plan_path(standing, target, rules)
    agents = Agents(standing, rules, target)
    taken = found.steps[: data.draw(st.integers(0, len(found.steps)))]
    for step in taken:
        agents.play(step)
    if not taken:
        return
    names = [d.device for d in target.nodes[0].devices]
    newer = {name: data.draw(device_layouts(name)) for name in names}
    if not any(newer.values()):
        newer[names[0]] = (planned("7g.40gb", 0, SMALL, names[0]),)
    middle = FleetSnapshot(dict(taken[-1].devices), agents.ready, frozenset(agents.present), taken[-1].routes)
    again = plan_path(middle, plan_of(newer), rules)
    second = Agents(middle, rules, plan_of(newer))
    for step in again.steps:
        second.play(step)
    assert again.halted or second.ready == {p.key: p for parts in newer.values() for p in parts}


def steps_of(now, then, need, swappable=True) -> RolloutPath:
    return plan_path(standing_of(now), plan_of(then), rollout_inputs(need, swappable))


def test_from_nothing_everything_starts_in_one_step():
    found = steps_of({"node0/gpu0": ()}, {"node0/gpu0": (planned("4g.20gb"), planned("3g.20gb", 4))}, 10)
    assert [s.name for s in found.steps] == ["start", "settle"]


def test_a_neighbour_keeps_serving_while_half_the_gpu_is_rebuilt():
    kept = planned("4g.20gb", 0, SMALL)
    now = {"node0/gpu0": (kept, planned("3g.20gb", 4))}
    then = {"node0/gpu0": (kept, planned("1g.5gb", 4), planned("1g.5gb", 5))}
    found = steps_of(now, then, 40)
    assert [s.name for s in found.steps] == ["shift", "settle"]
    assert found.steps[0].drained == {key("3g.20gb", 4)}
    assert found.moving == (key("1g.5gb", 4), key("1g.5gb", 5), key("3g.20gb", 4))


def test_a_faster_variant_is_swapped_before_the_shares_and_a_slower_one_after():
    slow, fast = planned("7g.40gb", 0, LARGE), planned("7g.40gb", 0, SMALL)
    faster = steps_of({"node0/gpu0": (slow,)}, {"node0/gpu0": (fast,)}, 10)
    slower = steps_of({"node0/gpu0": (fast,)}, {"node0/gpu0": (slow,)}, 10)
    assert [s.name for s in faster.steps] == ["start", "settle"]
    assert [s.name for s in slower.steps] == ["shift", "settle"]
    assert not slower.steps[0].drained


def test_a_family_comes_to_a_slice_before_it_is_routed_there_and_is_routed_away_before_it_goes():
    alone = planned("7g.40gb", 0, SMALL)
    guest = Hosted("other", SMALL.name, SMALL.version, 0, 1, 1, 8)
    shared = replace(alone, hosted=(*alone.hosted, guest))
    elsewhere = PlannedSlice(key("7g.40gb", 0, "node0/gpu1"), (guest,), 2)

    def plan(here: PlannedSlice) -> Plan:
        slices = {"node0/gpu0": (here,), "node0/gpu1": (elsewhere,)}
        own = [part for part in (here, elsewhere) if guest in part.hosted]
        targets = tuple(RouteTarget(p.key, guest.variant, 0, 1 / len(own), 2) for p in own)
        found = plan_of({"node0/gpu0": (alone,)})
        node = NodePlan(Revision(1, 2), "node0", tuple(device_of(n, p) for n, p in slices.items()))
        return replace(found, nodes=(node,), routes=(*found.routes, Route("other", "weighted", "fifo", targets, 100)))

    def path(here: PlannedSlice, there: PlannedSlice) -> RolloutPath:
        parts = {here.key: here, elsewhere.key: elsewhere}
        standing = {d.device: d for d in plan(here).nodes[0].devices}
        snapshot = FleetSnapshot(standing, parts, frozenset(parts), plan(here).routes)
        needs = {"toy": 10.0, "other": 10.0}
        return plan_path(snapshot, plan(there), replace(rollout_inputs(0.0), needs=needs))

    def targets(step: Step, family: str) -> dict[str, bool]:
        (route,) = [route for route in step.routes if route.family == family]
        return {t.slice.device: t.draining or not t.weight for t in route.targets}

    comes, goes = path(alone, shared), path(shared, alone)
    assert [s.name for s in comes.steps] == ["start", "settle"]
    assert targets(comes.steps[0], "other") == {"node0/gpu1": False}
    assert targets(comes.steps[1], "other") == {"node0/gpu0": False, "node0/gpu1": False}
    assert [s.name for s in goes.steps] == ["shift", "settle"]
    assert targets(goes.steps[0], "other") == {"node0/gpu0": True, "node0/gpu1": False}
    assert targets(goes.steps[0], "toy") == {"node0/gpu0": False}
    assert not goes.steps[0].drained  # the slice serves on


def test_two_gpus_are_rebuilt_one_after_the_other_when_one_alone_carries_the_load():
    now = {f"node0/gpu{i}": (planned("7g.40gb", 0, SMALL, f"node0/gpu{i}"),) for i in (0, 1)}
    then = {
        f"node0/gpu{i}": tuple(planned(k, s, SMALL, f"node0/gpu{i}") for k, s in (("4g.20gb", 0), ("3g.20gb", 4)))
        for i in (0, 1)
    }
    found = steps_of(now, then, 80)
    assert [{k.device for k in s.drained} for s in found.steps if s.drained] == [{"node0/gpu0"}, {"node0/gpu1"}]


def test_governors_rest_from_before_the_first_slice_leaves_until_the_target_is_reached():
    """Capacity on the way is counted at the highest clock: a governor would climb there only once requests are late."""
    parts = {f"node0/gpu{i}": (("4g.20gb", 0), ("3g.20gb", 4)) for i in (0, 1)}
    now = standing_of({name: (planned("7g.40gb", 0, SMALL, name),) for name in parts})
    now = replace(now, devices={n: replace(d, governor="miad", clock_min_mhz=600) for n, d in now.devices.items()})
    then = plan_of({name: tuple(planned(*part, SMALL, name) for part in each) for name, each in parts.items()})
    goal = tuple(replace(d, governor="miad", clock_min_mhz=900) for d in then.nodes[0].devices)
    then = replace(then, nodes=(replace(then.nodes[0], devices=goal),))

    first, *way, last = plan_path(now, then, rollout_inputs(80)).steps
    assert first.name == "clocks"
    assert first.devices == {n: replace(d, governor="") for n, d in now.devices.items()}
    assert first.routes == now.routes
    assert not first.drained
    assert any(step.drained for step in way)
    assert {d.governor for step in way for d in step.devices.values()} == {""}
    assert last.devices == {d.device: d for d in goal}

    shares = replace(then, nodes=(replace(then.nodes[0], devices=tuple(now.devices.values())),), routes=now.routes)
    (only,) = plan_path(now, shares, rollout_inputs(80)).steps
    assert {d.governor for d in only.devices.values()} == {"miad"}


def test_a_sleeping_gpu_carries_the_load_while_the_only_awake_one_is_rebuilt():
    now = {"node0/gpu0": (planned("7g.40gb", 0, SMALL),), "node0/gpu1": ()}
    then = {"node0/gpu0": (planned("4g.20gb", 0, SMALL), planned("3g.20gb", 4, SMALL)), "node0/gpu1": ()}
    found = steps_of(now, then, 80)
    assert "sleeping device carries" in found.why
    assert found.steps[0].devices["node0/gpu1"].target == DeviceState.AWAKE
    assert found.steps[-1].devices["node0/gpu1"].target == DeviceState.ASLEEP


def test_what_runs_swaps_to_faster_variants_when_that_makes_room():
    now = {f"node0/gpu{i}": (planned("7g.40gb", 0, LARGE, f"node0/gpu{i}"),) for i in (0, 1)}
    then = {
        f"node0/gpu{i}": tuple(planned(k, s, LARGE, f"node0/gpu{i}") for k, s in (("4g.20gb", 0), ("3g.20gb", 4)))
        for i in (0, 1)
    }
    found = steps_of(now, then, 45)
    assert "faster variants" in found.why
    assert {p.hosted[0].variant for p in found.steps[0].ready.values()} == {SMALL.name}


@pytest.mark.parametrize(("need", "lowest"), [(35, "between"), (45, SMALL.name)])
def test_no_variant_is_faster_than_makes_room(need, lowest):
    def faster(part: PlannedSlice, steps: int) -> PlannedSlice:
        name = "between" if steps == 1 else SMALL.name
        return replace(part, hosted=(Hosted("toy", name, 1, 0, 1, 1, 8),))

    parts = {f"node0/gpu{i}": (("4g.20gb", 0), ("3g.20gb", 4)) for i in (0, 1)}
    now = {name: (planned("7g.40gb", 0, LARGE, name),) for name in parts}
    then = {name: tuple(planned(kind, start, LARGE, name) for kind, start in each) for name, each in parts.items()}
    found = plan_path(standing_of(now), plan_of(then), replace(rollout_inputs(need), faster=faster))
    passed = {hosted.variant for step in found.steps for part in step.ready.values() for hosted in part.hosted}
    assert passed == {lowest, LARGE.name}


def test_halts_naming_what_is_missing_when_the_only_gpu_must_be_rebuilt_under_load():
    now = {"node0/gpu0": (planned("7g.40gb", 0, SMALL),)}
    then = {"node0/gpu0": (planned("4g.20gb", 0, SMALL), planned("3g.20gb", 4, SMALL))}
    found = steps_of(now, then, 50)
    assert found.halted
    assert "0.0/s of the 50.0/s" in found.why


def test_only_shares_change_without_touching_a_node():
    now = {"node0/gpu0": (planned("4g.20gb"), planned("3g.20gb", 4))}
    found = steps_of(now, now, 10)
    assert [s.name for s in found.steps] == ["settle"]
    assert not found.reconfigures


def test_a_device_of_a_stale_node_is_left_as_it_is():
    now = {"node0/gpu0": (planned("7g.40gb", 0, SMALL),), "node0/gpu1": ()}
    then = {"node0/gpu0": (), "node0/gpu1": (planned("7g.40gb", 0, SMALL, "node0/gpu1"),)}
    standing = replace(standing_of(now), fixed=frozenset({"node0/gpu1"}))
    found = plan_path(standing, plan_of(then), rollout_inputs(0))
    assert all(not s.devices["node0/gpu1"].slices for s in found.steps)


def test_what_serves_on_a_stale_node_stays_routed_to_and_the_rollout_is_not_done():
    now = {
        "node0/gpu0": (planned("3g.20gb", 0), planned("3g.20gb", 4)),
        "node0/gpu1": (planned("7g.40gb", 0, LARGE, "node0/gpu1"),),
    }
    then = {**now, "node0/gpu0": (planned("4g.20gb", 0), planned("2g.10gb", 4))}
    standing = replace(standing_of(now), fixed=frozenset({"node0/gpu0", "node0/gpu1"}))
    found = plan_path(standing, plan_of(then), rollout_inputs(0))
    assert "node0/gpu0 cannot be changed" in found.blocked
    assert not found.halted
    (settle,) = found.steps
    assert settle.devices["node0/gpu0"].slices == now["node0/gpu0"]
    (route,) = settle.routes
    assert {target.slice for target in route.targets} == set(standing.ready), "only what serves, and all of it"
    need = capacity_of("toy", list(standing.ready.values()), rollout_inputs(0))
    loaded = plan_path(standing, plan_of(then), rollout_inputs(need)).steps[-1].routes
    assert routed_capacity(loaded, standing.ready, rollout_inputs(need))["toy"] >= need - 1e-9
    assert all(target.weight > 0 for target in loaded[0].targets), "under load all of it helps"
    back = plan_path(replace(standing, fixed=frozenset()), plan_of(then), rollout_inputs(0))
    assert (back.blocked, {t.slice for t in back.steps[-1].routes[0].targets}) == (
        "",
        {p.key for ps in then.values() for p in ps},
    )


def test_a_node_plan_that_its_node_is_ahead_of_is_not_written_again():
    """An old copy in Redis was what the controller could read of its commands."""
    clock, old, now = ManualClock(), Revision(1, 1), Revision(1, 1, 2)
    nodes = tuple(NodeStatus(name, zone="z", applied=of) for name, of in (("ahead", now), ("level", old)))
    observation = SimpleNamespace(fleet=lambda _now_s: FleetState(nodes))
    commanded = {name: NodePlan(old, name) for name in ("ahead", "level", "silent")}
    executor = RolloutExecutor(RolloutSettings(), observation, None, clock, None, plan_of({}), commanded)
    plan, stand = executor.republished(Revision(2, 3))
    assert plan.revision == Revision(2, 3)
    assert [each.node for each in stand] == ["level", "silent"]

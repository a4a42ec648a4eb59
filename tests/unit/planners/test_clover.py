"""CLOVER, BLOVER and ORACLE as planners: what they ask for, when they stop, what they remember."""

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.planners.blover import blover
from controller.planners.clover import CloverPlanner
from controller.planners.clover.pods import pods_of
from controller.planners.clover.profile_estimator import ProfileEstimator, profile_estimator
from controller.planners.clover.settings import CloverSettings
from controller.planners.clover.space import Space
from controller.planners.oracle import OraclePlanner
from controller.planners.planning_input import read_view
from controller.planners.policy_parts import with_preset
from controller.planners.table import PLANNERS
from tests.support.exploring import explore, lambda_view, served, value
from tests.support.planning import applied, digits, fleet, objective, view
from trefoil.core.brains import Candidate, Decision, Measurement
from trefoil.core.catalog import Catalog, Family
from trefoil.core.demand import Demand, Measured
from trefoil.core.device_types import A100_40GB
from trefoil.core.errors import ProfileMissing, SettingError
from trefoil.core.fleet import MISSING_MODEL
from trefoil.core.objective import ObjectiveMode
from trefoil.core.plan_check import check
from trefoil.core.policies import POLICIES, PRESETS
from trefoil.core.queueing import ServerClass, arrivals_s, serve_shared

ON_PROFILES = CloverSettings(measure_on="profiles")


def rng(seed=0):
    return np.random.default_rng(seed)


def test_an_exploration_ends_with_the_best_plan_that_was_measured():
    one = lambda_view()
    planner = CloverPlanner()
    assert planner.asks(one)
    found = explore(planner, one, rng())
    best = max(value(one, out) for c in found.candidates for out in [served(one, c.plan)] if out.p95_ms <= 75.0)
    assert value(one, served(one, found.decision.plan)) == pytest.approx(best)
    assert "no better configuration in 5 evaluations" in found.decision.why
    assert found.decision.next_tick_at_s == math.inf
    assert all(c.plan.exploration and c.requests_min == 200 for c in found.candidates)
    assert not found.decision.plan.exploration
    assert found.candidates[0].plan.nodes == _base(one).nodes  # the first round begins at BASE


def _base(one):
    decision = CloverPlanner(CloverSettings(patience=0, measure_on="profiles")).plan(one, rng())
    return decision.plan


def test_plans_pull_from_one_queue_with_one_credit_per_slice():
    plan = explore(CloverPlanner(), lambda_view(), rng()).decision.plan
    route = plan.routes[0]
    assert len({t.weight for t in route.targets}) == 1
    assert {t.credits for t in route.targets} == {1}
    slices = [s for n in plan.nodes for d in n.devices for s in d.slices]
    assert len(route.targets) == len(slices)


def test_every_gpu_is_alike_in_the_standardised_space():
    plan = explore(CloverPlanner(), lambda_view(weight=0.9), rng(3)).decision.plan
    layouts = {tuple(sorted(s.key.slice_type for s in d.slices)) for n in plan.nodes for d in n.devices}
    assert len(layouts) == 1


def test_equal_seeds_equal_sequences():
    runs = [explore(CloverPlanner(), lambda_view(), rng(seed)) for seed in (5, 5, 6)]
    sequences = [[c.plan.content_digest for c in run.candidates] for run in runs]
    assert sequences[0] == sequences[1] != sequences[2]


def test_five_minutes_of_measuring_end_a_round():
    found = explore(CloverPlanner(CloverSettings(patience=1_000_000)), lambda_view(), rng(), spent_s=40.0)
    assert len(found.candidates) == 8
    assert "320 s of measuring" in found.decision.why


def test_what_is_known_is_not_measured_again_and_intensity_rescales_it():
    one, planner = lambda_view(300.0), CloverPlanner()
    first = explore(planner, one, rng(1))
    again = explore(planner, first.view, rng(1))
    assert len(again.candidates) < len(first.candidates)
    seen = {c.plan.content_digest for c in first.candidates}
    assert not seen & {c.plan.content_digest for c in again.candidates}
    elsewhere = replace(first.view, demand=(Demand("digits", "", 20.0, 22.0),))
    assert explore(planner, elsewhere, rng(1)).candidates[0].plan.content_digest == first.decision.plan.content_digest


def test_what_runs_is_measured_again_when_it_breaks_its_promise():
    planner = CloverPlanner()
    first = explore(planner, lambda_view(), rng(1))
    for trigger, measured in (("carbon", False), ("slo", True), ("accuracy", True)):
        again = explore(planner, replace(first.view, trigger=trigger), rng(1))
        assert (first.decision.plan.content_digest in {c.plan.content_digest for c in again.candidates}) == measured


def test_works_without_any_profile_by_measuring_base_first():
    family = digits().families[0]
    one = replace(lambda_view(), catalog=Catalog((Family(family.name, "top1", family.variants, family.classes),), ()))
    planner = CloverPlanner(ON_PROFILES)
    assert planner.asks(one)
    found = explore(planner, one, rng(2), truth=digits())
    assert found.decision.plan is not None
    assert {s.hosted[0].variant for n in found.candidates[0].plan.nodes for d in n.devices for s in d.slices} == {"l"}


def test_nothing_meters_and_the_decision_says_so():
    family = digits().families[0]
    one = replace(lambda_view(), catalog=Catalog((Family(family.name, "top1", family.variants, family.classes),), ()))
    found = explore(CloverPlanner(), one, rng(), metered=False, truth=digits())
    assert found.decision.plan is None
    assert "no joules were measured" in found.decision.why


def test_candidates_that_fail_are_left_and_what_comes_nearest_is_named():
    def partitioned(candidate):
        return any(len(d.slices) > 1 for n in candidate.plan.nodes for d in n.devices)

    found = explore(CloverPlanner(), lambda_view(), rng(), fails=partitioned)
    assert all(len(d.slices) == 1 for n in found.decision.plan.nodes for d in n.devices)
    everything = explore(CloverPlanner(), lambda_view(), rng(), fails=lambda _: True)
    assert everything.decision.plan is None
    assert "could be measured" in everything.decision.degraded
    tight = replace(lambda_view(), objectives=(objective(mode=ObjectiveMode.LAMBDA, slo_ms=5.0, lambda_weight=0.1),))
    missed = explore(CloverPlanner(), tight, rng())
    assert "slo_missed: no configuration of digits that was tried keeps 5 ms" in missed.decision.degraded
    assert missed.decision.plan is not None


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 1000), stop=st.integers(0, 12))
def test_memory_goes_on_elsewhere(seed, stop):
    """Interrupted anywhere, a planner that recalls asks for the same as one that was never interrupted."""
    one = lambda_view(gpus=2)
    planner, other, draws = CloverPlanner(), CloverPlanner(), rng(seed)
    for _ in range(stop):
        if not isinstance(step := planner.ask(one, draws), Candidate):
            break
        out = served(one, step.plan)
        told = Measured("digits", out.p95_ms, out.p99_ms, 1.0, out.accuracy, None, 20.0, 10.0, out.joules)
        planner.tell(step, Measurement((told,), 10.0, 1.0, 0))
    memory = json.loads(json.dumps(planner.memory()))
    other.recall(memory)
    assert other.memory() == planner.memory()
    assert planner.ask(one, rng(9)) == other.ask(one, rng(9))
    other.recall({"version": 99})
    assert other.memory()["known"] == {}


def test_on_profiles_one_call_does_all_of_it_and_is_pure():
    one = lambda_view()
    planner = CloverPlanner(ON_PROFILES)
    assert not planner.asks(one)
    decisions = [planner.plan(one, rng(4)) for _ in range(2)]
    assert decisions[0].plan.content_digest == decisions[1].plan.content_digest
    check(decisions[0].plan, one.fleet, one.catalog, one.demand, one.objectives)
    expected = decisions[0].plan.expected["digits"]
    assert expected.joules_per_request == pytest.approx(served(one, decisions[0].plan).joules)


def test_a_missing_profile_is_named():
    catalog = digits()
    rows = tuple(r for r in catalog.rows if (r.variant, r.slice_type) != ("m", "2g.10gb"))
    one = replace(lambda_view(), catalog=Catalog(catalog.families, rows))
    for planner in (CloverPlanner(ON_PROFILES), OraclePlanner()):
        with pytest.raises(ProfileMissing, match=r"no profile of m on 2g\.10gb of A100-SXM4-40GB"):
            planner.plan(one, rng())


def test_oracle_is_at_least_as_good_as_whatever_annealing_finds():
    oracle = OraclePlanner()
    for intensity in (60.0, 250.0, 600.0):
        one = lambda_view(intensity)
        best = value(one, served(one, oracle.plan(one, rng()).plan))
        for seed in range(4):
            for planner in (
                CloverPlanner(ON_PROFILES),
                blover(ON_PROFILES, lambda *_: ""),
            ):
                assert value(one, served(one, planner.plan(one, rng(seed)).plan)) <= best + 1e-9


def test_oracle_follows_carbon_and_wakes_with_the_next_reading():
    decisions = [OraclePlanner().plan(lambda_view(ci, weight=0.2), rng()) for ci in (30.0, 900.0)]
    accuracy = [d.plan.expected["digits"].accuracy for d in decisions]
    assert accuracy[0] > accuracy[1]
    assert decisions[0].next_tick_at_s == lambda_view().carbon.ends_at_s
    assert "1282 evaluations" in decisions[0].why


def test_oracle_takes_given_outcomes():
    one = lambda_view()
    pod = pods_of(read_view(one, 1.0), True)[0]
    look = profile_estimator(one.catalog, pod.task, pod.space, CloverSettings())
    units = pod.space.units(A100_40GB)
    given = {"digits": {s.key: o for s, o in zip(units, look.many(units), strict=True)}}
    bare = replace(one, objectives=(replace(one.objectives[0], base_j_per_request=14.0),))
    assert (
        OraclePlanner(given=given).plan(bare, rng()).plan.content_digest
        == OraclePlanner().plan(bare, rng()).plan.content_digest
    )
    given["digits"].pop(units[5].key)
    with pytest.raises(ProfileMissing, match="no outcome is given"):
        OraclePlanner(given=given).plan(bare, rng())


def test_lambda_trades_accuracy_for_carbon():
    accuracy = [
        OraclePlanner().plan(lambda_view(100.0, weight), rng()).plan.expected["digits"].accuracy
        for weight in (0.0, 0.5, 1.0)
    ]
    assert accuracy == sorted(accuracy, reverse=True)
    assert accuracy[0] == pytest.approx(0.993)
    assert accuracy[-1] < 0.93


def test_accuracy_is_a_threshold():
    for loss in (0.2, 4.0):
        plan = OraclePlanner(CloverSettings(accuracy_loss_max_pct=loss)).plan(lambda_view(weight=0.9), rng()).plan
        assert plan.expected["digits"].accuracy >= 0.993 * (1 - loss / 100)
    floor = replace(lambda_view(weight=0.9).objectives[0], min_accuracy=0.97)
    plan = explore(CloverPlanner(), replace(lambda_view(weight=0.9), objectives=(floor,)), rng()).decision.plan
    assert plan.expected["digits"].accuracy >= 0.97


def test_blover_searches_the_raw_space_and_remembers_what_runs_only():
    planner = blover(CloverSettings(), lambda *_: "")
    first = explore(planner, lambda_view(), rng(1))
    assert first.decision.plan.planner == "blover"
    planner.ask(first.view, rng(2))
    assert len(planner.memory()["known"]["digits"]) <= 2


def test_families_share_the_fleet_as_pods():
    both = digits()
    other = Family("words", "f1", both.families[0].variants, both.families[0].classes)
    rows = (*both.rows, *(replace(r, family="words") for r in both.rows))
    wanted = tuple(
        objective(family=f, mode=ObjectiveMode.LAMBDA, slo_ms=75.0, min_accuracy=0.0) for f in ("digits", "words")
    )
    one = view(
        devices=fleet(4, 2),
        wanted=wanted,
        catalog=Catalog((*both.families, other), rows),
        demand=[Demand("digits", "", 30.0, 33.0), Demand("words", "", 20.0, 22.0)],
    )
    for chosen in (CloverPlanner(ON_PROFILES), OraclePlanner()):
        plan = chosen.plan(one, rng()).plan
        check(plan, one.fleet, one.catalog, one.demand, one.objectives)
        hosts = {d.device: {s.hosted[0].family for s in d.slices} for n in plan.nodes for d in n.devices}
        assert sorted(len(h) for h in hosts.values()) == [1] * 4
        assert sum(h == {"words"} for h in hosts.values()) == 2
    more = tuple(replace(o, params={"pod_devices": 1.0}) if o.family == "words" else o for o in wanted)
    plan = OraclePlanner().plan(replace(one, objectives=more), rng()).plan
    assert sum({s.hosted[0].family for s in d.slices} == {"words"} for n in plan.nodes for d in n.devices) == 1


def test_a_gpu_that_joins_takes_the_mix_of_the_others():
    plan = explore(CloverPlanner(), lambda_view(gpus=2, weight=0.9), rng(3)).decision.plan
    grown = lambda_view(gpus=3, weight=0.9)
    running = applied(plan, grown.fleet)
    pod = pods_of(read_view(replace(grown, fleet=running, current=plan), 1.0), True)[0]
    before = pods_of(read_view(replace(lambda_view(gpus=2), fleet=applied(plan, lambda_view(gpus=2).fleet)), 1.0), True)
    assert pod.current_setup() == before[0].current_setup()
    loose = pods_of(read_view(replace(grown, fleet=running, current=plan), 1.0), False)[0]
    assert loose.space.legal(loose.current_setup())
    assert loose.current_setup().graph.instances % 3 == 0


def test_the_fleet_graph_explores_too():
    found = explore(CloverPlanner(CloverSettings(standardised=False)), lambda_view(), rng(8))
    assert found.decision.plan is not None
    assert len(found.candidates) > 5


@pytest.mark.parametrize(
    ("policy", "preset", "known"),
    [
        ("exact", "artifact", "use one of: paper, shared_slices"),
        ("wattwiser", "guided", "use one of: literal, paper, shared_gpus"),
        ("clover", "artefact", "did you mean artifact?"),
    ],
)
def test_a_preset_of_another_planner_is_refused_by_those_that_there_are(policy, preset, known):
    with pytest.raises(SettingError) as refused:
        with_preset(POLICIES[policy], preset)
    assert (refused.value.field, refused.value.value) == ("preset", preset)
    assert known in refused.value.remedy


def test_presets_are_settings_that_the_planner_has():
    others = {"shared_gpus": "uniform", "shared_left": "wattwiser", "shared_slices": "exact"}
    assert set(PRESETS) == {"paper", "literal", "artifact", "guided", *others}
    for preset, name in others.items():
        PLANNERS[name].settings_of(PRESETS[preset])
    assert not PRESETS["paper"]
    assert all(getattr(CloverSettings(), name) != value for name, value in PRESETS["guided"].items())
    for name in ("clover", "blover", "oracle"):
        assert POLICIES[name].router == "fifo"
        for preset in (PRESETS[known] for known in PRESETS if known not in others):
            assert set(preset) <= set(PLANNERS[name].settings.model_fields)
            decision = (
                PLANNERS[name]
                .made(settings=CloverSettings(**preset, measure_on="profiles"), refuses=lambda _view, _plan: "")
                .plan(lambda_view(), rng())
            )
            assert isinstance(decision, Decision)
            assert decision.plan is not None


def test_what_was_left_before_it_was_measured_may_be_tried_again():
    """It fell with the backlog of one rollout: that says nothing of the next round's."""
    one, planner, number = lambda_view(), CloverPlanner(), itertools.count()
    first = explore(planner, one, rng(), fails=lambda _: next(number) > 0)  # all but what runs
    left = {c.plan.content_digest for c in first.candidates[1:]}
    again = explore(planner, replace(first.view, trigger="carbon"), rng())
    assert left & {c.plan.content_digest for c in again.candidates}


def test_many_mixes_at_once_are_served_as_one_by_one_and_as_the_shared_kernel():
    one = lambda_view()
    pod = pods_of(read_view(one, 1.0), True)[0]
    look = profile_estimator(one.catalog, pod.task, pod.space, CloverSettings())
    setups = [pod.space.random(rng(i)) for i in range(20)]
    together = look.many(setups)
    for setup, outcome in zip(setups, together, strict=True):
        alone = look(setup)
        assert (alone.joules, alone.p95_ms) == (pytest.approx(outcome.joules), pytest.approx(outcome.p95_ms))
    setup = pod.space.uniform({"A100-SXM4-40GB": setups[0].layouts[0][0]}, "s")
    point = {e: look.points[e] for e, _ in setup.graph.weights}
    pool = [ServerClass(4 * n, point[e].service) for e, n in setup.graph.weights]
    kernel = serve_shared(pool, arrivals_s(40.0, 1.0, 40_000, rng(1)), rng(2))
    assert look(setup).p95_ms - look.overhead_ms == pytest.approx(kernel.quantile_ms(0.95), rel=0.05)


def test_a_large_pod_is_served_at_ten_devices_and_errs_on_the_safe_side():
    one = lambda_view()
    small, large = (
        ProfileEstimator(
            Space(((A100_40GB, n),), digits().families[0].by_accuracy()), {}, 10.0 * n, 10.0 * n, 1.0, 0.0, 3000
        )
        for n in (10, 40)
    )
    points = profile_estimator(
        one.catalog, pods_of(read_view(one, 1.0), True)[0].task, small.space, CloverSettings()
    ).points
    setup = small.space.units(A100_40GB)[100]
    a, b = (replace(p, points=points)(setup) for p in (small, large))
    assert a.joules == pytest.approx(b.joules)
    assert a.p95_ms == b.p95_ms


@pytest.mark.parametrize("seed", range(6))
def test_whatever_cannot_be_loaded_meanwhile_is_neither_asked_for_nor_decided_on(seed):
    """Variants come and go while it explores, and its controller is started again now and then."""
    drawn, planner, one, cannot = rng(seed), CloverPlanner(), lambda_view(), ()
    versions = [variant.version for variant in one.catalog.families[0].variants]
    for _ in range(30):
        if drawn.random() < 0.2:
            cannot = drawn.choice(versions, drawn.integers(0, len(versions)), replace=False)
        if drawn.random() < 0.1:
            memory, planner = json.loads(json.dumps(planner.memory())), CloverPlanner()
            planner.recall(memory)
        missing = tuple(f"{MISSING_MODEL}digits/{version}: its file was cut short" for version in cannot)
        one = replace(one, fleet=replace(one.fleet, nodes=(replace(one.fleet.nodes[0], missing=missing),)))
        step = planner.ask(one, drawn)
        if step.plan is None:
            continue
        hosts = [h.version for n in step.plan.nodes for d in n.devices for s in d.slices for h in s.hosted]
        assert not {*hosts} & {*cannot}
        if isinstance(step, Candidate):
            out = served(one, step.plan)
            told = Measured("digits", out.p95_ms, out.p99_ms, 1.0, out.accuracy, None, out.rate_per_s, 10.0, out.joules)
            planner.tell(step, Measurement((told,), 10.0, 100.0, 0))
        one = replace(one, fleet=applied(step.plan, one.fleet), current=step.plan)

"""Jobs in the simulator: a case by hand for each rule, in time where there is room, and what is refused."""

import dataclasses

import pytest

from controller.jobs.core.rules import RULES
from tests.unit.simulator.test_scenario import scenario, served
from trefoil.comparison import runs
from trefoil.comparison.comparison import Row
from trefoil.comparison.report import missed_text
from trefoil.comparison.runs import compare_rules
from trefoil.core.errors import SettingError
from trefoil.simulator import simulate
from trefoil.simulator.scenario.inputs import Provided, prepare
from trefoil.simulator.scenario.schema import Arrivals, Carbon, JobsRule, Node, SimulatedJobs

CARBON = (400.0, 100.0, 300.0, 200.0)
PUE, PROBE = 1.5, 0.02


def world(hours=4.0, items=20_000, **changes):
    """One A100 that serves few requests, in hours of one intensity each; a job of some minutes, due at the end."""
    given = {
        "duration_s": hours * 3600.0, "policy": "base", "fidelity": "fluid", "control": {"pue": PUE},
        "nodes": (Node(devices=("A100-SXM4-40GB",)),), "families": (served(arrivals=Arrivals(rate_per_s=5.0)),),
        "carbon": Carbon(forecast="perfect"),
        "jobs": (SimulatedJobs(family="digits", items=items, complete_by_h=4.0),),
    }  # fmt: skip
    return scenario(**{**given, **changes})


def played(of, **changes):
    """A run in those hours of carbon."""
    return simulate(of, Provided(carbon={"demo": (3600.0, CARBON)}, **changes)).summary


def served_as(found):
    """How requests were served."""
    one = found.families["digits"]
    return one.arrived, one.answered, one.p50_ms, one.p95_ms, one.slo_attainment, one.mix


@pytest.mark.parametrize(
    ("rule", "g_per_kwh"),
    [
        ("at_once", 400.0),
        ("evenly", sum(CARBON) / 4),
        ("wait_awhile", 100.0),
        ("carbon_scaler", 100.0),
        ("planned", 100.0),
    ],
)
def test_grams_of_a_job_are_those_of_the_hours_that_its_rule_takes(rule, g_per_kwh):
    alone, found = played(world(jobs=())), played(world(jobs_rule=rule))
    jobs = found.jobs
    assert (jobs.rule, jobs.jobs, jobs.done, jobs.late, jobs.answered) == (rule, 1, 1, 0, 20_000)
    at_once = PROBE if rule not in ("at_once", "evenly") else 0.0  # items that measure the pace
    wanted = (at_once * CARBON[0] + (1 - at_once) * g_per_kwh) * PUE * jobs.joules / 3.6e6
    assert jobs.grams == pytest.approx(wanted, rel=1e-3)
    assert alone.jobs is None
    assert found.grams - alone.grams == pytest.approx(jobs.grams, rel=0.01), "but for saturation (core/power)"
    assert found.joules - alone.joules == pytest.approx(jobs.joules, rel=0.01)
    assert jobs.interactive_grams + jobs.grams == pytest.approx(found.grams)
    assert served_as(found) == served_as(alone)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_is_late_where_there_is_room_and_each_says_so_where_there_is_not(rule):
    hourly = SimulatedJobs(family="digits", share=1.0, every_h=1.0, complete_by_h=2.0)
    found = played(world(jobs=(hourly,), jobs_rule=rule)).jobs
    assert (found.jobs, found.done, found.late, found.late_items) == (3, 3, 0, 0.0)
    assert found.items == found.answered == 3 * 5 * 3600
    full = played(world(items=10**7, jobs_rule=rule)).jobs
    assert (full.done, full.late) == (0, 1)
    assert 0 < full.answered < full.items


def test_a_deadline_that_is_missed_counts_the_items_after_it():
    jobs = (SimulatedJobs(family="digits", items=400_000, complete_by_h=0.5),)
    found = played(world(jobs=jobs)).jobs
    assert (found.done, found.late) == (1, 1)
    assert 0 < found.late_items < found.items == found.answered


def test_a_job_ends_when_its_grams_are_spent_and_takes_no_variant_below_its_floor():
    bounded = SimulatedJobs(family="digits", items=20_000, complete_by_h=4.0, grams_max=0.05)
    found = played(world(jobs=(bounded,))).jobs
    assert found.done == 1
    assert found.answered + found.failed == pytest.approx(20_000)
    assert found.grams == pytest.approx(0.05, rel=0.05)
    floor = SimulatedJobs(family="digits", items=20_000, complete_by_h=4.0, min_accuracy=0.99)
    assert played(world(jobs=(floor,), policy="co2opt")).jobs.answered == 0, "co2opt serves the smallest variant"


def test_requests_one_by_one_are_served_as_without_jobs():
    of = world(hours=0.1, fidelity="request", jobs=(SimulatedJobs(family="digits", items=500, complete_by_h=0.1),))
    alone, found = played(of.model_copy(update={"jobs": ()})), played(of)
    assert (found.jobs.done, found.jobs.late) == (1, 0)
    assert served_as(found) == served_as(alone)


def test_rules_are_compared_at_equal_load_and_what_is_late_or_left_has_saved_nothing():
    of = world(hours=2.0, jobs=(SimulatedJobs(family="digits", items=20_000, complete_by_h=2.0),))
    found = compare_rules(of, ("at_once", "planned"), {}, jobs=1)
    (case,) = found.cases
    assert case.saving(case.row("planned")).pct["mean"] > 0
    assert {"jobs.grams", "jobs.interactive_grams", "jobs.done", "jobs.late"} <= set(found.records()[0])
    (run,) = case.row("planned").runs
    for changes, missed, why in (
        ({"late": 1}, ("deadlines",), "1 of 1 jobs are late"),
        ({"answered": 10_000}, (), "unequal work: 10,000 items of jobs answered against 20,000"),
    ):
        other = dataclasses.replace(run, summary={**run.summary, "jobs": {**run.summary["jobs"], **changes}})
        changed = dataclasses.replace(case, rows=(case.rows[0], Row("planned", (other,))))
        assert changed.rows[1].missed == missed
        assert changed.saving(changed.rows[1]).why == why
        assert (changed.rows[1].missed != ()) == ("deadlines" in missed_text(changed.rows[1]))


def test_all_rules_are_those_of_the_scenario():
    assert set(runs.RULES) == set(RULES) == set(JobsRule.__args__)


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        ({"complete_by_h": 0.0}, r"jobs\.0\.complete_by_h = 0\.0: a deadline in the past\. Remedy: hours after"),
        ({"complete_by_h": 5.0}, r"jobs\.0\.complete_by_h = 5\.0: a deadline after the run's end\. Remedy: at most 4"),
        ({"arrives_h": 1.0}, r"a deadline after the run's end\. Remedy: at most 3 for a job of hour 1"),
        ({"family": "digit"}, r"jobs\.0\.family = 'digit': no family of this scenario\. Remedy: one of digits"),
        ({"items": 0, "share": 1.5}, r"jobs\.0\.share = 1\.5: a share above 1\. Remedy: at most 1"),
        ({"items": 0}, r"jobs\.0\.items = 0: no one size\. Remedy: set items or share"),
        ({"share": 0.5}, r"jobs\.0\.items = 10: no one size"),
        ({"every_h": 1e-4, "complete_by_h": 1.0}, r"jobs\.0\.every_h = 0\.0001: more than 10,000 jobs"),
        ({"min_accuracy": 0.9999}, r"jobs\.0\.min_accuracy = 0\.9999: no variant of digits is that accurate.*at most"),
    ],
)
def test_jobs_that_cannot_be_are_refused(terms, said):
    with pytest.raises(SettingError, match=said):
        prepare(world(jobs=(SimulatedJobs(**{"family": "digits", "items": 10, "complete_by_h": 4.0, **terms}),)))


def test_policies_and_scenarios_without_jobs_are_refused():
    with pytest.raises(SettingError, match=r"policy = 'muserve': shares slices.*Remedy: take another policy"):
        prepare(world(policy="muserve"))
    with pytest.raises(SettingError, match=r"--rules = 'at_once,planned': the scenario has no jobs"):
        compare_rules(world(jobs=()), ("at_once", "planned"), {})
    with pytest.raises(SettingError, match=r"--rules = 'planned': nothing to compare.*at_once,evenly"):
        compare_rules(world(), ("planned",), {})

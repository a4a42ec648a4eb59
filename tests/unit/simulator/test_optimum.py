"""The offline optimum: a linear program over hours and measured plans, and a frontier that is measured to its end."""

import itertools

import pytest

from trefoil.core import errors
from trefoil.core.units import grams
from trefoil.reproduce.clover import past
from trefoil.reproduce.clover.optimum import FrontierPlan, measured_frontiers, open_prices, optimum_of, optimum_row
from trefoil.reproduce.experiment import BASE_INTENSITY, CONSTANT_G, Reference
from trefoil.reproduce.runs import PUE

REFERENCE = Reference("albert", 1, 60.0, 150.0, 30.0, 0.87)
HIDDEN = ((0.79, 6.0), (0.80, 6.6), (0.81, 7.4), (0.815, 9.9), (0.82, 8.2), (0.84, 18.0), (0.85, 24.0), (0.855, 27.5))


def fleet_of(hidden):
    """What plays a spec: the best of the hidden plans at its price."""
    asked = []

    def run(specs):
        asked.extend(specs)
        found = []
        for spec in specs:
            worth = (1 - spec.lambda_weight) / spec.lambda_weight
            price = worth * REFERENCE.joules * BASE_INTENSITY / (CONSTANT_G * REFERENCE.accuracy)
            accuracy, joules = min(hidden, key=lambda p: p[1] - price * p[0])
            found.append({"accuracy": accuracy, "joules_per_request": joules, "slo_attainment": 0.97})
        return found

    return run, asked


def plans_of(hidden=HIDDEN):
    run, asked = fleet_of(hidden)
    return measured_frontiers(run, [REFERENCE])[REFERENCE], asked


def test_the_frontier_holds_every_plan_that_some_price_asks_for_and_is_not_measured_twice():
    plans, asked = plans_of()
    assert {(p.accuracy, p.joules) for p in plans} == set(HIDDEN) - {(0.815, 9.9)}
    assert not open_prices(plans)
    assert len({spec.lambda_weight for spec in asked}) == len(asked) <= 2 * len(HIDDEN)


def test_the_optimum_is_that_of_brute_force_and_its_grid_has_no_error():
    plans, _ = plans_of()
    hours, floor = (100.0, 100.0, 350.0), 0.83
    best = optimum_of(plans, hours, floor)
    steps = [n / 40 for n in range(41)]  # of each hour, between two plans
    mixes = {
        ((1 - x) * a + x * b, (1 - x) * p + x * q)
        for (a, p), (b, q) in itertools.combinations(HIDDEN, 2)
        for x in steps
    }
    cheapest = {}
    for accuracy, joules in mixes:
        cheapest[round(accuracy, 4)] = min(joules, cheapest.get(round(accuracy, 4), 1e9))
    brute = min(
        (2 * 100 * p + 350 * q) / 3
        for (a, p), (b, q) in itertools.product(cheapest.items(), repeat=2)
        if (2 * a + b) / 3 >= floor - 1e-9
    )
    assert best.grams_per_request == pytest.approx(grams(brute, 1.0, PUE), rel=2e-3)
    assert best.grams_per_request <= grams(brute, 1.0, PUE) * (1 + 1e-6)
    assert best.accuracy == pytest.approx(floor)
    assert best.accuracy_at[100.0] > best.accuracy_at[350.0]
    assert best.grid_error_ratio == pytest.approx(0.0, abs=1e-6)


def test_a_frontier_with_holes_says_how_much_it_may_miss():
    known = [FrontierPlan(0.79, 6.0, 1.0, 35.0), FrontierPlan(0.855, 27.5, 1.0, 7000.0)]
    whole, _ = plans_of()
    hours = (100.0, 350.0)
    coarse, fine = optimum_of(known, hours, 0.82), optimum_of(whole, hours, 0.82)
    missed = 1 - fine.grams_per_request / coarse.grams_per_request
    assert 0.05 < missed <= coarse.grid_error_ratio + 1e-9


def test_each_run_is_held_against_the_optimum_at_its_own_accuracy():
    plans, _ = plans_of()
    hours = (100.0, 350.0)
    at = optimum_of(plans, hours, 0.825)
    runs = {
        "level": {"accuracy": 0.825, "grams_per_request": at.grams_per_request},
        "dearer": {"accuracy": 0.825, "grams_per_request": 1.1 * at.grams_per_request},
        "out of reach": {"accuracy": 0.9, "grams_per_request": 1.0},
    }
    row = optimum_row(plans, runs, hours, 0.82)
    assert row["above_optimum_pct"] == {
        "level": pytest.approx(0.0, abs=1e-5), "dearer": pytest.approx(10.0, abs=1e-4), "out of reach": None,
    }  # fmt: skip
    assert row["optimum"]["accuracy"] == pytest.approx(0.82)
    assert optimum_of(plans, hours, 0.9) is None


def test_the_past_is_the_week_before_and_a_file_without_it_is_refused(tmp_path, monkeypatch):
    file, column, begins = past.PASTS["eso-march"]
    monkeypatch.setattr(past, "data_folder", lambda: tmp_path)
    assert past.past_of("eso-march") == ()
    (tmp_path / "carbon").mkdir()
    path = tmp_path / "carbon" / file

    def write(hours):
        lines = [f"Datetime (UTC),{column}", *(f"hour {n},{n}" for n in range(hours)), f"{begins},999", "later,1000"]
        path.write_text("\n".join(lines), encoding="utf-8")

    write(200)
    assert past.past_of("eso-march") == tuple(float(n) for n in range(200 - past.HOURS, 200))
    write(past.HOURS - 1)
    with pytest.raises(errors.TraceError, match="week before"):
        past.past_of("eso-march")

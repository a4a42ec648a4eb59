"""An objective is accepted whole or refused by naming field, value and remedy."""

import re
from dataclasses import replace

import pytest

from controller.loop.core.objectives import accept_objective
from controller.planners.planner_settings import ExactSettings, PlannerSettings
from tests.support.plans import CATALOG
from tests.unit.controller.views import OBJECTIVE
from trefoil.core.catalog import Catalog
from trefoil.core.common import ProfileRow
from trefoil.core.errors import InvalidInput, StaleRevision
from trefoil.core.objective import NO_TOKEN_SLO, ObjectiveMode, TokenSlo, objective_text

ROW = ProfileRow("A100-SXM4-40GB", "7g.40gb", "toy", "toy-s", 0, 1, 1410, (), 20.0, 22.0, 23.0, 50.0, 5.0, 100.0, 100)
PROFILED = Catalog(CATALOG.families, (ROW,))


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("mode", ObjectiveMode.UNSPECIFIED, "type"),
        ("slo_ms", 0.0, "slo_ms"),
        ("slo_ms", float("nan"), "slo_ms"),
        ("slo_quantile", 95.0, "slo_quantile"),
        ("slo_quantile", 0.0, "slo_quantile"),
        ("min_accuracy", 95.0, "min_accuracy"),
        ("min_accuracy", 0.99, "accuracy.floor"),
        ("hard_min_accuracy", 0.96, "accuracy.hard_floor"),
        ("lambda_weight", -0.1, "lambda_weight"),
        ("window_s", -1.0, "window_s"),
        ("slo_ms", 10.0, "slo.latency_ms"),
        ("base_intensity_g_per_kwh", -5.0, "base_intensity_g_per_kwh"),
        ("family", "unknown", "family"),
        ("params", {"nonsense": 1.0}, "params"),
    ],
)
def test_what_nothing_can_meet_is_refused_by_field_value_and_remedy(field, value, named):
    with pytest.raises(InvalidInput, match=re.escape(named)) as refused:
        accept_objective(replace(OBJECTIVE, **{field: value}), {}, PROFILED, PlannerSettings())
    assert "Remedy: " in str(refused.value)


def test_defaults_are_filled_in_and_the_number_counts_on():
    sparse = replace(OBJECTIVE, window_s=0.0, pue=0.0, replicas_min=0, spread_min=0)
    first = accept_objective(sparse, {}, PROFILED, PlannerSettings(), pue=1.2)
    assert (first.number, first.window_s, first.pue, first.replicas_min, first.spread_min) == (1, 86400.0, 1.2, 2, 2)
    second = accept_objective(sparse, {"toy": first}, PROFILED, None, expected_number=1)
    assert second.number == 2


def test_a_change_by_somebody_else_is_noticed():
    with pytest.raises(StaleRevision, match="number 1, not 7"):
        accept_objective(OBJECTIVE, {"toy": OBJECTIVE}, PROFILED, None, expected_number=7)


@pytest.mark.parametrize(("params", "taken"), [({"solver_gap": 0.01}, False), ({"accuracy_margin": 0.01}, True)])
def test_a_setting_of_the_whole_fleet_is_no_familys(params, taken):
    wanted = replace(OBJECTIVE, params=params)
    if taken:
        assert accept_objective(wanted, {}, PROFILED, ExactSettings()).params == params
        return
    with pytest.raises(InvalidInput, match=r"params\.solver_gap = 0\.01.*Remedy: set parts\.planner\.solver_gap"):
        accept_objective(wanted, {}, PROFILED, ExactSettings())


def test_params_of_a_planner_of_ones_own_are_its_own_business():
    assert accept_objective(replace(OBJECTIVE, params={"mine": 2.0}), {}, PROFILED, None).params == {"mine": 2.0}


def test_an_slo_that_is_left_open_is_that_of_the_family():
    (toy,) = (replace(family, classes={"": (44.0, 0.9)}) for family in CATALOG.families if family.name == "toy")
    found = accept_objective(
        replace(OBJECTIVE, slo_ms=0.0, slo_quantile=0.0), {}, Catalog((toy,), (ROW,)), PlannerSettings()
    )
    assert (found.slo_ms, found.slo_quantile) == (44.0, 0.9)
    assert accept_objective(OBJECTIVE, {}, Catalog((toy,), (ROW,)), None).slo_ms == OBJECTIVE.slo_ms


TALKS = Catalog(tuple(replace(each, generative=True, tokens_mean=4.0) for each in CATALOG.families), (ROW,))


def test_objectives_of_tokens_are_taken_with_a_percentile_of_their_own_or_the_usual_one():
    wanted = replace(OBJECTIVE, ttft_ms=40.0, tpot_ms=8.0, tpot_quantile=0.9)
    found = accept_objective(wanted, {}, TALKS, PlannerSettings())
    assert found.token_slo == TokenSlo(40.0, 0.95, 8.0, 0.9)
    assert "TTFT p95 <= 40 ms; TPOT p90 <= 8 ms; " in objective_text(found)
    assert accept_objective(OBJECTIVE, {}, TALKS, PlannerSettings()).token_slo == NO_TOKEN_SLO


@pytest.mark.parametrize(
    ("changes", "catalog", "named"),
    [
        ({"ttft_ms": 40.0}, PROFILED, "slo.ttft_ms = 40.0: of a family that streams no tokens"),
        ({"tpot_ms": float("nan")}, TALKS, "tpot_ms = nan"),
        ({"ttft_ms": -40.0}, TALKS, "slo.ttft_ms = -40.0"),
        ({"tpot_ms": 101.0}, TALKS, "is above slo.latency_ms 100"),
        ({"ttft_ms": 400.0}, TALKS, "is above slo.latency_ms 100"),
        ({"tpot_quantile": 0.9}, TALKS, "slo.tpot_percentile = 90"),
        ({"ttft_ms": 40.0, "ttft_quantile": 95.0}, TALKS, "ttft_quantile = 95"),
        ({"ttft_ms": 40.0, "ttft_quantile": -0.5}, TALKS, "slo.ttft_percentile = -50"),
        ({"tpot_ms": 4.9}, TALKS, "slo.tpot_ms = 4.9: no variant of toy makes a token that fast"),
        ({"ttft_ms": 1e-9}, TALKS, "ttft_ms = 1e-09"),
    ],
)
def test_objectives_of_tokens_that_mean_nothing_are_refused_by_field_value_and_remedy(changes, catalog, named):
    with pytest.raises(InvalidInput, match=re.escape(named)) as refused:
        accept_objective(replace(OBJECTIVE, **changes), {}, catalog, PlannerSettings())
    assert "Remedy: " in str(refused.value)

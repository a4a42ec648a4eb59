"""Budgets against the offline optimum on CLOVER's trace, as a flow. `pytest -s` prints the figures of each seed."""

import pytest

from trefoil.reproduce.clover.optimum import measured_frontiers, optimum_row
from trefoil.reproduce.clover.past import past_of
from trefoil.reproduce.experiment import MAIN_TRACE, reference_of, reference_spec, spec_of, trace_of
from trefoil.reproduce.runs import run_spec

NEAR_CLOVER: dict[str, float] = {"albert": 0.832, "yolo": 0.5065, "efficientnet": 0.8342}  # its accuracy, all seeds
CASES = [*(("albert", seed) for seed in (1, 2, 3, 4, 5)), ("yolo", 1), ("efficientnet", 1)]
FLOW = {"fidelity": "fluid", "step_s": 60.0}


@pytest.mark.long
@pytest.mark.parametrize(("family", "seed"), CASES)
def test_with_its_own_forecast_a_budget_is_within_3_percent_of_the_optimum(family, seed):
    if not trace_of(MAIN_TRACE) or not past_of(MAIN_TRACE):
        pytest.skip("the real traces are not here: set TREFOIL_DATA")
    reference, floor = reference_of(run_spec(reference_spec(family, seed))), NEAR_CLOVER[family]

    def played(policy, **changes):
        settings = {"mode": "budget", "min_accuracy": floor, "knows_truth": True, **FLOW, **changes}
        return run_spec(spec_of(reference, policy, policy, 48.0, trace_of(MAIN_TRACE), **settings))

    past = past_of(MAIN_TRACE)
    runs = {
        "static_mix": played("static_mix"),
        "no past": played("exact"),
        "past": played("exact", past=past),
        "own forecast": played("exact", past=past, forecast="blend"),
        "perfect forecast": played("exact", forecast="perfect"),
    }
    plans = measured_frontiers(lambda specs: [run_spec(s) for s in specs], [reference], **FLOW)[reference]
    row = optimum_row(plans, runs, runs["past"].series["intensity_g_per_kwh"], floor)
    best, above = row["optimum"], row["above_optimum_pct"]
    print(
        f"\n{family} seed {seed}: optimum {1e3 * best['grams_per_request']:.4f} mg at {floor}, error of the grid "
        f"{best['grid_error_ratio']:.2%}, in SLO {best['slo_attainment']:.4f}; "
        "above it in %, accuracy less the floor, in SLO:"
    )
    for label, run in runs.items():
        print(f"  {label:17}{above[label]:6.2f}  {run['accuracy'] - floor:+.5f}  {run['slo_attainment']:.4f}")
    assert best["grid_error_ratio"] < 0.005
    assert -1.0 < above["perfect forecast"] < 3.0
    assert above["own forecast"] < 3.0
    assert above["own forecast"] < above["static_mix"]
    assert not any(run["floor_missed"] for run in runs.values())

"""BASE on an A100 three ways: one 7g slice, 4g + 3g, and outside MIG."""

from dataclasses import replace

import pytest

from trefoil.reproduce.clover.study import CloverOptions, Study
from trefoil.reproduce.clover.sweeps import base_variants
from trefoil.reproduce.experiment import Experiment, capacity_per_s, reference_spec
from trefoil.reproduce.runs import catalogs, run_spec, scenario_of
from trefoil.simulator import simulate
from trefoil.simulator.scenario.inputs import Provided

FAMILY = "efficientnet"
SEED = 1


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    said = []
    study = Study(
        CloverOptions(Experiment((FAMILY,)), (SEED,), 1.0, 1.0, 1.0, 1, False),
        tmp_path_factory.mktemp("bases"),
        said.append,
    )
    study.run_references()
    return base_variants(study, FAMILY)


@pytest.mark.long
def test_they_differ_as_their_slices_do(found):
    seven, halves, outside = found.values()
    for name, one in found.items():
        assert one["accuracy"] == pytest.approx(seven["accuracy"]), name
        assert abs(one["joules_over_7g_pct"]) < 20, name
    assert 0.9 < outside["p50_ms"] / seven["p50_ms"] <= 1.0  # 10 more SMs, the same decoding; in bins of 4 %
    assert outside["p95_ms"] < seven["p95_ms"]
    assert halves["p50_ms"] > 1.1 * seven["p50_ms"]  # a request has half a GPU
    assert 0 < outside["joules_over_7g_pct"] < 100 * (108 / 98 - 1)
    assert halves["joules_per_request"] < seven["joules_per_request"]  # narrow slices are better filled


def test_outside_mig_base_is_the_best_variant_on_whole_gpus():
    spec = replace(reference_spec(FAMILY, SEED), device="A100-SXM4-40GB-nomig", hours=0.05, gpus=2,
                   rate_per_s=0.5 * capacity_per_s(FAMILY, 2), noise=0.0, device_noise=0.0)  # fmt: skip
    told, truth = catalogs(spec)
    assert {(r.device_type, r.slice_type) for r in told.rows} == {(spec.device, "whole")}
    run = simulate(scenario_of(spec), Provided(catalog=told, truth=truth))
    assert "efficientnet-b7 on 2xwhole, all 2 GPUs awake" in run.decisions[0]["why"]
    assert run.summary.families[FAMILY].mix == {"efficientnet-b7": 1.0}
    row = next(r for r in told.rows if (r.variant, r.batch, r.clock_mhz) == ("efficientnet-b7", 8, 1410))
    expected = row.energy_active_j_per_batch + 2 * 55.0 / spec.rate_per_s
    assert run.summary.joules_per_request == pytest.approx(expected, rel=0.06)
    assert run_spec(spec)["joules_per_request"] == pytest.approx(run.summary.joules_per_request)

"""What is found in pages of each version, and that the known traps of each do not change it."""

import numpy as np
import pytest

from tests.support.metric_pages import BEGIN_S, IDLE_W, JOULES, SERVICE_S, World, joules, vllm
from trefoil.assess.finding import find, histogram_quantile
from trefoil.assess.fitting import NO_MODEL, costs, fit_boards
from trefoil.assess.given import page_samples
from trefoil.assess.series import MetricSeries, series_of
from trefoil.core.errors import InvalidInput

DAY_S = 86_400.0
STEP_S = 900.0


def costed(found, pue=1.0):
    return costs(
        found,
        fit_boards(found, {one.board: 55.0 for one in found.devices.values()}),
        np.full(found.edges_s.size - 1, 360.0),
        pue,
    )


@pytest.mark.parametrize(("release", "dcgm"), [("23", ""), ("24", "3"), ("26", "4")])
def test_every_version_of_pages_says_the_same(release, dcgm):
    world = World()
    found = find(world.series(DAY_S, STEP_S, release, dcgm))
    model = found.models["resnet50:3"]
    truth = [world.requests(n, DAY_S) for n in (0, 1)]
    assert model.count("requests").sum() == pytest.approx(sum(truth), rel=1e-6)
    assert model.service_ms == pytest.approx(1e3 * SERVICE_S, rel=1e-6)
    assert [one.devices for one in model.replicas] == [(("GPU-0", ""),), (("GPU-1", ""),)]
    assert joules(found) == pytest.approx(sum(world.joules(n, DAY_S) for n in (0, 1)), rel=1e-6)
    if release == "23":
        assert (model.latency_basis, model.latency_ms) == ("mean", {})
        assert model.request_ms == pytest.approx(1.5e3 * SERVICE_S)
    else:
        assert (model.latency_basis, model.latency_ms[0.95]) == ("summary", pytest.approx(55.0))
    noon = int(np.argmax(model.count("requests")))
    assert noon / found.edges_s.size == pytest.approx(0.25, abs=0.05)  # the sine's top: the load by hour is kept


def test_idle_watts_and_joules_of_an_execution_are_fitted_and_add_up():
    found = find(World().series(DAY_S, STEP_S))
    cost = costed(found)
    (fit,) = cost.fits.values()
    assert (fit.idle_w, fit.idle_basis) == (pytest.approx(IDLE_W, rel=1e-3), "fitted")
    assert fit.joules["resnet50:3"] == pytest.approx(JOULES, rel=1e-3)
    assert cost.whole.joules == pytest.approx(joules(found), rel=1e-9)
    assert cost.whole.idle_j == pytest.approx(2 * IDLE_W * DAY_S, rel=1e-3)
    assert cost.whole.grams == pytest.approx(joules(found) / 1e4, rel=1e-9)  # 360 g/kWh are 1e-4 g/J


def test_counters_that_restart_lose_nothing():
    world = World(restarts_s={0: 40_100.0}, driver_restarts_s={1: 50_500.0})
    found = find(world.series(DAY_S, STEP_S))
    assert found.models["resnet50:3"].count("requests").sum() == pytest.approx(
        sum(world.requests(n, DAY_S) for n in (0, 1)), rel=0.011
    )
    assert joules(found) == pytest.approx(sum(world.joules(n, DAY_S) for n in (0, 1)), rel=0.011)


def test_missing_hours_are_counted_nowhere_and_said():
    world = World()
    found = find(world.series(DAY_S, STEP_S, missing=[(30_600.0, 40_500.0)]))
    expected = sum(world.joules(n, DAY_S) - world.joules(n, 40_500.0) + world.joules(n, 30_600.0) for n in (0, 1))
    assert joules(found) == pytest.approx(expected, rel=1e-6)
    assert found.covered_s.sum() == pytest.approx(DAY_S - 9_900.0, rel=1e-6)
    assert any("11.5% of the time has no samples" in note for note in found.notes)


def test_with_mig_each_slice_repeats_the_boards_joules_which_count_once():
    world = World(profile="3g.20gb")
    found = find(world.series(DAY_S, STEP_S))
    assert joules(found) == pytest.approx(sum(world.joules(n, DAY_S) for n in (0, 1)), rel=1e-6)
    assert found.devices["GPU-0"].slices == {"7": "3g.20gb", "8": "3g.20gb"}
    assert found.models["resnet50:3"].replicas[0].devices == (("GPU-0", "7"),)


def test_labels_renamed_by_a_scraper_are_the_same_servers():
    """Prometheus renames what collides with its target's labels: pod becomes exported_pod."""
    samples = []
    world = World()
    for at_s in np.arange(0.0, 7200.0, 120.0):
        for n in (0, 1):
            samples += page_samples(
                world.triton(n, at_s, "24"), BEGIN_S + at_s, "t", instance=f"h{n}:1", pod=f"triton-{n}"
            )
        for name, labels, time, value in page_samples(world.dcgm(at_s), BEGIN_S + at_s, "d"):
            renamed = {f"exported_{k}" if k in ("pod", "namespace", "container") else k: v for k, v in labels.items()}
            samples.append((name, {**renamed, "pod": "dcgm-exporter-x", "instance": "10.1.1.1:9400"}, time, value))
    found = find(series_of(samples))
    assert [one.devices for one in found.models["resnet50:3"].replicas] == [(("GPU-0", ""),), (("GPU-1", ""),)]


def test_a_page_scraped_by_two_jobs_counts_once():
    world, samples = World(servers=1), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        for job in ("pods", "services"):
            samples += page_samples(world.triton(0, at_s), BEGIN_S + at_s, "t", instance="h:8002", job=job)
            samples += page_samples(world.dcgm(at_s), BEGIN_S + at_s, "d", job=job)
    found = find(series_of(samples))
    assert found.models["resnet50:3"].count("requests").sum() == pytest.approx(world.requests(0, 7080.0), rel=1e-6)
    assert joules(found) == pytest.approx(world.joules(0, 7080.0), rel=1e-6)


def test_a_device_without_a_model_says_what_idle_is():
    world, samples = World(), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        for n in (0, 1):
            samples += page_samples(world.triton(n, at_s), BEGIN_S + at_s, "t", instance=f"h{n}:1", pod=f"triton-{n}")
        page = world.dcgm(at_s, devices=3).replace("GPU-2", "GPU-idle")
        samples += [
            (name, labels, time, 60.0 if "POWER" in name else 6e4 * at_s if "ENERGY" in name else value)
            if labels["UUID"] == "GPU-idle" else (name, labels, time, value)
            for name, labels, time, value in page_samples(page, BEGIN_S + at_s, "d")
        ]  # fmt: skip
    found = find(series_of(samples))
    cost = costed(found)
    assert cost.fits["NVIDIA A100-SXM4-40GB"].idle_basis == "seen idle"
    assert cost.by_model[NO_MODEL].joules == pytest.approx(60.0 * 7080.0, rel=1e-3)
    assert found.asleep_h() > 1.9


def test_models_on_the_same_devices_spare_them_once_and_gaps_spare_nothing():
    whole = []
    for name in "abc":
        own = World(model=name, base_per_s=0.1).series(DAY_S, STEP_S, missing=[(30_600.0, 40_500.0)])
        whole += [one for one in own if name == "a" or "model" in one.labels]
    assert find(whole).asleep_h() == pytest.approx((DAY_S - 9_900.0) / 3600.0, rel=1e-3)


def test_a_batch_counts_its_time_once_for_each_request_but_is_one_execution():
    found = find(World(mean_batch=4.0).series(DAY_S, STEP_S))
    model = found.models["resnet50:3"]
    assert (model.batch, model.service_ms) == (pytest.approx(4.0), pytest.approx(1e3 * SERVICE_S))
    busy = sum(model.busy_s(one).sum() for one in model.replicas)
    assert busy == pytest.approx(model.count("requests").sum() / 4 * SERVICE_S, rel=1e-6)


@pytest.mark.parametrize("release", ["0.6", "0.8", "0.32"])
def test_vllm_of_every_version(release):
    world, samples = World(servers=1), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        samples += page_samples(vllm("meta-llama/Llama-3-8B", 0.5 * at_s, release), BEGIN_S + at_s, "v", pod="triton-0")
        samples += page_samples(world.dcgm(at_s), BEGIN_S + at_s, "d")
    model = find(series_of(samples)).models["meta-llama/Llama-3-8B"]
    assert model.count("requests").sum() == pytest.approx(0.5 * 7080.0, rel=1e-6)  # over finished_reason
    assert (model.batch, model.service_ms) == (4.0, pytest.approx(1500.0))
    assert model.latency_basis == "histogram"
    assert model.latency_ms[0.5] == pytest.approx(2000.0)
    assert model.replicas[0].devices == (("GPU-0", ""),)


def test_a_series_of_two_samples_far_apart_spoils_neither_bins_nor_gaps():
    world = World()
    whole = world.series(DAY_S, STEP_S)
    few = [MetricSeries(s.name, {**s.labels, "pod": "triton-9"}, s.times_s[[0, -1]], s.values[[0, -1]]) for s in whole]
    found = find([*whole, *(s for s in few if s.name.startswith("nv_inference"))])
    assert found.bin_s == find(whole).bin_s
    assert found.models["resnet50:3"].count("requests").sum() == pytest.approx(
        sum(world.requests(n, DAY_S) for n in (0, 1)), rel=1e-6
    )


def test_samples_of_each_hour_are_enough():
    """As a year is read: bins are as wide as the samples are apart."""
    world, span_s = World(), 20 * DAY_S + 1800.0
    times = np.arange(0.0, span_s, 3600.0)
    few = [
        MetricSeries(s.name, s.labels, BEGIN_S + times, np.interp(times, s.times_s - BEGIN_S, s.values))
        for s in world.series(20 * DAY_S, DAY_S / 2)
    ]
    found = find(few)
    assert joules(found) == pytest.approx(sum(world.joules(n, times[-1]) for n in (0, 1)), rel=1e-3)
    assert found.covered_s.sum() == pytest.approx(times[-1], rel=1e-6)


def test_a_server_on_two_boards_is_on_both():
    world, samples = World(servers=1), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        samples += page_samples(world.triton(0, at_s), BEGIN_S + at_s, "t", instance="h:8002", pod="triton-0")
        page = world.dcgm(at_s, devices=2).replace(
            'modelName="NVIDIA A100-SXM4-40GB",Hostname="gpu-a"}', 'pod="triton-0"}'
        )
        samples += page_samples(page, BEGIN_S + at_s, "d")
    found = find(series_of(samples))
    assert found.models["resnet50:3"].replicas[0].devices == (("GPU-0", ""), ("GPU-1", ""))


def test_a_quantile_beyond_the_last_bound_is_that_bound():
    assert histogram_quantile({0.1: 0.0, 1.0: 10.0, float("inf"): 20.0}, 0.95) == 1.0
    assert histogram_quantile({0.1: 0.0, 1.0: 10.0, float("inf"): 10.0}, 0.5) == pytest.approx(0.55)


def test_power_is_integrated_where_no_counter_is():
    world = World()
    series = [one for one in world.series(DAY_S, STEP_S) if "nergy" not in one.name.lower()]
    found = find(series)
    assert joules(found) == pytest.approx(sum(world.joules(n, DAY_S) for n in (0, 1)), rel=1e-3)
    assert any("no energy counter" in note for note in found.notes)


@pytest.mark.parametrize(
    ("keep", "wanted"),
    [("DCGM", "nv_inference_request_success (Triton)"), ("nv_inf", "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION")],
)
def test_what_is_missing_is_named_with_how_to_get_it(keep, wanted):
    series = [one for one in World(profile="1g.5gb").series(3600.0, 300.0) if one.name.startswith(keep)]
    with pytest.raises(InvalidInput) as raised:
        find(series)
    assert wanted in str(raised.value)
    assert "Remedy" in str(raised.value)

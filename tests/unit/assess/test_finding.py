"""What is found in pages of each version, and that the known traps of each do not change it."""

from dataclasses import replace

import numpy as np
import pytest

from tests.support.metric_pages import BEGIN_S, IDLE_W, JOULES, SERVICE_S, World, joules, vllm
from trefoil.assess.families import FittedFamily
from trefoil.assess.finding import find, histogram_quantile
from trefoil.assess.fitting import NO_MODEL, costs, fit_boards
from trefoil.assess.given import page_samples
from trefoil.assess.scenario import rates
from trefoil.assess.series import MetricSeries, series_of
from trefoil.core.catalog import Family
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
    assert costed(found).fits["NVIDIA A100-SXM4-40GB"].idle_basis == "fitted", "no utilisation is there"


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


def sampled(pages, span_s=7200.0):
    """Series of pages of each time, with what a scraper adds to each."""
    times = np.arange(0.0, span_s, 120.0)
    return series_of(
        one
        for at_s in times
        for text, labels in pages(at_s)
        for one in page_samples(text, BEGIN_S + at_s, "p", **labels)
    )


def test_two_tritons_that_report_one_gpu_count_it_once():
    """Each counts its joules since its own start."""
    world, other = World(servers=1), World(servers=1, model="other")

    def pages(at_s):
        counted, started_s = f"{world.joules(0, at_s) + 1e3:f}", 3000.0
        yield world.triton(0, at_s), {"instance": "h:8002"}
        if at_s >= started_s:
            late = f"{world.joules(0, at_s) - world.joules(0, started_s):f}"
            yield other.triton(0, at_s).replace(counted, late), {"instance": "h:9002"}

    found = find(sampled(pages))
    assert joules(found) == pytest.approx(world.joules(0, 7080.0), rel=1e-6)
    assert {name: one.replicas[0].devices for name, one in found.models.items()} == {
        "resnet50:3": (("GPU-0", ""),), "other:3": (("GPU-0", ""),),
    }  # fmt: skip


def test_pods_that_share_a_gpu_by_time_repeat_its_joules_which_count_once():
    world = World(servers=1)

    def pages(at_s):
        row = world.dcgm(at_s)
        shared = row + "".join(
            line.replace("triton-0", "triton-1").replace("}", ',vgpu="1"}')
            for line in row.splitlines(True)
            if "{" in line
        )
        yield shared, {"instance": "d:9400"}
        for n in (0, 1):
            yield world.triton(0, at_s), {"instance": f"h{n}:8002", "pod": f"triton-{n}", "namespace": "prod"}

    found = find(sampled(pages))
    assert joules(found) == pytest.approx(world.joules(0, 7080.0), rel=1e-6)
    assert [one.devices for one in found.models["resnet50:3"].replicas] == [(("GPU-0", ""),)] * 2


def test_the_exporters_old_labels_name_the_pod_that_uses_a_gpu():
    """Its option --use-old-namespace; `pod` and `namespace` are then those of the exporter itself."""
    world = World()

    def pages(at_s):
        page = world.dcgm(at_s).replace("triton-0", "triton-9")  # in the other order than the GPUs
        renamed = page.replace("namespace=", "pod_namespace=").replace(",pod=", ",pod_name=")
        yield renamed, {"pod": "dcgm-exporter-x", "namespace": "gpu-operator"}
        for n, pod in enumerate(("triton-9", "triton-1")):
            yield world.triton(n, at_s, "24"), {"instance": f"h{n}:1", "pod": pod, "namespace": "prod"}

    model = find([one for one in sampled(pages) if "gpu_uuid" not in one.labels]).models["resnet50:3"]
    assert {one.name: one.devices for one in model.replicas} == {
        "prod/triton-9": (("GPU-0", ""),), "prod/triton-1": (("GPU-1", ""),),
    }  # fmt: skip


def test_answers_of_a_cache_are_no_executions():
    series = World().series(DAY_S, STEP_S)
    computed = ("exec_count", "compute_", "inference_count")
    series = [replace(s, values=s.values / 2) if any(part in s.name for part in computed) else s for s in series]
    asked = [one for one in series if one.name.startswith("nv_inference_request_success")]
    hits = [replace(one, name="nv_cache_num_hits_per_model", values=one.values / 2) for one in asked]
    model = find([*series, *hits]).models["resnet50:3"]
    assert (model.service_ms, model.items) == (pytest.approx(1e3 * SERVICE_S), pytest.approx(1.0))
    assert not model.joins


def test_an_ensemble_is_listed_beside_its_models():
    world, whole = World(servers=1), World(servers=1, model="pipeline")

    def pages(at_s):
        yield world.triton(0, at_s) + whole.triton(0, at_s).partition("# TYPE nv_gpu")[0], {"pod": "triton-0"}
        yield world.dcgm(at_s), {}

    found = find(sampled(pages))
    assert set(found.models) == {"resnet50:3", "pipeline:3"}
    for model in found.models.values():
        assert model.count("requests").sum() == pytest.approx(world.requests(0, 7080.0), rel=1e-6)


def test_engines_of_one_vllm_are_summed():
    world = World(servers=1)

    def pages(at_s):
        page = vllm("llama", 0.5 * at_s)
        for engine in (page, "".join(one for one in page.replace('engine="0"', 'engine="1"').splitlines(True))):
            yield engine, {"pod": "triton-0"}
        yield world.dcgm(at_s), {}

    model = find(sampled(pages)).models["llama"]
    assert (model.batch, len(model.replicas)) == (pytest.approx(8.0), 1)
    assert model.count("requests").sum() == pytest.approx(7080.0, rel=1e-6)


def test_stale_markers_that_last_are_a_gap():
    def stale(values):
        values[40:50] = np.nan
        return values

    found = find(with_values(World().series(DAY_S, STEP_S), ENERGY, stale))
    assert found.covered_s.sum() == pytest.approx(DAY_S - 11 * STEP_S)


def test_load_of_a_gap_is_that_of_the_same_hour_on_other_days():
    found = find(World().series(3 * DAY_S, STEP_S, missing=[(DAY_S + 30_600.0, DAY_S + 40_500.0)]))
    fitted = FittedFamily(Family("resnet50", "accuracy", ()), list(found.models.values()), 100.0)
    rate, hours = rates(found, fitted), round(DAY_S / found.bin_s)
    at = hours + round(36_000.0 / found.bin_s)
    assert fitted.models[0].count("requests")[at] == 0.0
    assert rate[at] == pytest.approx((rate[at - hours] + rate[at + hours]) / 2)


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


def with_values(series, name, change):
    """Series of which those of a name have other values."""
    own = (name, f"{name}_total")
    return [replace(one, values=change(one.values.copy())) if one.name in own else one for one in series]


def at(number, value):
    """Change of one sample: to a value, or by a function of it."""

    def change(values):
        values[number] = value(values[number]) if callable(value) else value
        return values

    return change


ENERGY = "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (at(40, 9_223_372_036_854_775_794.0), f"{ENERGY}: 2 samples left out"),  # not supported
        (at(40, 2.0**63 - 16), f"{ENERGY}: 2 samples left out"),
        (at(40, -1.0), f"{ENERGY}: 2 samples left out"),
        (at(40, np.inf), f"{ENERGY}: 2 samples left out"),
        (at(40, np.nan), ""),
        (at(40, 140_737_488_355_328.0), "GPU-0: 2 changes of its joules left out: above 800 W"),
        (at(40, lambda mj: 1.6 * mj), "GPU-0: 2 changes of its joules left out: above 800 W"),
        (at(40, lambda mj: mj - 5.0), ""),  # of two exporters one is behind
        (lambda mj: 3e12 + at(40, lambda one: one - 5e3)(mj), ""),
    ],
)
def test_one_wrong_sample_makes_neither_joules_nor_silence(change, said):
    world = World()
    found = find(with_values(world.series(DAY_S, STEP_S), ENERGY, change))
    per_s = joules(found) / sum(one.covered_s.sum() for one in found.devices.values())
    assert per_s == pytest.approx(sum(world.joules(n, DAY_S) for n in (0, 1)) / DAY_S / 2, rel=0.01)
    notes = [note for note in found.notes if "left out" in note]
    assert said in notes[0] if said else not notes


def test_a_blank_of_watts_or_utilisation_is_no_sample():
    series = [one for one in World().series(DAY_S, STEP_S) if "nergy" not in one.name and ENERGY not in one.name]
    wanted = find(series)
    power, utilisation = "DCGM_FI_DEV_POWER_USAGE", "DCGM_FI_DEV_GPU_UTIL"
    for name, blank in ((power, 2.0**47), (utilisation, 2.0**31 - 16), (utilisation, -1.0)):
        found = find(with_values(series, name, at(40, blank)))
        assert joules(found) == pytest.approx(joules(wanted), rel=1e-3)
        assert found.devices["GPU-0"].activity == pytest.approx(0.3)


def test_samples_read_more_often_than_they_are_scraped_are_no_jumps():
    """As Prometheus answers a step shorter than the scrape interval: each value several times."""
    series = World(base_per_s=140.0).series(2 * 3600.0, 60.0)  # 340 W of 400
    times = np.arange(BEGIN_S, BEGIN_S + 7200.0, 5.0)
    often = [
        MetricSeries(s.name, s.labels, times, s.values[np.searchsorted(s.times_s, times, side="right") - 1])
        for s in series
    ]
    found = find(often)
    assert joules(found) == pytest.approx(joules(find(series)) * 7140 / 7200, rel=0.02)
    assert not any("left out" in note for note in found.notes)


def test_a_counter_that_stays_at_zero_is_none():
    series = World().series(DAY_S, STEP_S)
    flat = with_values(with_values(series, ENERGY, np.zeros_like), "nv_energy_consumption", np.zeros_like)
    found = find(flat)
    assert joules(found) == pytest.approx(joules(find(series)), rel=1e-3)
    assert {one.basis for one in found.devices.values()} == {"power, integrated"}


def test_a_device_that_says_nothing_shortens_no_time():
    whole = World().series(3600.0, 300.0)
    clock = MetricSeries(
        "DCGM_FI_DEV_SM_CLOCK", {"UUID": "GPU-9"}, whole[0].times_s, np.full(whole[0].times_s.size, 1e3)
    )
    found = find([*whole, clock])
    assert found.covered_s.sum() == pytest.approx(3600.0)
    assert "GPU-9: neither joules nor watts: it counts as nothing" in found.notes
    assert not any("no samples" in note for note in found.notes)


@pytest.mark.parametrize("at_s", [0.0, 9e10])
def test_a_sample_of_another_age_is_refused_with_its_time(at_s):
    series = World().series(3600.0, 300.0)
    times = np.sort(np.append(series[0].times_s[1:], at_s))
    with pytest.raises(InvalidInput, match=rf"timestamp: samples of .* at {at_s:.0f}") as raised:
        find([replace(series[0], times_s=times), *series[1:]])
    assert "Remedy" in str(raised.value)


def test_pods_that_follow_each_other_do_not_thin_the_batch_of_a_vllm():
    world, samples = World(servers=1), []
    for number, at_s in enumerate(np.arange(0.0, 7 * 7200.0, 120.0)):
        page = vllm("llama", 0.5 * (at_s % 7200.0))
        samples += page_samples(page, BEGIN_S + at_s, "v", pod=f"triton-0-{number // 60}", node="gpu-a")
        samples += page_samples(world.dcgm(at_s, pods=False), BEGIN_S + at_s, "d")
    model = find(series_of(samples)).models["llama"]
    assert (len(model.replicas), model.batch) == (7, pytest.approx(4.0))


def test_a_vllm_inside_triton_is_timed_by_vllm():
    """Triton's own durations end when its backend takes the request over, and no gauge says what is running."""
    world, samples = World(servers=1, model="llama", version="1"), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        page = vllm("llama", world.requests(0, at_s)).replace(
            'engine="0",model_name="llama"', 'model="llama",version="1"'
        )
        own = [line for line in page.splitlines() if "vllm:e2e" in line]
        text = world.triton(0, at_s) + "\n".join(own) + "\n"
        samples += page_samples(text, BEGIN_S + at_s, "v", pod="triton-0")
        samples += page_samples(world.dcgm(at_s), BEGIN_S + at_s, "d")
    model = find(series_of(samples)).models["llama:1"]
    assert model.request_ms == pytest.approx(2000.0)
    assert model.count("requests").sum() == pytest.approx(world.requests(0, 7080.0), rel=1e-6)
    assert model.batch == pytest.approx(world.requests(0, 7080.0) / 7080.0 * model.service_ms / 1e3, rel=0.1)


def test_pods_of_one_name_in_two_namespaces_are_two_servers():
    world, samples = World(), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        for n, space in enumerate(("blue", "green")):
            page = world.triton(n, at_s)
            samples += page_samples(page, BEGIN_S + at_s, "t", instance=f"h{n}:1", pod="triton-0", namespace=space)
        page = world.dcgm(at_s).replace('namespace="prod",pod="triton-0"', 'namespace="blue",pod="triton-0"')
        page = page.replace('namespace="prod",pod="triton-1"', 'namespace="green",pod="triton-0"')
        samples += page_samples(page, BEGIN_S + at_s, "d")
    model = find(series_of(samples)).models["resnet50:3"]
    assert [one.devices for one in model.replicas] == [(("GPU-0", ""),), (("GPU-1", ""),)]
    assert model.count("requests").sum() == pytest.approx(sum(world.requests(n, 7080.0) for n in (0, 1)), rel=1e-6)


@pytest.mark.parametrize("bound", ["abc", "nan", "+Inf", ""])
def test_a_histogram_or_summary_without_bounds_gives_the_mean(bound):
    world, samples = World(servers=1), []
    for at_s in np.arange(0.0, 7200.0, 120.0):
        page = "".join(line for line in vllm("m", at_s).splitlines(True) if "_bucket" not in line or "+Inf" in line)
        samples += page_samples(page, BEGIN_S + at_s, "v", pod="triton-0")
        samples += page_samples(world.dcgm(at_s), BEGIN_S + at_s, "d")
    series = [
        replace(one, labels={**one.labels, "le": bound}) if "le" in one.labels else one for one in series_of(samples)
    ]
    quantiles = MetricSeries("nv_inference_request_summary_us", {"model": "m", "quantile": bound}, *TWO)
    model = find([*series, quantiles]).models["m"]
    assert (model.latency_basis, model.latency_ms) == ("mean", {})
    assert model.request_ms == pytest.approx(2000.0)


TWO = np.array([BEGIN_S, BEGIN_S + 120.0]), np.array([1.0, 2.0])


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

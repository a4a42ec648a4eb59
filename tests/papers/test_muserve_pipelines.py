"""Pipelines by hand and against queueing theory; AlpaServe's selection, and what mu-Serve makes of it."""

import numpy as np
import pytest

from controller.planners.muserve.alpaserve import Cluster, Model, OperatorCluster, Placement, by_sensitivity, place
from controller.planners.muserve.pipelines import Arrival, Pipelines, Stage
from trefoil.core.errors import Infeasible, InvalidInput

TOP = 1000


def latencies(played: Pipelines, arrivals, until_s: float = 1e6) -> list[float]:
    """Latencies in the order of arrival, of who came together in that of the answers."""
    answers = sorted(played.serve(arrivals, until_s), key=lambda answer: answer.arrived_s)
    return [pytest.approx(answer.latency_s) for answer in answers]


def test_two_requests_overlap_in_a_pipeline_and_wait_at_its_slower_stage():
    # a: GPU 0 from 0 to 1, over at 1.5, GPU 1 until 3.5. b: GPU 0 from 1 to 2, there at 2.5, waits to 3.5, until 5.5.
    played = Pipelines({"m": [(Stage(0, 1.0), Stage(1, 2.0))]}, 2, TOP, transfer_s=0.5, active_w=lambda _mhz: 100.0)
    assert latencies(played, [(0.0, "m"), (0.5, "m")]) == [3.5, 5.0]
    assert [(gpu.busy_s, gpu.joules) for gpu in played.gpus] == [(2.0, 200.0), (4.0, 400.0)]


def test_on_one_gpu_the_earliest_turn_goes_next():
    # The first runs to 4; then of those that came, the third (turn 1) until 5, the second until 8; the last waits not.
    came = [Arrival(at_s, "m", size, turn_s) for at_s, size, turn_s in ((0, 4, 0), (1, 3, 9), (2, 1, 1), (10, 2, 10))]
    assert latencies(Pipelines({"m": [(Stage(0, 1.0),)]}, 1, TOP), came) == [4.0, 7.0, 3.0, 2.0]


def test_a_request_goes_where_the_least_work_is_and_one_of_nobody_is_counted():
    played = Pipelines({"m": [(Stage(0, 4.0),), (Stage(1, 1.0),)]}, 2, TOP)
    assert latencies(played, [(0.0, "m"), (0.1, "m"), (0.2, "m"), (0.3, "other")]) == [4.0, 1.0, 1.9]
    assert played.unserved == {"other": 1}


def test_what_runs_goes_on_at_the_new_clock_by_its_own_s():
    played = Pipelines({"all": [(Stage(0, 2.0, 1.0),)], "none": [(Stage(1, 2.0, 0.0),)]}, 2, TOP, active_w=float)
    assert played.serve([(0.0, "all"), (0.0, "none")], 1.0) == []
    for gpu in (0, 1):
        played.set_clock(gpu, 500)
    assert latencies(played, []) == [
        2.0,
        3.0,
    ]  # of `none`, of `all`: a second at the top and a second's work at half of it
    assert [gpu.joules for gpu in played.gpus] == [1000 + 2 * 500, 1000 + 500]


def test_waiting_is_that_of_queueing_theory():
    # M/D/1 at half load: the mean wait is rho / (2 (1 - rho)) of a service time, 0.5 (Pollaczek and Khinchine).
    at = np.cumsum(np.random.default_rng(1).exponential(2.0, 40_000))
    answers = Pipelines({"m": [(Stage(0, 1.0),)]}, 1, TOP).serve([(float(t), "m") for t in at], 1e9)
    assert np.mean([answer.latency_s for answer in answers]) == pytest.approx(1.5, rel=0.04)


def model(name: str, time_s: float, memory_mib: float, s: float = 0.5, units: int = 4, slo: float = 3.0) -> Model:
    return Model(name, (OperatorCluster(time_s / units, s, memory_mib / units),) * units, slo * time_s)


def sample(rates: dict[str, float], requests: int = 400, seed: int = 1) -> list[tuple[float, str]]:
    rng, total = np.random.default_rng(seed), sum(rates.values())
    at = np.cumsum(rng.exponential(1 / total, requests))
    names = rng.choice(list(rates), requests, p=[rate / total for rate in rates.values()])
    return [(float(t), str(name)) for t, name in zip(at, names, strict=True)]


def memory(placement: Placement, models: list[Model], cluster: Cluster) -> list[float]:
    used = [0.0] * cluster.gpus
    for one in models:
        for stages in placement.replicas[one.name]:
            for stage, unit in zip(stages, one.stages(len(stages), cluster.memory_mib), strict=True):
                used[stage.gpu] += unit.memory_mib
    return used


def test_a_model_larger_than_a_gpu_becomes_a_pipeline_and_no_memory_overflows():
    models, cluster = [model("large", 1.0, 24.0), model("small", 0.1, 6.0)], Cluster(2, 16.0, TOP)
    found = place(models, cluster, sample({"large": 0.2, "small": 0.2}))
    assert [stage.gpu for stage in found.replicas["large"][0]] == [0, 1]
    assert max(memory(found, models, cluster)) <= 16.0
    assert found.latency_alone_s("large", 0.25) == pytest.approx(1.25)


def test_short_models_get_gpus_of_their_own_where_long_ones_would_hold_them_up():
    models, cluster = [model("long", 2.0, 4.0), model("short", 0.05, 4.0)], Cluster(2, 16.0, TOP)
    found = place(models, cluster, sample({"long": 0.1, "short": 1.0}))
    used = {name: {stage.gpu for stages in each for stage in stages} for name, each in found.replicas.items()}
    assert not used["long"] & used["short"]
    assert found.attainment > 0.95


def test_the_model_that_is_late_is_replicated_and_no_more_than_is_asked_for():
    models, cluster = [model("hot", 1.0, 4.0), model("cold", 1.0, 4.0)], Cluster(4, 4.0, TOP)
    load = sample({"hot": 2.0, "cold": 0.1})
    one, three = (place(models, cluster, load, most, group_sizes=(1,)) for most in (1, 3))
    assert (len(one.replicas["hot"]), len(three.replicas["hot"]), len(three.replicas["cold"])) == (1, 3, 1)
    assert three.attainment > one.attainment + 0.3
    piped = place(models, cluster, load)  # or one replica over several GPUs, which answers as many a second
    assert piped.attainment > one.attainment + 0.3
    assert len({stage.gpu for stage in piped.replicas["hot"][0]}) > 1


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(Infeasible, match=r"gpus = 1: 1 models of 24 MiB fit no 1 GPUs of 16 MiB. Remedy: more GPUs"):
        place([model("large", 1.0, 24.0)], Cluster(1, 16.0, TOP), [])
    with pytest.raises(InvalidInput, match=r"gpus = 17: is not a number of GPUs to enumerate. Remedy: 1 to 16"):
        place([model("m", 1.0, 1.0)], Cluster(17, 16.0, TOP), [])


def test_stages_change_places_so_that_a_gpu_serves_what_feels_the_clock_alike():
    models, cluster = [model("a", 1.0, 8.0, s=1.0), model("b", 1.0, 8.0, s=0.1)], Cluster(2, 16.0, TOP)
    rates = {"a": 0.2, "b": 0.2}
    piped = place(models, cluster, sample(rates), group_sizes=(2,))
    assert {tuple(stage.gpu for stage in each[0]) for each in piped.replicas.values()} == {(0, 1)}
    found = by_sensitivity(piped, models, cluster, rates, 2)
    gpus = [{stage.gpu for stage in found.replicas[name][0]} for name in ("a", "b")]
    assert gpus in ([{0}, {1}], [{1}, {0}])
    assert memory(found, models, cluster) == [8.0, 8.0]


def test_a_group_too_full_for_algorithm_2_stays_as_alpaserve_had_it():
    models, cluster = [model("a", 1.0, 24.0, 1.0, units=2), model("b", 1.0, 8.0, 0.1, units=2)], Cluster(2, 16.0, TOP)
    piped = place(models, cluster, sample({"a": 0.2, "b": 0.2}))
    assert by_sensitivity(piped, models, cluster, {"a": 0.2, "b": 0.2}, 1) == piped  # CT 1: a fits no single GPU


def test_replicas_on_several_groups_stay_on_gpus_of_their_own():
    models, cluster = [model("hot", 1.0, 4.0), model("cold", 1.0, 4.0, 0.1)], Cluster(4, 16.0, TOP)
    rates = {"hot": 2.0, "cold": 0.2}
    found = place(models, cluster, sample(rates), replicas_max=3, group_sizes=(1,))
    whole = Placement(found.replicas, (tuple(range(4)),), found.attainment, found.latency_s)
    moved = by_sensitivity(whole, models, cluster, rates, 4)
    for name, replicas in moved.replicas.items():
        assert len(replicas) == len(found.replicas[name])
        assert len({stages[0].gpu for stages in replicas}) == len(replicas)

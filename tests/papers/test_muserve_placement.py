"""Algorithms 1 and 2 of mu-Serve on a worked graph: fixed and as printed, where they differ, and what cannot be."""

import math

import networkx as nx
import pytest

from controller.planners.muserve.bins import LEFT_OVER, Partition, bins, mean_sensitivity
from controller.planners.muserve.clusters import clusters, stage_ends
from trefoil.core.errors import InvalidInput

# A block with a branch around it: conv -> relu -> (fc1 -> gelu -> fc2) -> add -> norm. By hand, threshold 0.5:
#   conv 1.8 begins. relu 0.2: |0.2 - 1.8| >= 0.5, a separate cluster. fc1 2.0 begins. gelu 1.7: |1.7 - 2.0| < 0.5,
#   mean 1.85. fc2 1.5: |1.5 - 1.85| < 0.5, mean 1.7333. add 0.1 begins. norm 0.4: |0.4 - 0.1| < 0.5, the last.
EDGES = [
    ("conv", "relu"), ("relu", "fc1"), ("fc1", "gelu"), ("gelu", "fc2"), ("fc2", "add"), ("relu", "add"),
    ("add", "norm"),
]  # fmt: skip
SCORES = {"conv": 1.8, "relu": 0.2, "fc1": 2.0, "gelu": 1.7, "fc2": 1.5, "add": 0.1, "norm": 0.4}
ORDER = list(nx.lexicographical_topological_sort(nx.DiGraph(EDGES), key=list(SCORES).index))


def test_clusters_of_the_worked_graph():
    found = clusters(ORDER, SCORES, 0.5)
    assert found == [["conv"], ["relu"], ["fc1", "gelu", "fc2"], ["add", "norm"]]
    graph, place = nx.DiGraph(EDGES), {name: n for n, cluster in enumerate(found) for name in cluster}
    assert all(place[a] <= place[b] for a, b in graph.edges)  # so that each border is a cut of the graph


def test_algorithm_1_as_printed_on_the_worked_graph():
    # conv is the first of the cluster and the first of the loop: 1.8 - 1.8 < 0.5 appends it again, mean 1.8.
    # relu: 0.2 - 1.8 < 0.5 joins, mean 1.2667. fc1: 2.0 - 1.2667 >= 0.5 ends it; the mean stays 1.2667.
    # gelu: 1.7 - 1.2667 < 0.5 joins, mean 1.85. fc2, add and norm are below it and join. Nothing is emitted after that.
    assert clusters(ORDER, SCORES, 0.5, literal=True) == [["conv", "conv", "relu"]]


def test_a_mean_that_stays_is_what_the_next_is_compared_with_as_printed():
    scores = {"a": 0.0, "b": 1.0, "c": 1.2, "d": 1.0}
    assert clusters(list(scores), scores, 0.5) == [["a"], ["b", "c", "d"]]
    assert clusters(list(scores), scores, 0.5, literal=True) == [["a", "a"], ["b"], ["c"]]  # 1.2 - 0.0, 1.0 - 0.0


def test_no_operator_is_clustered_without_a_score():
    with pytest.raises(InvalidInput, match=r"operator = 'fc2'.*trefoil family sensitivity"):
        clusters(ORDER, {name: score for name, score in SCORES.items() if name != "fc2"})
    assert clusters([], {}) == []


def test_stages_end_where_the_slowest_is_fastest():
    times = [4.0, 1.0, 3.0, 5.0, 2.0]
    found = stage_ends(times, [1.0] * 5, 3)
    slowest = min(max(sum(times[:a]), sum(times[a:b]), sum(times[b:])) for a in range(1, 4) for b in range(a + 1, 5))
    bounds = list(zip((0, *found), found, strict=False))
    assert (len(found), found[-1]) == (3, 5)
    assert max(sum(times[a:b]) for a, b in bounds) == slowest == 7.0
    assert stage_ends(times, [1.0] * 5, 1) == (5,)


def test_a_stage_that_fits_no_gpu_is_refused_and_memory_moves_a_cut():
    assert stage_ends([1, 1, 1, 1], [1, 1, 1, 8], 2) == (2, 4)
    assert stage_ends([1, 1, 1, 1], [1, 1, 1, 8], 2, stage_mib_max=8) == (3, 4)
    with pytest.raises(InvalidInput, match="memory_mib = 7: no cut into 2 stages fits: the largest unit takes 8 MiB"):
        stage_ends([1, 1, 1, 1], [1, 1, 1, 8], 2, stage_mib_max=7)
    with pytest.raises(InvalidInput, match="stages = 5"):
        stage_ends([1, 1, 1, 1], [1, 1, 1, 1], 5)


GPUS = {"gpu0": 16.0, "gpu1": 16.0}
PARTITIONS = (
    Partition("bert", 0, 1.8, 4.0),
    Partition("bert", 1, 1.6, 4.0, weight=3.0),
    Partition("opt", 0, 0.2, 4.0),
    Partition("opt", 1, 0.1, 4.0),
    Partition("resnet", 0, 1.7, 4.0),
)


def test_like_partitions_meet_on_a_gpu():
    # bert/1 1.6 begins gpu0, bert/0 is 0.2 from it. opt/1 0.1 is 1.5 from the mean (3 x 1.6 + 1.8) / 4 = 1.65: gpu1.
    found = bins(GPUS, PARTITIONS, 2)
    assert {gpu: [f"{p.model}/{p.stage}" for p in there] for gpu, there in found.items()} == {
        "gpu0": ["bert/1", "bert/0", "resnet/0"],
        "gpu1": ["opt/1", "opt/0"],
    }
    assert mean_sensitivity(found["gpu0"][:2]) == pytest.approx(1.65)


def test_algorithm_2_as_printed_places_nothing():
    found = bins(GPUS, PARTITIONS, 2, literal=True)
    assert list(found) == [LEFT_OVER]
    assert [(p.model, p.stage) for p in found[LEFT_OVER]] == [
        ("bert", 1), ("bert", 0), ("opt", 1), ("opt", 0), ("resnet", 0),
    ]  # fmt: skip


def test_ct_counts_gpus_and_above_all_of_them_binds_nothing():
    unlike = [Partition("m", n, score, 4.0) for n, score in enumerate((0.0, 1.0, 2.0))]
    assert sum(bool(there) for there in bins(dict.fromkeys("abc", 16.0), unlike, 3).values()) == 3
    assert sum(bool(there) for there in bins(dict.fromkeys("abc", 16.0), unlike, 2).values()) == 2  # and all three fit
    assert bins(dict.fromkeys("abc", 16.0), unlike, 99) == bins(dict.fromkeys("abc", 16.0), unlike, 3)
    with pytest.raises(InvalidInput, match=r"m/2.*a larger CT"):
        bins(dict.fromkeys("abc", 8.0), unlike, 1)
    with pytest.raises(InvalidInput, match="CT = 0"):
        bins(GPUS, unlike, 0)


def test_a_partition_that_fits_no_gpu_is_refused_by_name():
    with pytest.raises(InvalidInput, match=r"'m/0': fits no GPU: 17 MiB, at most 16 are left.*more stages"):
        bins(GPUS, [Partition("m", 0, 1.0, 17.0)], 2)


def test_load_keeps_like_partitions_apart_once_a_gpu_has_enough():
    alike = [Partition(f"m{n}", 0, 1.0, 1.0, load=0.4) for n in range(4)]
    assert [len(there) for there in bins(GPUS, alike, 1).values()] == [4, 0]
    assert [len(there) for there in bins(GPUS, alike, 1, load_max=0.8).values()] == [2, 2]
    assert [len(there) for there in bins(GPUS, alike, 1, load_max=0.5).values()] == [2, 2]  # over it the least loaded
    assert math.isclose(sum(p.load for p in bins(GPUS, alike, 1, 0.5)["gpu0"]), 0.8)


def test_replicas_of_a_model_keep_apart_and_each_has_its_own_ct():
    twice = [Partition("m", stage, 1.0, 4.0, replica=replica) for replica in (0, 1) for stage in (0, 1)]
    found = bins(GPUS, twice, 1)
    assert [{(p.replica, p.stage) for p in there} for there in found.values()] in (
        [{(0, 0), (0, 1)}, {(1, 0), (1, 1)}],
        [{(1, 0), (1, 1)}, {(0, 0), (0, 1)}],
    )
    with pytest.raises(InvalidInput, match="fits no GPU"):
        bins(GPUS, [*twice, Partition("m", 0, 1.0, 4.0, replica=2)], 1)

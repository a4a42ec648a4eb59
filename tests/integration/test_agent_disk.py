"""The real agent on a small disk that fills, and on a model repository whose files change under what runs."""

import itertools
import os
import shutil

import grpc
import pytest

from tests.support.agent_cluster import key, node_plan, planned
from tests.support.failing_disk import fill, small_disk
from tests.support.fast_checks import identity
from tests.support.fast_cluster import FastCluster
from tests.support.triton_process import MODELS
from trefoil.core.fleet import SliceState
from trefoil.core.plan import NodePlan, PlannedSlice

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LEFT, RIGHT = key("4g.20gb", 0), key("3g.20gb", 4)
numbers = itertools.count(1)


def plan(*parts: PlannedSlice) -> NodePlan:
    return node_plan(next(numbers), *parts)


def go(cluster: FastCluster, wanted: NodePlan) -> None:
    cluster.apply(wanted)
    cluster.settle(wanted)


def states(cluster: FastCluster) -> dict:
    return {s.key: (s.state, s.hosted[0].version) for d in cluster.status().devices for s in d.slices}


def apply_often(cluster: FastCluster) -> None:
    """The last blocks of its files have room for some more lines."""
    for _ in range(30):
        cluster.apply(plan(planned("4g.20gb", 0, 1)))


def missing(cluster: FastCluster, name: str) -> str:
    return next((why for why in cluster.status().missing if why.startswith(f"{name}: ")), "")


def test_an_agent_on_a_full_disk_keeps_what_runs_refuses_plans_and_goes_on_when_there_is_room(stage, tmp_path):
    with small_disk(tmp_path / "agent", "4m") as folder:
        cluster = FastCluster(stage, state_dir=str(folder))
        try:
            go(cluster, plan(planned("4g.20gb", 0, 1)))
            was, ballast = identity(cluster.inspect()), fill(folder)
            with pytest.raises(grpc.RpcError) as refused:
                apply_often(cluster)
            with pytest.raises(grpc.RpcError):
                cluster.apply(plan(planned("4g.20gb", 0, 2)))
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "No space left on device" in refused.value.details()
            cluster.kill_agent()
            cluster.start_agent()
            assert states(cluster) == {LEFT: (SliceState.READY, 1)}
            assert "nothing new is begun" in missing(cluster, "disk")
            assert identity(cluster.inspect()) == was
            ballast.unlink()
            cluster.until(lambda: not missing(cluster, "disk"), "the disk to be written again")
            go(cluster, plan(planned("4g.20gb", 0, 2)))
            assert states(cluster) == {LEFT: (SliceState.READY, 2)}
        finally:
            cluster.close()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_model_file_that_changes_is_refused_by_name_what_runs_goes_on_and_it_is_used_again(stage, tmp_path, how):
    models = tmp_path / "models"
    shutil.copytree(MODELS, models)
    folder, kept = models / "digits" / "2", tmp_path / "kept"
    cluster = FastCluster(stage, model_repository=str(models))
    try:
        go(cluster, plan(planned("4g.20gb", 0, 1), planned("3g.20gb", 4, 2)))
        was = identity(cluster.inspect())
        shutil.copytree(folder, kept)
        if how == "removed":
            shutil.rmtree(folder)
        else:
            shutil.copyfile(models / "digits" / "3" / "model.onnx", folder / "model.onnx")
        cluster.until(lambda: str(folder / "model.onnx") in missing(cluster, "model digits/2"), "the file to be named")
        cluster.kill_agent()
        cluster.start_agent()
        wanted = plan(planned("4g.20gb", 0, 2), planned("3g.20gb", 4, 2))  # nobody should ask for it, and somebody does
        cluster.apply(wanted)
        cluster.until(lambda: "model.onnx" in cluster.tail().partition("could not load")[2], "the load to be refused")
        before = {LEFT: (SliceState.READY, 1), RIGHT: (SliceState.READY, 2)}
        cluster.until(lambda: states(cluster) == before, "both to serve as before, between two attempts")
        assert identity(cluster.inspect()) == was
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(kept, folder)
        cluster.settle(wanted)
        assert states(cluster) == {LEFT: (SliceState.READY, 2), RIGHT: (SliceState.READY, 2)}
        cluster.until(lambda: not missing(cluster, "model digits/2"), "the file not to be named any more")
        assert identity(cluster.inspect()) == was
    finally:
        cluster.close()

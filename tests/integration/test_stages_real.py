"""A family that ships, split into two stages on separate slices, by real Tritons behind a dispatcher."""

import asyncio
import contextlib
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc.aio as triton_client
from tritonclient.utils import InferenceServerException

from tests.support.agent_cluster import AgentCluster, node_plan
from tests.support.agent_cluster import key as agent_key
from tests.support.dispatching import DispatcherSystem, Running, dispatching, until
from tests.support.stages import (
    FAMILY,
    FEATURES,
    STAGES,
    VARIANT,
    VERSION,
    planned_repository,
    split_repository,
    staged,
    triton,
    whole,
)
from tests.support.triton_process import MODELS, TritonProcess
from tests.unit.dispatcher.worlds import key, node, status
from trefoil.core.demand import LoadCell, LoadWindow
from trefoil.core.fleet import Hosted
from trefoil.core.plan import PlannedSlice, Route, RouteTarget

pytestmark = [pytest.mark.integration, pytest.mark.slow]
READY_S = 90.0
HOSTED = (staged(0), staged(1), staged(1), whole())  # on slices 0 to 3
SPLIT, WHOLE = (0, 1, 2), (3,)


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    with np.load(MODELS / FAMILY / "heldout.npz") as data:
        return data["images"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    return split_repository(tmp_path_factory.mktemp("split"))


@pytest.fixture
def tritons(tmp_path, repository) -> Iterator[list[TritonProcess]]:
    started = [triton(tmp_path, repository, f"slice{at}", hosted) for at, hosted in enumerate(HOSTED)]
    yield started
    for one in started:
        one.close()


def targets(slices: tuple[int, ...]) -> tuple[RouteTarget, ...]:
    stages = Counter(HOSTED[at].stage for at in slices)
    return tuple(
        RouteTarget(key(at), VARIANT, HOSTED[at].stage, 1 / stages[HOSTED[at].stage], 2, version=VERSION)
        for at in slices
    )


@contextlib.asynccontextmanager
async def serving(
    state, folder: Path, tritons: list[TritonProcess], slices: tuple[int, ...], number: int = 1
) -> AsyncIterator[Running]:
    for one, hosted in zip(tritons, HOSTED, strict=True):
        await one.ready([hosted], READY_S)
    # A slice that stands still for a moment is not an outlier here.
    async with dispatching(state, folder, hang_quiet_s=60.0, idle_probe_s=0.0) as running:
        found = [
            replace(status(at, one.launch.grpc_target), hosted=(hosted,))
            for at, (one, hosted) in enumerate(zip(tritons, HOSTED, strict=True))
        ]
        routes = [Route(FAMILY, "weighted", "fifo", targets(slices), 0, 0, {})]
        await DispatcherSystem(running, state).publish(node(found), routes, number, slo_ms=5000.0)
        await until(lambda: running.local.routing.table.served(FAMILY), 30)
        yield running


def tensor(images: np.ndarray):
    made = triton_client.InferInput("IMAGE", list(images.shape), "UINT8")
    made.set_data_from_numpy(images)
    return made


async def direct(address: str, hosted: Hosted, name: str, given, wanted: str) -> np.ndarray:
    """What a Triton itself answers."""
    async with triton_client.InferenceServerClient(address) as client:
        asked = triton_client.InferInput(name, list(given.shape), "UINT8" if given.dtype == np.uint8 else "FP32")
        asked.set_data_from_numpy(given)
        return (await client.infer(hosted.model, [asked])).as_numpy(wanted)


@pytest.mark.gate
@pytest.mark.timeout(240)
async def test_two_slices_answer_what_the_whole_answers(state, tmp_path, tritons, images):
    async with (
        serving(state, tmp_path, tritons, SPLIT) as running,
        triton_client.InferenceServerClient(running.address) as client,
    ):
        expected = await direct(tritons[3].launch.grpc_target, whole(), "IMAGE", images[:8], "PROBABILITIES")
        result = await client.infer(
            FAMILY, [tensor(images[:8])], request_id="mine", parameters={"trefoil_receipt": True},
            outputs=[triton_client.InferRequestedOutput("PROBABILITIES")],
        )  # fmt: skip
        np.testing.assert_array_equal(result.as_numpy("PROBABILITIES"), expected)
        answer = result.get_response()
        assert (answer.id, answer.model_name, answer.model_version) == ("mine", FAMILY, "1")
        said = {name: each.string_param for name, each in answer.parameters.items()}
        assert said["trefoil_variant"] == VARIANT
        first, second = said["trefoil_stage_slices"].split(", ")
        assert first == key(0).name
        assert second in (key(1).name, key(2).name)
        metadata = await client.get_model_metadata(FAMILY)
        assert ([i.name for i in metadata.inputs], [o.name for o in metadata.outputs]) == (["IMAGE"], ["PROBABILITIES"])
        assert [model.name for model in (await client.get_model_repository_index()).models] == [FAMILY]
        with pytest.raises(InferenceServerException, match="unknown model: 'digits@2of2'"):
            await client.infer("digits@2of2", [tensor(images[:1])])

        cells = list[LoadCell]()

        async def told() -> bool:
            names = await state.names(state.keys.load_prefix())
            windows = [window for name in names for _, window in await state.stream(name, LoadWindow, "0")]
            cells[:] = [cell for window in windows for cell in window.cells]
            return any(cell.answered for cell in cells)

        async with asyncio.timeout(30):
            while not await told():
                await asyncio.sleep(0.1)
        assert sum(cell.arrived for cell in cells) == sum(cell.answered for cell in cells) == 1
        (passed,) = [cell for cell in cells if cell.passed.total]
        assert (passed.key.family, passed.key.slice, passed.passed_items) == (FAMILY, key(0), 8)
        (last,) = [cell for cell in cells if cell.answered]
        assert last.latency.sum_ms >= last.service.sum_ms + passed.service.sum_ms > passed.service.sum_ms > 0
        statistics_ = (await client.get_inference_statistics(FAMILY)).model_stats
        assert [(one.name, one.inference_stats.success.count) for one in statistics_] == [(FAMILY, 1)]


@pytest.mark.gate
@pytest.mark.timeout(240)
async def test_a_stage_killed_under_load_fails_only_what_was_in_flight_on_it(state, tmp_path, tritons, images):
    async with serving(state, tmp_path, tritons, SPLIT) as running:
        expected = np.concatenate(
            [
                await direct(tritons[3].launch.grpc_target, whole(), "IMAGE", images[at : at + 1], "PROBABILITIES")
                for at in range(16)
            ]
        )
        answered, failed, wrong, stop = Counter[str](), list[str](), list[int](), asyncio.Event()

        async def user(client, at: int) -> None:
            while not stop.is_set():
                at = (at + 5) % 16
                try:
                    result = await client.infer(FAMILY, [tensor(images[at : at + 1])], client_timeout=30)
                except InferenceServerException as error:
                    failed.append(str(error))
                    continue
                answered[result.get_response().parameters["trefoil_stage_slices"].string_param.split(", ")[1]] += 1
                if not np.array_equal(result.as_numpy("PROBABILITIES")[0], expected[at]):
                    wrong.append(at)

        async with triton_client.InferenceServerClient(running.address) as client:
            users = [asyncio.create_task(user(client, at)) for at in range(4)]
            await until(lambda: min(answered[key(1).name], answered[key(2).name]) >= 20, 90)
            tritons[2].process.kill()
            await until(lambda: len(running.local.routing.table.live("digits@2of2")) == 1, 30)
            before = answered[key(1).name]
            await until(lambda: answered[key(1).name] >= before + 40, 90)
            stop.set()
            await asyncio.gather(*users)
        print(f"{answered.total()} answered, {len(failed)} failed")
        assert len(failed) <= 2, failed  # the credits of the slice
        assert not wrong
        assert running.local.routing.in_flight().total() == 0


@pytest.mark.timeout(300)
async def test_an_agent_hosts_the_stages_of_a_plan_on_two_gpus(tmp_path, images):
    parts = [PlannedSlice(agent_key("7g.40gb", gpu=n), (staged(n),), 2) for n in range(STAGES)]
    async with AgentCluster(model_repository=planned_repository(tmp_path)) as cluster:
        wanted = node_plan(1, *parts)
        await cluster.apply(wanted)
        await cluster.settled(wanted)
        found = await cluster.slices()
        assert [found[part.key].hosted for part in parts] == [part.hosted for part in parts]
        given, tensors = images[:4], ("IMAGE", FEATURES, "PROBABILITIES")
        for n, part in enumerate(parts):
            given = await direct(found[part.key].grpc_target, staged(n), tensors[n], given, tensors[n + 1])
        np.testing.assert_allclose(given.sum(axis=1), 1.0, atol=1e-5)
        labels = np.load(MODELS / FAMILY / "heldout.npz")["labels"][:4]
        assert list(given.argmax(axis=1)) == list(labels)
        # A stage and the whole of a family are two models: one comes, the other goes.
        again = node_plan(2, PlannedSlice(parts[0].key, (whole(),), 2), parts[1])
        await cluster.apply(again)
        await cluster.settled(again)
        target = (await cluster.slices())[parts[0].key].grpc_target
        assert (await direct(target, whole(), "IMAGE", images[:4], "PROBABILITIES")).argmax(axis=1).tolist() == [
            *labels
        ]


@pytest.mark.timeout(300)
async def test_a_hop_adds_two_milliseconds_at_most(state, tmp_path, tritons, images):
    async def p50_ms(slices: tuple[int, ...], folder: str, number: int) -> float:
        async with (
            serving(state, _folder(tmp_path / folder), tritons, slices, number) as running,
            triton_client.InferenceServerClient(running.address) as client,
        ):
            took_ms = []
            for at in range(220):
                started_s = time.perf_counter()
                await client.infer(FAMILY, [tensor(images[at : at + 1])])
                took_ms.append((time.perf_counter() - started_s) * 1e3)
            return statistics.median(took_ms[20:])

    found = [
        (await p50_ms(SPLIT, f"split{at}", 2 * at + 1), await p50_ms(WHOLE, f"whole{at}", 2 * at + 2))
        for at in range(3)
    ]
    added_ms = statistics.median(split - whole_ms for split, whole_ms in found) / (STAGES - 1)
    features = await direct(tritons[0].launch.grpc_target, staged(0), "IMAGE", images[:1], FEATURES)
    print(f"{STAGES} stages, {features.nbytes} bytes between them")
    print(f"p50 split, whole: {found} ms; a hop adds {added_ms:.2f} ms")
    assert added_ms <= 2.0


def _folder(path: Path) -> Path:
    path.mkdir()
    return path

"""The dispatcher in front of real Tritons with the real models: values are checked, not statuses."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_sync
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import DispatcherSystem, Plane, Running, dispatching, until
from tests.support.triton_process import NAMES, TritonProcess, expected, heldout, hosted
from tests.unit.dispatcher.worlds import key, node, route, status, target
from trefoil.core.common import Revision
from trefoil.core.fleet import DeviceState
from trefoil.core.plan import NodePlan, PlannedDevice, PlannedSlice

pytestmark = [pytest.mark.integration, pytest.mark.slow]
READY_S = 60.0
XS, LARGE = 1, 4
SHARES = {"digits-xs": 0.25, "digits-l": 0.75}


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, np.ndarray]:
    by_version = expected(tmp_path_factory.mktemp("expected"))
    return {NAMES[version - 1]: values for version, values in by_version.items()}


@pytest.fixture
def slices(tmp_path) -> Iterator[dict[str, TritonProcess]]:
    started = {NAMES[v - 1]: TritonProcess(_folder(tmp_path, v), v) for v in (XS, LARGE)}
    yield started
    for one in started.values():
        one.close()


@contextlib.asynccontextmanager
async def serving(state, folder: Path, slices, **settings) -> AsyncIterator[Running]:
    for version in (XS, LARGE):
        await slices[NAMES[version - 1]].ready([hosted(version)], READY_S)
    async with dispatching(state, folder, **settings) as running:
        statuses = [status(i, slices[name].launch.grpc_target, variant=name) for i, name in enumerate(SHARES)]
        targets = [target(i, name, share) for i, (name, share) in enumerate(SHARES.items())]
        await DispatcherSystem(running, state).publish(node(statuses), [route(targets)])
        yield running


class Users:
    """Closed-loop clients that check every answer against onnxruntime's, for the variant that the answer names."""

    def __init__(self, address: str, answers: dict[str, np.ndarray]) -> None:
        self._address, self._answers = address, answers
        self.seen: Counter = Counter()
        self.failed: list[str] = []
        self.wrong = 0
        self.stop = asyncio.Event()

    async def run(self, count: int) -> None:
        async with triton.InferenceServerClient(self._address) as client:
            await asyncio.gather(*(self._one(client, i) for i in range(count)))

    async def _one(self, client, i: int) -> None:
        images, _ = heldout()
        while not self.stop.is_set():
            i = (i + 7) % len(images)
            try:
                result = await client.infer("digits", [_tensor(triton, images[i : i + 1])], client_timeout=20)
            except InferenceServerException as error:
                self.failed.append(str(error))
                continue
            name = result.get_response().parameters["trefoil_variant"].string_param
            self.seen[name] += 1
            got = result.as_numpy("PROBABILITIES")
            self.wrong += not np.allclose(got[0], self._answers[name][i], atol=1e-5)


@pytest.mark.gate
async def test_unmodified_clients_get_onnxruntimes_values_and_perf_analyzer_its_start(state, tmp_path, slices, answers):
    # A slice that stands still for a moment is not an outlier here: the other one would have its share.
    async with serving(state, tmp_path, slices, hang_quiet_s=60.0, idle_probe_s=0.0) as running:
        images, _ = heldout()

        def ask():
            with triton_sync.InferenceServerClient(running.address) as client:
                metadata = client.get_model_metadata("digits")
                config = client.get_model_config("digits").config
                assert (config.name, config.max_batch_size) == ("digits", 8)
                assert "statistics" in client.get_server_metadata().extensions
                before = client.get_inference_statistics("digits").model_stats[0].inference_stats.queue.count
                tensor = _tensor(triton_sync, images[:8])
                assert [each.name for each in metadata.inputs] == [tensor.name()]
                result = client.infer("digits", [tensor], request_id="mine")
                after = client.get_inference_statistics("digits").model_stats[0].inference_stats
                assert after.queue.count == before + 1 == after.success.count == after.compute_infer.count
                return result

        result = await asyncio.to_thread(ask)
        response = result.get_response()
        name = response.parameters["trefoil_variant"].string_param
        assert (response.id, response.model_name, response.model_version) == ("mine", "digits", "1")
        np.testing.assert_allclose(result.as_numpy("PROBABILITIES"), answers[name][:8], atol=1e-5)

        users = Users(running.address, answers)
        load = asyncio.create_task(users.run(4))
        await until(lambda: sum(users.seen.values()) >= 400, 60)
        users.stop.set()
        await load
        assert not users.failed
        assert users.wrong == 0
        total = sum(users.seen.values())
        assert all(abs(users.seen[name] / total - share) <= 0.01 for name, share in SHARES.items())


@pytest.mark.gate
async def test_sigkill_of_a_triton_under_load_fails_only_what_it_had(state, tmp_path, slices, answers):
    async with serving(state, tmp_path, slices) as running:
        users = Users(running.address, answers)
        load = asyncio.create_task(users.run(4))
        await until(lambda: sum(users.seen.values()) >= 100, 60)
        slices["digits-l"].process.kill()
        await until(lambda: len(running.local.routing.table.live("digits")) == 1)
        before = sum(users.seen.values())
        await until(lambda: sum(users.seen.values()) >= before + 100, 60)
        users.stop.set()
        await load
        assert len(users.failed) <= 2, users.failed
        assert users.wrong == 0
        assert key(1) in running.local.health.ejections


@pytest.mark.gate
async def test_sigkill_of_a_stub_under_load_fails_until_a_probe_has_proved_it_and_heals(
    state, tmp_path, slices, answers, awake
):
    async with serving(state, tmp_path, slices) as running:
        users = Users(running.address, answers)
        load = asyncio.create_task(users.run(4))
        await until(lambda: sum(users.seen.values()) >= 100, 60)
        slices["digits-l"].kill_stubs()
        killed_s = time.monotonic()
        await until(lambda: key(1) in running.local.health.ejections)
        took_s = awake.between(killed_s, time.monotonic())
        before = users.seen.copy()
        await until(lambda: users.seen["digits-xs"] >= before["digits-xs"] + 50, 60)
        print(f"ejected after {took_s:.1f} s, {len(users.failed)} failed")
        assert took_s < 2.0
        assert len(users.failed) <= 4, "its credits when it died, and as many that came free before it was out"
        assert all("not healthy" in text for text in users.failed)
        assert key(1) in running.local.health.ejections, "readiness stays true; only an inference may readmit it"
        client = slices["digits-l"].client()
        await client.heal(hosted(LARGE))
        await client.close()
        await until(lambda: key(1) not in running.local.health.ejections)
        healed = users.seen["digits-l"]
        await until(lambda: users.seen["digits-l"] >= healed + 50, 60)
        users.stop.set()
        await load
        assert len(users.failed) <= 4
        assert users.wrong == 0


@pytest.mark.gate
async def test_a_swap_in_place_under_load_fails_nothing_and_tells_the_truth(state, tmp_path, slices, answers):
    """The table names the planned variant; the answer names the one that really gave it."""
    async with serving(state, tmp_path, slices) as running:
        swapped = PlannedSlice(key(0), (hosted(2),), 2)
        device = PlannedDevice(key(0).device, DeviceState.AWAKE, (swapped,))
        await Plane(state).put("other", state.keys.plan_node("node0"), NodePlan(Revision(1, 1, 1), "node0", (device,)))
        await until(lambda: ("digits", 2) in running.local.routing.variants)
        users = Users(running.address, answers)
        load = asyncio.create_task(users.run(4))
        await until(lambda: sum(users.seen.values()) >= 50, 60)
        client = slices["digits-xs"].client()
        await client.swap(hosted(XS), hosted(2))
        await client.close()
        await until(lambda: users.seen["digits-s"] >= 20, 60)
        users.stop.set()
        await load
        assert not users.failed
        assert users.wrong == 0


def _tensor(module, images: np.ndarray):
    tensor = module.InferInput("IMAGE", list(images.shape), "UINT8")
    tensor.set_data_from_numpy(images)
    return tensor


def _folder(parent: Path, version: int) -> Path:
    folder = parent / f"v{version}"
    folder.mkdir()
    return folder

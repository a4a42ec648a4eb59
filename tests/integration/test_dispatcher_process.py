"""`python -m dispatcher` as an operator meets it: starts, serves, stops, and complains in one line."""

import signal

import pytest
import tritonclient.grpc.aio as triton

from tests.support.dispatching import Plane, image
from tests.support.fake_triton import FakeTriton
from tests.support.ports import free_ports
from tests.support.workers import Dispatcher
from tests.unit.dispatcher.worlds import node, plan, route, status, target

pytestmark = pytest.mark.integration
NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.gate
async def test_it_serves_and_ends_with_zero_on_a_signal(shared_redis, state, tmp_path, number):
    one = Dispatcher(tmp_path, shared_redis.url, state.keys.cluster, 1, "one")
    await one.start()
    async with FakeTriton() as slice_, triton.InferenceServerClient(one.inference) as client:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0)])]))
        await one.serving(client)
        assert (await client.infer("digits", [image(6)])).as_numpy("PROBABILITIES").argmax() == 6
    one.process.send_signal(number)
    code, log = await one.ended()
    assert code == 0, log
    assert shared_redis.url not in log, "a redis_url may hold a password"


async def test_a_port_in_use_is_one_line_and_exit_code_two(shared_redis, tmp_path):
    async with FakeTriton() as taken:
        one = Dispatcher(tmp_path, shared_redis.url, "unused", 1, "one", inference_address=taken.target)
        await one.start("--set", "log_level=error")
        code, log = await one.ended()
    assert code == 2
    (line,) = log.strip().splitlines()
    assert str(taken.port) in line
    assert "in use" in line
    assert "Remedy" in line


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"inference_adress": "x"}, ("inference_adress", "inference_address")),
        ({"window_s": 0}, ("window_s", "0")),
        ({"message_bytes_max": 0}, ("message_bytes_max", "-1")),
    ],
)
async def test_a_wrong_setting_is_one_line_and_exit_code_two(tmp_path, setting, words):
    one = Dispatcher(tmp_path, NO_REDIS, "unused", 1, "one", **setting)
    await one.start()
    code, log = await one.ended()
    assert code == 2
    (line,) = log.strip().splitlines()
    assert all(word in line for word in words)


async def test_a_listener_that_others_reach_needs_protection(tmp_path):
    address = f"0.0.0.0:{free_ports(1)[0]}"
    one = Dispatcher(tmp_path, NO_REDIS, "unused", 1, "one", inference_address=address)
    await one.start("--set", "log_level=error")
    code, log = await one.ended()
    assert code == 2
    assert "needs TLS and a token" in log

"""`python -m dispatcher` as an operator meets it: starts, serves, stops, and complains in one line."""

import asyncio
import signal
import sys
from pathlib import Path

import pytest
import tritonclient.grpc.aio as triton
from tritonclient.utils import InferenceServerException

from tests.support.dispatching import Plane, image
from tests.support.fake_triton import FakeTriton
from tests.support.ports import free_ports
from tests.unit.dispatcher.worlds import node, plan, route, status, target

pytestmark = pytest.mark.integration


def config(folder: Path, redis_url: str, cluster: str, ports: list[int], more: str = "") -> Path:
    path = folder / "dispatcher.toml"
    path.write_text(
        f'cluster = "{cluster}"\nredis_url = "{redis_url}"\nstate_dir = "{folder}"\n'
        f'inference_address = "127.0.0.1:{ports[0]}"\nadmin_address = "127.0.0.1:{ports[1]}"\n'
        f'metrics_address = "127.0.0.1:{ports[2]}"\n{more}'
    )
    return path


async def start(path: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dispatcher", "--config", str(path), *flags, stderr=asyncio.subprocess.PIPE
    )


async def ended(process: asyncio.subprocess.Process, timeout_s: float = 60.0) -> tuple[int, str]:
    try:
        _, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    return process.returncode, errors.decode()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.gate
async def test_it_serves_and_ends_with_zero_on_a_signal(shared_redis, state, tmp_path, number):
    ports = free_ports(3)
    process = await start(config(tmp_path, shared_redis.url, state.keys.cluster, ports))
    async with FakeTriton() as slice_, triton.InferenceServerClient(f"127.0.0.1:{ports[0]}") as client:
        plane = Plane(state)
        await plane.node(node([status(0, slice_.target)]))
        await plane.plan(plan([route([target(0)])]))
        async with asyncio.timeout(60):
            while not await _ready(client):
                await asyncio.sleep(0.05)
        assert (await client.infer("digits", [image(6)])).as_numpy("PROBABILITIES").argmax() == 6
    process.send_signal(number)
    code, errors = await ended(process)
    assert code == 0, errors
    assert shared_redis.url not in errors, "a redis_url may hold a password"


async def test_a_port_in_use_is_one_line_and_exit_code_two(shared_redis, tmp_path):
    async with FakeTriton() as taken:
        ports = [taken.port, *free_ports(2)]
        process = await start(config(tmp_path, shared_redis.url, "unused", ports), "--set", "log_level=error")
        code, errors = await ended(process)
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert str(taken.port) in line
    assert "in use" in line
    assert "Remedy" in line


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("inference_adress = 'x'\n", ("inference_adress", "inference_address")),
        ("window_s = 0\n", ("window_s", "0")),
        ("message_bytes_max = 0\n", ("message_bytes_max", "-1")),
    ],
)
async def test_a_wrong_setting_is_one_line_and_exit_code_two(tmp_path, more, words):
    process = await start(config(tmp_path, "redis://127.0.0.1:1/0", "unused", free_ports(3), more))
    code, errors = await ended(process)
    assert code == 2
    (line,) = errors.strip().splitlines()
    assert all(word in line for word in words)


async def test_a_listener_that_others_reach_needs_protection(tmp_path):
    path = config(tmp_path, "redis://127.0.0.1:1/0", "unused", free_ports(3))
    path.write_text(path.read_text().replace('inference_address = "127.0.0.1', 'inference_address = "0.0.0.0'))
    code, errors = await ended(await start(path, "--set", "log_level=error"))
    assert code == 2
    assert "needs TLS and a token" in errors


async def _ready(client: triton.InferenceServerClient) -> bool:
    try:
        return bool(await client.is_server_ready())
    except InferenceServerException:
        return False

"""What runs beside a system of `trefoil up`, model code too, commands none of its services and reads no secret.

Clients' requests continue without a token.
"""

import asyncio
import contextlib
import json
import os
import stat
import time
from functools import partial
from urllib.parse import urlsplit

import grpc
import pytest
import redis.asyncio as redis

from protos.carbon_feed.v1 import carbon_feed_pb2, carbon_feed_pb2_grpc
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from protos.types.v1 import plan_pb2
from tests.integration.system.conftest import Serving
from tests.support.system import FAMILY, load, until
from trefoil.cli.run.launcher import infer_zeros
from trefoil.cli.run.state_directory import Launch, StatePaths, write_private
from trefoil.cli.system_client import launch_token
from trefoil.core.errors import StateUnavailable
from trefoil.core.fleet import NodeStatus
from trefoil.core.plan import RolloutState
from trefoil.runtime import rpc
from trefoil.runtime.security.plan_keys import routes_key
from trefoil.runtime.security.secret_files import FileSecret
from trefoil.runtime.state import State

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]

CALLS = {
    "controller": (controller_pb2_grpc.ControllerStub, "GetPlan", controller_pb2.GetPlanRequest()),
    "power_agent": (power_agent_pb2_grpc.PowerAgentStub, "GetNode", power_agent_pb2.GetNodeRequest()),
    "dispatcher": (dispatcher_pb2_grpc.DispatcherStub, "GetTable", dispatcher_pb2.GetTableRequest()),
    "carbon_feed": (carbon_feed_pb2_grpc.CarbonFeedStub, "ListZones", carbon_feed_pb2.ListZonesRequest()),
}


async def answered(address: str, service: str, token: str | None) -> grpc.StatusCode:
    stub, method, request = CALLS[service]
    async with rpc.channel(address, token=token) as channel:
        try:
            await getattr(stub(channel), method)(request, timeout=60.0)
        except grpc.aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_every_admin_port_wants_the_token_that_up_has_made(serving: Serving) -> None:
    launch = serving.system.launch
    assert stat.S_IMODE(os.stat(launch.token_file).st_mode) == 0o600
    for service in CALLS:
        address = launch.addresses[service]
        for token, code in ((None, "UNAUTHENTICATED"), ("x", "UNAUTHENTICATED"), (launch_token(launch), "OK")):
            assert (await answered(address, service, token)).name == code, (service, token)
    assert await infer_zeros(launch.addresses["inference"], FAMILY)


def test_commands_find_the_token_by_the_state_directory_also_for_an_address_of_it(serving: Serving) -> None:
    system = serving.system
    assert system.ask("node", "show", "--target", system.launch.addresses["power_agent"])["node"]
    assert system.ask("node", "show")["node"]
    assert "no valid token" in system.refused(
        "node", "show", "--target", system.launch.addresses["power_agent"], state_dir=system.state_dir / "elsewhere"
    )


async def test_tokens_and_the_password_of_redis_change_under_load_and_no_request_fails(serving: Serving) -> None:
    system, launch, stop = serving.system, serving.system.launch, asyncio.Event()
    paths, token, url = StatePaths(system.state_dir), launch_token(launch), launch.redis_url
    password = urlsplit(url).password
    assert token
    assert password
    state = State.connect(FileSecret(paths.redis_url, "redis_url_file"), launch.cluster)
    sending = asyncio.create_task(load(launch.addresses["inference"], 40.0, 240.0, stop))
    async with redis.from_url(url) as admin:

        async def accept(*passwords: str) -> None:
            wanted = [f"+{each}" for each in passwords]
            await admin.acl_setuser("default", enabled=True, reset_passwords=True, passwords=wanted)

        async def published() -> None:
            """The agent has published over a new connection."""
            await admin.client_kill_filter(_type="normal", skipme=True)
            since_s = time.time()

            async def seen() -> bool:
                with contextlib.suppress(StateUnavailable):  # once, for the connection that was closed
                    found = await state.scan(state.keys.node_prefix(), NodeStatus)
                    return bool(found) and all(node.observed_at_s > since_s for node in found.values())
                return False

            await until(seen, 60.0, "the agent has published nothing within")

        for old, new, old_token, new_token in (
            (password, "other", token, "other-token"), ("other", password, "other-token", token),
        ):  # fmt: skip
            await accept(old, new)
            write_private(paths.redis_url, url.replace(password, new))
            await published()
            await accept(new)
            await published()
            for lines in ((old_token, new_token), (new_token, old_token), (new_token,)):
                write_private(paths.token, "\n".join(lines))
                for service in CALLS:
                    for each in (old_token, new_token):
                        code = "OK" if each in lines else "UNAUTHENTICATED"
                        assert (await answered(launch.addresses[service], service, each)).name == code, (service, lines)
            await rolled_out(serving, new_token)
    stop.set()
    result = await sending
    await state.close()
    assert len(result.records) > 100
    assert result.answered == len(result.records)


async def test_the_plan_key_changes_under_load_and_no_plan_is_refused(serving: Serving) -> None:
    launch, stop = serving.system.launch, asyncio.Event()
    paths, token = StatePaths(serving.system.state_dir), launch_token(launch)
    key, other = paths.plan_key.read_text().strip(), "0" * 64
    assert token
    sending = asyncio.create_task(load(launch.addresses["inference"], 40.0, 240.0, stop))
    for old, new in ((key, other), (other, key)):
        for keys in ((old, new), (new, old), (new,)):
            epoch = (await rollout_of(launch, token)).target.epoch
            write_private(paths.plan_key, "\n".join(keys))
            write_private(paths.routes_key, "\n".join(map(routes_key, keys)))
            if keys == (new, old):
                await until(partial(rolled_out_after, launch, token, (epoch + 1, 0)), 60.0, "nothing is signed within")
            await rolled_out(serving, token)
    stop.set()
    result = await sending
    assert len(result.records) > 100
    assert result.answered == len(result.records)


async def rolled_out(serving: Serving, token: str) -> None:
    """The controller commands the agent again, and all dispatcher workers obey its plan."""
    launch = serving.system.launch
    before = (await rollout_of(launch, token)).target
    await asyncio.to_thread(serving.system.pin, serving.first_plan)
    after = (before.epoch, before.number + 1)
    await until(partial(rolled_out_after, launch, token, after), 60.0, "the plan is not rolled out within")


async def rolled_out_after(launch: Launch, token: str, least: tuple[int, int]) -> bool:
    with contextlib.suppress(grpc.aio.AioRpcError):  # a controller that starts again
        rollout = await rollout_of(launch, token)
        return rollout.state == RolloutState.DONE and (rollout.target.epoch, rollout.target.number) >= least
    return False


async def rollout_of(launch: Launch, token: str) -> plan_pb2.Rollout:
    async with rpc.channel(launch.addresses["controller"], token=token) as channel:
        stub = controller_pb2_grpc.ControllerStub(channel)
        return (await stub.GetPlan(controller_pb2.GetPlanRequest(), timeout=60.0)).rollout


def test_no_secret_is_in_the_process_list_nor_in_logs(serving: Serving) -> None:
    system = serving.system
    token, password = launch_token(system.launch), system.launch.redis_url.split(":")[2].split("@")[0]
    assert token
    shown = [" ".join(process.cmdline()) + json.dumps(process.environ()) for process in system.processes()]
    shown += [path.read_text(errors="replace") for path in (system.state_dir / "logs").iterdir()]
    assert len(shown) > 8
    assert not [text for text in shown if token in text or password in text]
    readable = [path for path in system.state_dir.rglob("*") if path.is_file() and path.stat().st_mode & stat.S_IRWXO]
    for path in readable:
        data = path.read_bytes()
        assert token.encode() not in data, path
        assert password.encode() not in data, path

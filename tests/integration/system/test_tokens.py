"""What runs beside a system of `trefoil up`, model code too, commands none of its services and reads no secret.

Clients' requests go on without a token.
"""

import json
import os
import stat

import grpc
import pytest

from protos.carbon_feed.v1 import carbon_feed_pb2, carbon_feed_pb2_grpc
from protos.controller.v1 import controller_pb2, controller_pb2_grpc
from protos.dispatcher.v1 import dispatcher_pb2, dispatcher_pb2_grpc
from protos.power_agent.v1 import power_agent_pb2, power_agent_pb2_grpc
from tests.integration.system.conftest import Serving
from tests.support.system import FAMILY
from trefoil.cli.run.launcher import infer_zeros
from trefoil.cli.system_client import launch_token
from trefoil.runtime import rpc

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

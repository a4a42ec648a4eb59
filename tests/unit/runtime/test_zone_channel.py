"""A channel to another zone under renewed certificates."""

import asyncio

import grpc
import pytest

from tests.support.certificates import Authority
from tests.support.dispatching import until
from trefoil.runtime.config import ServiceSettings
from trefoil.runtime.security.other_zones import OtherZone
from trefoil.runtime.security.tls import Tls
from trefoil.runtime.security.zone_channel import ZoneChannel


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


async def test_renewed_certificates_delay_no_call_and_end_none(authority):
    calls, answer = [], asyncio.Event()

    async def handle(request: bytes, _: grpc.aio.ServicerContext) -> bytes:
        calls.append(request)
        await (answer.wait() if request == b"slow" else asyncio.sleep(0))
        return request

    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(handle)}
    server, pair = grpc.aio.server(), authority.service("dispatcher")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("zone", handlers),))
    tls = Tls(pair.certificate, pair.key, authority.certificate)
    port = server.add_secure_port("127.0.0.1:0", tls.server_credentials())
    await server.start()
    own = authority.service("home")
    channel = ZoneChannel(OtherZone(zone="DE", address=f"127.0.0.1:{port}"), ServiceSettings(**own.settings(authority)))
    first = await channel.get()
    slow = asyncio.ensure_future(first.unary_unary("/zone/Ask")(b"slow"))
    await until(lambda: calls == [b"slow"])
    authority.service("renewed").copy_to(own)
    async with asyncio.timeout(3):
        again = await asyncio.gather(channel.get(), channel.get())
        assert again[0] is again[1] is not first
        assert await again[0].unary_unary("/zone/Ask")(b"quick") == b"quick"
    answer.set()
    assert await slow == b"slow"
    await channel.close()
    await server.stop(None)

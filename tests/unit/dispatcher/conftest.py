"""An HTTP/2 server and its clients."""

import pytest

from dispatcher.transport import h2_server
from dispatcher.transport.h2_channel import H2Channel
from tests.support.aio_channel import AioChannel
from tests.support.h2_ends import serving


@pytest.fixture
async def world():
    async with serving() as made:
        yield made


@pytest.fixture(params=[AioChannel, H2Channel], ids=["grpc.aio", "h2"])
async def channel(request, world):
    return await world.channel(request.param)


@pytest.fixture
def swift(monkeypatch):
    monkeypatch.setattr(h2_server, "SWEEP_S", 0.02)


@pytest.fixture(params=[AioChannel, H2Channel], ids=["grpc.aio", "h2"])
def channel_kinds(request):
    return request.param

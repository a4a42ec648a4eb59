"""A carbon feed beside a Redis of its own; a stage for power agents; seconds in which the machine ran."""

import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.awake import Awake
from tests.support.fast_cluster import Stage
from tests.support.feed_process import FeedProcess
from tests.support.redis_server import RedisServer
from trefoil.runtime.state import State


@pytest.fixture
async def feed(tmp_path, redis_server: RedisServer, unused_tcp_port) -> AsyncIterator[FeedProcess]:
    made = FeedProcess(tmp_path, redis_server.url, unused_tcp_port)
    yield made
    if made.process is not None:
        await made.end(signal.SIGKILL)


@pytest.fixture
async def own_state(redis_server: RedisServer) -> AsyncIterator[State]:
    connected = State.connect(redis_server.url, "c", timeout_s=30.0)
    yield connected
    await connected.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """What the agents of one module share."""
    one = Stage()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def awake() -> Iterator[Awake]:
    """Counts the seconds in which this machine ran, as long as the test takes."""
    with Awake() as one:
        yield one

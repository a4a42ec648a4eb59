"""Fixtures that several folders share. Processes they start are theirs to end."""

import itertools
from collections.abc import AsyncIterator, Iterator

import pytest
import structlog

from tests.support.docker_engine import DockerEngine, engine
from tests.support.redis_server import RedisServer
from trefoil.runtime.state import State

_CLUSTERS = itertools.count()


@pytest.fixture(scope="session")
def shared_redis() -> Iterator[RedisServer]:
    """One Redis for all tests that do not break it; `state` keeps them apart by cluster name."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    """A Redis of the test's own, to kill, restart and empty."""
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
async def state(shared_redis: RedisServer) -> AsyncIterator[State]:
    """Connected to a cluster that nobody else uses."""
    connected = State.connect(shared_redis.url, f"test{next(_CLUSTERS)}")
    yield connected
    await connected.close()


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[DockerEngine]:
    """A real Docker engine with the stand-in image of Triton, for all tests."""
    with engine() as found:
        yield found


@pytest.fixture(autouse=True)
def fresh_logging() -> Iterator[None]:
    """A test that runs a service's main configures logging on its own captured stderr, which closes with the test."""
    yield
    structlog.reset_defaults()

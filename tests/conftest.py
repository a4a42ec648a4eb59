"""Fixtures that several folders share. Processes they start are theirs to end."""

import gc
import itertools
import signal
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import structlog
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.support.docker_engine import DockerEngine, engine
from tests.support.ports import free_ports
from tests.support.redis_server import RedisServer
from trefoil.runtime.state import State

pytest_plugins = ["pytester", "tests.support.flaky"]
_CLUSTERS = itertools.count()

settings.register_profile("trefoil", settings.default, deadline=None)  # how long an example takes says nothing here
settings.load_profile("trefoil")

# A shell starts background jobs with SIGINT ignored, and whatever they start inherits that: programs that a test
# interrupts before they have a separate handler would not notice.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart() -> None:
    """Hypothesis also draws constants that it finds in the modules imported so far. Where it draws the same examples
    each time, those of a test would change with a number in any module, and with the tests collected beside it.
    """
    if settings.default.derandomize:
        providers.is_local_module_file = lambda _: False


def pytest_collection_finish() -> None:
    """What collecting has made stays to the end: a search for garbage need not go through it each time."""
    gc.collect()
    gc.freeze()


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
    """Connected to a cluster that no other process uses."""
    connected = State.connect(shared_redis.url, f"test{next(_CLUSTERS)}", timeout_s=30.0)
    yield connected
    await connected.close()


@pytest.fixture
def unused_tcp_port() -> int:
    """In place of pytest-asyncio's, which the kernel may give to an outgoing connection before it is bound."""
    return free_ports(1)[0]


@pytest.fixture(scope="session")
def unused_tcp_port_factory() -> Callable[[], int]:
    """As `unused_tcp_port`, each time another."""
    return lambda: free_ports(1)[0]


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

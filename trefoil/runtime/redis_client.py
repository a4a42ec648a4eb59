"""Redis' client: by a URL, without retries of its own. Each new connection reads password and certificates again."""

import asyncio
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final

import redis.asyncio as redis
from pydantic import SecretStr
from redis import exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from trefoil.core import errors

HINTS_MAX: Final = 1_000  # that are read at once
TICK_S: Final = 0.005  # uvloop counts in whole milliseconds: a shorter wait may end at once


class _FreshTls(redis.SSLConnection):
    """Connection over TLS by the files that the URL names, as they are when it connects: the client's own keeps what it
    has read for as long as it lives, also where they are renewed."""

    _read: tuple[tuple[int, int], ...] = ()

    def _connection_arguments(self) -> Mapping[str, Any]:
        stats = [os.stat(path) for path in (self.certfile, self.keyfile, self.ca_certs) if path]
        now = tuple((told.st_ino, told.st_mtime_ns) for told in stats)
        if now != self._read:
            self._read, self.ssl_context.context = now, None
        found: Mapping[str, Any] = super()._connection_arguments()
        return found


class _Credentials(CredentialProvider):
    """User and password of the URL as it is at each new connection."""

    def __init__(self, url: SecretStr) -> None:
        self._url = url

    async def get_credentials_async(self) -> Any:
        """Arguments of AUTH; none where the URL has no password."""
        found = parse_url(self._url.get_secret_value())
        return tuple(str(found[name]) for name in ("username", "password") if found.get(name))


def make_client(url: SecretStr | str, timeout_s: float) -> "redis.Redis":
    """Make a client, lazily: nothing is sent yet. `timeout_s`: of a connection; calls are their caller's to bound.

    Raises:
        errors.SettingError: no URL of a Redis.
    """
    secret = url if isinstance(url, SecretStr) else SecretStr(url)
    try:
        options = parse_url(secret.get_secret_value())
        for name in ("username", "password"):
            options.pop(name, None)  # type: ignore[misc]
        pool = redis.ConnectionPool(
            **options,
            credential_provider=_Credentials(secret),
            protocol=2,
            # With a timeout of its own the client sends under asyncio.wait_for, which in Python 3.11 can swallow a
            # cancellation: the task then outlives its service's shutdown.
            socket_timeout=None,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),  # a write that timed out may have been done: repeating is the caller's choice
            health_check_interval=0,
        )
    except ValueError as error:
        remedy = "write redis[s]://[:password@]host:port/0 or unix://path"
        raise errors.SettingError(f"{error}", field="redis_url", remedy=remedy) from error
    if issubclass(pool.connection_class, redis.SSLConnection):
        pool.connection_class = _FreshTls
    return redis.Redis.from_pool(pool)


async def read_hints(pubsub: Any, wait_s: float) -> Iterable[bytes]:
    """Read what was published by now, each message once, or the first within `wait_s`. Whoever was cut off gets all
    hints of that time together, and would act on each.

    Raises:
        redis.ConnectionError: it gave up at once. To redis-py the time-out of the connection itself (ETIMEDOUT, of a
            host that was cut off) is that of the question: it says that there is no message, for ever and in no time.
    """
    clock_s = asyncio.get_running_loop().time
    found: dict[bytes, None] = {}
    left, asked_s = HINTS_MAX, clock_s()
    message = await pubsub.get_message(timeout=wait_s)
    if message is None and wait_s > TICK_S and clock_s() - asked_s < wait_s / 2:
        raise exceptions.ConnectionError("the subscription has timed out")
    while message is not None:
        if message["type"] == "message":
            found[message["data"]] = None
        left -= 1
        message = await pubsub.get_message(timeout=0) if left else None
    return found

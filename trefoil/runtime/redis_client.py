"""Redis' client: by a URL, without retries of its own. Each new connection reads password and certificates again."""

import asyncio
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import redis.asyncio as redis
from pydantic import SecretStr
from redis import exceptions
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

from trefoil.core import errors

UNEXPECTED: Final = re.compile(r"unexpected keyword argument ('\w+')")
HINTS_MAX: Final = 1_000  # that are read at once
TICK_S: Final = 0.005  # uvloop counts in whole milliseconds: a shorter wait may end at once
SENTINEL: Final = "sentinel_"
"""How options begin that are for Sentinels alone."""
SENTINEL_PORT: Final = 26_379
SENTINEL_FORM: Final = "redis[s]+sentinel://[:password@]host:port,host2:port2/name-of-the-primary"


class _FreshTls(redis.SSLConnection):
    """Connection over TLS by the files that the URL names, as they are when it connects: the client's own keeps what it
    has read for as long as it lives, also where they are renewed."""

    _read: tuple[tuple[int, int], ...] = ()

    def __init__(self, *, tls_name: str = "", **options: Any) -> None:
        """`tls_name`: name that the server's certificate must have; "": its host."""
        super().__init__(**options)
        self._tls_name = tls_name

    def _connection_arguments(self) -> Mapping[str, Any]:
        stats = [os.stat(path) for path in (self.certfile, self.keyfile, self.ca_certs) if path]
        now = tuple((told.st_ino, told.st_mtime_ns) for told in stats)
        if now != self._read:
            self._read, self.ssl_context.context = now, None
        found: Mapping[str, Any] = super()._connection_arguments()
        return {**found, "server_hostname": self._tls_name} if self._tls_name else found


class _SentinelTls(SentinelManagedConnection, _FreshTls):
    """Connection over TLS to the primary that Sentinels name."""


class _Sentinel(Sentinel):
    """Sentinels of one primary. One that did not answer while a call lasted is asked last by the next."""

    async def discover_master(self, service_name: str) -> Any:
        """Address and port of the primary.

        Raises:
            exceptions.ConnectionError: no Sentinel names one. It has each one's reason, which redis-py leaves out.
        """
        first, reasons = self.sentinels[0], list[str]()
        try:
            for sentinel in tuple(self.sentinels):
                options = sentinel.connection_pool.connection_kwargs
                why = "does not have that primary, or has it as down"
                try:
                    masters: Any = await sentinel.sentinel_masters()
                    found = masters.get(service_name)
                except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
                    found, why = None, str(error)
                if found and self.check_master_state(found, service_name):
                    self.sentinels.insert(0, self.sentinels.pop(self.sentinels.index(sentinel)))
                    return found["ip"], found["port"]
                reasons.append(f"{options['host']}:{options['port']}: {why}")
        except asyncio.CancelledError:
            if self.sentinels[0] is first:
                self.sentinels.append(self.sentinels.pop(0))
            raise
        raise MasterNotFoundError(f"Sentinels name no primary {service_name!r}: {'; '.join(reasons)}")


class _SentinelPool(SentinelConnectionPool):
    """Connections to the primary, which are closed together with those to Sentinels."""

    async def disconnect(self, inuse_connections: bool = True) -> None:
        await super().disconnect(inuse_connections)
        if inuse_connections:  # not on a failover
            await self.sentinel_manager.aclose()


class _Credentials(CredentialProvider):
    """User and password of the URL as it is at each new connection: those of Redis, or with a prefix of Sentinels."""

    def __init__(self, url: SecretStr, prefix: str = "") -> None:
        self._url, self._prefix = url, prefix

    async def get_credentials_async(self) -> Any:
        """Arguments of AUTH; none where the URL has no password."""
        options, _ = _read_url(self._url.get_secret_value())
        return tuple(str(options[name]) for name in _names(self._prefix) if options.get(name))


def make_client(url: SecretStr | str, timeout_s: float) -> "redis.Redis":
    """Make a client, lazily: nothing is sent yet. `timeout_s`: of a connection; calls are their caller's to bound.

    Raises:
        errors.SettingError: no URL of a Redis.
    """
    remedy = f"write redis[s]://[:password@]host:port/0, unix://path or {SENTINEL_FORM}"
    try:
        return _client(url if isinstance(url, SecretStr) else SecretStr(url), timeout_s)
    except TypeError as error:  # of a connection's arguments
        remedy = "drop it from the URL, or correct it"
        told = UNEXPECTED.search(str(error))
        raise errors.SettingError(
            f"no connection has the option {told[1]}" if told else str(error), field="redis_url", remedy=remedy
        ) from error
    except (ValueError, LookupError, exceptions.RedisError) as error:
        raise errors.SettingError(f"{error}", field="redis_url", remedy=remedy) from error


def _client(secret: SecretStr, timeout_s: float) -> "redis.Redis":
    """Client of a URL.

    Raises:
        ValueError, TypeError, LookupError, exceptions.RedisError, errors.SettingError: no URL of a Redis.
    """
    options, sentinels = _read_url(secret.get_secret_value())
    for name in (*_names(""), *_names(SENTINEL)):
        options.pop(name, None)
    common: dict[str, Any] = {
        "protocol": 2,
        # With a separate timeout the client sends under asyncio.wait_for, which in Python 3.11 can swallow a
        # cancellation: the task then outlives its service's shutdown.
        "socket_timeout": None,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),  # a write that timed out may have been done: repeating is the caller's choice
        "health_check_interval": 0,
        "credential_provider": _Credentials(secret),
    }
    kind = options.pop("connection_class", redis.Connection)
    if fixed := [*(common.keys() & options.keys()), *(["connection_class"] if isinstance(kind, str) else [])]:
        raise TypeError(f"option {min(fixed)!r} is fixed")
    kind = _FreshTls if issubclass(kind, redis.SSLConnection) else kind
    if kind is not _FreshTls and options.pop("tls_name", ""):
        remedy = "write rediss://, or drop it"
        raise errors.SettingError("tls_name without TLS", field="redis_url", remedy=remedy)
    if not sentinels:
        return _of_pool(redis.ConnectionPool(connection_class=kind, **options, **common))
    name, own = options.pop("master"), {key: value for key, value in options.items() if key != "db"}
    of_sentinels = common | {
        "credential_provider": _Credentials(secret, SENTINEL),
        "socket_connect_timeout": timeout_s / (1 + len(sentinels)),  # so that a call reaches one that is there
    }
    manager = _Sentinel([])  # type: ignore[no-untyped-call]
    manager.sentinels = [
        _of_pool(redis.ConnectionPool(connection_class=kind, host=host, port=port, **own, **of_sentinels))
        for host, port in sentinels
    ]
    kind = _SentinelTls if kind is _FreshTls else SentinelManagedConnection
    pool: Any = _SentinelPool(name, manager, connection_class=kind, **options, **common)  # type: ignore[no-untyped-call]
    return _of_pool(pool)


def _of_pool(pool: Any) -> "redis.Redis":
    """Client of a pool, whose connections can be made: the URL's options are their arguments."""
    pool.make_connection().encoder.encode("")
    return redis.Redis.from_pool(pool)


def _names(prefix: str) -> tuple[str, str]:
    return f"{prefix}username", f"{prefix}password"


def _read_url(url: str) -> tuple[dict[str, Any], list[tuple[str, int]]]:
    """Options of connections, and the addresses of Sentinels with, in the options, the name of their `master`.

    Raises:
        ValueError: no URL of a Redis.
    """
    parts = urlsplit(url)
    if not parts.scheme.endswith("+sentinel"):
        return dict(parse_url(url)), []
    user, at, hosts = parts.netloc.rpartition("@")
    master, _, db = parts.path.strip("/").partition("/")
    addresses = [urlsplit(f"//{host}") for host in hosts.split(",")]
    if not master or not all(address.hostname for address in addresses):
        raise ValueError(f"{parts.scheme}: addresses of Sentinels and a name of their primary are needed")
    scheme = parts.scheme.removesuffix("+sentinel")
    single = parts._replace(scheme=scheme, netloc=f"{user}{at}sentinel", path=f"/{db or 0}")
    options = {**parse_url(single.geturl()), "master": master}
    options.pop("host")
    options.pop("port", None)
    return options, [(unquote(str(each.hostname)), each.port or SENTINEL_PORT) for each in addresses]


async def read_hints(pubsub: Any, wait_s: float) -> Iterable[bytes]:
    """Read what was published by now, each message once, or the first within `wait_s`. A subscriber that was cut off
    gets all hints of that time together, and would act on each.

    Raises:
        redis.ConnectionError: it gave up at once. To redis-py the time-out of the connection itself (ETIMEDOUT, of a
            host that was cut off) is that of the question: it says that there is no message, forever and in no time.
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

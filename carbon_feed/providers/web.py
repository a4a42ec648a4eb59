"""What providers over HTTP share: a client whose failures have names, a cache of answers, and reading in pages.

No redirect is followed (it would carry a key elsewhere), no cookie kept, no secret is ever part of a URL or a message.
"""

import asyncio
import datetime
import email.utils
import json
import math
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from weakref import WeakKeyDictionary

import httpx

from carbon_feed.core.observation import Observation
from carbon_feed.core.validation import Cause
from carbon_feed.providers.base import ProviderFailure
from carbon_feed.settings import WebSettings
from trefoil.core import errors
from trefoil.core.carbon import Quality
from trefoil.direct import proxy_error

Row = dict[str, Any]
ANSWER_BYTES_MAX: Final = 4 << 20
MESSAGE_MAX: Final = 200
RETRY_AFTER_MAX_S: Final = 24 * 3600.0
MASK: Final = "***"
RECENT_MAX: Final = 2_000
STATUS: Final[Mapping[int, Cause]] = {
    400: Cause.BAD_REQUEST,
    401: Cause.UNAUTHORISED,
    403: Cause.FORBIDDEN,
    404: Cause.NO_DATA,
    410: Cause.GONE,
    422: Cause.BAD_REQUEST,
    429: Cause.RATE_LIMITED,
}
REMEDIES: Final[Mapping[Cause, str]] = {
    Cause.UNAUTHORISED: "check the key; some providers also answer so above their rate",
    Cause.FORBIDDEN: "the account does not cover this zone or call",
    Cause.GONE: "the provider has shut this address down: set another base_url or provider",
    Cause.TLS: "set ca_bundle to the certificates of your network",
    Cause.REDIRECTED: "set base_url to where it points, if you trust that",
}


_TURNS: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, float]]] = WeakKeyDictionary()
"""Times [s of the loop] from which each address may be asked again."""


class HttpClient:
    """HTTP client of one provider. Connections are made when first used, and kept."""

    def __init__(self, settings: WebSettings, name: str, base_url: str) -> None:
        """Raises errors.SettingError: the proxy cannot be used."""
        self._settings, self._name = settings, name
        self._base_url = base_url.rstrip("/")
        self._client: httpx.AsyncClient | None = None
        self._proxy = ""  # of that client
        self._spend: Callable[[], None] | None = None
        self._made(settings.proxy.get_secret_value(), verify=False)

    def metered(self, spend: Callable[[], None]) -> None:
        """Call `spend` before each request; what it raises comes out of `get`."""
        self._spend = spend

    async def get(
        self,
        path: str,
        *,
        now_s: float,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        basic: tuple[str, str] | None = None,
        secrets: tuple[str, ...] = (),
    ) -> Any:
        """Get a path; returns the JSON of a 200.

        Raises:
            ProviderFailure: everything else, under its cause.
        """
        if self._spend is not None:
            self._spend()
        await self._wait_turn()
        if self._client is not None and self._settings.proxy.get_secret_value() != self._proxy:
            await self.close()
        client = self._connected()  # outside the limit: reading a bundle of certificates takes its time once
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                status, answered, body = await self._exchange(client, path, params, headers, basic)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ProviderFailure(
                Cause.TIMEOUT, f"{self._name} did not answer within {self._settings.timeout_s:g} s"
            ) from error
        except httpx.InvalidURL as error:
            raise ProviderFailure(
                Cause.CONNECTION, f"{self._name} has no usable address", remedy="correct base_url"
            ) from error
        except httpx.HTTPError as error:
            cause = Cause.TLS if _is_tls(error) else Cause.CONNECTION
            raise ProviderFailure(
                cause, f"{self._name} cannot be reached ({type(error).__name__})", remedy=REMEDIES.get(cause, "")
            ) from error
        if status != 200:
            raise self._failure(status, answered, body, now_s, secrets)
        return self._parsed(body)

    async def _wait_turn(self) -> None:
        """Wait until the address may be asked: its zones start together, and read their past in pieces."""
        loop = asyncio.get_running_loop()
        turns = _TURNS.setdefault(loop, {})
        at_s = max(loop.time(), turns.get(self._base_url, -math.inf))
        turns[self._base_url] = at_s + self._settings.gap_s
        await asyncio.sleep(max(0.0, at_s - loop.time()))

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    async def _exchange(
        self,
        client: httpx.AsyncClient,
        path: str,
        params: Mapping[str, str] | None,
        headers: Mapping[str, str] | None,
        basic: tuple[str, str] | None,
    ) -> tuple[int, httpx.Headers, bytes]:
        auth = httpx.BasicAuth(*basic) if basic is not None else None
        url, every = self._base_url + path, {"Accept": "application/json", **(headers or {})}
        async with client.stream("GET", url, params=params, headers=every, auth=auth) as answer:
            body = bytearray()
            async for piece in answer.aiter_bytes():
                body += piece
                if len(body) > ANSWER_BYTES_MAX:
                    raise ProviderFailure(Cause.TOO_LARGE, f"{self._name} sent more than {ANSWER_BYTES_MAX} bytes")
            client.cookies.clear()
            return answer.status_code, answer.headers, bytes(body)

    def _connected(self) -> httpx.AsyncClient:
        if self._client is None:
            proxy = self._settings.proxy.get_secret_value()
            plain = self._base_url.startswith("http://")
            self._client = self._made(proxy, self._trust() if proxy or not plain else False)
            self._proxy = proxy
        return self._client

    def _made(self, proxy: str, verify: ssl.SSLContext | bool) -> httpx.AsyncClient:
        from_environment = proxy == "environment"
        try:
            return httpx.AsyncClient(
                verify=verify,
                proxy=proxy if proxy and not from_environment else None,
                trust_env=from_environment,
                follow_redirects=False,
                timeout=self._settings.timeout_s,
                limits=httpx.Limits(max_connections=4, max_keepalive_connections=1),
                headers={"User-Agent": self._settings.user_agent},
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise proxy_error(error, "web.proxy", "" if from_environment else proxy) from None  # it may name a password

    def _trust(self) -> ssl.SSLContext:
        bundle = self._settings.ca_bundle
        try:
            return ssl.create_default_context(cafile=str(bundle)) if bundle else httpx.create_ssl_context()
        except (OSError, ssl.SSLError) as error:
            raise errors.system_error(
                errors.SettingError, error, "be read", bundle, field="web.ca_bundle", remedy="name a PEM file"
            ) from error

    def _failure(
        self, status: int, headers: httpx.Headers, body: bytes, now_s: float, secrets: tuple[str, ...]
    ) -> ProviderFailure:
        cause = STATUS.get(status)
        if cause is None:
            redirected = 300 <= status < 400
            cause = Cause.REDIRECTED if redirected else Cause.SERVER_ERROR if status >= 500 else Cause.BAD_REQUEST
        said = error_message(body)
        for secret in secrets:
            said = said.replace(secret, MASK) if secret else said
        message = f"{self._name} answered {status}" + (f" {said[:MESSAGE_MAX]!r}" if said else "")
        wait_s = retry_after_s(headers.get("retry-after", ""), now_s)
        return ProviderFailure(cause, message, retry_after_s=wait_s, remedy=REMEDIES.get(cause, ""))

    def _parsed(self, body: bytes) -> Any:
        if not body.strip():
            raise ProviderFailure(Cause.EMPTY, f"{self._name} answered 200 with an empty body")
        try:
            parsed = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise ProviderFailure(Cause.NOT_JSON, f"{self._name} answered 200 with what is not JSON") from error
        if parsed is None or parsed == {} or parsed == []:
            raise ProviderFailure(Cause.EMPTY, f"{self._name} answered 200 with {json.dumps(parsed)}")
        return parsed


class AnswerCache:
    """Cache of a provider's answers. Bounded; one observation per interval, the newest said of it."""

    def __init__(self) -> None:
        self._kept: dict[float, Observation] = {}
        self._answer: tuple[Observation, ...] = ()
        self._newest: Observation | None = None

    def remember(self, said: Observation, answer: Sequence[Observation] = ()) -> Observation:
        """Keep an observation, and what the same answer says of the time before; returns the observation."""
        self._answer, self._newest = tuple(answer) or (said,), said
        for point in self._answer:
            if point.ends_at_s <= said.starts_at_s:
                self._keep(point)
        return self._keep(said)

    def held(self, now_s: float) -> Observation | None:
        """Observation of now in the last answer: of a later interval it was a forecast, whatever it is called."""
        found = next((point for point in self._answer if point.starts_at_s <= now_s < point.ends_at_s), None)
        if found is None or self._newest is None or found.starts_at_s == self._newest.starts_at_s:
            return self._newest
        for point in self._answer:  # none is left out because no look fell into its interval
            if self._newest.starts_at_s < point.starts_at_s < found.starts_at_s and point.starts_at_s not in self._kept:
                self._keep(replace(point, quality=Quality.FORECAST))
        if found.starts_at_s not in self._kept:
            self._keep(replace(found, quality=Quality.FORECAST))
        return self._kept[found.starts_at_s]

    def _keep(self, said: Observation) -> Observation:
        self._kept[said.starts_at_s] = said
        while len(self._kept) > RECENT_MAX:
            del self._kept[min(self._kept)]
        return said

    def newest(self, count_max: int) -> tuple[Observation, ...]:
        """Newest observations, oldest first."""
        return tuple(self._kept[key] for key in sorted(self._kept)[-count_max:])


def point_holding(points: Sequence[Observation], now_s: float) -> Observation:
    """Point whose interval holds now, or else the newest that has ended: the ladder says what it is worth.

    Raises:
        ProviderFailure: all of them are yet to come.
    """
    begun = [point for point in points if point.starts_at_s <= now_s]
    if not begun and points[0].left_out:
        raise ProviderFailure(Cause.NULL, "the interval that holds now has no value")
    if not begun:
        raise ProviderFailure(Cause.FUTURE, "no interval of the answer has begun")
    return max(begun, key=lambda point: point.starts_at_s)


class WebProvider:
    """Base of providers that are asked over HTTP: their client, the cache of their answers, and reading in pages."""

    def __init__(self, web: HttpClient) -> None:
        self._web, self._cache = web, AnswerCache()
        self.left_out = 0
        """Rows without a value or a time, of all answers."""

    def _with_value(
        self, rows: Sequence[Row], value_of: Callable[[Row], object], times: tuple[str, ...]
    ) -> tuple[list[Row], int]:
        """Rows that have a number and these times, and how many have not: those are left out and counted.

        Where no row has a number, they are returned unchanged, for the provider to refuse.

        Raises:
            ProviderFailure: all of them are null.
        """
        values = [_said(row, value_of, times) for row in rows]
        found = [row for row, value in zip(rows, values, strict=True) if _is_number(value)]
        left_out = len(rows) - len(found)
        self.left_out += left_out
        if all(value is None for value in values):
            raise ProviderFailure(Cause.NULL, f"all {left_out} rows are null, or have no time")
        return (found, left_out) if found else (list(rows), 0)

    def history(self, now_s: float, count_max: int) -> tuple[Observation, ...]:
        """Past observations in the cache, oldest first."""
        return self._cache.newest(count_max)

    def held(self, now_s: float) -> Observation | None:
        """Observation of now in the last answer; None = nothing."""
        return self._cache.held(now_s)

    def metered(self, spend: Callable[[], None]) -> None:
        """Call `spend` before each request."""
        self._web.metered(spend)

    async def close(self) -> None:
        """Close the connections."""
        await self._web.close()


async def read_pages(
    begin_s: float, end_s: float, page_s: float, read: Callable[[float, float], Awaitable[Sequence[Observation]]]
) -> tuple[Observation, ...]:
    """Observations of [begin, end) read in pages of at most `page_s`, oldest first; the last said of an interval."""
    found: dict[float, Observation] = {}
    at_s = begin_s
    while at_s < end_s:
        until_s = min(end_s, at_s + page_s)
        for point in await read(at_s, until_s):
            found[point.starts_at_s] = point
        at_s = until_s
    return tuple(found[key] for key in sorted(found) if begin_s <= key < end_s)


def error_message(body: bytes) -> str:
    """Message in an error body: `error.message`, `message`, `error` or `detail`; others are not repeated."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(parsed, dict):
        return ""
    inner = parsed.get("error")
    found = inner.get("message") if isinstance(inner, dict) else parsed.get("message") or inner or parsed.get("detail")
    return found if isinstance(found, str) else ""


def retry_after_s(text: str, now_s: float) -> float:
    """Seconds of a Retry-After header, which is a number or a date; 0 = it does not say. Never more than a day."""
    if not text.strip():
        return 0.0
    try:
        wait_s = float(text)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(text).timestamp() - now_s
        except (ValueError, OverflowError):
            return 0.0
    return min(max(0.0, wait_s), RETRY_AFTER_MAX_S) if wait_s == wait_s else 0.0


def parse_utc(value: object, what: str) -> float:
    """UTC seconds of an ISO 8601 time; a time without a zone is UTC.

    Raises:
        ProviderFailure: it is none.
    """
    try:
        parsed = datetime.datetime.fromisoformat(value) if isinstance(value, str) else None
    except ValueError:
        parsed = None
    if parsed is None:
        raise ProviderFailure(Cause.WRONG_SHAPE, f"{what}: {str(value)[:40]!r} is not a time")
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)).timestamp()


def format_utc(at_s: float) -> str:
    """ISO 8601 text of UTC seconds, to the second, as queries have it."""
    return datetime.datetime.fromtimestamp(at_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_number(value: object, what: str) -> float:
    """Number of a JSON value.

    Raises:
        ProviderFailure: it is null, or something else.
    """
    if value is None:
        raise ProviderFailure(Cause.NULL, f"{what} is null")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProviderFailure(Cause.WRONG_SHAPE, f"{what}: {str(value)[:40]!r} is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise ProviderFailure(Cause.TOO_HIGH, f"{what} has hundreds of digits") from error


def _said(row: Row, value_of: Callable[[Row], object], times: tuple[str, ...]) -> object:
    """Value of a row; None or a text where one of its times is absent or none."""
    wrong = [row.get(key) for key in times if not _is_time(row.get(key))]
    return value_of(row) if not wrong else None if wrong[0] in (None, "") else "no time"


def _is_time(value: object) -> bool:
    try:
        parse_utc(value, "")
    except ProviderFailure:
        return False
    return True


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def list_of_objects(parsed: object, keys: tuple[str, ...], what: str) -> list[dict[str, Any]]:
    """List of objects under the first of these keys that holds one; of a row that is null an empty one.

    Raises:
        ProviderFailure: there is none, or it is empty.
    """
    if isinstance(parsed, dict):
        for key in keys:
            rows = parsed.get(key)
            if isinstance(rows, list):
                if not rows:
                    raise ProviderFailure(Cause.EMPTY, f"{what} answered 200 with no rows")
                if all(row is None or isinstance(row, dict) for row in rows):
                    return [row or {} for row in rows]
    raise ProviderFailure(Cause.WRONG_SHAPE, f"{what} answered without a list {' or '.join(keys)}")


def _is_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False

"""Reading from a Prometheus, or what answers as one: Thanos, Mimir, VictoriaMetrics. GET requests alone.

HTTP API: `series`, to see what there is, and `query_range` in chunks. Prometheus refuses more than 11,000 points a
series and query; a chunk has fewer, and at most `CHUNK_SAMPLES` samples. Tokens are never part of a URL or a message.
"""

import json
import math
import ssl
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import numpy as np

from carbon_feed.providers.web import error_message
from trefoil.assess.series import CLUSTER_LABELS, SERIES, MetricSeries, known_name, labels_of, merged, printable
from trefoil.core.errors import InvalidInput, SettingError, Unavailable, Untrusted, system_error
from trefoil.direct import is_internal, proxy_error
from trefoil.runtime.clock import WallClock
from trefoil.runtime.files import NotPlain, open_plain

POINTS: Final = 10_080  # of a series, at most: a week of minutes
CHUNK_POINTS: Final = 2_000
CHUNK_SAMPLES: Final = 400_000
SAMPLES_MAX: Final = 20_000_000
BYTES_MAX: Final = 256 << 20
PEM_BYTES_MAX: Final = 2**24
TIMEOUT_S: Final = 30.0
STEPS_S: Final = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
MESSAGE_MAX: Final = 300
LESS: Final = "ask for less with --since, --step or --selector"
UP: Final = f"see that it is up; {LESS}"
TOKEN: Final = "give a token that may read: --token-file, TREFOIL_ASSESS_TOKEN; to Mimir --header X-Scope-OrgID=TEAM"
PREFIX: Final = "give the path prefix as well, e.g. https://host/prometheus, or the address it redirects to"
API: Final = "give the address of its API with its path prefix; a login page or Grafana is none"
REMEDIES: Final = {400: f"correct --selector, or {LESS}", 401: TOKEN, 403: TOKEN, 404: PREFIX, 405: PREFIX, 302: PREFIX}


def open_client(
    token: str = "", user: str = "", headers: Mapping[str, str] | None = None, tls_ca: Path | None = None,
    urls: Sequence[str] = (),
) -> httpx.Client:  # fmt: skip
    """HTTP client of `urls` with a token (`user`: as password of basic auth); no redirect, which it never follows, gets
    it. Only hosts that are not internal are asked by a proxy of the environment."""
    try:
        with open_plain(tls_ca, PEM_BYTES_MAX) if tls_ca else nullcontext():
            trust = ssl.create_default_context(cafile=str(tls_ca) if tls_ca else None)
    except (OSError, NotPlain, ssl.SSLError) as error:
        remedy = "name a PEM file with certificates"
        raise system_error(SettingError, error, "be read", tls_ca, field="--tls-ca", remedy=remedy) from error
    token, words = token.strip(), "".join([token.strip(), user, *(f"{k}{v}" for k, v in (headers or {}).items())])
    if not (words.isascii() and words.isprintable()):
        why, remedy = "not ASCII, or of several lines", "write them as HTTP can send them"
        raise SettingError(why, field="--token-file, --user, --header", remedy=remedy)
    own = {"User-Agent": "trefoil-assess"} | ({"Authorization": f"Bearer {token}"} if token and not user else {})
    auth = httpx.BasicAuth(user, token) if user else None
    hosts = {_host(url) for url in urls}
    near = {host for host in hosts if is_internal(host)}
    direct = {f"all://[{host}]" if ":" in host else f"all://{host}": None for host in near if host}
    try:
        return httpx.Client(
            verify=trust, headers=own | dict(headers or {}), auth=auth, timeout=TIMEOUT_S, trust_env=hosts != near,
            mounts=direct,
        )  # fmt: skip
    except (ImportError, ValueError, httpx.InvalidURL) as error:
        raise proxy_error(error) from None  # its text may hold a password


def _host(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # `base_url` refuses it
        return ""


def base_url(url: str, option: str) -> str:
    """URL without a last slash; raises SettingError: it is not an http(s) URL, or holds what could be a secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingError(
            "is not a URL", field=option, value=url, remedy="write http://host:9090 or https://host/prefix"
        )
    if parts.username or parts.password or parts.query or parts.fragment:
        remedy = "put a password into a file: --token-file FILE --user NAME; send keys with --header NAME=VALUE"
        raise SettingError("a URL holds neither password nor query", field=option, value=parts.hostname, remedy=remedy)
    return url.rstrip("/")


def get(
    client: httpx.Client, url: str, option: str, asked: Counter[str], params: Mapping[str, str] | None = None
) -> tuple[str, bytes]:
    """Content type and body of the answer to a GET, read whole within `TIMEOUT_S`; `asked` counts it. Raises
    Unavailable: no answer in time, no connection; Untrusted: TLS; InvalidInput: not 200."""
    clock, body = WallClock(), bytearray()
    asked["requests"] += 1
    until_s, silent = clock.monotonic_s() + TIMEOUT_S, f"no whole answer within {TIMEOUT_S:g} s"
    try:
        with client.stream("GET", url, params=params) as answer:
            for piece in answer.iter_bytes():
                body += piece
                if clock.monotonic_s() > until_s:
                    raise Unavailable(silent, field=option, value=url, remedy=UP)
                if len(body) > BYTES_MAX:
                    raise InvalidInput(f"an answer of more than {BYTES_MAX:,} bytes", field=option, remedy=LESS)
    except httpx.TimeoutException as error:
        raise Unavailable(silent, field=option, value=url, remedy=UP) from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        words = str(error) or type(error).__name__
        if "SSL" in words.upper():
            remedy = "give the authority of its certificate with --tls-ca, or write http:// where it speaks no TLS"
            raise Untrusted(f"TLS fails ({words})", field=option, value=url, remedy=remedy) from error
        remedy = "correct the address, or start it"
        raise Unavailable(f"cannot be reached ({words})", field=option, value=url, remedy=remedy) from error
    if answer.status_code != 200:
        status = 302 if 300 <= answer.status_code < 400 else answer.status_code
        words = f" ({printable(words[:MESSAGE_MAX])})" if (words := error_message(bytes(body))) else ""
        why, remedy = f"{url} answered {answer.status_code}{words}", REMEDIES.get(status, UP)
        raise InvalidInput(why, field="--token-file" if status in (401, 403) else option, remedy=remedy)
    return answer.headers.get("Content-Type", "").partition(";")[0], bytes(body)


@dataclass(slots=True)
class Prometheus:
    """Prometheus by its HTTP API. `asked`: requests and samples so far; `warnings`: of answers that are not whole."""

    url: str
    client: httpx.Client
    selector: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    warnings: set[str] = field(default_factory=set)

    def _data(self, path: str, params: Mapping[str, str]) -> Any:
        url = f"{base_url(self.url, '--prometheus')}/api/v1/{path}"
        kind, body = get(self.client, url, "--prometheus", self.asked, params)
        try:
            told = json.loads(body)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict) or told.get("status") != "success" or "data" not in told:
            why = f"answered with {kind or 'something'}, not with Prometheus' JSON"
            raise InvalidInput(why, field="--prometheus", value=self.url, remedy=API)
        warnings = told.get("warnings") or []
        warnings = warnings if isinstance(warnings, list) else [warnings]
        partial = ["the answer is partial"] if told.get("isPartial") else []  # VictoriaMetrics' word
        self.warnings |= {printable(str(one)[:MESSAGE_MAX]) for one in (*warnings, *partial)}
        return told["data"]

    def read(self, begin_s: float, end_s: float, step_s: float = 0.0) -> list[MetricSeries]:
        """Every series that is read, in a time. `step_s` 0: such that a series has at most `POINTS`."""
        wanted = f'__name__=~"({"|".join(SERIES)})(_total)?"'
        match = "{" + ",".join(filter(None, (wanted, self.selector))) + "}"
        span = {"start": f"{begin_s:.0f}", "end": f"{end_s:.0f}"}
        try:
            labels = [labels_of(one) for one in self._data("series", {"match[]": match, **span})]
            names = Counter(one["__name__"] for one in labels if known_name(one["__name__"]))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput("series without names", field="--prometheus", value=self.url, remedy=API) from error
        check_clusters(labels)
        step_s = step_s or next((s for s in STEPS_S if (end_s - begin_s) / s <= POINTS), STEPS_S[-1])
        samples = len(labels) * (end_s - begin_s) / step_s
        if samples > SAMPLES_MAX:
            least_s = math.ceil(samples * step_s / SAMPLES_MAX)
            remedy = f"give --step {least_s}, a shorter --since, or a part of the fleet by --selector"
            why = f"{len(labels):,} series every {step_s:g} s are {samples:,.0f} samples, more than {SAMPLES_MAX:,}"
            raise InvalidInput(why, field="--since", remedy=remedy)
        found: dict[tuple[str, frozenset[tuple[str, str]]], list[MetricSeries]] = defaultdict(list)
        for name, series in sorted(names.items()):
            points = max(1, min(CHUNK_POINTS, CHUNK_SAMPLES // series))
            at_s = math.ceil(begin_s / step_s) * step_s
            while at_s <= end_s:
                until_s = min(end_s, at_s + (points - 1) * step_s)
                for part in self._range(name, at_s, until_s, step_s):
                    found[name, frozenset(part.labels.items())].append(part)
                at_s += points * step_s
        if names and not found:
            why = f"no sample within five minutes of any step of {step_s:g} s"
            raise InvalidInput(why, field="--step", remedy="give a smaller --step or --since")
        return [MetricSeries(name, dict(key), *merged(parts)) for (name, key), parts in found.items()]

    def _range(self, name: str, begin_s: float, end_s: float, step_s: float) -> list[MetricSeries]:
        query = "{" + ",".join(filter(None, (f'__name__="{name}"', self.selector))) + "}"
        params = {"query": query, "start": f"{begin_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        data, found = self._data("query_range", params), []
        try:
            for one in data["result"]:
                labels = {k: v for k, v in labels_of(one["metric"]).items() if k != "__name__"}
                points = np.array(one["values"], dtype=np.float64).reshape(-1, 2)
                points = points[(points[:, 0] >= begin_s - step_s) & (points[:, 0] <= end_s + step_s)]
                self.asked["samples"] += len(points)
                if len(points):
                    found.append(MetricSeries(name, labels, points[:, 0], points[:, 1]))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            why = f"{name}: no matrix of numbers"
            raise InvalidInput(why, field="--prometheus", value=self.url, remedy=API) from error
        return found


def check_clusters(labels: Sequence[Mapping[str, str]]) -> None:
    """Check that series are of one cluster; raises InvalidInput: a label of `CLUSTER_LABELS` has several values."""
    for label in CLUSTER_LABELS:
        values = sorted({one[label] for one in labels if one.get(label)})
        if len(values) > 1:
            remedy = f"name one: --selector '{label}=\"{values[0]}\"'"
            raise InvalidInput("series of several clusters", field=label, value=", ".join(values), remedy=remedy)

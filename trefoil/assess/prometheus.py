"""Reading from a Prometheus, or what answers as one: Thanos, Mimir, VictoriaMetrics. GET requests alone.

HTTP API: `series`, to see what there is, and `query_range` in chunks. Prometheus refuses more than 11,000 points a
series and query; a chunk has fewer, and at most `CHUNK_SAMPLES` samples. Tokens are never part of a URL or a message.
"""

import json
import math
import ssl
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import httpx
import numpy as np

from trefoil.assess.series import CLUSTER_LABELS, MetricSeries, merged, names_asked
from trefoil.core.errors import InvalidInput, SettingError, Unavailable, Untrusted, system_error
from trefoil.runtime.clock import WallClock

POINTS: Final = 10_080  # of a series, at most: a week of minutes
CHUNK_POINTS: Final = 2_000
CHUNK_SAMPLES: Final = 400_000
SAMPLES_MAX: Final = 20_000_000
BYTES_MAX: Final = 256 << 20
TIMEOUT_S: Final = 30.0
STEPS_S: Final = (5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600)
REPLICA_LABELS: Final = ("prometheus_replica", "replica", "__replica__")
"""Labels of two Prometheus that scrape the same: without them their series are one."""
MESSAGE_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class Access:
    """How a source is asked: token (basic auth where `user` is given), headers, authority of its certificate."""

    token: str = ""
    user: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    tls_ca: Path | None = None

    def client(self) -> httpx.Client:
        """HTTP client; follows no redirect, which would carry the token elsewhere.

        Raises:
            SettingError: the authority's file cannot be read.
        """
        try:
            trust = ssl.create_default_context(cafile=str(self.tls_ca) if self.tls_ca else None)
        except (OSError, ssl.SSLError) as error:
            remedy = "name a PEM file with certificates"
            raise system_error(SettingError, error, "be read", self.tls_ca, field="--tls-ca", remedy=remedy) from error
        headers = {"User-Agent": "trefoil-assess", **self.headers}
        if self.token and not self.user:
            headers["Authorization"] = f"Bearer {self.token}"
        auth = httpx.BasicAuth(self.user, self.token) if self.user else None
        return httpx.Client(verify=trust, headers=headers, auth=auth, timeout=TIMEOUT_S, follow_redirects=False)


@dataclass(slots=True)
class Asked:
    """How much a source was asked for."""

    requests: int = 0
    samples: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.requests:,} requests, {self.samples:,} samples, {self.bytes / 1e6:,.1f} MB"


def base_url(url: str, option: str) -> str:
    """URL without a last slash.

    Raises:
        SettingError: it is no http(s) URL, or holds a password.
    """
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    if not known:
        raise SettingError("is no URL", field=option, value=url, remedy="write http://host:9090 or https://host/prefix")
    if parts.username or parts.password:
        shown = f"{parts.scheme}://***@{parts.hostname}"
        remedy = "put the password into a file: --token-file FILE --user NAME"
        raise SettingError("a URL holds no password", field=option, value=shown, remedy=remedy)
    return url.rstrip("/")


def get(
    client: httpx.Client, url: str, option: str, asked: Asked, params: Mapping[str, str] | None = None
) -> httpx.Response:
    """Answer to a GET, read whole within `TIMEOUT_S`.

    Raises:
        Unavailable: no answer in time, or no connection. Untrusted: TLS. InvalidInput: another answer than 200.
    """
    clock = WallClock()
    until_s, body, asked.requests = clock.monotonic_s() + TIMEOUT_S, bytearray(), asked.requests + 1
    silent = Unavailable(
        f"no whole answer within {TIMEOUT_S:g} s", field=option, value=url,
        remedy="see that it is up and not overloaded; ask for less with --since, --step or --selector",
    )  # fmt: skip
    try:
        with client.stream("GET", url, params=params) as answer:
            for piece in answer.iter_bytes():
                body += piece
                if clock.monotonic_s() > until_s:
                    raise silent
                if len(body) > BYTES_MAX:
                    remedy = "ask for less with --since, --step or --selector"
                    raise InvalidInput(f"an answer of more than {BYTES_MAX:,} bytes", field=option, remedy=remedy)
    except httpx.TimeoutException as error:
        raise silent from error
    except httpx.HTTPError as error:
        words = str(error) or type(error).__name__
        if "CERTIFICATE" in words.upper() or "SSL" in words.upper():
            remedy = "give the authority of its certificate with --tls-ca, or write http:// where it speaks no TLS"
            raise Untrusted(f"TLS fails ({words})", field=option, value=url, remedy=remedy) from error
        raise Unavailable(
            f"cannot be reached ({words})", field=option, value=url, remedy="correct the address, or start it"
        ) from error
    asked.bytes += len(body)
    whole = httpx.Response(answer.status_code, headers={"Content-Type": answer.headers.get("Content-Type", "")})
    whole._content = bytes(body)
    if whole.status_code != 200:
        raise _refused(whole, url, option)
    return whole


def _refused(answer: httpx.Response, url: str, option: str) -> InvalidInput:
    """Error of an answer that is not 200, with what its body says."""
    try:
        told = json.loads(answer.content)
        words = str(told.get("error", "")) if isinstance(told, dict) else ""
    except ValueError:
        words = ""
    status, field, value = answer.status_code, option, url
    remedy = "see what it says; ask for less with --since, --step or --selector"
    if status in (401, 403):
        field, value = "--token-file", ""
        remedy = (
            "give a token that may read: --token-file or TREFOIL_ASSESS_TOKEN; to Mimir also --header X-Scope-OrgID=..."
        )
    elif status in (404, 405) or 300 <= status < 400:
        remedy = "give the path prefix as well, e.g. https://host/prometheus, or the address it redirects to"
    elif status == 429:
        remedy = "wait, or ask for less with --since, --step or --selector"
    why = f"{url} answered {status}" + (f" ({words[:MESSAGE_MAX]})" if words else "")
    return InvalidInput(why, field=field, value=value or None, remedy=remedy)


@dataclass(slots=True)
class Prometheus:
    """Prometheus by its HTTP API. `warnings`: what it said of answers that are not whole (Thanos)."""

    url: str
    access: Access = field(default_factory=Access)
    selector: str = ""
    asked: Asked = field(default_factory=Asked)
    warnings: set[str] = field(default_factory=set)
    _client: httpx.Client | None = None

    def _data(self, path: str, params: Mapping[str, str]) -> Any:
        self._client = self._client or self.access.client()
        url = f"{base_url(self.url, '--prometheus')}/api/v1/{path}"
        answer = get(self._client, url, "--prometheus", self.asked, params)
        try:
            told = json.loads(answer.content)
            known = isinstance(told, dict) and told.get("status") == "success" and "data" in told
        except ValueError:
            known = False
        if not known:
            kind = answer.headers["Content-Type"].partition(";")[0] or "something"
            raise InvalidInput(
                f"answered with {kind}, not with Prometheus' JSON", field="--prometheus", value=self.url,
                remedy="give the address of its API with its path prefix; a login page or Grafana is none",
            )  # fmt: skip
        self.warnings |= {str(one)[:MESSAGE_MAX] for one in told.get("warnings") or ()}
        return told["data"]

    def known(self, begin_s: float, end_s: float) -> list[dict[str, str]]:
        """Label sets of the series that there are, of those that are read.

        Raises:
            InvalidInput: there is none, or of several clusters.
        """
        match = f'{{__name__=~"{"|".join(names_asked())}"{"," if self.selector else ""}{self.selector}}}'
        found = self._data("series", {"match[]": match, "start": f"{begin_s:.0f}", "end": f"{end_s:.0f}"})
        if not isinstance(found, list) or not all(isinstance(one, dict) and "__name__" in one for one in found):
            raise InvalidInput("series without names", field="--prometheus", value=self.url, remedy="ask its API")
        check_clusters(found)
        return found

    def read(self, begin_s: float, end_s: float, step_s: float = 0.0) -> list[MetricSeries]:
        """Every series that is read, in a time. `step_s` 0: such that a series has at most `POINTS`.

        Raises:
            InvalidInput, Unavailable, Untrusted: names option, value and remedy.
        """
        labels = self.known(begin_s, end_s)
        step_s = step_s or step_for(end_s - begin_s)
        samples = len(labels) * (end_s - begin_s) / step_s
        if samples > SAMPLES_MAX:
            enough = next((s for s in STEPS_S if len(labels) * (end_s - begin_s) / s <= SAMPLES_MAX), 0)
            remedy = f"give --step {enough}" if enough else "give a shorter --since"
            raise InvalidInput(
                f"{len(labels):,} series every {step_s:g} s are {samples:,.0f} samples, more than {SAMPLES_MAX:,}",
                field="--since", remedy=f"{remedy}, or name a part of the fleet with --selector",
            )  # fmt: skip
        count: dict[str, int] = defaultdict(int)
        for one in labels:
            count[one["__name__"]] += 1
        found: dict[tuple[str, frozenset[tuple[str, str]]], list[MetricSeries]] = defaultdict(list)
        for name, series in sorted(count.items()):
            points = max(1, min(CHUNK_POINTS, CHUNK_SAMPLES // series))
            at_s = math.ceil(begin_s / step_s) * step_s
            while at_s <= end_s:
                until_s = min(end_s, at_s + (points - 1) * step_s)
                for part in self._range(name, at_s, until_s, step_s):
                    found[name, frozenset(part.labels.items())].append(part)
                at_s += points * step_s
        return [MetricSeries(name, dict(key), *merged(parts)) for (name, key), parts in found.items()]

    def _range(self, name: str, begin_s: float, end_s: float, step_s: float) -> list[MetricSeries]:
        query = f'{{__name__="{name}"{"," if self.selector else ""}{self.selector}}}'
        params = {"query": query, "start": f"{begin_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        data, found = self._data("query_range", params), []
        try:
            for one in data["result"]:
                labels = {k: v for k, v in one["metric"].items() if k not in (*REPLICA_LABELS, "__name__")}
                points = np.array(one["values"], dtype=np.float64).reshape(-1, 2)
                points = points[np.isfinite(points[:, 1])]
                self.asked.samples += len(points)
                if len(points):
                    found.append(MetricSeries(name, labels, points[:, 0], points[:, 1]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            why = f"{name}: no matrix of numbers"
            raise InvalidInput(why, field="--prometheus", value=self.url, remedy="ask its API") from error
        return found


def step_for(span_s: float) -> float:
    """Step of a span: the smallest of `STEPS_S` with at most `POINTS` points; beyond a year an hour."""
    return float(next((step for step in STEPS_S if span_s / step <= POINTS), STEPS_S[-1]))


def check_clusters(labels: Sequence[Mapping[str, str]]) -> None:
    """Check that series are of one cluster.

    Raises:
        InvalidInput: a label of `CLUSTER_LABELS` has several values.
    """
    for label in CLUSTER_LABELS:
        values = sorted({one[label] for one in labels if one.get(label)})
        if len(values) > 1:
            remedy = f"name one: --selector '{label}=\"{values[0]}\"'"
            raise InvalidInput("series of several clusters", field=label, value=", ".join(values), remedy=remedy)

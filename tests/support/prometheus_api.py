"""An HTTP server that answers as Prometheus' API does, or as what stands in its place; it keeps what it was asked."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np

from trefoil.assess.series import MetricSeries


@dataclass
class Api:
    """What is answered: series, a prefix of its paths, a token; or another answer for every path."""

    series: Sequence[MetricSeries] = ()
    prefix: str = ""
    token: str = ""
    warnings: Sequence[str] = ()
    partial: bool = False
    other: Callable[[BaseHTTPRequestHandler], None] | None = None
    asked: list[tuple[str, str, dict[str, str], dict[str, str]]] = field(default_factory=list)
    """Method, path, query and headers of each request."""

    def answer(self, path: str, query: dict[str, str]) -> tuple[int, object]:
        if path == f"{self.prefix}/api/v1/series":
            return 200, [{"__name__": one.name, **one.labels} for one in self.series]
        if path != f"{self.prefix}/api/v1/query_range":
            return 404, None
        begin_s, end_s, step_s = (float(query[name]) for name in ("start", "end", "step"))
        if (end_s - begin_s) / step_s > 11_000:
            return (
                400,
                "exceeded maximum resolution of 11,000 points per timeseries. Try decreasing the query resolution",
            )
        found = []
        for one in self.series:
            if f'__name__="{one.name}"' in query["query"]:
                times = np.arange(begin_s, end_s + step_s / 2, step_s)
                at = np.searchsorted(one.times_s, times, side="right") - 1  # the newest sample of the last five minutes
                known = (at >= 0) & (times - one.times_s[np.maximum(at, 0)] <= 300.0)
                values = [[t, repr(float(v))] for t, v in zip(times[known], one.values[at[known]], strict=True)]
                if values:
                    found.append({"metric": {"__name__": one.name, **one.labels}, "values": values})
        return 200, {"resultType": "matrix", "result": found}


@contextmanager
def serving(api: Api, tls: Path | None = None) -> Iterator[str]:
    """Address of a server that answers so; `tls`: folder of localhost's certificate and key."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(parts.query).items()}
            api.asked.append((self.command, parts.path, query, dict(self.headers)))
            if api.other is not None:
                api.other(self)
                return
            if api.token and self.headers.get("Authorization") != f"Bearer {api.token}":
                reply(self, 401, "application/json", json.dumps({"status": "error", "error": "bad token"}))
                return
            status, data = api.answer(parts.path, query)
            told = {"status": "success", "data": data, "warnings": list(api.warnings)} | (
                {"isPartial": True} if api.partial else {}
            )
            if status != 200:
                told = {"status": "error", "errorType": "bad_data", "error": data}
            reply(self, status, "application/json", json.dumps(told) if data is not None else "404 page not found")

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(tls / "localhost.crt", tls / "localhost.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}" if tls is None else f"https://localhost:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(handler: BaseHTTPRequestHandler, status: int, kind: str, body: str) -> None:
    """Answer a request."""
    handler.send_response(status)
    handler.send_header("Content-Type", kind)
    handler.send_header("Content-Length", str(len(body.encode())))
    handler.end_headers()
    handler.wfile.write(body.encode())

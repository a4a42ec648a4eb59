"""Speaks a Docker engine's HTTP API for one image and its containers, and keeps what it was asked to create.

Containers start, end and go; nothing runs. For what only an engine with NVIDIA's toolkit would accept.
"""

import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

IMAGE = "example/tritonserver:24.08-py3"
STARTED = "2026-11-21T10:00:00.123456789Z"


@dataclass
class FakeEngine:
    """`files` are those of the image; `created` the bodies of create calls; `refuse_start` an engine's refusal.

    `looks_ended`: exit code of whatever looked around in a container. The gateway of its networks is this host.
    """

    files: tuple[str, ...] = (
        "/opt/tritonserver/bin/tritonserver",
        "/opt/tritonserver/backends/onnxruntime",
        "/opt/tritonserver/backends/python",
    )
    has_image: bool = True
    refuse_start: str = ""
    looks_ended: int = 0
    info: dict[str, Any] = field(default_factory=lambda: {"ServerVersion": "28.3.0", "Runtimes": {"nvidia": {}}})
    networks: dict[str, dict[str, Any]] = field(default_factory=dict)
    created: dict[str, dict[str, Any]] = field(default_factory=dict)  # by name
    calls: list[str] = field(default_factory=list)
    containers: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *arguments: Any) -> None:
                """Nothing."""

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                status, answer = engine.answer(self.command, self.path, body)
                data = json.dumps(answer).encode() if answer is not None else b""
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            do_GET = do_POST = do_DELETE = do_HEAD = _answer

        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"tcp://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, address: str, body: dict[str, Any]) -> tuple[int, Any]:
        """One call: status and JSON. One at a time, as agents ask from several threads."""
        with self._lock:
            return self._answer(method, address, body)

    def _answer(self, method: str, address: str, body: dict[str, Any]) -> tuple[int, Any]:
        parts = urllib.parse.urlsplit(address)
        query = dict(urllib.parse.parse_qsl(parts.query))
        words = [word for word in parts.path.split("/") if word and not word.startswith("v1.")]
        self.calls.append(f"{method} {' '.join(words)}")
        match method, words:
            case "GET", ["version"]:
                return 200, {"ApiVersion": "1.43"}
            case "GET", ["info"]:
                return 200, self.info
            case "POST", ["networks", "create"]:
                self.networks[body["Name"]] = {**body, "IPAM": {"Config": [{"Gateway": "127.0.0.1"}]}, "Containers": {}}
                return 201, {"Id": body["Name"]}
            case "GET", ["networks", name]:
                found = self.networks.get(name)
                return (200, found) if found else (404, {"message": f"network {name} not found"})
            case "POST", ["images", "create"]:
                self.has_image = True
                return 200, {"status": "pulled"}
            case "GET", ["images", *_]:
                found = 200, {"Id": "sha256:1234", "Config": {}}
                return found if self.has_image else (404, {"message": "No such image"})
            case "POST", ["containers", "create"]:
                return self._create(query.get("name", ""), body)
            case "GET", ["containers", "json"]:
                wanted = dict(label.split("=", 1) for label in json.loads(query["filters"])["label"])
                return 200, [
                    one
                    for one in map(self._summary, self.containers.values())
                    if wanted.items() <= one["Labels"].items()
                ]
            case _, ["containers", name, *rest]:
                return self._on_container(method, name, rest, query)
        return 501, {"message": f"not spoken here: {method} {address}"}

    def _create(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        container = f"{len(self.calls):064x}"
        self.containers[container] = {
            "Id": container,
            "Config": {"Labels": body["Labels"] or {}, "Tty": False},
            "State": {"Status": "created", "StartedAt": "0001-01-01T00:00:00Z", "ExitCode": 0},
        }
        if name:
            self.created[name] = body
        return 201, {"Id": container, "Warnings": []}

    @staticmethod
    def _summary(one: dict[str, Any]) -> dict[str, Any]:
        status = one["State"]["Status"]
        return {"Id": one["Id"], "Labels": one["Config"]["Labels"], "State": status, "Status": status}

    def _on_container(self, method: str, name: str, rest: list[str], query: dict[str, str]) -> tuple[int, Any]:
        found = self.containers.get(name)
        if found is None:
            return 404, {"message": f"No such container: {name}"}
        match method, rest:
            case "HEAD", ["archive"]:
                return (200 if query["path"] in self.files else 404), None
            case "POST", ["start"]:
                if self.refuse_start:
                    return 500, {"message": self.refuse_start}
                found["State"] |= {"Status": "running", "StartedAt": STARTED}
                return 204, None
            case "POST", ["kill"]:
                found["State"] |= {"Status": "exited", "ExitCode": 128 + 9}
                return 204, None
            case "GET", ["logs"]:
                return 200, None
            case "POST", ["wait"]:
                return 200, {"StatusCode": self.looks_ended}
            case "DELETE", []:
                del self.containers[name]
                return 204, None
            case "GET", ["json"]:
                return 200, {**found, "HostConfig": {}}
        return 501, {"message": f"not spoken here: {method} {rest}"}

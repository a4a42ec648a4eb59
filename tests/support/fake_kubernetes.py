"""API server of Kubernetes for one namespace, with a kubelet that runs the commands of pods as processes of this host.

It has pods (create, get, list, watch, delete), their logs, one node, and faults: what a test adds to `faults` answers
the next calls that match; `expire`, `evict`, `lose_node` and `image_fault` are what clusters do. A pod has no file
system and no network of its own here: its processes see those of the host.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NAMESPACE, NODE, TOKEN = "trefoil", "gpu-a", "token-1"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
MARK = "FAKE_POD_UID"  # variable of all processes of a pod
AGENT_POD = {
    "metadata": {
        "name": "trefoil-gpu-x", "uid": "agent", "labels": {"app.kubernetes.io/instance": "trefoil"},
        "ownerReferences": [
            {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "trefoil-gpu", "uid": "ds", "controller": True}
        ],
    },
    "spec": {"nodeName": NODE},
}  # fmt: skip


@dataclass
class Fault:
    """Answer to calls of this method whose address contains `where`, so many `times`."""

    method: str
    where: str
    status: int
    message: str = "made to fail"
    times: int = 1
    retry_after: str = ""
    after: bool = False  # the call was carried out


@dataclass
class FakeKubernetes:
    """`folder`: of the service account and the logs. `calls`: method and path of each call, in order."""

    folder: Path
    faults: list[Fault] = field(default_factory=list)
    image_fault: str = ""  # message of an image that cannot be pulled
    admission_fault: str = ""  # reason of a kubelet that does not admit a pod
    programs: dict[str, str] = field(default_factory=dict)  # what stands for paths of the image, and its PATH
    kubelet_hangs: bool = False  # it ends no pod
    token: str = TOKEN
    calls: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    node: dict[str, Any] = field(default_factory=lambda: {"metadata": {"name": NODE, "labels": {}}, "status": {}})

    def __post_init__(self) -> None:
        server = self
        self.account = self.folder / "account"
        self.account.mkdir(parents=True)
        for name, text in (("namespace", NAMESPACE), ("token", TOKEN)):
            (self.account / name).write_text(f"{text}\n")
        self._changed = threading.Condition()
        self._version, self._oldest, self._epoch = 1, 0, 0
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._pods: dict[str, dict[str, Any]] = {"trefoil-gpu-x": json.loads(json.dumps(AGENT_POD))}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._closed = False

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *arguments: Any) -> None:
                """Nothing."""

            def _answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else {}
                server.serve(self, body)

            do_GET = do_POST = do_DELETE = _answer

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=[0.02], daemon=True).start()

    def close(self) -> None:
        """End the server and all processes of pods."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for name in list(self._processes):
            self._kill_all(self._pods.get(name, {}).get("metadata", {}).get("uid", ""))
        self._server.shutdown()
        self._server.server_close()

    # --- what clusters do ---------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """First process of a pod."""
        return self._processes[name].pid

    def pods(self) -> list[str]:
        """Names of the pods of slices."""
        return [name for name in self._pods if name != "trefoil-gpu-x"]

    def expire(self) -> None:
        """Forget all changes until now: watches from before them get 410."""
        with self._changed:
            self._oldest, self._epoch = self._version, self._epoch + 1
            self._events.clear()
            self._changed.notify_all()

    def evict(self, name: str) -> None:
        """The kubelet ends a pod because the node lacks memory."""
        reason = {"reason": "Evicted", "message": "The node was low on resource: memory."}
        self._update(name, {"phase": "Failed", **reason})  # first, as kubelets do
        self._kill_all(self._pods[name]["metadata"]["uid"])

    def lose_node(self) -> None:
        """The node goes, and the garbage collector deletes its pods."""
        disrupted = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
        for name in self.pods():
            self._update(name, {"conditions": [{**disrupted, "message": "PodGC: node no longer exists"}]})
            self._kill_all(self._pods[name]["metadata"]["uid"])
            self._remove(name)

    # --- the API ------------------------------------------------------------------------------------------------------

    def serve(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        parts = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        self.calls.append(f"{handler.command} {'watch ' if 'watch' in query else ''}{parts.path}")
        if handler.headers.get("Authorization") != f"Bearer {self.token}":
            return _send(handler, *_failed(401, "Unauthorized"))
        kind = f"watch {parts.path}" if "watch" in query else parts.path
        for fault in self.faults:
            if fault.times > 0 and fault.method == handler.command and fault.where in kind:
                fault.times -= 1
                if fault.after:
                    self._answer(handler.command, parts.path, query, body)
                return _send(handler, *_failed(fault.status, fault.message), retry_after=fault.retry_after)
        if "watch" in query:
            return self._watch(handler, query)
        return _send(handler, *self._answer(handler.command, parts.path, query, body))

    def _answer(self, method: str, path: str, query: dict[str, str], body: dict[str, Any]) -> tuple[int, Any]:
        words = path.removeprefix(PODS).strip("/").split("/") if path.startswith(PODS) else [path]
        match method, words:
            case "GET", [""]:
                with self._changed:
                    items = [pod for pod in self._pods.values() if _selected(pod, query)]
                    return 200, {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            case "POST", [""]:
                return self._create(body)
            case "GET", [name, "log"]:
                log = self.folder / f"{name}.log"
                return 200, log.read_text() if log.is_file() else ""
            case _, [name] if name in self._pods:
                return self._on_pod(method, name, body)
            case "GET", [path] if path == f"/api/v1/nodes/{NODE}":
                return 200, self.node
        return _failed(404, f'"{path}" not found')

    def _on_pod(self, method: str, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        pod = self._pods[name]
        if method == "DELETE":
            if body.get("preconditions", {}).get("uid", pod["metadata"]["uid"]) != pod["metadata"]["uid"]:
                return _failed(409, "the UID in the precondition does not match")
            pod["metadata"]["deletionTimestamp"] = _now()
            self._publish("MODIFIED", pod)
            threading.Thread(target=self._end, args=[name, body["gracePeriodSeconds"]], daemon=True).start()
        return 200, pod

    def _create(self, pod: dict[str, Any]) -> tuple[int, Any]:
        name = pod["metadata"]["name"]
        with self._changed:
            if name in self._pods:
                return _failed(409, f'pods "{name}" already exists')
            self.created.append(json.loads(json.dumps(pod)))
            pod["metadata"] |= {"uid": str(uuid.uuid4()), "creationTimestamp": _now(), "namespace": NAMESPACE}
            pod["status"] = {"phase": "Pending"}
            self._pods[name] = pod
        self._publish("ADDED", pod)
        answer = json.loads(json.dumps(pod))
        threading.Thread(target=self._run, args=[name], daemon=True).start()
        return 201, answer

    def _watch(self, handler: BaseHTTPRequestHandler, query: dict[str, str]) -> None:
        at, epoch = int(query["resourceVersion"]), self._epoch
        if at < self._oldest:
            return _send(handler, *_failed(410, "too old resource version"))
        handler.send_response(200)
        handler.end_headers()  # HTTP/1.0: the stream ends with the connection
        deadline_s = time.monotonic() + int(query["timeoutSeconds"])
        with contextlib.suppress(OSError):
            while time.monotonic() < deadline_s:
                with self._changed:
                    while not (self._version > at or self._closed or self._epoch > epoch):
                        self._changed.wait(0.5)
                        if time.monotonic() > deadline_s:
                            return None
                    if self._closed:
                        return None
                    events = [one for one in self._events if one[0] > at]
                    gone, at = self._epoch > epoch, self._version
                    lines = [{"type": kind, "object": pod} for _, kind, pod in events if _selected(pod, query)]
                    if gone:
                        lines = [{"type": "ERROR", "object": {"kind": "Status", "code": 410}}]
                    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
                handler.wfile.write(data)
                if gone:
                    return None
        return None

    def _publish(self, kind: str, pod: dict[str, Any]) -> None:
        with self._changed:
            self._version += 1
            pod["metadata"]["resourceVersion"] = str(self._version)
            self._events.append((self._version, kind, json.loads(json.dumps(pod))))
            self._changed.notify_all()

    def _update(self, name: str, status: dict[str, Any]) -> None:
        with self._changed:
            if (pod := self._pods.get(name)) is not None:
                pod["status"] |= status
                self._publish("MODIFIED", pod)

    def _state(self, name: str, phase: str, **state: Any) -> None:
        self._update(name, {"phase": phase, "containerStatuses": [{"name": "triton", "state": state}]})

    def _remove(self, name: str) -> None:
        with self._changed:
            if (pod := self._pods.pop(name, None)) is not None:
                self._publish("DELETED", pod)

    # --- the kubelet --------------------------------------------------------------------------------------------------

    def _run(self, name: str) -> None:
        pod = self._pods[name]
        container = pod["spec"]["containers"][0]
        if self.admission_fault:
            return self._update(name, {"phase": "Failed", "reason": self.admission_fault, "message": "no room"})
        if self.image_fault:
            return self._state(name, "Pending", waiting={"reason": "ErrImagePull", "message": self.image_fault})
        began = _now()
        environment = {one["name"]: _expanded(one["value"]) for one in container["env"]}
        environment |= {name: path for name, path in self.programs.items() if not name.startswith("/")}
        with (self.folder / f"{name}.log").open("wb") as log:
            try:
                process = subprocess.Popen(
                    [self._in_image(_expanded(word)) for word in container["args"]], cwd=container["workingDir"],
                    env={**environment, MARK: pod["metadata"]["uid"]}, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                ended = {"reason": "StartError", "exitCode": 128, "message": str(error), "startedAt": began}
                return self._state(name, "Failed", terminated=ended)
        self._processes[name] = process
        self._update(name, {"podIP": "127.0.0.1"})
        self._state(name, "Running", running={"startedAt": began})
        code = process.wait()
        self._kill_all(pod["metadata"]["uid"])
        for word in container["args"]:  # its /dev/shm goes with it
            if found := re.search(r"shm-region-prefix-name=(\S+)", word):
                for region in Path("/dev/shm").glob(f"{found[1]}*"):
                    region.unlink(missing_ok=True)
        ended = {"exitCode": 128 - code if code < 0 else code, "startedAt": began}
        ended["reason"] = "Completed" if code == 0 else "Error"
        return self._state(name, "Failed" if code else "Succeeded", terminated=ended)

    def _in_image(self, word: str) -> str:
        for path, there in self.programs.items():
            word = word.replace(path, there) if path.startswith("/") else word
        return word

    def _end(self, name: str, grace_s: float) -> None:
        if self.kubelet_hangs:
            return
        process = self._processes.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            deadline_s = time.monotonic() + grace_s
            while process.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.01)
            self._kill_all(self._pods[name]["metadata"]["uid"])
        deadline_s = time.monotonic() + 10
        while process is not None and time.monotonic() < deadline_s:  # the kubelet reports the end before it deletes
            if name not in self._pods or self._pods[name]["status"]["phase"] not in ("Running", "Pending"):
                break
            time.sleep(0.01)
        self._remove(name)

    @staticmethod
    def _kill_all(uid: str) -> None:
        for pid in _marked(uid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _marked(uid: str) -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if uid and f"{MARK}={uid}".encode() in path.read_bytes():
                yield int(path.parent.name)


def _selected(pod: dict[str, Any], query: dict[str, str]) -> bool:
    name, _, value = query.get("labelSelector", "").partition("=")
    return not name or pod["metadata"].get("labels", {}).get(name) == value


def _expanded(word: str) -> str:
    """Word as the kubelet passes it on: `$$` is `$`, and `$(NAME)` would be a variable, of which there is none."""
    return word.replace("$$", "$")


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _failed(status: int, message: str) -> tuple[int, Any]:
    return status, {"kind": "Status", "status": "Failure", "code": status, "message": message}


def _send(handler: BaseHTTPRequestHandler, status: int, answer: Any, retry_after: str = "") -> None:
    data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    handler.send_response(status)
    if retry_after:
        handler.send_header("Retry-After", retry_after)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    with contextlib.suppress(OSError):
        handler.wfile.write(data)

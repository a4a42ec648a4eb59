"""API server of the cluster: calls over REST, refusals as errors with a remedy, and a watched view of pods.

Few verbs on pods need no generated client (ADR 2). The kubelet renews the token of a pod, so each call reads its file.
"""

import json
import os
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from trefoil.core.errors import SettingError, StartError, TrefoilError, Unavailable, system_error
from trefoil.runtime.clock import WallClock

T = TypeVar("T")
Pod = Mapping[str, Any]  # JSON of a pod
TIMEOUT_S: Final = 15.0  # of a call; admission webhooks may take 10 s
PAUSES_S: Final = (0.2, 1.0)  # before the second and third try of a call
PAUSE_MAX_S: Final = 5.0  # whatever Retry-After asks for
WATCH_S: Final = 60  # after which the server ends a watch
WATCH_GRACE_S: Final = 15.0  # a watch that is silent for so much longer is dead
PAUSE_S: Final = 1.0  # between two watches, and after a list that failed
GONE_MAX: Final = 256  # pods that were deleted, of which the last state is kept
BUSY: Final = 429
EXPIRED: Final = 410
UNAUTHORIZED: Final = 401
# What the server reports -> what fixes it. First match wins.
REMEDIES: Final = (
    ("violates podsecurity", "label the namespace: pod-security.kubernetes.io/enforce=privileged"),
    ("admission webhook", "exempt this namespace from that webhook, or change what it checks"),
    ("calling webhook", "start that webhook's service, or exempt this namespace from it"),
    ("exceeded quota", "raise that ResourceQuota, or lower kubernetes_resources"),
    ("is forbidden: user", "give the agent's ServiceAccount the Role of deploy/helm/trefoil/templates/gpu.yaml"),
    ("runtimeclass", "create that RuntimeClass, or set kubernetes_runtime_class"),
    ("service account", "create it, or set kubernetes_service_account"),
)


class ApiServer:
    """Client of the API server with the ServiceAccount of this pod. Thread-safe."""

    def __init__(self, url: str, account: Path) -> None:
        """`url`: of the server; empty: as a pod's environment names it. `account`: folder of token, CA, namespace."""
        self._url, self._account = url, account
        self._clock, self._lock = WallClock(), threading.Lock()
        self._client: httpx.Client | None = None

    @property
    def pods_path(self) -> str:
        """Path of the pods of this namespace.

        Raises:
            SettingError: not in a pod.
        """
        return f"/api/v1/namespaces/{self._read('namespace')}/pods"

    def call(
        self,
        what: str,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str | int] | None = None,
        accept: tuple[int, ...] = (),
    ) -> httpx.Response:
        """Call the server; tries again where it is busy or fails. `what` begins the error message.

        Args:
            accept: statuses from 400 on that the caller understands.

        Raises:
            Unavailable: it does not answer, fails, or does not accept the token.
            StartError: it refuses.
            SettingError: not in a pod.
        """
        for pause_s in (*PAUSES_S, None):
            try:
                answer = self._connected().request(method, path, json=body, params=params, headers=self._headers())
            except httpx.TransportError as error:
                if pause_s is None:
                    raise self._silent(what, error) from error
                self._clock.block(pause_s)
                continue
            if pause_s is None or (answer.status_code != BUSY and answer.status_code < 500):
                break
            self._clock.block(_retry_after_s(answer, pause_s))
        return checked(what, answer, accept)

    def watch(self, what: str, path: str, params: Mapping[str, str | int], on_event: Callable[[Any], bool]) -> None:
        """Pass each event of one watch on until the server or the network ends it, or `on_event` returns False.

        Raises:
            Unavailable, StartError, SettingError: as `call`; 410 (EXPIRED) comes as an event of type ERROR.
        """
        timeout = httpx.Timeout(TIMEOUT_S, read=WATCH_S + WATCH_GRACE_S)
        query = {**params, "watch": 1, "timeoutSeconds": WATCH_S}
        began = False
        try:
            with self._connected().stream(
                "GET", path, params=query, headers=self._headers(), timeout=timeout
            ) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    if answer.status_code == EXPIRED:
                        on_event({"type": "ERROR", "object": {"code": EXPIRED}})
                        return
                    checked(what, answer)
                began = True
                for line in answer.iter_lines():
                    if line and not on_event(json.loads(line)):
                        return
        except (httpx.TransportError, ValueError) as error:
            silent = self._silent(what, error)
            if not began:  # else the next watch continues from where this one was cut, or says why it cannot
                raise silent from error

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            if self._client is not None:
                self._client.close()
            self._client = None

    def _silent(self, what: str, error: Exception) -> Unavailable:
        with self._lock:
            self._client = None  # the next call reads the CA again, which may be a new one
        return Unavailable(
            f"{what}: no Kubernetes API server answers at {self._address()}: {error or type(error).__name__}",
            remedy="running slices continue; see that this node reaches the API server (kubectl get --raw /readyz)",
        )

    def _connected(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                address = self._address()
                tls: ssl.SSLContext | bool = True
                if address.startswith("https:"):
                    tls = ssl.create_default_context(cadata=self._read("ca.crt"))
                self._client = httpx.Client(base_url=address, verify=tls, timeout=TIMEOUT_S, trust_env=False)
            return self._client

    def _address(self) -> str:
        if self._url:
            return self._url
        host, port = (os.environ.get(f"KUBERNETES_SERVICE_{name}", "") for name in ("HOST", "PORT"))
        if not host:
            raise SettingError(
                "the environment has no KUBERNETES_SERVICE_HOST: this agent is not in a pod",
                field="runtime",
                value="kubernetes",
                remedy="run the agent by the chart deploy/helm/trefoil, or set runtime to process or docker",
            )
        return f"https://{f'[{host}]' if ':' in host else host}:{port}"

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._read('token')}"}

    def _read(self, name: str) -> str:
        try:
            return (self._account / name).read_text().strip()
        except OSError as error:
            remedy = "set automountServiceAccountToken to true for the agent's pod, as the chart does"
            raise system_error(
                SettingError, error, "be read", self._account / name, field="service account", remedy=remedy
            ) from error


def _retry_after_s(answer: httpx.Response, otherwise_s: float) -> float:
    said = answer.headers.get("Retry-After", "")
    return min(float(said), PAUSE_MAX_S) if said.isdecimal() else otherwise_s


def checked(what: str, answer: httpx.Response, accept: tuple[int, ...] = ()) -> httpx.Response:
    """The answer, where it is none of an error.

    Raises:
        Unavailable: the server fails, is busy, or does not accept the token.
        StartError: it refuses, in its own words.
    """
    status = answer.status_code
    if status < 400 or status in accept:
        return answer
    try:
        said = str(answer.json()["message"])
    except (ValueError, KeyError, TypeError):
        said = answer.text.strip()[:200] or answer.reason_phrase
    remedy = next((remedy for text, remedy in REMEDIES if text in said.lower()), "")
    if status == UNAUTHORIZED:
        remedy = "see that the agent's ServiceAccount still exists: its token is not accepted"
    if status in (UNAUTHORIZED, BUSY) or status >= 500:
        remedy = remedy or "none: it is asked again; what runs goes on"
        raise Unavailable(f"{what}: the Kubernetes API server answers {status}: {said}", remedy=remedy)
    remedy = remedy or "see what the message names"
    raise StartError(f"{what}: the Kubernetes API server refuses ({status}): {said}", remedy=remedy)


class PodWatch:
    """View of the pods with one label, kept by a thread that lists once and then watches. Thread-safe.

    A watch costs the server nothing while nothing changes. Agents look twice a second: lists would be most of its load.
    """

    def __init__(self, api: ApiServer, selector: str) -> None:
        self._api, self._selector = api, selector
        self._changed = threading.Condition()
        self._listed, self._failure = False, ""
        self._pods: dict[str, Pod] = {}  # by uid
        self._gone: OrderedDict[str, Pod] = OrderedDict()  # deleted ones as they were last, by uid
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def pods(self) -> tuple[dict[str, Pod], dict[str, Pod]]:
        """Pods that exist, and those deleted of which the last state is kept, by uid.

        Raises:
            Unavailable: the server does not tell.
        """
        self.wait(lambda _: self._listed or self._failure or None, TIMEOUT_S)
        with self._changed:
            if self._failure or not self._listed:
                raise Unavailable(self._failure or "listing pods: the Kubernetes API server has not answered yet")
            return dict(self._pods), dict(self._gone)

    def wait(self, seen: Callable[[Mapping[str, Pod]], T | None], timeout_s: float) -> T | None:
        """Wait until `seen`, called with the pods that exist, returns something; None: it did not in that time."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="pods", daemon=True)
                self._thread.start()
            found: list[T] = []

            def look() -> bool:
                value = seen(self._pods)
                found[:] = [] if value is None else [value]
                return value is not None

            self._changed.wait_for(look, timeout_s)
            return found[0] if found else None

    def last_state(self, uid: str) -> Pod | None:
        """The last state of a pod that was deleted."""
        with self._changed:
            return self._gone.get(uid)

    def forget(self, uid: str) -> None:
        """Forget a pod that was deleted."""
        with self._changed:
            self._gone.pop(uid, None)

    def close(self) -> None:
        """End the thread, at its next event or pause."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            try:
                version = self._list()
                while version and not self._ended.is_set():
                    version = self._follow(version)
                    self._ended.wait(PAUSE_S)  # a server that ends watches at once is not asked without end
            except TrefoilError as error:
                with self._changed:
                    self._failure = str(error)
                    self._changed.notify_all()
                self._ended.wait(PAUSE_S)

    def _list(self) -> str:
        answer = self._api.call(
            "listing pods", "GET", self._api.pods_path, params={"labelSelector": self._selector}
        ).json()
        pods = {str(pod["metadata"]["uid"]): pod for pod in answer["items"]}
        with self._changed:
            for uid in [uid for uid in self._pods if uid not in pods]:
                self._leave(uid, self._pods[uid])
            self._pods, self._listed, self._failure = pods, True, ""
            self._changed.notify_all()
        return str(answer["metadata"]["resourceVersion"])

    def _follow(self, version: str) -> str:
        """Follow the changes since a version; returns the version to continue from, "" where pods must be listed
        again."""

        def on_event(event: Any) -> bool:
            nonlocal version
            kind, seen = event["type"], event["object"]
            if kind == "ERROR":
                version = ""  # 410: the server does not keep the changes since then any more
                return False
            version = str(seen["metadata"]["resourceVersion"])
            if kind != "BOOKMARK":
                with self._changed:
                    uid = str(seen["metadata"]["uid"])
                    if kind == "DELETED":
                        self._leave(uid, seen)
                    else:
                        self._pods[uid] = seen
                    self._changed.notify_all()
            return not self._ended.is_set()

        params = {"labelSelector": self._selector, "resourceVersion": version, "allowWatchBookmarks": "true"}
        self._api.watch("watching pods", self._api.pods_path, params, on_event)
        return version

    def _leave(self, uid: str, last: Pod) -> None:
        self._pods.pop(uid, None)
        self._gone[uid] = last
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)

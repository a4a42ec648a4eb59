"""Docker engine for one agent: `python -m power_agent.runtimes.engine_proxy --socket S --node N --folder F`.

A process that has an engine's socket is root of the host. An agent in a container therefore gets this one. It passes on
what the runtime `docker` asks (docker.py, slice_network.py, docker_engine.py), for containers and networks with the
labels of this cluster and node alone. It makes none but unprivileged ones, whose mounts are read-only and are below the
folders that it names. Everything else is refused, and says what.
"""

import argparse
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, unquote

import httpx
import structlog
import uvicorn

from power_agent.runtimes.docker_engine import LABEL, object_name
from trefoil.runtime.telemetry import setup_logging

ENGINE: Final = "/var/run/docker.sock"
VERSION: Final = re.compile(r"^/v\d+\.\d+(?=/)")
PLAIN: Final = re.compile(r"/(_ping|version|info|images/[\w./:@%-]+/json)")
OF_CONTAINER: Final = re.compile(r"/containers/([A-Za-z0-9][\w.-]*)(?:/(json|logs|archive|wait|start|kill))?")
OF_NETWORK: Final = re.compile(r"/networks/([A-Za-z0-9][\w.-]*)")
OF_NONE: Final = (("POST", "/containers/create"), ("GET", "/containers/json"), ("POST", "/networks/create"))
"""Requests that are about no one container or network, though one may have that name."""
BODY_BYTES_MAX: Final = 2**20
# Of a container's HostConfig: what may be said at all, and what each must be where it may be only that.
HOST_KEYS: Final = frozenset((
    "NetworkMode", "PortBindings", "Dns", "Mounts", "RestartPolicy", "LogConfig", "ReadonlyRootfs", "Tmpfs", "ShmSize",
    "IpcMode", "CapDrop", "SecurityOpt", "PidsLimit", "Ulimits", "CpusetCpus", "NanoCpus", "DeviceRequests", "Runtime",
))  # fmt: skip
HOST_VALUES: Final[Mapping[str, Sequence[Any]]] = {
    "ReadonlyRootfs": (True,),
    "CapDrop": (["ALL"],),
    "SecurityOpt": (["no-new-privileges:true"],),
    "IpcMode": (None, "", "private"),
    "Runtime": (None, "", "nvidia"),
}
LOG_TYPES: Final = (None, "", "json-file")  # others write to sockets of the host, as root
UNMASKED: Final = ("MaskedPaths", "ReadonlyPaths")  # of /proc and /sys: an empty list is none, and not the usual ones
JUDGED: Final = (
    "HostConfig", "NetworkDisabled", "NetworkingConfig", "EndpointsConfig", "Labels", "User", "Name", "Driver", "Type",
    "Source", "ReadOnly",
)  # fmt: skip
SPELT: Final[Mapping[str, str]] = {name.casefold(): name for name in (*HOST_KEYS, *JUDGED)}
"""Judged keys by their case-folded form. The engine, which is written in Go, takes a key in any case."""
USER: Final = re.compile(r"[1-9][0-9]{0,9}(:[0-9]{1,10})?")
HOP: Final = frozenset((b"connection", b"keep-alive", b"transfer-encoding", b"upgrade", b"host", b"content-length"))

Send = Callable[[Mapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class Rules:
    """What one agent may ask for."""

    cluster: str
    node: str
    folders: Sequence[Path]

    def is_own(self, labels: Mapping[str, str] | None) -> bool:
        """Whether a container or network is this agent's."""
        found = labels or {}
        return found.get(f"{LABEL}cluster") == self.cluster and self.node in (
            found.get(f"{LABEL}node"),
            found.get(f"{LABEL}looks"),
        )

    def refusal(self, method: str, path: str, query: str, body: bytes) -> str:
        """Why a request is refused for any owner of its object; "" = it is not."""
        if ".." in unquote(path):
            return "its path is none"
        match method, path:
            case "GET" | "HEAD", _ if PLAIN.fullmatch(path):
                return ""
            case "GET", "/containers/json":
                return self._refuse_list(query)
            case "POST", "/containers/create":
                return self._refuse_container(_parsed(body))
            case "POST", "/networks/create":
                return self._refuse_network(_parsed(body))
            case _ if body:  # older engines take the HostConfig of a start in place of that which was judged
                return "it has a body"
            case "GET", _ if OF_NETWORK.fullmatch(path):
                return ""
        found = OF_CONTAINER.fullmatch(path)
        verbs = {"GET": ("json", "logs"), "HEAD": ("archive",), "POST": ("wait", "start", "kill"), "DELETE": (None,)}
        return "" if found and found[2] in verbs.get(method, ()) else "an agent never asks that"

    def _refuse_list(self, query: str) -> str:
        filters = json.loads(parse_qs(query).get("filters", ["{}"])[0])
        given = filters.get("label", [])
        labels = dict(label.partition("=")[::2] for label in given)
        return "" if self.is_own(labels) else "it lists containers of others"

    def _refuse_network(self, asked: Mapping[str, Any]) -> str:
        if not self.is_own(asked.get("Labels")) or asked.get("Name") != object_name(self.cluster, self.node):
            return "it is not this agent's network"
        return "" if asked.get("Driver") == "bridge" else "no bridge"

    def _refuse_container(self, asked: Mapping[str, Any]) -> str:
        if not self.is_own(asked.get("Labels")):
            return "it does not carry the labels of this agent"
        host = {
            name: value
            for name, value in (asked.get("HostConfig") or {}).items()
            if value not in (None, "", 0, [], {}) or (name in UNMASKED and value is not None)
        }
        if asked.get("NetworkDisabled") and not set(host) - {"NetworkMode"}:
            return ""  # never started: what looks into an image
        if unknown := sorted(set(host) - HOST_KEYS):
            return f"HostConfig.{unknown[0]} is nothing that a slice needs"
        for name, values in HOST_VALUES.items():
            if host.get(name) not in values:
                return f"HostConfig.{name} is {host.get(name)!r}"
        own = object_name(self.cluster, self.node)
        if host.get("NetworkMode") != own:
            return f"HostConfig.NetworkMode is {host.get('NetworkMode')!r}"
        if others := set((asked.get("NetworkingConfig") or {}).get("EndpointsConfig") or ()) - {own}:
            return f"NetworkingConfig names {min(others)!r}"
        if (kind := host.get("LogConfig", {}).get("Type")) not in LOG_TYPES:
            return f"HostConfig.LogConfig.Type is {kind!r}"
        if not USER.fullmatch(str(asked.get("User"))):
            return f"its user is {asked.get('User')!r}, which may be root: uid:gid of another one"
        return next(filter(None, map(self._refuse_mount, host.get("Mounts", []))), "")

    def _refuse_mount(self, mount: Mapping[str, Any]) -> str:
        source = os.path.realpath(mount.get("Source") or "/")
        if mount.get("Type") != "bind" or not mount.get("ReadOnly"):
            return f"{source} is not a read-only bind mount"
        inside = any(Path(source).is_relative_to(os.path.realpath(folder)) for folder in self.folders)
        return "" if inside else f"{source} is not below {', '.join(map(str, self.folders))}"


class EngineProxy:
    """The proxy, an ASGI application. `engine`: a client of the real one."""

    def __init__(self, rules: Rules, engine: httpx.AsyncClient) -> None:
        self._rules, self._engine = rules, engine

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        if scope["type"] != "http":
            return
        body, more = b"", True
        while more and len(body) <= BODY_BYTES_MAX:
            message = await receive()
            if message["type"] == "http.disconnect":
                return  # it left before its body was whole
            body, more = body + message.get("body", b""), message.get("more_body", False)
        path = scope["raw_path"].decode().partition("?")[0]
        query = scope["query_string"].decode()
        try:
            why = "it is too long" if more else await self._refusal(scope["method"], VERSION.sub("", path), query, body)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            why = f"it cannot be read ({error})"
        except httpx.HTTPError as error:
            await _answer(send, 502, f"the engine does not answer: {error}")
            return
        if why:
            structlog.get_logger().warning("refused", method=scope["method"], path=path, why=why)
            await _answer(send, 403, f"refused by the agent's engine proxy: {scope['method']} {path}: {why}")
            return
        await self._pass_on(scope, f"{path}?{query}" if query else path, body, send)

    async def _refusal(self, method: str, path: str, query: str, body: bytes) -> str:
        if why := self._rules.refusal(method, path, query, body):
            return why
        for pattern, kind in ((OF_CONTAINER, "containers"), (OF_NETWORK, "networks")):
            found = pattern.fullmatch(path)
            if found is None or (method, path) in OF_NONE:
                continue
            told = await self._engine.get(f"/{kind}/{found[1]}{'/json' if kind == 'containers' else ''}")
            if told.status_code == httpx.codes.NOT_FOUND:
                continue
            config = (told.json().get("Config") or {}) if kind == "containers" else told.json()
            if told.status_code != httpx.codes.OK or not self._rules.is_own(config.get("Labels")):
                return "it is not this agent's"
            if path.endswith("/start") and config.get("NetworkDisabled"):  # may be root with all usual capabilities
                return "it was made to look into an image"
        return ""

    async def _pass_on(self, scope: Mapping[str, Any], target: str, body: bytes, send: Send) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name.lower() not in HOP]
        request = self._engine.build_request(scope["method"], target, headers=headers, content=body or None)
        try:
            answer = await self._engine.send(request, stream=True)
        except httpx.HTTPError as error:
            await _answer(send, 502, f"the engine does not answer: {error}")
            return
        kept = [(name.lower(), value) for name, value in answer.headers.raw if name.lower() not in HOP]
        try:
            await send({"type": "http.response.start", "status": answer.status_code, "headers": kept})
            async for chunk in answer.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await answer.aclose()


def _parsed(body: bytes) -> Any:
    """Body as the engine reads it. Raises ValueError: a key that it could take for another one than is judged here."""
    return json.loads(body, object_pairs_hook=_unambiguous)


def _unambiguous(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if len({name.casefold() for name, _ in pairs}) < len(pairs):
        raise ValueError("a key occurs twice, in any case")
    if strange := [name for name, _ in pairs if SPELT.get(name.casefold(), name) != name]:
        raise ValueError(f"{strange[0]!r} is spelt {SPELT[strange[0].casefold()]!r}")
    return dict(pairs)


async def _answer(send: Send, status: int, message: str) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"message": message}).encode()})


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--socket", required=True, help="where the agent asks")
    parser.add_argument("--engine", default=ENGINE, help=f"socket of the engine; default: {ENGINE}")
    parser.add_argument("--cluster", default="default", help="the agent's settings `cluster`")
    parser.add_argument("--node", required=True, help="and `node`")
    parser.add_argument("--folder", type=Path, action="append", required=True, help="what slices may mount; repeatable")
    given = parser.parse_args()
    setup_logging("engine_proxy", "info", None)
    engine = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=given.engine), base_url="http://engine", timeout=None
    )
    proxy = EngineProxy(Rules(given.cluster, given.node, given.folder), engine)
    # h11 reads on after an upgrade offer that is not taken; uvicorn's other parser takes the body for the next request.
    uvicorn.run(proxy, uds=given.socket, log_level="warning", lifespan="off", access_log=False, http="h11", ws="none")


if __name__ == "__main__":
    main()

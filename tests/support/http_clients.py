"""Unmodified HTTP and gRPC clients of others: the JDK's, Node's, grpc-js, curl. A test that needs one skips where it is
not installed, and names the Debian package.

A program in `clients/` reads requests as lines: method, path, "chunked" or "", headers (`A: b|C: d`), body in base64,
separated by tabs. It prints status, Content-Type, Inference-Header-Content-Length, body in base64.
"""

import base64
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

CLIENTS: Final = Path(__file__).parent / "clients"
PACKAGES: Final = {"java": "openjdk-17-jdk-headless", "node": "nodejs", "npm": "npm", "curl": "curl"}
RUN_S: Final = 120.0
Answer = tuple[int, str | None, str | None, bytes]


@dataclass(frozen=True)
class HttpRequest:
    """Request that a client shall send."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    chunked: bool = False

    @property
    def line(self) -> str:
        headers = "|".join(f"{name}: {value}" for name, value in self.headers.items())
        data = base64.b64encode(self.body).decode()
        return "\t".join((self.method, self.path, "chunked" if self.chunked else "", headers, data))


def needs(*tools: str) -> None:
    """Skip the test where a tool is not installed."""
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        packages = " ".join(PACKAGES[tool] for tool in missing)
        pytest.skip(f"no {', '.join(missing)} on PATH: apt-get install {packages}")


def rest(command: Sequence[str], requests: Sequence[HttpRequest]) -> list[Answer]:
    """Answers that a program of `clients/` gets, one request after the other."""
    lines = _lines(command, [request.line for request in requests])
    found = [line.split("\t") for line in lines]
    return [
        (int(status), type_ or None, length or None, base64.b64decode(data)) for status, type_, length, data in found
    ]


def jdk(address: str, requests: Sequence[HttpRequest]) -> list[Answer]:
    """Answers to java.net.http.HttpClient in its default version, which offers HTTP/2."""
    needs("java")
    return rest(["java", str(CLIENTS / "JdkClient.java"), address], requests)


def node_http(address: str, requests: Sequence[HttpRequest]) -> list[Answer]:
    """Answers to node:http."""
    needs("node")
    return rest(["node", str(CLIENTS / "rest.mjs"), "http", address], requests)


def node_fetch(address: str, requests: Sequence[HttpRequest]) -> list[Answer]:
    """Answers to Node's fetch (undici)."""
    needs("node")
    return rest(["node", str(CLIENTS / "rest.mjs"), "fetch", address], requests)


def curl(address: str, requests: Sequence[HttpRequest], *options: str) -> list[Answer]:
    """Answers to curl; status 0 = it got none."""
    needs("curl")
    found: list[Answer] = []
    for request in requests:
        headers = {**request.headers, **({"Transfer-Encoding": "chunked"} if request.chunked else {})}
        command = ["curl", "-s", "-S", *options, "-X", request.method, f"http://{address}{request.path}"]
        command += [part for name, value in headers.items() for part in ("-H", f"{name}: {value}")]
        command += ["--data-binary", "@-"] if request.method == "POST" else []
        command += ["-w", "%{stderr}%{http_code}\t%{content_type}\t%header{inference-header-content-length}"]
        if "Content-Type" not in headers:
            command += ["-H", "Content-Type:"]  # curl's own is that of a form
        done = subprocess.run(command, input=request.body, capture_output=True, timeout=RUN_S, check=False)
        status, type_, length = done.stderr.decode().splitlines()[-1].split("\t")
        found.append((int(status), type_ or None, length or None, done.stdout))
    return found


def grpc(library: str, address: str, calls: Sequence[tuple[str, bytes]]) -> list[tuple[int, bytes]]:
    """Statuses and messages that Node's "http2" or "grpc-js" gets for calls (path, message)."""
    needs("node")
    if library == "grpc-js":
        _needs_packages()
    given = [f"{path}\t{base64.b64encode(message).decode()}" for path, message in calls]
    lines = _lines(["node", str(CLIENTS / "grpc.mjs"), library, address], given)
    return [(int(status), base64.b64decode(data)) for status, data in (line.split("\t") for line in lines)]


def node_streams(address: str, descriptors: Path, requests: Sequence[bytes]) -> list[list[dict[str, Any]]]:
    """What @grpc/grpc-js with stubs by protobuf.js gets for ModelInferRequests, each on a ModelStreamInfer of its own:
    messages as JSON. `descriptors`: file with the FileDescriptorSet of the service."""
    needs("node")
    _needs_packages()
    command = ["node", str(CLIENTS / "stream.mjs"), address, str(descriptors)]
    return [json.loads(line) for line in _lines(command, [base64.b64encode(each).decode() for each in requests])]


def _needs_packages() -> None:
    """Install what package-lock.json names; skip the test where that fails."""
    if (CLIENTS / "node_modules").is_dir():
        return
    needs("npm")
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=CLIENTS, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"`npm ci` in {CLIENTS} failed: {done.stderr.strip()[-200:]}")


def _lines(command: Sequence[str], given: Sequence[str]) -> list[str]:
    """What a program prints for these lines; it has to end well."""
    text = "".join(line + "\n" for line in given)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()

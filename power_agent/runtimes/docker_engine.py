"""Docker engine: calls with a connection per thread, refusals as errors that say what to do, and Triton images.

An image is looked into without running it: which backends it has. NVIDIA's image keeps its Triton below
/opt/tritonserver and brings the onnxruntime backend. A smaller image may have only the python backend, with numpy < 2
and onnxruntime in its Python. The engine answers questions about files of a container that was created and never
started. Labels would not do, since NVIDIA's name no backend and its images differ in them."""

import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import docker
import docker.errors
import requests.exceptions
from docker.utils import kwargs_from_env

from power_agent.triton.installation import BACKENDS, LOOKED_FOR, TritonInstall
from trefoil.core.errors import BinaryMissing, StartError, TrefoilError, Unavailable

T = TypeVar("T")
LABEL: Final = "trefoil."  # how the labels of all that is ours begin
CALL_TIMEOUT_S: Final = 60  # a start with a GPU takes seconds
# What an engine says -> what brings it. First match wins.
REMEDIES: Final = (
    (
        "could not select device driver",
        "install nvidia-container-toolkit and run `nvidia-ctk runtime configure --runtime=docker`, "
        "or set docker_gpu=none where GPUs are simulated",
    ),
    (
        "unresolvable cdi devices",
        "run `nvidia-ctk cdi generate --output=/var/run/cdi/nvidia.yaml`, or set docker_gpu=runtime",
    ),
    ("port is already allocated", "end the container that publishes that port, or set triton_port_base"),
    ("address already in use", "end what listens on that port (`ss -ltnp`), or set triton_port_base"),
    (
        "unknown device",
        "the MIG instance is gone or the toolkit does not see it: compare `nvidia-smi -L` with the slice's UUID",
    ),
    ("nvidia-container-cli", "run `nvidia-smi` on this machine; the NVIDIA driver must answer there first"),
    ("requested cpus are not available", "plan only cores that the engine may use; `docker info` tells how many"),
    ("range of cpus is from", "plan at most the cores that this machine has"),
    ("is already in use by container", "remove that container: it has a slice's name, but not its labels"),
    ("no such file or directory", "the image lacks that file: take an image with tritonserver and its libraries"),
    ("bind source path does not exist", "create that folder on this machine, or mend model_repository"),
    ("no space left on device", "free space below the engine's data root (`docker system df`)"),
)


class Engine:
    """Client of a Docker engine. Thread-safe: every thread has a separate connection."""

    def __init__(self, url: str = "", timeout_s: int = CALL_TIMEOUT_S) -> None:
        """`url` as in DOCKER_HOST; empty takes that variable, or the engine's usual socket. Connects at first use."""
        self._url, self._timeout_s = url, timeout_s
        self._own = threading.local()

    def call(self, what: str, ask: Callable[[docker.APIClient], T], timeout_s: int | None = None) -> T:
        """Call the engine; `what` begins the error message.

        Raises:
            Unavailable: it does not answer.
            StartError: it refuses.
            docker.errors.NotFound: no such container or image; the caller knows what that means.
        """
        try:
            return ask(self._client(timeout_s))
        except docker.errors.NotFound:
            raise
        except docker.errors.APIError as error:
            raise refusal_error(what, error) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise Unavailable(
                f"{what}: no Docker engine answers at {self.address}: {innermost_cause(error)}",
                field="docker_url",
                remedy="start it (`systemctl start docker`), let the agent's user use its socket (group docker), "
                "or set runtime=process",
            ) from error

    def query(self, what: str, ask: Callable[[docker.APIClient], T]) -> T:
        """Query what there is: an engine that cannot even tell is as good as none.

        Raises:
            Unavailable: it does not answer, or answers with an error.
            docker.errors.NotFound: as in `call`.
        """
        try:
            return self.call(what, ask)
        except StartError as error:
            raise Unavailable(str(error)) from error

    def info(self) -> Mapping[str, Any]:
        """What it tells of itself, as `docker info`.

        Raises:
            Unavailable: it does not answer.
        """
        info: Mapping[str, Any] = self.query("looking at the engine", lambda api: api.info())
        return info

    @property
    def address(self) -> str:
        """Address of the engine, for people."""
        return self._url or str(kwargs_from_env().get("base_url") or "unix:///var/run/docker.sock")

    def _client(self, timeout_s: int | None) -> docker.APIClient:
        client: docker.APIClient | None = getattr(self._own, "client", None)
        if client is None:
            environment = kwargs_from_env()
            if self._url:
                environment["base_url"] = self._url
            client = self._own.client = _DirectClient(version="auto", **environment)
        # The SDK's calls take their time limit from here.
        client.timeout = self._timeout_s if timeout_s is None else timeout_s
        return client


class _DirectClient(docker.APIClient):
    """Client that asks an engine by TCP directly, whatever `http_proxy` says (requests reads it where `trust_env`)."""

    @property
    def trust_env(self) -> bool:
        return False

    @trust_env.setter
    def trust_env(self, value: bool) -> None:
        """`requests.Session` sets it."""


def refusal_error(what: str, error: docker.errors.APIError) -> TrefoilError:
    """Error from an engine's refusal: its own words, and the remedy where we know one."""
    said = str(error.explanation or error).strip()
    remedy = next((remedy for text, remedy in REMEDIES if text in said.lower()), "see the engine's own log")
    return StartError(f"{what}: the Docker engine refuses: {said}", remedy=remedy)


def innermost_cause(error: BaseException) -> str:
    """Text of the innermost cause: the SDK wraps 'connection refused' four times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__


def object_name(*parts: str) -> str:
    """Name of a container or network, readable in what `docker` lists."""
    name = "-".join(("trefoil", *parts))
    return "".join(char if char.isascii() and (char.isalnum() or char in "_.-") else "_" for char in name)


def wait_for_exit(api: docker.APIClient, container: str, within_s: float) -> int | None:
    """Wait for a container's end; its exit code, None when it has not ended within that time."""
    try:
        ended = api.wait(container, timeout=within_s)  # type: ignore[arg-type]  # it takes fractions
    except requests.exceptions.Timeout:
        return None
    except requests.exceptions.ConnectionError as error:  # as the SDK calls a read that takes too long
        if "timed out" in str(error).lower():
            return None
        raise
    return int(ended["StatusCode"])


@contextmanager
def removed_after(engine: Engine, container: str) -> Iterator[str]:
    """Context of a container that is only looked at, or looks; it is removed at the end, whether it runs or not."""
    try:
        yield container
    finally:
        with suppress(docker.errors.NotFound):
            engine.call("removing a container", lambda api: api.remove_container(container, v=True, force=True))


ROOT: Final = "/opt/tritonserver"
BINARY: Final = f"{ROOT}/bin/tritonserver"
PULL_TIMEOUT_S: Final = 3600


@dataclass(frozen=True, slots=True)
class TritonImage:
    """A Docker image with a Triton, and the backends in it."""

    name: str
    id: str
    backends: tuple[str, ...]  # those of LOOKED_FOR that it has, at least one of BACKENDS

    def install(self, *, sees_gpus: bool) -> TritonInstall:
        """Triton installation as paths inside the container; Python's side of it is the image's own affair."""
        root = Path(ROOT)
        return TritonInstall(
            binary=Path(BINARY),
            backends=root / "backends",
            caches=root / "caches",
            environment=Path("/usr"),
            offers=self.backends,
            sees_gpus=sees_gpus,
            own_network=True,
        )


def find_image(engine: Engine, name: str, *, pull: bool, labels: Mapping[str, str]) -> TritonImage:
    """Find a Triton image and look into it; `pull` fetches a missing one (minutes: NVIDIA's has 10 GB and more).

    Args:
        labels: for the container that is created to look into the image and removed at once; no other process uses
        them.

    Raises:
        StartError: it is not there and may not be pulled, or cannot be.
        BinaryMissing: it holds no Triton, or none of the backends.
        Unavailable: no engine.
    """
    described = _describe(engine, name, pull)
    wanted = {"label": [f"{label}={value}" for label, value in labels.items()]}
    for left in engine.query("listing containers", lambda api: api.containers(all=True, filters=wanted)):
        with removed_after(engine, left["Id"]):
            pass  # of an agent that was killed while it looked
    made = engine.call(
        f"looking into image {name}",
        lambda api: api.create_container(
            described["Id"], ["never-started"], labels=dict(labels), network_disabled=True
        ),
    )
    with removed_after(engine, made["Id"]) as container:
        if not _holds(engine, container, BINARY):
            raise BinaryMissing(
                f"image {name} has no {BINARY}",
                field="docker_image",
                remedy="take NVIDIA's Triton server image, or one that keeps Triton where that one does",
            )
        backends = tuple(one for one in LOOKED_FOR if _holds(engine, container, f"{ROOT}/backends/{one}"))
    if not set(backends) & set(BACKENDS):
        raise BinaryMissing(
            f"image {name} has neither of Triton's backends {', '.join(BACKENDS)} below {ROOT}/backends",
            field="docker_image",
            remedy="take an image with the onnxruntime backend",
        )
    return TritonImage(name, described["Id"], backends)


def _describe(engine: Engine, name: str, pull: bool) -> dict[str, Any]:
    try:
        return engine.call(f"image {name}", lambda api: _inspect(api, name))
    except docker.errors.NotFound as error:
        if not pull:
            raise StartError(
                f"image {name} is not on this machine, and images are not pulled unless docker_pull is set",
                field="docker_image",
                remedy=f"run `docker pull {name}`, or set docker_pull=true",
            ) from error
    try:
        engine.call(f"pulling image {name}", lambda api: api.pull(name), timeout_s=PULL_TIMEOUT_S)
        return engine.call(f"image {name}", lambda api: _inspect(api, name))
    except docker.errors.NotFound as error:
        raise StartError(
            f"image {name} cannot be pulled: {error.explanation}", field="docker_image", remedy="check name and login"
        ) from error


def _inspect(api: docker.APIClient, name: str) -> dict[str, Any]:
    return dict(api.inspect_image(name))  # type: ignore[no-untyped-call]  # its stub lost the types to a decorator


def _holds(engine: Engine, container: str, path: str) -> bool:
    def look(api: docker.APIClient) -> bool:
        # The public call would stream the whole folder as a tar; HEAD of the same address only says what is there.
        answer = api.head(f"{api.base_url}/v{api.api_version}/containers/{container}/archive", params={"path": path})
        if answer.status_code not in (200, 404):
            answer.raise_for_status()
        return answer.status_code == 200

    return engine.call(f"looking for {path}", look)


def failure_of(argv: Sequence[str], timeout_s: float, line: int = -1) -> str:
    """Run a command beside the engine; returns why it failed, that line of what it says of it, "" when it did not."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return "" if done.returncode == 0 else (done.stderr.splitlines() or [str(done.returncode)])[line]

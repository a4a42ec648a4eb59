"""Docker engine: calls with a connection per thread, refusals as errors that say what to do, and Triton images.

An image is looked into without running it: which backends it has, and what can check its health. NVIDIA's image keeps
its Triton below /opt/tritonserver and brings the onnxruntime backend; a smaller image may have only the python backend,
with numpy < 2 and onnxruntime in its Python. The engine answers questions about files of a container that was created
and never started."""

import posixpath
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import docker
import docker.errors
import requests.exceptions
from docker.utils import kwargs_from_env

from power_agent.triton.installation import BACKENDS, TritonInstall
from trefoil.core.errors import BinaryMissing, StartError, TrefoilError, Unavailable
from trefoil.runtime.model_files import ENGINES

T = TypeVar("T")
CALL_TIMEOUT_S: Final = 60  # a start with a GPU takes seconds
# What an engine says -> what brings it. First match wins.
REMEDIES: Final = (
    (
        "could not select device driver",
        "install nvidia-container-toolkit and run `nvidia-ctk runtime configure --runtime=docker`, "
        "or set docker_gpu=none where GPUs are simulated",
    ),
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
    """Client of a Docker engine. Thread-safe: every thread has a connection of its own."""

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
            Unavailable: it does not answer, or with an error of its own.
            docker.errors.NotFound: as in `call`.
        """
        try:
            return self.call(what, ask)
        except StartError as error:
            raise Unavailable(str(error)) from error

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
            client = self._own.client = docker.APIClient(version="auto", **environment)
        # The SDK's calls take their time limit from here.
        client.timeout = self._timeout_s if timeout_s is None else timeout_s
        return client


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


ROOT: Final = "/opt/tritonserver"
BINARY: Final = f"{ROOT}/bin/tritonserver"
PULL_TIMEOUT_S: Final = 3600
DEFAULT_PATH: Final = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True, slots=True)
class TritonImage:
    """A Docker image with a Triton, and the backends in it."""

    name: str
    id: str
    backends: tuple[str, ...]  # those of BACKENDS that it has, at least one, and ENGINES
    python: str  # an interpreter in it; "" = none, then no health check

    def install(self, *, sees_gpus: bool) -> TritonInstall:
        """Triton installation as paths inside the container; Python's side of it is the image's own affair."""
        root = Path(ROOT)
        return TritonInstall(
            binary=root / "bin" / "tritonserver",
            backends=root / "backends",
            caches=root / "caches",
            environment=Path(posixpath.dirname(posixpath.dirname(self.python)) or "/usr"),
            python_version="",
            numpy_version="",
            onnxruntime_version="",
            libpython="",
            libpython_loads=True,
            libpython_folder="",
            offers=self.backends,
            sees_gpus=sees_gpus,
        )


def find_image(engine: Engine, name: str, *, pull: bool, labels: Mapping[str, str]) -> TritonImage:
    """Find a Triton image and look into it; `pull` fetches a missing one (minutes: NVIDIA's has 10 GB and more).

    Args:
        labels: for the container that is created to look into the image and removed at once; nobody else uses them.

    Raises:
        StartError: it is not there and may not be pulled, or cannot be.
        BinaryMissing: it holds no Triton, or none of the backends.
        Unavailable: no engine.
    """
    described = _describe(engine, name, pull)
    config = described.get("Config") or {}
    wanted = {"label": [f"{label}={value}" for label, value in labels.items()]}
    for left in engine.query("listing containers", lambda api: api.containers(all=True, filters=wanted)):
        _remove(engine, left["Id"])  # of an agent that was killed while it looked
    found = engine.call(
        f"looking into image {name}",
        lambda api: api.create_container(
            described["Id"], ["never-started"], labels=dict(labels), network_disabled=True
        ),
    )["Id"]
    try:
        if not _holds(engine, found, BINARY):
            raise BinaryMissing(
                f"image {name} has no {BINARY}",
                field="docker_image",
                remedy="take NVIDIA's Triton server image, or one that keeps Triton where that one does",
            )
        backends = tuple(one for one in (*BACKENDS, ENGINES) if _holds(engine, found, f"{ROOT}/backends/{one}"))
        python = next((path for path in _pythons(config) if _holds(engine, found, path)), "")
    finally:
        _remove(engine, found)
    if not set(backends) & set(BACKENDS):
        raise BinaryMissing(
            f"image {name} has neither of Triton's backends {', '.join(BACKENDS)} below {ROOT}/backends",
            field="docker_image",
            remedy="take an image with the onnxruntime backend",
        )
    return TritonImage(name, described["Id"], backends, python)


def _remove(engine: Engine, container: str) -> None:
    with suppress(docker.errors.NotFound):
        engine.call("removing a container", lambda api: api.remove_container(container, v=True, force=True))


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


def _pythons(config: Mapping[str, Any]) -> list[str]:
    environment = dict(one.partition("=")[::2] for one in config.get("Env") or [])
    return [posixpath.join(folder, "python3") for folder in environment.get("PATH", DEFAULT_PATH).split(":") if folder]


def _holds(engine: Engine, container: str, path: str) -> bool:
    def look(api: docker.APIClient) -> bool:
        # The public call would stream the whole folder as a tar; HEAD of the same address only says what is there.
        answer = api.head(f"{api.base_url}/v{api.api_version}/containers/{container}/archive", params={"path": path})
        if answer.status_code not in (200, 404):
            answer.raise_for_status()
        return answer.status_code == 200

    return engine.call(f"looking for {path}", look)

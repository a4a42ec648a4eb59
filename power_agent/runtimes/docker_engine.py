"""Speaks to a Docker engine: a connection per thread, and refusals as errors that say what to do."""

import threading
from collections.abc import Callable
from typing import Final, TypeVar

import docker
import docker.errors
import requests.exceptions
from docker.utils import kwargs_from_env

from trefoil.core.errors import StartError, TrefoilError, Unavailable

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
    """A Docker engine. Thread-safe: every thread has a connection of its own."""

    def __init__(self, url: str = "", timeout_s: int = CALL_TIMEOUT_S) -> None:
        """`url` as in DOCKER_HOST; empty takes that variable, or the engine's usual socket. Connects at first use."""
        self._url, self._timeout_s = url, timeout_s
        self._own = threading.local()

    def call(self, what: str, ask: Callable[[docker.APIClient], T], timeout_s: int | None = None) -> T:
        """Ask the engine; `what` begins the error message.

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
            raise refusal(what, error) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise Unavailable(
                f"{what}: no Docker engine answers at {self.where}: {reason(error)}",
                field="docker_url",
                remedy="start it (`systemctl start docker`), let the agent's user use its socket (group docker), "
                "or set runtime=process",
            ) from error

    def look(self, what: str, ask: Callable[[docker.APIClient], T]) -> T:
        """Ask what there is: an engine that cannot even tell is as good as none.

        Raises:
            Unavailable: it does not answer, or with an error of its own.
            docker.errors.NotFound: as in `call`.
        """
        try:
            return self.call(what, ask)
        except StartError as error:
            raise Unavailable(str(error)) from error

    @property
    def where(self) -> str:
        """Its address, for people."""
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


def refusal(what: str, error: docker.errors.APIError) -> TrefoilError:
    """The engine's own words, and the remedy where we know one."""
    said = str(error.explanation or error).strip()
    remedy = next((remedy for text, remedy in REMEDIES if text in said.lower()), "see the engine's own log")
    return StartError(f"{what}: the Docker engine refuses: {said}", remedy=remedy)


def reason(error: BaseException) -> str:
    """The innermost cause: the SDK wraps 'connection refused' four times."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return str(error) or type(error).__name__

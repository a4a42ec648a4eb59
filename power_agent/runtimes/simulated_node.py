"""Tritons on a simulated node: its process owns them, as a kernel would; they end with it, not with the agent.

Where the CPUs of such a node serve, only GPU slices are the node's; CPU slices are real processes of this host."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from power_agent.devices.errors import NodeRefused
from power_agent.devices.node_client import NodeClient
from power_agent.runtimes.base import RunningTriton, Runtime
from power_agent.runtimes.confinement import Confinement
from power_agent.runtimes.process import ProcessRuntime
from power_agent.triton.slice_launch import SliceLaunch
from trefoil.core.errors import StartError


class NodeRuntime:
    """Runtime of Tritons on a simulated node; a slice is named to it by CUDA_VISIBLE_DEVICES in the environment."""

    name = "node"

    def __init__(self, client: NodeClient, confinement: Confinement | None = None) -> None:
        self._client = client
        self._confinement = confinement or Confinement()

    def start(self, tag: str, launch: SliceLaunch, log_path: Path) -> RunningTriton:
        """See Runtime. Another command under a live tag is refused.

        Raises:
            StartError: the slice does not exist, the program does not start, or the tag runs something else.
            NodeUnreachable: the node's process does not answer.
        """
        given = {"launch": launch, "confinement": self._confinement}
        words = {name: TypeAdapter(type(value)).dump_python(value, mode="json") for name, value in given.items()}
        try:
            return _running(self._client.call("process_start", tag=tag, log_path=str(log_path), **words))
        except NodeRefused as error:
            raise StartError(str(error)) from error

    def list(self) -> Sequence[RunningTriton]:
        """List every Triton on this node's slices."""
        return tuple(_running(row) for row in self._client.call("process_list"))

    def stop(self, tag: str, kill_after_s: float) -> None:
        """Stop a Triton (see Runtime); no-op when unknown."""
        self._client.call("process_stop", kill_after_s + self._client.timeout_s, tag=tag, kill_after_s=kill_after_s)

    def forget(self, tag: str) -> None:
        """See Runtime; a live one is refused."""
        self._client.call("process_forget", tag=tag)

    def missing(self, *, gpus: bool) -> Mapping[str, str]:
        """See Runtime: of hardware, what is simulated lacks nothing."""
        why = self._confinement.missing
        return {"isolate": why} if why else {}


def _running(row: Mapping[str, Any]) -> RunningTriton:
    return RunningTriton(**{**row, "argv": tuple(row.get("argv", ()))})


class SplitRuntime:
    """Runtime made of two: GPU slices go to one, CPU slices to the other."""

    def __init__(self, gpus: Runtime, cpus: ProcessRuntime) -> None:
        self._gpus, self._cpus = gpus, cpus
        self.missing_resources, self.used_cpu_s = cpus.missing_resources, cpus.used_cpu_s
        self.name = f"{gpus.name}+{cpus.name}"

    def start(self, tag: str, launch: SliceLaunch, log_path: Path) -> RunningTriton:
        """Start it where its hardware is (see Runtime)."""
        runtime = self._gpus if launch.gpu_uuid else self._cpus
        return runtime.start(tag, launch, log_path)

    def list(self) -> Sequence[RunningTriton]:
        """List the Tritons of both runtimes."""
        return (*self._gpus.list(), *self._cpus.list())

    def stop(self, tag: str, kill_after_s: float) -> None:
        """Stop it where it runs (see Runtime)."""
        self._runtime_of(tag).stop(tag, kill_after_s)

    def forget(self, tag: str) -> None:
        """Forget it where it ran (see Runtime)."""
        self._runtime_of(tag).forget(tag)

    def missing(self, *, gpus: bool) -> Mapping[str, str]:
        """Tell what either lacks (see Runtime)."""
        return {**self._gpus.missing(gpus=gpus), **self._cpus.missing(gpus=gpus)}

    def _runtime_of(self, tag: str) -> Runtime:
        return self._cpus if any(one.tag == tag for one in self._cpus.list()) else self._gpus

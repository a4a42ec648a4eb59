"""A simulated node whose CPUs serve: GPU slices are the node's, CPU slices are real processes of this host."""

from collections.abc import Sequence
from pathlib import Path

from power_agent.runtimes.base import RunningTriton, Runtime
from power_agent.runtimes.process import ProcessRuntime
from power_agent.triton_slice import SliceLaunch


class SplitRuntime:
    """One runtime made of two; a tag belongs to the one that its slice's hardware asks for."""

    def __init__(self, gpus: Runtime, cpus: ProcessRuntime) -> None:
        self._gpus, self._cpus = gpus, cpus
        self.lacks = cpus.lacks
        self.name = f"{gpus.name}+{cpus.name}"

    def start(self, tag: str, launch: SliceLaunch, log_path: Path) -> RunningTriton:
        """See Runtime."""
        runtime = self._gpus if launch.gpu_uuid else self._cpus
        return runtime.start(tag, launch, log_path)

    def list(self) -> Sequence[RunningTriton]:
        """See Runtime."""
        return (*self._gpus.list(), *self._cpus.list())

    def stop(self, tag: str, kill_after_s: float) -> None:
        """See Runtime."""
        self._of(tag).stop(tag, kill_after_s)

    def forget(self, tag: str) -> None:
        """See Runtime."""
        self._of(tag).forget(tag)

    def _of(self, tag: str) -> Runtime:
        return self._cpus if any(one.tag == tag for one in self._cpus.list()) else self._gpus

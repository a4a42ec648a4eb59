"""Clients of the simulated driver: which processes have NVML open, and which GPUs they have attached.

NVML counts nvmlInit and nvmlShutdown of a process, and its last nvmlShutdown closes all its GPUs [NVML API,
"Initialization and Cleanup"]. Opening NVML attaches no GPU; a handle of one does. By PCI address or index that is the
one GPU, by UUID NVML "may initialize additional GPUs as it searches": here all that come before it. A process that ends
lets go of everything. nvidia-persistenced holds each GPU whose persistence mode is on.
"""

from dataclasses import dataclass, field
from typing import Final

OWN: Final = 0  # client of calls that are made in the process of the driver model
PERSISTENCED_PID: Final = 2**22 - 1  # beyond what a machine of this size gives a process


@dataclass(slots=True)
class _Client:
    opened: int = 0
    attached: set[int] = field(default_factory=set)


class Clients:
    """Clients of a driver. `caller`: the client of the current call; None: no client, and nothing is attached."""

    def __init__(self) -> None:
        self.caller: int | None = None
        self.persistenced = False
        self._clients: dict[int, _Client] = {}

    def open(self) -> None:
        """Count an nvmlInit of the caller."""
        if self.caller is not None:
            self._clients.setdefault(self.caller, _Client()).opened += 1

    def close(self) -> None:
        """Count an nvmlShutdown of the caller; the last one lets go of its GPUs. One too many is not an error."""
        client = self._clients.get(self.caller) if self.caller is not None else None
        if client is not None:
            client.opened -= 1
            if client.opened <= 0:
                del self._clients[self.caller]  # type: ignore[arg-type]

    def attach(self, index: int) -> None:
        """Attach a GPU for the caller."""
        if self.caller is not None:
            self._clients.setdefault(self.caller, _Client()).attached.add(index)

    def end(self, pid: int) -> None:
        """End a client whose process is gone."""
        self._clients.pop(pid, None)

    def detach_all(self) -> None:
        """Detach all GPUs: the driver was unloaded. What processes have counted stays theirs."""
        for client in self._clients.values():
            client.attached.clear()

    def attached_to(self, index: int) -> tuple[int, ...]:
        """Pids of the clients that have a GPU attached, without nvidia-persistenced."""
        return tuple(sorted(pid for pid, client in self._clients.items() if index in client.attached))

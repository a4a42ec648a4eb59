"""Client of a simulated node's socket: driver calls, the pace summary, and (for tests) the hidden truth.

Length-prefixed JSON over a Unix stream. Every method is synchronous and safe to call from several threads: each call
borrows a separate connection, so a slow `process_stop` never blocks an NVML read. A connection that the node has
closed meanwhile is noticed before use; a call that was sent is never sent again: the node may have carried it out.
"""

import json
import select
import socket
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from power_agent.devices.errors import NodeRefused, NodeUnreachable
from trefoil.core.errors import system_words

FRAME: Final = struct.Struct("<I")
CREDENTIALS: Final = struct.Struct("3i")  # struct ucred: process, user, group
FRAME_BYTES_MAX: Final = 16 * 2**20
POOL_CONNECTIONS_MAX: Final = 8


@dataclass(frozen=True, slots=True)
class PaceSummary:
    """Work of padded models since the node started. Overrun: a batch whose real work outlasted its drawn time."""

    batches: int = 0
    items: int = 0
    overruns: int = 0
    overrun_s: float = 0.0
    busy_s: float = 0.0


class NodeClient:
    """Client of a simulated node's socket."""

    def __init__(self, socket_path: Path | str, timeout_s: float = 10.0) -> None:
        self._path = str(socket_path)
        self.timeout_s = timeout_s
        self._idle: list[socket.socket] = []
        self._lock = threading.Lock()
        self._closed = False

    # --- observation ---

    def describe(self) -> dict[str, Any]:
        """Description of the node: name, pid, driver_load_id, device types, start time."""
        described: dict[str, Any] = self.call("describe")
        return described

    def pace_summary(self) -> PaceSummary:
        """Summary of what padded models did since the node started."""
        return PaceSummary(**self.call("pace_summary"))

    def truth(self) -> dict[str, Any]:
        """True energy split per device and slice [J]. For tests: no product code may act on it."""
        split: dict[str, Any] = self.call("truth")
        return split

    def holders(self, index: int) -> tuple[tuple[int, str], ...]:
        """Processes that have a GPU open, as (pid, name); without invisible ones."""
        return tuple((int(pid), str(name)) for pid, name in self.call("holders", index=index))

    def admin(self, verb: str, **args: Any) -> Any:
        """Inject a fault: foreign load, failing calls, a lost GPU (see node_server.py for the verbs)."""
        return self.call("admin", verb=verb, args=args)

    def shutdown(self) -> None:
        """Ask the node to end: it stops everything that runs on its slices first."""
        self.call("shutdown")

    # --- NVML ---

    def nvml(self, function: str, args: Sequence[Any]) -> tuple[int, list[Any]]:
        """Send one driver call by its C name; returns (nvmlReturn_t, out values)."""
        ret, out = self.call("nvml", fn=function, args=list(args))
        return ret, out

    # --- transport ---

    def call(self, op: str, timeout_s: float | None = None, /, **args: Any) -> Any:
        """Send one request and return its answer.

        Raises:
            NodeUnreachable: no process listens, the node went away mid-call, or it did not answer in time.
            NodeRefused: the node answered that it cannot do this; the text says why and what to do.
        """
        body = json.dumps({"op": op, **args}, separators=(",", ":")).encode()
        connection = self._borrow()
        try:
            connection.settimeout(self.timeout_s if timeout_s is None else timeout_s)
            connection.sendall(FRAME.pack(len(body)) + body)
            answer = json.loads(_read_frame(connection))
        except (OSError, EOFError) as error:
            connection.close()
            message = f"simulated node at {self._path} did not answer {op} ({system_words(error)})"
            raise NodeUnreachable(message, remedy="see its log; restart it if it died") from error
        self._give_back(connection)
        if "error" in answer:
            raise NodeRefused(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _borrow(self) -> socket.socket:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return self._connect()
            readable, _, _ = select.select([connection], [], [], 0)
            if not readable:
                return connection
            connection.close()  # closed by a node that has restarted: the only thing an idle connection can have to say

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout_s)
            connection.connect(self._path)
        except OSError as error:
            connection.close()
            message = f"no simulated node listens at {self._path} ({system_words(error)})"
            raise NodeUnreachable(message, remedy="start it: python -m trefoil.simulated_node") from error
        return connection

    def _give_back(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._idle) < POOL_CONNECTIONS_MAX:
                self._idle.append(connection)
                return
        connection.close()


def peer_pid(connection: socket.socket) -> int:
    """Pid of the process at the other end of a Unix socket; 0: it has no number here, being in another container."""
    pid, _uid, _gid = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(pid)


def _read_frame(connection: socket.socket) -> bytes:
    (length,) = FRAME.unpack(_read_exactly(connection, FRAME.size))
    if length > FRAME_BYTES_MAX:
        raise OSError(f"frame of {length} bytes is above the limit of {FRAME_BYTES_MAX}")
    return _read_exactly(connection, length)


def _read_exactly(connection: socket.socket, length: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < length:
        chunk = connection.recv(length - len(chunks))
        if not chunk:
            raise EOFError("the node closed the connection")
        chunks += chunk
    return bytes(chunks)

"""A process that has imported everything and opened nothing: each service of a fast test is forked from it in 20 ms.

Not from pytest: a fork of a process with gRPC channels, event loops and threads would inherit their locks. Nothing that
it forks outlives it, and it ends with the pipe to the test.

Protocol: one line of JSON each way. {"run": "node" | "agent", "config": {...}, "log": path} -> {"pid": n};
{"wait": pid} -> {"status": wait status}.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG: Final = 1


class Zygote:
    """The test's end."""

    def __init__(self) -> None:
        env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=env, start_new_session=True,
        )  # fmt: skip

    def run(self, what: str, log: Path, **config: Any) -> int:
        """Fork one; returns its pid."""
        return int(self._ask({"run": what, "config": config, "log": str(log)})["pid"])

    def wait(self, pid: int) -> int:
        """Wait for its end; the exit code, negative for a signal."""
        return os.waitstatus_to_exitcode(int(self._ask({"wait": pid})["status"]))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        """End it and all that it forked."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


def _child(what: str, log: str, config: dict[str, Any]) -> None:
    """Become a service. Never returns."""
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (file, 1), (file, 2)):
            os.dup2(source, target)
        from tests.support import fast_agent, fast_node

        code = {"agent": fast_agent.main, "node": fast_node.main}[what](config)
    except BaseException:
        import traceback

        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    """The zygote itself."""
    from tests.support import fast_agent, fast_node  # noqa: F401 (imported before the first fork)
    from tests.support.triton_process import MODELS

    fast_agent.catalog(MODELS)
    alive: set[int] = set()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "run" in request:
            pid = os.fork()
            if pid == 0:
                _child(request["run"], request["log"], request["config"])
            alive.add(pid)
            answer = {"pid": pid}
        else:
            alive.discard(request["wait"])
            answer = {"status": os.waitpid(request["wait"], 0)[1]}
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()

"""Runs a command and stops it with all processes below it for a second now and then, as a busy machine does.

`python -m tests.support.stalls COMMAND...` (`make test STALLS=1`) prints how often; SEED draws other moments. Processes
that outlive their parents stay below it: it is who adopts them. Tritons go on a little earlier: one that stands for a
second calls its own python stub dead and answers INTERNAL (python_be.cc, SendMessageToStub: 1,000 ms of wall time).
"""

import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

STALL_S = 1.0
TRITON_STALL_S = 0.8
TRITON = frozenset({"tritonserver", "triton_python_backend_stub"})
GAP_S = (10.0, 30.0)
PR_SET_CHILD_SUBREAPER = 36


def stop(below: psutil.Process) -> list[psutil.Process]:
    """Stop every process below one; those that somebody had stopped already are not in the list."""
    stopped: list[psutil.Process] = []
    seen: set[psutil.Process] = set()
    while fresh := set(below.children(recursive=True)) - seen:  # who was not stopped yet may have started others
        for process in fresh:
            with suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE):
                    process.suspend()
                    stopped.append(process)
        seen |= fresh
    return stopped


def go_on(stopped: list[psutil.Process]) -> None:
    """Let stopped processes run again."""
    for process in stopped:
        with suppress(psutil.NoSuchProcess):
            process.resume()


def is_triton(process: psutil.Process) -> bool:
    """Whether it is a Triton server or a python stub of one."""
    with suppress(psutil.NoSuchProcess):
        return Path(process.exe()).name in TRITON
    return False


def reap(child: subprocess.Popen[bytes]) -> None:
    """Take the exit status of adopted processes that ended."""
    for process in psutil.Process().children():
        if process.pid != child.pid:
            with suppress(psutil.NoSuchProcess, ChildProcessError):
                if process.status() == psutil.STATUS_ZOMBIE:
                    os.waitpid(process.pid, os.WNOHANG)


def main(command: list[str]) -> int:
    """Run the command to its end; its exit status."""
    draw = random.Random(int(os.environ.get("SEED", "1")))
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    stalls, processes = 0, 0
    next_s = time.monotonic() + draw.uniform(*GAP_S)
    while child.poll() is None:
        time.sleep(0.1)
        reap(child)
        if time.monotonic() >= next_s:
            stopped = stop(psutil.Process())
            tritons = [process for process in stopped if is_triton(process)]
            try:
                time.sleep(TRITON_STALL_S)
            finally:
                go_on(tritons)
            try:
                time.sleep(STALL_S - TRITON_STALL_S)
            finally:
                go_on([process for process in stopped if process not in tritons])
            stalls, processes = stalls + 1, max(processes, len(stopped))
            next_s = time.monotonic() + draw.uniform(*GAP_S)
    print(f"stopped everything {stalls} times for {STALL_S:g} s, up to {processes} processes at once")
    return child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

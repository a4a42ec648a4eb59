"""A child process that first waits for its command (launcher.py), so that its pid can be noted before."""

import contextlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Collection, Mapping
from typing import Any, Final

from power_agent.runtimes import launcher

EXEC_PATIENCE_S: Final = 10.0
PR_SET_CHILD_SUBREAPER: Final = 36


def spawn(env: Mapping[str, str], log: Any) -> subprocess.Popen[bytes]:
    """Start one in a separate session; `log` gets what it writes. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(launcher.__file__)],
        env=dict(env),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        start_new_session=True,
    )


def become(child: subprocess.Popen[bytes], spec: Mapping[str, Any]) -> str:
    """Let it become the program; why it did not, or empty."""
    assert child.stdin is not None
    assert child.stdout is not None
    with child.stdout:
        try:
            with child.stdin as pipe:
                pipe.write(json.dumps(spec).encode() + b"\n")
        except BrokenPipeError:
            return "it ended before it got its command"
        readable, _, _ = select.select([child.stdout], [], [], EXEC_PATIENCE_S)
        if not readable:
            return f"it did not become the program within {EXEC_PATIENCE_S:g} s"
        return child.stdout.read().decode(errors="replace")


def become_subreaper() -> None:
    """Let orphans below this process become its children instead of init's. Raises OSError."""
    launcher.checked("prctl(PR_SET_CHILD_SUBREAPER)", launcher.libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def reap_orphans(keep: Collection[int]) -> bool:
    """Reap children that have ended, up to one of `keep`, whose exit code another caller reads: then True."""
    with contextlib.suppress(ChildProcessError):
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid in keep:
                return True
            os.waitpid(found.si_pid, 0)
    return False

"""The first program of a Triton's process: waits until the agent has written down its pid, then becomes the Triton.

Run by path as `python -I -S launcher.py`; imports nothing of Trefoil. One JSON line on stdin says what to become:
{"argv": [...], "cwd": "...", "cores": [...] | null, "groups": ["<cgroup folder>", ...]}. An end of file instead means
that the agent is gone: nothing was started, nothing is left. Whatever fails is said on stdout, which closes when the
program has taken over.

A Triton runs models that somebody wrote; it gets none of the agent's privileges.
"""

import ctypes
import json
import os
import signal
import sys

PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
# Reading files of others, which root is used to; everything else is dropped.
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
KEPT = 1 << CAP_DAC_OVERRIDE | 1 << CAP_DAC_READ_SEARCH


def drop_privileges() -> None:
    """Drop all capabilities but reading files; no_new_privs makes sure that the next program does not get them back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; low words, then high words
    if libc.capget(header, held) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    kept = held[1] & KEPT
    if libc.capset(header, (ctypes.c_uint32 * 6)(kept, kept, 0, 0, 0, 0)) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def exec_program(spec: dict) -> None:  # type: ignore[type-arg]
    """Become the program: join the groups, pin, drop privileges, execve. Raises OSError."""
    for group in spec["groups"]:
        with open(os.path.join(group, "cgroup.procs"), "w") as file:
            file.write("0")  # the writer itself
    if spec["cores"] is not None:
        os.sched_setaffinity(0, spec["cores"])
    drop_privileges()
    os.chdir(spec["cwd"])
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would be passed on
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.execve(spec["argv"][0], spec["argv"], os.environ)


def main() -> int:
    """Wait for the word and become the program; returns only when it did not work, or was not wanted."""
    line = sys.stdin.readline()
    if not line.endswith("\n"):
        return 0
    said = os.dup(1)  # not inheritable: closes when the program takes over
    try:
        exec_program(json.loads(line))
    except OSError as error:
        os.write(said, str(error).encode())
    return 127


if __name__ == "__main__":
    sys.exit(main())

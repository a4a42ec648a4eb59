"""The first program of a Triton's process: waits until the agent has written down its pid, then becomes the Triton.

Run by path as `python -I -S launcher.py`; imports nothing of Trefoil. One JSON line on stdin says what to become:
`argv`, `cwd`, `cores` (or null), `groups` (folders of control groups), `parent` (pid of the process that it ends with,
or 0). Also `uid` (user and group, or 0), `hides` (folder -> what stays visible of it), `reads` (files that it must be
able to read). An end of file instead means that the agent is gone: nothing was started, nothing is left. Whatever fails
is reported on stdout, which closes when the program has taken over. An empty argv: all but the last step.

A Triton runs models of others. It gets none of the agent's privileges, and where the agent is root a separate user: in
a separate mount namespace, each folder of `hides` is empty but for what the Triton needs.
"""

import ctypes
import errno
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAPABILITY_VERSION_3 = 0x20080522
CAPABILITIES_MAX = 64
CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 1 << 1, 1 << 2, 1 << 3, 1 << 12, 1 << 14, 1 << 18
PUBLIC = {"/tmp": "mode=1777,size=256m", "/dev/shm": "mode=1777"}  # others: only what is shown of them
UNREADABLE = "Triton's own user may not read it"

libc = ctypes.CDLL(None, use_errno=True)


def hide_folders(hides: dict) -> None:  # type: ignore[type-arg]
    """Empty these folders for this process and all it starts, but for what is shown of them. Raises OSError."""
    checked("unshare", libc.unshare(CLONE_NEWNS))
    _mount("none", "/", None, MS_REC | MS_PRIVATE, "")
    os.umask(0o022)
    shown = {path: os.open(path, os.O_PATH) for paths in hides.values() for path in paths}  # before it is out of sight
    for folder, paths in hides.items():
        _mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, PUBLIC.get(folder, "mode=755,size=1m"))
        for path in paths:
            source = f"/proc/self/fd/{shown[path]}"
            if os.path.isdir(source):
                os.makedirs(path, exist_ok=True)
            else:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
            _mount(source, path, None, MS_BIND, "")
    for descriptor in shown.values():
        os.close(descriptor)
    # Commands of other processes are hidden. Before Linux 5.8 this is refused, and they stay seen.
    libc.mount(b"proc", b"/proc", b"proc", ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOEXEC), b"hidepid=invisible")


def drop_privileges(uid: int) -> None:
    """Become that user (0: stay who one is), without any capability and without a way to one. Raises OSError."""
    for capability in range(CAPABILITIES_MAX if os.geteuid() == 0 else 0):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # refused without CAP_SETPCAP: then the next lines suffice
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    checked("prctl(PR_SET_NO_NEW_PRIVS)", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    checked("capset", libc.capset(header, (ctypes.c_uint32 * 6)()))  # effective, permitted, inheritable: none


def exec_program(spec: dict) -> None:  # type: ignore[type-arg]
    """Become the program: join the groups, pin, hide, drop privileges, execve. Raises OSError."""
    for group in spec["groups"]:
        with open(os.path.join(group, "cgroup.procs"), "w") as file:
            file.write("0")  # the writer itself
    if spec["cores"] is not None:
        os.sched_setaffinity(0, spec["cores"])
    if spec["uid"]:
        hide_folders(spec["hides"])
    drop_privileges(spec["uid"])
    for path in spec["reads"]:
        if not os.access(path, os.R_OK):
            raise OSError(errno.EACCES, UNREADABLE, path)
    os.chdir(spec["cwd"])
    if spec["parent"]:  # after the change of user, which would clear it
        checked("prctl(PR_SET_PDEATHSIG)", libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))
        if os.getppid() != spec["parent"]:
            raise OSError(errno.ESRCH, "its parent process is gone")
    if not spec["argv"]:
        return
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and that would be passed on
        signal.signal(ignored, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    os.execve(spec["argv"][0], spec["argv"], os.environ)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str) -> None:
    what = (os.fsencode(source), os.fsencode(target), kind.encode() if kind else None)
    checked(f"mount on {target}", libc.mount(*what, ctypes.c_ulong(flags), options.encode()))


def checked(call: str, returned: int) -> None:
    """Raise the OSError of a call to libc that failed."""
    if returned != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")


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
    return 0


if __name__ == "__main__":
    sys.exit(main())

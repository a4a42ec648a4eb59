"""What model code tries from inside a slice of `make e2e-security`. Standard library only, one file: a program that the
model.py of a slice starts, and that of a container.

Each attempt is a row: what was tried, at whom, and its outcome. DONE at its beginning: it was not refused.
"""

import contextlib
import ctypes
import json
import os
import socket
import ssl
import sys
import threading

DONE = "DONE"
QUIET_S = 3.0  # for an answer, of whoever listens
CONNECT_S = 1.0  # where packets are dropped nobody says so
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
PING = b"PING\r\n"  # of Redis
SETTINGS = 4  # type of the frame by which a server of HTTP/2 begins
PID_MAX = 200_000
NR_PTRACE_ATTACH = 16


def knock(host, port, pair=None, ca=None, clear=False, first=PREFACE):
    """Ask a server of gRPC or Redis whether it talks to us; DONE, and what it said, or how it refused. Never raises.

    pair: certificate and key to show; ca: what the server's certificate has to be signed by, to be shown ours; first:
    what is said to it.
    """
    try:
        plain = socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        return _named(error)
    with plain:
        plain.settimeout(QUIET_S)
        try:
            return _conversation(plain if clear else _secured(plain, pair, ca), first)
        except OSError as error:
            return _named(error)


def _secured(plain, pair, ca):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(ca)
    if pair is not None:
        context.load_cert_chain(*pair)
    context.set_alpn_protocols(["h2"])
    return context.wrap_socket(plain)


def _conversation(connection, first):
    connection.sendall(first)  # the preface is not a command of Redis, and answered all the same
    said = connection.recv(64)
    if said[:1] in (b"-", b"+"):
        return f"{'' if said.startswith(b'-NOAUTH') else DONE + ': '}{said.decode(errors='replace').splitlines()[0]}"
    return f"{DONE}: it talks HTTP/2" if said[3:4] == bytes((SETTINGS,)) else f"closed after {said!r}"


def _named(error):
    text = str(error).partition(" (_ssl.c")[0]
    return f"{type(error).__name__}: {text}"


def attempt(call):
    """What came of a call that must not work."""
    try:
        return f"{DONE}: {call()!r}"[:200]
    except OSError as error:
        return _named(error)


def own_options():
    """Options of the Triton that this runs in."""
    words = []
    for pid in os.listdir("/proc"):
        if pid.isdigit() and _is_own(pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
                words += file.read().split("\0")
    return dict(word.removeprefix("--").partition("=")[::2] for word in words if word.startswith("--"))


def signals():
    """Send every process the signal that does nothing."""
    reached = set(filter(_takes_signal, range(1, PID_MAX)))
    own = [pid for pid in os.listdir("/proc") if pid.isdigit() and _is_own(pid)]
    for pid in own:  # each thread has a number too
        with contextlib.suppress(OSError):
            reached -= set(map(int, os.listdir(f"/proc/{pid}/task")))
    reached = set(filter(_takes_signal, reached))  # of one that has ended meanwhile nobody can tell whose it was
    return f"{DONE}: {sorted(reached)[:8]}" if reached else f"none below {PID_MAX} takes one but its own {len(own)}"


def _takes_signal(pid):
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def _is_own(pid):
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.getuid()
    except OSError:  # out of sight
        return False


def seen_commands():
    """Commands of processes that are none of this slice's."""
    found = 0
    for pid in os.listdir("/proc"):
        if pid.isdigit() and not _is_own(pid):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:  # or it ended meanwhile
                found += bool(file.read())
    return f"{DONE}: {found} processes" if found else "none is to be seen"


def trace(pid):
    """Attach to a process as a debugger."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.ptrace(NR_PTRACE_ATTACH, pid, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def connect(path):
    """Connect to a Unix socket."""
    with socket.socket(socket.AF_UNIX) as door:
        door.connect(path)


def read(path):
    """First bytes of a file."""
    with open(path, "rb") as file:
        return file.read(16)


def try_all(told):
    """All rows; `told`: listeners (name -> host, port), scans (name -> host, first port, last), sockets, files, ..."""
    options = own_options()
    pair = (options["grpc-server-cert"], options["grpc-server-key"]) if "grpc-server-key" in options else None
    listeners, mine = dict(told["listeners"]), int(options.get("grpc-port", 0))
    for name, (host, first, last) in told["scans"].items():
        for port in range(first, last, 2):  # the others are metrics, on loopback
            with socket.socket() as door:
                door.settimeout(CONNECT_S)
                if port != mine and door.connect_ex((host, port)) == 0:
                    listeners[f"{name} {port}"] = (host, port)
    rows = []
    for name, (host, port) in listeners.items():
        rows.append((name, "clear text", knock(host, port, clear=True)))
        rows.append((name, "TLS, no certificate", knock(host, port)))
        if pair is not None:
            rows.append((name, "TLS, the slice's own certificate", knock(host, port, pair)))
    for name, certified in told.get("certified", {}).items():  # who also asks for a password
        rows.append((name, "TLS, certificate, no password", knock(*listeners[name], certified, first=PING)))
    rows += [(path, "connect to the socket", attempt(lambda path=path: connect(path))) for path in told["sockets"]]
    rows += [(path, "read", attempt(lambda path=path: read(path))) for path in told["files"]]
    rows += [(path, "write there", attempt(lambda path=path: os.mkdir(f"{path}/x"))) for path in told["folders"]]
    for name, pid in ((name, pid) for name, pid in told["pids"].items() if not _is_own(pid)):
        rows.append((name, "trace it", attempt(lambda pid=pid: trace(pid))))
        rows.append((name, "read its variables", attempt(lambda pid=pid: read(f"/proc/{pid}/environ"))))
    rows.append(("processes", "signal them", signals()))
    rows.append(("processes", "see others' commands", seen_commands()))
    rows.append(("root", "become it", attempt(lambda: os.setuid(0))))
    return rows


def begin(told):
    """Try all and print the rows on one line, when all that is told of has been started."""
    threading.Event().wait(told["after_s"])
    print("PROBE " + json.dumps(try_all(told)), file=sys.stderr, flush=True)

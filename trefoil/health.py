"""Health of one service, for the health checks of containers: `python -m trefoil.health HOST:PORT`.

Asks gRPC's own health service, which needs no token, and prints one line: exit code 0 while it serves, 1 otherwise, 2
for arguments that cannot be. Not a command of `trefoil`, whose start takes six times as long: it is run every few
seconds in every container, so it brings gRPC and nothing else. Messages of one field need no protobuf: its start would
take a third more.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import grpc

from trefoil import direct

SERVING: Final = 0
NOT_SERVING: Final = 1
REFUSED: Final = 2
CHECK: Final = "/grpc.health.v1.Health/Check"
STATES: Final = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
SERVICE_BYTES_MAX: Final = 127


def main(argv: Sequence[str] | None = None) -> int:
    """Ask once, print the answer, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trefoil.health", description="Is a service healthy?")
    parser.add_argument("target", metavar="HOST:PORT", help="a gRPC port of the service")
    parser.add_argument("--service", default="", metavar="NAME", help="one service of it; default: the process")
    parser.add_argument("--ca", type=Path, metavar="PEM", help="authority that signed its certificate; turns TLS on")
    parser.add_argument("--certificate", type=Path, metavar="PEM", help="to show, where the service demands one")
    parser.add_argument("--key", type=Path, metavar="PEM", help="its key")
    parser.add_argument("--timeout", type=float, default=3.0, metavar="S", help="how long to wait; default: 3 s")
    given = parser.parse_args(argv)
    host, colon, port = given.target.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 65536):
        print(f"error: HOST:PORT = {given.target!r}: no address. Remedy: write e.g. 127.0.0.1:8101", file=sys.stderr)
        return REFUSED
    if len(given.service.encode()) > SERVICE_BYTES_MAX:
        print(f"error: --service = {given.service!r}: longer than any is. Remedy: correct it", file=sys.stderr)
        return REFUSED
    if not 0 < given.timeout <= 3600:
        print(f"error: --timeout = {given.timeout!r}: 0 to 3600 s. Remedy: correct that value", file=sys.stderr)
        return REFUSED
    if (given.certificate is None) != (given.key is None) or (given.certificate and not given.ca):
        print("error: --certificate, --key: not all of three. Remedy: give both, and --ca", file=sys.stderr)
        return REFUSED
    pems: list[bytes | None] = []
    for flag, kind in (("ca", b"CERTIFICATE"), ("key", b"PRIVATE KEY"), ("certificate", b"CERTIFICATE")):
        path = getattr(given, flag)
        try:
            pem = path.read_bytes() if path else None
            why = f"holds no {kind.decode().lower()}" if pem is not None and kind + b"-----" not in pem else ""
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            print(f"error: --{flag} = {str(path)!r}: {why}. Remedy: name a PEM file", file=sys.stderr)
            return REFUSED
        pems.append(pem)
    said, healthy = ask(given.target, given.service, pems, given.timeout)
    print(f"{given.target}{f' {given.service}' if given.service else ''}: {said}")
    return SERVING if healthy else NOT_SERVING


def ask(target: str, service: str, pems: Sequence[bytes | None], timeout_s: float) -> tuple[str, bool]:
    """Ask a server for the health of a service, "" = of its process: what it said, and whether it serves.

    `pems`: authority, key and certificate; without an authority it asks in clear text.
    """
    credentials = None if pems[0] is None else grpc.ssl_channel_credentials(*pems)
    with direct.blocking_channel(target, credentials) as channel:
        name = service.encode()
        try:
            told = channel.unary_unary(CHECK)(bytes((0x0A, len(name))) + name, timeout=timeout_s)  # field 1, a string
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}", False
    state = STATES[told[1] if told[:1] == b"\x08" else 0]  # field 1, a number
    return state, state == "SERVING"


if __name__ == "__main__":
    raise SystemExit(main())

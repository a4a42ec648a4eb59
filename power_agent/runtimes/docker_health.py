"""The health check inside a container: asks Triton's gRPC health service with nothing but a bare Python.

Triton's HTTP port, with its /v2/health/ready, stays closed, and images bring no gRPC client; the one request is short
enough to be written by hand (HTTP/2: preface, SETTINGS, HEADERS, DATA; RFC 9113 and 7541, gRPC health checking
protocol). The engine runs it, so that `docker ps` tells the truth; the agent's own checks infer.
"""

from typing import Final

# A complete program; argv: host, port. Exit code 0: SERVING.
PROGRAM: Final = r"""
import socket, struct, sys
def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload
def text(value):
    return bytes([len(value)]) + value
headers = b"\x83\x86\x04" + text(b"/grpc.health.v1.Health/Check") + b"\x01" + text(b"localhost")
headers += b"\x0f\x10" + text(b"application/grpc") + b"\x00" + text(b"te") + text(b"trailers")
call = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers) + frame(0, 1, 1, bytes(5))
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 3) as connection:
    connection.sendall(call)
    answer = b""
    while b"\x00\x00\x00\x00\x02\x08\x01" not in answer:
        more = connection.recv(4096)
        if not more:
            sys.exit("not serving")
        answer += more
"""


def health_command(python: str, target: str) -> list[str]:
    """For a container's health check; `target` is host:port of Triton's gRPC."""
    host, _, port = target.rpartition(":")
    return ["CMD", python, "-I", "-S", "-c", PROGRAM, host, port]

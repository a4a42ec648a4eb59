"""What a service's container of `make e2e-security` tries with the pair and the token that it holds. A program of its
own, for containers of Trefoil's images: it needs gRPC.

Each attempt is a row, as of `security_probe`. What shows that a row means anything is tried too, and told apart: that
the same certificate is let in to what it is for, and the same call with the token, where there is one.
"""

import json
import sys
from pathlib import Path

import grpc

DONE = "DONE"
ANSWER_S = 20.0
CERTIFIED = "tls.crt", "tls.key"
DENIED = ("UNAUTHENTICATED", "PERMISSION_DENIED")
RESTRICTED = "This protocol is restricted"  # Triton's words


def code_of(channel, method, token=""):
    """How a call without a request ends: code and what was said."""
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    try:
        channel.unary_unary(method)(b"", timeout=ANSWER_S, metadata=metadata, wait_for_ready=True)
    except grpc.RpcError as error:
        return error.code().name, error.details()
    return "OK", ""


def channel_to(target, name, folder):
    """A connection with this container's certificate, to whose certificate says `name`."""
    authority, certificate, key = ((folder / file).read_bytes() for file in ("ca.crt", *CERTIFIED))
    credentials = grpc.ssl_channel_credentials(authority, key, certificate)
    return grpc.secure_channel(target, credentials, (("grpc.ssl_target_name_override", name),))


def try_all(told):
    """All rows, and what is let in; `told`: folder of the pair, calls and free (whom, target, name, method)."""
    folder = Path(told["folder"])
    token_file = folder / "token"
    token = token_file.read_text().strip() if token_file.exists() else ""
    rows, let_in = [], []
    for whom, target, name, method in told["calls"]:
        with channel_to(target, name, folder) as channel:
            code, said = code_of(channel, method)
            refused = code in DENIED or RESTRICTED in said
            rows.append(
                (
                    whom,
                    f"{method.split('/')[-1]}: certificate, no token",
                    f"{'' if refused else f'{DONE}: '}{code}: {said}",
                )
            )
            if token and RESTRICTED not in said:
                let_in.append((whom, f"{method} with the token", code_of(channel, method, token)[0]))
    for whom, target, name, method in told["free"]:
        with channel_to(target, name, folder) as channel:
            let_in.append((whom, f"{method} with the certificate", code_of(channel, method)[0]))
    return rows, let_in


if __name__ == "__main__":
    print("PROBE " + json.dumps(try_all(json.loads(sys.argv[1]))), file=sys.stderr, flush=True)

"""Ways to loopback and internal addresses: channels and HTTP requests that no proxy of the environment takes.

`http_proxy`, `https_proxy` and `grpc_proxy` are for the Internet. A proxy does not reach a service's loopback port, a
node or a Triton, and gRPC asks it nevertheless. Made here and nowhere else (`tests/test_tidy.py`).
"""

import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import grpc

Options = Sequence[tuple[str, Any]]
NO_PROXY: Final = ("grpc.enable_http_proxy", 0)


def channel(
    target: str,
    credentials: grpc.ChannelCredentials | None = None,
    options: Options = (),
    interceptors: Sequence[Any] = (),
) -> grpc.aio.Channel:
    """Channel of grpc.aio; without credentials in clear text."""
    more: dict[str, Any] = {"options": [*options, NO_PROXY], "interceptors": list(interceptors)}
    if credentials is None:
        return grpc.aio.insecure_channel(target, **more)
    return grpc.aio.secure_channel(target, credentials, **more)


def blocking_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, options: Options = ()
) -> grpc.Channel:
    """Channel of grpc, for a program without an event loop."""
    if credentials is None:
        return grpc.insecure_channel(target, [*options, NO_PROXY])
    return grpc.secure_channel(target, credentials, [*options, NO_PROXY])


TRITON_CLIENT: Final = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    NO_PROXY,
)
"""`channel_args` of tritonclient's gRPC clients."""


def open_url(url: str, timeout_s: float) -> Any:
    """Get a page, as urllib.request.urlopen does."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout_s)

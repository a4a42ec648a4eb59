"""Ways to loopback and internal addresses: channels and HTTP requests that no proxy of the environment takes.

`http_proxy`, `https_proxy` and `grpc_proxy` are for the Internet. A proxy does not reach a service's loopback port, a
node or a Triton, and gRPC asks it nevertheless. Made here and nowhere else (`tests/test_tidy.py`).
"""

import ipaddress
import os
import re
import urllib.request
from collections.abc import Sequence
from typing import Any, Final

import grpc

from trefoil.core.errors import SettingError

Options = Sequence[tuple[str, Any]]
NO_PROXY: Final = ("grpc.enable_http_proxy", 0)
PROXY_VARIABLES: Final = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")  # also in capitals
INTERNAL_NAMES: Final = (".localhost", ".local", ".internal", ".svc")
_USER: Final = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)


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


def is_internal(host: str) -> bool:
    """Whether a host is loopback, of a private network, or a name that no public DNS knows."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return "." not in host or host.lower().rstrip(".").endswith(INTERNAL_NAMES)
    return address.is_private or address.is_loopback or address.is_link_local


def proxy_error(error: Exception, field: str = "", url: str = "") -> SettingError:
    """Error of a proxy that httpx refuses: of the setting `field`, or of variables (no `url`). Shows no password."""
    variables = [name for name in sorted(os.environ) if name.lower() in PROXY_VARIABLES and os.environ[name]]
    shown = [f"{name}=" + _USER.sub(r"\1", os.environ[name]) for name in variables]
    value = _USER.sub(r"\1", url) if url else " ".join(shown)
    socks = isinstance(error, ImportError)
    return SettingError(
        "SOCKS proxies need the package socksio" if socks else "cannot be used as proxy",
        field=field or ", ".join(variables), value=value,
        remedy="name an HTTP proxy, http://host:port; in NO_PROXY hosts without brackets",
    )  # fmt: skip

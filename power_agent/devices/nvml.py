"""Puts a simulated driver behind the unmodified pynvml module of this process."""

import contextlib
from collections.abc import Collection, Sequence
from pathlib import Path

import pynvml

from power_agent.devices.errors import NodeUnreachable
from power_agent.devices.node_client import NodeClient
from power_agent.devices.nvml_shim import NvmlShim, Send


def install_simulated(socket_path: Path | str) -> NodeClient:
    """Answer every pynvml call of this process from the simulated node at `socket_path`; returns the client in use.

    pynvml resolves each C symbol by `getattr` on its module global `nvmlLib` and remembers it; both are replaced here,
    so a later call of this function moves the process to another node.
    """
    client = NodeClient(socket_path)
    missing: Sequence[str] = ()
    with contextlib.suppress(NodeUnreachable):  # not up yet: it will refuse what it lacks when it is called
        missing = client.describe().get("symbols_missing", ())
    install(client.nvml, missing)
    return client


def install(send: Send, symbols_missing: Collection[str] = ()) -> None:
    """Answer every pynvml call of this process through `send`, such as Machine.send.

    symbols_missing: C names that pynvml does not even find, as in the library of an old driver.
    """
    shim = NvmlShim(send)
    for symbol in symbols_missing:
        delattr(shim, symbol)
    with pynvml.libLoadLock:
        pynvml.nvmlLib = shim
        pynvml._nvmlGetFunctionPointer_cache.clear()


def uninstall() -> None:
    """Back to the real library, which is loaded at the next nvmlInit."""
    with pynvml.libLoadLock:
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

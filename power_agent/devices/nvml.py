"""Puts a simulated driver behind the unmodified pynvml module of this process."""

from pathlib import Path

import pynvml

from power_agent.devices.node_client import NodeClient
from power_agent.devices.nvml_shim import NvmlShim, Send


def install_simulated(socket_path: Path | str) -> NodeClient:
    """Answer every pynvml call of this process from the simulated node at `socket_path`; returns the client in use.

    pynvml resolves each C symbol by `getattr` on its module global `nvmlLib` and remembers it; both are replaced here,
    so a later call of this function moves the process to another node.
    """
    client = NodeClient(socket_path)
    install(client.nvml)
    return client


def install(send: Send) -> None:
    """Answer every pynvml call of this process through `send`, such as Machine.send."""
    with pynvml.libLoadLock:
        pynvml.nvmlLib = NvmlShim(send)
        pynvml._nvmlGetFunctionPointer_cache.clear()


def uninstall() -> None:
    """Back to the real library, which is loaded at the next nvmlInit."""
    with pynvml.libLoadLock:
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

"""Look at one GPU from a separate process, which has it open only as long as that takes.

    seen = await GpuLooker()("node0/gpu1", "GPU-...", "00000000:07:00.0", node_socket=None)
    python -m power_agent.devices.gpu_look node0/gpu1 GPU-... 00000000:07:00.0 [node.sock]

A look within this process would keep the GPU open for as long as NVML's session lasts, and so block its reset.
"""

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Final

from power_agent.devices.core.reset_proof import GpuLook
from power_agent.devices.errors import DeviceError, DeviceLost
from power_agent.devices.gpus import Gpus, Place
from power_agent.devices.nvml_shim import install_simulated_node

LIMIT_S: Final = 60.0


class GpuLooker:
    """Looks at GPUs, at each by one process at a time: one that hangs in the driver outlives its SIGKILL."""

    def __init__(self) -> None:
        self._processes: dict[str, asyncio.subprocess.Process] = {}

    async def __call__(self, device: str, uuid: str, bus_id: str, node_socket: Path | None) -> GpuLook:
        """Look at a GPU. `bus_id`: its PCI address; empty: NVML searches, and may open others for that moment.

        Raises:
            DeviceLost: it does not answer; the text says what its driver said.
        """
        if uuid in self._processes and self._processes[uuid].returncode is None:
            raise DeviceLost("an earlier look at it hangs in the driver", remedy="see the kernel's log")
        words = [device, uuid, bus_id, *([str(node_socket)] if node_socket is not None else [])]
        self._processes[uuid] = process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", "power_agent.devices.gpu_look", *words,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            async with asyncio.timeout(LIMIT_S):
                answer, trouble = await process.communicate()
        except TimeoutError:
            raise DeviceLost(f"it does not answer within {LIMIT_S:g} s", remedy="see the kernel's log") from None
        finally:
            if process.returncode is None:
                process.kill()
        return _look_of(answer, trouble)


def _look_of(answer: bytes, trouble: bytes) -> GpuLook:
    try:
        found = json.loads(answer)
    except ValueError:
        last = trouble.decode(errors="replace").strip().rpartition("\n")[2]
        raise DeviceLost(f"a look at it failed: {last or 'no answer'}", remedy="see the agent's log") from None
    if "error" in found:
        raise DeviceLost(found["error"])
    return GpuLook(**found)


def main(argv: list[str]) -> None:
    """Print one JSON object: a GpuLook, or the error."""
    device, uuid, bus_id, *sockets = argv
    for socket in sockets:
        install_simulated_node(socket)
    gpus = Gpus(device.partition("/")[0])
    try:
        gpus.open()
        gpus.remember_names({device: uuid}, {device: Place(bus_id)})
        modes, action = gpus.mig_mode(device), gpus.recovery_action(device)
        answer = asdict(GpuLook(*modes, action, gpus.energy_j(device), gpus.persistence_mode(device)))
        gpus.close()
    except DeviceError as error:
        answer = {"error": error.message}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Switches MIG mode on where the operator has asked for it (`mig_mode = enable`) and the GPU is empty; never off.

On Hopper it is in force at once and gone with the driver. On Ampere it stays pending until the idle GPU is reset, which
ends every client of that GPU on the machine: that is for a person to do, and `missing` says so.
"""

from typing import Final

import structlog

from power_agent.devices.errors import DeviceError, NoPermission
from power_agent.devices.inventory import Inventory
from power_agent.mig import Mig
from power_agent.node import Device, Node
from trefoil.core.fleet import DeviceKind, DeviceState

ENABLE: Final = "enable"


async def enable_mig(node: Node, mig: Mig, inventory: Inventory, device: Device) -> None:
    """Bring one device into MIG mode if it may be done now; what stands in the way is said in `missing`.

    Raises:
        DeviceError: the GPU is lost.
    """
    what = f"{device.device} mig"
    if device.type.kind != DeviceKind.MIG_GPU or device.state == DeviceState.LOST:
        return
    if device.mig_current:
        node.miss(what, "")
        return
    index = device.device.rpartition("gpu")[2]
    if device.mig_pending:
        node.miss(what, f"MIG mode waits for a reset of the idle GPU: sudo nvidia-smi -i {index} --gpu-reset")
    elif node.settings.mig_mode != ENABLE:
        by_hand = f"sudo nvidia-smi -i {index} -mig 1"
        node.miss(what, f"MIG mode is off: setting mig_mode = enable, or {by_hand} while the GPU is idle")
    elif holders := await mig.call(device.device, lambda: inventory.processes(device.uuid)):
        pids = ", ".join(str(holder.pid) for holder in holders)
        node.miss(what, f"MIG mode cannot be switched on while processes {pids} use the GPU: stop them")
    else:
        await _switch_on(node, mig, inventory, device)


async def _switch_on(node: Node, mig: Mig, inventory: Inventory, device: Device) -> None:
    log = structlog.get_logger()
    try:
        seen = await mig.call(device.device, lambda: inventory.set_mig_mode(device.device, True))
    except NoPermission as error:
        node.miss(f"{device.device} mig", str(error))
        return
    except DeviceError as error:
        log.warning("MIG mode could not be switched on", device=device.device, why=str(error))
        raise
    device.mig_current, device.mig_pending = seen.mig_current, seen.mig_pending
    log.warning("MIG mode asked for", device=device.device, current=seen.mig_current, pending=seen.mig_pending)
    node.changed()
    if seen.mig_current or seen.mig_pending:
        await enable_mig(node, mig, inventory, device)  # says what is left to do
    else:
        why = "the driver took the request for MIG mode and did nothing: see the kernel's log"
        node.miss(f"{device.device} mig", why)

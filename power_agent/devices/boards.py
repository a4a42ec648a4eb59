"""Which device type a GPU is governed as: its table's, the same outside MIG, or one that its driver describes.

A board that can be cut but whose MIG mode is off, and is not asked for, serves whole. So does a board that no table
describes. Such a board in MIG mode is metered only, as a process there would need an instance that may not be planned.
"""

from collections.abc import Sequence

from power_agent.devices.gpus import Gpus, ObservedDevice
from trefoil.core.device_types import DEVICE_TYPES, NO_MIG, UNKNOWN_MAX_W, device_type, unknown_board_name
from trefoil.core.fleet import DeviceKind, DeviceType

UNKNOWN_IN_MIG = (
    "no device type describes this board, and its MIG mode is on. Remedy: switch it off, nvidia-smi -i {uuid} -mig 0, "
    "or write its table: docs/device-types.md"
)
HELD = "processes {pids} compute on it, which are not this agent's. Remedy: stop them"
MIG_WENT_ON = "its MIG mode was switched on while it served whole. Remedy: switch it off, or restart the agent"


def board_type(gpus: Gpus, seen: ObservedDevice, mig_wanted: bool) -> DeviceType:
    """Device type of a GPU as it is now. `mig_wanted`: MIG mode will be switched on where it can be.

    Raises:
        DeviceError: the GPU does not answer.
    """
    if seen.type not in DEVICE_TYPES:
        limits = gpus.power_limits(seen.device)
        max_w = limits.max_w if limits is not None else gpus.power_limit_w(seen.device) or UNKNOWN_MAX_W
        clocks_mhz = gpus.clocks_supported_mhz(seen.device)
        return device_type(unknown_board_name(seen.type, seen.memory_mib, max_w, clocks_mhz))
    known = DEVICE_TYPES[seen.type]
    if known.kind == DeviceKind.MIG_GPU and not (seen.mig_current or seen.mig_pending or mig_wanted):
        return DEVICE_TYPES.get(known.name + NO_MIG, known)
    return known


def closed_reason(kind: DeviceType, uuid: str, mig_current: bool, holders: Sequence[int] = ()) -> str:
    """Reason why nothing may be planned on a GPU of that type, with the remedy; empty when something may. `holders`:
    processes of others on a whole GPU on which nothing of ours runs."""
    if kind.kind != DeviceKind.WHOLE_GPU:
        return ""
    if not mig_current:
        return HELD.format(pids=", ".join(map(str, holders))) if holders else ""
    return MIG_WENT_ON if kind.name in DEVICE_TYPES else UNKNOWN_IN_MIG.format(uuid=uuid)

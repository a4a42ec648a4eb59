"""The one table from NVML return codes to the errors of power_agent.devices.errors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pynvml

from power_agent.devices.errors import (
    DeviceBusy,
    DeviceError,
    DeviceLost,
    DeviceUnsupported,
    DriverUnavailable,
    NoPermission,
    NoRoom,
    SliceMissing,
)
from power_agent.devices.holders import Holders

ERROR_TABLE: Final[dict[int, tuple[type[DeviceError], str]]] = {
    pynvml.NVML_ERROR_NOT_SUPPORTED: (DeviceUnsupported, "is MIG mode on, and does this device have the feature?"),
    pynvml.NVML_ERROR_FUNCTION_NOT_FOUND: (DeviceUnsupported, "this driver is too old for the call: update it"),
    pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH: (DeviceUnsupported, "driver and pynvml disagree: update the older"),
    pynvml.NVML_ERROR_NO_PERMISSION: (NoPermission, "run the power agent as root or with CAP_SYS_ADMIN"),
    pynvml.NVML_ERROR_NOT_FOUND: (SliceMissing, "list the instances again: it is gone"),
    pynvml.NVML_ERROR_INSUFFICIENT_RESOURCES: (NoRoom, "list the instances: the place is taken, or it exists already"),
    pynvml.NVML_ERROR_GPU_IS_LOST: (DeviceLost, "fence the device; it needs a reset or a reboot"),
    pynvml.NVML_ERROR_RESET_REQUIRED: (DeviceLost, "fence the device; it needs a reset"),
    pynvml.NVML_ERROR_UNINITIALIZED: (DriverUnavailable, "open the inventory first"),
    pynvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        DriverUnavailable,
        "load the driver (simulated: start the node), then reopen",
    ),
    pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: (DriverUnavailable, "install the driver, or use a simulated node"),
    pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (DriverUnavailable, "the driver was upgraded under us: reload it"),
}


@contextmanager
def translated(where: str, verb: str, holders: Callable[[], Holders] = Holders) -> Iterator[None]:
    """Turn an NVMLError into a DeviceError that says where, what was tried, and what to do.

    `holders` is asked when the driver says IN_USE.
    """
    try:
        yield
    except pynvml.NVMLError as error:
        code = int(error.value)
        if code == pynvml.NVML_ERROR_IN_USE:
            found = holders()
            message = f"{where}: could not {verb}: in use by {found.text}"
            remedy = "stop it, then retry" if found.pids else "restart that client, then retry"
            raise DeviceBusy(message, remedy=remedy, code=code, holders=found.pids) from error
        kind, remedy = ERROR_TABLE.get(code, (DeviceError, "see the driver's log"))
        raise kind(f"{where}: could not {verb}: {error} (NVML {code})", remedy=remedy, code=code) from error

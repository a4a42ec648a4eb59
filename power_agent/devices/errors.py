"""Errors that a driver or a simulated node answers with, and their translation from NVML's return codes.

TrefoilError
+-- DeviceError             a driver call was refused; `code` is the nvmlReturn_t
|   +-- DeviceUnsupported   this driver or device lacks the feature (also: a symbol missing in an old driver)
|   +-- DeviceBusy          IN_USE: something still holds it; `holders` names the pids that NVML lists
|   +-- NoRoom              INSUFFICIENT_RESOURCES: the place is taken, or the instance exists already
|   +-- SliceMissing        NOT_FOUND: gone, or never was
|   +-- NoPermission        root or CAP_SYS_ADMIN is needed
|   +-- DeviceLost          the GPU fell off the bus or wants a reset: fence the device
|   +-- DeviceReleased      this process has let go of the GPU, so that it can be reset
|   +-- DriverUnavailable   driver not loaded, or not the one that this process opened
+-- Unavailable
|   +-- NodeUnreachable     the simulated node's process does not answer
+-- NodeRefused             it answered, and says why not"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import pynvml

from power_agent.devices.instance_holders import Holders
from trefoil.core.errors import TrefoilError, Unavailable


class DeviceError(TrefoilError):
    """A driver call was refused; `code` is the nvmlReturn_t, `holders` the pids in the way."""

    def __init__(self, message: str, *, remedy: str = "", code: int = 0, holders: tuple[int, ...] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.code = code
        self.holders = holders


class DeviceUnsupported(DeviceError):
    """This driver or device lacks the feature."""


class DeviceBusy(DeviceError):
    """A process or a compute instance still holds it."""


class NoRoom(DeviceError):
    """The place is taken, or the instance exists already: look at the state."""


class SliceMissing(DeviceError):
    """A slice, device or GPU instance does not exist (any more)."""


class NoPermission(DeviceError):
    """The call needs root or CAP_SYS_ADMIN."""


class DeviceLost(DeviceError):
    """The GPU fell off the bus or wants a reset."""


class DeviceReleased(DeviceError):
    """This process has let go of the GPU, so that it can be reset."""


class DriverUnavailable(DeviceError):
    """Driver not loaded, or not the one that this process opened."""


class NodeUnreachable(Unavailable):
    """The simulated node's process does not answer."""


class NodeRefused(TrefoilError):
    """The simulated node answered that it cannot do this."""


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
def translate_nvml_errors(where: str, verb: str, holders: Callable[[], Holders] = Holders) -> Iterator[None]:
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

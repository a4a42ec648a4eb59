"""What a driver or a simulated node can answer.

TrefoilError
+-- DeviceError             a driver call was refused; `code` is the nvmlReturn_t
|   +-- DeviceUnsupported   this driver or device lacks the feature (also: a symbol missing in an old driver)
|   +-- DeviceBusy          IN_USE: something still holds it; `holders` names the pids that NVML lists
|   +-- NoRoom              INSUFFICIENT_RESOURCES: the place is taken, or the instance exists already
|   +-- SliceMissing        NOT_FOUND: gone, or never was
|   +-- NoPermission        root or CAP_SYS_ADMIN is needed
|   +-- DeviceLost          the GPU fell off the bus or wants a reset: fence the device
|   +-- DriverUnavailable   driver not loaded, or not the one that this process opened
+-- Unavailable
|   +-- NodeUnreachable     the simulated node's process does not answer
+-- NodeRefused             it answered, and says why not
"""

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
    """Gone, or never was."""


class NoPermission(DeviceError):
    """Root or CAP_SYS_ADMIN is needed."""


class DeviceLost(DeviceError):
    """The GPU fell off the bus or wants a reset."""


class DriverUnavailable(DeviceError):
    """Driver not loaded, or not the one that this process opened."""


class NodeUnreachable(Unavailable):
    """The simulated node's process does not answer."""


class NodeRefused(TrefoilError):
    """The simulated node answered that it cannot do this."""

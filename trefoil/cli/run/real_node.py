"""Real node under `trefoil up`: whether this machine can be one, asked before anything is started."""

from power_agent.devices.driver_lock import DriverLock, loaded_library
from power_agent.devices.errors import DeviceError, DriverUnavailable
from power_agent.devices.inventory import Inventory
from power_agent.runtimes.factory import build_runtime, install_triton
from power_agent.settings import PowerAgentSettings
from power_agent.triton.installation import find_triton, prepare_triton, with_backend
from trefoil.core.errors import StartError


def check_real_node(settings: PowerAgentSettings) -> int:
    """Check devices and Triton of this machine; changes nothing. Returns the number of its GPUs.

    Raises:
        StartError: nothing here could serve, or another agent governs the GPUs.
        TrefoilError: no Triton that the settings' runtime could start.
    """
    why, gpus = "", 0
    inventory = Inventory(settings.node)
    try:
        inventory.open()
        gpus = len(inventory.list_devices())
    except DriverUnavailable as error:
        why = str(error).partition(". Remedy: ")[0]
    except DeviceError as error:  # a driver that is there and refuses: its own remedy is the right one
        raise StartError(str(error), field="fleet.kind", value="real") from error
    finally:
        inventory.close()
    if not gpus and settings.cpu != "serve":
        raise StartError(
            f"no GPU serves on this machine ({why or 'NVML lists none'})",
            field="fleet.kind",
            value="real",
            remedy="load NVIDIA's driver until `nvidia-smi -L` lists the GPUs; or serve on the CPUs: "
            "--set power_agent.cpu=serve; or simulate: --set fleet.kind=simulated",
        )
    lock = DriverLock(settings.driver_marker)
    try:
        lock.take(loaded_library() if gpus else None)
    finally:
        lock.release()
    if gpus and settings.cpu != "serve" and all(settings.engine_on(f"gpu{n}") for n in range(gpus)):
        return gpus  # engines that already run need no Triton
    if settings.runtime_name == "docker":
        install_triton(settings, build_runtime(settings, None))
    else:
        install = find_triton(settings.triton_binary, settings.triton_environment)
        prepare_triton(with_backend(install, settings.triton_backend, simulated=False))
    return gpus

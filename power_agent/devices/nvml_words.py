"""What NVML's names and numbers mean: products, virtualization modes, reasons of a clock, recovery actions."""

from typing import Final

import pynvml

# NVML's product names, without the vendor, whose device type goes by another name. Sources: `nvidia-smi -L` of the
# respective boards; drivers before R470 left "NVIDIA" out, and R450 wrote A100-SXM-80GB.
TYPE_OF_NAME: Final = {
    "H100 80GB HBM3": "H100-SXM5-80GB",
    "A100-SXM-40GB": "A100-SXM4-40GB",
    "A100-SXM-80GB": "A100-SXM4-80GB",
    "V100-SXM2-32GB": "Tesla V100-SXM2-32GB",
    "T4": "Tesla T4",
    "P4": "Tesla P4",
}
VIRTUALIZATION: Final = {0: "none", 1: "passthrough", 2: "vgpu", 3: "vgpu_host", 4: "vsga_host"}

CLOCK_EVENT_REASONS: Final = {
    0x1: "idle",
    0x2: "locked_or_application_clocks",
    0x4: "software_power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "power_brake",
}
# What nvmlDeviceGetFieldValues' recovery action asks for, where that is more than an application can do.
RECOVERY_ACTIONS: Final = {
    pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET: "a reset of the GPU",
    pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT: "a reboot of the node",
    pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET: "a reset of the GPU once it is drained",
    pynvml.NVML_GPU_RECOVERY_ACTION_BUS_RESET: "a reset of its bus",
    pynvml.NVML_GPU_RECOVERY_ACTION_SYSTEM_REBOOT: "a reboot of the system",
}
# Where NVML puts the value of a field, by its type tag (nvmlValueType_t).
VALUE_FIELDS: Final = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def device_type_name(nvml_name: str) -> str:
    """Name of the DeviceType of a product name; an unknown one is returned without its vendor.

    An A100 goes by the type that can be cut, whatever its MIG mode (the driver's name is the same): one whose mode is
    off serves whole, as `A100-SXM4-40GB-nomig`: `boards` says so.
    """
    name = " ".join(nvml_name.split()).removeprefix("NVIDIA ")
    return TYPE_OF_NAME.get(name, name)

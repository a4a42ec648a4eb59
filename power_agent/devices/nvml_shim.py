"""Stand-in for libnvidia-ml.so inside pynvml: ctypes arguments on one side, plain values on the other.

    client = install_simulated_node(socket_path)       # pynvml of this process answers from a simulated node
    install_simulated_driver(machine.send)                         # ... from a machine in this process

Each symbol is a row of argument kinds in the order of the C prototype. pynvml's own code (structure versions, two-call
sizing, error classes, missing symbols) runs unmodified above it. What would crash a real driver raises here: a
structure passed by value where C wants a pointer."""

import contextlib
import ctypes
import functools
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Final

import pynvml

from power_agent.devices.errors import NodeUnreachable
from power_agent.devices.node_client import NodeClient

Send = Callable[[str, Sequence[Any]], tuple[int, list[Any]]]
SUCCESS: Final = 0
STRUCT_VERSIONS: Final = {
    "nvmlDeviceGetGpuInstanceProfileInfoV": pynvml.nvmlGpuInstanceProfileInfo_v2,
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": pynvml.nvmlComputeInstanceProfileInfo_v2,
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": pynvml.nvmlGpuInstanceProfileInfo_v2,
    "nvmlDeviceGetMemoryInfo_v2": pynvml.nvmlMemory_v2,
    "nvmlGpmQueryDeviceSupport": pynvml.NVML_GPM_SUPPORT_VERSION,
    "nvmlGpmMetricsGet": pynvml.NVML_GPM_METRICS_GET_VERSION,
}

# The C prototypes of the simulated driver's symbols, as kinds of arguments in order. In: h handle, u integer, s string,
# p pointer to a placement. Out: H handle, U integer, S struct, T text buffer and length, A count
# and array, B array and count, F count and field values. In and out: G the struct of nvmlGpmMetricsGet.
SYMBOLS: Final[dict[str, str]] = {
    "nvmlInitWithFlags": "u",
    "nvmlShutdown": "",
    "nvmlSystemGetDriverVersion": "T",
    "nvmlDeviceGetCount_v2": "U",
    "nvmlDeviceGetHandleByIndex_v2": "uH",
    "nvmlDeviceGetHandleByUUID": "sH",
    "nvmlDeviceGetHandleByPciBusId_v2": "sH",
    "nvmlDeviceGetName": "hT",
    "nvmlDeviceGetUUID": "hT",
    "nvmlDeviceGetIndex": "hU",
    "nvmlDeviceGetMinorNumber": "hU",
    "nvmlDeviceGetArchitecture": "hU",
    "nvmlDeviceGetCudaComputeCapability": "hUU",
    "nvmlDeviceGetPciInfo_v3": "hS",
    "nvmlDeviceGetMemoryInfo": "hS",
    "nvmlDeviceGetMemoryInfo_v2": "hS",
    "nvmlDeviceGetPersistenceMode": "hU",
    "nvmlDeviceSetPersistenceMode": "hu",
    "nvmlDeviceGetVirtualizationMode": "hU",
    "nvmlDeviceGetComputeRunningProcesses_v3": "hA",
    "nvmlDeviceGetTemperature": "huU",
    "nvmlDeviceGetTotalEnergyConsumption": "hU",
    "nvmlDeviceGetPowerUsage": "hU",
    "nvmlDeviceGetFieldValues": "hF",
    "nvmlDeviceGetPowerManagementLimit": "hU",
    "nvmlDeviceGetEnforcedPowerLimit": "hU",
    "nvmlDeviceGetPowerManagementDefaultLimit": "hU",
    "nvmlDeviceGetPowerManagementLimitConstraints": "hUU",
    "nvmlDeviceSetPowerManagementLimit": "hu",
    "nvmlDeviceGetClockInfo": "huU",
    "nvmlDeviceGetDefaultApplicationsClock": "huU",
    "nvmlDeviceGetSupportedMemoryClocks": "hA",
    "nvmlDeviceGetSupportedGraphicsClocks": "huA",
    "nvmlDeviceGetCurrentClocksEventReasons": "hU",
    "nvmlDeviceGetCurrentClocksThrottleReasons": "hU",
    "nvmlDeviceSetGpuLockedClocks": "huu",
    "nvmlDeviceResetGpuLockedClocks": "h",
    "nvmlEventSetCreate": "H",
    "nvmlEventSetFree": "h",
    "nvmlEventSetWait_v2": "hSu",
    "nvmlDeviceRegisterEvents": "huh",
    "nvmlDeviceGetSupportedEventTypes": "hU",
    "nvmlGpmQueryDeviceSupport": "hS",
    "nvmlGpmSampleAlloc": "H",
    "nvmlGpmSampleFree": "h",
    "nvmlGpmSampleGet": "hh",
    "nvmlGpmMigSampleGet": "huh",
    "nvmlGpmMetricsGet": "G",
    "nvmlDeviceGetMigMode": "hUU",
    "nvmlDeviceSetMigMode": "huU",
    "nvmlDeviceGetGpuInstanceProfileInfo": "huS",
    "nvmlDeviceGetGpuInstanceProfileInfoV": "huS",
    "nvmlDeviceGetGpuInstanceProfileInfoByIdV": "huS",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2": "huB",
    "nvmlDeviceGetGpuInstanceRemainingCapacity": "huU",
    "nvmlDeviceCreateGpuInstance": "huH",
    "nvmlDeviceCreateGpuInstanceWithPlacement": "hupH",
    "nvmlGpuInstanceDestroy": "h",
    "nvmlDeviceGetGpuInstances": "huB",
    "nvmlGpuInstanceGetInfo": "hS",
    "nvmlGpuInstanceGetComputeInstanceProfileInfo": "huuS",
    "nvmlGpuInstanceGetComputeInstanceProfileInfoV": "huuS",
    "nvmlGpuInstanceGetComputeInstanceRemainingCapacity": "huU",
    "nvmlGpuInstanceCreateComputeInstance": "huH",
    "nvmlGpuInstanceCreateComputeInstanceWithPlacement": "hupH",
    "nvmlComputeInstanceDestroy": "h",
    "nvmlGpuInstanceGetComputeInstances": "huB",
    "nvmlComputeInstanceGetInfo_v2": "hS",
    "nvmlDeviceGetGpuInstanceId": "hU",
    "nvmlDeviceGetMaxMigDeviceCount": "hU",
    "nvmlDeviceGetMigDeviceHandleByIndex": "huH",
}


class NvmlShim:
    """Stand-in for the loaded library: one callable per symbol; a missing one raises AttributeError, as with ctypes."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._opened = 0
        for symbol, kinds in SYMBOLS.items():
            # partial objects, because pynvml sets attributes (restype) on what it gets
            setattr(self, symbol, functools.partial(self._call, symbol, kinds))
        self.nvmlErrorString = functools.partial(_error_string)

    def _call(self, symbol: str, kinds: str, *args: Any) -> int:
        if symbol != "nvmlInitWithFlags" and not self._opened:
            return int(pynvml.NVML_ERROR_UNINITIALIZED)
        if symbol == "nvmlShutdown":
            self._opened -= 1
        try:
            refused = _wrong_version(symbol, args)
            ret, out = (refused, []) if refused else self._send(symbol, _inputs(kinds, args))
        except NodeUnreachable:
            return int(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        if ret == SUCCESS:
            ret = _outputs(kinds, args, out)
        if ret == SUCCESS and symbol == "nvmlInitWithFlags":
            self._opened += 1
        return ret


def _error_string(code: int) -> bytes:
    known = pynvml.NVMLError._errcode_to_string
    return str(known.get(code, f"Unknown NVML error {code}")).encode()


def _wrong_version(symbol: str, args: tuple[Any, ...]) -> int:
    expected = STRUCT_VERSIONS.get(symbol)
    if expected is not None and _pointee(args[-1]).version != expected:
        return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
    return SUCCESS


def _pointee(arg: Any) -> Any:
    """What a `byref` points at; anything else would reach C as a bogus pointer."""
    target = getattr(arg, "_obj", None)
    if target is None:
        raise ctypes.ArgumentError(f"{type(arg).__name__} passed where C wants a pointer: a real driver would crash")
    return target


def _integer(arg: Any) -> int:
    return int(getattr(arg, "value", arg))


def _handle(arg: Any) -> int:
    return ctypes.c_void_p.from_buffer(arg).value or 0


def _inputs(kinds: str, args: tuple[Any, ...]) -> list[Any]:
    sent: list[Any] = []
    position = 0
    for kind in kinds:
        arg = args[position]
        if kind == "h":
            sent.append(_handle(arg))
        elif kind == "u":
            sent.append(_integer(arg))
        elif kind == "s":
            sent.append(arg.value.decode())
        elif kind == "p":
            placement = _pointee(arg)
            sent.append((placement.start, placement.size))
        elif kind == "F":
            sent.append([value.fieldId for value in _pointee(args[position + 1])])
        elif kind == "G":
            query = _pointee(arg)
            wanted = [query.metrics[row].metricId for row in range(query.numMetrics)]
            sent += [_handle(query.sample1), _handle(query.sample2), wanted]
        position += 2 if kind in "TABF" else 1
    return sent


def _outputs(kinds: str, args: tuple[Any, ...], out: list[Any]) -> int:
    values = iter(out)
    position = 0
    for kind in kinds:
        arg = args[position]
        ret = SUCCESS
        if kind == "H":
            _write_handle(_pointee(arg), next(values))
        elif kind == "U":
            _pointee(arg).value = next(values)
        elif kind == "S":
            _fill(_pointee(arg), next(values))
        elif kind == "T":
            ret = _fill_text(arg, _integer(args[position + 1]), next(values))
        elif kind == "A":
            ret = _fill_array(_pointee(arg), args[position + 1], next(values), null_asks_size=False)
        elif kind == "B":
            ret = _fill_array(_pointee(args[position + 1]), arg, next(values), null_asks_size=True)
        elif kind == "F":
            _fill_fields(_pointee(args[position + 1]), next(values))
        elif kind == "G":
            for row, found in enumerate(next(values)):
                _fill(_pointee(arg).metrics[row], found)
        if ret != SUCCESS:
            return ret
        position += 2 if kind in "TABF" else 1
    return SUCCESS


def _write_handle(pointer: Any, handle: int) -> None:
    ctypes.c_void_p.from_buffer(pointer).value = handle


def _fill(structure: Any, fields: dict[str, Any]) -> None:
    for field, kind in structure._fields_:
        if field not in fields:
            continue
        value = fields[field]
        if isinstance(value, dict):
            _fill(getattr(structure, field), value)
        elif issubclass(kind, ctypes._Pointer):
            offset = getattr(type(structure), field).offset
            ctypes.c_void_p.from_buffer(structure, offset).value = value
        else:
            setattr(structure, field, value.encode() if isinstance(value, str) else value)


def _fill_text(buffer: Any, length: int, text: str) -> int:
    if len(text) >= length:
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    buffer.value = text.encode()
    return SUCCESS


def _fill_array(count: Any, array: Any, values: list[Any], null_asks_size: bool) -> int:
    """Fill a caller's array and say how much; a short one is refused, with the size it should have.

    A NULL array asks for the size: the count-last getters answer that with SUCCESS, the count-first ones with
    INSUFFICIENT_SIZE unless there is nothing to tell (pynvml relies on both).
    """
    room = count.value if array is not None else 0
    count.value = len(values)
    if array is None and null_asks_size:
        return SUCCESS
    if room < len(values):
        return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
    array = getattr(array, "_obj", array)
    for position, value in enumerate(values):
        if isinstance(value, dict):
            _fill(array[position], value)
        elif issubclass(array._type_, ctypes._Pointer):
            ctypes.c_void_p.from_buffer(array, position * ctypes.sizeof(ctypes.c_void_p)).value = value
        else:
            array[position] = value
    return SUCCESS


def _fill_fields(array: Any, values: list[dict[str, int]]) -> None:
    for field, value in zip(array, values, strict=True):
        field.nvmlReturn = value["nvmlReturn"]
        field.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        field.value.ullVal = value["value"]


def install_simulated_node(socket_path: Path | str) -> NodeClient:
    """Install the simulated node at `socket_path` behind pynvml in this process; returns the client in use.

    pynvml resolves each C symbol by `getattr` on its module global `nvmlLib` and remembers it. This function replaces
    the global and clears that memory, so a later call moves the process to another node.
    """
    client = NodeClient(socket_path)
    missing: Sequence[str] = ()
    with contextlib.suppress(NodeUnreachable):  # not up yet: it will refuse what it lacks when it is called
        missing = client.describe().get("symbols_missing", ())
    install_simulated_driver(client.nvml, missing)
    return client


def install_simulated_driver(send: Send, symbols_missing: Collection[str] = ()) -> None:
    """Install a simulated driver behind pynvml in this process; `send` answers every call, such as Machine.send.

    symbols_missing: C names that pynvml does not even find, as in the library of an old driver.
    """
    shim = NvmlShim(send)
    for symbol in symbols_missing:
        delattr(shim, symbol)
    with pynvml.libLoadLock:
        pynvml.nvmlLib = shim
        pynvml._nvmlGetFunctionPointer_cache.clear()


def uninstall_simulated() -> None:
    """Uninstall the simulated driver: the real library is loaded at the next nvmlInit."""
    with pynvml.libLoadLock:
        pynvml.nvmlLib = None
        pynvml._nvmlGetFunctionPointer_cache.clear()

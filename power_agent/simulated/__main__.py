"""Run a simulated GPU node: `python -m power_agent.simulated --node N --socket S`.

With `--describe` it prints the fleet as nvidia-smi does (`-L`, `mig -lgip`, `mig -lgi`): of the node that listens at
the socket, else of the settings."""

import asyncio
import ctypes
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import pynvml

from power_agent.simulated.node_server import NodeServer, build_machine, listens
from power_agent.simulated.nvml_shim import install_simulated_driver, install_simulated_node
from power_agent.simulated.settings import NodeSettings, parse
from trefoil.core import errors
from trefoil.core.catalog import Catalog
from trefoil.runtime.clock import WallClock
from trefoil.runtime.repository import load_catalog
from trefoil.runtime.telemetry import setup_logging

MIB_PER_GIB: Final = 1024
RULE: Final = f"+{'-' * 77}+"
PROFILE_ROW: Final = "|{:>4}  {:<18}{:>4}{:>12}{:>9}{:>6}{:>8}{:>6}{:>6}  |"
INSTANCE_ROW: Final = "|{:>4}  {:<22}{:>8}{:>12}{:>14}               |"


def nvidia_smi_listing() -> str:
    """Listing of all GPUs that pynvml shows, in the words of nvidia-smi; initialises NVML for the while."""
    pynvml.nvmlInit()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        header = f"Driver {pynvml.nvmlSystemGetDriverVersion()}, NVML {pynvml.nvmlSystemGetNVMLVersion()}"
        listing = [line for index, handle in enumerate(handles) for line in _gpu_lines(index, handle)]
        profiles = [line for index, handle in enumerate(handles) for line in _profile_lines(index, handle)]
        instances = [line for index, handle in enumerate(handles) for line in _instance_lines(index, handle)]
    finally:
        pynvml.nvmlShutdown()
    return "\n".join((header, *listing, "", *_profile_table(profiles), "", *_instance_table(instances)))


def _gpu_lines(index: int, handle: Any) -> Iterator[str]:
    try:
        current, pending = pynvml.nvmlDeviceGetMigMode(handle)
        mode = f"MIG {'on' if current else 'off'}" + ("" if current == pending else ", changes at the next reset")
    except pynvml.NVMLError_NotSupported:
        current, mode = 0, "no MIG"
    yield f"GPU {index}: {pynvml.nvmlDeviceGetName(handle)} (UUID: {pynvml.nvmlDeviceGetUUID(handle)}) {mode}"
    for position in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle) if current else 0):
        try:
            mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, position)
        except pynvml.NVMLError_NotFound:
            continue
        name = pynvml.nvmlDeviceGetName(mig).rpartition("MIG ")[2]
        yield f"  MIG {name:<16} Device {position:>2}: (UUID: {pynvml.nvmlDeviceGetUUID(mig)})"


def _profile_infos(handle: Any) -> Iterator[Any]:
    for constant in range(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT):
        try:
            yield pynvml.nvmlDeviceGetGpuInstanceProfileInfo(handle, constant)
        except pynvml.NVMLError_NotSupported:
            continue
        except pynvml.NVMLError_InvalidArgument:
            return


def _profile_lines(index: int, handle: Any) -> Iterator[str]:
    for info in sorted(_profile_infos(handle), key=lambda info: (info.sliceCount, info.memorySizeMB, info.name)):
        try:
            free = pynvml.nvmlDeviceGetGpuInstanceRemainingCapacity(handle, info.id)
        except pynvml.NVMLError_NotSupported:
            free = 0  # MIG is off
        share, gib = f"{free}/{info.instanceCount}", f"{info.memorySizeMB / MIB_PER_GIB:.2f}"
        peer = "Yes" if info.isP2pSupported else "No"
        engines = (info.multiprocessorCount, info.decoderCount, info.encoderCount)
        yield PROFILE_ROW.format(index, info.name, info.id, share, gib, peer, *engines)
        yield PROFILE_ROW.format("", "", "", "", "", "", info.copyEngineCount, info.jpegCount, info.ofaCount)


def _instance_lines(index: int, handle: Any) -> Iterator[str]:
    rows = []
    for info in _profile_infos(handle):
        found, count = (pynvml.c_nvmlGpuInstance_t * info.instanceCount)(), ctypes.c_uint(info.instanceCount)
        try:
            pynvml.nvmlDeviceGetGpuInstances(handle, info.id, found, ctypes.byref(count))
        except pynvml.NVMLError_NotSupported:
            return  # MIG is off
        for instance in found[: count.value]:
            own = pynvml.nvmlGpuInstanceGetInfo(instance)
            rows.append((own.placement.start, own.placement.size, info.name, info.id, own.id))
    for start, size, name, profile_id, gi_id in sorted(rows):
        yield INSTANCE_ROW.format(index, name, profile_id, gi_id, f"{start}:{size}")


def _profile_table(lines: list[str]) -> list[str]:
    if not lines:
        return ["No GPU instance profiles: no GPU here is MIG capable."]
    first = PROFILE_ROW.format("GPU", "Name", "ID", "Free/Total", "GiB", "P2P", "SM", "DEC", "ENC")
    second = PROFILE_ROW.format("", "", "", "", "", "", "CE", "JPEG", "OFA")
    return [RULE, f"|{' GPU instance profiles:':<77}|", first, second, f"|{'=' * 77}|", *lines, RULE]


def _instance_table(lines: list[str]) -> list[str]:
    if not lines:
        return ["No GPU instances found."]
    header = INSTANCE_ROW.format("GPU", "Name", "Profile", "Instance", "Start:Size")
    return [RULE, f"|{' GPU instances:':<77}|", header, f"|{'=' * 77}|", *lines, RULE]


def main(argv: Sequence[str]) -> int:
    """Run the node, or print its fleet; exit code 2 when the settings are refused."""
    try:
        settings, only_describe = parse(argv)
        if only_describe:
            print(_listing(settings))
            return 0
        setup_logging("node", settings.log_level, settings.log_json)
        catalog = load_catalog(settings.model_repository, settings.profile_overrides)
        asyncio.run(_run(settings, catalog))
    except errors.TrefoilError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _listing(settings: NodeSettings) -> str:
    """The node that listens at the socket, or what these settings would start."""
    if listens(str(settings.socket)):
        client = install_simulated_node(settings.socket)
        try:
            return nvidia_smi_listing()
        finally:
            client.close()
    install_simulated_driver(build_machine(settings).send)
    return nvidia_smi_listing()


async def _run(settings: NodeSettings, catalog: Catalog) -> None:
    await NodeServer(settings, catalog, WallClock()).run()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

"""Who holds a GPU instance that cannot be destroyed, or a GPU that cannot be reset: a person must be able to act on it.

NVML lists compute processes only. A monitor (DCGM's host engine above all) holds an instance by a handle instead, which
shows as an open /dev/nvidia-caps/nvidia-cap<N>: each instance has such a device, and so has the right to watch all of
them. Which N is whose is in the driver's procfs. Where nothing shows, only restarting the monitor helps:
github.com/NVIDIA/DCGM issues 95 and 276.

A GPU is not reset while any process has its /dev/nvidia<N> open ("In use by another client"), nvidia-persistenced
included: github.com/NVIDIA/gpu-operator issue 118, NVIDIA/NVSentinel issue 1690.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CAPS_FOLDER: Final = "/dev/nvidia-caps/"
HIDDEN_HOLDER: Final = "no visible process: a client such as DCGM may hold a handle; restart it"
PIDS_LISTED_MAX: Final = 8  # pids in one text
PERSISTENCED: Final = "nvidia-persistenced"
COMMAND_LENGTH: Final = 15  # that the kernel keeps of a process' name


@dataclass(frozen=True, slots=True)
class Holders:
    """Processes that hold a GPU instance: their pids, and the same in words for a person."""

    pids: tuple[int, ...] = ()
    text: str = HIDDEN_HOLDER


@dataclass(frozen=True, slots=True)
class Opener:
    """A process that has one of the driver's devices open."""

    pid: int
    command: str
    path: str


def find_holders(
    listed: Collection[int], proc: Path | None, minor: int | None, gi_id: int | None, own_pid: int
) -> Holders:
    """Find who holds an instance: pids that NVML lists, else openers of its device, else who may watch all instances.

    proc: the proc file system to search; None: nowhere (the driver is simulated, this machine's devices are not its).
    """
    if listed:
        pids = tuple(sorted(listed))
        commands = {} if proc is None else {pid: command(proc, pid) for pid in pids[:PIDS_LISTED_MAX]}
        return Holders(
            pids, "processes " + ", ".join(_process_text(pid, commands.get(pid, "")) for pid in pids[:PIDS_LISTED_MAX])
        )
    if proc is None:
        return Holders()
    found = [opener for opener in openers(proc) if opener.pid != own_pid]
    devices = set() if minor is None or gi_id is None else instance_devices(proc, minor, gi_id)
    exact = [opener for opener in found if opener.path in devices]
    chosen, how = (exact, "has") if exact else (found, "may hold a handle through")
    if not chosen:
        return Holders()
    pids = tuple(sorted({opener.pid for opener in chosen}))
    shown = [f"{_process_text(opener.pid, opener.command)} {how} {opener.path}" for opener in chosen[:PIDS_LISTED_MAX]]
    return Holders(pids, "no compute process, but " + "; ".join(shown) + (" open" if exact else ""))


def openers(proc: Path, prefix: str = CAPS_FOLDER) -> tuple[Opener, ...]:
    """List processes with a file open whose path begins so; those whose files may not be read are passed over."""
    found = set()
    for folder in proc.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            targets = {str(link.readlink()) for link in (folder / "fd").iterdir()}
        except OSError:
            continue  # ended meanwhile, or another user's and we are not root
        pid = int(folder.name)
        found |= {Opener(pid, command(proc, pid), path) for path in targets if path.startswith(prefix)}
    return tuple(sorted(found, key=lambda opener: (opener.pid, opener.path)))


def gpu_openers(proc: Path, minor: int) -> tuple[tuple[int, str], ...]:
    """List processes that have a GPU open, as (pid, name)."""
    path = f"/dev/nvidia{minor}"
    return tuple((opener.pid, opener.command) for opener in openers(proc, path) if opener.path == path)


def reset_remedy(uuid: str, holders: Collection[tuple[int, str]], own_pid: int) -> str:
    """What a person does to reset a GPU that these processes (pid, name) have open; ours is not an exception."""
    kept = any(name.startswith(PERSISTENCED[:COMMAND_LENGTH]) for _, name in holders)
    others = [
        _process_text(pid, name)
        for pid, name in holders
        if pid != own_pid and not name.startswith(PERSISTENCED[:COMMAND_LENGTH])
    ]
    todo = []
    if any(pid == own_pid for pid, _ in holders):
        todo.append(f"restart this agent, {own_pid}, which has it open in spite of that")
    if others:
        more = f" and {len(others) - PIDS_LISTED_MAX} more" if len(others) > PIDS_LISTED_MAX else ""
        todo.append(f"stop who has it open: {', '.join(others[:PIDS_LISTED_MAX])}{more}")
    if kept:
        todo.append(f"sudo nvidia-smi -i {uuid} -pm 0, as {PERSISTENCED} has it open")
    todo.append(f"sudo nvidia-smi -i {uuid} --gpu-reset")
    if kept:
        todo.append(f"sudo nvidia-smi -i {uuid} -pm 1")
    return "; then ".join(todo)


def instance_devices(proc: Path, minor: int, gi_id: int) -> set[str]:
    """Capability devices of one GPU instance and of its compute instances."""
    instance = proc / "driver" / "nvidia" / "capabilities" / f"gpu{minor}" / "mig" / f"gi{gi_id}"
    numbers = (capability_minor(path) for path in (instance / "access", *instance.glob("ci*/access")))
    return {f"{CAPS_FOLDER}nvidia-cap{number}" for number in numbers if number is not None}


def capability_minor(path: Path) -> int | None:
    """The `DeviceFileMinor` that a file of the driver's procfs names; None when there is no such file."""
    try:
        text = path.read_text()
    except OSError:
        return None
    match = re.search(r"DeviceFileMinor:\s*(\d+)", text)
    return int(match[1]) if match else None


def command(proc: Path, pid: int) -> str:
    """Short name of a process; empty when it is gone."""
    try:
        return (proc / str(pid) / "comm").read_text().strip()
    except OSError:
        return ""


def _process_text(pid: int, name: str) -> str:
    return f"{pid} ({name})" if name else str(pid)

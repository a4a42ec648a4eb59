"""Control groups of CPU slices: a quota (a share of all cores) or a set of cores, for a whole tree of processes.

v2 (one tree): a group is made below a folder that was delegated to the agent. A group that hands controllers down may
hold no process itself, so the agent has to sit in a separate leaf, called `agent` (systemd: Delegate=cpu cpuset and
DelegateSubgroup=agent), or, with a systemd before 254, the setting `cgroup_parent` names a folder outside the unit.
v1 (a tree per controller): a group is made below the agent's own in the trees `cpu`, `cpuset` and, to count, `cpuacct`.

What cannot be had is said once, with its remedy, and refused when a slice needs it. Kernel documentation:
admin-guide/cgroup-v2 (cpu.max, cpu.stat, cpuset.cpus, cgroup.kill), scheduler/sched-bwc (cpu.cfs_quota_us),
admin-guide/cgroup-v1/cpuacct (cpuacct.usage).
"""

import contextlib
import errno
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from trefoil.core.errors import StartError, system_words

# Short: a slice of 0.1 cores that has used up its share stands still for 18 ms, not for 90 of the usual 100 ms.
PERIOD_US: Final = 20_000
LEAF: Final = "agent"
CONTROLLERS: Final = ("cpu", "cpuset")
COUNTER: Final = "cpuacct"  # of v1, where v2 counts in every group
DELEGATE: Final = "run the agent as root, or let systemd delegate: Delegate=cpu cpuset and DelegateSubgroup=agent"
# Where the kernel says which trees there are, and where in them this process is.
MOUNTS: Final = Path("/proc/self/mountinfo")
OWN: Final = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Cgroups:
    """Control groups that can be made: `parents` maps `cpu` and `cpuset` to a folder, as far as they can be had."""

    version: int  # 1, 2, or 0 = none found
    parents: dict[str, Path]
    missing: dict[str, str]  # controller -> why and remedy

    def create(self, tag: str, cores: Sequence[int] | None, quota: float | None) -> tuple[Path, ...]:
        """Create the groups of one slice; idempotent. Empty where a slice needs none, or pinning has to do without.

        Raises:
            StartError: a quota cannot be had here, or the kernel refuses.
        """
        values: dict[str, dict[str, str]] = {}  # controller -> file -> content
        if quota is not None:
            if "cpu" not in self.parents:
                why, _, remedy = self.missing["cpu"].partition(". Remedy: ")
                raise StartError(why, field="cpu_quota", value=quota, remedy=remedy)
            values["cpu"] = _quota(self.version, quota)
        if cores is not None and "cpuset" in self.parents:
            values["cpuset"] = {"cpuset.cpus": ",".join(map(str, cores))}
        if COUNTER in self.parents and not (quota is None and cores is None):
            values[COUNTER] = {}
        made: list[Path] = []
        for controller, files in values.items():
            folder = self.parents[controller] / tag
            made.append(folder)
            try:
                _make(self.version, controller, folder.parent)
                _make(self.version, controller, folder, slice_of_it=True)
                for name, content in files.items():
                    _write(folder / name, content)
            except OSError as error:
                remove_groups(made)
                remedy = "see that cores and quota are within those of the agent's own group"
                raise StartError(f"{folder} refused {files}: {system_words(error)}", remedy=remedy) from error
        return tuple(made)

    def of_process(self, pid: int) -> tuple[Path, ...]:
        """Groups of these in which a process is."""
        found = (folder for parent in self.parents.values() if parent.is_dir() for folder in sorted(parent.iterdir()))
        return tuple(folder for folder in found if folder.is_dir() and pid in member_pids([folder]))

    def remove_unknown(self, known: Collection[Path]) -> None:
        """Remove groups that an agent made and was killed before it wrote that down; such a group is empty."""
        for parent in self.parents.values():
            if parent.is_dir():
                remove_groups([folder for folder in parent.iterdir() if folder.is_dir() and folder not in known])


def used_cpu_s(folders: Sequence[Path]) -> float | None:
    """CPU seconds that all processes of a slice have used, by the kernel's counter; None where no group counts them."""
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):
            return int((folder / "cpuacct.usage").read_text()) / 1e9
        with contextlib.suppress(FileNotFoundError):
            found = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
            if "usage_usec" in found:  # v1 has a file of that name that counts periods alone
                return int(found["usage_usec"]) / 1e6
    return None


def member_pids(folders: Sequence[Path]) -> frozenset[int]:
    """Pids of the processes in these groups."""
    found: set[int] = set()
    for folder in folders:
        with contextlib.suppress(OSError):
            found.update(int(line) for line in (folder / "cgroup.procs").read_text().split())
    return frozenset(found)


def remove_groups(folders: Sequence[Path]) -> bool:
    """Remove empty groups, and with the last one what held them.

    False when one is left because the kernel still counts a process in it.
    """
    for folder in folders:
        for group in (folder, folder.parent):
            with contextlib.suppress(OSError):
                group.rmdir()
    return not any(folder.is_dir() for folder in folders)


def find_cgroups(name: str, parent: Path | None = None, mounts: Path = MOUNTS, own: Path = OWN) -> Cgroups:
    """Find where this process may make groups. Those of slices will be in `trefoil-<name>`.

    `parent`: a folder of cgroup v2 to use instead of the agent's own.
    """
    trees = _trees(mounts, own)
    unified = parent or trees.get("")
    if unified is not None and (parent is not None or "cpu" in _words(unified / "cgroup.controllers")):
        return _find_v2(name, unified, given=parent is not None)
    if any(controller in trees for controller in CONTROLLERS):
        return _find_v1(name, trees)
    why = f"no cgroup tree is mounted. Remedy: {DELEGATE}"
    return Cgroups(0, {}, dict.fromkeys(CONTROLLERS, why))


def _find_v1(name: str, trees: dict[str, Path]) -> Cgroups:
    parents: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for controller in CONTROLLERS:
        if controller not in trees:
            missing[controller] = f"no cgroup tree with {controller} is mounted. Remedy: {DELEGATE}"
            continue
        folder = trees[controller] / f"trefoil-{name}"
        try:
            _make(1, controller, folder)
        except OSError as error:
            missing[controller] = f"cannot make {folder}: {system_words(error)}. Remedy: {DELEGATE}"
        else:
            parents[controller] = folder
            remove_groups([folder / "none"])
    if COUNTER in trees and trees[COUNTER] != trees.get("cpu"):  # where both are one tree, its groups are those of cpu
        folder = trees[COUNTER] / f"trefoil-{name}"
        with contextlib.suppress(OSError):  # nothing is missing without it: Triton counts too
            _make(1, COUNTER, folder)
            parents[COUNTER] = folder
            remove_groups([folder / "none"])
    return Cgroups(1, parents, missing)


def _find_v2(name: str, unified: Path, *, given: bool) -> Cgroups:
    base = unified.parent if unified.name == LEAF and not given else unified
    folder = base / f"trefoil-{name}"
    parents: dict[str, Path] = {}
    missing: dict[str, str] = {}
    for controller in CONTROLLERS:
        try:
            if given and controller not in _words(base / "cgroup.controllers"):
                _make(2, controller, base.parent)  # as below the root, where systemd hands down what a unit wants
            if (base / "cgroup.type").exists() and _words(base / "cgroup.procs"):  # the root has no type, and may
                # The kernel would hand `cpu` down all the same, and then refuse every process in a slice's group.
                raise OSError(errno.EBUSY, "it holds processes itself")
            _make(2, controller, base)
            _make(2, controller, folder)
        except OSError as error:
            missing[controller] = (
                f"{base} does not hand down {controller}: {system_words(error)}. "
                f"Remedy: {DELEGATE}; or set cgroup_parent to a folder for the agent alone"
            )
        else:
            parents[controller] = folder
    remove_groups([folder / "none"])
    return Cgroups(2, parents, missing)


def _make(version: int, controller: str, folder: Path, *, slice_of_it: bool = False) -> None:
    """Make a group, and let it hand the controller down unless it is a slice's. Raises OSError."""
    folder.mkdir(exist_ok=True)
    if version == 2 and not slice_of_it and controller not in _words(folder / "cgroup.subtree_control"):
        _write(folder / "cgroup.subtree_control", f"+{controller}")
    if version == 1 and controller == "cpuset":  # a new group has neither, and takes no process before it has both
        for file in ("cpuset.cpus", "cpuset.mems"):
            if not (folder / file).read_text().strip():
                _write(folder / file, (folder.parent / file).read_text().strip())


def _quota(version: int, cores: float) -> dict[str, str]:
    used_us = round(cores * PERIOD_US)
    if version == 2:
        return {"cpu.max": f"{used_us} {PERIOD_US}"}
    return {"cpu.cfs_period_us": str(PERIOD_US), "cpu.cfs_quota_us": str(used_us)}


def _trees(mounts: Path, own: Path) -> dict[str, Path]:
    """This process's folder in each tree, by controller; v2 under the empty name."""
    places = {}
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        places.update(dict.fromkeys(controllers.split(","), path))
    found: dict[str, Path] = {}
    for line in mounts.read_text().splitlines():
        head, _, tail = line.partition(" - ")
        root, mount_point = head.split()[3:5]
        kind, _, options = tail.split(" ", 2)
        names = {"cgroup2": ("",), "cgroup": tuple(options.split(","))}.get(kind, ())
        for name in names:
            if name in places and places[name].startswith(root):
                found.setdefault(name, Path(mount_point) / places[name].removeprefix(root).lstrip("/"))
    return found


def _words(path: Path) -> frozenset[str]:
    try:
        return frozenset(path.read_text().split())
    except OSError:
        return frozenset()


def _write(path: Path, content: str) -> None:
    path.write_text(content)  # one write call: the kernel takes a value whole or not at all

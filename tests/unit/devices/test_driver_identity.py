"""Which load of the driver this is, and that one agent governs it, by the files that containers and reloads show."""

import os
from pathlib import Path

import pytest

from power_agent.devices.driver_lock import DriverLock, loaded_library
from power_agent.devices.gpus import driver_load_id
from power_agent.settings import PowerAgentSettings
from trefoil.core.errors import StartError


def load_module(folder: Path, srcversion: str = "533BB7E5866E52F63B9ACCB") -> Path:
    """What sysfs shows of a module that was just loaded; one of before keeps its inode, as kernfs reuses none."""
    module = folder / "nvidia"
    if module.exists():
        module.rename(folder / f"unloaded{len(list(folder.iterdir()))}")
    module.mkdir(parents=True)
    (module / "srcversion").write_text(srcversion + "\n")
    return module


def test_a_driver_is_known_by_its_module_and_not_by_a_device_node() -> None:
    assert PowerAgentSettings().driver_marker == Path("/sys/module/nvidia")


def test_a_load_keeps_its_identity_in_another_container_and_at_another_time(tmp_path: Path) -> None:
    module = load_module(tmp_path)
    loaded = driver_load_id(module)
    os.utime(module, ns=(1, 1))  # sysfs makes an inode's times up when it is looked at, in each mount again
    module.chmod(0o700)
    (tmp_path / "container").symlink_to(tmp_path)
    assert driver_load_id(tmp_path / "container" / "nvidia") == loaded


def test_a_reload_and_an_upgrade_are_told_apart_and_no_module_is_no_driver(tmp_path: Path) -> None:
    assert driver_load_id(tmp_path / "nvidia") == ""
    loads = [driver_load_id(load_module(tmp_path)), driver_load_id(load_module(tmp_path))]
    loads.append(driver_load_id(load_module(tmp_path, "0123456789ABCDEF0123456")))
    assert len(set(loads)) == 3
    (tmp_path / "nvidia" / "srcversion").unlink()  # a kernel that does not show it
    assert driver_load_id(tmp_path / "nvidia") not in ("", *loads)


def test_agents_in_two_containers_shut_each_other_out_by_the_library_that_both_have_mounted(tmp_path: Path) -> None:
    hosts = tmp_path / "libnvidia-ml.so.535.161.08"
    hosts.touch()
    locks, libraries = [], []
    for container in ("one", "two"):
        module = load_module(tmp_path / container)  # namespaces of the network have separate inodes
        libraries.append(tmp_path / container / hosts.name)
        os.link(hosts, libraries[-1])  # as a bind mount: another path, the same file
        locks.append(DriverLock(module))
    locks[0].take(libraries[0])
    locks[0].take(libraries[0])
    with pytest.raises(StartError, match=r"driver_marker = .*another power agent governs these GPUs"):
        locks[1].take(libraries[1])
    locks[0].release()
    locks[1].take(libraries[1])
    locks[1].release()


def test_a_driver_that_was_loaded_again_is_locked_again(tmp_path: Path) -> None:
    lock = DriverLock(load_module(tmp_path))
    lock.take(None)
    load_module(tmp_path)
    DriverLock(tmp_path / "nvidia").take(None)  # nobody holds the new one yet
    with pytest.raises(StartError):
        lock.take(None)


def test_the_library_in_use_is_found_among_what_is_mapped(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f10-7f20 r-xp 00000000 08:01 131 /usr/lib/libc.so.6\n7f30-7f40 rw-p 00000000 00:00 0\n"
        "7f50-7f60 r--p 00000000 08:01 977 /usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.161.08\n"
    )
    assert loaded_library(maps) == Path("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.535.161.08")
    assert loaded_library() is None

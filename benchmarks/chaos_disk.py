"""Troubles of disks and of model files: full, read-only, cut short, replaced, removed, under a running system.

The services' state folders lie on small separate disks (`small_disks`, needs root), so that filling one leaves the
machine, Redis and the other services alone. A read-only disk is one for whatever is opened from then on: what a process
holds open continues to be written, as only a failing disk can take that away.
"""

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.chaos_rows import Trouble
from benchmarks.echo_family import FAMILY
from benchmarks.echo_system import EchoSystem
from protos.controller.v1 import controller_pb2
from trefoil.cli.system_client import is_serving
from trefoil.core import errors

FOLDERS: Final = ("controller", "agent", "dispatcher", "carbon_feed", "logs")
STARTED: Final = {"controller": "controller", "agent": "power_agent", "carbon_feed": "carbon_feed"}
DISK_MIB: Final = 32
BALLAST: Final = "ballast"
KIB: Final = 1024
SAID_S: Final = 10.0  # within which a service says that it cannot load a variant
STARTS_S: Final = 30.0


@contextmanager
def small_disks(folder: Path) -> Iterator[None]:
    """Small disks under the state folders of a system that is about to run in `folder`."""
    with ExitStack() as mounted:
        for name in FOLDERS:
            path = folder / "cluster" / name
            path.mkdir(parents=True, exist_ok=True)
            _run("mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(path))
            mounted.callback(_run, "umount", "--lazy", str(path))
        yield


def troubles() -> tuple[Trouble, ...]:
    """Troubles of disks and model files, for a system on `small_disks`."""
    full = [Trouble(f"disk full under {name}", partial(_disk, (name,), _filled)) for name in FOLDERS]
    read_only = [Trouble(f"disk read-only under {name}", partial(_disk, (name,), _read_only)) for name in FOLDERS[:-1]]
    every = Trouble("disk full under all of them", partial(_disk, FOLDERS, _filled))
    starts = [
        Trouble(f"{service} starts on a full disk", partial(_starts, name, service), ended=frozenset({service}))
        for name, service in STARTED.items()
    ]
    changes = (("version folder removed", _removed), ("ONNX file cut short", _cut), ("ONNX file replaced", _replaced))
    return (*full, every, *starts, *read_only, *(Trouble(what, partial(_model, how)) for what, how in changes))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


# --- disks ------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _disk(
    names: Sequence[str], trouble: Callable[[Path], Iterator[None]], system: EchoSystem
) -> AsyncIterator[None]:
    paths = [system.launcher.paths.state_dir / name for name in names]
    assert all(path.is_mount() for path in paths), "run the system on small_disks"
    with ExitStack() as lasting:
        for path in paths:
            lasting.enter_context(contextmanager(trouble)(path))
        if "controller" in names:
            await _refuses_what_it_cannot_keep(system)
        yield


@asynccontextmanager
async def _starts(name: str, service: str, system: EchoSystem) -> AsyncIterator[None]:
    """A service is killed while its disk is full, and serves again before there is room."""
    async with _disk((name,), _filled, system):
        os.kill(system.launcher.pid(service), signal.SIGKILL)
        await system.clock.sleep(1.0)
        async with asyncio.timeout(STARTS_S):
            while not await is_serving(system.launch.addresses[service]):
                await system.clock.sleep(0.1)
        yield


def _filled(path: Path) -> Iterator[None]:
    ballast = path / BALLAST
    with ballast.open("wb", buffering=0) as file:
        for size in (KIB * KIB, KIB, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    try:
        yield
    finally:
        ballast.unlink()


def _read_only(path: Path) -> Iterator[None]:
    _run("mount", "--bind", str(path), str(path))
    try:
        _run("mount", "-o", "remount,bind,ro", str(path))
        yield
    finally:
        _run("umount", "--lazy", str(path))


async def _refuses_what_it_cannot_keep(system: EchoSystem) -> None:
    """An operator's change is refused with the reason, and not half made; `trefoil status` says why."""
    before = await system.client.plan()
    why = ""
    try:
        await system.client.call("Freeze", controller_pb2.FreezeRequest(frozen=not before.frozen))
    except errors.Unavailable as refused:
        why = str(refused)
    assert "cannot be written" in why, f"a change that cannot be kept was answered with {why or 'OK'}"
    after = await system.client.plan()
    assert (after.frozen, after.plan) == (before.frozen, before.plan)
    assert after.disk_trouble


# --- model files ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _model(change: Callable[[Path], None], system: EchoSystem) -> AsyncIterator[None]:
    """A variant that serves loses its file; plans go round it until it is put back."""
    pinned = (await system.client.plan()).plan
    serving = await system.serving()
    version = min(part.hosted[0].version for part in serving.values())
    folder = system.repository / FAMILY / str(version)
    kept = folder.with_name(f".{version}.kept")
    shutil.copytree(folder, kept)
    try:
        change(folder)
        async with asyncio.timeout(SAID_S):
            while not any(str(folder) in why for node in await system.client.nodes() for why in node.missing):
                await system.clock.sleep(0.1)
        await system.client.call("Pin", controller_pb2.PinRequest())
        async with asyncio.timeout(60.0):
            while version in _planned_versions((await system.client.plan()).plan):
                await system.clock.sleep(0.1)
        yield
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(kept, folder)
    await system.client.call("Pin", controller_pb2.PinRequest(plan=pinned))
    await system.rolled_out(60.0)


def _planned_versions(plan: object) -> set[int]:
    hosts = (part.hosted for node in plan.nodes for device in node.devices for part in device.slices)  # type: ignore[attr-defined]
    return {one.version for hosted in hosts for one in hosted}


def _removed(folder: Path) -> None:
    shutil.rmtree(folder)


def _cut(folder: Path) -> None:
    file = folder / "model.onnx"
    os.truncate(file, file.stat().st_size // 2)


def _replaced(folder: Path) -> None:
    other = next(path for path in sorted(folder.parent.glob("[0-9]*")) if path != folder)
    shutil.copyfile(other / "model.onnx", folder / "model.onnx")

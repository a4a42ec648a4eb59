"""Variants of a family, each loaded by a Triton of this machine and asked once, as a slice's Triton is."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from power_agent.slices.core.patience import load_timeout_s
from power_agent.triton.client import TritonClient, TritonUnready
from power_agent.triton.installation import TritonInstall
from power_agent.triton.log_errors import read_first_error
from power_agent.triton.slice_launch import SliceLaunch, SliceSpec, clean_shared_memory, prepare_slice, refuse_missing
from trefoil.core.catalog import Catalog, Family, Variant
from trefoil.core.errors import CatalogError, TrefoilError
from trefoil.core.fleet import Hosted
from trefoil.runtime.clock import WallClock
from trefoil.runtime.model_files import GPU_ONLY, backend_of, contract

READY_S: Final = 60.0  # a variant whose load_s in family.toml is longer gets more
POLL_S: Final = 0.1


def unanswered(
    install: TritonInstall, root: Path, family: Family, variants: Sequence[Variant], say: Callable[[str], None]
) -> dict[int, str]:
    """Variants that a Triton does not load or that do not answer, by version, each with its first error. What loads on
    its own type of GPU alone is not asked: the Triton has its backend, or lacks it."""
    found = {}
    config = contract(root, family.name)
    try:
        refuse_missing(install, config)
    except CatalogError as error:
        return {variant.version: f"version {variant.version} ({variant.name}): {error}" for variant in variants}
    if backend_of(config) in GPU_ONLY:
        return {}
    for variant in variants:
        say(f"{family.name}: Triton loads {variant.name} and is asked once")
        hosted = Hosted(family.name, variant.name, variant.version, 0, 1, 1, 1)
        timeout_s = load_timeout_s((hosted,), Catalog((family,), ()), READY_S)
        if why := _ask(install, root, hosted, timeout_s):
            found[variant.version] = f"version {variant.version} ({variant.name}) does not answer on Triton: {why}"
    return found


def _ask(install: TritonInstall, root: Path, hosted: Hosted, timeout_s: float) -> str:
    """Why a variant does not answer within a time; "" when it does."""
    with tempfile.TemporaryDirectory(prefix="trefoil-check-") as made:
        folder, log = Path(made), Path(made) / "triton.log"
        name = f"check-{os.getpid()}"
        spec = SliceSpec(name, folder / "slice", root.absolute(), [hosted], *_free_ports(), "", exit_timeout_s=1)
        try:
            launch = prepare_slice(install, spec)
            with _running(launch, log) as process:
                asyncio.run(_answered(launch, process, hosted, timeout_s))
        except TrefoilError as error:
            return read_first_error(log, 0) or str(error)
    return ""


async def _answered(launch: SliceLaunch, process: "subprocess.Popen[bytes]", hosted: Hosted, timeout_s: float) -> None:
    """Wait for one answer.

    Raises:
        TritonUnready: it has ended, or does not answer in time.
    """
    client = TritonClient(launch.grpc_target, launch.metrics_url, launch.repository, WallClock())
    ready = asyncio.ensure_future(client.wait_ready((hosted,), timeout_s))
    try:
        while not (await asyncio.wait((ready,), timeout=POLL_S))[0]:
            if process.poll() is not None:
                raise TritonUnready(f"Triton exited with {process.returncode}")
        await ready
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)
        await client.close()


@contextmanager
def _running(launch: SliceLaunch, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    """A Triton, killed with all that it started at the end of the block."""
    with log.open("wb") as written:
        process = subprocess.Popen(
            launch.argv, env=dict(launch.env), cwd=launch.cwd, stdin=subprocess.DEVNULL, stdout=written,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        clean_shared_memory(launch.shm_prefix)


def _free_ports() -> tuple[int, int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        first, second = (int(each.getsockname()[1]) for each in sockets)
    return first, second

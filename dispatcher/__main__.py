"""python -m dispatcher --config <toml>: routes requests to slices."""

import ctypes
import importlib
import sys
from collections.abc import Sequence
from typing import Final

import uvloop

from dispatcher.settings import DispatcherSettings
from dispatcher.workers.supervisor import SETTINGS_REFUSED, supervise
from trefoil.core.errors import StartError, TrefoilError
from trefoil.runtime import config
from trefoil.runtime.clock import WallClock
from trefoil.runtime.service import main
from trefoil.runtime.telemetry import setup_logging

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
KEPT_BYTES: Final = 64 << 20
KEPT_BLOCK_BYTES: Final = 32 << 20  # the largest that glibc takes
NGH2: Final = "ngh2==0.3.0"  # as in requirements/services.in


def entry(argv: Sequence[str]) -> int:
    """Run `python -m dispatcher`: one dispatcher, one of its workers, or the supervisor of several; returns the exit
    code."""
    try:
        settings = config.parser_main(DispatcherSettings, "dispatcher", argv)
        check_libnghttp2()
    except TrefoilError as error:
        print(f"error: {error}", file=sys.stderr)
        return SETTINGS_REFUSED
    if settings.workers == 1 or settings.dispatcher:
        from dispatcher.worker import build  # it needs libnghttp2

        keep_freed_memory()
        return main(build, argv, uvloop.new_event_loop)
    setup_logging("dispatcher", settings.log_level, settings.log_json)
    return supervise(settings, argv, WallClock())


def check_libnghttp2() -> None:
    """Check that libnghttp2, which serves gRPC, can be loaded.

    Raises:
        StartError: it cannot.
    """
    try:
        importlib.import_module("dispatcher.transport.h2")
    except (ImportError, AttributeError) as error:  # missing, built for another machine, or of another version
        remedy = f"pip install {NGH2}; it has wheels for Linux (x86-64, aarch64), macOS (arm64) and Python 3.11 to 3.13"
        raise StartError(f"libnghttp2 cannot be loaded: {error}", remedy=remedy) from error


def keep_freed_memory() -> None:
    """Let glibc keep up to KEPT_BYTES of what large messages free: else the kernel gives and clears every page again, a
    thousand times for one of 4.8 MB."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # other C libraries have none
        mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


if __name__ == "__main__":
    raise SystemExit(entry(sys.argv[1:]))

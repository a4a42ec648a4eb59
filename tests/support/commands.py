"""Every command and group of the `trefoil` program; one as a process."""

import asyncio
import sys
from collections.abc import Iterator
from typing import Any

import typer

from trefoil.cli.main import app


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command and group, imported, by its words; the program itself is ""."""
    group = group or typer.main.get_command(app)
    yield path, group
    for name in getattr(group, "commands", ()):
        _, command, _ = group.resolve_command(typer.Context(group), [name])
        yield from commands(command, f"{path} {name}".strip())


async def trefoil(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trefoil.cli.main", *arguments, stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()

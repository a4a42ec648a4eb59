"""Every command and group of the `trefoil` program."""

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

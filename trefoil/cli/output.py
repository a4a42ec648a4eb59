"""How commands speak: JSON for programs, tables for people, one line for errors."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from trefoil.core.errors import SettingError, TrefoilError

EXIT_ERROR = 2

StateDir = Annotated[
    str, typer.Option("--state-dir", help="Where the running system keeps its things.", show_default=True)
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


class Guarded(TyperGroup):
    """Operating errors are one line on stderr and exit code 2; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TrefoilError as error:
            typer.echo(f"trefoil: {error}", err=True)
            raise typer.Exit(EXIT_ERROR) from error


def console() -> Console:
    """Standard output; wide enough for tables when it is no terminal."""
    out = Console(highlight=False, soft_wrap=False)
    return out if out.is_terminal else Console(highlight=False, width=160)


def print_json(value: Any) -> None:
    """One document, stable order."""
    typer.echo(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False))


def grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A plain table of text."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def writing(path: Path, option: str) -> Iterator[Path]:
    """Make the folder of a file that is about to be written.

    Raises:
        SettingError: it cannot be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield path
    except OSError as error:
        remedy = "name a file in a folder that you may write to"
        raise SettingError(
            f"cannot be written ({error.strerror or error})", field=option, value=str(path), remedy=remedy
        ) from error

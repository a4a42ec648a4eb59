"""Groups of commands whose operating errors are one line."""

from typing import Any, Final

import typer
from typer.core import TyperGroup

from trefoil.core.errors import TrefoilError, in_one_line

EXIT_ERROR: Final = 2
COMMAND_PACKAGES: Final = ("matplotlib", "plotext", "textual")
"""Packages of requirements/main.in that are not in services.in."""


class Guarded(TyperGroup):
    """Commands whose operating errors are one line on stderr and exit code 2; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        from trefoil.runtime.config import register_own_device_types

        try:
            with in_one_line():
                register_own_device_types()
                return super().invoke(ctx)
        except TrefoilError as error:
            typer.echo(f"trefoil: {error}", err=True)
            raise typer.Exit(EXIT_ERROR) from error
        except ModuleNotFoundError as error:
            if (missing := (error.name or "").partition(".")[0]) not in COMMAND_PACKAGES:
                raise
            typer.echo(
                f"trefoil: {missing} is not installed: the services' image holds neither charts nor live view. "
                "Remedy: give this command where Trefoil is installed by pip, with --controller", err=True,
            )  # fmt: skip
            raise typer.Exit(EXIT_ERROR) from error

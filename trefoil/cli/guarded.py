"""Groups of commands whose operating errors are one line."""

from typing import Any, Final

import typer
from typer.core import TyperGroup

from trefoil.core.errors import TrefoilError, in_one_line

EXIT_ERROR: Final = 2
SENTENCE_MAX: Final = 1000
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

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands with their first sentence, wrapped; the overridden method would cut it to a line."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(SENTENCE_MAX)) for name, one in found if one and not one.hidden]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

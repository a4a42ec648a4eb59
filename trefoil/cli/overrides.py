"""`--set KEY=VALUE`: one setting of a file, overridden on the command line."""

from typing import Annotated, Any

import typer

from trefoil.core.errors import SettingError

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. carbon.step_s=60.")
]


def given(sets: list[str] | None) -> dict[str, Any]:
    """The settings as dotted overrides.

    Raises:
        SettingError: one without `=` or without a name.
    """
    overrides: dict[str, Any] = {}
    for assignment in sets or []:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise SettingError("no '=' in it", field="--set", value=assignment, remedy="write --set key=value")
        overrides[key] = value
    return overrides

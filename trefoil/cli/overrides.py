"""`--set KEY=VALUE`: one setting of a file, overridden on the command line."""

from typing import Annotated, Any

import typer

from trefoil.core.errors import SettingError

Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. carbon.step_s=60.")
]


Planner = Annotated[str, typer.Option("--planner", help="Planner instead of the policy's: a name, or module:Class.")]
Forecaster = Annotated[
    str, typer.Option("--forecaster", help="Forecaster instead of the policy's: a name, or module:Class.")
]
Router = Annotated[
    str, typer.Option("--router", help="Router instead of the policy's: a name, or module:Class of your own.")
]
Queue = Annotated[str, typer.Option("--queue", help="Queue instead of the policy's: a name, or module:Class.")]
Governor = Annotated[str, typer.Option("--governor", help="Governor instead of the policy's: a name, or module:Class.")]


def chosen(**named: str) -> dict[str, str]:
    """Settings that were given a value, by name."""
    return {name: value for name, value in named.items() if value}


def given(sets: list[str] | None) -> dict[str, Any]:
    """The settings as dotted overrides.

    Raises:
        SettingError: one without `=` or without a name.
    """
    return dict(pairs("--set", sets))


def pairs(flag: str, given_: list[str] | None) -> dict[str, str]:
    """What a flag that takes KEY=VALUE was given, by key.

    Raises:
        SettingError: one without `=` or without a name.
    """
    found: dict[str, str] = {}
    for assignment in given_ or []:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise SettingError("no '=' in it", field=flag, value=assignment, remedy=f"write {flag} key=value")
        found[key] = value
    return found


def number(flag: str, name: str, text: str) -> float:
    """A value that is to be a number.

    Raises:
        SettingError: it is none.
    """
    try:
        return float(text)
    except ValueError as error:
        remedy = f"write {flag} {name}=0.05"
        raise SettingError("is not a number", field=f"{flag} {name}", value=text, remedy=remedy) from error

"""Options that several commands take: `--set KEY=VALUE`, the parts of a policy, a plan in a file."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from trefoil.core.errors import InvalidInput, NotFound, SettingError
from trefoil.core.plan import Plan
from trefoil.runtime import codec

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


def non_empty(**named: str) -> dict[str, str]:
    """Options that were given a value, by name."""
    return {name: value for name, value in named.items() if value}


def parse_sets(sets: list[str] | None) -> dict[str, Any]:
    """Overrides of settings, by dotted key, from `--set KEY=VALUE`.

    Raises:
        SettingError: one without `=` or without a name.
    """
    return dict(parse_pairs("--set", sets))


def parse_pairs(flag: str, assignments: list[str] | None) -> dict[str, str]:
    """Values of a repeated flag that takes KEY=VALUE, by key.

    Raises:
        SettingError: one without `=` or without a name.
    """
    found: dict[str, str] = {}
    for assignment in assignments or []:
        key, equals, value = assignment.partition("=")
        if not equals or not key:
            raise SettingError("no '=' in it", field=flag, value=assignment, remedy=f"write {flag} key=value")
        found[key] = value
    return found


def parse_number(flag: str, name: str, text: str) -> float:
    """The number in the value of `flag name=value`.

    Raises:
        SettingError: it is none.
    """
    try:
        return float(text)
    except ValueError as error:
        remedy = f"write {flag} {name}=0.05"
        raise SettingError("is not a number", field=f"{flag} {name}", value=text, remedy=remedy) from error


def read_plan(path: Path) -> Plan:
    """Read a plan as `trefoil plan --json` prints it (the whole answer, or its `plan`).

    Raises:
        NotFound, InvalidInput: naming what is wrong with the file.
    """
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise NotFound(
            "no such file", field="FILE", value=str(path), remedy="trefoil plan --json > plan.json"
        ) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"not JSON ({error})", field="FILE", value=str(path), remedy="trefoil plan --json > plan.json"
        ) from error
    if isinstance(values, dict) and isinstance(values.get("plan"), dict):
        values = values["plan"]
    plan: Plan = codec.from_json(Plan, json.dumps(values))
    return plan

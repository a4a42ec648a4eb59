"""`trefoil policy`: the policies, and what can be set of one: each part's settings with value, type and meaning."""

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from trefoil.cli.output import AsJson, respond
from trefoil.core.errors import SettingError


def policy(
    name: Annotated[str, typer.Argument(help="A policy, or one's own as module:ROW; none: all of them.")] = "",
    preset: Annotated[str, typer.Option(help="Settings that go over the policy's own, by name.")] = "",
    as_json: AsJson = False,
) -> None:
    """Show the policies, or what can be set of one: settings of its parts, with value, type and meaning."""
    from trefoil.core.policies import POLICIES

    if not name:
        if preset:
            raise SettingError("given without a policy", field="--preset", value=preset, remedy="name a policy too")
        found = [{"name": row.name, **_parts(row)} for row in POLICIES.values()]
        respond(as_json, found, _table(found))
        return
    about, rows = _settings(name, preset)
    table = _table([{**row, "value": row["text"]} for row in rows], ("key", "value", "type", "meaning"))
    respond(as_json, {**about, "settings": rows}, "  ".join(f"{key}: {value}" for key, value in about.items()), table)


def _settings(name: str, preset: str) -> tuple[dict[str, str], list[dict[str, Any]]]:
    """Parts of a policy, by kind, and a row for each of their settings."""
    from controller.planners.policy_parts import with_preset
    from trefoil.cli.settings_page import meaning, type_text, value_text
    from trefoil.core.parts import Kind
    from trefoil.core.policies import policy as policy_row
    from trefoil.simulator.scenario.policy_check import check_policy

    row = with_preset(policy_row(name), preset)
    found = check_policy(row, simulated=True)
    rows = []
    for kind in Kind:
        settings = found[kind].settings_of(row.settings.get(kind, {}))
        for setting, field in type(settings).model_fields.items():
            value = getattr(settings, setting)
            of = {"default": field.get_default(), "type": type_text(field), "meaning": meaning(type(settings), setting)}
            rows.append({"key": f"parts.{kind}.{setting}", "value": value, "text": value_text(value), **of})
    return {"name": row.name, **_parts(row)}, rows


def _parts(row: Any) -> dict[str, str]:
    from trefoil.core.parts import Kind

    return {**{kind.value: row.part(kind) for kind in Kind}, "triggers": ", ".join(row.triggers)}


def _table(rows: list[dict[str, Any]], columns: tuple[str, ...] = ()) -> Table:
    table = Table(*(columns or rows[0]), box=None)
    for row in rows:
        table.add_row(*(escape(str(row[name])) for name in columns or row))
    return table

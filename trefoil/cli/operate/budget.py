"""`trefoil budget`: grams or joules that a tenant, a family or both may spend in a day."""

from typing import Annotated, Any, Final

import typer
from rich.table import Table

from protos.controller.v1 import controller_pb2
from trefoil.cli.guarded import Guarded
from trefoil.cli.options import HERE, SystemAddress, of_system
from trefoil.cli.output import AsJson, grid, respond
from trefoil.cli.system_client import call_system
from trefoil.core.errors import NotFound, SettingError, one_of
from trefoil.core.objective import Budget, whose_budget
from trefoil.core.units import format_time
from trefoil.overview.budgets import budget_rows
from trefoil.runtime import codec

app = typer.Typer(
    cls=Guarded, no_args_is_help=True, help="Grams or joules that a tenant, a family or both may spend in a day."
)
Tenant = Annotated[
    str, typer.Option("--tenant", help="Tenant of the dispatchers' tenants file; default: all together.")
]
Family = Annotated[str, typer.Option("--family", help="Family; default: all together.")]
COLUMNS: Final = ("tenant", "family", "grams a day", "joules a day", "used", "rung", "least accuracy", "next day")


@app.command("set")
@of_system
def budget_set(
    tenant: Tenant = "",
    family: Family = "",
    grams_per_day: Annotated[float | None, typer.Option(help="Grams of CO2 a day, as reports book them.")] = None,
    joules_per_day: Annotated[float | None, typer.Option(help="Joules of devices a day.")] = None,
    least_accuracy: Annotated[
        float | None,
        typer.Option(help="What accuracy floors of its requests may fall to, a fraction of 1; default: they stay."),
    ] = None,
    time_zone: Annotated[str, typer.Option(help="Zone whose midnight begins a day, e.g. Europe/London.")] = "UTC",
    reset: Annotated[bool, typer.Option("--reset", help="Back to what the controller's settings say of it.")] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Set a budget, until --reset; what is not named is without a limit. At 80 % the jobs wait, at 90 % accuracy floors
    fall, at 100 % requests are refused until the next day."""
    given = {"--grams-per-day": grams_per_day, "--joules-per-day": joules_per_day, "--least-accuracy": least_accuracy}
    for option, value in given.items():
        if value is not None and not value > 0:
            raise SettingError("must be above 0", field=option, value=value, remedy="leave it out for none")
    if reset and (time_zone != "UTC" or any(value is not None for value in given.values())):
        raise SettingError("goes back to the settings", field="--reset", remedy="give it with --tenant and --family")
    budget = Budget(tenant, family, grams_per_day or 0.0, joules_per_day or 0.0, least_accuracy or 0.0, time_zone)
    request = controller_pb2.SetBudgetRequest(budget=codec.to_proto(budget), reset=reset)
    answer = call_system(where, lambda system: system.call("SetBudget", request))
    rows = budget_rows([answer.use] if answer.HasField("use") else [])
    unbooked = rows and rows[0]["joules"] == 0
    note = ["nothing is booked to it today: check the names, unless it has sent no request yet"] if unbooked else []
    shown = [_table(rows), *note] if rows else [f"{whose_budget(tenant, family)}: no budget, as in the settings"]
    respond(as_json_, {"budget": rows[0] if rows else None}, *shown)


@app.command("clear")
@of_system
def budget_clear(
    tenant: Tenant = "", family: Family = "", where: SystemAddress = HERE, as_json_: AsJson = False
) -> None:
    """Take a budget away; requests that it refuses are served within seconds."""
    request = controller_pb2.ClearBudgetRequest(tenant=tenant, family=family)
    call_system(where, lambda system: system.call("ClearBudget", request))
    cleared = {"cleared": {"tenant": tenant, "family": family}}
    respond(as_json_, cleared, f"{whose_budget(tenant, family)}: no budget")


@app.command("list")
@of_system
def budget_list(where: SystemAddress = HERE, as_json_: AsJson = False) -> None:
    """List all budgets, with what of each is spent today and its rung."""
    rows = budget_rows(call_system(where, lambda system: system.budgets()).budgets)
    respond(as_json_, {"budgets": rows}, _table(rows) if rows else "no budgets: trefoil budget set")


@app.command("show")
@of_system
def budget_show(
    tenant: Tenant = "", family: Family = "", where: SystemAddress = HERE, as_json_: AsJson = False
) -> None:
    """Show the budgets of a tenant or a family; with both, the one of both."""
    rows = budget_rows(call_system(where, lambda system: system.budgets()).budgets)
    found = [row for row in rows if tenant in ("", row["tenant"]) and family in ("", row["family"])]
    if not found:
        known = [whose_budget(row["tenant"], row["family"]) for row in rows]
        wanted = whose_budget(tenant, family)
        remedy = one_of(known, wanted, none="trefoil budget set")
        raise NotFound("no such budget", field="--tenant, --family", value=wanted, remedy=remedy)
    respond(as_json_, {"budgets": found}, _table(found))


def _table(rows: list[dict[str, Any]]) -> Table:
    cells = [
        (
            row["tenant"] or "(all)",
            row["family"] or "(all)",
            _of_limit(row["grams"], row["grams_per_day"]),
            _of_limit(row["joules"], row["joules_per_day"]),
            "not metered" if row["used"] is None else f"{row['used']:.0%}",
            row["rung"],
            f"{row['least_accuracy']:g}" if row["least_accuracy"] else "-",
            format_time(row["free_at_s"]),
        )
        for row in rows
    ]
    return grid("Budgets", COLUMNS, cells)


def _of_limit(spent: float | None, limit: float) -> str:
    if not limit:
        return "-"
    most, so_far = (f"{n:,.0f}" if n >= 1000 else f"{n:.4g}" for n in (limit, spent or 0.0))
    return most if spent is None else f"{so_far} of {most}"

"""`trefoil report`: joules and grams of a time by family, variant and tenant, how well they are known, and the SCI."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from trefoil.cli.carbon.client import parse_moment
from trefoil.cli.operate.report_document import jobs_document, records, report_document
from trefoil.cli.options import HERE, SystemAddress, of_system
from trefoil.cli.output import AsJson, csv_text, grid, show, writing
from trefoil.cli.system_client import ControllerClient, call_system
from trefoil.core.errors import SettingError
from trefoil.core.units import format_duration
from trefoil.overview.jobs import RULES, saved_text
from trefoil.runtime.clock import WallClock

UNKNOWN: Final = "-"
BAR: Final = 24  # characters of the hour with the most carbon
COST_COLUMNS: Final = ("requests", "kJ", "g", "J/request", "mg/request", "not known because")
TOKEN_COLUMNS: Final = (
    "family", "variant", "tokens", "prompt tokens", "J/token", "mg/token", "in TTFT", "in TPOT"
)  # fmt: skip
UNANSWERED_COLUMNS: Final = ("unanswered", "kJ of these")
"""Requests that were executed without an answer, and their part of the joules."""

Table = tuple[str, Sequence[str], list[tuple[str, ...]]]
"""Title, columns, rows."""


@of_system
def report(
    since: Annotated[
        str, typer.Option(help="90min, 24h, 7d ago, or an ISO 8601 time; the hour that it lies in counts as a whole.")
    ] = "24h",
    until: Annotated[str, typer.Option(help="The same; default: now.")] = "",
    format_: Annotated[
        Literal["text", "html", "csv", "json"], typer.Option("--format", help="What is printed, or written to -o.")
    ] = "text",
    out: Annotated[Path | None, typer.Option("-o", "--out", help="File to write, instead of printing.")] = None,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Report joules and grams by family, variant and tenant, how well they are known, and the SCI of an answer."""
    if as_json_ and format_ not in ("text", "json"):
        raise SettingError("one of the two", field="--format", value=format_, remedy="drop --json")
    now_s = WallClock().now_s()
    span = parse_moment(since, "--since", now_s), parse_moment(until, "--until", now_s)

    async def ask(system: ControllerClient) -> Any:
        return await system.report(*span), await system.fleet()

    told, fleet = call_system(where, ask)
    found = report_document(told) | jobs_document(fleet, now_s)
    kind = "json" if as_json_ else format_
    if kind == "text" and out is None:
        show(*(grid(*table) for table in report_tables(found)))
        return
    text = {"json": _json, "csv": lambda found: csv_text(records(found)), "html": _html, "text": _plain}[kind](found)
    if out is None:
        typer.echo(text, nl=False)
        return
    with writing(out, "-o") as path:
        path.write_text(text, encoding="utf-8")


def report_tables(found: Mapping[str, Any]) -> list[Table]:
    """Tables of a report: costs of each kind, data quality, SCI."""
    title = f"{found['since']} to {found['until']}" + (" (SIMULATED)" if found["simulated"] else "")
    families = [(one["family"], one) for one in found["families"]]
    whole = families if len(families) == 1 else [("all", found["total"]), *families]
    variants = [(one["family"], one["variant"], *_costs(one)) for one in found["variants"]]
    with_tokens = [one for one in (*found["families"], *found["variants"]) if "tokens" in one]
    tenants = [(one["family"], one["tenant"], *_unanswered(one), *_costs(one)) for one in found["tenants"]]
    tokens = [(one["family"], one.get("variant", ""), *_per_token(one)) for one in with_tokens]
    quality = [row for name, one in whole for row in _quality(name, one)]
    terms = [row for name, one in whole for row in _sci(name, one)]
    return [
        (
            title,
            ("family", *UNANSWERED_COLUMNS, *COST_COLUMNS),
            [(name, *_unanswered(one), *_costs(one)) for name, one in whole],
        ),
        ("By variant", ("family", "variant", *COST_COLUMNS), variants),
        ("By tenant, split by what receipts say", ("family", "tenant", *UNANSWERED_COLUMNS, *COST_COLUMNS), tenants),
        *([("By token", TOKEN_COLUMNS, tokens)] if tokens else []),
        ("Data quality", ("family", "what", "how it is known"), quality),
        ("SCI = (E x I + M) / R", ("family", "term", "value", "unit", "source", "not known because"), terms),
        *(_jobs(found["jobs"]) if "jobs" in found else ()),
    ]


def _jobs(jobs: Mapping[str, Any]) -> list[Table]:
    """Tables of the jobs that are planned now: by deadline, and their hours over the carbon forecast."""
    queue: list[tuple[str, ...]] = [
        (
            one["job"], one["complete_by"], f"{one['items_left']:,}", one["reason"], _number(one["grams"]),
            *(_number(one[name]) for name in RULES),
        )
        for one in jobs["queue"]
    ]  # fmt: skip
    most = max(one["p50_g_per_kwh"] for one in jobs["hours"]) if jobs["hours"] else 0.0
    hours: list[tuple[str, ...]] = [
        (
            one["starts_at"], f"{one['items']:,.0f}", _number(one["grams"]), f"{one['p50_g_per_kwh']:.0f}",
            ("#" if one["items"] else ".") * round(BAR * one["p50_g_per_kwh"] / (most or 1.0)),
        )
        for one in jobs["hours"]
    ]  # fmt: skip
    saves = saved_text(jobs["grams"], jobs)
    columns = ("job", "complete by", "items left", "prospect", "g planned", "g at once", "g evenly")
    hour_columns = ("from", "items", "g", "g/kWh", "carbon; # = items run")
    return [(f"Jobs planned now; the plan {saves}", columns, queue), ("Planned hours of jobs", hour_columns, hours)]


def _unanswered(one: Mapping[str, Any]) -> tuple[str, ...]:
    return f"{one.get('unanswered', 0):,}", _number(one.get("unanswered_joules"), 1e-3)


def _costs(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{one['requests']:,}",
        _number(one["joules"], 1e-3),
        _number(one["grams"]),
        _number(one.get("joules_per_request")),
        _number(one.get("grams_per_request"), 1e3),
        one["unknown"] or "",
    )


def _per_token(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        f"{one['tokens']:,}",
        UNKNOWN if one["prompt_tokens"] is None else f"{one['prompt_tokens']:,}",
        _number(one["joules_per_token"]),
        _number(one["grams_per_token"], 1e3),
        *(UNKNOWN if one[name] is None else f"{one[name]:.2%}" for name in ("ttft_attainment", "tpot_attainment")),
    )


def _quality(family: str, one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    known = one["quality"]
    age = known["carbon_age_s"]
    unmetered = f"{known['unmetered_s']:,.0f} s of devices unmetered, gaps of {known['gap_s']:,.0f} s"
    return [
        (family, "energy", _shares(known["energy"]) or known["unknown"]),
        (family, "meters", _shares(known["meters"]) or UNKNOWN),
        (family, "carbon", _shares(known["carbon"]) or UNKNOWN),
        (family, "carbon rungs", _shares(known["carbon_rungs"]) or UNKNOWN),
        (family, "carbon age, mean", format_duration(age) if age is not None else UNKNOWN),
        (family, "not metered", unmetered),
    ]


def _shares(found: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {100 * share:.1f} %" for name, share in (found or {}).items())


def _sci(family: str, one: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [
        (family, name, _number(term["value"]), term["unit"], term["source"], term["unknown"])
        for name, term in one["sci"].items()
    ]


def _number(value: float | None, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else f"{value * scale:,.4g}"


def _json(found: Mapping[str, Any]) -> str:
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _plain(found: Mapping[str, Any]) -> str:
    tables = (
        "\n".join((title, *("\t".join(cells) for cells in (columns, *rows))))
        for title, columns, rows in report_tables(found)
    )
    return "\n\n".join(tables) + "\n"


def _html(found: Mapping[str, Any]) -> str:
    from trefoil.page import Card, page  # only where a page is asked for

    simulated = "Devices of this fleet are simulated: joules, and grams from them, are a model's."
    return page(
        f"Energy and carbon, {found['since']} to {found['until']}",
        "Whole hours, UTC. A dash is what is not known, with the reason beside it.",
        simulated if found["simulated"] else "",
        [Card(title, columns, rows) for title, columns, rows in report_tables(found)],
        {},
    )

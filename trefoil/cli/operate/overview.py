"""Overview of a running system as a document, with what this machine knows of it, and as tables: for `trefoil status`
and `trefoil top`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from rich.markup import escape
from rich.table import Table

from trefoil.cli.output import grid, power_text, slices_text
from trefoil.cli.run.state_directory import SERVICES, Failing, StatePaths
from trefoil.cli.system_client import ControllerClient, is_serving, page_link
from trefoil.core.errors import Unavailable
from trefoil.core.fleet import NodeStatus
from trefoil.core.objective import Objective
from trefoil.core.units import format_time
from trefoil.overview.jobs import grams_by_rule, name_of, planned_queue
from trefoil.overview.known import overview_of, read_answers, saving_unknown
from trefoil.overview.served import TOKEN_OBJECTIVES, promises
from trefoil.overview.totals import REQUESTS_MIN
from trefoil.overview.troubles import known_trouble_lines
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock

UNKNOWN: Final = "-"
LATE_MAX: Final = 5
ELSEWHERE: Final[Mapping[str, Any]] = {
    "state_dir": "", "inference": "", "rest": "", "page": "", "services": {"controller": True}, "metrics": {},
    "failing": {}, "set_aside_here": [],
}  # fmt: skip
"""Of a system that was not started here: what its supervisor would know."""
SERVED_COLUMNS: Final = (
    "family", "class", "requests/s", "p95 (SLO)", "in SLO (asked)", "accuracy (floor)", "J/request", "mg CO2/request",
)  # fmt: skip
TOKEN_COLUMNS: Final = (
    "family", "class", "tokens", "prompt tokens", "TTFT p95 (SLO)", "in it (asked)", "TPOT p95 (SLO)", "in it (asked)",
    "J/token", "mg CO2/token",
)  # fmt: skip


async def gather_overview(system: ControllerClient, decisions: int = 0) -> dict[str, Any]:
    """The whole overview as JSON values, with a number of the newest decisions. Values of a controller or Redis that
    does not answer are left out and named in `unknown`."""
    if system.local is None:
        return dict(ELSEWHERE) | overview_of(await read_answers(system, WallClock().now_s(), decisions=decisions))
    launch = system.local.launch
    paths = StatePaths(Path(launch.state_dir))
    healthy = await asyncio.gather(*(is_serving(launch.addresses[n]) for n in SERVICES))
    found = {
        "cluster": launch.cluster,
        "state_dir": launch.state_dir,
        "inference": launch.addresses["inference"],
        "rest": launch.addresses.get("rest", ""),
        "page": page_link(launch),
        "services": dict(zip(SERVICES, healthy, strict=True)),
        "metrics": {name: f"http://{address}/metrics" for name, address in launch.metrics.items()},
        "failing": {name: asdict(one) for name, one in paths.failing().items()},
        "set_aside_here": paths.set_aside(),
    }
    try:
        answers = await read_answers(system, WallClock().now_s(), launch.started_at_s, decisions)
        return found | overview_of(answers)
    except Unavailable as error:  # the controller or Redis is among those that fail: the rest is shown
        return found | {"unknown": str(error)}


def devices_table(node: NodeStatus) -> Table:
    """Devices of a node and what they serve."""
    title = f"{node.node}" + (" (SIMULATED GPUs)" if node.simulated else "")
    rows = [
        (d.device, d.type.name, d.state.name.lower(), f"{d.clock_mhz} MHz", power_text(d), slices_text(d))
        for d in node.devices
    ]
    return grid(title, ("device", "type", "state", "clock", "power", "slices"), rows)


def trouble_lines(found: Mapping[str, Any], now_s: float) -> list[str]:
    """What does not work, a line each."""
    lines = [failing_text(name, Failing(**one), now_s) for name, one in found["failing"].items()]
    lines += [
        f"{path} could not be understood and stands aside. Remedy: look at it, then remove it"
        for path in found["set_aside_here"]
    ]
    if "unknown" in found:
        return lines
    return lines + known_trouble_lines(found)


def failing_text(name: str, failing: Failing, now_s: float) -> str:
    """Why a service does not stay up, in words."""
    row = f" {failing.ends} times in a row, last" if failing.ends > 1 else ""
    wait_s = failing.again_at_s - now_s
    when = f"started again in {wait_s:.0f} s" if wait_s > 0 else "started again"
    return f"{name} fails: it ended{row} with {failing.how}, {when}: {failing.last_error}"


def carbon_lines(found: Mapping[str, Any]) -> list[str]:
    """Carbon now, a line for each zone."""
    lines = []
    for reading, known in zip(found["carbon"], found["carbon_ratio"], strict=True):
        kind = "simulated" if reading["simulated"] else reading["provider"]
        kind += f": {reading['estimation_method']}" if reading["estimation_method"] else ""
        ratio = "not known, routers that go by it do without" if known["ratio"] is None else f"{known['ratio']:.2f}"
        now = f"{reading['intensity_g_per_kwh']:.0f} g/kWh ({kind})"
        lines.append(f"carbon {reading['series']['zone']}: {now}; over its mean: {ratio}")
    return lines


def jobs_lines(found: Mapping[str, Any], now_s: float) -> list[str]:
    """Planned jobs: what runs in this hour and what is saved; a line for each of those that will be late."""
    jobs = planned_queue(found["jobs"], now_s)
    if not jobs:
        return []
    hours = [hour for job in jobs for hour in job["hours"]]
    items = sum(hour["items"] for hour in hours if hour["starts_at_s"] <= now_s < hour["ends_at_s"])
    grams, at_once, evenly = grams_by_rule(jobs).values()
    late = [job for job in jobs if not job["in_time"]]
    lines = [
        f"jobs: {len(jobs)} planned, {items:,.0f} items this hour; {grams:.3g} g, at once {at_once:.3g} g, "
        f"evenly {evenly:.3g} g; {len(late)} will be late"
    ]
    lines += [f"job {name_of(job)}: {job['reason']}" for job in late[:LATE_MAX]]
    return lines + ([f"... and {len(late) - LATE_MAX} more: trefoil jobs list"] if len(late) > LATE_MAX else [])


def receipt_lines(found: Mapping[str, Any]) -> list[str]:
    """Receipts against metered energy, a line for each family that is metered or waits for traffic."""
    lines = []
    for row in found["receipts"]:
        if not row["answered"]:
            lines.append(f"receipts {row['family']}: no traffic yet")
        elif row["answered"] < REQUESTS_MIN:
            more = REQUESTS_MIN - row["answered"]
            lines.append(f"receipts {row['family']}: {more} more requests are needed to compare them with the meter")
        elif row["residual"] is not None:
            lines.append(
                f"receipts {row['family']}: {row['receipt_j']:,.0f} J of {row['active_j']:,.0f} J metered active "
                f"energy ({100 * row['residual']:+.1f} %) since the last full hour began"
            )
    return lines


def served_tables(found: Mapping[str, Any]) -> list[Table]:
    """What was served of late, a row for each family and for each class where it has any; and the tokens, where
    families stream any. Red is missed."""
    objectives = {o["family"]: codec.from_plain(Objective, o) for o in found["objectives"]}
    by_class, window = found["served"]["by_class"], f"last {found['served']['window_s']:.0f} s"
    rows = [_served_cells(one, objectives.get(one["family"])) for one in by_class]
    tables = [grid(f"Served, {window}", SERVED_COLUMNS, rows, markup=True)]
    if streams := [one for one in by_class if one["tokens"]]:
        rows = [_token_cells(one, one["tokens"], promises(one, objectives.get(one["family"])).slow) for one in streams]
        tables.append(grid(f"Tokens, {window}", TOKEN_COLUMNS, rows, markup=True))
    return tables


def _token_cells(one: Mapping[str, Any], tokens: Mapping[str, Any], slow: Sequence[str]) -> tuple[str, ...]:
    times = []
    for name in TOKEN_OBJECTIVES:
        limit_ms, asked = tokens[f"{name}_ms"], tokens[f"{name}_quantile"]
        share = _marked(_shown(tokens[f"{name}_attainment"], "{:.1%}"), name in slow)
        p95 = _shown(tokens[f"{name}_ms_p95"], "{:.1f} ms")
        times += [f"{p95} ({limit_ms:g} ms)", f"{share} ({asked:.1%})"] if limit_ms else [p95, UNKNOWN]
    return (
        escape(one["family"]) if not one["slo_class"] else "",
        escape(one["slo_class"]),
        f"{tokens['tokens']:,}",
        f"{tokens['prompt_tokens']:,}" if tokens["prompt_tokens"] else UNKNOWN,
        *times,
        _shown(tokens["joules_per_token"], "{:.3f}"),
        _shown(tokens["grams_per_token"], "{:.4f}", 1000.0),
    )


def _served_cells(one: Mapping[str, Any], objective: Objective | None) -> tuple[str, ...]:
    whole, promised = not one["slo_class"], promises(one, objective)
    in_slo = _marked(_shown(one["slo_attainment"], "{:.1%}"), promised.late)
    right = _shown(one["accuracy"], "{:.4f}")
    if promised.floor and whole:
        right = f"{_marked(right, promised.inaccurate)} ({promised.floor:.4f})"
    return (
        escape(one["family"]) if whole else "",
        escape(one["slo_class"]),
        _shown(one["rate_per_s"], "{:.1f}"),
        _shown(one["latency_ms_p95"], "{:.1f} ms") + f" ({one['slo_ms']:g} ms)",
        f"{in_slo} ({promised.asked:.1%})" if promised.asked else in_slo,
        right,
        _shown(one["joules_per_request"], "{:.2f}"),
        _shown(one["grams_per_request"], "{:.3f}", 1000.0),
    )


def saving_lines(found: Mapping[str, Any]) -> list[str]:
    """What was saved since the start, and what that rests on."""
    saving = found["saving"]
    took, base = _cost_text(saving["grams"], saving["joules"]), _cost_text(saving["base_grams"], saving["base_joules"])
    pct = saving["saving_pct"]
    against = (
        f"{pct:+.1f} % against modelled BASE ({base}), as it ran"
        if pct is not None
        else f"no saving is shown: {saving_unknown(saving)}"
    )
    since = f"since {format_time(saving['since_s'])}{', the hour of the start' if saving['since_start'] else ''}"
    lines = [f"{since}: {saving['requests']:,} requests, {took}; {against}"]
    if pct is not None and saving["basis"]:
        lines.append(f"modelled BASE: {saving['basis']}")
    if saving["unmeasured_s"]:
        lines.append(f"{saving['unmeasured_s']:,.0f} s of devices were not metered: neither side counts them")
    return lines


def _cost_text(co2: float | None, joules: float | None) -> str:
    return "joules and grams not known" if co2 is None or joules is None else f"{co2:,.2f} g, {joules / 1e3:,.1f} kJ"


def _shown(value: float | None, form: str, scale: float = 1.0) -> str:
    return UNKNOWN if value is None else form.format(value * scale)


def _marked(text: str, missed: bool) -> str:
    return f"[bold red]{text}[/]" if missed else text

"""`trefoil top`: the running system on one screen, renewed every second. It only reads."""

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.text import Text

from trefoil.cli.operate.decisions import decisions_table
from trefoil.cli.operate.overview import (
    carbon_lines,
    devices_table,
    gather_overview,
    saving_lines,
    served_tables,
    trouble_lines,
)
from trefoil.cli.options import HERE, SystemAddress, of_system
from trefoil.cli.output import AsJson, respond
from trefoil.cli.system_client import ControllerClient, call_system, connect
from trefoil.core.errors import InvalidInput
from trefoil.core.units import format_time
from trefoil.overview.troubles import nodes_of
from trefoil.runtime.clock import WallClock

DECISIONS_SHOWN: Final = 5


@of_system
def top(
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end, instead of a screen.")] = False,
    where: SystemAddress = HERE,
    as_json_: AsJson = False,
) -> None:
    """Watch the running system: fleet, slices, families, carbon, plan and saving, live. Changes nothing; q quits."""
    if as_json_ and not once:
        raise InvalidInput("a screen is not a document", field="--json", remedy="add --once")
    if once:
        found = call_system(where, gather_frame)
        respond(as_json_, found, frame(found))
        return
    asyncio.run(_watch(where))


async def _watch(where: SystemAddress) -> None:
    from trefoil.cli.operate.top_screen import TopScreen

    async with connect(where) as system:
        await TopScreen(lambda: gather_frame(system), frame).run_async()


async def gather_frame(system: ControllerClient) -> dict[str, Any]:
    """Document of a frame: the overview of `trefoil status`, its time, and the newest decisions."""
    return await gather_overview(system, DECISIONS_SHOWN) | {"at_s": WallClock().now_s()}


def frame(found: Mapping[str, Any]) -> RenderableType:
    """What a frame shows, of its document."""
    down = [name for name, healthy in found["services"].items() if not healthy]
    health = f"[bold red]not healthy: {', '.join(down)}[/]" if down else "services healthy"
    serving = found["inference"] or ("" if "unknown" in found else f"{len(found['workers'])} workers")
    head = f"[bold]{escape(found['cluster'])}[/] at {format_time(round(found['at_s']))}, {health}, {serving}"
    trouble = [Text(line, style="bold red") for line in trouble_lines(found, found["at_s"])]
    if "unknown" in found:
        return Group(Text.from_markup(head), *trouble, Text(f"not known: {found['unknown']}", style="bold red"))
    held = "".join(f", {word}" for word in ("frozen", "pinned", "exploring") if found[word])
    revision = found["revision"] or {"epoch": 0, "number": 0}
    plan = f"plan {revision['epoch']}.{revision['number']} of {found['policy']}, mode {found['mode']}{held}, "
    decisions = decisions_table([{**one, "why": one["why"].partition(";")[0]} for one in reversed(found["decisions"])])
    tables = [*map(devices_table, nodes_of(found)), *served_tables(found), decisions]
    for table in tables:
        table.box = box.SIMPLE_HEAD
    return Group(
        Text.from_markup(head),
        *trouble,
        *tables[:-1],
        *map(Text, [*carbon_lines(found), *saving_lines(found)]),
        Text(f"\n{plan}rollout {found['rollout']}: {found['why']}"),
        decisions,
    )

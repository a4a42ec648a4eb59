"""`trefoil jobs`: submit work that can wait, see how it stands, read its results."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trefoil.cli.carbon.client import parse_moment
from trefoil.cli.guarded import Guarded
from trefoil.cli.options import RUNNING, ServiceAddress, file_to_write, of_service
from trefoil.cli.output import AsJson, console, grid, print_json, show, writing
from trefoil.cli.run.state_directory import StatePaths
from trefoil.cli.system_client import INSECURE_VARIABLE, command_tls, control_token, token_at
from trefoil.core.units import format_duration, format_time
from trefoil.overview.jobs import RULES, saved_text
from trefoil.runtime.clock import WallClock

if TYPE_CHECKING:
    from trefoil.api.jobs import ItemResult, Jobs, JobStatus

EXIT_UNFINISHED: Final = 1
UNPLANNED: Final = "its hours are not planned: it runs whenever slices are idle"
BAR: Final = 24  # characters of the hour with the most carbon

app = typer.Typer(
    cls=Guarded, no_args_is_help=True, help="Work that can wait: items with a deadline, run on idle slices."
)
Name = Annotated[str, typer.Argument(metavar="ID", help="Name of the job, as `submit` printed it.")]


of_dispatcher: Final = of_service("dispatcher", "--dispatcher", "TREFOIL_DISPATCHER")


@app.command("submit")
@of_dispatcher
def submit(
    family: Annotated[str, typer.Argument(help="Family that answers.")],
    items: Annotated[
        str, typer.Argument(help="File or URL: .npz of arrays by input name, or .jsonl of KServe v2 requests.")
    ],
    complete_by: Annotated[str, typer.Option("--complete-by", help="Deadline: 6h, 90min, 2d, or 2026-11-20T12:00Z.")],
    name: Annotated[str, typer.Option("--id", help="Name of the job; given again, it is the same job.")] = "",
    tenant: Annotated[
        str, typer.Option("--tenant", help="Tenant of the tenants file that answers are booked to.")
    ] = "",
    priority: Annotated[int, typer.Option("--priority", min=0, help="The highest goes first.")] = 0,
    min_accuracy: Annotated[
        float, typer.Option("--min-accuracy", help="Floor of the variants that answer, 0..1.")
    ] = 0.0,
    zone: Annotated[list[str] | None, typer.Option("--zone", help="Zone that may answer, this one or a peer.")] = None,
    grams_max: Annotated[float, typer.Option("--grams-max", help="Most grams of CO2 by receipts; 0: no bound.")] = 0.0,
    watch_it: Annotated[bool, typer.Option("--watch", help="Show its progress until it has ended.")] = False,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Submit a job: items that are answered when slices are idle, until a deadline."""
    by_s = parse_moment(complete_by, "--complete-by", WallClock().now_s(), ahead=True)
    with _jobs(where) as jobs:
        status = jobs.submit(
            family, items, complete_by_s=by_s, id=name, tenant=tenant, priority=priority, min_accuracy=min_accuracy,
            zones=tuple(zone or ()), grams_max=grams_max,
        )  # fmt: skip
        status = _follow(jobs, status.id, as_json_) if watch_it else jobs.planned(status.id)
        _show([status], as_json_)
        if not as_json_ and not status.ended:
            show(f"{status.id}: {status.prospect or UNPLANNED}")


@app.command("list")
@of_dispatcher
def list_jobs(
    tenant: Annotated[str, typer.Option("--tenant", help="Of this tenant alone.")] = "",
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Show all jobs, the next deadline first."""
    with _jobs(where) as jobs:
        found = jobs.all(tenant)
    if as_json_:
        print_json([asdict(each) for each in found])
        return
    _show(found, False)


@app.command("show")
@of_dispatcher
def show_job(
    name: Name, where: ServiceAddress = RUNNING, as_json_: AsJson = False
) -> None:  # fmt: skip
    """Show how a job stands."""
    with _jobs(where) as jobs:
        status = jobs.get(name)
    _show([status], as_json_)
    if not as_json_:
        _show_zones(status)
        if not status.ended:
            _show_hours(status)


@app.command("watch")
@of_dispatcher
def watch(
    name: Name, where: ServiceAddress = RUNNING, as_json_: AsJson = False
) -> None:  # fmt: skip
    """Show the progress of a job until it has ended; exit code 1 where it was cancelled."""
    with _jobs(where) as jobs:
        status = _follow(jobs, name, as_json_)
    _show([status], as_json_)
    if status.state != "done":
        raise typer.Exit(EXIT_UNFINISHED)


@app.command("cancel")
@of_dispatcher
def cancel(
    name: Name,
    why: Annotated[str, typer.Option("--why", help="Reason, shown where the job is.")] = "",
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """End a job; what was answered stays."""
    with _jobs(where) as jobs:
        _show([jobs.cancel(name, why)], as_json_)


@app.command("results")
@of_dispatcher
def results(
    name: Name,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File for the lines; default: standard output.", callback=file_to_write),
    ] = None,
    first: Annotated[int, typer.Option("--first", min=0, help="First item, counted from 0.")] = 0,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Print the results of a job in the order of its items, one line of JSON each: an answer with variant and receipt,
    or an error. Of a job that continues: those there are by now."""
    with _jobs(where) as jobs:
        if as_json_ and out is None:
            print_json([_result(each) for each in jobs.results(name, first)])
            return
        lines = (json.dumps(_result(each), ensure_ascii=False) for each in jobs.results(name, first))
        if out is None:
            for line in lines:
                typer.echo(line)
            return
        with writing(out, "--out") as path, path.open("w") as file:
            file.writelines(f"{line}\n" for line in lines)


@contextmanager
def _jobs(where: ServiceAddress) -> "Iterator[Jobs]":
    """Jobs of a dispatcher, for the length of one command. Raises NotFound, SettingError, as `open_service`."""
    from trefoil.api.jobs import Jobs  # brings numpy and tritonclient, which --help need not

    address = where.target or StatePaths(Path(where.state_dir).resolve()).running().addresses["dispatcher"]
    token = token_at(address, Path(where.state_dir)) or control_token() or ""
    insecure = os.environ.get(INSECURE_VARIABLE) == "1"
    jobs = Jobs.connect(address, token=token, tls=command_tls(where.ca), insecure=insecure)
    try:
        yield jobs
    finally:
        jobs.close()


def _follow(jobs: "Jobs", name: str, quiet: bool) -> "JobStatus":
    """Progress bar of a job until it has ended: its last status."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    last = jobs.get(name)
    with Progress(*columns, console=console(), disable=quiet) as progress:
        bar = progress.add_task(name, total=None)
        for last in jobs.watch(name):
            text = f"{name} {last.state}{', late' if last.late else ''}{f': {last.why}' if last.why else ''}"
            progress.update(bar, total=last.items, completed=last.answered + last.failed, description=text)
    return last


def _show(found: "list[JobStatus]", as_json: bool) -> None:
    if as_json:
        print_json(asdict(found[0]))
        return
    now_s = WallClock().now_s()
    rows = []
    for each in found:
        ended = f"ended {format_time(round(each.ended_at_s))}"
        when = f"{format_time(round(each.complete_by_s))} ({format_duration(each.complete_by_s - now_s)})"
        done = f"{each.answered + each.failed}/{each.items}"
        state = f"{each.state}{', late' if each.late else ', will be late' if each.in_danger else ''}"
        cost = f"{each.joules:.4g} J, {each.grams:.3g} g" if each.joules else "-"
        rows.append(
            (
                each.id, each.family, state, done, str(each.failed), ended if each.ended else when, cost,
                each.tenant or "-", "; ".join(filter(None, (each.why, each.first_error))) or each.prospect or "-",
            )
        )  # fmt: skip
    columns = ("job", "family", "state", "done", "failed", "ends", "receipts", "tenant", "why")
    show(grid("Jobs", columns, rows))


def _show_zones(status: "JobStatus") -> None:
    """Items of a job in peers' zones."""
    for one in status.zones:
        cost = f"{one.joules:.4g} J, {one.grams:.3g} g"
        show(f"zone {one.zone}: {one.answered} answered ({cost}), {one.away} there now")


def _show_hours(status: "JobStatus") -> None:
    """Planned hours of a job over their carbon, and what they save."""
    show(f"plan: {status.prospect or UNPLANNED}")
    if not status.hours:
        return
    most = max(one.p50_g_per_kwh for one in status.hours) or 1.0
    rows = [
        (
            format_time(round(one.starts_at_s)) + (f" in {one.zone}" if one.zone else ""), f"{one.items:,.0f}",
            f"{one.grams:.3g}", f"{one.p50_g_per_kwh:.0f}", "#" * round(BAR * one.p50_g_per_kwh / most),
        )
        for one in status.hours
    ]  # fmt: skip
    show(grid("Planned hours", ("from", "items", "g CO2", "g/kWh", ""), rows))
    others = {name: getattr(status, name) for name in RULES}
    if saves := saved_text(sum(one.grams for one in status.hours), others):
        show(saves)


def _result(result: "ItemResult") -> dict[str, Any]:
    answer = result.answer
    if answer is None:
        return {"item": result.item, "code": result.code, "error": result.error, **_of_zone(result)}
    outputs = {
        name: [part.decode("utf-8", "replace") if isinstance(part, bytes) else part for part in values.ravel().tolist()]
        if values.dtype.kind == "O"
        else values.tolist()
        for name, values in answer.outputs.items()
    }
    return {
        "item": result.item, "outputs": outputs, "variant": answer.variant, "slice": answer.slice,
        "joules": answer.joules, "grams": answer.grams, "basis": answer.basis, **_of_zone(result),
    }  # fmt: skip


def _of_zone(result: "ItemResult") -> dict[str, Any]:
    """Of a peer's answer: its zone, and what moved the item."""
    return {"zone": result.zone, "moved_j": result.moved_j, "moved_g": result.moved_g} if result.zone else {}

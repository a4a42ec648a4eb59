"""`trefoil carbon`: what forecasts are worth; what a feed knows is in carbon_live and carbon_outlook."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from pydantic import ValidationError

from trefoil.cli.carbon import feed_commands, forecast_commands, scores
from trefoil.cli.guarded import Guarded
from trefoil.cli.options import TimeColumn, TimeUnit, file_to_write, of_service
from trefoil.cli.output import AsJson, console, csv_text, grid, print_json, show, slow, writing
from trefoil.core.errors import InvalidInput, SettingError, one_of
from trefoil.runtime.config import explain

if TYPE_CHECKING:
    from carbon_feed.core.trace_playback import Trace
    from carbon_feed.forecast.backtest import Backtest
    from carbon_feed.settings import TraceSettings

READING: Final = ("unit", "time_column", "time_unit", "timezone", "estimates", "estimated_column", "gaps", "gap_max_h")
"""Settings of how a trace is read that `backtest` has as options."""
# What `backtest` sets by a flag: the field that errors name, its flag, and another remedy where theirs has no flag.
FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "trace.value_column": ("--column", ""),
    "factors": ("--factors", "give the other ones, or another --column"),
    "method": ("--method", "give the other one, or another --column"),
    **{f"{table}{name}": (f"--{name.replace('_', '-')}", "") for name in READING for table in ("", "trace.")},
    "step_s": ("--step-min", "use 15, 30, 60 or what else divides a day, and is a multiple of the trace's step"),
    "horizon_s": ("--horizon-h", "give at least one step of --step-min, at most 336"),
    "first": ("--test-share", "give a larger share, or a longer trace"),
}

app = typer.Typer(cls=Guarded, no_args_is_help=True, help="Grid carbon intensity and its forecasts.")


@app.command("backtest")
@slow
def backtest(
    trace: Annotated[Path, typer.Argument(help="CSV of a year or so: a column of times and one of intensities.")],
    model: Annotated[list[str] | None, typer.Option(help="Only these; default: all of our own.")] = None,
    factors: Annotated[str, typer.Option(help="Of several columns: lifecycle or direct.")] = "lifecycle",
    method: Annotated[str, typer.Option(help="average, or marginal, which may be negative.")] = "average",
    column: Annotated[str, typer.Option(help="Column of intensities; default: found by its name and factors.")] = "",
    unit: Annotated[str, typer.Option(help="Of the intensities, e.g. lb/MWh; default: by the column's name.")] = "",
    time_column: TimeColumn = "",
    time_unit: TimeUnit = "",
    timezone: Annotated[str, typer.Option(help="IANA name, of times that do not say theirs; default: UTC.")] = "",
    estimates: Annotated[bool, typer.Option(help="Accept rows that the file marks as estimates.")] = True,
    estimated_column: Annotated[str, typer.Option(help="Column that marks them; default: by its name.")] = "",
    gaps: Annotated[str, typer.Option(help="Missing rows: refuse, hold or linear.")] = "refuse",
    gap_max_h: Annotated[float, typer.Option(min=0.01, help="Longest gap that is filled.")] = 6.0,
    step_min: Annotated[float, typer.Option(min=15, max=1440, help="Minutes from origin to origin.")] = 60.0,
    horizon_h: Annotated[float, typer.Option(min=1, max=336, help="How far ahead.")] = 96.0,
    test_share: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="The last part of the trace that is scored; before it, they learn.")
    ] = 0.5,
    out: Annotated[Path | None, typer.Option(help="CSV of all scores by lead time.", callback=file_to_write)] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of the same.", callback=file_to_write)] = None,
    as_json: AsJson = False,
) -> None:
    """Make every forecast that would have been made, knowing nothing after its origin, and score it."""
    from carbon_feed.forecast import MODELS
    from carbon_feed.forecast.backtest import backtest as run_backtest
    from carbon_feed.forecast.backtest import trace_means
    from carbon_feed.providers.trace import load_trace
    from trefoil.core.carbon import Factors, Method

    known = {name.lower(): value for name, value in Factors.__members__.items() if value}
    methods = {name.lower(): value for name, value in Method.__members__.items() if value}
    names = tuple(model or MODELS)
    _check_name("factors", factors, known)
    _check_name("method", method, methods)
    for name in names:
        _check_name("model", name, MODELS)
    flags = {"--column": column, "--step-min": step_min, "--horizon-h": horizon_h, "--test-share": test_share}
    read_by = (unit, time_column, time_unit, timezone, estimates, estimated_column, gaps, gap_max_h)
    reading = dict(zip(READING, read_by, strict=True))
    with naming_flags(flags | {_flag(k): v for k, v in {**reading, "factors": factors, "method": method}.items()}):
        settings = _trace_settings({"path": trace, "value_column": column, **reading})
        read = load_trace(trace, settings, known[factors], methods[method])
        values, step_s = trace_means(read, step_min * 60.0), step_min * 60.0
        first = max(0, round(len(values) * (1 - test_share)) - 1)
        results = [
            run_backtest(MODELS[name], values, first=first, step_s=step_s, horizon_s=horizon_h * 3600.0)
            for name in names
        ]
    if out is not None:
        rows = scores.csv_rows([(r.model, r.scores) for r in results], _basis(read))
        with writing(out, "--out") as path:
            path.write_text(csv_text(rows, scores.CSV_COLUMNS), encoding="utf-8")
    if plot is not None:
        with writing(plot, "--plot") as path:
            _save_png(path, read.source, results)
    if as_json:
        print_json(_results_document(read, factors, len(values), results))
    else:
        _print_results(read, factors, len(values), results)


def _basis(read: "Trace") -> str:
    """What the values of a trace rest on."""
    return "simulated" if read.synthetic else "modelled" if read.filled or read.estimated else "measured"


def _check_name(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise SettingError(f"no such {what}", field=f"--{what}", value=name, remedy=one_of(known, name))


def _trace_settings(values: Mapping[str, object]) -> "TraceSettings":
    from carbon_feed.settings import TraceSettings

    try:
        return TraceSettings.model_validate(values)
    except ValidationError as error:
        raise explain(error, "backtest", TraceSettings) from error


def _flag(setting: str) -> str:
    """Flag of a setting of `[trace]`."""
    return "--column" if setting == "value_column" else f"--{setting.replace('_', '-')}"


@contextmanager
def naming_flags(given: Mapping[str, object]) -> Iterator[None]:
    """Errors about what a flag sets name that flag, its value and a remedy in its unit. `given`: values by flag.

    Raises:
        InvalidInput: as it was, but for the name.
    """
    try:
        yield
    except InvalidInput as error:
        if (known := FLAGS.get(error.field)) is None:
            raise
        flag, remedy = known
        remedy = remedy or re.sub(r"trace\.(\w+)", lambda found: _flag(found[1]), error.remedy)
        raise type(error)(error.message, field=flag, value=given[flag] or error.value, remedy=remedy) from error


def _print_results(read: "Trace", factors: str, steps: int, results: Sequence["Backtest"]) -> None:
    from trefoil.cli.carbon import chart as carbon_chart

    one = results[0]
    licence = f", {read.licence}" if read.licence else ""
    rows = [[r.model, f"day {d}", *scores.score_cells(r.day(d))] for r in results for d in range(1, r.days + 1)]
    errors = {r.model: ([s.horizon_s / 3600 for s in r.scores], [s.mae_g_per_kwh for s in r.scores]) for r in results}
    show(
        read.read_as,
        f"{read.source} sha256:{read.digest[:12]} from {read.starts}, {steps} steps, {factors}{licence}",
        f"{one.last - one.first + 1} origins, every {one.step_s / 60:g} min, from step {one.first}; "
        "scored on the 50 % line; nothing after an origin is known to it",
        grid("Errors by day ahead", scores.COLUMNS, rows),
        carbon_chart.draw_errors(errors, carbon_chart.fitting_width(console())),
    )


def _results_document(read: "Trace", factors: str, steps: int, results: Sequence["Backtest"]) -> dict[str, Any]:
    one = results[0]
    return {
        "trace": read.source,
        "read_as": read.read_as,
        "sha256": read.digest,
        "starts": read.starts,
        "factors": factors,
        "steps": steps,
        "step_s": one.step_s,
        "first_origin": one.first,
        "last_origin": one.last,
        "models": {
            r.model: {
                "days": [scores.score_row(r.day(d)) for d in range(1, r.days + 1)],
                "leads": [scores.score_row(score) for score in r.scores],
            }
            for r in results
        },
    }


def _save_png(path: Path, source: str, results: Sequence["Backtest"]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for r in results:
        hours = [s.horizon_s / 3600 for s in r.scores]
        above.plot(hours, [s.mae_g_per_kwh for s in r.scores], label=r.model)
        covered = [scores.PCT * s.coverage_ratio if s.coverage_samples else math.nan for s in r.scores]
        below.plot(hours, covered, label=r.model)
    above.set_title(f"Own forecasts of {source}")
    above.set_ylabel("MAE, g/kWh")
    above.set_ylim(bottom=0)
    above.legend(frameon=False)
    below.axhline(80, linewidth=0.8, color="grey")
    below.set_ylabel("in the 10-90 % band, %")
    below.set_ylim(50, 100)
    below.set_xlabel("hours ahead")
    figure.savefig(path, dpi=110, format="png")


for _command in (
    feed_commands.now, feed_commands.watch, forecast_commands.forecast, forecast_commands.history, feed_commands.health,
):  # fmt: skip
    app.command()(of_service("feed")(_command))
app.command()(feed_commands.zones)

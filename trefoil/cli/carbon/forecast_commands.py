"""`trefoil carbon forecast` and `history`: what lies ahead, what was, and what forecasts have been worth."""

import csv
import json
import math
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from protos.carbon_feed.v1 import carbon_feed_pb2 as pb
from trefoil.cli.carbon import scores as carbon_scores
from trefoil.cli.carbon.client import (
    FeedClient,
    ZoneArgument,
    parse_moment,
    series_kind,
    with_feed,
)
from trefoil.cli.options import RUNNING, ServiceAddress, file_to_write
from trefoil.cli.output import AsJson, as_json, console, csv_text, grid, print_json, show, writing
from trefoil.core.carbon import CarbonBand, CarbonForecast, CarbonReading, CarbonScores, Quality, Series
from trefoil.core.errors import SettingError, Unavailable
from trefoil.core.units import HOUR_S, format_duration, format_time
from trefoil.runtime import codec
from trefoil.runtime.clock import WallClock

ROWS_MAX: Final = 24  # of a forecast's table; more are put together
TOGETHER: Final = (1, 2, 3, 4, 6, 8, 12, 24, 36, 48, 72, 96)
STEPS_MIN: Final = (0, 5, 15, 30, 60)
ARCHIVE_COLUMNS: Final = (
    "zone", "method", "factors", "model", "issued_at_s", "starts_at_s", "ends_at_s", "p10_g_per_kwh", "p50_g_per_kwh",
    "p90_g_per_kwh", "actual_g_per_kwh", "basis",
)  # fmt: skip
HISTORY_COLUMNS: Final = (
    "starts_at_s", "ends_at_s", "intensity_g_per_kwh", "quality", "provider", "rung", "observed_at_s", "fetched_at_s",
    "as_of",
)  # fmt: skip
CSV_COLUMNS: Final = ("zone", "method", "factors", *HISTORY_COLUMNS, "basis")

Plot = Annotated[Path | None, typer.Option("--plot", help="PNG of it.", callback=file_to_write)]


@dataclass(frozen=True, slots=True)
class ForecastView:
    """Forecast of one zone with its past, the reading now and scores."""

    series: Series
    forecast: CarbonForecast | None
    why: str
    scores: tuple[CarbonScores, ...]
    past: tuple[CarbonReading, ...]
    now: CarbonReading | None


def forecast(
    zone: ZoneArgument = "",
    hours: Annotated[float, typer.Option(min=0, max=336, help="How far ahead; 0 = as far as it goes.")] = 0.0,
    step_min: Annotated[int, typer.Option("--step", help="Minutes: 5, 15, 30 or 60; 0 = as it was issued.")] = 0,
    model: Annotated[
        str, typer.Option(help="Newest of this model (blend, climatology, persistence, or the provider's name).")
    ] = "",
    past_h: Annotated[float, typer.Option("--past", min=0, max=400 * 24, help="Hours before now in the plot.")] = 24.0,
    plot: Plot = None,
    export: Annotated[
        Path | None,
        typer.Option(
            help="FILE.csv (and FILE-scores.csv) or FILE.json: archived forecasts, actuals and scores.",
            callback=file_to_write,
        ),
    ] = None,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Show the forecast in force with its band, the day before it, and what such forecasts have been worth."""
    if step_min not in STEPS_MIN:
        allowed = ", ".join(map(str, STEPS_MIN))
        raise SettingError("no such step", field="--step", value=step_min, remedy=f"one of {allowed}")
    if export is not None and export.suffix not in (".csv", ".json"):
        raise SettingError(
            "not .csv or .json", field="--export", value=str(export), remedy="name FILE.csv or FILE.json"
        )
    now_s = WallClock().now_s()

    async def gather(feed: FeedClient) -> tuple[ForecastView, int]:
        series = await feed.only_series(zone)
        request = pb.GetForecastRequest(zone=series.zone, horizon_s=hours * HOUR_S, step_s=step_min * 60.0, model=model)
        view = await _gather(feed, series, request, past_h, now_s)
        if export is None:
            return view, 0
        return view, await _export(export, view, _archived(feed, series, model))

    view, archived = with_feed(where, gather)
    past, ahead = _with_now(view), view.forecast.bands if view.forecast is not None else ()
    if plot is not None:
        with writing(plot, "--plot") as path:
            _save_png(path, view.series, past, ahead, now_s)
    if as_json_:
        print_json(_document(view))
        return
    _print_view(view, past, ahead, now_s)
    if export is not None:
        exported = f"{archived} archived bands in {export}"
        if not archived:
            exported += ": only the process that asks the provider keeps forecasts (trefoil carbon health)"
        show(exported)


async def _gather(feed: FeedClient, series: Series, request: Any, past_h: float, now_s: float) -> ForecastView:
    found, why = None, ""
    try:
        found = codec.from_proto((await feed.call("GetForecast", request)).forecast)
    except Unavailable as error:
        why = str(error)  # no forecast is an answer too; a feed that is gone fails at the next question
    answer = await feed.call("GetScores", pb.GetScoresRequest(zone=series.zone))
    scores = tuple(codec.from_proto(one) for one in answer.scores if request.model in ("", one.model))
    many = await feed.call("GetMany", pb.GetManyRequest(series=[codec.to_proto(series)]))
    now = codec.from_proto(many.readings[0]) if many.readings else None
    span_s = past_h * HOUR_S
    if now is not None and now.simulated and found is not None and found.bands:
        span_s = min(span_s, found.bands[-1].ends_at_s - now_s)  # a replay's hours are shorter than ours
    past = await feed.history(series.zone, now_s - span_s, now_s) if span_s > 0 else []
    return ForecastView(series, found, why, scores, tuple(past), now)


async def _archived(feed: FeedClient, series: Series, model: str) -> AsyncIterator[list[dict[str, Any]]]:
    """Every archived forecast as one flat row a band, with what came; oldest first, model by model."""
    head = {"zone": series.zone, "method": series.method.name.lower(), "factors": series.factors.name.lower()}
    async for answer in feed.stream("ListForecasts", pb.ListForecastsRequest(zone=series.zone, model=model)):
        issued_at_s = answer.issued_at.ToMicroseconds() / 1e6
        yield [
            {
                **head,
                "model": answer.model,
                "issued_at_s": issued_at_s,
                **as_json(band),
                "actual_g_per_kwh": None if math.isnan(actual) else actual,
            }
            for band, actual in zip(answer.bands, answer.actual_g_per_kwh, strict=True)
        ]


def _with_now(view: ForecastView) -> list[CarbonReading]:
    """The past and, where it is not a part of it yet, what holds now."""
    known_s = max((reading.ends_at_s for reading in view.past), default=-math.inf)
    newer = [view.now] if view.now is not None and view.now.starts_at_s >= known_s - 1e-3 else []
    return [*view.past, *newer]


def _print_view(view: ForecastView, past: Sequence[CarbonReading], ahead: Sequence[CarbonBand], now_s: float) -> None:
    show(headline(view), *_charts(past, ahead, now_s))
    if view.forecast is not None and view.forecast.bands:
        show(grid("Forecast, means in g/kWh", ("from", "10 %", "50 %", "90 %"), _table(view.forecast)))
    if view.scores:
        rows = carbon_scores.table_rows(view.scores)
        show(grid("What past forecasts were worth", carbon_scores.COLUMNS, rows))


def headline(view: ForecastView) -> str:
    """Headline of a forecast: whose it is, since when, how far, and its reservations."""
    named = f"{view.series.zone} ({series_kind(view.series)})"
    found = view.forecast
    if found is None or not found.bands:
        return f"{named}: no forecast: {view.why or 'it has no step'}"
    reach = format_duration(found.bands[-1].ends_at_s - found.bands[0].starts_at_s)
    text = f"{named}: {found.model}, issued {format_time(round(found.issued_at_s))}, {reach} ahead"
    if found.provenance is not None:
        text += f", {found.provenance.source}" + (f", {found.provenance.licence}" if found.provenance.licence else "")
    if view.now is not None and view.now.simulated:
        text += " (SIMULATED: a replay, in wall time)"
    return text + (f"; {found.fallback_reason}" if found.fallback_reason else "")


def _charts(past: Sequence[CarbonReading], ahead: Sequence[CarbonBand], now_s: float) -> list[str]:
    """The chart for the terminal, if there is anything to draw."""
    from trefoil.cli.carbon import chart

    width = chart.fitting_width(console())
    curves = chart.sample_curves(past, ahead, now_s, width * chart.POINTS_A_COLUMN)
    return [chart.draw_intensity(curves, width)] if curves is not None else []


def _save_png(
    path: Path, series: Series, past: Sequence[CarbonReading], ahead: Sequence[CarbonBand], now_s: float
) -> None:
    from trefoil.cli.carbon import chart

    curves = chart.sample_curves(past, ahead, now_s, chart.PNG_POINTS)
    chart.save_intensity_png(path, f"{series.zone}: {series_kind(series)}", curves)


def _table(found: CarbonForecast) -> list[tuple[str, str, str, str]]:
    """At most `ROWS_MAX` rows; finer steps are put together to their means, the first of them from now on."""
    from carbon_feed.forecast.resample import resample

    together = next((k for k in TOGETHER if k * ROWS_MAX >= len(found.bands)), -(-len(found.bands) // ROWS_MAX))
    first = found.bands[0]
    shown = resample(found, together * (first.ends_at_s - first.starts_at_s)) if together > 1 else found
    return [
        (
            format_time(round(b.starts_at_s)),
            f"{b.p10_g_per_kwh:.0f}",
            f"{b.p50_g_per_kwh:.0f}",
            f"{b.p90_g_per_kwh:.0f}",
        )
        for b in shown.bands
    ]


def _document(view: ForecastView) -> dict[str, Any]:
    return {
        "series": as_json(view.series),
        "forecast": as_json(view.forecast) if view.forecast is not None else None,
        "why": view.why,
        "scores": [carbon_scores.scores_document(scored) for scored in view.scores],
        "past": [as_json(reading) for reading in view.past],
        "now": as_json(view.now) if view.now is not None else None,
    }


async def _export(path: Path, view: ForecastView, archived: AsyncIterator[list[dict[str, Any]]]) -> int:
    """Write rows as they come, since an archive may be long; how many they were."""
    count = 0
    bases = {_basis(reading) for reading in view.past or (view.now,) if reading is not None}
    basis = next((worse for worse in ("simulated", "modelled", "measured") if worse in bases), "")
    with writing(path, "--export") as whole, whole.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".json":
            head = {
                "series": as_json(view.series),
                "scores": [carbon_scores.scores_document(scored) for scored in view.scores],
            }
            file.write(json.dumps(head, indent=1)[:-2] + ',\n "forecasts": [')
            async for rows in archived:
                file.write("".join(f"{',' if count + i else ''}\n  {json.dumps(row)}" for i, row in enumerate(rows)))
                count += len(rows)
            file.write("\n ]\n}\n")
            return count
        writer = csv.DictWriter(file, ARCHIVE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        async for rows in archived:
            writer.writerows({**row, "basis": "simulated" if basis == "simulated" else "modelled"} for row in rows)
            count += len(rows)
    flat = carbon_scores.csv_rows([(one.model, one.scores) for one in view.scores], basis)
    with writing(path.with_name(f"{path.stem}-scores.csv"), "--export") as whole:
        whole.write_text(csv_text(flat, carbon_scores.CSV_COLUMNS), encoding="utf-8")
    return count


def history(
    zone: ZoneArgument = "",
    since: Annotated[str, typer.Option("--from", help="ISO 8601 time, or how long ago: 90min, 24h, 7d.")] = "24h",
    until: Annotated[str, typer.Option("--to", help="The same; default: now.")] = "",
    as_of: Annotated[str, typer.Option("--as-of", help="Values as known at this time; default: now.")] = "",
    revisions: Annotated[
        bool, typer.Option("--revisions", help="Every version of every interval, not only what is believed.")
    ] = False,
    rows_max: Annotated[int, typer.Option("--rows", min=1, help="Newest rows of the table; files hold all.")] = 48,
    out: Annotated[Path | None, typer.Option(help="CSV of all of it.", callback=file_to_write)] = None,
    plot: Plot = None,
    where: ServiceAddress = RUNNING,
    as_json_: AsJson = False,
) -> None:
    """Show what is known of the past, or was known at an earlier time, with its revisions if wanted."""
    now_s = WallClock().now_s()
    from_s, to_s = parse_moment(since, "--from", now_s), parse_moment(until, "--to", now_s)
    as_of_s = parse_moment(as_of, "--as-of", now_s)
    if to_s and from_s >= to_s:
        raise SettingError("not before --to", field="--from", value=since, remedy="give an earlier time")

    async def gather(feed: FeedClient) -> tuple[Series, list[CarbonReading]]:
        series = await feed.only_series(zone)
        return series, await feed.history(series.zone, from_s, to_s, as_of_s, revisions)

    series, found = with_feed(where, gather)
    if out is not None:
        with writing(out, "--out") as path:
            path.write_text(csv_text([_csv_row(reading) for reading in found], CSV_COLUMNS), encoding="utf-8")
    if plot is not None:
        with writing(plot, "--plot") as path:
            _save_png(path, series, found, (), to_s or now_s)
    if as_json_:
        print_json({"series": as_json(series), "readings": [as_json(reading) for reading in found]})
        return
    title = f"{series.zone} ({series_kind(series)}): {len(found)} intervals since {format_time(round(from_s))}"
    show(title, *_charts(found, (), min(now_s, to_s or now_s)))
    if found:
        columns = ("from", "until", "g/kWh", "quality", "rung", "provider", "known since")
        rows = [_table_row(reading) for reading in found[-rows_max:]]
        shown = f", the newest {rows_max}" if len(found) > rows_max else ""
        show(grid(f"Known intervals{shown}", columns, rows))


def _table_row(reading: CarbonReading) -> tuple[str, ...]:
    return (
        format_time(round(reading.starts_at_s, 3)),
        format_time(round(reading.ends_at_s, 3)),
        f"{reading.intensity_g_per_kwh:.1f}",
        reading.quality.name.lower(),
        str(reading.rung),
        reading.provider,
        format_time(round(reading.fetched_at_s)),
    )


def _csv_row(reading: CarbonReading) -> dict[str, Any]:
    series = reading.series
    head = {"zone": series.zone, "method": series.method.name.lower(), "factors": series.factors.name.lower()}
    values = {name: getattr(reading, name) for name in HISTORY_COLUMNS}
    return {**head, **values, "quality": reading.quality.name.lower(), "basis": _basis(reading)}


def _basis(reading: CarbonReading) -> str:
    """What an intensity rests on."""
    return "simulated" if reading.simulated else "measured" if reading.quality is Quality.MEASURED else "modelled"
